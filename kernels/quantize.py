"""Host entries of the fp8 conversion: e4m3 codes, and one fp32 scale per batch row, head and 128 tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .checks import check_like, check_qkv_tensor
from .device.e4m3 import dequantize_kernel, quantize_kernel
from .device.tiles import LaunchShape
from .launch import grid_size, launch, strided_tensor

SCALE_TOKENS = 128
"""Tokens that share a scale, and tokens per program."""

ELEMENTS_PER_THREAD = 64  # several 16-byte loads in flight, and no spills at any head dim


def quantize(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Convert ``x`` to e4m3 codes ``out`` and fp32 ``scale``, so that ``x`` is about ``out * scale``.

    128 consecutive tokens of one batch row and head share ``scale = max(amax / 448, 2^-126)``, where ``amax`` is the
    largest finite ``|x|``. The codes are ``e4m3(x * (1 / scale))``, rounded to nearest, ties to even. The largest value
    maps to the largest code (Micikevicius et al., arXiv:2209.05433, section 3.2). ``|x| / scale <= 448 * (1 + 2^-22)``
    rounds to 448, so nothing saturates. The error of an element is at most half a step: ``2^-4`` of the power of two
    below it, or ``scale * 2^-10`` for elements below ``scale * 2^-6``.

    NaN and both infinities become NaN without affecting the scale, and zeros keep their sign. The call is one launch on
    the current stream and allocates nothing.

    Args:
        x: ``[B, S, H, D]``, float16, bfloat16 or float32. The last stride must be 1.
        out: float8_e4m3fn ``[B, S, H, D]``, contiguous.
        scale: fp32 with the shape of :func:`scale_shape`, contiguous.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    check_qkv_tensor("x", x)
    check_codes_and_scale("out", out, "x", x, scale)
    launch_fp8_kernel(quantize_kernel, x, strided_tensor(x), strided_tensor(out.view(torch.uint8)), scale)


def dequantize(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """Convert e4m3 codes back: ``out = x * scale``, rounded to fp32 and then to the dtype of ``out``.

    A value that was finite in that dtype before :func:`quantize` stays finite. The call is one launch on the current
    stream and allocates nothing.

    Args:
        x: float8_e4m3fn ``[B, S, H, D]``, contiguous.
        scale: fp32 with the shape of :func:`scale_shape`, contiguous.
        out: ``[B, S, H, D]``, float16, bfloat16 or float32. The last stride must be 1.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    check_qkv_tensor("out", out)
    check_codes_and_scale("x", x, "out", out, scale)
    launch_fp8_kernel(dequantize_kernel, out, strided_tensor(x.view(torch.uint8)), scale, strided_tensor(out))


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape of the scales of a tensor ``[B, S, H, D]``: ``[B, ceil(S / 128), H]``."""
    batch, tokens, heads, _ = shape
    return batch, -(-tokens // SCALE_TOKENS), heads


def check_codes_and_scale(name: str, codes: Tensor, like_name: str, like: Tensor, scale: Tensor) -> None:
    """Raise ValueError if codes and scales do not fit the tensor ``like``."""
    if codes.shape != like.shape:
        raise ValueError(
            f"{name} has shape {list(codes.shape)} and {like_name} has {list(like.shape)}: the shapes must be equal"
        )
    check_like(name, codes, tuple(like.shape), torch.float8_e4m3fn, like.device, needs_contiguous=True)
    check_like("scale", scale, scale_shape(tuple(like.shape)), torch.float32, like.device, needs_contiguous=True)


def launch_fp8_kernel(kernel: Any, x: Tensor, *args: Any) -> None:
    """Launch one program per scale of ``x``."""
    _, tokens, heads, head_dim = x.shape
    launch(
        kernel, grid_size(tokens, SCALE_TOKENS, x), x.device, *args, LaunchShape(tokens, tokens, heads, 1),
        HEAD_DIM=head_dim, BLOCK=SCALE_TOKENS, num_warps=num_warps(head_dim),
    )  # fmt: skip


def num_warps(head_dim: int) -> int:
    """Return the warps per program that give each thread ``ELEMENTS_PER_THREAD`` elements of the padded tile.

    Above head dim 256 each thread has twice as many, because 32 warps leave it only 64 registers.
    """
    return min(SCALE_TOKENS * max(16, int(triton.next_power_of_2(head_dim))) // (32 * ELEMENTS_PER_THREAD), 16)
