"""Intervals of keys per query, turned into intervals of queries per key, against every pair."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import combinations_with_replacement, pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels import FULL, Bounds, Runs

from ..support.kernel_cases import dense

CPU = torch.device("cpu")


def of(lo: list[int], hi: list[int]) -> Bounds:
    return Bounds(torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32))


def check_transposed(lo: list[int], hi: list[int], keys: int) -> None:
    made, queries = of(lo, hi), len(lo)
    other = made.transposed(keys)
    assert other.lo is not None
    assert other.hi is not None
    other.check(1, keys, queries, CPU)
    assert torch.equal(dense(other, keys, queries), dense(made, queries, keys).mT)
    for end in (other.lo, other.hi):  # what the kernels need of it is what they need of the original
        assert torch.equal(end, end.sort().values)
        assert ((end >= 0) & (end <= queries)).all()
    assert (other.lo <= other.hi).all()


@pytest.mark.parametrize("keys", range(5))
@pytest.mark.parametrize("queries", range(5))
def test_transposed_of_every_small_interval(queries: int, keys: int) -> None:
    ends = list(combinations_with_replacement(range(keys + 1), queries))
    for lo, hi in product(ends, repeat=2):
        if all(first <= last for first, last in zip(lo, hi, strict=True)):
            check_transposed(list(lo), list(hi), keys)


@given(st.integers(0, 60), st.data())
def test_transposed_of_any_interval(keys: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 60))
    ends = st.lists(st.integers(0, keys), min_size=rows, max_size=rows).map(sorted)
    lo, hi = data.draw(ends), data.draw(ends)
    check_transposed(lo, [max(pair) for pair in zip(lo, hi, strict=True)], keys)


def test_transposed_is_made_once() -> None:
    made = of([0, 0, 1], [1, 2, 3])
    assert made.transposed(3) is made.transposed(3)
    assert made.transposed(4) is not made.transposed(3)
    assert of([0, 0, 1], [1, 2, 3]).transposed(3) is not made.transposed(3)


def test_full() -> None:
    assert FULL.is_full
    assert FULL.transposed(7) is FULL
    assert FULL.to(CPU) is FULL
    FULL.check(1, 5, 7, CPU)
    assert not of([0], [1]).is_full


@given(st.integers(0, 7), st.integers(0, 7), st.data())
def test_runs_are_what_is_visible(rows: int, columns: int, data: st.DataObject) -> None:
    """Read as the kernels do, both ways round."""
    cells = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    visible = torch.tensor(cells, dtype=torch.bool).reshape(rows, columns)
    made = Runs(visible, 16)
    assert torch.equal(made.transposed.visible, visible.T)
    for runs, shown in ((made, visible), (made.transposed, visible.T)):
        read = torch.zeros_like(shown)
        assert len(runs.offsets) == len(shown) + 1
        for row, (begin, end) in enumerate(pairwise(runs.offsets.tolist())):
            pairs = list(zip(runs.begins[begin:end].tolist(), runs.ends[begin:end].tolist(), strict=True))
            assert all(first < last for first, last in pairs)
            assert all(before[1] < after[0] for before, after in pairwise(pairs))
            for first, last in pairs:
                assert first % 16 == last % 16 == 0
                read[row, first // 16 : last // 16] = True
        assert torch.equal(read, shown)


def test_what_is_empty() -> None:
    runs = Runs(torch.zeros(2, 2, dtype=torch.bool), 16)
    assert not FULL.is_empty
    assert not of([0, 1], [0, 2]).is_empty
    assert of([0, 1], [0, 1]).is_empty
    assert Bounds(None, None, torch.zeros(2, dtype=torch.int32)).is_empty
    assert not Bounds(None, None, torch.tensor([0, 1], dtype=torch.int32)).is_empty
    assert Bounds(None, None, None, runs).is_empty


def test_what_narrows_bounds_stays_with_them() -> None:
    used, runs = torch.tensor([2, 3], dtype=torch.int32), Runs(torch.tensor([[True, False]]), 16)
    made = Bounds(None, None, used, runs)
    other = made.transposed(17)
    assert made.is_full
    assert other.used is used
    assert other.runs is not None
    assert other.runs.visible.tolist() == [[True], [False]]
    assert made.transposed(17) is other
    moved = made.to(torch.device("meta"))
    assert moved.used is not None
    assert moved.runs is not None
    assert {moved.used.device, moved.runs.offsets.device, moved.runs.begins.device} == {torch.device("meta")}


def test_to_another_device() -> None:
    made = of([0, 0], [1, 2]).to(torch.device("meta"))
    assert made.lo is not None
    assert made.hi is not None
    assert made.lo.device == made.hi.device == torch.device("meta")


def test_values_are_frozen_and_compared_by_identity() -> None:
    made = of([0], [1])
    assert made == made
    assert made != of([0], [1])
    assert len({made, FULL}) == 2
    with pytest.raises(FrozenInstanceError):
        made.lo = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("lo", "hi", "message"),
    [
        (None, torch.zeros(3, dtype=torch.int32), "^bounds has only one of lo and hi: pass both vectors, or FULL$"),
        (torch.zeros(3, dtype=torch.int32), None, "^bounds has only one of lo and hi: pass both vectors, or FULL$"),
        (
            torch.zeros(3),
            torch.zeros(3, dtype=torch.int32),
            r"bounds\.lo is torch\.float32 \[3\] on cpu: .* int32 \[3\]",
        ),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), r"bounds\.hi is torch\.int64 \[3\]"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), r"bounds\.lo is torch\.int32 \[2\]"),
        (*[torch.zeros(3, 1, dtype=torch.int32)] * 2, r"bounds\.lo is torch\.int32 \[3, 1\]"),
        (*[torch.zeros(3, dtype=torch.int32, device="meta")] * 2, r"bounds\.lo is .* on meta: .* on cpu"),
        (*[torch.zeros(6, dtype=torch.int32)[::2]] * 2, r"bounds\.lo has stride \(2,\): it must be contiguous"),
    ],
)
def test_vectors_that_do_not_fit(lo: torch.Tensor | None, hi: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bounds(lo, hi).check(1, 3, 5, CPU)
