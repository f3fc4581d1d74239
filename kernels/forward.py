"""Attention of one query shard against one key shard, continuing the online softmax of the shards before.

The recurrence is FlashAttention's (Dao et al., arXiv:2205.14135, algorithm 1) in base 2, restarted from the carried
state ``(out, lse)``: ``m = lse - STATE_SHIFT, l = 2^STATE_SHIFT, acc = out * l`` is the same softmax for any shift.
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

# With the pivot at lse itself, p of a new key is about 1/keys-so-far, below fp16's normal range after 16k keys: the
# carried pivot lies lower, so that the block's own maximum takes over, as it does in a launch without a state.
STATE_SHIFT = tl.constexpr(32.0)
STATE_SUM = tl.constexpr(2.0**32)


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
def start_state(state, lse_ptrs, offs_q, shape, HEAD_DIM_V: tl.constexpr, HAS_STATE: tl.constexpr):
    """(acc, l, m) in base 2: empty, or where the hop before left it."""
    if HAS_STATE:
        lse = tl.load(lse_ptrs, mask=offs_q < shape.rows, other=float("-inf"))
        l_i = tl.where(lse == float("-inf"), 0.0, STATE_SUM)
        acc = load_rows(state, offs_q, shape.rows, HEAD_DIM_V, True) * l_i[:, None]
        return acc, l_i, lse * LOG2_E - STATE_SHIFT
    else:
        l_i = tl.zeros_like(offs_q).to(tl.float32)
        acc = tl.zeros([offs_q.shape[0], columns(HEAD_DIM_V).shape[0]], tl.float32)
        return acc, l_i, l_i - float("inf")


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

    acc, l_i, m_i = start_state(of_head(state, batch, head), lse_ptrs, offs_q, shape, HEAD_DIM_V, HAS_STATE)
    q_tile = load_rows(of_head(q, batch, head), offs_q, shape.rows, HEAD_DIM, True)
    k, v = of_head(k, batch, head // shape.group), of_head(v, batch, head // shape.group)
    qk_scale = softmax_scale * LOG2_E
    acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, start, full_start, qk_scale, shape.columns,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, full_start, full_end, qk_scale, shape.columns,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_K, False)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q_tile, k, v, lo, hi, full_end, end, qk_scale, shape.columns,
                         HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that has seen nothing: out = 0, lse = -inf
    new_lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_safe)) * LN_2)
    tl.store(lse_ptrs, new_lse, mask=offs_q < shape.rows)
    store_rows(of_head(out, batch, head), acc / l_safe[:, None], offs_q, shape.rows, HEAD_DIM_V)
