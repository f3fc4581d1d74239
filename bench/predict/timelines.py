"""A prediction as the timeline of every rank, in the format that measured ones are kept in."""

from __future__ import annotations

from collections.abc import Iterator

from ...ring.plan import Plan
from ...ring.traffic import Kind
from ..timeline.events import Event, Timeline
from .clock import Track
from .program import COMPUTE, POINT, Op
from .ring import Pass

SHARDS = {Kind.RAIL: "K/V of {} by rail", Kind.KV: "K/V of {}", Kind.SUMS: "sums of {}", Kind.HOME: "node's sum of {}"}


def timeline(title: str, passes: tuple[Pass, ...], plans: list[Plan]) -> Timeline:
    """The events of all ranks, the passes one after the other.

    Raises:
        ValueError: a pass of which one rank stands for all.
    """
    events: list[Event] = []
    begin = 0.0
    for one in passes:
        if not one.tracks:
            raise ValueError("one rank stands for all of this ring: a timeline needs ranks that are told apart")
        for track in one.tracks:
            events += _of_rank(track, plans[track.program.rank], begin)
        begin += one.seconds
    return Timeline(title, "predicted", len(plans), tuple(events))


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
    for slot, hop, begin, end in _slots(track, plan):
        shard = plan.hops[hop].shard
        yield Event(rank, f"slot {slot}", phase, hop, start + begin, start + end, f"K/V of {shard}")


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
    if kind is Kind.HOME:
        return op.key.hop // plan.inner * plan.inner if lane == "send" else 0
    following = brings + 1
    if lane == "send" or following >= len(plan.hops) or plan.is_base(plan.hops[following]):
        return brings if lane == "send" else brings // plan.inner * plan.inner
    return following


def _slots(track: Track, plan: Plan) -> Iterator[tuple[int, int, float, float]]:
    """(slot, hop, from, to): from when it awaits K/V until the last that uses them is over."""
    program = track.program
    for hop in plan.hops:
        if hop.kv_slot is None:
            continue
        came = [
            begin for op, begin in zip(program.ops, track.begins, strict=True)
            if op.key is not None and op.key.kind in (Kind.KV, Kind.RAIL) and op.key.brings == hop.index and op.receives
        ]  # fmt: skip
        used = [
            end for op, end in zip(program.ops, track.ends, strict=True)
            if (op.stream == COMPUTE and op.hop == hop.index and op.what != POINT)
            or (op.key is not None and op.key.kind is Kind.KV and op.key.brings == hop.index + 1 and op.sends)
        ]  # fmt: skip
        if came and used:
            yield hop.kv_slot, hop.index, min(came), max(*used, min(came))
