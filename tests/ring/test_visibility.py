"""Visibility between shards and the keys each rank sends, against every pair, and at a million tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.bench.common.attention import random_boundaries
from ringattn.conformance.cases import pairwise_cases
from ringattn.ring.schedule import visibility as module
from ringattn.ring.schedule.intervals import Intervals
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import BlockMask, Mask
from ringattn.ring.schedule.schedule import Schedule, schedule
from ringattn.ring.schedule.visibility import MAX_SENT_SHARE, active_shards, cut_keys, sent_keys

from ..support.layouts import (
    NAMES,
    block_layouts,
    block_masks,
    build_layout,
    is_visible_pair,
    layouts,
    masks,
    visible_shards,
)
from ..support.plan_timing import clear_plan_caches, plan_within

MILLION, WORLD = 2**20, 64


@pytest.fixture(autouse=True)
def _fresh() -> None:
    clear_plan_caches()


def needed(layout: Layout, mask: Mask, keys: Layout, block: int) -> list[list[int]]:
    """Return, per shard, the key positions in blocks that a query of another rank sees."""
    held = [layout.positions(rank).tolist() for rank in range(layout.world)]
    ranges = []
    for shard in range(keys.world):
        others = [query for rank, queries in enumerate(held) if rank != shard for query in queries]
        mine = keys.positions(shard).tolist()
        blocks = {key // block for key in mine if any(is_visible_pair(mask, query, key) for query in others)}
        ranges.append([key for key in mine if key // block in blocks])
    return ranges


def check(layout: Layout, mask: Mask, keys: Layout, block: int = 1) -> None:
    """Check that the visible shards and the keys sent are exact, not just sufficient."""
    pairs = [tuple(pair) for pair in np.argwhere(active_shards(layout, mask, keys)).tolist()]
    assert pairs == visible_shards(layout, mask, keys)
    expected, sent = needed(layout, mask, keys, block), sent_keys(layout, mask, keys)
    if sum(map(len, expected)) >= MAX_SENT_SHARE * keys.seqlen:
        assert sent == keys
    else:
        assert [sent.positions(rank).tolist() for rank in range(keys.world)] == expected


@given(st.data(), st.booleans())
def test_active_shards_and_sent_keys_for_any_mask_and_layout(data: st.DataObject, other_keys: bool) -> None:
    layout = data.draw(layouts(max_seqlen=24))
    keys = data.draw(layouts(max_seqlen=24, world=layout.world)) if other_keys else layout
    check(layout, data.draw(masks(parts=True, used=True)), keys)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_block_masks_send_whole_blocks(data: st.DataObject, world: int, block: int, other_keys: bool) -> None:
    layout = data.draw(block_layouts(7, block, world))
    # of a short last block of other keys, only keys that are not there may be visible
    whole_blocks = block_layouts(7, block, world).filter(lambda keys: keys.reach % block == 0)
    keys = data.draw(whole_blocks) if other_keys else layout
    plain = data.draw(masks(parts=True, used=True).filter(lambda mask: type(mask) is Mask))
    check(layout, replace(plain, blocks=data.draw(block_masks(7, 7, block)), intervals=None), keys, block)


def test_blocks_between_the_intervals_of_a_query_block_are_not_sent() -> None:
    """The two queries of a block see keys far apart; of blocks 0 to 7 only the first and the last are sent."""
    lo = (torch.arange(16) >= 7) * 14
    mask = Mask(intervals=Intervals([(lo, lo + 1)]), blocks=BlockMask(torch.ones(8, 8).bool(), 2))
    active = active_shards(Layout([[(6, 2)], *[[]] * 7]), mask, Layout.contiguous(16, 8))
    assert active[0].nonzero()[0].tolist() == [0, 7]


@given(st.data(), st.integers(1, 5), st.sampled_from([2, 3, 7, 20]))
def test_ranks_with_striped_and_contiguous_spans(data: st.DataObject, world: int, step: int) -> None:
    stripes = [(3 * world + rank, data.draw(st.integers(0, 4)), step * world) for rank in range(world)]
    layout = Layout([[(3 * rank, 3), stripe] for rank, stripe in enumerate(stripes)])
    mask = data.draw(masks().filter(lambda mask: mask.documents is None))  # the last document ends before these stripes
    check(layout, mask, layout)


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_runs_have_equal_numbers_of_sent_keys(
    data: st.DataObject, count: int, world: int, block: int, sparse: bool
) -> None:
    layout, keys = (data.draw(block_layouts(7, block, world)) for _ in range(2))
    mask = data.draw(masks(used=True).filter(lambda mask: type(mask) is Mask))
    mask = replace(mask, blocks=data.draw(block_masks(7, 7, block))) if sparse else mask
    sent, runs = sent_keys(layout, mask, keys), cut_keys(layout, mask, keys, count)
    assert len(runs) == count
    for number, whole in enumerate((keys, sent)):
        for rank in range(world):
            parts = [run[number].positions(rank) for run in runs]
            assert torch.cat(parts).equal(whole.positions(rank))
    for rank, length in enumerate(sent.lengths):
        lengths = [run.lengths[rank] for _, run in runs]
        assert max(lengths) - min(lengths) <= (2 * block if sparse else 1), (length, lengths)
    for own, _ in runs:
        active_shards(layout, mask, own)  # raises if a run begins inside a block


def test_runs_of_long_shards_begin_at_whole_tiles() -> None:
    layout = Layout.uneven([1000, 300, 200, 5, 0])
    first, second = ([run.lengths for run in both] for both in cut_keys(layout, Mask(), layout, 2))
    assert first == [(512, 128, 100, 2, 0)] * 2
    assert second == [(488, 172, 100, 3, 0)] * 2
    # the sent keys are shared evenly; the others stay with the sent key before them
    narrow = cut_keys(layout, Mask(window=(0, 8)), layout, 2)
    assert [[run.lengths[1] for run in both] for both in narrow] == [[4, 4], [296, 4]]


PACKED = Documents(random_boundaries(MILLION, 8192, seed=0))
MASKS = {
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window=(4096, 0)),
    "documents": Mask(documents=PACKED),
    "causal documents": Mask(causal=True, documents=PACKED),
    "prefix": Mask(causal=True, prefix=100_000),
    "used": Mask(used=(500_000, 1)),
    "intervals": Mask(intervals=Intervals([(torch.arange(MILLION) // 2, torch.arange(MILLION) // 2 + 9)])),
    "longformer": Mask(window=(2048, 2048), global_tokens=((0, 64), (MILLION // 2, MILLION // 2 + 64))),
}


def use(plan: Schedule) -> None:
    plan.bytes(1, 1)
    plan.hops(0)


@pytest.mark.parametrize(("name", "mask"), pairwise_cases([*NAMES, "per document"], MASKS)[::3])
def test_a_million_tokens_over_64_ranks(name: str, mask: str) -> None:
    """Plan with a new layout each time, because packed documents change every step."""

    def make() -> Schedule:
        per_document = name == "per document"
        return schedule(
            Layout.zigzag(MILLION, WORLD, PACKED.boundaries) if per_document else build_layout(name, MILLION, WORLD),
            MASKS[mask],
        )

    plan_within(5, make, use)


def test_sent_spans_keep_their_step() -> None:
    layout = Layout([[(0, 20)], [(20, 10, 2), (60, 10)], [(21, 10, 2)]])
    sent = sent_keys(layout, Mask(window=(4, 0)), layout)
    assert sent.spans_per_rank == (((16, 4, 1),), ((20, 10, 2),), ((21, 9, 2),))


def test_fragmented_shards_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, mask = Layout.contiguous(64, 4), Mask(window=(3, 0))
    assert sent_keys(layout, mask, layout).lengths == (3, 3, 3, 0)
    sent_keys.cache_clear()
    monkeypatch.setattr(module, "MAX_EDGES", 4 * 8 - 1)  # 8 edges and 4 ranks
    assert sent_keys(layout, mask, layout) == layout
    sent_keys.cache_clear()


@pytest.mark.parametrize("spans", [[[(0, 4)], [(8, 8)]], [[(0, 8)], [(8, 4)]]])
def test_a_part_of_a_block_is_refused_on_any_rank(spans: list[list[tuple[int, int]]]) -> None:
    mask = Mask(blocks=BlockMask(torch.ones(3, 3, dtype=torch.bool), 8))
    with pytest.raises(ValueError, match="with block_mask every span must be a contiguous run of whole blocks of 8"):
        active_shards(Layout([*spans, [(16, 8)]]), mask, Layout.contiguous(24, 3))
    with pytest.raises(ValueError, match="with block_mask every span must be a contiguous run of whole blocks of 8"):
        active_shards(Layout([[(16, 8)], *spans]), mask, Layout.contiguous(24, 3))
