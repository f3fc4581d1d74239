"""Tiles in registers: load, multiply and store.

A tile is a tuple of one or two parts along the head dim. Two parts avoid padding, such as 128 and 64 for head dim 192.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from .tiles import LOG2_E

MIN_PART_WIDTH = 16  # smallest number of columns of a matrix instruction
MAX_PART_WIDTH = 256  # largest number of columns of a matrix instruction


@triton.constexpr_function
def first_part_width(head_dim):
    """Return the columns of the first part: a power of two of at least MIN_PART_WIDTH.

    A head dim is split in two parts, such as 192 into 128 and 64, if that takes fewer columns than padding, or if it is
    larger than MAX_PART_WIDTH.
    """
    power_of_two = triton.next_power_of_2(head_dim)
    half = power_of_two // 2
    rest = max(triton.next_power_of_2(head_dim - half), MIN_PART_WIDTH)
    is_narrower = half >= MIN_PART_WIDTH and half + rest < power_of_two
    return half if is_narrower or power_of_two > MAX_PART_WIDTH else padded_width(head_dim)


@triton.constexpr_function
def second_part_width(head_dim):
    """Return the columns of the second part, or 0 if there is only one part."""
    rest = head_dim - first_part_width(head_dim)
    return max(triton.next_power_of_2(rest), MIN_PART_WIDTH) if rest > 0 else 0


@triton.constexpr_function
def padded_width(head_dim):
    """Return the columns of a tile that is padded to one part."""
    return max(triton.next_power_of_2(head_dim), MIN_PART_WIDTH)


@triton.constexpr_function
def needs_reload(dtype, *head_dims):
    """Return True if 16 rows of these head dims exceed 99 KB of shared memory. TMA loads only narrower rows."""
    columns = sum(first_part_width(dim) + second_part_width(dim) for dim in head_dims)
    return dtype == tl.pointer_type(tl.float32) and columns > 2 * MAX_PART_WIDTH


@triton.jit
def load_rows(tensor, offs, limit, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Load the rows ``offs`` of one head; fill with zeros past the head dim and, if CHECK, past ``limit``.

    VOLATILE keeps the compiler from moving the load out of a loop.
    """
    FIRST: tl.constexpr = first_part_width(HEAD_DIM)
    SECOND: tl.constexpr = second_part_width(HEAD_DIM)
    first = load_part(tensor, offs, limit, 0, FIRST, HEAD_DIM, CHECK, VOLATILE)
    if SECOND == 0:
        return (first,)
    else:
        return (first, load_part(tensor, offs, limit, FIRST, SECOND, HEAD_DIM, CHECK, VOLATILE))


@triton.jit
def load_block(tensor, start, offs, limit, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr):
    """Load the rows ``offs`` like `load_rows`. TMA loads those of a ``TmaTensor``, which must begin at ``start``."""
    ROWS: tl.constexpr = offs.shape[0]
    FIRST: tl.constexpr = first_part_width(HEAD_DIM)
    SECOND: tl.constexpr = second_part_width(HEAD_DIM)
    if isinstance(tensor[0], tl.tensor_descriptor):
        first = tensor.first.load([tensor.batch, start, tensor.head, 0]).reshape(ROWS, FIRST)
        if SECOND == 0:
            return (first,)
        else:
            return (first, tensor.second.load([tensor.batch, start, tensor.head, FIRST]).reshape(ROWS, SECOND))
    else:
        return load_rows(tensor, offs, limit, HEAD_DIM, CHECK)


