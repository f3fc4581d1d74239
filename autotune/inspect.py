"""What ``ringattn inspect`` says of variants: what each takes, and what bounds its main loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

from ..bench.common.result import Result, Row
from .bound import TENSOR, blocks_of, bounds_of, main_bound
from .compile import Variant
from .gate import Compiled, compile_variant

SELECTED = ("kernel", "arch", "dtype", "head_dim", "head_dim_v", "role", "full", "grouped", "features")
"""What selects the variant, beside its tile and the options that are chosen with it."""

FIGURES = {
    "bound": "%", "regs": "", "spills": "", "blocks": "", "limiter": "", "shared": "B", "ceiling": "%", "stack": "B",
    "threads": "", "instructions": "", "matrix": "", "exponentials": "", "products": "clocks",
}  # fmt: skip
"""Blocks of an SM; instructions, spills and what follows of the main loop, products on the tensor cores."""

UNITS = {"bound": "%", "variant": ""} | FIGURES | dict.fromkeys(("problems", "loops", *SELECTED, "options", "tile"), "")


def row_of(variant: Variant, compiled: Compiled, problems: Sequence[str]) -> dict[str, Any]:
    """Everything about one variant; what is read from loops is of the main one, None without any.

    ``problems`` are those of its gate.
    """
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
        "loops": " ".join(str(one.loop.matrix) for one in bounds_of(compiled)),  # matrix instructions of each
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
    """The row of one variant; where it cannot be compiled or does not fit, its ``problems`` say why."""
    try:
        return row_of(variant, *compile_variant(variant))
    except Exception as error:  # one that cannot be compiled is a finding, and the others still count
        empty = Compiled(0, 0, 0, 0, (), arch=variant.arch, threads=32)
        return row_of(variant, empty, [f"{type(error).__name__}: {error}"]) | {"blocks": 0}


def inspect_variants(variants: Sequence[Variant], step: Callable[[str, int | None], None]) -> list[dict[str, Any]]:
    """A row each, compiled one after another; ``step`` is called as :data:`tune.Progress`."""
    step("compiling", len(variants))
    rows = []
    for variant in variants:
        rows.append(inspect_variant(variant))
        step("compiling", None)
    return rows


def result_of(rows: Sequence[Row], *, gate: bool) -> Result:
    """Failed is what does not fit; with ``gate`` also what does not pass."""
    wrong = {row["variant"]: row["problems"] for row in rows if row["problems"]}
    unfit = {row["variant"] for row in rows if not row["blocks"]}
    failed = [f"{name}: {why}" for name, why in wrong.items() if gate or name in unfit]
    notes = [f"{name}: {why}" for name, why in wrong.items() if not gate and name not in unfit]
    if best := max((row for row in rows if row["bound"]), key=lambda row: row["bound"], default=None):
        notes.append(f"best: {best['variant']}: at most {best['bound']:.1f}% of peak, limited by {best['limiter']}")
    return Result("inspect", UNITS, [*rows], failed, notes, {"triton": triton.__version__})
