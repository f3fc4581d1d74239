"""``ringattn bench ring`` times whole rings in real processes, next to one device and to other methods."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from ..common import flags
from ..common.launching import run_process_group
from ..common.ranks import launched_rank
from ..common.result import Result, finish_command

DEFAULT_WORLD = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def parse_layouts(text: str) -> list[str]:
    """Parse a comma-separated list of layouts, or ``all`` for all that need no documents."""
    from ..common.attention import DOCUMENT_LAYOUTS

    equal = [layout.value for layout in flags.LayoutName]
    known = [*equal, *DOCUMENT_LAYOUTS]
    names = equal if text == "all" else [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not a layout: pass all, or some of {', '.join(known)}")
    return names


@app.command()
def ring(
    world: Annotated[
        Any,
        typer.Option(
            parser=flags.sizes, metavar="N,…", help="Numbers of processes; default: the launcher's ranks, else 2."
        ),
    ] = None,
    seqlen: Annotated[Any, typer.Option(parser=flags.sizes, metavar="SIZE,…", help="Total tokens.")] = "16k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.DeviceDtype = None,
    causal: flags.Causal = True,
    layout: Annotated[
        Any,
        typer.Option(
            parser=parse_layouts,
            metavar="NAME,…|all",
            help="How tokens are split over the ranks; default: zigzag, or packed and per-document.",
        ),
    ] = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.MeanDocumentLength = None,
    documents_seed: flags.DocumentsSeed = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Run only candidates whose names start with one of these; default: all."),
    ] = None,
    transport: Annotated[str, typer.Option(help="Transport of our ring, as in Ring(transport=).")] = "auto",
    bytes_per_second: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Slow down the links of our rings; CPU only.")
    ] = None,
    repeats: flags.Repeats = 5,
    device: flags.DeviceFlag = "",
    timer: flags.RingTimer = "",
    seed: flags.Seed = 0,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Time forward and backward of a ring over processes, next to other methods for the same attention."""
    import torch

    from ...ring.schedule.layout import resolve_documents
    from ..common.attention import DOCUMENT_LAYOUTS, AttentionConfig, document_boundaries
    from ..common.memory import check_ranks_fit
    from ..common.memory_table import candidate_kind
    from ..common.provenance import provenance
    from . import measure
    from .candidates import select_makers

    place = launched_rank()
    worlds = list(dict.fromkeys(flags.resolve_world(ranks, DEFAULT_WORLD) for ranks in world or [None]))
    kv_heads, device = flags.resolve_kv_heads(heads, kv_heads), flags.parse_device_kind(device)
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    if min(worlds) < 1:
        raise typer.BadParameter(f"--world is {min(worlds)}: it must be at least 1")
    if min(seqlen) < max(worlds):
        raise typer.BadParameter(f"--seqlen is {min(seqlen)}: it must be at least {max(worlds)}, one token per process")
    flags.check_transport_flag(transport, device, max(worlds))
    if bytes_per_second is not None and device != "cpu":
        raise typer.BadParameter("--bytes-per-second slows down only transfers on the CPU. Set --device cpu.")
    if bytes_per_second is not None and min(worlds) == 1:
        raise typer.BadParameter(
            "--world is 1: --bytes-per-second slows down transfers between processes, so it must be at least 2"
        )
    has_documents = cu_seqlens is not None or documents is not None
    layout = layout or ([*DOCUMENT_LAYOUTS] if has_documents else ["zigzag"])
    if not has_documents and {*layout} & {*DOCUMENT_LAYOUTS}:
        raise typer.BadParameter(f"--layout {','.join(layout)} needs --documents or --cu-seqlens")
    boundaries = {}
    for tokens in seqlen:
        try:
            given = document_boundaries(tokens, cu_seqlens, documents, documents_seed)
            boundaries[tokens] = None if given is None else (*resolve_documents(given, tokens).boundaries,)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    prefixes = parse_candidate_prefixes(layout, by, worlds)
    configs = []
    for ranks in worlds:
        problems = tuple(
            AttentionConfig(
                tokens, ranks, batch, heads, kv_heads, head_dim, dtype, causal, layout[0],
                flags.rank_threads(ranks), seed, device, transport, cu_seqlens=boundaries[tokens],
            )
            for tokens in sorted(seqlen)
        )  # fmt: skip
        kinds = list({candidate_kind(name) for name in select_makers(layout, prefixes, [ranks])})
        check_ranks_fit("--seqlen", problems[-1], partial(measure.ring_needs, layouts=layout, kinds=kinds))
        # On the CPU every length runs in new processes, because a reused heap would distort the peaks.
        problem_groups = [(problem,) for problem in problems] if device == "cpu" and place is None else [problems]
        ring_timer = flags.resolve_timer(device, timer, flags.RING_TIMERS)
        configs += [
            measure.RingConfig(group, tuple(layout), repeats, prefixes, ring_timer, bytes_per_second)
            for group in problem_groups
        ]
    result = Result("bench ring", measure.UNITS)
    for config in configs:
        result.add(run_process_group(config.problems[0].world, measure.measure_rings, config, device=device))
    result.notes += [*measure.crossover_notes(result.rows), *measure.fastest_ring_note(result.rows)]
    result.provenance = provenance(torch.device(device))
    finish_command(result, json, csv)


def parse_candidate_prefixes(layouts: list[str], by: str | None, worlds: list[int]) -> tuple[str, ...]:
    """Return the prefixes in ``by``; raise typer.BadParameter if no candidate's name starts with a prefix."""
    from .candidates import select_makers

    known, prefixes = list(select_makers(layouts, (), worlds)), tuple(by.split(",")) if by else ()
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            raise typer.BadParameter(f"--by has {prefix!r}: it must begin one of {', '.join(known)}.")
    return prefixes
