"""``ringattn show``: who computes what at which hop, and what moves, as text, picture, JSON or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common.flags import (
    Batch,
    BlockMaskPattern,
    Causal,
    Csv,
    CuSeqlens,
    DocumentsOfMean,
    DocumentsSeed,
    Dtype,
    HeadDim,
    Heads,
    Json,
    KvHeads,
    LayoutName,
    Out,
    PrefixLength,
    SeqUsedK,
    Window,
    check_apart,
    human,
    kv_heads_of,
    size,
    sizes,
)
from ..bench.report.theme import picture

if TYPE_CHECKING:
    from ..ring.schedule.layout import Layout
    from .call import Call

LEAST_CELLS, MOST_CELLS = 16, 32  # of a mask on the terminal, each way
MOST = 1 << 30  # tokens times ranks: half a minute
COUNTS = ("tokens", "visible pairs")  # of a rank; the others are FLOPs and bytes
HOP_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def show(
    context: typer.Context,
    seqlen: Annotated[Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all.")] = "8k",
    world: Annotated[int, typer.Option(min=1, help="Ranks.")] = 4,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    lengths: Annotated[
        Any,
        typer.Option(parser=sizes, metavar="SIZE,…", help="Uneven shards in rank order, in place of the three above."),
    ] = None,
    per_document: Annotated[
        bool, typer.Option("--per-document", help="A zigzag of every document, in place of one of the whole.")
    ] = False,
    causal: Causal = True,
    window: Window = None,
    cu_seqlens: CuSeqlens = None,
    documents: DocumentsOfMean = None,
    documents_seed: DocumentsSeed = None,
    seqused_k: SeqUsedK = None,
    prefix_length: PrefixLength = None,
    block_mask: BlockMaskPattern = None,
    nodes: Annotated[int, typer.Option(min=1, help="Equal nodes; several make a ring of rings.")] = 1,
    direction: Annotated[int, typer.Option(help="1: K/V move to the next rank, -1: to the one before.")] = 1,
    batch: Batch = 1,
    heads: Heads = 32,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    dtype: Dtype = "bf16",
    out: Out = None,
    json: Json = None,
    csv: Csv = None,
) -> None:
    """Print or draw the schedule and the mask of any call: who computes what at which hop, and what moves."""
    for name in ("seqlen", "world", "layout"):
        check_apart(context, "lengths", name)
    if out is not None:
        picture(str(out))
    import torch

    from ..bench.common.attention import boundaries_of, pattern_of
    from ..bench.common.output import prints
    from ..bench.common.provenance import provenance
    from ..bench.common.result import Result, Row, finish
    from ..ring.args import Layouts, mask_of
    from ..ring.schedule.mask import UNLIMITED
    from .call import Call, described, hop_rows

    tokens, count = (seqlen, world) if lengths is None else (sum(lengths), len(lengths))
    if tokens * count > MOST:
        raise typer.BadParameter(
            f"{tokens:,} tokens over {count:,} ranks are too many to count one by one: the product may be {MOST:,} at "
            "most; `ringattn predict` takes any number"
        )
    try:
        boundaries = boundaries_of(tokens, cu_seqlens, documents, documents_seed)
        if per_document and (boundaries is None or lengths is not None or layout is not LayoutName.zigzag):
            raise ValueError(
                "--per-document is a zigzag of --documents or --cu-seqlens: pass these, and no other layout"
            )
        held, name = layout_of(tokens, world, layout, lengths, boundaries if per_document else None)
        if not tokens:
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
        call = Call(held, name, mask, direction, batch, heads, kv_heads_of(heads, kv_heads), head_dim, dtype, nodes)
        _ = call.plan
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not prints():
        return
    if out is not None:
        from .pictures import draw_call

        draw_call(call, out)
    rows: list[Row] = [*hop_rows(call)] if json is not None or csv is not None else []
    about = provenance(torch.device("cpu")) | {"call": described(call)} if json is not None else {}
    notes = [*summary(call), *([f"picture: {out}"] if out is not None else [])]
    units = dict.fromkeys(rows[0] if rows else (), "")
    finish(Result("show", units, rows, notes=notes, provenance=about), json, csv, text=text(call, notes))


def layout_of(
    seqlen: int, world: int, name: LayoutName, lengths: Sequence[int] | None, documents: Sequence[int] | None
) -> tuple[Layout, str]:
    """The layout and what it is called; ``documents`` are the boundaries to cut at, where these are asked for."""
    from ..ring.schedule.layout import Layout

    if lengths is not None:
        return Layout.uneven(lengths), "uneven"
    if documents is not None:
        return Layout.zigzag(seqlen, world, documents), "zigzag per document"
    made: Layout = getattr(Layout, name)(seqlen, world)
    return made, name.value


def text(call: Call, notes: Sequence[str]) -> str:
    """Everything, for the terminal."""
    title, *rest = notes
    parts = [[title], [str(call.plan)], ranks_text(call), mask_text(call), rest]
    return "\n\n".join("\n".join(lines) for lines in parts)


def summary(call: Call) -> list[str]:
    """The call and its totals."""
    from ..ring.schedule.mask import Mask

    kv, dkv = call.bytes_per_token
    full = call.plan_of(Mask())
    passes = [
        (name, call.plan.bytes(kv, more), full.bytes(kv, more)) for name, more in (("forward", 0), ("backward", dkv))
    ]
    moved = ", ".join(f"{_part(sum(sent), sum(most))} {name}" for name, sent, most in passes)
    by_a_rank = ", ".join(f"{_part(max(sent), max(most))} {name}" for name, sent, most in passes)
    across, of = "", "" if call.mask.used is None else " of all batch rows"
    if call.nodes > 1:
        there, back_there = sum(call.plan.bytes(kv, level=1)), sum(call.plan.bytes(kv, dkv, level=1))
        across = f"; of it between nodes: {human(there, 'B')} forward, {human(back_there, 'B')} backward"
    return [
        f"{call.title}; batch {call.batch}, {call.heads} heads ({call.kv_heads} of K/V) of dim {call.head_dim}, "
        f"{call.dtype}",
        f"moves in all, of a full ring: {moved}{across}",
        f"a rank sends at most: {by_a_rank}",
        f"{int(call.pairs.sum()):,} visible pairs{of}; ranks compute {call.balance:.0%} of the time, if every hop "
        "lasts as long as its slowest rank",
    ]


def _part(count: int, whole: int) -> str:
    return human(count, "B") + (f" ({count / whole:.1%})" if whole else "")


def ranks_text(call: Call) -> list[str]:
    """What each rank computes and sends, of many ranks a few."""
    from ..ring.schedule.text import shown
    from .call import rank_rows

    found = rank_rows(call)
    total = max(sum(row["visible pairs"] for row in found), 1)
    cells = [["", "tokens", "visible pairs", "share", *(name for name in found[0] if name not in COUNTS)]]
    for rank in shown(call.layout.world):
        if rank is None:
            cells.append(["…"] * len(cells[0]))
            continue
        row = found[rank]
        pairs = row["visible pairs"]
        amounts = [
            human(value, "FLOP" if name in ("forward", "backward") else "B")
            for name, value in row.items()
            if name not in COUNTS
        ]
        cells.append([f"rank {rank}", f"{row['tokens']:,}", f"{pairs:,}", f"{pairs / total:.1%}", *amounts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["   ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def mask_text(call: Call) -> list[str]:
    """The mask on the terminal: rows are queries, columns keys, a mark is the hop."""
    from .call import mask_cells

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
