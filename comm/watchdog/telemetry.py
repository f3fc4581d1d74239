"""What every rank knows of every other without anybody in the middle: how long work takes, gossip, stragglers.

At each tick a rank pulls the table of one peer, merges it into its own and leaves the result for whoever pulls next.
The peer is a power of two away, the next power at the next tick, as in a dissemination barrier (Hensgen, Finkel and
Manber, 1988): were all ticks at the same moment, log2(ranks) of them would do.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..cuda_threads import on_device
from .deadlines import NEVER

logger = logging.getLogger(__name__)


# Seconds between two ticks of a rank, up to this many ranks; with more of them the time grows in proportion, so that a
# rank moves no more bytes a second the more there are.
TICK_SECONDS, TICK_RANKS = 0.25, 32

# A straggler is named when it is busy for at least this many times as long as the median of the others ...
SLOW_FACTOR = 1.1
# ... while these wait in the ring for at least this share of all time, ...
WAITING_SHARE = 0.1
# ... it itself for at most this part of what they do, ...
LOW_WAIT = 0.4
# ... and this has been so at as many looks in a row. It is over when it has not been so at as many in a row.
LOOKS = 4


class RankRow(NamedTuple):
    """What one rank says of itself."""

    version: int  # counts what the rank has said
    stamp: float  # seconds since the epoch, by the rank's own clock
    step: str  # the last step of a call that it is known to have reached
    calls: int = 0  # phases (forward or backward) begun
    nbytes: int = 0  # sent and received since the ring opened
    compute: float = 0.0  # seconds of the last `window`
    wait: float = 0.0  # seconds of the last `window`
    window: float = 0.0  # seconds that compute and wait were looked at
    gauges: Mapping[str, object] | None = None  # clocks and throttle reasons of its GPU; None where there is none


class Report(NamedTuple):
    """A row as another rank knows it."""

    rank: int
    age: float  # seconds since the rank said it
    row: RankRow


class Table:
    """The newest row known of every rank."""

    def __init__(self) -> None:
        self.rows: dict[int, RankRow] = {}

    def merge(self, rows: Mapping[int, RankRow]) -> None:
        """Keep what is newer than what is known."""
        for rank, row in rows.items():
            known = self.rows.get(rank)
            if known is None or known.version < row.version:
                self.rows[rank] = row

    def reports(self, now: float) -> tuple[Report, ...]:
        """All rows in rank order, with their age at `now` (seconds since the epoch)."""
        return tuple(Report(rank, max(0.0, now - row.stamp), row) for rank, row in sorted(self.rows.items()))

    def packed(self) -> list[list[object]]:
        """Its rows for JSON, without the names of their fields, which would be most of the bytes."""
        return [[rank, *row] for rank, row in self.rows.items()]

    def merge_packed(self, packed: object) -> None:
        """Merge what `packed` of a peer's table gave; nothing where a peer has not left any yet."""
        self.merge({rank: RankRow(*row) for rank, *row in packed} if isinstance(packed, list) else {})


def period(size: int) -> float:
    """Seconds between two ticks of a rank in a group of this size."""
    return TICK_SECONDS * max(1.0, size / TICK_RANKS)


def peer_at(rank: int, size: int, tick: int) -> int:
    """Whose table a rank pulls at a tick; never its own. Ticks are counted by the clock, so that all ranks agree.

    At 1,024 ranks that tick at random moments, with clocks half a tick apart, everyone knows everyone after 16 ticks;
    with a random peer each time it takes 25.
    """
    powers = (size - 1).bit_length()
    return (rank + (1 << tick % powers)) % size


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    factor: float  # its busy time over the median of the others'
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the ring up: it is busy {self.factor:.2f} times as long as the median of the "
            "other ranks, which wait for it"
        )


def slowest(rows: Mapping[int, RankRow]) -> tuple[int, float] | None:
    """The rank that waits little while all others wait much, and its factor; None where there is none."""
    waits = {rank: row.wait / row.window for rank, row in rows.items() if row.compute > 0 and row.window > 0}
    if len(waits) < 2:
        return None
    least = min(waits, key=lambda rank: (waits[rank], rank))
    others = [waits[rank] for rank in waits if rank != least]
    waited = statistics.median(others)
    # What a rank does not wait it is busy, in the ring or elsewhere: one that comes late from elsewhere counts too.
    factor = (1 - waits[least]) / max(1 - waited, 1e-9)
    if waited < WAITING_SHARE or waits[least] > LOW_WAIT * waited or factor < SLOW_FACTOR:
        return None
    return least, factor


class Stragglers:
    """Follows who is slow, and says each time once."""

    def __init__(self) -> None:
        self.current: Straggler | None = None
        """Who holds the ring up now."""
        self._candidate: int | None = None  # the rank that the last looks found, where that is another
        self._looks = 0  # in a row that found another
        self._since = 0.0

    def look(self, rows: Mapping[int, RankRow], now: float) -> Straggler | None:
        """Look at the table; the straggler where a new episode begins just now, else None."""
        slow = slowest(rows)
        rank = slow[0] if slow is not None else None
        if self.current is not None and rank == self.current.rank:
            assert slow is not None
            self.current, self._looks = self.current._replace(factor=slow[1]), 0
            return None
        if self.current is None and rank != self._candidate:
            self._candidate, self._looks, self._since = rank, 0, now
        self._looks += 1
        if self._looks < LOOKS:
            return None
        ended, self._looks = self.current is not None, 0
        self.current = None if ended or slow is None else Straggler(*slow, self._since)
        self._candidate = None
        return self.current


