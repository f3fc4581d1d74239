"""How long a ring takes: its programs, what each operation costs, and the clock.

Up to ``MOST_SIMULATED`` ranks are all simulated. The time of a plain ring is a straight line in the number of nodes,
and of ranks in a node: larger ones are extrapolated from two small ones, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...kernels import Bounds
from ...ring.schedule.plan import Plan
from .call import Call, area_of
from .clock import Track, run, slowed
from .links import Links
from .program import COMPUTE, PASSES, Op, Program, record
from .speed import DKDV, DQ, FOLD, MOST_RANKS, NONE, Area, Perturbation, Seconds, Speed

UNIT = 256  # tokens of a rank that a plain ring's program is recorded with: bytes are in proportion
MOST_SIMULATED = 32  # ranks of a plain ring: more takes no longer by a straight line, and says the same
LEAST_RANKS, MORE_RANKS = 16, 8  # of the smaller of two rings, and how many more the larger has
LEAST_NODES, MORE_NODES = 3, 2
LATE_NODES = 6  # of causal contiguous shards in a flat ring over nodes, whose line is straight from there on
LARGE_NODE, SMALL_NODE = 16, 12  # ranks: of a larger node than the first, two smaller ones are simulated
SURELY_TIED = 1e-9  # of the time of a pass: ranks that end together


@dataclass(frozen=True)
class Pass:
    """A forward, or a backward; numbers, or arrays of as many cases."""

    phase: str
    seconds: Seconds
    """Until the last rank is done."""
    exposed: Seconds = 0.0
    """Of it the compute stream of the rank that is done last stood still."""
    worst: Seconds = 0.0
    """The same before the launches of one hop, of the hop that waited longest."""
    tracks: tuple[Track, ...] = ()
    """What every rank did when; empty where a smaller ring was simulated."""

    def along(self, larger: Pass, share: float) -> Pass:
        """On the straight line through this and the pass of a larger ring."""

        def at(one: Seconds, other: Seconds) -> Seconds:
            return one + (other - one) * share

        # of contiguous causal shards over nodes it grows with the ring, of others it is that of any
        worst = np.maximum(self.worst, at(self.worst, larger.worst))[()]
        return Pass(self.phase, at(self.seconds, larger.seconds), at(self.exposed, larger.exposed), worst)


def predicted(
    call: Call,
    speed: Speed,
    links: Links,
    perturbation: Perturbation = NONE,
    *,
    phases: Sequence[str] = PASSES,
    tokens: Any = None,
    simulated: bool = False,
) -> tuple[Pass, ...]:
    """The passes of a call.

    Args:
        call: what is computed, on how many ranks.
        speed: of a GPU.
        links: what joins them.
        perturbation: slow ranks, and launches that vary: every time is an array of its draws.
        phases: which passes.
        tokens: of a rank, many lengths (floats) in the place of the call's: every time is an array of theirs.
        simulated: every rank, where two smaller rings could stand for all.

    Raises:
        ValueError: more ranks than are simulated, where a mask or a layout has them do different things.
    """

    def of(one: Call, phase: str) -> Pass:
        return _simulated(one, speed, links, perturbation, phase, tokens)

    return passes_of(call, of, perturbation, phases, simulated=simulated)


def passes_of(
    call: Call,
    of: Callable[[Call, str], Pass],
    perturbation: Perturbation,
    phases: Sequence[str],
    *,
    simulated: bool = False,
) -> tuple[Pass, ...]:
    """Every pass by ``of``; without a perturbation on the straight line, where the call has many ranks."""
    perturbation.check(call.world)
    every = simulated or perturbation.is_there
    return tuple(of(call, phase) if every else _stretched(call, phase, of) for phase in phases)


def _stretched(call: Call, phase: str, of: Callable[[Call, str], Pass]) -> Pass:
    """A pass by ``of`` or, where there are many ranks, on the straight line through those of two smaller rings."""
    pair = _smaller(call)
    if pair is None:
        return of(call, phase)
    near, far, share = pair
    return _stretched(near, phase, of).along(_stretched(far, phase, of), share)


def _smaller(call: Call) -> tuple[Call, Call, float] | None:
    """Two smaller rings, and how far beyond the first the call is in steps to the second; None: it is simulated.

    Raises:
        ValueError: a call that is not simulated, and whose time is no straight line.
    """
    if call.world <= (MOST_SIMULATED if call.is_plain else MOST_RANKS):
        return None
    if not call.is_plain:
        raise ValueError(
            f"{call.world} GPUs with this layout and mask do different things: at most {MOST_RANKS} are simulated; "
            "more of contiguous, zigzag (of even shards) and striped, full or causal"
        )
    unit, steps = (call.per_node, call.nodes) if call.nodes > 1 else (1, call.world)
    if unit > LARGE_NODE:
        small, large = (replace(call, world=size * call.nodes) for size in (SMALL_NODE, LARGE_NODE))
        return small, large, (unit - SMALL_NODE) / (LARGE_NODE - SMALL_NODE)
    late = call.layout == "contiguous" and call.mask.causal and call.nodes > 1 and not call.is_two_level
    near = max(-(-max(LEAST_RANKS, 2 * call.slots) // unit), LATE_NODES if late else LEAST_NODES)
    far = near + max(MORE_RANKS // unit, MORE_NODES)
    if far >= steps:
        return None
    small, large = (replace(call, world=unit * n, nodes=n if call.nodes > 1 else 1) for n in (near, far))
    return small, large, (steps - near) / (far - near)


@lru_cache(8)
def recorded(call: Call, phase: str) -> tuple[tuple[Plan, Program], ...]:
    """Plan and program of every rank."""
    return tuple((one, record(call, one, phase, tokens=call.held.lengths[one.rank])) for one in call.plans())


def _simulated(call: Call, speed: Speed, links: Links, perturbation: Perturbation, phase: str, tokens: Any) -> Pass:
    plain = call.is_plain
    tokens = call.tokens if tokens is None else tokens
    made = recorded(replace(call, tokens=UNIT) if plain else call, phase)
    price = _plain_price(call, speed, tokens) if plain else _price(call, speed)
    costs = [[price(plan, op) if op.stream == COMPUTE else 0.0 for op in program.ops] for plan, program in made]
    factor = tokens / UNIT if plain else 1.0
    programs = [program for _, program in made]
    return simulated(programs, costs, messages(call, links, factor), speed.beside, lambda op: speed.host, perturbation)


def simulated(
    programs: Sequence[Program],
    costs: Sequence[Sequence[Seconds]],
    message: Callable[[int, int, int], Seconds],
    beside: float,
    host: Callable[[Op], float],
    perturbation: Perturbation = NONE,
) -> Pass:
    """A pass of all ranks, given what their launches cost with nothing beside."""
    spent = []
    for program, alone in zip(programs, costs, strict=True):
        if perturbation.is_there:
            factors = perturbation.factors(program.rank, program.phase, len(alone))
            alone = [cost * factor for cost, factor in zip(alone, factors, strict=True)]
        spent.append(slowed(program, alone, [_transfer(program.rank, op, message) for op in program.ops], beside))
    tracks = run(programs, spent, message, host)
    hops = 1 + max(op.hop for program in programs for op in program.ops)
    ends = np.array([np.atleast_1d(track.seconds) for track in tracks])  # [rank, case]
    waits = np.array([[np.broadcast_to(one, ends.shape[1:]) for one in track.waits(hops)] for track in tracks])
    # of ranks that end together the one that waited least
    tied = ends >= ends.max(axis=0) * (1 - SURELY_TIED)
    last = np.where(tied, waits.sum(axis=1), np.inf).argmin(axis=0)
    mine = np.take_along_axis(waits, last[None, None], axis=0)[0]  # [hop, case]
    results: list[Seconds] = [ends.max(axis=0), mine.sum(axis=0), mine.max(axis=0)]
    if ends.shape[1] == 1:
        results = [float(one[0]) for one in results]
    return Pass(programs[0].phase, results[0], results[1], results[2], tuple(tracks))


def _transfer(rank: int, op: Op, message: Callable[[int, int, int], Seconds]) -> Seconds:
    """Of a group once both its ends are there: its longest message."""
    times = [message(rank, peer, nbytes) for peer, nbytes in (*op.sends, *op.receives)]
    return times[0] if len(times) == 1 else np.max(times, axis=0) if times else 0.0


def messages(call: Call, links: Links, factor: Any = 1.0) -> Callable[[int, int, int], Seconds]:
    """Seconds of a message, whose bytes are so many times those that were recorded."""
    near, far = links.inside, links.far(call.senders)

    @lru_cache(None)
    def seconds(same_node: bool, nbytes: int) -> Seconds:
        return (near if same_node else far).seconds(nbytes * factor)

    return lambda a, b, nbytes: seconds(call.node_of(a) == call.node_of(b), nbytes)


def _plain_price(call: Call, speed: Speed, tokens: Any) -> Callable[[Plan, Op], Seconds]:
    """Of a launch of a plain ring."""

    @lru_cache(None)
    def seconds(what: str, ahead: int, first: bool) -> Seconds:
        needed = speed.seconds(what, call.plain_area(ahead, tokens), call, hop=0 if first else 1)
        return needed if np.ndim(needed) else float(needed)

    def price(plan: Plan, op: Op) -> Seconds:
        shard = plan.hops[op.hop].shard
        return seconds(op.what, (shard > plan.rank) - (shard < plan.rank), op.hop == 0)

    return price


def _price(call: Call, speed: Speed) -> Callable[[Plan, Op], Seconds]:
    """The same of any other: what is seen is looked up in the plan."""

    def price(plan: Plan, op: Op) -> Seconds:
        rows = call.held.lengths[plan.rank]
        hop_masks, keys = plan.hop_masks[op.hop], plan.lengths[op.hop] if op.hop else rows
        area = Area(0, rows, keys, 0, 0)
        if hop_masks:
            area = _area(hop_masks[min(op.part, len(hop_masks) - 1)].bounds, rows, keys)
        return float(speed.seconds(op.what, area, call, hop=op.hop))

    return price


@lru_cache(1 << 15)
def _area(seen: Bounds, rows: int, keys: int) -> Area:
    return area_of(seen, rows, keys)


def ideal_seconds(call: Call, speed: Speed, phase: str, tokens: Any = None) -> Seconds:
    """Of one device with all the work, divided by the ranks; ``tokens`` of a rank, if not the call's."""
    what = (FOLD,) if phase == "forward" else (DQ, DKDV)
    alone = replace(call, chunks=1)
    return sum(speed.seconds(one, area, alone, hop=0) for one in what for area in call.areas(tokens)) / call.world
