"""Kernels compiled ahead of time for GPUs that are not here: resources fit, and main loops have no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton

from ringattn.autotune.compile import ATTENTION, FEATURES, FP8

ARCHS = (80, 86, 89, 90, 100, 120)
SIXTEEN_BIT = (64, 128)


def of_a_hop(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the gate's row of each causal multi-head kernel."""
    return {row["kernel"]: row for row in rows if not row["full"] and not row["grouped"]}


def compiling(*arguments: str) -> str:
    """Return the output of a module in a child process, because here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def gate(*variants: str) -> list[dict[str, Any]]:
    """Return rows of ``ringattn inspect`` after the gate passed."""
    report = json.loads(compiling("ringattn", "inspect", "--gate", "--json", "-", *variants))
    rows: list[dict[str, Any]] = report["rows"]
    return rows


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Compile the variants that the test's marker lists, and return the gate's rows."""
    return gate(*request.node.get_closest_marker("compiles").args)


# Registers and instructions of the unmasked loop (of dK/dV's only loop) of causal kernels in the middle of a ring with
# Triton 3.7.1. Scores, used lengths, block ranges and head dims in two parts did not change those of earlier tiles.
EXPECTED = {"forward": (205, 347), "dq": (245, 276), "dkdv": (255, 377)}


@pytest.mark.compiles("90:bf16:128:middle")
def test_common_launches_are_clean_and_disabled_features_cost_nothing(rows: list[dict[str, Any]]) -> None:
    """Compare registers and instructions with those of kernels without disabled features."""
    compiled = of_a_hop(rows)
    if triton.__version__.startswith("3.7."):  # the version of the figures
        for kernel, (registers, instructions) in EXPECTED.items():
            assert compiled[kernel]["regs"] <= registers and compiled[kernel]["instructions"] <= instructions, kernel


# One kernel per other GPU family, and the remaining kernels on the main one. Each process compiles several, because
# starting it takes most of the time.
SAMPLE = [
    ["80:bf16:128:middle:dkdv", "100:bf16:64:middle:forward", "120:fp16:128:middle:dq"],
    ["90:bf16:128:last:single_pass", "100:bf16:96:middle:single_pass"],
    ["80:bf16:512:middle:mha:dkdv", "86:bf16:320:middle:mha:forward", "90:bf16:512:last:mha:forward"],
    ["90:bf16:128:quantize", "80:fp32:256:quantize", "90:bf16:128:dequantize", "86:bf16:64:dequantize"],
]


@pytest.mark.parametrize("names", [pytest.param(row, marks=pytest.mark.compiles(*row), id=row[0]) for row in SAMPLE])
def test_a_sample_passes_the_gate(names: list[str], rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= len(names)


@pytest.mark.compiles("90:bf16:192/128:middle:forward")
def test_head_dims_in_two_parts_multiply_less(rows: list[dict[str, Any]]) -> None:
    """A head dim of 192 runs as 128 + 64: 12 + 4 steps of 16 instead of 16 + 4 with padding to 256."""
    compiled = of_a_hop(rows)["forward"]
    assert compiled["loops"] == "16 16 16"


@pytest.mark.compiles("90:bf16:128:middle:dkdv:dkdv_epilogue=descriptors")
def test_descriptors_in_the_epilogue_end_the_spills() -> None:
    """The default tile has 16 bytes of stack outside its loop when it stores by pointers."""
    (compiled,) = gate("90:bf16:128:middle:bounded:mha:dkdv:dkdv_epilogue=descriptors")
    assert (compiled["head_dim"], compiled["role"], compiled["options"]) == (128, "middle", "dkdv_epilogue=descriptors")
    assert compiled["stack"] == 0 and compiled["regs"] <= 230


ORDERS = (
    "order=longest",
    "order=longest:persistent=True",
    "pack_gqa=True",
    "order=longest:pack_gqa=True",
    "dkdv_splits=2",
)
HOPPER = ("hopper", "hopper_backward")
DESCRIBED = "dkdv:dkdv_epilogue=descriptors"
NIGHTLY: dict[str, list[str]] = {
    "bf16": [f"bf16:{dim}" for dim in (64, 128, 256)],
    "fp32": [f"fp32:{dim}" for dim in (64, 128, 256)],
    # one role per kernel, because only the matrix instruction differs from bf16
    "fp16": [f"fp16:{dim}:{role}" for dim in (64, 128, 256) for role in ("middle", "quantize", "dequantize")],
    "features": [
        f"bf16:128:middle:{kernel}:{extra}" for kernel in ATTENTION for extra in (*FEATURES, ":".join(FEATURES))
    ],
    "max_logits": [f"bf16:{dim}:max_logits" for dim in SIXTEEN_BIT],
    "orders": [f"bf16:{dim}:middle:{options}" for dim in SIXTEEN_BIT for options in ORDERS],
    "two parts": [f"bf16:{head_dims}" for head_dims in ("192/128", "96", "80")],
    "wide": ["bf16:512", "fp16:512:middle"]
    + [f"bf16:{dims}:middle" for dims in ("272", "320", "384", "448", "64/512", "512/64", "256/512", "512/256")]
    + [f"fp32:{dims}:middle:bounded:mha" for dims in ("512", "300/212", "512/16")],
    "fp8": [f"{dtype}:{dim}:{kernel}" for dtype in ("bf16", "fp32") for dim in (1, 40, 96, 129, 257) for kernel in FP8],
    "hopper": [f"{dtype}:{dim}:{kernel}" for dtype in ("bf16", "fp16") for kernel, dim in product(HOPPER, SIXTEEN_BIT)]
    + ["bf16:256:hopper", "fp16:256:hopper", "bf16:128:hopper:max_logits"],
    "descriptors": [f"bf16:64:{DESCRIBED}", f"bf16:128:{DESCRIBED}", f"fp32:128:{DESCRIBED}"],
}


WITH = {"descriptors": (90, 100, 120), "hopper": (90,)}
"""GPUs with TMA or wgmma. Other variants run on all architectures."""
ON_AMD = ("bf16", "fp32", "features", "max_logits", "two parts")


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("what", "arch"), [
    *((what, arch) for what in NIGHTLY for arch in WITH.get(what, ARCHS)), *product(ON_AMD, ("gfx942", "gfx950"))
])  # fmt: skip
def test_everything_that_can_be_launched_passes_the_gate(what: str, arch: int | str) -> None:
    specs = list(NIGHTLY[what])
    if (what, arch) == ("descriptors", 90):  # persistent kernels do not fit sm_120
        specs += [
            f"{spec}:{order}" for spec in specs[:2] for order in ("order=longest:persistent=True", "dkdv_splits=2")
        ]
    rows = gate(*(f"{arch}:{spec}" for spec in specs))
    assert arch != 90 or not any(row["stack"] for row in rows if row["options"] == "dkdv_epilogue=descriptors")
