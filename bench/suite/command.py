"""``ringattn bench suite``: everything this machine can tell, most important first, within a time budget.

A list of command lines (``parts.py``), each run as a process. A folder that holds results of the same code, versions
and machine is gone on with: what ended well there is kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..common.flags import device_here
from ..common.launching import cores, forget_launcher
from ..common.output import json_text, prints, write_json
from ..common.provenance import provenance
from ..common.tables import table
from ..report.command import write_beside
from . import result_file
from .cases import Number
from .decisions import OPEN, decisions
from .parts import Part, parts_of
from .processes import LOGS, Outcome, run
from .result_file import NAME, SCHEMA

WRITING_SECONDS = 20.0  # of the budget, kept for the end: the page draws two pictures of each layout and mask
MOST_SIDE_BY_SIDE = 15
PROCESS_GIB = 2  # of host memory: CUDA's libraries and a compiler
FEW = 4  # whatever the memory
TIME_SLICES = "processes share one GPU: their times are time slices, and no results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 480,
    out: Annotated[Path, typer.Option(help="Folder of results.json.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = None,
    only: Annotated[str | None, typer.Option(help="Parts whose name contains this.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run anew what the folder already holds.")] = False,
) -> None:
    """Run what this machine can tell, most important first; a failure is recorded, and the rest goes on."""
    begun = time.monotonic()
    if not prints():
        return  # one device: under a launcher rank 0 measures, in processes of its own
    forget_launcher()
    place = device_here(device)
    everything = parts_of(place.type)
    parts = [part for part in everything if (only or "") in part.name]
    if not parts:
        raise typer.BadParameter(f"--only is {only!r}: no part has that in its name")
    record: dict[str, Any] = {"schema": SCHEMA, "budget": budget, "provenance": provenance(place)}
    before = earlier(out, record, everything, again=again)
    kept = {part.name: one for part in parts if (one := result_file.finished(before, part.name, asked(part)))}
    book = Book(out, record, [part.name for part in everything], before, kept)
    with Console(stderr=True).status("starting") as status:

        def changed(outcome: Outcome) -> None:
            book.changed(outcome)
            status.update(", ".join(book.running))

        left = [part for part in parts if part.name not in kept]
        ends = begun + budget - WRITING_SECONDS
        with ending_as_interrupted():
            done = run(left, out=out, device=place.type, ends=ends, width=width(place.type), changed=changed)
    ran = {one.part.name: one for one in done}
    outcomes = [ran[part.name] if part.name in ran else restored(part, kept[part.name]) for part in parts]
    record["provenance"]["seconds"] = time.monotonic() - begun
    book.write()
    if kept:
        typer.echo(f"{len(kept)} of {len(parts)} parts were run before, and are kept: --again runs them anew\n")
    page = write_beside(out)
    typer.echo(report(record, outcomes, book.decisions))
    typer.echo(f"\n{out / NAME}\n{page}")
    if not all(outcome.good for outcome in outcomes):
        print(f"something failed: see above, `reason` in {NAME}, and {out / LOGS}", file=sys.stderr)
        raise typer.Exit(1)


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


def asked(part: Part) -> dict[str, str]:
    """What a part is, as the record of a case says it."""
    return {"command": part.told}


def earlier(out: Path, record: Mapping[str, Any], parts: Sequence[Part], *, again: bool) -> dict[str, Any]:
    """What the folder holds of this code and machine; results of others are put aside, under their date.

    Raises:
        typer.BadParameter: the file there is of another schema, or damaged.
    """
    path = out / NAME
    nothing: dict[str, Any] = {"cases": []}
    if os.path.lexists(out) and not out.is_dir():
        raise typer.BadParameter(f"--out is {out}: that is no folder")
    if not os.path.lexists(path):
        return nothing
    try:
        found = result_file.read(path)
    except ValueError as refused:
        raise typer.BadParameter(f"--out: {refused}; move it away, or name another folder") from None
    differ = result_file.differences(record["provenance"], found["provenance"])
    if not differ and not again:
        return found
    date = "".join(letter for letter in found["provenance"]["date"] if letter.isalnum() or letter == "-")
    aside = out / f"results_{date}"
    aside.mkdir(exist_ok=True)
    for name in (NAME, LOGS, *(name for part in parts for name in part.leaves)):
        if (out / name).exists():  # the page of what is measured now has no place for it
            (out / name).replace(aside / name)
    typer.echo(f"begun anew: {'; '.join(differ) or '--again'}. What was there is in {aside}\n", err=True)
    return nothing


def restored(part: Part, record: Mapping[str, Any]) -> Outcome:
    """How a part ended in an earlier call."""
    return Outcome(part, record["state"], record["reason"], record["seconds"], result_file.numbers_of(record))


@dataclass
class Book:
    """Writes results.json: what was kept, what is running, and what earlier calls found of other parts, in order."""

    out: Path
    record: Mapping[str, Any]
    order: Sequence[str]
    before: Mapping[str, Any]
    kept: Mapping[str, dict[str, Any]]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def running(self) -> list[str]:
        """Names of parts that have begun and not ended."""
        return [name for name, one in self.outcomes.items() if not one.seconds and not one.reason]

    @property
    def cases(self) -> list[dict[str, Any]]:
        """Every part that something is known of."""
        new = {name: as_json(one) for name, one in self.outcomes.items()}
        old = {case["name"]: case for case in result_file.others(self.before, [*self.kept, *new])}
        known = {**old, **self.kept, **new}
        place = {name: index for index, name in enumerate(self.order)}
        return sorted(known.values(), key=lambda case: place.get(case["name"], len(place)))

    @property
    def decisions(self) -> list[dict[str, str]]:
        """What they decide; on the CPU nothing."""
        return decisions(self.cases) if self.record["provenance"]["gpu"] else []

    def changed(self, outcome: Outcome) -> None:
        """A part has begun or ended."""
        self.outcomes[outcome.part.name] = outcome
        self.write()

    def write(self) -> None:
        """Replace results.json: whoever reads it, or ends us, finds a whole one."""
        write(self.out, {**self.record, "decisions": self.decisions}, self.cases)


def width(device: str) -> int:
    """Processes that may run side by side where nothing is timed: each compiles, which keeps a core busy."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    few = (
        MOST_SIDE_BY_SIDE if device == "cuda" else FEW
    )  # machines of GPUs have much, and may show little until it is used
    return min(cores(), MOST_SIDE_BY_SIDE, max(few, int(gib / PROCESS_GIB)))


