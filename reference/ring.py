"""A ring of ranks in one process: keys and values travel, hop by hop, and partial results are merged.

H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
arXiv:2310.01889, Algorithm 1: every host keeps its queries, and passes its key-value block on to the next host while it
computes with it. The lists that these functions take and return have one entry per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from .blockwise import row_delta, tile_gradients
from .dense import attention
from .masks import pairs
from .scores import Options
from .tensors import check, scale_or_default


@dataclass
class _Traveller:
    """A shard of keys and values on its way round, with the gradients that it has collected so far."""

    k: Tensor
    v: Tensor
    positions: Tensor
    dk: Tensor
    dv: Tensor


def forward(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    q_positions: Sequence[Tensor],
    k_positions: Sequence[Tensor] | None = None,
    learnable_sink: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor]]:
    """(out, lse) per rank; arguments per rank as :func:`..reference.attention`, the positions in any order.

    ``k_positions`` defaults to ``q_positions``. Shards may have any lengths, none included. Raises: ValueError.
    """
    outs = [x.new_zeros((*x.shape[:3], y.shape[3]), dtype=torch.float64) for x, y in zip(q, v, strict=True)]
    lses = [x.new_full((x.shape[0], x.shape[2], x.shape[1]), -torch.inf, dtype=torch.float64) for x in q]
    if learnable_sink is not None:  # the state before any key, as in FlashAttention-2's loop
        lses = [learnable_sink.to(torch.float64)[None, :, None].expand_as(lse) for lse in lses]
    held = _depart(q, k, v, q_positions, k_positions)
    for _hop in range(len(q)):
        for rank, shard in enumerate(held):
            partial = attention(
                q[rank],
                shard.k,
                shard.v,
                q_positions=q_positions[rank],
                k_positions=shard.positions,
                **options,
            )
            outs[rank], lses[rank] = merge((outs[rank], lses[rank]), partial)
        held = _pass_on(held)
    return outs, lses


def backward(
    dout: Sequence[Tensor],
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    out: Sequence[Tensor],
    lse: Sequence[Tensor],
    *,
    q_positions: Sequence[Tensor],
    k_positions: Sequence[Tensor] | None = None,
    dlse: Sequence[Tensor] | None = None,
    **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(dq, dk, dv) per rank, float64, from the global ``out`` and ``lse`` of :func:`forward`.

    dk and dv travel with their shard and are home after one full turn. Raises: ValueError.
    """
    dq = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in q]
    delta = [row_delta(dout[r], out[r], None if dlse is None else dlse[r]) for r in range(len(q))]
    held = _depart(q, k, v, q_positions, k_positions)
    for _hop in range(len(q)):
        for rank, shard in enumerate(held):
            where = q_positions[rank], shard.positions
            seen, scale = pairs(*where, options), scale_or_default(q[rank], options.get("softmax_scale"))
            tile = (dout[rank], q[rank], shard.k, shard.v, lse[rank], delta[rank])
            parts = tile_gradients(*tile, seen=seen, scale=scale, positions=where, options=options)
            dq[rank] += parts[0]
            shard.dk += parts[1]
            shard.dv += parts[2]
        held = _pass_on(held)
    return dq, [shard.dk for shard in held], [shard.dv for shard in held]


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The (out, lse) of attention over two disjoint sets of keys, from the two (out, lse).

    ``lse = log(exp(lse_1) + exp(lse_2))``, ``out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2``: the sum of two
    softmax numerators over the sum of their denominators (M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2)
    Memory", 2021, arXiv:2112.05682, section 2). Rows that neither saw keep ``out = 0``, ``lse = -inf``.
    """
    lse = torch.logaddexp(one[1], other[1])
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)
    share = [torch.exp(part[1] - pivot).transpose(1, 2)[..., None] for part in (one, other)]
    return share[0] * one[0] + share[1] * other[0], lse


def _depart(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    q_positions: Sequence[Tensor],
    k_positions: Sequence[Tensor] | None,
) -> list[_Traveller]:
    """Hop 0: every rank holds its own shard."""
    key_positions = q_positions if k_positions is None else k_positions
    travellers = []
    for rank, (keys, values, positions) in enumerate(zip(k, v, key_positions, strict=True)):
        check(q[rank], keys, values)
        if len(positions) != keys.shape[1] or len(q_positions[rank]) != q[rank].shape[1]:
            raise ValueError(
                f"rank {rank} has positions for {len(q_positions[rank])} queries and {len(positions)} keys"
            )
        dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (keys, values))
        travellers.append(_Traveller(keys, values, positions, dk, dv))
    return travellers


def _pass_on(held: list[_Traveller]) -> list[_Traveller]:
    """Every rank gives what it holds to the next: rank r now holds what rank r - 1 held."""
    return held[-1:] + held[:-1]
