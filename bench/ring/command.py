"""``ringattn bench ring`` times whole rings in real processes, next to one device and to other methods."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from ..common import flags
from ..common.launching import spawn
from ..common.ranks import member
from ..common.result import Result, finish

DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def layout_names(text: str) -> list[str]:
    """Parse a comma-separated list of layouts, or ``all``."""
    known = [layout.value for layout in flags.LayoutName]
    names = known if text == "all" else [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not a layout: it takes all, or some of {', '.join(known)}")
    return names


@app.command()
def ring(
    world: Annotated[
        Any,
        typer.Option(
            parser=flags.sizes, metavar="N,…", help="Numbers of processes; default: 2, or a launcher's ranks."
        ),
    ] = None,
    seqlen: Annotated[Any, typer.Option(parser=flags.sizes, metavar="SIZE,…", help="Total tokens.")] = "16k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.DtypeOfDevice = None,
    causal: flags.Causal = True,
    layout: Annotated[
        Any, typer.Option(parser=layout_names, metavar="NAME,…|all", help="How tokens are split over the ranks.")
    ] = "zigzag",
    by: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Candidates to run, by the beginning of their names; default: all."),
    ] = None,
    transport: Annotated[str, typer.Option(help="Transport of our ring, as in Ring(transport=).")] = "auto",
    bytes_per_second: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Slow down the links of our rings; CPU only.")
    ] = None,
    repeats: flags.Repeats = 5,
    threads: flags.Threads = None,
    device: flags.DeviceFlag = "",
    timer: flags.TimerOfRings = "",
    seed: flags.Seed = 0,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Time forward and backward of a ring over processes, next to other methods for the same attention."""
    import torch

    from ..common.attention import AttentionConfig
    from ..common.memory import refuse_ranks
    from ..common.memory_table import kind_of
    from ..common.provenance import provenance
    from . import runs
    from .candidates import chosen

    place = member()
    worlds = list(dict.fromkeys(flags.resolve_world(ranks, DEFAULT_WORLD) for ranks in world or [None]))
    kv_heads, device = flags.kv_heads_of(heads, kv_heads), flags.device_name(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if min(worlds) < 1:
        raise typer.BadParameter(f"--world is {min(worlds)}: it must be at least 1")
    if min(seqlen) < max(worlds):
        raise typer.BadParameter(
            f"--seqlen is {min(seqlen)}: it must be at least one token for each of {max(worlds)} processes"
        )
    flags.check_transport(transport, device, max(worlds))
    if bytes_per_second is not None and device != "cpu":
        raise typer.BadParameter("--bytes-per-second slows only transfers on the CPU: set --device cpu")
    if bytes_per_second is not None and min(worlds) == 1:
        raise typer.BadParameter(
            "--bytes-per-second slows transfers between processes, and --world is 1: set --world 2 or more"
        )
    prefixes = chosen_prefixes(layout, by, worlds)
    configs = []
    for ranks in worlds:
        problems = tuple(
            AttentionConfig(
                tokens, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout[0],
                flags.resolve_threads(threads, ranks), seed, device, transport,
            )
            for tokens in sorted(seqlen)
        )  # fmt: skip
        kinds = list({kind_of(name) for name in chosen(layout, prefixes, [ranks])})
        refuse_ranks("--seqlen", problems[-1], partial(runs.needs, layouts=layout, kinds=kinds))
        # On the CPU every length runs in new processes, because a reused heap would distort the peaks.
        problem_groups = [(problem,) for problem in problems] if device == "cpu" and place is None else [problems]
        timer_of_ranks = flags.timer_of_rings(device, timer)
        configs += [
            runs.RingConfig(group, tuple(layout), repeats, prefixes, timer_of_ranks, bytes_per_second)
            for group in problem_groups
        ]
    result = Result("bench ring", runs.UNITS)
    for config in configs:
        result.add(spawn(config.problems[0].world, runs.measure, config, device=device))
    result.notes += [*runs.crossovers(result.rows), *runs.best(result.rows)]
    result.provenance = provenance(torch.device(device))
    finish(result, json, csv)


def chosen_prefixes(layouts: list[str], by: str | None, worlds: list[int]) -> tuple[str, ...]:
    """Return the name prefixes of ``--by``; raise typer.BadParameter if one starts no candidate's name."""
    from .candidates import chosen

    known, prefixes = list(chosen(layouts, (), worlds)), tuple(by.split(",")) if by else ()
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            raise typer.BadParameter(f"--by has {prefix!r}: it takes beginnings of {', '.join(known)}")
    return prefixes
