"""What one rank does in one call: its hops and the bounds of each, cached per (layout, mask, rank, settings)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels import BlockSparseIndex, Bounds, Scores
from ...kernels.shared import Shared, SharedCache
from .active import sent_keys
from .layout import Layout
from .mask import Mask, bounds
from .schedule import DKV_SLOTS, KV_SLOTS, RAIL_SLOTS, ROOT_SLOTS, Edge, Hop, kv_slot_at, schedule

if TYPE_CHECKING:
    from ...comm.topology.topology import Topology

PLANS = 64  # a model alternates between a few (layout, mask) pairs


class KvPost(NamedTuple):
    """One group of K/V transfers: those of one hop arrive, and those of an earlier hop are passed on."""

    coming: Hop
    leaving: Hop
    to: int | None
    """The rank that K/V of ``leaving`` go to."""
    by_rail: bool
    """Between nodes; else inside a node or a flat ring."""
    waits: bool
    """What leaves came over the other level, or is produced here: not there in this level's own order."""


@dataclass(frozen=True)
class Plan:
    """One rank's part of a schedule, with the index interval of each hop."""

    rank: int
    hops: tuple[Hop, ...]
    inner: int  # hops of an outer step; a flat ring is one outer step
    # of each hop, one per part of the mask; none: it launches nothing. The local hop always does, for its start state
    hop_masks: tuple[tuple[HopMask, ...], ...]
    lengths: tuple[int, ...]  # keys of the shard of each hop that travel
    longest: int  # those of the longest shard of all: what a slot must hold, whichever hops a mask leaves
    send_index: torch.Tensor | None  # which keys of the own shard travel, int64 on the device; None: all
    last: int  # the last hop that launches
    slots: int  # that K/V rotate through
    edges: tuple[tuple[Edge, ...], tuple[Edge, ...]]  # of all ranks, per level
    returns_early: bool  # dK/dV of some shard come back to their root before an outer step ends
    dkv_returns: dict[int, Hop]  # after which hop the dK/dV of an outer step's root come back to it

    def device_tensors(self) -> Iterator[torch.Tensor | None]:
        """Yield the device tensors that were made with the plan."""
        yield self.send_index
        for hop_mask in chain.from_iterable(self.hop_masks):
            yield from (hop_mask.bounds.lo, hop_mask.bounds.hi, hop_mask.bounds.seqused_k)

    @property
    def two_level(self) -> bool:
        """Whether K/V cross between nodes."""
        return self.inner < len(self.hops)

    def is_outer_root(self, hop: Hop) -> bool:
        """Whether the hop is the first of an outer step, for which its K/V, the rank's own or come by rail, stay."""
        return hop.index % self.inner == 0

    @cached_property
    def outer_steps(self) -> tuple[tuple[Hop, ...], ...]:
        """The hops, one outer step after the other; the first of each is its root."""
        return tuple(self.hops[start : start + self.inner] for start in range(0, len(self.hops), self.inner))

    @property
    def kv_slots(self) -> int:
        """Slots that K/V arrive in."""
        return self.slots + (ROOT_SLOTS if self.two_level else 0)

    @property
    def dkv_slots(self) -> int:
        """Slots of dK/dV: those that rotate, the rail's, and on all ranks one more where some return early."""
        return DKV_SLOTS + (RAIL_SLOTS if self.two_level else 0) + self.returns_early

    def arrivals(self, hop: int, prefetch: int) -> tuple[Hop, ...]:
        """The hops whose K/V are posted when ``hop`` begins: by rail an outer step ahead, else ``prefetch`` hops.

        Never those of a later outer step: its root may still be on the rail, and what is posted behind would wait for
        it.
        """
        root = hop // self.inner * self.inner
        end = min(hop + prefetch + 1, root + self.inner)
        if hop == root:
            return self.hops[hop + self.inner : hop + self.inner + 1] + self.hops[hop + 1 : end]
        return self.hops[hop + prefetch : end]

    def kv_posts(self, prefetch: int) -> tuple[tuple[KvPost, ...], ...]:
        """What is posted when each hop begins, in order; made once."""
        if prefetch not in self._kv_posts:
            arrivals = (self.arrivals(hop.index, prefetch) for hop in self.hops)
            self._kv_posts[prefetch] = tuple(tuple(map(self._kv_post, coming)) for coming in arrivals)
        return self._kv_posts[prefetch]

    def kv_slot(self, hop: Hop) -> int:
        """The slot that K/V of a hop arrive in, on every rank that they come to."""
        return kv_slot_at(hop.index, self.inner, self.slots)

    def kv_sender(self, coming: Hop) -> Hop:
        """The hop whose K/V are passed on while those of ``coming`` arrive."""
        return self.hops[coming.index - (self.inner if self.is_outer_root(coming) else 1)]

    def _kv_post(self, coming: Hop) -> KvPost:
        by_rail, leaving = self.is_outer_root(coming), self.kv_sender(coming)
        to = leaving.rail_to if by_rail else leaving.kv_to
        return KvPost(coming, leaving, to, by_rail, leaving.index == 0 or self.is_outer_root(leaving) != by_rail)

    @cached_property
    def _kv_posts(self) -> dict[int, tuple[tuple[KvPost, ...], ...]]:
        return {}

    @cached_property
    def dkv_arrivals(self) -> tuple[tuple[Hop, ...], ...]:
        """For each hop those whose dK/dV arrive while its own are sent on: the next one, and an outer step's root."""
        following = [[hop] if hop.dkv_from is not None and not self.is_outer_root(hop) else [] for hop in self.hops[1:]]
        returns = [[self.dkv_returns[hop.index]] if hop.index in self.dkv_returns else [] for hop in self.hops]
        return tuple((*near, *root) for near, root in zip([*following, []], returns, strict=True))


