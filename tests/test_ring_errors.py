"""What ``ring_attention`` refuses, before anything is sent: the argument, what it got, what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup
from ringattn.comm.topology import Topology
from ringattn.kernels import KernelConfig, Tile


def qkv(tokens: int = 8, **change: Tensor) -> list[Tensor]:
    parts = {"q": torch.zeros(2, tokens, 4, 16), "k": torch.zeros(2, tokens, 2, 16), "v": torch.zeros(2, tokens, 2, 16)}
    return list({**parts, **change}.values())


TILE = Tile(32, 32, 4, 1)


@pytest.mark.parametrize(
    ("change", "call", "told"),
    [
        ({"q": torch.zeros(8, 4, 16)}, {}, r"q has shape \[8, 4, 16\]: it must be \[B, S, H, D\]"),
        ({"k": torch.zeros(2, 8, 2, 16).half()}, {}, "k is torch.float16, q is torch.float32"),
        ({"q": torch.zeros(2, 8, 4, 16).int()}, {}, "q is torch.int32: it must be float16, bfloat16 or float32"),
        ({"q": torch.zeros(2, 8, 4, 16).double()}, {}, "q is torch.float64"),
        ({"k": torch.zeros(2, 8, 2, 16, device="meta")}, {}, "k is on meta, q on cpu"),
        ({"k": torch.zeros(2, 8, 3, 16), "v": torch.zeros(2, 8, 3, 16)}, {}, "k has 3 heads, q has 4"),
        ({"q": torch.zeros(2, 8, 4, 24)}, {}, "k has head dim 16, q has 24"),
        ({"q": torch.zeros(2, 8, 4, 257)}, {}, "q has head dim 257: it must be 1 to 256"),
        ({"v": torch.zeros(2, 9, 2, 16)}, {}, r"v is \[2, 9, 2, 16\], k is \[2, 8, 2, 16\]"),
        ({"k": torch.zeros(3, 8, 2, 16)}, {}, "k has batch size 3, q has 2"),
        ({"k": torch.zeros(2, 9, 2, 16), "v": torch.zeros(2, 9, 2, 16)}, {}, "k has 9 tokens, q has 8"),
        ({"q": torch.zeros(2, 8, 16, 4).mT}, {}, "q has strides .*: the last stride must be 1"),
        ({}, {"softmax_scale": 0.0}, "softmax_scale is 0.0: it must be a positive finite number"),
        ({}, {"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({}, {"causal": 1}, "causal is 1: it must be True or False"),
        ({}, {"backend": "cuda"}, "backend is 'cuda': it must be one of auto, triton, aten"),
        ({}, {"config": KernelConfig(TILE, TILE, TILE)}, "config sets the tiles of the Triton kernels"),
        ({}, {"layout": "ring"}, "layout is 'ring': it must be a Layout or one of contiguous, zigzag, striped"),
        ({}, {"layout": 3}, "layout is a int: it must be a Layout"),
        ({}, {"layout": Layout.zigzag(8, 2)}, "layout is made for 2 ranks, the group has 1"),
        ({}, {"layout": Layout.zigzag(9, 1)}, "q has 8 tokens, the layout gives rank 0 9"),
        ({}, {"ring": "ring"}, "ring is a str: it must be a Ring"),
        ({}, {"group": "group"}, "group is a str"),
    ],
)
def test_bad_input_on_one_device(change: dict[str, Tensor], call: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ring_attention(*qkv(8, **change), **call)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({}, "layout is None with 2 ranks"),
        ({"layout": Layout.contiguous(16, 4)}, "layout is made for 4 ranks, the group has 2"),
        ({"layout": Layout.contiguous(30, 2)}, "the layout gives rank"),
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
        ({"causal": True}, {"causal": False}, "mask differs between ranks"),
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


def test_shards_of_unequal_length_under_a_name_are_refused_on_every_rank() -> None:
    def refused(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match="layout differs between ranks"):
            ring_attention(*qkv(8 + group.rank()), layout="contiguous", group=group)

    with LocalWorld(2) as world:
        world.run(refused)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"transport": "mpi"}, "transport is 'mpi': it must be one of auto"),
        ({"direction": 2}, "direction is 2: it must be 1"),
        ({"slots": 0}, "slots is 0: a ring of 1 ranks needs at least 1"),
        ({"prefetch": 3}, "prefetch is 3: with 3 slots it must be 0 to 2"),
        ({"prefetch": -1}, "prefetch is -1: with 3 slots"),
        ({"chunks": 0}, "chunks is 0: it must be at least 1 and at most the number of key heads"),
        ({"deadline": 0}, "deadline is 0: it must be a positive number of seconds, or None"),
        ({"deadline": float("nan")}, "deadline is nan: it must be a positive"),
        ({"topology": Topology.grid(2, 2)}, "topology has 4 ranks, the group has 1"),
        ({"group": 5}, "group is a int"),
    ],
)
def test_a_ring_of_nonsense(call: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Ring(**call)


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
