"""Errors of every public function: each names the argument, what it got and what it takes.

One table holds the errors of ``ring_attention``. It runs twice: in eager mode and through the op that a graph holds.
"""

from __future__ import annotations

import gc
import inspect
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout, LocalWorld, Ring, halo, positions, relayout, ring_attention, roll, shard, unshard
from ringattn.comm import GroupLike, Limits, LocalGroup, Message, Topology, TransportError, single_rank
from ringattn.comm.control import open_control
from ringattn.kernels import KernelConfig, Scores, Tile
from ringattn.ring import BlockMask, Intervals, bigbird, fixed, longformer, prefix_tree, slices, strided
from ringattn.ring import prepare as prepare_module
from ringattn.ring import ring as ring_module
from ringattn.ring.args import ARG_SPECS, AttentionArgs, Compare, Options, take_args
from ringattn.ring.local.protocol import Supports
from ringattn.ring.local.rectangles import RectangleAttention
from ringattn.ring.ops import pack_call, unpack_call
from ringattn.ring.prepare import Call, autocast_inputs, check_sink, prepare_call
from ringattn.ring.ring import call_device
from ringattn.ring.schedule.layout import Documents

from ..support import own_kernels
from ..support.rank_processes import group_results
from ..support.ring_cases import run_ranks

TILE = Tile(32, 32, 4, 1)


def x(tokens: int = 8, heads: int = 4, dim: int = 16, batch: int = 2) -> torch.Tensor:
    return torch.zeros(batch, tokens, heads, dim)


EIGHT = torch.arange(8)
HALVES = Layout.contiguous(8, 2)
BFLOAT16 = {"q": x().bfloat16(), "k": x(8, 2).bfloat16(), "v": x(8, 2).bfloat16(), "backend": "triton"}


