"""dK and dV of one tile of keys, shared by `dkdv_kernel` and `single_pass_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from .dq_sum import add_to_dq, make_dq_turn
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
    load_lse_log2,
    load_rows,
    load_tile,
    matmul_accumulate,
    matmul_nt,
    scale_tile,
    store_rows,
    zero_tile,
)
from .tiles import Keys, Queries, clip_tile_range, load_block_ranges, load_row_bounds, select_head, visible_mask


@triton.jit
def dkdv_phase(dk, dv, keys, queries, seqlen_q, scores, query_range, gradients, turn, sizes, MASKED: tl.constexpr):
    """Add ``dS^T Q`` and ``P^T dO`` of a tile range of queries to the sums of a block of keys.

    ``keys`` is a tile in registers, and ``queries`` is one head. If ``gradients`` has dQ, also add ``scale * dS K``.
    """
    unit = score_scale_log2(scores)
    for start in range(query_range.start, query_range.end, sizes.BLOCK_Q):
        offs_q = start + tl.arange(0, sizes.BLOCK_Q)
        if gradients.dq is None:
            q_tile = load_rows(queries.q, offs_q, seqlen_q, sizes.HEAD_DIM, True)
        else:  # addresses take fewer registers, which dQ needs
            q_tile = load_tile(queries.q, start, seqlen_q, sizes.BLOCK_Q, sizes.HEAD_DIM)
        lse_tile = load_lse_log2(queries.lse, offs_q, seqlen_q)  # +inf past the end, so that those rows add nothing
        positions = load_column_positions(scores, offs_q, seqlen_q)
        qk, tanh = modify_scores(matmul_nt(keys.k, q_tile), scores, positions)
        p = tl.exp2(qk * unit - lse_tile[None, :])
        if MASKED:
            p = tl.where(visible_mask(offs_q, scores.lo, scores.hi), p, 0.0)
        if gradients.dq is None:
            dout_tile = load_rows(queries.dout, offs_q, seqlen_q, sizes.HEAD_DIM_V, True)
        else:
            dout_tile = load_tile(queries.dout, start, seqlen_q, sizes.BLOCK_Q, sizes.HEAD_DIM_V)
        if scores.modifiers.counter is None:
            dv = matmul_accumulate(p, dout_tile, dv)
        else:
            keep = dropout_keep_mask(scores, positions, True)
            dv = matmul_accumulate(tl.where(keep, p, 0.0), dout_tile, dv)
        if gradients.dq is None or scores.modifiers.counter is not None:
            dp = matmul_nt(kept_value_rows(keys.v, sizes.HEAD_DIM_V), dout_tile)
            if scores.modifiers.counter is not None:
                dp = tl.where(keep, dp * scores.modifiers.kept, 0.0)
            delta_tile = tl.load(queries.delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * (dp - delta_tile[None, :])
        else:  # start the accumulator at -delta, which saves its registers
            delta_tile = tl.load(queries.delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * matmul_nt(keys.v, dout_tile, tl.broadcast_to(-delta_tile[None, :], p.shape))
        if scores.modifiers.softcap is not None:
            ds *= 1.0 - tanh * tanh
        dk = matmul_accumulate(ds, q_tile, dk)
        if gradients.dq is not None:
            add_to_dq(gradients, turn, ds, keys.k, start, seqlen_q, scores.softmax_scale, sizes.HEAD_DIM)
    return dk, dv


@triton.jit
def dkdv_tile(
    queries, keys, gradients, bounds, shape, softmax_scale, modifiers, visit, sizes,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_K keys of one key head over its query heads in order; add their part of dQ.

    There is one loop, masked or not, because three phases spill here. With ``shape.splits`` programs per key head, each
    program writes the sum over its own query heads, and `reduce_kernel` adds these parts. If dK and dV are TMA
    descriptors, TMA stores the results. RAGGED says that the last tile has keys past the end, which must be masked.
    IN_PLACE says that the sums are updated in place.
    """
    batch, head, first, seqlen_k = visit.batch, visit.head, visit.first, shape.rows
    offs_k = first + tl.arange(0, sizes.BLOCK_K)
    lo, hi = load_row_bounds(bounds, offs_k, visit.keys, shape.columns)
    head_k = head if shape.splits is None else head // shape.splits
    k = load_rows(select_head(keys.k, batch, head_k), offs_k, seqlen_k, sizes.HEAD_DIM, True)
    keys = Keys(k, keep_value_rows(select_head(keys.v, batch, head_k), first, offs_k, seqlen_k, sizes))

    dk, dv = zero_tile(sizes.BLOCK_K, sizes.HEAD_DIM), zero_tile(sizes.BLOCK_K, sizes.HEAD_DIM_V)
    MASKED: tl.constexpr = bounds.lo is not None or bounds.seqused_k is not None or RAGGED
    for member in range(shape.group):
        head_q = head * shape.group + member
        row = (batch * shape.heads * shape.group + head_q) * shape.columns
        place = load_tile_position(modifiers, offs_k, seqlen_k, batch, head_q)
        scores = TileScores(lo, hi, place, modifiers, softmax_scale)
        q_head, dout_head = select_head(queries.q, batch, head_q), select_head(queries.dout, batch, head_q)
        query_head = Queries(q_head, dout_head, queries.lse + row, queries.delta + row)
        turn = make_dq_turn(gradients, visit, head_q, shape, sizes)
        if bounds.block_sparse is None:
            dk, dv = dkdv_phase(
                dk, dv, keys, query_head, shape.columns, scores, visit.column_range, gradients, turn, sizes, MASKED
            )
        else:
            first_range, end_range = load_block_ranges(bounds.block_sparse, first, shape)
            for index in range(first_range, end_range):
                query_range = clip_tile_range(bounds.block_sparse, index, visit.column_range)
                dk, dv = dkdv_phase(
                    dk, dv, keys, query_head, shape.columns, scores, query_range, gradients, turn, sizes, MASKED
                )
    dk = scale_tile(dk, softmax_scale)
    if modifiers.counter is not None:
        dv = scale_tile(dv, modifiers.kept)
    dk_in, dv_in, dk_out, dv_out = gradients.dk_in, gradients.dv_in, gradients.dk_out, gradients.dv_out
    if isinstance(dk_out, tl.tensor_descriptor):
        store_by_tma(dk[0], dk_in, dk_out, batch, head, first, HAS_SUM, IN_PLACE)
        store_by_tma(dv[0], dv_in, dv_out, batch, head, first, HAS_SUM, IN_PLACE)
    else:
        if HAS_SUM:  # load the sums last, because the loop needs the registers
            dk = add_tiles(dk, load_rows(select_head(dk_in, batch, head), offs_k, seqlen_k, sizes.HEAD_DIM, True))
            dv = add_tiles(dv, load_rows(select_head(dv_in, batch, head), offs_k, seqlen_k, sizes.HEAD_DIM_V, True))
        store_rows(select_head(dk_out, batch, head), dk, offs_k, seqlen_k, sizes.HEAD_DIM)
        store_rows(select_head(dv_out, batch, head), dv, offs_k, seqlen_k, sizes.HEAD_DIM_V)


@triton.jit
def store_by_tma(value, accum, result, batch, head, first, HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr):
    """Store ``value [keys, D]`` by TMA to the keys from ``first``; TMA writes nothing past the end.

    A sum that is updated in place takes one TMA addition and never passes through registers. No other program adds to
    it in this launch, so the bits are the same on every run.
    """
    coords = [batch.to(tl.int32), first, head.to(tl.int32), 0]
    block = value.reshape(1, value.shape[0], 1, value.shape[1])
    if HAS_SUM and IN_PLACE:
        result.atomic_add(coords, block)
    elif HAS_SUM:
        result.store(coords, (accum.load(coords) + block).to(result.dtype))
    else:
        result.store(coords, block.to(result.dtype))
