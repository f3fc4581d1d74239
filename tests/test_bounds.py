"""Bounds and tile ranges: against brute force for every small size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels.bounds import FULL, Bounds, tile_range

CPU, META = torch.device("cpu"), torch.device("meta")


def bounds(lo: list[int], hi: list[int]) -> Bounds:
    return Bounds(torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32))


def seen(made: Bounds, columns: int) -> torch.Tensor:
    assert made.lo is not None
    assert made.hi is not None
    index = torch.arange(columns)
    return (made.lo[:, None] <= index) & (index < made.hi[:, None])


@st.composite
def intervals(draw: st.DrawFn, max_keys: int = 12) -> tuple[list[int], list[int], int]:
    """Ascending ``lo`` and ``hi`` with ``lo <= hi``, and the number of keys."""
    keys, rows = draw(st.integers(0, max_keys)), draw(st.integers(0, 10))
    lo = sorted(draw(st.lists(st.integers(0, keys), min_size=rows, max_size=rows)))
    hi = sorted(draw(st.lists(st.integers(0, keys), min_size=rows, max_size=rows)))
    return [min(pair) for pair in zip(lo, hi, strict=True)], [max(pair) for pair in zip(lo, hi, strict=True)], keys


@given(intervals())
def test_transposed_is_the_same_mask_by_key(drawn: tuple[list[int], list[int], int]) -> None:
    lo, hi, keys = drawn
    made = bounds(lo, hi)
    turned = made.transposed(keys)
    assert torch.equal(seen(turned, len(lo)), seen(made, keys).T)
    turned.check(keys, CPU)
    assert turned.lo is not None
    assert turned.hi is not None
    for end in (turned.lo, turned.hi):
        assert torch.equal(end, end.sort().values)
    assert made.transposed(keys) is turned  # made once
    assert made.transposed(keys + 1) is not turned


def test_full() -> None:
    assert FULL.is_full
    assert FULL.transposed(7) is FULL
    assert FULL.to(META) is FULL
    FULL.check(3, CPU)
    assert not bounds([0], [1]).is_full


def test_to_another_device() -> None:
    made = bounds([0, 1], [1, 2]).to(META)
    assert made.lo is not None
    assert made.hi is not None
    assert (made.lo.device, made.hi.device) == (META, META)


def test_compared_by_identity() -> None:
    made = bounds([0], [1])
    assert Bounds(made.lo, made.hi) != made


@pytest.mark.parametrize(
    ("lo", "hi", "message"),
    [
        (None, torch.zeros(2, dtype=torch.int32), r"^bounds has only one of lo and hi: pass both vectors, or FULL$"),
        (torch.zeros(2, dtype=torch.int32), None, r"^bounds has only one of lo and hi: pass both vectors, or FULL$"),
        (
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int32),
            r"^bounds.lo is torch.int64 \[2\] on cpu: it must be int32 \[2\] on cpu",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            r"^bounds.hi is torch.int32 \[3\] on cpu: it must be int32 \[2\] on cpu",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32, device="meta"),
            r"^bounds.hi is torch.int32 \[2\] on meta: it must be int32 \[2\] on cpu",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int32)[::2],
            r"^bounds.hi has stride \(2,\): it must be contiguous$",
        ),
    ],
)
def test_vectors_that_do_not_fit(lo: torch.Tensor | None, hi: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bounds(lo, hi).check(2, CPU)


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_tile_range_loads_what_is_seen_and_masks_what_must_be(block: int) -> None:
    ends = [(lo, hi) for lo in range(9) for hi in range(lo, 9)]
    for lo_first, hi_first in ends:
        for lo_last, hi_last in ((lo, hi) for lo, hi in ends if lo >= lo_first and hi >= hi_first):
            made = tile_range(lo_first, lo_last, hi_first, hi_last, block)
            assert all(edge % block == 0 for edge in made)
            assert all(before <= after for before, after in pairwise(made))
            assert made.full_start < made.full_end or made.full_start == made.start  # none whole: all in the tail
            hull, whole = range(lo_first, hi_last), range(lo_last, hi_first)
            for tile in range(0, 12, block):
                keys = range(tile, tile + block)
                loaded = made.start <= tile < made.end
                unmasked = made.full_start <= tile < made.full_end
                assert loaded == any(key in hull for key in keys)
                assert unmasked == (loaded and all(key in whole for key in keys))
