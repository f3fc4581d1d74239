"""``align`` with different numbers of queries and keys, against the reference at the aligned positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Layout, ring_attention
from ringattn.comm import LocalGroup
from ringattn.conformance.cases import pairwise_cases

from ..support.mask_cases import RingCase, combine_ranks, compare_with_expected, expected_results, start_call
from ..support.ring_cases import LAYOUTS, inputs, run_ranks

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (5, 0)},
    "window": {"window_size": (4, 2)},
    "ALiBi, dropout": {"causal": True, "alibi_slopes": torch.rand(4), "dropout_p": 0.3, "dropout_seed": 5},
}
HOW: dict[str, tuple[int, str, str, bool]] = {
    "alone": (1, "contiguous", "contiguous", False),
    "one name": (2, "zigzag", "zigzag", True),
    "two names": (3, "striped", "contiguous", True),
    "a name and a layout": (3, "striped", "uneven", True),
    "layouts": (3, "uneven", "striped", False),
    "mesh": (2, "zigzag", "zigzag", True),
}
"""Ranks, layouts of q and k, and whether to pass their names. The mesh case counts Ulysses ranks."""


def later(layout: Layout, by: int) -> Layout:
    return Layout([[(start + by, length, step) for start, length, step in spans] for spans in layout.spans_per_rank])


@pytest.mark.parametrize(
    ("align", "name", "lengths", "how"),
    pairwise_cases(["bottom-right", "top-left"], MASKS, [(12, 30), (30, 12), (18, 18)], HOW),
)
def test_masks_where_lengths_differ(align: str, name: str, lengths: tuple[int, int], how: str) -> None:
    world, *kinds, named = HOW[how]
    layouts = [LAYOUTS[kind](length, world) for kind, length in zip(kinds, lengths, strict=True)]
    own: dict[str, Any] = dict(zip(("layout", "kv_layout"), kinds if named else layouts, strict=True))
    own = own if kinds[1] != "uneven" else own | {"kv_layout": layouts[1]}
    if how in ("alone", "one name", "mesh"):
        own["kv_layout"] = None
    more = lengths[1] - lengths[0] if align == "bottom-right" else 0
    at = later(layouts[0], max(more, 0)), later(layouts[1], max(-more, 0))
    case = RingCase(at[0], inputs(max(lengths)), MASKS[name], kv_layout=at[1])

    def rank(group: LocalGroup) -> list[Any]:
        where = group.mesh(1, 2) if how == "mesh" else group
        return start_call(case, group.rank(), group=where, align=align, change=lambda call: call.update(own)).finish()

    compare_with_expected(expected_results(case), *combine_ranks(case, run_ranks(world, rank)))


def test_bottom_right_is_a_lower_triangle_ending_in_the_corner() -> None:
    for queries, keys in ((2, 5), (5, 2)):
        whole = torch.zeros(1, queries, 1, 8), torch.zeros(1, keys, 1, 8)
        out = ring_attention(*whole, torch.eye(keys)[None, :, None], causal=True, align="bottom-right")
        assert torch.equal(out[0, :, 0] > 0, torch.ones(queries, keys).tril(keys - queries) > 0)
