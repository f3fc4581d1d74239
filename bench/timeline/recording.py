"""The timeline of a real ring: every rank's trace, brought to one clock and to rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from ...comm import TransportError
from ...comm.control import Control, control_of
from ...ring import Ring, Trace, TraceSpan
from .events import Event, Timeline

ROUNDS = 16  # of questions to rank 0; the fastest counts
PATIENCE = 60.0  # seconds for one of them


class Offset(NamedTuple):
    """Seconds to add to a rank's clock to have rank 0's, and by how much that may be wrong."""

    seconds: float
    error: float


def clock_name() -> str:
    """Processes that say the same read one monotonic clock: same boot, same time namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return f"unknown {os.getpid()}"


def offset(
    control: Control, *, now: Callable[[], float] = time.perf_counter, name: Callable[[], str] = clock_name
) -> Offset:
    """This rank's offset from rank 0's clock; every rank calls it.

    Ranks of one machine share its clock, exactly. Others ask rank 0 for the time, as NTP does (D. Mills, RFC 5905,
    section 8): ``offset = ((t1 - t0) + (t2 - t3)) / 2`` from when the question left and came, and the answer left and
    came; wrong by at most half the way there and back. Of several rounds the fastest counts.
    """
    names = control.gather(name(), what="the clocks of the ranks")
    asking = [rank for rank in range(control.size) if names[rank] != names[0]]
    if control.rank == 0:
        for rank in asking:
            _answer(control, rank, now)
        return Offset(0.0, 0.0)
    return _ask(control, now) if control.rank in asking else Offset(0.0, 0.0)


def _answer(control: Control, rank: int, now: Callable[[], float]) -> None:
    for number in range(ROUNDS):
        _hear(control, f"question{rank}/{number}")
        came = now()
        control.publish(f"answer{rank}/{number}", (came, now()))


def _ask(control: Control, now: Callable[[], float]) -> Offset:
    found: list[Offset] = []
    for number in range(ROUNDS):
        asked = now()
        control.publish(f"question{control.rank}/{number}", True)
        came, left = _hear(control, f"answer{control.rank}/{number}")
        told = now()
        found.append(Offset(((came - asked) + (left - told)) / 2, ((told - asked) - (left - came)) / 2))
    return min(found, key=lambda one: one.error)


def _hear(control: Control, key: str) -> Any:
    """What another rank publishes under a key, as soon as it does: looked for again and again, without a pause."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = control.look(key)
        if found is not None:
            return found
    raise TransportError(f"the clocks of the ranks: nobody published {key} within {PATIENCE:g} s")


def timeline_of(ring: Ring, trace: Trace, title: str, about: Mapping[str, Any] | None = None) -> Timeline | None:
    """What all ranks recorded, from the first event of any of them on; on rank 0, None elsewhere. All ranks call it.

    ``about["clock_error"]`` is the largest error of a rank's clock, in seconds: against rank 0's, and of a GPU's
    against its host's.
    """
    control = control_of(ring.group).fresh_scope("timeline")
    moved = offset(control)
    error = moved.error + trace.clock_error
    mine = [astuple(span) for span in (*trace.spans, *trace.transfers, *trace.slots)]
    told: list[Any] = control.gather((moved.seconds, error, mine), what="the traces of the ranks")
    if ring.rank:
        return None
    shifted = [(rank, seconds, TraceSpan(*span)) for rank, (seconds, _, spans) in enumerate(told) for span in spans]
    start = min((span.begin + seconds for _, seconds, span in shifted), default=0.0)
    events = tuple(_event(rank, seconds - start, span) for rank, seconds, span in shifted)
    errors = {"clock_error": max(error for _, error, _ in told)}
    return Timeline(title, "measured", ring.size, events, {**(about or {}), **errors})


def _event(rank: int, shift: float, span: TraceSpan) -> Event:
    begin, end = span.begin + shift, span.end + shift
    return Event(rank, span.kind, span.phase, span.hop, begin, end, span.name, span.nbytes)
