"""dK and dV of one tile of keys: what `dkdv_kernel` and `single_pass_kernel` have in common."""

from __future__ import annotations

import triton
import triton.language as tl

from .dq_sum import add_to_dq, place_of
from .modify import column_positions, is_kept, modified, placed, score_unit
from .parts import accumulate, added, load_lse, load_rows, load_tile, products, scaled, store_rows, zeros
from .tiles import Shape, clipped, of_head, ranges_of_block, row_interval, visible


@triton.jit
def dkdv_step(
    dk, dv, k, v, q, dout, lse, delta, lo, hi, begin, end, softmax_scale, seqlen_q, modifiers, place,
    dq, box, turns, adds,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS^T Q`` and ``P^T dO`` of the queries ``[begin, end)`` of one head to the sums of a block of keys.

    Where there is a ``dq`` also ``dS K`` to that.
    """
    unit = score_unit(modifiers, softmax_scale)
    for start in range(begin, end, BLOCK_Q):
        offs_q = start + tl.arange(0, BLOCK_Q)
        if dq is None:
            q_tile = load_rows(q, offs_q, seqlen_q, HEAD_DIM, True)
        else:  # with less in registers: dQ needs them
            q_tile = load_tile(q, start, seqlen_q, BLOCK_Q, HEAD_DIM)
        lse_tile = load_lse(lse, offs_q, seqlen_q)  # +inf past the end: those rows add nothing
        positions = column_positions(modifiers, offs_q, seqlen_q)
        qk, tanh = modified(products(k, q_tile), modifiers, place, positions, softmax_scale)
        p = tl.exp2(qk * unit - lse_tile[None, :])
        if MASKED:
            p = tl.where(visible(offs_q, lo, hi), p, 0.0)
        if dq is None:
            dout_tile = load_rows(dout, offs_q, seqlen_q, HEAD_DIM_V, True)
        else:
            dout_tile = load_tile(dout, start, seqlen_q, BLOCK_Q, HEAD_DIM_V)
        if modifiers.counter is None:
            dv = accumulate(p, dout_tile, dv)
        else:
            kept = is_kept(modifiers, place, positions, True)
            dv = accumulate(tl.where(kept, p, 0.0), dout_tile, dv)
        if dq is None or modifiers.counter is not None:
            dp = products(v, dout_tile)
            if modifiers.counter is not None:
                dp = tl.where(kept, dp * modifiers.kept, 0.0)
            delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * (dp - delta_tile[None, :])
        else:  # the accumulator starts from -delta: as many registers fewer
            delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * products(v, dout_tile, tl.broadcast_to(-delta_tile[None, :], p.shape))
        if modifiers.softcap is not None:
            ds *= 1.0 - tanh * tanh
        dk = accumulate(ds, q_tile, dk)
        if dq is not None:
            add_to_dq(dq, box, turns, adds, ds, k, start, seqlen_q, softmax_scale, HEAD_DIM)
    return dk, dv


@triton.jit
def key_tile(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, dq, box, turns, bounds, shape, softmax_scale, modifiers,
    batch, head, first, keys, visited,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_K keys of one key head, over its query heads in order, and where there is a ``dq`` their part.

    One loop, masked or (FULL) not: three phases spill here. RAGGED: the last tile has keys past the end, whose weights
    are none. Where ``shape.splits`` program heads share a key head, each leaves the sum over its own query heads, which
    `reduce_kernel` adds up. Where ``dk_out`` and the like are TMA descriptors, the copy engine leaves the results.
    IN_PLACE: where the sums are.
    """
    tile, tiles = first // BLOCK_K, tl.cdiv(shape.rows, BLOCK_K)
    seqlen_k = shape.rows
    if bounds.seqused_k is not None:
        shape = Shape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
    start, _, _, end = visited
    offs_k = first + tl.arange(0, BLOCK_K)
    lo, hi = row_interval(bounds, offs_k, shape)
    head_k = head if shape.splits is None else head // shape.splits
    k_tile = load_rows(of_head(k, batch, head_k), offs_k, seqlen_k, HEAD_DIM, True)
    v_tile = load_rows(of_head(v, batch, head_k), offs_k, seqlen_k, HEAD_DIM_V, True)

    dk, dv = zeros(BLOCK_K, HEAD_DIM), zeros(BLOCK_K, HEAD_DIM_V)
    MASKED: tl.constexpr = bounds.lo is not None or bounds.seqused_k is not None or RAGGED
    for member in range(shape.group):
        head_q = head * shape.group + member
        row = (batch * shape.heads * shape.group + head_q) * shape.columns
        place = placed(modifiers, offs_k, seqlen_k, batch, head_q, shape.heads * shape.group)
        q_head, dout_head = of_head(q, batch, head_q), of_head(dout, batch, head_q)
        adds = place_of(dq, turns, tile, tiles, batch, head_q, shape.heads * shape.group, shape.columns, BLOCK_Q)
        if bounds.block_sparse is None:
            dk, dv = dkdv_step(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi, start, end,
                               softmax_scale, shape.columns, modifiers, place, dq, box, turns, adds,
                               HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
        else:
            first_range, end_range = ranges_of_block(bounds.block_sparse, first, shape)
            for index in range(first_range, end_range):
                range_start, _, _, stop = clipped(bounds.block_sparse, index, start, start, start, end)
                dk, dv = dkdv_step(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi,
                                   range_start, stop, softmax_scale, shape.columns, modifiers, place, dq, box, turns,
                                   adds, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
    dk = scaled(dk, softmax_scale)
    if modifiers.counter is not None:
        dv = scaled(dv, modifiers.kept)
    if isinstance(dk_out, tl.tensor_descriptor):
        leave(dk[0], dk_in, dk_out, batch, head, first, HAS_SUM, IN_PLACE)
        leave(dv[0], dv_in, dv_out, batch, head, first, HAS_SUM, IN_PLACE)
    else:
        if HAS_SUM:  # read last, as in dQ
            dk = added(dk, load_rows(of_head(dk_in, batch, head), offs_k, seqlen_k, HEAD_DIM, True))
            dv = added(dv, load_rows(of_head(dv_in, batch, head), offs_k, seqlen_k, HEAD_DIM_V, True))
        store_rows(of_head(dk_out, batch, head), dk, offs_k, seqlen_k, HEAD_DIM)
        store_rows(of_head(dv_out, batch, head), dv, offs_k, seqlen_k, HEAD_DIM_V)


@triton.jit
def leave(value, before, result, batch, head, first, HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr):
    """``value [keys, D]`` of the keys from ``first``, by the copy engine; the end of ``result`` clips it.

    A sum that stays where it is takes it as one addition, without passing through registers: nobody else adds to it in
    this launch, so that its bits are the same on every run.
    """
    place = [batch.to(tl.int32), first, head.to(tl.int32), 0]
    box = value.reshape(1, value.shape[0], 1, value.shape[1])
    if HAS_SUM and IN_PLACE:
        result.atomic_add(place, box)
    elif HAS_SUM:
        result.store(place, (before.load(place) + box).to(result.dtype))
    else:
        result.store(place, box.to(result.dtype))
