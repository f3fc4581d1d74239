"""A ring's forward and backward three ways, on one loop: compute alone, communication alone, together.

Compute alone is the same work on the same slots over a transport that moves nothing. Communication alone is the same
transfers with work that computes nothing. So the three differ in nothing else.
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
from ...ring.backends import backward_backends, forward_backends, joined
from ...ring.buffers import RingCall, Tensors, ignore_post
from ...ring.local.registry import resolve_backend
from ...ring.schedule.plan import Plan, plan
from ..common.attention import AttentionConfig
from ..common.flags import counted, human
from ..common.progress import Progress, progress
from ..common.ranks import Member
from ..common.result import Result, Row
from ..common.timing import Clock, Ranks, Samples, interleaved

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
PHASES = (FORWARD, BACKWARD)
TOGETHER, COMPUTE, COMMUNICATION = "together", "compute", "communication"
PROBES = 3  # runs of compute alone that the link's speed is set by
MOST_OVERLAP = 105  # percent: a ring that hides more than there is ran while compute or communication alone ran slower
ALLOWANCE = 0.05  # of the larger of compute and communication: what a step may take above it and one chunk
UNITS = {
    "phase": "", "slots": "", "prefetch": "", "chunks": "", "together": "ms", "spread": "%", "exposed": "ms",
    "overlap": "%", "compute": "ms", "communication": "ms", "efficiency": "%", "bound": "ms", "within bound": "",
}  # fmt: skip

Setting = tuple[int, int, int]
"""Slots, prefetch and chunks of a ring."""


class Still:
    """In a transport's place: nothing moves, everything is here already. Counts the bytes that would have moved."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Nothing moves. Counted is the larger direction, which is what takes a link's time."""
        self.nbytes += max(sum(message.tensor.nbytes for message in messages) for messages in (sends, receives))
        return DONE


class Nothing:
    """In a backend's place: waits for what arrives, and computes nothing."""

    def fold(self, *_tensors: object, **_options: object) -> None:
        """The shard has arrived."""

    dq = fold

    def dkdv(self, *_tensors: object, accum: Callable[[], Tensors] | None, **_options: object) -> None:
        """Wait for the accumulators."""
        if accum is not None:
            accum()

    def result(self) -> Any:
        """Return nothing."""