@dataclass(frozen=True)
class Positions:
    """Global positions of the queries and of every shard of keys, int32, on the device; made when asked for."""

    layout: Layout
    kv_layout: Layout
    sent: Layout  # the keys that leave their rank
    rank: int
    device: torch.device
    _cache: SharedCache[torch.Tensor] = field(default_factory=SharedCache, init=False, repr=False, compare=False)

    @property
    def queries(self) -> torch.Tensor:
        """Of this rank's queries, ``[S]``, for work on the current stream."""
        return self._cache.get(None, lambda: self._moved(self.layout.positions(self.rank)), lambda made: (made,))

    def keys(self, shard: int) -> torch.Tensor:
        """Of the keys of a shard as this rank has them, ``[Sk]``, for work on the current stream."""
        return self._cache.get(shard, lambda: self._moved(self.held(shard).positions(shard)), lambda made: (made,))

    def _moved(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.to(self.device, torch.int32)

    def held(self, shard: int) -> Layout:
        """The layout that says which keys of a shard this rank has: all of its own."""
        return self.kv_layout if shard == self.rank else self.sent


class HopMask(NamedTuple):
    """What one rank sees of one shard, by one part of the mask."""

    bounds: Bounds
    positions: Positions
    shard: int

    def place(self, scores: Scores) -> Scores:
        """``scores`` with the positions of these queries and keys, where they ask for them."""
        if not scores.by_position:
            return scores
        return replace(scores, q_positions=self.positions.queries, k_positions=self.positions.keys(self.shard))


def _hop_masks(mask: Mask, positions: Positions, shard: int) -> tuple[HopMask, ...]:
    """Part by part; at least one, and none more that is empty."""
    layout, kv_layout, rank, device = positions.layout, positions.held(shard), positions.rank, positions.device
    index = None
    if mask.blocks is not None:
        visible = mask.blocks.between(layout, rank, kv_layout, shard)
        index = None if bool(visible.all()) else BlockSparseIndex(visible, mask.blocks.block)
    parts = [bounds(part, layout.positions(rank), kv_layout.positions(shard)) for part in mask.parts]
    parts = [replace(part, block_sparse=index) for part in parts]
    visible_parts = [part for part in parts if not part.is_empty] or parts[:1]
    return tuple(HopMask(part.to(device), positions, shard) for part in visible_parts)


def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    direction: int,
    device: torch.device,
    topology: Topology | None = None,
    slots: int = KV_SLOTS,
    kv_layout: Layout | None = None,
) -> Plan:
    """Return the plan of ``rank``, for work on the current stream of ``device``; made once.

    It is a pure function of its arguments, so that all ranks agree on what moves without talking.
    """
    return _shared_plan(layout, mask, rank, direction, device, topology, slots, kv_layout).read()


@lru_cache(maxsize=PLANS)
def _shared_plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    direction: int,
    device: torch.device,
    topology: Topology | None,
    slots: int,
    kv_layout: Layout | None,
) -> Shared[Plan]:
    keys = layout if kv_layout is None else kv_layout
    whole = schedule(layout, mask, kv_layout=kv_layout, direction=direction, topology=topology, slots=slots)
    hops = whole.hops(rank)
    sent = sent_keys(layout, mask, keys)
    positions = Positions(layout, keys, sent, rank, device)
    send_index = None
    if keys.lengths[rank] != sent.lengths[rank]:
        send_index = torch.searchsorted(keys.positions(rank), sent.positions(rank)).to(device)
    made = Plan(
        rank=rank,
        hops=hops,
        inner=whole.inner,
        hop_masks=tuple(
            _hop_masks(mask, positions, hop.shard) if hop.computes or hop.index == 0 else () for hop in hops
        ),
        lengths=tuple(sent.lengths[hop.shard] for hop in hops),
        longest=max(sent.lengths),
        send_index=send_index,
        last=max((hop.index for hop in hops if hop.computes), default=0),
        slots=slots,
        edges=whole.edges,
        returns_early=whole.returns_early,
        dkv_returns={
            root.index + whole.active_ranges[root.shard][root.index // whole.inner][1]: root
            for root in hops[:: whole.inner]
            if root.dkv_from is not None
        },
    )
    return Shared(made, made.device_tensors())
