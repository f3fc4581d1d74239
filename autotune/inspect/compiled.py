"""Compile a kernel for any GPU on any machine, and read what the compiler made of it.

Needs no GPU and no CUDA: Triton's wheel ships ``ptxas`` and ``nvdisasm``. Not under ``TRITON_INTERPRET=1``, where
kernels have nothing to compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .arguments import ast_source
from .sass import Loop, matrix_loops, tma_loads
from .variant import MEMORY_BOUND, Variant

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may take: CUDA C++ programming guide, table of compute capabilities."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of an SM of sm_100; ptxas turns a kernel that asks for more into a trap without an error."""

CLEAN_HEAD_DIM = 128
WAITS = "single_pass_deterministic"
MOST_LOCAL = 16
"""Local-memory instructions in the loop of the one that waits: its default tiles have up to 6."""


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
    tma: int = 0  # loads by TMA, in an iteration of the warps that load for all others
    folder: str = ""  # of Triton's cache, where it lies


def problems(variant: Variant, compiled: Compiled) -> list[str]:
    """What keeps a binary from being launched, or from being fast; empty where it passes the gate.

    Fit is asked of every variant. Clean loops (no spills, no serialised wgmma) are asked of 16-bit variants up to head
    dim 128, inside the loop that holds the matrix instructions: what spills outside costs nothing that counts. Where
    features make the loop several times as long, a few spills are the least of it; so they are, if they are few, where
    a loop waits for its turn (the deterministic single pass), or a program that walks from tile to tile keeps its place
    in registers beside (persistent dK/dV, never a default). A memory-bound kernel has no such loop, spills nowhere, and
    keeps fp32's subnormals, which stand for those of e4m3.
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
        walks = variant.kernel == "dkdv" and dict(variant.options).get("persistent")
        most = MOST_LOCAL if variant.kernel == WAITS or walks else 0
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
        tma=tma_loads(listing),
        folder=Path(next(iter(kernel.metadata_group.values()))).parent.name,
    )


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