class _Measured:
    """One piece of work; a class, as every hop has some and a generator costs several calls more."""

    __slots__ = ("_begun", "_end", "_kind", "_stopwatch", "_stream")

    def __init__(self, stopwatch: Stopwatch, kind: str) -> None:
        self._stopwatch, self._kind = stopwatch, kind

    def __enter__(self) -> None:
        stopwatch = self._stopwatch
        if not stopwatch._cuda:
            self._begun: Any = time.perf_counter()
            return
        self._begun, self._end = stopwatch._event(), stopwatch._event()
        self._stream = torch.cuda.current_stream(stopwatch._device)
        # an event is of the device of its first record, and the pool's are of this one
        self._begun.record(self._stream)

    def __exit__(self, error: object, *_: object) -> None:
        stopwatch = self._stopwatch
        if error is not None:
            return
        if not stopwatch._cuda:
            stopwatch._over.append((self._kind, time.perf_counter() - self._begun))
            return
        self._end.record(self._stream)
        stopwatch._running.append((self._kind, self._begun, self._end))


class Stopwatch:
    """How long pieces of work take: by host clock on the CPU, by events of the compute stream on a GPU.

    Noted as they are issued, handed out when they are over. One thread notes, one (the same or another) asks for what
    is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._over: deque[tuple[str, float]] = deque()
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._pool: deque[torch.cuda.Event] = deque()  # a new event costs a call into the driver

    def measure(self, kind: str) -> AbstractContextManager[None]:
        """Note how long what is done (CPU) or enqueued on the device's current stream (CUDA) inside takes."""
        return _Measured(self, kind)

    def finished(self) -> Iterator[tuple[str, float]]:
        """What is over, in the order in which it was noted, with its seconds; each once."""
        with on_device(self._device):
            while self._running:
                kind, start, end = self._running[0]
                if not end.query():  # type: ignore[no-untyped-call]
                    break
                self._running.popleft()
                self._over.append((kind, start.elapsed_time(end) / 1e3))
                self._pool.extend((start, end))
        while self._over:
            yield self._over.popleft()

    def _event(self) -> torch.cuda.Event:
        # one thread alone takes from the pool
        return self._pool.popleft() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# Compute and wait in a row are those of this many last seconds.
WINDOW_SECONDS = 10.0
# A reading of a GPU's clocks takes milliseconds in the driver.
GAUGE_SECONDS = 2.0

Gauges = Callable[[], Mapping[str, object]]


class Telemetry:
    """What a rank reports of itself and knows of the others."""

    def __init__(self, rank: int, size: int, device: torch.device, gauges: Gauges | None) -> None:
        self.table = Table()
        self.stopwatch = Stopwatch(device)
        self._rank, self._size = rank, size
        self._gauges = gauges
        self._read: Mapping[str, object] | None = None
        self._read_at = -NEVER
        self._seconds = {"compute": 0.0, "wait": 0.0}
        self._window: deque[tuple[float, float, float]] = deque()  # (when, compute, wait) so far, at past ticks
        self._tick = -1
        self._stragglers = Stragglers()
        self._looked = -NEVER
        self._reporting = threading.Lock()  # the watchdog, and whoever asks for telemetry

    def spent(self, kind: str, seconds: float) -> None:
        """Count seconds of one kind; others than compute and wait are not reported."""
        if kind in self._seconds:
            self._seconds[kind] += seconds

    def report(self, step: str, calls: int, nbytes: int) -> None:
        """Write this rank's row."""
        with self._reporting:
            for kind, seconds in self.stopwatch.finished():
                self.spent(kind, seconds)
            now = time.monotonic()
            compute, wait = self._seconds["compute"], self._seconds["wait"]
            while self._window and now - self._window[0][0] > WINDOW_SECONDS:
                self._window.popleft()
            self._window.append((now, compute, wait))
            since, compute_then, wait_then = self._window[0]
            if self._gauges is not None and now - self._read_at >= GAUGE_SECONDS:
                self._read, self._read_at = self._gauges() or None, now
            known = self.table.rows.get(self._rank)
            version = 1 if known is None else known.version + 1
            spent = compute - compute_then, wait - wait_then, now - since
            self.table.merge({self._rank: RankRow(version, time.time(), step, calls, nbytes, *spent, self._read)})

    def expect(self, step: str) -> None:
        """Note the first thing that is known of every rank, until it reports something itself."""
        if len(self.table.rows) < self._size:
            self.table.merge({rank: RankRow(0, time.time(), step) for rank in range(self._size)})

    def next_peer(self) -> int | None:
        """Whose table to pull now; None between two ticks of the gossip."""
        tick = int(time.time() / period(self._size))
        if tick == self._tick:
            return None
        self._tick = tick
        return peer_at(self._rank, self._size, tick)

    def warn(self, now: float) -> None:
        """Name a straggler, once per episode; rank 0 speaks for all."""
        if self._rank != 0 or now - self._looked < WINDOW_SECONDS:
            return
        self._looked = now  # once per window: what one long pause did is in one look only
        fresh = {report.rank: report.row for report in self.table.reports(time.time()) if report.age < WINDOW_SECONDS}
        straggler = self._stragglers.look(fresh, time.time())
        if straggler is not None:
            logger.warning("%s, since %s", straggler, time.strftime("%H:%M:%S", time.localtime(straggler.since)))
