"""Command line of ``ringattn show``, which prints or draws the schedule and the mask of a call."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common import flags
from ..bench.common.flags import LayoutName, human_count
from ..bench.common.theme import parse_picture_path

if TYPE_CHECKING:
    from .call_summary import CallSummary

COLUMNS = 80
LEAST_CELLS, MOST_CELLS = 16, 32  # rows and columns of the mask on the terminal
MAX_TOKENS_TIMES_RANKS = 1 << 30  # tokens times ranks, which take about half a minute
MOST_BYTES = 5e9
# peak memory per token, per rank and hop, and per rank and hop with --json or --csv
TOKEN_BYTES, HOP_BYTES, ROW_BYTES = 100, 150, 4500
PAIR_BYTES = 30  # peak memory per pair of blocks of a block mask
HOP_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
LEGEND = "mask: rows are queries (rank), columns are keys (shard);", "0, 1, …: hop that computes, .: not visible"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def show(
    context: typer.Context,
    seqlen: Annotated[Any, typer.Option(parser=flags.parse_size_text, metavar="SIZE", help="Total tokens.")] = "8k",
    world: Annotated[Any, typer.Option(parser=flags.count, metavar="COUNT", help="Ranks.")] = "4",
    layout: flags.LayoutOrFile = LayoutName.zigzag,
    lengths: Annotated[
        Any,
        typer.Option(
            parser=flags.sizes, metavar="SIZE,…", help="Tokens of each rank; replaces --seqlen, --world and --layout."
        ),
    ] = None,
    per_document: Annotated[
        bool, typer.Option("--per-document", help="Zigzag within each document instead of the whole sequence.")
    ] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Layout.packed: even work and few K/V to send; needs documents.")
    ] = False,
    causal: flags.Causal = True,
    window: flags.Window = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.MeanDocumentLength = None,
    documents_seed: flags.DocumentsSeed = None,
    seqused_k: flags.SeqUsedK = None,
    prefix_length: flags.PrefixLength = None,
    block_mask: flags.BlockMaskPattern = None,
    mask_file: flags.MaskFile = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of equal nodes; more than 1 makes a two-level ring.")] = 1,
    chunks: flags.Chunks = 1,
    direction: Annotated[int, typer.Option(help="1: K/V move to the next rank, -1: to the previous rank.")] = 1,
    batch: flags.Batch = 1,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 128,
    dtype: flags.Dtype = "bf16",
    out: flags.Out = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Print or draw the schedule and the mask of a call: what each rank computes at each hop, and what it sends."""
    for name in ("seqlen", "world", "layout"):
        flags.check_exclusive(context, "lengths", name)
    if out is not None:
        parse_picture_path(str(out))
    import torch

    from ..bench.common.attention import build_pattern, document_boundaries, read_mask
    from ..bench.common.output import is_printing_rank
    from ..bench.common.provenance import provenance
    from ..bench.common.result import Result, Row, finish_command
    from ..comm.topology.topology import Topology
    from ..ring import Layout
    from ..ring.prepare import Layouts, mask_from_options
    from ..ring.schedule.mask import NO_WINDOW, Mask
    from .call_summary import CallSummary, call_provenance, hop_rows

    own = None if isinstance(layout, LayoutName) else flags.read_layout(context, layout, "seqlen", "world")
    if own is not None:
        seqlen, world = own.seqlen, own.world
    tokens, count = (seqlen, world) if lengths is None else (sum(lengths), len(lengths))
    block = block_mask.parameters.get("block", 0) if block_mask else 0
    needed = TOKEN_BYTES * tokens + (HOP_BYTES if json is None and csv is None else ROW_BYTES) * count**2
    needed += PAIR_BYTES * (tokens // block) ** 2 if block else 0
    if tokens * count > MAX_TOKENS_TIMES_RANKS or needed > MOST_BYTES:
        raise typer.BadParameter(
            f"{tokens:,} tokens over {count:,} ranks{f' in blocks of {block}' if block else ''} are too many: they "
            f"need {human_count(needed, 'B')}, and the limits are {human_count(MOST_BYTES, 'B')} and "
            f"{MAX_TOKENS_TIMES_RANKS:,} for tokens times ranks. `ringattn predict` does not have these limits"
        )
    if not tokens:
        raise typer.BadParameter("--seqlen or --lengths gives 0 tokens; pass at least 1")
    try:
        kv_heads = flags.resolve_kv_heads(heads, kv_heads)
        boundaries = document_boundaries(tokens, cu_seqlens, documents, documents_seed)
        if per_document and (boundaries is None or lengths is not None or layout is not LayoutName.zigzag):
            raise ValueError("--per-document needs --documents or --cu-seqlens, and --layout zigzag")
        if packed and (boundaries is None or lengths is not None or per_document or layout is not LayoutName.zigzag):
            raise ValueError("--packed needs --documents or --cu-seqlens, and no other layout")
        if lengths is not None:
            token_layout, name = Layout.uneven(lengths), "uneven"
        elif per_document:
            token_layout, name = Layout.zigzag(seqlen, world, boundaries), "zigzag per document"
        elif packed:
            assert boundaries is not None
            masks = [(Mask(causal, window or NO_WINDOW), 1)]
            topology = None if world % nodes else Topology.grid(nodes, world // nodes)
            token_layout, name = Layout.packed(
                boundaries, world, masks=masks, topology=topology, heads_per_kv_head=heads // kv_heads
            ), "packed"  # fmt: skip
        elif own is not None:
            token_layout, name = own, layout.name
        else:
            token_layout, name = getattr(Layout, layout)(seqlen, world), layout.value
        mask = mask_from_options(
            Layouts(token_layout, token_layout), batch, causal=causal, window_size=window or NO_WINDOW,
            cu_seqlens=boundaries, seqused_k=seqused_k, prefix_length=prefix_length,
            block_mask=build_pattern(tokens, block_mask), **read_mask(mask_file, tokens),
        )  # fmt: skip
        call = CallSummary(token_layout, name, mask, direction, batch, heads, kv_heads, head_dim, dtype, nodes, chunks)
        _ = call.schedule
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not is_printing_rank():
        return
    if out is not None:
        from .pictures import draw_call

        draw_call(call, out)
    rows: list[Row] = [*hop_rows(call)] if json is not None or csv is not None else []
    about = provenance(torch.device("cpu")) | {"call": call_provenance(call)} if json is not None else {}
    notes = [*summary_lines(call), *([f"picture: {out}"] if out is not None else [])]
    units = dict.fromkeys(rows[0] if rows else (), "")
    finish_command(Result("show", units, rows, notes=notes, provenance=about), json, csv, text=call_text(call, notes))


def call_text(call: CallSummary, notes: list[str]) -> str:
    """Return the output for the terminal: summary, schedule, table of ranks and mask."""
    title, *rest = ["\n".join(textwrap.wrap(note, COLUMNS)) for note in notes]
    count = len(call.runs)
    runs = [f"run {number} of {count} of each shard's tokens:\n{run}" for number, run in enumerate(call.runs, 1)]
    schedules = runs if count > 1 else [str(call.schedule)]
    return "\n\n".join([title, *schedules, rank_table_text(call), mask_text(call), "\n".join(rest)])


def summary_lines(call: CallSummary) -> list[str]:
    """Return lines with the arguments of the call, its total traffic and its balance."""
    from ..ring.schedule.mask import Mask

    kv, dkv = call.bytes_per_token
    full = call.schedule_for(Mask())
    traffic = []
    for name, partials in (("forward", 0), ("backward", dkv)):
        count, most = sum(call.bytes(kv, partials)), sum(full.bytes(kv, partials))
        traffic.append(f"{name} {human_count(count, 'B')}{f' ({count / most:.1%})' if most else ''}")
        if call.nodes > 1:
            traffic[-1] += f" ({human_count(sum(call.bytes(kv, partials, level=1)), 'B')} between nodes)"
    rows = "" if call.mask.used is None else " of all batch rows"
    return [
        f"{call.title}; batch {call.batch}, {call.heads} heads ({call.kv_heads} of K/V) of dim {call.head_dim}, "
        f"{call.dtype}",
        f"sent by all ranks (relative to a full mask): {', '.join(traffic)}",
        f"{int(call.pairs.sum()):,} visible pairs{rows}; ranks compute {call.balance:.0%} of the time, if every hop "
        f"lasts as long as its slowest rank; over all hops the slowest rank has {call.imbalance:.2f} times the mean",
    ]


def rank_table_text(call: CallSummary) -> str:
    """Return the table of what each rank computes and sends, abridged for many ranks."""
    from ..bench.common.result import Result
    from ..ring.schedule.formatting import printed_indices
    from .call_summary import rank_rows

    all_rows = rank_rows(call)
    total = max(sum(row["visible pairs"] for row in all_rows), 1)
    units = {"rank": "", "tokens": "", "visible pairs": "", "share": "%", "sends forward": "", "sends backward": ""}
    rows = []
    for rank in printed_indices(call.layout.world):
        if rank is not None:
            sent = {name: human_count(all_rows[rank][name], "B") for name in units if name.startswith("sends")}
            share = {"rank": rank, "share": 100 * all_rows[rank]["visible pairs"] / total}
            rows.append(all_rows[rank] | share | sent)
    return Result("show", units, [*rows]).text(COLUMNS)


def mask_text(call: CallSummary) -> str:
    """Return the mask as text, with a row per query, a column per key, and the hop as mark."""
    from .call_summary import mask_cells

    ranks, grid = mask_cells(call, min(max(4 * call.layout.world, LEAST_CELLS), MOST_CELLS))
    rows = [["", *map(_mark, ranks)]]
    rows += [[f"rank {rank}", *map(_mark, row)] for rank, row in zip(ranks, grid, strict=True)]
    widest = max(len(name) for name, *_ in rows) + 2
    return "\n".join([*LEGEND, *(f"{name:<{widest}}" + " ".join(marks) for name, *marks in rows)])


def _mark(number: int) -> str:
    return "." if number < 0 else HOP_MARKS[number] if number < len(HOP_MARKS) else "+"
