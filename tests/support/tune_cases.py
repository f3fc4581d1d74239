"""Stand-ins for what tuning is handed: a compiler, and a GPU with a clock of its own."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ringattn.autotune import candidates
from ringattn.autotune.candidates import Verdict
from ringattn.autotune.compile import Variant
from ringattn.autotune.pool import Failure
from ringattn.autotune.search import Reading
from ringattn.kernels import Tile
from ringattn.kernels.tables import Point

POINT = Point("forward", "bf16", 128, 128, 4, "full", 8192)
TILES = [Tile(q, k, warps, 2) for q in (32, 64, 128) for k in (16, 32, 64) for warps in (4, 8)]
BASELINE = Tile(128, 128, 8, 2)


@dataclass
class StandIn:
    """A GPU whose tiles take the seconds they are told, on a clock that only its work moves."""

    seconds: Callable[[Tile, int], float]
    """Of a tile's n-th run."""
    besides: Callable[[Tile], float | None] = lambda tile: None
    throttles: Callable[[int], tuple[str, ...]] = lambda call: ()
    """By the number of the call."""
    bad: dict[Tile, str] = field(default_factory=dict)
    check: float = 0.25
    """Seconds of a check."""
    dies_at: int | None = None
    """The call that the user interrupts."""
    now: float = 0.0
    calls: list[tuple[str, Tile]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    _runs: Counter[Tile] = field(default_factory=Counter)

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def wrong(self, tile: Tile) -> str | None:
        self._called("wrong", tile, self.check)
        return self.bad.get(tile)

    def run(self, tile: Tile) -> Reading:
        seconds, beside = self.seconds(tile, self._runs[tile]), self.besides(tile)
        throttled = self.throttles(len(self.calls))
        self._called("run", tile, seconds + (beside or 0.0))
        self._runs[tile] += 1
        return Reading(seconds, throttled, {"sm_mhz": 1980.0 - 400 * len(throttled)}, beside)

    def _called(self, kind: str, tile: Tile, seconds: float) -> None:
        if len(self.calls) == self.dies_at:
            self.dies_at = None
            raise KeyboardInterrupt
        self.calls.append((kind, tile))
        self.now += seconds


def no_progress(part: str, more: int | None) -> None:
    """Shows nothing."""


class AtOnce:
    """A ``Pool`` without processes."""

    def __init__(self, work: Callable[[Variant], Verdict], workers: int) -> None:
        self._work = work

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, jobs: Sequence[Variant], done: Callable[[Variant, Any], None], left: Callable[[], float]) -> None:
        for job in jobs:
            if left() <= 0:
                return
            try:
                result: Verdict | Failure = self._work(job)
            except RuntimeError as error:
                result = Failure(str(error))
            done(job, result)


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """Whatever is compiled from now on is compiled here."""
    patch.setattr(candidates, "Pool", AtOnce)


# what worker processes are given to do


def twice(number: int) -> int:
    return 2 * number


def by_number(number: int) -> str:
    """Fails, dies or hangs where the number says so; else tells whether kernels would be interpreted."""
    if number == 1:
        raise ValueError("one is\nnot taken")
    if number == 2:
        os._exit(7)
    if number == 3:
        time.sleep(600)
    return os.environ.get("TRITON_INTERPRET", "off")
