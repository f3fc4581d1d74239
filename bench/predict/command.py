"""``ringattn predict``: predicts the time of a ring on other hardware, and of other methods for the same attention."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.output import check_writable, is_printing_rank, write_json
from ..common.result import Result, finish_command
from .links import PRESETS
from .speed import DRAWS, GPUS, MOST_RANKS

if TYPE_CHECKING:  # these import torch, which would slow --help
    from .alternatives import Alternative
    from .inputs import PredictionInputs
    from .links import ClusterLinks
    from .predicted_call import PredictedCall
    from .speed import Speed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PICTURE = Path("predict.png")
DEFAULT_NODE_LINK = "ib400"
MOST_GPUS = 16 * 1024
TOKENS, WORLD = 8192, 8
ONE_RING_FLAGS = ("tokens", "seqlen", "packed", "trace", "slow", "jitter")
"""Flags that cannot be combined with --sweep."""
WHOLE_RING = ("tokens", "seqlen", "world", "sweep")
"""Flags that cannot be combined with a layout from a file."""
COLUMNS = 80
SHORT = {"forward": "fwd", "backward": "bwd"}


class PassName(StrEnum):
    """Passes to predict: forward for inference, both for training."""

    forward = "forward"
    both = "both"


def parse_slow_rank(text: str) -> tuple[int, float]:
    """Parse ``3=1.5``: rank 3 takes 1.5 times as long."""
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not RANK=FACTOR, such as 3=1.5") from None


def parse_axes(text: str) -> dict[str, list[int]]:
    """Parse ``tokens=1k..128k,gpus=2..16k`` as powers of two from one end to the other."""
    result = {}
    for part in text.split(","):
        name, _, span = part.partition("=")
        first, last = (flags.parse_size_text(end) for end in (span if ".." in span else "0..0").split("..", 1))
        result[name] = [first << step for step in range(64) if first << step <= last] if first else []
    if set(result) != {"tokens", "gpus"} or not all(result.values()):
        raise typer.BadParameter(f"{text!r} does not have the form tokens=1k..128k,gpus=2..16k")
    return result


@app.command()
def predict(
    context: typer.Context,
    tokens: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help=f"Tokens per rank; default: {TOKENS}.")
    ] = None,
    seqlen: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Total tokens, instead of --tokens.")
    ] = None,
    world: Annotated[
        Any,
        typer.Option("--world", "--gpus", parser=flags.count, metavar="COUNT", help="Number of GPUs, one rank each."),
    ] = str(WORLD),
    nodes: Annotated[int, typer.Option(min=1, help="Number of machines; several make a two-level ring.")] = 1,
    nics: Annotated[int | None, typer.Option(min=1, help="NICs per node; default and maximum: one per GPU.")] = None,
    layout: flags.LayoutOrFile = flags.LayoutName.zigzag,
    packed: Annotated[
        bool, typer.Option("--packed", help="Layout.packed: even work and few K/V to send; needs documents.")
    ] = False,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 128,
    batch: flags.Batch = 1,
    dtype: flags.Dtype = "bf16",
    passes: Annotated[PassName, typer.Option("--pass", help="forward (inference) or both (training).")] = PassName.both,
    causal: flags.Causal = True,
    window: flags.Window = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.MeanDocumentLength = None,
    documents_seed: flags.DocumentsSeed = None,
    prefix_length: flags.PrefixLength = None,
    block_mask: flags.BlockMaskPattern = None,
    mask_file: flags.MaskFile = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured kernel speeds: JSON from bench kernels or a suite.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help=f"GPU model: {', '.join(GPUS)}; default: that of --kernels, else h100.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s of the forward kernel at 16k tokens, causal or full like this call.")
    ] = None,
    backward_tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s of both backward kernels, counted as 2.5 forwards.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(PRESETS)}; GB/s,10us; or JSON from bench links. Default: that of the GPU."),
    ] = None,
    link_between: Annotated[
        str | None, typer.Option(help="Link of a NIC, given as for --link; default: ib400.")
    ] = None,
    chunks: flags.Chunks = 1,
    slots: Annotated[int, typer.Option(min=1, help="Receive buffers for K/V.")] = 3,
    wire_dtype: flags.WireDtype = None,
    grad_wire_dtype: flags.GradWireDtype = None,
    slow: Annotated[
        list[Any] | None,
        typer.Option(
            parser=parse_slow_rank, metavar="RANK=FACTOR", help=f"A slow rank, such as 3=1.5; up to {MOST_RANKS} GPUs."
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help=f"Random spread of launch times: 0.05 is 5%; {DRAWS} draws; up to {MOST_RANKS} GPUs.")
    ] = 0.0,
    memory_gb: Annotated[float | None, typer.Option("--memory", help="Memory of a GPU in GB.")] = None,
    sweep: Annotated[
        Any,
        typer.Option(
            parser=parse_axes,
            metavar="tokens=1k..128k,gpus=2..16k",
            help="Predict a map over tokens per GPU and number of GPUs instead.",
        ),
    ] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="File for the map, PNG or SVG.")] = PICTURE,
    trace: flags.Trace = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Predict time, exposed communication and memory of a ring of any size by simulating its real loops."""
    given = SimpleNamespace(**locals())
    check_writable(picture)
    flags.check_needs(context, {"picture": "sweep", "documents_seed": "documents", "backward_tflops": "tflops"})
    flags.check_exclusive(context, "tokens", "seqlen")
    flags.check_exclusive(context, "kernels", "tflops")
    for name in ONE_RING_FLAGS:
        flags.check_exclusive(context, "sweep", name)
    from .inputs import PredictionInputs, check_above_zero
    from .program import PASSES
    from .speed import Perturbation

    try:
        if picture.suffix not in (".png", ".svg"):
            raise ValueError(f"--picture is {str(picture)!r}: it must end in .png or .svg")
        _read_layout(given)
        max_gpus = max(sweep["gpus"]) if sweep else given.world
        if max_gpus > MOST_GPUS:
            flag = "gpus in --sweep" if sweep else "--world"
            raise ValueError(f"{flag} is {max_gpus:,}: it must be at most {MOST_GPUS:,}")
        check_above_zero("GB", memory=memory_gb)
        call = _build_call(given)
        speed, links, measured = _resolve_hardware(call, given, max_gpus, is_map=bool(sweep))
        phases = PASSES[:1] if passes is PassName.forward else PASSES
        inputs = PredictionInputs(speed, links, Perturbation(dict(slow or []), jitter), phases, measured)
        capacity = speed.capacity if memory_gb is None else memory_gb * 1e9
        if sweep:
            result, summary = _map(call, inputs, sweep, capacity, picture)
        else:
            result, summary = _one_call(call, inputs, capacity, trace)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if is_printing_rank() and "-" not in (json, csv):
        typer.echo("\n".join([summary, *_heading(call, inputs, is_map=bool(sweep)), ""]))
    finish_command(result, json, csv)