class Distributed(torch.Tensor):
    """Stand-in for a DTensor: a tensor with ``to_local``."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


Door = tuple[Callable[..., Any], dict[str, Any]]
WHOLE = x(8, 4)
DOORS: dict[str, Door] = {
    "ring_attention": (ring_attention, {"q": WHOLE, "k": WHOLE[:, :, :2], "v": WHOLE[:, :, :2]}),
    "Ring": (Ring, {}),
    "LocalWorld": (LocalWorld, {"world_size": 2}),
    "Layout": (Layout, {"spans_per_rank": [[(0, 8)]]}),
    "contiguous": (Layout.contiguous, {"seqlen": 8, "world": 2}),
    "zigzag": (Layout.zigzag, {"seqlen": 8, "world": 2}),
    "striped": (Layout.striped, {"seqlen": 8, "world": 2}),
    "uneven": (Layout.uneven, {"lengths": [5, 3]}),
    "balanced": (Layout.balanced, {"seqlen": 8, "speeds": [1, 2], "causal": True}),
    "spans of a rank": (HALVES.spans, {"rank": 0}),
    "positions of a rank": (HALVES.positions, {"rank": 0}),
    "shard of a rank": (HALVES.shard, {"x": WHOLE, "rank": 0}),
    "whole of shards": (HALVES.unshard, {"shards": [WHOLE[:, :4], WHOLE[:, 4:]]}),
    "check_sink": (check_sink, {"q": WHOLE, "learnable_sink": None}),
    "shard": (shard, {"x": WHOLE, "layout": None}),
    "unshard": (unshard, {"x": WHOLE, "layout": None, "grad": "slice"}),
    "relayout": (relayout, {"x": WHOLE, "source": None, "target": None}),
    "roll": (roll, {"x": WHOLE, "shift": 1, "layout": None}),
    "halo": (halo, {"x": WHOLE, "left": 1, "right": 1, "layout": None}),
    "positions": (positions, {"seqlen": 8, "layout": None}),
    "Documents": (Documents, {"cu_seqlens": [0, 8]}),
    "BlockMask": (BlockMask, {"visible": torch.eye(3).bool(), "block": 4}),
    "strided": (strided, {"seqlen": 8, "block": 4, "stride": 4}),
    "fixed": (fixed, {"seqlen": 8, "block": 2, "stride": 4, "summary": 2}),
    "bigbird": (bigbird, {"seqlen": 8, "block": 2, "window": 1, "global_": 0, "random": 0}),
    "longformer": (longformer, {"window": 2, "global_tokens": []}),
    "Intervals": (Intervals, {"pairs": [(EIGHT, EIGHT + 1)]}),
    "prefix_tree": (prefix_tree, {"lengths": [2, 3], "parents": [-1, 0]}),
    "slices": (slices, {"slices": [((0, 8), (0, 8), "full")], "positions": 8}),
    "Limits": (Limits, {}),
    "Topology": (Topology, {"nodes": [[0, 1]]}),
    "flat": (Topology.flat, {"world": 2}),
    "grid": (Topology.grid, {"nodes": 2, "per_node": 2}),
}
"""Each public function and valid arguments for it."""

FOUR_KEYS = {"k": x(4, 2), "v": x(4, 2), "kv_layout": Layout.contiguous(4, 1)}
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "softmax_scale": (1e-31, 1e31), "softcap": (-1.0, 1e-9, 1e31), "dropout_p": (-0.1, 1.0), "dropout_seed": (2**64,),
    "first_head": (-1, 2**31), "prefix_length": (-1,),
}  # fmt: skip
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(8, 4, 16)}, r"q has shape \[8, 4, 16\]: it must be \[B, S, H, D\]"),
    ({"layout": Layout([[(2**31 - 7, 8)]]), "dropout_p": 0.1}, "layout reaches position 2147483648: with dropout_p"),
    ({"k": x(9, 2), "v": x(9, 2)}, "k has 9 tokens and q has 8"),
    ({"v": x(8, 2, 513)}, "v has head dim 513: it must be between 1 and 512"),
    ({"k": x(8, 3), "v": x(8, 3)}, r"k has 3 heads and q has 4: .* must be a multiple of the heads of k"),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0: it must be a number from 1e-30 to 1e30, or None"),
    ({"backend": "cuda"}, "backend is 'cuda': it must be one of auto, triton, flash, cudnn, fa3, fa4, aten"),
    ({"layout": Layout.zigzag(8, 2)}, "layout is made for 2 ranks, but the group has 1"),
    ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\): it must be \(left, right\)"),
    ({"cu_seqlens": [0, 5]}, "cu_seqlens ends at 5: it must end at 8, the number of tokens"),
    ({"causal": True, "prefix_length": 9}, "prefix_length is 9: it must be between 0 and 8"),
    ({"prefix_length": 3}, "prefix_length is 3 and causal is False"),
    ({"learnable_sink": torch.zeros(3)}, r"learnable_sink has shape \[3\] on cpu: it must have shape \[4\] on cpu"),
    ({"learnable_sink": torch.zeros(4).int()}, "learnable_sink is .*: it must be a floating-point tensor of shape"),
    ({"block_mask": torch.ones(2, 3).bool()}, r"block_mask has shape \[2, 3\] with blocks of 4 .* must be \[2, 2\]"),
    ({"block_mask": torch.ones(0, 2).bool()}, r"block_mask is .* \[0, 2\]: it must be a bool tensor of shape \[query"),
    ({"block_mask": torch.ones(3, 3).bool()}, "block_mask has 3 rows, .* 8 queries.* BlockMask"),
    ({"block_mask": BlockMask(torch.ones(1, 1).bool(), 8), "backend": "triton"}, "the block mask has block size 8"),
    ({"islands": [(1, 3)]}, "islands is given and causal is False"),
    ({"causal": True, "islands": [(1, 3), (2, 4)]}, r"islands\[1\] is \(2, 4\): ranges must ascend, without overlap"),
    ({"causal": True, "islands": [(1, 3), (6, 9)]}, r"islands\[1\] is \(6, 9\): it must not extend past the end of"),
    ({"causal": True, "islands": [(0, 2), (3, 6)], "cu_seqlens": [0, 2, 5, 8]}, r"islands\[1\] is \(3, 6\): it must"),
    ({"intervals": [(EIGHT[:7], EIGHT[:7] + 1)]}, "intervals has 7 positions: it must have 8, those of the queries"),
    ({"intervals": [(EIGHT * 0, EIGHT), (EIGHT, EIGHT + 3)]}, "intervals ends at 9 at position 6: it must end at 8 at"),
    ({"intervals": [(EIGHT % 3, EIGHT + 1)]}, r"intervals\[0\] is \[0, 4\) at position 3, after \[2, 3\) at position"),
    (
        {"intervals": [(EIGHT * 0 + 4, EIGHT * 0 + 6), (EIGHT * 0, EIGHT)]},
        r"intervals\[0\] overlaps intervals\[1\] at position 5: one begins at 4, and the other ends at 5",
    ),
    ({"intervals": [(EIGHT - 1, EIGHT + 1)]}, r"intervals\[0\] begins at -1 at position 0: it must begin at 0 or"),
    *(
        (
            {"intervals": Intervals([(EIGHT, EIGHT + 1)], EIGHT), "causal": True, name: value},
            f"{name} cannot be used with",
        )
        for name, value in (("alibi_slopes", torch.ones(4)), ("islands", [(1, 3)]), ("prefix_length", 3))
    ),
    ({"seqused_k": [8]}, "seqused_k has 1 lengths: it must have 2, one per batch row"),
    ({"seqused_k": [9, 8]}, r"seqused_k\[0\] is 9: it must be between 0 and 8"),
    (FOUR_KEYS | {"seqused_k": [5, 4]}, r"seqused_k\[0\] is 5: it must be between 0 and 4"),
    (FOUR_KEYS | {"seqused_k": [5, 4], "leftpad_k": [1, 0]}, r"seqused_k\[0\] is 5: it must be between 0 and 4"),
    (FOUR_KEYS | {"leftpad_k": [5, 4]}, r"leftpad_k\[0\] is 5: it must be between 0 and 4"),
    *(
        ({"causal": True, name: value}, f"{name} is {re.escape(repr(value))}: it must be")
        for name, values in OUT_OF_RANGE.items()
        for value in values
    ),
    ({"dropout_seed": 3}, "dropout_seed is 3 with dropout_p 0. Pass dropout_p"),
    ({"align": "bottom"}, "align is 'bottom': it must be one of top-left, bottom-right, or None"),
    ({"align": "bottom-right", "q": x(9), "key_mask": torch.ones(2, 8).bool()}, "key_mask cannot be used with align"),
    ({"align": "top-left", "kv_layout": Layout([[(2, 8)]])}, "align is 'top-left', but kv_layout holds only 8 of the"),
    *(
        ({"align": "bottom-right", "k": x(9, 2), "v": x(9, 2), name: value}, f"{name} cannot be used with align")
        for name, value in (
            ("cu_seqlens", [0, 9]),
            ("seqused_k", [9, 9]),
            ("prefix_length", 3),
            ("block_mask", torch.ones(2, 2).bool()),
            ("islands", [(0, 2)]),
            ("intervals", [(EIGHT, EIGHT + 1)]),
        )
    ),
    ({"alibi_slopes": torch.zeros(3)}, r"alibi_slopes is torch.float32 of shape \[3\] on cpu: .* \[4\] or \[2, 4\]"),
    ({"block_mask": longformer(2, []), "window_size": (1, 1)}, r"window_size is \(1, 1\), but the Longformer"),
    ({"kv_layout": Layout.zigzag(9, 1)}, "k has 8 tokens, but kv_layout has 9 for rank 0$"),
    ({"block_mask": BlockMask(torch.ones(2, 3).bool(), 4), "kv_layout": Layout([[(0, 2), (4, 6)]])}, "kv_layout gives"),
    (
        {"intervals": [(EIGHT, EIGHT + 3)], "kv_layout": Layout([[(0, 9)]]), "k": x(9, 2), "v": x(9, 2)},
        "intervals ends at 10 at position 7: it must end at 9",
    ),
    ({"q": x(4, 8), "k": x(2, 8), "v": x(2, 8)}, r"k has 2 tokens and q has 4: .* pass q.transpose\(1, 2\)"),
    ({"layout": Layout.contiguous(4, 1)}, r"q has 8 tokens, but layout has 4 for rank 0\. .* pass q.transpose\(1, 2\)"),
    (BFLOAT16, "tensors are torch.bfloat16 on the CPU"),
]
"""Errors of ``ring_attention``, in eager mode and in a graph."""

NO_BACKWARD = RectangleAttention("mine", own_kernels.forward, supports=Supports(devices=("cpu",)))
SINK_GRADIENT = {"k": WHOLE, "v": WHOLE, "learnable_sink": torch.zeros(4).requires_grad_()}
EAGER: list[tuple[dict[str, Any], str]] = [
    ({"k": x(8, 2).to("meta")}, "k is on meta and q is on cpu"),
    ({"q": x(8, 4).to("meta")}, "q is a Tensor on meta without data: it must be"),
    *(({name: 1}, f"{name} is 1: it must be True or False") for name in ("causal", "return_lse", "return_max_logits")),
    ({"config": KernelConfig(TILE, TILE, TILE)}, "config, which sets the tiles"),
    ({"config": 5, "backend": "triton"}, "config is 5: it must be a kernels.KernelConfig, or None"),
    ({"group": single_rank().mesh(1, 1), "backend": NO_BACKWARD} | SINK_GRADIENT, "does not support gradients"),
    ({"layout": "ring"}, "layout is 'ring': it must be a Layout or one of contiguous, zigzag, striped"),
    ({"learnable_sink": 1.0}, "learnable_sink is float: it must be a torch.Tensor"),
    ({"alibi_slopes": torch.zeros(4).requires_grad_()}, "alibi_slopes requires a gradient, which is not computed"),
    ({"ring": "ring"}, "ring is '[^']*': it must be a Ring"),
    ({"group": "group"}, "group is 'group'"),
    ({"v": np.zeros((2, 8, 2, 16))}, r"v is ndarray: .* Pass torch.from_numpy\(v\)"),
    ({"k": Distributed()}, r"k is a Distributed: it must be this rank's local tensor. Pass k.to_local\(\)"),
    *(
        ({name: Distributed()}, rf"{name} is a Distributed: .*\. Pass {name}.to_local\(\)")
        for name in ("learnable_sink", "alibi_slopes", "cu_seqlens", "seqused_k", "key_mask", "leftpad_k", "block_mask")
    ),
    *(({name: Distributed()}, rf"Pass {name}.to_local\(\)") for name in ("islands", "intervals")),
    ({"intervals": [(Distributed(), EIGHT)]}, r"Pass intervals.to_local\(\)"),
    ({"intervals": [(EIGHT, EIGHT + 1.0)]}, r"intervals\[0\] is \(a torch.int64 .*, a torch.float32 .*: it must be a"),
    ({"intervals": [(EIGHT, EIGHT[:7])]}, r"intervals\[0\] is .* of shape \[7\]\): it must be a pair \(lo, hi\) of"),
    ({"intervals": [(EIGHT, EIGHT), (EIGHT[:7], EIGHT[:7])]}, r"intervals\[1\] has 7 positions: it must have 8, as"),
    ({"intervals": []}, "intervals is empty: it must have at least one pair"),
    ({"intervals": prefix_tree([8], [-1])}, r"intervals is .*PrefixTree: .*Pass tree.intervals"),
    ({"intervals": [(EIGHT + p, EIGHT + p + 1) for p in range(0, 130, 2)]}, "intervals has 65 intervals per query:"),
    ({"q": x(8, 4).to_sparse()}, "q is a torch.sparse_coo tensor: it must be a dense"),
    ({"window_size": (0, 2**63 - 1)}, r"window_size is \(0, 9223372036854775807\): .* from 0 to 2\^62 - 1"),
    ({"softmax_scale": torch.tensor(0.5)}, r"softmax_scale is a torch.float32 tensor of shape \[\]: .* Pass .item\(\)"),
]
"""Errors of ``ring_attention`` for values that a torch op cannot take."""

BLOCKS = r"block is 1: .* 1,000,000 blocks, .* 1,000,000,000,000 bytes, more than 2\^30. .* of at least 31"

WRONG_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "Ring": {"slots": (1.5, 2**16 + 1), "prefetch": (-1,), "direction": (0,), "limits": (5,), "deadline": (True, 0)},
    "contiguous": {"seqlen": (-1,)},
    "positions of a rank": {"rank": (2,)},
    "BlockMask": {"block": (0,)},
    "strided": {"seqlen": (-1,), "block": (0,), "stride": (0,)},
    "bigbird": {"window": (0,), "seed": ("a", 2**70), "global_": (-1,), "random": (-1,)},
    "longformer": {"window": (-2,)},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (door, {name: value}, f"{name} is {value!r}: it must be")
        for door, arguments in WRONG_VALUES.items()
        for name, values in arguments.items()
        for value in values
    ),
    ("Ring", {"transport": "mpi"}, "transport is 'mpi': it must be one of auto"),
    ("Ring", {"direction": 2}, "direction is 2: it must be 1"),
    ("Ring", {"chunks": 1025}, r"chunks is 1025: it must be an integer from 1 to 1024"),
    ("Ring", {"prefetch": 3}, "prefetch is 3: with 3 slots it must be between 0 and 2"),
    ("Ring", {"deadline": Fraction(1, 10**400)}, r"deadline is Fraction.*: it must be a positive number"),
    ("Ring", {"topology": Topology.grid(2, 2)}, "topology has 4 ranks, but the group has 1"),
    ("Ring", {"wire_dtype": [3]}, r"wire_dtype is \[3\]: it must be one of None, torch.bfloat16"),
    ("Ring", {"group": 5}, r"group is \d+; "),
    ("LocalWorld", {"device": "meta"}, "device is 'meta': it must be cpu or a CUDA device that torch sees"),
    ("Layout", {"spans_per_rank": []}, "^spans_per_rank is empty: it must have one list of spans per rank$"),
    ("Layout", {"spans_per_rank": [5]}, r"spans_per_rank\[0\] is 5: it must be a list of spans"),
    ("Layout", {"spans_per_rank": [[5]]}, r"spans_per_rank\[0\]\[0\] is 5: it must be a Span\(start, length"),
    ("Layout", {"spans_per_rank": [[(0, 2)], [(-1, 2)]]}, r"spans_per_rank\[1\]\[0\] is \(-1, 2\): it must be a Span"),
    ("Layout", {"spans_per_rank": [[(0, -1)]]}, r"is \(0, -1\): it must be a Span"),
    ("Layout", {"spans_per_rank": [[(2**61, 2**61)]]}, r"at least 0, step at least 1, and all positions below"),
    ("zigzag", {"cu_seqlens": [0, 5, 7]}, "cu_seqlens ends at 7: it must end at 8, the number of tokens"),
    ("uneven", {"lengths": []}, "^lengths is empty: it must have the number of tokens of every rank$"),
    ("uneven", {"lengths": [1, -2]}, r"lengths\[1\] is -2: it must be"),
    ("balanced", {"speeds": []}, "^speeds is empty: it must have the relative speed of every rank$"),
    ("balanced", {"speeds": [0, 0.0]}, r"speeds is \[0.0, 0.0\]: at least one speed must be above 0"),
    ("balanced", {"speeds": [1, -1]}, r"speeds\[1\] is -1: it must be"),
    ("shard of a rank", {"x": 5}, "x is int: it must be a torch.Tensor"),
    ("shard of a rank", {"x": WHOLE[:, :7]}, "^x has 7 tokens along dim 1, but the layout is made for 8$"),
    ("shard of a rank", {"dim": -1}, r"x has 16 tokens along dim -1, but the layout is made for 8\. Dim 1 has 8"),
    ("shard of a rank", {"dim": -5}, "dim is -5, but x has 4 dimensions"),
    ("whole of shards", {"dim": 4}, r"dim is 4, but shards\[0\] has 4 dimensions"),
    ("whole of shards", {"shards": [WHOLE]}, "shards has 1 tensors: it must have one per rank, 2"),
    ("whole of shards", {"shards": [WHOLE, WHOLE]}, r"shards\[0\] has 8 tokens along dim 1, but rank 0 has 4"),
    ("whole of shards", {"shards": [WHOLE[:, :4], WHOLE[:, :4].half()]}, r"shards\[1\] is .*float16.*: it must be"),
    ("unshard", {"grad": "mean"}, "grad is 'mean': it must be one of slice, sum"),
    ("Documents", {"cu_seqlens": Distributed()}, r"Pass cu_seqlens.to_local\(\)"),
    ("BlockMask", {"visible": Distributed().bool()}, r"Pass block_mask.to_local\(\)"),
    ("Documents", {"cu_seqlens": [0]}, r"cu_seqlens is \[0\]: it must have at least one document"),
    ("Documents", {"cu_seqlens": [1, 4]}, "cu_seqlens starts at 1: it must start at 0"),
    ("Documents", {"cu_seqlens": [0, 4, 3]}, r"cu_seqlens\[2\] is 3 after 4: "),
    ("Documents", {"cu_seqlens": [0, 4.0]}, r"cu_seqlens is \[0, 4.0\]: it must be a list of integers"),
    ("Documents", {"cu_seqlens": torch.tensor([0.0, 4])}, r"float32 of shape \[2\]: it must be an integer tensor of"),
    ("Documents", {"cu_seqlens": torch.tensor([0j, 4])}, r"cu_seqlens is torch.complex64 of shape \[2\]: it must"),
    ("Documents", {"cu_seqlens": torch.tensor([False, True])}, r"cu_seqlens is torch.bool of shape \[2\]: it must be"),
    ("Documents", {"cu_seqlens": torch.tensor([[0, 4]])}, r"cu_seqlens is torch.int64 of shape \[1, 2\]: it must be"),
    ("Documents", {"cu_seqlens": torch.zeros(2, device="meta").int()}, "cu_seqlens is on meta: it must be a list or a"),
    ("Layout", {"spans_per_rank": [[(4, 2), (5, 2)]]}, r"^spans_per_rank\[0\]\[1\] starts at 5, but the span before"),
    ("Layout", {"spans_per_rank": [[(4, 2)], [(0, 1), (5, 2)]]}, r"holds position 5 on rank 0 and on rank 1\. A"),
    ("Layout", {"spans_per_rank": [[(9, 1)], [(0, 4, 3)]]}, "holds position 9 on rank 0 and on rank 1"),
    ("check_sink", {"learnable_sink": torch.zeros(4, device="meta")}, r"has shape \[4\] on meta: it must have shape"),
    ("BlockMask", {"visible": [[True]]}, r"block_mask is \[\[True\]\]: it must be a bool tensor of shape \[query"),
    ("BlockMask", {"visible": torch.zeros(3).bool()}, r"block_mask is torch.bool \[3\]: it must be a bool tensor of"),
    ("BlockMask", {"visible": torch.zeros(3, 3, device="meta").bool()}, "block_mask is on meta: it must be on the CPU"),
    ("strided", {"stride": 6}, "stride is 6: it must be a positive multiple of 4, the block size"),
    ("fixed", {"stride": 3}, "stride is 3: it must be a positive multiple of 2, the block size"),
    ("fixed", {"summary": 3}, "summary is 3: it must be a positive multiple of 2, the block size"),
    ("fixed", {"summary": 6}, "summary is 6: it must be at most 4, the stride"),
    ("bigbird", {"window": 2}, "window is 2: it must be odd"),
    *((name, {"seqlen": 10**6, "block": 1}, BLOCKS) for name in ("strided", "fixed", "bigbird")),
    ("longformer", {"window": 3}, "window is 3: it must be even, because half of it is on either side"),
    ("longformer", {"global_tokens": [(4, 4)]}, r"global_tokens\[0\] is \(4, 4\): ranges must ascend"),
    ("longformer", {"global_tokens": [(0, 4), (3, 5)]}, r"global_tokens\[1\] is \(3, 5\): ranges must ascend"),
    ("longformer", {"global_tokens": [7]}, r"global_tokens is \[7\]: it must be a list of ranges \(start, end\)"),
    ("prefix_tree", {"lengths": [2, 0]}, r"lengths\[1\] is 0: it must be at least 1"),
    ("prefix_tree", {"lengths": [2]}, "lengths has 1 nodes and parents has 2: both must have the same, at least 1"),
    ("prefix_tree", {"lengths": [], "parents": []}, "lengths has 0 nodes and parents has 0"),
    ("prefix_tree", {"parents": [-1, 1]}, r"parents\[1\] is 1: it must be an earlier node, 0 to 0, or -1 for a root"),
    ("prefix_tree", {"parents": [0, -1]}, r"parents\[0\] is 0: it must be "),
    ("prefix_tree", {"parents": [-1, -2]}, r"parents\[1\] is -2: it must be an earlier node"),
    ("prefix_tree", {"lengths": [1.5, 2]}, r"lengths is \[1.5, 2\]: it must be a list of integers"),
    (
        "prefix_tree",
        {"lengths": [1] * 131, "parents": [-1, *(node // 2 * 2 for node in range(130))]},
        r"parents\[127\] is 126, after 64 branches: a path may have 64",
    ),
    ("slices", {"slices": 3}, r"slices is 3: it must be a list of slices \(queries, keys, kind\)"),
    ("slices", {"slices": [((0, 2), (3, 2), "full")]}, r"slices\[0\] is .*\(3, 2\).*: it must be \(queries, keys"),
    ("slices", {"slices": [((2, 0), (0, 2), "full")]}, r"slices\[0\] is .*\(2, 0\).*: it must be \(queries, keys"),
    *(
        ("slices", {"slices": [((0, 2), (0, 2), kind)]}, rf"slices\[0\] is .*{kind}\): it must be \(queries, keys")
        for kind in (4, -1)
    ),
    ("slices", {"slices": [((0, 2), (0, 2), "half")]}, r"slices\[0\] is .*'half'.*one of full, causal, inverse"),
    ("slices", {"slices": [((0, 9), (0, 2), 0)]}, r"slices\[0\] has queries up to 9: they must end at 8"),
    ("Limits", {"channels": 3}, "channels is 3: it must be a power of two from 1 to 64, or None"),
    ("Limits", {"channels": 8, "ctas": 4}, "channels is 8; it must be at most ctas, 4"),
    ("Limits", {"cga_cluster_size": 16}, "cga_cluster_size is 16: it must be a power of two from 1 to 8, or None"),
    ("Limits", {"bytes_per_second": 0}, "bytes_per_second is 0: it must be a positive finite number"),
    ("Topology", {"nodes": [[0, True]]}, r"nodes is \[\[0, True\]\]: it must be a list of nodes"),
]

PATTERNS = ("Documents", "BlockMask", "Intervals", "strided", "fixed", "bigbird", "longformer")
NONSENSE = [
    None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 10**5000, 3 + 4j, "x", b"x", [], [[]], {}, object(),
    np.int64(3), np.float32(0.5), np.zeros(2), torch.tensor(3), torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64),
    torch.zeros(2, device="meta"), torch.float64,
]  # fmt: skip


@pytest.mark.parametrize(
    ("door", "change", "message"), [*(("ring_attention", *row) for row in CALLS + EAGER), *REFUSED]
)
def test_refusals(door: str, change: dict[str, Any], message: str) -> None:
    call, fit = DOORS[door]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(**fit | change)


def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> Any:
    return torch.ops.ringattn.ring_attention(q, k, v, *pack_call(AttentionArgs(**call), None, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *CALLS,
        ({"layout": 5}, "layout is '5': it must be a Layout or one of contiguous"),
        ({"cu_seqlens": [[], []]}, r"cu_seqlens is \[0\]: it must have at least one document"),
        ({"cu_seqlens": [0, 7.5, 8]}, "cu_seqlens is torch.float32 .*: it must be an integer tensor"),
        ({"dropout_p": 0.5, "dropout_seed": -3}, "dropout_seed is -3: it must be"),
        ({"alibi_slopes": torch.zeros(4).requires_grad_()}, "alibi_slopes requires a gradient"),
        ({"learnable_sink": torch.zeros(4).to_sparse()}, "learnable_sink is a torch.sparse_coo tensor"),
    ],
)
def test_refusals_through_the_op_of_a_graph(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        op(**DOORS["ring_attention"][1] | change)


# sink_of takes arguments that a call has checked before.
@pytest.mark.parametrize("door", [name for name in DOORS if name not in (*PATTERNS, "check_sink")])
def test_meaningless_values_are_accepted_or_refused_by_argument_name(door: str) -> None:
    call, fit = DOORS[door]
    for name in (name for name in inspect.signature(call).parameters if name != "unknown"):
        for value in NONSENSE:
            try:
                call(**fit | {name: value})
            except (ValueError, NotImplementedError) as error:
                assert re.search(rf"\b{name}\b", str(error)), (name, type(value), str(error))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # raised inside torch's forward_ad
@pytest.mark.parametrize("door", ["ring_attention", "unshard", "relayout", "roll"])
def test_torch_func_transforms_are_refused(door: str) -> None:
    call, fit = DOORS[door]
    name = next(iter(fit))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.sum(call(**fit | {name: x}))

    for transform, x in ((torch.func.grad(loss), WHOLE), (torch.func.vmap(loss), WHOLE[None])):
        with pytest.raises(NotImplementedError, match=f"{door} is called inside a torch.func transform"):
            transform(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dual tensors"):
        make_dual: Any = torch.autograd.forward_ad.make_dual
        loss(make_dual(WHOLE, WHOLE))


def dtensors(rank: int) -> list[str]:
    """Replace every tensor by a DTensor, in eager mode and where a graph ends; return the refused names.

    A graph also finds process groups and meshes again.
    """
    tensor = import_module("torch.distributed.tensor")  # lazily, because importing ringattn must not import it
    mesh = init_device_mesh("cpu", (1,))
    fit, refused = DOORS["ring_attention"][1], []
    rest = {"k": fit["k"], "v": fit["v"], "learnable_sink": torch.zeros(4), "alibi_slopes": torch.zeros(4)}
    calls: list[Any] = [ring_attention, torch.compile(ring_attention, backend="eager")]
    for call in calls:
        for name, x in ({"q": fit["q"]} | (rest if call is ring_attention else {})).items():
            with pytest.raises(ValueError, match=rf"{name} is a DTensor: .*\. Pass {name}.to_local\(\)"):
                call(**fit | {name: tensor.distribute_tensor(x, mesh, [tensor.Replicate()])})
            refused.append(name)
    of_world, of_some = dist.group.WORLD, dist.new_group([0])
    for group, expected in ((None, of_world), (of_world, of_world), (of_some, of_some), (mesh, mesh.get_group())):
        assert unpack_call(pack_call(AttentionArgs(), None, group), torch.device("cpu")).ring.group is expected
    return refused


def test_dtensors_are_refused_with_a_call_to_to_local() -> None:
    assert [len(names) for names in group_results(1, dtensors)] == [6]


def test_interleaved_head_groups_by_the_documented_permutation() -> None:
    """Head h of q reads head ``h % Hkv`` after the permutation that the docstring gives."""
    q, k, v = (torch.randn(2, 8, heads, 16) for heads in (6, 2, 2))
    interleave, restore = (
        lambda x: x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3),
        lambda x: x.unflatten(2, (2, -1)).transpose(2, 3).flatten(2, 3),
    )
    out = restore(ring_attention(interleave(q), k, v, causal=True))
    expected = ring_attention(q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1), causal=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("none", "number"),
    [
        ({"softcap": None}, {"softcap": 0.0}),
        ({"window_size": None}, {"window_size": (-1, -1)}),
        ({"window_size": (None, 2)}, {"window_size": (-1, 2)}),
        ({"window_size": (1, None)}, {"window_size": (1, -1)}),
    ],
)
def test_none_equals_the_number_that_disables_a_feature(none: dict[str, Any], number: dict[str, Any]) -> None:
    fit = {name: torch.randn(x.shape) for name, x in DOORS["ring_attention"][1].items()}
    expected = ring_attention(**fit, **number)  # type: ignore[call-overload]
    assert torch.equal(ring_attention(**fit, **none), expected)  # type: ignore[call-overload]
    assert torch.equal(op(**fit, **none)[0], expected)
    with LocalWorld(2) as world:
        world.run(
            lambda group: ring_attention(  # type: ignore[call-overload]
                **fit, layout="zigzag", group=group, **(number, none)[group.rank()]
            )
        )


UNEVEN = {"layout": Layout.uneven([8, 9])}
EIGHTS = {"block_mask": BlockMask(torch.ones(2, 2).bool(), 8)}
NINE_KEYS = {"layout": Layout.uneven([8, 8]), "align": "top-left", "k": x(9, 2), "v": x(9, 2)}
SHORT = {name: x(9, heads) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
ON_RANKS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # both ranks pass the same wrong arguments
    ({"layout": None}, {"layout": None}, "layout is None with 2 ranks"),
    (UNEVEN, UNEVEN, "q has 8 tokens, but layout has 9 for rank 1"),
    (EIGHTS, EIGHTS, r"layout gives rank 0 the span \(0, 4, 1\): .* whole blocks of 8 positions"),
    ({"group": "both"}, {"group": "both"}, "ring and group are both given"),
    (NINE_KEYS, NINE_KEYS, "k has 9 tokens and q has 8: without kv_layout"),
    # only one rank is wrong, and both get the error
    ({}, {"cu_seqlens": [0, 3]}, "cu_seqlens ends at 3"),
    # the ranks disagree
    ({}, SHORT, "tokens per rank differs between ranks"),
    ({"causal": True}, {}, r"causal differs between ranks \(rank 0: True, rank 1: False\)"),
    ({"backend": "aten"}, {"backend": "triton"}, r"backend differs .*rank 0: 'aten', rank 1: 'triton'"),
    ({}, {"block_mask": longformer(2, [])}, "window_size differs"),
    ({"ring": {"chunks": 2}}, {}, r"chunks differs between ranks \(rank 0: 2, rank 1: None"),
]
"""Arguments of rank 0, arguments of rank 1, and the error that both get."""


def test_all_ranks_get_the_same_error_and_the_ring_stays_usable() -> None:
    fit = DOORS["ring_attention"][1] | {"layout": "zigzag"}

    def refused(group: LocalGroup) -> None:
        for *calls, message in ON_RANKS:
            call = dict(calls[group.rank()])
            with Ring(group, **call.pop("ring", {})) as ring, pytest.raises(ValueError, match=message):
                ring_attention(**fit | call | ({"group": group} if "group" in call else {}), ring=ring)

    run_ranks(2, refused)


def mask_of_keys(*hidden: int) -> torch.Tensor:
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[0, list(hidden)] = False
    return mask


DIAGONAL = torch.eye(4).bool()
TWO_VALUES: dict[str, list[tuple[Any, Any, dict[str, Any]]]] = {
    "layout": [("zigzag", "contiguous", {}), (Layout.uneven([8, 8]), Layout([[(8, 8)], [(0, 8)]]), {})],
    "causal": [(True, False, {})],
    "window_size": [((3, 4), (4, 3), {}), ((3, -1), (3, 0), {})],
    "softmax_scale": [(0.5, 0.25, {})],
    "softcap": [(2.0, 3.0, {})],
    "learnable_sink": [(torch.zeros(4), torch.zeros(4).double(), {})],
    "alibi_slopes": [(torch.ones(4), torch.ones(2, 4), {})],
    "dropout_p": [(0.25, 0.5, {})],
    "dropout_seed": [(5, 6, {"dropout_p": 0.5})],
    "first_head": [(4, 8, {})],
    "cu_seqlens": [([0, 4, 16], [0, 5, 16], {}), ([[0, 16], [0, 4, 16]], [[0, 16], [0, 5, 16]], {})],
    "seqused_k": [([3, 16], [16, 3], {}), ([3, 16], [16, 3], {"key_mask": mask_of_keys(2, 5)})],
    "key_mask": [(mask_of_keys(2, 5), mask_of_keys(3, 5), {})],
    "leftpad_k": [([3, 0], [0, 3], {})],
    "prefix_length": [(3, 4, {"causal": True})],
    "islands": [([(3, 5)], [(3, 6)], {"causal": True})],
    "intervals": [
        (
            [(torch.zeros(16).int(), torch.arange(n, n + 16) // 2)],
            [(torch.zeros(16).int(), torch.arange(n, n + 16) // 3)],
            {},
        )
        for n in (3, 4)
    ],
    "block_mask": [
        (BlockMask(DIAGONAL, 4), BlockMask(DIAGONAL.flip(0), 4), {}),
        (longformer(2, [(0, 1)]), longformer(2, [(1, 2)]), {}),
    ],
    "kv_layout": [("striped", "zigzag", {})],
    "align": [("top-left", "bottom-right", {})],
    "return_max_logits": [(True, False, {})],
    "backend": [("aten", "triton", {})],
}
"""Per argument: rank 0's value, rank 1's value, and arguments that both ranks add."""
OF_TENSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch size": ({}, {name: x(8, heads, batch=1) for name, heads in (("q", 4), ("k", 2), ("v", 2))}),
    "heads": ({}, {name: x(8, 4) for name in "kv"}),
    "head dim": ({}, {"v": x(8, 2, 8)}),
    "dtype": ({}, {name: x(8, heads).half() for name, heads in (("q", 4), ("k", 2), ("v", 2))}),
    "gradient": ({}, {"q": x(8, 4).requires_grad_()}),
    "keys per rank": ({"kv_layout": "zigzag"}, {"kv_layout": "zigzag", "k": x(9, 2), "v": x(9, 2)}),
}
ALWAYS = ("layout", "dropout_seed", "backend")  # other arguments may be given on one rank only
CASES = [
    *((name, {name: mine} | more, {name: its} | more) for name, rows in TWO_VALUES.items() for mine, its, more in rows),
    *((name, {name: rows[0][0]} | rows[0][2], rows[0][2]) for name, rows in TWO_VALUES.items() if name not in ALWAYS),
    *((name, *calls) for name, calls in OF_TENSORS.items()),
    ("heads", {}, {"q": x(8, 8)}),
    ("head dim", {}, {"q": x(8, 4, 8), "k": x(8, 2, 8)}),
    ("gradient", {"learnable_sink": torch.zeros(4)}, {"learnable_sink": torch.zeros(4).requires_grad_()}),
]


@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
def test_differing_arguments_are_refused_on_both_ranks(mesh: tuple[int, int] | None) -> None:
    fit = DOORS["ring_attention"][1] | {"layout": "zigzag"}

    def refused(group: LocalGroup) -> None:
        where: GroupLike = group if mesh is None else group.mesh(*mesh)
        for name, *calls in CASES:
            with pytest.raises(ValueError, match=f"^{name} differs between ranks"):
                ring_attention(**fit | calls[group.rank()], group=where)

    run_ranks(2, refused)
    assert {*TWO_VALUES} == {name for name, entry in ARG_SPECS.items() if entry.compare_mode is not Compare.OWN}
    # a new value of these costs no round trip
    changing = {"dropout_seed", "cu_seqlens", "seqused_k", "key_mask", "leftpad_k", "islands", "intervals"}
    assert changing == {name for name, entry in ARG_SPECS.items() if entry.compare_mode is Compare.CHANGING}


OF_RINGS: dict[str, tuple[Any, Any]] = {
    "transport": ("auto", "local"),
    "wire_dtype": (torch.bfloat16, "float8_e4m3fn"),
    "grad_wire_dtype": (None, "bfloat16"),
    "slots": (3, 4),
    "prefetch": (0, 1),
    "chunks": (1, 2),
    "direction": (1, -1),
    "topology": (Topology.flat(2), Topology(((1, 0),))),
    "limits": (Limits(ctas=2), Limits(ctas=4)),
}


def test_differing_ring_settings_are_refused_on_both_ranks() -> None:
    fit = DOORS["ring_attention"][1] | {"layout": "zigzag"}

    def refused(group: LocalGroup) -> None:
        for name, values in OF_RINGS.items():
            more = {"prefetch": 1} if name == "slots" else {}
            refusal = pytest.raises(ValueError, match=f"^{name} differs between ranks")
            with Ring(group, **{name: values[group.rank()]} | more) as ring, refusal:
                ring_attention(**fit, ring=ring)

    run_ranks(2, refused)
    of_each_rank = {"group", "deadline"}  # a deadline applies to its own rank only
    assert {*OF_RINGS} == {*inspect.signature(Ring).parameters} - of_each_rank


OF_SHARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layout": ({"layout": "zigzag"}, {"layout": "contiguous"}),
    "dim": ({"dim": 1}, {"dim": 2}),
    "shape": ({}, {"x": x(8, 2)}),
    "dtype": ({}, {"x": x(8, 8).half()}),
    "grad": ({"grad": "slice"}, {"grad": "sum"}),
}


@pytest.mark.parametrize("mesh", [None, (1, 2), (2, 1)])
@pytest.mark.parametrize("door", [shard, unshard])
def test_differing_shard_arguments_are_refused_on_both_ranks(
    door: Callable[..., Any], mesh: tuple[int, int] | None
) -> None:
    takes = {*inspect.signature(door).parameters} - {"group"}
    fit = {"x": x(8, 8), "layout": "zigzag"} | ({"grad": "slice"} if door is unshard else {})

    def refused(group: LocalGroup) -> None:
        where: GroupLike = group if mesh is None else group.mesh(*mesh)
        for name in sorted((takes | {"shape", "dtype"}) & {*OF_SHARDS}):
            calls = OF_SHARDS[name]
            for call in (*calls, *calls) if door is shard else ():  # nothing is sent, so only the comparison could fail
                door(**fit | call, group=where)
            if name == "dim" and door is shard:
                door(**fit | {"dim": (1, -3)[group.rank()]}, group=where)
            # a different dim also changes the shape and the layout
            with pytest.raises(ValueError, match=f"^{'(shape|layout)' if name == 'dim' else name} differs"):
                door(**fit | calls[group.rank()], group=where)

    run_ranks(2, refused)
    assert takes - {"x"} <= {*OF_SHARDS}


def test_differing_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfThread:
        def __repr__(self) -> str:
            return threading.current_thread().name

    def refused(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match=r"^torch differs between ranks"):
            ring_attention(**DOORS["ring_attention"][1], layout="zigzag", group=group)

    monkeypatch.setitem(ring_module.VERSIONS, "torch", OfThread())
    run_ranks(2, refused)


@pytest.mark.parametrize("most", [15, 16])
def test_position_limit_counts_the_packed_sequence(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 8 tokens are packed into one sequence of 16."""
    monkeypatch.setattr(prepare_module, "MAX_SCORED_POSITIONS", most)
    with pytest.raises(ValueError, match="reaches position 15: with dropout_p") if most == 15 else nullcontext():
        ring_attention(**DOORS["ring_attention"][1], leftpad_k=[1, 0], dropout_p=0.5)
    with pytest.raises(ValueError, match="reaches position 15: with alibi_slopes") if most == 15 else nullcontext():
        ring_attention(**DOORS["ring_attention"][1], leftpad_k=[1, 0], alibi_slopes=torch.ones(4))


