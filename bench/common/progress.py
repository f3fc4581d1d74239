"""How far a command is, on standard error: bars on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EVERY = 10.0  # seconds between two lines: a short command has none

Progress = Callable[[str, int | None], None]
"""Called with a part of a run and how many steps more it has, or None: one of them is done."""


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Progress]:
    """Yield what is told of steps: a bar per part, gone at the end; into a file or a pipe a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console, tasks, done, totals = Console(stderr=True), dict[str, Any](), Counter[str](), Counter[str]()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    told = time.monotonic()
    with Bars(*columns, console=console, transient=True, disable=silent or not console.is_terminal) as bars:

        def step(part: str, more: int | None) -> None:
            nonlocal told
            if part not in tasks:
                tasks[part] = bars.add_task(part)
            if more is None:
                done[part] += 1
                bars.advance(tasks[part])
            else:
                totals[part] += more
                bars.update(tasks[part], total=totals[part])
            if not silent and not console.is_terminal and time.monotonic() - told >= EVERY:
                told = time.monotonic()
                print(f"{part}: {done[part]} of {totals[part]}", file=sys.stderr, flush=True)

        yield step
