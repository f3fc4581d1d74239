"""Block-sparse patterns: values, what shards see of each other, and the builders against what the papers say."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import BlockMask, Longformer, Mask, bigbird, bounds, fixed, longformer, strided

from ..support.layouts import block_layouts, block_masks

SIZES = st.tuples(st.integers(0, 40), st.integers(1, 5))


def seen_by_pairs(seqlen: int, block: int, sees: Callable[[int, int], bool]) -> torch.Tensor:
    """Blocks of which a query i sees a key j <= i, pair by pair."""
    count = -(-seqlen // block)
    made = torch.zeros(count, count, dtype=torch.bool)
    for i in range(seqlen):
        for j in range(i + 1):
            made[i // block, j // block] |= sees(i, j)
    return made


@given(SIZES, st.integers(1, 4))
def test_strided_is_the_papers(sizes: tuple[int, int], count: int) -> None:
    """Sparse Transformer, section 4.3: A1 = {t, ..., i} with t = max(0, i - l), A2 = {j : (i - j) mod l = 0}."""
    seqlen, block = sizes
    stride = count * block
    made = strided(seqlen, block, stride=stride)
    expected = seen_by_pairs(seqlen, block, lambda i, j: i - j <= stride or (i - j) % stride == 0)
    assert made == BlockMask(expected, block)


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_fixed_is_the_papers(sizes: tuple[int, int], count: int, last: int) -> None:
    """Section 4.3: A1 = {j : floor(j / l) = floor(i / l)}, A2 = {j : j mod l in {t, ..., l}} with t = l - c."""
    seqlen, block = sizes
    stride, summary = count * block, min(last, count) * block
    made = fixed(seqlen, block, stride=stride, summary=summary)
    expected = seen_by_pairs(seqlen, block, lambda i, j: j // stride == i // stride or j % stride >= stride - summary)
    assert made == BlockMask(expected, block)


@given(SIZES, st.sampled_from([1, 3, 5]), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_bigbird_is_the_papers(sizes: tuple[int, int], window: int, global_: int, random: int, seed: int) -> None:
    """BigBird, section 2: window, global rows and columns, and r random blocks per row."""
    seqlen, block = sizes
    made = bigbird(seqlen, block, window=window, global_=global_, random=random, seed=seed)
    rows = made.visible.tolist()
    assert len(rows) == -(-seqlen // block)
    for i, row in enumerate(rows):
        certain = [abs(i - j) <= window // 2 or i < global_ or j < global_ for j in range(len(row))]
        assert all(seen for seen, sure in zip(row, certain, strict=True) if sure)
        assert sum(row) == min(sum(certain) + random, len(row))
    assert made == bigbird(seqlen, block, window=window, global_=global_, random=random, seed=seed)


def test_random_blocks_are_spread_and_follow_the_seed() -> None:
    one, other = (bigbird(6400, 64, window=3, global_=1, random=3, seed=seed) for seed in (0, 1))
    assert one != other
    columns = one.visible[1:, 1:].sum(0)
    assert columns.max() < 20  # of 99 rows: nobody's favourite
    assert columns.float().std() > 0.5


@given(st.integers(0, 20), st.integers(1, 40))
def test_longformer_is_the_papers(half: int, seqlen: int) -> None:
    """Longformer, section 3.1: w / 2 on each side; global tokens see all and are seen by all."""
    stretches = ((0, 1), (5, 8))
    made = longformer(2 * half, stretches)
    assert made == Longformer((half, half), stretches)
    mask = Mask(window=made.window, global_tokens=made.global_tokens)
    positions, seen = torch.arange(seqlen), torch.zeros(seqlen, seqlen, dtype=torch.int32)
    for part in mask.parts:
        limits = bounds(part, positions, positions)
        lo, hi = (limits.lo, limits.hi) if limits.lo is not None else (torch.tensor([0]), torch.tensor([seqlen]))
        seen += (lo[:, None] <= positions) & (positions < hi[:, None])  # type: ignore[index]
    far = (positions[:, None] - positions).abs()
    all_seeing = torch.tensor([p == 0 or 5 <= p < 8 for p in range(seqlen)])
    assert torch.equal(seen, ((far <= half) | all_seeing | all_seeing[:, None]).int())


def test_a_pattern_is_a_value() -> None:
    visible = torch.rand(4, 6) < 0.5
    one, same = BlockMask(visible, 8), BlockMask(visible.clone(), 8)
    assert one == same
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != BlockMask(visible, 4) != BlockMask(~visible, 4)
    assert one != visible
    assert BlockMask(torch.ones(2, 3, dtype=torch.bool), 1) != BlockMask(torch.ones(3, 2, dtype=torch.bool), 1)
    assert len({Mask(blocks=one), Mask(blocks=same), Mask()}) == 2
    seen = one.visible.clone()
    visible.logical_not_()
    assert torch.equal(one.visible, seen)  # its own copy


def test_repr_tells_patterns_apart() -> None:
    """What ranks compare, and what an error shows."""
    shown = {repr(BlockMask(torch.eye(4, dtype=torch.bool)[order], 2)) for order in ([0, 1, 2, 3], [1, 0, 2, 3])}
    assert len(shown) == 2
    assert all(re.fullmatch("<4 x 4 blocks of 2 positions, 4 seen, [0-9a-f]{16}>", one) for one in shown)
    assert repr(BlockMask(torch.ones(2, 3, dtype=torch.bool), 1)) != repr(
        BlockMask(torch.ones(3, 2, dtype=torch.bool), 1)
    )


@given(st.data(), st.integers(1, 4))
def test_between_two_shards(data: st.DataObject, block: int) -> None:
    queries, keys = data.draw(block_layouts(6, block, 2)), data.draw(block_layouts(6, block, 2))
    blocks = data.draw(block_masks(6, 6, block))
    for rank in range(2):
        for shard in range(2):
            mine, theirs = (one.positions(number)[::1] // block for one, number in ((queries, rank), (keys, shard)))
            rows, columns = mine.unique(), theirs.unique()
            assert torch.equal(blocks.rows(queries, rank), rows)
            assert torch.equal(blocks.columns(keys, shard), columns)
            assert torch.equal(blocks.between(queries, rank, keys, shard), blocks.visible[rows][:, columns])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout.uneven([4, 4, 2]), None),  # the last block is short
        (Layout.uneven([0, 10]), None),
        (Layout.uneven([3, 7]), "layout gives rank 0 the span (0, 3, 1): with block_mask the spans must be runs of"),
        (Layout([[(0, 4)], [(6, 4)]]), "layout gives rank 1 the span (6, 4, 1)"),
        (
            Layout.striped(8, 2),
            "layout gives rank 0 the span (0, 4, 2): with block_mask the spans must be runs of whole",
        ),
    ],
)
def test_spans_are_whole_blocks(layout: Layout, message: str | None) -> None:
    blocks = strided(10, 4, stride=4)
    if message is None:
        blocks.check("layout", layout)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        blocks.check("layout", layout)
    with pytest.raises(ValueError, match=f"^kv_{re.escape(message)}"):
        for shard in range(layout.world):
            blocks.columns(layout, shard)


def test_a_layout_longer_than_the_pattern() -> None:
    message = "^block_mask has 2 blocks of 4 positions for layout, which holds 12$"
    with pytest.raises(ValueError, match=message):
        strided(8, 4, stride=4).rows(Layout.contiguous(12, 1), 0)


EYE = torch.eye(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockMask([[True]], 4), "block_mask is [[True]]: it must be bool [query blocks, key blocks]"),  # type: ignore[arg-type]
        (
            lambda: BlockMask(EYE.int(), 4),
            "block_mask is torch.int32 [3, 3]: it must be bool [query blocks, key blocks]",
        ),
        (lambda: BlockMask(EYE[0], 4), "block_mask is torch.bool [3]: it must be bool [query blocks, key blocks]"),
        (
            lambda: BlockMask(EYE.to("meta"), 4),
            "block_mask is on meta: it must be on the CPU, since schedules are host",
        ),
        (lambda: BlockMask(EYE, 0), "block is 0: it must be a whole number from 1"),
        (lambda: BlockMask(EYE, 2.0), "block is 2.0: it must be a whole number"),  # type: ignore[arg-type]
        (lambda: strided(-1, 4, stride=4), "seqlen is -1: it must be a whole number from 0"),
        (lambda: strided(8, 0, stride=4), "block is 0: it must be a whole number from 1"),
        (lambda: strided(8, 4, stride=6), "stride is 6: it must be a positive multiple of block, 4"),
        (lambda: strided(8, 4, stride=0), "stride is 0: it must be a whole number from 1"),
        (lambda: fixed(8, 2, stride=4, summary=3), "summary is 3: it must be a positive multiple of block, 2"),
        (lambda: fixed(8, 2, stride=4, summary=6), "summary is 6: it must be at most stride, 4"),
        (
            lambda: bigbird(8, 2, window=2, global_=0, random=0),
            "window is 2: it must be odd, the query's own block and",
        ),
        (lambda: bigbird(8, 2, window=-1, global_=0, random=0), "window is -1: it must be a whole number from 1"),
        (lambda: bigbird(8, 2, window=1, global_=-1, random=0), "global_ is -1: it must be a whole number from 0"),
        (lambda: bigbird(8, 2, window=1, global_=0, random=-1), "random is -1: it must be a whole number from 0"),
        (lambda: longformer(3, []), "window is 3: it must be even, half of it on either side"),
        (lambda: longformer(-2, []), "window is -2: it must be a whole number from 0"),
        (lambda: longformer(2, [(4, 4)]), "global_tokens[0] is (4, 4): stretches must ascend and hold a position"),
        (
            lambda: longformer(2, [(0, 4), (3, 5)]),
            "global_tokens[1] is (3, 5): stretches must ascend and hold a position",
        ),
        (lambda: longformer(2, [(0, 4, 5)]), "global_tokens is [(0, 4, 5)]: it must be stretches (start, end)"),  # type: ignore[list-item]
        (lambda: longformer(2, [7]), "global_tokens is [7]: it must be stretches (start, end)"),  # type: ignore[list-item]
    ],
)
def test_bad_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()
