"""``ringattn bench suite``: everything this machine can tell, most important first, within a time budget.

A list of command lines (``parts.py``), each run as a process. A folder that holds results of the same code, versions
and machine is gone on with: what ended well there is kept.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..common.result import Result, Row
    from .parts import Part
    from .processes import Outcome

NAME, DECISIONS = "results.json", "decisions.json"
CASE = "bench suite"
UNITS = {"part": "", "state": "", "seconds": "s", "found": "", "reason": "", "about": "", "command": ""}
FINAL = ("done", "not here")  # asked again on the same machine, the answer would be the same
WRITING_SECONDS = 20.0  # of the budget, kept for the end: the page
MOST_SIDE_BY_SIDE = 15
PROCESS_GIB = 2  # of host memory: CUDA's libraries and a compiler
FEW = {"cuda": 15, "cpu": 4}  # whatever the memory: machines of GPUs have much, and may show little until it is used
FOUND_WIDTH = 40  # of a column on the terminal
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 480,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of all results.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = None,
    only: Annotated[str | None, typer.Option(help="Parts whose name contains this.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Begin anew: what the folder holds is put aside.")] = False,
) -> None:
    """Run what this machine can tell, most important first; a failure is recorded, and the rest goes on."""
    import time

    begun = time.monotonic()
    from rich.console import Console

    from ..common.flags import device_here
    from ..common.launching import forget_launcher
    from ..common.output import prints
    from ..common.provenance import provenance
    from ..common.result import Result, finish
    from ..report.command import write_beside
    from . import processes
    from .parts import parts_of

    if not prints():
        return  # one device: under a launcher rank 0 measures, in processes of its own
    forget_launcher()
    place = device_here(device)
    everything = parts_of(place.type)
    parts = [part for part in everything if (only or "") in part.name]
    if not parts:
        raise typer.BadParameter(f"--only is {only!r}: no part has that in its name")
    result = Result(CASE, UNITS, provenance=provenance(place))
    known = {str(row["part"]): row for row in earlier(out, result.provenance, again=again)}
    kept = [part.name for part in parts if ended_well(known.get(part.name), part)]
    left = [part for part in parts if part.name not in kept]
    side_by_side = width(place.type)
    typer.echo(useful_budget(len(kept), left, processes.seconds_of(left, side_by_side), budget), err=True)
    running: dict[str, Outcome] = {}
    with Console(stderr=True).status("starting") as status, ending_as_interrupted():

        def changed(outcome: Outcome) -> None:
            running[outcome.part.name] = outcome
            known[outcome.part.name] = outcome.row
            write(out, result, [known[part.name] for part in everything if part.name in known])
            status.update(", ".join(name for name, one in running.items() if not one.over))

        try:
            ends = begun + budget - WRITING_SECONDS
            processes.run(left, out=out, device=place.type, ends=ends, width=side_by_side, changed=changed)
        except KeyboardInterrupt:
            typer.echo("interrupted: what is known is kept, and the same command goes on from there", err=True)
            raise typer.Exit(INTERRUPTED) from None
    result.provenance["seconds"] = time.monotonic() - begun
    if place.type == "cuda":
        decide(out, result, [*known.values()])
    write(out, result, [known[part.name] for part in everything if part.name in known])
    typer.echo(f"{write_beside(out)}\n")
    asked = [row for row in result.rows if row["part"] in {part.name for part in parts}]
    shown: list[Row] = [{**row, "found": shorten(str(row["found"] or row["reason"]), FOUND_WIDTH)} for row in asked]
    columns = {name: unit for name, unit in UNITS.items() if name in ("part", "state", "seconds", "found")}
    finish(Result(CASE, columns, shown, failures(asked), [*result.notes, f"everything is in {out / NAME}"]))


def useful_budget(kept: int, left: Sequence[Part], seconds: float, budget: float) -> str:
    """What is going to run, and which budget gives every part its time."""
    useful = seconds + WRITING_SECONDS
    told = f"{kept} parts were run before, and are kept: --again runs them anew. " if kept else ""
    enough = "is enough" if useful <= budget else "does not let all of them run"
    return f"{told}{len(left)} parts take up to {useful:.0f} s, most of them less: --budget {budget:g} {enough}"


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the parts that run, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def earlier(out: Path, provenance: Mapping[str, Any], *, again: bool) -> Sequence[Row]:
    """What the folder holds of this code and machine; a folder of another is put aside, under its date.

    Raises:
        typer.BadParameter: it is no folder, or the file there is something else, or damaged.
    """
    from ..common.result import read

    if os.path.lexists(out) and not out.is_dir():
        raise typer.BadParameter(f"--out is {out}: that is no folder")
    path = out / NAME
    if not os.path.lexists(path):
        return []
    try:
        found = read(path)
        if found.case != CASE or not all(UNITS.keys() <= row.keys() for row in found.rows):
            raise ValueError(f"{path} is of {found.case}")
    except ValueError as refused:
        raise typer.BadParameter(f"--out: {refused}; move it away, or name another folder") from None
    here, there = identity(provenance), identity(found.provenance)
    differ = [f"{name} {there[name]:.60} there, {here[name]:.60} here" for name in here if here[name] != there[name]]
    if not differ and not again:
        return found.rows
    date = "".join(one for one in str(found.provenance.get("date")) if one.isalnum() or one == "-")
    aside = out.absolute().with_name(f"{out.absolute().name}_{date}")
    try:
        out.absolute().rename(aside)
    except OSError as refused:
        raise typer.BadParameter(f"--out: cannot put {out} aside as {aside}: {refused.strerror}") from None
    typer.echo(f"begun anew: {'; '.join(differ) or '--again'}. What was there is in {aside}\n", err=True)
    return []


def identity(provenance: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal for two runs to be one: the code, the versions, the machine. Not clocks, loads and dates."""
    import json

    told: dict[str, Any] = {name: provenance.get(name) or {} for name in ("ringattn", "versions", "cpu", "gpu")}
    found = {"versions": told["versions"], "ringattn.sources": told["ringattn"].get("sources")}
    found |= {f"{name}.{key}": told[name].get(key) for name, key in (
        ("cpu", "model"), ("cpu", "cores"), ("gpu", "name"), ("gpu", "driver"),
    )}  # fmt: skip
    return {name: json.dumps(value) for name, value in found.items()}


