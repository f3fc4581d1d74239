"""``ringattn bench ring``: whole rings in real processes, beside one device, ways around a ring, and other rings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...comm.groups import TRANSPORTS
from ..common.attention import AttentionConfig
from ..common.flags import (
    LayoutName,
    TimerOfRings,
    check_transport,
    device_name,
    dtype_name,
    kv_heads_of,
    sizes,
    timer_of_rings,
)
from ..common.launching import cores, member, started, world_of
from ..common.memory import Needs, free_here, gpus_of
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.provenance import provenance
from . import memory as ring_memory
from .candidates import ALL_CORES, OURS, WHOLE, makers
from .rows import as_json, rows_of, text
from .runs import Report, Wish, measure, spawned

SCHEMA = "ringattn bench ring 2"
DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def layout_names(text: str) -> list[str]:
    """A comma list of layouts, or ``all``; a parser of typer options.

    Raises:
        typer.BadParameter: no such layout.
    """
    known = [one.value for one in LayoutName]
    names = known if text == "all" else [part.strip() for part in text.split(",")]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is no layout: it takes all, or some of {', '.join(known)}")
    return names


@app.command()
def ring(
    world: Annotated[
        Any, typer.Option(parser=sizes, metavar="N,…", help="Processes; default: 2; under a launcher, its ranks.")
    ] = None,
    seqlen: Annotated[Any, typer.Option(parser=sizes, metavar="SIZE,…", help="Tokens in all.")] = "16k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16, fp16; default: bf16; on the CPU fp32."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[
        Any, typer.Option(parser=layout_names, metavar="NAME,…|all", help="Who holds which tokens.")
    ] = "zigzag",
    by: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Only candidates whose name starts so, beside one device.")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="|".join(TRANSPORTS), help="Of our ring.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Default: the GPU where there is one.")] = "",
    timer: TimerOfRings = "",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per world, length and candidate.")] = None,
) -> None:
    """Forward and backward of one attention, sharded over processes, beside the same attention done otherwise."""
    place = member()
    worlds = list(dict.fromkeys(world_of(place, one, DEFAULT_WORLD) for one in world or [None]))
    kv_heads, device = kv_heads_of(heads, kv_heads), device_name(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    check(worlds, seqlen, layout, by)
    check_transport(transport, device, max(worlds))
    timer = timer_of_rings(device, timer)
    check_targets(json, csv)
    reports: list[Report] = []
    wishes = []
    for ranks in worlds:
        share = threads or max(1, cores() // (place.local_world if place is not None else ranks))
        first = AttentionConfig(
            min(seqlen),
            ranks,
            batch,
            heads,
            kv_heads,
            head_dim,
            dtype,
            causal,
            layout[0],
            share,
            seed,
            device,
            transport,
        )
        problems = tuple(replace(first, seqlen=tokens) for tokens in sorted(seqlen))
        wishes.append(Wish(problems, tuple(layout), repeats, tuple(by.split(",")) if by else (), timer))
        for problem in problems:
            refuse_too_large(problem, layout, wishes[-1].by, place.local_world if place is not None else ranks)
    for wish in wishes:
        reports += started(wish.problems[0].world, spawned, wish) if place is None else measure(place, wish)
    if prints():
        finish(reports, device, timer, json, csv)


def check(worlds: Sequence[int], lengths: Sequence[int], layouts: Sequence[str], by: str | None) -> None:
    """Refuse what no measurement could be made of."""
    if min(worlds) < 1:
        raise typer.BadParameter(f"--world is {min(worlds)}: it takes at least one process")
    if min(lengths) < max(worlds):
        raise typer.BadParameter(f"--seqlen is {min(lengths)}: {max(worlds)} processes need a token each")
    known = list(makers(layouts))
    for name in by.split(",") if by else ():
        if not any(one.startswith(name) for one in known):
            raise typer.BadParameter(f"--by has {name!r}: there are {', '.join(known)}")


def refuse_too_large(problem: AttentionConfig, layouts: Sequence[str], by: Sequence[str], ranks_here: int) -> None:
    """Stop before anything starts where this machine's memory does not hold it: typer.BadParameter."""
    names = [one for one in makers(layouts) if not by or one == WHOLE or any(one.startswith(part) for part in by)]
    kinds = list(dict.fromkeys(OURS if name.partition(" ")[0] == OURS else name for name in names))
    if problem.device != "cpu":
        kinds = [kind for kind in kinds if kind != ALL_CORES]
    gpus = gpus_of(ranks_here) if problem.device == "cuda" else 1
    needed: Callable[[AttentionConfig], Needs] = partial(
        ring_memory.needs, layouts=layouts, kinds=kinds, ranks_here=ranks_here, ranks_per_gpu=-(-ranks_here // gpus)
    )
    here = torch.device(problem.device)
    why = ring_memory.refusal(problem, free_here(here), needed)
    if why is not None:
        raise typer.BadParameter(f"--seqlen: {why}")


def finish(reports: Sequence[Report], device: str, timer: str, json: str | None, csv: Path | None) -> None:
    """Print and write; exit 1 where a result that must agree does not."""
    if json != "-":
        typer.echo(text(reports))
    if json is not None:
        about = provenance(torch.device(device))
        write_json(json, {"schema": SCHEMA, "provenance": about, "timer": timer, **as_json(reports)})
    if csv is not None:
        rows = [row for report in reports for row in rows_of(report)]
        write_csv(csv, [{"candidate" if key == "" else key: value for key, value in row.items()} for row in rows])
    if any(one.disagrees and one.trusted for report in reports for one in report.found.values()):
        print("a result differs from PyTorch's by more than rounding: see `agrees`", file=sys.stderr)
        raise typer.Exit(1)
