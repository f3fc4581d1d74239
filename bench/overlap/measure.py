"""Times a ring's forward and backward in three ways with the same loop: compute alone, communication alone, together.

Compute alone uses a transport that moves no data. Communication alone uses a local kernel that computes nothing. The
slots and everything else are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from ...comm import DONE, Fence, Limits, Message, Transport
from ...ring import Ring, loop
from ...ring.backends import backward_backends, cat_heads, forward_backends
from ...ring.buffers import RingCall, Tensors, chunk_runs, ignore_post
from ...ring.local.registry import resolve_backend
from ...ring.schedule.plan import Plan, plan
from ..common.attention import AttentionConfig
from ..common.flags import count_noun, human_count
from ..common.progress import Progress, progress
from ..common.ranks import LaunchedRank
from ..common.result import Result, Row
from ..common.timing import RankTeam, Samples, StepTimer, time_in_turns

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
PHASES = (FORWARD, BACKWARD)
TOGETHER, COMPUTE, COMMUNICATION = "together", "compute", "communication"
PROBES = 3  # runs of compute alone that determine the link's speed
MOST_OVERLAP = 105  # percent; above it, compute or communication alone ran slower than in the ring
ALLOWANCE = 0.05  # relative slack of the bound
UNITS = {
    "phase": "", "slots": "", "prefetch": "", "chunks": "", "together": "ms", "spread": "%", "exposed": "ms",
    "overlap": "%", "compute": "ms", "communication": "ms", "efficiency": "%", "bound": "ms", "within bound": "",
}  # fmt: skip

BufferSetting = tuple[int, int, int]
"""(slots, prefetch, chunks) of a ring."""


class StillTransport:
    """Transport that moves no data and completes at once. It counts the bytes that would have moved."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Add the bytes of the sends or of the receives, whichever are more, and return a completed fence."""
        self.nbytes += max(sum(message.tensor.nbytes for message in messages) for messages in (sends, receives))
        return DONE


class IdleBackend:
    """Backend that waits for received data and computes nothing."""

    def fold(self, *_tensors: object, **_options: object) -> None:
        """Accept a shard that has arrived."""

    dq = fold

    def dkdv(self, *_tensors: object, accum: Callable[[], Tensors] | None, **_options: object) -> None:
        """Wait until the accumulators have arrived."""
        if accum is not None:
            accum()

    def result(self) -> Any: ...


class RankPasses:
    """One rank's random inputs and a ring's passes over them; ``revise_plan`` may change the ring's plan."""

    def __init__(
        self,
        problem: AttentionConfig,
        ring: Ring,
        device: torch.device,
        *,
        backend: str = "auto",
        revise_plan: Callable[[Plan], Plan] = lambda own: own,
    ) -> None:
        self._ring, self._backend = ring, resolve_backend(backend, device)
        self._chunks = ring.chunks or 1
        where = (ring.rank, ring.direction, device, ring.topology, ring.slots)
        runs = chunk_runs(self._chunks, problem.kv_heads)
        self._plan = revise_plan(plan(problem.token_layout, problem.mask, *where, runs=runs))
        self._scale = 1 / math.sqrt(problem.head_dim)
        self.nbytes = dict.fromkeys(PHASES, 0)
        """Bytes that each pass moves, filled in by a run of compute alone."""
        self.q, self.k, self.v, self.dout = problem.random_shard(ring.rank, device)
        # The backward reads these. The run also fills the ring's slots with real K/V.
        self.out, self.lse = self.run(FORWARD, TOGETHER)

    def run(self, phase: str, kind: str) -> Tensors:
        """Run a phase in one of the three ways; return out and lse, or dq, dk and dv (nothing for communication)."""
        with torch.no_grad(), self._ring.call(self._plan, phase, self.q, self.k, chunks=self._chunks) as call:
            still_transports = [StillTransport(transport) for transport in call.transports] if kind == COMPUTE else []
            if still_transports:
                call = replace(call, transports=tuple(still_transports), on_post=ignore_post)
            results = (self._forward if phase == FORWARD else self._backward)(call, idle=kind == COMMUNICATION)
            if still_transports:
                self.nbytes[phase] = sum(transport.nbytes for transport in still_transports)
        return results

    def _forward(self, call: RingCall, *, idle: bool) -> Tensors:
        if idle:
            loop.forward(call, [IdleBackend() for _ in call.heads], self.k, self.v)
            return ()
        backends = forward_backends(self._backend, call.heads, self.q, softmax_scale=self._scale)
        loop.forward(call, backends, self.k, self.v)
        outs, lses = zip(*(backend.result() for backend in backends), strict=True)
        return cat_heads(outs, 2), cat_heads(lses, 1)

    def _backward(self, call: RingCall, *, idle: bool) -> Tensors:
        dkdv = torch.empty_like(self.k), torch.empty_like(self.v)
        if idle:
            loop.backward(call, [IdleBackend() for _ in call.heads], self.k, self.v, dkdv)
            return ()
        tensors = (self.dout, self.q, self.out, self.lse)
        backends = backward_backends(self._backend, call.heads, *tensors, softmax_scale=self._scale)
        loop.backward(call, backends, self.k, self.v, dkdv)
        return cat_heads([backend.result() for backend in backends], 2), *dkdv


