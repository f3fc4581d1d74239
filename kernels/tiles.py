"""What the kernels share: where a tile lies, how it is loaded, which tiles a block of rows visits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Strided(NamedTuple):
    """A tensor ``[B, S, H, D]`` with a unit last stride; the strides count elements."""

    ptr: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any


class Interval(NamedTuple):
    """The two vectors of a ``Bounds`` that run along the rows of the program, or two None."""

    lo: Any
    hi: Any


class Shape(NamedTuple):
    """``rows``: the sequence cut into programs. ``columns``: the sequence that each program walks.

    ``heads`` counts the programs' heads; ``group`` is query heads per key head.
    """

    rows: Any
    columns: Any
    heads: Any
    group: Any


@triton.jit
def program(shape, BLOCK: tl.constexpr):
    """(tile, batch, head) of this program; the tiles of one head run together, so that they share its K/V in L2."""
    tiles = tl.cdiv(shape.rows, BLOCK)
    pid = tl.program_id(0)
    head = pid // tiles
    # 64-bit: batch and head strides pass 2^31 elements long before a GPU's memory is full
    return pid % tiles, (head // shape.heads).to(tl.int64), (head % shape.heads).to(tl.int64)


@triton.jit
def of_head(tensor, batch, head):
    """The [S, D] part of one head."""
    ptr = tensor.ptr + batch * tensor.stride_b + head * tensor.stride_h
    return Strided(ptr, tensor.stride_b, tensor.stride_s, tensor.stride_h)


@triton.jit
def row_pointers(tensor, offs, HEAD_DIM: tl.constexpr):
    # 64-bit: row 262,144 with a stride of 8,192 elements already wraps an int32
    return tensor.ptr + offs[:, None].to(tl.int64) * tensor.stride_s + columns(HEAD_DIM)[None, :]


@triton.jit
def columns(HEAD_DIM: tl.constexpr):
    """The columns of a tile: the head dim padded to a power of two that a matrix instruction takes."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    return tl.arange(0, BLOCK_D if BLOCK_D > 16 else 16)


@triton.jit
def load_rows(tensor, offs, limit, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr):
    """Rows ``offs`` of one head; zeros past the head dim and, where CHECK, past the sequence."""
    offs_d = columns(HEAD_DIM)
    PADDED: tl.constexpr = offs_d.shape[0] != HEAD_DIM
    if CHECK and PADDED:
        mask = (offs[:, None] < limit) & (offs_d[None, :] < HEAD_DIM)
        return tl.load(row_pointers(tensor, offs, HEAD_DIM), mask=mask, other=0.0)
    elif CHECK:
        return tl.load(row_pointers(tensor, offs, HEAD_DIM), mask=offs[:, None] < limit, other=0.0)
    elif PADDED:
        return tl.load(row_pointers(tensor, offs, HEAD_DIM), mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(row_pointers(tensor, offs, HEAD_DIM))


@triton.jit
def store_rows(tensor, value, offs, limit, HEAD_DIM: tl.constexpr):
    inside = (offs[:, None] < limit) & (columns(HEAD_DIM)[None, :] < HEAD_DIM)
    tl.store(row_pointers(tensor, offs, HEAD_DIM), value.to(tensor.ptr.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, acc):
    # a plain fp32 dot is TF32 on a GPU, and 'ieee' spills; 16-bit inputs ignore the precision
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def row_interval(interval, offs, shape):
    """Bounds of the rows of a tile; rows past the end see nothing."""
    inside = offs < shape.rows
    if interval.lo is None:
        return tl.zeros_like(offs), tl.where(inside, shape.columns, 0)
    else:
        return tl.load(interval.lo + offs, mask=inside, other=0), tl.load(interval.hi + offs, mask=inside, other=0)


@triton.jit
def row_limits(interval, first, shape, BLOCK_ROWS: tl.constexpr):
    """The bounds of the first and the last row of a tile, which are the extremes of all its rows."""
    if interval.lo is None:
        return 0, 0, shape.columns, shape.columns
    else:
        last = tl.minimum(first + BLOCK_ROWS, shape.rows) - 1
        lo_first, lo_last = tl.load(interval.lo + first), tl.load(interval.lo + last)
        return lo_first, lo_last, tl.load(interval.hi + first), tl.load(interval.hi + last)


@triton.jit
def tile_range(interval, first, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The jit mirror of ``bounds.tile_range``: (start, full_start, full_end, end)."""
    lo_first, lo_last, hi_first, hi_last = row_limits(interval, first, shape, BLOCK_ROWS)
    start = lo_first // BLOCK * BLOCK
    end = tl.where(hi_last > lo_first, tl.cdiv(hi_last, BLOCK) * BLOCK, start)
    full_start = tl.maximum(tl.cdiv(lo_last, BLOCK) * BLOCK, start)
    full_end = hi_first // BLOCK * BLOCK
    some_full = full_end > full_start  # where no tile is seen whole, all are the tail's
    return start, tl.where(some_full, full_start, start), tl.where(some_full, full_end, start), end


@triton.jit
def visible(offs, lo, hi):
    """[rows, columns] of a tile: whether the column lies in the row's interval."""
    return (offs[None, :] >= lo[:, None]) & (offs[None, :] < hi[:, None])
