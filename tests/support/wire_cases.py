"""Tensors to quantise, and bounds for the error of quantised values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import SCALE_TOKENS, scale_shape
from ringattn.reference import fp8

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def poisoned_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return poisoned buffers for the codes and scales of ``x``."""
    codes = torch.full(x.shape, 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, torch.full(scale_shape(tuple(x.shape)), torch.nan)


def wide_range_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of random sign over many powers of two: normal and subnormal codes, and some that round to zero."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-14, 8, shape))).to(dtype)


def comparable_bits(x: Tensor) -> Tensor:
    """Return integers that are equal if two results are bitwise equal; all NaNs compare equal."""
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)
    return x.nan_to_num(nan=123.0).view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for actual, wanted in zip(got, expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(comparable_bits(actual), comparable_bits(wanted))


def wire_error_bound(x: Tensor, scale: Tensor) -> Tensor:
    """Return the largest allowed difference between ``x`` and its decoded value.

    The bound is half a step of e4m3 at ``|x| / scale``, plus ``2^-16`` of that for four fp32 roundings (scale, inverse
    and two products: ``4 * 2^-24`` of a value of at most 32 half steps), plus the rounding to the dtype.
    """
    exact, scales = x.to(torch.float64), fp8.scale_per_token(scale.to(torch.float64), x.shape[1], SCALE_TOKENS)
    steps = fp8.max_rounding_error(exact / scales) * scales * (1 + 2**-16)
    info = torch.finfo(x.dtype)
    rounding = info.eps / 2 * (exact.abs() + steps) + info.tiny * info.eps / 2  # half a subnormal at least
    return steps + rounding


def assert_within_bound(x: Tensor, back: Tensor, scale: Tensor) -> None:
    """Check that exactly the non-finite values of ``x`` are NaN, and others are within :func:`wire_error_bound`."""
    finite = x.isfinite()
    assert torch.equal(back.isnan(), ~finite)
    error = (back.to(torch.float64) - x.to(torch.float64)).abs()
    over = (error > wire_error_bound(x, scale)) & finite
    assert not over.any(), f"{int(over.sum())} elements, worst {x[over][0]} came back as {back[over][0]}"


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Draw a small ``[B, S, H, D]`` tensor of any magnitude; some values are zero or subnormal, all are finite."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 140), st.integers(1, 2), st.integers(1, 5)))
    seed, spread = draw(st.integers(0, 2**32)), draw(st.integers(0, 24))
    lowest, highest = (-24, 14) if dtype == torch.float16 else (-140, 126)
    center = draw(st.integers(lowest, highest))
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(center - spread, center + 1, shape, generator=generator).clamp(lowest, highest)
    sizes = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    signs = torch.randint(-1, 2, shape, generator=generator)  # a third are zeros
    return (signs * sizes * torch.exp2(exponents.double())).to(dtype)
