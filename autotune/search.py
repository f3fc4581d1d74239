"""Spends time on a GPU where it tells most: successive halving over candidates that take turns.

Karnin, Koren, Somekh: "Almost Optimal Exploration in Multi-Armed Bandits" (ICML 2013), algorithm 3: everybody runs a
few times, the better half twice as often, and so on. A run is one alone and one beside a transfer, as a hop of a ring
is now the one, now the other, and the sum of the two decides. Pure: what checks, what measures and what tells the time
is handed in, and every reading is in a journal, from which an interrupted search goes on as if it had not been.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

from ..kernels import Tile
from ..kernels.tables import Point
from .journal import Journal
from .ranking import point_text, tile_text

FIRST_TURNS = 3  # readings of everybody: a median that one outlier does not move
FINALISTS = 3
FINAL_TURNS = 15  # quartiles that mean something
LEAST_TURNS = 5  # with fewer nothing is called measured
RETRIES = 3  # of a run taken while throttled; what throttles for longer is how this GPU is
COOL_DOWN = 0.5  # seconds before such a repeat

KINDS = ALONE, BESIDE = "alone", "beside"


@dataclass(frozen=True)
class Reading:
    """One timed run."""

    seconds: float
    throttled: tuple[str, ...] = ()
    """Why the clocks were lower than they could be."""
    clocks: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "throttled": list(self.throttled), "clocks": dict(self.clocks)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Reading:
        """Of what :meth:`as_json` gave."""
        return cls(float(told["seconds"]), tuple(map(str, told["throttled"])), dict(told["clocks"]))


class Trials(Protocol):
    """What a GPU, or a test in its place, does with a tile at one point."""

    def wrong(self, tile: Tile) -> str | None:
        """What is wrong with its results beside the reference's; None where they are right."""

    def alone(self, tile: Tile) -> Reading:
        """One run on fresh inputs with nothing beside it."""

    def beside(self, tile: Tile) -> Reading | None:
        """One run with a communication kernel beside it; None where this device has none."""


