"""dK and dV of one tile of keys, shared by `dkdv_kernel` and `single_pass_kernel`."""

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

    If ``dq`` is given, also add ``scale * dS K`` to it.
    """
    unit = score_unit(modifiers, softmax_scale)
    for start in range(begin, end, BLOCK_Q):
        offs_q = start + tl.arange(0, BLOCK_Q)
        if dq is None:
            q_tile = load_rows(q, offs_q, seqlen_q, HEAD_DIM, True)
        else:  # addresses take fewer registers, which dQ needs
            q_tile = load_tile(q, start, seqlen_q, BLOCK_Q, HEAD_DIM)
        lse_tile = load_lse(lse, offs_q, seqlen_q)  # +inf past the end, so that those rows add nothing
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
            keep = is_kept(modifiers, place, positions, True)
            dv = accumulate(tl.where(keep, p, 0.0), dout_tile, dv)
        if dq is None or modifiers.counter is not None:
            dp = products(v, dout_tile)
            if modifiers.counter is not None:
                dp = tl.where(keep, dp * modifiers.kept, 0.0)
            delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
            ds = p * (dp - delta_tile[None, :])
        else:  # start the accumulator at -delta, which saves its registers
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
        shape = Shape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
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
            dk, dv = dkdv_step(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi,
                               query_range.start, query_range.end, softmax_scale, shape.columns, modifiers, place, dq,
                               box, turns, adds, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
        else:
            first_range, end_range = ranges_of_block(bounds.block_sparse, first, shape)
            for index in range(first_range, end_range):
                visits = clipped(bounds.block_sparse, index, query_range)
                dk, dv = dkdv_step(dk, dv, k_tile, v_tile, q_head, dout_head, lse + row, delta + row, lo, hi,
                                   visits.start, visits.end, softmax_scale, shape.columns, modifiers, place, dq, box,
                                   turns, adds, HEAD_DIM, HEAD_DIM_V, BLOCK_Q, MASKED)  # fmt: skip
    dk = scaled(dk, softmax_scale)
    if modifiers.counter is not None:
        dv = scaled(dv, modifiers.kept)
    if isinstance(dk_out, tl.tensor_descriptor):
        leave(dk[0], dk_in, dk_out, batch, head, first, HAS_SUM, IN_PLACE)
        leave(dv[0], dv_in, dv_out, batch, head, first, HAS_SUM, IN_PLACE)
    else:
        if HAS_SUM:  # load the sums last, because the loop needs the registers
            dk = added(dk, load_rows(of_head(dk_in, batch, head), offs_k, seqlen_k, HEAD_DIM, True))
            dv = added(dv, load_rows(of_head(dv_in, batch, head), offs_k, seqlen_k, HEAD_DIM_V, True))
        store_rows(of_head(dk_out, batch, head), dk, offs_k, seqlen_k, HEAD_DIM)
        store_rows(of_head(dv_out, batch, head), dv, offs_k, seqlen_k, HEAD_DIM_V)


@triton.jit
def leave(value, before, result, batch, head, first, HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr):
    """Store ``value [keys, D]`` by TMA to the keys from ``first``; TMA writes nothing past the end.

    A sum that is updated in place takes one TMA addition and never passes through registers. No other program adds to
    it in this launch, so the bits are the same on every run.
    """
    coords = [batch.to(tl.int32), first, head.to(tl.int32), 0]
    block = value.reshape(1, value.shape[0], 1, value.shape[1])
    if HAS_SUM and IN_PLACE:
        result.atomic_add(coords, block)
    elif HAS_SUM:
        result.store(coords, (before.load(coords) + block).to(result.dtype))
    else:
        result.store(coords, block.to(result.dtype))
