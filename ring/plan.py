"""What one rank does in one call: its hops and the bounds of each, cached per (layout, mask, rank)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..kernels import Bounds
from .layout import Layout
from .mask import Mask, bounds
from .schedule import SUMS_SLOTS, Hop, schedule

PLANS = 64  # a model alternates between a few (layout, mask) pairs


@dataclass(frozen=True)
class Plan:
    """One rank's part of a schedule, with the index interval of each hop."""

    hops: tuple[Hop, ...]
    bounds: tuple[Bounds | None, ...]  # None: the hop launches nothing; the local hop always does, for its start state
    lengths: tuple[int, ...]  # tokens of the shard of each hop
    last: int  # the last hop that launches
    home_after: int | None  # the hop after which this rank's own sums come home

    @property
    def longest(self) -> int:
        """Tokens of the longest shard that passes: what a slot must hold."""
        return max(self.lengths)

    @property
    def sums_slots(self) -> int:
        """Slots of dK/dV sums: two that rotate; a third only where sums come home before other journeys end."""
        return max(SUMS_SLOTS, *(hop.sums_slot + 1 for hop in self.hops if hop.sums_slot is not None), 0)


@lru_cache(maxsize=PLANS)
def plan(layout: Layout, mask: Mask, rank: int, direction: int, device: torch.device) -> Plan:
    """The plan of ``rank``: a pure function, so that all ranks agree on what moves without talking."""
    hops = schedule(layout, mask, direction=direction).hops(rank)
    q_positions = layout.positions(rank)
    home_from = hops[0].sums_from
    return Plan(
        hops=hops,
        bounds=tuple(
            bounds(mask, q_positions, layout.positions(hop.shard)).to(device)
            if hop.computes or hop.index == 0
            else None
            for hop in hops
        ),
        lengths=tuple(layout.lengths[hop.shard] for hop in hops),
        last=max((hop.index for hop in hops if hop.computes), default=0),
        home_after=None if home_from is None else (direction * (home_from - rank)) % layout.world,
    )
