"""Which keys of a shard travel: those that a query of another rank sees."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from .layout import Layout
from .mask import Mask
from .spans import Span
from .visits import Vector, disjoint, seen_blocks, unions

KEPT = 64
LESS = 3 / 4  # of a pass's bytes: gathering the keys and spreading their sums among the others costs memory and time
MOST = 1 << 22  # edges of what the queries see, times ranks: as many take a tenth of a second
Stretches = tuple[Vector, Vector]  # starts and ends, ascending


@lru_cache(maxsize=KEPT)
def travelling(layout: Layout, mask: Mask, keys: Layout) -> Layout:
    """The keys that leave their rank, as a layout: ``keys`` without what no query of another rank sees.

    Of a window's shards the ends, of packed documents those that lie on several ranks, of a block-sparse pattern whole
    blocks. Every rank passes on the whole of what it got. ``keys`` itself where ``LESS`` of it or more would travel.
    """
    found = _intervals(layout, mask) if mask.blocks is None else _blocks(layout, mask, keys)
    if found is None:
        return keys
    spans = [list(_inside(mine, *near)) for mine, near in zip(keys.spans_per_rank, found, strict=True)]
    if sum(span.length for one in spans for span in one) >= LESS * keys.seqlen:
        return keys
    return Layout(spans)


def _intervals(layout: Layout, mask: Mask) -> Iterator[Stretches] | None:
    """For each rank what the queries of all others see; None where that is in too many pieces to be told apart."""
    seen = [_merged(*(np.concatenate(ends) for ends in zip(*parts, strict=True))) for parts in unions(layout, mask)]
    edges = np.unique(np.concatenate([ends for both in seen for ends in both]))
    return None if len(edges) * layout.world > MOST else _seen_by_others(seen, edges)


def _seen_by_others(seen: list[Stretches], edges: Vector) -> Iterator[Stretches]:
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


def _blocks(layout: Layout, mask: Mask, keys: Layout) -> Iterator[Stretches]:
    """For each rank starts and ends of its blocks that a query of another sees."""
    held, seen = seen_blocks(layout, mask, keys)
    others = seen.sum(axis=0) - seen[held.owners, np.arange(len(held.owners))]
    for rank in range(keys.world):
        near = (held.owners == rank) & (others > 0)
        yield held.starts[near], held.stops[near]


def _inside(spans: tuple[Span, ...], starts: Vector, ends: Vector) -> Iterator[Span]:
    """What of the spans lies in the intervals, both ascending."""
    begins, stops = starts.tolist(), ends.tolist()
    for start, length, step in spans:
        first, past = bisect_right(stops, start), bisect_left(begins, start + length * step)
        for begin, end in zip(begins[first:past], stops[first:past], strict=True):
            a, b = max(-((start - begin) // step), 0), min(-((start - end) // step), length)
            if a < b:
                yield Span(start + a * step, b - a, step)
