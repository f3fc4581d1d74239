"""The order in which the ring posts, waits and computes: seen from beneath."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn import Layout
from ringattn.comm.topology.topology import Topology
from ringattn.ring import Mask
from ringattn.ring.loop import partial_sums
from ringattn.ring.schedule.schedule import schedule

from ..support.rendezvous import run_ranks


def lines(layout: Layout, *, topology: Topology | None = None, prefetch: int = 1, chunks: int = 1) -> list[list[str]]:
    """What each rank did in a causal backward."""
    whole = schedule(layout, Mask(causal=True), topology=topology)
    return [rank.lines for rank in run_ranks(whole, "backward", prefetch=prefetch, chunks=chunks)]


def test_dkv_travel_while_dq_computes_and_return_under_the_last_one() -> None:
    for line in lines(Layout.zigzag(24, 3)):
        assert line == [
            "post K/V 1: 2 out, 2 in",  # hidden by the local dQ
            "dq",
            "post K/V 2: 2 out, 2 in",
            "dkdv",
            "post dK/dV: 2 out, 2 in",  # of hop 1 on, those for hop 2 in
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",  # back to the owner, hidden by the last dQ
            "dq final",
            "dkdv continued",
        ]


def test_kv_of_later_hops_are_posted_behind_dkv() -> None:
    for line in lines(Layout.zigzag(16, 4), prefetch=2):
        assert line == [
            "post K/V 1: 2 out, 2 in",
            "post K/V 2: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",  # which the next rank needs first
            "post K/V 3: 2 out, 2 in",
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv continued",
        ]


def test_each_chunk_of_heads_goes_on_while_the_next_computes() -> None:
    for line in lines(Layout.zigzag(16, 2), chunks=2):
        assert line == [
            "post K/V 1: 2 out, 2 in",
            "post K/V 1 chunk 1: 2 out, 2 in",
            "dq",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv",
            "post dK/dV chunk 1: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "dkdv continued",
        ]


def test_kv_leave_a_node_first_and_its_dkv_return_under_the_next_outer_step() -> None:
    for line in lines(Layout.zigzag(24, 6), topology=Topology.grid(3, 2)):
        assert line == [
            "post K/V 2 by rail: 2 out, 2 in",  # a whole outer step to arrive
            "post K/V 1: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "post K/V 4 by rail: 2 out, 2 in",
            "post K/V 3: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "dkdv continued",  # the root adds its part last
            "post dK/dV by rail: 2 out, 2 in",
            "post K/V 5: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "post dK/dV by rail: 2 out, 2 in",  # hidden by the own dK/dV
            "dkdv continued",
        ]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_only_the_last_part_of_the_last_hop_is_final(phase: str) -> None:
    """A part before it would be rounded to the dtype of the model."""
    whole = schedule(Layout.contiguous(4, 2), Mask())
    for rank in run_ranks(whole, phase, parts=2):
        computed = [line for line in rank.lines if line.startswith(("out", "dq"))]
        assert [line.endswith("final") for line in computed] == [False, False, False, True]


def test_parts_before_the_last_are_added_in_fp32() -> None:
    parts: Any = [{}, {}]
    out = torch.zeros(1).half(), torch.zeros(1).half()
    sums = [into for _, _, into in partial_sums(parts, None, out)]
    assert [{x.dtype for x in into} for into in sums] == [{torch.float32}, {torch.float16}]
