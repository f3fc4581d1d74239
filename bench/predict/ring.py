"""How long a ring takes: its programs, what each operation costs, and the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels import Bounds
from ...ring.schedule.mask import UNLIMITED, Mask
from ...ring.schedule.plan import Plan
from .alike import UNIT, area_at, at_edges, crosses, crosses_inside, meeting, recorded, seen_at
from .apart import MOST_RANKS, is_local
from .apart import told_apart as choose_apart
from .call import Call
from .clock import Alike, Lanes, Track, needed, run, run_alike
from .launch import TILE_ROWS, Area, Device, Launch, area_of, whole
from .links import Links
from .program import COMPUTE, DKDV, DQ, FOLD, PASSES, Form, Op, Program, record
from .trouble import Trouble

SURELY_TOLD_APART = 16  # up to here it takes a moment
ROUNDS = 3  # until launches and who computes beside them agree


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
    trouble.check(call.world)
    alike = call.is_plain and call.world > SURELY_TOLD_APART and not told_apart and not device.on_host
    if call.world > MOST_RANKS and device.on_host:
        raise ValueError(f"{call.world} ranks at the speed of a CPU: at most {MOST_RANKS}, each told apart")
    if alike:
        return tuple(alike_pass(call, device, links, trouble, phase) for phase in phases)
    apart = choose_apart(call, trouble)
    plans = apart.plans()
    return tuple(_exact_pass(apart, plans, device, links, trouble, phase) for phase in phases)


def _exact_pass(call: Call, plans: Sequence[Plan], device: Device, links: Links, trouble: Trouble, phase: str) -> Pass:
    programs, costs = [], []
    noise = trouble.noise()
    for one in plans:
        program, alone = launches(call, one, device, phase)
        spent = trouble.slow.get(one.rank, 1.0) * np.array(alone) * noise(len(alone))
        programs.append(program)
        costs.append(slowed(program, spent.tolist(), _transfer_seconds(program, call, links), device.beside))
    tracks = run(programs, costs, message := _message_seconds(call, links))
    for _ in range(ROUNDS if device.alone < 1 else 0):  # times say who computes beside whom, and that says the times
        each = zip(tracks, costs, strict=True)
        tracks = run(programs, [eased(track, tracks, cost, device.alone) for track, cost in each], message)
    last = max(tracks, key=lambda track: track.seconds)
    by_hop = [0.0] * len(plans[0].hops)
    for op, wait in zip(last.program.ops, last.waits(), strict=True):
        by_hop[op.hop] += wait
    return Pass(phase, last.seconds, sum(by_hop), tuple(by_hop), tuple(tracks))


def _message_seconds(call: Call, links: Links) -> Callable[[int, int, int], float]:
    return lambda a, b, nbytes: links.of(call.node_of(a) == call.node_of(b)).seconds(nbytes)


def eased(track: Track, tracks: Sequence[Track], costs: Sequence[float], alone: float) -> list[float]:
    """Launches of one rank, whose ``costs`` are those beside all others, the faster the fewer others compute."""
    others = [other.busy() for other in tracks if other is not track]
    found = []
    for begin, end, cost in zip(track.begins, track.ends, costs, strict=True):
        beside = sum(overlap(begin, end, busy) for busy in others) / len(others) if others else 0.0
        share = beside / (end - begin) if end > begin else 0.0
        found.append(cost * (alone + (1 - alone) * share))
    return found


def overlap(begin: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds of ``[begin, end)`` in the intervals, which do not overlap one another."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in intervals)


def launches(call: Call, plan: Plan, device: Device, phase: str) -> tuple[Program, list[float]]:
    """The program of one rank, and seconds of each of its launches with nothing beside; of transfers 0."""
    form = replace(call.form, tokens=call.held.lengths[plan.rank], on_host=device.on_host)
    program = record(plan, form, phase)
    return program, [_launch_seconds(op, plan, form, device) for op in program.ops]


def _launch_seconds(op: Op, plan: Plan, form: Form, device: Device) -> float:
    if op.stream != COMPUTE:
        return 0.0
    hop_masks, keys = plan.hop_masks[op.hop], plan.lengths[op.hop] if op.hop else form.tokens
    if not hop_masks:
        return device.launch_seconds(Launch(op.what, op.hop, Area(0, form.tokens, keys, 0, 0)), form)
    seen = hop_masks[min(op.part, len(hop_masks) - 1)].bounds
    return device.launch_seconds(Launch(op.what, op.hop, _area(seen, form.tokens, keys), seen), form)


@lru_cache(4096)
def _area(seen: Bounds, rows: int, keys: int) -> Area:
    return area_of(seen, rows, keys)


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
    hops = np.array([op.hop for op in program.ops])
    return [float(one) for one in _slowed(hops, np.array(costs), np.array(transfers), beside)]


def _slowed(hops: npt.NDArray[np.int64], costs: Lanes, transfers: Lanes, beside: float) -> Lanes:
    """The same, of the hops of its operations."""
    if not beside or not len(hops):
        return costs
    moving, busy = np.bincount(hops, transfers), np.bincount(hops, costs)
    share = beside * np.minimum(moving, busy / (1 - beside)) / np.where(busy > 0, busy, 1.0)
    slower: Lanes = costs * (1 + share)[hops]
    return slower


KEPT = 8


class Kind(NamedTuple):
    """What launches that cost the same have in common."""

    what: str
    hop: int
    """The first of them."""
    part: int


@dataclass(frozen=True)
class Recorded:
    """A program of thousands of hops, of which few operations are not alike."""

    program: Program
    hops: npt.NDArray[np.int64]
    kinds: tuple[Kind, ...]
    kind: npt.NDArray[np.int64]
    """Of each launch its kind; of transfers 0, which is none."""
    nbytes: Lanes
    """Of each group of transfers its largest message, for ``UNIT`` tokens."""
    far: npt.NDArray[np.bool_]
    """Whether it leaves a node, ``[2, op]``: of ranks whose neighbours are in theirs, and of those at a node's edge."""


