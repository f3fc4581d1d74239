"""Attention of one query shard against one key shard, continuing the online softmax of the shards before.

The recurrence is FlashAttention's (Dao et al., arXiv:2205.14135, algorithm 1) in base 2. The carried ``(out, lse)`` is
folded in as one more block of that recurrence, the last: during the loop the registers belong to the matrix products,
and the pivot to this shard's own keys. (With the pivot at ``lse``, p of a new key is about 1 / keys so far: it leaves
fp16's normal range after 16k keys.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .modify import column_positions, is_kept, modified, placed, score_unit
from .parts import accumulate, added, divided, load_rows, products, scaled, store_rows, zeros
from .tiles import (
    LN_2,
    LOG2_E,
    Shape,
    as_column,
    clipped,
    of_head,
    ranges_of_block,
    row_interval,
    tile_rows,
    vector_of,
    visible,
    visit,
)


@triton.jit
def fold(
    acc, l_i, m_i, q, k, v, lo, hi, begin, end, unit, softmax_scale, seqlen_k, modifiers, place,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[begin, end)`` into the running softmax (acc, l, m) of a block of query rows."""
    for start in range(begin, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        k_tile = load_rows(k, offs_k, seqlen_k, HEAD_DIM, MASKED)
        positions = column_positions(modifiers, offs_k, seqlen_k)
        qk, _ = modified(products(q, k_tile), modifiers, place, positions, softmax_scale)
        if MASKED:
            qk = tl.where(visible(offs_k, lo, hi), qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * unit)
        if MASKED:  # keep the pivot finite: a row that has seen no key yet would give inf - inf
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(qk * unit - pivot[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if modifiers.counter is not None:  # after the sum: lse is that of all weights
            p = tl.where(is_kept(modifiers, place, positions, False), p, 0.0)
        v_tile = load_rows(v, offs_k, seqlen_k, HEAD_DIM_V, MASKED)
        acc = accumulate(p, v_tile, scaled(acc, alpha[:, None]))
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def fold_range(
    acc, l_i, m_i, q, k, v, lo, hi, start, full_start, full_end, end, softmax_scale, seqlen_k, modifiers, place,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, HAS_HEAD: tl.constexpr,
):  # fmt: skip
    """Fold a tile range, in three phases: masked head, full middle, masked tail."""
    unit = score_unit(modifiers, softmax_scale)
    if HAS_HEAD:
        acc, l_i, m_i = fold(acc, l_i, m_i, q, k, v, lo, hi, start, full_start, unit, softmax_scale, seqlen_k,
                             modifiers, place, HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q, k, v, lo, hi, full_start, full_end, unit, softmax_scale, seqlen_k,
                         modifiers, place, HEAD_DIM, HEAD_DIM_V, BLOCK_K, False)  # fmt: skip
    acc, l_i, m_i = fold(acc, l_i, m_i, q, k, v, lo, hi, full_end, end, unit, softmax_scale, seqlen_k,
                         modifiers, place, HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    return acc, l_i, m_i


@triton.jit
def merge(acc, lse, state, lse_ptrs, offs, limit, HEAD_DIM_V: tl.constexpr):
    """Average (out, lse) with the carried state, each weighted by the sum of exponentials it stands for."""
    old_lse = tl.load(lse_ptrs, mask=offs < limit, other=float("-inf"))
    pivot = tl.maximum(lse, old_lse)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)  # a row that has seen nothing would give inf - inf
    new, old = tl.exp2((lse - pivot) * LOG2_E), tl.exp2((old_lse - pivot) * LOG2_E)
    total = tl.where(new + old == 0.0, 1.0, new + old)
    carried = load_rows(state, offs, limit, HEAD_DIM_V, True)
    acc = added(scaled(acc, (new / total)[:, None]), scaled(carried, (old / total)[:, None]))
    return acc, tl.where(new + old == 0.0, float("-inf"), pivot + tl.log2(total) * LN_2)


@triton.jit
def forward_kernel(
    q, k, v, state, out, lse, bounds, shape, softmax_scale, modifiers,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_STATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One program: the tile of its place in the order; or, persistent, that one and every so many-th after it.

    In place, the state of a tile whose rows see nothing stays as it is.
    """
    if shape.order.count is None:
        batch, head, first, keys, visited = visit(tl.program_id(0), bounds, shape, BLOCK_Q, BLOCK_K)
        if IN_PLACE:
            if visited[3] <= visited[0]:
                return
        forward_tile(q, k, v, state, out, lse, bounds, shape, softmax_scale, modifiers, batch, head, first, keys,
                     visited, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, HAS_STATE)  # fmt: skip
    else:
        for index in range(tl.program_id(0), shape.order.count, tl.num_programs(0)):
            batch, head, first, keys, visited = visit(index, bounds, shape, BLOCK_Q, BLOCK_K)
            if not IN_PLACE or visited[3] > visited[0]:  # Triton takes no return in a loop
                forward_tile(q, k, v, state, out, lse, bounds, shape, softmax_scale, modifiers, batch, head, first,
                             keys, visited, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, HAS_STATE)  # fmt: skip


@triton.jit
def forward_tile(
    q, k, v, state, out, lse, bounds, shape, softmax_scale, modifiers, batch, head, first, keys, visited,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q query rows of one head, or of those that share K/V, against every tile of keys that one of them sees."""
    seqlen_k = shape.columns
    if bounds.seqused_k is not None:
        shape = Shape(shape.rows, keys, shape.heads, shape.group, None, shape.packed, None)
    start, full_start, full_end, end = visited
    offs_q, heads = tile_rows(first, head, shape, BLOCK_Q)
    lo, hi = row_interval(bounds, offs_q, shape)
    column = as_column(heads, shape)
    lse_ptrs = lse + vector_of(batch, heads, shape) + offs_q

    acc = zeros(BLOCK_Q, HEAD_DIM_V)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    m_i = l_i - float("inf")
    q_tile = load_rows(of_head(q, batch, column), offs_q, shape.rows, HEAD_DIM, True)
    place = placed(modifiers, offs_q, shape.rows, batch, column, shape.heads)
    k, v = of_head(k, batch, head // shape.group), of_head(v, batch, head // shape.group)
    if bounds.block_sparse is None:
        acc, l_i, m_i = fold_range(acc, l_i, m_i, q_tile, k, v, lo, hi, start, full_start, full_end, end,
                                   softmax_scale, seqlen_k, modifiers, place,
                                   HEAD_DIM, HEAD_DIM_V, BLOCK_K, bounds.lo is not None)  # fmt: skip
    else:
        first_range, end_range = ranges_of_block(bounds.block_sparse, first, shape)
        for index in range(first_range, end_range):
            head_start, middle, tail, stop = clipped(bounds.block_sparse, index, start, full_start, full_end, end)
            acc, l_i, m_i = fold_range(acc, l_i, m_i, q_tile, k, v, lo, hi, head_start, middle, tail, stop,
                                       softmax_scale, seqlen_k, modifiers, place,
                                       HEAD_DIM, HEAD_DIM_V, BLOCK_K, bounds.lo is not None)  # fmt: skip

    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that has seen nothing: out = 0, lse = -inf
    if modifiers.counter is not None:
        acc = scaled(acc, modifiers.kept)
    acc = divided(acc, l_safe[:, None])
    new_lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_safe)) * LN_2)
    if HAS_STATE:
        acc, new_lse = merge(acc, new_lse, of_head(state, batch, column), lse_ptrs, offs_q, shape.rows, HEAD_DIM_V)
    tl.store(lse_ptrs, new_lse, mask=offs_q < shape.rows)
    store_rows(of_head(out, batch, column), acc, offs_q, shape.rows, HEAD_DIM_V)