def _read_layout(given: Any) -> None:
    """Turn the flag ``layout`` into a name or a ``Layout``; a file also sets ``world`` and ``seqlen``."""
    if isinstance(given.layout, flags.LayoutName):
        given.layout = given.layout.value
        return
    layout = flags.read_layout(given.context, given.layout, *WHOLE_RING)
    shortest, longest = min(layout.lengths), max(layout.lengths)
    if shortest < longest:
        raise ValueError(
            f"--layout is {given.layout}: its shards have {shortest:,} to {longest:,} tokens, but must be equal"
        )
    given.layout, given.world, given.seqlen = layout, layout.world, layout.seqlen


def _build_call(given: Any) -> PredictedCall:
    """Return the call that these flags describe; raise ValueError if they do not fit each other."""
    from ...comm.topology.topology import Topology
    from ...ring import Layout, Mask
    from ..common.attention import AttentionConfig, document_boundaries, read_mask
    from .predicted_call import PredictedCall

    world, seqlen = given.world, given.seqlen
    if seqlen is not None and seqlen % world:
        fits = max(seqlen // world, 1) * world
        raise ValueError(f"--seqlen is {seqlen:,}: it must be a multiple of --world, {world:,}, such as {fits:,}")
    tokens = given.tokens or (seqlen or TOKENS * world) // world
    boundaries = document_boundaries(tokens * world, given.cu_seqlens, given.documents, given.documents_seed)
    config = AttentionConfig(
        tokens * world, batch=given.batch, causal=given.causal, window=given.window or (-1, -1),
        prefix_length=given.prefix_length, cu_seqlens=None if boundaries is None else tuple(boundaries),
        block_mask=given.block_mask, layout="contiguous", **read_mask(given.mask_file, tokens * world),
    )  # fmt: skip
    kv_heads, layout = flags.resolve_kv_heads(given.heads, given.kv_heads), given.layout
    if given.packed:
        if boundaries is None or layout != flags.LayoutName.zigzag:
            raise ValueError("--packed needs --documents or --cu-seqlens, and no other layout")
        masks, nodes = [(Mask(given.causal, config.window), 1)], given.nodes
        topology = None if world % nodes else Topology.grid(nodes, world // nodes)
        layout = Layout.packed(
            boundaries, world, masks=masks, topology=topology, heads_per_kv_head=given.heads // kv_heads
        )
    return PredictedCall(
        tokens, world, layout, config.mask, given.heads, kv_heads, given.head_dim, given.batch, given.dtype,
        given.nodes, chunks=given.chunks, slots=given.slots, wire_dtype=given.wire_dtype,
        grad_wire_dtype=given.grad_wire_dtype,
    )  # fmt: skip


def _resolve_hardware(
    call: PredictedCall, given: Any, max_gpus: int, *, is_map: bool
) -> tuple[Speed, ClusterLinks, tuple[str, ...]]:
    """Return the GPU's speed, the links, and a description of the measured rows that gave the speed."""
    from .inputs import resolve_speed
    from .links import ClusterLinks, parse_link

    link, link_between, nics = given.link, given.link_between, given.nics
    if max_gpus <= call.per_node and (link_between is not None or nics is not None):
        raise ValueError("--link-between and --nics need several nodes. Set --nodes to at least 2.")
    if nics is not None and nics > call.per_node:
        raise ValueError(f"--nics is {nics}: it must be at most {call.per_node}, one per GPU of a node")
    if call.per_node == 1 and link is not None and not is_map:
        raise ValueError("--link is the link inside a node, but each node has one GPU. Use --link-between.")
    speed, measured = resolve_speed(call, given.gpu, given.tflops, given.backward_tflops, given.kernels)
    between = parse_link(link_between or DEFAULT_NODE_LINK, "link-between")
    if link_between is None:
        between = replace(between, source=f"assumed: {between.source}; set it with --link-between")
    return speed, ClusterLinks(parse_link(link or speed.link), between, nics), measured


def _one_call(call: PredictedCall, inputs: PredictionInputs, capacity: float, trace: Path | None) -> tuple[Result, str]:
    """Predict one call; return the result, with a row per method, and the summary line."""
    from .alternatives import check_memory, predict_alternatives

    check_memory(call, capacity, backward=inputs.has_backward)
    if trace is not None:
        _write_trace(call, inputs, trace)
    results = predict_alternatives(call, inputs, capacity=capacity)
    rows = [_row(way, call, inputs) for way in results]
    best = f"{results[0].name}: {rows[0]['ideal']:.0f}% of ideal"
    units = {"way": "", "ideal": "%", **{SHORT[phase]: "ms" for phase in inputs.phases}, "exposed": "ms",
             "TFLOP/s": "", "memory": "GB", "worst hop": "ms", "spread": "ms", "note": ""}  # fmt: skip
    if not inputs.perturbation.jitter:
        units.pop("spread")
    unfit = [f"{way.name}: {way.note}" for way in results if not way.passes]
    nic_ranges = _nic_ranges(results, inputs.links.count_nics(call.per_node))
    notes = [*unfit, *nic_ranges, *_notes(call, inputs), f"best: {best}"]
    return Result("predict", units, [*rows], notes=notes, provenance=_provenance(call, inputs)), best


def _nic_ranges(results: Sequence[Alternative], nics: int) -> list[str]:
    """Return a note per flat ring with its time if a transfer between nodes uses one NIC, and if it uses all NICs."""
    import numpy as np

    notes = []
    for way in results:
        if way.multi_nic_passes:
            fast = sum(float(np.mean(one.seconds)) for one in way.multi_nic_passes)
            notes += textwrap.wrap(
                f"{way.name}: {1e3 * way.seconds:.4g} ms if a transfer between nodes uses one NIC (as in the table), "
                f"{1e3 * fast:.4g} ms if it uses all {nics} NICs of a node",
                COLUMNS,
            )
    return notes


def _write_trace(call: PredictedCall, inputs: PredictionInputs, trace: Path) -> None:
    """Write the timeline of every rank; raise ValueError for too many ranks or with jitter."""
    from ..timeline.events import as_chrome
    from .ring_time import predict_passes, predicted_timeline

    if call.world > MOST_RANKS:
        raise ValueError(f"--trace draws every rank, so at most {MOST_RANKS} GPUs are allowed, not {call.world}")
    if inputs.perturbation.jitter:
        raise ValueError("--trace draws one run, but --jitter needs several. Leave one of them out.")
    if is_printing_rank():
        setting = inputs.speed, inputs.links, inputs.perturbation
        passes = predict_passes(call, *setting, phases=inputs.phases, simulated=True)
        write_json(trace, as_chrome(predicted_timeline(_title(call), passes, call)), indent=None)


def _row(way: Alternative, call: PredictedCall, inputs: PredictionInputs) -> dict[str, Any]:
    """Return the table row of a method; without passes it has only name, memory and note."""
    import numpy as np

    from .ring_time import ideal_seconds
    from .speed import BACKWARD_FLOPS, FORWARD_FLOPS

    row: dict[str, Any] = {"way": way.name, "memory": way.memory / 1e9, "note": way.note or None}
    if not way.passes:
        return row
    total = np.sum([item.seconds for item in way.passes], axis=0)
    pairs = call.batch * call.heads * sum(float(area.pairs) for area in call.areas())  # of all ranks
    flops = FORWARD_FLOPS * call.head_dim * pairs * (1 + BACKWARD_FLOPS * (len(way.passes) > 1))
    row |= {SHORT[item.phase]: 1e3 * float(np.mean(item.seconds)) for item in way.passes}
    row |= {
        "ideal": 100 * sum(float(ideal_seconds(call, inputs.speed, item.phase)) for item in way.passes) / way.seconds,
        "exposed": 1e3 * sum(float(np.mean(item.exposed)) for item in way.passes),
        "worst hop": 1e3 * max(float(np.mean(item.worst)) for item in way.passes),
        "TFLOP/s": flops / way.seconds / call.world / 1e12,
    }
    if total.ndim:
        row["spread"] = 1e3 * float(total.std())
    return row


def _notes(call: PredictedCall, inputs: PredictionInputs) -> list[str]:
    from .alternatives import straggler_seconds, tokens_needed

    notes = []
    if not call.is_plain or call.world == 1:
        notes = ["other methods need at least 2 GPUs, equal (zigzag: even) shards, and a full or causal mask"]
    elif not inputs.perturbation.is_active:
        needed = tokens_needed(call, inputs)
        tokens = "more than 4m" if needed is None else f"{needed:,}"
        notes = [f"tokens per GPU for 90% of ideal by the {call.name}: {tokens}"]
    if inputs.perturbation.slow:
        even, slow, balanced = (1e3 * seconds for seconds in straggler_seconds(call, inputs))
        notes.append(f"slow GPUs: {even:.3f} ms without them, {slow:.3f} ms with equal shards ({slow / even - 1:+.1%})")
        notes.append(f"slow GPUs with Layout.balanced: {balanced:.3f} ms ({balanced / even - 1:+.1%})")
    memory = call.memory(backward=inputs.has_backward)
    parts = ", ".join(f"{name} {flags.human_count(nbytes, 'B')}" for name, nbytes in memory.items())
    return [*notes, *textwrap.wrap(f"memory per GPU of the {call.name}: {parts}", COLUMNS)]


def _map(
    call: PredictedCall, inputs: PredictionInputs, axes: dict[str, list[int]], capacity: float, picture: Path
) -> tuple[Result, str]:
    """Predict and draw the map; return rows per number of GPUs with a column per tokens per GPU, and the summary."""
    from .alternatives import ENOUGH_IDEAL, draw_map, sweep_percents

    percents = sweep_percents(call, inputs, axes["tokens"], axes["gpus"], capacity)
    rows = [
        {"GPUs": flags.size_text(world), **{flags.size_text(length): value for length, value in column.items()}}
        for world, column in percents.items()
    ]
    empty = [flags.size_text(world) for world, column in percents.items() if None in column.values()]
    notes = (
        [f"empty cells at {', '.join(empty)} GPUs: the call does not fit into {capacity / 1e9:.3g} GB"] if empty else []
    )
    largest = percents[max(percents)]
    enough = [tokens for tokens, value in largest.items() if value is not None and value >= 100 * ENOUGH_IDEAL]
    length_text = f"{flags.size_text(min(enough))} tokens per GPU" if enough else "at none of these lengths"
    if is_printing_rank():
        draw_map(percents, "\n".join(_heading(call, inputs, is_map=True)), picture)
    units = {"GPUs": "", **{flags.size_text(length): "" for length in axes["tokens"]}}
    notes.append(f"picture: {picture}")
    result = Result("predict sweep", units, [*rows], notes=notes, provenance=_provenance(call, inputs))
    return result, f"90% of ideal on {flags.size_text(max(percents))} GPUs: {length_text}"


def _title(call: PredictedCall) -> str:
    from ..common.attention import mask_label

    return f"{call.layout}, {mask_label(call.mask)}, H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}"


def _heading(call: PredictedCall, inputs: PredictionInputs, *, is_map: bool) -> list[str]:
    """Return lines that describe the call, the links, the speed and the perturbation."""
    links, speed = inputs.links, inputs.speed
    problem, between = speed.name, ""
    if not is_map:
        problem = f"{call.tokens:,} tokens on each of {call.world:,} {speed.name}"
        problem += f" on {call.nodes:,} nodes" if call.nodes > 1 else ""
    nics = "one NIC per GPU" if links.nics is None else f"{links.nics:g} NIC{'s' * (links.nics != 1)} per node"
    if is_map or call.nodes > 1:
        between = f"; between nodes {links.between.rate / 1e9:.0f} GB/s per NIC, {nics} ({links.between.source})"
    lines = [
        f"{problem}, B{call.batch}, {_title(call)}, {' and '.join(inputs.phases)}",
        f"links: {links.inside.rate / 1e9:.0f} GB/s inside nodes ({links.inside.source}){between}",
        f"speed: {'; '.join(inputs.measured_rows)}" if inputs.measured_rows else _speed_note(speed),
        str(inputs.perturbation),
    ]
    return [part for line in lines for part in textwrap.wrap(line, COLUMNS)]


def _speed_note(speed: Speed) -> str:
    """Return a note on the speed of the default kernels; empty if flags give the speed."""
    if speed.peak is None:
        return ""
    forward, backward = speed.forward / speed.peak, speed.backward / speed.peak
    return (
        f"kernel rate: {forward:.0%} of the peak of {speed.peak / 1e12:.0f} TFLOP/s forward, {backward:.0%} backward, "
        "the instruction bound of the default kernels; measured on no GPU"
    )


def _provenance(call: PredictedCall, inputs: PredictionInputs) -> dict[str, Any]:
    from ..common.provenance import provenance
    from .predicted_call import CPU
    from .ring_time import timeline_details

    return provenance(CPU) | {
        "call": timeline_details(call) | {"tokens": call.tokens, "slots": call.slots, "chunks": call.chunks},
        "speed": asdict(inputs.speed), "links": asdict(inputs.links), "measured": list(inputs.measured_rows),
        "perturbation": str(inputs.perturbation),
    }  # fmt: skip
