"""Dense attention in float64: all scores at once."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .masks import add_head_dim, evaluate_masks
from .scores import AttentionOptions, apply_score_options, dropout_factors, uses_positions
from .tensors import check_attention_shapes, positions_or_default, scale_or_default, to_head_layout, to_token_layout


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    learnable_sink: Tensor | None = None, q_positions: Tensor | None = None, k_positions: Tensor | None = None,
    **options: Unpack[AttentionOptions],
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
        **options: Arguments of :class:`.masks.MaskOptions` and :class:`.scores.ScoreOptions`.

    Returns:
        out ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``, both float64. Gradients have the dtype of the inputs.

    Raises:
        ValueError: If shapes do not fit, if positions are needed and missing, or if dropout has no seed.
    """
    check_attention_shapes(q, k, v)
    positions = positions_or_default(q, k, q_positions, k_positions, is_needed=uses_positions(options))
    heads, scale = q.shape[2], scale_or_default(q, options.get("softmax_scale"))
    visible = add_head_dim(evaluate_masks(*positions, options))
    scores = apply_score_options(scale * to_head_layout(q, heads) @ to_head_layout(k, heads).mT, *positions, options)
    scores = scores.masked_fill(~visible, -torch.inf)
    factors = dropout_factors(tuple(scores.shape), *positions, options)
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
    out = (weights if factors is None else weights * factors) @ to_head_layout(v, heads) / total
    lse = (pivot + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return to_token_layout(out, heads), lse


def _finite_maximum(scores: Tensor) -> Tensor:
    """Return the largest score of each row, ``[…, 1]``; 0 for a row without visible keys, to avoid ``inf - inf``."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    largest = scores.amax(-1, keepdim=True)
    return largest.masked_fill(largest == -torch.inf, 0.0)
