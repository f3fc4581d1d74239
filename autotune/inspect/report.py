"""Reports of compiled kernels: one row per variant, and what differs between two of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import triton

from ...bench.common.files import read_object
from ...kernels.strict import Check, checked_as, named, number, optional, typed
from ...kernels.strict import text as plain
from .bound import Bound, blocks_of, bounds_of, main_bound
from .compiled import Compiled
from .variant import Variant

Row = dict[str, Any]

IDENTITY = ("kernel", "arch", "dtype", "head_dim", "head_dim_v", "role", "full", "grouped", "features")
"""What two rows must share to be compared: all of the variant but its tile and the options that are chosen with it."""

SHOWN = {
    "registers": "regs", "spills": "spills", "shared": "shared B", "blocks_per_sm": "blocks", "matrix": "mma",
    "waits": "waits", "tma": "tma", "exponentials_per_matrix": "ex2/mma", "fma_per_matrix": "fma/mma",
    "bound": "bound %", "limiter": "limiter", "ceiling": "ceiling %", "ceiling_limiter": "its limiter",
}  # fmt: skip
"""Columns of the table on the terminal, and their titles."""

COMPARED = (
    "registers", "spills", "stack", "shared", "blocks_per_sm", "instructions", "matrix", "waits", "barriers", "tma",
    "exponentials", "exponentials_per_matrix", "fma_per_matrix", "bound", "limiter", "ceiling", "ceiling_limiter",
)  # fmt: skip

READ: dict[str, Check] = {
    "kernel": plain(), "variant": plain(), "triton": optional(plain()), "options": optional(named(lambda value: None)),
    "limiter": optional(plain()), "ceiling_limiter": optional(plain()),
    **{name: optional(number()) for name in ("seconds", *COMPARED) if not name.endswith("limiter")},
    "problems": optional(typed("a list", list)),
}  # fmt: skip
"""What of a row of a file is shown or reckoned with."""


def tile_text(variant: Variant) -> str:
    tile = variant.tile
    return f"{tile.block_q}x{tile.block_k}x{tile.num_warps}x{tile.num_stages}"


def row_of(variant: Variant, compiled: Compiled, problems: Sequence[str]) -> Row:
    """Everything about one variant, ready for JSON; what is read from loops is of the main one, None without any.

    ``problems`` are those of its gate.
    """
    bounds, blocks = bounds_of(compiled), blocks_of(compiled)
    found = of_loop(main_bound(bounds))
    if found["tma"] is not None:
        found["tma"] += compiled.tma  # those of its own iteration, and those that other warps issue for it
    if not blocks:
        found |= {"bound": 0.0, "limiter": "does not fit", "ceiling": 0.0, "ceiling_limiter": "does not fit"}
    return {
        **identity(variant),
        "triton": triton.__version__,
        "registers": compiled.registers,  # per thread
        "stack": compiled.stack,  # bytes
        "shared": compiled.shared,  # bytes
        "tensor_memory": compiled.tensor_memory,  # columns
        "threads": compiled.threads,
        "blocks_per_sm": blocks,
        **found,
        "loops": [
            {"instructions": one.loop.instructions, "matrix": one.loop.matrix, "bound": one.percent} for one in bounds
        ],
        "problems": [*problems],
    }


def failed_row(variant: Variant, error: Exception) -> Row:
    """The row of a variant that cannot be compiled."""
    empty = Compiled(0, 0, 0, 0, (), arch=variant.arch, threads=32)
    return row_of(variant, empty, [f"{type(error).__name__}: {error}"]) | {"blocks_per_sm": 0}


def identity(variant: Variant) -> Row:
    return {
        "kernel": variant.kernel,
        "arch": f"sm_{variant.arch}",
        "dtype": variant.dtype,
        "head_dim": variant.head_dim,
        "head_dim_v": variant.head_dim_v,
        "role": variant.role,
        "full": variant.full,
        "grouped": variant.grouped,
        "features": list(variant.features),
        "options": dict(variant.options),
        "tile": tile_text(variant),
        "variant": str(variant),
    }


def of_loop(bound: Bound | None) -> Row:
    if bound is None:
        keys = ("instructions", "spills", "matrix", "waits", "barriers", "tma", "exponentials", "fma")
        more = ("exponentials_per_matrix", "fma_per_matrix", "bound", "limiter", "ceiling", "ceiling_limiter", "clocks")
        return dict.fromkeys((*keys, *more))
    mix = bound.mix
    return {
        "instructions": bound.loop.instructions,
        "spills": bound.loop.local,  # instructions on local memory
        "matrix": mix.matrix,
        "waits": mix.waits,
        "barriers": mix.barriers,
        "tma": mix.tma,
        "exponentials": mix.exponentials,
        "fma": mix.fma,
        "exponentials_per_matrix": mix.exponentials / mix.matrix,
        "fma_per_matrix": mix.fma / mix.matrix,
        "bound": bound.percent,
        "limiter": bound.limiter,
        "ceiling": bound.ceiling,
        "ceiling_limiter": bound.ceiling_limiter,
        "clocks": bound.clocks,
    }


def shown(row: Row) -> Row:
    """A row of the table on the terminal."""
    return {"variant": row["variant"]} | {title: row[key] for key, title in SHOWN.items()}


def read_rows(path: str) -> list[Row]:
    """The rows of a report that ``--json`` wrote; of one of ``ringattn tune`` those of the candidates that were timed.

    Raises:
        ValueError: no such file, or not such a report.
    """
    try:
        found = read_object(Path(path))
    except ValueError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    rows = found.get("timed", found.get("rows"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "kernel" in row for row in rows):
        raise ValueError(
            f"{path} is no report: it must hold the `rows` that `ringattn inspect --json` writes, "
            "or what `ringattn tune --json` writes on a GPU"
        )
    places = ((f"{path}: rows[{place}]", row) for place, row in enumerate(rows))
    return [row | checked_as(where, {name: row.get(name) for name in READ}, READ) for where, row in places]


def pairs(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same kernel, arch, dtype, head dims and role; where there are several of those, of the same tile too.

    Raises:
        ValueError: there are none.
    """
    keys = (
        IDENTITY
        if not _ambiguous(before, IDENTITY) and not _ambiguous(after, IDENTITY)
        else (*IDENTITY, "tile", "options")
    )
    others = {key_of(row, keys): row for row in after}
    found = [(row, others[key_of(row, keys)]) for row in before if key_of(row, keys) in others]
    if not found:
        held = (", ".join(sorted({str(row.get("variant")) for row in rows})) for rows in (before, after))
        raise ValueError("the two have no variant in common: {} and {}".format(*held))
    return found


def key_of(row: Row, keys: Iterable[str]) -> str:
    return json.dumps([row.get(key) or None for key in keys])  # what an older report does not have is empty


def _ambiguous(rows: Sequence[Row], keys: Iterable[str]) -> bool:
    return len({key_of(row, keys) for row in rows}) < len(rows)


def difference(before: Row, after: Row) -> list[Row]:
    """What two rows have, side by side, as rows of a table; ``change`` where both are numbers."""
    rows = []
    for key in COMPARED:
        a, b = before.get(key), after.get(key)
        change = b - a if isinstance(a, int | float) and isinstance(b, int | float) else None
        rows.append({"": key.replace("_", " "), "A": text(a), "B": text(b), "change": text(change)})
    return rows


def text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
