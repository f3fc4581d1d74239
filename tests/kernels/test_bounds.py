"""Bounds: intervals of keys per query, transposed to intervals of queries per key, against every pair."""

from __future__ import annotations

from itertools import chain, combinations_with_replacement, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels import FULL, BlockSparseIndex, Bounds

from ..support.kernel_cases import dense_mask

CPU = torch.device("cpu")


def of(lo: list[int], hi: list[int]) -> Bounds:
    return Bounds(torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32))


def check_transposed(lo: list[int], hi: list[int], keys: int) -> None:
    made, queries = of(lo, hi), len(lo)
    other = made.transposed(keys)
    other.check(1, keys, queries, CPU)
    assert torch.equal(dense_mask(other, keys, queries), dense_mask(made, queries, keys).mT)
    assert other.lo is not None and other.hi is not None
    ends = torch.cat([other.lo, other.hi]).tolist()  # the kernels need ascending ends here, too
    assert ends == sorted(ends[:keys]) + sorted(ends[keys:]) and all(0 <= end <= queries for end in ends)
    assert (other.lo <= other.hi).all()


def test_every_small_interval_is_transposed() -> None:
    for queries, keys in product(range(5), repeat=2):
        ends = list(combinations_with_replacement(range(keys + 1), queries))
        for lo, hi in product(ends, repeat=2):
            if all(first <= last for first, last in zip(lo, hi, strict=True)):
                check_transposed(list(lo), list(hi), keys)


@given(st.integers(0, 7), st.integers(0, 7), st.data())
def test_block_ranges_equal_the_visible_blocks(rows: int, columns: int, data: st.DataObject) -> None:
    """Read the ranges as the kernels do, in both directions."""
    cells = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    visible = torch.tensor(cells, dtype=torch.bool).reshape(rows, columns)
    made = BlockSparseIndex(visible, 16)
    assert torch.equal(made.transposed.visible, visible.T)
    for index, shown in ((made, visible), (made.transposed, visible.T)):
        read = torch.zeros_like(shown)
        for row, (begin, end) in enumerate(pairwise(index.offsets.tolist())):
            pairs = list(zip(index.begins[begin:end].tolist(), index.ends[begin:end].tolist(), strict=True))
            ends = list(chain.from_iterable(pairs))
            assert ends == sorted({*ends}), "ranges ascend, and do not touch"
            for first, last in pairs:
                assert first % 16 == last % 16 == 0
                read[row, first // 16 : last // 16] = True
        assert torch.equal(read, shown)


@pytest.mark.parametrize(("visible", "block", "message"), [
    (torch.ones(2, 2), 16, r"visible is a torch.float32 tensor of shape \[2, 2\]: it must be"),
    (torch.ones(2, 2, dtype=torch.uint8), 16, "visible is a torch.uint8 "),
    (torch.ones(2, dtype=torch.bool), 16, r"visible is a torch.bool tensor of shape \[2\]: it must be"),
    ([[True]], 16, "visible is list: it must be a torch.Tensor"),
    (torch.ones(2, 2, dtype=torch.bool), 0, "block is 0: it must be"),
    (torch.ones(2, 2, dtype=torch.bool), 16.0, "block is 16.0: it must be"),
])  # fmt: skip
def test_invalid_block_sparse_indices_are_refused(visible: Any, block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BlockSparseIndex(visible, block)


def test_empty_bounds() -> None:
    index = BlockSparseIndex(torch.zeros(2, 2, dtype=torch.bool), 16)
    assert not FULL.is_empty
    assert not of([0, 1], [0, 2]).is_empty
    assert of([0, 1], [0, 1]).is_empty
    assert Bounds(None, None, torch.zeros(2, dtype=torch.int32)).is_empty
    assert not Bounds(None, None, torch.tensor([0, 1], dtype=torch.int32)).is_empty
    assert Bounds(None, None, None, index).is_empty


def test_used_lengths_and_blocks_survive_transposing_and_moving() -> None:
    used, index = torch.tensor([2, 3], dtype=torch.int32), BlockSparseIndex(torch.tensor([[True, False]]), 16)
    made = Bounds(None, None, used, index)
    other = made.transposed(17)
    assert made.is_full and made.transposed(17) is other and made.transposed(18) is not other
    assert FULL.transposed(7) is FULL and FULL.to(CPU) is FULL
    alone = Bounds(None, None, None, index).to(torch.device("meta")).block_sparse
    assert alone is not None and alone.device.type == alone.transposed.device.type == "meta"
    assert other.is_full and other.seqused_k is used
    assert other.block_sparse is not None and other.block_sparse.visible.tolist() == [[True], [False]]
    moved, other = made.to(torch.device("meta")), of([0, 0], [1, 2]).to(torch.device("meta"))
    assert moved.block_sparse is not None
    held = [
        moved.seqused_k,
        moved.block_sparse.offsets,
        moved.block_sparse.begins,
        moved.block_sparse.ends,
        other.lo,
        other.hi,
    ]
    assert [x is not None and (x.device.type, x.dtype) for x in held] == [("meta", torch.int32)] * 6
