"""Rings of thousands of GPUs: one rank's program stands for all, since all do the same.

The schedule of a plain ring is known without looking at every pair of ranks: everyone sees something of every shard. It
is the same :class:`~ringattn.ring.schedule.schedule.Schedule`, with its tables of world x world left unwritten;
tests compare its hops with those that the ring makes.

Of a causal mask on contiguous shards the last rank sees everything, and it is the last to be ready; every other rank
does a part of that. All are taken to do as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ...comm.topology.topology import Topology
from ...kernels import FULL
from ...ring.schedule.layout import Layout
from ...ring.schedule.plan import HopMask, Plan, Positions
from ...ring.schedule.schedule import Schedule
from .call import CPU, Call
from .clock import Lanes
from .launch import Area
from .program import BETWEEN, Op, Program, record

T = TypeVar("T")
S = TypeVar("S", bound=np.generic)
KEPT = 256  # shifts of lanes: those of a ring are few, but homewards
UNIT = 256  # tokens that a program is recorded with: bytes are in proportion


class Same(Sequence[T]):
    """A sequence of one value."""

    def __init__(self, value: T, count: int) -> None:
        self._value, self._count = value, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return Same(self._value, len(range(*index.indices(self._count))))
        return self._value


class EveryoneSees(Schedule):
    """A schedule in which every rank sees something of every shard."""

    @property
    def active_ranges(self) -> Any:
        """To the last rank of every turn."""
        one = (1, self.inner - 1) if self.inner > 1 else (1, 0)
        return Same((one,) * len(self.outer_steps), self.world)

    @property
    def last_outer_steps(self) -> Any:
        return Same(len(self.outer_steps) - 1, self.world)


def schedule_of(call: Call) -> EveryoneSees:
    """The schedule of a plain call, whatever its size."""
    topology = call.topology or Topology.flat(call.world)
    nodes = topology.nodes if topology.two_level else (topology.order,)
    visits: Any = Same(Same(True, call.world), call.world)
    return EveryoneSees(nodes, call.direction, visits, (call.tokens,) * call.world, call.slots)


def plan_of(call: Call, rank: int = 0) -> Plan:
    """The plan of a rank of a plain call, without bounds."""
    whole = schedule_of(call)
    hops = whole.hops(rank)
    nowhere = Positions(Layout.uneven([0]), Layout.uneven([0]), Layout.uneven([0]), 0, CPU)
    bases = [base for base in hops[:: whole.inner] if base.dkv_from is not None]
    return Plan(
        rank=rank,
        hops=hops,
        inner=whole.inner,
        hop_masks=tuple((HopMask(FULL, nowhere, hop.shard),) for hop in hops),
        lengths=whole.lengths,
        longest=call.tokens,
        send_index=None,
        last=whole.count - 1,
        slots=call.slots,
        edges=((), ()),
        dkv_returns={base.index + whole.inner - 1: base for base in bases},
    )


def area_at(call: Call, hop: int) -> Area:
    """What a rank of a plain call computes at a hop.

    Of a zigzag all rows against half of the keys, or half of the rows against all keys: the area of the one has the
    rows, whose state it carries, of the other the keys, which its last programs run along.
    """
    tokens = call.tokens
    if not call.mask.causal:
        return Area(tokens * tokens, tokens, tokens, tokens, 0)
    if hop == 0 or call.layout == "striped":
        return Area(tokens * (tokens + 1) / 2, tokens, tokens, tokens, tokens)
    if call.layout == "zigzag":
        return Area(tokens * tokens / 2, tokens, tokens, tokens, 0)
    return Area(tokens * tokens, tokens, tokens, tokens, 0)


@dataclass(frozen=True)
class Meeting:
    """Whom every rank meets in a group of rank 0's program; a lane per rank, ``[place in the node, node]``."""

    nodes: int
    per_node: int

    def lanes(self, ranks: npt.NDArray[S]) -> npt.NDArray[S]:
        """What is told in rank order; neighbours inside a node come in long runs, since they meet most."""
        return np.ascontiguousarray(ranks.reshape(self.nodes, self.per_node).T)

    def __call__(self, op: Op, begin: Lanes) -> Lanes:
        """When both ends of all messages have begun the group."""
        found = begin.copy()
        for peer in {peer for peer, _ in (*op.sends, *op.receives)}:
            node, place = divmod(peer, self.per_node)
            for mine, theirs in _runs(self.per_node, place, self.nodes, node):
                np.maximum(found[mine], begin[theirs], out=found[mine])
        return found


Where = tuple[slice, slice]


@lru_cache(KEPT)
def _runs(places: int, place: int, nodes: int, node: int) -> list[tuple[Where, Where]]:
    """Lanes, and as many of the ranks so far on round the ring."""
    inside, between = _turned(places, place), _turned(nodes, node)
    return [((mine, its), (theirs, whose)) for mine, theirs in inside for its, whose in between]


def _turned(size: int, by: int) -> list[tuple[slice, slice]]:
    """The same along one side of the lanes, which ends and goes on at its begin."""
    return [(slice(size - by), slice(by, size)), *([(slice(size - by, size), slice(by))] if by else [])]


def meeting(call: Call) -> Meeting:
    """For a plain call's program."""
    return Meeting(call.nodes, call.per_node) if call.topology is not None else Meeting(1, call.world)


def recorded(call: Call, phase: str) -> Program:
    """Rank 0's program, with bytes as of ``UNIT`` tokens per rank."""
    unit = replace(call, tokens=UNIT)
    form = replace(unit.form, tokens=UNIT)
    return record(plan_of(unit), form, phase)


def seen_at(call: Call, hop: int, meet: Meeting) -> npt.NDArray[np.bool_]:
    """Per lane whether its rank computes at a hop: of a causal mask on contiguous shards those of earlier ranks."""
    if call.layout != "contiguous" or not call.mask.causal:
        return np.ones(1, np.bool_)
    ranks = meet.lanes(np.arange(call.world))
    turn, step = divmod(hop, meet.per_node)
    node, place = divmod(ranks, meet.per_node)
    shards = (node - call.direction * turn) % meet.nodes * meet.per_node
    seen: npt.NDArray[np.bool_] = shards + (place - call.direction * step) % meet.per_node <= ranks
    return seen


def crosses(call: Call, op: Op) -> bool:
    """Whether any rank's messages of a group leave its node."""
    if call.nodes == 1:
        return False
    return op.stream == BETWEEN or call.topology is None


def crosses_inside(call: Call, op: Op) -> bool:
    """Whether even those of ranks do whose neighbours in the ring are in their node."""
    peers = {peer for peer, _ in (*op.sends, *op.receives)}
    return crosses(call, op) and (op.stream == BETWEEN or not peers <= {1, call.world - 1})


def at_edges(call: Call) -> npt.NDArray[np.bool_]:
    """Whether a neighbour in a flat ring is in another node, per rank."""
    if call.nodes == 1 or call.topology is not None:
        return np.zeros(call.world, np.bool_)
    return np.isin(np.arange(call.world) % call.per_node, (0, call.per_node - 1))
