"""The result of a command: rows of columns with units, failures, notes and provenance.

The table on the terminal, the CSV and the JSON hold the same rows. A report reads the JSON with :func:`read_result`.
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

from .output import is_printing_rank, write_csv, write_json

SCHEMA = "ringattn result"
HEADINGS = {
    "of ideal": "% of ideal", "of product": "% of matmul", "counted peak": "computed peak MB",
    "found": "result", "rate of a rank": "TFLOP/s per rank", "rate by S²/2": "TFLOP/s by S²/2",
    "over tolerance": "wrong results",
}  # fmt: skip
"""Headings of columns whose names in JSON and CSV say too little, with units."""
WRITTEN_OUT, MOST_WRITTEN_OUT = 9999.5, 1e9  # between these, numbers are written without an exponent
Cell = str | bool | float | None
Row = Mapping[str, Any]  # of cells


@dataclass
class Result:
    """Result of one command."""

    case: str
    """The command, such as ``bench links``."""
    units: dict[str, str]
    """Unit of every column, by name, most important column first; "" for no unit."""
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Failed checks, one sentence each. A command with failures ends with exit code 1."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader. The last note is the summary, such as ``best: ...``."""
    provenance: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Result) -> None:
        """Append rows, failures and new notes of another part of the same command."""
        self.rows += other.rows
        self.failed += other.failed
        self.notes += [note for note in other.notes if note not in self.notes]

    def text(self, width: int | None = None) -> str:
        """Return table, notes and failures for a terminal.

        Empty columns are not shown. If the table is wider than ``width`` (default: the terminal's), columns with equal
        values in all rows move into a line above the table. If it is still too wide, the last columns are left out.
        """
        width = width or shutil.get_terminal_size((80, 24)).columns
        columns = [name for name in self.units if any(row.get(name) not in (None, "") for row in self.rows)]
        constant, omitted = list[str](), list[str]()
        if self._width(columns) > width and len(self.rows) > 1:
            constant = [name for name in columns if len({row.get(name) for row in self.rows}) == 1]
            columns = [name for name in columns if name not in constant]
        while len(columns) > 1 and self._width(columns) > width:
            omitted.insert(0, columns.pop())
        shared = ", ".join(f"{name} {format_cell(self.rows[0][name])} {self.units[name]}".rstrip() for name in constant)
        lines = [*textwrap.wrap(shared, width), *self._table(columns)]
        if omitted:
            lines += textwrap.wrap(f"(columns only in --csv and --json: {', '.join(omitted)})", width)
        return "\n".join([*lines, *self.notes, *(f"FAILED: {failure}" for failure in self.failed)])

    def _width(self, columns: Sequence[str]) -> int:
        return max(map(len, self._table(columns)), default=0)

    def _table(self, columns: Sequence[str]) -> list[str]:
        """Return the table's lines, headings first; numbers are aligned to the right and words to the left."""
        if not self.rows:
            return []
        lines = [""] * (len(self.rows) + 1)
        for name in columns:
            heading = HEADINGS.get(name) or f"{name} {self.units[name]}".rstrip()
            cells = [heading, *(format_cell(row.get(name)) for row in self.rows)]
            push = str.rjust if all(isinstance(row.get(name), int | float | None) for row in self.rows) else str.ljust
            widest = max(map(len, cells))
            lines = [f"{line}  {push(text, widest)}" for line, text in zip(lines, cells, strict=True)]
        return [line[2:].rstrip() for line in lines]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON data that :func:`read_result` reads."""
        return {"schema": SCHEMA, **asdict(self)}


def format_cell(value: object) -> str:
    """Format a table cell: at least four digits of a number, yes or no, or nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    # Write 11960, not 1.196e+04, next to 3684.
    return f"{value:.0f}" if WRITTEN_OUT <= abs(value) < MOST_WRITTEN_OUT else f"{value:.4g}"


def finish_command(result: Result, json: str | None = None, csv: str | None = None, *, text: str | None = None) -> None:
    """Print a result on rank 0 and write it to the files ``json`` and ``csv``; raise typer.Exit(1) if a check failed.

    If ``json`` or ``csv`` is ``-``, that format is printed in place of the text. ``text`` replaces the table.
    """
    if is_printing_rank():
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


def read_result(path: Path) -> Result:
    """Read a result that :func:`finish_command` wrote; raise ValueError if the file holds something else."""
    from ...kernels.json_files import convert_json, read_object  # imports torch

    try:
        data = read_object(path)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        result: Result = convert_json(Result, data, "result")
        convert_json(list[dict[str, Cell]], result.rows, "rows")
        if any(row.keys() - result.units.keys() for row in result.rows):
            raise ValueError("rows have fields that units lacks")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; it must be a file written with --json") from None
    return result
