"""A ring of the usual kind, on the same clock: two buffers, a whole attention per hop, and its results merged by torch.

Written from the method's description in zhuzilin's ring-flash-attention and TransformerEngine's context parallelism.
What sets it apart from ours are values: bytes that merging moves, and what waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...ring.buffers import Key, Kind
from .clock import run
from .launch import Area, whole
from .links import Links
from .program import COMPUTE, INSIDE, Form, Op, Program
from .ring import slowed
from .speed import Speed

ATTEND, MERGE = "attention", "merge"
KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Merging:
    """Bytes of memory traffic per element (a row and one of its head's), pass by pass."""

    first: int = 2 + 4
    """The first result as fp32."""
    each: int = (2 + 4) + (4 + 4 + 4) + (4 + 4) + (4 + 4 + 4)
    """``block.float()``, ``out - block``, times the weight, ``out -`` that: each a torch operation of its own."""
    sliced: int = 4 + 4
    """What only some rows have is copied back."""
    last: int = 4 + 2
    """The result in the model's dtype."""
    gradient: int = 4 + 2 + 4
    """``dq += block``, and the same for dK and dV of what arrived."""


MERGING = Merging()


@dataclass(frozen=True)
class Usual:
    """One call: every rank has ``form.tokens`` tokens."""

    world: int
    per_node: int
    form: Form
    layout: str
    causal: bool = True

    def area(self, rank: int, step: int) -> Area | None:
        """What a rank computes at a step; None: nothing."""
        tokens = self.form.tokens
        if not self.causal or step == 0:
            return whole(tokens, causal=self.causal)
        if self.layout == "striped":
            return whole(tokens, causal=True)
        if self.layout == "contiguous":
            return whole(tokens, causal=False) if step <= rank else None
        if step <= rank:
            return Area(tokens * tokens / 2, tokens, tokens / 2, tokens / 2, 0)
        return Area(tokens * tokens / 2, tokens / 2, tokens, tokens, 0)

    def is_sliced(self, rank: int, step: int) -> bool:
        return self.causal and self.layout != "contiguous" and step > rank


def seconds(call: Usual, speed: Speed, links: Links, phase: str, merging: Merging = MERGING) -> float:
    """Until the last rank is done."""
    make = _forward if phase == "forward" else _backward
    made = [make(call, rank, speed, merging) for rank in range(call.world)]

    def message(source: int, destination: int, nbytes: int) -> float:
        return links.of(source // call.per_node == destination // call.per_node).seconds(nbytes)

    costs = [_slowed(program, spent, message, speed.beside) for program, spent in made]
    return max(track.seconds for track in run([program for program, _ in made], costs, message))


class _Writer:
    """A program as it grows; what is posted waits for all launches so far, as torch's streams do."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.ops: list[Op] = []
        self.costs: list[float] = []
        self.waits: set[int] = set()
        self.last: int | None = None

    def launch(self, what: str, step: int, seconds: float) -> None:
        self.ops.append(Op(COMPUTE, what, step, 0, tuple(self.waits)))
        self.costs.append(seconds)
        self.waits.clear()
        self.last = len(self.ops) - 1

    def exchange(self, kind: Kind, step: int, nbytes: int, phase: str) -> int:
        after = () if self.last is None else (self.last,)
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        key = Key(phase, step, kind, step, 0)
        self.ops.append(Op(INSIDE, kind.name, step, 0, after, 0, key, ((to, nbytes),), ((source, nbytes),)))
        self.costs.append(0.0)
        return len(self.ops) - 1

    def program(self, phase: str) -> tuple[Program, list[float]]:
        return Program(self.rank, phase, tuple(self.ops)), self.costs


def _elements(form: Form) -> tuple[int, int]:
    """Of a row of q and of out, and of a row of K and V together."""
    return form.batch * form.heads * form.head_dim, 2 * form.batch * form.kv_heads * form.head_dim


def _forward(call: Usual, rank: int, speed: Speed, merging: Merging) -> tuple[Program, list[float]]:
    form, writer = call.form, _Writer(rank, call.world)
    row, kv_row = _elements(form)
    for step in range(call.world):
        area, coming = call.area(rank, step), None
        if step + 1 < call.world:
            coming = writer.exchange(Kind.KV, step, form.tokens * kv_row * form.dtype.itemsize, "forward")
        if area is not None:
            per_element = merging.each + merging.sliced * call.is_sliced(rank, step) if step else merging.first
            writer.launch(ATTEND, step, speed.launch + speed.products(area, form))
            writer.launch(MERGE, step, speed.launch + speed.moved(per_element * area.rows * row))
        writer.waits |= set() if coming is None else {coming}
    writer.launch(MERGE, call.world - 1, speed.moved(merging.last * form.tokens * row))
    return writer.program("forward")


def _backward(call: Usual, rank: int, speed: Speed, merging: Merging) -> tuple[Program, list[float]]:
    form, writer = call.form, _Writer(rank, call.world)
    row, kv_row = _elements(form)
    sums: int | None = None
    for step in range(call.world):
        area, coming = call.area(rank, step), None
        if step + 1 < call.world:
            coming = writer.exchange(Kind.KV, step, form.tokens * kv_row * form.dtype.itemsize, "backward")
        if area is not None:
            writer.launch(ATTEND, step, speed.launch + speed.products(area, form, backward=True))
            writer.launch(MERGE, step, speed.moved(merging.gradient * area.rows * row))
        writer.waits |= set() if sums is None else {sums}
        writer.launch(MERGE, step, speed.moved(merging.gradient * (area.keys if area else 0) * kv_row))
        writer.waits |= set() if coming is None else {coming}
        if call.world > 1:
            sums = writer.exchange(Kind.DKV, step, form.tokens * kv_row * 4, "backward")
    writer.waits |= set() if sums is None else {sums}
    writer.launch(MERGE, call.world - 1, speed.moved(merging.last * form.tokens * (row + kv_row)))
    return writer.program("backward")


def _slowed(
    program: Program, costs: Sequence[float], message: Callable[[int, int, int], float], beside: float
) -> list[float]:
    times = [max((message(program.rank, *sent) for sent in op.sends), default=0.0) for op in program.ops]
    return slowed(program, costs, times, beside)


def baseline(form: Form, speed: Speed, phase: str, *, causal: bool = True) -> float:
    """Of one device with a shard of its own, which is what these rings' tables compare with: times the ranks."""
    area = whole(form.tokens, causal=causal)
    return speed.launch + speed.products(area, replace(form, chunks=1), backward=phase == "backward")
