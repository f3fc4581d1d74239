"""Tests of ``ringattn inspect``: its arguments, its report, and the bounds of the default tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.autotune import assemblers
from ringattn.autotune import inspect as inspection
from ringattn.autotune.cli_inspect import DEFAULT, app
from ringattn.autotune.compile import KernelVariant, parse_variants
from ringattn.autotune.gate import CompiledKernel
from ringattn.autotune.inspect import inspect_variant, variant_row
from ringattn.autotune.sass import matrix_loops
from ringattn.bench.common.result import read_result
from ringattn.kernels import Tile
from ringattn.kernels.gpu import MULTIPROCESSOR_SPECS

LISTING = Path(__file__).with_name("forward_sm_90.sass").read_text()
LOOPS = tuple(replace(loop, is_serialised=False) for loop in matrix_loops(LISTING))  # products of one wgmma each
COMPILED = CompiledKernel(64, 0, 2560, 0, LOOPS, arch=90, threads=128)
VARIANT = KernelVariant("forward", 90, "bf16", 16, 16, Tile(64, 16, 4, 1), "only", full=True, grouped=False)
WRONG = "serialised wgmma in a loop"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"TERMINAL_WIDTH": "200", "COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the problems of every variant; fill the list to make the gate fail."""
    wrong: list[str] = []
    monkeypatch.setattr(inspection, "inspect_variant", lambda variant, ptxas: variant_row(variant, COMPILED, wrong))
    return wrong


def test_an_invalid_spec_is_refused() -> None:
    code, output = run("75:bf16:64")
    assert code == 2 and "arch is '75': it must be one of 80, 86, 89, 90, 100, 120, gfx942, gfx950" in output


@pytest.mark.parametrize("specs", [[], ["90:bf16:128:dq", "90:bf16:64:hopper"]])
def test_specs_name_variants(specs: list[str], problems: list[str], tmp_path: Path) -> None:
    code, _ = run(*specs, "--json", str(report := tmp_path / "report.json"))
    expected = [str(selected) for spec in specs or DEFAULT for selected in parse_variants(spec)]
    assert code == 0 and [row["variant"] for row in read_result(report).rows] == expected


