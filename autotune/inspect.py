"""What ``ringattn inspect`` says of variants: what each takes, what bounds its main loop, what differs between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton

from ..bench.common.result import Result, Row, read
from .bound import TENSOR, blocks_of, bounds_of, main_bound
from .compile import Variant, select
from .gate import Compiled, compile_variant

IDENTITY = ("kernel", "arch", "dtype", "head_dim", "head_dim_v", "role", "full", "grouped", "features")
"""What two rows must share to be compared: all of the variant but its tile and the options that are chosen with it."""

FIGURES = {
    "bound": "%", "regs": "", "spills": "", "blocks": "", "limiter": "", "shared": "B", "ceiling": "%", "stack": "B",
    "threads": "", "instructions": "", "matrix": "", "exponentials": "", "products": "clocks",
}  # fmt: skip
"""Blocks of an SM; instructions, spills and what follows of the main loop, products on the tensor cores."""

UNITS = {"bound": "%", "variant": ""} | FIGURES | dict.fromkeys(("problems", "loops", *IDENTITY, "options", "tile"), "")


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
        **{name: getattr(variant, name) for name in IDENTITY},
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


# two side by side


def configs(spec: str) -> list[Variant]:
    """Of what a spec names one of each kernel, role, mask and grouping: dK/dV in parts where the spec says so."""
    first: dict[tuple[object, ...], Variant] = {}
    for one in select(spec):
        first.setdefault((one.kernel, one.role, one.full, one.grouped, one.head_dim), one)
    return [*first.values()]


def read_rows(path: str) -> list[Row]:
    """The rows of a report that ``ringattn inspect --json`` wrote: ValueError where it is none."""
    found = read(Path(path))
    if found.case != "inspect" or {*found.units} != {*UNITS}:
        raise ValueError(f"{path} is of `{found.case[:80]}`: it must be what `ringattn inspect --json` writes")
    for place, row in enumerate(found.rows):
        for name in FIGURES:
            kind = str if name == "limiter" else int | float
            if not isinstance(row.get(name), kind | None):
                raise ValueError(f"{path}: rows[{place}].{name} is {str(row[name])[:80]!r}: it must be a {kind}")
    return found.rows


def pairs(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same kernel, arch, dtype, head dims and role; where there are several of those, of the same tile too.

    Raises:
        ValueError: there are none.
    """

    def by(keys: Sequence[str], rows: Sequence[Row]) -> dict[tuple[object, ...], Row]:
        return {tuple(row.get(key) for key in keys): row for row in rows}

    keys: tuple[str, ...] = IDENTITY
    if any(len(by(keys, rows)) < len(rows) for rows in (before, after)):
        keys += ("tile", "options")
    one, other = by(keys, before), by(keys, after)
    if not {*one} & {*other}:
        held = (", ".join(sorted({str(row.get("variant")) for row in rows})) for rows in (before, after))
        raise ValueError("the two have no variant in common: {} and {}".format(*held))
    return [(row, other[key]) for key, row in one.items() if key in other]


def differences(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Of every pair a row per figure, side by side; ``change`` where both are numbers."""
    rows: list[Row] = []
    for a, b in pairs(before, after):
        for key in FIGURES:
            one, other = a.get(key), b.get(key)
            change = other - one if isinstance(one, int | float) and isinstance(other, int | float) else None
            if one is not None or other is not None:
                rows.append({"figure": key, "A": one, "B": other, "change": change, "of A": a["variant"],
                             "of B": b["variant"]})  # fmt: skip
    return rows
