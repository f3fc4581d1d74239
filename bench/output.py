"""What commands share of their output: who prints, and where JSON and CSV go."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from .launching import member


def prints() -> bool:
    """Whether this process is the one that prints and writes: alone, or rank 0 under a launcher."""
    place = member()
    return place is None or place.rank == 0


def check_targets(*targets: str | Path | None) -> None:
    """Refuse a file that could not be written, before minutes of work rather than after: typer.BadParameter."""
    for target in targets:
        if target in (None, "-"):
            continue
        if not Path(target).absolute().parent.is_dir():
            raise typer.BadParameter(f"cannot write {target}: there is no folder {Path(target).parent}")
        if Path(target).is_dir():
            raise typer.BadParameter(f"cannot write {target}: it is a folder; name a file in it")


def write_json(target: str, data: object) -> None:
    """Write ``data`` to a file, or to standard output where ``target`` is ``-``."""
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def write_csv(target: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows of the same keys, with a header."""
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
