"""The gradient of one query shard against one key shard, from the global ``out`` and ``lse``.

FlashAttention-2's backward (Dao, arXiv:2307.08691, algorithm 2) in two passes without atomics: with
``P = exp(scale * QK^T - lse)``, ``dS = P * (dO V^T - delta)`` and ``delta = rowsum(dO * O) - dlse``,
``dQ = scale * dS K``, ``dK = scale * dS^T Q``, ``dV = P^T dO``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
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
def delta_kernel(dout, out, dlse, delta, shape, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr):
    """``delta = rowsum(dout * out) - dlse``; ``dlse`` is a pointer to [B, H, S], or None."""
    tile, batch, head = program(shape, BLOCK_Q)
    offs_q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dout_tile = load_rows(of_head(dout, batch, head), offs_q, shape.rows, HEAD_DIM_V, True).to(tl.float32)
    out_tile = load_rows(of_head(out, batch, head), offs_q, shape.rows, HEAD_DIM_V, True).to(tl.float32)
    result = tl.sum(dout_tile * out_tile, 1)
    offs = (batch * shape.heads + head) * shape.rows + offs_q
    if dlse is not None:
        result -= tl.load(dlse + offs, mask=offs_q < shape.rows, other=0.0)
    tl.store(delta + offs, result, mask=offs_q < shape.rows)


@triton.jit
def load_lse(lse, offs, limit):
    """``lse`` in base 2; +inf for rows that see nothing, so that their P is 0 and never inf."""
    value = tl.load(lse + offs, mask=offs < limit, other=float("-inf"))
    return tl.where(value == float("-inf"), float("inf"), value * LOG2_E)


@triton.jit
def dq_step(
    acc, q, dout, lse, delta, k, v, lo, hi, begin, end, qk_scale, seqlen_k,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS K`` of the keys ``[begin, end)`` to the accumulator of a block of query rows."""
    for start in range(begin, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        k_tile = load_rows(k, offs_k, seqlen_k, HEAD_DIM, MASKED)
        p = tl.exp2(dot(q, tl.trans(k_tile), None) * qk_scale - lse[:, None])
        v_tile = load_rows(v, offs_k, seqlen_k, HEAD_DIM_V, MASKED)
        ds = p * (dot(dout, tl.trans(v_tile), None) - delta[:, None])
        if MASKED:
            ds = tl.where(visible(offs_k, lo, hi), ds, 0.0)
        acc = dot(ds.to(k_tile.dtype), k_tile, acc)
    return acc


@triton.jit
def dq_kernel(
    dout, q, k, v, lse, delta, dq_in, dq_out, bounds, shape, softmax_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_Q query rows of one head, added to ``dq_in`` where HAS_SUM."""
    tile, batch, head = program(shape, BLOCK_Q)
    first = (tl.cdiv(shape.rows, BLOCK_Q) - 1 - tile) * BLOCK_Q  # longest first, as in the forward
    start, full_start, full_end, end = tile_range(bounds, first, shape, BLOCK_Q, BLOCK_K)
    if IN_PLACE:
        if end <= start:  # the sum stays as it is
            return
    offs_q = first + tl.arange(0, BLOCK_Q)
    lo, hi = row_interval(bounds, offs_q, shape)
    row = (batch * shape.heads + head) * shape.rows
    lse_tile = load_lse(lse + row, offs_q, shape.rows)
    delta_tile = tl.load(delta + row + offs_q, mask=offs_q < shape.rows, other=0.0)
    q_tile = load_rows(of_head(q, batch, head), offs_q, shape.rows, HEAD_DIM, True)
    dout_tile = load_rows(of_head(dout, batch, head), offs_q, shape.rows, HEAD_DIM_V, True)
    k, v = of_head(k, batch, head // shape.group), of_head(v, batch, head // shape.group)

    acc = tl.zeros([BLOCK_Q, columns(HEAD_DIM).shape[0]], tl.float32)
    qk_scale = softmax_scale * LOG2_E
    if bounds.lo is not None:  # FULL has no head
        acc = dq_step(acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, lo, hi, start, full_start, qk_scale,
                      shape.columns, HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    acc = dq_step(acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, lo, hi, full_start, full_end, qk_scale,
                  shape.columns, HEAD_DIM, HEAD_DIM_V, BLOCK_K, False)  # fmt: skip
    acc = dq_step(acc, q_tile, dout_tile, lse_tile, delta_tile, k, v, lo, hi, full_end, end, qk_scale,
                  shape.columns, HEAD_DIM, HEAD_DIM_V, BLOCK_K, True)  # fmt: skip
    acc *= softmax_scale
    if HAS_SUM:  # read last: during the loop the registers belong to the matrix products
        acc += load_rows(of_head(dq_in, batch, head), offs_q, shape.rows, HEAD_DIM, True)
    store_rows(of_head(dq_out, batch, head), acc, offs_q, shape.rows, HEAD_DIM)


@triton.jit
def dkdv_step(
    dk, dv, k, v, q, dout, lse, delta, lo, hi, begin, end, qk_scale, seqlen_q,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add ``dS^T Q`` and ``P^T dO`` of the queries ``[begin, end)`` of one head to the sums of a block of keys."""
    for start in range(begin, end, BLOCK_Q):
        offs_q = start + tl.arange(0, BLOCK_Q)
        q_tile = load_rows(q, offs_q, seqlen_q, HEAD_DIM, True)
        lse_tile = load_lse(lse, offs_q, seqlen_q)  # +inf past the end: those rows add nothing
        p = tl.exp2(dot(k, tl.trans(q_tile), None) * qk_scale - lse_tile[None, :])
        if MASKED:
            p = tl.where(visible(offs_q, lo, hi), p, 0.0)
        dout_tile = load_rows(dout, offs_q, seqlen_q, HEAD_DIM_V, True)
        dv = dot(p.to(dout_tile.dtype), dout_tile, dv)
        delta_tile = tl.load(delta + offs_q, mask=offs_q < seqlen_q, other=0.0)
        ds = p * (dot(v, tl.trans(dout_tile), None) - delta_tile[None, :])
        dk = dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, bounds, shape, softmax_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_K keys of one key head, over its query heads in order (no atomics).

    ``shape.rows`` are keys, ``shape.columns`` queries, ``bounds`` the transposed interval. One loop, masked or (FULL)
    not: three phases spill here.
    """
    tile, batch, head = program(shape, BLOCK_K)
    first = tile * BLOCK_K  # early keys are seen by most queries: longest first
    start, _, _, end = tile_range(bounds, first, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE:
        if end <= start:  # the sums stay as they are
            return
    offs_k = first + tl.arange(0, BLOCK_K)
    lo, hi = row_interval(bounds, offs_k, shape)
    k_tile = load_rows(of_head(k, batch, head), offs_k, shape.rows, HEAD_DIM, True)
    v_tile = load_rows(of_head(v, batch, head), offs_k, shape.rows, HEAD_DIM_V, True)

    dk = tl.zeros([BLOCK_K, columns(HEAD_DIM).shape[0]], tl.float32)
    dv = tl.zeros([BLOCK_K, columns(HEAD_DIM_V).shape[0]], tl.float32)
    for member in range(shape.group):
        head_q = head * shape.group + member
        row = (batch * shape.heads * shape.group + head_q) * shape.columns
        dk, dv = dkdv_step(dk, dv, k_tile, v_tile, of_head(q, batch, head_q), of_head(dout, batch, head_q), lse + row,
                           delta + row, lo, hi, start, end, softmax_scale * LOG2_E, shape.columns,
                           HEAD_DIM, HEAD_DIM_V, BLOCK_Q, bounds.lo is not None)  # fmt: skip
    dk *= softmax_scale
    if HAS_SUM:  # read last, as in dQ
        dk += load_rows(of_head(dk_in, batch, head), offs_k, shape.rows, HEAD_DIM, True)
        dv += load_rows(of_head(dv_in, batch, head), offs_k, shape.rows, HEAD_DIM_V, True)
    store_rows(of_head(dk_out, batch, head), dk, offs_k, shape.rows, HEAD_DIM)
    store_rows(of_head(dv_out, batch, head), dv, offs_k, shape.rows, HEAD_DIM_V)
