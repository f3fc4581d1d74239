"""Traces of a call: compute, waits, transfers and slot use, by host clock or, on a GPU, by CUDA events.

All times are on the rank's host clock (``time.perf_counter``). On a GPU every point is an event, timed against a start
event whose host time is known up to :attr:`Trace.clock_error`. Nothing waits while a call runs. A transfer's begin is
recorded after the last fence that it waits for, its end when the transfer ends. The content of transfers and the use of
slots follow from the plan and these times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..comm import Fence
from ..comm.cuda_threads import on_device
from ..comm.transports.copy_streams import StreamOrderedFence
from ..comm.transports.process_group import HostFence
from .buffers import KV_KINDS, Payload, PostKey, RingCall, TransferKind
from .schedule.plan import Plan
from .schedule.schedule import Hop

TimeInterval = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class TraceSpan:
    """One interval of ``kind``, in seconds on the rank's host clock, at one hop of the forward or the backward.

    ``kind`` is "compute", "wait", "send" or "receive"; or "slot N" (K/V) or "dK/dV slot N" while a slot is in use.
    """

    phase: str
    kind: str
    hop: int
    begin: float
    end: float
    name: str = ""  # content of a transfer or slot, such as "K/V of 3"
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class CompletedPost(NamedTuple):
    """A completed group of transfers, with its times and the bytes that it sent and received."""

    key: PostKey
    begin: float
    end: float
    sent: int
    received: int


def slot_trace(
    phase: str, plan: Plan, posts: Sequence[CompletedPost], computed: Mapping[int, Sequence[TimeInterval]]
) -> Iterator[TraceSpan]:
    """Yield every use of a slot in one call, from the first write to the end of the last read.

    The two slots of a two-level ring that return dK/dV between nodes are left out. ``computed`` maps hops to the times
    of their compute.
    """
    for run in plan.runs:
        yield from slot_trace(phase, run, [post for post in posts if plan.run(post.key.chunk) is run], computed)
    if plan.runs:
        return
    kv = [post for post in posts if post.key.kind in KV_KINDS]
    dkv = [post for post in posts if post.key.kind is TransferKind.DKV]
    for hop in plan.hops:
        reads = computed.get(hop.index, ())
        if hop.kv_slot is not None:
            into = [post for post in kv if post.received and post.key.payload_hop == hop.index]
            out = [post for post in kv if post.sent and plan.kv_sender(plan.hops[post.key.payload_hop]) is hop]
            for span in _slot_span(into, out, reads):
                yield TraceSpan(phase, f"slot {hop.kv_slot}", hop.index, *span, f"K/V of {hop.shard}")
        if hop.dkv_slot is not None and phase == "backward":
            # If more dK/dV return later, each arrival is added to a total at once, and hop 0 does not read the slot.
            into = [post for post in dkv if post.received and hop in plan.dkv_arrivals[post.key.hop]]
            out = [post for post in dkv if post.sent and post.key.hop == hop.index]
            for span in _slot_span(into, out, reads if hop.index or plan.returns_once else ()):
                yield TraceSpan(phase, f"dK/dV slot {hop.dkv_slot}", hop.index, *span, f"dK/dV of {hop.shard}")


def _slot_span(
    into: Sequence[CompletedPost], out: Sequence[CompletedPost], reads: Sequence[TimeInterval]
) -> list[TimeInterval]:
    """Return the time from the first write into a slot to its last read; empty if nothing moves through it."""
    transfers = [(post.begin, post.end) for post in (*into, *out)]
    used = [*transfers, *reads]
    if not transfers:
        return []
    return [(min(begin for begin, _ in transfers[: len(into)] or used), max(end for _, end in used))]


def transfer_names(plan: Plan, key: PostKey) -> tuple[str, str]:
    """Return the names of what a group of transfers sends and receives, such as "K/V of 3" for shard 3."""
    if key.kind in KV_KINDS:
        coming = plan.hops[key.payload_hop]
        return f"K/V of {plan.kv_sender(coming).shard}", f"K/V of {coming.shard}"
    if key.kind is TransferKind.DKV:
        arrivals = " and ".join(str(hop.shard) for hop in plan.dkv_arrivals[key.hop])
        return f"dK/dV of {plan.hops[key.hop].shard}", f"dK/dV of {arrivals}"
    root = plan.hops[key.hop // plan.inner * plan.inner]
    return f"dK/dV of {root.shard}", f"dK/dV of {plan.rank}"


Moment = Any  # a float (seconds on the host clock) or a torch.cuda.Event (a point of a stream)


class _Clock:
    """Points in time of a device, converted to the host clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.error = 0.0
        if self._cuda:
            torch.cuda.synchronize(device)
            before = time.perf_counter()
            self._start = self.now()
            self._wait(self._start)
            after = time.perf_counter()
            self._host, self.error = (before + after) / 2, (after - before) / 2

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """Return the current point of the host (CPU) or of a stream (GPU; default: the current stream)."""
        if not self._cuda:
            return time.perf_counter()
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        point = event(enable_timing=True)
        point.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return point

    def seconds(self, moment: Moment) -> float:
        """Convert a point to seconds on the host clock. Wait for it if it is an event."""
        if isinstance(moment, float):
            return moment
        self._wait(moment)
        seconds: float = self._host + self._start.elapsed_time(moment) / 1e3
        return seconds

    def _wait(self, moment: torch.cuda.Event) -> None:
        with on_device(self._device):
            moment.synchronize()


