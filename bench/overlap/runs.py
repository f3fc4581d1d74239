"""A ring's forward and backward three ways, on one loop: compute alone, communication alone, together.

Compute alone is the same work on the same slots over a transport that moves nothing. Communication alone is the same
transfers with work that computes nothing. So the three differ in nothing else.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ...comm import DONE, Fence, Limits, Message, Transport
from ...ring import Mask, Ring, loop
from ...ring.backends import backward_backends, forward_backends, joined, resolve_backend
from ...ring.buffers import Call, Tensors, ignore_post
from ...ring.ring import depth_of
from ...ring.schedule.plan import Plan, plan
from ..common.attention import DTYPES, AttentionConfig
from ..common.flags import human
from ..common.launching import Member
from ..common.memory import Needs, needs_of_ranks, refuse_too_large
from ..common.memory_table import settings_bytes
from ..common.result import Result
from ..common.timing import Clock, Ranks, Samples, Stopwatch, interleaved

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
PHASES = (FORWARD, BACKWARD)
TOGETHER, COMPUTE, COMMUNICATION = "together", "compute", "communication"
PROBES = 3  # runs of compute alone that the link's speed is set by
ALLOWANCE = 0.05  # of the larger of compute and communication: what a step may take above it and one chunk
UNITS = {
    "phase": "", "slots": "", "prefetch": "", "chunks": "", "together": "ms", "spread": "%", "exposed": "ms",
    "overlap": "%", "compute": "ms", "communication": "ms", "contention": "x", "efficiency": "%", "bound": "ms",
    "within bound": "",
}  # fmt: skip

Setting = tuple[int, int, int]
"""Slots, prefetch and chunks of a ring."""
Row = dict[str, Any]


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
        """Wait for the sums."""
        if accum is not None:
            accum()


class Stretches(Stopwatch):
    """Stretches of compute, less what is waited for inside them."""

    def without(self, wait: Callable[[], Tensors]) -> Tensors:
        """What ``wait`` returns, its time not counted. On a GPU the host does not wait, and the stream did before."""
        at = time.perf_counter()
        tensors = wait()
        self._host -= 0.0 if self._on_gpu else time.perf_counter() - at
        return tensors


class Clocked:
    """A backend whose compute is timed, its waits for the network left out."""

    def __init__(self, backend: Any, clock: Stretches, device: torch.device) -> None:
        self._backend = backend
        self._clock = clock
        self._waits_first = device.type == "cuda"

    def fold(self, *tensors: Any, **options: Any) -> None:
        with self._clock.stretch():
            self._backend.fold(*tensors, **options)

    def dq(self, *tensors: Any, **options: Any) -> None:
        with self._clock.stretch():
            self._backend.dq(*tensors, **options)

    def dkdv(self, *tensors: Any, accum: Callable[[], Tensors] | None, **options: Any) -> None:
        wait = accum
        if accum is not None and self._waits_first:  # the kernel's stream waits before its launch, not within it
            arrived = accum()
            wait = lambda: arrived  # noqa: E731
        with self._clock.stretch():
            late = None if wait is None else lambda: self._clock.without(wait)
            self._backend.dkdv(*tensors, accum=late, **options)


@dataclass
class Shard:
    """One rank's inputs, and what its backward reads: results over all ranks."""

    plan: Plan
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3])


def shard_of(problem: AttentionConfig, ring: Ring, device: torch.device) -> Shard:
    """Random inputs of this rank, with the results that a backward reads.

    K/V of real shards lie in the ring's slots then.
    """
    mask = Mask(causal=problem.causal)
    steps = plan(problem.held, mask, ring.rank, ring.direction, device, ring.topology, ring.slots)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    tokens = problem.held.lengths[ring.rank]
    made = [torch.randn(problem.batch, tokens, count, problem.head_dim, device=device) for count in heads]
    shard = Shard(steps, *(x.to(DTYPES[problem.dtype]) for x in made))
    shard.out, shard.lse = Step(ring, shard, FORWARD, TOGETHER)()
    return shard


