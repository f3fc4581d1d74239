"""Tests of the suite's own measurements: launches, ceilings, fp8, virtual ranks, and the rows of a case."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from ringattn.bench.common import memory
from ringattn.bench.common.cases import (
    MeasuredNumber,
    UnavailableError,
    case_result,
    poison_allocations,
    relative_distance,
)
from ringattn.bench.common.result import read_result
from ringattn.bench.common.timing import Samples
from ringattn.bench.suite import device_cases
from ringattn.kernels import dequantize, quantize

CPU = torch.device("cpu")


def test_relative_distance() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative_distance([a, a], [a, a * 2]) == pytest.approx(0.5)
    assert math.isnan(relative_distance([a * torch.nan], [a]))


@pytest.mark.parametrize(("value", "fails"), [(1, False), (2, True), (math.nan, True), (None, True)])
def test_numbers_fail_above_their_limit(value: float | None, fails: bool) -> None:
    limited, free = (
        MeasuredNumber("x", value, "s", {"by": "me"}, limit=1),
        MeasuredNumber("rate", 9.0, "GB/s", {"D": 64}),
    )
    result = case_result("a", [limited, free], {})
    assert result.failed == [f"x (by me) is {value}. At most 1 is allowed."] * fails
    assert result.notes == ["rate: 9 GB/s"] and list(result.units)[:5] == ["number", "value", "unit", "by", "D"]
    assert result.rows[1]["D"] == 64 and "D" not in result.rows[0]
    judged = [MeasuredNumber("bar", 1.0, "times", {"verdict": verdict}) for verdict in ("reached", "missed", "reached")]
    assert case_result("a", judged, {}).notes == ["2 reached, 1 missed"]


def test_new_tensors_are_poisoned_only_inside_the_block() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with poison_allocations():
            assert torch.empty(9).isnan().all() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    with poison_allocations():
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_case_leaves_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"

    def case(device: torch.device, *, missing: bool, worst: float = 0.0) -> Any:
        yield MeasuredNumber("error", worst, "", limit=1.0)
        assert read_result(file).rows[0]["value"] == worst  # the file is complete even if the case is killed later
        if missing:
            raise UnavailableError("no such library")
        yield MeasuredNumber("rate", 5.0, "GB/s")

    drawn: Any = []
    for _ in range(2):  # every run draws the same inputs
        assert device_cases.main("x", lambda _: drawn.append(torch.rand(1).item()) or iter(()), CPU, str(file)) == 0
    assert drawn[0] == drawn[1]
    assert device_cases.main("x", partial(case, missing=False), CPU, str(file)) == 0
    assert [row["number"] for row in read_result(file).rows] == ["error", "rate"] and read_result(
        file
    ).case == "bench suite: x"
    assert device_cases.main("x", partial(case, missing=False, worst=2.0), CPU, str(file)) == 1
    assert device_cases.main("x", partial(case, missing=True), CPU, str(file)) == 69
    assert capsys.readouterr().out.endswith("no such library\n")
    with pytest.raises(RuntimeError, match="a kernel failed"):
        device_cases.main("x", Mock(side_effect=RuntimeError("a kernel failed")), CPU, str(file))


def test_launch_errors_and_ceilings_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(device_cases.launch_case(CPU, dtype="float32", seqlen=40, head_dim=16))
    assert [number.name for number in rows if number.limit] == ["difference from float64"] * 2
    assert not any(number.fails for number in rows)
    assert [number.labels["mask"] for number in rows] == ["full", "full", "causal", "causal"]
    times = {"product": Samples((2e-3,) * 3), "copy": Samples((4e-6,) * 3)}
    monkeypatch.setattr(device_cases, "time_in_turns", lambda steps, clock, **_: {name: times[name] for name in steps})
    product, copy = device_cases.ceilings_case(CPU, side=64, dtype="float32", nbytes=4096)
    assert (copy.unit, copy.labels["bytes"], copy.value) == ("GB/s", 4096, pytest.approx(2 * 4096 / 4e3))
    assert product.value == pytest.approx(2 * 64**3 / 2e9) and product.spread == copy.spread == 0.0
    monkeypatch.setattr(memory, "free_memory", lambda device: 8000)
    product, copy = device_cases.ceilings_case(CPU, side=64, dtype="float32", nbytes=4096)
    assert (product.unit, copy.labels["bytes"]) == ("TFLOP/s", 2000)  # a read and a write of a quarter of free memory


def test_virtual_ranks_are_compared_with_one_rank() -> None:
    run = device_cases.local_world_case(CPU, world=2, tokens=64, heads=2, head_dim=16, dtype="float32", repeats=2)
    first, *times = run
    assert first.name == "difference from one rank" and not first.fails
    for ring, alone, ratio in (times[:3], times[3:]):
        assert (ring.labels["by"], alone.labels["by"]) == ("ring", "one rank") and ring.value and alone.value
        assert min(ring.spread, alone.spread) >= 0  # type: ignore[operator, type-var]
        assert ratio.value == pytest.approx(ring.value / alone.value) and ratio.limit is None


def wrong() -> dict[str, float]:
    """Return the sum of each number over all dtypes and shapes."""
    counts = {"wrong codes": 0.0, "wrong scales": 0.0, "wrong numbers": 0.0}
    for number in device_cases.fp8_case(CPU, dtypes=("float32", "float16"), shapes=((1, 130, 2, 8), (2, 20, 1, 40))):
        assert number.limit == 0 and number.value is not None
        counts[number.name] += number.value
    return counts


def test_wrong_or_unwritten_fp8_codes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: Tensor, out: Tensor, scale: Tensor) -> None:
        quantize(x, out, scale)
        out.view(torch.uint8)[0, 3, 0, 2] ^= 1

    assert not any(wrong().values())
    ours, other = torch.tensor([[0.0, torch.nan, 1.0], [-0.0, -torch.nan, 1.0]])
    assert device_cases.count_differing_bits(ours, other) == 1  # the sign of zero counts, that of NaN does not
    x = device_cases.fp8_inputs((1, 130, 2, 8), torch.float16)
    assert x.isnan().any() and x.isinf().any() and 0 < (x == 0).float().mean() < 0.5
    assert not x.is_contiguous() and x.stride(-1) == 1
    monkeypatch.setattr(device_cases, "quantize", off)
    assert wrong()["wrong codes"] == 4  # one per dtype and shape
    monkeypatch.setattr(device_cases, "quantize", quantize)
    monkeypatch.setattr(device_cases, "dequantize", lambda x, scale, out: dequantize(x, scale, out.clone()))
    rows = wrong()
    assert rows["wrong numbers"] > 1000 and not rows["wrong codes"]
    monkeypatch.setattr(device_cases, "quantize", lambda x, out, scale: None)
    assert wrong()["wrong scales"] == 2 * (2 * 2 + 2)
