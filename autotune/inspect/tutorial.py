"""The loop bounds of Triton's fused-attention tutorial, compiled and read like ours: ``python -m … FILE [ARCH] [D]``.

``FILE`` is your copy of ``python/tutorials/06-fused-attention.py`` of the Triton that is installed; it is no part of
the wheel nor of this package. It asks for a GPU where it is imported, and gets one that is not there, of the arch
asked for. fp16, causal, no warp specialisation; each config of its own list for the forward, its one for the backward.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...bench.common.tables import table
from .arguments import specialise
from .bound import blocks_of, bounds_of
from .compiled import Compiled, read_compiled
from .report import Row

BACKWARD = {"BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32, "BLK_SLICE_FACTOR": 2}
BACKWARD_OPTIONS = {"num_warps": 4, "num_stages": 5}
"""What the tutorial's backward is launched with."""

DESCRIPTORS = 90  # the first compute capability that takes tensors by TMA descriptors


def load(path: str, arch: int) -> ModuleType:
    """Import the tutorial as if a GPU of ``arch`` were here."""
    spec = spec_from_file_location("fused_attention_tutorial", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    target = GPUTarget("cuda", arch, 32)
    device = SimpleNamespace(get_active_torch_device=lambda: torch.device("cpu"), get_current_target=lambda: target)
    module = module_from_spec(spec)
    with (
        patch.object(triton.runtime, "driver", SimpleNamespace(active=device)),
        patch.object(torch.cuda, "get_device_capability", lambda: divmod(arch, 10)),
    ):
        spec.loader.exec_module(module)
    return module


def arguments(arch: int, head_dim: int, block_m: int, block_n: int) -> dict[str, Any]:
    """By name, for both kernels: a type for what is passed at run time, a plain value for a constexpr."""
    by_descriptor = arch >= DESCRIPTORS
    rows = {"desc_q": block_m, "desc_k": block_n, "desc_v": block_n, "desc_o": block_m}
    described = {
        name: f"tensordesc<fp16[{count}, {head_dim}]>" if by_descriptor else "*fp16" for name, count in rows.items()
    }
    pointers = dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DK", "DV"), "*fp16")
    return {
        **described, **pointers, **BACKWARD, "M": "*fp32", "D": "*fp32", "sm_scale": "fp32",
        **dict.fromkeys(("Z", "H", "N_CTX", "stride_z", "stride_h", "stride_tok"), "i32"), "stride_d": 1,
        "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGE": 3, "CAUSAL": True,
        "FP8_OUTPUT": False, "warp_specialize": False, "IS_HOPPER": arch // 10 == 9,
    }  # fmt: skip


def compile_kernel(kernel: Any, given: dict[str, Any], arch: int, options: dict[str, int]) -> Compiled:
    """One kernel of the tutorial.

    Raises:
        ValueError: it has an argument that is not known here: a tutorial of another Triton.
    """
    if unknown := set(kernel.arg_names) - set(given):
        raise ValueError(f"the tutorial's kernel has the arguments {sorted(unknown)}: not those of Triton 3.5 to 3.9")
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    signature = {}
    for index, name in enumerate(kernel.arg_names):
        kind = given[name]
        descriptor = isinstance(kind, str) and kind.startswith("tensordesc")
        signature[name] = kind if descriptor else specialise(kind, (index,), constexprs, attributes)
    source = ASTSource(kernel, signature, constexprs, attributes)
    return read_compiled(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), arch)


def rows_of(name: str, compiled: Compiled) -> list[Row]:
    """A row per loop, in the order of the listing."""
    return [
        {
            "kernel": name,
            "regs": compiled.registers,
            "spills": one.loop.local,
            "blocks": blocks_of(compiled),
            "Mi products": one.mix.products / 2**20,
            "instructions": one.loop.instructions,
            "ex2/mma": one.mix.exponentials / one.mix.matrix,
            "bound %": one.percent if blocks_of(compiled) else 0.0,
            "limiter": one.limiter,
            "ceiling %": one.ceiling,
        }
        for one in bounds_of(compiled)
    ]


def forward_rows(module: ModuleType, arch: int, head_dim: int) -> list[Row]:
    """Of every config that the tutorial's autotuner would try, the loop without a mask; the best first."""
    tuner = module._attn_fwd
    found = []
    for config in tuner.configs:
        sizes = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        if sizes[1] > min(head_dim, sizes[0]):  # its own rules: BLOCK_N <= HEAD_DIM, and of the causal form <= BLOCK_M
            continue
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        name = f"forward {sizes[0]}x{sizes[1]} {config.num_warps}w {config.num_stages}s"
        try:
            compiled = compile_kernel(tuner.fn, arguments(arch, head_dim, *sizes), arch, options)
        except Exception as error:  # a config that cannot be compiled is not one that the autotuner would take
            print(f"{name}: {re.sub(chr(10), ' ', str(error))[:100]}", file=sys.stderr)
            continue
        found.append(min(rows_of(name, compiled), key=lambda row: row["instructions"]))
    return sorted(found, key=lambda row: -row["bound %"])


def main(path: str, arch: str = "90", head_dim: str = "128") -> None:
    chip, dim = int(arch.removeprefix("sm_")), int(head_dim)
    module = load(path, chip)
    print(table(forward_rows(module, chip, dim), title=f"forward, best first, sm_{chip}, Triton {triton.__version__}"))
    given = arguments(chip, dim, 128, 64)
    backward = rows_of("backward", compile_kernel(module._attn_bwd, given, chip, BACKWARD_OPTIONS))
    print(table(backward, title="backward: dK/dV (masked, then not), then dQ (masked, then not)"))


if __name__ == "__main__":
    main(*sys.argv[1:])
