"""Which keys leave their rank: against every pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.ring.schedule import visits as module
from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import Mask
from ringattn.ring.schedule.visits import LESS, travelling

from ..support.layouts import block_layouts, block_masks, layouts, masks, sees


def needed(layout: Layout, mask: Mask, keys: Layout, block: int = 1) -> list[list[int]]:
    """For each shard the positions that a query of another rank sees, or that share a block with such a one."""
    held = [layout.positions(rank).tolist() for rank in range(layout.world)]
    found = []
    for shard in range(keys.world):
        others = [query for rank, queries in enumerate(held) if rank != shard for query in queries]
        mine = keys.positions(shard).tolist()
        blocks = {key // block for key in mine if any(sees(mask, query, key) for query in others)}
        found.append([key for key in mine if key // block in blocks])
    return found


def check(layout: Layout, mask: Mask, keys: Layout, block: int = 1) -> None:
    expected, sent = needed(layout, mask, keys, block), travelling(layout, mask, keys)
    if sum(map(len, expected)) >= LESS * keys.seqlen:
        assert sent == keys
    else:
        assert [sent.positions(rank).tolist() for rank in range(keys.world)] == expected


@given(st.data(), st.booleans())
def test_any_mask_and_layouts(data: st.DataObject, other_keys: bool) -> None:
    layout = data.draw(layouts(max_seqlen=24))
    keys = data.draw(layouts(max_seqlen=24, world=layout.world)) if other_keys else layout
    check(layout, data.draw(masks(global_tokens=True, used=True)), keys)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_whole_blocks_travel(data: st.DataObject, world: int, block: int, other_keys: bool) -> None:
    layout = data.draw(block_layouts(7, block, world))
    keys = data.draw(block_layouts(7, block, world)) if other_keys else layout
    plain = data.draw(masks(global_tokens=True, used=True).filter(lambda mask: type(mask) is Mask))
    check(layout, replace(plain, blocks=data.draw(block_masks(7, 7, block))), keys, block)


def test_spans_with_steps_keep_theirs() -> None:
    layout = Layout([[(0, 20)], [(20, 10, 2), (60, 10)], [(21, 10, 2)]])
    sent = travelling(layout, Mask(window=(4, 0)), layout)
    assert sent.spans_per_rank == (((16, 4, 1),), ((20, 10, 2),), ((21, 9, 2),))


def test_what_is_in_too_many_pieces_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, mask = Layout.contiguous(64, 4), Mask(window=(3, 0))
    assert travelling(layout, mask, layout).lengths == (3, 3, 3, 0)
    travelling.cache_clear()
    monkeypatch.setattr(module, "MOST", 7)
    assert travelling(layout, mask, layout) == layout
    travelling.cache_clear()
