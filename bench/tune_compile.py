"""What ``tune`` compiles: one candidate in a worker process, the gate it has to pass, and a bound of its main loop."""

from __future__ import annotations

import hashlib
from pathlib import Path

import triton
from triton.compiler import ASTSource

from ..autotune import Job, Verdict
from ..autotune.ranking import ANY, ONE
from ..kernels.config import SHARED_LIMIT
from ..kernels.tiles import Shape
from .compiled import Compiled, Variant, ast_source, compile_variant, problems

ROOT = Path(__file__).resolve().parent.parent

TENSOR_FLOPS = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
"""Of a multiprocessor in one clock, 16-bit products with fp32 sums, dense: peak of the data sheets (A100, A40, L40S,
H100, B200, RTX PRO 6000) over multiprocessors and boost clock."""
SPLIT_TF32 = 6  # `tf32x3` multiplies three times, at half the rate
EXPONENTIALS = 16  # of a multiprocessor in one clock: CUDA C++ programming guide, arithmetic throughput
SCHEDULERS = 4  # each issues one instruction of one warp in a clock
L2_BYTES = 64  # that one multiprocessor reads in a clock
REGISTERS = 65_536  # of a multiprocessor
RESERVED_SHARED = 1024  # bytes that the system takes of each block's, and of the multiprocessor's
HEADS, GROUP = map(Shape._fields.index, ("heads", "group"))
PAIRS = 1024  # that the bound is told for, so that it is a number of a few digits


def compile_job(job: Job) -> Verdict:
    """Compile a job and read what came out; runs in a worker process, which Triton's interpreter is off in."""
    variant = variant_of(job)
    compiled = compile_variant(variant, source_of(job))
    found = tuple(problems(variant, compiled))
    if found:
        return Verdict(found)
    bound, unit = loop_bound(job, compiled)
    return Verdict((), bound, f"SM clocks per {PAIRS} pairs, most of them {unit}")


def variant_of(job: Job) -> Variant:
    """What the gate is asked about."""
    return Variant(
        job.kernel, job.arch, job.dtype, job.head_dim, job.head_dim_v, job.tile, job.role, job.full, job.grouped
    )


def source_of(job: Job) -> ASTSource:
    """As a launch specialises it, to the letter: what is compiled here lies in Triton's cache under a launch's key."""
    source = ast_source(variant_of(job))
    names = [parameter.name for parameter in source.fn.params]
    shape = names.index("shape")
    for place, count in ((HEADS, job.heads), (GROUP, job.group)):
        if count == ANY and (shape, place) in source.attrs:
            source.attrs[shape, place] = []
    if job.heads == ONE:
        del source.attrs[shape, HEADS]
        source.constants[shape, HEADS] = 1
        source.signature["shape"] = source.signature["shape"]._replace(heads="constexpr")
    # a launch says of every constexpr that it has no attribute, and that is part of the key
    source.attrs |= {(i,): [] for i, parameter in enumerate(source.fn.params) if parameter.is_constexpr}
    return source


def loop_bound(job: Job, compiled: Compiled) -> tuple[float, str]:
    """Clocks that a multiprocessor takes at least for 1,024 pairs of a query and a key, and the unit that takes most.

    Each unit takes its clocks; with ``n`` warps to every scheduler that take turns, what the slowest unit does not
    hide is at least one ``n``-th of what the others take. Loads that no stage runs ahead of (one stage) are hidden by
    other blocks alone.
    """
    taken, blocks = clocks(job, compiled), blocks_per_multiprocessor(job, compiled)
    unit = max(taken, key=taken.__getitem__)
    warps = blocks * job.tile.num_warps / SCHEDULERS
    turns = dict.fromkeys(taken, warps) | ({"loads": blocks} if job.tile.num_stages == 1 else {})
    exposed = sum(count / turns[name] for name, count in taken.items() if name != unit)
    return round((taken[unit] + exposed) * PAIRS / (job.tile.block_q * job.tile.block_k), 3), unit


def clocks(job: Job, compiled: Compiled) -> dict[str, float]:
    """By unit, for one step of the loop: one tile of scores."""
    tile, both = job.tile, job.head_dim + job.head_dim_v
    pairs = tile.block_q * tile.block_k
    products = {"forward": both, "dq": both + job.head_dim, "dkdv": 2 * both}[job.kernel]
    streamed = tile.block_q if job.kernel == "dkdv" else tile.block_k
    small = job.dtype == "fp32"
    # the loop without a mask is the shortest, and the one that most steps take
    instructions = min(loop.instructions for loop in compiled.loops)
    return {
        "matrix products": 2 * pairs * products * (SPLIT_TF32 if small else 1) / TENSOR_FLOPS[job.arch],
        "issue": instructions * tile.num_warps / SCHEDULERS,
        "exponentials": pairs / EXPONENTIALS,
        "loads": streamed * both * (4 if small else 2) / L2_BYTES,
    }


def blocks_per_multiprocessor(job: Job, compiled: Compiled) -> int:
    """How many it holds at a time, by registers and by shared memory."""
    threads = 32 * job.tile.num_warps
    by_registers = REGISTERS // max(1, compiled.registers * threads)
    by_shared = (SHARED_LIMIT[job.arch] + RESERVED_SHARED) // (compiled.shared + RESERVED_SHARED)
    return max(1, min(by_registers, by_shared))


def digest() -> str:
    """Of all that decides a verdict: kernels, what reads them, and Triton."""
    made = hashlib.sha256(triton.__version__.encode())
    here = [ROOT / "bench" / name for name in ("compiled.py", "sass.py", "tune_compile.py")]
    for path in [*sorted((ROOT / "kernels").glob("*.py")), *here]:
        made.update(path.read_bytes())
    return made.hexdigest()[:16]
