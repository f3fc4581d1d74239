"""The gate: what a compiled kernel takes, read from its binary, and what keeps it from being launched or fast.

Needs no GPU and no CUDA: Triton's wheel ships ``ptxas`` and ``nvdisasm``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

from ..kernels import hopper_backward_launch
from ..kernels.gpu import TENSOR_MEMORY_COLUMNS, shared_limit
from ..kernels.hopper.steps import CONSUMERS, ROWS
from .compile import MEMORY_BOUND, Launch, Variant, compiled
from .sass import Loop, matrix_loops

CLEAN_HEAD_DIM = 128
WAITS = "single_pass_deterministic"
MOST_LOCAL = 16
"""Local-memory instructions in the loop of the one that waits: its default tiles have up to 6."""

WARPGROUP = 128
"""Threads of one, as a consumer of a Hopper kernel is."""


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


def problems(variant: Variant, compiled: Compiled) -> list[str]:
    """What keeps a binary from being launched, or from being fast; empty where it passes the gate.

    Fit is asked of every variant. Clean loops (no spills, no serialised wgmma) are asked of 16-bit variants up to head
    dim 128, inside the loop that holds the matrix instructions: what spills outside costs nothing that counts. Where
    features make the loop several times as long, a few spills are the least of it; so they are, if they are few, where
    a loop waits for its turn (the deterministic single pass), or a program that walks from tile to tile keeps its place
    in registers beside (persistent dK/dV, never a default). A memory-bound kernel has no such loop, spills nowhere, and
    keeps fp32's subnormals, which stand for those of e4m3.
    """
    failures = []
    if compiled.shared > (limit := shared_limit(variant.arch)):
        failures.append(f"{compiled.shared} bytes of shared memory, the chip has {limit}")
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        failures.append(f"{compiled.tensor_memory} columns of tensor memory, the chip has {TENSOR_MEMORY_COLUMNS}")
    if variant.kernel in MEMORY_BOUND:
        spills = [f"{compiled.stack} bytes of local memory"] if compiled.stack else []
        return [*failures, *spills, *(["subnormal numbers are flushed to zero"] if compiled.flushes else [])]
    if not compiled.loops:
        failures.append("no loop with matrix instructions")
    must_be_clean = variant.dtype != "fp32" and max(variant.head_dim, variant.head_dim_v) <= CLEAN_HEAD_DIM
    if must_be_clean and not variant.features:
        walks = variant.kernel == "dkdv" and dict(variant.options).get("persistent")
        most = MOST_LOCAL if variant.kernel == WAITS or walks else 0
        failures += [
            f"{loop.local} local-memory instructions in a loop" for loop in compiled.loops if loop.local > most
        ]
        failures += ["serialised wgmma in a loop" for loop in compiled.loops if loop.serialised]
    return failures


def compile_variant(variant: Variant) -> tuple[Compiled, list[str]]:
    """What the compiler made of the launch of a variant, and what keeps that from being launched or fast.

    Raises:
        ValueError: no kernel is written for this variant, or kernels are interpreted.
        RuntimeError: Triton or ptxas refuses it.
    """
    launch = compiled(variant.launch, variant.arch)
    result = read_compiled(launch, variant.arch)
    return result, problems(variant, result) + hopper_problems(variant, result, launch.binary.asm["ptx"])


def read_compiled(launch: Launch, arch: int) -> Compiled:
    """What the gate and ``inspect`` read of a compiled launch."""
    kernel = launch.binary
    usage = read_with("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
    listing = read_with("nvdisasm", "-c", "-ndf", cubin=kernel.asm["cubin"])
    registers, stack = (int(_match(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    specialised: dict[str, int] = {}
    if launch.name in ("hopper_kernel", "hopper_backward_kernel"):
        specialised = {"partitions": CONSUMERS, "loop_threads": WARPGROUP}
    return Compiled(
        registers,
        stack,
        kernel.metadata.shared,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        tuple(matrix_loops(listing)),
        ".ftz" in kernel.asm["ptx"],
        arch,
        threads_of(kernel.asm["ptx"]),
        **specialised,
    )


def threads_of(ptx: str) -> int:
    """Of a program: what the compiler requires, all partitions of a specialised kernel together."""
    return int(_match(r"\.(?:reqntid|maxntid) (\d+)", ptx)[1])


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match


def read_with(tool: str, *flags: str, cubin: bytes) -> str:
    """What a tool of Triton's wheel prints of a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


# the Hopper kernels: where the exponentials of the forward stand, who loads, adds and hands on