def ended_well(row: Row | None, part: Part) -> bool:
    """Whether a part need not run again: it ended by itself, nothing failed, and it is the same command."""
    return row is not None and row["command"] == part.told and row["state"] in FINAL


def width(device: str) -> int:
    """Processes that may run side by side where nothing is timed: each compiles, which keeps a core busy."""
    from ..common.launching import cores

    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return min(cores(), MOST_SIDE_BY_SIDE, max(FEW[device], int(gib / PROCESS_GIB)))


def write(out: Path, result: Result, rows: Sequence[Row]) -> None:
    """Put a whole file in the place of the old one."""
    from ..common.output import write_json

    result.rows = list(rows)
    result.failed = failures(rows)
    draft = out / f"{NAME}.part"
    write_json(draft, result.as_json(), indent=1)
    draft.replace(out / NAME)


def failures(rows: Sequence[Row]) -> list[str]:
    """A sentence per part that failed."""
    return [f"{row['part']}: {row['reason']}" for row in rows if row["state"] == "failed"]


def decide(out: Path, result: Result, parts: Sequence[Row]) -> None:
    """Write what the parts of a GPU decide; what is not open is told in the notes."""
    from ..common.output import write_json
    from ..common.result import Result, read
    from .decisions import OPEN, decisions

    targets = out / "targets.json"
    rows = decisions(parts, read(targets).rows if targets.exists() else [])
    decided = Result("bench suite: decisions", dict.fromkeys(rows[0], ""), rows, provenance=result.provenance)
    write_json(out / DECISIONS, decided.as_json())
    result.notes = [f"{row['question']}: {row['answer']}" for row in rows if row["answer"] != OPEN]
