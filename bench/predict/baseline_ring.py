"""A baseline ring on the same clock: two buffers, one full attention per hop, results merged by torch operators.

It follows the published descriptions of zhuzilin's ring-flash-attention and TransformerEngine's context parallelism. It
differs from our ring in the bytes that merging moves, in the dependencies, and in the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ring.buffers import PostKey, TransferKind
from .links import ClusterLinks
from .predicted_call import PredictedCall
from .program import COMPUTE, INSIDE, PASSES, Op, Program
from .ring_time import Pass, build_passes, message_cost, simulate_pass
from .speed import NO_PERTURBATION, Area, Perturbation, Seconds, Speed, full_area

FP32 = 4
ATTEND, MERGE = "attention", "merge"
BUFFERS = 2
# Bytes of memory traffic per element of the head, per row.
FIRST_BYTES = 2 + 4  # the first result as fp32
# block.float(); out - block; times the weight; out minus that
MERGE_BYTES = (2 + 4) + (4 + 4 + 4) + (4 + 4) + (4 + 4 + 4)
SLICED_BYTES = 4 + 4  # copy back results of a part of the rows
LAST_BYTES = 4 + 2  # the result in the model's dtype
GRADIENT_BYTES = 4 + 2 + 4  # dq += block; the same for the dK and dV that arrived
MERGE_KERNELS = 6
KERNEL = 2e-6  # seconds of a nearly empty kernel
HOST_KERNEL = 6e-6  # host seconds per kernel from Python; 5 to 10 us is usual
HOST_ATTENTION = 40e-6  # host seconds to call FlashAttention: checks, allocations, autograd
HOST_EXCHANGE = 50e-6  # torch's batch_isend_irecv of K and V, and its waits
HOST_COLLECTIVE = 25e-6  # torch's all_gather or all_to_all
HOST = {ATTEND: HOST_ATTENTION, MERGE: MERGE_KERNELS * HOST_KERNEL}


def baseline_passes(
    call: PredictedCall,
    speed: Speed,
    links: ClusterLinks,
    perturbation: Perturbation = NO_PERTURBATION,
    *,
    phases: Sequence[str] = PASSES,
) -> tuple[Pass, ...]:
    """Predict the passes of a plain call by a flat baseline ring through all ranks."""

    def simulate(variant: PredictedCall, phase: str) -> Pass:
        return _simulated(variant, speed, links, perturbation, phase)

    return build_passes(replace(call, two_level=False, slots=BUFFERS), simulate, perturbation, phases)


def _simulated(call: PredictedCall, speed: Speed, links: ClusterLinks, perturbation: Perturbation, phase: str) -> Pass:
    write = _forward if phase == "forward" else _backward
    writers = [_Writer(call, rank, phase) for rank in range(call.world)]
    for writer in writers:
        write(writer, speed)
    programs = [Program(writer.rank, phase, tuple(writer.ops)) for writer in writers]
    costs = [writer.costs for writer in writers]
    message = message_cost(call, links)
    return simulate_pass(
        programs, costs, message, speed.beside, lambda op: HOST.get(op.what, HOST_EXCHANGE), perturbation
    )


def _area(call: PredictedCall, rank: int, step: int) -> Area | None:
    """Return the part of the (query, key) plane that a rank computes in a step; None if it sees no key."""
    tokens = call.tokens
    if not call.mask.causal or step == 0 or call.layout == "striped":
        return full_area(tokens, causal=call.mask.causal)
    if call.layout == "contiguous":
        return full_area(tokens, causal=False) if step <= rank else None
    half = Area(tokens * tokens / 2, tokens, tokens / 2, tokens / 2, 0)
    return half if step <= rank else half._replace(rows=tokens / 2, keys=tokens, longest=tokens)


class _Writer:
    """Builds one rank's program and its costs. A posted group waits for all launches so far, as torch's streams do."""

    def __init__(self, call: PredictedCall, rank: int, phase: str) -> None:
        self.call, self.rank, self.phase = call, rank, phase
        self.ops: list[Op] = []
        self.costs: list[Seconds] = []
        self.waiting: set[int] = set()
        self.last: int | None = None
        # elements per row of q or out, and of K and V together
        self.row, self.kv_row = (call.batch * n * call.head_dim for n in (call.heads, 2 * call.kv_heads))

    def launch(self, what: str, step: int, seconds: Seconds) -> None:
        self.ops.append(Op(COMPUTE, what, step, 0, tuple(self.waiting)))
        self.costs.append(float(seconds))
        self.waiting.clear()
        self.last = len(self.ops) - 1

    def exchange(self, kind: TransferKind, step: int, itemsize: int) -> set[int]:
        """Post the transfers of a step; return the indices of the operations after which the data have arrived."""
        after = () if self.last is None else (self.last,)
        world, nbytes = self.call.world, self.call.tokens * self.kv_row * itemsize
        to, source = (self.rank + 1) % world, (self.rank - 1) % world
        key = PostKey(self.phase, step, kind, step, 0)
        sends, receives = ((to, nbytes),), ((source, nbytes),)
        self.ops.append(Op(INSIDE, kind.name, step, 0, after, key=key, sends=sends, receives=receives))
        self.costs.append(0.0)
        return {len(self.ops) - 1}

    def next_keys(self, step: int) -> set[int]:
        is_last = step + 1 == self.call.world
        return set() if is_last else self.exchange(TransferKind.KV, step, self.call.itemsize)


def _forward(writer: _Writer, speed: Speed) -> None:
    call, rank = writer.call, writer.rank
    for step in range(call.world):
        area, next_keys = _area(call, rank, step), writer.next_keys(step)
        if area is not None:
            # Zigzag merges half of the rows, striped all rows but one.
            sliced = SLICED_BYTES * (call.mask.causal and call.layout != "contiguous" and step > rank)
            moved = speed.memory_seconds((MERGE_BYTES + sliced if step else FIRST_BYTES) * area.rows * writer.row)
            writer.launch(ATTEND, step, speed.launch + speed.product_seconds(area, call))
            writer.launch(MERGE, step, MERGE_KERNELS * KERNEL + moved)
        writer.waiting |= next_keys
    writer.launch(MERGE, call.world - 1, speed.memory_seconds(LAST_BYTES * call.tokens * writer.row))


def _backward(writer: _Writer, speed: Speed) -> None:
    call, received = writer.call, set[int]()
    for step in range(call.world):
        area, next_keys = _area(call, writer.rank, step), writer.next_keys(step)
        if area is not None:
            writer.launch(ATTEND, step, speed.launch + speed.product_seconds(area, call, backward=True))
            writer.launch(MERGE, step, speed.memory_seconds(GRADIENT_BYTES * area.rows * writer.row))
        writer.waiting |= received
        writer.launch(MERGE, step, speed.memory_seconds(GRADIENT_BYTES * (area.keys if area else 0) * writer.kv_row))
        writer.waiting |= next_keys
        received = writer.exchange(TransferKind.DKV, step, FP32) if call.world > 1 else set()
    writer.waiting |= received
    writer.launch(MERGE, call.world - 1, speed.memory_seconds(LAST_BYTES * call.tokens * (writer.row + writer.kv_row)))
