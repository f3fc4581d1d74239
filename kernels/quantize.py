"""Keys and values as fp8: e4m3 codes, and one fp32 scale per (batch, head, 128 tokens). The host entries."""

from __future__ import annotations

from typing import Any

import torch
import triton

from .checks import check_like, check_values
from .device.e4m3 import dequantize_kernel, quantize_kernel
from .device.tiles import Shape
from .launch import launch, programs, strided

SCALE_TOKENS = 128
"""Tokens that share a scale: the tile of one program, and 4 bytes of scale to 128 * D of codes."""

ELEMENTS_PER_THREAD = 64  # of a tile: several 16-byte loads in flight, and no spills at any head dim


def quantize(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Write ``x`` as e4m3 ``out`` and fp32 ``scale``, so that ``x`` is about ``out * scale``.

    Per (batch, head, 128 tokens): ``scale = max(amax / 448, 2^-126)`` with ``amax = max |x|`` over the finite ones, and
    ``out = e4m3(x * (1 / scale))``, to nearest, ties to even (arXiv:2209.05433, section 3.2: the largest value maps to
    the format's largest). ``|x| / scale <= 448 * (1 + 2^-22)``, which rounds to 448: nothing saturates. An
    element errs by at most half a step: ``2^-4`` of the power of two below it, or ``scale * 2^-10`` where it is smaller
    than ``scale * 2^-6``.

    NaN and both infinities become NaN and leave their neighbours alone; zeros keep their sign. One launch on the
    current stream, nothing allocated.

    Args:
        x: ``[B, S, H, D]``, float16, bfloat16 or float32, any strides with a unit last one.
        out: float8_e4m3fn ``[B, S, H, D]``, contiguous.
        scale: fp32 of :func:`scale_shape`, contiguous.

    Raises:
        ValueError: an argument does not fit; the message names it, what it got and what it takes.
    """
    check_values("x", x)
    check_codes("out", out, "x", x, scale)
    run(quantize_kernel, x, strided(x), strided(out.view(torch.uint8)), scale)


def dequantize(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """``out = x * scale``, what :func:`quantize` was given up to its rounding.

    Args:
        x: float8_e4m3fn ``[B, S, H, D]``, contiguous.
        scale: fp32 of :func:`scale_shape`, contiguous.
        out: ``[B, S, H, D]``, float16, bfloat16 or float32, any strides with a unit last one.

    The product is rounded to fp32 and to out's dtype; numbers that were finite in that dtype come back finite. One
    launch on the current stream, nothing allocated.

    Raises:
        ValueError: an argument does not fit; the message names it, what it got and what it takes.
    """
    check_values("out", out)
    check_codes("x", x, "out", out, scale)
    run(dequantize_kernel, out, strided(x.view(torch.uint8)), scale, strided(out))


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Of the scales of a tensor ``[B, S, H, D]``: ``[B, ceil(S / 128), H]``."""
    batch, tokens, heads, _ = shape
    return batch, -(-tokens // SCALE_TOKENS), heads


def check_codes(name: str, codes: torch.Tensor, like_name: str, like: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse codes and scales that are not those of ``like``: ValueError."""
    if codes.shape != like.shape:
        raise ValueError(f"{name} has shape {list(codes.shape)}: {like_name} has {list(like.shape)}")
    check_like(name, codes, tuple(like.shape), torch.float8_e4m3fn, like.device, contiguous=True)
    check_like("scale", scale, scale_shape(tuple(like.shape)), torch.float32, like.device, contiguous=True)


def run(kernel: Any, x: torch.Tensor, *args: Any) -> None:
    """One program per scale of ``x``."""
    _, tokens, heads, head_dim = x.shape
    launch(
        kernel, programs(tokens, SCALE_TOKENS, x), x.device, *args, Shape(tokens, tokens, heads, 1),
        HEAD_DIM=head_dim, BLOCK=SCALE_TOKENS, num_warps=num_warps(head_dim),
    )  # fmt: skip


def num_warps(head_dim: int) -> int:
    """Of both kernels: ELEMENTS_PER_THREAD of a tile whose head dim is padded as the kernels pad it."""
    return SCALE_TOKENS * max(16, int(triton.next_power_of_2(head_dim))) // (32 * ELEMENTS_PER_THREAD)
