"""Masks as intervals of key indices, and block-sparse patterns as the papers define them, against every pair."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.kernels import FULL
from ringattn.ring.schedule import mask as mask_module
from ringattn.ring.schedule.intervals import Intervals
from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import (
    BlockMask,
    Longformer,
    Mask,
    bigbird,
    bounds,
    fixed,
    longformer,
    strided,
    visible_pairs,
)

from ..support.kernel_cases import dense_mask
from ..support.layouts import (
    block_layouts,
    block_masks,
    interval_pairs,
    is_visible_pair,
    layouts,
    masks,
    small_layouts,
)

CAUSAL = Mask(causal=True)


def brute(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    pairs = [[is_visible_pair(mask, query, key) for key in keys.tolist()] for query in queries.tolist()]
    return torch.tensor(pairs, dtype=torch.bool).reshape(len(queries), len(keys))


def check(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> None:
    made, expected = bounds(mask, queries, keys), brute(mask, queries, keys)
    assert torch.equal(dense_mask(made, len(queries), len(keys)), expected)
    assert made.is_full == bool(expected.numel() and expected.all())
    counts = [int((keys < used).sum()) for used in mask.used or ()]  # keys of each batch row; None means all of them
    all_keys = all(count == len(keys) for count in counts)
    assert (made.seqused_k is None) == all_keys and (made is FULL) == (made.is_full and all_keys)
    assert made.seqused_k is None or (made.seqused_k.tolist(), made.seqused_k.dtype) == (counts, torch.int32)
    assert visible_pairs(mask, queries, keys) == count(mask, queries, keys)
    if made.lo is not None and made.hi is not None:
        check_order(made.lo, made.hi, expected)


def count(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Count visible pairs one by one, over all batch rows if they differ."""
    rows = range(len(mask.used)) if mask.used is not None else [None]
    return sum(
        is_visible_pair(mask, query, key, row) for row in rows for query in queries.tolist() for key in keys.tolist()
    )


def check_order(lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> None:
    keys = expected.shape[1]
    assert (lo.dtype, hi.dtype, lo.shape, hi.shape) == (torch.int32, torch.int32, *[expected.shape[:1]] * 2)
    for end in (lo, hi):
        assert end.is_contiguous()
        assert torch.equal(end, end.sort().values)
    assert ((lo >= 0) & (hi <= keys) & (lo <= hi)).all()
    sees_any = expected.any(1)
    assert torch.equal(lo == hi, ~sees_any)
    if not sees_any.any():
        assert not lo.any()
        return
    first, last = lo[sees_any][0], hi[sees_any][-1]
    assert ((lo >= first) & (hi <= last)).all(), "an empty row lies outside of what the others see"
    for start in range(len(lo)):  # a tile is no wider than its rows with visible keys need
        tile = slice(start, start + 3)
        if sees_any[tile].any():
            hull = int(hi[tile][-1] - lo[tile][0])
            needed = int(hi[tile][sees_any[tile]].max() - lo[tile][sees_any[tile]].min())
            gap = first_after(lo, sees_any, start + 3) - int(hi[tile][sees_any[tile]].max())
            assert hull == needed or (not sees_any[tile][-1] and hull == needed + gap)


def first_after(lo: torch.Tensor, sees_any: torch.Tensor, row: int) -> int:
    """Return the interval start of the next row, at or after ``row``, that sees a key."""
    rest = lo[row:][sees_any[row:]]
    return int(rest[0]) if len(rest) else int(lo[-1])


@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(used=(4, 9)), Mask(used=())])
def test_mask_bounds_of_every_small_layout(mask: Mask) -> None:
    for layout in small_layouts(9, 4):
        for queries, keys in product(map(layout.positions, range(layout.world)), repeat=2):
            check(mask, queries, keys)


@given(st.data())
def test_mask_bounds_of_any_layout(data: st.DataObject) -> None:
    layout, mask = data.draw(layouts(max_world=4, max_seqlen=24)), data.draw(masks(used=True))
    keys = data.draw(st.one_of(st.just(layout), layouts(world=layout.world, max_seqlen=24)))
    for rank, shard in product(range(layout.world), repeat=2):
        check(mask, layout.positions(rank), keys.positions(shard))


@given(st.data())
def test_parts_are_disjoint(data: st.DataObject) -> None:
    layout, mask = data.draw(layouts(max_world=3, max_seqlen=24)), data.draw(masks(parts=True, used=True))
    for queries, keys in product(map(layout.positions, range(layout.world)), repeat=2):
        made = [bounds(part, queries, keys) for part in mask.parts]
        pairs = [dense_mask(part_bounds, len(queries), len(keys)) for part_bounds in made]
        for part_bounds, visible in zip(made, pairs, strict=True):
            if part_bounds.lo is not None and part_bounds.hi is not None:
                check_order(part_bounds.lo, part_bounds.hi, visible)
        assert torch.equal(torch.stack(pairs).sum(0), brute(mask, queries, keys).long())
        assert visible_pairs(mask, queries, keys) == count(mask, queries, keys)


