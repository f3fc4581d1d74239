"""Where the time of a call went: compute, waits, transfers and slots, by host clock or, on a GPU, by CUDA events.

All of a rank's points in time are on its host clock (``time.perf_counter``). On a GPU every one is an event, timed
against one start event whose place on the host clock is known to :attr:`Trace.clock_error`. Nothing is waited for while
a call runs: a transfer's begin is noted as the last of what it waits for, its end by whoever ends it. What a transfer
carried, and from when to when a slot was in use, is read off the plan and these times.
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
from ..comm.transports.lanes import StreamOrdered
from ..comm.transports.process_group import HostFence
from .buffers import KEY_VALUES, Key, Kind, Load, RingCall
from .schedule.plan import Plan
from .schedule.schedule import Hop

Stretch = tuple[float, float]  # begin and end


@dataclass(frozen=True)
class Span:
    """``kind`` from ``begin`` to ``end``, in seconds on the rank's host clock, at a hop of the forward or the backward.

    ``kind`` is "compute" or "wait"; "send" or "receive"; "slot N" (K/V) or "dK/dV slot N" while a slot is in use.
    """

    phase: str
    kind: str
    hop: int
    begin: float
    end: float
    name: str = ""  # what moves, or what a slot holds: "K/V of 3"
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Moved(NamedTuple):
    """A group of transfers that is over: when, and how many bytes it sent and received."""

    key: Key
    begin: float
    end: float
    sent: int
    received: int


def slot_trace(
    phase: str, plan: Plan, posts: Sequence[Moved], computed: Mapping[int, Sequence[Stretch]]
) -> Iterator[Span]:
    """Every use of a slot by one call: from when something may be written there until its last reader is over.

    ``computed``: per hop, when it computed. Left out: the two slots of a two-level ring through which dK/dV of nodes
    return to their owners.
    """
    kv = [post for post in posts if post.key.kind in KEY_VALUES]
    dkv = [post for post in posts if post.key.kind is Kind.DKV]
    for hop in plan.hops:
        reads = computed.get(hop.index, ())
        if hop.kv_slot is not None:
            into = [post for post in kv if post.received and post.key.brings == hop.index]
            out = [post for post in kv if post.sent and plan.kv_sender(plan.hops[post.key.brings]) is hop]
            for span in _slot_span(into, out, reads):
                yield Span(phase, f"slot {hop.kv_slot}", hop.index, *span, f"K/V of {hop.shard}")
        if hop.dkv_slot is not None and phase == "backward":
            # where more is to come, what returned is added to a total as soon as it is there
            plain = not plan.two_level and plan.send_index is None
            into = [post for post in dkv if post.received and hop in plan.dkv_arrivals[post.key.hop]]
            out = [post for post in dkv if post.sent and post.key.hop == hop.index]
            for span in _slot_span(into, out, reads if hop.index or plain else ()):
                yield Span(phase, f"dK/dV slot {hop.dkv_slot}", hop.index, *span, f"dK/dV of {hop.shard}")


def _slot_span(into: Sequence[Moved], out: Sequence[Moved], reads: Sequence[Stretch]) -> list[Stretch]:
    """From the first write into a slot to its last reader; nothing where nothing comes or goes through it."""
    moved = [(post.begin, post.end) for post in (*into, *out)]
    used = [*moved, *reads]
    return [(min(begin for begin, _ in moved[: len(into)] or used), max(end for _, end in used))] if moved else []


def names(plan: Plan, key: Key) -> tuple[str, str]:
    """What a group of transfers sends, and what it receives."""
    if key.kind in KEY_VALUES:
        coming = plan.hops[key.brings]
        return f"K/V of {plan.kv_sender(coming).shard}", f"K/V of {coming.shard}"
    if key.kind is Kind.DKV:
        arrivals = " and ".join(str(one.shard) for one in plan.dkv_arrivals[key.hop])
        return f"dK/dV of {plan.hops[key.hop].shard}", f"dK/dV of {arrivals}"
    root = plan.hops[key.hop // plan.inner * plan.inner]
    return f"dK/dV of {root.shard}", f"dK/dV of {plan.rank}"


Moment = Any  # float: seconds on the host clock; a torch.cuda.Event: where a stream is


class _Clock:
    """Points in time of a device, and where they lie on the host's clock."""

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
        """This point: of the host, or of a stream (the device's current one where none is named)."""
        if not self._cuda:
            return time.perf_counter()
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        made = event(enable_timing=True)
        made.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return made

    def seconds(self, moment: Moment) -> float:
        """On the host clock; waits for a stream's point."""
        if isinstance(moment, float):
            return moment
        self._wait(moment)
        seconds: float = self._host + self._start.elapsed_time(moment) / 1e3
        return seconds

    def _wait(self, moment: torch.cuda.Event) -> None:
        with on_device(self._device):
            moment.synchronize()


class _Begin(StreamOrdered):
    """The last of what a post waits for: where it is reached, the transfer begins."""

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
    """A group of transfers on its way."""

    call: int
    key: Key
    begin: _Begin
    fence: Fence
    end: Moment  # None: the fence knows
    sent: int
    received: int


