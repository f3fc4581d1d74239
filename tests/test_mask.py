"""Masks become intervals of indices: against every pair, one by one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels import FULL, Bounds
from ringattn.ring.layout import Layout
from ringattn.ring.mask import END, Mask, bounds, visible_pairs

from .layouts import Window, layouts, masks, sees, small_layouts

CAUSAL = Mask(causal=True)


def brute(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    pairs = [[sees(mask, query, key) for key in keys.tolist()] for query in queries.tolist()]
    return torch.tensor(pairs, dtype=torch.bool).reshape(len(queries), len(keys))


def expand(made: Bounds, queries: int, keys: int) -> torch.Tensor:
    if made.lo is None or made.hi is None:
        return torch.ones(queries, keys, dtype=torch.bool)
    index = torch.arange(keys)
    return (made.lo[:, None] <= index) & (index < made.hi[:, None])


def check(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> None:
    made, expected = bounds(mask, queries, keys), brute(mask, queries, keys)
    assert torch.equal(expand(made, len(queries), len(keys)), expected)
    assert made.is_full == bool(expected.numel() and expected.all())
    assert visible_pairs(mask, queries, keys) == int(expected.sum())
    if made.lo is not None and made.hi is not None:
        check_order(made.lo, made.hi, expected)


def check_order(lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> None:
    keys = expected.shape[1]
    assert (lo.dtype, hi.dtype, lo.shape, hi.shape) == (torch.int32, torch.int32, *[expected.shape[:1]] * 2)
    for end in (lo, hi):
        assert end.is_contiguous()
        assert torch.equal(end, end.sort().values)
    assert ((lo >= 0) & (hi <= keys) & (lo <= hi)).all()
    seen = expected.any(1)
    assert torch.equal(lo == hi, ~seen)
    if not seen.any():
        assert not lo.any()
        return
    first, last = lo[seen][0], hi[seen][-1]
    assert ((lo >= first) & (hi <= last)).all(), "an empty row lies outside of what the others see"
    for start in range(len(lo)):  # no tile is wider than the rows in it that see something need
        tile = slice(start, start + 3)
        if seen[tile].any():
            hull = int(hi[tile][-1] - lo[tile][0])
            needed = int(hi[tile][seen[tile]].max() - lo[tile][seen[tile]].min())
            gap = first_after(lo, seen, start + 3) - int(hi[tile][seen[tile]].max())
            assert hull == needed or (not seen[tile][-1] and hull == needed + gap)


def first_after(lo: torch.Tensor, seen: torch.Tensor, row: int) -> int:
    """Where the first row from ``row`` on that sees something starts; rows between two others lean forward."""
    rest = lo[row:][seen[row:]]
    return int(rest[0]) if len(rest) else int(lo[-1])


@pytest.mark.parametrize("causal", [False, True])
def test_every_small_layout(causal: bool) -> None:
    for layout in small_layouts(9, 4):
        for rank in range(layout.world):
            for shard in range(layout.world):
                check(Mask(causal=causal), layout.positions(rank), layout.positions(shard))


@given(st.data())
def test_any_layout_and_mask(data: st.DataObject) -> None:
    layout, mask = data.draw(layouts(max_world=4, max_seqlen=24)), data.draw(masks())
    keys = data.draw(st.one_of(st.just(layout), layouts(world=layout.world, max_seqlen=24)))
    for rank in range(layout.world):
        for shard in range(layout.world):
            check(mask, layout.positions(rank), keys.positions(shard))


@given(layouts(max_seqlen=32), masks())
def test_pairs_of_all_shards_are_the_pairs_of_the_whole(layout: Layout, mask: Mask) -> None:
    whole = torch.arange(layout.seqlen)
    held = [layout.positions(rank) for rank in range(layout.world)]
    assert sum(visible_pairs(mask, q, k) for q in held for k in held) == visible_pairs(mask, whole, whole)


def test_interval() -> None:
    positions = torch.tensor([0, 3, 7])
    lo, hi = Mask().interval(positions)
    assert (lo.tolist(), hi.tolist()) == ([0, 0, 0], [END, END, END])
    lo, hi = CAUSAL.interval(positions)
    assert (lo.tolist(), hi.tolist()) == ([0, 0, 0], [1, 4, 8])
    assert lo.dtype == hi.dtype == torch.int64


def test_masks_are_values() -> None:
    assert Mask() == Mask(causal=False) != CAUSAL
    assert len({Mask(), Mask(causal=False), CAUSAL}) == 2
    with pytest.raises(FrozenInstanceError):
        CAUSAL.causal = False  # type: ignore[misc]


def test_full_is_the_one_that_kernels_know() -> None:
    late, early = torch.tensor([4, 6]), torch.tensor([1, 4])
    assert bounds(CAUSAL, late, early) is FULL
    assert bounds(Mask(), early, late) is FULL
    assert bounds(CAUSAL, early, early) is not FULL


def test_rows_that_see_nothing() -> None:
    rows = torch.arange(8)
    made = bounds(Window(left=-1, right=1), rows, torch.tensor([3, 4, 6]))  # each sees its successor alone
    assert made.lo is not None
    assert made.hi is not None
    assert made.lo.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert made.hi.tolist() == [0, 0, 1, 2, 2, 3, 3, 3]


def test_nothing_visible_and_nothing_there() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    early, late = torch.tensor([0, 1]), torch.tensor([5, 6, 7])
    for made in (bounds(CAUSAL, early, late), bounds(CAUSAL, early, empty), bounds(Mask(), early, empty)):
        assert made.lo is not None
        assert made.hi is not None
        assert (made.lo.tolist(), made.hi.tolist()) == ([0, 0], [0, 0])
    for keys in (late, empty):
        made = bounds(Mask(), empty, keys)
        assert made.lo is not None
        assert len(made.lo) == 0
        assert visible_pairs(Mask(), empty, keys) == 0


def test_visible_pairs_is_an_int_and_counts_past_32_bits() -> None:
    positions = torch.arange(100_000)
    pairs = visible_pairs(Mask(), positions, positions)
    assert (type(pairs), pairs) == (int, 10**10)