class Budget:
    """Seconds that may be spent, counted from now."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._ends = now, now() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - self._now())

    def share(self, parts: int) -> Budget:
        """An even part of what is left: what one does not use, those after it have."""
        return Budget(self.left / parts, self._now)


@dataclass(frozen=True)
class Measured:
    """The best tile of a point, and what it was compared with."""

    tile: Tile
    alone: tuple[Reading, ...]
    beside: tuple[Reading, ...]
    baseline: tuple[Reading, ...]
    """Of the built-in default, alone, in the same turns."""
    wrong: Mapping[Tile, str]
    """Candidates whose results were not right, with what was wrong."""
    complete: bool
    """The search ended by itself, not by its budget."""
    seconds: Mapping[Tile, float] = field(default_factory=dict)
    """The median, alone, of every candidate that was timed at all."""


def median(readings: Sequence[Reading]) -> float:
    """Seconds."""
    return statistics.median(reading.seconds for reading in readings)


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
    told: dict[str, float | str | None] = {
        name: statistics.median(reading.clocks[name] for reading in readings if name in reading.clocks)
        for name in names
    }
    return told | {"throttled": ", ".join(reasons)}


def planned(candidates: int) -> int:
    """Readings that a search over so many tiles takes, with the baseline, unless its budget ends it."""
    total, taken, turns = 0, 0, FIRST_TURNS
    while candidates > FINALISTS:
        total += (candidates + 1) * (turns - taken)
        taken, turns, candidates = turns, 2 * turns, max(FINALISTS, candidates // 2)
    return len(KINDS) * (total + (candidates + 1) * max(0, FINAL_TURNS - taken))


class Search:
    """The search at one point.

    Args:
        baseline: the built-in default; a candidate, and what the others are compared with in every turn.
        pause: waits before a throttled run is repeated.
        told: called for every reading, also one that the journal had.
    """

    def __init__(
        self,
        point: Point,
        baseline: Tile,
        trials: Trials,
        journal: Journal,
        budget: Budget,
        *,
        pause: Callable[[float], None] = time.sleep,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._baseline, self._trials = point_text(point), baseline, trials
        self._journal, self._budget, self._pause, self._told = journal, budget, pause, told
        self._found: dict[tuple[str, Tile], list[Reading]] = {}
        self._wrong: dict[Tile, str] = {}
        self._kinds: tuple[str, ...] = KINDS

    def run(self, tiles: Sequence[Tile]) -> Measured | None:
        """The best of ``tiles`` and the baseline; None where the budget ends before anything is measured."""
        everyone = list(dict.fromkeys([self._baseline, *tiles]))
        players = [tile for tile in everyone if self._is_right(tile)]
        turns, complete = FIRST_TURNS, self._budget.left > 0 or not players
        while len(players) - (self._baseline in players) > FINALISTS:
            complete = self._turns(players, turns)
            players = self._better_half(players, turns)
            if not complete:
                break
            turns *= 2
        complete = complete and self._turns(players, FINAL_TURNS)
        return self._best(players, complete)

    def _is_right(self, tile: Tile) -> bool:
        """Whether a tile's results are; not known, and so not, once the budget is spent."""
        key = f"{self._name} | {tile_text(tile)} | wrong"
        if (known := self._journal.last(key)) is None:
            if not self._budget.left:
                return False
            try:
                known = {"wrong": self._trials.wrong(tile)}
            except Exception as error:  # what breaks the device is not tried again by the next run
                self._journal.put(key, {"wrong": f"{type(error).__name__}: {error}"[:300]})
                raise
            self._journal.put(key, known)
        if known["wrong"] is not None:
            self._wrong[tile] = str(known["wrong"])
        return known["wrong"] is None

    def _turns(self, players: Sequence[Tile], turns: int) -> bool:
        """Readings until each player has ``turns``, everybody once before anybody twice; False: the budget is spent."""
        for number, tile in product(range(turns), players):
            for kind in self._kinds:
                found = self._readings(kind, tile)
                if len(found) > number:
                    continue
                if not self._budget.left:
                    return False
                reading = self._unthrottled(kind, tile)
                if reading is None:  # this device has nothing to run beside
                    self._kinds = (ALONE,)
                    continue
                found.append(reading)
                self._journal.put(f"{self._name} | {tile_text(tile)} | {kind}", reading.as_json())
                self._told()
        return True

    def _readings(self, kind: str, tile: Tile) -> list[Reading]:
        """All that there are, those of interrupted runs first."""
        if (kind, tile) not in self._found:
            kept = self._journal.all(f"{self._name} | {tile_text(tile)} | {kind}")
            self._found[kind, tile] = [Reading.of(told) for told in kept]
            for _ in kept:
                self._told()
        return self._found[kind, tile]

    def _unthrottled(self, kind: str, tile: Tile) -> Reading | None:
        """A run with clocks as high as they get; after some repeats whatever it is."""
        measure = self._trials.alone if kind == ALONE else self._trials.beside
        reading = measure(tile)
        for _ in range(RETRIES):
            if reading is None or not reading.throttled or not self._budget.left:
                break
            self._pause(COOL_DOWN)
            reading = measure(tile)
        return reading

    def _better_half(self, players: Sequence[Tile], turns: int) -> list[Tile]:
        """By the turns that all of them had, and the baseline in any case; who had none is out."""
        heard = [tile for tile in players if self._readings(ALONE, tile)]
        # of earlier runs there may be more readings: what was decided then is decided again
        rest = self._sorted([tile for tile in heard if tile != self._baseline], heard, turns)
        return [tile for tile in heard if tile == self._baseline] + rest[: max(FINALISTS, len(rest) // 2)]

    def _sorted(self, tiles: Sequence[Tile], among: Sequence[Tile], turns: int) -> list[Tile]:
        """The fastest first, by as many of the first ``turns`` readings of each kind as all ``among`` them have."""
        common = {kind: min([turns, *(len(self._readings(kind, one)) for one in among)]) for kind in KINDS}

        def seconds(tile: Tile) -> float:
            return sum(median(self._readings(kind, tile)[:count]) for kind, count in common.items() if count)

        return sorted(tiles, key=seconds)

    def _best(self, players: Sequence[Tile], complete: bool) -> Measured | None:
        known = [tile for tile in players if len(self._readings(ALONE, tile)) >= LEAST_TURNS]
        if not known:
            return None
        tile = self._sorted(known, known, FINAL_TURNS)[0]
        alone, beside, baseline = (
            tuple(self._readings(*key)) for key in ((ALONE, tile), (BESIDE, tile), (ALONE, self._baseline))
        )
        timed = {one: median(found) for (kind, one), found in self._found.items() if kind == ALONE and found}
        return Measured(tile, alone, beside, baseline, dict(self._wrong), complete, timed)
