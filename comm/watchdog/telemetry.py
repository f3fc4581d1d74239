"""Telemetry without a central rank: durations of work, gossip between ranks, and stragglers.

At each tick a rank reads the table of one peer, merges it into its own and publishes the result. The distance to the
peer is a power of two that doubles from tick to tick, as in a dissemination barrier (Hensgen, Finkel and Manber, 1988).
If all ranks ticked at the same moment, log2(ranks) ticks would spread a report to all.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ..cuda_threads import on_device
from .deadlines import NEVER

logger = logging.getLogger(__name__)


# Seconds between two ticks of a rank, up to this many ranks. With more ranks the time grows in proportion, so that the
# bytes per second of a rank stay constant.
TICK_SECONDS, TICK_RANKS = 0.25, 32

# A straggler is reported if it is busy for at least this many times as long as the median of the others, ...
MIN_SLOW_FACTOR = 1.1
# ... the others wait in the ring for at least this share of all time, ...
MIN_WAIT_SHARE = 0.1
# ... its own wait is at most this fraction of theirs, ...
MAX_WAIT_RATIO = 0.4
# ... and all this holds at this many checks in a row. The episode ends after as many checks without it.
CONFIRMING_LOOKS = 4


class RankRow(NamedTuple):
    """A rank's report about itself."""

    version: int  # number of reports of the rank so far
    stamp: float  # seconds since the epoch, by the rank's own clock
    step: str  # last step of a call that the rank is known to have reached
    calls: int = 0  # phases (forward or backward) begun
    nbytes: int = 0  # sent and received since the ring opened
    compute: float = 0.0  # seconds of the last `window`
    wait: float = 0.0  # seconds of the last `window`
    window: float = 0.0  # seconds that compute and wait cover
    gauges: Mapping[str, object] | None = None  # clocks and throttle reasons of the GPU, if any


class Report(NamedTuple):
    """Latest step times of one rank that another rank has received, with their age."""

    rank: int
    age: float  # seconds since the report
    row: RankRow


class RankTable:
    """Newest known row of every rank."""

    def __init__(self) -> None:
        self.rows: dict[int, RankRow] = {}

    def merge(self, rows: Mapping[int, RankRow]) -> None:
        """Keep those of `rows` that are newer than the known rows of their ranks."""
        for rank, row in rows.items():
            known = self.rows.get(rank)
            if known is None or known.version < row.version:
                self.rows[rank] = row

    def reports(self, now: float) -> tuple[Report, ...]:
        """Return all rows in rank order, with their age at `now` (seconds since the epoch)."""
        return tuple(Report(rank, max(0.0, now - row.stamp), row) for rank, row in sorted(self.rows.items()))

    def pack(self) -> list[list[object]]:
        """Return the rows as lists for JSON, without field names, which would be most of the bytes."""
        return [[rank, *row] for rank, row in self.rows.items()]

    def merge_from_peer(self, packed: object) -> None:
        """Merge the table that a peer has packed. Do nothing if the peer has not published a table."""
        self.merge({rank: RankRow(*row) for rank, *row in packed} if isinstance(packed, list) else {})


def tick_period(size: int) -> float:
    """Return the seconds between two ticks of a rank in a group of this size."""
    return TICK_SECONDS * max(1.0, size / TICK_RANKS)


def gossip_peer(rank: int, size: int, tick: int) -> int:
    """Return the peer whose table a rank reads at a tick. Ticks are counted by the clock, so that all ranks agree.

    With 1,024 ranks that tick at random moments and clocks half a tick apart, every rank knows every other after 16
    ticks. A random peer at each tick would need 25.
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
            f"rank {self.rank} is a straggler: it is busy {self.factor:.2f} times as long as the median of the other "
            "ranks, which wait for it"
        )


def find_straggler(rows: Mapping[int, RankRow]) -> tuple[int, float] | None:
    """Return (rank, factor) of the rank that waits little while all others wait long, or None.

    The factor is the rank's busy time over the median of the others'.
    """
    waits = {rank: row.wait / row.window for rank, row in rows.items() if row.compute > 0 and row.window > 0}
    if len(waits) < 2:
        return None
    least = min(waits, key=lambda rank: (waits[rank], rank))
    others = [waits[rank] for rank in waits if rank != least]
    waited = statistics.median(others)
    # Count all time that is not waiting as busy, because a rank that enters the ring late is a straggler, too.
    factor = (1 - waits[least]) / max(1 - waited, 1e-9)
    if waited < MIN_WAIT_SHARE or waits[least] > MAX_WAIT_RATIO * waited or factor < MIN_SLOW_FACTOR:
        return None
    return least, factor


class StragglerTracker:
    """Tracker of the straggler, which reports each episode once."""

    def __init__(self) -> None:
        self.current: Straggler | None = None
        """Straggler of the current episode, if any."""
        self._candidate: int | None = None  # rank found by the last checks, if it differs from the current straggler
        self._checks = 0  # number of checks in a row that differ from the current straggler
        self._since = 0.0

    def update(self, rows: Mapping[int, RankRow], now: float) -> Straggler | None:
        """Check the rows of all ranks, and return the straggler if a new episode begins at `now`, else None."""
        slow = find_straggler(rows)
        rank = slow[0] if slow is not None else None
        if self.current is not None and rank == self.current.rank:
            assert slow is not None
            self.current, self._checks = self.current._replace(factor=slow[1]), 0
            return None
        if self.current is None and rank != self._candidate:
            self._candidate, self._checks, self._since = rank, 0, now
        self._checks += 1
        if self._checks < CONFIRMING_LOOKS:
            return None
        ended, self._checks = self.current is not None, 0
        self.current = None if ended or slow is None else Straggler(*slow, self._since)
        self._candidate = None
        return self.current


class _StopwatchSpan:
    """Context manager for one measured block. A class, because a generator costs several more calls in every hop."""

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
        # An event belongs to the device of its first record, and the pool's events to this device.
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
    """Stopwatch for blocks of work: by the host's clock on the CPU, by events of the compute stream on a GPU.

    Blocks are recorded when they are issued and returned when they are over. One thread records, and one thread (the
    same or another) collects.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._over: deque[tuple[str, float]] = deque()
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._pool: deque[torch.cuda.Event] = deque()  # a new event costs a call into the driver

    def measure(self, kind: str) -> AbstractContextManager[None]:
        """Measure the work done (CPU) or enqueued on the device's current stream (CUDA) inside the block.

        `kind` names the block for `pop_finished`.
        """
        return _StopwatchSpan(self, kind)

    def pop_finished(self) -> Iterator[tuple[str, float]]:
        """Yield the kind and the seconds of each finished block once, in the order of recording."""
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
        # Only one thread takes from the pool.
        return self._pool.popleft() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# Compute and wait of a row cover this many seconds.
