"""``ringattn bench timeline`` records when each rank computes, sends, receives and waits in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.output import check_writable, is_printing_rank, write_json
from ..common.ranks import launched_rank
from ..common.result import Result, finish_command
from ..common.theme import parse_picture_path

if TYPE_CHECKING:
    from .events import Timeline

DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def timeline_command(
    world: Annotated[int | None, typer.Option(min=1, help="Ranks; default: 2, or the launcher's.")] = None,
    seqlen: Annotated[Any, typer.Option(parser=flags.parse_size_text, metavar="SIZE", help="Total tokens.")] = "8k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.Dtype = "fp32",
    causal: flags.Causal = True,
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    repeats: Annotated[int, typer.Option(min=1, help="Recorded runs; the run with the median length is kept.")] = 5,
    seed: flags.Seed = 0,
    device: flags.DeviceFlag = "",
    trace: flags.Trace = None,
    out: Annotated[
        Any,
        typer.Option(parser=parse_picture_path, metavar="FILE", help="Draw the timeline to a .svg, .png or .pdf file."),
    ] = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Record one forward and backward of a ring: compute, waits, transfers and slots of every rank, on one clock.

    Without a launcher the ranks are virtual ranks on the GPU, or processes if there is no GPU.
    """
    from ..common.attention import AttentionConfig
    from . import record
    from .events import as_chrome

    place, ranks = launched_rank(), flags.resolve_world(world, DEFAULT_WORLD)
    device, kv_heads = flags.parse_device_kind(device), flags.resolve_kv_heads(heads, kv_heads)
    if seqlen < ranks:
        raise typer.BadParameter(f"--seqlen is {seqlen}: it must be at least {ranks}, one token per rank")
    problem = AttentionConfig(
        seqlen, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout.value,
        flags.rank_threads(ranks), seed, device,
    )  # fmt: skip
    check_writable(out)
    recorded = record.run_timeline(place, problem, repeats)
    if recorded is None or not is_printing_rank():
        return
    if trace is not None:
        write_json(trace, as_chrome(recorded))
    if out is not None:
        from ..common.theme import write_figure
        from .drawing import draw_timeline_figure

        write_figure(draw_timeline_figure([recorded]), out, dpi=140)
    finish_command(timeline_result(recorded), json, csv)


def timeline_result(timeline: Timeline) -> Result:
    """Return a row per rank with the time on each lane, and notes with title, clock error and share of compute."""
    from .events import LANES

    length = timeline.seconds
    rows = []
    for rank in range(timeline.world):
        spans = [event for event in timeline.events if event.rank == rank]
        lanes = {lane: sum(event.seconds for event in spans if event.lane == lane) for lane in LANES}
        share = 100 * lanes["compute"] / length if length else 0.0
        rows.append({"rank": rank, **{lane: seconds * 1e3 for lane, seconds in lanes.items()}, "computing": share})
    notes = [timeline.title, f"clocks of the ranks agree within {timeline.about['clock_error']:.1e} s"]
    computing = sum(row["computing"] for row in rows) / len(rows)
    notes.append(f"ranks compute {computing:.1f}% of {length * 1e3:.4g} ms")
    units = {"rank": "", **dict.fromkeys(LANES, "ms"), "computing": "%"}
    return Result("bench timeline", units, [*rows], notes=notes, provenance=timeline.about["provenance"])