@lru_cache(KEPT)
def _recorded(call: Call, phase: str) -> Recorded:
    program = needed(recorded(call, phase))
    known: dict[tuple[str, bool, int], int] = {}
    kinds, kind = [Kind("", 0, 0)], []
    for op in program.ops:
        name = op.what, op.hop == 0, op.part
        if op.stream == COMPUTE and name not in known:
            known[name] = len(kinds)
            kinds.append(Kind(op.what, op.hop, op.part))
        kind.append(known[name] if op.stream == COMPUTE else 0)
    moved = [max((nbytes for _, nbytes in (*op.sends, *op.receives)), default=0) for op in program.ops]
    far = [[op.stream != COMPUTE and of(call, op) for op in program.ops] for of in (crosses_inside, crosses)]
    hops = np.array([op.hop for op in program.ops])
    return Recorded(program, hops, tuple(kinds), np.array(kind), np.array(moved, np.float64), np.array(far))


def alike_pass(call: Call, device: Device, links: Links, trouble: Trouble, phase: str) -> Pass:
    """A pass of a plain call, one rank's program for all."""
    if not trouble.is_there:
        found = cases([call], device, links, phase)
        return Pass(phase, float(found.seconds[0]), float(found.waited[0]), tuple(found.by_hop.values()))
    meet, noise = meeting(call), trouble.noise()
    told = np.stack([meet.lanes(trouble.factors(call.world)), meet.lanes(at_edges(call))])
    kinds, kind = np.unique(told.reshape(2, -1), axis=1, return_inverse=True)
    each = [_alike_costs(call, device, links, phase, factor, at_edge=bool(edge)) for factor, edge in kinds.T]
    program, shape = each[0][0], told.shape[1:]
    costs, groups = (np.array([one[index] for one in each]).T for index in (1, 2))

    def spread(values: Lanes) -> Lanes:
        return values[kind].reshape(shape) if len({*values.tolist()}) > 1 else values[:1]

    def spent(op: Op, values: Lanes) -> Lanes:
        if not values.any():
            return values[:1]
        return spread(values) * seen_at(call, op.hop, meet) * noise(call.world).reshape(shape)

    found = run_alike(program, map(spent, program.ops, costs), map(spread, groups), meet)
    seconds, waited = np.broadcast_arrays(found.seconds, found.waited)
    last = int(seconds.argmax())
    return Pass(phase, float(seconds.flat[last]), float(waited.flat[last]), tuple(found.by_hop.values()))


