"""Positions of tiles, and the tiles that a block of rows visits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class TileRange(NamedTuple):
    """Key tiles that a block of query rows visits, as key indices that are multiples of the tile.

    The tiles in ``[start, full_start)`` and ``[full_end, end)`` need the mask. Every row of the block sees all keys in
    ``[full_start, full_end)``.
    """

    start: int
    full_start: int
    full_end: int
    end: int


class TileVisit(NamedTuple):
    """Tile of rows from ``first`` on, and the ``TileRange`` of columns that it visits; ``keys`` excludes padding."""

    batch: Any
    head: Any
    first: Any
    keys: Any
    column_range: Any


class TileSizes(NamedTuple):
    """Constexpr sizes. Construct it in the argument list of a call: Triton makes tensors of a local's fields."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_Q: Any
    BLOCK_K: Any


class StridedTensor(NamedTuple):
    """Tensor ``[B, S, H, D]`` with last stride 1; strides count elements."""

    ptr: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any


class TmaTensor(NamedTuple):
    """Tensor ``[B, S, H, D]`` that TMA loads, or one head of it; past the last row and column, TMA reads zeros."""

    first: Any
    """TMA descriptor of the whole tensor, in tiles with the first part of the head dim."""
    second: Any
    """The same with the second part; the first descriptor again if there is only one part."""
    batch: Any = 0
    head: Any = 0


class Keys(NamedTuple):
    """K and V: whole tensors, one head, or a tile in registers."""

    k: Any
    v: Any


class Queries(NamedTuple):
    """Inputs of the backward with a row per query: whole tensors, one head, or a tile in registers."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class Gradients(NamedTuple):
    """Results of a key tile, as tensors or TMA descriptors; None if they are not computed.

    The tile's part of dQ is added to ``dq`` (fp32), by TMA if it has the descriptor ``dq_box``, in the order ``turns``.
    ``dk_in`` and ``dv_in`` are the sums so far.
    """

    dq: Any
    dq_box: Any
    turns: Any
    dk_in: Any
    dv_in: Any
    dk_out: Any
    dv_out: Any


class BlockSparseRanges(NamedTuple):
    """Kernel argument for a ``BlockSparseIndex``: the ranges of columns that each block of rows sees."""

    offsets: Any
    begins: Any
    ends: Any
    block: Any


class MaskInterval(NamedTuple):
    """Kernel argument for a ``Bounds``: the interval of columns of each row, or None for all columns."""

    lo: Any
    hi: Any
    seqused_k: Any = None
    """Number of keys of each batch row, or None."""
    block_sparse: Any = None
    """``BlockSparseRanges`` or None."""


class TileOrder(NamedTuple):
    """Order of tiles; if all fields are None, each program takes one tile, head by head."""

    l2_group: Any
    """Number of heads whose tiles are interleaved, longest first; None takes one head after another."""
    heads: Any
    """Number of heads of all batch rows; None without ``l2_group``."""
    count: Any
    """Number of tiles of a persistent kernel, whose programs take tile after tile; None otherwise."""


HEAD_BY_HEAD_ORDER = TileOrder(None, None, None)


class LaunchShape(NamedTuple):
    """Sizes of a launch."""

    rows: Any
    """Tokens that are split among programs."""
    columns: Any
    """Tokens that each program loops over."""
    heads: Any
    """Heads that are split among programs."""
    group: Any
    """Query heads per key head."""
    order: Any = HEAD_BY_HEAD_ORDER
    packed: Any = None
    """Query heads in a tile, or None. Row r is token ``r // packed`` of query head ``r % packed`` of the key head."""
    splits: Any = None
    """Programs per key head of a split dK/dV, or None."""


@triton.jit
def program_placement(shape, BLOCK: tl.constexpr):
    """Return (tile, batch, head) of this program, which takes one tile."""
    return tile_placement(tl.program_id(0), shape, BLOCK)


