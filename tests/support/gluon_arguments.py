"""Run as a script: the Hopper forward's launch, or the ``backward``'s, up to the binary, where there is no GPU.

The gate compiles from types that it spells itself. Here the JIT derives them from the tensors, the descriptors and the
integers of a launch, of which it makes constants where they are 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ringattn.kernels import FULL, Bounds, Tile
from ringattn.kernels.experimental import hopper_backward_launch, hopper_launch
from ringattn.kernels.launch import Descriptors


class Hopper:
    """What the JIT asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


CASES: dict[str, tuple[tuple[int, ...], torch.dtype, bool, bool]] = {
    "several of all": ((2, 256, 384, 4, 2, 128), torch.bfloat16, False, True),
    "one of all": ((1, 1, 1, 1, 1, 64), torch.float16, True, False),
    "one row": ((1, 1, 300, 2, 1, 128), torch.bfloat16, True, True),
    "one key": ((1, 130, 1, 3, 3, 128), torch.bfloat16, False, True),
    "odd lengths": ((3, 77, 301, 3, 1, 256), torch.float16, True, True),
}
"""(B, Sq, Sk, H, Hkv, D), dtype, bounds, state."""


BACKWARD: dict[str, tuple[tuple[int, ...], torch.dtype, bool, bool]] = {
    "backward, several of all": ((2, 256, 384, 4, 2, 128), torch.bfloat16, False, True),
    "backward, one of all": ((1, 1, 1, 1, 1, 64), torch.float16, True, False),
    "backward, keys past the end": ((1, 130, 300, 3, 3, 128), torch.bfloat16, False, False),
}
"""The same of the backward, with sums."""


def compile_launch(kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
    """In the place of ``launch``."""
    made = kernel.warmup(*arguments, grid=(grid,), **options)
    assert "cubin" in made.asm and made.metadata.shared <= hopper_launch.SHARED_LIMIT


def launch_case(sizes: tuple[int, ...], dtype: torch.dtype, bounded: bool, carried: bool) -> None:
    batch, rows, keys, heads, kv_heads, head_dim = sizes
    q, k = (
        torch.zeros(batch, rows, heads, head_dim, dtype=dtype),
        torch.zeros(batch, keys, kv_heads, head_dim, dtype=dtype),
    )
    out = torch.zeros(q.shape, dtype=torch.float32 if carried else dtype)
    limits = torch.zeros(rows, dtype=torch.int32)
    tile = Tile(128, 64 if head_dim == 256 else 128, 8, 2)
    hopper_launch.launch_hopper(
        q, k, k.clone(), out if carried else None, out, torch.zeros(batch, heads, rows),
        Bounds(limits, limits) if bounded else FULL, 1.0, tile, Descriptors(),
    )  # fmt: skip


def launch_backward(sizes: tuple[int, ...], dtype: torch.dtype, bounded: bool, carried: bool) -> None:
    batch, rows, keys, heads, kv_heads, head_dim = sizes
    q = torch.zeros(batch, rows, heads, head_dim, dtype=dtype)
    k, v = (torch.zeros(batch, keys, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    vectors = torch.zeros(batch, heads, rows), torch.zeros(batch, heads, rows)
    into = (k.float(), v.float()) if carried else (k.clone(), v.clone())
    limits = torch.zeros(rows, dtype=torch.int32)
    hopper_backward_launch.launch_hopper_backward(
        q.clone(), q, k, v, *vectors, q.float(), into if carried else None, into,
        Bounds(limits, limits) if bounded else FULL, 1.0, None, Descriptors(),
    )  # fmt: skip


if __name__ == "__main__":
    driver.set_active(Hopper())
    vars(hopper_launch)["launch"] = vars(hopper_backward_launch)["launch"] = compile_launch
    of_backward = "backward" in sys.argv
    for name, case in (BACKWARD if of_backward else CASES).items():
        (launch_backward if of_backward else launch_case)(*case)
        print("compiled:", name)
