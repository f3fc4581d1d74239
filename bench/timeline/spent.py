"""What each rank of a timeline did with its time: as text, and in files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .events import Timeline, call_of

SCHEMA = "ringattn bench timeline 1"
MILLI = 1e3


@dataclass(frozen=True)
class Spent:
    """Seconds of one rank in compute and in waits."""

    rank: int
    compute_seconds: float
    wait_seconds: float


def spent(timeline: Timeline) -> list[Spent]:
    """Of every rank."""

    def seconds(rank: int, lane: str) -> float:
        return sum(one.seconds for one in timeline.events if (one.rank, one.lane) == (rank, lane))

    return [Spent(rank, seconds(rank, "compute"), seconds(rank, "wait")) for rank in range(timeline.world)]


def shares(timeline: Timeline) -> str:
    """What rank after rank did with its time, in a line each."""
    whole = timeline.seconds * MILLI
    return "\n".join(
        f"rank {one.rank}: compute {one.compute_seconds * MILLI:.1f} ms, wait {one.wait_seconds * MILLI:.1f} ms "
        f"of {whole:.1f} ms"
        for one in spent(timeline)
    )


def as_json(timeline: Timeline) -> dict[str, Any]:
    """What ``--json`` writes of a measured timeline."""
    return {
        "schema": SCHEMA,
        "provenance": timeline.about["provenance"],
        "title": timeline.title,
        "problem": dict(call_of(timeline)),
        "world": timeline.world,
        "seconds": timeline.seconds,
        "clock_error": timeline.about["clock_error"],
        "ranks": [asdict(one) for one in spent(timeline)],
    }


def as_rows(timeline: Timeline) -> list[dict[str, object]]:
    """What ``--csv`` writes: a row per rank, in the units of the text."""
    return [
        {
            "rank": one.rank,
            "compute ms": one.compute_seconds * MILLI,
            "wait ms": one.wait_seconds * MILLI,
            "of ms": timeline.seconds * MILLI,
        }
        for one in spent(timeline)
    ]
