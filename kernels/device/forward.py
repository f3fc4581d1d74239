"""Forward kernel for one query shard against one key shard, continuing the online softmax of earlier shards.

The recurrence is that of FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1) in base 2. For each tile of keys::

    s = scale * q k^T          m_new = max(m, rowmax(s))          p = exp(s - m_new)
    alpha = exp(m - m_new)     l = alpha * l + rowsum(p)          acc = alpha * acc + p v

A program has BLOCK_Q query rows and visits their key tiles in three phases. Only head and tail apply the mask::

    keys       start       full_start      full_end         end
    first row    | . # # # # | # # # # # # # | # . . . . . . |
    last row     | . . . . # | # # # # # # # | # # # # # . . |
                  masked head   full middle     masked tail

The carried ``(out, lse)`` is merged after the loop, because the loop needs the registers. The pivot ``m`` also comes
only from this shard's keys: with ``lse`` as pivot, p of a new key is about 1 / (keys so far), which leaves the normal
range of fp16 after 16k keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .score_modifiers import (
    TileScores,
    dropout_keep_mask,
    load_column_positions,
    load_tile_position,
    modify_scores,
    score_scale_log2,
)
from .tile_ops import (
    add_tiles,
    divide_tile,
    load_block,
    load_rows,
    matmul_accumulate,
    matmul_nt,
    scale_tile,
    store_rows,
    zero_tile,
)
from .tiles import (
    LN_2,
    LOG2_E,
    Keys,
    TileSizes,
    clip_tile_range,
    head_column,
    head_row_offset,
    load_block_ranges,
    load_row_bounds,
    select_head,
    tensor_argument,
    tile_rows,
    visible_mask,
    visit_query_tile,
)


@triton.jit
def forward_phase(acc, l_i, m_i, q, keys, seqlen_k, scores, begin, end, sizes, MASKED: tl.constexpr):
    """Add the keys ``[begin, end)`` to the online softmax state (acc, l, m) of a block of query rows.

    ``q`` is a tile in registers, and ``keys`` is one head.
    """
    unit = score_scale_log2(scores)
    for start in range(begin, end, sizes.BLOCK_K):
        offs_k = start + tl.arange(0, sizes.BLOCK_K)
        k_tile = load_block(keys.k, start, offs_k, seqlen_k, sizes.HEAD_DIM, MASKED)
        positions = load_column_positions(scores, offs_k, seqlen_k)
        qk, _ = modify_scores(matmul_nt(q, k_tile), scores, positions)
        if MASKED:
            qk = tl.where(visible_mask(offs_k, scores.lo, scores.hi), qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * unit)
        if MASKED:  # keep the pivot finite: a row that has seen no key would compute inf - inf
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(qk * unit - pivot[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if scores.modifiers.counter is not None:  # after the sum, because lse covers dropped weights, too
            p = tl.where(dropout_keep_mask(scores, positions, False), p, 0.0)
        v_tile = load_block(keys.v, start, offs_k, seqlen_k, sizes.HEAD_DIM_V, MASKED)
        acc = matmul_accumulate(p, v_tile, scale_tile(acc, alpha[:, None]))
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def forward_range(acc, l_i, m_i, q, keys, seqlen_k, scores, key_range, sizes, HAS_HEAD: tl.constexpr):
    """Add a tile range to the state in three phases: masked head, full middle, masked tail."""
    start, full_start, full_end, end = key_range
    if HAS_HEAD:
        acc, l_i, m_i = forward_phase(acc, l_i, m_i, q, keys, seqlen_k, scores, start, full_start, sizes, True)
    acc, l_i, m_i = forward_phase(acc, l_i, m_i, q, keys, seqlen_k, scores, full_start, full_end, sizes, False)
    return forward_phase(acc, l_i, m_i, q, keys, seqlen_k, scores, full_end, end, sizes, True)


@triton.jit
def merge_state(acc, lse, state, lse_ptrs, offs, limit, HEAD_DIM_V: tl.constexpr):
    """Merge (acc, lse) with the carried state; each is weighted by its sum of exponentials, ``exp(lse)``."""
    old_lse = tl.load(lse_ptrs, mask=offs < limit, other=float("-inf"))
    pivot = tl.maximum(lse, old_lse)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)  # a row that has seen no key would compute inf - inf
    new, old = tl.exp2((lse - pivot) * LOG2_E), tl.exp2((old_lse - pivot) * LOG2_E)
    total = tl.where(new + old == 0.0, 1.0, new + old)
    carried = load_rows(state, offs, limit, HEAD_DIM_V, True)
    acc = add_tiles(scale_tile(acc, (new / total)[:, None]), scale_tile(carried, (old / total)[:, None]))
    return acc, tl.where(new + old == 0.0, float("-inf"), pivot + tl.log2(total) * LN_2)


@triton.jit
def forward_kernel(
    q, k, v, state, out, lse, bounds, shape, softmax_scale, modifiers, q_second, k_second, v_second, row_max,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_STATE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Compute ``out = softmax(scale * q k^T) v`` and ``lse`` of one tile of queries per program.

    Shapes are ``[B, Sq, H, D]`` for ``q``, ``[B, Sk, Hkv, D]`` for ``k``, ``[B, Sk, Hkv, Dv]`` for ``v`` and
    ``[B, Sq, H, Dv]`` for ``state`` and ``out``. ``lse`` is fp32 ``[B, H, Sq]``, a natural log. With HAS_STATE the
    result is merged with ``state`` and ``lse``. ``q``, ``k`` and ``v`` are strided tensors, or TMA descriptors whose
    second part of the head dim is in ``q_second``, ``k_second`` and ``v_second``. IN_PLACE says that ``state`` is
    ``out``; tiles whose rows see no key then stay unchanged. ``row_max``, fp32 ``[B, H, Sq]`` or None, is raised to the
    largest score of each row. A persistent program takes several tiles.
    """
    q, keys = tensor_argument(q, q_second), Keys(tensor_argument(k, k_second), tensor_argument(v, v_second))
    if shape.order.count is None:
        visit = visit_query_tile(tl.program_id(0), bounds, shape, BLOCK_Q, BLOCK_K)
        if IN_PLACE and visit.column_range.end <= visit.column_range.start:
            return
        forward_tile(q, keys, state, out, lse, row_max, bounds, shape, softmax_scale, modifiers, visit,
                     TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_STATE)  # fmt: skip
    else:
        for index in range(tl.program_id(0), shape.order.count, tl.num_programs(0)):
            visit = visit_query_tile(index, bounds, shape, BLOCK_Q, BLOCK_K)
            # Triton has no return inside a loop
            if not IN_PLACE or visit.column_range.end > visit.column_range.start:
                forward_tile(q, keys, state, out, lse, row_max, bounds, shape, softmax_scale, modifiers, visit,
                             TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_STATE)  # fmt: skip


