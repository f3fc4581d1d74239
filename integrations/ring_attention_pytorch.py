"""lucidrains' ring-attention-pytorch by its own names, on ``ringattn.ring_attention``.

``from ringattn.integrations.ring_attention_pytorch import ring_flash_attn`` is the one line to change: names, argument
order, layouts and the order of heads are those of ring_attention_pytorch 0.5.20, which need not be installed. Its
modules look the function up where they are, so that with ``use_cuda_kernel=False`` the line is
``ring_attention_pytorch.ring_attention.ring_flash_attn = ring_flash_attn``.

- Heads: query head h reads key head ``h % Hkv``; in ``ring_attention`` it reads ``h // (H // Hkv)``.
- Tokens: rank r of P holds run r of P. With ``striped_ring_attn`` bucket j of all J, ``bucket_size`` tokens each, holds
  the tokens j, j + J, j + 2J, ..., and rank r the buckets r J / P to (r + 1) J / P - 1, one after the other;
  ``ring_flash_attn_cuda`` has one bucket per rank.
- ``max_lookback_seq_len`` is a window of that many tokens behind the query. Theirs counts whole buckets, those of
  stripes too, and ends where a number of ring passes does.
- ``mask`` holds with ``causal`` too, where theirs drops it.
- This function's gradients are right; those of its modules with ``auto_shard_seq`` stay wrong over several ranks, since
  the backward of its ``AllGather`` lacks an all-reduce.
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
    """Attention of ``[B, S, H, D]`` over keys ``[B, S, Hkv, D]``, of all ranks with ``ring_reduce_col``.

    Args:
        mask: bool ``[B, S]`` of this rank's keys; False: there is no key. Gathered to the host, which waits for it.
        bucket_size: of stripes; else it is how theirs cuts its work, and changes nothing.
        ring_reduce_col: whether the ranks share a sequence.
        ring_size: so many neighbours share one, all of the group by default.
        group: the ranks, in place of the default group; of one ring.

    Raises:
        ValueError: ``max_lookback_seq_len`` without ``causal`` or below 0; ``softclamp_qk_sim`` and no
            ``softclamp_value``; a ``mask`` that is not bool or not of these keys; stripes that ``bucket_size`` does not
            divide; ``ring_size`` that does not divide the ranks; queries and keys that are not as many, with ``causal``
            or over a ring; or as :func:`ringattn.ring_attention`.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    tokens, keys, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    if tokens != keys and (causal or ring_reduce_col):
        raise ValueError(
            f"q has {tokens} tokens, k has {keys}, with causal={causal} and ring_reduce_col={ring_reduce_col}: "
            "their forward and backward disagree there; ringattn.ring_attention takes kv_layout= and align="
        )
    if max_lookback_seq_len is not None and not causal:
        raise ValueError(f"max_lookback_seq_len is {max_lookback_seq_len} without causal: it looks behind the query")
    if max_lookback_seq_len == -1:
        raise ValueError("max_lookback_seq_len is -1: it must be a whole number from 0, or None: all of them")
    if softclamp_qk_sim and not softclamp_value:
        raise ValueError(f"softclamp_value is {softclamp_value}: with softclamp_qk_sim it must be above 0")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != k.shape[:2]):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask is {got}: it must be torch.bool {list(k.shape[:2])}, True where there is a key")
    members = _members(ring_size, group) if ring_reduce_col else single_rank()
    world = group_rank_size(members)[1]
    layout, buckets = Layout.contiguous(world * tokens, world), 1
    if striped_ring_attn:
        size = min(keys, bucket_size or 0)
        if size < 1 or keys % size:
            raise ValueError(f"bucket_size is {bucket_size}: with striped_ring_attn it must divide the {keys} tokens")
        buckets = keys // size
        layout = _stripes(size, buckets, world)
    key_layout = layout if tokens == keys else Layout.contiguous(keys, 1)
    if mask is not None:  # of all ranks by position, on the CPU: the host waits for them
        mask = _swapped(mask.to(torch.uint8), 1, buckets)
        mask = unshard(mask, layout=key_layout, group=members, grad="slice").bool().cpu()
    out = ring_attention(
        _swapped(_swapped(q, 1, buckets), 2, q.shape[2] // max(kv_heads, 1)),
        _swapped(k, 1, buckets),
        _swapped(v, 1, buckets),
        layout=layout,
        kv_layout=key_layout,
        group=members,
        causal=causal,
        key_mask=mask,
        window_size=(-1 if max_lookback_seq_len is None else max_lookback_seq_len, -1),
        softcap=softclamp_value if softclamp_qk_sim else 0.0,
    )
    return _swapped(_swapped(out, 2, kv_heads), 1, tokens // buckets)


@wraps(ring_flash_attn, assigned=())
def ring_flash_attn_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, bucket_size: int = 1024,
    *arguments: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """:func:`ring_flash_attn`, on any device, with one bucket per rank, whatever ``bucket_size``: plain stripes."""
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
    """Of ``[B, H, S, D]`` sharded by ``zig_zag_shard``: runs r and 2P - 1 - r of 2P; keys travel, none are gathered.

    Raises:
        ValueError: an odd number of tokens, which no two equal runs have (``zig_zag_pad_seq`` pads).
        NotImplementedError: ``attn_mask``, in whose place there is ``causal``.
    """
    if attn_mask is not None:
        raise NotImplementedError("attn_mask is given: pass causal=True for the positions of zig_zag_shard")
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    if q.shape[2] % 2 and group_rank_size(group)[1] > 1:
        raise ValueError(f"q has {q.shape[2]} tokens: a zigzag has two equal runs of them")
    grouped = _swapped(q.transpose(1, 2), 2, q.shape[1] // max(k.shape[1], 1))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = ring_attention(grouped, k, v, layout="zigzag", group=group, causal=causal, dropout_p=dropout)
    return _swapped(out, 2, k.shape[2]).transpose(1, 2)


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
    """Decoding: ``[B, H, S, D]``, the same on every rank, over the keys ``[B, H, N, D]`` of all; without a gradient.

    Each rank attends to its own keys, and the ranks exchange results (Tree Attention, arXiv:2408.04093, algorithm 3).

    Args:
        k, v: with ``shard_kv_seq`` all keys, the same on every rank, which takes its part; else this rank's, None where
            it has none.
        eps: least denominator in theirs, whose own is 1 or more: it changes nothing.
        use_triton: None: the kernels for the device; False: those of a CPU.

    Raises:
        ValueError: one of k and v is None, or both with ``shard_kv_seq``; other numbers of heads than q's, which theirs
            refuses too; or as :func:`ringattn.ring_attention`.
    """
    if (k is None) != (v is None) or (k is None and shard_kv_seq):
        kinds = f"k is {type(k).__name__}, v is {type(v).__name__}, with shard_kv_seq={shard_kv_seq}"
        raise ValueError(f"{kinds}: pass both, or neither with shard_kv_seq=False")
    rank, size = group_rank_size(group)
    keys, values = (q[:, :, :0] if x is None else x for x in (k, v))
    if keys.shape[1] != q.shape[1]:
        raise ValueError(f"k has {keys.shape[1]} heads, q has {q.shape[1]}: they must be as many")
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
    """The ranks of one ring."""
    rank, size = group_rank_size(group)
    if ring_size is None or ring_size == size:
        return group
    if group is not None:
        raise ValueError(f"ring_size is {ring_size}, group has {size} ranks: pass the group of one ring")
    if ring_size < 1 or size % ring_size:
        raise ValueError(f"ring_size is {ring_size}: it must divide the {size} ranks")
    return _neighbours(rank - rank % ring_size, ring_size, dist.group.WORLD)


@lru_cache
def _neighbours(first: int, ring_size: int, world: object) -> dist.ProcessGroup:
    """Made once for a default group, by the ranks that are in it alone."""
    made: dist.ProcessGroup = dist.new_group([*range(first, first + ring_size)], use_local_synchronization=True)
    return made


@lru_cache
def _stripes(bucket_size: int, buckets: int, world: int) -> Layout:
    """Of every rank, by position: ``buckets`` neighbours in each of ``bucket_size`` rounds over all buckets."""
    if buckets == 1:
        return Layout.striped(bucket_size * world, world)
    rounds = range(bucket_size)
    return Layout([(buckets * (world * i + rank), buckets) for i in rounds] for rank in range(world))


def _swapped(x: Tensor, dim: int, groups: int) -> Tensor:
    """``groups`` runs along ``dim``, the first of each, then the second of each, and so on."""
    if groups in (1, x.shape[dim]) or groups < 1 or x.shape[dim] % groups:
        return x  # nothing to swap, or heads that do not fit: the call names them
    shape = *x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :]
    return x.reshape(shape).transpose(dim, dim + 1).flatten(dim, dim + 1)
