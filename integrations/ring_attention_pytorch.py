"""Functions of lucidrains' ring-attention-pytorch on top of ``ringattn.ring_attention``.

Only the import changes: ``from ringattn.integrations.ring_attention_pytorch import ...``. Names, argument order,
layouts and head order are those of ring_attention_pytorch 0.5.20, which need not be installed. To change its modules,
set ``use_cuda_kernel=False`` and assign ``ring_attention_pytorch.ring_attention.ring_flash_attn = ring_flash_attn``.

- Heads: query head h reads key head ``h % Hkv``. In ``ring_attention`` query head h reads ``h // (H // Hkv)``.
- Tokens: rank r of P holds run r of P. With ``striped_ring_attn`` there are J buckets of ``bucket_size`` tokens.
  Bucket j holds the tokens j, j + J, j + 2J, ..., and rank r holds the buckets r J / P to (r + 1) J / P - 1 in order.
  ``ring_flash_attn_cuda`` has one bucket per rank.
- ``max_lookback_seq_len`` is a window of that many tokens before the query. The original rounds it to whole buckets
  and ring passes.
- ``mask`` and ``causal`` can be combined. The original ignores ``mask`` with ``causal``.
- Gradients are correct here. The original's modules with ``auto_shard_seq`` still have wrong gradients over several
  ranks, because the backward of their ``AllGatherAttention`` lacks an all-reduce.
"""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import Layout, merge, ring_attention, single_rank, unshard
from ..comm import GroupLike, group_rank_size
from . import unit_stride


