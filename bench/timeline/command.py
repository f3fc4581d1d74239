"""``ringattn bench timeline``: when each rank computed, sent, received and waited in one forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.launching import Member, cores, member, world_of
from ..common.output import check_targets, prints, write_json
from ..common.result import Result, finish

if TYPE_CHECKING:
    from ..common.attention import AttentionConfig
    from .events import Timeline

DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def picture_file(text: str) -> Path:
    """The path of a picture that can be drawn; a parser of typer options."""
    from ..report.theme import picture

    return picture(text)


def read_timeline(path: Path) -> Timeline:
    """A timeline's file, as an option of a command.

    Raises:
        typer.BadParameter: it cannot be read, or is none.
    """
    from ..common.files import read_object
    from .events import from_chrome

    try:
        return from_chrome(read_object(path))
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def prediction_of(path: Path, call: Mapping[str, Any]) -> Timeline:
    """A predicted timeline's file, which must be of a call.

    Raises:
        typer.BadParameter: it cannot be read, is measured, or of another call.
    """
    from .events import PREDICTED, call_of, differences

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
    seqlen: Annotated[Any, typer.Option(parser=flags.size, metavar="SIZE", help="Tokens in all.")] = "8k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.Dtype = "fp32",
    causal: flags.Causal = True,
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    repeats: Annotated[int, typer.Option(min=1, help="Recorded runs; the one of median length is kept.")] = 5,
    threads: flags.Threads = None,
    seed: flags.Seed = 0,
    device: flags.DeviceFlag = "",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace that Perfetto opens.")] = None,
    out: Annotated[Any, typer.Option(parser=picture_file, metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    predicted: Annotated[Path | None, typer.Option(help="A predicted trace of the same call, drawn below.")] = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Record one forward and backward of a ring: every rank's compute, waits, transfers and slots on one clock.

    Alone it starts processes of the CPU, or virtual ranks on the GPU where there is one.
    """
    from ..common.attention import AttentionConfig
    from .events import as_chrome
    from .runs import call_data

    flags.check_needs(context, {"predicted": "out"})
    place, ranks = member(), world_of(member(), world, DEFAULT_WORLD)
    device, kv_heads = flags.device_name(device), flags.kv_heads_of(heads, kv_heads)
    if seqlen < ranks:
        raise typer.BadParameter(f"--seqlen is {seqlen}: {ranks} ranks need a token each")
    threads = threads or max(1, cores() // (place.local_world if place is not None else ranks))
    problem = AttentionConfig(
        seqlen, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, threads, seed, device
    )  # fmt: skip
    below = None if predicted is None else prediction_of(predicted, call_data(problem))
    check_targets(trace, out)
    recorded = measured(place, problem, repeats)
    if recorded is None or not prints():
        return
    if trace is not None:
        write_json(trace, as_chrome(recorded))
    if out is not None:
        from ..report.timelines import save

        save([recorded] if below is None else [recorded, below], out)
    finish(result_of(recorded), json, csv)


def measured(place: Member | None, problem: AttentionConfig, repeats: int) -> Timeline | None:
    """The timeline, on rank 0; with the error of a rank that fails, and exit code 1."""
    from . import runs

    device = flags.device_here(problem.device) if place is None else place.shared_device(problem.device)
    runs.check_room(problem, device, place)
    return runs.measured(place, problem, device, repeats)


def result_of(timeline: Timeline) -> Result:
    """What each rank did with its time."""
    from .events import LANES

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
    units = {"rank": "", **dict.fromkeys(LANES, "ms"), "computing": "%"}
    return Result("bench timeline", units, [*rows], notes=notes, provenance=timeline.about["provenance"])
