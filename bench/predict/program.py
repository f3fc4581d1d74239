"""What one rank does in one call, in order: the ring's own loops, run on tensors without memory, and written down.

Nothing here knows what a ring is. :func:`record` hands :mod:`ringattn.ring.loop` a transport that moves nothing and
work that computes nothing; what they are asked for, and what each waits for, is the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ...comm import Fence, Message, Slots
from ...kernels import FULL, PLAIN, Bounds, Scores
from ...ring import loop
from ...ring.buffers import Call, Key, Kind, Tensors, chunks_of
from ...ring.schedule.plan import HopMask, Plan
from ...ring.schedule.schedule import Hop
from ...ring.wire import Wire
from .speed import ADD, DECODE, DKDV, DQ, ENCODE, FOLD, POINT

META = torch.device("meta")
COMPUTE, INSIDE, BETWEEN = 0, 1, 2
"""Streams of a rank: its kernels, and the transfers of each level of the ring."""
PASSES = ("forward", "backward")
TRANSFERS = {Kind.RAIL: "K/V by rail", Kind.KV: "K/V", Kind.DKV: "sums", Kind.RETURN: "node's sums"}


@dataclass(frozen=True)
class Op:
    """One launch, or one group of transfers; it begins after the one before on its stream, and after ``after``."""

    stream: int
    what: str
    hop: int
    chunk: int
    after: tuple[int, ...]
    """Indices into the program, all smaller than its own."""
    part: int = 0
    """Which part of the mask a launch is for."""
    key: Key | None = None
    sends: tuple[tuple[int, int], ...] = ()
    """Of a group: (peer, bytes), one for each peer."""
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Program:
    """The operations of one rank in the order in which its host issues them."""

    rank: int
    phase: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Form:
    """What a program depends on besides the plan: shapes in elements, and the settings of the ring."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunks: int = 1
    prefetch: int = 2
    wire: Wire | None = None
    grad_wire: Wire | None = None
    on_host: bool = False
    """The host computes itself: it posts nothing while it does, and adds sums that came in a pass of their own."""


def record(plan: Plan, form: Form, phase: str) -> Program:
    """The program of the rank of ``plan`` in a pass, ``forward`` or ``backward``."""
    recorder = _Recorder(form)
    send_index = None if plan.send_index is None else plan.send_index.to(META)
    blank = tuple(tuple(_blank(hop_mask) for hop_mask in hop_masks) for hop_masks in plan.hop_masks)
    call = recorder.call(replace(plan, hop_masks=blank, send_index=send_index), phase)
    shape = (form.batch, form.tokens, form.kv_heads, form.head_dim)
    k, v = (torch.empty(shape, dtype=form.dtype, device=META) for _ in range(2))
    works = [_Work(recorder, heads.number) for heads in call.chunks]
    if phase == "forward":
        loop.forward(call, works, k, v)
    else:
        loop.backward(call, works, k, v, (torch.empty_like(k), torch.empty_like(v)))
    recorder.point()
    return Program(plan.rank, phase, tuple(recorder.ops))


def _blank(hop_mask: HopMask) -> HopMask:
    """The loops pass bounds on and look at none of them."""
    return hop_mask._replace(bounds=FULL)


@dataclass(frozen=True)
class _Over:
    """The end of an operation, as a fence."""

    recorder: _Recorder
    op: int

    def wait(self) -> None:
        self.recorder.waiting.add(self.op)

    def done(self) -> bool:
        return False


