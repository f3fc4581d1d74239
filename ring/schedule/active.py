"""Which ranks see anything of which shards, and which keys of a shard leave their rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .layout import Layout, Span
from .mask import BlockMask, Mask

# NumPy throughout: this is many small searches, and torch would start its threads for each
Vector = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]
KEPT = 8  # a schedule and what travels by it ask for the same


def active_shards(layout: Layout, mask: Mask, keys: Layout) -> Marks:
    """Where a query of a rank sees a key of a shard, ``[rank, shard]``; exact.

    It costs what the queries and the spans of keys cost, not what their product would.

    Raises:
        ValueError: the mask has blocks, and a span of either layout begins or ends inside one.
    """
    if mask.blocks is not None:
        for rank in range(layout.world):
            mask.blocks.between(layout, rank, keys, rank)  # refuses parts of blocks
    held = HeldKeys(keys)
    return np.array([np.logical_or.reduce([held.seen(*one) for one in parts]) for parts in unions(layout, mask)])


class HeldKeys:
    """The keys of all shards, sorted so that what lies in an interval is found by two searches."""

    def __init__(self, keys: Layout) -> None:
        spans = [(*span, shard) for shard, mine in enumerate(keys.spans_per_rank) for span in mine]
        table = np.array(spans, dtype=np.int64).reshape(-1, 4)
        runs = table[table[:, 2] == 1]
        runs = runs[np.argsort(runs[:, 0])]
        self.world = keys.world
        self.starts, self.stops, self.owners = runs[:, 0].copy(), runs[:, 0] + runs[:, 1], runs[:, 3].copy()
        self.stripes = table[table[:, 2] != 1]

    def seen(self, starts: Vector, ends: Vector) -> Marks:
        """For each shard whether it has a key at any of the positions; ``[world]``."""
        seen = np.zeros(self.world, dtype=np.bool_)
        if len(starts):
            widest = int((ends - starts).argmax())
            self._mark(seen, starts[widest : widest + 1], ends[widest : widest + 1])
            if not seen.all():  # most often it is: the others are looked at where they may add something
                self._mark(seen, starts, ends)
        return seen

    def _mark(self, seen: Marks, starts: Vector, ends: Vector) -> None:
        first, past = np.searchsorted(self.stops, starts, side="right"), np.searchsorted(self.starts, ends)
        there = first < past
        if there.sum() == 1:
            seen[self.owners[first[there][0] : past[there][0]]] = True
        elif there.any():
            begun, ended = (np.bincount(edges[there], minlength=len(self.owners) + 1) for edges in (first, past))
            seen[self.owners[(begun - ended).cumsum()[:-1] > 0]] = True
        if len(self.stripes):
            self._mark_stripes(seen, starts, ends)

    def _mark_stripes(self, seen: Marks, starts: Vector, ends: Vector) -> None:
        start, length, step, shard = self.stripes.T[..., None]
        first, past = (-((start - edges) // step) for edges in (starts, ends))  # indices into the span, rounded up
        seen[shard[:, 0][(np.maximum(first, 0) < np.minimum(past, length)).any(axis=1)]] = True


@lru_cache(maxsize=KEPT)
def unions(layout: Layout, mask: Mask) -> tuple[tuple[tuple[Vector, Vector], ...], ...]:
    """For each rank and part of the mask :func:`union` of its queries."""
    return tuple(tuple(union(part, layout.positions(rank)) for part in mask.parts) for rank in range(layout.world))


def union(mask: Mask, positions: torch.Tensor) -> tuple[Vector, Vector]:
    """Starts and ends of the positions that any of the queries sees: one interval, for most masks."""
    queries, lo, hi = _intervals(mask, positions)
    return disjoint(lo, hi) if mask.blocks is None or not len(queries) else _whole_blocks(mask.blocks, queries, lo, hi)


def _whole_blocks(blocks: BlockMask, queries: Vector, lo: Vector, hi: Vector) -> tuple[Vector, Vector]:
    """The blocks of keys of which any of the queries sees something.

    A mask's interval holds the query's own position, but for what is cut off alike for all: what the rows of a
    block see is one interval too, from the first one's start to the last one's end.
    """
    rows, first = np.unique(queries // blocks.block, return_index=True)
    starts, ends = np.minimum.reduceat(lo, first)[:, None], np.maximum.reduceat(hi, first)[:, None]
    begins = np.arange(blocks.visible.shape[1]) * blocks.block
    near = (begins < ends) & (starts < begins + blocks.block)
    begins = begins[(blocks.visible.numpy()[rows] & near).any(axis=0)]
    return disjoint(begins, begins + blocks.block)


def disjoint(starts: Vector, ends: Vector) -> tuple[Vector, Vector]:
    """The union of intervals of which neither end decreases: what does not touch the one before starts anew."""
    new = np.ones(len(starts), dtype=np.bool_)
    new[1:] = starts[1:] > ends[:-1]
    return starts[new], ends[np.roll(new, -1)]


def _intervals(mask: Mask, positions: torch.Tensor) -> tuple[Vector, Vector, Vector]:
    """The queries that may see something, and what each of them sees."""
    first, past = np.searchsorted(positions.numpy(), mask.queries)
    positions = positions[first:past]
    lo, hi = (end.numpy() for end in mask.interval(positions))
    there = lo < hi
    return positions.numpy()[there], lo[there], hi[there]


SENT_KEYS = 64  # layouts of what travels, that are kept
LESS = 3 / 4  # of a pass's bytes: gathering the keys and spreading their dK/dV among the others costs memory and time
MOST = 1 << 22  # edges of what the queries see, times ranks: as many take a tenth of a second
Stretches = tuple[Vector, Vector]  # starts and ends, ascending


@lru_cache(maxsize=SENT_KEYS)
def sent_keys(layout: Layout, mask: Mask, keys: Layout) -> Layout:
    """The keys that leave their rank, as a layout: ``keys`` without what no query of another rank sees.

    Of a window's shards the ends, of packed documents those that lie on several ranks, of a block-sparse pattern whole
    blocks. Every rank passes on the whole of what it got. ``keys`` itself where ``LESS`` of it or more would travel.
    """
    needed = _seen_by_others(layout, mask)
    if needed is None:
        return keys
    spans = [list(_inside(mine, *near)) for mine, near in zip(keys.spans_per_rank, needed, strict=True)]
    if sum(span.length for one in spans for span in one) >= LESS * keys.seqlen:
        return keys
    return Layout(spans)


def _seen_by_others(layout: Layout, mask: Mask) -> Iterator[Stretches] | None:
    """For each rank what the queries of all others see; None where that is in too many pieces to be kept apart."""
    seen = [_merged(*(np.concatenate(ends) for ends in zip(*parts, strict=True))) for parts in unions(layout, mask)]
    edges = np.unique(np.concatenate([ends for both in seen for ends in both]))
    return None if len(edges) * layout.world > MOST else _less_own(seen, edges)


def _less_own(seen: list[Stretches], edges: Vector) -> Iterator[Stretches]:
    """How many ranks see what lies between two edges, less the own one."""

    def changes(starts: Vector, ends: Vector) -> Vector:
        up, down = (np.bincount(np.searchsorted(edges, x), minlength=len(edges)) for x in (starts, ends))
        return up - down

    total = changes(*(np.concatenate(ends) for ends in zip(*seen, strict=True)))
    for own in seen:
        marks = np.cumsum(total - changes(*own)) > 0  # from an edge to the next; nothing behind the last
        before = np.roll(marks, 1)
        yield edges[marks & ~before], edges[~marks & before]


def _merged(starts: Vector, ends: Vector) -> Stretches:
    """The union of intervals, ascending and disjoint."""
    order = np.argsort(starts)
    return disjoint(starts[order], np.maximum.accumulate(ends[order]))


def _inside(spans: tuple[Span, ...], starts: Vector, ends: Vector) -> Iterator[Span]:
    """What of the spans lies in the intervals, both ascending."""
    begins, stops = starts.tolist(), ends.tolist()
    for start, length, step in spans:
        first, past = bisect_right(stops, start), bisect_left(begins, start + length * step)
        for begin, end in zip(begins[first:past], stops[first:past], strict=True):
            a, b = max(-((start - begin) // step), 0), min(-((start - end) // step), length)
            if a < b:
                yield Span(start + a * step, b - a, step)