def test_a_ring_refuses_a_second_device() -> None:
    with Ring() as ring:
        ring_attention(**DOORS["ring_attention"][1], ring=ring)
        with pytest.raises(ValueError, match="q is on meta, but this ring works on cpu"):
            ring.open(torch.device("meta"))
    assert call_device(WHOLE.to("meta"), 5, WHOLE).type == "cpu"  # the device whose ring can report the error


def test_recording_ends_with_its_block() -> None:
    with Ring() as ring:
        with pytest.raises(ValueError, match="Make one call with this ring first"), ring.record():
            pass
        ring_attention(**DOORS["ring_attention"][1], ring=ring)
        with ring.record() as trace:
            ring_attention(**DOORS["ring_attention"][1], ring=ring)
        spans = len(trace.spans)
        ring_attention(**DOORS["ring_attention"][1], ring=ring)
        assert len(trace.spans) == spans > 0


def test_autocast_leaves_double_precision_alone() -> None:
    """Like SDPA, refuse float64 instead of casting it."""
    tensors = [torch.ones(1, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.int64)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [x.dtype for x in autocast_inputs(*tensors)] == [torch.float64, torch.bfloat16, torch.int64]
        with pytest.raises(ValueError, match="float64"):
            ring_attention(*[x(8, heads).double() for heads in (4, 2, 2)])  # type: ignore[call-overload]


def prepared(ring: Ring, **arguments: Any) -> Call:
    call = Call(AttentionArgs(**arguments), ring, {})
    prepare_call(call, x(8, 4), x(8, 2), x(8, 2))
    return call


def test_a_call_uses_the_config_with_room_for_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = KernelConfig(TILE, TILE, TILE, persistent=True)
    roomy = replace(given, sm_margin=3)
    asked: list[KernelConfig | None] = []

    def leaving_room(ring: Ring, config: KernelConfig | None) -> KernelConfig:
        asked.append(config)
        return roomy

    monkeypatch.setattr(Ring, "with_sm_margin", leaving_room)
    assert (prepared(Ring(), backend="triton", config=given).config, asked) == (roomy, [given])


def test_kernels_that_are_not_persistent_leave_no_room_for_transfers() -> None:
    ring, plain = Ring(), KernelConfig(TILE, TILE, TILE)
    ring._transports = (Mock(multiprocessors=3),)
    assert ring.with_sm_margin(None) is None and ring.with_sm_margin(plain) is plain


def test_settings_of_the_ring_reach_the_loops() -> None:
    scores = Scores(softcap=2.0)

    def on_rank(group: LocalGroup) -> None:
        for wire in (None, "bfloat16"):
            with Ring(group, prefetch=1, slots=4, wire_dtype=wire, grad_wire_dtype=wire) as ring:
                plan = prepared(ring, layout="contiguous").plan
                assert [ring.transport] == [transport.name for transport in ring._transports]  # opened with the plan
                with ring.call(plan, "backward", x(8, 4), x(8, 2), scores, 2) as call:
                    assert ring._watch is not None and call.on_post == ring._watch.add_post
                    assert (call.plan, call.phase, call.prefetch, call.scores) == (plan, "backward", 1, scores)
                    assert [each and each.name for each in (call.wire, call.grad_wire)] == [wire, wire]
                    assert [heads.kv for heads in call.heads] == [slice(0, 1), slice(1, 2)]
                    counts = 2 * (plan.kv_slots + (wire is not None)), 2 * plan.dkv_slots
                    assert (call.kv_slots.count, call.dkv_slots.count) == counts

    run_ranks(2, on_rank)


def test_direction_slots_and_topology_of_the_ring_reach_the_plan() -> None:
    def visits(group: LocalGroup, **settings: Any) -> tuple[list[int], int]:
        with Ring(group, **settings) as ring:
            plan = prepared(ring, layout="contiguous").plan
            return [hop.shard for hop in plan.hops], plan.slots

    def on_rank(group: LocalGroup) -> None:
        rank, order = group.rank(), Topology(((0, 2, 1),))
        before, after = (rank - 1) % 3, (rank + 1) % 3
        with pytest.raises(ValueError, match="slots is 1: a ring of 3 ranks needs at least 2"):
            Ring(group, slots=1)
        assert visits(group) == ([rank, before, after], 3)
        assert visits(group, direction=-1, slots=2) == ([rank, after, before], 2)
        assert visits(group, topology=order) == ([rank, after, before], 3)

    run_ranks(3, on_rank)
    # nodes of two ranks, which exchange their K/V at once
    assert run_ranks(4, lambda group: Ring(group, topology=Topology.grid(2, 2), slots=1).slots) == [1] * 4


def test_a_closed_ring_is_refused() -> None:
    ring = Ring()
    for _ in range(2):
        ring.close()
    with pytest.raises(ValueError, match="ring is closed"):
        ring_attention(**DOORS["ring_attention"][1], ring=ring)


def test_a_compiled_call_refuses_a_deleted_ring_or_group() -> None:
    calls = {"ring": pack_call(AttentionArgs(), Ring(), None)}
    with LocalWorld(1) as world:
        (calls["group"],) = world.run(lambda group: pack_call(AttentionArgs(), None, group))
    del world
    gc.collect()
    for name, packed in calls.items():
        with pytest.raises(RuntimeError, match=f"{name} of a compiled call was deleted"):
            torch.ops.ringattn.ring_attention(*DOORS["ring_attention"][1].values(), *packed)


def test_leaving_a_ring_by_an_error_ends_the_transfers_of_other_ranks() -> None:
    def fn(group: LocalGroup) -> None:
        raised = TransportError if group.rank() else KeyError
        with pytest.raises(raised, match="out of data"), Ring(group) as ring:
            transport = ring.open_flat(torch.device("cpu"))
            if group.rank() == 0:
                raise KeyError("out of data")
            transport.post(sends=[], receives=[Message(0, torch.empty(4))])
        open_control(group).gather(None, what="the test")

    run_ranks(2, fn)


def test_signature_options_and_op_entries_agree() -> None:
    """Compare the signature with the overloads, the fields' defaults and the op's entries."""
    named = {name: parameter.default for name, parameter in inspect.signature(ring_attention).parameters.items()}
    del named["unknown"]
    others = {name: named.pop(name) for name in ("q", "k", "v", "return_lse", "ring", "group")}
    assert AttentionArgs()._asdict() == named
    # an overload per type of result has this argument
    assert {*Options.__annotations__, "return_max_logits"} == {*named, "ring", "group"} < {*named, *others}
    assert [*ARG_SPECS] == [*named]
    local_vars = named | others
    assert take_args(local_vars)._asdict() == named and not local_vars  # the frame keeps them, and with them tensors


@pytest.mark.parametrize(
    ("name", "suggestion"), [("attn_mask", "block_mask"), ("softmax_scal", "softmax_scale"), ("xyzzy", "'xyzzy'")]
)
def test_unknown_keywords_suggest_our_argument(name: str, suggestion: str) -> None:
    q: Any = torch.randn(1, 8, 2, 16)
    calls: list[Any] = [ring_attention, torch.compile(ring_attention, backend="eager")]
    for call in calls:
        with pytest.raises(TypeError, match=rf"'{name}'.*\b{suggestion}|argument {suggestion}$"):
            call(q, q, q, **{name: None})
    assert name not in inspect.signature(ring_attention).parameters


def test_names_of_other_libraries_suggest_our_argument() -> None:
    others = {
        "is_causal": "causal", "scale sm_scale": "softmax_scale", "process_group": "group", "seqlens_k": "seqused_k",
        "cu_seqlens_q cu_seqlens_k": "cu_seqlens", "dropout": "dropout_p", "window": "window_size",
        "sinks s_aux": "learnable_sink", "logits_soft_cap": "softcap", "attn_bias": "alibi_slopes",
        "return_attn_probs return_softmax_lse": "return_lse", "return_max_logit": "return_max_logits",
        "attention_mask key_padding_mask": "key_mask",
    }  # fmt: skip
    hints = {name: f"Use {ours}" for names, ours in others.items() for name in names.split()}
    hints |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "enable_gqa", "deterministic"), "Omit it, because .*")
    for name, hint in hints.items():
        with pytest.raises(TypeError, match=rf"'{name}'\. {hint}\.$"):
            ring_attention(WHOLE, WHOLE, WHOLE, **{name: None})  # type: ignore[call-overload]
