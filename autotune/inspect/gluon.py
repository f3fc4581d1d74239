"""What the Hopper kernels have in common as variants: their words, their types of arguments, their compilation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ...kernels.experimental.hopper_launch import REGISTERS
from ...kernels.experimental.steps import CONSUMERS
from .arguments import specialise
from .compiled import Compiled, read_compiled
from .variant import Variant

WARPGROUP = 128  # threads, of a consumer

GLUON_DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}


def check_kind(variant: Variant, kernel: str, head_dims: Collection[int], takes: str) -> None:
    """Refuse what a Hopper kernel, which stands in the place of ``kernel``, is not written for: ValueError."""
    for what, got, known in (
        ("kernel", variant.kernel, [kernel]),
        ("arch", f"sm_{variant.arch}", ["sm_90"]),
        ("dtype", variant.dtype, GLUON_DTYPES),
        ("head_dim", variant.head_dim, head_dims),
        ("head_dim_v", variant.head_dim_v, [variant.head_dim]),
        ("features", " ".join(variant.features) or "none", ["none"]),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: {takes} {', '.join(map(str, known))}")


def described(dtype: str, rows: int, columns: int) -> str:
    """The type of a TMA descriptor of tiles of ``rows`` rows."""
    return f"tensordesc<{dtype}{[1, rows, 1, columns]},{layout_of(dtype, rows, columns)}>"


def layout_of(dtype: str, rows: int, columns: int) -> str:
    """Of such a tile in shared memory, as Gluon spells it."""
    return repr(
        gl.NVMMASharedLayout.get_default_for([1, rows, 1, columns], (GLUON_DTYPES | {"fp32": gl.float32})[dtype])
    )


def source_of(kernel: Any, arguments: Mapping[str, Any], *, general: Collection[str] = ()) -> GluonASTSource:
    """A kernel with the types of its arguments; those in ``general`` are not specialised, nor are descriptors."""
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        given = arguments[name]
        as_it_is = name in general or (isinstance(given, str) and given.startswith("tensordesc"))
        signature[name] = given if as_it_is else specialise(given, (index,), constexprs, attributes)
    return GluonASTSource(kernel, signature, constexprs, attributes)


def compile_source(source: GluonASTSource, arch: int) -> tuple[Compiled, str]:
    """(what the gate and the bound read, PTX).

    Raises:
        RuntimeError: Triton or ptxas refuses it.
    """
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return replace(read_compiled(kernel, arch), partitions=CONSUMERS, loop_threads=WARPGROUP), kernel.asm["ptx"]
