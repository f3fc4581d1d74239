"""The timeline of a real ring: one forward and backward, every rank's trace brought to one clock and to rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...comm import LocalGroup, LocalWorld, TransportError
from ...comm.control import Control, control_of
from ...ring import Ring, Trace, TraceSpan, ring_attention
from ..common.attention import AttentionConfig, forward_backward, mask_data
from ..common.flags import device_here
from ..common.launching import spawn
from ..common.memory import Needs, refuse_ranks
from ..common.memory_table import OURS, candidate_bytes
from ..common.provenance import provenance
from ..common.ranks import Member
from .events import MACHINE, Event, Timeline

CALL = ("seqlen", "world", "batch", "heads", "kv_heads", "head_dim", "dtype", "layout", *sorted(MACHINE))
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
    rounds: list[Offset] = []
    for number in range(ROUNDS):
        sent = now()
        control.publish(f"question{control.rank}/{number}", True)
        came, left = _hear(control, f"answer{control.rank}/{number}")
        back = now()
        rounds.append(Offset(((came - sent) + (left - back)) / 2, ((back - sent) - (left - came)) / 2))
    return min(rounds, key=lambda offset: offset.error)


def _hear(control: Control, key: str) -> Any:
    """What another rank publishes under a key, as soon as it does: looked for again and again, without a pause."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        message = control.look(key)
        if message is not None:
            return message
    raise TransportError(f"the clocks of the ranks: nobody published {key} within {PATIENCE:g} s")


def timeline_of(ring: Ring, trace: Trace, title: str, about: Mapping[str, Any]) -> Timeline | None:
    """What all ranks recorded, from the first event of any of them on; on rank 0, None elsewhere. All ranks call it.

    ``about["clock_error"]`` is the largest error of a rank's clock, in seconds: against rank 0's, and of a GPU's
    against its host's.
    """
    control = control_of(ring.group).fresh_scope("timeline")
    moved = offset(control)
    error = moved.error + trace.clock_error
    mine = [astuple(span) for span in (*trace.spans, *trace.transfers, *trace.slots)]
    everyone: list[Any] = control.gather((moved.seconds, error, mine), what="the traces of the ranks")
    if ring.rank:
        return None
    shifted = [(rank, seconds, TraceSpan(*span)) for rank, (seconds, _, spans) in enumerate(everyone) for span in spans]
    start = min((span.begin + seconds for _, seconds, span in shifted), default=0.0)
    events = []
    for rank, seconds, span in shifted:
        begin, end = span.begin + seconds - start, span.end + seconds - start
        events.append(Event(rank, span.kind, span.phase, span.hop, begin, end, span.name, span.nbytes))
    error = max(error for _, error, _ in everyone)
    return Timeline(title, "measured", ring.size, tuple(events), {**about, "clock_error": error})


# one forward and backward


def measured(place: Member | None, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """The timeline, on rank 0, of the launcher's ranks, of virtual ranks of a GPU, or of new processes of the CPU."""
    device = device_here(problem.device) if place is None else place.shared_device(problem.device)
    virtual_ranks = place is None and device.type == "cuda"

    def taken(one: AttentionConfig) -> int | Needs:
        each = candidate_bytes(OURS, one)
        return Needs(0, one.world * each) if virtual_ranks else each

    refuse_ranks("--seqlen", problem, taken)
    if virtual_ranks:
        return virtual(problem, device, repeats)
    return spawn(problem.world, measure, problem, repeats, device=problem.device)


def measure(place: Member, device: torch.device, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """One rank of a process group."""
    torch.set_num_threads(problem.threads)
    return recorded(problem, None, device, repeats)


def virtual(problem: AttentionConfig, device: torch.device, repeats: int) -> Timeline | None:
    """Virtual ranks that share one device."""
    with LocalWorld(problem.world, device=device) as world:
        return world.run(lambda group: recorded(problem, group, device, repeats))[0]


def recorded(problem: AttentionConfig, group: LocalGroup | None, device: torch.device, repeats: int) -> Timeline | None:
    """The median of ``repeats`` runs by length, after one that is not recorded; on rank 0."""
    call = {name: getattr(problem, name) for name in CALL} | mask_data(problem.mask)
    title = f"{problem.title}, {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    runs = []
    with Ring(group) as ring:
        *inputs, dout = problem.drawn(ring.rank, device)
        attend = partial(ring_attention, layout=problem.held, ring=ring, causal=problem.causal)
        forward_backward(attend, inputs, dout)
        about = {"call": call, "provenance": provenance(device) if ring.rank == 0 else None}
        for _ in range(repeats):
            with ring.record() as trace:
                _together(ring)
                forward_backward(attend, inputs, dout)
            runs.append(timeline_of(ring, trace, title, about))
    recordings = sorted((run for run in runs if run is not None), key=lambda run: run.seconds)
    return recordings[len(recordings) // 2] if recordings else None


def _together(ring: Ring) -> None:
    """Let all ranks begin at once, as near as a barrier lets them."""
    if isinstance(ring.group, LocalGroup):
        for _ in range(2):  # who waited long looks seldom: the second time all look at once
            control_of(ring.group).gather(None, what="the ranks to be ready")
    else:
        dist.barrier(ring.group)