def hopper_problems(variant: Variant, compiled: Compiled, ptx: str) -> list[str]:
    """What keeps a Hopper kernel from the gate beside :func:`problems`; nothing of any other kernel.

    What makes the forward fast is not which instructions there are but where the exponentials stand: between the wait
    for the scores and the wait for the product with V, which runs meanwhile.
    """
    options, of_forward = dict(variant.options), variant.function == "hopper_kernel"
    if not of_forward and options.get("backward") != "hopper":
        return []
    # the forward: masked tail, full middle, masked head
    loops = CONSUMERS * (3 if of_forward and not variant.full else 1)
    failures = [] if len(compiled.loops) == loops else [f"{len(compiled.loops)} main loops, there should be {loops}"]
    # wgmma multiplies 16 deep
    if of_forward:
        wanted = (variant.head_dim + variant.tile.block_k) // 16
        # `problems` lets spills pass beyond head dim 128, as the portable kernels have them there; this one has none
        failures += [f"{loop.local} local-memory instructions in a main loop" for loop in compiled.loops if loop.local]
        failures += ["serialised wgmma in a main loop" for loop in compiled.loops if loop.serialised]
        listing = "\n".join(line for loop in compiled.loops for line in loop.lines)
        failures += order_problems(listing, loops, variant.tile.block_k) + handing_problems(ptx)
    else:  # S and dP over the head dim, dV and dK over the queries, dQ over the keys
        wanted = 2 * (variant.head_dim + variant.tile.block_q) // 16 + CONSUMERS * ROWS // 16
        shared = hopper_backward_launch.shared_bytes(variant.head_dim, variant.tile)
        if not 0 <= compiled.shared - shared <= 1024:
            failures.append(
                f"{compiled.shared} bytes of shared memory, the launch counts on {shared} and some for barriers"
            )
        failures += [] if "cp.reduce.async.bulk.tensor.4d" in ptx else ["dQ is not added by the copy engine"]
        # the barrier of a partition of one warp
        failures += handing_problems(ptx.replace("bar.warp.sync", "bar.sync")) + unfenced(ptx)
    return failures + [
        f"{loop.matrix} products in a loop, not {wanted}" for loop in compiled.loops if loop.matrix != wanted
    ]


def order_problems(listing: str, loops: int, block_k: int) -> list[str]:
    """Of the order of a listing of that many main loops: exponentials under a product.

    A step is: products start (HGMMA), ``DEPBAR gsb0, 1`` waits for the first of the two, ``DEPBAR gsb0, 0`` for the
    other; straight code but for spins on barriers, so that the order of lines is that of execution.
    """
    steps = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", listing)[1:]
    failures = []
    if len(steps) != loops:
        failures.append(f"{len(steps)} of {loops} main loops start a product before the wait for the scores")
    for part in steps:
        under, _, after = part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        rest = re.split(r"HGMMA|\bBRA\b", after)[0]  # to the next product, or to the end of the loop's body
        hidden, late = under.count("MUFU.EX2"), rest.count("MUFU.EX2")
        if hidden < ROWS * block_k // WARPGROUP:
            failures.append(f"{hidden} of {hidden + late} exponentials run under the product with V")
    return failures


def handing_problems(ptx: str) -> list[str]:
    """Of loads, registers and slots: who loads, who gives registers to whom, and when a slot is given back."""
    handed_on = {int(number) for number in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    failures = [] if "cp.async.bulk.tensor.4d" in ptx else ["no TMA loads"]
    failures += [] if {24, 240} <= handed_on else [f"registers are handed on as {sorted(handed_on)}"]
    # every arrival stands behind a barrier of its warpgroup, with neither product nor barrier operation between
    arrivals = re.findall(r"(bar\.sync[^\n]*\n(?:(?!mbarrier|wgmma).*\n)*?)?[^\n]*mbarrier\.arrive\.shared", ptx)
    if not arrivals:
        failures.append("no slot is given back")
    return failures if all(arrivals) else [*failures, "a slot is given back before all warps are done with it"]


def unfenced(ptx: str) -> list[str]:
    """What threads store for the products or for the copy engine, and hand on without a fence for those to see it.

    That is dS, by stmatrix before an arrival, and a part of dQ, before its reduction; PTX ISA, "Async proxy".
    """
    waiting: set[str] = set()
    pending = {"stmatrix": 0, "st.shared": 0}
    for word in re.findall(r"(stmatrix|st\.shared|fence\.proxy\.async|mbarrier\.arrive|cp\.reduce)\b", ptx):
        if word in pending:
            waiting.add(word)
        elif word == "fence.proxy.async":
            waiting.clear()
        else:
            late = "stmatrix" if word == "mbarrier.arrive" else "st.shared"
            pending[late] += late in waiting
    return [f"{count} times {word} is handed on without a fence" for word, count in pending.items() if count]
