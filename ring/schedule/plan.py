"""`Plan`: the hops of one rank with the bounds of each hop, cached per (layout, mask, rank, settings)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise, starmap
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...kernels import BlockSparseIndex, Bounds, Scores
from ...kernels.shared_cache import SharedCache, SharedValue
from .layout import Layout
from .mask import Mask, bounds
from .schedule import DKV_SLOTS, KV_SLOTS, RAIL_SLOTS, ROOT_SLOTS, Edge, Hop, Schedule, kv_slot_at, schedule
from .visibility import cut_keys

if TYPE_CHECKING:
    from ...comm.topology.topology import Topology

PLAN_CACHE_SIZE = 64  # cached plans; a model alternates between a few (layout, mask) pairs


class KvPost(NamedTuple):
    """One group of K/V transfers: receive K/V of one hop, send K/V of an earlier hop."""

    recv_hop: Hop
    send_hop: Hop
    send_to: int | None  # rank that K/V of ``send_hop`` are sent to
    by_rail: bool  # True between nodes, False inside a node or in a flat ring
    needs_wait: bool
    """True if the send must wait for a fence, because the K/V arrived on the other level or are this rank's own.

    Otherwise the K/V have arrived by then, because the posts of a level run in order.
    """


@dataclass(frozen=True)
class Plan:
    """One rank's part of a schedule, with the bounds of each hop.

    If the shards are cut along tokens, every run of tokens has a plan of its own, with the same number of hops. The
    plan of the call then has the hops of the first run, and the edges and slots of all ``runs``.
    """

    rank: int
    hops: tuple[Hop, ...]
    inner: int  # hops per outer step; a flat ring is one outer step
    # Per hop one mask per part; empty if the hop launches nothing. Hop 0 always launches, to write the start state.
    hop_masks: tuple[tuple[HopMask, ...], ...]
    lengths: tuple[int, ...]  # keys that are sent, of the shard of each hop
    max_shard_keys: int  # keys that are sent of the longest shard, which every slot must hold
    send_index: torch.Tensor | None  # indices of the own keys that are sent, int64 on the device; None: all
    last_launch_hop: int  # index of the last hop that launches; -1 if another run launches last
    slots: int  # slots that K/V rotate through
    edges: tuple[tuple[Edge, ...], tuple[Edge, ...]]  # edges of all ranks, per level
    returns_early: bool  # dK/dV of some shard return to their root before an outer step ends
    dkv_returns: dict[int, Hop]  # hop index -> root whose dK/dV return to it after that hop
    own_keys: slice = field(default_factory=lambda: slice(None))  # keys of this rank's shard that the plan covers
    runs: tuple[Plan, ...] = ()

    def run(self, chunk: int) -> Plan:
        """Return the plan of a chunk."""
        return self.runs[chunk % len(self.runs)] if self.runs else self

    def device_tensors(self) -> Iterator[torch.Tensor | None]:
        """Yield the device tensors that were created with the plan."""
        for run in self.runs or (self,):
            yield run.send_index
            for hop_mask in chain.from_iterable(run.hop_masks):
                yield from (hop_mask.bounds.lo, hop_mask.bounds.hi, hop_mask.bounds.seqused_k)

    @property
    def two_level(self) -> bool:
        """True if K/V cross between nodes."""
        return self.inner < len(self.hops)

    @property
    def returns_once(self) -> bool:
        """True if dK/dV of the own shard return once, and cover all of its keys."""
        return not self.two_level and self.send_index is None

    def is_outer_root(self, hop: Hop) -> bool:
        """Return True if the hop is the first of an outer step. Its K/V stay in their slot for the whole outer step."""
        return hop.index % self.inner == 0

    @cached_property
    def mask_kinds(self) -> frozenset[tuple[bool, bool, bool]]:
        """Fields of the bounds that kernels are compiled for: whether lo, seqused_k and block_sparse are None."""
        hop_masks = chain.from_iterable(run.hop_masks for run in self.runs or (self,))
        parts = [hop_mask.bounds for hop_mask in chain.from_iterable(hop_masks)]
        return frozenset((part.lo is None, part.seqused_k is None, part.block_sparse is None) for part in parts)

    @cached_property
    def outer_steps(self) -> tuple[tuple[Hop, ...], ...]:
        """Hops grouped by outer step; the first hop of each group is its root."""
        return tuple(self.hops[start : start + self.inner] for start in range(0, len(self.hops), self.inner))

    @property
    def kv_slots(self) -> int:
        """Number of K/V receive slots."""
        return self.slots + (ROOT_SLOTS if self.two_level else 0)

    @property
    def dkv_slots(self) -> int:
        """Number of dK/dV slots: rotating ones, those of the rail, and one more if dK/dV of any rank return early."""
        return DKV_SLOTS + (RAIL_SLOTS if self.two_level else 0) + self.returns_early

    def kv_arrivals(self, hop: int, prefetch: int) -> tuple[Hop, ...]:
        """Return the hops whose K/V are posted when ``hop`` begins.

        Inside a node these hops are ``prefetch`` hops ahead. K/V that move by rail are posted one outer step ahead.
        Hops of a later outer step are never posted, because its root may still be on the rail and would block all later
        posts.
        """
        root = hop // self.inner * self.inner
        end = min(hop + prefetch + 1, root + self.inner)
        if hop == root:
            return self.hops[hop + self.inner : hop + self.inner + 1] + self.hops[hop + 1 : end]
        return self.hops[hop + prefetch : end]

    def kv_posts(self, prefetch: int) -> tuple[tuple[KvPost, ...], ...]:
        """Return for each hop the K/V groups that are posted when the hop begins, in order. Cached."""
        if prefetch not in self._kv_posts:
            arrivals = (self.kv_arrivals(hop.index, prefetch) for hop in self.hops)
            self._kv_posts[prefetch] = tuple(tuple(map(self._kv_post, coming)) for coming in arrivals)
        return self._kv_posts[prefetch]

    def kv_slot(self, hop: Hop) -> int:
        """Return the slot that K/V of a hop arrive in, on every rank that receives them."""
        return kv_slot_at(hop.index, self.inner, self.slots)

    def kv_sender(self, recv_hop: Hop) -> Hop:
        """Return the hop whose K/V are sent on while those of ``recv_hop`` arrive."""
        return self.hops[recv_hop.index - (self.inner if self.is_outer_root(recv_hop) else 1)]

    def _kv_post(self, coming: Hop) -> KvPost:
        by_rail, leaving = self.is_outer_root(coming), self.kv_sender(coming)
        to = leaving.rail_to if by_rail else leaving.kv_to
        return KvPost(coming, leaving, to, by_rail, leaving.index == 0 or self.is_outer_root(leaving) != by_rail)

    @cached_property
    def _kv_posts(self) -> dict[int, tuple[tuple[KvPost, ...], ...]]:
        return {}

    @cached_property
    def dkv_arrivals(self) -> tuple[tuple[Hop, ...], ...]:
        """For each hop, the hops whose dK/dV arrive while it sends: the next hop, and a root if dK/dV return to it."""
        following = [[hop] if hop.dkv_from is not None and not self.is_outer_root(hop) else [] for hop in self.hops[1:]]
        returns = [[self.dkv_returns[hop.index]] if hop.index in self.dkv_returns else [] for hop in self.hops]
        return tuple((*next_hop, *root) for next_hop, root in zip([*following, []], returns, strict=True))


@dataclass(frozen=True)
class Positions:
    """Global positions of the queries and of every shard of keys, int32 on the device, created on demand."""

    layout: Layout
    kv_layout: Layout
    sent: Layout  # positions of the keys that are sent to other ranks
    rank: int
    device: torch.device
    _cache: SharedCache[torch.Tensor] = field(default_factory=SharedCache, init=False, repr=False, compare=False)

    @property
    def queries(self) -> torch.Tensor:
        """Positions of this rank's queries, ``[S]``, ready on the current stream."""
        return self._cache.get(None, lambda: self._moved(self.layout.positions(self.rank)), lambda made: (made,))

    def keys(self, shard: int) -> torch.Tensor:
        """Return the positions of a shard's keys that this rank has, ``[Sk]``, ready on the current stream."""
        return self._cache.get(
            shard, lambda: self._moved(self.shard_layout(shard).positions(shard)), lambda made: (made,)
        )

    def _moved(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions on the device."""
        return positions.to(self.device, torch.int32)

    def shard_layout(self, shard: int) -> Layout:
        """Return the layout of the keys that this rank has of a shard: all keys of its own, the sent keys of others."""
        return self.kv_layout if shard == self.rank else self.sent


class HopMask(NamedTuple):
    """One part of the mask, between this rank's queries and one shard."""

    bounds: Bounds
    positions: Positions
    shard: int

    def with_positions(self, scores: Scores) -> Scores:
        """Return ``scores`` with the positions of these queries and keys if the scores depend on positions."""
        if not scores.needs_positions:
            return scores
        return replace(scores, q_positions=self.positions.queries, k_positions=self.positions.keys(self.shard))


def _hop_masks(mask: Mask, positions: Positions, shard: int) -> tuple[HopMask, ...]:
    """Return the nonempty parts of the mask for one shard, or the first part if all are empty."""
    layout, kv_layout, rank, device = positions.layout, positions.shard_layout(shard), positions.rank, positions.device
    index = None
    if mask.blocks is not None:
        visible = mask.blocks.shard_blocks(layout, rank, kv_layout, shard)
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
    runs: int = 1,
) -> Plan:
    """Return the plan of ``rank``, ready on the current stream of ``device``. Cached.

    The arguments are those of :func:`.schedule.schedule`, and the number of runs of tokens that every shard is cut
    into, see :func:`.visibility.cut_keys`. The plan is a pure function of them, so that all ranks agree
    on the transfers without communication.
    """
    return _shared_plan(layout, mask, rank, direction, device, topology, slots, kv_layout, runs).read()


