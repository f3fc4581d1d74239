"""How long a ring takes: its programs, what each operation costs, and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from ...kernels import Bounds
from ...ring.mask import Mask, bounds
from ...ring.plan import Plan
from .alike import UNIT, area_at, crosses, meeting, recorded
from .call import Call
from .clock import Alike, Lanes, Track, run, run_alike
from .launch import Area, Device, Launch, area_of, whole
from .links import Links
from .program import COMPUTE, DKDV, DQ, FOLD, PASSES, Form, Op, Program, record

MOST_RANKS = 128  # of a ring whose ranks are told apart: each takes a program, and there are world x world hops
SURELY_TOLD_APART = 16  # up to here it takes a moment
MOST_LANES = 1024  # of ranks that do the same, but not in the same time


@dataclass(frozen=True)
class Trouble:
    """What is not as it should be: ranks that are slow, and launches that vary."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank how many times as long its launches take."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a launch's time, drawn for each."""
    seed: int = 0

    @property
    def is_there(self) -> bool:
        return bool(self.slow) or self.jitter > 0


@dataclass(frozen=True)
class Pass:
    """A forward, or a backward."""

    phase: str
    seconds: float
    """Until the last rank is done."""
    waited: float
    """Of it launches stood still, on the rank that is done last, for what had not arrived yet."""
    by_hop: tuple[float, ...]
    """The same per hop; of ranks told apart on the last one, else the mean."""
    tracks: tuple[Track, ...] = ()
    """What every rank did when; empty where one stands for all."""


def predicted(
    call: Call,
    device: Device,
    links: Links,
    trouble: Trouble | None = None,
    *,
    phases: Sequence[str] = PASSES,
    told_apart: bool = False,
) -> tuple[Pass, ...]:
    """The passes of a call; ``told_apart`` asks for every rank's own program where one could stand for all.

    Raises:
        ValueError: more ranks than can be told apart, where a mask or a layout has them do different things.
    """
    trouble = trouble or Trouble()
    wrong = [rank for rank in trouble.slow if not 0 <= rank < call.world]
    if wrong:
        raise ValueError(f"slow names rank {wrong[0]}: ranks are 0 to {call.world - 1}")
    alike = call.is_plain and call.world > SURELY_TOLD_APART and not told_apart and not device.on_host
    if call.world > MOST_RANKS and device.on_host:
        raise ValueError(f"{call.world} ranks at the speed of a CPU: at most {MOST_RANKS}, each told apart")
    if call.world > MOST_RANKS and not alike:
        raise ValueError(
            f"{call.world} GPUs with this layout and mask do different things: at most {MOST_RANKS} are told apart. "
            "More are predicted for contiguous, zigzag (of even shards) and striped, full or causal"
        )
    if alike:
        return tuple(_alike_pass(call, device, links, trouble, phase) for phase in phases)
    plans = call.plans()
    return tuple(_exact_pass(call, plans, device, links, trouble, phase) for phase in phases)


def _exact_pass(call: Call, plans: Sequence[Plan], device: Device, links: Links, trouble: Trouble, phase: str) -> Pass:
    programs, costs = [], []
    draw = np.random.default_rng(trouble.seed)
    for one in plans:
        program, spent = launches(call, one, device, phase)
        factor = trouble.slow.get(one.rank, 1.0)
        spent = [seconds * factor for seconds in spent]
        if trouble.jitter:
            spent = list(np.array(spent) * np.exp(draw.normal(0.0, trouble.jitter, len(spent))))
        programs.append(program)
        costs.append(slowed(program, spent, _transfer_seconds(program, call, links), device.beside))
    tracks = run(programs, costs, lambda a, b, nbytes: links.of(call.node_of(a) == call.node_of(b)).seconds(nbytes))
    last = max(tracks, key=lambda track: track.seconds)
    by_hop = [0.0] * len(plans[0].hops)
    for op, wait in zip(last.program.ops, last.waits(), strict=True):
        by_hop[op.hop] += wait
    return Pass(phase, last.seconds, sum(by_hop), tuple(by_hop), tuple(tracks))


def launches(call: Call, plan: Plan, device: Device, phase: str) -> tuple[Program, list[float]]:
    """The program of one rank, and seconds of each of its launches with nothing beside; of transfers 0."""
    form = replace(call.form, tokens=call.held().lengths[plan.rank], on_host=device.on_host)
    program = record(plan, form, phase)
    return program, [_launch_seconds(op, plan, form, device) for op in program.ops]


def _launch_seconds(op: Op, plan: Plan, form: Form, device: Device) -> float:
    if op.stream != COMPUTE:
        return 0.0
    sights, keys = plan.sights[op.hop], plan.lengths[op.hop] if op.hop else form.tokens
    if not sights:
        return device.launch_seconds(Launch(op.what, op.hop, Area(0, form.tokens, keys, 0, 0)), form)
    bounds = sights[min(op.part, len(sights) - 1)].bounds
    return device.launch_seconds(Launch(op.what, op.hop, _area(bounds, form.tokens, keys), bounds), form)