@dataclass
class _Recorder:
    form: Form
    ops: list[Op] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # ends that the next launch comes after
    last: int | None = None  # the launch before
    hop: int = 0
    part: int = 0

    def call(self, plan: Plan, phase: str) -> Call:
        form = self.form
        wire, grad_wire = (None if one is None else _RecordedWire(one, self) for one in (form.wire, form.grad_wire))
        return Call(
            plan=plan,
            phase=phase,
            transports=(_Transport(self, INSIDE), _Transport(self, BETWEEN)),
            kv_slots=_Slots((plan.kv_slots + (wire is not None)) * form.chunks, META),
            dkv_slots=_Slots(plan.dkv_slots * form.chunks, META),
            span=self.span,
            chunks=chunks_of(form.chunks, form.heads, form.kv_heads),
            prefetch=form.prefetch,
            wire=wire,
            grad_wire=grad_wire,
            posted=self.posted,
        )

    @contextmanager
    def span(self, kind: str, hop: Hop) -> Iterator[None]:
        self.hop, self.part = hop.index, 0
        yield

    def launch(self, what: str, chunk: int) -> None:
        self._append(Op(COMPUTE, what, self.hop, chunk, tuple(sorted(self.waiting)), self.part))
        self.waiting.clear()
        self.last = len(self.ops) - 1

    def point(self) -> int | None:
        """The launch after which everything waited for so far is over."""
        if self.waiting:
            self.launch(POINT, 0)
        return self.last

    def post(self, stream: int, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence]) -> _Over:
        before = {fence.op for fence in after if isinstance(fence, _Over)}
        if self.form.on_host and (reached := self.point()) is not None:
            before.add(reached)
        moved = (_by_peer(messages) for messages in (sends, receives))
        # what it carries is told next, by `posted`
        self._append(Op(stream, "", self.hop, 0, tuple(sorted(before)), 0, None, *moved))
        return _Over(self, len(self.ops) - 1)

    def posted(self, key: object, fence: Fence, after: object, sent: object, received: object) -> None:
        assert isinstance(fence, _Over) and isinstance(key, Key)
        op = self.ops[fence.op]
        self.ops[fence.op] = replace(op, what=TRANSFERS[key.kind], hop=key.hop, chunk=key.chunk, key=key)

    def _append(self, op: Op) -> None:
        self.ops.append(op)


def _by_peer(messages: Sequence[Message]) -> tuple[tuple[int, int], ...]:
    summed: dict[int, int] = {}
    for peer, tensor in messages:
        summed[peer] = summed.get(peer, 0) + tensor.nbytes
    return tuple(summed.items())


@dataclass
class _Transport:
    """Moves nothing."""

    recorder: _Recorder
    stream: int
    name: str = "predicted"
    rank: int = 0
    size: int = 0
    reason: str = ""

    def mark(self) -> Fence:
        reached = self.recorder.point()
        return _Past() if reached is None else _Over(self.recorder, reached)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        return self.recorder.post(self.stream, sends, receives, after)

    def warm_up(self, edges: object) -> None: ...

    def gather(self, value: object) -> list[object]:
        return [value]

    def check(self) -> str | None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class _Past:
    """Before everything: nothing has been launched yet."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


class _Slots(Slots):
    """Who uses them until when is kept; what they hold is not."""

    def reserve(self, nbytes: int) -> None:
        """Any size is there."""

    def tensors(self, slot: int, specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=META) for shape, dtype in specs)


@dataclass
class _RecordedWire:
    wire: Wire
    recorder: _Recorder

    @property
    def name(self) -> str:
        return self.wire.name

    def specs(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self.wire.specs(shape)

    def encode(self, x: torch.Tensor, into: Tensors) -> None:
        self.recorder.launch(ENCODE, 0)

    def decode(self, wire: Tensors, into: torch.Tensor) -> None:
        self.recorder.launch(DECODE, 0)


@dataclass
class _Work:
    """Computes nothing; ``dkdv`` asks for the sums where the real one does: before its launch, on a host after it."""

    recorder: _Recorder
    chunk: int

    def fold(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        self._launch(FOLD)

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool
    ) -> None:
        self._launch(DQ)

    def dkdv(
        self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool,
        accum: Callable[[], Tensors] | None, out: Tensors,
    ) -> None:  # fmt: skip
        if accum is not None and not self.recorder.form.on_host:
            accum()
        self._launch(DKDV)
        if self.recorder.form.on_host:
            if accum is not None:
                accum()
            self.recorder.launch(ADD, self.chunk)

    def _launch(self, what: str) -> None:
        self.recorder.launch(what, self.chunk)
        self.recorder.part += 1