def ring_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    bucket_size: int = 1024,
    ring_reduce_col: bool = False,
    striped_ring_attn: bool = False,
    max_lookback_seq_len: int | None = None,
    ring_size: int | None = None,
    softclamp_qk_sim: bool = False,
    softclamp_value: float = 50.0,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Compute attention of ``q [B, S, H, D]`` over ``k`` and ``v`` ``[B, S, Hkv, D]``, of all ranks in a ring.

    With ``ring_reduce_col`` the ranks share a sequence, otherwise each rank attends to its own. ``mask`` is bool
    ``[B, S]`` of this rank's keys, and False hides a key. All ranks' masks are gathered to the host, which waits.
    ``bucket_size`` has no effect without ``striped_ring_attn``. ``ring_size`` neighbouring ranks of the default process
    group share a sequence; alternatively ``group`` has the ranks of one ring.

    Raises:
        ValueError: An argument has a wrong value, or q and k differ in length with ``causal`` or in a ring.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    tokens, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    if tokens != keys and (causal or ring_reduce_col):
        raise ValueError(
            f"q has {tokens} tokens and k has {keys} with causal={causal} and ring_reduce_col={ring_reduce_col}: they "
            "must be equal. For other lengths call ringattn.ring_attention with kv_layout= and align=."
        )
    if max_lookback_seq_len is not None and not causal:
        raise ValueError(f"max_lookback_seq_len is {max_lookback_seq_len} without causal; pass causal=True")
    if max_lookback_seq_len == -1:
        raise ValueError("max_lookback_seq_len is -1: it must be an integer of at least 0, or None for all tokens")
    if softclamp_qk_sim and not softclamp_value:
        raise ValueError(f"softclamp_value is {softclamp_value}: with softclamp_qk_sim it must be above 0")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        got = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask is {got}: it must be torch.bool of shape {list(k.shape[:2])}, True for real keys")
    members = _members(ring_size, group) if ring_reduce_col else single_rank()
    world = group_rank_size(members)[1]
    layout, buckets = Layout.contiguous(world * tokens, world), 1
    if striped_ring_attn and tokens == keys:  # otherwise there is neither a ring nor a causal mask
        size = min(keys, bucket_size or 0)
        if size < 1 or keys % size:
            raise ValueError(f"bucket_size is {bucket_size}: with striped_ring_attn it must divide the {keys} tokens")
        buckets = keys // size
        layout = _stripes(size, buckets, world)
    key_layout = layout if tokens == keys else Layout.contiguous(keys, 1)
    if mask is not None:  # gather the keys of all ranks in order of position
        mask = _swap_runs(mask.to(torch.uint8), 1, buckets)
        mask = unshard(mask, layout=key_layout, group=members, grad="slice").bool().cpu()
    out = ring_attention(
        _swap_runs(_swap_runs(q, 1, buckets), 2, q.shape[2] // max(kv_heads, 1)),
        _swap_runs(k, 1, buckets),
        _swap_runs(v, 1, buckets),
        layout=layout,
        kv_layout=key_layout,
        group=members,
        causal=causal,
        key_mask=mask,
        window_size=(-1 if max_lookback_seq_len is None else max_lookback_seq_len, -1),
        softcap=softclamp_value if softclamp_qk_sim else 0.0,
    )
    return _swap_runs(_swap_runs(out, 2, kv_heads), 1, tokens // buckets)


@wraps(ring_flash_attn, assigned=())
def ring_flash_attn_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, bucket_size: int = 1024,
    *arguments: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """Call :func:`ring_flash_attn` with one bucket per rank, on any device; ``bucket_size`` has no effect."""
    return ring_flash_attn(q, k, v, mask, causal, k.shape[1], *arguments, **options)


def zig_zag_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    group: GroupLike = None,
) -> Tensor:
    """Compute attention of ``[B, H, S, D]`` sharded by ``zig_zag_shard``, which gives rank r runs r and 2P - 1 - r.

    K/V move around the ring. The original gathers them.

    Raises:
        ValueError: The number of tokens is odd; ``zig_zag_pad_seq`` pads.
        NotImplementedError: ``attn_mask`` is given; pass ``causal`` instead.
    """
    if attn_mask is not None:
        raise NotImplementedError("attn_mask is given; pass causal=True for the positions of zig_zag_shard")
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    if q.shape[2] % 2 and group_rank_size(group)[1] > 1:
        raise ValueError(f"q has {q.shape[2]} tokens: zigzag needs an even number per rank")
    grouped = _swap_runs(q.transpose(1, 2), 2, q.shape[1] // max(k.shape[1], 1))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = ring_attention(grouped, k, v, layout="zigzag", group=group, causal=causal, dropout_p=dropout)
    return _swap_runs(out, 2, k.shape[2]).transpose(1, 2)


@torch.no_grad()
def tree_attn_decode(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    eps: float = 1e-8,
    shard_kv_seq: bool = True,
    use_triton: bool | None = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Compute attention of decoding: queries ``[B, H, S, D]`` that are equal on all ranks over all ranks' keys.

    Each rank attends to its own keys, then the ranks merge their results (Tree Attention, arXiv:2408.04093,
    algorithm 3). The function has no gradient.

    With ``shard_kv_seq`` ``k`` and ``v`` ``[B, H, N, D]`` are equal on all ranks, and each rank takes its part.
    Otherwise they are this rank's part, or None. ``eps`` has no effect, because it clamps a denominator that is never
    below 1. ``use_triton`` is None for the kernels of the device, True for Triton, or False for ATen.

    Raises:
        ValueError: Only one of ``k`` and ``v`` is given, or neither with ``shard_kv_seq``, or q and k differ in heads.
    """
    if (k is None) != (v is None) or (k is None and shard_kv_seq):
        types = f"k is {type(k).__name__} and v is {type(v).__name__} with shard_kv_seq={shard_kv_seq}"
        raise ValueError(f"{types}. Pass both tensors, or None for both with shard_kv_seq=False.")
    rank, size = group_rank_size(group)
    keys, values = (q[:, :, :0] if x is None else x for x in (k, v))
    if keys.shape[1] != q.shape[1]:
        raise ValueError(f"k has {keys.shape[1]} heads and q has {q.shape[1]}: they must be equal")
    if shard_kv_seq:
        keys, values = (x.tensor_split(size, 2)[rank] for x in (keys, values))
    out, lse = ring_attention(
        *(unit_stride(x).transpose(1, 2) for x in (q, keys, values)),
        layout=Layout.contiguous(q.shape[2], 1),
        kv_layout=Layout.contiguous(keys.shape[2], 1),
        group=single_rank(),
        return_lse=True,
        backend={None: "auto", True: "triton", False: "aten"}[use_triton],
    )
    outs, lses = (
        unshard(x, layout="contiguous", group=group, dim=dim, grad="slice").chunk(size, dim)
        for x, dim in ((out, 1), (lse, 2))
    )
    return merge(outs, lses)[0].transpose(1, 2)


def _members(ring_size: int | None, group: GroupLike) -> GroupLike:
    """Return the group of this rank's ring: ``ring_size`` neighbours of the default group, or ``group`` itself."""
    rank, size = group_rank_size(group)
    if ring_size is None or ring_size == size:
        return group
    if group is not None:
        raise ValueError(
            f"ring_size is {ring_size} and group has {size} ranks. Pass the group of one ring, without ring_size."
        )
    if ring_size < 1 or size % ring_size:
        raise ValueError(f"ring_size is {ring_size}: it must divide {size}, the number of ranks")
    return _neighbours(rank - rank % ring_size, ring_size, dist.group.WORLD)


@lru_cache
def _neighbours(first: int, ring_size: int, world: object) -> dist.ProcessGroup:
    """Return the process group of ``ring_size`` ranks from ``first`` on; cached per default group ``world``."""
    ring: dist.ProcessGroup = dist.new_group([*range(first, first + ring_size)], use_local_synchronization=True)
    return ring


@lru_cache
def _stripes(bucket_size: int, buckets: int, world: int) -> Layout:
    """Return the layout in which a rank holds ``buckets`` adjacent tokens of each of ``bucket_size`` rounds."""
    if buckets == 1:
        return Layout.striped(bucket_size * world, world)
    rounds = range(bucket_size)
    return Layout([(buckets * (world * i + rank), buckets) for i in rounds] for rank in range(world))


def _swap_runs(x: Tensor, dim: int, groups: int) -> Tensor:
    """Split ``dim`` into ``groups`` equal runs and interleave them: the first elements of all runs, then the second.

    Return ``x`` itself if there is nothing to reorder, or if ``groups`` does not divide the dimension.
    """
    if groups in (1, x.shape[dim]) or groups < 1 or x.shape[dim] % groups:
        return x  # nothing to swap, or the heads do not fit, which ring_attention reports
    shape = *x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :]
    return x.reshape(shape).transpose(dim, dim + 1).flatten(dim, dim + 1)
