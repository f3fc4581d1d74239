"""``ringattn bench suite``: everything this machine can measure, most important first, within a time budget.

A folder that holds results of the same code, versions and machine is gone on with: what ended well there is kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..kernels import beside, speed, targets
from ..launching import cores, forget_launcher
from ..output import json_text, prints, write_json
from ..provenance import provenance
from ..report.command import write_beside
from ..shapes import device_here
from ..tables import table
from ..timeline.events import SOURCES
from ..timing import TIMERS, timer_on
from . import result_file
from .brief import lines, longest, sentences
from .case_lists import cpu_cases, gpu_cases, timed_by
from .cases import Case, Number
from .result_file import NAME, SCHEMA
from .timeline_cases import FILE
from .workers import Outcome, Pool

WRITING_SECONDS = 30.0  # of the budget, kept for the end: the page draws two pictures of each layout and mask
MOST_WORKERS = 15  # as many as there are cases of correctness
WORKER_GIB = 2  # of host memory: CUDA's libraries and a compiler
FEW_WORKERS = 4  # whatever the memory: some machines show little of theirs until it is used

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


BRIEF: dict[Callable[..., Any], Callable[[list[Number]], list[dict[str, Any]]]] = {
    targets.targets: targets.brief,
    speed.speed: speed.brief,
    beside.beside: beside.brief,
}
"""Cases whose numbers make a table of their own."""


@app.command()
def suite(
    budget: Annotated[float, typer.Option(min=1, help="Seconds in all.")] = 480,
    out: Annotated[Path, typer.Option(help="Folder of results.json.")] = Path("build/bench"),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = None,
    timer: Annotated[
        str, typer.Option(metavar="|".join(TIMERS), help="Default: events; on the CPU clock. Rings: no graph, events.")
    ] = "",
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what the folder already holds.")] = False,
) -> None:
    """Measure what this machine can, most important first; a failure is recorded, and the rest goes on."""
    begun = time.monotonic()
    if not prints():
        return  # one device: under a launcher rank 0 measures, in processes of its own
    forget_launcher()
    place = device_here(device)
    timer = checked(timer, place)
    cases = [timed_by(case, timer) for case in cases_of(place) if (only or "") in case.name]
    if not cases:
        raise typer.BadParameter(f"--only is {only!r}: no case has that in its name")
    os.environ["TRITON_INTERPRET"] = "1" if place.type == "cpu" else "0"  # read when a worker imports triton
    record: dict[str, Any] = {"schema": SCHEMA, "budget": budget, "provenance": provenance(place)}
    before = earlier(out, record, again=again)
    kept = {case.name: one for case in cases if (one := result_file.finished(before, case.name, case.arguments))}
    book = Book(out, record, [case.name for case in cases_of(place)], before, kept)
    with Console(stderr=True).status("starting") as status:

        def changed(outcome: Outcome) -> None:
            book.changed(outcome)
            status.update(", ".join(book.running))

        pool = Pool(place, begun + budget - WRITING_SECONDS, width(), changed)
        run = {one.case.name: one for one in pool.run(case.leaving_in(out) for case in cases if case.name not in kept)}
    outcomes = [run[case.name] if case.name in run else restored(case, kept[case.name]) for case in cases]
    record["provenance"]["seconds"] = time.monotonic() - begun
    book.write()
    if kept:
        typer.echo(
            f"{len(kept)} of {len(cases)} cases were measured before, and are kept: --again measures them anew\n"
        )
    page = write_beside(out)
    typer.echo(report(record, outcomes))
    typer.echo(f"\n{out / NAME}\n{page}")
    if not all(outcome.good for outcome in outcomes):
        print("something failed: see above, and `reason` in results.json", file=sys.stderr)
        raise typer.Exit(1)


def checked(timer: str, place: torch.device) -> str:
    """What ``--timer`` asks for beside what this kind of device is timed by anyhow: that is empty.

    Raises:
        typer.BadParameter: no such timer, or not of this kind.
    """
    try:
        return "" if timer_on(place.type, timer) == timer_on(place.type, "") else timer
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None


def cases_of(place: torch.device) -> list[Case]:
    """Everything for this kind of device."""
    return gpu_cases() if place.type == "cuda" else cpu_cases()


def earlier(out: Path, record: Mapping[str, Any], *, again: bool) -> dict[str, Any]:
    """What the folder holds of this code and machine; results of others are put aside, under their date.

    Raises:
        typer.BadParameter: the file there is of another schema, or damaged.
    """
    path = out / NAME
    nothing: dict[str, Any] = {"cases": []}
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
    aside = path.with_name(f"results_{date}.json")
    path.replace(aside)
    for trace in (out / FILE.format(source) for source in SOURCES):
        if trace.exists():  # the page of what is measured now has no place for it
            trace.replace(aside.with_name(f"{aside.stem}_{trace.name}"))
    typer.echo(f"begun anew: {'; '.join(differ) or '--again'}. What was there is {aside}\n", err=True)
    return nothing


def restored(case: Case, record: Mapping[str, Any]) -> Outcome:
    """How a case ended in an earlier call."""
    return Outcome(case, record["state"], record["reason"], record["seconds"], result_file.numbers_of(record))


@dataclass
class Book:
    """Writes results.json: what was kept, what is running, and what earlier calls found of other cases, in order."""

    out: Path
    record: Mapping[str, Any]
    order: Sequence[str]
    before: Mapping[str, Any]
    kept: Mapping[str, dict[str, Any]]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def running(self) -> list[str]:
        """Names of cases that have begun and not ended."""
        return [name for name, one in self.outcomes.items() if not one.seconds and not one.reason]

    def changed(self, outcome: Outcome) -> None:
        """A case has begun or ended."""
        self.outcomes[outcome.case.name] = outcome
        self.write()

    def write(self) -> None:
        """Replace results.json: whoever reads it, or ends us, finds a whole one."""
        new = {name: as_json(one) for name, one in self.outcomes.items()}
        old = {case["name"]: case for case in result_file.others(self.before, [*self.kept, *new])}
        known = {**old, **self.kept, **new}
        place = {name: index for index, name in enumerate(self.order)}
        cases = sorted(known.values(), key=lambda case: place.get(case["name"], len(place)))
        write(self.out, self.record, cases)


def width() -> int:
    """Processes that may run side by side where nothing is timed: each compiles, which keeps a core busy."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return min(cores(), MOST_WORKERS, max(FEW_WORKERS, int(gib / WORKER_GIB)))