def cases(calls: Sequence[Call], device: Device, links: Links, phase: str) -> Alike:
    """Plain calls that differ in their tokens alone, a lane each."""
    each = [_alike_costs(call, device, links, phase) for call in calls]
    program = each[0][0]
    costs, groups = (np.array([one[index] for one in each]).T for index in (1, 2))
    return run_alike(program, list(costs), list(groups))


def _alike_costs(
    call: Call, device: Device, links: Links, phase: str, factor: float = 1.0, *, at_edge: bool = True
) -> tuple[Program, Lanes, Lanes]:
    """Rank 0's program, seconds of its launches on a rank that takes ``factor`` times as long, and of its groups.

    Ranks that are all alike wait for those at a node's edge.
    """
    made = _recorded(replace(call, tokens=UNIT), phase)
    form = replace(call.form, on_host=device.on_host)
    each = [
        device.launch_seconds(Launch(one.what, one.hop, area_at(call, one.hop)), form) if one.what else 0.0
        for one in made.kinds
    ]
    near, far = links.of(True), links.of(False)
    moved = made.nbytes * (call.tokens / UNIT)
    seconds = np.where(made.far[int(at_edge)], far.latency + moved / far.rate, near.latency + moved / near.rate)
    groups = np.where(made.nbytes > 0, seconds, 0.0)
    return made.program, _slowed(made.hops, factor * np.array(each)[made.kind], groups, device.beside), groups


def ideal_seconds(call: Call, device: Device, phase: str) -> float:
    """Of one device with all the work, divided by the ranks."""
    form = replace(call.form, tokens=call.seqlen, chunks=1, on_host=device.on_host)
    parts: list[tuple[Area, Bounds | None]] = [(whole(call.seqlen, causal=call.mask.causal), None)]
    if device.on_host or call.mask != Mask(causal=call.mask.causal):
        parts = [(_local(call), None)] if is_local(call.mask) and not device.on_host else _parts(call, call.seqlen)
    what = (FOLD,) if phase == "forward" else (DQ, DKDV)
    each = (Launch(one, 0, area, bounds) for one in what for area, bounds in parts)
    return sum(device.launch_seconds(one, form) for one in each) / call.world


def _parts(call: Call, seqlen: int) -> list[tuple[Area, Bounds | None]]:
    """What one device with so many tokens sees, part by part of the mask."""
    alone = replace(call, tokens=seqlen, world=1, nodes=1, layout="contiguous", speeds=())
    seen = [hop_mask.bounds for hop_mask in alone.plans()[0].hop_masks[0]]
    return [(area_of(one, seqlen, seqlen), one) for one in seen]


def _local(call: Call) -> Area:
    """The same of a window, without all positions: past its reach every tile of rows has the same area."""
    reach = sum(side for side in call.mask.window if side != UNLIMITED)
    short = TILE_ROWS * (2 + reach // TILE_ROWS) + call.seqlen % TILE_ROWS
    if call.seqlen <= short + TILE_ROWS:
        return _parts(call, call.seqlen)[0][0]
    few, more = (_parts(call, tokens)[0][0] for tokens in (short, short + TILE_ROWS))
    tiles = (call.seqlen - short) / TILE_ROWS
    return Area(*(one + tiles * (other - one) for one, other in zip(few, more, strict=True)))
