"""``ringattn show``: who computes what at which hop, and what moves, as text, picture, JSON or CSV."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common import flags
from ..bench.common.flags import LayoutName, human
from ..bench.common.theme import picture

if TYPE_CHECKING:
    from .call import ShownCall

COLUMNS = 80
LEAST_CELLS, MOST_CELLS = 16, 32  # of a mask on the terminal, each way
MOST = 1 << 30  # tokens times ranks: half a minute
MOST_BYTES = 5e9
TOKEN_BYTES, HOP_BYTES, ROW_BYTES = 100, 150, 4500  # at the peak: of a token, a hop of a rank, and that in a file
PAIR_BYTES = 30  # of two blocks of a pattern
HOP_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
LEGEND = "mask: rows are queries and their rank, columns keys and their shard;", "the hop that computes, . unseen"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def show(
    context: typer.Context,
    seqlen: Annotated[Any, typer.Option(parser=flags.size, metavar="SIZE", help="Tokens in all.")] = "8k",
    world: Annotated[Any, typer.Option(parser=flags.count, metavar="COUNT", help="Ranks.")] = "4",
    layout: flags.LayoutOrFile = LayoutName.zigzag,
    lengths: Annotated[
        Any,
        typer.Option(parser=flags.sizes, metavar="SIZE,…", help="Uneven shards by rank, in place of the three above."),
    ] = None,
    per_document: Annotated[
        bool, typer.Option("--per-document", help="A zigzag of every document, in place of one of the whole.")
    ] = False,
    causal: flags.Causal = True,
    window: flags.Window = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.DocumentsOfMean = None,
    documents_seed: flags.DocumentsSeed = None,
    seqused_k: flags.SeqUsedK = None,
    prefix_length: flags.PrefixLength = None,
    block_mask: flags.BlockMaskPattern = None,
    nodes: Annotated[int, typer.Option(min=1, help="Equal nodes; several make a ring of rings.")] = 1,
    direction: Annotated[int, typer.Option(help="1: K/V move to the next rank, -1: to the one before.")] = 1,
    batch: flags.Batch = 1,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 128,
    dtype: flags.Dtype = "bf16",
    out: flags.Out = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Print or draw the schedule and the mask of any call: who computes what at which hop, and what moves."""
    for name in ("seqlen", "world", "layout"):
        flags.check_apart(context, "lengths", name)
    if out is not None:
        picture(str(out))
    import torch

    from ..bench.common.attention import boundaries_of, pattern_of
    from ..bench.common.output import prints
    from ..bench.common.provenance import provenance
    from ..bench.common.result import Result, Row, finish
    from ..ring import Layout
    from ..ring.prepare import Layouts, mask_of
    from ..ring.schedule.mask import UNLIMITED
    from .call import ShownCall, described, hop_rows

    own = None if isinstance(layout, LayoutName) else flags.read_layout(context, layout, "seqlen", "world")
    if own is not None:
        seqlen, world = own.seqlen, own.world
    tokens, count = (seqlen, world) if lengths is None else (sum(lengths), len(lengths))
    block = block_mask.parameters.get("block", 0) if block_mask else 0
    needed = TOKEN_BYTES * tokens + (HOP_BYTES if json is None and csv is None else ROW_BYTES) * count**2
    needed += PAIR_BYTES * (tokens // block) ** 2 if block else 0
    if tokens * count > MOST or needed > MOST_BYTES:
        raise typer.BadParameter(
            f"{tokens:,} tokens over {count:,} ranks{f' in blocks of {block}' if block else ''} are too many to count "
            f"one by one: they may take {human(needed, 'B')}, {human(MOST_BYTES, 'B')} at most, and the product may be "
            f"{MOST:,} at most; `ringattn predict` takes any number"
        )
    if not tokens:
        raise typer.BadParameter("there are 0 tokens: a call has at least one")
    try:
        boundaries = boundaries_of(tokens, cu_seqlens, documents, documents_seed)
        if per_document and (boundaries is None or lengths is not None or layout is not LayoutName.zigzag):
            raise ValueError(
                "--per-document is a zigzag of --documents or --cu-seqlens: pass these, and no other layout"
            )
        if lengths is not None:
            held, name = Layout.uneven(lengths), "uneven"
        elif per_document:
            held, name = Layout.zigzag(seqlen, world, boundaries), "zigzag per document"
        elif own is not None:
            held, name = own, layout.name
        else:
            held, name = getattr(Layout, layout)(seqlen, world), layout.value
        mask = mask_of(
            Layouts(held, held), batch, causal=causal, window_size=window or (UNLIMITED, UNLIMITED),
            cu_seqlens=boundaries, seqused_k=seqused_k, prefix_length=prefix_length,
            block_mask=pattern_of(tokens, block_mask),
        )  # fmt: skip
        kv_heads = flags.kv_heads_of(heads, kv_heads)
        call = ShownCall(held, name, mask, direction, batch, heads, kv_heads, head_dim, dtype, nodes)
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


def text(call: ShownCall, notes: list[str]) -> str:
    """Everything, for the terminal."""
    title, *rest = ["\n".join(textwrap.wrap(note, COLUMNS)) for note in notes]
    return "\n\n".join([title, str(call.plan), ranks_text(call), mask_text(call), "\n".join(rest)])


def summary(call: ShownCall) -> list[str]:
    """The call and its totals."""
    from ..ring.schedule.mask import Mask

    kv, dkv = call.bytes_per_token
    full = call.plan_of(Mask())
    moved = []
    for name, more in (("forward", 0), ("backward", dkv)):
        count, most = sum(call.plan.bytes(kv, more)), sum(full.bytes(kv, more))
        moved.append(f"{human(count, 'B')}{f' ({count / most:.1%})' if most else ''} {name}")
        if call.nodes > 1:
            moved[-1] += f" ({human(sum(call.plan.bytes(kv, more, level=1)), 'B')} between nodes)"
    of = "" if call.mask.used is None else " of all batch rows"
    return [
        f"{call.title}; batch {call.batch}, {call.heads} heads ({call.kv_heads} of K/V) of dim {call.head_dim}, "
        f"{call.dtype}",
        f"moves in all, of a full ring: {', '.join(moved)}",
        f"{int(call.pairs.sum()):,} visible pairs{of}; ranks compute {call.balance:.0%} of the time, if every hop "
        "lasts as long as its slowest rank",
    ]


def ranks_text(call: ShownCall) -> str:
    """What each rank computes and sends, of many ranks a few."""
    from ..bench.common.result import Result
    from ..ring.schedule.text import shown
    from .call import rank_rows

    every = rank_rows(call)
    total = max(sum(row["visible pairs"] for row in every), 1)
    units = {"rank": "", "tokens": "", "visible pairs": "", "share": "%", "sends forward": "", "sends backward": ""}
    rows = []
    for rank in shown(call.layout.world):
        if rank is not None:
            sent = {name: human(every[rank][name], "B") for name in units if name.startswith("sends")}
            share = {"rank": rank, "share": 100 * every[rank]["visible pairs"] / total}
            rows.append(every[rank] | share | sent)
    return Result("show", units, [*rows]).text(COLUMNS)


def mask_text(call: ShownCall) -> str:
    """The mask on the terminal: rows are queries, columns keys, a mark is the hop."""
    from .call import mask_cells

    ranks, grid = mask_cells(call, min(max(4 * call.layout.world, LEAST_CELLS), MOST_CELLS))
    rows = [["", *map(_mark, ranks)]]
    rows += [[f"rank {rank}", *map(_mark, row)] for rank, row in zip(ranks, grid, strict=True)]
    widest = max(len(name) for name, *_ in rows) + 2
    return "\n".join([*LEGEND, *(f"{name:<{widest}}" + " ".join(marks) for name, *marks in rows)])


def _mark(number: int) -> str:
    return "." if number < 0 else HOP_MARKS[number] if number < len(HOP_MARKS) else "+"
