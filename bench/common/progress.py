"""Progress on standard error: bars on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LINE_INTERVAL = 10.0  # seconds between two lines, so that a short command prints none

Progress = Callable[[str, int | None], None]
"""Function of a part's name, and of the number of steps to add to the part, or None when a step is done."""


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Progress]:
    """Yield a `Progress` to report steps to; show a bar per part, or without a terminal a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console, tasks, done, totals = Console(stderr=True), dict[str, Any](), Counter[str](), Counter[str]()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    last_line = time.monotonic()
    with Bars(*columns, console=console, transient=True, disable=silent or not console.is_terminal) as bars:

        def step(part: str, more: int | None) -> None:
            nonlocal last_line
            if part not in tasks:
                tasks[part] = bars.add_task(part)
            if more is None:
                done[part] += 1
                bars.advance(tasks[part])
            else:
                totals[part] += more
                bars.update(tasks[part], total=totals[part])
            if not silent and not console.is_terminal and time.monotonic() - last_line >= LINE_INTERVAL:
                last_line = time.monotonic()
                print(f"{part}: {done[part]} of {totals[part]}", file=sys.stderr, flush=True)

        yield step
