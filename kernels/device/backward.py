"""Backward kernels for one query shard against one key shard, from the global ``out`` and ``lse``.

The equations are those of FlashAttention-2 (Dao, arXiv:2307.08691, algorithm 2), in two passes without atomics::

    P  = exp(scale * Q K^T - lse)              dQ = scale * dS K
    dS = P * (dO V^T - delta)                  dK = scale * dS^T Q
    delta = rowsum(dO * O) - dlse              dV = P^T dO

Q, dO, K and V are float16, bfloat16 or float32. ``lse`` and ``delta`` are fp32 ``[B, H, S]``. All sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dkdv_tile import dkdv_tile
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
    keep_value_rows,
    kept_value_rows,
    load_block,
    load_lse_log2,
    load_rows,
    matmul_accumulate,
    matmul_nt,
    scale_tile,
    store_rows,
    zero_tile,
)
from .tiles import (
    Gradients,
    Keys,
    Queries,
    TileSizes,
    clip_tile_range,
    head_column,
    head_row_offset,
    load_block_ranges,
    load_row_bounds,
    program_placement,
    select_head,
    tensor_argument,
    tile_rows,
    visible_mask,
    visit_key_index,
    visit_key_tile,
    visit_query_tile,
)


@triton.jit
def delta_kernel(dout, out, dlse, delta, shape, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Compute ``delta = rowsum(dout * out) - dlse`` of BLOCK_Q query rows of one head.

    ``dout`` and ``out`` are ``[B, S, H, Dv]``. ``dlse``, fp32 ``[B, H, S]``, may be None. ``delta`` is fp32
    ``[B, H, S]``.
    """
    tile, batch, head = program_placement(shape, BLOCK_Q)
    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dout_tile = load_rows(select_head(dout, batch, head), offs_q, shape.rows, HEAD_DIM_V, True)
    out_tile = load_rows(select_head(out, batch, head), offs_q, shape.rows, HEAD_DIM_V, True)
    result = tl.sum(dout_tile[0].to(tl.float32) * out_tile[0].to(tl.float32), 1)
    if len(dout_tile) == 2:
        result += tl.sum(dout_tile[1].to(tl.float32) * out_tile[1].to(tl.float32), 1)
    offs = (batch * shape.heads + head) * shape.rows + offs_q
    if dlse is not None:
        result -= tl.load(dlse + offs, mask=offs_q < shape.rows, other=0.0)
    tl.store(delta + offs, result, mask=offs_q < shape.rows)


@triton.jit
def dq_phase(acc, queries, keys, seqlen_k, scores, begin, end, sizes, MASKED: tl.constexpr):
    """Add ``dS K`` of the keys ``[begin, end)`` to the accumulator of a block of query rows.

    ``queries`` is a tile in registers, with ``lse`` in base 2, and ``keys`` is one head.
    """
    unit = score_scale_log2(scores)
    for start in range(begin, end, sizes.BLOCK_K):
        offs_k = start + tl.arange(0, sizes.BLOCK_K)
        k_tile = load_block(keys.k, start, offs_k, seqlen_k, sizes.HEAD_DIM, MASKED)
        positions = load_column_positions(scores, offs_k, seqlen_k)
        qk, tanh = modify_scores(matmul_nt(queries.q, k_tile), scores, positions)
        p = tl.exp2(qk * unit - queries.lse[:, None])
        v_tile = load_block(keys.v, start, offs_k, seqlen_k, sizes.HEAD_DIM_V, MASKED)
        dp = matmul_nt(kept_value_rows(queries.dout, sizes.HEAD_DIM_V), v_tile)
        if scores.modifiers.counter is not None:
            dp = tl.where(dropout_keep_mask(scores, positions, False), dp * scores.modifiers.kept, 0.0)
        ds = p * (dp - queries.delta[:, None])
        if scores.modifiers.softcap is not None:
            ds *= 1.0 - tanh * tanh
        if MASKED:
            ds = tl.where(visible_mask(offs_k, scores.lo, scores.hi), ds, 0.0)
        acc = matmul_accumulate(ds, k_tile, acc)
    return acc


