"""Where a tile lies, and which tiles a block of rows visits."""

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


class BlockSparseRanges(NamedTuple):
    """A ``BlockSparseIndex``: which ranges of columns each block of rows sees."""

    offsets: Any
    begins: Any
    ends: Any
    block: Any


class Interval(NamedTuple):
    """The two vectors of a ``Bounds`` that run along the rows of the program, or two None; and what narrows them."""

    lo: Any
    hi: Any
    seqused_k: Any = None
    """Keys of each batch row, or None."""
    block_sparse: Any = None
    """``BlockSparseRanges`` or None."""


class Order(NamedTuple):
    """Which tiles a program takes, and when. All None: one each, head by head."""

    l2_group: Any
    """Heads whose tiles come together, longest first; None: the tiles of one head after those of another."""
    heads: Any
    """Of all batch rows together, where there are L2 groups."""
    count: Any
    """Tiles of all heads, where a program walks from tile to tile; None: it takes one."""


HEAD_BY_HEAD = Order(None, None, None)


class Shape(NamedTuple):
    """``rows``: the sequence cut into programs. ``columns``: the sequence that each program walks.

    ``heads`` counts the programs' heads; ``group`` is query heads per key head. ``packed`` query heads, where it is not
    None, are the rows of a tile in turn: row r is token ``r // packed`` of head ``r % packed`` of the program's key
    head. ``splits`` program heads, where it is not None, share a key head of dK/dV.
    """

    rows: Any
    columns: Any
    heads: Any
    group: Any
    order: Any = HEAD_BY_HEAD
    packed: Any = None
    splits: Any = None


@triton.jit
def program(shape, BLOCK: tl.constexpr):
    """(tile, batch, head) of this program, which takes one tile."""
    return placement(tl.program_id(0), shape, BLOCK)


