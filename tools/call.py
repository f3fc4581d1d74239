"""One call of ``ring_attention`` as far as its schedule depends on it: its pairs, its traffic, its mask as a grid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..bench.common.attention import BACKWARD_FLOPS, forward_flops, mask_data, mask_title
from ..bench.common.flags import DTYPE_BYTES, counted
from ..comm.topology.topology import Topology
from ..ring.schedule.layout import Layout
from ..ring.schedule.mask import Mask, visible_pairs
from ..ring.schedule.schedule import Schedule, schedule

Grid = npt.NDArray[np.int64]

FP32_BYTES = 4  # dK/dV accumulators travel as fp32


@dataclass(frozen=True)
class ShownCall:
    """One call of ``ring_attention``, as far as its schedule and its traffic depend on it."""

    layout: Layout
    layout_name: str
    mask: Mask
    direction: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    nodes: int = 1
    """Equal nodes in rank order; several make a two-level ring."""

    @cached_property
    def plan(self) -> Schedule:
        """The schedule.

        Raises:
            ValueError: the ranks do not make equal nodes, or the direction is none.
        """
        return self.plan_of(self.mask)

    def plan_of(self, mask: Mask) -> Schedule:
        """The schedule of the same call with another mask."""
        world = self.layout.world
        if world % self.nodes or world == self.nodes > 1:
            raise ValueError(f"nodes is {self.nodes}: it must cut {world} ranks into equal nodes of at least 2")
        topology = Topology.grid(self.nodes, world // self.nodes)
        return schedule(self.layout, mask, direction=self.direction, topology=topology)

    @property
    def title(self) -> str:
        where = counted(self.layout.world, "rank") + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        return f"{self.layout_name}, {mask_title(self.mask)}, {self.layout.seqlen:,} tokens over {where}"

    @cached_property
    def owners(self) -> Grid:
        """The rank of every position."""
        owners = np.empty(self.layout.seqlen, dtype=np.int64)
        for rank in range(self.layout.world):
            owners[self.layout.positions(rank).numpy()] = rank
        return owners

    @cached_property
    def pairs(self) -> Grid:
        """Visible (query, key) pairs, ``[rank, hop]``: of one batch row, and of all together where they differ."""
        by_shard = np.stack([_pairs_by_shard(self, rank) for rank in range(self.layout.world)])
        return np.take_along_axis(by_shard, self.shards, axis=1)

    @cached_property
    def shards(self) -> Grid:
        """The shard that is on a rank at a hop, ``[rank, hop]``: at every hop each is on one rank."""
        return np.argsort(self.plan.ranks, axis=0)

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Of K and V, and of the accumulators of dK and dV."""
        elements = 2 * self.head_dim * self.kv_heads * self.batch
        return elements * DTYPE_BYTES[self.dtype], elements * FP32_BYTES

    @property
    def balance(self) -> float:
        """Share of the ring's time in which ranks compute, if every hop lasts as long as its slowest rank."""
        slowest = int(self.pairs.max(axis=0).sum())
        return int(self.pairs.sum()) / (self.layout.world * slowest) if slowest else 1.0


def _pairs_by_shard(call: ShownCall, rank: int) -> Grid:
    """Pairs of one rank's queries with the keys of each shard."""
    world, mine = call.layout.world, call.layout.positions(rank)
    if call.mask.blocks is None:
        parts = (part for row in call.mask.rows for part in row.parts)
        return sum((_pairs_of_part(call, part, mine) for part in parts), np.zeros(world, dtype=np.int64))
    seen = {hop.shard for hop in call.plan.hops(rank) if hop.computes}
    pairs = [
        visible_pairs(call.mask, mine, call.layout.positions(shard)) if shard in seen else 0 for shard in range(world)
    ]
    return np.array(pairs, dtype=np.int64)


def _pairs_of_part(call: ShownCall, part: Mask, queries: torch.Tensor) -> Grid:
    """How many queries see each key, summed by its owner."""
    seqlen = call.layout.seqlen
    lo, hi = (end.clamp(0, seqlen).numpy() for end in part.interval(queries))
    lo, hi = lo[lo < hi], hi[lo < hi]
    seers = np.cumsum(np.bincount(lo, minlength=seqlen + 1) - np.bincount(hi, minlength=seqlen + 1))[:seqlen]
    summed = np.bincount(call.owners, weights=seers, minlength=call.layout.world)
    return summed.astype(np.int64)  # exact: sums of whole numbers far below 2^53


