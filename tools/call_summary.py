"""Summary of one ``ring_attention`` call: visible pairs, traffic, and the mask as a grid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..bench.common.attention import BACKWARD_FLOPS, forward_flops, mask_data, mask_label
from ..bench.common.flags import DTYPE_BYTES, count_noun
from ..comm.topology.topology import Topology
from ..ring.buffers import chunk_runs
from ..ring.schedule.layout import Layout
from ..ring.schedule.mask import Mask, visible_pairs
from ..ring.schedule.schedule import Schedule, schedule
from ..ring.schedule.visibility import cut_keys

IntGrid = npt.NDArray[np.int64]

FP32_BYTES = 4  # partial dK/dV are sent as fp32


@dataclass(frozen=True)
class CallSummary:
    """Arguments of a ``ring_attention`` call that determine its schedule and its traffic."""

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
    """Number of equal nodes in rank order; more than one makes a two-level ring."""
    chunks: int = 1

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule of the call.

        Raises:
            ValueError: ``nodes`` does not divide the ranks into equal nodes, or ``direction`` is invalid.
        """
        return self.schedule_for(self.mask)

    def schedule_for(self, mask: Mask) -> Schedule:
        """Return the schedule of the same call with another mask."""
        world = self.layout.world
        if world % self.nodes or world == self.nodes > 1:
            raise ValueError(f"nodes is {self.nodes}: it must divide {world} ranks into equal nodes of at least 2")
        topology = Topology.grid(self.nodes, world // self.nodes)
        return schedule(self.layout, mask, direction=self.direction, topology=topology)

    @cached_property
    def runs(self) -> list[Schedule]:
        """Schedule of each run of tokens that the chunks cut every shard into."""
        count = chunk_runs(self.chunks, self.kv_heads)
        if count == 1:
            return [self.schedule]
        runs = cut_keys(self.layout, self.mask, self.layout, count)
        return [self.schedule.select_keys(self.layout, self.mask, *run) for run in runs]

    def bytes(self, kv_bytes: int, dkv_bytes: int = 0, *, level: int | None = None) -> tuple[int, ...]:
        """Return the bytes that each rank sends in one pass, as :meth:`Schedule.bytes`."""
        return tuple(map(sum, zip(*(run.bytes(kv_bytes, dkv_bytes, level=level) for run in self.runs), strict=True)))

    @property
    def title(self) -> str:
        ranks = count_noun(self.layout.world, "rank") + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        return f"{self.layout_name}, {mask_label(self.mask)}, {self.layout.seqlen:,} tokens over {ranks}"

    @cached_property
    def owners(self) -> IntGrid:
        """Rank of every position, ``[seqlen]``."""
        owners = np.empty(self.layout.seqlen, dtype=np.int64)
        for rank in range(self.layout.world):
            owners[self.layout.positions(rank).numpy()] = rank
        return owners

    @cached_property
    def pairs(self) -> IntGrid:
        """Visible (query, key) pairs of one batch row, or of all rows if their masks differ, ``[rank, hop]``."""
        by_shard = np.stack([_pairs_by_shard(self, rank) for rank in range(self.layout.world)])
        return np.take_along_axis(by_shard, self.shards, axis=1)

    @cached_property
    def shards(self) -> IntGrid:
        """Shard on each rank at each hop, ``[rank, hop]``; each hop has a permutation of the shards."""
        return np.argsort(self.schedule.ranks, axis=0)

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Bytes per token of K/V, and of partial dK/dV."""
        elements = 2 * self.head_dim * self.kv_heads * self.batch
        return elements * DTYPE_BYTES[self.dtype], elements * FP32_BYTES

    @property
    def balance(self) -> float:
        """Fraction of the time in which ranks compute, if every hop lasts as long as its slowest rank."""
        slowest = int(self.pairs.max(axis=0).sum())
        return int(self.pairs.sum()) / (self.layout.world * slowest) if slowest else 1.0

    @property
    def imbalance(self) -> float:
        """Visible pairs of the slowest rank in all hops, relative to the mean."""
        by_rank = self.pairs.sum(axis=1)
        return int(by_rank.max()) * self.layout.world / max(int(by_rank.sum()), 1)


def _pairs_by_shard(call: CallSummary, rank: int) -> IntGrid:
    """Return the number of visible pairs of one rank's queries with the keys of each shard, ``[world]``."""
    world, queries = call.layout.world, call.layout.positions(rank)
    if call.mask.blocks is None:
        parts = (part for row in call.mask.rows for part in row.parts)
        return sum((_pairs_of_part(call, part, queries) for part in parts), np.zeros(world, dtype=np.int64))
    computed = {hop.shard for hop in call.schedule.hops(rank) if hop.computes}
    pairs = [
        visible_pairs(call.mask, queries, call.layout.positions(shard)) if shard in computed else 0
        for shard in range(world)
    ]
    return np.array(pairs, dtype=np.int64)


def _pairs_of_part(call: CallSummary, part: Mask, queries: torch.Tensor) -> IntGrid:
    """Return the number of visible pairs of some queries with the keys of each shard, in one part of a mask.

    Counts for each key the queries that see it.
    """
    seqlen = call.layout.seqlen
    lo, hi = (end.clamp(0, seqlen).numpy() for end in part.interval(queries))
    lo, hi = lo[lo < hi], hi[lo < hi]
    queries_per_key = np.cumsum(np.bincount(lo, minlength=seqlen + 1) - np.bincount(hi, minlength=seqlen + 1))[:seqlen]
    by_shard = np.bincount(call.owners, weights=queries_per_key, minlength=call.layout.world)
    return by_shard.astype(np.int64)  # exact, because the sums are integers far below 2^53


def mask_cells(call: CallSummary, cells: int) -> tuple[IntGrid, IntGrid]:
    """Return the mask as a grid of at most ``cells`` by ``cells`` in global positions.

    A row or column that covers several ranks represents them in turn, so that stripes stay visible. If the masks of
    the batch rows differ, the grid shows the row with the most keys.

    Returns:
        The rank of each row or column, ``[n]``, and the hop that computes each cell, ``[n, n]``, -1 if invisible.
    """
    edges = np.linspace(0, call.layout.seqlen, min(cells, call.layout.seqlen) + 1).astype(np.int64)
    columns: list[tuple[int, int, int]] = []  # rank, and its first and last position
    for number, (start, stop) in enumerate(pairwise(edges)):
        owners = call.owners[start:stop]
        present = np.unique(owners)
        rank = present[number % len(present)]
        positions = start + np.flatnonzero(owners == rank)
        columns.append((rank, positions[0], positions[-1]))
    ranks, first, last = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    visible = np.any([_visible(part, first, last) for part in call.mask.parts], axis=0)
    hops = np.full((call.layout.world,) * 2, -1)  # [rank, shard]
    hops[np.arange(call.layout.world)[:, None], call.shards] = np.arange(call.schedule.count)
    return ranks, np.where(visible, hops[ranks[:, None], ranks], -1)


def _visible(part: Mask, first: IntGrid, last: IntGrid) -> npt.NDArray[np.bool_]:
    """Return which cells of positions ``first`` to ``last`` have a visible pair in a part of a mask, ``[n, n]``."""
    queries = np.arange(last[-1] + 1 if len(last) else 0)
    cells = np.searchsorted(first, queries, side="right") - 1
    lo, hi = (end.numpy() for end in part.interval(torch.from_numpy(queries)))
    begin, end = np.searchsorted(last, lo), np.searchsorted(first, hi)  # the cells from begin to end - 1
    seen, columns = (cells >= 0) & (queries <= last[cells]) & (lo < hi) & (begin < end), len(first) + 1
    begun, ended = (
        np.bincount(cells[seen] * columns + edge[seen], minlength=len(first) * columns) for edge in (begin, end)
    )
    visible = (begun - ended).reshape(len(first), columns).cumsum(1)[:, :-1] > 0
    if part.blocks is not None:
        # summed-area table of the visible blocks
        table = np.pad(part.blocks.visible.numpy().cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        top, bottom = first // part.blocks.block, last // part.blocks.block + 1
        blocks = table[bottom][:, bottom] - table[top][:, bottom] - table[bottom][:, top] + table[top][:, top]
        visible &= blocks > 0
    return np.asarray(visible)


def hop_rows(call: CallSummary) -> list[dict[str, Any]]:
    """Return a table row per rank and hop, with the hop of the schedule and its visible pairs."""
    pairs = call.pairs.tolist()
    return [
        {"rank": rank, **asdict(hop), "pairs": pairs[rank][hop.index]}
        for rank in range(call.layout.world)
        for hop in call.schedule.hops(rank)
    ]


def rank_rows(call: CallSummary) -> list[dict[str, Any]]:
    """Return a table row per rank with its pairs, FLOPs and sent bytes, with several nodes also the rail bytes."""
    kv, dkv = call.bytes_per_token
    sent = {"sends forward": call.bytes(kv), "sends backward": call.bytes(kv, dkv)}
    if call.nodes > 1:
        sent["by rail forward"] = call.bytes(kv, level=1)
        sent["by rail backward"] = call.bytes(kv, dkv, level=1)
    batch = call.batch if call.mask.used is None else 1  # `pairs` covers all batch rows if they differ
    rows = []
    for rank, pairs in enumerate(call.pairs.sum(axis=1).tolist()):
        flops = forward_flops(pairs, heads=call.heads, head_dim=call.head_dim, batch=batch)
        row = {"tokens": call.layout.lengths[rank], "visible pairs": pairs, "forward": flops}
        row |= {"backward": flops * BACKWARD_FLOPS, **{name: counts[rank] for name, counts in sent.items()}}
        rows.append(row)
    return rows


def call_provenance(call: CallSummary) -> dict[str, Any]:
    """Return the arguments of the call and the row of each rank, for the provenance of a result."""
    names = ("direction", "batch", "heads", "kv_heads", "head_dim", "dtype", "chunks", "balance", "imbalance")
    return {
        "layout": call.layout_name,
        "seqlen": call.layout.seqlen,
        "world": call.layout.world,
        "spans": call.layout.spans_per_rank,
        "mask": mask_data(call.mask),
        "nodes": call.schedule.nodes,
        **{name: getattr(call, name) for name in names},
        "ranks": rank_rows(call),
    }