class _PostBegin(StreamOrderedFence):
    """Fence that a post waits for last. It records the time when it is reached, at which the transfer begins."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self.at: Moment = None
        self.stream: torch.cuda.Stream | None = None

    def wait(self) -> None:
        if self.at is None:
            self.at = self._clock.now()

    def done(self) -> bool:
        return True

    def order(self, stream: torch.cuda.Stream) -> None:
        if self.at is None:
            self.stream, self.at = stream, self._clock.now(stream)


@dataclass
class _Post:
    """A posted group of transfers."""

    call: int
    key: PostKey
    begin: _PostBegin
    fence: Fence
    end: Moment  # None: the fence records the end
    sent: int
    received: int


@dataclass
class _OpenSpan:
    """A span whose ends may still be stream events."""

    call: int
    phase: str
    kind: str
    hop: int
    begin: Moment
    end: Moment = None  # None while it is open


@dataclass
class Trace:
    """Recording of one rank's work while :meth:`Ring.record` was open."""

    device: torch.device
    _pieces: list[_OpenSpan] = field(default_factory=list)
    _posts: list[_Post] = field(default_factory=list)
    _plans: list[tuple[str, Plan]] = field(default_factory=list)
    _open: _OpenSpan | None = None

    def __post_init__(self) -> None:
        self._clock = _Clock(self.device)

    @property
    def clock_error(self) -> float:
        """Largest error of device times on the host clock, in seconds; 0 on the CPU."""
        return self._clock.error

    # while a call runs

    def wrap_call(self, call: RingCall) -> RingCall:
        """Return a copy of the call that records its transfers, compute and waits in this trace."""
        self._plans.append((call.phase, call.plan))

        @contextmanager
        def span(kind: str, hop: Hop) -> Iterator[None]:
            with call.record_span(kind, hop), self.span(call.phase, kind, hop):
                yield

        settings = {item.name: getattr(call, item.name) for item in fields(call)}
        settings |= {"record_wait": partial(self.span, call.phase, "wait"), "record_span": span}
        return _RecordedCall(**settings, trace=self)

    def record_post(self, key: PostKey, begin: _PostBegin, fence: Fence, sends: Payload, receives: Payload) -> None:
        """Record a group of transfers right after its post; ``begin`` is the fence that it waits for last."""
        end = None if isinstance(fence, HostFence) else self._clock.now(begin.stream)
        sent, received = (sum(nbytes for _, nbytes in way.sizes) for way in (sends, receives))
        self._posts.append(_Post(len(self._plans) - 1, key, begin, fence, end, sent, received))

    @contextmanager
    def span(self, phase: str, kind: str, hop: Hop) -> Iterator[None]:
        """Record the work inside, done on the CPU or enqueued on the stream, as one span of ``kind``.

        A span inside another one, such as a wait inside a compute, splits the outer span.
        """
        begin, outer = self._clock.now(), self._open
        if outer is not None:
            self._pieces.append(replace(outer, end=begin))
        self._open = piece = _OpenSpan(max(len(self._plans) - 1, 0), phase, kind, hop.index, begin)
        yield
        end = self._clock.now()
        self._pieces.append(replace(piece, end=end))
        if outer is not None:
            outer.begin = end
        self._open = outer

    # afterwards

    @property
    def spans(self) -> list[TraceSpan]:
        """Compute and waits so far, in order. On a GPU, reading them waits for their end."""
        at = self._clock.seconds
        return [TraceSpan(piece.phase, piece.kind, piece.hop, at(piece.begin), at(piece.end)) for piece in self._pieces]

    def seconds(self, kind: str, hop: int | None = None) -> float:
        """Return the total time of the spans of one kind ("compute" or "wait"), at one hop or all hops."""
        return sum(span.seconds for span in self.spans if span.kind == kind and hop in (None, span.hop))

    @property
    def transfers(self) -> list[TraceSpan]:
        """Sends and receives so far. Reading them waits for their end. A send ends when its group of transfers ends.

        Between virtual ranks on the CPU the receiver copies, so a send ends as soon as it is posted.
        """
        return [span for post in self._posts for span in self._moved(post)]

    @property
    def slots(self) -> list[TraceSpan]:
        """Uses of a slot so far, each from the first possible write to the end of the last read."""
        return [span for number in range(len(self._plans)) for span in self._slot_trace(number)]

    def _done(self, post: _Post) -> CompletedPost:
        """Wait for the end of a post, and return it with its times."""
        if post.end is None:
            assert isinstance(post.fence, HostFence)
            post.fence.wait()
            post.end = post.fence.finished_at
        at = self._clock.seconds
        return CompletedPost(post.key, at(post.begin.at), at(post.end), post.sent, post.received)

    def _moved(self, post: _Post) -> Iterator[TraceSpan]:
        """Yield the send and the receive of a post, unless empty."""
        phase, plan = self._plans[post.call]
        done = self._done(post)
        sizes = (done.sent, done.received)
        for kind, name, nbytes in zip(
            ("send", "receive"), transfer_names(plan.run(post.key.chunk), post.key), sizes, strict=True
        ):
            if nbytes:
                yield TraceSpan(phase, kind, post.key.hop, done.begin, done.end, name, nbytes)

    def _slot_trace(self, number: int) -> Iterator[TraceSpan]:
        """Yield when each slot for K/V or dK/dV was in use during recorded call ``number``, which counts from 0."""
        computed: dict[int, list[tuple[float, float]]] = {}
        at = self._clock.seconds
        for piece in self._pieces:
            if (piece.call, piece.kind) == (number, "compute"):
                computed.setdefault(piece.hop, []).append((at(piece.begin), at(piece.end)))
        posts = [self._done(post) for post in self._posts if post.call == number]
        return slot_trace(*self._plans[number], posts, computed)


@dataclass(frozen=True)
class _RecordedCall(RingCall):
    """A call that records when the last wait of each post ends, and when the post ends."""

    trace: Trace = field(kw_only=True)

    def post(self, level: int, key: PostKey, sends: Payload, receives: Payload, after: Sequence[Fence]) -> Fence | None:
        begin = _PostBegin(self.trace._clock)
        fence = super().post(level, key, sends, receives, (*after, begin))
        if fence is not None:
            self.trace.record_post(key, begin, fence, sends, receives)
        return fence
