"""``ringattn bench timeline``: when each rank computed, sent, received and waited in one forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...tools.pictures import picture
from ..common.files import read_object
from ..common.flags import check_needs
from ..common.free_memory import free_memory
from ..common.launching import Member, cores, member, world_of
from ..common.memory_room import Needs, free_here, of_ranks
from ..common.output import check_targets, prints, write_json
from ..common.result import Result, finish
from ..common.shapes import LayoutName, device_here, device_name, dtype_name, grouped, size
from ..links.runs import device_of
from ..ring.candidates import Problem
from ..ring.memory import of_ours, refusal
from .events import LANES, PREDICTED, Timeline, as_chrome, call_of, differences, from_chrome
from .runs import measured

DEFAULT_WORLD = 2
UNITS = {"rank": "", **dict.fromkeys(LANES, "ms"), "computing": "%"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def check_room(problem: Problem, device: torch.device, place: Member | None) -> None:
    """Refuse what does not fit this machine's free memory, with the length that does.

    Raises:
        typer.BadParameter: too many tokens.
    """

    def needed(wanted: Problem) -> Needs:
        if place is None and device.type == "cuda":
            return Needs(0, problem.world * of_ours(wanted))  # virtual ranks of this process
        return of_ranks(of_ours(wanted), device, problem.world if place is None else place.local_world)

    why = refusal(problem, free_here(device, free_memory), needed)
    if why is not None:
        raise typer.BadParameter(f"--seqlen: {why}")


def read_timeline(path: Path) -> Timeline:
    """A timeline's file, as an option of a command.

    Raises:
        typer.BadParameter: it cannot be read, or is none.
    """
    try:
        return from_chrome(read_object(path))
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def prediction_of(path: Path, call: Mapping[str, Any]) -> Timeline:
    """A predicted timeline's file, which must be of a call.

    Raises:
        typer.BadParameter: it cannot be read, is measured, or of another call.
    """
    timeline = read_timeline(path)
    if timeline.source != PREDICTED:
        why = f"is {timeline.source}: it takes what `ringattn predict --trace` left"
    elif not call_of(timeline):
        why = "does not say of what call it is: it must be of the one recorded"
    else:
        apart = differences(call, call_of(timeline))
        other = "; ".join(f"{name} {there} there, {here} here" for name, here, there in apart)
        why = f"is of another call: {other}" if apart else ""
    if why:
        raise typer.BadParameter(f"--predicted {path} {why}")
    return timeline


@app.command()
def timeline(
    context: typer.Context,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks; default: 2; under a launcher, its own.")] = None,
    seqlen: Annotated[Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all.")] = "8k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    repeats: Annotated[int, typer.Option(min=1, help="Recorded runs; the one of median length is kept.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU where there is one.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that Perfetto opens.")] = None,
    out: Annotated[Any, typer.Option(parser=picture, metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    predicted: Annotated[Path | None, typer.Option(help="A predicted trace of the same call, drawn below.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write what each rank did as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per rank.")] = None,
) -> None:
    """Record one forward and backward of a ring: every rank's compute, waits, transfers and slots on one clock.

    Alone it starts processes of the CPU, or virtual ranks on the GPU where there is one.
    """
    place, ranks = member(), world_of(member(), world, DEFAULT_WORLD)
    kind, kv_heads = device_name(device or ""), grouped(heads, kv_heads)
    if seqlen < ranks:
        raise typer.BadParameter(f"--seqlen is {seqlen}: {ranks} ranks need a token each")
    threads = threads or max(1, cores() // (place.local_world if place is not None else ranks))
    problem = Problem(
        seqlen, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, threads, seed, kind
    )  # fmt: skip
    check_needs(context, {"predicted": "out"})
    below = None if predicted is None else prediction_of(predicted, asdict(problem))
    check_targets(trace, out, json, csv)
    where = device_here(kind) if place is None else device_of(place, kind)
    check_room(problem, where, place)
    recorded = measured(place, problem, where, repeats)
    if recorded is None or not prints():
        return
    if trace is not None:
        write_json(trace, as_chrome(recorded))
    if out is not None:
        from ..report.timelines import save

        save([recorded] if below is None else [recorded, below], out)
    finish(result_of(recorded), json, csv)


def result_of(timeline: Timeline) -> Result:
    """What each rank did with its time."""
    length = timeline.seconds
    rows = []
    for rank in range(timeline.world):
        spans = [event for event in timeline.events if event.rank == rank]
        lanes = {lane: sum(event.seconds for event in spans if event.lane == lane) for lane in LANES}
        share = 100 * lanes["compute"] / length if length else 0.0
        rows.append({"rank": rank, **{lane: seconds * 1e3 for lane, seconds in lanes.items()}, "computing": share})
    notes = [timeline.title, f"clocks of the ranks agree to {timeline.about['clock_error']:.1e} s"]
    computing = sum(row["computing"] for row in rows) / len(rows)
    notes.append(f"ranks compute {computing:.1f}% of {length * 1e3:.4g} ms")
    return Result("bench timeline", UNITS, [*rows], notes=notes, provenance=timeline.about["provenance"])