@lru_cache(maxsize=PLAN_CACHE_SIZE)
def _shared_plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    direction: int,
    device: torch.device,
    topology: Topology | None,
    slots: int,
    kv_layout: Layout | None,
    runs: int,
) -> SharedValue[Plan]:
    keys = layout if kv_layout is None else kv_layout
    full = schedule(layout, mask, kv_layout=kv_layout, direction=direction, topology=topology, slots=slots)
    cut = cut_keys(layout, mask, keys, runs)
    each = (full if runs == 1 else full.select_keys(layout, mask, *run) for run in cut)
    plans = [_rank_plan(own, mask, Positions(layout, *run, rank, device)) for own, run in zip(each, cut, strict=True)]
    made = plans[0] if runs == 1 else _join_runs(plans, [run.lengths[rank] for run, _ in cut])
    return SharedValue(made, made.device_tensors())


def _join_runs(plans: list[Plan], lengths: list[int]) -> Plan:
    """Return the plan of all runs of tokens; ``lengths`` are those of the runs of the own shard."""
    _, last = max((plan.last_launch_hop, number) for number, plan in enumerate(plans))
    own_keys = starmap(slice, pairwise(accumulate(lengths, initial=0)))
    runs = tuple(
        replace(plan, own_keys=keys, last_launch_hop=plan.last_launch_hop if number == last else -1)
        for number, (plan, keys) in enumerate(zip(plans, own_keys, strict=True))
    )
    inside, between = (tuple(sorted({*chain(*edges)})) for edges in zip(*(plan.edges for plan in plans), strict=True))
    return replace(
        runs[0],
        runs=runs,
        edges=(inside, between),
        max_shard_keys=max(plan.max_shard_keys for plan in plans),
        returns_early=any(plan.returns_early for plan in plans),
    )


def _rank_plan(full: Schedule, mask: Mask, positions: Positions) -> Plan:
    """Return the plan of one rank for the keys of ``positions``."""
    rank, keys, sent, device = positions.rank, positions.kv_layout, positions.sent, positions.device
    hops = full.hops(rank)
    send_index = None
    if keys.lengths[rank] != sent.lengths[rank]:
        send_index = torch.searchsorted(keys.positions(rank), sent.positions(rank)).to(device)
    return Plan(
        rank=rank,
        hops=hops,
        inner=full.inner,
        hop_masks=tuple(
            _hop_masks(mask, positions, hop.shard) if hop.computes or hop.index == 0 else () for hop in hops
        ),
        lengths=tuple(sent.lengths[hop.shard] for hop in hops),
        max_shard_keys=max(sent.lengths),
        send_index=send_index,
        last_launch_hop=max((hop.index for hop in hops if hop.computes), default=0),
        slots=full.slots,
        edges=full.edges,
        returns_early=full.returns_early,
        dkv_returns={
            root.index + full.active_ranges[root.shard][root.index // full.inner][1]: root
            for root in hops[:: full.inner]
            if root.dkv_from is not None
        },
    )