def write(out: Path, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Put a whole file in the place of the old one."""
    data = json.loads(json_text({**record, "cases": cases}))  # as it is read
    result_file.check(data)
    draft = out / f"{NAME}.part"
    write_json(draft, data, indent=1)
    draft.replace(out / NAME)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """A part as a case of results.json."""
    sliced = outcome.part.shares_a_gpu
    return {
        "name": outcome.part.name,
        "about": f"{outcome.part.about}; {TIME_SLICES}" if sliced else outcome.part.about,
        "arguments": asked(outcome.part),
        "state": outcome.state,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 1),
        "numbers": [number.as_json() for number in outcome.numbers],
        **({"time_slices": True} if sliced else {}),
    }


def report(record: Mapping[str, Any], outcomes: list[Outcome], told: Sequence[Mapping[str, str]]) -> str:
    """The short tables: targets, how each part ended, what is decided, and everything that failed."""
    about = record["provenance"]
    device = about["gpu"]["name"] if about["gpu"] else f"{about['cpu']['model']}, {about['cpu']['cores']} cores"
    parts = [f"{device}, torch {torch.__version__}, {about['date']}"]
    parts.append(table([row_of(outcome) for outcome in outcomes]))
    parts += [table(answered)] if (answered := [row for row in told if row["answer"] != OPEN]) else []
    parts += [
        f"{one.part.name}: {one.reason.strip().splitlines()[-1 if one.reason.startswith('exit code') else 0]}"
        for one in outcomes if one.reason.strip()
    ]  # fmt: skip
    parts += [
        f"{outcome.part.name}: {number.name} ({labels(number)}) is {number.value}, at most {number.limit:.3g} allowed"
        for outcome in outcomes
        for number in outcome.numbers
        if number.fails and number.limit is not None
    ]
    return "\n\n".join(parts)


def row_of(outcome: Outcome) -> dict[str, object]:
    """How many limits hold, how near the nearest came, and the first number that has none."""
    demanded = [number for number in outcome.numbers if number.limit is not None]
    nearest = max((number.value / number.limit for number in demanded if number.limit and number.value), default=None)
    free = next((number for number in outcome.numbers if number.limit is None and number.value is not None), None)
    found = TIME_SLICES if outcome.part.shares_a_gpu else ", ".join(outcome.part.leaves)
    return {
        "part": outcome.part.name,
        "state": outcome.state if outcome.good or outcome.state == "failed" else "failed",
        "seconds": round(outcome.seconds, 1),
        "checks": f"{sum(not number.fails for number in demanded)}/{len(demanded)}" if demanded else "",
        "of limit": "" if nearest is None else f"{nearest:.0%}",
        "found": f"{free.name}: {free.value:.3g} {free.unit}" if free else found,
    }


def labels(number: Number) -> str:
    """``head_dim 64, mask causal``."""
    return ", ".join(f"{name} {value}" for name, value in number.labels.items())
