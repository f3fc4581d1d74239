"""Attention as one formula: every score at once, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import predicates, visible
from .tensors import by_head, by_token, check, positions_or_default, scale_or_default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention between any queries and any keys, masked by their global positions.

    ``out = softmax(softmax_scale * q k^T) v`` over the visible keys (Vaswani et al. 2017, arXiv:1706.03762, eq. 1) and
    ``lse = log(sum(exp(softmax_scale * q k^T)))``, natural log. A row that sees no key has ``out = 0``,
    ``lse = -inf`` and gradients of zero. Differentiable by autograd, through ``out`` and through ``lse``. Every
    input must be finite: a NaN in ``v`` reaches all rows.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, positions integer ``[Sq]`` and ``[Sk]``
    in any order (default 0, 1, 2, …). H must be a multiple of Hkv; query head h reads key/value head h // (H / Hkv).
    ``softmax_scale`` defaults to 1 / sqrt(D).

    Returns: out ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``, both float64 whatever the inputs are (gradients come in the
    inputs' own dtype).

    Raises: ValueError for shapes that do not fit, or a mask between different lengths without positions.
    """
    check(q, k, v)
    masked = bool(predicates(causal=causal))
    q_positions, k_positions = positions_or_default(q, k, q_positions, k_positions, masked=masked)
    heads = q.shape[2]
    seen = visible(q_positions, k_positions, causal=causal)
    scores = by_head(q, heads) @ by_head(k, heads).transpose(2, 3) * scale_or_default(q, softmax_scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    pivot = _finite_maximum(scores.detach())
    weights = torch.exp(scores - pivot)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(
        empty, 1.0
    )  # before it divides: a gradient of 0 / 0 would be NaN, even if discarded later
    out = weights @ by_head(v, heads) / total
    lse = (pivot + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return by_token(out, heads), lse


def _finite_maximum(scores: Tensor) -> Tensor:
    """The largest score of each row, ``[…, 1]``; 0 for a row without any, since ``-inf - -inf`` would be NaN."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    largest = scores.amax(-1, keepdim=True)
    return largest.masked_fill(largest == -torch.inf, 0.0)
