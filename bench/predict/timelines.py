"""Converts a prediction to the timeline format of measured runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...ring.buffers import KV_KINDS, PostKey, TransferKind
from ...ring.schedule.plan import Plan
from ...ring.trace import CompletedPost, TimeInterval, slot_trace
from ..common.attention import mask_data
from ..timeline.events import Event, Timeline
from .predicted_call import PredictedCall
from .program import Op
from .ring_time import Pass
from .simulator import RankTimes
from .speed import POINT

TIMELINE_FIELDS = ("seqlen", "world", "batch", "heads", "kv_heads", "head_dim", "dtype", "nodes")
"""Fields of a call that a timeline describes besides layout and mask, named as in measured timelines."""


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
