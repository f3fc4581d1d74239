"""Timing: candidates take turns, so that noise of the machine affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .flags import resolve_timer

Step = Callable[[], object]

MIN_SAMPLES, MAX_SAMPLES = 5, 50  # bounds on the samples when a time budget decides
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
        """Half the interquartile range divided by the median; differences below it are noise."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


class DeviceStopwatch:
    """Total time of several blocks of code, by the host's clock on the CPU and by CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def count_block(self) -> Iterator[None]:
        """Time the ``with`` block and add its time to the total."""
        if self._on_gpu:
            event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        at = time.perf_counter()
        yield
        self._host += time.perf_counter() - at

    @property
    def seconds(self) -> float:
        """Seconds so far; on a GPU, valid after all work has finished."""
        on_gpu: float = sum(start.elapsed_time(end) for start, end in self._events)
        return self._host + on_gpu / 1e3

    def lap_seconds(self) -> float:
        """Wait for running work; return the total since the last call of this method and set it to 0."""
        for _, end in self._events:
            end.synchronize()
        seconds, self._host = self.seconds, 0.0
        self._events.clear()
        return seconds


class RankTeam:
    """All ranks of the default process group, which start every timed run together and of which the slowest counts."""

    def wait_until_ready(self) -> None:
        """Wait over gloo until every rank is ready to start."""
        self.slowest_seconds(0.0)

    def slowest_seconds(self, seconds: float) -> float:
        """Return the longest time of any rank."""
        longest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()


def event_seconds(step: Step, prepare: Step = lambda: None) -> float:
    """Return the device's seconds of ``step`` on the current stream, which is busy while the host posts.

    ``prepare`` is enqueued before and not timed.
    """
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(HOST_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    prepare()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class StepTimer:
    """Times single runs of a step on a device by one of ``TIMERS``; an unsuitable timer raises typer.BadParameter.

    On a GPU it first flushes the L2 cache. With the timers events and graph it keeps the device busy while the host
    enqueues, so that the host's speed does not count.
    """

    device: torch.device
    team: RankTeam | None = None  # None: this process alone
    timer: str = ""  # empty: the device's default
    _flush: torch.Tensor | None = None
    _capturing: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        self.timer = resolve_timer(self.device.type, self.timer)

    def __call__(self, step: Step) -> float:
        """Return the seconds of one run, on the slowest rank of the team."""
        if self.team is not None:
            self.team.wait_until_ready()
        seconds = self._by_host(step) if self.timer == "clock" else self._by_events(step)
        return seconds if self.team is None else self.team.slowest_seconds(seconds)

    def capture_stream(self) -> AbstractContextManager[object]:
        """Return the context in which steps must be prepared: with the timer graph, the stream that graphs capture."""
        if self.timer != "graph":
            return nullcontext()
        if self._capturing is None:
            make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
            self._capturing = make(device=self.device)
        context: Callable[..., AbstractContextManager[object]] = torch.cuda.stream
        return context(self._capturing)

    def prepare_step(self, step: Step) -> Step:
        """Return the function to time: ``step``, or with timer graph its replay; RuntimeError if capturing fails."""
        if self.timer != "graph":
            return step
        step()  # compile and allocate before the capture
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._capturing):
            step()
        return graph.replay

    def _by_host(self, step: Step) -> float:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self._flush_cache()
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _by_events(self, step: Step) -> float:
        torch.cuda.synchronize(self.device)
        return event_seconds(step, self._flush_cache)

    def _flush_cache(self) -> None:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._flush.zero_()


def time_in_turns(
    candidates: Mapping[str, Step],
    clock: StepTimer,
    *,
    repeats: int,
    warmup: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Time candidates in turns (a, b, c, a, b, c, …), ``repeats`` times each after ``warmup`` runs; return the samples.

    Each candidate enqueues its work on the current stream. Every process of the clock's team passes the same names.
    ``progress`` is called after every run.
    """
    seconds_by_name: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(-warmup, repeats):
        for name, step in candidates.items():
            seconds = clock(step)
            if number >= 0:
                seconds_by_name[name].append(seconds)
            progress()
    return {name: Samples(tuple(seconds)) for name, seconds in seconds_by_name.items()}


def repeats_within(seconds: float, one_round: float) -> int:
    """Return how many rounds of ``one_round`` seconds fit into ``seconds``, between 5 and 50 (MIN_, MAX_SAMPLES)."""
    return min(max(int(seconds / max(one_round, 1e-9)), MIN_SAMPLES), MAX_SAMPLES)
