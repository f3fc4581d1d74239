"""Records the timeline of a real ring and gathers all ranks' traces, on one clock, at rank 0."""

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
from ...comm.control import Control, open_control
from ...ring import Ring, Trace, TraceSpan, ring_attention
from ..common.attention import AttentionConfig, forward_backward, mask_data
from ..common.flags import resolve_device
from ..common.launching import run_process_group
from ..common.memory import MemoryNeeds, check_ranks_fit
from ..common.memory_table import OURS, candidate_bytes
from ..common.provenance import provenance
from ..common.ranks import LaunchedRank
from .events import MACHINE, Event, Timeline

CALL = ("seqlen", "world", "batch", "heads", "kv_heads", "head_dim", "dtype", "layout", *sorted(MACHINE))
ROUNDS = 16  # of time requests to rank 0; the fastest counts
PATIENCE = 60.0  # seconds to wait for an answer


class ClockOffset(NamedTuple):
    """Seconds to add to a rank's clock to get rank 0's, and the largest error of these seconds."""

    seconds: float
    error: float


def clock_name() -> str:
    """Return an identifier of the monotonic clock, equal for processes with the same boot and time namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return f"unknown {os.getpid()}"


def measure_clock_offset(
    control: Control, *, now: Callable[[], float] = time.perf_counter, name: Callable[[], str] = clock_name
) -> ClockOffset:
    """Return this rank's offset from rank 0's clock; every rank must call.

    Ranks on rank 0's machine share its clock. Other ranks ask rank 0 for the time as NTP does (D. Mills, RFC 5905,
    section 8): ``offset = ((t1 - t0) + (t2 - t3)) / 2``. The question is sent at t0 and received at t1, the answer is
    sent at t2 and received at t3. The error is at most half the round trip. The fastest of several rounds counts.
    ``now`` returns the time of this rank's clock, and ``name`` the clock's identifier.
    """
    names = control.gather(name(), what="the clocks of the ranks")
    asking = [rank for rank in range(control.size) if names[rank] != names[0]]
    if control.rank == 0:
        for rank in asking:
            _answer(control, rank, now)
        return ClockOffset(0.0, 0.0)
    return _ask(control, now) if control.rank in asking else ClockOffset(0.0, 0.0)


def _answer(control: Control, rank: int, now: Callable[[], float]) -> None:
    for number in range(ROUNDS):
        _wait_for_key(control, f"question{rank}/{number}")
        received = now()
        control.publish(f"answer{rank}/{number}", (received, now()))


def _ask(control: Control, now: Callable[[], float]) -> ClockOffset:
    rounds: list[ClockOffset] = []
    for number in range(ROUNDS):
        sent = now()
        control.publish(f"question{control.rank}/{number}", True)
        question_received, answer_sent = _wait_for_key(control, f"answer{control.rank}/{number}")
        answer_received = now()
        rounds.append(
            ClockOffset(
                ((question_received - sent) + (answer_sent - answer_received)) / 2,
                ((answer_received - sent) - (answer_sent - question_received)) / 2,
            )
        )
    return min(rounds, key=lambda offset: offset.error)


def _wait_for_key(control: Control, key: str) -> Any:
    """Poll without pause until another rank publishes ``key``; raise TransportError after ``PATIENCE``."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        message = control.read_key(key)
        if message is not None:
            return message
    raise TransportError(f"no rank published {key} within {PATIENCE:g} s, so the clocks cannot be compared")


def gather_timeline(ring: Ring, trace: Trace, title: str, about: Mapping[str, Any]) -> Timeline | None:
    """Gather all ranks' traces on one clock, from the first event on; return the timeline on rank 0, None elsewhere.

    All ranks must call. The timeline has ``about`` and ``clock_error``, the largest error of a rank's clock in seconds:
    against rank 0's, and of a GPU's clock against its host's.
    """
    control = open_control(ring.group).new_scope("timeline")
    clock_offset = measure_clock_offset(control)
    error = clock_offset.error + trace.clock_error
    own_spans = [astuple(span) for span in (*trace.spans, *trace.transfers, *trace.slots)]
    rank_traces: list[Any] = control.gather((clock_offset.seconds, error, own_spans), what="the traces of the ranks")
    if ring.rank:
        return None
    offsets = [(rank, seconds, spans) for rank, (seconds, _, spans) in enumerate(rank_traces)]
    shifted = [(rank, seconds, TraceSpan(*span)) for rank, seconds, spans in offsets for span in spans]
    start = min((span.begin + seconds for _, seconds, span in shifted), default=0.0)
    events = []
    for rank, seconds, span in shifted:
        begin, end = span.begin + seconds - start, span.end + seconds - start
        events.append(Event(rank, span.kind, span.phase, span.hop, begin, end, span.name, span.nbytes))
    error = max(error for _, error, _ in rank_traces)
    return Timeline(title, "measured", ring.size, tuple(events), {**about, "clock_error": error})


# One forward and backward.


def run_timeline(place: LaunchedRank | None, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """Record the timeline of a launcher's ranks, a GPU's virtual ranks or new CPU processes; return it on rank 0."""
    device = resolve_device(problem.device) if place is None else place.shared_device(problem.device)
    virtual_ranks = place is None and device.type == "cuda"

    def needed(config: AttentionConfig) -> int | MemoryNeeds:
        per_rank = candidate_bytes(OURS, config)
        return MemoryNeeds(0, config.world * per_rank) if virtual_ranks else per_rank

    check_ranks_fit("--seqlen", problem, needed)
    if virtual_ranks:
        return virtual_timeline(problem, device, repeats)
    return run_process_group(problem.world, record_timeline, problem, repeats, device=problem.device)


def virtual_timeline(problem: AttentionConfig, device: torch.device, repeats: int) -> Timeline | None:
    """Record the timeline of virtual ranks that share one device."""
    with LocalWorld(problem.world, device=device) as world:
        return world.run(lambda group: record_timeline(None, device, problem, repeats, group))[0]


def record_timeline(
    place: LaunchedRank | None, device: torch.device, problem: AttentionConfig, repeats: int,
    group: LocalGroup | None = None,
) -> Timeline | None:  # fmt: skip
    """Record ``repeats`` runs after a warm-up; return the run of median length on rank 0, None elsewhere.

    ``group`` has the virtual ranks; None: the ranks are processes.
    """
    if place is not None:
        torch.set_num_threads(problem.threads)
    call = {name: getattr(problem, name) for name in CALL} | mask_data(problem.mask)
    title = f"{problem.title}, {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name(device)}"
    runs = []
    with Ring(group) as ring:
        *inputs, dout = problem.random_shard(ring.rank, device)
        attend = partial(ring_attention, layout=problem.token_layout, ring=ring, causal=problem.causal)
        forward_backward(attend, inputs, dout)
        about = {"call": call, "provenance": provenance(device) if ring.rank == 0 else None}
        for _ in range(repeats):
            with ring.record() as trace:
                _align_start(ring)
                forward_backward(attend, inputs, dout)
            runs.append(gather_timeline(ring, trace, title, about))
    recordings = sorted((run for run in runs if run is not None), key=lambda run: run.seconds)
    return recordings[len(recordings) // 2] if recordings else None


def _align_start(ring: Ring) -> None:
    """Let all ranks begin together, within the accuracy of a barrier."""
    if isinstance(ring.group, LocalGroup):
        for _ in range(2):  # a long wait polls seldom; the second barrier is tight
            open_control(ring.group).gather(None, what="the ranks to be ready")
    else:
        dist.barrier(ring.group)
