"""A prediction as the timeline of every rank, in the format that measured ones are kept in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ring.buffers import Kind
from ...ring.schedule.plan import Plan
from ...ring.trace import Moved, Stretch, slot_trace
from ..common.attention import mask_data
from ..timeline.events import Event, Timeline
from .call import Call
from .clock import Track
from .program import COMPUTE, Op
from .ring import Pass
from .speed import POINT

SHARDS = {Kind.RAIL: "K/V of {}", Kind.KV: "K/V of {}", Kind.DKV: "dK/dV of {}", Kind.RETURN: "dK/dV of {}"}
SAID = ("seqlen", "world", "batch", "heads", "kv_heads", "head_dim", "dtype", "layout", "nodes")
"""What a timeline says of its call beside its mask, by the names that a measured one says."""


def timeline(title: str, passes: tuple[Pass, ...], call: Call) -> Timeline:
    """The events of all ranks, the passes one after the other.

    Raises:
        ValueError: a pass in whose place smaller rings were simulated.
    """
    events: list[Event] = []
    plans, begin = call.plans(), 0.0
    for one in passes:
        if not one.tracks:
            raise ValueError("smaller rings were simulated in its place: a timeline needs every rank")
        for track in one.tracks:
            events += _of_rank(track, plans[track.program.rank], begin)
        begin += one.seconds
    return Timeline(title, "predicted", call.world, tuple(events), {"call": said(call)})


def said(call: Call) -> dict[str, Any]:
    """What a timeline says of its call: shape, layout and mask, as a measured one does."""
    return {name: getattr(call, name) for name in SAID} | mask_data(call.mask)


def _of_rank(track: Track, plan: Plan, start: float) -> Iterator[Event]:
    rank, phase = track.program.rank, track.program.phase
    free = 0.0
    for op, begin, end in zip(track.program.ops, track.begins, track.ends, strict=True):
        if op.stream != COMPUTE:
            yield from _transfers(op, plan, phase, start + begin, start + end)
            continue
        if begin > free:
            yield Event(rank, "wait", phase, op.hop, start + free, start + begin)
        if op.what != POINT and end > begin:
            name = f"{op.what} of {plan.hops[op.hop].shard}"
            yield Event(rank, "compute", phase, op.hop, start + begin, start + end, name)
        free = end
    yield from _slots(track, plan, start)


def _transfers(op: Op, plan: Plan, phase: str, begin: float, end: float) -> Iterator[Event]:
    assert op.key is not None
    for lane, messages in (("send", op.sends), ("receive", op.receives)):
        shard = plan.hops[_moved(op, plan, lane)].shard
        for _, nbytes in messages:
            yield Event(plan.rank, lane, phase, op.hop, begin, end, SHARDS[op.key.kind].format(shard), nbytes)


def _moved(op: Op, plan: Plan, lane: str) -> int:
    """The hop whose shard a group sends, or receives."""
    assert op.key is not None
    brings, kind = op.key.brings, op.key.kind
    if kind in (Kind.KV, Kind.RAIL):
        return brings if lane == "receive" else brings - (plan.inner if kind is Kind.RAIL else 1)
    if kind is Kind.RETURN:
        return op.key.hop // plan.inner * plan.inner if lane == "send" else 0
    following = brings + 1
    if lane == "send" or following >= len(plan.hops) or plan.is_outer_root(plan.hops[following]):
        return brings if lane == "send" else brings // plan.inner * plan.inner
    return following


def _slots(track: Track, plan: Plan, start: float) -> Iterator[Event]:
    """Every use of a slot, of K/V and of sums, by the rule that measured ones are told by."""
    program = track.program
    computed: dict[int, list[Stretch]] = {}
    posts = []
    for op, begin, end in zip(program.ops, track.begins, track.ends, strict=True):
        if op.key is not None:
            sent, received = (sum(nbytes for _, nbytes in messages) for messages in (op.sends, op.receives))
            posts.append(Moved(op.key, begin, end, sent, received))
        elif op.stream == COMPUTE and op.what != POINT:
            computed.setdefault(op.hop, []).append((begin, end))
    for one in slot_trace(program.phase, plan, posts, computed):
        yield Event(program.rank, one.kind, one.phase, one.hop, start + one.begin, start + one.end, one.name)
