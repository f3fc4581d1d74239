"""``ringattn bench kernels``: our kernels beside PyTorch's backends on one device; any dtype, head dim and mask."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ...kernels.checks import MAX_HEAD_DIM
from ..common.attention import boundaries_of
from ..common.flags import (
    TIMERS,
    BlockMaskPattern,
    CuSeqlens,
    DocumentsOfMean,
    DocumentsSeed,
    PrefixLength,
    SeqUsedK,
    Window,
    counts,
    dtype_name,
    head_dims,
    kv_heads_of,
)
from ..common.launching import member
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.provenance import provenance
from ..common.tables import table
from ..common.timing import Clock
from ..suite.cases import Number
from . import speed
from .contender import OURS
from .memory import Field, check_room
from .rivals import contenders
from .shape import Shape

SCHEMA = "ringattn bench kernels 1"
DEFAULTS = {"cuda": ("8k,16k", "bf16", 16), "cpu": ("1k,2k", "fp32", 4)}
"""Lengths, dtype and heads where nothing is said."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def dtypes(text: str) -> list[str]:
    """A comma list of dtypes; a parser of typer options."""
    return [dtype_name(part.strip()) for part in text.split(",")]


@app.command()
def kernels(
    seqlen: Annotated[
        Any, typer.Option(parser=counts, metavar="SIZE,…", help="Tokens; default: 8k,16k; on the CPU 1k,2k.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; default: 16; on the CPU 4.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[Any, typer.Option(parser=head_dims, metavar="N,…", help="Of q and k.")] = "64,128",
    value_dim: Annotated[int | None, typer.Option(min=1, max=MAX_HEAD_DIM, help="Of v; default: --head-dim.")] = None,
    dtype: Annotated[
        Any, typer.Option(parser=dtypes, metavar="DTYPE,…", help="fp32, bf16, fp16; default: bf16; on the CPU fp32.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    window: Window = None,
    cu_seqlens: CuSeqlens = None,
    documents: DocumentsOfMean = None,
    documents_seed: DocumentsSeed = None,
    seqused_k: SeqUsedK = None,
    prefix_length: PrefixLength = None,
    block_mask: BlockMaskPattern = None,
    by: Annotated[str | None, typer.Option(metavar="NAME,…", help="These contenders alone.")] = None,
    timer: Annotated[
        str | None, typer.Option(metavar="|".join(TIMERS), help="Default: events; on the CPU clock.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Of timing per shape.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per shape, pass and contender.")] = None,
) -> None:
    """Forward, forward with a carried state and backward: ms, TFLOP/s, percent of a matrix product, errors."""
    if not prints():
        return  # one device: under a launcher rank 0 measures, and the others have nothing to do
    check_targets(json, csv)
    device = here()
    usual = DEFAULTS[device.type]
    torch.manual_seed(seed)
    try:
        clock = Clock(device, timer=timer or "")
        shapes = [
            Shape(
                tokens, heads or usual[2], kv_heads_of(heads or usual[2], kv_heads), dim, value_dim or 0, kind, causal,
                window or (-1, -1), _boundaries(tokens, cu_seqlens, documents, documents_seed), prefix_length,
                block_mask, batch, None if seqused_k is None else tuple(seqused_k),
            )
            for kind, dim, tokens in product(dtype or dtypes(usual[1]), head_dim, seqlen or counts(usual[0]))
        ]  # fmt: skip
        for shape in shapes:
            _ = shape.mask
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    names = chosen(device, by)
    check_room(shapes, Field.of(device, names))
    found: list[Number] = []
    with Console(stderr=True).status("measuring") as status:
        for shape in shapes:
            status.update(", ".join(f"{name} {value}" for name, value in shape.labels.items()))
            found += speed.measured(shape, clock, seconds=seconds, by=names)
    finish(found, clock, json, csv)


def _boundaries(tokens: int, given: list[int] | None, mean: int | None, seed: int | None) -> tuple[int, ...] | None:
    found = boundaries_of(tokens, given, mean, seed)
    return None if found is None else tuple(found)


def here() -> torch.device:
    """This process's GPU where there is one, else the CPU."""
    place = member()
    if place is not None:
        return place.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def chosen(device: torch.device, by: str | None) -> tuple[str, ...]:
    """The contenders that ``--by`` names; none: all.

    Raises:
        typer.BadParameter: one that there is not.
    """
    known = [one.name for one in contenders(device)]
    names = tuple(part.strip() for part in by.split(",")) if by else ()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"--by has {unknown[0]!r}: on {device.type} there are {', '.join(known)}")
    return names


def finish(found: list[Number], clock: Clock, json: str | None, csv: Path | None) -> None:
    """Print and write; exit 1 where a result of ours errs by more than rounding explains, or is not there."""
    told = speed.rows(found)
    if json != "-":
        typer.echo(text(told, found, clock))
    if json is not None:
        data = {"schema": SCHEMA, "provenance": provenance(clock.device), "timer": clock.timer}
        write_json(json, {**data, "numbers": [number.as_json() for number in found]})
    if csv is not None:
        write_csv(csv, told)
    missing = [number for number in found if number.name == speed.ABSENT and number.labels["by"] == OURS]
    if missing or any(number.fails for number in found):
        typer.echo("a result of ringattn errs by more than rounding (!), or is not there: see the table", err=True)
        raise typer.Exit(1)


def text(told: list[dict[str, Any]], found: list[Number], clock: Clock) -> str:
    """The table; what is the same in all rows is told once, above it."""
    same = {name for name in told[0] if len({str(row[name]) for row in told}) == 1} if len(told) > 1 else set()
    above = ", ".join(f"{name} {told[0][name]}" for name in told[0] if name in same and told[0][name] not in ("", None))
    rows = [{name: value for name, value in row.items() if name not in same} for row in told]
    products = [number for number in found if number.name == speed.PRODUCT and number.value is not None]
    rates = ", ".join(f"{number.labels['dtype']} {number.value:.4g} TFLOP/s" for number in products)
    title = f"{above}; medians of interleaved runs by {clock.timer}; matrix product in the same runs: {rates}\n"
    return table(rows, title=title)