@triton.jit
def tile_placement(index, shape, BLOCK: tl.constexpr):
    """Return (tile, batch, head) of the ``index``-th tile in the order; tile 0 is the longest tile of a head."""
    tiles = tl.cdiv(shape.rows if shape.packed is None else shape.rows * shape.packed, BLOCK)
    if shape.order.l2_group is None:  # the tiles of one head run together and share its K/V in L2
        tile, head = index % tiles, index // tiles
    else:  # interleave as many heads as fit in L2, longest tiles first
        first = index // (tiles * shape.order.l2_group) * shape.order.l2_group
        heads = tl.minimum(shape.order.l2_group, shape.order.heads - first)
        rest = index - first * tiles
        tile, head = rest // heads, first + rest % heads
    # 64-bit, because offsets of batch rows and heads can exceed 2^31 elements
    return tile, (head // shape.heads).to(tl.int64), (head % shape.heads).to(tl.int64)


@triton.jit
def tile_rows(first, head, shape, BLOCK: tl.constexpr):
    """Return the tokens ``[BLOCK]`` of a tile's rows and their query head, which is ``[BLOCK]`` if packed."""
    offs = first + tl.arange(0, BLOCK)
    if shape.packed is None:
        return offs, head
    else:
        return offs // shape.packed, head * shape.packed + offs % shape.packed


@triton.jit
def head_column(head, shape):
    """Return the query heads of a tile as a column: one head or, packed, ``[BLOCK, 1]``."""
    if shape.packed is None:
        return head
    else:
        return head[:, None]


@triton.jit
def head_row_offset(batch, head, shape):
    """Return the offset of a head's vector in ``lse`` and ``delta``, ``[B, H, S]``; if packed, of each row's head."""
    if shape.packed is None:
        return (batch * shape.heads + head) * shape.rows
    else:
        return (batch * shape.heads * shape.packed + head) * shape.rows


@triton.jit
def tensor_argument(tensor, second):
    """Return a kernel argument for `select_head`: a ``StridedTensor``, or descriptors as a ``TmaTensor``."""
    if isinstance(tensor, tl.tensor_descriptor):
        return TmaTensor(tensor, tensor if second is None else second)  # Triton 3.6 cannot return None in a tuple
    else:
        return tensor


@triton.jit
def select_head(tensor, batch, head):
    """Return the ``[S, D]`` tensor of one head, or of a column of heads, one for each row of a tile."""
    if isinstance(tensor[0], tl.tensor_descriptor):
        return TmaTensor(tensor.first, tensor.second, batch.to(tl.int32), head.to(tl.int32))
    else:
        ptr = tensor.ptr + batch * tensor.stride_b + head * tensor.stride_h
        return StridedTensor(ptr, tensor.stride_b, tensor.stride_s, tensor.stride_h)


@triton.jit
def load_row_bounds(interval, offs, rows, columns):
    """Load the bounds (lo, hi) of the rows of a tile; rows past the end see no column."""
    inside = offs < rows
    if interval.lo is None:
        return offs * 0, tl.where(inside, columns, 0)
    else:
        lo = tl.load(interval.lo + offs, mask=inside, other=0)
        hi = tl.load(interval.hi + offs, mask=inside, other=0)
        if interval.seqused_k is not None:
            hi = tl.minimum(hi, columns)
        return lo, hi


@triton.jit
def load_tile_limits(interval, first, shape, BLOCK_ROWS: tl.constexpr):
    """Load the bounds of the first and the last row of a tile; bounds never decrease, so these are its extremes."""
    if interval.lo is None:
        return 0, 0, shape.columns, shape.columns
    else:
        if shape.packed is None:
            last = tl.minimum(first + BLOCK_ROWS, shape.rows) - 1
        else:
            last = tl.minimum((first + BLOCK_ROWS - 1) // shape.packed, shape.rows - 1)
            first = first // shape.packed
        if interval.seqused_k is not None:
            last = tl.maximum(last, first)  # the caller skips a tile that is only padding
        lo_first, lo_last = tl.load(interval.lo + first), tl.load(interval.lo + last)
        hi_first, hi_last = tl.load(interval.hi + first), tl.load(interval.hi + last)
        if interval.seqused_k is not None:
            hi_first, hi_last = tl.minimum(hi_first, shape.columns), tl.minimum(hi_last, shape.columns)
        return lo_first, lo_last, hi_first, hi_last


@triton.jit
def load_tile_range(interval, first, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``TileRange`` of a block of rows; the jit mirror of ``bounds.tile_range``."""
    lo_first, lo_last, hi_first, hi_last = load_tile_limits(interval, first, shape, BLOCK_ROWS)
    start = lo_first // BLOCK * BLOCK
    end = tl.where(hi_last > lo_first, tl.cdiv(hi_last, BLOCK) * BLOCK, start)
    full_start = tl.maximum(tl.cdiv(lo_last, BLOCK) * BLOCK, start)
    full_end = hi_first // BLOCK * BLOCK
    has_full = full_end > full_start  # without a full tile, all tiles are in the tail
    if interval.seqused_k is not None and shape.packed is None:  # the rows may be keys, and this tile only padding
        end = tl.where(first < shape.rows, end, start)
    return TileRange(start, tl.where(has_full, full_start, start), tl.where(has_full, full_end, start), end)


@triton.jit
def visit_query_tile(index, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``TileVisit`` of the ``index``-th tile of the forward or dQ."""
    tile, batch, head = tile_placement(index, shape, BLOCK_ROWS)
    rows = shape.rows if shape.packed is None else shape.rows * shape.packed
    first = (tl.cdiv(rows, BLOCK_ROWS) - 1 - tile) * BLOCK_ROWS  # longest first: late rows see most keys
    if bounds.seqused_k is not None:
        keys = tl.load(bounds.seqused_k + batch)
        shape = LaunchShape(shape.rows, keys, shape.heads, shape.group, None, shape.packed, None)
    return TileVisit(batch, head, first, shape.columns, load_tile_range(bounds, first, shape, BLOCK_ROWS, BLOCK))


@triton.jit
def visit_key_index(index, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``TileVisit`` of the ``index``-th tile of dK/dV."""
    tile, batch, head = tile_placement(index, shape, BLOCK_ROWS)
    return visit_key_tile(tile, batch, head, bounds, shape, BLOCK_ROWS, BLOCK)


@triton.jit
def visit_key_tile(tile, batch, head, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ``TileVisit`` of a tile of keys."""
    first = tile * BLOCK_ROWS  # longest first: most queries see early keys
    if bounds.seqused_k is not None:  # later keys are padding
        keys = tl.load(bounds.seqused_k + batch)
        shape = LaunchShape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
    return TileVisit(batch, head, first, shape.rows, load_tile_range(bounds, first, shape, BLOCK_ROWS, BLOCK))


@triton.jit
def load_block_ranges(ranges, first, shape):
    """Return [first, last) indices of the column ranges that the block of rows with row ``first`` sees."""
    block = (first if shape.packed is None else first // shape.packed) // ranges.block
    return tl.load(ranges.offsets + block), tl.load(ranges.offsets + block + 1)


@triton.jit
def clip_tile_range(ranges, index, visits):
    """Return the intersection of a ``TileRange`` with the ``index``-th range of columns."""
    begin, past = tl.load(ranges.begins + index), tl.load(ranges.ends + index)
    start = tl.maximum(visits.start, begin)
    end = tl.maximum(tl.minimum(visits.end, past), start)
    full_start = tl.minimum(tl.maximum(visits.full_start, start), end)
    full_end = tl.minimum(tl.maximum(visits.full_end, full_start), end)
    return TileRange(start, full_start, full_end, end)


@triton.jit
def visible_mask(offs, lo, hi):
    """Return bool ``[rows, columns]``: True if the column lies in the row's interval."""
    return (offs[None, :] >= lo[:, None]) & (offs[None, :] < hi[:, None])
