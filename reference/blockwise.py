"""Attention tile by tile with an online softmax, and its gradient, as FlashAttention-2 writes them.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv:2307.08691:
Algorithm 1 (forward) and Algorithm 2 (backward). The recurrence is M. Milakov and N. Gimelshein's, "Online normalizer
calculation for softmax", 2018, arXiv:1805.02867, Algorithm 3. The papers have no mask, no scale and no gradient of the
log-sum-exp; what these add is said where it is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import predicates, visible
from .tensors import by_head, by_token, check, positions_or_default, scale_or_default


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    block_q: int = 16,
    block_k: int = 16,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`..reference.attention`, same arguments and errors, one tile at a time.

    Algorithm 1: for each block of queries, over the blocks of keys, ``m' = max(m, rowmax(S))``, ``P = exp(S - m')``,
    ``l = exp(m - m') l + rowsum(P)``, ``O = exp(m - m') O + P V``; at the end ``O / l`` and ``L = m + log(l)``.
    """
    check(q, k, v)
    masked = bool(predicates(causal=causal))
    q_positions, k_positions = positions_or_default(q, k, q_positions, k_positions, masked=masked)
    heads, scale = q.shape[2], scale_or_default(q, softmax_scale)
    queries, keys, values = (by_head(x, heads) for x in (q, k, v))
    out = queries.new_empty((*queries.shape[:3], values.shape[3]))
    lse = queries.new_empty(queries.shape[:3])
    for i in _blocks(q.shape[1], block_q):
        o = torch.zeros_like(out[:, :, i])
        total = torch.zeros_like(lse[:, :, i])
        m = torch.full_like(total, -torch.inf)
        for j in _blocks(k.shape[1], block_k):
            seen = visible(q_positions[i], k_positions[j], causal=causal)
            scores = (scale * queries[:, :, i] @ keys[:, :, j].mT).masked_fill(~seen, -torch.inf)
            o, total, m = _fold(o, total, m, scores, values[:, :, j])
        # added: a row that saw nothing has l = 0, and stays at O = 0
        out[:, :, i] = o / total.masked_fill(total == 0, 1.0)[..., None]
        lse[:, :, i] = m + total.log()
    return by_token(out, heads), lse


def _fold(o: Tensor, total: Tensor, m: Tensor, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One turn of Algorithm 1's inner loop: fold a block of keys into (O, l, m)."""
    m_new = torch.maximum(m, scores.amax(-1))
    # added: the pivot stays finite, since a row that has seen nothing would give -inf - -inf
    pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
    weights = torch.exp(scores - pivot[..., None])
    decay = torch.exp(m - pivot)
    return decay[..., None] * o + weights @ values, decay * total + weights.sum(-1), m_new


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    block_q: int = 16,
    block_k: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float64 from ``dout`` (shape of ``out``) and ``dlse`` (shape of ``lse``, default zero).

    Algorithm 2, over blocks of keys, then of queries; the tile is :func:`tile_gradients`. Arguments and errors as
    :func:`forward`; ``out`` and ``lse`` are its results.
    """
    check(q, k, v)
    masked = bool(predicates(causal=causal))
    q_positions, k_positions = positions_or_default(q, k, q_positions, k_positions, masked=masked)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
    delta = row_delta(dout, out, dlse)
    for j in _blocks(k.shape[1], block_k):
        for i in _blocks(q.shape[1], block_q):
            seen = visible(q_positions[i], k_positions[j], causal=causal)
            scale = scale_or_default(q, softmax_scale)
            parts = tile_gradients(
                dout[:, i], q[:, i], k[:, j], v[:, j], lse[:, :, i], delta[:, :, i], seen=seen, scale=scale
            )
            dq[:, i] += parts[0]
            dk[:, j] += parts[1]
            dv[:, j] += parts[2]
    return dq, dk, dv


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """``D = rowsum(dO * O)`` (Algorithm 2), ``[B, H, S]``; added: ``- dL``, as ``L`` moves with S as ``P`` does."""
    delta = (dout.to(torch.float64) * out.to(torch.float64)).sum(-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse.to(torch.float64)


def tile_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile of queries and keys adds to (dq, dk, dv), float64.

    Algorithm 2's inner loop: ``P = exp(S - L)``, ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P * (dP - D)``,
    ``dQ = dS K``, ``dK = dS^T Q``; added: the mask ``seen`` ``[Sq, Sk]`` and the factor ``scale`` of S.
    """
    heads = q.shape[2]
    queries, keys, values, grads = (by_head(x, heads) for x in (q, k, v, dout))
    weights = torch.exp(scale * queries @ keys.mT - lse[..., None]).masked_fill(~seen, 0.0)
    dscores = scale * weights * (grads @ values.mT - delta[..., None])
    dq, dk, dv = dscores @ keys, dscores.mT @ queries, weights.mT @ grads
    return by_token(dq, heads), by_token(dk, k.shape[2]), by_token(dv, k.shape[2])


def _blocks(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
