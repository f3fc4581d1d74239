"""The suite's case of the fp8 kernels: it passes where bits are the same, and counts those that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn.bench.suite import fp8_cases
from ringattn.kernels import dequantize, quantize

CPU = torch.device("cpu")
SMALL = {"dtypes": ("float32", "float16"), "shapes": ((1, 130, 2, 8), (2, 20, 1, 40))}


def wrong() -> dict[str, float]:
    """How much of each kind is, over all dtypes and shapes."""
    counts = {"wrong codes": 0.0, "wrong scales": 0.0, "wrong numbers": 0.0}
    for number in fp8_cases.fp8(CPU, **SMALL):  # type: ignore[arg-type]
        assert number.limit == 0 and number.value is not None
        counts[number.name] += number.value
    return counts


def test_the_kernels_have_the_bits_of_the_cpu() -> None:
    assert not any(wrong().values())


def test_inputs_have_what_is_special() -> None:
    x = fp8_cases.drawn((1, 130, 2, 8), torch.float16)
    assert x.isnan().any() and x.isinf().any() and (x == 0).any()
    assert not x.is_contiguous() and x.stride(-1) == 1


def test_one_wrong_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: Tensor, out: Tensor, scale: Tensor) -> None:
        quantize(x, out, scale)
        out.view(torch.uint8)[0, 3, 0, 2] ^= 1

    monkeypatch.setattr(fp8_cases, "quantize", off)
    assert wrong()["wrong codes"] == 4  # of two dtypes and two shapes


def test_what_is_not_written_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_cases, "dequantize", lambda x, scale, out: dequantize(x, scale, out.clone()))
    found = wrong()
    assert found["wrong numbers"] > 1000 and not found["wrong codes"]
    monkeypatch.setattr(fp8_cases, "quantize", lambda x, out, scale: None)
    assert wrong()["wrong scales"] == 2 * (2 * 2 + 2)