class Step:
    """Forward or backward of one ring, in one of the three ways; called, it runs once.

    ``inside`` are the stretches of compute of each run so far.
    """

    def __init__(self, ring: Ring, shard: Shard, phase: str, kind: str) -> None:
        self.inside: list[Stretches] = []
        self.nbytes = 0  # that a run would have moved, where it moves none
        self._ring, self._shard = ring, shard
        self._phase, self._kind = phase, kind
        self._backend = resolve_backend("auto", shard.q.device)

    def __call__(self) -> Tensors:
        """Out and lse, or dq, dk and dv."""
        q, k = self._shard.q, self._shard.k
        clock = Stretches(q.device)
        self.inside.append(clock)
        with torch.no_grad(), self._ring.call(self._shard.plan, self._phase, q, k) as call:
            stills: list[Still] = []
            if self._kind == COMPUTE:
                stills = [Still(transport) for transport in call.transports]
                call = replace(call, transports=tuple(stills), posted=ignore_post)
            results = self._forward(call, clock) if self._phase == FORWARD else self._backward(call, clock)
            self.nbytes = sum(still.nbytes for still in stills)
        return results

    def _forward(self, call: Call, clock: Stretches) -> Tensors:
        shard = self._shard
        works = forward_backends(self._backend, call.chunks, shard.q, softmax_scale=shard.scale)
        loop.forward(call, self._dressed(works, clock), shard.k, shard.v)
        if self._kind == COMMUNICATION:
            return ()
        outs, lses = zip(*(work.result() for work in works), strict=True)
        return joined(outs, 2), joined(lses, 1)

    def _backward(self, call: Call, clock: Stretches) -> Tensors:
        shard = self._shard
        dkdv = torch.empty_like(shard.k), torch.empty_like(shard.v)
        works: Sequence[Any] = ()
        if self._kind != COMMUNICATION:
            assert shard.out is not None and shard.lse is not None
            tensors = (shard.dout, shard.q, shard.out, shard.lse)
            works = backward_backends(self._backend, call.chunks, *tensors, softmax_scale=shard.scale)
        loop.backward(call, self._dressed(works or [None] * len(call.chunks), clock), shard.k, shard.v, dkdv)
        return () if self._kind == COMMUNICATION else (joined([work.result() for work in works], 2), *dkdv)

    def _dressed(self, works: Sequence[Any], clock: Stretches) -> list[Any]:
        if self._kind == COMMUNICATION:
            return [Nothing() for _ in works]
        return [Clocked(work, clock, self._shard.q.device) for work in works]


# every ring


@dataclass(frozen=True)
class OverlapConfig:
    """What to measure; the same on every rank."""

    problem: AttentionConfig
    slots: tuple[int, ...] = (1, 2, 3)
    prefetch: tuple[int, ...] = (0, 1, 2)
    chunks: tuple[int, ...] = (1,)
    repeats: int = 5
    link_share: float | None = 0.8  # communication alone over compute alone; None: the link as it is
    timer: str = ""  # one of OF_RINGS; empty: the device's own

    @cached_property
    def settings(self) -> list[Setting]:
        """Of every ring that there is."""
        wanted = [(slots, ahead, chunks) for chunks in self.chunks for slots in self.slots for ahead in self.prefetch]
        return [setting for setting in wanted if self.reason(setting) == ""]

    @property
    def absent(self) -> list[str]:
        """Why there is no ring with the other buffers, a line each."""
        wanted = [(slots, ahead, 1) for slots in self.slots for ahead in self.prefetch]
        return [reason for reason in map(self.reason, wanted) if reason]

    def reason(self, setting: Setting) -> str:
        """Why there is no such ring; empty where there is."""
        slots, prefetch, _ = setting
        try:
            depth_of(slots, prefetch, self.problem.world)
        except ValueError as error:
            return str(error)
        return ""