class Shard:
    """One rank's random inputs, and the passes of one ring over them, in each of the three ways.

    ``backend`` is that of ``ring_attention``; ``revised`` makes the plan that runs of the ring's own.
    """

    def __init__(
        self,
        problem: AttentionConfig,
        ring: Ring,
        device: torch.device,
        *,
        backend: str = "",
        revised: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self._ring, self._backend = ring, resolve_backend(backend or "auto", device)
        own = plan(problem.held, problem.mask, ring.rank, ring.direction, device, ring.topology, ring.slots)
        self._plan = own if revised is None else revised(own)
        self._scale = 1 / math.sqrt(problem.head_dim)
        self.nbytes = dict.fromkeys(PHASES, 0)
        """That a pass moves, once it was run as compute alone."""
        self.q, self.k, self.v, self.dout = problem.drawn(ring.rank, device)
        # what a backward reads; and K/V of real shards lie in the ring's slots from here on
        self.out, self.lse = self.run(FORWARD, TOGETHER)

    def run(self, phase: str, kind: str) -> Tensors:
        """Out and lse, or dq, dk and dv; nothing of communication alone."""
        with torch.no_grad(), self._ring.call(self._plan, phase, self.q, self.k) as call:
            stills = [Still(transport) for transport in call.transports] if kind == COMPUTE else []
            if stills:
                call = replace(call, transports=tuple(stills), posted=ignore_post)
            results = (self._forward if phase == FORWARD else self._backward)(call, idle=kind == COMMUNICATION)
            if stills:
                self.nbytes[phase] = sum(still.nbytes for still in stills)
        return results

    def _forward(self, call: RingCall, *, idle: bool) -> Tensors:
        if idle:
            loop.forward(call, [Nothing() for _ in call.chunks], self.k, self.v)
            return ()
        backends = forward_backends(self._backend, call.chunks, self.q, softmax_scale=self._scale)
        loop.forward(call, backends, self.k, self.v)
        outs, lses = zip(*(backend.result() for backend in backends), strict=True)
        return joined(outs, 2), joined(lses, 1)

    def _backward(self, call: RingCall, *, idle: bool) -> Tensors:
        dkdv = torch.empty_like(self.k), torch.empty_like(self.v)
        if idle:
            loop.backward(call, [Nothing() for _ in call.chunks], self.k, self.v, dkdv)
            return ()
        tensors = (self.dout, self.q, self.out, self.lse)
        backends = backward_backends(self._backend, call.chunks, *tensors, softmax_scale=self._scale)
        loop.backward(call, backends, self.k, self.v, dkdv)
        return joined([backend.result() for backend in backends], 2), *dkdv


# every ring


@dataclass(frozen=True)
class OverlapConfig:
    """What to measure; the same on every rank."""

    problem: AttentionConfig
    settings: tuple[Setting, ...]
    repeats: int = 5
    link_share: float | None = 0.8  # communication alone over compute alone; None: the link as it is
    timer: str = ""  # one of OF_RINGS; empty: the device's own


def measure(place: Member, device: torch.device, config: OverlapConfig) -> Result:
    """One rank of the measurement; every rank has the rows."""
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
            rows = rows_of(config, rings, device, step)
    throttled = "" if speed is None else f", link throttled to {human(speed, 'B/s')}"
    notes = [
        *unlikely(rows),
        f"{problem.title}, over {ring.transport}{throttled}",
        f"slowest rank, medians of {config.repeats} interleaved runs",
        verdict(rows, config.repeats),
    ]
    return Result("bench overlap", UNITS, rows, notes=notes)


def link_speed(config: OverlapConfig, share: float, device: torch.device) -> float:
    """Bytes per second at which the transfers of a step take that share of its compute."""
    with Ring(transport=config.problem.transport, chunks=config.settings[0][2]) as ring:
        shard = Shard(config.problem, ring, device)
        steps = {phase: partial(shard.run, phase, COMPUTE) for phase in PHASES}
        times = interleaved(steps, Clock(device, Ranks(), config.timer), repeats=PROBES)
    moved = Ranks().slowest(sum(shard.nbytes.values()))
    return moved / (share * sum(samples.median for samples in times.values()))


def rows_of(config: OverlapConfig, rings: Mapping[Setting, Ring], device: torch.device, step: Progress) -> list[Row]:
    """Time everything in turns; a row per ring and phase, and per ring's step."""
    steps: dict[str, Callable[[], object]] = {}
    for setting, ring in rings.items():
        shard = Shard(config.problem, ring, device)
        for phase, kind in product(PHASES, (TOGETHER, COMPUTE, COMMUNICATION)):
            steps[_name(setting, phase, kind)] = partial(shard.run, phase, kind)
    step("timing", len(steps) * (config.repeats + 1))
    clock = Clock(device, Ranks(), config.timer)
    taken = interleaved(steps, clock, repeats=config.repeats, progress=partial(step, "timing", None))
    rows: list[Row] = []
    for setting in rings:
        forward, backward = (
            Times(
                compute=taken[_name(setting, phase, COMPUTE)],
                communication=taken[_name(setting, phase, COMMUNICATION)],
                together=taken[_name(setting, phase, TOGETHER)],
                pieces=config.problem.world * setting[2],
            )
            for phase in PHASES
        )
        columns = dict(zip(("slots", "prefetch", "chunks"), setting, strict=True))
        for phase, times in ((FORWARD, forward), (BACKWARD, backward), (STEP, step_of(forward, backward))):
            rows.append({"phase": phase, **columns, **times.columns()})
    return rows


def _name(setting: Setting, phase: str, kind: str) -> str:
    """Of a timed step. What is alone is timed once for all rings with these chunks: the last one has most buffers."""
    return str((setting if kind == TOGETHER else setting[2], phase, kind))


# what follows from the three times; formulas in bench/README.md


class Times(NamedTuple):
    """Compute alone, communication alone and together, of one phase of one ring."""

    compute: Samples
    communication: Samples
    together: Samples
    pieces: int = 1  # chunks of all hops of the phase that compute something

    def columns(self) -> dict[str, Any]:
        """What a row says of them."""
        compute, communication, together = (each.median for each in self[:3])
        larger = max(compute, communication)
        # what a ring that overlaps takes at most: the larger of the two, 5%, and one chunk of one hop
        bound = larger * (1 + ALLOWANCE) + compute / self.pieces
        return {
            "together": together * 1e3,
            "spread": 100 * self.together.spread,
            "exposed": (together - compute) * 1e3,  # what compute does not hide
            # the part of what could be hidden that is: 100 where the shorter of the two costs nothing
            "overlap": 100 * (compute + communication - together) / min(compute, communication),
            "compute": compute * 1e3,
            "communication": communication * 1e3,
            "efficiency": 100 * larger / together,  # of a ring that hides all it can
            "bound": bound * 1e3,
            "within bound": together <= bound,
        }


def step_of(forward: Times, backward: Times) -> Times:
    """Forward and backward of one ring as one step: the sums of their times, run by run."""
    pairs = zip(forward[:3], backward[:3], strict=True)
    compute, communication, together = (
        Samples(tuple(map(sum, zip(x.seconds, y.seconds, strict=True)))) for x, y in pairs
    )
    return Times(compute, communication, together, forward.pieces + backward.pieces)


def unlikely(rows: Sequence[Row]) -> list[str]:
    """Return a note where some ring hides more than all there is to hide: times of several runs do not go together."""
    wrong = [f"{row['phase']} with {row['slots']} slots, prefetch {row['prefetch']}, {counted(row['chunks'], 'chunk')} "
             f"({row['overlap']:.0f}%)" for row in rows if row["overlap"] > MOST_OVERLAP]  # fmt: skip
    if not wrong:
        return []
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [
        f"overlap above 100%, which no ring has: {wrong[0]}{more}. Compute or communication alone was slower than "
        "together: the machine was busy, or transfers take too little to tell; run again with longer shards (--tokens) "
        "or more --repeats"
    ]


def verdict(rows: Sequence[Row], repeats: int) -> str:
    """What the third buffer saves of a step, by chunks; beside it what runs spread by, where there are several."""
    steps = {(row["slots"], row["prefetch"], row["chunks"]): row for row in rows if row["phase"] == STEP}
    saved = []
    for chunks in sorted({row["chunks"] for row in rows}):
        two, three = steps.get((2, 1, chunks)), steps.get((3, 2, chunks))
        if two is not None and three is not None:
            spread = max(two["spread"], three["spread"])
            beside = "" if repeats == 1 else f" ±{spread:.1f}%"
            saved.append(
                f"{100 - 100 * three['together'] / two['together']:+.1f}%{beside} with {counted(chunks, 'chunk')}"
            )
    listed = ", ".join(saved) or "not measured (--slots 2,3 --prefetch 1,2, three ranks or more)"
    return f"the third buffer saves of a step: {listed}"
