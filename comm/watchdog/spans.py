"""How long pieces of work take: by host clock on the CPU, by events of the compute stream on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..cuda_threads import on_device

What = tuple[Hashable, ...]


def _new_event() -> torch.cuda.Event:
    new: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return new


class _Span:
    """One span; a class, as every hop has some and a generator costs several calls more."""

    __slots__ = ("_begun", "_end", "_spans", "_stream", "_what")

    def __init__(self, spans: Spans, what: What) -> None:
        self._spans, self._what = spans, what

    def __enter__(self) -> None:
        spans = self._spans
        if not spans._cuda:
            self._begun: Any = time.perf_counter()
            return
        pool = spans._pool  # one thread alone takes from it
        self._begun = pool.popleft() if pool else _new_event()
        self._end = pool.popleft() if pool else _new_event()
        self._stream = torch.cuda.current_stream(spans._device)
        # an event is of the device of its first record, and the pool's are of this one
        self._begun.record(self._stream)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        spans = self._spans
        if kind is not None:
            return
        if not spans._cuda:
            spans._over.append((self._what, time.perf_counter() - self._begun))
            return
        self._end.record(self._stream)
        spans._running.append((self._what, self._begun, self._end))


class Spans:
    """Notes spans as they are issued, hands them out when they are over.

    One thread notes, one (the same or another) asks for what is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._over: deque[tuple[What, float]] = deque()
        self._running: deque[tuple[What, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._pool: deque[torch.cuda.Event] = deque()  # a new event costs a call into the driver

    def span(self, *what: Hashable) -> AbstractContextManager[None]:
        """Note how long what is done (CPU) or enqueued on the device's current stream (CUDA) inside takes."""
        return _Span(self, what)

    def finished(self, *, wait: bool = False) -> Iterator[tuple[What, float]]:
        """What is over, in the order in which it was noted, with its seconds; each once. ``wait``: wait for all."""
        with on_device(self._device):
            while self._running:
                what, start, end = self._running[0]
                if wait:
                    end.synchronize()
                elif not end.query():  # type: ignore[no-untyped-call]
                    break
                self._running.popleft()
                self._over.append((what, start.elapsed_time(end) / 1e3))
                self._pool.extend((start, end))
        while self._over:
            yield self._over.popleft()
