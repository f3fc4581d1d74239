"""The fp8 kernels, interpreted: every code, the reference's results, special values, shapes, views and errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringattn.kernels import SCALE_TOKENS, dequantize, quantize
from ringattn.reference import fp8

from ..support.wire_cases import assert_same, assert_within_bound, poisoned_codes, wide_range_tensor
from .test_attention import VIEWS

DTYPES = (torch.float16, torch.float32)
"""The interpreter treats bfloat16 as integers, so it is missing here."""


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = poisoned_codes(x)
    quantize(x, codes, scale)
    return codes, scale


def back(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.full(codes.shape, torch.nan, dtype=dtype)
    dequantize(codes, scale, out)
    return out


def scaled_by_one(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``y`` with a scale of 1, by placing 448 into each block of 128."""
    y = y.to(torch.float32)
    rows = torch.nn.functional.pad(y, (0, -len(y) % 254)).view(-1, 254)
    x = torch.cat([rows, torch.full_like(rows[:, :2], 448.0)], 1).view(1, -1, 1, 256)
    codes, scale = quantized(x)
    assert torch.equal(scale, torch.ones_like(scale))
    return codes.view(-1, 256)[:, :254].reshape(-1)[: len(y)], y


def test_every_code_decodes_like_torch_and_the_reference() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    codes = every.view(1, 2, 1, 128).view(torch.float8_e4m3fn)
    assert_same(
        (torch.tensor([fp8.decode_code(code) for code in every.tolist()]),), (codes.to(torch.float32).view(256),)
    )
    for scale in (torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 3.7e-5)):
        assert_same((back(codes, scale, torch.float32),), (codes.to(torch.float32) * scale.item(),))


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    """Ties between all neighbouring codes, and one fp32 step to either side."""
    values = torch.tensor([fp8.decode_code(code) for code in range(fp8.NAN_CODE)])
    middle = (values[1:] + values[:-1]) / 2
    y = torch.cat([torch.nextafter(middle, torch.tensor(0.0)), middle, torch.nextafter(middle, torch.tensor(1e9))])
    codes, y = scaled_by_one(torch.cat([y, -y]))
    assert codes.view(torch.uint8).tolist() == [fp8.nearest_code(value) for value in y.tolist()]
    assert set((codes.view(torch.uint8)[len(middle) : 2 * len(middle)] % 2).tolist()) == {0}


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 130, 2, 3), dtype) for dtype in DTYPES] + [((1, 18, 1, 300), DTYPES[0])]
)
def test_quantize_matches_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = wide_range_tensor(*shape, dtype=dtype)
    codes, scale = quantized(x)
    expected, scales = fp8.quantize_blocks(x, SCALE_TOKENS)
    torch.testing.assert_close(scale.double(), scales, rtol=2**-24, atol=0)
    # The reference divides in float64, so a few numbers lie on the other side of a tie.
    steps = (codes.view(torch.uint8).int() - expected.int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) < 1e-3
    got = fp8.dequantize_blocks(codes.view(torch.uint8), scale.double(), SCALE_TOKENS)
    torch.testing.assert_close(back(codes, scale, torch.float32).double(), got, rtol=2**-24, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_become_nan_without_changing_other_values(dtype: torch.dtype) -> None:
    x = torch.randn(1, 130, 2, 5).to(dtype)
    special = x.clone()
    special[0, 3, 0, 1], special[0, 4, 0, 2], special[0, 129, 0] = torch.nan, torch.inf, -torch.inf
    x[~special.isfinite()] = 0.0  # below the largest of its block, so that the scale does not change
    codes, scale = quantized(special)
    clean, clean_scale = quantized(x)
    assert_same((scale,), (clean_scale,))
    assert set(codes.view(torch.uint8)[~special.isfinite()].tolist()) == {fp8.NAN_CODE}
    made, expected = back(codes, scale, dtype), back(clean, clean_scale, dtype)
    assert torch.equal(made.isnan(), ~special.isfinite())
    assert torch.equal(made[special.isfinite()], expected[special.isfinite()])


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1.1754944e-38, 5.2e-36, 5.3e-36])
def test_tiny_blocks(amax: float) -> None:
    """If ``amax / 448`` is subnormal or zero, the scale stays 2^-126, so its inverse is finite."""
    x = torch.tensor([1.0, -0.7, 0.3, 0.01]).mul(amax).view(1, 1, 1, 4)
    codes, scale = quantized(x)
    assert torch.equal(scale, (x.amax() / 448).clamp(min=2.0**-126).view(1, 1, 1))
    made = back(codes, scale, torch.float32)
    assert_within_bound(x, made, scale)
    assert amax or torch.equal(made.signbit(), x.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_stay_finite(dtype: torch.dtype) -> None:
    """448 times a scale that was rounded up would overflow if the largest numbers were not multiples of 7."""
    integer = torch.int16 if dtype == torch.float16 else torch.int32
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    x = (largest.view(integer) - torch.arange(16, dtype=integer)).view(dtype)
    x = torch.stack([x, -x], -1)[:, None, None]  # one block, hence one scale, per value
    codes, scale = quantized(x)
    assert set(codes.view(torch.uint8).flatten().tolist()) == {0x7E, 0xFE}
    made = back(codes, scale, dtype)
    assert made.isfinite().all()
    torch.testing.assert_close(made, x, rtol=2**-22 if dtype == torch.float32 else 0.0, atol=0.0)


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dtype"),
    [(0, 3, 4, torch.float32), (128, 3, 4, torch.float32), (129, 3, 80, torch.float16), (20, 2, 256, torch.float16)],
)
def test_each_block_of_128_tokens_and_head_has_a_scale(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    x = wide_range_tensor(2, tokens, heads, head_dim, dtype=dtype)
    x *= torch.arange(1, 2 * heads + 1).view(2, 1, heads, 1) / (2 * heads)
    codes, scale = quantized(x)
    assert scale.shape == (2, -(-tokens // 128), heads)
    for tile, start in enumerate(range(0, tokens, 128)):
        amax = x[:, start : start + 128].abs().amax((1, 3)).float()
        assert_same((scale[:, tile],), ((amax / 448).clamp(min=2.0**-126),))
    assert_within_bound(x, back(codes, scale, x.dtype), scale)


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_written_in_place(view: Callable[[Tensor], Tensor]) -> None:
    x = wide_range_tensor(2, 20, 2, 6)
    codes, scale = quantized(x)
    assert_same(quantized(view(x)), (codes, scale))
    target = view(torch.zeros_like(x))
    dequantize(codes, scale, target)
    assert_same((target,), (back(codes, scale, x.dtype),))
    storage = target._base
    assert storage is not None
    assert int(storage.isnan().sum()) == storage.numel() - target.numel()


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(1, 4, 2, 8, dtype=torch.float64)}, r"VALUES is torch.float64: it must be float16, bf"),
        ({"codes": torch.zeros(1, 4, 2, 8)}, r"CODES is torch.float32: it must be torch.float8_e4m3fn"),
        ({"codes": torch.zeros(1, 5, 2, 8).to(E4M3)}, r"CODES has shape \[1, 5, 2, 8\] and VALUES has \[1, 4, 2, 8\]"),
        ({"codes": torch.zeros(1, 4, 4, 8).to(E4M3)[:, :, ::2]}, r"CODES has strides .* must be contiguous"),
        ({"scale": torch.zeros(1, 2, 1)}, r"scale has shape \[1, 2, 1\]: it must be \[1, 1, 2\]"),
        ({"scale": torch.zeros(1, 1, 2, dtype=torch.float16)}, r"scale is torch.float16: it must be torch.float32"),
    ],
)
def test_bad_arguments_are_refused_in_both_directions(change: dict[str, Tensor], message: str) -> None:
    """The names of the arguments differ between the two directions."""
    values = torch.ones(1, 4, 2, 8)
    codes, scale = poisoned_codes(values)
    arguments = {"values": values, "codes": codes, "scale": scale, **change}
    with pytest.raises(ValueError, match=message.replace("VALUES", "x").replace("CODES", "out")):
        quantize(arguments["values"], arguments["codes"], arguments["scale"])
    with pytest.raises(ValueError, match=message.replace("VALUES", "out").replace("CODES", "x")):
        dequantize(arguments["codes"], arguments["scale"], arguments["values"])
