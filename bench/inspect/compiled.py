"""Compile a kernel for any GPU on any machine, and read what the compiler made of it.

Needs no GPU and no CUDA: Triton's wheel ships ``ptxas`` and ``nvdisasm``. Not under ``TRITON_INTERPRET=1``, where
kernels have nothing to compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...kernels import Tile
from ...kernels.attention import REDUCE_BLOCK
from ...kernels.backward import dkdv_kernel, dq_kernel, reduce_kernel
from ...kernels.config import config_for, single_pass_tile
from ...kernels.described import COPY_ENGINE_ARCH
from ...kernels.dq_sum import Turns
from ...kernels.e4m3 import dequantize_kernel, quantize_kernel
from ...kernels.forward import forward_kernel
from ...kernels.modify import UNMODIFIED, Modifiers
from ...kernels.quantize import SCALE_TOKENS, num_warps
from ...kernels.single_pass import single_pass_kernel
from ...kernels.tables import Options
from ...kernels.tiles import BlockRuns, Interval, Order, Shape, Strided
from .sass import Loop, matrix_loops

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may take: CUDA C++ programming guide, table of compute capabilities."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of an SM of sm_100; ptxas turns a kernel that asks for more into a trap without an error."""

CLEAN_HEAD_DIM = 128
WAITS = "single_pass_deterministic"
MOST_LOCAL = 16
"""Local-memory instructions in the loop of the one that waits: its default tiles have up to 6."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SINGLE_PASS = {"single_pass": single_pass_kernel, "single_pass_deterministic": single_pass_kernel}
ATTENTION = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel} | SINGLE_PASS
FP8 = {"quantize": quantize_kernel, "dequantize": dequantize_kernel}
MEMORY_BOUND = FP8 | {"reduce": reduce_kernel}
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


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack: int  # bytes
    shared: int  # bytes
    tensor_memory: int  # columns, on sm_100
    loops: tuple[Loop, ...]
    flushes: bool = False  # somewhere, fp32 subnormals to zero
    arch: int = 0  # compute capability without the dot
    threads: int = 0  # of a block
    partitions: int = 1  # of a block that each run a main loop of their own at the same time: warp specialisation
    loop_threads: int = 0  # of one of them; 0: all of the block


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
        tile = replace(dkdv, num_warps=4, num_stages=1)
        yield Variant("reduce", arch, dtype, head_dim, dim_v, tile, role, full, True)
    for kernel, dim in product(FP8, dict.fromkeys((head_dim, dim_v))):
        tile = Tile(SCALE_TOKENS, SCALE_TOKENS, num_warps(dim), 1)
        yield Variant(kernel, arch, dtype, dim, dim, tile, "only", full=True, grouped=False)


def default_tile(kernel: str, arch: int, dtype: str, head_dim: int) -> Tile | None:
    """The built-in tile of a kernel of ``ATTENTION`` at the larger head dim; None where it has none that fits."""
    if kernel in SINGLE_PASS:
        return single_pass_tile(arch, DTYPES[dtype], head_dim)
    tile: Tile = getattr(config_for(arch, DTYPES[dtype], head_dim), kernel)
    return tile


def problems(variant: Variant, compiled: Compiled) -> list[str]:
    """What keeps a binary from being launched, or from being fast; empty where it passes the gate.

    Fit is asked of every variant. Clean loops (no spills, no serialised wgmma) are asked of 16-bit variants up to head
    dim 128, inside the loop that holds the matrix instructions: what spills outside costs nothing that counts. Where
    features make the loop several times as long, a few spills are the least of it; so they are, if they are few, where
    a loop waits for its turn (the deterministic single pass). A memory-bound kernel has no such loop, spills
    nowhere, and keeps fp32's subnormals, which stand for those of e4m3.
    """
    found = []
    if compiled.shared > SHARED_LIMIT[variant.arch]:
        found.append(f"{compiled.shared} bytes of shared memory, the chip has {SHARED_LIMIT[variant.arch]}")
    if compiled.tensor_memory > TENSOR_MEMORY_LIMIT:
        found.append(f"{compiled.tensor_memory} columns of tensor memory, the chip has {TENSOR_MEMORY_LIMIT}")
    if variant.kernel in MEMORY_BOUND:
        spills = [f"{compiled.stack} bytes of local memory"] if compiled.stack else []
        return [*found, *spills, *(["subnormal numbers are flushed to zero"] if compiled.flushes else [])]
    if not compiled.loops:
        found.append("no loop with matrix instructions")
    asked = variant.dtype != "fp32" and max(variant.head_dim, variant.head_dim_v) <= CLEAN_HEAD_DIM
    if asked and not variant.features:
        most = MOST_LOCAL if variant.kernel == WAITS else 0
        found += [f"{loop.local} local-memory instructions in a loop" for loop in compiled.loops if loop.local > most]
        found += ["serialised wgmma in a loop" for loop in compiled.loops if loop.serialised]
    return found


def compile_variant(variant: Variant, source: ASTSource | None = None) -> Compiled:
    """Compile one variant ahead of time, as :func:`ast_source` specialises it or as ``source`` does.

    Raises:
        RuntimeError: Triton or ptxas refuses it.
    """
    options = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    target = GPUTarget("cuda", variant.arch, 32)
    return read_compiled(triton.compile(source or ast_source(variant), target=target, options=options), variant.arch)


def read_compiled(kernel: Any, arch: int) -> Compiled:
    """What the gate and ``inspect`` read of a kernel that Triton compiled for ``arch``."""
    usage, listing = disassemble(kernel.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    threads = int(re.search(r"\.(?:reqntid|maxntid) (\d+)", kernel.asm["ptx"])[1])  # type: ignore[index]
    return Compiled(
        registers,
        stack,
        kernel.metadata.shared,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        tuple(matrix_loops(listing)),
        ".ftz" in kernel.asm["ptx"],
        arch,
        threads,
    )


def ast_source(variant: Variant) -> ASTSource:
    """The signature that a launch with 16-aligned pointers, strides and lengths specialises to."""
    arguments = launch_arguments(variant)
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(KERNELS[variant.kernel].arg_names):
        signature[name] = specialise(arguments[name], (index,), constexprs, attributes)
    return ASTSource(KERNELS[variant.kernel], signature, constexprs, attributes)


def specialise(
    value: Any, path: tuple[int, ...], constexprs: dict[tuple[int, ...], Any], attributes: dict[tuple[int, ...], Any]
) -> Any:
    """Type of one argument as Triton spells it; constants and alignments go to their tables under its path."""
    if isinstance(value, tuple):
        parts = [specialise(part, (*path, i), constexprs, attributes) for i, part in enumerate(value)]
        return type(value)(*parts)
    if value is None or isinstance(value, int):
        constexprs[path] = value
        return "constexpr"
    if value != "fp32" and not value.startswith("tensordesc"):
        attributes[path] = [["tt.divisibility", 16]]
    return value


def launch_arguments(variant: Variant) -> dict[str, Any]:
    """By argument name: a type for what is passed at run time, a plain value for a constexpr."""
    role = ROLES[variant.role]
    model, sums = strided(variant.dtype), strided("fp32")
    codes = strided("u8")
    result = codes if variant.kernel == "quantize" else model if role.final else sums
    carried = sums if role.carried else result
    in_place = role.in_place or (role.carried and variant.dtype == "fp32" and variant.kernel == "forward")
    if "dkdv_splits" in dict(variant.options):  # leaves its parts, and what they are added to is the reduction's
        role, result, carried = replace(role, carried=False), sums, sums
    dk, dv = (box_types(variant, dim, result, carried) for dim in (variant.head_dim, variant.head_dim_v))
    common = {
        "q": model, "k": model, "v": model, "dout": model, "lse": "*fp32", "delta": "*fp32", "softmax_scale": "fp32",
        "bounds": interval(variant), "modifiers": modifiers(variant.features),
        "shape": shape(variant), "dk_parts": sums, "dv_parts": sums,
        "state": carried, "out": result, "dq_in": carried, "dq_out": result,
        "dk_in": dk[1], "dv_in": dv[1], "dk_out": dk[0], "dv_out": dv[0],
        "HEAD_DIM": variant.head_dim, "HEAD_DIM_V": variant.head_dim_v,
        "BLOCK_Q": variant.tile.block_q, "BLOCK_K": variant.tile.block_k,
        "x": codes if variant.kernel == "dequantize" else model, "scale": "*fp32", "BLOCK": SCALE_TOKENS,
        "BLOCK_ROWS": REDUCE_BLOCK,
        "HAS_STATE": role.carried, "HAS_SUM": role.carried, "IN_PLACE": in_place,
        "dq": sums, "turns": turns(variant), "box": box(variant), "RAGGED": False,
    }  # fmt: skip
    return {name: common[name] for name in KERNELS[variant.kernel].arg_names}


def shape(variant: Variant) -> Shape:
    """Of the launch, and the order of its tiles."""
    options = dict(variant.options)
    swath = "i32" if options.get("order") == "longest" else None
    order = Order(swath, swath, "i32" if options.get("persistent") else None)
    packed = "i32" if options.get("pack_gqa") else None
    group = "i32" if variant.grouped and packed is None else 1
    splits = "i32" if "dkdv_splits" in options or variant.kernel == "reduce" else None
    return Shape("i32", "i32", "i32", group, order, packed, splits)


def turns(variant: Variant) -> Turns:
    """Who waits for whom in a single pass."""
    if variant.kernel != "single_pass_deterministic":
        return Turns(None, None, None)
    has_numbers = not variant.full or {"used", "runs"} & {*variant.features}
    if not has_numbers:
        return Turns(None, None, "*i32")
    return Turns("*i32", "i32" if "used" in variant.features else 0, "*i32")


def box_types(variant: Variant, head_dim: int, *kept: Strided) -> list[Strided | str]:
    """Of what dK/dV leave or continue, with such a head dim: tensors, or their descriptors."""
    if dict(variant.options).get("dkdv_epilogue") != "descriptors":
        return [*kept]
    return [f"tensordesc<{one.ptr[1:]}[1,{variant.tile.block_k},1,{head_dim}]>" for one in kept]


def box(variant: Variant) -> str | None:
    """The type of dQ's descriptor where the copy engine adds to it."""
    whole = variant.head_dim == triton.next_power_of_2(variant.head_dim)
    described = variant.arch >= COPY_ENGINE_ARCH and whole
    return f"tensordesc<fp32[1,{variant.tile.block_q},1,{variant.head_dim}]>" if described else None


def interval(variant: Variant) -> Interval:
    lo, hi = (None, None) if variant.full else ("*i32", "*i32")
    runs = BlockRuns("*i32", "*i32", "*i32", "i32") if "runs" in variant.features else None
    return Interval(lo, hi, "*i32" if "used" in variant.features else None, runs)


def modifiers(features: tuple[str, ...]) -> Modifiers:
    made = UNMODIFIED
    if "softcap" in features:
        made = made._replace(softcap="fp32")
    if {"alibi", "dropout"} & set(features):
        made = made._replace(rows="*i32", columns="*i32")
    if "alibi" in features:
        made = made._replace(slopes="*fp32", slopes_stride=0)
    if "dropout" in features:
        made = made._replace(counter="*i64", threshold="i32", kept="fp32")
    return made


def strided(dtype: str) -> Strided:
    return Strided(f"*{dtype}", "i32", "i32", "i32")


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        listing = subprocess.run(
            [tools / "nvdisasm", "-c", "-ndf", file.name], capture_output=True, text=True, check=True
        )
    return usage.stdout + usage.stderr, listing.stdout
