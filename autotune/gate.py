"""Gate for compiled kernels, which reads resources and code from the binary and lists its problems.

The gate needs neither a GPU nor CUDA, because Triton's wheel contains ``ptxas`` and ``nvdisasm``. For AMD it reads the
assembly, and checks spills and shared memory only.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from ..kernels import hopper_backward_launch
from ..kernels.device.tile_ops import MAX_PART_WIDTH
from ..kernels.gpu import TENSOR_MEMORY_COLUMNS, is_amd, shared_limit
from ..kernels.hopper.step_order import CONSUMER_ROWS, CONSUMERS
from .assemblers import assemble, assembler_version
from .compile import MAX_LOGITS, MEMORY_BOUND, KernelVariant, RecordedLaunch, compile_launch
from .sass import Loop, matrix_loops
from .wrong_code import in_place_races, known_miscompiles, launch_tensors, wgmma_hazards

MAY_SPILL_HEAD_DIMS = range(129, MAX_PART_WIDTH + 1)
"""Larger head dims of D and Dv with which loops may spill, as nearly all tiles do."""
TURN_TAKING_KERNEL = "single_pass_deterministic"
MAX_LOCAL_OPS = 16
"""Spill instructions that a loop of the deterministic single pass may have; its default tiles have up to 6."""

WARPGROUP = 128
"""Threads of a warpgroup, such as a consumer of a Hopper kernel."""


@dataclass(frozen=True)
class CompiledKernel:
    """Resources and main loops of a compiled kernel."""

    registers: int
    stack: int  # bytes
    shared: int  # bytes
    tensor_memory: int  # columns, on sm_100
    loops: tuple[Loop, ...]
    flushes_subnormals: bool = False  # some instruction flushes fp32 subnormals to zero
    arch: int = 0
    threads: int = 0  # per block
    partitions: int = 1  # warp-specialised partitions of a block that each run their own main loop
    loop_threads: int = 0  # threads of one partition; 0: all threads of the block
    hazards: tuple[str, ...] = ()  # instructions that use a register of wgmma in flight


def gate_problems(variant: KernelVariant, compiled: CompiledKernel) -> list[str]:
    """Return the reasons why a binary cannot launch or is slow; the list is empty if the binary passes the gate.

    - Every variant must fit the GPU's shared memory and tensor memory.
    - No instruction may use a register of wgmma in flight.
    - Loops with matrix instructions must have no spills and no serialised wgmma, for 16-bit dtypes and head dims
      outside ``MAY_SPILL_HEAD_DIMS``. Spills outside these loops do not matter.
    - Variants with ``FEATURES`` are exempt, because the features dominate the time of the loop.
    - A few spills are allowed in the deterministic single pass, whose loop waits for its turn, and in persistent
      dK/dV, which keeps the state of the tile schedule in registers and is never a default.
    - Memory-bound kernels must not spill at all. They must keep fp32 subnormals, which represent those of e4m3.
    """
    failures = []
    if compiled.shared > (limit := shared_limit(variant.arch)):
        failures.append(f"{compiled.shared} bytes of shared memory, but the GPU has {limit}")
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        failures.append(f"{compiled.tensor_memory} columns of tensor memory, but the GPU has {TENSOR_MEMORY_COLUMNS}")
    failures += hazard_problems(compiled.hazards)
    if variant.kernel in MEMORY_BOUND:
        spills = [f"{compiled.stack} bytes of local memory"] if compiled.stack else []
        return [*failures, *spills, *(["subnormal numbers are flushed to zero"] if compiled.flushes_subnormals else [])]
    if not compiled.loops:
        failures.append("no loop with matrix instructions")
    largest = max(variant.head_dim, variant.head_dim_v)
    must_be_clean = variant.dtype != "fp32" and largest not in MAY_SPILL_HEAD_DIMS
    if must_be_clean and not {*variant.features} - {MAX_LOGITS}:
        is_persistent_dkdv = variant.kernel == "dkdv" and dict(variant.options).get("persistent")
        max_local = MAX_LOCAL_OPS if variant.kernel == TURN_TAKING_KERNEL or is_persistent_dkdv else 0
        failures += [
            f"{loop.local} local-memory instructions in a loop" for loop in compiled.loops if loop.local > max_local
        ]
        failures += ["serialised wgmma in a loop" for loop in compiled.loops if loop.is_serialised]
    return failures


def hazard_problems(hazards: Sequence[str], source: str = "") -> list[str]:
    return [f"{len(hazards)} instructions{source} use registers of in-flight wgmma: {hazards[0]}"] if hazards else []


def compile_variant(variant: KernelVariant, assembler: Path | None = None) -> tuple[CompiledKernel, list[str]]:
    """Compile the launch of a variant, and return the compiled kernel with its problems.

    ``assembler`` is another ptxas, whose binary for sm_90 is checked for hazards, too.

    Raises:
        ValueError: There is no kernel for this variant, or kernels are interpreted.
        RuntimeError: Triton or ptxas rejects the kernel.
    """
    launch = compile_launch(variant.launch, variant.arch)
    if is_amd(variant.arch):
        result = read_amdgcn(launch, variant.arch)
        return result, gate_problems(variant, result)
    result, ptx, ttgir = read_compiled(launch, variant.arch), launch.binary.asm["ptx"], launch.binary.asm["ttgir"]
    failures = gate_problems(variant, result) + hopper_problems(variant, result, ptx)
    if assembler is not None and "wgmma" in ptx and (cubin := assemble(ptx, assembler)) is not None:
        version = ".".join(map(str, assembler_version(assembler)))
        failures += hazard_problems(wgmma_hazards(disassemble(cubin)), f" from ptxas {version}")
    failures += in_place_races(ptx, launch_tensors(launch.kernel.arg_names, launch.arguments, ttgir))
    return result, failures + known_miscompiles(ttgir, variant.arch)


def read_compiled(launch: RecordedLaunch, arch: int) -> CompiledKernel:
    """Read resources and main loops from the binary of a launch."""
    kernel = launch.binary
    usage = run_binary_tool("cuobjdump", "-res-usage", cubin=kernel.asm["cubin"])
    listing = disassemble(kernel.asm["cubin"])
    registers, stack = (int(_match(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    specialised: dict[str, Any] = {}
    if launch.name in ("hopper_kernel", "hopper_backward_kernel"):
        specialised = {"partitions": CONSUMERS, "loop_threads": WARPGROUP}
    return CompiledKernel(
        registers,
        stack,
        kernel.metadata.shared,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        tuple(matrix_loops(listing)),
        ".ftz" in kernel.asm["ptx"],
        arch,
        required_threads(kernel.asm["ptx"]),
        hazards=tuple(wgmma_hazards(listing)),
        **specialised,
    )


def read_amdgcn(launch: RecordedLaunch, arch: int) -> CompiledKernel:
    """Read resources and main loops from the assembly of a launch for AMD; registers include accumulation registers."""
    listing = launch.binary.asm["amdgcn"]
    registers, stack, threads = (
        int(_match(rf"\.{name}:\s+(\d+)", listing)[1])
        for name in ("vgpr_count", "private_segment_fixed_size", "max_flat_workgroup_size")
    )
    flushes = re.search(r"float_denorm_mode_32 3\b", listing) is None
    shared = launch.binary.metadata.shared
    return CompiledKernel(registers, stack, shared, 0, tuple(matrix_loops(listing)), flushes, arch, threads)


def disassemble(cubin: bytes) -> str:
    return run_binary_tool("nvdisasm", "-c", "-ndf", cubin=cubin)


def required_threads(ptx: str) -> int:
    """Return the threads per block that a kernel's PTX requires."""
    return int(_match(r"\.(?:reqntid|maxntid) (\d+)", ptx)[1])


