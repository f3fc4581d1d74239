"""When each rank computed, sent, received and waited: one format for what was measured and what is predicted.

It is kept as a Chrome trace (JSON object format of the Trace Event document), which Perfetto opens: a process per rank,
a thread per lane, a complete event ("X") per span, microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...kernels.strict import checked_as, shown, typed, whole

SCHEMA = "ringattn timeline 2"
LANES = ("compute", "wait", "send", "receive")
"""Of every rank, from the top; below them come its slots while they hold or await something: "slot 0" and on (K/V),
"dK/dV slot 0" and on."""
PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)
MACHINE = {"threads", "seed", "device", "transport"}
"""What a measured call says of where it ran: a prediction has none of it."""
IGNORED = MACHINE | {"nodes"}  # a prediction alone says these
MICRO = 1e6
MOST_RANKS = 1024  # of a file: a picture of more cannot be read
MOST_TIME = 1e30


@dataclass(frozen=True)
class Event:
    """What one rank did on one lane from ``begin`` to ``end``, in seconds from the start of the call."""

    rank: int
    lane: str  # one of LANES, "slot N" or "dK/dV slot N"
    phase: str  # "forward" or "backward"
    hop: int
    begin: float
    end: float
    name: str = ""  # what moves or is computed: "K/V of 3", "dQ"
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The events of one call, forward or forward and backward, on all its ranks."""

    title: str
    source: str  # one of SOURCES
    world: int
    events: tuple[Event, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What it is of, and where it comes from: "call" (shape, layout, mask), "provenance"; ready for JSON."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}: it must be one of {', '.join(SOURCES)}")
        wrong = [event.rank for event in self.events if not 0 <= event.rank < self.world]
        if wrong:
            raise ValueError(f"an event is of rank {wrong[0]}: ranks are 0 to {self.world - 1}")

    @property
    def seconds(self) -> float:
        """Until the last event of any rank ends."""
        return max((event.end for event in self.events), default=0.0)


def alike(one: Timeline, other: Timeline) -> bool:
    """Whether both say of what call they are, and it is the same, whatever ran it."""
    mine, theirs = one.about.get("call"), other.about.get("call")
    if not (isinstance(mine, dict) and isinstance(theirs, dict) and mine and theirs):
        return False
    return all(mine.get(name) == theirs.get(name) for name in {*mine, *theirs} - IGNORED)


def lane_order(lane: str) -> tuple[int, str]:
    """Sorts lanes as they are drawn."""
    return (LANES.index(lane), "") if lane in LANES else (len(LANES) + lane.startswith("dK/dV"), lane)


def as_chrome(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object."""
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
    """What :func:`as_chrome` wrote.

    Raises:
        ValueError: the trace is not one of ours, or of another version.
    """
    about: Any = trace.get("otherData")
    schema = about.get("schema") if isinstance(about, Mapping) else None
    if schema != SCHEMA:
        raise ValueError(f"schema is {shown(schema)}: a timeline says otherData.schema = {SCHEMA!r}")
    fields: dict[str, Any] = {name: about.get(name) for name in _ABOUT} | {"about": about.get("about", {})}
    checked_as("otherData", fields, _ABOUT)
    try:
        return Timeline(events=_events(trace["traceEvents"]), **fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this timeline is broken: {type(error).__name__}: {error}") from None


def _events(records: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    arguments = {f"traceEvents[{number}]": each["args"] for number, each in enumerate(records) if each["ph"] == "X"}
    for name, fields in arguments.items():
        checked_as(name, fields, _EVENT)
    return tuple(Event(**fields) for fields in arguments.values())


def _time(value: object) -> str | None:
    return None if type(value) in (int, float) and abs(value) < MOST_TIME else "a number"  # type: ignore[arg-type]


TEXT = typed("text", str)
_ABOUT = {"title": TEXT, "source": TEXT, "world": whole(1, MOST_RANKS), "about": typed("an object", dict)}
_EVENT = {
    "rank": whole(0, MOST_RANKS - 1),
    "hop": whole(0, MOST_RANKS**2),
    "nbytes": whole(0, 1 << 60),
    **dict.fromkeys(("begin", "end"), _time),
    **dict.fromkeys(("lane", "phase", "name"), TEXT),
}
