"""A baseline ring on the same clock: two buffers, a whole attention per hop, and its results merged by torch.

Written from the method's description in zhuzilin's ring-flash-attention and TransformerEngine's context parallelism.
What sets it apart from ours are values: bytes that merging moves, what waits for what, and the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ring.buffers import Key, Kind
from .call import Call
from .links import Links
from .program import COMPUTE, INSIDE, PASSES, Op, Program
from .ring import Pass, messages, passes_of, simulated
from .speed import NONE, Area, Perturbation, Seconds, Speed, whole

FP32 = 4
ATTEND, MERGE = "attention", "merge"
BUFFERS = 2
# bytes of memory traffic per element, a row and one of its head's
FIRST_BYTES = 2 + 4  # the first result as fp32
MERGE_BYTES = (2 + 4) + (4 + 4 + 4) + (4 + 4) + (4 + 4 + 4)  # block.float(), out - block, times the weight, out - that
SLICED_BYTES = 4 + 4  # what only some rows have is copied back
LAST_BYTES = 4 + 2  # the result in the model's dtype
GRADIENT_BYTES = 4 + 2 + 4  # dq += block, and the same for dK and dV of what arrived
MERGE_KERNELS = 6
KERNEL = 2e-6  # seconds of a kernel that has next to nothing to do
HOST_KERNEL = 6e-6  # of the host to issue one from Python, the order of what is usual: 5 to 10 us
HOST_ATTENTION = 40e-6  # to call FlashAttention: checks, allocations, autograd
HOST_EXCHANGE = 50e-6  # torch's batch_isend_irecv of K and V, and its waits
HOST_COLLECTIVE = 25e-6  # torch's all_gather or all_to_all
HOST = {ATTEND: HOST_ATTENTION, MERGE: MERGE_KERNELS * HOST_KERNEL}


def baseline(
    call: Call, speed: Speed, links: Links, perturbation: Perturbation = NONE, *, phases: Sequence[str] = PASSES
) -> tuple[Pass, ...]:
    """The passes of a plain call by a baseline ring, flat through all ranks."""

    def of(one: Call, phase: str) -> Pass:
        return _simulated(one, speed, links, perturbation, phase)

    return passes_of(replace(call, two_level=False, slots=BUFFERS), of, perturbation, phases)


def _simulated(call: Call, speed: Speed, links: Links, perturbation: Perturbation, phase: str) -> Pass:
    write = _forward if phase == "forward" else _backward
    writers = [_Writer(call, rank, phase) for rank in range(call.world)]
    for writer in writers:
        write(writer, speed)
    programs = [Program(writer.rank, phase, tuple(writer.ops)) for writer in writers]
    costs = [writer.costs for writer in writers]
    message = messages(call, links)
    return simulated(programs, costs, message, speed.beside, lambda op: HOST.get(op.what, HOST_EXCHANGE), perturbation)


def _area(call: Call, rank: int, step: int) -> Area | None:
    """What a rank computes at a step; None: nothing."""
    tokens = call.tokens
    if not call.mask.causal or step == 0 or call.layout == "striped":
        return whole(tokens, causal=call.mask.causal)
    if call.layout == "contiguous":
        return whole(tokens, causal=False) if step <= rank else None
    half = Area(tokens * tokens / 2, tokens, tokens / 2, tokens / 2, 0)
    return half if step <= rank else half._replace(rows=tokens / 2, keys=tokens, longest=tokens)


class _Writer:
    """A program as it grows; what is posted waits for all launches so far, as torch's streams do."""

    def __init__(self, call: Call, rank: int, phase: str) -> None:
        self.call, self.rank, self.phase = call, rank, phase
        self.ops: list[Op] = []
        self.costs: list[Seconds] = []
        self.waiting: set[int] = set()
        self.last: int | None = None
        # elements of a row of q and of out, and of a row of K and V together
        self.row, self.kv_row = (call.batch * n * call.head_dim for n in (call.heads, 2 * call.kv_heads))

    def launch(self, what: str, step: int, seconds: Seconds) -> None:
        self.ops.append(Op(COMPUTE, what, step, 0, tuple(self.waiting)))
        self.costs.append(float(seconds))
        self.waiting.clear()
        self.last = len(self.ops) - 1

    def exchange(self, kind: Kind, step: int, itemsize: int) -> set[int]:
        """Post what goes around the ring; what a launch that takes what arrives waits for."""
        after = () if self.last is None else (self.last,)
        world, nbytes = self.call.world, self.call.tokens * self.kv_row * itemsize
        to, source = (self.rank + 1) % world, (self.rank - 1) % world
        key = Key(self.phase, step, kind, step, 0)
        self.ops.append(Op(INSIDE, kind.name, step, 0, after, 0, key, ((to, nbytes),), ((source, nbytes),)))
        self.costs.append(0.0)
        return {len(self.ops) - 1}

    def next_keys(self, step: int) -> set[int]:
        is_last = step + 1 == self.call.world
        return set() if is_last else self.exchange(Kind.KV, step, self.call.itemsize)


def _forward(writer: _Writer, speed: Speed) -> None:
    call, rank = writer.call, writer.rank
    for step in range(call.world):
        area, coming = _area(call, rank, step), writer.next_keys(step)
        if area is not None:
            # of a zigzag half of the rows, of stripes all but one
            sliced = SLICED_BYTES * (call.mask.causal and call.layout != "contiguous" and step > rank)
            moved = speed.moved((MERGE_BYTES + sliced if step else FIRST_BYTES) * area.rows * writer.row)
            writer.launch(ATTEND, step, speed.launch + speed.products(area, call))
            writer.launch(MERGE, step, MERGE_KERNELS * KERNEL + moved)
        writer.waiting |= coming
    writer.launch(MERGE, call.world - 1, speed.moved(LAST_BYTES * call.tokens * writer.row))


def _backward(writer: _Writer, speed: Speed) -> None:
    call, came = writer.call, set[int]()
    for step in range(call.world):
        area, coming = _area(call, writer.rank, step), writer.next_keys(step)
        if area is not None:
            writer.launch(ATTEND, step, speed.launch + speed.products(area, call, backward=True))
            writer.launch(MERGE, step, speed.moved(GRADIENT_BYTES * area.rows * writer.row))
        writer.waiting |= came
        writer.launch(MERGE, step, speed.moved(GRADIENT_BYTES * (area.keys if area else 0) * writer.kv_row))
        writer.waiting |= coming
        came = writer.exchange(Kind.DKV, step, FP32) if call.world > 1 else set()
    writer.waiting |= came
    writer.launch(MERGE, call.world - 1, speed.moved(LAST_BYTES * call.tokens * (writer.row + writer.kv_row)))
