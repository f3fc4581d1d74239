"""What ``tune`` shows: bars meanwhile, and at the end a table, words and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...bench.common.output import write_csv, write_json
from ...bench.common.provenance import provenance
from ...bench.common.tables import table

SCHEMA = "ringattn tune 1"


def finish(
    told: str,
    rows: list[dict[str, Any]],
    report: dict[str, Any],
    json: str | None,
    csv: Path | None,
    device: torch.device | None = None,
) -> None:
    """Print and write."""
    if json != "-":
        typer.echo(f"{table(rows)}\n\n{told}")
    if json is not None:
        made = {"schema": SCHEMA, "provenance": provenance(device or torch.device("cpu"))}
        write_json(json, {**made, **report, "rows": rows})
    if csv is not None:
        write_csv(csv, rows)


class ShownBars:
    """Progress on the terminal: a bar for each part, from when its length is known."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._tasks, self._totals = progress, {}, Counter[str]()  # type: ignore[var-annotated]

    def more(self, part: str, count: int) -> None:
        self._totals[part] += count
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part)
        self._progress.update(self._tasks[part], total=self._totals[part])

    def step(self, part: str) -> None:
        self._progress.advance(self._tasks[part])


@contextmanager
def bars() -> Iterator[ShownBars]:
    """On standard error and gone at the end; into a file they would be nothing but empty lines."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ShownBars(progress)