@dataclass(frozen=True)
class OverlapConfig:
    """Configuration of a measurement, equal on every rank."""

    problem: AttentionConfig
    settings: tuple[BufferSetting, ...]
    repeats: int = 5
    link_share: float | None = 0.8  # ratio of communication to compute time to throttle to; None: unthrottled
    timer: str = ""  # one of RING_TIMERS; empty: the device's default


def measure_overlap(place: LaunchedRank, device: torch.device, config: OverlapConfig) -> Result:
    """Run the measurement as one rank; return the same rows on every rank."""
    problem = config.problem
    torch.set_num_threads(problem.threads)
    speed = None if config.link_share is None else link_speed(config, config.link_share, device)
    limits = Limits(bytes_per_second=speed)
    with ExitStack() as stack:
        rings = {}
        for slots, prefetch, chunks in config.settings:
            ring = Ring(transport=problem.transport, slots=slots, prefetch=prefetch, chunks=chunks, limits=limits)
            rings[slots, prefetch, chunks] = stack.enter_context(ring)
        with progress(silent=place.rank != 0) as step:
            rows = overlap_rows(config, rings, device, step)
    throttled = "" if speed is None else f", link throttled to {human_count(speed, 'B/s')}"
    notes = [
        *unlikely_notes(rows),
        f"{problem.title}, over {ring.transport}{throttled}",
        f"slowest rank, medians of {config.repeats} interleaved runs",
        buffer_verdict(rows, config.repeats),
    ]
    return Result("bench overlap", UNITS, rows, notes=notes)


def link_speed(config: OverlapConfig, share: float, device: torch.device) -> float:
    """Return the bytes per second at which a step's transfers take ``share`` times its compute time."""
    with Ring(transport=config.problem.transport, chunks=config.settings[0][2]) as ring:
        shard = RankPasses(config.problem, ring, device)
        steps = {phase: partial(shard.run, phase, COMPUTE) for phase in PHASES}
        times = time_in_turns(steps, StepTimer(device, RankTeam(), config.timer), repeats=PROBES)
    moved = RankTeam().slowest_seconds(sum(shard.nbytes.values()))
    return moved / (share * sum(samples.median for samples in times.values()))


def overlap_rows(
    config: OverlapConfig, rings: Mapping[BufferSetting, Ring], device: torch.device, step: Progress
) -> list[Row]:
    """Time all rings in turns; return for each ring a row per phase and one for both phases together."""
    steps: dict[str, Callable[[], object]] = {}
    for setting, ring in rings.items():
        shard = RankPasses(config.problem, ring, device)
        for phase, kind in product(PHASES, (TOGETHER, COMPUTE, COMMUNICATION)):
            steps[_step_name(setting, phase, kind)] = partial(shard.run, phase, kind)
    step("timing", len(steps) * (config.repeats + 1))
    clock = StepTimer(device, RankTeam(), config.timer)
    samples = time_in_turns(steps, clock, repeats=config.repeats, progress=partial(step, "timing", None))
    rows: list[Row] = []
    for setting in rings:
        forward, backward = (
            PhaseTimes(
                compute=samples[_step_name(setting, phase, COMPUTE)],
                communication=samples[_step_name(setting, phase, COMMUNICATION)],
                together=samples[_step_name(setting, phase, TOGETHER)],
                computing_chunks=config.problem.world * setting[2],
            )
            for phase in PHASES
        )
        columns = dict(zip(("slots", "prefetch", "chunks"), setting, strict=True))
        for phase, times in ((FORWARD, forward), (BACKWARD, backward), (STEP, sum_phases(forward, backward))):
            rows.append({"phase": phase, **columns, **times.as_columns()})
    return rows