@triton.jit
def placement(index, shape, BLOCK: tl.constexpr):
    """(tile, batch, head) of the tile that is ``index``-th in the order; tile 0 is a head's longest."""
    tiles = tl.cdiv(shape.rows if shape.packed is None else shape.rows * shape.packed, BLOCK)
    if shape.order.l2_group is None:  # the tiles of one head run together, so that they share its K/V in L2
        tile, head = index % tiles, index // tiles
    else:  # those of as many heads as fit there, the longest of all of them first
        first = index // (tiles * shape.order.l2_group) * shape.order.l2_group
        heads = tl.minimum(shape.order.l2_group, shape.order.heads - first)
        rest = index - first * tiles
        tile, head = rest // heads, first + rest % heads
    # 64-bit: batch and head strides pass 2^31 elements long before a GPU's memory is full
    return tile, (head // shape.heads).to(tl.int64), (head % shape.heads).to(tl.int64)


@triton.jit
def tile_rows(first, head, shape, BLOCK: tl.constexpr):
    """(tokens, query heads) of the rows of a tile: ``[BLOCK]``, and one head or, packed, one per row."""
    offs = first + tl.arange(0, BLOCK)
    if shape.packed is None:
        return offs, head
    else:
        return offs // shape.packed, head * shape.packed + offs % shape.packed


@triton.jit
def as_column(head, shape):
    """The query heads of a tile beside its rows: one head, or ``[BLOCK, 1]``."""
    if shape.packed is None:
        return head
    else:
        return head[:, None]


@triton.jit
def vector_of(batch, head, shape):
    """Where the vector of one head begins in ``lse`` and ``delta``, ``[B, H, S]``; packed, of each row's head."""
    if shape.packed is None:
        return (batch * shape.heads + head) * shape.rows
    else:
        return (batch * shape.heads * shape.packed + head) * shape.rows


@triton.jit
def of_head(tensor, batch, head):
    """The [S, D] part of one head; of a column of heads ``[rows, 1]``, one for each row of a tile."""
    ptr = tensor.ptr + batch * tensor.stride_b + head * tensor.stride_h
    return Strided(ptr, tensor.stride_b, tensor.stride_s, tensor.stride_h)


@triton.jit
def row_interval(interval, offs, shape):
    """Bounds of the rows of a tile; rows past the end see nothing."""
    inside = offs < shape.rows
    if interval.lo is None:
        return tl.zeros_like(offs), tl.where(inside, shape.columns, 0)
    else:
        lo = tl.load(interval.lo + offs, mask=inside, other=0)
        hi = tl.load(interval.hi + offs, mask=inside, other=0)
        if interval.seqused_k is not None:
            hi = tl.minimum(hi, shape.columns)
        return lo, hi


@triton.jit
def row_limits(interval, first, shape, BLOCK_ROWS: tl.constexpr):
    """The bounds of the first and the last row of a tile, which are the extremes of all its rows."""
    if interval.lo is None:
        return 0, 0, shape.columns, shape.columns
    else:
        if shape.packed is None:
            last = tl.minimum(first + BLOCK_ROWS, shape.rows) - 1
        else:
            last = tl.minimum((first + BLOCK_ROWS - 1) // shape.packed, shape.rows - 1)
            first = first // shape.packed
        if interval.seqused_k is not None:
            last = tl.maximum(last, first)  # a tile of padding alone is stopped by its caller
        lo_first, lo_last = tl.load(interval.lo + first), tl.load(interval.lo + last)
        hi_first, hi_last = tl.load(interval.hi + first), tl.load(interval.hi + last)
        if interval.seqused_k is not None:
            hi_first, hi_last = tl.minimum(hi_first, shape.columns), tl.minimum(hi_last, shape.columns)
        return lo_first, lo_last, hi_first, hi_last


@triton.jit
def tile_range(interval, first, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The jit mirror of ``bounds.tile_range``: (start, full_start, full_end, end)."""
    lo_first, lo_last, hi_first, hi_last = row_limits(interval, first, shape, BLOCK_ROWS)
    start = lo_first // BLOCK * BLOCK
    end = tl.where(hi_last > lo_first, tl.cdiv(hi_last, BLOCK) * BLOCK, start)
    full_start = tl.maximum(tl.cdiv(lo_last, BLOCK) * BLOCK, start)
    full_end = hi_first // BLOCK * BLOCK
    some_full = full_end > full_start  # where no tile is seen whole, all are the tail's
    if interval.seqused_k is not None and shape.packed is None:  # of rows that are keys; packed ones never are
        end = tl.where(first < shape.rows, end, start)
    return start, tl.where(some_full, full_start, start), tl.where(some_full, full_end, start), end


@triton.jit
def visit(index, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What the ``index``-th tile of the forward and of dQ is about: (batch, head, first row, keys, range of keys)."""
    tile, batch, head = placement(index, shape, BLOCK_ROWS)
    rows = shape.rows if shape.packed is None else shape.rows * shape.packed
    first = (tl.cdiv(rows, BLOCK_ROWS) - 1 - tile) * BLOCK_ROWS  # late rows see most keys: longest first
    if bounds.seqused_k is not None:
        keys = tl.load(bounds.seqused_k + batch)
        shape = Shape(shape.rows, keys, shape.heads, shape.group, None, shape.packed, None)
    return batch, head, first, shape.columns, tile_range(bounds, first, shape, BLOCK_ROWS, BLOCK)


@triton.jit
def visit_keys(index, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the ``index``-th tile of dK/dV: (batch, head, first key, keys, range of queries)."""
    tile, batch, head = placement(index, shape, BLOCK_ROWS)
    first, keys, visited = visit_key_tile(tile, batch, bounds, shape, BLOCK_ROWS, BLOCK)
    return batch, head, first, keys, visited


@triton.jit
def visit_key_tile(tile, batch, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of one tile of keys: (first key, keys, range of queries)."""
    first = tile * BLOCK_ROWS  # early keys are seen by most queries: longest first
    if bounds.seqused_k is not None:  # the rows behind are padding: nobody sees them
        keys = tl.load(bounds.seqused_k + batch)
        shape = Shape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
    return first, shape.rows, tile_range(bounds, first, shape, BLOCK_ROWS, BLOCK)


@triton.jit
def ranges_of_block(ranges, first, shape):
    """The ranges of columns that the block of rows with row ``first`` sees: [begin, end) of ``begins`` and ``ends``."""
    block = (first if shape.packed is None else first // shape.packed) // ranges.block
    return tl.load(ranges.offsets + block), tl.load(ranges.offsets + block + 1)


@triton.jit
def clipped(ranges, index, start, full_start, full_end, end):
    """What is left of a tile range inside one range."""
    begin, past = tl.load(ranges.begins + index), tl.load(ranges.ends + index)
    start = tl.maximum(start, begin)
    end = tl.maximum(tl.minimum(end, past), start)
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.minimum(tl.maximum(full_end, full_start), end)
    return start, full_start, full_end, end


@triton.jit
def visible(offs, lo, hi):
    """[rows, columns] of a tile: whether the column lies in the row's interval."""
    return (offs[None, :] >= lo[:, None]) & (offs[None, :] < hi[:, None])
