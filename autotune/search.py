"""Search for the fastest candidate on a GPU by sequential halving.

Candidates are checked first. Then all candidates run a few times in turns, the better half twice as often, and so on
(Karnin, Koren, Somekh: "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013, algorithm 3). The functions that
check, measure and tell the time are arguments. A candidate is a tile of a kernel or a setting of a ring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..bench.common.timing import Samples

FIRST_TURNS = 3  # runs of each candidate in the first round; a median of 3 tolerates one outlier
FINALISTS = 3
FINAL_TURNS = 15  # enough runs for meaningful quartiles
MIN_TURNS = 5  # a candidate with fewer runs does not count as measured
RETRIES = 3  # repeats of a throttled run, then the reading counts
COOL_DOWN = 0.5  # seconds before a repeat

SLOWDOWN_REASONS = {
    "power cap", "hardware slowdown", "sync boost", "software thermal slowdown", "hardware thermal slowdown",
    "power brake",
}  # fmt: skip
"""Throttle reasons that slow down single runs, unlike an idle GPU or clocks that the user has set."""

C = TypeVar("C")


@dataclass(frozen=True)
class TimedRun:
    """Time of one run, and the clocks during the run."""

    seconds: float
    throttled: tuple[str, ...] = ()
    """Throttle reasons."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    seconds_with_transfer: float | None = None
    """Seconds of another run during a transfer; None on a device without transfers."""

    @classmethod
    def from_nvml(cls, seconds: float, clocks: Mapping[str, Any], beside: float | None = None) -> TimedRun:
        """Build a run from its seconds and the readings of a :class:`nvml.GpuReader` after it.

        ``beside`` is the seconds of another run during a transfer.
        """
        throttled = tuple(reason for reason in clocks.get("throttled", ()) if reason in SLOWDOWN_REASONS)
        return cls(seconds, throttled, {name: float(clocks[name]) for name in clocks if name != "throttled"}, beside)


