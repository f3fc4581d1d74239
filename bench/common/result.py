"""What every command finds, in one shape: rows of columns with units, what failed, what to know, where it comes from.

The table on the terminal, the CSV and the JSON are the same rows. A report reads the JSON back with :func:`read`.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from .output import prints, write_csv, write_json

SCHEMA = "ringattn result"
Row = Mapping[str, Any]  # text, numbers, booleans, None


@dataclass
class Result:
    """What one command found."""

    case: str
    """The command, as in ``bench links``."""
    units: dict[str, str]
    """Every column by its name, the most important first, and its unit; "" of a column without one."""
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What did not hold, a sentence each; a command with any ends with exit code 1."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know; the last one is the line that matters, as in ``best: ...``."""
    provenance: dict[str, Any] = field(default_factory=dict)

    def text(self, width: int | None = None) -> str:
        """Table, notes and failures for a terminal; a table that is too wide is cut by :meth:`_fitted`."""
        width = width or shutil.get_terminal_size((80, 24)).columns
        lines = self._fitted(width) if self.rows else []
        return "\n".join([*(line.rstrip() for line in lines), *self.notes, *(f"FAILED: {one}" for one in self.failed)])

    def _fitted(self, width: int) -> list[str]:
        """The table within a width: what is the same in all rows is told once, above; then columns from the right go.

        Empty columns are not shown.
        """
        columns = [name for name in self.units if any(row.get(name) not in (None, "") for row in self.rows)]
        same, left = list[str](), list[str]()
        if len(_lines(self.rows, columns, self.units)[0]) > width:
            same = [name for name in columns if len(self.rows) > 1 and len({row.get(name) for row in self.rows}) == 1]
            columns = [name for name in columns if name not in same]
        while len(columns) > 1 and len(_lines(self.rows, columns, self.units)[0]) > width:
            left.insert(0, columns.pop())
        lines = [f"{name} {_cell(self.rows[0][name])} {self.units[name]}".rstrip() for name in same]
        told = textwrap.wrap(", ".join(lines), width)
        table = _lines(self.rows, columns, self.units)
        if left:
            table += textwrap.wrap(f"(too wide; in --csv and --json: {', '.join(left)})", width)
        return told + table

    def as_json(self) -> dict[str, Any]:
        """What :func:`read` takes."""
        return {"schema": SCHEMA, **asdict(self)}


def _lines(rows: Sequence[Row], columns: Sequence[str], units: Mapping[str, str]) -> list[str]:
    """Aligned text: numbers to the right, words to the left, names with their units on top."""
    head = [f"{name} {units[name]}".rstrip() for name in columns]
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if push else text.ljust(width)
            for text, width, push in zip(line, widths, right, strict=True)
        )
        for line in (head, *cells)
    ]


def _cell(value: object) -> str:
    """Four digits of a number; yes or no; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(result: Result, json: str | None = None, csv: str | Path | None = None, *, text: str | None = None) -> None:
    """Print, write and end a command: rank 0 alone prints; exit code 1 on every rank where something failed.

    ``json`` of ``-`` puts the JSON in the place of the text; ``text`` is printed in the place of the table.
    """
    if prints():
        if json is not None:
            write_json(json, result.as_json())
        if csv is not None:
            write_csv(Path(csv), [{name: row.get(name) for name in result.units} for row in result.rows])
        if json != "-":
            typer.echo(result.text() if text is None else text)
        elif result.failed:
            sys.stderr.write(result.text() + "\n")
    if result.failed:
        raise typer.Exit(1)


def read(path: Path) -> Result:
    """A result that :func:`finish` wrote.

    Raises:
        ValueError: the file is something else; the message names it and what it has to be.
    """
    from .files import read_object  # which brings torch

    try:
        data = read_object(path)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        _check(data)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; it takes what a command wrote with --json") from None
    return Result(**data)


def _check(data: Mapping[str, Any]) -> None:
    """Every field is there and of its kind: ValueError."""
    from ...kernels.strict import shown

    kinds = {"case": str, "units": dict, "rows": list, "failed": list, "notes": list, "provenance": dict}
    if data.keys() != kinds.keys():
        raise ValueError(f"it has the fields {', '.join(sorted(data))[:200]}: it must have {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(data[name], kind):
            raise ValueError(f"{name} is {shown(data[name])}: it must be of type {kind.__name__}")
    for name in ("failed", "notes"):
        if not all(isinstance(one, str) for one in data[name]):
            raise ValueError(f"{name} must be texts")
    if not all(isinstance(unit, str) for unit in data["units"].values()):
        raise ValueError("units must be texts by columns")
    for row in data["rows"]:
        if not isinstance(row, dict) or not row.keys() <= data["units"].keys():
            raise ValueError("rows must be objects whose fields are columns of units")
        if not all(isinstance(value, str | int | float | None) for value in row.values()):
            raise ValueError("a row takes texts, numbers, true, false and null")