WINDOW_SECONDS = 10.0
# Interval of reading a GPU's clocks, which takes milliseconds in the driver.
GAUGE_SECONDS = 2.0

Gauges = Callable[[], Mapping[str, object]]


class Telemetry:
    """Telemetry of one rank: its own durations, and the latest known reports of all ranks.

    ``names`` has the rank numbers for warnings.
    """

    def __init__(self, rank: int, size: int, device: torch.device, gauges: Gauges | None, names: Sequence[int]) -> None:
        self.table = RankTable()
        self.stopwatch = Stopwatch(device)
        self._rank, self._size, self._names = rank, size, names
        self._gauges = gauges
        self._gauge_values: Mapping[str, object] | None = None
        self._gauges_read_at = -NEVER
        self._seconds = {"compute": 0.0, "wait": 0.0}
        self._window: deque[tuple[float, float, float]] = deque()  # (when, compute, wait) so far, at past ticks
        self._tick = -1
        self._stragglers = StragglerTracker()
        self._checked_at = -NEVER
        self._reporting = threading.Lock()  # the watchdog and users may report at the same time

    def add_seconds(self, kind: str, seconds: float) -> None:
        """Add `seconds` to the time of one kind of work. Kinds other than "compute" and "wait" are ignored."""
        if kind in self._seconds:
            self._seconds[kind] += seconds

    def report(self, step: str, calls: int, nbytes: int) -> None:
        """Write this rank's row into the table. The arguments are fields of `RankRow`."""
        with self._reporting:
            for kind, seconds in self.stopwatch.pop_finished():
                self.add_seconds(kind, seconds)
            now = time.monotonic()
            compute, wait = self._seconds["compute"], self._seconds["wait"]
            while self._window and now - self._window[0][0] > WINDOW_SECONDS:
                self._window.popleft()
            self._window.append((now, compute, wait))
            since, compute_then, wait_then = self._window[0]
            if self._gauges is not None and now - self._gauges_read_at >= GAUGE_SECONDS:
                self._gauge_values, self._gauges_read_at = self._gauges() or None, now
            known = self.table.rows.get(self._rank)
            version = 1 if known is None else known.version + 1
            spent = compute - compute_then, wait - wait_then, now - since
            self.table.merge(
                {self._rank: RankRow(version, time.time(), step, calls, nbytes, *spent, self._gauge_values)}
            )

    def set_initial_step(self, step: str) -> None:
        """Give the ranks without a report a row with this step."""
        if len(self.table.rows) < self._size:
            self.table.merge({rank: RankRow(0, time.time(), step) for rank in range(self._size)})

    def next_peer(self) -> int | None:
        """Return the peer whose table to read now; None between two ticks."""
        tick = int(time.time() / tick_period(self._size))
        if tick == self._tick:
            return None
        self._tick = tick
        return gossip_peer(self._rank, self._size, tick)

    def warn_straggler(self, now: float) -> None:
        """Log the straggler once per episode. `now` is a time of `time.monotonic`. Only rank 0 logs."""
        if self._rank != 0 or now - self._checked_at < WINDOW_SECONDS:
            return
        self._checked_at = now  # look once per window, so that one long pause affects only one look
        fresh = {report.rank: report.row for report in self.table.reports(time.time()) if report.age < WINDOW_SECONDS}
        straggler = self._stragglers.update(fresh, time.time())
        if straggler is not None:
            straggler = straggler._replace(rank=self._names[straggler.rank])
            logger.warning("%s, since %s", straggler, time.strftime("%H:%M:%S", time.localtime(straggler.since)))