def write(out: Path, record: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> None:
    """Put a whole file in the place of the old one."""
    data = json.loads(json_text({**record, "cases": cases}))  # as it is read
    result_file.check(data)
    draft = out / f"{NAME}.part"
    write_json(draft, data, indent=1)
    draft.replace(out / NAME)


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.case.name,
        "about": outcome.case.about,
        "arguments": dict(outcome.case.arguments),
        "state": outcome.state,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 1),
        "numbers": [number.as_json() for number in outcome.numbers],
    }


def report(record: Mapping[str, Any], outcomes: list[Outcome]) -> str:
    """The short table: how each case ended, by which numbers, and everything that failed."""
    about = record["provenance"]
    device = about["gpu"]["name"] if about["gpu"] else f"{about['cpu']['model']}, {about['cpu']['cores']} cores"
    parts = [f"{device}, torch {torch.__version__}, {about['date']}"]
    for run, brief in BRIEF.items():
        rows = brief(longest([outcome for outcome in outcomes if outcome.case.run is run]))
        parts += [table(rows)] if rows else []
    parts.append(table([row for outcome in outcomes for row in ended(outcome)]))
    parts += [sentence for outcome in outcomes for sentence in sentences(outcome)]
    parts += [
        f"{outcome.case.name}: {outcome.reason.strip().splitlines()[-1]}" for outcome in outcomes if outcome.reason
    ]
    parts += [
        f"{outcome.case.name}: {number.name} ({labels(number)}) is {number.value}, at most {number.limit:.3g} allowed"
        for outcome in outcomes
        for number in outcome.numbers
        if number.fails and number.limit is not None
    ]
    return "\n\n".join(parts)


def ended(outcome: Outcome) -> list[dict[str, object]]:
    """A line per deciding number; the first says how many limits hold and how near the nearest came."""
    demanded = [number for number in outcome.numbers if number.limit is not None]
    nearest = max((number.value / number.limit for number in demanded if number.limit and number.value), default=None)
    first: dict[str, object] = {
        "case": outcome.case.name,
        "state": outcome.state if outcome.good or outcome.state == "failed" else "failed",
        "seconds": round(outcome.seconds, 1),
        "checks": f"{sum(not number.fails for number in demanded)}/{len(demanded)}" if demanded else "",
        "of limit": "" if nearest is None else f"{nearest:.0%}",
    }
    blank: dict[str, object] = {**dict.fromkeys(first, ""), "seconds": None}
    told = lines(outcome) if outcome.case.run not in BRIEF else []
    return [(blank if number else first) | {"found": found} for number, found in enumerate(told or [""])]


def labels(number: Number) -> str:
    """``head_dim 64, mask causal``."""
    return ", ".join(f"{name} {value}" for name, value in number.labels.items())
