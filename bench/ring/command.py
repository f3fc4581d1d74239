"""``ringattn bench ring``: whole rings in real processes, beside one device, ways around a ring, and other rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...comm.groups import TRANSPORTS
from ..common.free_memory import free_memory
from ..common.launching import cores, member, started, world_of
from ..common.memory_room import Needs, free_here, gpus_of, own_device
from ..common.output import check_targets
from ..common.provenance import provenance
from ..common.result import Result, finish
from ..common.shapes import (
    LayoutName,
    TimerOfRings,
    check_transport,
    device_name,
    dtype_name,
    grouped,
    sizes,
    timer_of_rings,
)
from . import memory as ring_memory
from .candidates import ALL_CORES, OURS, Problem, chosen, makers
from .runs import UNITS, RingConfig, best, crossovers, measure, spawned

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
    kv_heads, device = grouped(heads, kv_heads), device_name(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    check(worlds, seqlen, layout, by)
    check_transport(transport, device, max(worlds))
    check_targets(json, csv)
    prefixes = tuple(by.split(",")) if by else ()
    configs = []
    for ranks in worlds:
        ranks_here = place.local_world if place is not None else ranks
        threads_each = threads or max(1, cores() // ranks_here)
        problems = tuple(
            Problem(
                tokens, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout[0], threads_each, seed, device,
                transport,
            )
            for tokens in sorted(seqlen)
        )  # fmt: skip
        for problem in problems:
            refuse_too_large(problem, layout, prefixes, ranks_here)
        configs.append(RingConfig(problems, tuple(layout), repeats, prefixes, timer_of_rings(device, timer)))
    result = Result("bench ring", UNITS)
    for config in configs:
        part = started(config.problems[0].world, spawned, config) if place is None else measure(place, config)
        result.rows += part.rows
        result.notes += [note for note in part.notes if note not in result.notes]
        result.failed += part.failed
    result.notes += [*crossovers(result.rows), best(result.rows)]
    result.provenance = provenance(torch.device(device))
    finish(result, json, csv)


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


def refuse_too_large(problem: Problem, layouts: Sequence[str], by: Sequence[str], ranks_here: int) -> None:
    """Stop before anything starts where this machine's memory does not hold it: typer.BadParameter."""
    kinds = list(dict.fromkeys(OURS if name.startswith(f"{OURS} ") else name for name in chosen(layouts, by)))
    if problem.device != "cpu":
        kinds = [kind for kind in kinds if kind != ALL_CORES]
    gpus = gpus_of(ranks_here) if problem.device == "cuda" else 1
    needed: Callable[[Problem], Needs] = partial(
        ring_memory.needs, layouts=layouts, kinds=kinds, ranks_here=ranks_here, ranks_per_gpu=-(-ranks_here // gpus)
    )
    here = torch.device(problem.device)
    why = ring_memory.refusal(problem, free_here(own_device(here), free_memory), needed)
    if why is not None:
        raise typer.BadParameter(f"--seqlen: {why}")
