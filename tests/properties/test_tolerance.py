"""The tolerance itself: what it lets pass, and what it must not, whatever the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..support.tolerance import assert_as_exact_as_pytorch

EXACT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps
CAPABILITY = "ATEN_CPU_CAPABILITY"
RESULTS = (
    "ring", "processes", "aten", "shards", "scores", "reference", "regions", "wire", "backends", "compile",
    "attention", "ops", "order", "single_pass", "epilogue", "quantize",
)  # fmt: skip


def off_by(error: float) -> torch.Tensor:
    return (EXACT + torch.tensor([0.0, 0.0, error])).float()


@pytest.mark.parametrize("error", [0.0, 1e-3, 1.99e-3])
def test_up_to_twice_pytorchs_error_passes(error: float) -> None:
    assert_as_exact_as_pytorch("out", off_by(error), off_by(1e-3), EXACT)


@pytest.mark.parametrize("error", [2.01e-3, 1.0, torch.nan, torch.inf])
def test_more_fails(error: float) -> None:
    with pytest.raises(AssertionError, match="out: error"):
        assert_as_exact_as_pytorch("out", off_by(error), off_by(1e-3), EXACT)


def test_rounding_is_allowed_where_pytorch_is_exact() -> None:
    assert_as_exact_as_pytorch("out", off_by(EPS), EXACT.float(), EXACT)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", off_by(3 * EPS), EXACT.float(), EXACT)


def test_rounding_is_relative_to_terms_that_cancel() -> None:
    zero = torch.zeros(3)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("dq", zero + EPS, zero, zero.double())
    assert_as_exact_as_pytorch("dq", zero + EPS, zero, zero.double(), magnitude=1.0)


def test_rounding_is_that_of_our_dtype() -> None:
    assert_as_exact_as_pytorch("out", off_by(2e-3).bfloat16(), EXACT.bfloat16(), EXACT)


def test_nan_in_the_baseline_or_the_reference_fails() -> None:
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", EXACT.float(), off_by(torch.nan), EXACT)
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", off_by(torch.nan), off_by(torch.nan), EXACT + torch.nan)


def test_infinities_are_the_same_or_fail() -> None:
    lse = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert_as_exact_as_pytorch("lse", lse.float(), lse.float(), lse)
    for wrong in (torch.inf, -1e6, torch.nan):
        with pytest.raises(AssertionError, match="infinite"):
            assert_as_exact_as_pytorch("lse", torch.tensor([1.0, wrong]), lse.float(), lse)


def test_other_shapes_fail() -> None:
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", EXACT.float()[:1], EXACT.float(), EXACT)


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("capability", ["default", "avx2", None])
def test_results_by_every_instruction_set(capability: str | None, threads: str, tmp_path: Path) -> None:
    """PyTorch's errors and last bits differ with the width of its vectors and the number of its threads."""
    environment = {name: value for name, value in os.environ.items() if name != CAPABILITY}
    # a cache of its own: torch's gives what it compiled for another instruction set
    environment |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment |= {} if capability is None else {CAPABILITY: capability}
    files = sorted({str(path) for name in RESULTS for path in Path(__file__).parents[1].rglob(f"test_{name}*.py")})
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "900", *files]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
