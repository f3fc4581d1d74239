"""Timelines: a trace that Perfetto opens and that reads back as it was; what is refused."""

import json

import pytest

from ringattn.bench.timeline.events import LANES, Event, Timeline, as_chrome, from_chrome

EVENTS = (
    Event(0, "compute", "forward", 0, 0.0, 0.5, "own keys"),
    Event(0, "send", "forward", 0, 0.0, 0.25, "K/V of 0", 1 << 20),
    Event(1, "receive", "forward", 0, 0.0, 0.25, "K/V of 0", 1 << 20),
    Event(1, "slot 1", "forward", 1, 0.25, 1.5, "K/V of 0"),
    Event(1, "wait", "backward", 1, 1.0, 1.25),
)


def test_a_trace_reads_back_as_it_was() -> None:
    timeline = Timeline("two ranks", "measured", 2, EVENTS)
    assert from_chrome(json.loads(json.dumps(as_chrome(timeline)))) == timeline
    assert timeline.seconds == 1.5


def test_a_trace_has_a_process_per_rank_and_a_thread_per_lane() -> None:
    trace = as_chrome(Timeline("two ranks", "predicted", 2, EVENTS))
    named = [one for one in trace["traceEvents"] if one["name"] == "thread_name"]
    assert [one["args"]["name"] for one in named if one["pid"] == 1] == [*LANES, "slot 1"]
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert [(one["ts"], one["dur"]) for one in spans][-1] == (1e6, 250000.0)


def test_what_is_no_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is 'ringattn timeline 9': a timeline says"):
        from_chrome({"otherData": {"schema": "ringattn timeline 9"}, "traceEvents": []})
    with pytest.raises(ValueError, match="source is 'guessed': it must be one of measured, predicted"):
        Timeline("", "guessed", 1, ())
    with pytest.raises(ValueError, match="an event is of rank 2: ranks are 0 to 1"):
        Timeline("", "measured", 2, (Event(2, "compute", "forward", 0, 0, 1),))