def _step_name(setting: BufferSetting, phase: str, kind: str) -> str:
    """Return the key of a timed run; settings with equal chunks share the runs of compute and communication alone."""
    return str((setting if kind == TOGETHER else setting[2], phase, kind))


class PhaseTimes(NamedTuple):
    """Times of compute alone, communication alone and together, for one phase of one ring."""

    compute: Samples
    communication: Samples
    together: Samples
    computing_chunks: int = 1  # computing chunks of all hops of the phase

    def as_columns(self) -> dict[str, Any]:
        """Return the columns of these times; ``bench/overlap/README.md`` has the formulas."""
        compute, communication, together = (samples.median for samples in self[:3])
        larger = max(compute, communication)
        # Bound for a ring that overlaps: the larger of the two, plus 5%, plus one chunk of one hop.
        bound = larger * (1 + ALLOWANCE) + compute / self.computing_chunks
        return {
            "together": together * 1e3,
            "spread": 100 * self.together.spread,
            "exposed": (together - compute) * 1e3,  # not hidden by compute
            # Hidden share of the shorter one; 100 if it costs nothing.
            "overlap": 100 * (compute + communication - together) / min(compute, communication),
            "compute": compute * 1e3,
            "communication": communication * 1e3,
            "efficiency": 100 * larger / together,  # relative to perfect overlap
            "bound": bound * 1e3,
            "within bound": together <= bound,
        }


def sum_phases(forward: PhaseTimes, backward: PhaseTimes) -> PhaseTimes:
    """Return the times of forward and backward together, added run by run."""
    pairs = zip(forward[:3], backward[:3], strict=True)
    compute, communication, together = (
        Samples(tuple(map(sum, zip(x.seconds, y.seconds, strict=True)))) for x, y in pairs
    )
    return PhaseTimes(compute, communication, together, forward.computing_chunks + backward.computing_chunks)


def unlikely_notes(rows: Sequence[Row]) -> list[str]:
    """Return a note if a ring hides more than 100% of its communication, which shows that the runs disagree."""
    wrong = [
        f"{row['phase']} with {row['slots']} slots, prefetch {row['prefetch']}, "
        f"{count_noun(row['chunks'], 'chunk')} ({row['overlap']:.0f}%)"
        for row in rows
        if row["overlap"] > MOST_OVERLAP
    ]
    if not wrong:
        return []
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [
        f"overlap above 100% is impossible: {wrong[0]}{more}. The machine was busy, or the transfers are too short. "
        "Run again with more --tokens or --repeats."
    ]


def buffer_verdict(rows: Sequence[Row], repeats: int) -> str:
    """Return a note: by how much a third buffer shortens a step, and the spread of the runs, by chunks."""
    steps = {(row["slots"], row["prefetch"], row["chunks"]): row for row in rows if row["phase"] == STEP}
    savings = []
    for chunks in sorted({row["chunks"] for row in rows}):
        two, three = steps.get((2, 1, chunks)), steps.get((3, 2, chunks))
        if two is not None and three is not None:
            spread = max(two["spread"], three["spread"])
            spread_text = "" if repeats == 1 else f" ±{spread:.1f}%"
            saved = 100 - 100 * three["together"] / two["together"]
            savings.append(f"{saved:+.1f}%{spread_text} with {count_noun(chunks, 'chunk')}")
    listed = ", ".join(savings) or "not measured; it needs --slots 2,3 and --prefetch 1,2"
    return f"step time saved by the third buffer: {listed}"
