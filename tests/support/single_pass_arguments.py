"""Run as a script: launches of the single-pass backward on sm_90, real arguments included, up to the binary."""

from __future__ import annotations

import re
from typing import Any

import torch
from triton.runtime import driver

from ringattn.kernels import FULL, Bounds, KernelConfig, Tile
from ringattn.kernels.experimental import single_pass
from ringattn.kernels.tables import Gpu

from .gluon_arguments import Hopper

LIMIT = 232_448  # bytes of shared memory of a block on sm_90

STEPS = re.compile(
    r"(?P<acquire>atom\.\S*acquire)|(?P<add>cp\.reduce\.async\.bulk|(?:atom|red)\.\S*\.f32)"
    r"|(?P<done>cp\.async\.bulk\.wait_group\s)|(?P<barrier>bar\.sync)|(?P<release>(?:atom|red)\.\S*release)"
)
"""What orders who adds to dQ; ``wait_group.read`` waits for the room alone, not for the sum."""


def compile_launch(kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
    """In the place of ``launch``."""
    made = kernel.warmup(*arguments, grid=(grid,), **options)
    adds_by_copy_engine = "cp.reduce.async.bulk" in made.asm["ptx"]
    assert made.metadata.shared <= LIMIT
    assert adds_by_copy_engine == (arguments[11] is not None)
    if arguments[12].gates is not None:
        check_turn([str(match.lastgroup) for match in STEPS.finditer(made.asm["ptx"])], adds_by_copy_engine)


def check_turn(steps: list[str], by_copy_engine: bool) -> None:
    """A program waits before it adds, and passes its turn on when all of its threads and the copy engine have added."""
    added = [index for index, step in enumerate(steps) if step == "add"]
    begin, end = steps.index("acquire"), steps.index("release")
    assert begin < added[0] and added[-1] < end, steps
    behind = steps[added[-1] + 1 : end]
    assert behind[-1] == "barrier" and ("done" in behind) == by_copy_engine, behind


def launch_case(sizes: tuple[int, ...], mode: str, bounded: bool) -> None:
    batch, rows, keys, heads, kv_heads, head_dim = sizes
    q = torch.zeros(batch, rows, heads, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(batch, keys, kv_heads, head_dim, dtype=torch.bfloat16)
    lse, limits = torch.zeros(batch, heads, rows), torch.zeros(rows, dtype=torch.int32)
    tile = Tile(32, 64, 4, 1)
    single_pass.attention_gradients(
        q, q, k, k.clone(), lse, lse, dq=torch.zeros(q.shape), bounds=Bounds(limits, limits) if bounded else FULL,
        config=KernelConfig(tile, tile, tile, backward=mode, single_pass=tile),
    )  # fmt: skip


if __name__ == "__main__":
    driver.set_active(Hopper())
    vars(single_pass)["launch"] = compile_launch
    vars(single_pass)["gpu_of"] = lambda device: Gpu("NVIDIA H200", 90)
    for case in (
        ((2, 256, 384, 4, 2, 64), "single_pass", True),
        ((1, 1, 1, 1, 1, 64), "single_pass", False),
        ((3, 77, 301, 3, 1, 96), "single_pass_deterministic", False),  # no power of two: by atomics
        ((1, 130, 300, 2, 1, 64), "single_pass_deterministic", True),
    ):
        launch_case(*case)
        print("compiled:", *case)
