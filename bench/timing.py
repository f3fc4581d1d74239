"""The one way to time: candidates take turns, so that what the machine does meanwhile falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Step = Callable[[], object]

LEAST, MOST = 5, 50  # samples of a candidate where its own speed decides: a median, and an end
FLUSH_BYTES = 256 << 20  # more than the L2 of any GPU
HOST_AHEAD_CYCLES = 2_000_000  # about 1 ms: longer than the host takes to enqueue any step


@dataclass(frozen=True)
class Samples:
    """Seconds of each timed run of one candidate."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median: what a difference must exceed to mean something."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def as_json(self, unit: str = "s") -> dict[str, Any]:
        return {"median": self.median, "spread": self.spread, "unit": unit, "samples": list(self.seconds)}


class Team:
    """Who has to be ready before a run starts, and over before its time counts: this process alone."""

    def ready(self) -> None:
        """Return when every member may start."""

    def slowest(self, seconds: float) -> float:
        """The longest time of any member."""
        return seconds


@dataclass
class Clock:
    """Times one run on a device: by the host's clock on the CPU, by CUDA events on a GPU.

    On a GPU the cache is flushed first and the device kept busy while the host enqueues the run, so that neither warm
    inputs nor the host's speed are in the time.
    """

    device: torch.device
    team: Team = field(default_factory=Team)
    _flush: torch.Tensor | None = None

    def __call__(self, step: Step) -> float:
        """Seconds of one run, on the slowest member of the team."""
        self.team.ready()
        seconds = self._on_gpu(step) if self.device.type == "cuda" else self._on_host(step)
        return self.team.slowest(seconds)

    @staticmethod
    def _on_host(step: Step) -> float:
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun

    def _on_gpu(self, step: Step) -> float:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(HOST_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self._flush.zero_()
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def interleaved(
    candidates: Mapping[str, Step],
    clock: Clock,
    *,
    repeats: int,
    warmup: int = 1,
    limits: Mapping[str, int] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Time every candidate ``repeats`` times, in turns: a, b, c, a, b, c, …

    Args:
        candidates: what to run, by name; each does its whole work on the current stream, and every member of the team
            calls with the same names.
        clock: of the device.
        repeats: timed runs of each.
        warmup: runs of each before the first timed one.
        limits: candidates that run fewer times, for they are slow.
        progress: called after every run.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(-warmup, repeats):
        for name, step in candidates.items():
            if number >= (limits or {}).get(name, repeats):
                continue
            seconds = clock(step)
            if number >= 0:
                taken[name].append(seconds)
            progress()
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def repeats_within(seconds: float, one_round: float) -> int:
    """How many rounds of ``one_round`` seconds to take where ``seconds`` are to be spent."""
    return min(max(int(seconds / max(one_round, 1e-9)), LEAST), MOST)
