"""One job sharded, then whole, then compared: by this process as one rank of several, or as all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..bench.common.launching import Member, cores, launch, member, process_group, threads
from ..bench.common.output import write_csv, write_json
from ..bench.common.provenance import provenance
from ..comm import LocalGroup, LocalWorld
from .outcome import Outcome, Setting
from .training import Job, RingRun, Task, Tick, Weights, no_tick, train_exactly, train_ring, train_whole


@dataclass(frozen=True)
class Order:
    """A job, its text, and where the numbers go."""

    job: Job
    document: bytes
    name: str  # of the document
    json: str | None = None
    csv: Path | None = None


def run(order: Order, world: int) -> bool:
    """Whether the two runs agree: one rank under a launcher, virtual ranks on a single device, else new processes."""
    if member() is not None:
        return as_rank(None, order)
    if world == 1 or torch.cuda.device_count() == 1:
        return as_all_ranks(order, world)
    typer.echo(f"starting {world} processes …", err=True)
    try:
        return launch(world, as_rank, order)
    except ChildFailedError as error:
        typer.echo(f"a rank failed: {error}", err=True)
        return False
    except SignalException as error:  # the ranks have been ended
        raise typer.Exit(128 + error.sigval) from None


def as_rank(store: str | None, order: Order) -> bool:
    """One rank of several processes, which meet in the file ``store``; rank 0 goes on alone with the whole sequence.

    Returns:
        On rank 0 whether the two runs agree, True on every other.
    """
    place = member()
    assert place is not None
    task = Task(order.job, order.document, place.device)
    with _progress(order.job, place.world, hidden=place.rank > 0) as bars, TemporaryDirectory() as folder:
        weights = Weights(folder)
        with threads(place.threads), process_group(place, store):
            ring = train_ring(task, None, weights if place.rank == 0 else None, bars.ring)
        if place.rank > 0:
            return True
        outcome = _complete(order, task, _setting_of_rank(order, task, place), ring, weights, bars)
    return report(order, outcome)


def as_all_ranks(order: Order, world: int) -> bool:
    """All ranks, as virtual ones on one device; whether the two runs agree."""
    task = Task(
        order.job, order.document, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
    with _progress(order.job, world) as bars, TemporaryDirectory() as folder, threads(cores()):
        weights = Weights(folder)

        def rank(group: LocalGroup) -> RingRun:
            first = group.rank() == 0
            return train_ring(task, group, weights if first else None, bars.ring if first else no_tick)

        with LocalWorld(world, device=task.device) as local:
            ring = local.run(rank)[0]
        where = _whole(task.device)
        setting = Setting(
            order.name, world, f"virtual rank{'s' * (world > 1)} on {where}", where, shared_memory=world > 1
        )
        outcome = _complete(order, task, setting, ring, weights, bars)
    return report(order, outcome)


def report(order: Order, outcome: Outcome) -> bool:
    """Print and write; whether the two runs agree."""
    if order.json != "-":
        typer.echo(outcome.text())
    if order.json is not None:
        write_json(order.json, outcome.data())
    if order.csv is not None:
        write_csv(order.csv, outcome.steps())
    return not outcome.disagreements


class Bars(NamedTuple):
    """What each of the three runs calls after a step."""

    ring: Tick
    whole: Tick
    exact: Tick


@contextmanager
def _progress(job: Job, world: int, *, hidden: bool = False) -> Iterator[Bars]:
    """A bar per run, on standard error and gone at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    runs = {f"sharded over {world}": job.steps, "whole": job.steps, "whole, float64": len(job.compared)}
    console = Console(stderr=True)
    # into a file a bar is nothing but an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        yield Bars(*(_bar(progress, name, total) for name, total in runs.items()))


def _bar(progress: Progress, name: str, total: int) -> Tick:
    bar = progress.add_task(name, total=total)
    return lambda: progress.advance(bar)


def _complete(order: Order, task: Task, setting: Setting, ring: RingRun, weights: Weights, bars: Bars) -> Outcome:
    """The runs on the whole sequence, in this process with all its threads, and the comparison."""
    try:
        with threads(cores()):
            whole = train_whole(task, weights, bars.whole)
            exact = train_exactly(task, weights, bars.exact)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"--seqlen {order.job.seqlen}: the whole sequence does not fit one GPU, and nothing is left to compare "
            "with; take a shorter one"
        ) from error
    return Outcome(order.job, setting, ring, whole, exact, provenance(task.device))


def _setting_of_rank(order: Order, task: Task, place: Member) -> Setting:
    if task.device.type == "cuda":
        ranks = f"GPUs, {torch.cuda.get_device_name(task.device)}"
    else:
        ranks = f"process{'es' * (place.world > 1)} of {_threads(place.threads)}"
    return Setting(order.name, place.world, ranks, _whole(task.device), shared_memory=False)


def _whole(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"1 process of {_threads(cores())}"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
