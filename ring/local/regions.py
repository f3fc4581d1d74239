"""Cut the bounds of one hop into regions that kernels for full and causal rectangles can compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...kernels import BlockSparseIndex, Bounds

MIN_ROWS = 128  # fewer rows are computed blockwise, because an operator call would cost more than it computes
BAND_ROWS = 512  # most rows per band of a window; the operator computes parts of larger triangles in vain
MAX_BLOCKWISE_ROWS = 4096  # most rows of a blockwise region
NARROW_KEYS = 2048  # windows up to this width are computed blockwise, because triangles would be too large a part

KeyRanges = tuple[tuple[int, int], ...]  # ascending, disjoint ranges of key indices ``[begin, end)``


class RegionKind(Enum):
    """Shape of a region in the plane of query rows and key indices."""

    RECTANGLE = "every row sees every key"
    CAUSAL = "square: row i of the region sees its first i + 1 keys"
    ANTICAUSAL = "square: row i of the region sees all but its first i keys"
    BLOCKWISE = "anything else, row by row as the bounds say"


class Region(NamedTuple):
    """Query rows ``[row, row_end)`` against keys ``[key, key_end)``, as indices into the two shards."""

    kind: RegionKind
    row: int
    row_end: int
    key: int
    key_end: int
    key_ranges: KeyRanges = ()  # keys that a blockwise region sees; empty: all
    batch: int = 0
    batch_end: int | None = None  # end of the batch items ``[batch, batch_end)``; None: the last item

    @property
    def items(self) -> slice:
        return slice(self.batch, self.batch_end)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row_end)

    @property
    def keys(self) -> slice:
        return slice(self.key, self.key_end)


class KeyLimits(NamedTuple):
    """Keys that the rows of a region see, counted from its first key: ``lo <= j < hi``, inside ``key_ranges``."""

    lo: Tensor
    hi: Tensor
    key_ranges: KeyRanges


_cache: WeakKeyDictionary[Bounds, dict[tuple[int, int, bool, bool], tuple[Region, ...]]] = WeakKeyDictionary()


def regions(
    bounds: Bounds, rows: int, keys: int, *, use_operator: bool = True, exact: bool = False
) -> tuple[Region, ...]:
    """Return disjoint regions that cover every visible pair once. Cached as long as ``bounds`` lives.

    With ``use_operator=False`` all regions are blockwise, with ``exact=True`` none is. In regions that are not
    blockwise every row sees a key, because PyTorch's CPU operator crashes on empty queries or keys, and returns an lse
    of 0 for rows without keys.
    """
    if rows == 0 or keys == 0:
        return ()
    if bounds.is_full and bounds.seqused_k is None and bounds.block_sparse is None:  # FULL is shared by all shapes
        return (Region(RegionKind.RECTANGLE if use_operator else RegionKind.BLOCKWISE, 0, rows, 0, keys),)
    cached, key = _cache.setdefault(bounds, {}), (rows, keys, use_operator, exact)
    if key not in cached:
        cached[key] = tuple(_regions(bounds, *key))
    return cached[key]


def key_limits(bounds: Bounds, region: Region) -> KeyLimits:
    """Return the keys that the rows of a region see."""
    key, end = region.key, region.key_end
    key_ranges = tuple((begin - key, stop - key) for begin, stop in region.key_ranges) or ((0, end - key),)
    if bounds.lo is None or bounds.hi is None:
        lo = torch.zeros(region.row_end - region.row, dtype=torch.int32)
        return KeyLimits(lo, lo + (end - key), key_ranges)
    lo, hi = (x[region.rows].clamp(key, end) - key for x in (bounds.lo, bounds.hi))
    return KeyLimits(lo, hi, key_ranges)


def split_work(regions_to_split: Sequence[Region]) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Split the regions into two parts of about equal work. A blockwise region may be cut by rows."""
    parts: tuple[list[Region], list[Region]] = [], []
    remaining = sum(_size(region) for region in regions_to_split) / 2
    for region in regions_to_split:
        rows, share = region.row_end - region.row, remaining / _size(region)
        cut = region.row + round(rows * share)
        if region.kind is RegionKind.BLOCKWISE and region.row < cut < region.row_end:
            parts[0].append(region._replace(row_end=cut))
            parts[1].append(region._replace(row=cut))
        else:
            parts[share < 0.5].append(region)
        remaining -= _size(region)
    return tuple(parts[0]), tuple(parts[1])


