"""``ringattn bench suite``: everything this machine can tell, most important first, within a time budget.

A list of command lines (``parts.py``), each run as a process. A folder that holds results of the same code, versions
and machine is gone on with: what ended well there is kept.
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
FINAL = ("done", "not here")  # asked again on the same machine, the answer would be the same
WRITING_SECONDS = 20.0  # of the budget, kept for the end: the page
MOST_SIDE_BY_SIDE = 15
FOUND_WIDTH = 40  # of a column on the terminal
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 480,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of all results.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = None,
    only: Annotated[str | None, typer.Option(help="Parts whose name contains this.")] = None,
) -> None:
    """Run what this machine can tell, most important first; a failure is recorded, and the rest goes on."""
    import time

    begun = time.monotonic()
    from ..common.flags import check_folder, device_here
    from ..common.output import prints
    from ..common.provenance import provenance
    from ..common.ranks import LAUNCHERS, cores
    from ..common.result import Result, finish
    from ..report.command import write_beside
    from . import processes
    from .parts import parts_of

    if not prints():
        return  # one device: under a launcher rank 0 measures, in processes of its own
    for name in [*chain(*LAUNCHERS), *(name for name in os.environ if name.startswith(("TORCHELASTIC_", "MASTER_")))]:
        os.environ.pop(name, None)
    place = device_here(device)
    everything = parts_of(place.type)
    parts = [part for part in everything if (only or "") in part.name]
    if not parts:
        raise typer.BadParameter(f"--only is {only!r}: no part has that in its name")
    check_folder("--out", out)
    result = Result(CASE, UNITS, provenance=provenance(place))
    known = {str(row["part"]): row for row in earlier(out, result.provenance)}
    # kept is what ended well, by the same command
    kept = {name: row["command"] for name, row in known.items() if row["state"] in FINAL}
    left = [part for part in parts if kept.get(part.name) != part.command_line]
    # each of those side by side compiles, which keeps a core busy
    width, names = min(cores(), MOST_SIDE_BY_SIDE), [part.name for part in everything]
    seconds = sum(processes.seconds_of(group, width) for group in processes.grouped(left)) + WRITING_SECONDS
    before = f"{len(parts) - len(left)} parts were run before, and are kept. " if len(left) < len(parts) else ""
    enough = "is enough" if seconds <= budget else "does not let all of them run"
    ends = begun + budget - WRITING_SECONDS
    started = time.monotonic() - begun
    if short := processes.short_of(left, ends):
        least = math.ceil(budget + short + started)  # as much again: the next start may take longer
        raise typer.BadParameter(f"--budget is {budget:g}: no part starts within it; one does from about {least} on")
    message = f"{len(left)} parts take up to {seconds:.0f} s, most of them less: --budget {budget:g} {enough}"
    typer.echo(before + message, err=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    running = processes.run(left, out=out, device=place.type, ends=ends, width=width)
    try:
        with closing(running):
            for row in running:
                known[str(row["part"])] = row
                write(out, result, [known[name] for name in names if name in known])
                typer.echo(f"{row['part']}: {row['state']}, {row['seconds']} s", err=True)
    except KeyboardInterrupt:
        typer.echo("interrupted: what is known is kept, and the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None
    result.provenance["seconds"] = time.monotonic() - begun
    write(out, result, [known[name] for name in names if name in known])
    typer.echo(f"{write_beside(out)}\n")
    rows = [known[part.name] for part in parts]
    shown = [{**row, "found": shorten(str(row["found"]), FOUND_WIDTH)} for row in rows]
    columns = {name: unit for name, unit in UNITS.items() if name not in ("about", "command")}
    finish(Result(CASE, columns, [*shown], failures(rows), [f"everything is in {out / NAME}"]))


def earlier(out: Path, provenance: Mapping[str, Any]) -> Sequence[Row]:
    """What the folder holds of this code and machine.

    Raises:
        typer.BadParameter: the file there is of other code, of another machine, or something else.
    """
    from ..common.result import read

    path = out / NAME
    if not path.exists() and not path.is_symlink():
        return []
    try:
        result = read(path)
        if result.case != CASE or not all(UNITS.keys() <= row.keys() for row in result.rows):
            raise ValueError(f"{path} is of {result.case}")
        here, there = identity(provenance), identity(result.provenance)
        if differ := [f"{name} {there[name]:.60}, here {here[name]:.60}" for name in here if here[name] != there[name]]:
            raise ValueError(f"{path} is of {'; '.join(differ)}")
    except ValueError as refused:
        raise typer.BadParameter(f"--out: {refused}; move it away, or name another folder") from None
    return result.rows


def identity(provenance: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal for two runs to be one: the code, the versions, the machine. Not clocks, loads and dates."""
    wanted = {"ringattn": ("sources",), "cpu": ("model", "cores"), "gpu": ("name", "driver")}
    names = {"versions": str(provenance.get("versions"))}
    for name, keys in wanted.items():
        value = provenance.get(name)
        names |= {f"{name}.{key}": str(value.get(key) if isinstance(value, dict) else value) for key in keys}
    return names


def write(out: Path, result: Result, rows: Sequence[Row]) -> None:
    """Put a whole file in the place of the old one."""
    from ..common.output import write_json

    result.rows, result.failed = list(rows), failures(rows)
    draft = out / f"{NAME}.part"
    write_json(draft, result.as_json(), indent=1)
    draft.replace(out / NAME)


def failures(rows: Sequence[Row]) -> list[str]:
    """A sentence per part that failed."""
    return [f"{row['part']}: {row['found']}" for row in rows if row["state"] == "failed"]