def check(config: OverlapConfig, ranks_here: int) -> None:
    """Refuse a choice of which no ring can be made, and what does not fit this machine's free memory.

    Raises:
        typer.BadParameter: why there is none, or the tokens that fit.
    """
    if not config.settings:
        why = "; ".join(dict.fromkeys(config.absent))
        raise typer.BadParameter(f"no ring can be made with these --slots and --prefetch: {why}")
    problem, device = config.problem, torch.device(config.problem.device)

    def needed(tokens: int) -> Needs:
        longer = replace(problem, seqlen=tokens * problem.world)
        return needs_of_ranks(settings_bytes(longer, [slots for slots, _, _ in config.settings]), device, ranks_here)

    unit = f"tokens on each of {problem.world} ranks"
    refuse_too_large("--tokens", problem.seqlen // problem.world, needed, device, unit=unit)


def measure(place: Member, device: torch.device, config: OverlapConfig) -> Result:
    """One rank of the measurement; every rank has the rows."""
    problem = config.problem
    torch.set_num_threads(problem.threads)
    torch.manual_seed(problem.seed + place.rank)
    speed = None if config.link_share is None else link_speed(config, device)
    limits = Limits(bytes_per_second=speed)
    with ExitStack() as stack:
        rings = {}
        for slots, prefetch, chunks in config.settings:
            ring = Ring(transport=problem.transport, slots=slots, prefetch=prefetch, chunks=chunks, limits=limits)
            rings[slots, prefetch, chunks] = stack.enter_context(ring)
        with Progress(console=Console(stderr=True), disable=place.rank != 0, transient=True) as bar:
            rows = rows_of(config, rings, device, bar)
    throttled = "" if speed is None else f", link throttled to {human(speed, 'B/s')}"
    notes = [
        *(f"no ring: {reason}" for reason in config.absent),
        f"{problem.title}, over {ring.transport}{throttled}",
        f"slowest rank, medians of {config.repeats} interleaved runs",
        verdict(rows),
    ]
    return Result("bench overlap", UNITS, [*rows], notes=notes)


def link_speed(config: OverlapConfig, device: torch.device) -> float:
    """Bytes per second at which the transfers of a step take the wished share of its compute."""
    with Ring(transport=config.problem.transport, chunks=config.chunks[0]) as ring:
        shard = shard_of(config.problem, ring, device)
        steps = {phase: Step(ring, shard, phase, COMPUTE) for phase in PHASES}
        times = interleaved(steps, Clock(device, Ranks(), config.timer), repeats=PROBES)
    moved = Ranks().slowest(sum(step.nbytes for step in steps.values()))
    assert config.link_share is not None
    return moved / (config.link_share * sum(samples.median for samples in times.values()))


def rows_of(config: OverlapConfig, rings: dict[Setting, Ring], device: torch.device, bar: Progress) -> list[Row]:
    """Time everything in turns; a row per ring and phase, and per ring's step."""
    steps: dict[tuple[object, ...], Step] = {}
    for setting, ring in rings.items():
        shard = shard_of(config.problem, ring, device)
        for phase in PHASES:
            steps[*setting, phase] = Step(ring, shard, phase, TOGETHER)
            # alone, once for all rings with these chunks: the last one has the most buffers
            steps[setting[2], phase, COMPUTE] = Step(ring, shard, phase, COMPUTE)
            steps[setting[2], phase, COMMUNICATION] = Step(ring, shard, phase, COMMUNICATION)
    task = bar.add_task("timing", total=len(steps) * (config.repeats + 1))
    named: dict[str, Callable[[], object]] = {str(key): step for key, step in steps.items()}
    clock = Clock(device, Ranks(), config.timer)
    taken = interleaved(named, clock, repeats=config.repeats, progress=lambda: bar.advance(task))
    inside = {key: [run.seconds for run in step.inside[-config.repeats :]] for key, step in steps.items()}
    rows: list[Row] = []
    for setting in rings:
        chunks, phases = setting[2], []
        for phase in PHASES:
            alone = contention(inside[*setting, phase], inside[chunks, phase, COMPUTE])
            slowed = None if alone is None else Ranks().slowest(alone)
            compute, communication, together = (
                taken[str(key)] for key in ((chunks, phase, COMPUTE), (chunks, phase, COMMUNICATION), (*setting, phase))
            )
            phases.append(Times(compute, communication, together, config.problem.world * chunks, slowed))
        for phase, times in zip((*PHASES, STEP), (*phases, step_of(*phases)), strict=True):
            rows.append({**dict(zip(("slots", "prefetch", "chunks"), setting, strict=True)), **times.row(phase)})
    return rows


# what follows from the three times; formulas in bench/README.md


class Times(NamedTuple):
    """Compute alone, communication alone and together, of one phase of one ring."""

    compute: Samples
    communication: Samples
    together: Samples
    pieces: int = 1  # chunks of all hops of the phase that compute something
    contention: float | None = None  # compute while communicating over compute alone

    def row(self, phase: str) -> Row:
        """The columns."""
        compute, communication, together = (each.median for each in self[:3])
        larger = max(compute, communication)
        # what a ring that overlaps takes at most: the larger of the two, 5%, and one chunk of one hop
        bound = larger * (1 + ALLOWANCE) + compute / self.pieces
        return {
            "phase": phase,
            "together": together * 1e3,
            "spread": 100 * self.together.spread,
            "exposed": (together - compute) * 1e3,  # what compute does not hide
            # the part of what could be hidden that is: 100 where the shorter of the two costs nothing
            "overlap": 100 * (compute + communication - together) / min(compute, communication),
            "compute": compute * 1e3,
            "communication": communication * 1e3,
            "contention": self.contention,
            "efficiency": 100 * larger / together,  # of a ring that hides all it can
            "bound": bound * 1e3,
            "within bound": together <= bound,
        }


def step_of(forward: Times, backward: Times) -> Times:
    """Forward and backward of one ring as one step: the sums of their times, run by run."""

    def both(x: Samples, y: Samples) -> Samples:
        return Samples(tuple(a + b for a, b in zip(x.seconds, y.seconds, strict=True)))

    compute = both(forward.compute, backward.compute)
    slowed = None
    if forward.contention is not None and backward.contention is not None:
        share = forward.compute.median / compute.median
        slowed = share * forward.contention + (1 - share) * backward.contention
    return Times(
        compute,
        both(forward.communication, backward.communication),
        both(forward.together, backward.together),
        forward.pieces + backward.pieces,
        slowed,
    )


def contention(together: Sequence[float], alone: Sequence[float]) -> float | None:
    """How many times longer the same compute takes while something moves; None where there is none to compare."""
    if not together or not alone or not statistics.median(alone) > 0:
        return None
    return statistics.median(together) / statistics.median(alone)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the third buffer saves of a step, by chunks; beside it what runs spread by."""
    steps = {(row["slots"], row["prefetch"], row["chunks"]): row for row in rows if row["phase"] == STEP}
    saved = []
    for chunks in sorted({row["chunks"] for row in rows}):
        two, three = steps.get((2, 1, chunks)), steps.get((3, 2, chunks))
        if two is not None and three is not None:
            spread = max(two["spread"], three["spread"])
            saved.append(f"{100 - 100 * three['together'] / two['together']:+.1f}% ±{spread:.1f}% with {chunks} chunks")
    told = ", ".join(saved) or "not measured (--slots 2,3 --prefetch 1,2, three ranks or more)"
    return f"the third buffer saves of a step: {told}"