@triton.jit
def dq_range(acc, queries, keys, seqlen_k, scores, key_range, sizes, HAS_HEAD: tl.constexpr):
    """Add ``dS K`` of a tile range in three phases, as in the forward."""
    start, full_start, full_end, end = key_range
    if HAS_HEAD:
        acc = dq_phase(acc, queries, keys, seqlen_k, scores, start, full_start, sizes, True)
    acc = dq_phase(acc, queries, keys, seqlen_k, scores, full_start, full_end, sizes, False)
    return dq_phase(acc, queries, keys, seqlen_k, scores, full_end, end, sizes, True)


@triton.jit
def dq_kernel(
    dout, q, k, v, lse, delta, dq_in, dq_out, bounds, shape, softmax_scale, modifiers,
    dout_second, q_second, k_second, v_second,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Compute ``dQ = scale * dS K`` of one tile of queries per program.

    The result is added to ``dq_in`` if HAS_SUM and written to ``dq_out``, both ``[B, Sq, H, D]``. IN_PLACE says that
    they are the same tensor.
    """
    queries = Queries(tensor_argument(q, q_second), tensor_argument(dout, dout_second), lse, delta)
    keys = Keys(tensor_argument(k, k_second), tensor_argument(v, v_second))
    if shape.order.count is None:
        visit = visit_query_tile(tl.program_id(0), bounds, shape, BLOCK_Q, BLOCK_K)
        if IN_PLACE and visit.column_range.end <= visit.column_range.start:  # nothing to add
            return
        dq_tile(queries, keys, dq_in, dq_out, bounds, shape, softmax_scale, modifiers, visit,
                TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_SUM)  # fmt: skip
    else:
        for index in range(tl.program_id(0), shape.order.count, tl.num_programs(0)):
            visit = visit_query_tile(index, bounds, shape, BLOCK_Q, BLOCK_K)
            if not IN_PLACE or visit.column_range.end > visit.column_range.start:
                dq_tile(queries, keys, dq_in, dq_out, bounds, shape, softmax_scale, modifiers, visit,
                        TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_SUM)  # fmt: skip


@triton.jit
def dq_tile(queries, keys, dq_in, dq_out, bounds, shape, softmax_scale, modifiers, visit, sizes, HAS_SUM: tl.constexpr):
    """Compute dQ of BLOCK_Q rows: queries of one head or, packed, of all query heads of one key head."""
    batch, head = visit.batch, visit.head
    offs_q, heads = tile_rows(visit.first, head, shape, sizes.BLOCK_Q)
    lo, hi = load_row_bounds(bounds, offs_q, shape.rows, visit.keys)
    row, column = head_row_offset(batch, heads, shape), head_column(heads, shape)
    lse = load_lse_log2(queries.lse + row, offs_q, shape.rows)
    delta = tl.load(queries.delta + row + offs_q, mask=offs_q < shape.rows, other=0.0)
    q = load_block(select_head(queries.q, batch, column), visit.first, offs_q, shape.rows, sizes.HEAD_DIM, True)
    dout = keep_value_rows(select_head(queries.dout, batch, column), visit.first, offs_q, shape.rows, sizes)
    queries = Queries(q, dout, lse, delta)
    place = load_tile_position(modifiers, offs_q, shape.rows, batch, column)
    scores = TileScores(lo, hi, place, modifiers, softmax_scale)
    keys = Keys(select_head(keys.k, batch, head // shape.group), select_head(keys.v, batch, head // shape.group))

    acc = zero_tile(sizes.BLOCK_Q, sizes.HEAD_DIM)
    if bounds.block_sparse is None:
        acc = dq_range(acc, queries, keys, shape.columns, scores, visit.column_range, sizes, bounds.lo is not None)
    else:
        first_range, end_range = load_block_ranges(bounds.block_sparse, visit.first, shape)
        for index in range(first_range, end_range):
            key_range = clip_tile_range(bounds.block_sparse, index, visit.column_range)
            acc = dq_range(acc, queries, keys, shape.columns, scores, key_range, sizes, bounds.lo is not None)
    acc = scale_tile(acc, softmax_scale)
    if HAS_SUM:  # load the sum last, because the loop needs the registers
        acc = add_tiles(acc, load_rows(select_head(dq_in, batch, column), offs_q, shape.rows, sizes.HEAD_DIM, True))
    store_rows(select_head(dq_out, batch, column), acc, offs_q, shape.rows, sizes.HEAD_DIM)


@triton.jit
def dkdv_kernel(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, bounds, shape, softmax_scale, modifiers,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Compute ``dK = scale * dS^T Q`` and ``dV = P^T dO`` of one tile of keys per program.

    ``shape.rows`` counts keys, ``shape.columns`` counts queries, and ``bounds`` is transposed. The results are added to
    ``dk_in`` and ``dv_in`` if HAS_SUM. With ``shape.splits`` the outputs are the parts that `reduce_kernel` adds.
    """
    queries, keys = Queries(q, dout, lse, delta), Keys(k, v)
    gradients = Gradients(None, None, None, dk_in, dv_in, dk_out, dv_out)
    if shape.order.count is None:
        visit = visit_key_index(tl.program_id(0), bounds, shape, BLOCK_K, BLOCK_Q)
        if IN_PLACE and visit.column_range.end <= visit.column_range.start:  # nothing to add
            return
        dkdv_tile(queries, keys, gradients, bounds, shape, softmax_scale, modifiers, visit,
                  TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_SUM, IN_PLACE, False)  # fmt: skip
    else:
        for index in range(tl.program_id(0), shape.order.count, tl.num_programs(0)):
            visit = visit_key_index(index, bounds, shape, BLOCK_K, BLOCK_Q)
            if not IN_PLACE or visit.column_range.end > visit.column_range.start:
                dkdv_tile(queries, keys, gradients, bounds, shape, softmax_scale, modifiers, visit,
                          TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K), HAS_SUM, IN_PLACE, False)  # fmt: skip


