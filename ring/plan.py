"""What one rank does in one call: its hops and the bounds of each, cached per (layout, mask, rank, settings)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..comm.topology import Topology
from ..kernels import Bounds
from .layout import Layout
from .mask import Mask, bounds
from .schedule import BASE_SLOTS, KV_SLOTS, RAIL_SLOTS, SUMS_SLOTS, Edge, Hop, schedule

PLANS = 64  # a model alternates between a few (layout, mask) pairs


@dataclass(frozen=True)
class Plan:
    """One rank's part of a schedule, with the index interval of each hop."""

    rank: int
    hops: tuple[Hop, ...]
    inner: int  # hops of a turn; a flat ring is one turn
    bounds: tuple[Bounds | None, ...]  # None: the hop launches nothing; the local hop always does, for its start state
    lengths: tuple[int, ...]  # tokens of the shard of each hop
    last: int  # the last hop that launches
    slots: int  # that K/V rotate through
    edges: tuple[tuple[Edge, ...], tuple[Edge, ...]]  # of all ranks, per level
    homecomings: dict[int, Hop]  # after which hop the sums of a turn's base come back to it

    @property
    def longest(self) -> int:
        """Tokens of the longest shard that passes: what a slot must hold."""
        return max(self.lengths)

    @property
    def two_level(self) -> bool:
        """Whether K/V cross between nodes."""
        return self.inner < len(self.hops)

    def is_base(self, hop: Hop) -> bool:
        """Whether the hop is a turn's first: its K/V are the rank's own or came by rail, and stay for the turn."""
        return hop.index % self.inner == 0

    @cached_property
    def turns(self) -> tuple[tuple[Hop, ...], ...]:
        """The hops, turn by turn; the first of each is its base."""
        return tuple(self.hops[start : start + self.inner] for start in range(0, len(self.hops), self.inner))

    @property
    def kv_slots(self) -> int:
        """Slots that K/V arrive in."""
        return self.slots + (BASE_SLOTS if self.two_level else 0)

    @property
    def sums_slots(self) -> int:
        """Slots of dK/dV sums: those that rotate, the rail's, and one more only where sums come home early."""
        used = [hop.sums_slot + 1 for hop in self.hops if hop.sums_slot is not None]
        return max(SUMS_SLOTS + (RAIL_SLOTS if self.two_level else 0), *used, 0)

    def arrivals(self, hop: int, prefetch: int) -> Iterator[Hop]:
        """The hops whose K/V are asked for when ``hop`` begins: over a rail a turn ahead, else ``prefetch`` hops.

        Never those of a later turn: its base may still be on the rail, and what is posted behind would wait for it.
        """
        turn = hop // self.inner * self.inner
        first = hop + prefetch
        if hop == turn:
            yield from self.hops[hop + self.inner : hop + self.inner + 1]
            first = hop + 1
        yield from self.hops[first : min(hop + prefetch + 1, turn + self.inner)]


@lru_cache(maxsize=PLANS)
def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    direction: int,
    device: torch.device,
    topology: Topology | None = None,
    slots: int = KV_SLOTS,
) -> Plan:
    """The plan of ``rank``: a pure function, so that all ranks agree on what moves without talking."""
    whole = schedule(layout, mask, direction=direction, topology=topology, slots=slots)
    hops = whole.hops(rank)
    q_positions = layout.positions(rank)
    return Plan(
        rank=rank,
        hops=hops,
        inner=whole.inner,
        bounds=tuple(
            bounds(mask, q_positions, layout.positions(hop.shard)).to(device)
            if hop.computes or hop.index == 0
            else None
            for hop in hops
        ),
        lengths=tuple(layout.lengths[hop.shard] for hop in hops),
        last=max((hop.index for hop in hops if hop.computes), default=0),
        slots=slots,
        edges=whole.edges,
        homecomings={
            base.index + whole.journeys[base.shard][base.index // whole.inner][1]: base
            for base in hops[:: whole.inner]
            if base.sums_from is not None
        },
    )
