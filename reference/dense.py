"""Attention as one formula: every score at once, in float64."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .masks import by_batch, pairs
from .scores import Options, by_position, kept, modified
from .tensors import by_head, by_token, check, positions_or_default, scale_or_default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    learnable_sink: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """Softmax attention between any queries and any keys, masked by their global positions.

    ``out = dropout(softmax(score)) v`` over the visible keys with ``score = alibi(softcap(softmax_scale * q k^T))``
    (Vaswani et al. 2017, arXiv:1706.03762, eq. 1) and ``lse = log(sum(exp(score)))``, natural log, before dropout. A
    row that sees no key has ``out = 0``, ``lse = -inf`` and gradients of zero. ``learnable_sink`` ``[H]`` is one more
    logit per row, without a value (G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023,
    arXiv:2309.17453, section 3.3). The masks are those of :class:`.masks.Masks`, what becomes of scores is in
    :class:`.scores.Scores`. Differentiable by autograd, through ``out`` and through ``lse``. Every input must be
    finite: a NaN in ``v`` reaches all rows.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, positions integer ``[Sq]`` and ``[Sk]``
    in any order (default 0, 1, 2, …). H must be a multiple of Hkv; query head h reads key/value head h // (H / Hkv).

    Returns: out ``[B, Sq, H, Dv]`` and lse ``[B, H, Sq]``, both float64 whatever the inputs are (gradients come in the
    inputs' own dtype).

    Raises: ValueError for shapes that do not fit, for anything that depends on positions between different lengths
    without positions, or dropout without a seed.
    """
    check(q, k, v)
    where = positions_or_default(q, k, q_positions, k_positions, needed=by_position(options))
    heads, scale = q.shape[2], scale_or_default(q, options.get("softmax_scale"))
    seen = by_batch(pairs(*where, options))
    scores = modified(scale * by_head(q, heads) @ by_head(k, heads).mT, *where, options).masked_fill(~seen, -torch.inf)
    factors = kept(tuple(scores.shape), *where, options)
    if learnable_sink is not None:  # one more logit that all rows have
        sinks = learnable_sink.to(torch.float64)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    pivot = _finite_maximum(scores.detach())
    weights = torch.exp(scores - pivot)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    # before it divides: a gradient of 0 / 0 would be NaN, even if discarded later
    total = total.masked_fill(empty, 1.0)
    weights = weights[..., : k.shape[1]]
    out = (weights if factors is None else weights * factors) @ by_head(v, heads) / total
    lse = (pivot + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return by_token(out, heads), lse


def _finite_maximum(scores: Tensor) -> Tensor:
    """The largest score of each row, ``[…, 1]``; 0 for a row without any, since ``-inf - -inf`` would be NaN."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    largest = scores.amax(-1, keepdim=True)
    return largest.masked_fill(largest == -torch.inf, 0.0)
