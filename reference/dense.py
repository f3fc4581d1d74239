"""Dense attention in float64: all scores at once."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .masks import by_batch, pairs
from .scores import Options, by_position, kept, modified
from .tensors import by_head, by_token, check, positions_or_default, scale_or_default


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    learnable_sink: Tensor | None = None, q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax attention between queries and keys, masked by their global positions.

    ``out = dropout(softmax(score)) v`` over the visible keys, where ``score = alibi(softcap(softmax_scale * q k^T))``
    (Vaswani et al. 2017, arXiv:1706.03762, eq. 1). ``lse = log(sum(exp(score)))`` is a natural log and does not depend
    on dropout. A row that sees no key has ``out = 0``, ``lse = -inf`` and zero gradients. Autograd differentiates
    through ``out`` and ``lse``. Every input must be finite, because a NaN in ``v`` reaches all rows.

    Args:
        q: Queries ``[B, Sq, H, D]``.
        k: Keys ``[B, Sk, Hkv, D]``. H must be a multiple of Hkv; query head h reads key head ``h // (H / Hkv)``.
        v: Values ``[B, Sk, Hkv, Dv]``.
        learnable_sink: One more logit per row without a value, ``[H]`` (G. Xiao et al., "Efficient Streaming Language
            Models with Attention Sinks", 2023, arXiv:2309.17453, section 3.3).
        q_positions: Integer positions ``[Sq]`` in any order. Default: 0, 1, 2, …
        k_positions: Integer positions ``[Sk]`` in any order. Default: 0, 1, 2, …
        **options: Arguments of :class:`.masks.Masks` and :class:`.scores.Scores`.

    Returns:
        out ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``, both float64. Gradients have the dtype of the inputs.

    Raises:
        ValueError: If shapes do not fit, if positions are needed and missing, or if dropout has no seed.
    """
    check(q, k, v)
    positions = positions_or_default(q, k, q_positions, k_positions, needed=by_position(options))
    heads, scale = q.shape[2], scale_or_default(q, options.get("softmax_scale"))
    visible = by_batch(pairs(*positions, options))
    scores = modified(scale * by_head(q, heads) @ by_head(k, heads).mT, *positions, options)
    scores = scores.masked_fill(~visible, -torch.inf)
    factors = kept(tuple(scores.shape), *positions, options)
    if learnable_sink is not None:
        sinks = learnable_sink.to(torch.float64)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    pivot = _finite_maximum(scores.detach())
    weights = torch.exp(scores - pivot)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    # Replace 0 before the division: the gradient of 0 / 0 is NaN, even if the result is discarded later.
    total = total.masked_fill(empty, 1.0)
    weights = weights[..., : k.shape[1]]
    out = (weights if factors is None else weights * factors) @ by_head(v, heads) / total
    lse = (pivot + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return by_token(out, heads), lse


def _finite_maximum(scores: Tensor) -> Tensor:
    """Return the largest score of each row, ``[…, 1]``; 0 for a row without visible keys, to avoid ``inf - inf``."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    largest = scores.amax(-1, keepdim=True)
    return largest.masked_fill(largest == -torch.inf, 0.0)
