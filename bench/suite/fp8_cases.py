"""The kernels that make fp8 of K/V and back, against what the CPU does: the same bits, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import dequantize, quantize, scale_shape
from ...ring.wire import Scaled
from ..common.attention import DTYPES
from ..common.timing import Clock, interleaved
from .cases import Number

Shape = tuple[int, int, int, int]

NAN_CODE = 0x7F  # and the same with a sign
EXPONENTS = (-14, 8)  # of the numbers: normal and subnormal codes, and some that round to zero


def fp8(
    device: torch.device,
    *,
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    shapes: tuple[Shape, ...] = ((2, 1000, 4, 128), (1, 200, 2, 40)),
    timed: Shape = (1, 32768, 32, 128),
) -> Iterator[Number]:
    """``[B, S, H, D]`` to e4m3 and back: bits that are not the CPU's, then GB/s read and written, on a GPU."""
    for name in dtypes:
        for shape in shapes:
            labels = {"dtype": name, "shape": "x".join(map(str, shape))}
            given = drawn(shape, DTYPES[name])
            wrong = compared(given, device)
            for what, count in wrong.items():
                yield Number(f"wrong {what}", count, "elements", labels, limit=0)
    if device.type == "cuda":
        yield from speeds(Clock(device), timed)


def drawn(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, some zeros, and one NaN and one infinity, on the CPU; heads are strided."""
    batch, tokens, heads, dim = shape
    wide = torch.randn(batch, tokens, heads, 2 * dim) * torch.exp2(
        torch.randint(*EXPONENTS, (batch, tokens, heads, 2 * dim))
    )
    wide[torch.rand(wide.shape) < 0.01] = 0.0
    wide[0, tokens // 2, 0, 1] = torch.nan
    wide[0, tokens - 1, heads - 1, 0] = -torch.inf
    return wide.to(dtype)[..., :dim]


def compared(x: Tensor, device: torch.device) -> dict[str, int]:
    """How many codes, scales and numbers that come back differ between the kernels and the CPU's code."""
    codes, scales = room(x, x.device)
    Scaled().encode(x, (codes, scales))
    back = torch.empty(x.shape, dtype=x.dtype)
    Scaled().decode((codes, scales), back)
    here = x.to(device) if device.type != "cpu" else x
    ours, our_scales = room(x, device)
    quantize(here, ours, our_scales)
    returned = torch.full(x.shape, torch.nan, dtype=x.dtype, device=device)
    dequantize(ours, our_scales, returned)
    return {
        "codes": differing(code_bits(ours), code_bits(codes)),
        "scales": differing(our_scales.cpu().view(torch.int32), scales.view(torch.int32)),
        "numbers": differing(number_bits(returned), number_bits(back)),
    }


def room(x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """For codes and scales of ``x``, poisoned."""
    codes = torch.full(x.shape, 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return codes, torch.full(scale_shape((x.shape[0], *x.shape[1:])), torch.nan, device=device)


def code_bits(codes: Tensor) -> Tensor:
    """With one code for NaN of either sign."""
    bits = codes.view(torch.uint8).cpu()
    return torch.where(bits & NAN_CODE == NAN_CODE, NAN_CODE, bits)


def number_bits(x: Tensor) -> Tensor:
    """With one pattern for every NaN."""
    bits = x.cpu().nan_to_num(nan=123.0, posinf=torch.inf, neginf=-torch.inf)
    return bits.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def differing(a: Tensor, b: Tensor) -> int:
    return int((a != b).sum())


def speeds(clock: Clock, shape: Shape) -> Iterator[Number]:
    """Of bf16; the numbers that the bytes are counted from are those of the inputs and outputs, once each."""
    with clock.stage():
        x = torch.randn(shape, device=clock.device).to(torch.bfloat16)
        back = torch.empty_like(x)
        codes, scales = room(x, clock.device)
        steps = {"quantize": lambda: quantize(x, codes, scales), "dequantize": lambda: dequantize(codes, scales, back)}
        prepared = {name: clock.prepared(step) for name, step in steps.items()}
        taken = interleaved(prepared, clock, repeats=20, warmup=3)
    nbytes = x.nbytes + codes.nbytes + scales.nbytes
    for name, samples in taken.items():
        labels = {"dtype": "bfloat16", "shape": "x".join(map(str, shape))}
        yield Number(name, nbytes / samples.median / 1e9, "GB/s", labels, spread=samples.spread)
