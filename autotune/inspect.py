"""Rows of ``ringattn inspect``: resources of each kernel variant, and the throughput bound of its main loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

from ..bench.common.result import Result, Row
from .bound import TENSOR, blocks_of, bounds_of, main_bound
from .compile import Variant
from .gate import Compiled, compile_variant

SELECTED = ("kernel", "arch", "dtype", "head_dim", "head_dim_v", "role", "full", "grouped", "features")
"""Fields that select a variant, besides the tile and its options."""

FIGURES = {
    "bound": "%", "regs": "", "spills": "", "blocks": "", "limiter": "", "shared": "B", "ceiling": "%", "stack": "B",
    "threads": "", "instructions": "", "matrix": "", "exponentials": "", "products": "clocks",
}  # fmt: skip
"""Columns and their units. Blocks are per SM; spills, instructions and products are of the main loop."""

UNITS = {"bound": "%", "variant": ""} | FIGURES | dict.fromkeys(("problems", "loops", *SELECTED, "options", "tile"), "")


def row_of(variant: Variant, compiled: Compiled, problems: Sequence[str]) -> dict[str, Any]:
    """Return the row of a variant with the ``problems`` of the gate; loop figures are None without a main loop."""
    main, blocks, tile = main_bound(compiled), blocks_of(compiled), variant.tile
    row: dict[str, Any] = {
        "variant": str(variant),
        **dict.fromkeys(FIGURES),
        "regs": compiled.registers,  # per thread
        "stack": compiled.stack,
        "shared": compiled.shared,
        "threads": compiled.threads,
        "blocks": blocks,
        "problems": "; ".join(problems),
        "loops": " ".join(str(bound.loop.matrix) for bound in bounds_of(compiled)),  # matrix instructions per loop
        **{name: getattr(variant, name) for name in SELECTED},
        "arch": f"sm_{variant.arch}",
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
    if not blocks:
        row |= {"bound": 0.0, "limiter": "does not fit", "ceiling": 0.0}
        row["problems"] = "; ".join([*problems, f"does not fit an SM of sm_{variant.arch}"])
    return row


def inspect_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant and return its row; if that fails, ``problems`` has the reason."""
    try:
        return row_of(variant, *compile_variant(variant))
    except Exception as error:  # a failure is a result, too, and must not stop the other variants
        empty = Compiled(0, 0, 0, 0, (), arch=variant.arch, threads=32)
        return row_of(variant, empty, [f"{type(error).__name__}: {error}"]) | {"blocks": 0}


def inspect_variants(variants: Sequence[Variant], step: Callable[[str, int | None], None]) -> list[dict[str, Any]]:
    """Return a row per variant, compiled one after another; ``step`` is a :data:`tune.Progress`."""
    step("compiling", len(variants))
    rows = []
    for variant in variants:
        rows.append(inspect_variant(variant))
        step("compiling", None)
    return rows


def result_of(rows: Sequence[Row], *, gate: bool) -> Result:
    """Return the result of ``inspect``; variants that do not fit fail, and with ``gate`` all with problems."""
    problems = {row["variant"]: row["problems"] for row in rows if row["problems"]}
    unfit = {row["variant"] for row in rows if not row["blocks"]}
    failed = [f"{name}: {reason}" for name, reason in problems.items() if gate or name in unfit]
    notes = [f"{name}: {reason}" for name, reason in problems.items() if not gate and name not in unfit]
    if best := max((row for row in rows if row["bound"]), key=lambda row: row["bound"], default=None):
        notes.append(f"best: {best['variant']}: at most {best['bound']:.1f}% of peak, limited by {best['limiter']}")
    return Result("inspect", UNITS, [*rows], failed, notes, {"triton": triton.__version__})
