"""Wire dtypes of K/V and dK/dV: encoding, equal bits from CPU and kernels, and error bounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from ringattn.comm import Slots, slot_nbytes
from ringattn.kernels import dequantize, quantize
from ringattn.ring.wire import Wire, resolve_grad_wire, resolve_wire

from ..kernels.test_attention import VIEWS
from ..support.kernel_cases import cycle_values
from ..support.wire_cases import DTYPES, assert_same, assert_within_bound, poisoned_codes, tensors, wide_range_tensor


def wire(name: str, dtype: torch.dtype = torch.float32) -> Wire:
    made = resolve_wire(name, dtype)
    assert made is not None
    return made


def send(by: Wire, x: Tensor) -> tuple[Tensor, ...]:
    """Encode a tensor into a slot, as the ring does."""
    specs = by.specs(tuple(x.shape))
    slots = Slots(1, x.device)
    slots.reserve(slot_nbytes(specs))
    into = slots.tensors(0, specs)
    by.encode(x, into)
    return into


def receive(by: Wire, travelled: tuple[Tensor, ...], like: Tensor) -> Tensor:
    into = torch.full_like(like, torch.nan, memory_format=torch.contiguous_format)
    by.decode(travelled, into)
    return into


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wire_in_the_model_dtype_is_none(dtype: torch.dtype) -> None:
    assert resolve_wire(None, dtype) is None
    assert (resolve_wire("bfloat16", dtype) is None) == (dtype == torch.bfloat16)
    assert resolve_grad_wire(None) is resolve_grad_wire(torch.float32) is resolve_grad_wire("float32") is None


def test_wire_dtypes_by_name_and_refusals() -> None:
    for name in ("bfloat16", "float8_e4m3fn"):
        assert wire(name) is resolve_wire(getattr(torch, name), torch.float16)
        assert wire(name).name == name
    assert resolve_grad_wire("bfloat16") is resolve_grad_wire(torch.bfloat16) is not None
    refused: list[tuple[Any, str, tuple[Any, ...]]] = [
        (
            partial(resolve_wire, dtype=torch.float32),
            "wire_dtype",
            (torch.float16, torch.float8_e5m2, "fp8", "torch.bfloat16", 8, "", np.array(["bfloat16", "fp8"])),
        ),
        (resolve_grad_wire, "grad_wire_dtype", (torch.float16, torch.float8_e4m3fn, "fp32")),
    ]
    for make, name, dtypes in refused:
        for dtype in dtypes:
            with pytest.raises(ValueError, match=rf"^{name} is .*: it must be one of None, torch.\w+ \("):
                make(dtype)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64: keys and values must be float16, bfloat16"):
        resolve_wire("bfloat16", torch.float64)


@pytest.mark.parametrize(("view", "dtype"), cycle_values(VIEWS, [torch.float16, torch.float32]))
def test_bfloat16_is_one_rounding(view: object, dtype: torch.dtype) -> None:
    x = wide_range_tensor(2, 20, 2, 6, dtype=dtype)
    made = receive(wire("bfloat16"), send(wire("bfloat16"), view(x)), x)  # type: ignore[operator]
    assert_same((made,), (x.to(torch.bfloat16).to(dtype),))


def test_fp16_values_that_round_above_its_maximum_become_infinite() -> None:
    x = torch.tensor([65376.0, 65408.0, 65504.0, torch.nan], dtype=torch.float16).view(1, 1, 1, 4)
    made = receive(wire("bfloat16"), send(wire("bfloat16"), x), x).flatten()
    assert made[:3].tolist() == [65280.0, torch.inf, torch.inf]
    assert made[3].isnan()


FP8 = wire("float8_e4m3fn")


@pytest.mark.parametrize(("tokens", "dtype"), cycle_values([0, 1, 128, 300], [torch.float16, torch.float32]))
def test_the_cpu_encoder_equals_the_kernels_bitwise(tokens: int, dtype: torch.dtype) -> None:
    x = wide_range_tensor(2, tokens, 3, 40, dtype=dtype)
    if tokens:
        x[0, 0, 0, :4] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
        x[1, :, 1], x[1, :, 2] = 0.0, x[1, :, 2] * (2.0**-12 if dtype == torch.float16 else 2.0**-125)
    codes, scale = poisoned_codes(x)
    quantize(x, codes, scale)
    travelled = send(FP8, x)
    assert_same(travelled, (codes, scale))
    out = torch.empty_like(x)
    dequantize(codes, scale, out)
    assert_same((receive(FP8, travelled, x),), (out,))


@settings(max_examples=50)
@given(tensors())
def test_fp8_error_bound(x: Tensor) -> None:
    travelled = send(FP8, x)
    assert_within_bound(x, receive(FP8, travelled, x), travelled[1])
