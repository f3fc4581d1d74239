"""What the kernels share: where a tile lies, how it is loaded, which tiles a block of rows visits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

LEAST = 16  # columns of a matrix instruction


class Strided(NamedTuple):
    """A tensor ``[B, S, H, D]`` with a unit last stride; the strides count elements."""

    ptr: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any


class BlockRuns(NamedTuple):
    """A ``Runs``: which runs of columns each block of rows sees."""

    offsets: Any
    begins: Any
    ends: Any
    block: Any


class Interval(NamedTuple):
    """The two vectors of a ``Bounds`` that run along the rows of the program, or two None; and what narrows them."""

    lo: Any
    hi: Any
    used: Any = None
    """Keys of each batch row, or None."""
    runs: Any = None
    """``BlockRuns`` or None."""


class Order(NamedTuple):
    """Which tiles a program takes, and when: the jit side of ``order.Order``. All None: one each, head by head."""

    swath: Any
    """Heads whose tiles come together, longest first; None: the tiles of one head after those of another."""
    heads: Any
    """Of all batch rows together, where there are swaths."""
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
    """(tile, batch, head) of the tile that is ``index``-th in the order; the jit mirror of ``order.placement``."""
    tiles = tl.cdiv(shape.rows if shape.packed is None else shape.rows * shape.packed, BLOCK)
    if shape.order.swath is None:  # the tiles of one head run together, so that they share its K/V in L2
        tile, head = index % tiles, index // tiles
    else:  # those of as many heads as fit there, the longest of all of them first
        first = index // (tiles * shape.order.swath) * shape.order.swath
        heads = tl.minimum(shape.order.swath, shape.order.heads - first)
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


@triton.constexpr_function
def first_part(head_dim):
    """Columns of the first, or only, part of a tile: a power of two that a matrix instruction takes.

    A head dim that is none is cut in two, 192 into 128 and 64, where that is less than padding it.
    """
    whole = triton.next_power_of_2(head_dim)
    half = whole // 2
    rest = max(triton.next_power_of_2(head_dim - half), LEAST)
    return half if half >= LEAST and half + rest < whole else padded(head_dim)


@triton.constexpr_function
def second_part(head_dim):
    """Columns of the second part; 0: there is none."""
    rest = head_dim - first_part(head_dim)
    return max(triton.next_power_of_2(rest), LEAST) if rest > 0 else 0


@triton.constexpr_function
def padded(head_dim):
    """Columns of a tile in one part."""
    return max(triton.next_power_of_2(head_dim), LEAST)


@triton.jit
def load_rows(tensor, offs, limit, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr):
    """Rows ``offs`` of one head, in parts; zeros past the head dim and, where CHECK, past the sequence."""
    FIRST: tl.constexpr = first_part(HEAD_DIM)
    SECOND: tl.constexpr = second_part(HEAD_DIM)
    first = load_part(tensor, offs, limit, 0, FIRST, HEAD_DIM, CHECK)
    if SECOND == 0:
        return (first,)
    else:
        return (first, load_part(tensor, offs, limit, FIRST, SECOND, HEAD_DIM, CHECK))


@triton.jit
def load_part(
    tensor, offs, limit, BEGIN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr
):
    offs_d = BEGIN + tl.arange(0, WIDTH)
    pointers = row_pointers(tensor, offs, offs_d)
    PADDED: tl.constexpr = BEGIN + WIDTH > HEAD_DIM
    if CHECK and PADDED:
        return tl.load(pointers, mask=(offs[:, None] < limit) & (offs_d[None, :] < HEAD_DIM), other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=offs[:, None] < limit, other=0.0)
    elif PADDED:
        return tl.load(pointers, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(tensor, start, limit, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The rows from ``start``, as `load_rows`; one 64-bit base per tile, within the tile 32 bits."""
    base = tensor.ptr + tl.cast(start, tl.int64) * tensor.stride_s
    FIRST: tl.constexpr = first_part(HEAD_DIM)
    SECOND: tl.constexpr = second_part(HEAD_DIM)
    first = near_part(base, tensor.stride_s, limit - start, ROWS, 0, FIRST, HEAD_DIM)
    if SECOND == 0:
        return (first,)
    else:
        return (first, near_part(base, tensor.stride_s, limit - start, ROWS, FIRST, SECOND, HEAD_DIM))