@triton.jit
def reduce_kernel(
    dk_parts, dv_parts, dk_in, dv_in, dk_out, dv_out, bounds, shape,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Add the ``shape.splits`` parts of dK and dV that `dkdv_kernel` wrote, for BLOCK_ROWS keys of one key head.

    BLOCK_Q, BLOCK_K, ``bounds`` and IN_PLACE must be those of that launch, because `dkdv_kernel` writes no part for a
    tile of keys that no query sees.
    """
    tile, batch, head = program_placement(shape, BLOCK_ROWS)
    if IN_PLACE:
        visit = visit_key_tile(tile * BLOCK_ROWS // BLOCK_K, batch, head, bounds, shape, BLOCK_K, BLOCK_Q)
        if visit.column_range.end <= visit.column_range.start:
            return
    offs_k = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    sum_splits(dk_parts, dk_in, dk_out, offs_k, shape.rows, batch, head, shape.splits, HEAD_DIM, BLOCK_ROWS, HAS_SUM)
    sum_splits(dv_parts, dv_in, dv_out, offs_k, shape.rows, batch, head, shape.splits, HEAD_DIM_V, BLOCK_ROWS, HAS_SUM)


@triton.jit
def sum_splits(
    parts, before, result, offs_k, seqlen_k, batch, head, splits,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_SUM: tl.constexpr,
):  # fmt: skip
    """Store the sum of the ``splits`` parts of a key head, in order, plus ``before`` if HAS_SUM."""
    total = zero_tile(BLOCK_ROWS, HEAD_DIM)
    for part in range(splits):
        total = add_tiles(
            total, load_rows(select_head(parts, batch, head * splits + part), offs_k, seqlen_k, HEAD_DIM, True)
        )
    if HAS_SUM:
        total = add_tiles(total, load_rows(select_head(before, batch, head), offs_k, seqlen_k, HEAD_DIM, True))
        tl.debug_barrier()  # `before` may be `result`: all threads must have loaded it
    store_rows(select_head(result, batch, head), total, offs_k, seqlen_k, HEAD_DIM)