@triton.jit
def forward_tile(
    q, keys, state, out, lse, row_max, bounds, shape, softmax_scale, modifiers, visit, sizes, HAS_STATE: tl.constexpr
):
    """Compute out and lse of BLOCK_Q rows: queries of one head or, packed, of all query heads of one key head."""
    batch, head = visit.batch, visit.head
    offs_q, heads = tile_rows(visit.first, head, shape, sizes.BLOCK_Q)
    lo, hi = load_row_bounds(bounds, offs_q, shape.rows, visit.keys)
    column = head_column(heads, shape)
    lse_ptrs = lse + head_row_offset(batch, heads, shape) + offs_q

    acc = zero_tile(sizes.BLOCK_Q, sizes.HEAD_DIM_V)
    l_i = tl.zeros([sizes.BLOCK_Q], tl.float32)
    m_i = l_i - float("inf")
    q_tile = load_block(select_head(q, batch, column), visit.first, offs_q, shape.rows, sizes.HEAD_DIM, True)
    place = load_tile_position(modifiers, offs_q, shape.rows, batch, column)
    scores = TileScores(lo, hi, place, modifiers, softmax_scale)
    keys = Keys(select_head(keys.k, batch, head // shape.group), select_head(keys.v, batch, head // shape.group))
    if bounds.block_sparse is None:
        acc, l_i, m_i = forward_range(
            acc, l_i, m_i, q_tile, keys, shape.columns, scores, visit.column_range, sizes, bounds.lo is not None
        )
    else:
        first_range, end_range = load_block_ranges(bounds.block_sparse, visit.first, shape)
        for index in range(first_range, end_range):
            key_range = clip_tile_range(bounds.block_sparse, index, visit.column_range)
            acc, l_i, m_i = forward_range(
                acc, l_i, m_i, q_tile, keys, shape.columns, scores, key_range, sizes, bounds.lo is not None
            )

    if row_max is not None:
        max_ptrs = row_max + head_row_offset(batch, heads, shape) + offs_q
        earlier = tl.load(max_ptrs, mask=offs_q < shape.rows, other=float("-inf"))
        tl.debug_barrier()  # updated in place: all threads must have loaded it
        tl.store(max_ptrs, tl.maximum(earlier, m_i * LN_2), mask=offs_q < shape.rows)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that has seen no key gets out = 0, lse = -inf
    if modifiers.counter is not None:
        acc = scale_tile(acc, modifiers.kept)
    acc = divide_tile(acc, l_safe[:, None])
    new_lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(l_safe)) * LN_2)
    if HAS_STATE:
        acc, new_lse = merge_state(
            acc, new_lse, select_head(state, batch, column), lse_ptrs, offs_q, shape.rows, sizes.HEAD_DIM_V
        )
    tl.store(lse_ptrs, new_lse, mask=offs_q < shape.rows)
    store_rows(select_head(out, batch, column), acc, offs_q, shape.rows, sizes.HEAD_DIM_V)
