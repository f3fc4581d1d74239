"""How long pieces of work take: by host clock on the CPU, by events of the compute stream on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from .cuda_threads import on_device

What = tuple[Hashable, ...]


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

    @contextmanager
    def span(self, *what: Hashable) -> Iterator[None]:
        """Note how long what is done (CPU) or enqueued on the device's current stream (CUDA) inside takes."""
        if not self._cuda:
            begun = time.perf_counter()
            yield
            self._over.append((what, time.perf_counter() - begun))
            return
        start, end, stream = self._event(), self._event(), torch.cuda.current_stream(self._device)
        start.record(stream)  # an event is of the device of its first record, and the pool's are of this one
        yield
        end.record(stream)
        self._running.append((what, start, end))

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

    def _event(self) -> torch.cuda.Event:
        try:
            return self._pool.popleft()
        except IndexError:
            new: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            return new
