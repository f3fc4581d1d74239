"""Attention tile by tile with an online softmax, and its gradient, as FlashAttention-2 writes them.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv:2307.08691:
Algorithm 1 (forward) and Algorithm 2 (backward). The recurrence is M. Milakov and N. Gimelshein's, "Online normalizer
calculation for softmax", 2018, arXiv:1805.02867, Algorithm 3. The papers have no mask, no scale and no gradient of the
log-sum-exp; what these add is said where it is added.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .masks import by_batch, pairs
from .scores import Options, Scores, by_position, kept, modified
from .tensors import by_head, by_token, check, positions_or_default, scale_or_default


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    learnable_sink: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    block_q: int = 16,
    block_k: int = 16,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`..reference.attention`, same arguments and errors, one tile at a time.

    Algorithm 1: for each block of queries, over the blocks of keys, ``m' = max(m, rowmax(S))``, ``P = exp(S - m')``,
    ``l = exp(m - m') l + rowsum(P)``, ``O = exp(m - m') O + P V``; at the end ``O / l`` and ``L = m + log(l)``.
    """
    check(q, k, v)
    rows, columns = positions_or_default(q, k, q_positions, k_positions, needed=by_position(options))
    heads, scale = q.shape[2], scale_or_default(q, options.get("softmax_scale"))
    queries, keys, values = (by_head(x, heads) for x in (q, k, v))
    out = queries.new_empty((*queries.shape[:3], values.shape[3]))
    lse = queries.new_empty(queries.shape[:3])
    for i in _blocks(q.shape[1], block_q):
        o = torch.zeros_like(out[:, :, i])
        total = torch.zeros_like(lse[:, :, i])
        m = torch.full_like(total, -torch.inf)
        if learnable_sink is not None:  # added: as if a key with this score and the value 0 had been seen
            m = learnable_sink.to(torch.float64)[None, :, None].expand_as(m)
            total = (m > -torch.inf).to(torch.float64)
        for j in _blocks(k.shape[1], block_k):
            scores = modified(scale * queries[:, :, i] @ keys[:, :, j].mT, rows[i], columns[j], options)
            scores = scores.masked_fill(~by_batch(pairs(rows[i], columns[j], options)), -torch.inf)
            factors = kept(tuple(scores.shape), rows[i], columns[j], options)
            o, total, m = _fold(o, total, m, scores, values[:, :, j], factors)
        # added: a row that saw nothing has l = 0, and stays at O = 0
        out[:, :, i] = o / total.masked_fill(total == 0, 1.0)[..., None]
        lse[:, :, i] = m + total.log()
    return by_token(out, heads), lse


def _fold(
    o: Tensor, total: Tensor, m: Tensor, scores: Tensor, values: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One turn of Algorithm 1's inner loop: fold a block of keys into (O, l, m)."""
    m_new = torch.maximum(m, scores.amax(-1))
    # added: the pivot stays finite, since a row that has seen nothing would give -inf - -inf
    pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
    weights = torch.exp(scores - pivot[..., None])
    decay = torch.exp(m - pivot)
    total = decay * total + weights.sum(-1)
    # added: dropout takes weights from O and not from l (T. Dao et al. 2022, arXiv:2205.14135, algorithm 2)
    return decay[..., None] * o + (weights if factors is None else weights * factors) @ values, total, m_new


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    block_q: int = 16,
    block_k: int = 16,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in float64 from ``dout`` (shape of ``out``) and ``dlse`` (shape of ``lse``, default zero).

    Algorithm 2, over blocks of keys, then of queries; the tile is :func:`tile_gradients`. Arguments and errors as
    :func:`forward`; ``out`` and ``lse`` are its results.
    """
    check(q, k, v)
    rows, columns = positions_or_default(q, k, q_positions, k_positions, needed=by_position(options))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v))
    delta, scale = row_delta(dout, out, dlse), scale_or_default(q, options.get("softmax_scale"))
    for j in _blocks(k.shape[1], block_k):
        for i in _blocks(q.shape[1], block_q):
            tile = (dout[:, i], q[:, i], k[:, j], v[:, j], lse[:, :, i], delta[:, :, i])
            seen = pairs(rows[i], columns[j], options)
            parts = tile_gradients(*tile, seen=seen, scale=scale, positions=(rows[i], columns[j]), options=options)
            dq[:, i] += parts[0]
            dk[:, j] += parts[1]
            dv[:, j] += parts[2]
    return dq, dk, dv


def row_delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """``D = rowsum(dO * O)`` (Algorithm 2), ``[B, H, S]``; added: ``- dL``, as ``L`` moves with S as ``P`` does."""
    delta = (dout.to(torch.float64) * out.to(torch.float64)).sum(-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse.to(torch.float64)


def tile_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    seen: Tensor,
    scale: float,
    positions: tuple[Tensor, Tensor] | None = None,
    options: Scores | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one tile of queries and keys adds to (dq, dk, dv), float64.

    Algorithm 2's inner loop: ``P = exp(S - L)``, ``dV = P^T dO``, ``dP = dO V^T``, ``dS = P * (dP - D)``,
    ``dQ = dS K``, ``dK = dS^T Q``; added: the mask ``seen`` ``[Sq, Sk]`` or ``[B, Sq, Sk]``, the factor ``scale`` of
    S, and of ``options``, at the ``positions`` of the queries and of the keys: softcap, whose derivative is ``1 -
    tanh^2``, ALiBi, and the factors Z of dropout, ``dV = (P * Z)^T dO`` and ``dP = (dO V^T) * Z`` (T. Dao et al.,
    "FlashAttention", 2022, arXiv:2205.14135, algorithm 4).
    """
    heads, options = q.shape[2], options or {}
    rows, columns = positions or (torch.arange(q.shape[1]), torch.arange(k.shape[1]))
    queries, keys, values, grads = (by_head(x, heads) for x in (q, k, v, dout))
    plain = scale * queries @ keys.mT
    scores = modified(plain, rows, columns, options)
    weights = torch.exp(scores - lse[..., None]).masked_fill(~by_batch(seen), 0.0)
    factors = kept(tuple(weights.shape), rows, columns, options)
    dropped = weights if factors is None else weights * factors
    dweights = grads @ values.mT if factors is None else grads @ values.mT * factors
    dscores = scale * weights * (dweights - delta[..., None])
    softcap = options.get("softcap", 0.0)
    if softcap:
        dscores = dscores * (1 - torch.tanh(plain / softcap) ** 2)
    dq, dk, dv = dscores @ keys, dscores.mT @ queries, dropped.mT @ grads
    return by_token(dq, heads), by_token(dk, k.shape[2]), by_token(dv, k.shape[2])


def _blocks(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
