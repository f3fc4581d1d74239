"""``ringattn predict``: how long a ring that is not here takes, and the other ways to compute the same."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.output import check_targets, prints, write_json
from ..common.result import Result, finish
from .links import PRESETS
from .speed import DRAWS, GPUS, MOST_RANKS

if TYPE_CHECKING:  # which bring torch, and --help is there at once
    from .alternatives import Way
    from .call import Call
    from .inputs import Inputs
    from .speed import Speed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PICTURE = Path("predict.png")
BETWEEN = "ib400"
MOST_GPUS = 16 * 1024
TOKENS, WORLD = 8192, 8
ONE_RING = ("tokens", "seqlen", "trace", "slow", "jitter")
"""Flags that have no say beside --sweep."""
WHOLE_RING = ("tokens", "seqlen", "world", "sweep")
"""Flags that have no say beside the file of a layout."""
COLUMNS = 80
SHORT = {"forward": "fwd", "backward": "bwd"}


class PassName(StrEnum):
    """What is computed: inference has no backward."""

    forward = "forward"
    both = "both"


def slow_rank(text: str) -> tuple[int, float]:
    """``3=1.5``: rank 3 takes 1.5 times as long; a parser of typer options.

    Raises:
        typer.BadParameter: not of this form.
    """
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: it must be RANK=FACTOR, as in 3=1.5") from None


def axes(text: str) -> dict[str, list[int]]:
    """``tokens=1k..128k,gpus=2..16k``: powers of two from one end to the other; a parser of typer options.

    Raises:
        typer.BadParameter: not both, or not of this form.
    """
    result = {}
    for part in text.split(","):
        name, _, ends = part.partition("=")
        first, last = (flags.size(end) for end in (ends if ".." in ends else "0..0").split("..", 1))
        result[name] = [first << step for step in range(64) if first << step <= last] if first else []
    if set(result) != {"tokens", "gpus"} or not all(result.values()):
        raise typer.BadParameter(f"{text!r}: it takes tokens=1k..128k,gpus=2..16k")
    return result


@app.command()
def predict(
    context: typer.Context,
    tokens: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help=f"Tokens per rank; default: {TOKENS}.")
    ] = None,
    seqlen: Annotated[
        Any, typer.Option(parser=flags.count, metavar="SIZE", help="Tokens in all, in place of --tokens.")
    ] = None,
    world: Annotated[
        Any, typer.Option("--world", "--gpus", parser=flags.count, metavar="COUNT", help="Ranks, a GPU each.")
    ] = str(WORLD),
    nodes: Annotated[int, typer.Option(min=1, help="Machines; several make a two-level ring.")] = 1,
    nics: Annotated[int | None, typer.Option(min=1, help="NICs of a node, at most and by default one per GPU.")] = None,
    layout: flags.LayoutOrFile = flags.LayoutName.zigzag,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 128,
    batch: flags.Batch = 1,
    dtype: flags.Dtype = "bf16",
    passes: Annotated[PassName, typer.Option("--pass", help="Of inference, or of training.")] = PassName.both,
    causal: flags.Causal = True,
    window: flags.Window = None,
    cu_seqlens: flags.CuSeqlens = None,
    documents: flags.DocumentsOfMean = None,
    documents_seed: flags.DocumentsSeed = None,
    prefix_length: flags.PrefixLength = None,
    block_mask: flags.BlockMaskPattern = None,
    kernels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speeds: JSON of bench kernels, or of that case of a suite.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"Its constants: {', '.join(GPUS)} (where left out that of --kernels, else h100)."),
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Of the forward kernel at 16k tokens, this mask.")] = None,
    backward_tflops: Annotated[float | None, typer.Option(help="Of both backward kernels, 2.5 forwards.")] = None,
    link: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(PRESETS)}; GB/s,10us; JSON of bench links (where left out that of the GPU)."),
    ] = None,
    link_between: Annotated[str | None, typer.Option(help="The same, of a NIC (ib400 where left out).")] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")] = 1,
    slots: Annotated[int, typer.Option(min=1)] = 3,
    wire_dtype: flags.WireDtype = None,
    grad_wire_dtype: flags.GradWireDtype = None,
    slow: Annotated[
        list[Any] | None,
        typer.Option(parser=slow_rank, metavar="RANK=FACTOR", help=f"Times as long; up to {MOST_RANKS} GPUs."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help=f"Spread of a launch's time, 0.05 is 5%; {DRAWS} draws, up to {MOST_RANKS} GPUs.")
    ] = 0.0,
    memory_gb: Annotated[float | None, typer.Option("--memory", help="GB of a GPU.")] = None,
    sweep: Annotated[
        Any, typer.Option(parser=axes, metavar="tokens=1k..128k,gpus=2..16k", help="A map instead.")
    ] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="Of the map: PNG or SVG.")] = PICTURE,
    trace: flags.Trace = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Time, exposed communication and memory of a ring of any size, by the loops that really run."""
    check_targets(picture)
    flags.check_needs(context, {"picture": "sweep", "documents_seed": "documents", "backward_tflops": "tflops"})
    flags.check_apart(context, "tokens", "seqlen")
    flags.check_apart(context, "kernels", "tflops")
    for name in ONE_RING:
        flags.check_apart(context, "sweep", name)
    from ...ring import Layout
    from ..common.attention import AttentionConfig, boundaries_of
    from .call import Call
    from .inputs import Inputs, above_zero, speed_of
    from .links import Links, link_of
    from .program import PASSES
    from .speed import Perturbation

    try:
        if picture.suffix not in (".png", ".svg"):
            raise ValueError(f"picture is {str(picture)!r}: its name must end in .png or .svg")
        held = layout.value if isinstance(layout, flags.LayoutName) else flags.read_layout(context, layout, *WHOLE_RING)
        if isinstance(held, Layout):
            if len({*held.lengths}) > 1:
                shortest, longest = min(held.lengths), max(held.lengths)
                raise ValueError(
                    f"layout is {layout}, shards of {shortest:,} to {longest:,} tokens: they must be equal"
                )
            world, seqlen = held.world, held.seqlen
        most = max(sweep["gpus"]) if sweep else world
        if most > MOST_GPUS:
            raise ValueError(f"{'gpus of sweep' if sweep else 'world'} is {most:,}: at most {MOST_GPUS:,} GPUs")
        above_zero("GB", memory=memory_gb)
        if seqlen is not None and seqlen % world:
            fits = max(seqlen // world, 1) * world
            raise ValueError(f"seqlen is {seqlen:,}: {world:,} ranks have equal shards of it, as of {fits:,}")
        tokens = tokens or (seqlen or TOKENS * world) // world
        boundaries = boundaries_of(tokens * world, cu_seqlens, documents, documents_seed)
        config = AttentionConfig(
            tokens * world, batch=batch, causal=causal, window=window or (-1, -1), prefix_length=prefix_length,
            cu_seqlens=None if boundaries is None else tuple(boundaries), block_mask=block_mask, layout="contiguous",
        )  # fmt: skip
        call = Call(
            tokens, world, held, config.mask, heads, flags.kv_heads_of(heads, kv_heads), head_dim, batch, dtype,
            nodes, chunks=chunks, slots=slots, wire_dtype=wire_dtype, grad_wire_dtype=grad_wire_dtype,
        )  # fmt: skip
        if most <= call.per_node and (link_between is not None or nics is not None):
            raise ValueError("link-between and nics are of several nodes: --nodes counts them")
        if nics is not None and nics > call.per_node:
            raise ValueError(f"nics is {nics}: a node has {call.per_node} GPUs, and each uses one NIC at most")
        if call.per_node == 1 and link is not None and not sweep:
            raise ValueError("link joins GPUs of a node, and each has one: --link-between joins nodes")
        speed, measured = speed_of(call, gpu, tflops, backward_tflops, kernels)
        between = link_of(link_between or BETWEEN, "link-between")
        if link_between is None:
            between = replace(between, source=f"assumed: {between.source}; --link-between")
        links = Links(link_of(link or speed.link), between, nics)
        phases = PASSES[:1] if passes is PassName.forward else PASSES
        inputs = Inputs(speed, links, Perturbation(dict(slow or []), jitter), phases, measured)
        capacity = speed.capacity if memory_gb is None else memory_gb * 1e9
        if sweep:
            result, first = _map(call, inputs, sweep, capacity, picture)
        else:
            result, first = _one(call, inputs, capacity, trace)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if prints() and "-" not in (json, csv):
        typer.echo("\n".join([first, *_heading(call, inputs, is_map=bool(sweep)), ""]))
    finish(result, json, csv)


def _one(call: Call, inputs: Inputs, capacity: float, trace: Path | None) -> tuple[Result, str]:
    """A row for every way; and the sentence that comes first."""
    from .alternatives import nics_of, ways
    from .crossover import check_memory

    check_memory(call, capacity, backward=inputs.backward)
    if trace is not None:
        _write_trace(call, inputs, trace)
    results = ways(call, inputs, capacity=capacity)
    rows = [_row(way, call, inputs) for way in results]
    best = f"{results[0].name}: {rows[0]['ideal']:.0f}% of ideal"
    units = {"way": "", "ideal": "%", **{SHORT[phase]: "ms" for phase in inputs.phases}, "exposed": "ms",
             "TFLOP/s": "", "memory": "GB", "worst hop": "ms", "spread": "ms", "note": ""}  # fmt: skip
    if not inputs.perturbation.jitter:
        units.pop("spread")
    unfit = [f"{way.name}: {way.note}" for way in results if not way.passes]
    notes = [*unfit, *_ranges(results, nics_of(call, inputs)), *_notes(call, inputs), f"best: {best}"]
    return Result("predict", units, [*rows], notes=notes, provenance=_provenance(call, inputs)), best


def _ranges(results: Sequence[Way], nics: int) -> list[str]:
    """Between which times a ring lies whose transfers cross nodes one at a time, which a transport may cut or not."""
    import numpy as np

    notes = []
    for way in results:
        if way.spread:
            fast = sum(float(np.mean(one.seconds)) for one in way.spread)
            notes += textwrap.wrap(
                f"{way.name}: {1e3 * way.seconds:.4g} ms where a transfer between nodes takes one NIC (the table), "
                f"{1e3 * fast:.4g} ms where it is spread over all {nics} of a node",
                COLUMNS,
            )
    return notes


def _write_trace(call: Call, inputs: Inputs, trace: Path) -> None:
    """Every rank's timeline; ValueError where it is not of one run, or of too many ranks."""
    from ..timeline.events import as_chrome
    from .ring import predicted
    from .timelines import timeline

    if call.world > MOST_RANKS:
        raise ValueError(f"trace draws every rank, of {MOST_RANKS} at most: there are {call.world}")
    if inputs.perturbation.jitter:
        raise ValueError("trace draws one run, and jitter is of many: leave one of them out")
    if prints():
        made = predicted(call, inputs.speed, inputs.links, inputs.perturbation, phases=inputs.phases, simulated=True)
        write_json(trace, as_chrome(timeline(_title(call), made, call)), indent=None)


def _row(way: Way, call: Call, inputs: Inputs) -> dict[str, Any]:
    """What a way takes; without times where it does not fit."""
    import numpy as np

    from .ring import ideal_seconds
    from .speed import BACKWARD_FLOPS, FORWARD_FLOPS

    row: dict[str, Any] = {"way": way.name, "memory": way.memory / 1e9, "note": way.note or None}
    if not way.passes:
        return row
    total = np.sum([one.seconds for one in way.passes], axis=0)
    pairs = call.batch * call.heads * sum(float(area.pairs) for area in call.areas())  # of all ranks
    flops = FORWARD_FLOPS * call.head_dim * pairs * (1 + BACKWARD_FLOPS * (len(way.passes) > 1))
    row |= {SHORT[one.phase]: 1e3 * float(np.mean(one.seconds)) for one in way.passes}
    row |= {
        "ideal": 100 * sum(float(ideal_seconds(call, inputs.speed, one.phase)) for one in way.passes) / way.seconds,
        "exposed": 1e3 * sum(float(np.mean(one.exposed)) for one in way.passes),
        "worst hop": 1e3 * max(float(np.mean(one.worst)) for one in way.passes),
        "TFLOP/s": flops / way.seconds / call.world / 1e12,
    }
    if total.ndim:
        row["spread"] = 1e3 * float(total.std())
    return row


def _notes(call: Call, inputs: Inputs) -> list[str]:
    from .crossover import straggling, tokens_needed

    notes = []
    if not call.is_plain or call.world == 1:
        notes = ["other ways: of 2 GPUs or more, equal (zigzag: even) shards, full or causal"]
    elif not inputs.perturbation.is_there:
        needed = tokens_needed(call, inputs)
        tokens = "more than 4m" if needed is None else f"{needed:,}"
        notes = [f"tokens per GPU for 90% of ideal by the {call.name}: {tokens}"]
    if inputs.perturbation.slow:
        even, slow, balanced = (1e3 * seconds for seconds in straggling(call, inputs))
        notes.append(f"slow GPUs: {even:.3f} ms without, {slow:.3f} ms with equal shards ({slow / even - 1:+.1%})")
        notes.append(f"and {balanced:.3f} ms with Layout.balanced ({balanced / even - 1:+.1%})")
    parts = ", ".join(
        f"{name} {flags.human(nbytes, 'B')}" for name, nbytes in call.memory(backward=inputs.backward).items()
    )
    return [*notes, *textwrap.wrap(f"memory of the {call.name}: {parts}", COLUMNS)]


def _map(call: Call, inputs: Inputs, axes: dict[str, list[int]], capacity: float, picture: Path) -> tuple[Result, str]:
    """A row for every number of GPUs, a column for every number of tokens per GPU."""
    from .crossover import ENOUGH, draw, sweep

    percents = sweep(call, inputs, axes["tokens"], axes["gpus"], capacity)
    rows = [{"GPUs": flags.binary(world), **{flags.binary(one): value for one, value in column.items()}}
            for world, column in percents.items()]  # fmt: skip
    empty = [flags.binary(world) for world, column in percents.items() if None in column.values()]
    notes = [f"empty at {', '.join(empty)} GPUs: does not fit {capacity / 1e9:.3g} GB"] if empty else []
    most = percents[max(percents)]
    enough = [tokens for tokens, value in most.items() if value is not None and value >= 100 * ENOUGH]
    where = f"{flags.binary(min(enough))} tokens per GPU" if enough else "at no length of these"
    if prints():
        draw(percents, "\n".join(_heading(call, inputs, is_map=True)), picture)
    units = {"GPUs": "", **{flags.binary(one): "" for one in axes["tokens"]}}
    notes.append(f"picture: {picture}")
    result = Result("predict sweep", units, [*rows], notes=notes, provenance=_provenance(call, inputs))
    return result, f"90% of ideal on {flags.binary(max(percents))} GPUs: {where}"


def _title(call: Call) -> str:
    from ..common.attention import mask_title

    return f"{call.layout}, {mask_title(call.mask)}, H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}"


def _heading(call: Call, inputs: Inputs, *, is_map: bool) -> list[str]:
    """What is predicted, of which GPUs and links."""
    links, speed = inputs.links, inputs.speed
    sized, between = speed.name, ""
    if not is_map:
        sized = f"{call.tokens:,} tokens on each of {call.world:,} {speed.name}"
        sized += f" on {call.nodes:,} nodes" if call.nodes > 1 else ""
    nics = "one NIC per GPU" if links.nics is None else f"{links.nics:g} NIC{'s' * (links.nics != 1)} a node"
    if is_map or call.nodes > 1:
        between = f"; between nodes {links.between.rate / 1e9:.0f} GB/s per NIC, {nics} ({links.between.source})"
    lines = [
        f"{sized}, B{call.batch}, {_title(call)}, {' and '.join(inputs.phases)}",
        f"links: {links.inside.rate / 1e9:.0f} GB/s inside nodes ({links.inside.source}){between}",
        f"speed: {'; '.join(inputs.measured)}" if inputs.measured else _guessed(speed),
        str(inputs.perturbation),
    ]
    return [part for line in lines for part in textwrap.wrap(line, COLUMNS)]


def _guessed(speed: Speed) -> str:
    """Say how fast a preset is; nothing where the flags do."""
    if speed.peak is None:
        return ""
    forward, backward, peak = (rate / 1e12 for rate in (speed.forward, speed.backward, speed.peak))
    return f"speed: {forward:.0f} TFLOP/s forward, {backward:.0f} backward, not measured; {peak:.0f} are published"


def _provenance(call: Call, inputs: Inputs) -> dict[str, Any]:
    from dataclasses import asdict

    from ..common.provenance import provenance
    from .call import CPU
    from .timelines import described

    return provenance(CPU) | {
        "call": described(call) | {"tokens": call.tokens, "slots": call.slots, "chunks": call.chunks},
        "speed": asdict(inputs.speed), "links": asdict(inputs.links), "measured": list(inputs.measured),
        "perturbation": str(inputs.perturbation),
    }  # fmt: skip
