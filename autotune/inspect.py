"""Rows of ``ringattn inspect``: resources of each kernel variant, and the throughput bound of its main loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton

from ..bench.common.progress import Progress
from ..bench.common.result import Result, Row
from ..kernels.gpu import arch_name, is_amd
from .compile import KernelVariant
from .gate import CompiledKernel, compile_variant
from .loop_bound import TENSOR, blocks_per_sm, main_bound

VARIANT_COLUMNS = ("kernel", "arch", "dtype", "head_dim", "head_dim_v", "role", "full", "grouped", "features")
"""Fields that select a variant, besides the tile and its options."""

FIGURE_UNITS = {
    "bound": "%", "regs": "", "spills": "", "blocks": "", "limiter": "", "shared": "B", "ceiling": "%", "stack": "B",
    "threads": "", "instructions": "", "matrix": "", "exponentials": "", "products": "clocks",
}  # fmt: skip
"""Columns and their units. Blocks are per SM; spills, instructions and products are of the main loop."""

UNITS = (
    {"bound": "%", "variant": ""}
    | FIGURE_UNITS
    | dict.fromkeys(("problems", "loops", *VARIANT_COLUMNS, "options", "tile"), "")
)


def variant_row(variant: KernelVariant, compiled: CompiledKernel, problems: Sequence[str]) -> dict[str, Any]:
    """Return the row of a variant with the ``problems`` of the gate; loop figures are None without a main loop."""
    main = None if is_amd(variant.arch) else main_bound(compiled)
    blocks, tile = blocks_per_sm(compiled), variant.tile
    row: dict[str, Any] = {
        "variant": str(variant),
        **dict.fromkeys(FIGURE_UNITS),
        "regs": compiled.registers,  # per thread
        "stack": compiled.stack,
        "shared": compiled.shared,
        "threads": compiled.threads,
        "blocks": blocks,
        "problems": "; ".join(problems),
        "loops": " ".join(str(loop.matrix) for loop in compiled.loops),  # matrix instructions per loop
        **{name: getattr(variant, name) for name in VARIANT_COLUMNS},
        "arch": arch_name(variant.arch),
        "features": " ".join(variant.features),
        "options": " ".join(f"{name}={value}" for name, value in variant.options),
        "tile": f"{tile.block_q}x{tile.block_k}x{tile.num_warps}x{tile.num_stages}",
    }
    if main is not None:
        row |= {
            "bound": main.percent, "limiter": main.limiter, "ceiling": main.ceiling, "spills": main.loop.local,
            "instructions": main.mix.issued, "matrix": main.loop.matrix, "exponentials": main.mix.exponentials,
            "products": main.clocks[TENSOR],
        }  # fmt: skip
    elif compiled.loops:  # of AMD, whose rates the bound does not know
        loop = min(compiled.loops, key=lambda loop: len(loop.lines) / loop.matrix)
        row |= {"spills": loop.local, "instructions": len(loop.lines), "matrix": loop.matrix}
        row["exponentials"] = sum("v_exp_f32" in line for line in loop.lines)
    if not blocks:
        row |= {"bound": 0.0, "limiter": "does not fit", "ceiling": 0.0}
        row["problems"] = "; ".join([*problems, f"does not fit an SM of {arch_name(variant.arch)}"])
    return row


def inspect_variant(variant: KernelVariant, assembler: Path | None = None) -> dict[str, Any]:
    """Compile a variant and return its row; if that fails, ``problems`` has the reason."""
    try:
        return variant_row(variant, *compile_variant(variant, assembler))
    except Exception as error:  # a failure is a result, too, and must not stop the other variants
        empty = CompiledKernel(0, 0, 0, 0, (), arch=variant.arch, threads=32)
        return variant_row(variant, empty, [f"{type(error).__name__}: {error}"]) | {"blocks": 0}


def inspect_variants(
    variants: Sequence[KernelVariant], step: Progress, assembler: Path | None = None, *, gate: bool
) -> Result:
    """Compile the variants one after another, and return the result of ``inspect`` with a row per variant.

    Variants that do not fit fail, and with ``gate`` all with problems. ``assembler`` is the second ptxas of
    :func:`gate.compile_variant`.
    """
    step("compiling", len(variants))
    rows: list[Row] = []
    for variant in variants:
        rows.append(inspect_variant(variant, assembler))
        step("compiling", None)
    problems = {row["variant"]: row["problems"] for row in rows if row["problems"]}
    unfit = {row["variant"] for row in rows if not row["blocks"]}
    failed = [f"{name}: {reason}" for name, reason in problems.items() if gate or name in unfit]
    notes = [f"{name}: {reason}" for name, reason in problems.items() if not gate and name not in unfit]
    if best := max((row for row in rows if row["bound"]), key=lambda row: row["bound"], default=None):
        notes.append(f"best: {best['variant']}: at most {best['bound']:.1f}% of peak, limited by {best['limiter']}")
    return Result("inspect", UNITS, rows, failed, notes, {"triton": triton.__version__})
