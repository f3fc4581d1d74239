"""dK and dV of one tile of keys, shared by `dkdv_kernel` and `single_pass_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from .dq_sum import add_to_dq, make_dq_turn
from .score_modifiers import (
    dropout_keep_mask,
    load_column_positions,
    load_tile_position,
    modify_scores,
    score_scale_log2,
)
from .tile_ops import (
    add_tiles,
    load_lse_log2,
    load_rows,
    load_tile,
    matmul_accumulate,
    matmul_nt,
    scale_tile,
    store_rows,
    zero_tile,
)
from .tiles import LaunchShape, clip_tile_range, load_block_ranges, load_row_bounds, select_head, visible_mask


@triton.jit
def dkdv_phase(
    dk, dv, k, v, q, dout, lse, delta, lo, hi, begin, end, softmax_scale, seqlen_q, modifiers, place,
    dq, box, turns, turn,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS^T Q`` and ``P^T dO`` of the queries ``[begin, end)`` of one head to the sums of a block of keys.

    If ``dq`` is given, also add ``scale * dS K`` to it.
    """
    unit = score_scale_log2(modifiers, softmax_scale)
    for start in range(begin, end, BLOCK_Q):
        offs_q = start + tl.arange(0, BLOCK_Q)
        if dq is None:
            q_tile = load_rows(q, offs_q, seqlen_q, HEAD_DIM, True)
        else:  # addresses take fewer registers, which dQ needs
            q_tile = load_tile(q, start, seqlen_q, BLOCK_Q, HEAD_DIM)
        lse_tile = load_lse_log2(lse, offs_q, seqlen_q)  # +inf past the end, so that those rows add nothing
        positions = load_column_positions(modifiers, offs_q, seqlen_q)
        qk, tanh = modify_scores(matmul_nt(k, q_tile), modifiers, place, positions, softmax_scale)
        p = tl.exp2(qk * unit - lse_tile[None, :])
        if MASKED:
            p = tl.where(visible_mask(offs_q, lo, hi), p, 0.0)
        if dq is None:
            dout_tile = load_rows(dout, offs_q, seqlen_q, HEAD_DIM_V, True)
        else:
            dout_tile = load_tile(dout, start, seqlen_q, BLOCK_Q, HEAD_DIM_V)
        if modifiers.counter is None:
            dv = matmul_accumulate(p, dout_tile, dv)
        else:
            keep = dropout_keep_mask(modifiers, place, positions, True)
            dv = matmul_accumulate(tl.where(keep, p, 0.0), dout_tile, dv)
        if dq is None or modifiers.counter is not None:
            dp = matmul_nt(v, dout_tile)
            if modifiers.counter is not None:
                dp = tl.where(keep, dp * modifiers.kept, 0.0)
            delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * (dp - delta_tile[None, :])
        else:  # start the accumulator at -delta, which saves its registers
            delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * matmul_nt(v, dout_tile, tl.broadcast_to(-delta_tile[None, :], p.shape))
        if modifiers.softcap is not None:
            ds *= 1.0 - tanh * tanh
        dk = matmul_accumulate(ds, q_tile, dk)
        if dq is not None:
            add_to_dq(dq, box, turns, turn, ds, k, start, seqlen_q, softmax_scale, HEAD_DIM)
    return dk, dv


@triton.jit
def dkdv_tile(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, dq, box, turns, bounds, shape, softmax_scale, modifiers,
    batch, head, first, keys, query_range,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_K keys of one key head over its query heads in order; add their part of dQ to ``dq``.

    There is one loop, masked or not, because three phases spill here. With ``shape.splits`` programs per key head, each
    program writes the sum over its own query heads, and `reduce_kernel` adds these parts. If ``dk_out`` and ``dv_out``
    are TMA descriptors, TMA stores the results. RAGGED says that the last tile has keys past the end, which must be
    masked. IN_PLACE says that the sums are updated in place.
    """
    tile, tiles = first // BLOCK_K, tl.cdiv(shape.rows, BLOCK_K)
    seqlen_k = shape.rows
    if bounds.seqused_k is not None:
        shape = LaunchShape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
    offs_k = first + tl.arange(0, BLOCK_K)
    lo, hi = load_row_bounds(bounds, offs_k, shape)
    head_k = head if shape.splits is None else head // shape.splits
    k_tile = load_rows(select_head(k, batch, head_k), offs_k, seqlen_k, HEAD_DIM, True)
    v_tile = load_rows(select_head(v, batch, head_k), offs_k, seqlen_k, HEAD_DIM_V, True)

    dk, dv = zero_tile(BLOCK_K, HEAD_DIM), zero_tile(BLOCK_K, HEAD_DIM_V)
    MASKED: tl.constexpr = bounds.lo is not None or bounds.seqused_k is not None or RAGGED
    for member in range(shape.group):
        head_q = head * shape.group + member
        row = (batch * shape.heads * shape.group + head_q) * shape.columns
        place = load_tile_position(modifiers, offs_k, seqlen_k, batch, head_q, shape.heads * shape.group)
        q_head, dout_head = select_head(q, batch, head_q), select_head(dout, batch, head_q)
        adds = make_dq_turn(dq, turns, tile, tiles, batch, head_q, shape.heads * shape.group, shape.columns, BLOCK_Q)
        if bounds.block_sparse is None:
            dk, dv = dkdv_phase(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi,
                               query_range.start, query_range.end, softmax_scale, shape.columns, modifiers, place, dq,
                               box, turns, adds, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
        else:
            first_range, end_range = load_block_ranges(bounds.block_sparse, first, shape)
            for index in range(first_range, end_range):
                visits = clip_tile_range(bounds.block_sparse, index, query_range)
                dk, dv = dkdv_phase(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi,
                                   visits.start, visits.end, softmax_scale, shape.columns, modifiers, place, dq, box,
                                   turns, adds, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
    dk = scale_tile(dk, softmax_scale)
    if modifiers.counter is not None:
        dv = scale_tile(dv, modifiers.kept)
    if isinstance(dk_out, tl.tensor_descriptor):
        store_by_tma(dk[0], dk_in, dk_out, batch, head, first, HAS_SUM, IN_PLACE)
        store_by_tma(dv[0], dv_in, dv_out, batch, head, first, HAS_SUM, IN_PLACE)
    else:
        if HAS_SUM:  # load the sums last, because the loop needs the registers
            dk = add_tiles(dk, load_rows(select_head(dk_in, batch, head), offs_k, seqlen_k, HEAD_DIM, True))
            dv = add_tiles(dv, load_rows(select_head(dv_in, batch, head), offs_k, seqlen_k, HEAD_DIM_V, True))
        store_rows(select_head(dk_out, batch, head), dk, offs_k, seqlen_k, HEAD_DIM)
        store_rows(select_head(dv_out, batch, head), dv, offs_k, seqlen_k, HEAD_DIM_V)


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
