"""Visibility between ranks and shards, and the keys that are sent to other ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .layout import Layout, Span
from .mask import END, BlockMask, Mask

# NumPy throughout: these are many small searches, and torch would start its threads for each.
Vector = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]
INTERVALS_CACHE_SIZE = 8  # cached results; the schedule and `sent_keys` use the same ones


def active_shards(layout: Layout, mask: Mask, keys: Layout) -> Marks:
    """Return bool ``[rank, shard]``: True if any query of the rank sees any key of the shard; exact.

    The cost grows with the number of queries plus the number of key spans, not with their product.

    Raises:
        ValueError: the mask has blocks, and a span of either layout begins or ends inside a block.
    """
    if mask.blocks is not None:
        for rank in range(layout.world):
            mask.blocks.shard_blocks(layout, rank, keys, rank)  # raises for spans that cut a block
    key_index = KeyIndex(keys)
    return np.array(
        [
            np.logical_or.reduce([key_index.visible_shards(*part) for part in parts])
            for parts in rank_intervals(layout, mask)
        ]
    )


class KeyIndex:
    """Sorted index of the keys of all shards, which finds the keys of an interval with two searches."""

    def __init__(self, keys: Layout) -> None:
        spans = [(*span, shard) for shard, mine in enumerate(keys.spans_per_rank) for span in mine]
        table = np.array(spans, dtype=np.int64).reshape(-1, 4)
        runs = table[table[:, 2] == 1]
        runs = runs[np.argsort(runs[:, 0])]
        self.world = keys.world
        self.starts, self.stops, self.owners = runs[:, 0].copy(), runs[:, 0] + runs[:, 1], runs[:, 3].copy()
        self.stripes = table[table[:, 2] != 1]

    def visible_shards(self, starts: Vector, ends: Vector) -> Marks:
        """Return bool ``[world]``: True for each shard that has a key in any of the intervals ``[starts, ends)``."""
        seen = np.zeros(self.world, dtype=np.bool_)
        if len(starts):
            widest = int((ends - starts).argmax())
            self._mark(seen, starts[widest : widest + 1], ends[widest : widest + 1])
            if not seen.all():  # the widest interval usually reaches all shards; search the others only if not
                self._mark(seen, starts, ends)
        return seen

    def _mark(self, seen: Marks, starts: Vector, ends: Vector) -> None:
        """Set ``seen`` for each shard that has a key in any of the intervals."""
        first, past = np.searchsorted(self.stops, starts, side="right"), np.searchsorted(self.starts, ends)
        nonempty = first < past
        if nonempty.sum() == 1:
            seen[self.owners[first[nonempty][0] : past[nonempty][0]]] = True
        elif nonempty.any():
            begun, ended = (np.bincount(edges[nonempty], minlength=len(self.owners) + 1) for edges in (first, past))
            seen[self.owners[(begun - ended).cumsum()[:-1] > 0]] = True
        if len(self.stripes):
            self._mark_stripes(seen, starts, ends)

    def _mark_stripes(self, seen: Marks, starts: Vector, ends: Vector) -> None:
        start, length, step, shard = self.stripes.T[..., None]
        first, past = (-((start - edges) // step) for edges in (starts, ends))  # indices into the span, rounded up
        seen[shard[:, 0][(np.maximum(first, 0) < np.minimum(past, length)).any(axis=1)]] = True


@lru_cache(maxsize=INTERVALS_CACHE_SIZE)
def rank_intervals(layout: Layout, mask: Mask) -> tuple[tuple[tuple[Vector, Vector], ...], ...]:
    """Return :func:`visible_intervals` of each rank's queries, for every part of the mask."""
    return tuple(
        tuple(visible_intervals(part, layout.positions(rank)) for part in mask.parts) for rank in range(layout.world)
    )


def visible_intervals(mask: Mask, positions: torch.Tensor) -> tuple[Vector, Vector]:
    """Return starts and ends of the position intervals that any of the queries sees; one interval for most masks."""
    queries, lo, hi = _intervals(mask, positions)
    return (
        merge_intervals(lo, hi)
        if mask.blocks is None or not len(queries)
        else _whole_blocks(mask.blocks, queries, lo, hi)
    )


def _whole_blocks(blocks: BlockMask, queries: Vector, lo: Vector, hi: Vector) -> tuple[Vector, Vector]:
    """Return the key blocks that any of the queries sees, as intervals.

    Rows of one block with intervals that overlap or touch together see one interval, from the start of the first row to
    the end of the last row.
    """
    rows, new = queries // blocks.block, np.ones(len(lo), dtype=np.bool_)
    new[1:] = (rows[1:] != rows[:-1]) | (lo[1:] > hi[:-1])
    starts, ends = lo[new][:, None], hi[np.roll(new, -1)][:, None]
    begins = np.arange(blocks.visible.shape[1]) * blocks.block
    touched = (begins < ends) & (starts < begins + blocks.block)
    begins = begins[(blocks.visible.numpy()[rows[new]] & touched).any(axis=0)]
    return merge_intervals(begins, begins + blocks.block)


def merge_intervals(starts: Vector, ends: Vector) -> tuple[Vector, Vector]:
    """Merge overlapping or touching intervals whose starts and ends are both ascending."""
    new = np.ones(len(starts), dtype=np.bool_)
    new[1:] = starts[1:] > ends[:-1]
    return starts[new], ends[np.roll(new, -1)]


