"""What selects one binary of a kernel, and those that default configs launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from ...kernels import Tile
from ...kernels.attention import DELTA_BLOCK, REDUCE_WARPS
from ...kernels.config import config_for, single_pass_tile
from ...kernels.device.backward import delta_kernel, dkdv_kernel, dq_kernel, reduce_kernel
from ...kernels.device.e4m3 import dequantize_kernel, quantize_kernel
from ...kernels.device.forward import forward_kernel
from ...kernels.experimental.single_pass import single_pass_kernel
from ...kernels.quantize import SCALE_TOKENS, num_warps
from ...kernels.tables import Options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SINGLE_PASS = {"single_pass": single_pass_kernel, "single_pass_deterministic": single_pass_kernel}
ATTENTION = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel} | SINGLE_PASS
FP8 = {"quantize": quantize_kernel, "dequantize": dequantize_kernel}
MEMORY_BOUND = FP8 | {"reduce": reduce_kernel, "delta": delta_kernel}
KERNELS = ATTENTION | MEMORY_BOUND


@dataclass(frozen=True)
class Role:
    """Where in a ring a launch stands: what it continues, and in which dtype it leaves its result."""

    carried: bool  # continues a state or sums
    in_place: bool  # and writes them back
    final: bool  # leaves the model dtype, not fp32


ROLES = {
    "only": Role(carried=False, in_place=False, final=True),
    "first": Role(carried=False, in_place=False, final=False),
    "middle": Role(carried=True, in_place=True, final=False),
    "last": Role(carried=True, in_place=False, final=True),
}


FEATURES = ("softcap", "alibi", "dropout", "used", "runs")
"""What a launch may have beside bounds."""


@dataclass(frozen=True)
class Variant:
    """Everything that selects one binary of a kernel."""

    kernel: str  # one of KERNELS
    arch: int  # compute capability without the dot: 90
    dtype: str  # bf16, fp16 or fp32
    head_dim: int
    head_dim_v: int
    tile: Tile
    role: str = "middle"  # one of ROLES
    full: bool = False  # no bounds
    grouped: bool = True  # several query heads per key head
    features: tuple[str, ...] = ()  # some of FEATURES that are on
    options: Options = ()  # fields of KernelConfig beside the tiles that are not the default

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        tile = f"{self.tile.block_q}x{self.tile.block_k} {self.tile.num_warps}w {self.tile.num_stages}s"
        flags = " ".join(
            [
                self.role,
                *(["full"] if self.full else []),
                *(["gqa"] if self.grouped else []),
                *self.features,
            ]
        )
        flags += "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.kernel} sm_{self.arch} {self.dtype} {dims} {tile} {flags}"


def launchable(arch: int, dtype: str, head_dim: int, head_dim_v: int | None = None) -> Iterator[Variant]:
    """Every variant that a default config can launch: kernels x roles x bounds x GQA, and the memory-bound ones.

    dK/dV of grouped heads is cut into parts where programs are few, and the parts are reduced.
    """
    dim_v = head_dim if head_dim_v is None else head_dim_v
    for kernel, role, full, grouped in product(ATTENTION, ROLES, (False, True), (False, True)):
        if (tile := default_tile(kernel, arch, dtype, max(head_dim, dim_v))) is not None:
            yield Variant(kernel, arch, dtype, head_dim, dim_v, tile, role, full, grouped)
    dkdv = config_for(arch, DTYPES[dtype], max(head_dim, dim_v)).dkdv
    for role, full in product(ROLES, (False, True)):
        yield Variant("dkdv", arch, dtype, head_dim, dim_v, dkdv, role, full, True, options=(("dkdv_splits", 2),))
        tile = replace(dkdv, num_warps=REDUCE_WARPS, num_stages=1)
        yield Variant("reduce", arch, dtype, head_dim, dim_v, tile, role, full, True)
    tile = Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1)
    yield Variant("delta", arch, dtype, head_dim, dim_v, tile, "only", full=True, grouped=False)
    for kernel, dim in product(FP8, dict.fromkeys((head_dim, dim_v))):
        tile = Tile(SCALE_TOKENS, SCALE_TOKENS, num_warps(dim), 1)
        yield Variant(kernel, arch, dtype, dim, dim, tile, "only", full=True, grouped=False)


def default_tile(kernel: str, arch: int, dtype: str, head_dim: int) -> Tile | None:
    """The built-in tile of a kernel of ``ATTENTION`` at the larger head dim; None where it has none that fits."""
    if kernel in SINGLE_PASS:
        return single_pass_tile(arch, DTYPES[dtype], head_dim)
    tile: Tile = getattr(config_for(arch, DTYPES[dtype], head_dim), kernel)
    return tile
