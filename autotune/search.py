"""Spends time on a GPU where it tells most: successive halving over candidates that take turns.

Karnin, Koren, Somekh: "Almost Optimal Exploration in Multi-Armed Bandits" (ICML 2013), algorithm 3: everybody runs a
few times, the better half twice as often, and so on. Pure: what checks, what measures and what tells the time is handed
in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from ..kernels import Tile
from ..kernels.tables import Point
from .space import point_text, tile_text
from .store import Journal

FIRST_TURNS = 3  # readings of everybody: a median that one outlier does not move
FINALISTS = 3
FINAL_TURNS = 15  # quartiles that mean something
LEAST_TURNS = 5  # with fewer nothing is called measured
RETRIES = 3  # of a run taken while throttled; what throttles for longer is how this GPU is
COOL_DOWN = 0.5  # seconds before such a repeat

P = TypeVar("P")


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
    def of(cls, kept: Mapping[str, Any]) -> Reading:
        """Of what a journal has."""
        beside = None if kept["beside"] is None else float(kept["beside"])
        return cls(float(kept["seconds"]), tuple(map(str, kept["throttled"])), dict(kept["clocks"]), beside)


class Budget:
    """Seconds that may be spent, counted from now."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - self._now())

    def share(self, parts: int) -> Budget:
        """An even part of what is left: what one does not use, those after it have."""
        return Budget(self.left() / parts, self._now)


def median(readings: Sequence[Reading]) -> float:
    """Seconds."""
    return statistics.median(reading.seconds for reading in readings)


def median_beside(readings: Sequence[Reading]) -> float | None:
    """Seconds of the runs with a communication kernel beside them."""
    known = [reading.beside for reading in readings if reading.beside is not None]
    return statistics.median(known) if known else None


def spread(readings: Sequence[Reading]) -> float:
    """Half the interquartile range over the median: what a difference must exceed to mean something."""
    if len(readings) < 2:
        return 0.0
    low, _, high = statistics.quantiles([reading.seconds for reading in readings], n=4, method="inclusive")
    return (high - low) / 2 / median(readings)


def clocks_of(readings: Sequence[Reading]) -> dict[str, float | str | None]:
    """The median of each clock, and every reason why some run was throttled in spite of repeats."""
    names = dict.fromkeys(name for reading in readings for name in reading.clocks)
    reasons = dict.fromkeys(reason for reading in readings for reason in reading.throttled)
    found: dict[str, float | str | None] = {
        name: statistics.median(reading.clocks[name] for reading in readings if name in reading.clocks)
        for name in names
    }
    return found | {"throttled": ", ".join(reasons)}


def unthrottled(
    run: Callable[[], Reading], left: Callable[[], float], pause: Callable[[float], None] = time.sleep
) -> Reading:
    """A run with clocks as high as they get; after some repeats whatever it is."""
    reading = run()
    for _ in range(RETRIES):
        if not reading.throttled or left() <= 0:
            break
        pause(COOL_DOWN)
        reading = run()
    return reading


