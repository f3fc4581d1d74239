"""How long a ring takes: its programs, what each operation costs, and the clock.

Up to ``MOST_SIMULATED`` ranks are all simulated. The time of a plain ring, and of a window that reaches few of its
ranks, is a straight line in the number of nodes, and of ranks in a node: larger ones are extrapolated from two small
ones, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...kernels import Bounds
from ...ring.schedule.mask import UNLIMITED, Mask
from ...ring.schedule.plan import Plan
from ...ring.schedule.schedule import schedule
from .call import Call, area_of
from .clock import Track, run, slowed
from .links import Links
from .perturbation import MOST_RANKS, NONE, Perturbation
from .program import COMPUTE, PASSES, Form, Op, Program, record
from .speed import DKDV, DQ, FOLD, TILE_ROWS, Area, Seconds, Speed, whole

UNIT = 256  # tokens of a rank that a plain ring's program is recorded with: bytes are in proportion
MOST_SIMULATED = 32  # ranks of a plain ring: more takes no longer by a straight line, and says the same
LEAST_RANKS, MORE_RANKS = 16, 8  # of the smaller of two rings, and how many more the larger has
LEAST_NODES, MORE_NODES = 3, 2
LATE_NODES = 6  # of causal contiguous shards in a flat ring over nodes, whose line is straight from there on
LARGE_NODE, SMALL_NODE = 16, 12  # ranks: of a larger node than the first, two smaller ones are simulated
SURELY_TIED = 1e-9  # of the time of a pass: ranks that end together
WINDOWED = (64, 128)  # ranks of two rings with a window, which have to be larger than it reaches


@dataclass(frozen=True)
class Pass:
    """A forward, or a backward; numbers, or arrays of as many cases."""

    phase: str
    seconds: Seconds
    """Until the last rank is done."""
    exposed: Seconds
    """Of it the compute stream of the rank that is done last stood still."""
    worst: Seconds
    """The same before the launches of one hop, of the hop that waited longest."""
    tracks: tuple[Track, ...] = ()
    """What every rank did when; empty where a smaller ring was simulated."""

    def along(self, larger: Pass, share: float) -> Pass:
        """On the straight line through this and the pass of a larger ring."""

        def at(one: Seconds, other: Seconds) -> Seconds:
            return one + (other - one) * share

        worst = np.maximum(self.worst, larger.worst)[()]
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
    perturbation.check(call.world)

    def of(one: Call) -> tuple[Pass, ...]:
        return tuple(_simulated(one, speed, links, perturbation, phase, tokens) for phase in phases)

    return of(call) if simulated or perturbation.is_there else stretched(call, of)


def stretched(call: Call, of: Callable[[Call], tuple[Pass, ...]]) -> tuple[Pass, ...]:
    """``of`` a call or, where it has many ranks, on the straight line through those of two smaller rings.

    Raises:
        ValueError: it has many, and no smaller ring does the same.
    """
    pair = _smaller(call)
    if pair is None:
        return of(call)
    near, far, share = pair
    return tuple(one.along(other, share) for one, other in zip(stretched(near, of), stretched(far, of), strict=True))


def _smaller(call: Call) -> tuple[Call, Call, float] | None:
    """Two smaller rings, and how far beyond the first the call is in steps to the second; None: it is simulated.

    Raises:
        ValueError: a call that is not simulated, and whose time is no straight line.
    """
    if call.world <= (MOST_SIMULATED if call.is_plain else MOST_RANKS):
        return None
    unit, steps = (call.per_node, call.nodes) if call.nodes > 1 else (1, call.world)
    if not call.is_plain:
        near, far = (world // unit for world in WINDOWED)
    elif unit > LARGE_NODE:
        small, large = (replace(call, world=size * call.nodes) for size in (SMALL_NODE, LARGE_NODE))
        return small, large, (unit - SMALL_NODE) / (LARGE_NODE - SMALL_NODE)
    else:
        late = call.layout == "contiguous" and call.mask.causal and call.nodes > 1 and not call.is_two_level
        near = max(-(-max(LEAST_RANKS, 2 * call.slots) // unit), LATE_NODES if late else LEAST_NODES)
        far = near + max(MORE_RANKS // unit, MORE_NODES)
    if far >= steps and call.is_plain:
        return None
    small, large = (replace(call, world=unit * n, nodes=n if call.nodes > 1 else 1) for n in (near, far) if n)
    if not call.is_plain and not _is_straight(small, large):
        raise ValueError(
            f"{call.world} GPUs with this layout and mask do different things: at most {MOST_RANKS} are simulated; "
            "more of contiguous, zigzag (of even shards) and striped, full or causal, and of both former with a "
            f"window that ends on both sides and reaches fewer than {WINDOWED[0]} ranks"
        )
    return small, large, (steps - near) / (far - near)


def _is_straight(small: Call, large: Call) -> bool:
    """Whether ranks meet few others by a window that ends on both sides, as many in the one ring as in the other."""
    in_runs = small.layout == "contiguous" or (small.layout == "zigzag" and small.tokens % 2 == 0)
    if not is_local(small.mask) or not in_runs:
        return False
    count, more = (len(schedule(one.held, one.mask, topology=one.topology).hops(0)) for one in (small, large))
    return count == more


def is_local(mask: Mask) -> bool:
    """Whether a window alone says what is seen, and ends on both sides."""
    left, right = mask.window
    ends = left != UNLIMITED and (mask.causal or right != UNLIMITED)
    return ends and mask == Mask(causal=mask.causal, window=mask.window)


@lru_cache(8)
def recorded(call: Call, phase: str) -> tuple[tuple[Plan, Program], ...]:
    """Plan and program of every rank."""
    lengths = call.held.lengths
    return tuple((one, record(one, replace(call.form, tokens=lengths[one.rank]), phase)) for one in call.plans())


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
    found: list[Seconds] = [ends.max(axis=0), mine.sum(axis=0), mine.max(axis=0)]
    if ends.shape[1] == 1:
        found = [float(one[0]) for one in found]
    return Pass(programs[0].phase, found[0], found[1], found[2], tuple(tracks))


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
        found = speed.seconds(what, call.plain_area(ahead, tokens), call.form, hop=0 if first else 1)
        return found if np.ndim(found) else float(found)

    def price(plan: Plan, op: Op) -> Seconds:
        shard = plan.hops[op.hop].shard
        return seconds(op.what, (shard > plan.rank) - (shard < plan.rank), op.hop == 0)

    return price


def _price(call: Call, speed: Speed) -> Callable[[Plan, Op], Seconds]:
    """The same of any other: what is seen is looked up in the plan."""
    lengths = call.held.lengths

    def price(plan: Plan, op: Op) -> Seconds:
        rows = lengths[plan.rank]
        hop_masks, keys = plan.hop_masks[op.hop], plan.lengths[op.hop] if op.hop else rows
        area = Area(0, rows, keys, 0, 0)
        if hop_masks:
            area = _area(hop_masks[min(op.part, len(hop_masks) - 1)].bounds, rows, keys)
        return float(speed.seconds(op.what, area, replace(call.form, tokens=rows), hop=op.hop))

    return price


@lru_cache(1 << 15)
def _area(seen: Bounds, rows: int, keys: int) -> Area:
    return area_of(seen, rows, keys)


def ideal_seconds(call: Call, speed: Speed, phase: str, tokens: Any = None) -> Seconds:
    """Of one device with all the work, divided by the ranks."""
    form = replace(call.form, chunks=1)
    what = (FOLD,) if phase == "forward" else (DQ, DKDV)
    areas = areas_seen(call, tokens)
    return sum(speed.seconds(one, area, form, hop=0) for one in what for area in areas) / call.world


def areas_seen(call: Call, tokens: Any = None) -> list[Area]:
    """What one device with all tokens sees, part by part of the mask; ``tokens`` of a rank, if not the call's."""
    if is_local(call.mask):
        return [_window_area(call)]
    if call.mask != Mask(causal=call.mask.causal):
        return _seen_alone(call, call.seqlen)
    return [whole((call.tokens if tokens is None else tokens) * call.world, causal=call.mask.causal)]


