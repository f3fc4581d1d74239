"""How K/V and dK/dV travel: what a wire sends, that the CPU sends the kernels' bits, and how near they stay."""

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
from ringattn.ring.wire import Wire, grad_wire_of, wire_of

from ..kernels.test_attention import VIEWS
from ..support.kernel_cases import in_turn
from ..support.wire_cases import DTYPES, assert_same, assert_within_bound, codes_for, tensors, wide


def wire(name: str, dtype: torch.dtype = torch.float32) -> Wire:
    made = wire_of(name, dtype)
    assert made is not None
    return made


def send(by: Wire, x: Tensor) -> tuple[Tensor, ...]:
    """Encoded into a slot, as the ring does it."""
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


# --- which wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_wires_of_the_same_dtype_are_none(dtype: torch.dtype) -> None:
    assert wire_of(None, dtype) is None
    assert (wire_of("bfloat16", dtype) is None) == (dtype == torch.bfloat16)
    assert grad_wire_of(None) is grad_wire_of(torch.float32) is grad_wire_of("float32") is None


def test_wires_by_name_and_refusals() -> None:
    for name in ("bfloat16", "float8_e4m3fn"):
        assert wire(name) is wire_of(getattr(torch, name), torch.float16)
        assert wire(name).name == name
    assert grad_wire_of("bfloat16") is grad_wire_of(torch.bfloat16) is not None
    refused: list[tuple[Any, str, tuple[Any, ...]]] = [
        (
            partial(wire_of, dtype=torch.float32),
            "wire_dtype",
            (torch.float16, torch.float8_e5m2, "fp8", "torch.bfloat16", 8, "", np.array(["bfloat16", "fp8"])),
        ),
        (grad_wire_of, "grad_wire_dtype", (torch.float16, torch.float8_e4m3fn, "fp32")),
    ]
    for make, name, dtypes in refused:
        for dtype in dtypes:
            with pytest.raises(ValueError, match=rf"^{name} is .*: it must be one of None, torch.\w+ \("):
                make(dtype)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64: keys and values must be float16, bfloat16"):
        wire_of("bfloat16", torch.float64)


# --- rounded to bfloat16 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("view", "dtype"), in_turn(VIEWS, [torch.float16, torch.float32]))
def test_bfloat16_is_one_rounding(view: object, dtype: torch.dtype) -> None:
    x = wide(2, 20, 2, 6, dtype=dtype)
    made = receive(wire("bfloat16"), send(wire("bfloat16"), view(x)), x)  # type: ignore[operator]
    assert_same((made,), (x.to(torch.bfloat16).to(dtype),))


def test_fp16_beyond_bfloat16s_steps_is_infinite() -> None:
    x = torch.tensor([65376.0, 65408.0, 65504.0, torch.nan], dtype=torch.float16).view(1, 1, 1, 4)
    made = receive(wire("bfloat16"), send(wire("bfloat16"), x), x).flatten()
    assert made[:3].tolist() == [65280.0, torch.inf, torch.inf]
    assert made[3].isnan()


# --- fp8 ------------------------------------------------------------------------------------------------------------


FP8 = wire("float8_e4m3fn")


@pytest.mark.parametrize(("tokens", "dtype"), in_turn([0, 1, 128, 300], [torch.float16, torch.float32]))
def test_the_cpu_sends_the_bits_of_the_kernels(tokens: int, dtype: torch.dtype) -> None:
    x = wide(2, tokens, 3, 40, dtype=dtype)
    if tokens:
        x[0, 0, 0, :4] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
        x[1, :, 1], x[1, :, 2] = 0.0, x[1, :, 2] * (2.0**-12 if dtype == torch.float16 else 2.0**-125)
    codes, scale = codes_for(x)
    quantize(x, codes, scale)
    travelled = send(FP8, x)
    assert_same(travelled, (codes, scale))
    out = torch.empty_like(x)
    dequantize(codes, scale, out)
    assert_same((receive(FP8, travelled, x),), (out,))


@settings(max_examples=50)
@given(tensors())
def test_error_bound(x: Tensor) -> None:
    travelled = send(FP8, x)
    assert_within_bound(x, receive(FP8, travelled, x), travelled[1])
