"""Rings whose ranks are told apart, and a smaller one in place of one that has too many.

Where a window has an end on every side, a rank meets those whose tokens are near its own, however many there are: all
but the ends of the sequence do the same, and a ring of fewer ranks, with as many tokens each, takes as long.
"""

from __future__ import annotations

from dataclasses import replace

from ...ring.schedule.mask import UNLIMITED, Mask
from ...ring.schedule.schedule import Schedule, schedule
from .call import Call
from .trouble import Trouble

MOST_RANKS = 128  # that are told apart whatever they see, and that stand for more
MOST_HOPS = MOST_RANKS**2  # of all ranks together: each is planned, and takes its place on the clock
MOST_WITH_TABLES = 1024  # ranks of a schedule with its tables of world x world


def is_local(mask: Mask) -> bool:
    """Whether a window alone says what is seen, and ends on every side."""
    left, right = mask.window
    ends = left != UNLIMITED and (mask.causal or right != UNLIMITED)
    return ends and mask == Mask(causal=mask.causal, window=mask.window)


def told_apart(call: Call, trouble: Trouble | None = None) -> Call:
    """The call, or the one of fewer ranks that stands for it: without trouble, which every rank has of its own.

    Raises:
        ValueError: neither can be told apart.
    """
    if call.world <= MOST_RANKS:
        return call
    small = None if trouble is not None and trouble.is_there else _smaller(call)
    if small is not None:
        return small
    counted = ""
    if call.world <= MOST_WITH_TABLES:
        hops = call.world * _schedule(call).count
        if hops <= MOST_HOPS:
            return call
        counted = f", of {hops} hops in all"
    raise ValueError(
        f"{call.world} GPUs with this layout and mask do different things{counted}: at most {MOST_RANKS} are told "
        f"apart, or {MOST_WITH_TABLES} with {MOST_HOPS} hops in all. More are predicted for contiguous, zigzag (of "
        "even shards) and striped, full or causal; and without slow or jitter for contiguous and zigzag with a window "
        f"that ends on every side and reaches less than half of {MOST_RANKS} ranks, or of the nodes that they make"
    )


def _smaller(call: Call) -> Call | None:
    """Fewer ranks, or fewer nodes of as many; None: some would meet round both sides, or do different things."""
    nodes = MOST_RANKS // call.per_node if call.nodes > 1 else 1
    in_runs = call.layout == "contiguous" or (call.layout == "zigzag" and call.tokens % 2 == 0)
    if not is_local(call.mask) or not in_runs or nodes < min(call.nodes, 2):
        return None
    world = nodes * call.per_node if call.nodes > 1 else MOST_RANKS
    small = replace(call, world=world, nodes=nodes)
    made = _schedule(small)
    places, used = (nodes, len(made.outer_steps)) if small.is_two_level else (world, made.inner)
    return small if 2 * used <= places else None


def _schedule(call: Call) -> Schedule:
    return schedule(call.held, call.mask, direction=call.direction, topology=call.topology, slots=call.slots)
