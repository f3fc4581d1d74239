"""Kernels that convert to and from scaled e4m3 codes.

e4m3 is the OCP 8-bit floating point format (OFP8, revision 1.0) of "FP8 Formats for Deep Learning" (Micikevicius et
al., arXiv:2209.05433, table 1). It has 4 bits of exponent with bias 7, 3 bits of fraction, one NaN and no infinity.

The conversion uses integer arithmetic on the bits of fp32 instead of conversion instructions, so every GPU and the
interpreter give the same bits. sm_80 and sm_86 have no such instruction, and the interpreter's conversion does not
round to nearest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import MAX_PART_WIDTH, load_part, padded_width, store_part
from .tiles import program_placement, select_head

FP32_FRACTION, FP32_BIAS = 23, 127
E4M3_FRACTION, E4M3_BIAS = 3, 7
E4M3_MAX = tl.constexpr(448.0)
E4M3_NAN = tl.constexpr(0x7F)
DROPPED_BITS = tl.constexpr(FP32_FRACTION - E4M3_FRACTION)  # fraction bits of fp32 that e4m3 lacks
MIN_NORMAL_EXPONENT = tl.constexpr(FP32_BIAS - E4M3_BIAS + 1)  # fp32 exponent field of 2^-6, the smallest normal e4m3
EXPONENT_REBIAS = tl.constexpr(2.0 ** (FP32_BIAS - E4M3_BIAS))
SMALLEST_SCALE = tl.constexpr(2.0**-126)  # smallest normal fp32; it and its inverse are exact


@triton.jit
def encode_e4m3(y):
    """Return the e4m3 bits without sign for fp32 ``|y| < 464``, rounded to nearest, ties to even.

    Below 2^-6 the spacing stays 2^-9, so more bits of the fraction are dropped. A carry out of the fraction increments
    the exponent, which is the correct result.
    """
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    above = (bits >> 23) - MIN_NORMAL_EXPONENT
    fraction = (bits & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(-above, 0), 5) + DROPPED_BITS  # 5 more bits round to 0
    nearest = (fraction + (1 << (shift - 1)) - 1 + ((fraction >> shift) & 1)) >> shift
    return nearest + (tl.maximum(above, 0) << 3)


@triton.jit
def decode_e4m3(code):
    """Return the fp32 value of an e4m3 ``code`` (int32, 0 to 255): shift its bits into place, then fix the exponent."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << DROPPED_BITS)
    return tl.where((code & 0x7F) == E4M3_NAN, float("nan"), bits.to(tl.float32, bitcast=True) * EXPONENT_REBIAS)


@triton.constexpr_function
def rows_in_registers(block, head_dim):
    """Return the rows of a piece of a tile: a half, or an eighth if the head dim exceeds MAX_PART_WIDTH."""
    return block // (2 if head_dim <= MAX_PART_WIDTH else 8)


@triton.jit
def quantize_kernel(x, out, scale, shape, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the codes (bytes) and the scale of BLOCK tokens of one head.

    A program reads the tile twice in pieces, because a tile of 128 x 256 does not fit in registers. The second read
    hits the cache.
    """
    tile, batch, head = program_placement(shape, BLOCK)
    x, out = select_head(x, batch, head), select_head(out, batch, head)
    STEP: tl.constexpr = rows_in_registers(BLOCK, HEAD_DIM)
    largest = tl.zeros([STEP, padded_width(HEAD_DIM)], tl.float32)
    for start in range(0, BLOCK, STEP):
        offs = tile * BLOCK + start + tl.arange(0, STEP)
        size = tl.abs(load_part(x, offs, shape.rows, 0, padded_width(HEAD_DIM), HEAD_DIM, True).to(tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))  # also skips NaN
    step = tl.maximum(tl.div_rn(tl.max(tl.max(largest, 1), 0), E4M3_MAX), SMALLEST_SCALE)
    tl.store(scale + (batch * tl.cdiv(shape.rows, BLOCK) + tile) * shape.heads + head, step)
    inverse = tl.div_rn(1.0, step)
    for start in range(0, BLOCK, STEP):
        offs = tile * BLOCK + start + tl.arange(0, STEP)
        x_rows = load_part(x, offs, shape.rows, 0, padded_width(HEAD_DIM), HEAD_DIM, True).to(tl.float32)
        sign = (x_rows.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = tl.where(tl.abs(x_rows) < float("inf"), encode_e4m3(x_rows * inverse) | sign, E4M3_NAN)
        store_part(out, code, offs, shape.rows, 0, HEAD_DIM)


@triton.jit
def dequantize_kernel(x, scale, out, shape, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK tokens of one head from their codes (bytes) and their scale."""
    tile, batch, head = program_placement(shape, BLOCK)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    code = load_part(select_head(x, batch, head), offs, shape.rows, 0, padded_width(HEAD_DIM), HEAD_DIM, True).to(
        tl.int32
    )
    step = tl.load(scale + (batch * tl.cdiv(shape.rows, BLOCK) + tile) * shape.heads + head)
    store_part(select_head(out, batch, head), decode_e4m3(code) * step, offs, shape.rows, 0, HEAD_DIM)
