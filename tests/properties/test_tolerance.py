"""The tolerance itself: errors that it must reject, and results within it on any machine."""

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


ONE_THOUSANDTH = off_by(1e-3)
ZERO = torch.zeros(3)
LSE = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
FAILS = {
    "more than twice PyTorch's error": (off_by(2.01e-3), ONE_THOUSANDTH, EXACT),
    "an error of one": (off_by(1.0), ONE_THOUSANDTH, EXACT),
    "NaN": (off_by(torch.nan), ONE_THOUSANDTH, EXACT),
    "infinity": (off_by(torch.inf), ONE_THOUSANDTH, EXACT),
    "more than rounding where PyTorch is exact": (off_by(3 * EPS), EXACT.float(), EXACT),
    "rounding of terms that cancel": (ZERO + EPS, ZERO, ZERO.double()),
    "NaN of the baseline": (EXACT.float(), off_by(torch.nan), EXACT),
    "NaN of the reference": (off_by(torch.nan), off_by(torch.nan), EXACT + torch.nan),
    "infinity of another sign": (torch.tensor([1.0, torch.inf]), LSE.float(), LSE),
    "a number in the place of an infinity": (torch.tensor([1.0, -1e6]), LSE.float(), LSE),
    "NaN in the place of an infinity": (torch.tensor([1.0, torch.nan]), LSE.float(), LSE),
    "another shape": (EXACT.float()[:1], EXACT.float(), EXACT),
}


@pytest.mark.parametrize("name", FAILS)
def test_the_tolerance_rejects(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_as_exact_as_pytorch("out", *FAILS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("capability", ["default", "avx2", None])
def test_results_pass_with_every_instruction_set(capability: str | None, threads: str, tmp_path: Path) -> None:
    """PyTorch's rounding depends on the width of its vectors and the number of threads."""
    environment = {name: value for name, value in os.environ.items() if name != CAPABILITY}
    # Use a separate cache: torch's default one returns code for another instruction set.
    environment |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if capability is not None:  # oneDNN has its own limit, and PyTorch needs both to agree in bf16
        environment |= {CAPABILITY: capability, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    files = sorted({str(path) for name in RESULTS for path in Path(__file__).parents[1].rglob(f"test_{name}*.py")})
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "900", *files]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
