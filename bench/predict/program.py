"""Records the operations of one rank in a call by running the ring's real loops on tensors without memory.

:func:`record_program` passes :mod:`ringattn.ring.loop` a transport that moves no data and backends that compute
nothing. Their calls and dependencies are the program. This module knows nothing about rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ...comm import Fence, Message, Slots
from ...kernels import FULL, PLAIN, Bounds, Scores
from ...ring import loop
from ...ring.buffers import PostKey, RingCall, Tensors, TransferKind, split_heads
from ...ring.schedule.plan import Plan
from ...ring.schedule.schedule import Hop
from ...ring.wire import Wire, resolve_grad_wire, resolve_wire
from ..common.attention import DTYPES
from .predicted_call import PredictedCall
from .speed import ADD, DECODE, DKDV, DQ, ENCODE, FOLD, POINT

META = torch.device("meta")
COMPUTE, INSIDE, BETWEEN = 0, 1, 2
"""Streams of a rank: kernels, and the transfers of each level of the ring."""
PASSES = ("forward", "backward")
TRANSFERS = {
    TransferKind.RAIL: "K/V by rail",
    TransferKind.KV: "K/V",
    TransferKind.DKV: "dK/dV accumulators",
    TransferKind.PREFETCH: "K/V",
    TransferKind.RETURN: "a node's accumulators",
}


@dataclass(frozen=True)
class Op:
    """One launch or one group of transfers; it begins after the previous one on its stream and all in ``after``."""

    stream: int
    what: str
    hop: int
    chunk: int
    after: tuple[int, ...]
    """Indices of earlier operations of the program."""
    keys: int = 0
    """Keys of a launch."""
    bounds: Bounds = FULL
    """Mask of a launch."""
    key: PostKey | None = None
    sends: tuple[tuple[int, int], ...] = ()
    """(peer, bytes) of a group, one entry per peer."""
    receives: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Program:
    """Operations of one rank, in the order in which its host issues them."""

    rank: int
    phase: str
    ops: tuple[Op, ...]


def record_program(
    call: PredictedCall, plan: Plan, phase: str, *, tokens: int | None = None, on_host: bool = False
) -> Program:
    """Return the program of the rank of ``plan`` in a phase, ``forward`` or ``backward``.

    ``tokens`` are this rank's if the shards are unequal. ``on_host`` is for CPUs: the host posts nothing while it
    computes, and adds received dK/dV in a separate operation.
    """
    recorder = _Recorder(call, on_host)
    loop_call = recorder.loop_call(_on_meta(plan), phase)
    shape = (call.batch, tokens or call.tokens, call.kv_heads, call.head_dim)
    k, v = (torch.empty(shape, dtype=DTYPES[call.dtype], device=META) for _ in range(2))
    backends = [_Backend(recorder, heads.number) for heads in loop_call.heads]
    if phase == "forward":
        loop.forward(loop_call, backends, k, v)
    else:
        loop.backward(loop_call, backends, k, v, (torch.empty_like(k), torch.empty_like(v)))
    recorder.point()
    return Program(plan.rank, phase, tuple(recorder.ops))


def _on_meta(plan: Plan) -> Plan:
    """Return the plan with indices on the meta device."""
    send_index = None if plan.send_index is None else plan.send_index.to(META)
    return replace(plan, send_index=send_index, runs=tuple(map(_on_meta, plan.runs)))


@dataclass(frozen=True)
class _OpEnd:
    """Fence for the end of operation ``op``; None means before the first launch."""

    recorder: _Recorder
    op: int | None

    def wait(self) -> None:
        if self.op is not None:
            self.recorder.waiting.add(self.op)

    def done(self) -> bool:
        return self.op is None


@dataclass
class _Recorder:
    call: PredictedCall
    on_host: bool
    ops: list[Op] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # operations that the next launch waits for
    last: int | None = None  # previous launch
    hop: int = 0

    def loop_call(self, plan: Plan, phase: str) -> RingCall:
        call = self.call
        wires = resolve_wire(call.wire_dtype, DTYPES[call.dtype]), resolve_grad_wire(call.grad_wire_dtype)
        wire, grad_wire = (cast(Any, w and _RecordedWire(w, self)) for w in wires)
        transports: Any = (_Transport(self, INSIDE), _Transport(self, BETWEEN))
        return RingCall(
            plan=plan,
            phase=phase,
            transports=transports,
            kv_slots=_Slots((plan.kv_slots + (wire is not None)) * call.chunks, META),
            dkv_slots=_Slots(plan.dkv_slots * call.chunks, META),
            record_span=self.span,
            heads=split_heads(call.head_groups, call.heads, call.kv_heads),
            prefetch=call.prefetch,
            wire=wire,
            grad_wire=grad_wire,
            on_post=self.posted,
        )

    @contextmanager
    def span(self, kind: str, hop: Hop) -> Iterator[None]:
        self.hop = hop.index
        yield

    def launch(self, what: str, heads: int = 0, keys: int = 0, bounds: Bounds = FULL) -> None:
        self.ops.append(Op(COMPUTE, what, self.hop, heads, tuple(sorted(self.waiting)), keys, bounds))
        self.waiting.clear()
        self.last = len(self.ops) - 1

    def point(self) -> int | None:
        """Return the index of a launch by whose end all operations waited for have ended; None if there is none."""
        if self.waiting:
            self.launch(POINT)
        return self.last

    def posted(self, key: object, fence: Fence, after: object, sent: object, received: object) -> None:
        assert isinstance(fence, _OpEnd) and isinstance(key, PostKey) and fence.op is not None
        op = self.ops[fence.op]
        self.ops[fence.op] = replace(op, what=TRANSFERS[key.kind], hop=key.hop, chunk=key.chunk, key=key)


def _by_peer(messages: Sequence[Message]) -> tuple[tuple[int, int], ...]:
    summed: dict[int, int] = {}
    for peer, tensor in messages:
        summed[peer] = summed.get(peer, 0) + tensor.nbytes
    return tuple(summed.items())


@dataclass
class _Transport:
    """Transport that records posts and moves no data; it has only the methods that the loops call."""

    recorder: _Recorder
    stream: int

    def mark(self) -> Fence:
        return _OpEnd(self.recorder, self.recorder.point())

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence]) -> Fence:
        recorder = self.recorder
        before = {fence.op for fence in after if isinstance(fence, _OpEnd) and fence.op is not None}
        if recorder.on_host and (reached := recorder.point()) is not None:
            before.add(reached)
        moved = (_by_peer(messages) for messages in (sends, receives))
        # `posted` fills in the contents next
        recorder.ops.append(Op(self.stream, "", recorder.hop, 0, tuple(sorted(before)), 0, FULL, None, *moved))
        return _OpEnd(recorder, len(recorder.ops) - 1)


class _Slots(Slots):
    """Slots that track which operations use them but hold no data."""

    def reserve(self, nbytes: int) -> None:
        """Accept any size."""

    def tensors(self, slot: int, specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=META) for shape, dtype in specs)


@dataclass
class _RecordedWire:
    wire: Wire
    recorder: _Recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def encode(self, x: Tensor, into: Tensors) -> None:
        self.recorder.launch(ENCODE, keys=x.shape[1])

    def decode(self, wire: Tensors, into: Tensor) -> None:
        self.recorder.launch(DECODE, keys=into.shape[1])


@dataclass
class _Backend:
    """Backend that records launches and computes nothing; ``dkdv`` waits for accumulators as real backends do."""

    recorder: _Recorder
    heads: int

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        self.recorder.launch(FOLD, self.heads, k.shape[1], bounds)

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool) -> None:
        self.recorder.launch(DQ, self.heads, k.shape[1], bounds)

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool,
        accum: Callable[[], Tensors] | None, out: Tensors,
    ) -> None:  # fmt: skip
        if accum is not None and not self.recorder.on_host:
            accum()
        self.recorder.launch(DKDV, self.heads, k.shape[1], bounds)
        if self.recorder.on_host:
            if accum is not None:
                accum()
            self.recorder.launch(ADD, self.heads, k.shape[1])

    def result(self) -> Any:
        """Return None, because nothing was computed."""
