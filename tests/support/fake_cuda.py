"""A stand-in for the parts of ``torch.cuda`` that the benches call, so that their GPU code runs on the CPU."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch

MULTIPROCESSORS = 18  # two more than the copy kernel has blocks


class FakeEvent:
    """The host's clock in place of the device's: work is over when its call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.at: float | None = None

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self.at is not None, "waited for an event that nobody recorded"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed and end.timed, "an event without timing cannot be read"
        assert self.at is not None and end.at is not None and end.at >= self.at
        return (end.at - self.at) * 1e3


class FakeStream(SimpleNamespace):
    """Its work is over when its call returns."""

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class FakeGraph:
    """Runs again what was run while it was captured."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def replay(self) -> None:
        self._calls.append("replay")


class FakeCuda:
    """What was called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.calls.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.calls.append("sleep"))
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self.calls))
        monkeypatch.setattr(torch.cuda, "graph", self._graph)

    def _graph(self, graph: FakeGraph, stream: object = None) -> AbstractContextManager[None]:
        self.calls.append("capture")
        return nullcontext()

    def _stream(self, stream: object) -> AbstractContextManager[None]:
        self.calls.append(f"stream of priority {getattr(stream, 'priority', 0)}")
        return nullcontext()
