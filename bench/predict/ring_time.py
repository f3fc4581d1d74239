"""The time of a ring, from its programs, the cost of each operation and the simulated clock.

Up to ``MOST_SIMULATED`` ranks are simulated one by one. The time of a plain ring grows linearly with the number of
nodes, and with the number of ranks of a node. Larger rings are therefore extrapolated from two small ones, exactly up
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...ring.buffers import KV_KINDS, PostKey, TransferKind
from ...ring.schedule.plan import Plan
from ...ring.trace import CompletedPost, TimeInterval, slot_trace
from ..common.attention import mask_data
from ..timeline.events import Event, Timeline
from .links import ClusterLinks
from .predicted_call import PredictedCall, bounds_area
from .program import COMPUTE, PASSES, Op, Program, record_program
from .simulator import RankTimes, run_programs, slow_launches
from .speed import DKDV, DQ, FOLD, NO_PERTURBATION, POINT, Area, Perturbation, Seconds, Speed

RECORDED_TOKENS = 256  # tokens per rank in recorded programs of plain rings; bytes scale with the real tokens
MOST_SIMULATED = 32  # ranks of a plain ring; larger ones are extrapolated
MOST_MASKED = 1024  # ranks of any other ring, simulated one by one in up to minutes
LEAST_RANKS, MORE_RANKS = 16, 8  # size of the smaller simulated ring, and how many more ranks the larger one has
LEAST_NODES, MORE_NODES = 3, 2
LATE_NODES = 6  # with causal contiguous shards in a flat ring over nodes, time is linear from here on
LARGE_NODE, SMALL_NODE = 16, 12  # ranks; nodes above LARGE_NODE are extrapolated from these two sizes
SURELY_TIED = 1e-9  # relative to a pass: ranks that end this close end together
TIMELINE_FIELDS = ("seqlen", "world", "batch", "heads", "kv_heads", "head_dim", "dtype", "nodes")
"""Fields of a call that a timeline describes besides layout and mask, named as in measured timelines."""


@dataclass(frozen=True)
class Pass:
    """Times of a forward or a backward; arrays hold one element per length or per random draw."""

    phase: str
    seconds: Seconds
    """Seconds until the last rank is done."""
    exposed: Seconds = 0.0
    """Part of ``seconds`` in which the compute stream of the rank that ends last was idle."""
    worst: Seconds = 0.0
    """Longest idle time before the launches of one hop, on the same rank."""
    tracks: tuple[RankTimes, ...] = ()
    """Timeline of every rank; empty if smaller rings were simulated."""

    def extrapolate(self, larger: Pass, share: float) -> Pass:
        """Return the pass on the line through this one (``share`` 0) and that of a larger ring (``share`` 1)."""

        def at(one: Seconds, other: Seconds) -> Seconds:
            return one + (other - one) * share

        # With causal contiguous shards over nodes the longest wait grows with the ring. Otherwise it is constant.
        worst = np.maximum(self.worst, at(self.worst, larger.worst))[()]
        return Pass(self.phase, at(self.seconds, larger.seconds), at(self.exposed, larger.exposed), worst)


def predict_passes(
    call: PredictedCall,
    speed: Speed,
    links: ClusterLinks,
    perturbation: Perturbation = NO_PERTURBATION,
    *,
    phases: Sequence[str] = PASSES,
    tokens: Any = None,
    simulated: bool = False,
) -> tuple[Pass, ...]:
    """Predict one pass per phase; raise ValueError if ranks differ in their work and are too many to simulate.

    ``tokens`` may be an array of tokens per rank, which replace the call's. Then every time is an array over the
    lengths; with jitter it is an array over the draws. ``simulated`` simulates every rank instead of extrapolating.
    """

    def simulate(variant: PredictedCall, phase: str) -> Pass:
        lengths, small, factor = variant.tokens if tokens is None else tokens, variant, 1.0
        if variant.is_plain:
            small, factor = replace(variant, tokens=RECORDED_TOKENS), lengths / RECORDED_TOKENS
        recorded = record_ring(small, phase)
        is_formula = variant.is_plain and variant.runs == 1
        price = _plain_price(variant, speed, lengths) if is_formula else _price(small, speed, factor)
        costs = [[price(plan, op) if op.stream == COMPUTE else 0.0 for op in program.ops] for plan, program in recorded]
        programs = [program for _, program in recorded]
        message = message_cost(variant, links, factor)
        return simulate_pass(programs, costs, message, speed.beside, lambda op: speed.host, perturbation)

    return build_passes(call, simulate, perturbation, phases, simulated=simulated)


def build_passes(
    call: PredictedCall,
    make_pass: Callable[[PredictedCall, str], Pass],
    perturbation: Perturbation,
    phases: Sequence[str],
    *,
    simulated: bool = False,
) -> tuple[Pass, ...]:
    """Return ``make_pass(call, phase)`` per phase, extrapolated for large rings unless ``simulated`` or perturbed."""
    perturbation.check(call.world)
    every = simulated or perturbation.is_active
    return tuple(make_pass(call, phase) if every else _extrapolate_pass(call, phase, make_pass) for phase in phases)


def _extrapolate_pass(call: PredictedCall, phase: str, make_pass: Callable[[PredictedCall, str], Pass]) -> Pass:
    """Return ``make_pass(call, phase)``, or for many ranks the extrapolation from two smaller rings."""
    pair = _smaller_calls(call)
    if pair is None:
        return make_pass(call, phase)
    small, large, share = pair
    return _extrapolate_pass(small, phase, make_pass).extrapolate(_extrapolate_pass(large, phase, make_pass), share)


def _smaller_calls(call: PredictedCall) -> tuple[PredictedCall, PredictedCall, float] | None:
    """Return two smaller rings and ``share`` of :meth:`Pass.extrapolate`; None if the call can be simulated."""
    if call.world <= (MOST_SIMULATED if call.is_plain else MOST_MASKED):
        return None
    if not call.is_plain:
        raise ValueError(
            f"world is {call.world}: with this layout and mask it must be at most {MOST_MASKED}. "
            "Larger rings need a contiguous, zigzag (even shards) or striped layout and a full or causal mask."
        )
    unit, steps = (call.per_node, call.nodes) if call.nodes > 1 else (1, call.world)
    if unit > LARGE_NODE:
        small, large = (replace(call, world=size * call.nodes) for size in (SMALL_NODE, LARGE_NODE))
        return small, large, (unit - SMALL_NODE) / (LARGE_NODE - SMALL_NODE)
    late = call.layout == "contiguous" and call.mask.causal and call.nodes > 1 and not call.is_two_level
    small_steps = max(-(-max(LEAST_RANKS, 2 * call.slots) // unit), LATE_NODES if late else LEAST_NODES)
    large_steps = small_steps + max(MORE_RANKS // unit, MORE_NODES)
    if large_steps >= steps:
        return None
    small, large = (replace(call, world=unit * n, nodes=n if call.nodes > 1 else 1) for n in (small_steps, large_steps))
    return small, large, (steps - small_steps) / (large_steps - small_steps)


@lru_cache(8)
def record_ring(call: PredictedCall, phase: str) -> tuple[tuple[Plan, Program], ...]:
    """Return the plan and the program of every rank."""
    lengths = call.token_layout.lengths
    return tuple((plan, record_program(call, plan, phase, tokens=lengths[plan.rank])) for plan in call.plans())


def simulate_pass(
    programs: Sequence[Program],
    costs: Sequence[Sequence[Seconds]],
    message: Callable[[int, int, int], Seconds],
    transfer_slowdown: float,
    host: Callable[[Op], float],
    perturbation: Perturbation = NO_PERTURBATION,
) -> Pass:
    """Simulate a pass of all ranks.

    ``costs`` are seconds of launches without transfers, ``[rank][op]``. ``message(source, destination, nbytes)`` and
    ``host(op)`` return the seconds of a message and of issuing an operation.
    """
    durations = []
    for program, alone in zip(programs, costs, strict=True):
        if perturbation.is_active:
            factors = perturbation.launch_factors(program.rank, program.phase, len(alone))
            alone = [cost * factor for cost, factor in zip(alone, factors, strict=True)]
        transfers = [_transfer(program.rank, op, message) for op in program.ops]
        durations.append(slow_launches(program, alone, transfers, transfer_slowdown))
    tracks = run_programs(programs, durations, message, host)
    hops = 1 + max(op.hop for program in programs for op in program.ops)
    ends = np.array([np.atleast_1d(track.seconds) for track in tracks])  # [rank, case]
    waits = np.array([[np.broadcast_to(wait, ends.shape[1:]) for wait in track.hop_waits(hops)] for track in tracks])
    # Among ranks that end together, take the one that waited least.
    tied = ends >= ends.max(axis=0) * (1 - SURELY_TIED)
    last = np.where(tied, waits.sum(axis=1), np.inf).argmin(axis=0)
    last_waits = np.take_along_axis(waits, last[None, None], axis=0)[0]  # [hop, case]
    results: list[Seconds] = [ends.max(axis=0), last_waits.sum(axis=0), last_waits.max(axis=0)]
    if ends.shape[1] == 1:
        results = [float(value[0]) for value in results]
    return Pass(programs[0].phase, results[0], results[1], results[2], tuple(tracks))


def _transfer(rank: int, op: Op, message: Callable[[int, int, int], Seconds]) -> Seconds:
    """Return the seconds of a group of transfers when both ends are ready: those of its longest message."""
    times = [message(rank, peer, nbytes) for peer, nbytes in (*op.sends, *op.receives)]
    return times[0] if len(times) == 1 else np.max(times, axis=0) if times else 0.0


def message_cost(call: PredictedCall, links: ClusterLinks, factor: Any = 1.0) -> Callable[[int, int, int], Seconds]:
    """Return ``f(rank_a, rank_b, nbytes)``: the seconds of ``nbytes * factor`` inside a node or between nodes."""
    # GPUs of a node that send to another node at the same time
    senders = call.per_node if call.is_two_level else 1
    inside, between = links.inside, links.far(senders)

    @lru_cache(None)
    def seconds(same_node: bool, nbytes: int) -> Seconds:
        return (inside if same_node else between).seconds(nbytes * factor)

    return lambda a, b, nbytes: seconds(a // call.per_node == b // call.per_node, nbytes)


def _plain_price(call: PredictedCall, speed: Speed, tokens: Any) -> Callable[[Plan, Op], Seconds]:
    """Return a function of a plan and an op that predicts the seconds of the op's kernel."""

    @lru_cache(None)
    def seconds(what: str, ahead: int, first: bool) -> Seconds:
        result = speed.seconds(what, call.plain_launch_area(ahead, tokens), call, hop=0 if first else 1)
        return result if np.ndim(result) else float(result)

    def price(plan: Plan, op: Op) -> Seconds:
        shard = plan.hops[op.hop].shard
        return seconds(op.what, (shard > plan.rank) - (shard < plan.rank), op.hop == 0)

    return price