def _match(pattern: str, text: str) -> re.Match[str]:
    """Return the first match of a pattern that must occur."""
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match


def run_binary_tool(tool: str, *flags: str, cubin: bytes) -> str:
    """Run a tool of Triton's wheel, such as ``nvdisasm``, on a binary, and return its output."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        process = subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=True)
    return process.stdout + process.stderr


# additional checks of the Hopper kernels


def hopper_problems(variant: KernelVariant, compiled: CompiledKernel, ptx: str) -> list[str]:
    """Return the problems of a Hopper kernel beyond those of :func:`gate_problems`; empty for other kernels.

    The speed of the forward depends on the position of the exponentials. They must run between the wait for the scores
    and the wait for the product with V, so that they overlap with that product.
    """
    options, is_forward = dict(variant.options), variant.function == "hopper_kernel"
    if not is_forward and options.get("backward") != "hopper":
        return []
    # a bounded forward has a loop for each of its tail, middle and head phases
    loops = CONSUMERS * (3 if is_forward and not variant.full else 1)
    failures = [] if len(compiled.loops) == loops else [f"{len(compiled.loops)} main loops, expected {loops}"]
    # one wgmma has a depth of 16
    if is_forward:
        expected = (variant.head_dim + variant.tile.block_k) // 16
        # `gate_problems` tolerates spills above head dim 128, but the Hopper forward has none
        failures += [f"{loop.local} local-memory instructions in a main loop" for loop in compiled.loops if loop.local]
        failures += ["serialised wgmma in a main loop" for loop in compiled.loops if loop.is_serialised]
        listing = "\n".join(line for loop in compiled.loops for line in loop.lines)
        failures += order_problems(listing, loops, variant.tile.block_k) + handoff_problems(ptx)
    else:  # S and dP over the head dim, dV and dK over the queries, dQ over the keys
        expected = 2 * (variant.head_dim + variant.tile.block_q) // 16 + CONSUMERS * CONSUMER_ROWS // 16
        shared = hopper_backward_launch.backward_shared_bytes(variant.head_dim, variant.tile)
        if not 0 <= compiled.shared - shared <= 1024:
            failures.append(
                f"{compiled.shared} bytes of shared memory, but the launch expects {shared} and up to 1024 for barriers"
            )
        failures += [] if "cp.reduce.async.bulk.tensor.4d" in ptx else ["dQ is not added by the copy engine"]
        # a partition of one warp uses bar.warp.sync as its barrier
        failures += handoff_problems(ptx.replace("bar.warp.sync", "bar.sync")) + unfenced_stores(ptx)
    return failures + [
        f"{loop.matrix} products in a loop, expected {expected}" for loop in compiled.loops if loop.matrix != expected
    ]


def order_problems(listing: str, loops: int, block_k: int) -> list[str]:
    """Return problems with the position of the exponentials, which must overlap with the product with V.

    ``listing`` has the SASS of all main loops, of which there must be ``loops``. In each step both products start
    (HGMMA). ``DEPBAR gsb0, 1`` waits for the scores and ``DEPBAR gsb0, 0`` for the product with V. Except for barrier
    spins the code is straight-line, so the listing has execution order.
    """
    steps = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", listing)[1:]
    failures = []
    if len(steps) != loops:
        failures.append(f"{len(steps)} of {loops} main loops start a product before the wait for the scores")
    for part in steps:
        under, _, after = part.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        rest = re.split(r"HGMMA|\bBRA\b", after)[0]  # up to the next product or the end of the loop body
        hidden, late = under.count("MUFU.EX2"), rest.count("MUFU.EX2")
        if hidden < CONSUMER_ROWS * block_k // WARPGROUP:
            failures.append(f"{hidden} of {hidden + late} exponentials run under the product with V")
    return failures


def handoff_problems(ptx: str) -> list[str]:
    """Return problems with TMA loads, with the register split of setmaxnreg, and with the release of slots."""
    registers = {int(number) for number in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    failures = [] if "cp.async.bulk.tensor.4d" in ptx else ["no TMA loads"]
    failures += [] if {24, 240} <= registers else [f"setmaxnreg is {sorted(registers)}, expected 24 and 240"]
    # before each arrival there must be a warpgroup barrier, with no wgmma or mbarrier operation in between
    arrivals = re.findall(r"(bar\.sync[^\n]*\n(?:(?!mbarrier|wgmma).*\n)*?)?[^\n]*mbarrier\.arrive\.shared", ptx)
    if not arrivals:
        failures.append("no slot is released")
    return failures if all(arrivals) else [*failures, "a slot is released before all warps have finished with it"]


def unfenced_stores(ptx: str) -> list[str]:
    """Return problems with shared-memory stores that the async proxy may read without a fence (PTX ISA, "Async proxy").

    dS is stored with stmatrix before an arrival, and a part of dQ with st.shared before its cp.reduce.
    """
    unfenced_kinds: set[str] = set()
    counts = {"stmatrix": 0, "st.shared": 0}
    for op in re.findall(r"(stmatrix|st\.shared|fence\.proxy\.async|mbarrier\.arrive|cp\.reduce)\b", ptx):
        if op in counts:
            unfenced_kinds.add(op)
        elif op == "fence.proxy.async":
            unfenced_kinds.clear()
        else:
            store = "stmatrix" if op == "mbarrier.arrive" else "st.shared"
            counts[store] += store in unfenced_kinds
    return [f"{count} {store} without a fence" for store, count in counts.items() if count]
