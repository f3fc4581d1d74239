"""Run as a script: launches of the single-pass backward on sm_90, real arguments included, up to the binary."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

from ringattn.kernels import FULL, Bounds, KernelConfig, Tile, gradients
from ringattn.kernels.lookup import Gpu

from .gluon_arguments import Hopper

LIMIT = 232_448  # bytes of shared memory of a block on sm_90


def compile_launch(kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
    """In the place of ``launch``."""
    made = kernel.warmup(*arguments, grid=(grid,), **options)
    adds_by_copy_engine = "cp.reduce.async.bulk" in made.asm["ptx"]
    assert made.metadata.shared <= LIMIT
    assert adds_by_copy_engine == (arguments[11] is not None)


def launch_case(sizes: tuple[int, ...], mode: str, bounded: bool) -> None:
    batch, rows, keys, heads, kv_heads, head_dim = sizes
    q = torch.zeros(batch, rows, heads, head_dim, dtype=torch.bfloat16)
    k = torch.zeros(batch, keys, kv_heads, head_dim, dtype=torch.bfloat16)
    lse, limits = torch.zeros(batch, heads, rows), torch.zeros(rows, dtype=torch.int32)
    tile = Tile(32, 64, 4, 1)
    gradients.attention_gradients(
        q, q, k, k.clone(), lse, lse, dq=torch.zeros(q.shape), bounds=Bounds(limits, limits) if bounded else FULL,
        config=KernelConfig(tile, tile, tile, backward=mode, single_pass=tile),
    )  # fmt: skip


if __name__ == "__main__":
    driver.set_active(Hopper())
    vars(gradients)["launch"] = compile_launch
    vars(gradients)["gpu_of"] = lambda device: Gpu("NVIDIA H200", 90)
    for case in (
        ((2, 256, 384, 4, 2, 64), "single_pass", True),
        ((1, 1, 1, 1, 1, 64), "single_pass", False),
        ((3, 77, 301, 3, 1, 96), "single_pass", False),
        ((1, 130, 300, 2, 1, 64), "single_pass_deterministic", True),
    ):
        launch_case(*case)
        print("compiled:", *case)
