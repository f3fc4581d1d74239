"""``ringattn show``: who computes what at which hop, and what moves, as text, picture, JSON or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.common.call import Call, data, mask_cells, table
from ..bench.common.flops import BACKWARD_FLOPS
from ..bench.common.masks import boundaries_of, pattern_of
from ..bench.common.output import check_targets, prints, write_csv, write_json
from ..bench.common.shapes import (
    BlockMaskPattern,
    Causal,
    CuSeqlens,
    DocumentsOfMean,
    DocumentsSeed,
    LayoutName,
    PrefixLength,
    SeqUsedK,
    Window,
    grouped,
    human,
    size,
    sizes,
)
from ..ring.args import Layouts, mask_of
from ..ring.schedule.layout import Layout
from ..ring.schedule.mask import UNLIMITED, Mask
from ..ring.schedule.text import shown
from .pictures import draw_call, picture

LEAST_CELLS, MOST_CELLS = 16, 32  # of a mask on the terminal, each way
HOP_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def mask_text(call: Call) -> list[str]:
    """The mask on the terminal: rows are queries, columns keys, a mark is the hop."""
    ranks, grid = mask_cells(call, min(max(4 * call.layout.world, LEAST_CELLS), MOST_CELLS))
    owners = " ".join(_mark(rank) for rank in ranks)
    rows = [f"{f'rank {rank}':<9}" + " ".join(_mark(hop) for hop in row) for rank, row in zip(ranks, grid, strict=True)]
    return [
        "mask: rows are queries and their rank, columns keys and their shard; the hop that computes, . unseen",
        " " * 9 + owners,
        *(row.rstrip() for row in rows),
    ]


def _mark(number: int) -> str:
    return "." if number < 0 else HOP_MARKS[number] if number < len(HOP_MARKS) else "+"


def ranks_text(call: Call) -> list[str]:
    """What each rank computes and sends."""
    kv, sums = call.bytes_per_token
    moved = {"sends forward": call.plan.bytes(kv), "sends backward": call.plan.bytes(kv, sums)}
    if call.nodes > 1:
        forward, backward = call.plan.bytes(kv, level=1), call.plan.bytes(kv, sums, level=1)
        moved |= {"by rail forward": forward, "by rail backward": backward}
    pairs = call.pairs.sum(axis=1)
    total = max(int(pairs.sum()), 1)
    rows = [["", "tokens", "visible pairs", "share", "forward", "backward", *moved]]
    for rank in shown(call.layout.world):
        if rank is None:
            rows.append(["…"] * len(rows[0]))
            continue
        flops = int(pairs[rank]) * call.flops_per_pair
        work = [human(flops, "FLOP"), human(flops * BACKWARD_FLOPS, "FLOP")]
        sent = [human(counts[rank], "B") for counts in moved.values()]
        tokens = call.layout.lengths[rank]
        rows.append([f"rank {rank}", f"{tokens:,}", f"{pairs[rank]:,}", f"{pairs[rank] / total:.1%}", *work, *sent])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def summary(call: Call) -> str:
    """The call and its totals, in a few lines."""
    kv, sums = call.bytes_per_token
    full = call.plan_of(Mask())
    passes = [
        (name, call.plan.bytes(kv, more), full.bytes(kv, more)) for name, more in (("forward", 0), ("backward", sums))
    ]
    moved = ", ".join(f"{_part(sum(sent), sum(most))} {name}" for name, sent, most in passes)
    by_a_rank = ", ".join(f"{_part(max(sent), max(most))} {name}" for name, sent, most in passes)
    across, of = "", "" if call.mask.used is None else " of all batch rows"
    if call.nodes > 1:
        there, back_there = sum(call.plan.bytes(kv, level=1)), sum(call.plan.bytes(kv, sums, level=1))
        across = f"; of it between nodes: {human(there, 'B')} forward, {human(back_there, 'B')} backward"
    return (
        f"{call.title}; batch {call.batch}, {call.heads} heads ({call.kv_heads} of K/V) of dim {call.head_dim}, "
        f"{call.dtype}\n"
        f"moves in all, of a full ring: {moved}{across}\n"
        f"a rank sends at most: {by_a_rank}\n"
        f"{int(call.pairs.sum()):,} visible pairs{of}; ranks compute {call.balance:.0%} of the time, if every hop "
        "lasts as long as its slowest rank"
    )


def _part(count: int, whole: int) -> str:
    return human(count, "B") + (f" ({count / whole:.1%})" if whole else "")


def text(call: Call) -> str:
    """Everything, for the terminal."""
    parts = [summary(call), str(call.plan), "\n".join(ranks_text(call)), "\n".join(mask_text(call))]
    return "\n\n".join(parts)


def _layout(
    seqlen: int,
    world: int | None,
    name: LayoutName | None,
    lengths: Sequence[int] | None,
    documents: Sequence[int] | None,
) -> tuple[Layout, str]:
    """The layout and what it is called; ``documents`` are the boundaries to cut at, where these are asked for."""
    if lengths is not None:
        return Layout.uneven(lengths), "uneven"
    name, world = name or LayoutName.zigzag, 4 if world is None else world
    if documents is not None:
        return Layout.zigzag(seqlen, world, documents), "zigzag per document"
    made: Layout = getattr(Layout, name)(seqlen, world)
    return made, name.value


@app.command()
def show(
    seqlen: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Tokens in all (8k where left out).")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks (4 where left out).")] = None,
    layout: Annotated[LayoutName | None, typer.Option(help="Who holds which tokens (zigzag where left out).")] = None,
    lengths: Annotated[
        Any,
        typer.Option(parser=sizes, metavar="SIZE,…", help="Uneven shards in rank order, in place of the three above."),
    ] = None,
    per_document: Annotated[
        bool, typer.Option("--per-document", help="A zigzag of every document, in place of one of the whole.")
    ] = False,
    causal: Causal = False,
    window: Window = None,
    cu_seqlens: CuSeqlens = None,
    documents: DocumentsOfMean = None,
    documents_seed: DocumentsSeed = None,
    seqused_k: SeqUsedK = None,
    prefix_length: PrefixLength = None,
    block_mask: BlockMaskPattern = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Equal nodes; several make a ring of rings (1 where left out).")
    ] = 1,
    direction: Annotated[int, typer.Option(help="1: K/V move to the next rank, -1: to the one before.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of K and V (as many as --heads where left out).")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Of q, k and v.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="What K and V travel as.")] = Dtype.bfloat16,
    out: Annotated[
        Path | None, typer.Option(parser=picture, metavar="FILE", help="Draw both into a .png, .svg or .pdf.")
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per rank and hop.")] = None,
) -> None:
    """Print or draw the schedule and the mask of any call: who computes what at which hop, and what moves."""
    check_targets(out, json, csv)
    if lengths is not None and (seqlen, world, layout) != (None, None, None):
        raise typer.BadParameter("--lengths says everything: leave out --seqlen, --world and --layout")
    tokens = sum(lengths) if lengths is not None else 8192 if seqlen is None else seqlen
    try:
        boundaries = boundaries_of(tokens, cu_seqlens, documents, documents_seed)
        if per_document and (boundaries is None or lengths is not None or layout not in (None, LayoutName.zigzag)):
            raise ValueError(
                "--per-document is a zigzag of --documents or --cu-seqlens: pass these, and no other layout"
            )
        held, name = _layout(tokens, world, layout, lengths, boundaries if per_document else None)
        if not held.seqlen:
            raise ValueError("there are 0 tokens: a call has at least one")
        mask = mask_of(
            Layouts(held, held),
            batch,
            causal=causal,
            window_size=window or (UNLIMITED, UNLIMITED),
            cu_seqlens=boundaries,
            seqused_k=seqused_k,
            prefix_length=prefix_length,
            block_mask=pattern_of(tokens, block_mask),
        )
        kv_heads = grouped(heads, kv_heads)
        call = Call(held, name, mask, direction, batch, heads, kv_heads, head_dim, dtype.value, nodes)
        _ = call.plan
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if prints():
        _write(call, out, json, csv)


def _write(call: Call, out: Path | None, json: str | None, csv: Path | None) -> None:
    if json != "-":
        typer.echo(text(call))
    if json is not None:
        write_json(json, data(call))
    if csv is not None:
        write_csv(csv, table(call))
    if out is not None:
        draw_call(call, out)
        typer.echo(f"\npicture: {out}", err=json == "-")