def mask_cells(call: ShownCall, cells: int) -> tuple[Grid, Grid]:
    """The mask as a grid of at most ``cells`` by ``cells`` in global positions.

    Returns:
        The rank that a row or column stands for, ``[n]``, and at which hop it computes each cell, ``[n, n]``; -1 where
        nothing is visible. A cell of several ranks stands for one of them in turn, so that stripes stay visible. Of
        batch rows that differ it is the one with the most keys.
    """
    edges = np.linspace(0, call.layout.seqlen, min(cells, call.layout.seqlen) + 1).astype(np.int64)
    chosen: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        inside = call.owners[start:stop]
        present = np.unique(inside)
        rank = present[number % len(present)]
        held = start + np.flatnonzero(inside == rank)
        chosen.append(rank)
        first.append(held[0])
        last.append(held[-1])
    ranks, first_held, last_held = (np.array(one, dtype=np.int64) for one in (chosen, first, last))
    visible = np.any([_visible(part, first_held, last_held) for part in call.mask.parts], axis=0)
    hops = np.full((call.layout.world,) * 2, -1)  # [rank, shard]
    hops[np.arange(call.layout.world)[:, None], call.shards] = np.arange(call.plan.count)
    return ranks, np.where(visible, hops[ranks[:, None], ranks], -1)


def _visible(part: Mask, first: Grid, last: Grid) -> npt.NDArray[np.bool_]:
    """Which cells, of positions from ``first`` to ``last``, hold a pair that a part of a mask lets through; [n, n]."""
    start, end = part.queries
    inside = np.maximum(first, start), np.minimum(last, end - 1)
    begins, ends = (torch.from_numpy(held) for held in inside)
    lo, hi = part.interval(begins)[0].numpy(), part.interval(ends)[1].numpy()
    hi = np.where(inside[0] <= inside[1], hi, 0)
    visible = (last >= lo[:, None]) & (first < hi[:, None]) & (lo < hi)[:, None]
    if part.blocks is not None:
        # how many visible blocks there are above and to the left of each
        table = np.pad(part.blocks.visible.numpy().cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        top, bottom = first // part.blocks.block, last // part.blocks.block + 1
        within = table[bottom][:, bottom] - table[top][:, bottom] - table[bottom][:, top] + table[top][:, top]
        visible &= within > 0
    return np.asarray(visible)


def hop_rows(call: ShownCall) -> list[dict[str, Any]]:
    """A row per rank and hop."""
    pairs = call.pairs.tolist()
    return [
        {"rank": rank, **asdict(hop), "pairs": pairs[rank][hop.index]}
        for rank in range(call.layout.world)
        for hop in call.plan.hops(rank)
    ]


def rank_rows(call: ShownCall) -> list[dict[str, Any]]:
    """What each rank computes and sends: pairs, FLOPs and bytes; on several nodes those over the rails, too."""
    kv, dkv = call.bytes_per_token
    sent = {"sends forward": call.plan.bytes(kv), "sends backward": call.plan.bytes(kv, dkv)}
    if call.nodes > 1:
        sent["by rail forward"] = call.plan.bytes(kv, level=1)
        sent["by rail backward"] = call.plan.bytes(kv, dkv, level=1)
    counted = call.batch if call.mask.used is None else 1  # where batch rows differ all pairs are counted together
    rows = []
    for rank, pairs in enumerate(call.pairs.sum(axis=1).tolist()):
        flops = forward_flops(pairs, heads=call.heads, head_dim=call.head_dim, batch=counted)
        row = {"tokens": call.layout.lengths[rank], "visible pairs": pairs, "forward": flops}
        row |= {"backward": flops * BACKWARD_FLOPS, **{name: counts[rank] for name, counts in sent.items()}}
        rows.append(row)
    return rows


def described(call: ShownCall) -> dict[str, Any]:
    """The call and what each rank does, for the provenance of a result."""
    names = ("direction", "batch", "heads", "kv_heads", "head_dim", "dtype", "balance")
    return {
        "layout": call.layout_name,
        "seqlen": call.layout.seqlen,
        "world": call.layout.world,
        "spans": call.layout.spans_per_rank,
        "mask": mask_data(call.mask),
        "nodes": call.plan.nodes,
        **{name: getattr(call, name) for name in names},
        "ranks": rank_rows(call),
    }
