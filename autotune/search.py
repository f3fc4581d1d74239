"""Spends time on a GPU where it tells most: candidates are checked, then successive halving while they take turns.

Karnin, Koren, Somekh: "Almost Optimal Exploration in Multi-Armed Bandits" (ICML 2013), algorithm 3: everybody runs a
few times, the better half twice as often, and so on. Pure: what checks, what measures and what tells the time is handed
in. A candidate is a tile of a kernel, or a setting of a whole ring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..bench.common.timing import Samples

FIRST_TURNS = 3  # readings of everybody: a median that one outlier does not move
FINALISTS = 3
FINAL_TURNS = 15  # quartiles that mean something
LEAST_TURNS = 5  # with fewer nothing is called measured
RETRIES = 3  # of a run taken while throttled; what throttles for longer is how this GPU is
COOL_DOWN = 0.5  # seconds before such a repeat

SLOWING = {
    "power cap", "hardware slowdown", "sync boost", "software thermal slowdown", "hardware thermal slowdown",
    "power brake",
}  # fmt: skip
"""Throttle reasons that make a run slower than the next one; an idle GPU and clocks that the user set do not."""

C = TypeVar("C")


@dataclass(frozen=True)
class Reading:
    """One timed run."""

    seconds: float
    throttled: tuple[str, ...] = ()
    """Why the clocks were lower than they could be."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    beside: float | None = None
    """Seconds of another run, with a communication kernel beside it; None where this device has none."""

    @classmethod
    def of(cls, seconds: float, clocks: Mapping[str, Any], beside: float | None = None) -> Reading:
        """A run with what NVML said after it."""
        throttled = tuple(reason for reason in clocks.get("throttled", ()) if reason in SLOWING)
        return cls(
            seconds, throttled, {name: float(clocks[name]) for name in clocks if name != "throttled"}, beside
        )  # fmt: skip


class Budget:
    """Seconds that may be spent, counted from now."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - self._now())

    def share(self, parts: int) -> Budget:
        """An even part of what is left: what one does not use, those after it have."""
        return Budget(self.left() / parts, self._now)


def samples(readings: Sequence[Reading]) -> Samples:
    """Their seconds, with median and spread."""
    return Samples(tuple(reading.seconds for reading in readings))


def median_beside(readings: Sequence[Reading]) -> float | None:
    """Seconds of the runs with a communication kernel beside them."""
    known = [reading.beside for reading in readings if reading.beside is not None]
    return statistics.median(known) if known else None


def clocks_of(readings: Sequence[Reading]) -> dict[str, float | str | None]:
    """The median of each clock, and every reason why some run was throttled in spite of repeats."""
    names = dict.fromkeys(name for reading in readings for name in reading.clocks)
    reasons = dict.fromkeys(reason for reading in readings for reason in reading.throttled)
    clocks: dict[str, float | str | None] = {
        name: statistics.median(reading.clocks[name] for reading in readings if name in reading.clocks)
        for name in names
    }
    return clocks | {"throttled": ", ".join(reasons)}


@dataclass(frozen=True)
class Measured(Generic[C]):
    """What a search found."""

    best: C | None
    """None where the budget ended before enough was measured."""
    readings: Mapping[C, Sequence[Reading]]
    """Of every candidate that was timed at all."""
    wrong: Mapping[C, str]
    """Candidates whose results were not right, or that do not run here, with why."""
    complete: bool
    """The search ended by itself, not by its budget."""


def search(
    candidates: Iterable[C],
    baseline: C,
    check: Callable[[C], str | None],
    run: Callable[[C], Reading],
    left: Callable[[], float],
    *,
    pause: Callable[[float], None] = time.sleep,
    done: Callable[[], None] = lambda: None,
) -> Measured[C]:
    """The best of the candidates and the baseline, which are checked and then timed in turns.

    The same on every rank of a ring where ``check``, ``run`` and ``left`` are.

    Args:
        check: what is wrong with the results of one; None where they are right.
        left: seconds of the budget.
        pause: waits before a throttled run is repeated.
        done: called for every reading.
    """
    right: list[C] = []
    wrong: dict[C, str] = {}
    for one in dict.fromkeys([baseline, *candidates]):
        if left() <= 0:
            return Measured(None, {}, wrong, False)
        if (problem := check(one)) is None:
            right.append(one)
        else:
            wrong[one] = problem

    def unthrottled(one: C) -> Reading:
        """A run with clocks as high as they get; after some repeats whatever it is."""
        reading = run(one)
        for _ in range(RETRIES):
            if not reading.throttled or left() <= 0:
                break
            pause(COOL_DOWN)
            reading = run(one)
        done()
        return reading

    known, complete = halving(right, baseline, unthrottled, left)
    return Measured(
        best_of(known, baseline, complete), {one: runs for one, runs in known.items() if runs}, wrong, complete
    )


def halving(
    candidates: Iterable[C], baseline: C, run: Callable[[C], Reading], left: Callable[[], float]
) -> tuple[dict[C, list[Reading]], bool]:
    """Everybody runs: all a few times in turns, the better half twice as often, and so on; the baseline always.

    Returns:
        All readings, and whether the search ended by itself, not by its budget.
    """
    known: dict[C, list[Reading]] = {one: [] for one in candidates}
    going, turns = [*known], FIRST_TURNS
    while True:
        others = [one for one in going if one != baseline]
        turns = turns if len(others) > FINALISTS else FINAL_TURNS
        for number in range(turns):
            for one in going:
                if len(known[one]) > number:
                    continue
                if left() <= 0:
                    return known, False
                known[one].append(run(one))
        if len(others) <= FINALISTS:
            return known, True
        better = sorted(others, key=lambda one: seconds_of(known[one]))[: max(FINALISTS, len(others) // 2)]
        going = [one for one in going if one == baseline] + better
        turns *= 2


def seconds_of(readings: Sequence[Reading]) -> float:
    """What decides: the median alone plus that beside a transfer, as a hop of a ring is now the one, now the other."""
    return samples(readings).median + (median_beside(readings) or 0.0)


def best_of(known: Mapping[C, Sequence[Reading]], baseline: C, complete: bool = True) -> C | None:
    """The fastest of those that ran to the end; the baseline, where it is not faster by more than the spread.

    None where nobody ran often enough.
    """
    enough = {one: runs for one, runs in known.items() if len(runs) >= LEAST_TURNS}
    if not enough:
        return None
    turns = (max if complete else min)(map(len, enough.values()))
    times = {one: seconds_of(runs[:turns]) for one, runs in enough.items() if len(runs) >= turns}
    best = min(times, key=times.__getitem__)
    if baseline not in times:
        return best
    noise = max(samples(enough[one]).spread for one in (best, baseline))
    return best if times[best] < (1 - noise) * times[baseline] else baseline


def planned(candidates: int) -> int:
    """Readings of a search over so many and a baseline, unless its budget ends it."""
    known, _ = halving(range(candidates + 1), 0, lambda one: Reading(1.0), lambda: 1.0)
    return sum(map(len, known.values()))
