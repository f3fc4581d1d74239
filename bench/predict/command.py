"""``ringattn predict``: how long a ring that is not here takes, and what would hide its links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...ring.args import Layouts, mask_of
from ...ring.schedule.layout import Layout
from ...ring.schedule.mask import UNLIMITED
from ..common.masks import boundaries_of, pattern_of, title
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.shapes import (
    BlockMaskPattern,
    Causal,
    CuSeqlens,
    DocumentsOfMean,
    DocumentsSeed,
    LayoutName,
    PrefixLength,
    Window,
    binary,
    device_here,
    dtype_name,
    grouped,
    refuse_beside,
    refuse_without,
    size,
)
from ..timeline.events import as_chrome
from .apart import MOST_RANKS
from .call import Call
from .given import (
    IB,
    NVLINK,
    TOKENS,
    WORLD,
    Given,
    above_zero,
    axes_of,
    links_of,
    slow_of,
    speed_of,
    tokens_of,
)
from .links import PRESETS, link_of
from .memory import check as check_memory
from .ring import predicted
from .speed import GPUS, Speed
from .sweep import check_ending, draw, rows_of_sweep, shown
from .text import map_report, report, rows_of, text
from .timelines import timeline
from .trouble import Trouble

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PICTURE = "predict.png"
MOST_GPUS = 16 * 1024


@app.command()
def predict(
    tokens: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help=f"Tokens per rank ({binary(TOKENS)} where left out).")
    ] = None,
    seqlen: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Tokens in all, in place of --tokens.")
    ] = None,
    world: Annotated[
        Any, typer.Option("--world", "--gpus", parser=size, metavar="COUNT", help="Ranks of the ring, a GPU each.")
    ] = str(WORLD),
    nodes: Annotated[int, typer.Option(min=1, help="Machines; several make a two-level ring.")] = 1,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of K and V (as many as --heads where left out).")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE")] = "bf16",
    causal: Causal = True,
    window: Window = None,
    cu_seqlens: CuSeqlens = None,
    documents: DocumentsOfMean = None,
    documents_seed: DocumentsSeed = None,
    prefix_length: PrefixLength = None,
    block_mask: BlockMaskPattern = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speeds: JSON of bench kernels, or results.json of bench suite.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure speeds, and links where not given, on this machine now.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"Its constants: {', '.join(GPUS)} (where left out that of --kernels, else h100)."),
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Of the forward kernel at 16k tokens, this mask.")] = None,
    backward_tflops: Annotated[float | None, typer.Option(help="Of both backward kernels, 2.5 forwards.")] = None,
    link: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(PRESETS)}; GB/s,10us; JSON of bench links ({NVLINK} where left out)."),
    ] = None,
    link_between: Annotated[str | None, typer.Option(help=f"The same, between nodes ({IB} where left out).")] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")] = 1,
    slots: Annotated[int, typer.Option(min=1)] = 3,
    prefetch: Annotated[int | None, typer.Option(min=0)] = None,
    wire_dtype: Annotated[str | None, typer.Option(help="What K/V travel as: bfloat16, float8_e4m3fn.")] = None,
    grad_wire_dtype: Annotated[str | None, typer.Option(help="What sums travel as: bfloat16.")] = None,
    slow: Annotated[list[str] | None, typer.Option(metavar="RANK=FACTOR", help="Takes so many times as long.")] = None,
    jitter: Annotated[float, typer.Option(help="Spread of a launch's time, 0 to 1: 0.05 is 5%.")] = 0.0,
    beside: Annotated[float | None, typer.Option(help="Speed that kernels lose beside transfers, 0 to 1.")] = None,
    memory_gb: Annotated[float | None, typer.Option("--memory", help="GB of a GPU.")] = None,
    sweep: Annotated[str | None, typer.Option(metavar="tokens=1k..128k,gpus=2..16k", help="A map instead.")] = None,
    picture: Annotated[Path | None, typer.Option(help=f"Of the map: PNG or SVG ({PICTURE} where left out).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Every rank's timeline, for Perfetto.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the passes and their hops, or the points of the map.")] = None,
) -> None:
    """Time, exposed communication and memory of a ring of any size, by the loops that really run."""
    check_targets(json, csv, trace, picture)
    try:
        axes = None if sweep is None else axes_of(sweep)
        if axes is None:
            refuse_without("sweep", "it is of the map", picture=picture)
        else:
            refuse_beside("sweep", "the map has lengths of its own", tokens=tokens, seqlen=seqlen)
            refuse_beside("sweep", "it draws one ring", trace=trace)
        name, count = ("world", world) if axes is None else ("gpus of sweep", max(axes["gpus"]))
        if count > MOST_GPUS:
            raise ValueError(f"{name} is {count:,}: rings of up to {MOST_GPUS:,} GPUs are predicted")
        above_zero("GB", memory=memory_gb)
        trouble = Trouble(slow_of(slow or []), jitter)
        tokens = tokens_of(tokens, seqlen, world)
        boundaries = boundaries_of(tokens * world, cu_seqlens, documents, documents_seed)
        held = Layout.uneven([tokens * world])
        mask = mask_of(
            Layouts(held, held), batch, causal=causal, window_size=window or (UNLIMITED, UNLIMITED),
            cu_seqlens=boundaries, seqused_k=None, prefix_length=prefix_length,
            block_mask=pattern_of(tokens * world, block_mask),
        )  # fmt: skip
        call = Call(
            tokens, world, layout.value, mask, heads, grouped(heads, kv_heads), head_dim, batch, dtype, nodes, True,
            chunks, slots, prefetch, 1, wire_dtype, grad_wire_dtype,
        )  # fmt: skip
        _check_links(call, max(axes["gpus"]) if axes else world, link, link_between, calibrate)
        if calibrate:
            refuse_beside(
                "calibrate", "--calibrate measures it here", kernels=kernels, gpu=gpu, tflops=tflops,
                backward_tflops=backward_tflops,
            )  # fmt: skip
            if not prints():
                return  # it starts its own processes: under a launcher rank 0 does
            given = _calibrated(call, link, link_between)
        else:
            device, told = speed_of(gpu, tflops, backward_tflops, kernels, call)
            given = Given(device, links_of(link, link_between), device.capacity, told)
        given = given.checked(beside, None if memory_gb is None else memory_gb * 1e9)
        if axes is not None:
            _map(call, given, axes, trouble, picture or Path(PICTURE), json, csv)
            return
        check_memory(call, given.capacity)
        _one(call, given, trouble, trace, json, csv)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check_links(call: Call, most: int, link: str | None, between: str | None, calibrate: bool) -> None:
    """Refuse a link that joins no two of ``most`` ranks."""
    if most <= call.per_node:
        refuse_without("several nodes", "it joins two of them; --nodes counts them", link_between=between)
    if call.per_node == 1 and not calibrate:  # which may need it in place of what one device cannot tell
        refuse_without("several GPUs of a node", "it joins two of them; --world counts all", link=link)


def _calibrated(call: Call, link: str | None, between: str | None) -> Given:
    from .calibrate import here  # which imports what measures, and that takes a second

    told = None if link is None else link_of(link), None if between is None else link_of(between, "link-between")
    with Console(stderr=True).status("measuring this machine"):
        return here(call, device_here(None), *told)


def _one(call: Call, given: Given, trouble: Trouble, trace: Path | None, json: str | None, csv: Path | None) -> None:
    if trace is not None and call.world > MOST_RANKS:
        raise ValueError(f"trace draws every rank, of {MOST_RANKS} at most: there are {call.world}")
    passes = predicted(call, given.device, given.links, trouble)
    found = report(call, given, passes, trouble)
    if not prints():
        return
    if trace is not None:
        if not all(one.tracks for one in passes):  # one rank stood for all
            passes = predicted(call, given.device, given.links, trouble, told_apart=True)
        write_json(trace, as_chrome(timeline(found["mask"], passes, call)), indent=None)
    if json is not None:
        write_json(json, found)
    if csv is not None:
        write_csv(csv, rows_of(found))
    if json != "-":
        typer.echo(text(call, given, found))


def _map(
    call: Call, given: Given, axes: dict[str, list[int]], trouble: Trouble, picture: Path, json: str | None,
    csv: Path | None,
) -> None:  # fmt: skip
    check_ending(picture)
    if not call.is_plain:
        raise ValueError("sweep is of thousands of GPUs: it takes contiguous, zigzag and striped, full or causal")
    if not isinstance(given.device, Speed):
        raise ValueError("sweep is of GPUs, and --calibrate finds none here: leave one of them out")
    links = given.links
    rows = rows_of_sweep(call, given.device, links, axes["tokens"], axes["gpus"], trouble, capacity=given.capacity)
    if not prints():
        return
    heading = (
        f"{call.layout}, {title(call.mask)}, H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}, forward and "
        f"backward\n{links.inside.rate / 1e9:.0f} GB/s inside nodes of {call.per_node}, "
        f"{links.between.rate / 1e9:.0f} GB/s per GPU between" + (f"\n{trouble.words}" if trouble.is_there else "")
    )
    draw(rows, heading, picture)
    if json is not None:
        write_json(json, map_report(call, given, trouble, rows))
    if csv is not None:
        write_csv(csv, rows)
    if json != "-":
        typer.echo("\n".join([shown(rows, heading), "", *given.told, str(picture)]))
