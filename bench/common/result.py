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
WRITTEN_OUT, MOST_WRITTEN_OUT = 9999.5, 1e9  # numbers between them have no exponent
Cell = str | bool | float | None
Row = Mapping[str, Any]  # of cells


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

    def add(self, other: Result) -> None:
        """Take in what another part of the same command found; a note that both have is told once."""
        self.rows += other.rows
        self.failed += other.failed
        self.notes += [note for note in other.notes if note not in self.notes]

    def text(self, width: int | None = None) -> str:
        """Table, notes and failures for a terminal.

        Of a table that is too wide what is the same in all rows is told once, above; then columns from the right go.
        Empty columns are not shown.
        """
        width = width or shutil.get_terminal_size((80, 24)).columns
        columns = [name for name in self.units if any(row.get(name) not in (None, "") for row in self.rows)]
        same, left = list[str](), list[str]()
        if self._width(columns) > width and len(self.rows) > 1:
            same = [name for name in columns if len({row.get(name) for row in self.rows}) == 1]
            columns = [name for name in columns if name not in same]
        while len(columns) > 1 and self._width(columns) > width:
            left.insert(0, columns.pop())
        shared = ", ".join(f"{name} {cell(self.rows[0][name])} {self.units[name]}".rstrip() for name in same)
        lines = [*textwrap.wrap(shared, width), *self._table(columns)]
        if left:
            lines += textwrap.wrap(f"(too wide; in --csv and --json: {', '.join(left)})", width)
        return "\n".join([*lines, *self.notes, *(f"FAILED: {one}" for one in self.failed)])

    def _width(self, columns: Sequence[str]) -> int:
        return max(map(len, self._table(columns)), default=0)

    def _table(self, columns: Sequence[str]) -> list[str]:
        """Aligned text: numbers to the right, words to the left, names with their units on top."""
        if not self.rows:
            return []
        lines = [""] * (len(self.rows) + 1)
        for name in columns:
            cells = [f"{name} {self.units[name]}".rstrip(), *(cell(row.get(name)) for row in self.rows)]
            push = str.rjust if all(isinstance(row.get(name), int | float | None) for row in self.rows) else str.ljust
            widest = max(map(len, cells))
            lines = [f"{line}  {push(one, widest)}" for line, one in zip(lines, cells, strict=True)]
        return [line[2:].rstrip() for line in lines]

    def as_json(self) -> dict[str, Any]:
        """What :func:`read` takes."""
        return {"schema": SCHEMA, **asdict(self)}


def cell(value: object) -> str:
    """Return at least four digits of a number; yes or no; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    # the digits before the point as they are: 11960 beside 3684, not 1.196e+04
    return f"{value:.0f}" if WRITTEN_OUT <= abs(value) < MOST_WRITTEN_OUT else f"{value:.4g}"


def finish(result: Result, json: str | None = None, csv: str | None = None, *, text: str | None = None) -> None:
    """Print, write and end a command: rank 0 alone prints; exit code 1 on every rank where something failed.

    ``json`` or ``csv`` of ``-`` stands in the place of the text; ``text`` is printed in the place of the table.
    """
    if prints():
        if json is not None:
            write_json(json, result.as_json())
        if csv is not None:
            write_csv(csv, [{name: row.get(name) for name in result.units} for row in result.rows])
        if "-" not in (json, csv):
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
    from ...kernels.files import converted, read_object  # which brings torch

    try:
        data = read_object(path)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        result: Result = converted(Result, data, "result")
        converted(list[dict[str, Cell]], result.rows, "rows")
        if any(row.keys() - result.units.keys() for row in result.rows):
            raise ValueError("rows must have no fields but the columns of units")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; it takes what a command wrote with --json") from None
    return result