@dataclass
class _Piece:
    """A span whose ends may still be points of a stream."""

    call: int
    phase: str
    kind: str
    hop: int
    begin: Moment
    end: Moment = None  # not yet


@dataclass
class Trace:
    """What one rank did while :meth:`Ring.record` was open."""

    device: torch.device
    _pieces: list[_Piece] = field(default_factory=list)
    _posts: list[_Post] = field(default_factory=list)
    _plans: list[tuple[str, Plan]] = field(default_factory=list)
    _open: _Piece | None = None

    def __post_init__(self) -> None:
        self._clock = _Clock(self.device)

    @property
    def clock_error(self) -> float:
        """Seconds by which the device's clock may be off the host's; 0 on the CPU."""
        return self._clock.error

    # while a call runs

    def watching(self, call: RingCall) -> RingCall:
        """The same call, with its transfers and its inner waits noted."""
        self._plans.append((call.phase, call.plan))

        @contextmanager
        def span(kind: str, hop: Hop) -> Iterator[None]:
            with call.span(kind, hop), self.span(call.phase, kind, hop):
                yield

        settings = {one.name: getattr(call, one.name) for one in fields(call)}
        settings |= {"waiting": partial(self.span, call.phase, "wait"), "span": span}
        return _RecordedCall(**settings, trace=self)

    def posting(self, key: Key, begin: _Begin, fence: Fence, sends: Load, receives: Load) -> None:
        """Note a post, right after it was made."""
        end = None if isinstance(fence, HostFence) else self._clock.now(begin.stream)
        sent, received = (sum(nbytes for _, nbytes in way.sizes) for way in (sends, receives))
        self._posts.append(_Post(len(self._plans) - 1, key, begin, fence, end, sent, received))

    @contextmanager
    def span(self, phase: str, kind: str, hop: Hop) -> Iterator[None]:
        """Note what is done (CPU) or enqueued on the current stream (GPU) inside. A wait inside a compute cuts it."""
        begin, outer = self._clock.now(), self._open
        if outer is not None:
            self._pieces.append(replace(outer, end=begin))
        self._open = mine = _Piece(max(len(self._plans) - 1, 0), phase, kind, hop.index, begin)
        yield
        end = self._clock.now()
        self._pieces.append(replace(mine, end=end))
        if outer is not None:
            outer.begin = end
        self._open = outer

    # afterwards

    @property
    def spans(self) -> list[Span]:
        """Compute and waits so far, in order; on a GPU this waits for them."""
        at = self._clock.seconds
        return [Span(one.phase, one.kind, one.hop, at(one.begin), at(one.end)) for one in self._pieces]

    def seconds(self, kind: str, hop: int | None = None) -> float:
        """Sum over the spans of one kind ("compute" or "wait"), of one hop or of all."""
        return sum(span.seconds for span in self.spans if span.kind == kind and hop in (None, span.hop))

    @property
    def transfers(self) -> list[Span]:
        """Sends and receives so far; waits for them. A send ends where the group of transfers it is in does.

        Between virtual ranks on the CPU the receiver copies: a send is over there once it is offered.
        """
        return [span for post in self._posts for span in self._moved(post)]

    @property
    def slots(self) -> list[Span]:
        """Every use of a slot so far: from when it may be written to until the last that reads it is over."""
        return [span for number in range(len(self._plans)) for span in self._slot_trace(number)]

    def _done(self, post: _Post) -> Moved:
        """A post whose ends are known; waits for it."""
        if post.end is None:
            assert isinstance(post.fence, HostFence)
            post.fence.wait()
            post.end = post.fence.over_at
        at = self._clock.seconds
        return Moved(post.key, at(post.begin.at), at(post.end), post.sent, post.received)

    def _moved(self, post: _Post) -> Iterator[Span]:
        phase, plan = self._plans[post.call]
        moved = self._done(post)
        for kind, name, nbytes in zip(("send", "receive"), names(plan, post.key), moved[3:], strict=True):
            if nbytes:
                yield Span(phase, kind, post.key.hop, moved.begin, moved.end, name, nbytes)

    def _slot_trace(self, number: int) -> Iterator[Span]:
        computed: dict[int, list[tuple[float, float]]] = {}
        for one in self._pieces:
            if (one.call, one.kind) == (number, "compute"):
                computed.setdefault(one.hop, []).append((self._clock.seconds(one.begin), self._clock.seconds(one.end)))
        posts = [self._done(post) for post in self._posts if post.call == number]
        return slot_trace(*self._plans[number], posts, computed)


@dataclass(frozen=True)
class _RecordedCall(RingCall):
    """A call whose posts are noted: when what they wait for is over, and when they are."""

    trace: Trace = field(kw_only=True)

    def post(self, level: int, key: Key, sends: Load, receives: Load, after: Sequence[Fence]) -> Fence | None:
        begin = _Begin(self.trace._clock)
        fence = super().post(level, key, sends, receives, (*after, begin))
        if fence is not None:
            self.trace.posting(key, begin, fence, sends, receives)
        return fence