@triton.jit
def near_part(
    base, stride, count, ROWS: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    rows, offs_d = tl.arange(0, ROWS), BEGIN + tl.arange(0, WIDTH)
    inside = rows[:, None] < count
    if BEGIN + WIDTH > HEAD_DIM:
        inside &= offs_d[None, :] < HEAD_DIM
    return tl.load(base + (rows[:, None] * stride + offs_d[None, :]), mask=inside, other=0.0)


@triton.jit
def store_rows(tensor, value, offs, limit, HEAD_DIM: tl.constexpr):
    """The rows ``offs`` of one head, in parts as `load_rows` has them."""
    store_part(tensor, value[0], offs, limit, 0, HEAD_DIM)
    if len(value) == 2:
        store_part(tensor, value[1], offs, limit, first_part(HEAD_DIM), HEAD_DIM)


@triton.jit
def store_part(tensor, value, offs, limit, BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr):
    offs_d = BEGIN + tl.arange(0, value.shape[1])
    inside = (offs[:, None] < limit) & (offs_d[None, :] < HEAD_DIM)
    tl.store(row_pointers(tensor, offs, offs_d), value.to(tensor.ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_pointers(tensor, offs, offs_d):
    # 64-bit: row 262,144 with a stride of 8,192 elements already wraps an int32
    return tensor.ptr + offs[:, None].to(tl.int64) * tensor.stride_s + offs_d[None, :]


@triton.jit
def dot(a, b, acc):
    # a plain fp32 dot is TF32 on a GPU, and 'ieee' spills; 16-bit inputs ignore the precision
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def zeros(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """An accumulator of rows, fp32, in parts."""
    SECOND: tl.constexpr = second_part(HEAD_DIM)
    first = tl.zeros([ROWS, first_part(HEAD_DIM)], tl.float32)
    if SECOND == 0:
        return (first,)
    else:
        return (first, tl.zeros([ROWS, SECOND], tl.float32))


@triton.jit
def products(a, b, acc=None):
    """``acc + a b^T`` of two tiles of rows: the sum over their parts."""
    result = dot(a[0], tl.trans(b[0]), acc)
    if len(a) == 2:
        result = dot(a[1], tl.trans(b[1]), result)
    return result


@triton.jit
def accumulate(weights, tile, acc):
    """``acc + weights tile``, part by part."""
    first = dot(weights.to(tile[0].dtype), tile[0], acc[0])
    if len(acc) == 1:
        return (first,)
    else:
        return (first, dot(weights.to(tile[1].dtype), tile[1], acc[1]))


@triton.jit
def scaled(acc, factor):
    """Every part times ``factor``: a number, or a column of them."""
    if len(acc) == 1:
        return (acc[0] * factor,)
    else:
        return (acc[0] * factor, acc[1] * factor)


@triton.jit
def divided(acc, divisor):
    """Every part divided by a column of numbers."""
    if len(acc) == 1:
        return (acc[0] / divisor,)
    else:
        return (acc[0] / divisor, acc[1] / divisor)


@triton.jit
def added(a, b):
    """The sum, part by part."""
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit
def row_interval(interval, offs, shape):
    """Bounds of the rows of a tile; rows past the end see nothing."""
    inside = offs < shape.rows
    if interval.lo is None:
        return tl.zeros_like(offs), tl.where(inside, shape.columns, 0)
    else:
        lo = tl.load(interval.lo + offs, mask=inside, other=0)
        hi = tl.load(interval.hi + offs, mask=inside, other=0)
        if interval.used is not None:
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
        if interval.used is not None:
            last = tl.maximum(last, first)  # a tile of padding alone is stopped by its caller
        lo_first, lo_last = tl.load(interval.lo + first), tl.load(interval.lo + last)
        hi_first, hi_last = tl.load(interval.hi + first), tl.load(interval.hi + last)
        if interval.used is not None:
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
    if interval.used is not None and shape.packed is None:  # of rows that are keys; packed ones never are
        end = tl.where(first < shape.rows, end, start)
    return start, tl.where(some_full, full_start, start), tl.where(some_full, full_end, start), end


@triton.jit
def visit(index, bounds, shape, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """What the ``index``-th tile of the forward and of dQ is about: (batch, head, first row, keys, range of keys)."""
    tile, batch, head = placement(index, shape, BLOCK_ROWS)
    rows = shape.rows if shape.packed is None else shape.rows * shape.packed
    first = (tl.cdiv(rows, BLOCK_ROWS) - 1 - tile) * BLOCK_ROWS  # late rows see most keys: longest first
    if bounds.used is not None:
        keys = tl.load(bounds.used + batch)
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
    if bounds.used is not None:  # the rows behind are padding: nobody sees them
        keys = tl.load(bounds.used + batch)
        shape = Shape(keys, shape.columns, shape.heads, shape.group, None, None, shape.splits)
    return first, shape.rows, tile_range(bounds, first, shape, BLOCK_ROWS, BLOCK)


@triton.jit
def run_range(runs, first, shape):
    """The runs of columns that the block of rows with row ``first`` sees: [begin, end) of ``begins`` and ``ends``."""
    block = (first if shape.packed is None else first // shape.packed) // runs.block
    return tl.load(runs.offsets + block), tl.load(runs.offsets + block + 1)


@triton.jit
def clipped(runs, run, start, full_start, full_end, end):
    """What is left of a tile range inside one run."""
    begin, past = tl.load(runs.begins + run), tl.load(runs.ends + run)
    start = tl.maximum(start, begin)
    end = tl.maximum(tl.minimum(end, past), start)
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.minimum(tl.maximum(full_end, full_start), end)
    return start, full_start, full_end, end


@triton.jit
def visible(offs, lo, hi):
    """[rows, columns] of a tile: whether the column lies in the row's interval."""
    return (offs[None, :] >= lo[:, None]) & (offs[None, :] < hi[:, None])
