"""A rehearsal of the suite's GPU parts on the CPU, with stand-ins for the GPU and smaller sizes.

`python -m tests.support.suite_stand_in NAME FILE` runs a case of the suite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ringattn.bench.common import timing
from ringattn.bench.common.memory_table import OURS
from ringattn.bench.kernels import accuracy, contenders, speed
from ringattn.bench.suite import call_cases, device_cases, gpu_cases
from ringattn.bench.suite.suite_parts import FILE, OUT, PYTHON, RINGATTN, SuitePart, gpu_parts
from ringattn.kernels import KernelConfig, Tile

from .cuda.device import FakeCuda
from .interpreter import speed_up_interpreter

TILE = Tile(16, 16, 4, 1)
SMALL: dict[Callable[..., Any], dict[str, Any]] = {
    device_cases.launch_case: {"dtype": "float32", "seqlen": 40, "head_dim": 16},
    device_cases.ceilings_case: {"side": 64, "dtype": "float32", "nbytes": 4096},
    accuracy.accuracy_case: {"dtype": "float16", "head_dim": 16, "head_dim_v": 16, "seqlen": 24, "heads": (2, 1),
                        "causal_worlds": (2,), "full_worlds": ()},
    speed.measure_targets: {"seconds": 0, "sizes": speed.TargetSizes(32, 16, 1, 16, 16, "float32", 1 << 12)},
    call_cases.measure_calls: {"transport": "local", "world": 2, "call_names": ("fp32, uneven", "Ulysses")},
    gpu_cases.killed_rank_case: {"transport": "process_group"},
    device_cases.fp8_case: {"dtypes": ("float16",), "shapes": ((1, 130, 2, 8),)},
    device_cases.local_world_case: {
        "world": 2, "tokens": 64, "heads": 2, "head_dim": 16, "dtype": "float32", "repeats": 1,
    },
}  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "backends": (
        *RINGATTN, "bench", "kernels", "--seqlen", "64", "--heads", "2", "--head-dim", "16",
        "--dtype", "fp32", "--seconds", "0.1", "--by", OURS, "--json", FILE,
    ),
    "beside NCCL": (
        *RINGATTN, "bench", "links", "--device", "cpu", "--world", "2", "--transport", "process_group", "-b", "64K",
        "-e", "64K", "-n", "1", "--json", FILE,
    ),
    "host": (*RINGATTN, "bench", "host", "--device", "cpu", "--tokens", "64", "--json", FILE),
    "tune": (
        *RINGATTN, "tune", "--heads", "2", "--head-dim", "64", "--seqlen", "1k", "--full", "--tiles", "1", "--arch",
        "sm_90", "--compile-only", "--save-dir", f"{OUT}/tables", "--json", FILE,
    ),
}  # fmt: skip
SKIPPED_PARTS = ("compiled", "captured", "racecheck", "memcheck")  # parts that do nothing without a GPU


def rehearsed_parts() -> list[SuitePart]:
    """Return the suite's GPU parts, with commands that run on the CPU."""
    return [replace(part, command=stand_in_command(part), missing_reason=None) for part in gpu_parts()]


def stand_in_command(part: SuitePart) -> tuple[str, ...]:
    if part.name in SKIPPED_PARTS:
        return (PYTHON, "-c", "")
    return COMMANDS.get(part.name, (PYTHON, "-m", "tests.support.suite_stand_in", *part.command[-2:]))


def run_case_on_cpu(name: str, file: str, patch: pytest.MonkeyPatch) -> int:
    """Run one case of the suite with the GPU stand-ins, and return the exit code."""
    run_case = device_cases.CASES["cuda"][name]
    run, arguments = (run_case.func, run_case.keywords) if isinstance(run_case, partial) else (run_case, {})
    if run is accuracy.accuracy_case:
        replace_hopper(patch)
    if run is speed.measure_targets:
        FakeCuda(patch)
        patch.setattr(timing, "MIN_SAMPLES", 1)
        patch.setattr(timing, "MAX_SAMPLES", 1)
        patch.setattr(speed, "PRODUCT_SIDE", {"cpu": 16})
        ours = [
            contenders.Contender(kind.name, partial(contenders.triton_contender, kind)) for kind in contenders.VARIANTS
        ]
        flash = contenders.Contender("flash", partial(contenders.sdpa_contender, contenders.GPU_SDPA["flash"]))
        patch.setattr(speed, "list_contenders", lambda device: [*ours, flash])
    smaller = {name: value for name, value in SMALL[run].items() if name != "head_dim_v" or name in arguments}
    return device_cases.main(name, partial(run, **{**arguments, **smaller}), torch.device("cpu"), file)


def replace_hopper(patch: pytest.MonkeyPatch) -> None:
    """Replace the Hopper kernels by a portable single pass in fp16, because the interpreter has no bf16."""
    right, draw = accuracy.backend_config, accuracy.draw_inputs
    single = KernelConfig(TILE, TILE, TILE, backward="single_pass")
    patch.setattr(accuracy, "is_hopper_device", lambda device: True)
    patch.setattr(accuracy, "draw_inputs", lambda device, dtype, sizes: draw(device, torch.float16, (24, 2, 1, 16, 16)))
    patch.setattr(accuracy, "backend_config", lambda kind, q: single if kind == accuracy.HOPPER else right(kind, q))


if __name__ == "__main__":
    speed_up_interpreter()
    with pytest.MonkeyPatch.context() as patched:
        sys.exit(run_case_on_cpu(sys.argv[1], sys.argv[2], patched))
