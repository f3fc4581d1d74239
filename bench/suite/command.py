"""``ringattn bench suite`` runs everything this machine can measure, most important first, within a time budget.

The suite is a list of command lines (``suite_parts.py``), each run as a process. If the folder holds results of the
same code, versions and machine, the suite keeps finished parts and runs the rest.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..common.result import Result, Row

NAME = "results.json"
CASE = "bench suite"
UNITS = {"part": "", "state": "", "seconds": "s", "found": "", "about": "", "command": ""}
FINAL = ("done", "not here")  # states that another run on the same machine would not change
WRITING_SECONDS = 20.0  # reserved at the end for the report
MOST_SIDE_BY_SIDE = 15
FOUND_WIDTH = 40  # characters of a column on the terminal
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Total seconds.")] = 480,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all results.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if available.")] = None,
    only: Annotated[str | None, typer.Option(help="Run only parts whose name contains this text.")] = None,
) -> None:
    """Run every benchmark that this machine can run, most important first; a failing part does not stop the rest."""
    import time

    start = time.monotonic()
    from ..common.flags import check_folder, resolve_device
    from ..common.output import is_printing_rank
    from ..common.provenance import provenance
    from ..common.ranks import LAUNCHERS, cores
    from ..common.result import Result, finish_command
    from ..report.command import PAGE_NAME, write_report
    from . import part_processes
    from .suite_parts import list_parts

    if not is_printing_rank():
        return  # under a launcher only rank 0 measures, in its own processes
    for name in [*chain(*LAUNCHERS), *(name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_")))]:
        os.environ.pop(name, None)
    place = resolve_device(device)
    all_parts = list_parts(place.type)
    parts = [part for part in all_parts if (only or "") in part.name]
    if not parts:
        raise typer.BadParameter(f"--only is {only!r}: no part's name contains it")
    check_folder("--out", out)
    result = Result(CASE, UNITS, provenance=provenance(place))
    known = {str(row["part"]): row for row in read_earlier_rows(out, result.provenance)}
    # Keep parts that finished with the same command.
    finished = {name: row["command"] for name, row in known.items() if row["state"] in FINAL}
    remaining = [part for part in parts if finished.get(part.name) != part.command_line]
    # Parallel parts compile, and each keeps a core busy.
    width, names = min(cores(), MOST_SIDE_BY_SIDE), [part.name for part in all_parts]
    groups = part_processes.group_parts(remaining)
    seconds = sum(part_processes.group_seconds(group, width) for group in groups) + WRITING_SECONDS
    before = f"{len(parts) - len(remaining)} parts with results are kept. " if len(remaining) < len(parts) else ""
    enough = "is enough" if seconds <= budget else "may not be enough for all"
    ends = start + budget - WRITING_SECONDS
    started = time.monotonic() - start
    if short := part_processes.missing_seconds(remaining, ends):
        # Add the start-up time again, because the next start may take longer.
        minimum = math.ceil(budget + short + started)
        raise typer.BadParameter(f"--budget is {budget:g}, too short for even one part: it must be at least {minimum}")
    message = f"{len(remaining)} parts take at most {seconds:.0f} s, usually less. --budget {budget:g} {enough}."
    typer.echo(before + message, err=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # handle like Ctrl-C
        signal.signal(number, signal.default_int_handler)
    running = part_processes.run_parts(remaining, out=out, device=place.type, end_time=ends, width=width)
    try:
        with closing(running):
            for row in running:
                known[str(row["part"])] = row
                write_results(out, result, [known[name] for name in names if name in known])
                typer.echo(f"{row['part']}: {row['state']}, {row['seconds']} s", err=True)
    except KeyboardInterrupt:
        typer.echo("interrupted. Finished parts are kept; the same command runs the rest.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    result.provenance["seconds"] = time.monotonic() - start
    write_results(out, result, [known[name] for name in names if name in known])
    page = str(out / PAGE_NAME)
    try:
        write_report(out, out / PAGE_NAME)
    except Exception as error:  # the results are more important than the page
        page = f"no {PAGE_NAME}: {type(error).__name__}: {error}"
    typer.echo(f"{page}\n")
    rows = [known[part.name] for part in parts]
    shown = [{**row, "found": shorten(str(row["found"]), FOUND_WIDTH)} for row in rows]
    columns = {name: unit for name, unit in UNITS.items() if name not in ("about", "command")}
    finish_command(Result(CASE, columns, [*shown], failure_lines(rows), [f"all results are in {out / NAME}"]))


def read_earlier_rows(out: Path, provenance: Mapping[str, Any]) -> Sequence[Row]:
    """Return the rows in the folder (none: empty); typer.BadParameter if another code or machine measured them."""
    from ..common.result import read_result

    path = out / NAME
    if not path.exists() and not path.is_symlink():
        return []
    try:
        result = read_result(path)
        if result.case != CASE or not all(UNITS.keys() <= row.keys() for row in result.rows):
            raise ValueError(f"{path} holds results of {result.case}")
        current, stored = run_identity(provenance), run_identity(result.provenance)
        if changed := [name for name in current if current[name] != stored[name]]:
            differences = "; ".join(f"{name} {stored[name]:.60}, not {current[name]:.60}" for name in changed)
            raise ValueError(f"{path} was measured with {differences}")
    except ValueError as refused:
        raise typer.BadParameter(f"--out: {refused}. Move the file, or name another folder.") from None
    return result.rows


def run_identity(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, what must be equal for a run to continue another: code, versions, CPU and GPU."""
    wanted = {"ringattn": ("sources",), "cpu": ("model", "cores"), "gpu": ("name", "driver")}
    names = {"versions": str(provenance.get("versions"))}
    for name, keys in wanted.items():
        value = provenance.get(name)
        names |= {f"{name}.{key}": str(value.get(key) if isinstance(value, dict) else value) for key in keys}
    return names


def write_results(out: Path, result: Result, rows: Sequence[Row]) -> None:
    """Write ``rows`` and their failures to the folder's result file, which is replaced in one step."""
    from ..common.output import write_json

    result.rows, result.failed = list(rows), failure_lines(rows)
    draft = out / f"{NAME}.part"
    write_json(draft, result.as_json(), indent=1)
    draft.replace(out / NAME)


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """Return name and message of every failed part."""
    return [f"{row['part']}: {row['found']}" for row in rows if row["state"] == "failed"]
