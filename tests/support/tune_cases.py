"""Stand-ins for a compiler and for a GPU with its own clock, for tuning tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringattn.autotune.candidates import CompileResult
from ringattn.autotune.compile import KernelVariant
from ringattn.autotune.pool import JobFailure
from ringattn.autotune.search import TimedRun
from ringattn.kernels import Tile
from ringattn.kernels.tables import TuningPoint

POINT = TuningPoint("forward", "bf16", 128, 128, 4, "full", 8192)
TILES = [Tile(q, k, warps, 2) for q in (32, 64, 128) for k in (16, 32, 64) for warps in (4, 8)]
BASELINE = Tile(128, 128, 8, 2)


@dataclass
class SimulatedGpu:
    """GPU with given seconds per tile, on a clock that only its own work advances."""

    seconds: Callable[[Tile], float]
    seconds_with_transfer: Callable[[Tile], float | None] = lambda tile: None
    throttles: Callable[[int], tuple[str, ...]] = lambda call: ()  # throttle reasons by the number of the run
    errors: dict[Tile, str] = field(default_factory=dict)
    check: float = 0.25  # seconds of a check
    now: float = 0.0
    checked: list[Tile] = field(default_factory=list)
    timed: list[Tile] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def find_error(self, tile: Tile) -> str | None:
        self.checked.append(tile)
        self.now += self.check
        return self.errors.get(tile)

    def run(self, tile: Tile) -> TimedRun:
        seconds, beside = self.seconds(tile), self.seconds_with_transfer(tile)
        throttled = self.throttles(len(self.timed))
        self.timed.append(tile)
        self.now += seconds + (beside or 0.0)
        return TimedRun(seconds, throttled, {"sm_mhz": 1980.0 - 400 * len(throttled)}, beside)


def ignore_progress(part: str, more: int | None) -> None:
    pass


def compile_fine(job: KernelVariant) -> CompileResult:
    """Return a compile result without problems."""
    tile = job.tile
    return CompileResult((), tile.block_q * tile.block_k / 128 + tile.num_warps + tile.num_stages, "percent")


class InlinePool:
    """A ``Pool`` without processes that records the compiled variants."""

    def __init__(self, work: Callable[[KernelVariant], CompileResult] = compile_fine, workers: int = 1) -> None:
        self.work, self.seen = work, list[KernelVariant]()

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(
        self, jobs: Sequence[KernelVariant], done: Callable[[KernelVariant, Any], None], left: Callable[[], float]
    ) -> None:
        for job in jobs:
            if left() <= 0:
                return
            self.seen.append(job)
            try:
                result: CompileResult | JobFailure = self.work(job)
            except RuntimeError as error:
                result = JobFailure(str(error))
            done(job, result)


# job of worker processes


def number_job(number: int) -> str | int:
    """Raise, exit, hang, report ``TRITON_INTERPRET`` or return twice the number, depending on the number."""
    if number == 1:
        raise ValueError("one is\nnot taken")
    if number == 2:
        os._exit(7)
    if number == 3:
        time.sleep(600)
    return os.environ.get("TRITON_INTERPRET", "off") if number < 5 else 2 * number
