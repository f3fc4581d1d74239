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
from .perturbation import NONE, Perturbation
from .program import COMPUTE, INSIDE, PASSES, Form, Op, Program
from .ring import Pass, messages, simulated, stretched
from .speed import Area, Seconds, Speed, whole

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

    def of(one: Call) -> tuple[Pass, ...]:
        return tuple(_simulated(one, speed, links, perturbation, phase) for phase in phases)

    perturbation.check(call.world)
    call = replace(call, two_level=False, slots=BUFFERS, prefetch=None)
    return of(call) if perturbation.is_there else stretched(call, of)


def _simulated(call: Call, speed: Speed, links: Links, perturbation: Perturbation, phase: str) -> Pass:
    write = _forward if phase == "forward" else _backward
    made = [write(call, rank, speed) for rank in range(call.world)]
    programs, costs = [program for program, _ in made], [spent for _, spent in made]
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

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.ops: list[Op] = []
        self.costs: list[Seconds] = []
        self.waits: set[int] = set()
        self.last: int | None = None

    def launch(self, what: str, step: int, seconds: Seconds) -> None:
        self.ops.append(Op(COMPUTE, what, step, 0, tuple(self.waits)))
        self.costs.append(float(seconds))
        self.waits.clear()
        self.last = len(self.ops) - 1

    def exchange(self, kind: Kind, step: int, nbytes: int, phase: str) -> int:
        after = () if self.last is None else (self.last,)
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        key = Key(phase, step, kind, step, 0)
        self.ops.append(Op(INSIDE, kind.name, step, 0, after, 0, key, ((to, nbytes),), ((source, nbytes),)))
        self.costs.append(0.0)
        return len(self.ops) - 1

    def program(self, phase: str) -> tuple[Program, list[Seconds]]:
        return Program(self.rank, phase, tuple(self.ops)), self.costs


def _elements(form: Form) -> tuple[int, int]:
    """Of a row of q and of out, and of a row of K and V together."""
    return form.batch * form.heads * form.head_dim, 2 * form.batch * form.kv_heads * form.head_dim


def _forward(call: Call, rank: int, speed: Speed) -> tuple[Program, list[Seconds]]:
    form, writer = call.form, _Writer(rank, call.world)
    row, kv_row = _elements(form)
    for step in range(call.world):
        area, coming = _area(call, rank, step), None
        if step + 1 < call.world:
            coming = writer.exchange(Kind.KV, step, form.tokens * kv_row * form.dtype.itemsize, "forward")
        if area is not None:
            # of a zigzag half of the rows, of stripes all but one
            sliced = SLICED_BYTES * (call.mask.causal and call.layout != "contiguous" and step > rank)
            moved = speed.moved((MERGE_BYTES + sliced if step else FIRST_BYTES) * area.rows * row)
            writer.launch(ATTEND, step, speed.launch + speed.products(area, form))
            writer.launch(MERGE, step, MERGE_KERNELS * KERNEL + moved)
        writer.waits |= set() if coming is None else {coming}
    writer.launch(MERGE, call.world - 1, speed.moved(LAST_BYTES * form.tokens * row))
    return writer.program("forward")


def _backward(call: Call, rank: int, speed: Speed) -> tuple[Program, list[Seconds]]:
    form, writer = call.form, _Writer(rank, call.world)
    row, kv_row = _elements(form)
    came: int | None = None
    for step in range(call.world):
        area, coming = _area(call, rank, step), None
        if step + 1 < call.world:
            coming = writer.exchange(Kind.KV, step, form.tokens * kv_row * form.dtype.itemsize, "backward")
        if area is not None:
            writer.launch(ATTEND, step, speed.launch + speed.products(area, form, backward=True))
            writer.launch(MERGE, step, speed.moved(GRADIENT_BYTES * area.rows * row))
        writer.waits |= set() if came is None else {came}
        writer.launch(MERGE, step, speed.moved(GRADIENT_BYTES * (area.keys if area else 0) * kv_row))
        writer.waits |= set() if coming is None else {coming}
        if call.world > 1:
            came = writer.exchange(Kind.DKV, step, form.tokens * kv_row * 4, "backward")
    writer.waits |= set() if came is None else {came}
    writer.launch(MERGE, call.world - 1, speed.moved(LAST_BYTES * form.tokens * (row + kv_row)))
    return writer.program("backward")


def one_device(call: Call, speed: Speed, phase: str) -> float:
    """Of one device with a shard of its own, which is what these rings' tables compare with: times the ranks."""
    area = whole(call.tokens, causal=call.mask.causal)
    return float(speed.launch + speed.products(area, call.form, backward=phase == "backward"))