def _size(region: Region) -> int:
    """Estimate the number of pairs that a region computes."""
    area = (region.row_end - region.row) * (region.key_end - region.key)
    return -(-area // 2) if region.kind in (RegionKind.CAUSAL, RegionKind.ANTICAUSAL) else area


def rectangles(bounds: Bounds, rows: int, keys: int) -> tuple[Region, ...]:
    """Cut the bounds of one hop into full and causal rectangles that cover every visible pair once."""
    return regions(bounds, rows, keys, exact=True)


def _regions(bounds: Bounds, rows: int, keys: int, operator: bool, exact: bool) -> Iterator[Region]:
    lo, hi = bounds.lo, bounds.hi
    if lo is None or hi is None:
        lo, hi = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    lo, hi = lo.cpu(), hi.cpu()
    for first, end, used in _batches(bounds.seqused_k, keys):
        interval = lo.clamp(max=used), hi.clamp(max=used)
        if bounds.block_sparse is not None:
            cut = list(_block_sparse(*interval, bounds.block_sparse, operator, exact))
        else:
            cut = list(_cut(*interval, exact)) if operator else list(_blockwise(*interval, 0, rows))
        yield from (region._replace(batch=first, batch_end=end) for region in cut)


def _batches(used: Tensor | None, keys: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield ``(first, end, number of keys)`` for runs of batch items with equal ``used``; end None: the last item."""
    if used is None:
        yield 0, None, keys
        return
    for count, group in groupby(enumerate(used.tolist()), key=lambda pair: pair[1]):
        items = [item for item, _ in group]
        yield items[0], items[-1] + 1, count


def _block_sparse(lo: Tensor, hi: Tensor, index: BlockSparseIndex, operator: bool, exact: bool) -> Iterator[Region]:
    """Yield the regions of a block-sparse mask, band by band (see :func:`_bands`).

    Long key ranges of a band become regions for the operator, all others one blockwise region.
    """
    for row, end, band in _bands(index, len(lo)):
        (band_lo, band_hi), rest = (lo[row:end], hi[row:end]), []
        for begin, stop in band:
            cut = list(_cut(band_lo.clamp(begin, stop), band_hi.clamp(begin, stop), exact)) if operator else []
            shortest = min((min(x.row_end - x.row, x.key_end - x.key) for x in cut), default=0)
            if exact or (shortest >= MIN_ROWS and all(x.kind is not RegionKind.BLOCKWISE for x in cut)):
                yield from (region._replace(row=row + region.row, row_end=row + region.row_end) for region in cut)
            else:
                rest.append((begin, stop))
        seen = [(max(begin, int(band_lo[0])), min(stop, int(band_hi[-1]))) for begin, stop in rest]
        if seen := [(begin, stop) for begin, stop in seen if begin < stop]:
            yield Region(RegionKind.BLOCKWISE, row, end, seen[0][0], seen[-1][1], tuple(seen))


def _bands(index: BlockSparseIndex, rows: int) -> Iterator[tuple[int, int, KeyRanges]]:
    """Yield bands, which are runs of query blocks that see the same keys, as ``(row, row_end, key ranges)``."""
    begins, ends = index.begins.tolist(), index.ends.tolist()
    blocks = [tuple(zip(begins[a:b], ends[a:b], strict=True)) for a, b in pairwise(index.offsets.tolist())]
    for seen, group in groupby(range(len(blocks)), key=blocks.__getitem__):
        band = list(group)
        yield band[0] * index.block, min((band[-1] + 1) * index.block, rows), seen


def _blockwise(lo: Tensor, hi: Tensor, start: int, end: int) -> Iterator[Region]:
    """Yield blockwise regions for the rows ``[start, end)``, without blind rows at the ends.

    A long run of rows is cut, because a region copies its keys and fresh memory is slow.
    """
    for row in range(start, end, MAX_BLOCKWISE_ROWS):
        a, b = _trim_blind_rows(lo, hi, row, min(row + MAX_BLOCKWISE_ROWS, end))
        if a < b:
            yield Region(RegionKind.BLOCKWISE, a, b, int(lo[a]), int(hi[b - 1]))


def _cut(lo: Tensor, hi: Tensor, exact: bool) -> Iterator[Region]:
    """Yield the regions of long regular runs and of the gaps between them; with ``exact`` the gaps go row by row."""
    regular = _regular_runs(lo, hi, 1 if exact else MIN_ROWS)
    for (_, gap), (start, end) in pairwise([(0, 0), *regular, (len(lo), len(lo))]):
        for row, row_end in pairwise(range(gap, start + 1)) if exact else [(gap, start)]:
            yield from _shape(lo, hi, row, row_end, exact)
        yield from _shape(lo, hi, start, end, exact)


SAME, LONGER, SHORTER, SHIFTED, OTHER = range(5)
"""Keys of a row relative to the row before: equal, one more at the end, one less at the start, both, or irregular."""


def _classify_rows(lo: Tensor, hi: Tensor) -> Tensor:
    """Return SAME to OTHER for each row but the first."""
    rise, fall, seen = hi.diff(), lo.diff(), hi > lo
    regular = (fall <= 1) & (rise <= 1) & seen[:-1] & seen[1:]
    return torch.where(regular, SHORTER * fall + rise, OTHER)


def _regular_runs(lo: Tensor, hi: Tensor, least: int) -> list[tuple[int, int]]:
    """Return runs of rows ``[start, end)`` in which all rows but the first have the same class, none of them OTHER.

    ``least`` is the minimum of rows with this class.
    """
    steps, counts = torch.unique_consecutive(_classify_rows(lo, hi), return_counts=True)
    ends = counts.cumsum(0)
    long = (steps != OTHER) & (counts >= least)
    runs: list[tuple[int, int]] = []
    for count, end in zip(counts[long].tolist(), ends[long].tolist(), strict=True):
        done = runs[-1][1] if runs else 0  # two adjacent runs share a row, which stays with the first run
        runs.append((max(end - count, done), end + 1))
    return runs


def _trim_blind_rows(lo: Tensor, hi: Tensor, start: int, end: int) -> tuple[int, int]:
    """Return the rows ``[start, end)`` without those at either end that see nothing."""
    visible = (hi > lo)[start:end].nonzero()
    return (start + int(visible[0]), start + int(visible[-1]) + 1) if len(visible) else (start, start)


def _shape(lo: Tensor, hi: Tensor, start: int, end: int, exact: bool) -> Iterator[Region]:
    """Yield the regions of the rows ``[start, end)``: rectangles and triangles if all rows have the same class."""
    start, end = _trim_blind_rows(lo, hi, start, end)
    if start == end:
        return
    first, last = (int(lo[start]), int(hi[start])), (int(lo[end - 1]), int(hi[end - 1]))
    steps = set(_classify_rows(lo[start:end], hi[start:end]).tolist()) or {SAME}
    if steps == {SAME}:
        yield Region(RegionKind.RECTANGLE, start, end, *first)
    elif steps == {LONGER}:
        yield from _rectangle(start, end, first[0], first[1] - 1)
        yield Region(RegionKind.CAUSAL, start, end, first[1] - 1, last[1])
    elif steps == {SHORTER} and (exact or end - start >= MIN_ROWS):
        yield Region(RegionKind.ANTICAUSAL, start, end, first[0], last[0] + 1)
        yield from _rectangle(start, end, last[0] + 1, last[1])
    elif exact and first[1] - first[0] == 1:  # a window of one key
        yield from (
            Region(RegionKind.RECTANGLE, row, row + 1, key, key + 1)
            for row, key in zip(range(start, end), range(first[0], last[1]), strict=True)
        )
    elif steps == {SHIFTED} and (exact or (end - start >= MIN_ROWS and first[1] - first[0] > NARROW_KEYS)):
        yield from _cut_window(start, end, *first)
    else:
        yield from _blockwise(lo, hi, start, end)


def _cut_window(start: int, end: int, lo: int, hi: int) -> Iterator[Region]:
    """Yield the regions of a window that moves by one key per row, band by band.

    ``lo`` and ``hi`` are the bounds of the first row. Each band has a triangle at its left edge, a rectangle in the
    middle and a triangle at its right edge. A band has fewer rows than the window has keys, so that the triangles do
    not overlap::

        keys    0 1 2 | 3 | 4 5 6
        row 0   # # # | # | # . .
        row 1   . # # | # | # # .
        row 2   . . # | # | # # #
    """
    count = -(-(end - start) // min(BAND_ROWS, hi - lo - 1))
    cuts = [(end - start) * cut // count for cut in range(count + 1)]
    for a, b in pairwise(cuts):
        yield Region(RegionKind.ANTICAUSAL, start + a, start + b, lo + a, lo + b)
        yield from _rectangle(start + a, start + b, lo + b, hi + a - 1)
        yield Region(RegionKind.CAUSAL, start + a, start + b, hi + a - 1, hi + b - 1)


def _rectangle(row: int, row_end: int, key: int, key_end: int) -> Iterator[Region]:
    """Yield a rectangle, unless it has no keys."""
    if key < key_end:
        yield Region(RegionKind.RECTANGLE, row, row_end, key, key_end)