def _price(call: PredictedCall, speed: Speed, factor: Any) -> Callable[[Plan, Op], Seconds]:
    """Return a function for the seconds of a launch of any ring, with the areas of its bounds.

    ``factor`` is the number of tokens per recorded token.
    """

    def price(plan: Plan, op: Op) -> Seconds:
        pairs, *others = bounds_area(op.bounds, call.token_layout.lengths[plan.rank], op.keys)
        area = Area(pairs * factor**2, *(count * factor for count in others))
        seconds = speed.seconds(op.what, area, call, hop=op.hop)
        return seconds if np.ndim(seconds) else float(seconds)

    return price


def ideal_seconds(call: PredictedCall, speed: Speed, phase: str, tokens: Any = None) -> Seconds:
    """Return one device's seconds for the whole call divided by the ranks; ``tokens`` per rank replace the call's."""
    what = (FOLD,) if phase == "forward" else (DQ, DKDV)
    alone = replace(call, chunks=1)
    return sum(speed.seconds(name, area, alone, hop=0) for name in what for area in call.areas(tokens)) / call.world


# the timeline, in the format of measured runs


def predicted_timeline(title: str, passes: tuple[Pass, ...], call: PredictedCall) -> Timeline:
    """Return the timeline of all ranks, one pass after the other; raise ValueError for extrapolated passes."""
    events: list[Event] = []
    plans, begin = call.plans(), 0.0
    for predicted_pass in passes:
        if not predicted_pass.tracks:
            raise ValueError("a timeline needs every rank, and this prediction is extrapolated from smaller rings")
        for track in predicted_pass.tracks:
            events += _rank_events(track, plans[track.program.rank], begin)
        begin += predicted_pass.seconds
    return Timeline(title, "predicted", call.world, tuple(events), {"call": timeline_details(call)})