class Budget:
    """Time budget that starts now."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self._ends - self._now())

    def share(self, parts: int) -> Budget:
        """Return a budget of one of ``parts`` equal parts of the remaining time."""
        return Budget(self.left() / parts, self._now)


def samples(readings: Sequence[TimedRun]) -> Samples:
    """Return the seconds of the runs as samples, which have a median and a spread."""
    return Samples(tuple(reading.seconds for reading in readings))


def median_with_transfer(readings: Sequence[TimedRun]) -> float | None:
    """Return the median seconds of the runs during a transfer, or None without such runs."""
    seconds = [reading.seconds_with_transfer for reading in readings if reading.seconds_with_transfer is not None]
    return statistics.median(seconds) if seconds else None


def median_clocks(readings: Sequence[TimedRun]) -> dict[str, float | str | None]:
    """Return the median of each clock, and all throttle reasons that remained after the repeats."""
    names = dict.fromkeys(name for reading in readings for name in reading.clocks)
    reasons = dict.fromkeys(reason for reading in readings for reason in reading.throttled)
    clocks: dict[str, float | str | None] = {
        name: statistics.median(reading.clocks[name] for reading in readings if name in reading.clocks)
        for name in names
    }
    return clocks | {"throttled": ", ".join(reasons)}


@dataclass(frozen=True)
class SearchResult(Generic[C]):
    """Result of a search."""

    best: C | None = None
    """Fastest candidate; None if the budget ended before enough runs."""
    readings: Mapping[C, Sequence[TimedRun]] = field(default_factory=dict)
    """Runs of every candidate with at least one."""
    errors: Mapping[C, str] = field(default_factory=dict)
    """Candidates that failed the check, with the reason."""
    is_complete: bool = True
    """Whether the search ended by itself, and not because its budget ended."""


def search(
    candidates: Iterable[C],
    baseline: C,
    check: Callable[[C], str | None],
    run: Callable[[C], TimedRun],
    seconds_left: Callable[[], float],
    *,
    pause: Callable[[float], None] = time.sleep,
    on_run: Callable[[], None] = lambda: None,
) -> SearchResult[C]:
    """Check all candidates and the baseline, then find the fastest.

    The baseline wins unless a candidate is faster by more than the noise. ``check`` returns the problem of a candidate
    or None, ``seconds_left`` the remaining seconds. ``pause`` waits before a throttled run is repeated, and ``on_run``
    is called after every reading. If ``check``, ``run`` and ``seconds_left`` return the same on all ranks of a ring, so
    does the search.
    """
    passed: list[C] = []
    wrong: dict[C, str] = {}
    for candidate in dict.fromkeys([baseline, *candidates]):
        if seconds_left() <= 0:
            return SearchResult(None, {}, wrong, False)
        if (problem := check(candidate)) is None:
            passed.append(candidate)
        else:
            wrong[candidate] = problem

    def run_unthrottled(candidate: C) -> TimedRun:
        reading = run(candidate)
        for _ in range(RETRIES):
            if not reading.throttled or seconds_left() <= 0:
                break
            pause(COOL_DOWN)
            reading = run(candidate)
        on_run()
        return reading

    readings, complete = successive_halving(passed, baseline, run_unthrottled, seconds_left)
    timed = {candidate: runs for candidate, runs in readings.items() if runs}
    return SearchResult(fastest_candidate(readings, baseline, complete), timed, wrong, complete)


def successive_halving(
    candidates: Iterable[C], baseline: C, run: Callable[[C], TimedRun], seconds_left: Callable[[], float]
) -> tuple[dict[C, list[TimedRun]], bool]:
    """Run all candidates in turns, then the better half twice as often, and so on; the baseline always stays.

    Returns:
        All runs, and True if the search ended by itself, and not because its budget ended.
    """
    readings: dict[C, list[TimedRun]] = {candidate: [] for candidate in candidates}
    remaining, turns = [*readings], FIRST_TURNS
    while True:
        others = [candidate for candidate in remaining if candidate != baseline]
        turns = turns if len(others) > FINALISTS else FINAL_TURNS
        for number in range(turns):
            for candidate in remaining:
                if len(readings[candidate]) > number:
                    continue
                if seconds_left() <= 0:
                    return readings, False
                readings[candidate].append(run(candidate))
        if len(others) <= FINALISTS:
            return readings, True
        ranked = sorted(others, key=lambda candidate: ranking_seconds(readings[candidate]))
        remaining = [candidate for candidate in remaining if candidate == baseline]
        remaining += ranked[: max(FINALISTS, len(others) // 2)]
        turns *= 2


def ranking_seconds(readings: Sequence[TimedRun]) -> float:
    """Return the ranking criterion: median alone plus median during a transfer, because a ring has both cases."""
    return samples(readings).median + (median_with_transfer(readings) or 0.0)


def fastest_candidate(readings: Mapping[C, Sequence[TimedRun]], baseline: C, complete: bool = True) -> C | None:
    """Return the fastest candidate, or the baseline if the gain is within the spread, or None without enough runs.

    If the search is not ``complete``, all candidates with MIN_TURNS runs are compared by equally many runs.
    """
    enough = {candidate: runs for candidate, runs in readings.items() if len(runs) >= MIN_TURNS}
    if not enough:
        return None
    turns = (max if complete else min)(map(len, enough.values()))
    times = {candidate: ranking_seconds(runs[:turns]) for candidate, runs in enough.items() if len(runs) >= turns}
    best = min(times, key=times.__getitem__)
    if baseline not in times:
        return best
    noise = max(samples(enough[candidate]).spread for candidate in (best, baseline))
    return best if times[best] < (1 - noise) * times[baseline] else baseline


def planned_runs(candidates: int) -> int:
    """Return the number of readings of a search over ``candidates`` and a baseline without a time limit."""
    readings, _ = successive_halving(range(candidates + 1), 0, lambda candidate: TimedRun(1.0), lambda: 1.0)
    return sum(map(len, readings.values()))
