"""How long work takes: noted as it is issued, handed out when it is over, never waited for unless asked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ringattn.comm.watchdog.telemetry import Spans

CUDA = torch.device("cuda", 1)


class Event:
    """A timing event; the stream reaches it when the test says so."""

    made = 0
    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self.when: float | None = None
        self.over = False
        self.waits = 0

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.when, self.over = Event.clock, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.waits += 1
        self.over = True

    def elapsed_time(self, end: Event) -> float:
        assert self.when is not None and end.when is not None and end.over
        return 1e3 * (end.when - self.when)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    Event.made, Event.clock = 0, 0.0
    return Event


def issue(spans: Spans, what: str, seconds: float) -> tuple[Any, Any]:
    with spans.span(what, 3):
        Event.clock += seconds
    _, start, end = spans._running[-1]
    return start, end


def test_the_host_s_clock() -> None:
    spans = Spans(torch.device("cpu"))
    with spans.span("compute", 1):
        time.sleep(0.02)
    with spans.span("wait"):
        pass
    (first, seconds), (second, _) = spans.finished()
    assert (first, second) == (("compute", 1), ("wait",))
    assert 0.02 <= seconds < 1
    assert list(spans.finished()) == []


def test_a_span_on_a_stream_comes_out_when_it_is_over(events: type[Event]) -> None:
    spans = Spans(CUDA)
    _, first = issue(spans, "compute", 2.0)
    _, second = issue(spans, "wait", 1.0)
    second.over = True
    assert list(spans.finished()) == []  # in order: the stream has not reached the one before
    first.over = True
    assert list(spans.finished()) == [(("compute", 3), 2.0), (("wait", 3), 1.0)]
    assert first.waits == second.waits == 0


def test_events_are_used_again(events: type[Event]) -> None:
    spans = Spans(CUDA)
    for _ in range(5):
        _, end = issue(spans, "compute", 1.0)
        end.over = True
        assert list(spans.finished()) == [(("compute", 3), 1.0)]
    assert events.made == 2


def test_whoever_wants_all_waits_for_all(events: type[Event]) -> None:
    spans = Spans(CUDA)
    ends = [issue(spans, "compute", 1.0)[1] for _ in range(3)]
    assert len(list(spans.finished(wait=True))) == 3
    assert [end.waits for end in ends] == [1, 1, 1]


def test_work_that_raises_leaves_no_span(events: type[Event]) -> None:
    for device in (CUDA, torch.device("cpu")):
        spans = Spans(device)
        with pytest.raises(KeyError), spans.span("compute"):
            raise KeyError
        assert list(spans.finished(wait=True)) == []