def halving(
    players: Iterable[P],
    baseline: P,
    run: Callable[[P], Reading],
    left: Callable[[], float],
    kept: Mapping[P, Sequence[Reading]] | None = None,
) -> tuple[dict[P, list[Reading]], bool]:
    """Everybody runs: all a few times in turns, the better half twice as often, and so on; the baseline always.

    What decides is the median alone plus that beside a transfer, as a hop of a ring is now the one, now the other. The
    same on every rank of a ring where ``run``, ``left`` and ``kept`` are.

    Args:
        left: seconds of the budget; once they are spent, those that ran are what is known.
        kept: readings of an interrupted search, which are not taken again.

    Returns:
        All readings, and whether the search ended by itself, not by its budget.
    """
    known: dict[P, list[Reading]] = {one: [*(kept or {}).get(one, ())] for one in players}
    going, turns = [*known], FIRST_TURNS
    while True:
        others = len(going) - (baseline in going)
        turns = turns if others > FINALISTS else FINAL_TURNS
        for number in range(turns):
            for one in going:
                if len(known[one]) > number:
                    continue
                if left() <= 0:
                    return known, False
                known[one].append(run(one))
        if others <= FINALISTS:
            return known, True
        # of an interrupted search there may be more readings: what was decided then is decided again
        rest = fastest({one: known[one][:turns] for one in going if one != baseline})
        going = [one for one in going if one == baseline] + rest[: max(FINALISTS, others // 2)]
        turns *= 2


def fastest(known: Mapping[P, Sequence[Reading]]) -> list[P]:
    """The fastest first, by as many readings as all of them have; who has none is left out."""
    heard = {one: readings for one, readings in known.items() if readings}
    count = min(map(len, heard.values()), default=0)

    def seconds(one: P) -> float:
        readings = heard[one][:count]
        return median(readings) + (median_beside(readings) or 0.0)

    return sorted(heard, key=seconds)


def planned(candidates: int) -> int:
    """Readings of a search over so many and a baseline, unless its budget ends it."""
    known, _ = halving(range(candidates + 1), 0, lambda one: Reading(1.0), lambda: 1.0)
    return sum(map(len, known.values()))


class Trials(Protocol):
    """What a GPU, or a test in its place, does with a tile at one point."""

    def wrong(self, tile: Tile) -> str | None:
        """What is wrong with its results beside the reference's; None where they are right."""

    def run(self, tile: Tile) -> Reading:
        """One run on fresh inputs with nothing beside it, and where there can be one beside a transfer."""


@dataclass(frozen=True)
class Measured:
    """The best tile of a point, and what it was compared with."""

    tile: Tile
    readings: Mapping[Tile, Sequence[Reading]]
    """Of every candidate that was timed at all."""
    baseline: Tile
    """The built-in default, in the same turns."""
    wrong: Mapping[Tile, str]
    """Candidates whose results were not right, with what was wrong."""
    complete: bool
    """The search ended by itself, not by its budget."""

    @property
    def best(self) -> Sequence[Reading]:
        """The readings of the best tile."""
        return self.readings[self.tile]

    @property
    def baseline_seconds(self) -> float | None:
        """None where the baseline's results are wrong, or it was not timed."""
        return median(self.readings[self.baseline]) if self.readings.get(self.baseline) else None


def search(
    point: Point,
    baseline: Tile,
    tiles: Sequence[Tile],
    trials: Trials,
    journal: Journal,
    left: Callable[[], float],
    *,
    pause: Callable[[float], None] = time.sleep,
    done: Callable[[], None] = lambda: None,
) -> Measured | None:
    """The best of ``tiles`` and the baseline; None where the budget ends before anything is measured.

    Every reading is in the journal, from which an interrupted search goes on as if it had not been.

    Args:
        pause: waits before a throttled run is repeated.
        done: called for every reading, also one that the journal had.
    """
    everyone = [*dict.fromkeys([baseline, *tiles])]
    keys = {tile: f"{point_text(point)} | {tile_text(tile)}" for tile in everyone}
    wrong: dict[Tile, str] = {}

    def is_right(tile: Tile) -> bool:
        """Whether a tile's results are; not known, and so not, once the budget is spent."""
        key = f"{keys[tile]} | wrong"
        if (known := journal.last(key)) is None:
            if left() <= 0:
                return False
            try:
                known = {"wrong": trials.wrong(tile)}
            except Exception as error:  # what breaks the device is not tried again by the next run
                journal.put(key, {"wrong": f"{type(error).__name__}: {error}"[:300]})
                raise
            journal.put(key, known)
        if known["wrong"] is not None:
            wrong[tile] = str(known["wrong"])
        return known["wrong"] is None

    def run(tile: Tile) -> Reading:
        reading = unthrottled(lambda: trials.run(tile), left, pause)
        journal.put(keys[tile], asdict(reading))
        done()
        return reading

    players = [tile for tile in everyone if is_right(tile)]
    in_time = left() > 0 or not players
    kept = {tile: [Reading.of(one) for one in journal.all(keys[tile])] for tile in players}
    for _ in range(sum(map(len, kept.values()))):
        done()
    known, complete = halving(players, baseline, run, left, kept)
    enough = {tile: readings[:FINAL_TURNS] for tile, readings in known.items() if len(readings) >= LEAST_TURNS}
    if not enough:
        return None
    final = max(map(len, enough.values()))
    best = fastest({tile: readings for tile, readings in enough.items() if len(readings) == final or not complete})[0]
    return Measured(best, {one: found for one, found in known.items() if found}, baseline, wrong, in_time and complete)
