"""Where the time of a call went: compute and wait per hop, by host clock on the CPU, by CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .schedule import Hop


@dataclass(frozen=True)
class Span:
    """``seconds`` that one rank spent on ``kind`` ("compute" or "wait") at a hop of the forward or the backward."""

    phase: str
    kind: str
    hop: int
    seconds: float


class Trace:
    """Collects spans while :meth:`Ring.record` is open."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: list[Span] = []
        self._events: list[tuple[str, str, int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, phase: str, kind: str, hop: Hop) -> Iterator[None]:
        if self._device.type == "cuda":
            event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((phase, kind, hop.index, start, end))
            return
        begun = time.perf_counter()
        yield
        self._host.append(Span(phase, kind, hop.index, time.perf_counter() - begun))

    @property
    def spans(self) -> list[Span]:
        """All spans so far; on a GPU this waits for them."""
        for phase, kind, hop, start, end in self._events:
            end.synchronize()
            self._host.append(Span(phase, kind, hop, start.elapsed_time(end) / 1e3))
        self._events.clear()
        return list(self._host)

    def seconds(self, kind: str, hop: int | None = None) -> float:
        """Sum over the spans of one kind, of one hop or of all."""
        return sum(span.seconds for span in self.spans if span.kind == kind and hop in (None, span.hop))