@triton.jit
def load_part(
    tensor, offs, limit, BEGIN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, CHECK: tl.constexpr,
    VOLATILE: tl.constexpr = False,
):  # fmt: skip
    offs_d = BEGIN + tl.arange(0, WIDTH)
    pointers = row_pointers(tensor, offs, offs_d)
    PADDED: tl.constexpr = BEGIN + WIDTH > HEAD_DIM
    if CHECK and PADDED:
        inside = (offs[:, None] < limit) & (offs_d[None, :] < HEAD_DIM)
        return tl.load(pointers, mask=inside, other=0.0, volatile=VOLATILE)
    elif CHECK:
        return tl.load(pointers, mask=offs[:, None] < limit, other=0.0, volatile=VOLATILE)
    elif PADDED:
        return tl.load(pointers, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def keep_value_rows(tensor, start, offs, limit, sizes):
    """Load rows of v or dO for all steps of a loop, or return the arguments with which each step loads them."""
    if needs_reload(tensor[0].dtype, sizes.HEAD_DIM, sizes.HEAD_DIM_V):
        return tensor, offs, limit
    else:
        return load_block(tensor, start, offs, limit, sizes.HEAD_DIM_V, True)


@triton.jit
def kept_value_rows(rows, HEAD_DIM_V: tl.constexpr):
    """Return the tile of `keep_value_rows`."""
    if len(rows) == 3:
        return load_rows(rows[0], rows[1], rows[2], HEAD_DIM_V, True, True)
    else:
        return rows


@triton.jit
def load_lse_log2(lse, offs, limit):
    """Load ``lse`` in base 2; return +inf for rows that see no key, so that their P is 0."""
    value = tl.load(lse + offs, mask=offs < limit, other=float("-inf"))
    return tl.where(value == float("-inf"), float("inf"), value * LOG2_E)


@triton.jit
def load_tile(tensor, start, limit, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load the rows from ``start`` like `load_rows`, with one 64-bit base per tile and 32-bit offsets."""
    base = tensor.ptr + tl.cast(start, tl.int64) * tensor.stride_s
    FIRST: tl.constexpr = first_part_width(HEAD_DIM)
    SECOND: tl.constexpr = second_part_width(HEAD_DIM)
    first = load_tile_part(base, tensor.stride_s, limit - start, ROWS, 0, FIRST, HEAD_DIM)
    if SECOND == 0:
        return (first,)
    else:
        return (first, load_tile_part(base, tensor.stride_s, limit - start, ROWS, FIRST, SECOND, HEAD_DIM))


@triton.jit
def load_tile_part(
    base, stride, count, ROWS: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr
):
    rows, offs_d = tl.arange(0, ROWS), BEGIN + tl.arange(0, WIDTH)
    inside = rows[:, None] < count
    if BEGIN + WIDTH > HEAD_DIM:
        inside &= offs_d[None, :] < HEAD_DIM
    return tl.load(base + (rows[:, None] * stride + offs_d[None, :]), mask=inside, other=0.0)


@triton.jit
def store_rows(tensor, value, offs, limit, HEAD_DIM: tl.constexpr):
    """Store a tile to the rows ``offs`` of one head; write nothing past ``limit`` and the head dim."""
    store_part(tensor, value[0], offs, limit, 0, HEAD_DIM)
    if len(value) == 2:
        store_part(tensor, value[1], offs, limit, first_part_width(HEAD_DIM), HEAD_DIM)


@triton.jit
def store_part(tensor, value, offs, limit, BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr):
    offs_d = BEGIN + tl.arange(0, value.shape[1])
    inside = (offs[:, None] < limit) & (offs_d[None, :] < HEAD_DIM)
    tl.store(row_pointers(tensor, offs, offs_d), value.to(tensor.ptr.dtype.element_ty), mask=inside)


@triton.jit
def row_pointers(tensor, offs, offs_d):
    # 64-bit, because row 262,144 with a stride of 8,192 elements overflows an int32
    return tensor.ptr + offs[:, None].to(tl.int64) * tensor.stride_s + offs_d[None, :]


@triton.constexpr_function
def dot_precision():
    """Return the precision of fp32 products. The default is TF32 on NVIDIA GPUs, where 'ieee' spills."""
    return "ieee" if is_hip() else "tf32x3"  # AMD's matrix instructions multiply in fp32


@triton.jit
def dot(a, b, acc):
    PRECISION: tl.constexpr = dot_precision()  # 16-bit inputs ignore it
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def zero_tile(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return an fp32 accumulator of zeros."""
    SECOND: tl.constexpr = second_part_width(HEAD_DIM)
    first = tl.zeros([ROWS, first_part_width(HEAD_DIM)], tl.float32)
    if SECOND == 0:
        return (first,)
    else:
        return (first, tl.zeros([ROWS, SECOND], tl.float32))


@triton.jit
def matmul_nt(a, b, acc=None):
    """Return ``acc + a b^T`` of two tiles of rows."""
    result = dot(a[0], tl.trans(b[0]), acc)
    if len(a) == 2:
        result = dot(a[1], tl.trans(b[1]), result)
    return result


@triton.jit
def matmul_accumulate(weights, tile, acc):
    """Return ``acc + weights @ tile``."""
    first = dot(weights.to(tile[0].dtype), tile[0], acc[0])
    if len(acc) == 1:
        return (first,)
    else:
        return (first, dot(weights.to(tile[1].dtype), tile[1], acc[1]))


@triton.jit
def scale_tile(acc, factor):
    """Return a tile times ``factor``, a number or a column."""
    if len(acc) == 1:
        return (acc[0] * factor,)
    else:
        return (acc[0] * factor, acc[1] * factor)


@triton.jit
def divide_tile(acc, divisor):
    """Return a tile divided by a column."""
    if len(acc) == 1:
        return (acc[0] / divisor,)
    else:
        return (acc[0] / divisor, acc[1] / divisor)


@triton.jit
def add_tiles(a, b):
    """Return the sum of two tiles."""
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])
