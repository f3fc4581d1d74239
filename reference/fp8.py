"""e4m3 conversion by a table of all values, with one scale per batch row, head and block of tokens, in float64.

The format is S.EEEE.MMM with bias 7 and no infinity; S.1111.111 is NaN (P. Micikevicius et al., "FP8 Formats for Deep
Learning", 2022, arXiv:2209.05433, table 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 7
NAN_CODE = 0x7F
MAX_E4M3 = 448.0
SMALLEST_SCALE = 2.0**-126  # smallest normal fp32; scales are fp32


def decode_code(code: int) -> float:
    """Return the value of a code from 0 to 255."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    if code & NAN_CODE == NAN_CODE:
        return float("nan")
    size = 2.0 ** (exponent - BIAS) * (1 + fraction / 8) if exponent else 2.0 ** (1 - BIAS) * (fraction / 8)
    return -size if sign else size


def nearest_code(y: float) -> int:
    """Return the code with the value nearest to ``y``, ties to even; larger ``|y|`` gives the largest finite code."""
    if y != y:
        return NAN_CODE
    sign = 0x80 if torch.tensor(y).signbit() else 0
    return sign | min(range(NAN_CODE), key=lambda code: (abs(decode_code(code) - abs(y)), code % 2))


def max_rounding_error(y: Tensor) -> Tensor:
    """Return the largest rounding error of ``|y| <= 448``.

    Three bits of fraction divide ``[2^e, 2^(e + 1))`` into 8 steps of ``2^(e - 3)``. Below ``2^-6`` the step is
    ``2^-9``.
    """
    exponent = torch.frexp(y.to(torch.float64)).exponent - 1
    return torch.exp2(exponent.clamp(min=1 - BIAS).to(torch.float64) - 4)


def quantize_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 ``[B, S, H, D]``, and scales, float64 ``[B, ceil(S / block), H]``.

    A scale is ``max |x| / 448`` over the finite elements of a block, and at least the smallest normal fp32. NaN and
    infinity become NaN.
    """
    batch, tokens, heads, _ = x.shape
    starts = range(0, tokens, block)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(batch, len(starts), heads, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for j, start in enumerate(starts):
                part = x[b, start : start + block, h].to(torch.float64)
                largest = max((abs(y) for y in part.flatten().tolist() if abs(y) < float("inf")), default=0.0)
                scales[b, j, h] = max(largest / MAX_E4M3, SMALLEST_SCALE)
                scaled = (part / scales[b, j, h]).flatten().tolist()
                rounded = [nearest_code(y if abs(y) < float("inf") else float("nan")) for y in scaled]
                codes[b, start : start + block, h] = torch.tensor(rounded, dtype=torch.uint8).view(part.shape)
    return codes, scales


def dequantize_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return ``decode_code(code) * scale`` in float64."""
    table = torch.tensor([decode_code(code) for code in range(256)], dtype=torch.float64)
    return table[codes.long()] * scale_per_token(scales, codes.shape[1], block)


def scale_per_token(scales: Tensor, tokens: int, block: int) -> Tensor:
    """Broadcast scales ``[B, ceil(S / block), H]`` to tokens, ``[B, S, H, 1]``."""
    return scales.repeat_interleave(block, dim=1)[:, :tokens, :, None]
