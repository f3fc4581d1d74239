"""Timelines: when each rank computes, sends, receives and waits, measured or predicted.

They are stored as Chrome traces (JSON object format of the Trace Event document), which Perfetto opens. A process is a
rank, a thread a lane, and a complete event ("X") a span in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...kernels.json_files import convert_json

SCHEMA = "ringattn timeline 2"
LANES = ("compute", "wait", "send", "receive")
"""Lanes of every rank. Below them are slots in use: "slot 0", "slot 1" … for K/V, and "dK/dV slot 0" …"""
PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)
MACHINE = {"threads", "seed", "device", "transport"}
"""Fields of a measured call that describe the machine; predicted calls do not have them."""
IGNORED = MACHINE | {"nodes"}  # only predictions have `nodes`
MICRO = 1e6
MOST_RANKS = 1024  # per file; a figure of more is unreadable


@dataclass(frozen=True)
class Event:
    """One activity of a rank on a lane from ``begin`` to ``end``, in seconds from the start of the call."""

    rank: int
    lane: str  # one of LANES, "slot N" or "dK/dV slot N"
    phase: str  # "forward" or "backward"
    hop: int
    begin: float
    end: float
    name: str = ""  # the data, such as "K/V of 3" or "dQ"
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """Events of one call on all its ranks, of a forward or of a forward and backward."""

    title: str
    source: str  # one of SOURCES
    world: int
    events: tuple[Event, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """JSON data: "call" (shape, layout, mask) and "provenance"."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}: it must be one of {', '.join(SOURCES)}")
        unknown = [event.rank for event in self.events if not 0 <= event.rank < self.world]
        if unknown:
            raise ValueError(f"an event has rank {unknown[0]}: it must be between 0 and {self.world - 1}")

    @property
    def seconds(self) -> float:
        """Time until the last event of any rank ends."""
        return max((event.end for event in self.events), default=0.0)


def is_same_call(one: Timeline, other: Timeline) -> bool:
    """Return True if both timelines say which call they are of and the calls are equal; machines may differ."""
    call, other_call = one.about.get("call"), other.about.get("call")
    if not (isinstance(call, dict) and isinstance(other_call, dict) and call and other_call):
        return False
    return all(call.get(name) == other_call.get(name) for name in {*call, *other_call} - IGNORED)


def lane_order(lane: str) -> tuple[int, str]:
    """Return the sort key of a lane: LANES first, then K/V slots, then dK/dV slots."""
    return (LANES.index(lane), "") if lane in LANES else (len(LANES) + lane.startswith("dK/dV"), lane)


def as_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as JSON data in the format of Chrome traces."""
    lanes = sorted({event.lane for event in timeline.events} | set(LANES), key=lane_order)
    names: list[dict[str, Any]] = []
    for rank in range(timeline.world):
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        names += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(lanes)
        ]
    spans = [
        {
            "ph": "X",
            "name": event.name or f"{event.phase} hop {event.hop}",
            "cat": event.phase,
            "pid": event.rank,
            "tid": lanes.index(event.lane),
            "ts": event.begin * MICRO,
            "dur": event.seconds * MICRO,
            "args": asdict(event),
        }
        for event in timeline.events
    ]
    about = {name: getattr(timeline, name) for name in ("title", "source", "world")} | {"schema": SCHEMA}
    if timeline.about:
        about["about"] = dict(timeline.about)
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": names + spans}


def from_chrome(trace: Mapping[str, Any]) -> Timeline:
    """Read a trace that :func:`as_chrome` wrote; raise ValueError for other, older or damaged traces."""
    about: Any = trace.get("otherData")
    schema = about.get("schema") if isinstance(about, Mapping) else None
    if schema != SCHEMA:
        raise ValueError(f"otherData.schema is {schema!r:.60}: it must be {SCHEMA!r}")
    try:
        events = [record["args"] for record in trace["traceEvents"] if record["ph"] == "X"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"this timeline is damaged: {type(error).__name__}: {error}") from None
    fields = {name: value for name, value in about.items() if name != "schema"} | {"events": events}
    timeline: Timeline = convert_json(Timeline, fields, "timeline")
    if timeline.world > MOST_RANKS:
        raise ValueError(f"timeline.world is {timeline.world}: it must be at most {MOST_RANKS}")
    return timeline
