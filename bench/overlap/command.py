"""``ringattn bench overlap``: compute alone, communication alone, together; what buffers and prefetch are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...ring.ring import depth_of
from ..common.flags import check_mode
from ..common.launching import cores, member, started, world_of
from ..common.output import check_targets
from ..common.provenance import provenance
from ..common.result import finish
from ..common.shapes import (
    LayoutName,
    TimerOfRings,
    check_chunks,
    check_transport,
    count,
    device_name,
    dtype_name,
    grouped,
    sizes,
    timer_of_rings,
)
from ..ring.candidates import Problem
from .memory import check_room
from .runs import LINK_SHARE, OverlapConfig, Setting, measure, spawned

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def overlap(
    context: typer.Context,
    world: Annotated[int | None, typer.Option(min=1, help="Processes; default: the GPUs, or 2; or its ranks.")] = None,
    tokens: Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")] = "2k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[
        str | None, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16 [CPU: fp32, GPU: bf16].")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    slots: Annotated[Any, typer.Option(parser=sizes, metavar="N,…", help="Buffers of K/V.")] = "1,2,3",
    prefetch: Annotated[Any, typer.Option(parser=sizes, metavar="N,…", help="Hops ahead; 0: blocking.")] = "0,1,2",
    chunks: Annotated[
        Any, typer.Option(parser=sizes, metavar="N,…", help="Runs of heads that a hop is cut into.")
    ] = "1,2",
    link_share: Annotated[
        float | None,
        typer.Option(min=0.01, help="Throttle the link: communication alone over compute alone. [CPU: 0.8]"),
    ] = None,
    transport: Annotated[str, typer.Option(help="As of Ring; default: process_group on the CPU, else auto.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    timer: TimerOfRings = "",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; medians count.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per ring and phase.")] = None,
) -> None:
    """What a ring hides of its communication, for every number of buffers and every depth of prefetch."""
    device = device_name(device)
    if device == "cuda":
        check_mode(context, "on a GPU, whose links are not throttled", context.params.keys() - {"link_share"})
    place = member()
    world = world_of(place, world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    ranks_here = world if place is None else place.local_world
    kv_heads = grouped(heads, kv_heads)
    check_chunks(chunks, kv_heads)
    check_targets(json, csv)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    transport = transport or ("auto" if device == "cuda" else "process_group")
    threads = threads or max(1, cores() // ranks_here)
    config = OverlapConfig(
        Problem(
            world * tokens, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, threads, seed, device,
            transport,
        ),
        slots=tuple(slots),
        prefetch=tuple(prefetch),
        chunks=tuple(chunks),
        repeats=repeats,
        link_share=None if device == "cuda" else link_share or LINK_SHARE,
        timer=timer_of_rings(device, timer),
    )  # fmt: skip
    check_transport(transport, device, world)
    check_settings(config.settings, world)
    check_room(config.problem, config.settings, ranks_here)
    result = started(world, spawned, config) if place is None else measure(place, config)
    result.provenance = provenance(torch.device(device))
    finish(result, json, csv)


def check_settings(settings: Sequence[Setting], world: int) -> None:
    """Refuse a choice of which no ring can be made: there would be nothing to time.

    Raises:
        typer.BadParameter: why, of every one.
    """
    why = []
    for slots, prefetch, _ in settings:
        try:
            depth_of(slots, prefetch, world)
        except ValueError as error:
            why.append(str(error))
        else:
            return
    raise typer.BadParameter(f"no ring can be made with these --slots and --prefetch: {'; '.join(dict.fromkeys(why))}")