def _intervals(mask: Mask, positions: torch.Tensor) -> tuple[Vector, Vector, Vector]:
    """Return the queries that may see a key, and the interval ``[lo, hi)`` that each of them sees."""
    first, past = np.searchsorted(positions.numpy(), mask.queries)
    positions = positions[first:past]
    lo, hi = (end.numpy() for end in mask.interval(positions))
    nonempty = lo < hi
    return positions.numpy()[nonempty], lo[nonempty], hi[nonempty]


SENT_KEYS_CACHE_SIZE = 64  # cached layouts of the keys that are sent
MAX_SENT_SHARE = (
    3 / 4
)  # send a subset only below this share of the bytes: gathering keys and scattering dK/dV costs time
CUT_TOKENS = 128  # tokens that share a scale of an fp8 wire, and a multiple of most tiles
MAX_EDGES = 1 << 22  # largest number of interval edges times ranks; that many take 0.1 s
PositionIntervals = tuple[Vector, Vector]  # starts and ends, ascending


@lru_cache(maxsize=SENT_KEYS_CACHE_SIZE)
def sent_keys(layout: Layout, mask: Mask, keys: Layout) -> Layout:
    """Return the layout of the keys that are sent: ``keys`` without those that no query of another rank sees.

    With a window these are the ends of the shards, with packed documents the documents that span several ranks, with a
    block-sparse pattern whole blocks. Every rank passes on everything that it received. If a share of
    ``MAX_SENT_SHARE`` or more would be sent anyway, the result is ``keys``.
    """
    needed = _seen_by_others(layout, mask)
    if needed is None:
        return keys
    spans = [list(_clip_spans(own, *seen)) for own, seen in zip(keys.spans_per_rank, needed, strict=True)]
    if sum(span.length for rank_spans in spans for span in rank_spans) >= MAX_SENT_SHARE * keys.seqlen:
        return keys
    return Layout(spans)


def cut_keys(layout: Layout, mask: Mask, keys: Layout, count: int) -> tuple[tuple[Layout, Layout], ...]:
    """Cut every shard into ``count`` runs of tokens; return for each run its keys, and those of them that are sent.

    The runs of a shard have almost equal numbers of keys that are sent. They begin at whole blocks of a block-sparse
    mask, and otherwise at multiples of ``CUT_TOKENS`` sent keys if the shard is long enough. Runs may be empty.
    """
    return _cut(keys, sent_keys(layout, mask, keys), count, mask.blocks and mask.blocks.block)


@lru_cache(maxsize=SENT_KEYS_CACHE_SIZE)  # masks that change from batch to batch often send the same keys
def _cut(keys: Layout, sent: Layout, count: int, block: int | None) -> tuple[tuple[Layout, Layout], ...]:
    if count == 1:
        return ((keys, sent),)
    starts = []
    for rank, length in enumerate(sent.lengths):
        unit = block or (CUT_TOKENS if length >= count * CUT_TOKENS else 1)
        cuts = ((length * run // count + unit // 2) // unit * unit for run in range(1, count))
        starts.append([0, *(int(sent.positions(rank)[cut]) if cut < length else END for cut in cuts), END])

    def part(whole: Layout, run: int) -> Layout:
        intervals = (np.array(firsts[run : run + 2])[:, None] for firsts in starts)
        return Layout(_clip_spans(own, *ends) for own, ends in zip(whole.spans_per_rank, intervals, strict=True))

    return tuple((own := part(keys, run), own if sent == keys else part(sent, run)) for run in range(count))


def _seen_by_others(layout: Layout, mask: Mask) -> Iterator[PositionIntervals] | None:
    """Return for each rank the intervals that queries of other ranks see; None if there are too many."""
    seen = [
        _merge_unsorted(*(np.concatenate(ends) for ends in zip(*parts, strict=True)))
        for parts in rank_intervals(layout, mask)
    ]
    edges = np.unique(np.concatenate([ends for both in seen for ends in both]))
    return None if len(edges) * layout.world > MAX_EDGES else _without_own(seen, edges)


def _without_own(seen: list[PositionIntervals], edges: Vector) -> Iterator[PositionIntervals]:
    """Yield for each rank the intervals that at least one other rank sees.

    Each rank's intervals change a count at their edges. Where the total without a rank's own changes is above 0,
    another rank sees the positions.
    """

    def changes(starts: Vector, ends: Vector) -> Vector:
        up, down = (np.bincount(np.searchsorted(edges, x), minlength=len(edges)) for x in (starts, ends))
        return up - down

    total = changes(*(np.concatenate(ends) for ends in zip(*seen, strict=True)))
    for own in seen:
        marks = np.cumsum(total - changes(*own)) > 0  # from an edge to the next; nothing behind the last
        before = np.roll(marks, 1)
        yield edges[marks & ~before], edges[~marks & before]


def _merge_unsorted(starts: Vector, ends: Vector) -> PositionIntervals:
    """Merge intervals in any order into ascending, disjoint ones."""
    order = np.argsort(starts)
    return merge_intervals(starts[order], np.maximum.accumulate(ends[order]))


def _clip_spans(spans: tuple[Span, ...], starts: Vector, ends: Vector) -> Iterator[Span]:
    """Yield the parts of the spans that lie inside the intervals; both are ascending."""
    begins, stops = starts.tolist(), ends.tolist()
    for start, length, step in spans:
        first, past = bisect_right(stops, start), bisect_left(begins, start + length * step)
        for begin, end in zip(begins[first:past], stops[first:past], strict=True):
            a, b = max(-((start - begin) // step), 0), min(-((start - end) // step), length)
            if a < b:
                yield Span(start + a * step, b - a, step)
