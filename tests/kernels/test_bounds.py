"""Intervals of keys per query, turned into intervals of queries per key, against every pair."""

from __future__ import annotations

from itertools import chain, combinations_with_replacement, pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels import FULL, BlockSparseIndex, Bounds

from ..support.kernel_cases import dense

CPU = torch.device("cpu")


def of(lo: list[int], hi: list[int]) -> Bounds:
    return Bounds(torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32))


def check_transposed(lo: list[int], hi: list[int], keys: int) -> None:
    made, queries = of(lo, hi), len(lo)
    other = made.transposed(keys)
    other.check(1, keys, queries, CPU)
    assert torch.equal(dense(other, keys, queries), dense(made, queries, keys).mT)
    assert other.lo is not None and other.hi is not None
    ends = torch.cat([other.lo, other.hi]).tolist()  # what the kernels need of it is what they need of the original
    assert ends == sorted(ends[:keys]) + sorted(ends[keys:]) and all(0 <= end <= queries for end in ends)
    assert (other.lo <= other.hi).all()


def test_transposed_of_every_small_interval() -> None:
    for queries, keys in product(range(5), repeat=2):
        ends = list(combinations_with_replacement(range(keys + 1), queries))
        for lo, hi in product(ends, repeat=2):
            if all(first <= last for first, last in zip(lo, hi, strict=True)):
                check_transposed(list(lo), list(hi), keys)


@given(st.integers(0, 7), st.integers(0, 7), st.data())
def test_runs_are_what_is_visible(rows: int, columns: int, data: st.DataObject) -> None:
    """Read as the kernels do, both ways round."""
    cells = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    visible = torch.tensor(cells, dtype=torch.bool).reshape(rows, columns)
    made = BlockSparseIndex(visible, 16)
    assert torch.equal(made.transposed.visible, visible.T)
    for runs, shown in ((made, visible), (made.transposed, visible.T)):
        read = torch.zeros_like(shown)
        for row, (begin, end) in enumerate(pairwise(runs.offsets.tolist())):
            pairs = list(zip(runs.begins[begin:end].tolist(), runs.ends[begin:end].tolist(), strict=True))
            ends = list(chain.from_iterable(pairs))
            assert ends == sorted({*ends}), "runs ascend, and do not touch"
            for first, last in pairs:
                assert first % 16 == last % 16 == 0
                read[row, first // 16 : last // 16] = True
        assert torch.equal(read, shown)


def test_what_is_empty() -> None:
    runs = BlockSparseIndex(torch.zeros(2, 2, dtype=torch.bool), 16)
    assert not FULL.is_empty
    assert not of([0, 1], [0, 2]).is_empty
    assert of([0, 1], [0, 1]).is_empty
    assert Bounds(None, None, torch.zeros(2, dtype=torch.int32)).is_empty
    assert not Bounds(None, None, torch.tensor([0, 1], dtype=torch.int32)).is_empty
    assert Bounds(None, None, None, runs).is_empty


def test_what_travels_with_bounds() -> None:
    """Through a transposition, which is made once, and to another device."""
    used, runs = torch.tensor([2, 3], dtype=torch.int32), BlockSparseIndex(torch.tensor([[True, False]]), 16)
    made = Bounds(None, None, used, runs)
    other = made.transposed(17)
    assert made.is_full and made.transposed(17) is other and made.transposed(18) is not other
    assert FULL.transposed(7) is FULL and FULL.to(CPU) is FULL
    assert other.is_full and other.seqused_k is used
    assert other.runs is not None and other.runs.visible.tolist() == [[True], [False]]
    moved, other = made.to(torch.device("meta")), of([0, 0], [1, 2]).to(torch.device("meta"))
    assert moved.runs is not None
    held = [moved.seqused_k, moved.runs.offsets, moved.runs.begins, moved.runs.ends, other.lo, other.hi]
    assert [x is not None and (x.device.type, x.dtype) for x in held] == [("meta", torch.int32)] * 6