def _seen_alone(call: Call, seqlen: int) -> list[Area]:
    """What one device with so many tokens sees, part by part of the mask."""
    alone = replace(call, tokens=seqlen, world=1, nodes=1, layout="contiguous", speeds=())
    return [area_of(sight.bounds, seqlen, seqlen) for sight in alone.plans()[0].hop_masks[0]]


def _window_area(call: Call) -> Area:
    """The same of a window, without all positions: past its reach every tile of rows has the same area."""
    reach = sum(side for side in call.mask.window if side != UNLIMITED)
    short = TILE_ROWS * (2 + reach // TILE_ROWS) + call.seqlen % TILE_ROWS
    if call.seqlen <= short + TILE_ROWS:
        return _seen_alone(call, call.seqlen)[0]
    few, more = (_seen_alone(call, tokens)[0] for tokens in (short, short + TILE_ROWS))
    tiles = (call.seqlen - short) / TILE_ROWS
    return Area(*(one + tiles * (other - one) for one, other in zip(few, more, strict=True)))


def form_of(
    *, tokens: int, heads: int, kv_heads: int | None = None, head_dim: int = 128, batch: int = 1, dtype: Any = None
) -> Form:
    """A form with the ring's usual settings, of 16 bits."""
    call = Call(tokens, 1, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, batch=batch)
    return call.form if dtype is None else replace(call.form, dtype=dtype)
