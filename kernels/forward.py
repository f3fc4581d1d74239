"""Attention of one query shard against one key shard, continuing the online softmax of the shards before.

The recurrence is FlashAttention's (Dao et al., arXiv:2205.14135, algorithm 1) in base 2. The carried ``(out, lse)`` is
folded in as one more block of that recurrence, the last: during the loop the registers belong to the matrix products,
and the pivot to this shard's own keys. (With the pivot at ``lse``, p of a new key is about 1 / keys so far: it leaves
fp16's normal range after 16k keys.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    LN_2,
    LOG2_E,
    columns,
    dot,
    load_rows,
    of_head,
    program,
    row_interval,
    store_rows,
    tile_range,
    visible,
)


@triton.jit
def fold(
    acc, l_i, m_i, q, k, v, lo, hi, begin, end, qk_scale, seqlen_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[begin, end)`` into the running softmax (acc, l, m) of a block of query rows."""
    for start in range(begin, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        k_tile = load_rows(k, offs_k, seqlen_k, HEAD_DIM, MASKED)
        qk = dot(q, tl.trans(k_tile), None)
        if MASKED:
            qk = tl.where(visible(offs_k, lo, hi), qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        if MASKED:  # keep the pivot finite: a row that has seen no key yet would give inf - inf
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(qk * qk_scale - pivot[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_tile = load_rows(v, offs_k, seqlen_k, HEAD_DIM_V, MASKED)
        acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def merge(acc, lse, state, lse_ptrs, offs, limit, HEAD_DIM_V: tl.constexpr):
    """Average (out, lse) with the carried state, each weighted by the sum of exponentials it stands for."""
    old_lse = tl.load(lse_ptrs, mask=offs < limit, other=float("-inf"))
    pivot = tl.maximum(lse, old_lse)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)  # a row that has seen nothing would give inf - inf
    new, old = tl.exp2((lse - pivot) * LOG2_E), tl.exp2((old_lse - pivot) * LOG2_E)
    total = tl.where(new + old == 0.0, 1.0, new + old)
    acc = acc * (new / total)[:, None] + load_rows(state, offs, limit, HEAD_DIM_V, True) * (old / total)[:, None]
    return acc, tl.where(new + old == 0.0, float("-inf"), pivot + tl.log2(total) * LN_2)


@triton.jit
def forward_kernel(
    q, k, v, state, out, lse, bounds, shape, softmax_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_STATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q query rows of one head against every key tile that one of them sees."""
    tile, batch, head = program(shape, BLOCK_Q)
    first = (tl.cdiv(shape.rows, BLOCK_Q) - 1 - tile) * BLOCK_Q  # late rows see most keys: longest first
    start, full_start, full_end, end = tile_range(bounds, first, shape, BLOCK_Q, BLOCK_K)
    if IN_PLACE:
        if end <= start:  # the state stays as it is
            return
    offs_q = first + tl.arange(0, BLOCK_Q)
    lo, hi = row_interval(bounds, offs_q, shape)
    lse_ptrs = lse + (batch * shape.heads + head) * shape.rows + offs_q

    acc = tl.zeros([BLOCK_Q, columns(HEAD_DIM_V).shape[0]], tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    m_i = l_i - float("inf")
    q_tile = load_rows(of_head(q, batch, head), offs_q, shape.rows, HEAD_DIM, True)
    k, v = of_head(k, batch, head // shape.group), of_head(v, batch, head // shape.group)
    qk_scale = softmax_scale * LOG2_E
    if bounds.lo is not None:  # FULL has no head
        acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, start, full_start, qk_scale, shape.columns,
                             HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, full_start, full_end, qk_scale, shape.columns,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_K, False)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, full_end, end, qk_scale, shape.columns,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that has seen nothing: out = 0, lse = -inf
    acc = acc / l_safe[:, None]
    new_lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_safe)) * LN_2)
    if HAS_STATE:
        acc, new_lse = merge(acc, new_lse, of_head(state, batch, head), lse_ptrs, offs_q, shape.rows, HEAD_DIM_V)
    tl.store(lse_ptrs, new_lse, mask=offs_q < shape.rows)
    store_rows(of_head(out, batch, head), acc, offs_q, shape.rows, HEAD_DIM_V)