@lru_cache(4096)
def _area(bounds: Bounds, rows: int, keys: int) -> Area:
    return area_of(bounds, rows, keys)


def _transfer_seconds(program: Program, call: Call, links: Links) -> list[float]:
    """Of every group, once both ends are there: its longest message."""
    rank, found = program.rank, []
    for op in program.ops:
        messages = (*op.sends, *op.receives)
        times = [links.of(call.node_of(rank) == call.node_of(peer)).seconds(nbytes) for peer, nbytes in messages]
        found.append(max(times, default=0.0))
    return found


def slowed(program: Program, costs: Sequence[float], transfers: Sequence[float], beside: float) -> list[float]:
    """Launches take longer for what is posted during their hop, and moves while they compute."""
    if not beside:
        return list(costs)
    moving: dict[int, float] = {}
    computing: dict[int, float] = {}
    for op, cost, seconds in zip(program.ops, costs, transfers, strict=True):
        moving[op.hop] = moving.get(op.hop, 0.0) + seconds
        computing[op.hop] = computing.get(op.hop, 0.0) + cost
    shares = {
        hop: 1 + beside * min(moving.get(hop, 0.0), busy / (1 - beside)) / busy
        for hop, busy in computing.items()
        if busy
    }
    return [cost * shares.get(op.hop, 1.0) for op, cost in zip(program.ops, costs, strict=True)]


KEPT = 8
_recorded = lru_cache(KEPT)(recorded)


def _alike_pass(call: Call, device: Device, links: Links, trouble: Trouble, phase: str) -> Pass:
    if not trouble.is_there:
        found = cases([call], device, links, phase)
        return Pass(phase, float(found.seconds[0]), float(found.waited[0]), tuple(found.by_hop.values()))
    program, costs, groups = _alike_costs(call, device, links, phase)
    if call.world > MOST_LANES:
        if trouble.jitter:
            raise ValueError(f"jitter is told for {MOST_LANES} GPUs at most, and there are {call.world}")
        # all wait for the slowest at every hop but for what the slots hold: as if everyone were as slow
        worst = max(trouble.slow.values())
        found = run_alike(program, [np.array([cost * worst]) for cost in costs], [np.array([one]) for one in groups])
        return Pass(phase, float(found.seconds[0]), float(found.waited[0]), tuple(found.by_hop.values()))
    factor = np.ones(call.world)
    for rank, times in trouble.slow.items():
        factor[rank] = times
    draw = np.random.default_rng(trouble.seed)

    def spread(cost: float) -> Lanes:
        noise = np.exp(draw.normal(0.0, trouble.jitter, call.world)) if trouble.jitter else 1.0
        return cost * factor * noise

    found = run_alike(program, [spread(cost) if cost else 0.0 for cost in costs], groups, meeting(call))
    last = int(found.seconds.argmax())
    return Pass(phase, float(found.seconds[last]), float(found.waited[last]), tuple(found.by_hop.values()))


def cases(calls: Sequence[Call], device: Device, links: Links, phase: str) -> Alike:
    """Plain calls that differ in their tokens alone, a lane each."""
    each = [_alike_costs(call, device, links, phase) for call in calls]
    program = each[0][0]
    costs, groups = (np.array([one[index] for one in each]).T for index in (1, 2))
    return run_alike(program, list(costs), list(groups))


def _alike_costs(call: Call, device: Device, links: Links, phase: str) -> tuple[Program, list[float], list[float]]:
    """Rank 0's program, seconds of its launches, and of its groups."""
    program = _recorded(replace(call, tokens=UNIT), phase)
    form, known = replace(call.form, on_host=device.on_host), dict[tuple[str, bool, int], float]()
    costs, groups = [], []
    for op in program.ops:
        if op.stream != COMPUTE:
            nbytes = max(nbytes for _, nbytes in (*op.sends, *op.receives)) * call.tokens / UNIT
            groups.append(links.of(not crosses(call, op)).seconds(nbytes))
            costs.append(0.0)
            continue
        name = op.what, op.hop == 0, op.part
        if name not in known:
            known[name] = device.launch_seconds(Launch(op.what, op.hop, area_at(call, op.hop)), form)
        costs.append(known[name])
        groups.append(0.0)
    return program, slowed(program, costs, groups, device.beside), groups


def ideal_seconds(call: Call, device: Device, phase: str) -> float:
    """Of one device with all the work, divided by the ranks."""
    area, seen = whole(call.seqlen, causal=call.mask.causal), None
    if device.on_host or call.mask != Mask(causal=call.mask.causal):
        positions = torch.arange(call.seqlen)
        seen = bounds(call.mask, positions, positions)
        area = area_of(seen, call.seqlen, call.seqlen)
    form = replace(call.form, tokens=call.seqlen, chunks=1, on_host=device.on_host)
    what = (FOLD,) if phase == "forward" else (DQ, DKDV)
    return sum(device.launch_seconds(Launch(one, 0, area, seen), form) for one in what) / call.world
