"""Choice of the rank that prints, and writing of JSON, CSV and other files."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from .ranks import launched_rank


def is_printing_rank() -> bool:
    """Return True if this process prints and writes files: without a launcher, or on rank 0."""
    place = launched_rank()
    return place is None or place.rank == 0


def check_writable(*targets: str | Path | None) -> None:
    """Raise typer.BadParameter for a file that cannot be written: no folder, a folder, a link, a device or ``-``."""
    for target in targets:
        path, reason = Path(str(target)), ""
        if target is None:
            continue
        if str(target) == "-":
            reason = "only --json and --csv can go to standard output. Name a file."
        elif not path.absolute().parent.is_dir():
            reason = f"there is no folder {path.parent}."
        elif path.is_dir():
            reason = "it is a folder. Name a file in it."
        elif path.is_symlink() or (path.exists() and not path.is_file()):
            reason = "it is a link or not a regular file. Name another file."
        if reason:
            raise typer.BadParameter(f"cannot write {target}: {reason}")


def write_file(target: str | Path, data: str | bytes) -> None:
    """Write a regular file and make its folders; raise typer.BadParameter if it cannot be written."""
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        check_writable(target)
        Path(target).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {target}: {error.strerror}.") from None


def write_json(target: str | Path, data: object, indent: int | None = 2) -> None:
    """Write ``data`` to a file, or to standard output if ``target`` is ``-``; NaN and infinity become null."""
    _write_text(target, json.dumps(_finite(data), indent=indent, allow_nan=False) + "\n")


def _write_text(target: str | Path, text: str) -> None:
    if str(target) == "-":
        sys.stdout.write(text)
    else:
        write_file(target, text)


def _finite(data: object) -> object:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def write_csv(target: str | Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with a header to a file or to standard output; the first row's keys are the columns."""
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    _write_text(target, written.getvalue())