def test_gate_fails_if_a_variant_has_problems(problems: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(assemblers, "newest_assembler", lambda: asked.append("for it"))
    for found, exit_code in (([], 0), ([WRONG], 1)):
        problems[:] = found
        assert run("90:bf16:128:dq:middle")[0] == 0
        code, output = run("90:bf16:128:dq:middle", "--gate")
        assert code == exit_code and (WRONG in output) == bool(found)
    assert "best: dq sm_90 bf16 D128" in output and output.index("best: ") < output.index("FAILED: ")
    for specs in (["gfx942:bf16:128:delta"], ["gfx942:bf16:128:delta", "90:bf16:128:delta"]):
        assert run(*specs, "--gate")[0] == 1
    assert len(asked) == 3, "the gate of NVIDIA's kernels, because Triton for AMD may lack ptxas"


def test_a_kernel_that_does_not_fit_fails_without_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(COMPILED, shared=300_000)
    monkeypatch.setattr(
        inspection, "compile_variant", lambda variant, ptxas: (large, ["300000 bytes of shared memory"])
    )
    row = inspect_variant(VARIANT)
    assert (row["bound"], row["limiter"], row["blocks"]) == (0.0, "does not fit", 0)
    code, output = run("90:bf16:128:dq:middle:mha:full")
    assert code == 1 and "300000 bytes of shared memory; does not fit an SM of sm_90" in output


def test_a_variant_that_its_entry_point_refuses_has_a_row() -> None:
    (large,) = parse_variants("86:bf16:128:middle:forward:full:mha:128x128x8x3")
    row = inspect_variant(large)
    assert "sm_86 allows 101,376 per block" in row["problems"] and not row["blocks"] and row["bound"] is None


def inspect(*arguments: str) -> list[dict[str, Any]]:
    """Return the rows that ``ringattn inspect`` prints in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ringattn", "inspect", "--json", "-", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


# Lowest bounds, in percent of peak, that the default tiles ever had. Raise them when a kernel improves.
LEAST_BOUNDS = {"forward": 90.0, "dq": 99.0, "dkdv": 79.0}


@pytest.mark.compiles("90:bf16:128:middle", "90:fp32:64:middle:forward", "90:bf16:128:middle:hopper")
def test_the_report_of_the_defaults() -> None:
    extra = "90:fp32:64:middle:forward:full:mha:64x32x4x2", "90:bf16:128:middle:full:mha:hopper"
    *report, fp32, hopper = inspect("--gate", *DEFAULT, *extra)
    assert [row["kernel"] for row in report] == [*LEAST_BOUNDS]
    for row in report:
        assert row["arch"] == "sm_90" and not row["spills"] and not row["problems"]
        assert row["exponentials"] > 0 and row["bound"] >= LEAST_BOUNDS[row["kernel"]], row["variant"]
    forward = report[0]
    assert [row["blocks"] for row in report] == [2, 2, 2]
    # 64 x 64 scores over 128 threads, and a rescaling for each of a thread's two rows.
    # Products of 64 x 64 x 128 by instructions of 64x64x16, and of 64 x 128 x 64 by 64x128x16.
    assert (forward["exponentials"], forward["matrix"]) == (64 * 64 // 128 + 2, 8 + 4)
    assert forward["loops"] == "12 12 12"
    assert forward["products"] == 2 * 64 * 64 * 128 / 2048
    # An fp32 product runs as three TF32 products at half the rate (`tf32x3`).
    assert fp32["products"] * MULTIPROCESSOR_SPECS[90].products == 3 * 2 * 64 * 32 * (64 + 64)
    # Two warpgroups alternate: the softmax of one overlaps with the products of the other.
    assert (hopper["loops"], hopper["threads"], hopper["products"]) == ("16 16", 384, 2 * 64 * 128 * 128 / 2048)
    assert hopper["bound"] > 95


AMD = [f"{arch}:bf16:128:middle:bounded:mha:{kernel}" for arch in ("gfx942", "gfx950") for kernel in LEAST_BOUNDS]


@pytest.mark.compiles(*AMD)
def test_the_report_of_gpus_of_amd() -> None:
    rows = inspect("--gate", *AMD, "gfx942:fp32:64:middle:bounded:mha:forward", "gfx942:bf16:128:quantize")
    *report, fp32, quantize = rows
    for row in report:
        assert row["arch"] in row["variant"] and row["blocks"] >= 1 and row["threads"] in (256, 512)
        assert row["shared"] <= 64 << 10 and row["regs"] <= 512 and row["spills"] == row["stack"] == 0
        assert row["bound"] is row["ceiling"] is row["limiter"] is None and not row["problems"]
    # Two products of 128 x 64 x 128 in four wavefronts, by instructions of 32x32x8 and, on gfx950, 32x32x16.
    assert [row["matrix"] for row in report[::3]] == [2 * 128 * 64 * 128 // 4 // (32 * 32 * depth) for depth in (8, 16)]
    assert report[0]["exponentials"] == 128 * 64 // 256 + 1  # and a rescaling
    assert fp32["matrix"] > 0 and quantize["matrix"] is None and quantize["stack"] == 0


@pytest.mark.parametrize("word", ["hopper", "hopper_backward", "dkdv:dkdv_epilogue=descriptors"])
def test_kernels_for_nvidia_alone_are_refused_on_amd(word: str) -> None:
    try:
        variants = parse_variants(f"gfx942:bf16:128:middle:bounded:mha:{word}")
    except ValueError as error:
        assert "sm_90" in str(error)
    else:
        assert "compute capability 9.0" in inspect_variant(variants[0])["problems"]
