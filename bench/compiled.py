"""Compile a kernel for any GPU on any machine, and read what the compiler made of its main loop.

Needs no GPU and no CUDA: Triton's wheel ships ``ptxas`` and ``nvdisasm``. Not under ``TRITON_INTERPRET=1``, where
kernels have nothing to compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..kernels import Tile
from ..kernels.backward import dkdv_kernel, dq_kernel
from ..kernels.forward import forward_kernel
from ..kernels.tiles import Interval, Shape, Strided

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may take: CUDA C++ programming guide, table of compute capabilities."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of an SM of sm_100; ptxas turns a kernel that asks for more into a trap without an error."""

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}


@dataclass(frozen=True)
class Variant:
    """Everything that selects one binary of a kernel."""

    kernel: str  # forward, dq or dkdv
    arch: int  # compute capability without the dot: 90
    dtype: str  # bf16, fp16 or fp32
    head_dim: int
    head_dim_v: int
    tile: Tile
    carried: bool = True  # continues a state or sums
    in_place: bool = True  # and writes them back
    full: bool = False  # no bounds

    def __str__(self) -> str:
        flags = [name for name in ("carried", "in_place", "full") if getattr(self, name)]
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        tile = f"{self.tile.block_q}x{self.tile.block_k} {self.tile.num_warps}w {self.tile.num_stages}s"
        return f"{self.kernel} sm_{self.arch} {self.dtype} {dims} {tile} {' '.join(flags)}"


@dataclass(frozen=True)
class Loop:
    """One innermost loop that holds matrix instructions."""

    matrix: int
    local: int  # loads and stores of local memory: spills
    waits: int  # waits for wgmma (HGMMA) in flight
    serialised: bool  # every wgmma waits for itself


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack: int  # bytes
    shared: int  # bytes
    tensor_memory: int  # columns, on sm_100
    loops: tuple[Loop, ...]


def compile_variant(variant: Variant) -> Compiled:
    """Compile one variant ahead of time.

    Raises:
        RuntimeError: Triton or ptxas refuses it.
    """
    source = ast_source(variant)
    options = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=options)
    usage, listing = disassemble(kernel.asm["cubin"])
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Compiled(registers, stack, kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0, tuple(matrix_loops(listing)))


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
    if value != "fp32":
        attributes[path] = [["tt.divisibility", 16]]
    return value


def launch_arguments(variant: Variant) -> dict[str, Any]:
    """By argument name: a type for what is passed at run time, a plain value for a constexpr."""
    model = strided(variant.dtype)
    carried = strided("fp32") if variant.carried else model
    result = strided("fp32") if variant.in_place else model
    bounds = Interval(None, None) if variant.full else Interval("*i32", "*i32")
    group = "i32" if variant.kernel != "group1" else 1
    common = {
        "q": model, "k": model, "v": model, "dout": model, "lse": "*fp32", "delta": "*fp32", "bounds": bounds,
        "shape": Shape("i32", "i32", "i32", group), "softmax_scale": "fp32",
        "state": carried, "out": result, "dq_in": carried, "dq_out": result,
        "dk_in": carried, "dv_in": carried, "dk_out": result, "dv_out": result,
        "HEAD_DIM": variant.head_dim, "HEAD_DIM_V": variant.head_dim_v,
        "BLOCK_Q": variant.tile.block_q, "BLOCK_K": variant.tile.block_k,
        "HAS_STATE": variant.carried, "HAS_SUM": variant.carried, "IN_PLACE": variant.in_place,
    }  # fmt: skip
    return {name: common[name] for name in KERNELS[variant.kernel].arg_names}


def strided(dtype: str) -> Strided:
    return Strided(f"*{dtype}", "i32", "i32", "i32")


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) by the tools in Triton's wheel."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        listing = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
    return usage.stdout + usage.stderr, listing.stdout


MATRIX = re.compile(r"\b([HIQ]G?MMA|UTC\w*MMA)\b")
LOCAL = re.compile(r"\b(LDL|STL)\b")


@dataclass
class Block:
    """A basic block: its instructions and the blocks that may follow."""

    lines: list[str]
    successors: list[int]


BRANCH = re.compile(r"\bBRA\b.*?`\((\.L_\w+)\)")
LEAVES = re.compile(r"\b(EXIT|RET\.\S+)\b")


def basic_blocks(listing: str) -> list[Block]:
    """Control flow of a kernel; the first block is its entry."""
    labels: dict[str, int] = {}
    blocks = [Block([], [])]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            blocks.append(Block([], []))
            labels[label[1]] = len(blocks) - 1
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            blocks[-1].lines.append(line)
            if BRANCH.search(line) or LEAVES.search(line):
                blocks.append(Block([], []))
    for i, block in enumerate(blocks):
        last = block.lines[-1] if block.lines else ""
        branch = BRANCH.search(last)
        if branch and branch[1] in labels:
            block.successors.append(labels[branch[1]])
        # a guard (@P0, or a uniform predicate as operand) may let the branch or the exit fall through
        guarded = "@" in last or re.search(r"\bBRA\S*\s+!?U?P\d", last)
        if i + 1 < len(blocks) and (guarded or not (branch or LEAVES.search(last))):
            block.successors.append(i + 1)
    return blocks


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """Bodies of the loops by header.

    By control flow, not by position: waits spin in blocks behind the end of the kernel, and branch back into the middle
    of its loop. (Aho, Lam, Sethi, Ullman, Compilers, section 9.6.6.)
    """
    dominators = dominators_of(blocks)
    predecessors: dict[int, list[int]] = {i: [] for i in dominators}
    for i in dominators:
        for j in blocks[i].successors:
            predecessors[j].append(i)
    bodies: dict[int, set[int]] = {}
    for i in dominators:
        for header in set(blocks[i].successors) & dominators[i]:  # a back edge
            body, work = bodies.setdefault(header, {header}), [i]
            while work:
                if (node := work.pop()) not in body:
                    body.add(node)
                    work.extend(predecessors[node])
    return list(bodies.values())


def dominators_of(blocks: list[Block]) -> dict[int, set[int]]:
    """For every reachable block, the blocks that lie on all ways to it."""
    reachable, work = {0}, [0]
    while work:
        new = set(blocks[work.pop()].successors) - reachable
        reachable |= new
        work.extend(new)
    dominators = {i: set(reachable) for i in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in sorted(reachable - {0}):
            before = [dominators[j] for j in reachable if i in blocks[j].successors]
            now = {i} | set.intersection(*before)
            changed |= now != dominators[i]
            dominators[i] = now
    return dominators


def matrix_loops(listing: str) -> Iterator[Loop]:
    """The innermost loops of a SASS listing that hold matrix instructions."""
    blocks = basic_blocks(listing)
    bodies = [body for body in natural_loops(blocks) if any(MATRIX.search(x) for i in body for x in blocks[i].lines)]
    for body in bodies:
        if not any(other < body for other in bodies):
            yield read_loop([line for i in sorted(body) for line in blocks[i].lines])


def read_loop(lines: list[str]) -> Loop:
    matrix = sum(bool(MATRIX.search(line)) for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    hopper = any("HGMMA" in line for line in lines)
    local = sum(bool(LOCAL.search(line)) for line in lines)
    # a chain of k-steps needs one wait; nearly as many waits as products means that none overlaps another
    return Loop(matrix, local, waits, hopper and waits > matrix // 2)
