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
from ringattn.bench.kernels import accuracy, contender, speed
from ringattn.bench.suite import calls, device_cases, gpu
from ringattn.bench.suite.parts import FILE, OUT, PYTHON, RINGATTN, Part, gpu_parts
from ringattn.kernels import KernelConfig, Tile

from .cuda.device import FakeCuda
from .interpreter import quicken

TILE = Tile(16, 16, 4, 1)
SMALL: dict[Callable[..., Any], dict[str, Any]] = {
    device_cases.launches: {"dtype": "float32", "seqlen": 40, "head_dim": 16},
    device_cases.ceilings: {"side": 64, "dtype": "float32", "nbytes": 4096},
    accuracy.accuracy: {"dtype": "float16", "head_dim": 16, "head_dim_v": 16, "seqlen": 24, "heads": (2, 1),
                        "causal_worlds": (2,), "full_worlds": ()},
    speed.targets: {"seconds": 0, "sizes": speed.Sizes(32, 16, 1, 16, 16, "float32", 1 << 12)},
    calls.drawn_calls: {"transport": "local", "world": 2, "only": ("fp32, uneven", "Ulysses")},
    gpu.killed: {"transport": "process_group"},
    device_cases.fp8: {"dtypes": ("float16",), "shapes": ((1, 130, 2, 8),)},
    device_cases.local_world: {
        "world": 2, "tokens": 64, "heads": 2, "head_dim": 16, "dtype": "float32", "repeats": 1,
    },
}  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
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
NOTHING_LEFT = ("compiled", "captured", "racecheck", "memcheck")  # parts that do nothing without a GPU


def rehearsed() -> list[Part]:
    return [replace(part, command=stand_in(part), missing=None) for part in gpu_parts()]


def stand_in(part: Part) -> tuple[str, ...]:
    if part.name in NOTHING_LEFT:
        return (PYTHON, "-c", "")
    return COMMANDS.get(part.name, (PYTHON, "-m", "tests.support.suite_stand_in", *part.command[-2:]))


def case(name: str, file: str, patch: pytest.MonkeyPatch) -> int:
    run_case = device_cases.CASES["cuda"][name]
    run, arguments = (run_case.func, run_case.keywords) if isinstance(run_case, partial) else (run_case, {})
    if run is accuracy.accuracy:
        hopper_by_another(patch)
    if run is speed.targets:
        FakeCuda(patch)
        patch.setattr(timing, "LEAST", 1)
        patch.setattr(timing, "MOST", 1)
        patch.setattr(speed, "PRODUCT_SIDE", {"cpu": 16})
        ours = [contender.Contender(kind.name, partial(contender.triton_kernels, kind)) for kind in contender.VARIANTS]
        flash = contender.Contender("flash", partial(contender.sdpa, contender.GPU_SDPA["flash"]))
        patch.setattr(speed, "contenders", lambda device: [*ours, flash])
    smaller = {name: value for name, value in SMALL[run].items() if name != "head_dim_v" or name in arguments}
    return device_cases.main(name, partial(run, **{**arguments, **smaller}), torch.device("cpu"), file)


def hopper_by_another(patch: pytest.MonkeyPatch) -> None:
    """Replace the Hopper kernels by a portable single pass in fp16, because the interpreter has no bf16."""
    right, draw = accuracy.config_of, accuracy.draw
    single = KernelConfig(TILE, TILE, TILE, backward="single_pass")
    patch.setattr(accuracy, "is_hopper", lambda device: True)
    patch.setattr(accuracy, "draw", lambda device, dtype, sizes: draw(device, torch.float16, (24, 2, 1, 16, 16)))
    patch.setattr(accuracy, "config_of", lambda kind, q: single if kind == accuracy.HOPPER else right(kind, q))


if __name__ == "__main__":
    quicken()
    with pytest.MonkeyPatch.context() as patched:
        sys.exit(case(sys.argv[1], sys.argv[2], patched))
