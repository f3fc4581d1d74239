"""What ``ring_attention`` refuses, before anything is sent: the argument, what it got, what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import LocalGroup, Message, TransportError
from ringattn.comm.control import control_of
from ringattn.comm.topology import Topology
from ringattn.kernels import KernelConfig, Tile
from ringattn.ring import BlockMask, longformer


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
        ({}, {"layout": Layout.zigzag(9, 1)}, "q has 8 tokens, layout gives rank 0 9"),
        ({}, {"window_size": (-2, 0)}, r"window_size is \(-2, 0\): a side is at least 0, or -1 for no end"),
        ({}, {"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\): it must be \(left, right\)"),
        ({}, {"window_size": 4}, "window_size is 4: it must be"),
        ({}, {"window_size": (0.5, 1)}, "two whole numbers"),
        ({}, {"cu_seqlens": [1, 8]}, "cu_seqlens starts at 1: it must start at 0"),
        ({}, {"cu_seqlens": [0, 5, 4, 8]}, r"cu_seqlens\[2\] is 4, the one before is 5: it must not descend"),
        ({}, {"cu_seqlens": [0, 5]}, "cu_seqlens ends at 5: it must end at 8, the number of tokens"),
        ({}, {"cu_seqlens": [0]}, r"cu_seqlens is \[0\]: it must have at least one document"),
        ({}, {"cu_seqlens": [0, 4.5, 8]}, "it must be a list of whole numbers"),
        ({}, {"cu_seqlens": torch.tensor([0.0, 8.0])}, r"cu_seqlens is torch.float32 \[2\]: it must be integers"),
        ({}, {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}, "cu_seqlens is on meta: .* CPU tensor"),
        ({}, {"causal": True, "prefix_length": 9}, "prefix_length is 9: it must be 0 to 8"),
        ({}, {"causal": True, "prefix_length": 1.5}, "prefix_length is 1.5: it must be a whole number"),
        ({}, {"prefix_length": 3}, "prefix_length is 3 without causal"),
        ({}, {"learnable_sink": torch.zeros(3)}, r"learnable_sink is \[3\] on cpu: it must be \[4\] on cpu"),
        ({}, {"learnable_sink": torch.zeros(4).int()}, "learnable_sink is .*: it must be a floating tensor"),
        ({}, {"learnable_sink": 1.0}, "learnable_sink is 1.0: it must be a floating tensor"),
        ({}, {"block_mask": "all"}, r"block_mask is str: it must be bool \[query blocks, key blocks\], a BlockMask or"),
        ({}, {"block_mask": torch.ones(2, 2)}, r"block_mask is torch.float32 \[2, 2\]: it must be bool"),
        ({}, {"block_mask": torch.ones(2, 2, device="meta").bool()}, "block_mask is on meta: it must be on the CPU"),
        ({}, {"block_mask": torch.ones(2, 3).bool()}, r"block_mask is \[2, 3\] blocks of 4 .* must be \[2, 2\]"),
        ({}, {"block_mask": BlockMask(torch.ones(3, 3).bool(), 4)}, r"block_mask is \[3, 3\] blocks of 4 positions"),
        ({}, {"block_mask": torch.ones(3, 3).bool()}, "block_mask has 3 blocks of queries for 8: .* BlockMask"),
        (
            {},
            {"block_mask": BlockMask(torch.ones(1, 1).bool(), 8), "backend": "triton"},
            "the block mask has blocks of 8: they must be a multiple of 16",
        ),
        ({}, {"seqused_k": [8]}, "seqused_k has 1 lengths: it must have 2, one per batch row"),
        ({}, {"seqused_k": [9, 8]}, r"seqused_k\[0\] is 9: it must be 0 to 8"),
        ({}, {"seqused_k": [-1, 8]}, r"seqused_k\[0\] is -1: it must be 0 to 8"),
        ({}, {"seqused_k": torch.zeros(2, dtype=torch.int32, device="meta")}, "seqused_k is on meta: .* CPU tensor"),
        ({}, {"softcap": -1.0}, "softcap is -1.0: it must be a positive finite number, or 0 for none"),
        ({}, {"dropout_p": 1.0}, "dropout_p is 1.0: it must be at least 0 and below 1"),
        ({}, {"dropout_p": -0.5}, "dropout_p is -0.5: it must be at least 0 and below 1"),
        ({}, {"dropout_seed": 3}, "dropout_seed is 3 with dropout_p 0: nothing is dropped"),
        (
            {},
            {"dropout_p": 0.5, "dropout_seed": 1 << 64},
            r"dropout_seed is 18446744073709551616: it must be 0 to 2\^64",
        ),
        ({}, {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes is torch.float32 \[3\] on cpu: .* \[4\] or \[2, 4\]"),
        ({}, {"alibi_slopes": torch.zeros(4).double()}, r"alibi_slopes is torch.float64"),
        ({}, {"alibi_slopes": torch.zeros(4).requires_grad_()}, "alibi_slopes requires a gradient, and there is none"),
        ({}, {"block_mask": longformer(2, []), "window_size": (1, 1)}, r"window_size is \(1, 1\) with the Longformer"),
        ({}, {"kv_layout": Layout.zigzag(9, 1)}, "k has 8 tokens, kv_layout gives rank 0 9"),
        ({}, {"kv_layout": "ring"}, "kv_layout is 'ring': it must be a Layout or one of"),
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
