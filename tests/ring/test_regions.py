"""Splitting bounds into regions: each visible pair once, and each region of a shape that its code accepts."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import FULL, BlockSparseIndex, Bounds
from ringattn.ring import Mask, rectangles
from ringattn.ring.local import regions as cutting
from ringattn.ring.local.regions import Region, RegionKind, key_limits, regions, split_work
from ringattn.ring.schedule.mask import bounds as bounds_of

from ..support.kernel_cases import visible as visible_pairs

CAUSAL = Mask(causal=True)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[Bounds, int, int]:
    """Draw bounds from stretches of rows of one kind, so that regular shapes occur."""
    steps = st.sampled_from([(1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (2, 1), (0, 2)])
    stretches = draw(st.lists(st.tuples(st.integers(3, 12), steps, st.integers(0, 4)), min_size=1, max_size=6))
    lo, hi = [draw(st.integers(0, 3))], [draw(st.integers(6, 16))]
    for length, (lo_step, hi_step), jump in stretches:
        for i in range(length):
            hi.append(hi[-1] + hi_step + (jump if i == 0 else 0))
            lo.append(min(lo[-1] + lo_step, hi[-1]))
    keys = hi[-1] + draw(st.integers(0, 2))
    return Bounds(torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32)), len(lo), keys


@st.composite
def any_bounds(draw: st.DrawFn) -> tuple[Bounds, int, int]:
    """Draw intervals or none, padding or none, and a block pattern or none."""
    bounds, rows, keys = draw(intervals())
    used, pattern = draw(st.lists(st.integers(0, keys), max_size=3)), draw(st.integers(0, 2**20))
    block = draw(st.integers(2, 9))
    counts = [-(-length // block) for length in (rows, keys)]
    visible = torch.tensor([pattern >> bit % 20 & 1 for bit in range(counts[0] * counts[1])]).bool().view(counts)
    return (
        replace(
            draw(st.sampled_from([bounds, bounds, FULL])),
            seqused_k=torch.tensor(used, dtype=torch.int32) if used else None,
            block_sparse=draw(st.sampled_from([None, BlockSparseIndex(visible, block)])),
        ),
        rows,
        keys,
    )


def shape(region: Region, bounds: Bounds) -> Tensor:
    """Return which pairs a region computes, bool ``[rows, keys]``."""
    rows, keys = region.row_end - region.row, region.key_end - region.key
    if region.kind is RegionKind.BLOCKWISE:
        lo, hi, runs = key_limits(bounds, region)
        at = torch.arange(keys)
        return (at >= lo[:, None]) & (at < hi[:, None]) & torch.stack([(at >= a) & (at < b) for a, b in runs]).any(0)
    square = torch.ones(rows, keys, dtype=torch.bool)
    assert region.kind is RegionKind.RECTANGLE or rows == keys
    return {RegionKind.RECTANGLE: square, RegionKind.CAUSAL: square.tril(), RegionKind.ANTICAUSAL: square.triu()}[
        region.kind
    ]


CONSTANTS = {"MIN_ROWS": (3, 6), "BAND_ROWS": (2, 4), "NARROW_KEYS": (3, 30)}


@given(
    case=any_bounds(),
    constants=st.fixed_dictionaries({name: st.sampled_from(some) for name, some in CONSTANTS.items()}),
    how=st.sampled_from([{}, {}, {"use_operator": False}, {"exact": True}, {"exact": True}]),
)
@settings(max_examples=200)
def test_regions_cover_every_visible_pair_once(
    case: tuple[Bounds, int, int], constants: dict[str, int], how: dict[str, bool]
) -> None:
    bounds, rows, keys = case
    with mock.patch.dict(vars(cutting), constants):
        cut = rectangles(bounds, rows, keys) if "exact" in how else regions(bounds, rows, keys, **how)
    batch = 1 if bounds.seqused_k is None else len(bounds.seqused_k)
    visible = visible_pairs(bounds, batch, rows, keys)[:, 0]
    covered = torch.zeros(visible.shape, dtype=torch.int32)
    for region in cut:
        assert region.row < region.row_end and region.key < region.key_end
        assert (region.kind is RegionKind.BLOCKWISE) not in (["use_operator" not in how] if how else [])
        covered[region.items, region.rows, region.keys] += shape(region, bounds)
    assert covered.equal(visible.int())
    assert bool(cut) == bool(visible.any())


def test_rows_after_a_rectangle_form_one_square() -> None:
    late = bounds_of(CAUSAL, torch.arange(300, 900), torch.arange(900))
    assert regions(late, 600, 900) == (
        Region(RegionKind.RECTANGLE, 0, 600, 0, 300),
        Region(RegionKind.CAUSAL, 0, 600, 300, 900),
    )
    positions = torch.cat([torch.arange(0, 150), torch.arange(450, 900)])
    (whole,) = regions(bounds_of(CAUSAL, positions, positions), 600, 600)
    assert whole.kind is RegionKind.CAUSAL


def test_half_of_the_work_is_split_off() -> None:
    """Half of 232 pairs are a rectangle, a triangle and four rows of the blockwise region."""
    rectangle, triangle = Region(RegionKind.RECTANGLE, 0, 4, 0, 10), Region(RegionKind.CAUSAL, 4, 12, 10, 18)
    rows, last = Region(RegionKind.BLOCKWISE, 12, 22, 0, 12), Region(RegionKind.RECTANGLE, 22, 26, 0, 10)
    assert split_work([rectangle, triangle, rows, last]) == (
        (rectangle, triangle, rows._replace(row_end=16)),
        (rows._replace(row=16), last),
    )


def test_empty_shards_have_no_rectangles() -> None:
    assert rectangles(FULL, 0, 5) == rectangles(FULL, 5, 0) == ()


def test_long_blockwise_regions_are_cut() -> None:
    """A region copies its keys, so that its size limits the memory of a hop."""
    lo, most = torch.arange(10_000, dtype=torch.int32), cutting.MAX_BLOCKWISE_ROWS
    cut = regions(Bounds(lo, lo + 5), 10_000, 10_004, use_operator=False)
    assert [(each.row, each.row_end) for each in cut] == [(0, most), (most, 2 * most), (2 * most, 10_000)]


def test_regions_are_cached_per_bounds() -> None:
    bounds = bounds_of(CAUSAL, torch.arange(8), torch.arange(8))
    first = regions(bounds, 8, 8)
    assert regions(bounds, 8, 8) is first
    before = len(cutting._cache)
    del bounds
    assert len(cutting._cache) == before - 1


def test_wide_windows_use_the_operator() -> None:
    at = torch.arange(cutting.NARROW_KEYS + 600)
    kinds = {
        window: {region.kind for region in regions(bounds_of(Mask(True, (window, -1)), at[-200:], at), 200, len(at))}
        for window in (200, cutting.NARROW_KEYS)
    }
    assert kinds == {
        200: {RegionKind.BLOCKWISE},
        cutting.NARROW_KEYS: {RegionKind.ANTICAUSAL, RegionKind.RECTANGLE, RegionKind.CAUSAL},
    }


def test_exact_regions_are_cached_apart() -> None:
    bounds = Bounds(torch.arange(16, dtype=torch.int32) // 2, torch.arange(1, 17, dtype=torch.int32))
    found = [regions(bounds, 16, 16, exact=exact) for exact in (False, True)]
    kinds = [{region.kind for region in each} for each in found]
    assert RegionKind.BLOCKWISE in kinds[0] and RegionKind.BLOCKWISE not in kinds[1]
    assert found == [regions(bounds, 16, 16, exact=exact) for exact in (False, True)]
