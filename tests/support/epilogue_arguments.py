"""Run as a script: dK/dV with descriptors in its epilogue on sm_90, real arguments included, up to the binary."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

from ringattn.kernels import KernelConfig, Tile, attention, launch

from .descriptor_stand_in import H200
from .gluon_arguments import Hopper

TILE = Tile(32, 64, 4, 1)
DESCRIPTORS = KernelConfig(TILE, TILE, TILE, dkdv_epilogue="descriptors")
ADDS, STORES = "cp.reduce.async.bulk.tensor", "cp.async.bulk.tensor.4d.global.shared"


def compile_launch(kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
    """In the place of ``launch``."""
    ptx = kernel.warmup(*arguments, grid=(grid,), **options).asm["ptx"]
    in_place = options["HAS_SUM"] and options["IN_PLACE"]
    assert (ADDS in ptx, STORES in ptx) == (in_place, not in_place)
    assert ("cp.async.bulk.tensor.4d.shared" in ptx) == (options["HAS_SUM"] and not in_place)
    assert "st.global" not in ptx, "something is left by pointers"


def launch_case(batch: int, rows: int, keys: int, kv_heads: int, head_dim: int, role: str) -> None:
    q, k = (torch.zeros(batch, count, kv_heads, head_dim, dtype=torch.bfloat16) for count in (rows, keys))
    v = torch.zeros(batch, keys, kv_heads, 64, dtype=torch.bfloat16)
    dout, lse = torch.zeros(batch, rows, kv_heads, 64, dtype=torch.bfloat16), torch.zeros(batch, kv_heads, rows)
    sums = None if role in ("only", "first") else (torch.zeros(k.shape), torch.zeros(v.shape))
    into = {"only": None, "first": (torch.zeros(k.shape), torch.zeros(v.shape)), "middle": sums, "last": None}[role]
    attention.attention_dkdv(dout, q, k, v, lse, lse, sums=sums, into=into, config=DESCRIPTORS)


if __name__ == "__main__":
    driver.set_active(Hopper())
    vars(attention)["launch"] = compile_launch
    vars(launch)["gpu_of"] = lambda device: H200
    for case in (
        (2, 256, 384, 2, 128, "only"),
        (3, 77, 301, 3, 32, "first"),
        (1, 1, 1, 1, 64, "middle"),
        (1, 130, 300, 2, 16, "last"),
    ):
        launch_case(*case)
        print("compiled:", *case)