def timeline_details(call: PredictedCall) -> dict[str, Any]:
    """Return shape, layout and mask of a call as JSON data, as measured timelines have them."""
    return {name: getattr(call, name) for name in TIMELINE_FIELDS} | {"layout": str(call.layout)} | mask_data(call.mask)


def _rank_events(track: RankTimes, plan: Plan, start: float) -> Iterator[Event]:
    rank, phase = track.program.rank, track.program.phase
    free, posts, computed = 0.0, list[CompletedPost](), dict[int, list[TimeInterval]]()
    for op, begin, end in zip(track.program.ops, track.begins, track.ends, strict=True):
        if op.key is not None:
            yield from _transfer_events(op, op.key, plan, start + begin, start + end)
            sent, received = (sum(nbytes for _, nbytes in messages) for messages in (op.sends, op.receives))
            posts.append(CompletedPost(op.key, begin, end, sent, received))
            continue
        if begin > free:
            yield Event(rank, "wait", phase, op.hop, start + free, start + begin)
        if op.what != POINT:
            computed.setdefault(op.hop, []).append((begin, end))
            if end > begin:
                name = f"{op.what} of {plan.hops[op.hop].shard}"
                yield Event(rank, "compute", phase, op.hop, start + begin, start + end, name)
        free = end
    # Slots are derived by the same rule as in measured timelines.
    for use in slot_trace(phase, plan, posts, computed):
        yield Event(rank, use.kind, use.phase, use.hop, start + use.begin, start + use.end, use.name)


def _transfer_events(op: Op, key: PostKey, plan: Plan, begin: float, end: float) -> Iterator[Event]:
    name = "dK/dV of {}" if key.kind in (TransferKind.DKV, TransferKind.RETURN) else "K/V of {}"
    for lane, messages in (("send", op.sends), ("receive", op.receives)):
        shard = plan.hops[_moved_hop(key, plan, lane)].shard
        for _, nbytes in messages:
            yield Event(plan.rank, lane, key.phase, op.hop, begin, end, name.format(shard), nbytes)


def _moved_hop(key: PostKey, plan: Plan, lane: str) -> int:
    """Return the hop whose shard a group of transfers moves; ``lane`` is ``send`` or ``receive``."""
    if key.kind in KV_KINDS:
        step = plan.inner if key.kind is TransferKind.RAIL else 1
        return key.payload_hop - (step if lane == "send" else 0)
    if key.kind is TransferKind.RETURN:
        return key.hop // plan.inner * plan.inner if lane == "send" else 0
    following = key.payload_hop + 1
    if lane == "send":
        return key.payload_hop
    is_last = following >= len(plan.hops) or plan.is_outer_root(plan.hops[following])
    return key.payload_hop // plan.inner * plan.inner if is_last else following
