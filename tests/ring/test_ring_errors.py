"""What ``ring_attention`` refuses, before anything is sent: the argument, what it got, what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup, Message, TransportError
from ringattn.comm.control import control_of
from ringattn.comm.topology.topology import Topology
from ringattn.ring import BlockMask, longformer


def qkv(tokens: int = 8, **change: Tensor) -> list[Tensor]:
    parts = {"q": torch.zeros(2, tokens, 4, 16), "k": torch.zeros(2, tokens, 2, 16), "v": torch.zeros(2, tokens, 2, 16)}
    return list({**parts, **change}.values())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({}, "layout is None with 2 ranks"),
        ({"layout": Layout.contiguous(16, 4)}, "layout is made for 4 ranks, the group has 2"),
        ({"layout": Layout.contiguous(30, 2)}, "layout gives rank"),
    ],
)
def test_bad_input_on_several_ranks(call: dict[str, Any], told: str) -> None:
    def refused(group: LocalGroup) -> None:
        tokens = 8 + group.rank()  # none of the layouts fits either rank
        with pytest.raises(ValueError, match=told):
            ring_attention(*qkv(tokens + 1), group=group, **call)

    with LocalWorld(2) as world:
        world.run(refused)


def test_ring_and_group_name_the_same_thing() -> None:
    def refused(group: LocalGroup) -> None:
        with Ring(group) as ring, pytest.raises(ValueError, match="ring and group are both given"):
            ring_attention(*qkv(), ring=ring, group=group, layout="zigzag")

    with LocalWorld(2) as world:
        world.run(refused)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ({"causal": True}, {"causal": False}, "causal differs between ranks"),
        ({"softmax_scale": 0.5}, {}, r"softmax_scale differs between ranks \(rank 0: 0.5, rank 1: 0.25\)"),
        ({"layout": "zigzag"}, {"layout": "striped"}, "layout differs between ranks"),
        ({"backend": "aten"}, {"backend": "triton"}, r"backend differs .*rank 0: 'aten', rank 1: 'triton'"),
    ],
)
def test_ranks_that_disagree_all_learn_it(mine: dict[str, Any], theirs: dict[str, Any], told: str) -> None:
    def refused(group: LocalGroup) -> None:
        call = theirs if group.rank() else mine
        with pytest.raises(ValueError, match=told):
            ring_attention(*qkv(), group=group, **({"layout": "zigzag"} | call))

    with LocalWorld(2) as world:
        world.run(refused)


def test_spans_that_cut_a_block_are_refused_on_every_rank() -> None:
    mask = BlockMask(torch.ones(2, 2).bool(), 8)

    def refused(group: LocalGroup) -> None:
        with pytest.raises(
            ValueError, match=r"layout gives rank 0 the span \(0, 4, 1\): .* whole blocks of 8 positions"
        ):
            ring_attention(*qkv(8), layout="zigzag", group=group, block_mask=mask)

    with LocalWorld(2) as world:
        world.run(refused)


def test_shards_of_unequal_length_under_a_name_are_refused_on_every_rank() -> None:
    def refused(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match="layout differs between ranks"):
            ring_attention(*qkv(8 + group.rank()), layout="contiguous", group=group)

    with LocalWorld(2) as world:
        world.run(refused)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"slots": 1}, "slots is 1: a ring of 4 ranks needs at least 2"),
        ({"slots": 3, "prefetch": 3}, "prefetch is 3: with 3 slots it must be 0 to 2"),
        ({"topology": Topology.grid(2, 2), "slots": 5, "prefetch": 5}, "prefetch is 5: with 5 slots it must be 0 to 4"),
        ({"topology": Topology.grid(2, 3)}, "topology has 6 ranks, the group has 4"),
    ],
)
def test_a_ring_of_four_of_nonsense(call: dict[str, Any], told: str) -> None:
    def refused(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match=told):
            Ring(group, **call)

    with LocalWorld(4) as world:
        world.run(refused)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        ({"chunks": 2}, {}, r"chunks differs between ranks \(rank 0: 2, rank 1: 1"),
        ({"slots": 2, "prefetch": 1}, {"slots": 4, "prefetch": 1}, "slots differs between ranks"),
        ({"prefetch": 0}, {}, "prefetch differs between ranks"),
        ({"direction": -1}, {}, "direction differs between ranks"),
        ({"topology": Topology(((1, 0),))}, {"topology": Topology.flat(2)}, "topology differs between ranks"),
    ],
)
def test_rings_that_disagree_all_learn_it(mine: dict[str, Any], theirs: dict[str, Any], told: str) -> None:
    def refused(group: LocalGroup) -> None:
        with Ring(group, **(theirs if group.rank() else mine)) as ring, pytest.raises(ValueError, match=told):
            ring_attention(*qkv(), layout="zigzag", ring=ring)

    with LocalWorld(2) as world:
        world.run(refused)


def test_more_chunks_than_key_heads() -> None:
    def refused(group: LocalGroup) -> None:
        told = "chunks of the ring is 3, k has 2 heads: a chunk has at least one"
        with Ring(group, chunks=3) as ring, pytest.raises(ValueError, match=told):
            ring_attention(*qkv(), layout="zigzag", ring=ring)

    with LocalWorld(2) as world:
        world.run(refused)


def test_a_closed_ring() -> None:
    ring = Ring()
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="ring is closed"):
        ring_attention(*qkv(), ring=ring)


def test_a_ring_left_by_an_error_ends_the_transfers_of_the_others() -> None:
    """The rank that leaves goes on elsewhere: nothing but its ring tells the others."""

    def fn(group: LocalGroup) -> None:
        raised = TransportError if group.rank() else KeyError
        with pytest.raises(raised, match="out of data"), Ring(group) as ring:
            transport = ring.open_flat(torch.device("cpu"))
            if group.rank() == 0:
                raise KeyError("out of data")
            transport.post(sends=[], receives=[Message(0, torch.empty(4))])
        control_of(group).gather(None, what="the test", timeout=5)

    with LocalWorld(2, timeout=5) as world:
        world.run(fn)


@pytest.mark.parametrize(
    ("window", "stretches", "told"),
    [
        (3, [], "window is 3: it must be even"),
        (-2, [], "window is -2"),
        (2, [(0, 2), (1, 4)], r"global_tokens\[1\] is \(1, 4\): stretches must ascend"),
        (2, [(3, 3)], r"global_tokens\[0\] is \(3, 3\): stretches must ascend and hold a position"),
    ],
)
def test_a_longformer_that_is_none(window: int, stretches: list[tuple[int, int]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        longformer(window, stretches)


@pytest.mark.parametrize(
    "mine",
    [
        {"window_size": (4, 4)},
        {"cu_seqlens": [0, 5, 16]},
        {"block_mask": longformer(2, [])},
        {"block_mask": BlockMask(torch.ones(4, 4).bool(), 4)},
        {"seqused_k": [3, 16]},
        {"softcap": 2.0},
        {"alibi_slopes": torch.ones(4)},
        {"dropout_p": 0.25, "dropout_seed": 7},
        {"learnable_sink": torch.zeros(4)},
    ],
)
def test_masks_that_differ_are_an_error_on_every_rank(mine: dict[str, Any]) -> None:
    def refused(group: LocalGroup) -> None:
        call = mine if group.rank() else {}
        with pytest.raises(ValueError, match=f"({next(iter(mine))}|window_size) differs between ranks .rank 0: "):
            ring_attention(*qkv(8), group=group, layout="zigzag", **call)

    with LocalWorld(2) as world:
        world.run(refused)


def test_seeds_that_differ_are_an_error_on_every_rank() -> None:
    def refused(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match=r"dropout_seed differs between ranks \(rank 0: 5, rank 1: 6\)"):
            ring_attention(*qkv(8), group=group, layout="zigzag", dropout_p=0.5, dropout_seed=5 + group.rank())

    with LocalWorld(2) as world:
        world.run(refused)


def test_what_one_rank_refuses_all_refuse() -> None:
    def refused(group: LocalGroup) -> None:
        call: dict[str, Any] = {"cu_seqlens": [0, 3]} if group.rank() else {}
        with pytest.raises(ValueError, match="cu_seqlens ends at 3"):
            ring_attention(*qkv(8), group=group, layout="zigzag", **call)

    with LocalWorld(2) as world:
        world.run(refused)