@given(st.data(), st.integers(1, 4), st.booleans())
def test_intervals_inside_blocks(data: st.DataObject, block: int, other_keys: bool) -> None:
    layout = data.draw(block_layouts(6, block, 2))
    kv_layout = data.draw(block_layouts(8, block, 2)) if other_keys else layout
    mask = replace(
        data.draw(masks(parts=True, used=True).filter(lambda mask: type(mask) is Mask)),
        blocks=data.draw(block_masks(8, 8, block)),
    )
    for rank, shard in product(range(2), repeat=2):
        queries, keys = layout.positions(rank), kv_layout.positions(shard)
        assert visible_pairs(mask, queries, keys) == count(mask, queries, keys)


@given(interval_pairs())
def test_intervals_show_what_their_pairs_show(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    made, keys = Intervals([(lo.int(), hi.int()) for lo, hi in pairs]), torch.arange(49)
    visible = [[((lo[:, None] <= keys) & (keys < hi[:, None])) for lo, hi in table] for table in (pairs, made.table)]
    assert torch.stack(visible[1]).sum(0).equal(torch.stack(visible[0]).sum(0))
    assert made.table.diff(dim=2).min() >= 0 and (made.table[:, 0] <= made.table[:, 1]).all()
    assert made == Intervals(made.table) == pickle.loads(pickle.dumps(made)) != pairs
    assert f"of 49 positions, {int(torch.stack(visible[0]).sum())} pairs, " in repr(made)
    with_path = Intervals(made.table, torch.arange(49))
    assert len({made, Intervals(made.table), with_path}) == 2 and pickle.loads(pickle.dumps(with_path)) == with_path


AT = torch.arange(4)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((AT * 0, 6 - AT), r"intervals\[0\] is \[0, 5\) at position 1, after \[0, 6\) at position 0"),
        ((torch.zeros(140).long(), torch.arange(140) % 2), r"intervals\[0\] is cut .* no key into 70 .* at most 64"),
        ((AT.short(), AT + 1), r"intervals\[0\] is .*torch.int16.*: it must be a pair \(lo, hi\) of int32 or int64"),
    ],
)
def test_wrong_intervals_are_refused(pair: tuple[torch.Tensor, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Intervals([pair])


def test_intervals_of_another_number_of_positions_differ() -> None:
    one, two = torch.tensor([[[0, 0, 1, 1], [1, 1, 2, 2]]]), torch.tensor([[[0, 0], [1, 1]], [[1, 1], [2, 2]]])
    assert one.flatten().equal(two.flatten()) and Intervals(one) != Intervals(two)
    for queries in (1, 3):
        with pytest.raises(ValueError, match=f"intervals has 2 positions: it must have {queries}, those of the"):
            Intervals(two).check_ends(queries, 2)


def test_longformer_has_three_parts() -> None:
    assert len(Mask(window=(4, 4), global_tokens=((0, 2),)).parts) == 3
    assert Mask(window=(4, 4)).parts == (Mask(window=(4, 4)),)


def test_visible_pairs_is_an_int_and_counts_past_32_bits() -> None:
    positions = torch.arange(100_000)
    pairs = visible_pairs(Mask(), positions, positions)
    assert (type(pairs), pairs) == (int, 10**10)


SIZES = st.tuples(st.integers(0, 40), st.integers(1, 5))


def seen_by_pairs(seqlen: int, block: int, sees: Callable[[int, int], bool]) -> torch.Tensor:
    """Return the blocks in which some query i sees a key j <= i."""
    count = -(-seqlen // block)
    made = torch.zeros(count, count, dtype=torch.bool)
    for i in range(seqlen):
        for j in range(i + 1):
            made[i // block, j // block] |= sees(i, j)
    return made


@given(SIZES, st.integers(1, 4))
def test_strided_follows_the_sparse_transformer_paper(sizes: tuple[int, int], count: int) -> None:
    """Sparse Transformer, section 4.3: A1 = {t, ..., i} with t = max(0, i - l), A2 = {j : (i - j) mod l = 0}."""
    seqlen, block = sizes
    stride = count * block
    made = strided(seqlen, block, stride=stride)
    expected = seen_by_pairs(seqlen, block, lambda i, j: i - j <= stride or (i - j) % stride == 0)
    assert made == BlockMask(expected, block)


@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_fixed_follows_the_sparse_transformer_paper(sizes: tuple[int, int], count: int, last: int) -> None:
    """Section 4.3: A1 = {j : floor(j / l) = floor(i / l)}, A2 = {j : j mod l in {t, ..., l}}, t = l - c."""
    seqlen, block = sizes
    stride, summary = count * block, min(last, count) * block
    made = fixed(seqlen, block, stride=stride, summary=summary)
    expected = seen_by_pairs(seqlen, block, lambda i, j: j // stride == i // stride or j % stride >= stride - summary)
    assert made == BlockMask(expected, block)


@given(SIZES, st.sampled_from([1, 3, 5]), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_bigbird_follows_its_paper(sizes: tuple[int, int], window: int, global_: int, random: int, seed: int) -> None:
    """BigBird, section 2: a window, global rows and columns, and r random blocks per row."""
    seqlen, block = sizes
    made = bigbird(seqlen, block, window=window, global_=global_, random=random, seed=seed)
    rows = made.visible.tolist()
    assert len(rows) == -(-seqlen // block)
    for i, row in enumerate(rows):
        certain = [abs(i - j) <= window // 2 or i < global_ or j < global_ for j in range(len(row))]
        assert all(visible for visible, sure in zip(row, certain, strict=True) if sure)
        assert sum(row) == min(sum(certain) + random, len(row))
    same = {"seed": seed} if seed else {}
    assert made == bigbird(seqlen, block, window=window, global_=global_, random=random, **same)


def test_block_masks_are_values() -> None:
    for window in (0, 14):
        made = longformer(window, [(0, 1), (5, 8)])
        assert repr(made) == repr(Longformer((window // 2, window // 2), ((0, 1), (5, 8))))
    visible = torch.rand(4, 6) < 0.5
    pattern, same = BlockMask(visible, 8), BlockMask(visible.clone(), 8)
    assert pattern == same == pickle.loads(pickle.dumps(pattern))
    assert hash(pattern) == hash(same) != hash(BlockMask(~visible, 8))
    assert pattern != BlockMask(visible, 4) != BlockMask(~visible, 4)
    assert pattern != visible
    assert BlockMask(torch.ones(2, 3, dtype=torch.bool), 1) != BlockMask(torch.ones(3, 2, dtype=torch.bool), 1)
    assert len({Mask(blocks=pattern), Mask(blocks=same), Mask()}) == 2
    unchanged = pattern.visible.clone()
    visible.logical_not_()
    assert torch.equal(pattern.visible, unchanged)  # the pattern holds a copy
    # the text that ranks compare and errors show
    shown = {repr(BlockMask(torch.eye(4, dtype=torch.bool)[order], 2)) for order in ([0, 1, 2, 3], [1, 0, 2, 3])}
    assert len(shown) == 2
    assert all(re.fullmatch("<4 x 4 blocks of 2 positions, 4 visible, [0-9a-f]{16}>", text) for text in shown)


def test_patterns_of_too_many_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_module, "MAX_BLOCKS", 4)
    assert len(strided(16, 4, stride=4).visible) == 4
    with pytest.raises(ValueError, match=r"block is 4: 17 positions have 5 blocks.* at least 5"):
        strided(17, 4, stride=4)


def test_spans_must_be_whole_blocks() -> None:
    blocks = strided(10, 4, stride=4)
    thirds, all_on_one = Layout.uneven([4, 4, 2]), Layout.uneven([0, 10])  # the last block is short
    for fine in (thirds, all_on_one):
        blocks.check_layout("layout", fine)
    assert blocks.shard_blocks(all_on_one, 1, thirds, 1).equal(blocks.visible[:, 1:2])
    assert blocks.shard_blocks(thirds, 2, all_on_one, 0).shape == (1, 0)
    wide = BlockMask(torch.ones(1, 3).bool(), 4)
    assert wide.shard_blocks(Layout.contiguous(4, 1), 0, Layout.contiguous(12, 1), 0).shape == (1, 3)
    for layout, message in (
        (Layout.uneven([3, 7]), r"layout gives rank 0 the span \(0, 3, 1\): with block_mask every span must be a"),
        (Layout([[(0, 4)], [(6, 4)]]), r"layout gives rank 1 the span \(6, 4, 1\)"),
        (Layout([[(0, 7)], [(8, 2)]]), r"layout gives rank 0 the span \(0, 7, 1\)"),
        (Layout.striped(8, 2), r"layout gives rank 0 the span \(0, 4, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            blocks.check_layout("layout", layout)
        with pytest.raises(ValueError, match=f"^kv_{message}"):
            for shard in range(layout.world):
                blocks.shard_blocks(Layout.contiguous(8, 2), 0, layout, shard)
    with pytest.raises(ValueError, match=r"^block_mask has 2 blocks of 4 positions, but layout has 12 positions$"):
        strided(8, 4, stride=4).shard_blocks(Layout.contiguous(12, 1), 0, Layout.contiguous(8, 1), 0)
