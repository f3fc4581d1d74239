"""``ringattn predict``: how long a ring that is not here takes, and what would hide its links."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...ring.arguments import Layouts, mask_of
from ...ring.layout import Layout
from ...ring.mask import UNLIMITED
from ..masks import boundaries_of, title
from ..output import check_targets, prints, write_csv, write_json
from ..shapes import Causal, CuSeqlens, DocumentsOfMean, DocumentsSeed, Window, binary, dtype_name, grouped, human, size
from ..tables import table
from ..timeline.events import as_chrome
from .answers import Needed, Straggling, rows_of_sweep, straggling, tokens_needed
from .call import NAMED, Call
from .launch import whole
from .links import PRESETS, Links, link_of
from .memory import check as check_memory
from .memory import memory
from .others import Way, ways
from .ring import MOST_RANKS, Pass, Trouble, ideal_seconds, predicted
from .speed import GPUS, Speed
from .sweep import draw
from .timelines import timeline

SPEED_TOKENS = 16384  # of the launch whose TFLOP/s are given

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def speed_of(gpu: str, forward: float | None, backward: float | None, call: Call) -> Speed:
    """A GPU's constants, with the TFLOP/s that are given for causal or full attention of 16k tokens.

    Raises:
        ValueError: an unknown GPU, or a speed that is none.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: it must be one of {', '.join(GPUS)}; --tflops says how fast it is")
    base = GPUS[gpu]
    if forward is None:
        if backward is not None:
            raise ValueError("backward-tflops is given without tflops: both are of the same kernel")
        return base
    area = whole(SPEED_TOKENS, causal=call.mask.causal)
    form = replace(call.form, tokens=SPEED_TOKENS, chunks=1)
    told = None if backward is None else (backward * 1e12, area, form)
    return base.fitted(forward=(forward * 1e12, area, form), backward=told)


def slow_of(texts: Sequence[str]) -> dict[int, float]:
    """``3=1.5``: rank 3 takes 1.5 times as long.

    Raises:
        ValueError: not of this form, or a factor below 1.
    """
    found = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise ValueError(f"slow is {text!r}: it must be RANK=FACTOR, as in 3=1.5") from None
        if not found[int(rank)] >= 1:
            raise ValueError(f"slow is {text!r}: a factor is how many times as long the rank takes, at least 1")
    return found


def report(call: Call, device: Speed, links: Links, passes: Sequence[Pass], trouble: Trouble) -> dict[str, Any]:
    """Everything, for JSON."""
    ideal = {one.phase: ideal_seconds(call, device, one.phase) for one in passes}
    found: dict[str, Any] = {
        "schema": "ringattn predict 1",
        "call": {name: value for name, value in asdict(replace(call, mask=call.mask)).items() if name != "mask"},
        "mask": title(call.mask),
        "speed": asdict(device),
        "links": asdict(links),
        "passes": [
            {
                "phase": one.phase, "seconds": one.seconds, "exposed": one.waited, "ideal": ideal[one.phase],
                "percent_of_ideal": 100 * ideal[one.phase] / one.seconds, "exposed_by_hop": one.by_hop,
            }
            for one in passes
        ],
        "memory": memory(call),
    }  # fmt: skip
    if call.is_plain:
        found["ways"] = [asdict(way) | {"percent_of_ideal": way.percent} for way in ways(call, device, links)]
        found["tokens_needed"] = asdict(tokens_needed(call, device, links))
    if trouble.slow:
        found["slow"] = asdict(straggling(call, device, links, dict(trouble.slow)))
    return found


def text(call: Call, links: Links, found: dict[str, Any]) -> str:
    """The same, for the terminal."""
    where = f"{call.world:,} GPUs" + (f" on {call.nodes:,} nodes" if call.nodes > 1 else "")
    lines = [
        f"{call.layout}, {found['mask']}, {call.tokens:,} tokens on each of {where}, B{call.batch} "
        f"H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}",
        f"links: {links.inside.rate / 1e9:.0f} GB/s inside nodes ({links.inside.source})"
        + (f", {links.between.rate / 1e9:.0f} between ({links.between.source})" if call.nodes > 1 else ""),
    ]
    rows = [
        {
            "": one["phase"], "ms": 1e3 * one["seconds"], "ideal ms": 1e3 * one["ideal"],
            "% of ideal": one["percent_of_ideal"], "exposed ms": 1e3 * one["exposed"],
            "worst hop": _worst(one["exposed_by_hop"]),
        }
        for one in found["passes"]
    ]  # fmt: skip
    parts = ["\n".join(lines), table(rows)]
    if "ways" in found:
        parts.append(table([_way_row(Way(**_without(one, "percent_of_ideal"))) for one in found["ways"]]))
        parts.append(_needed(Needed(**found["tokens_needed"])))
    if "slow" in found:
        parts.append(_slow(Straggling(**found["slow"])))
    total = sum(found["memory"].values())
    parts.append(f"memory per GPU: {human(total, 'B')}: " + ", ".join(
        f"{name} {human(nbytes, 'B')}" for name, nbytes in found["memory"].items()
    ))  # fmt: skip
    return "\n\n".join(parts)


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def _worst(by_hop: Sequence[float]) -> str:
    most = max(by_hop, default=0.0)
    return f"{list(by_hop).index(most)}: {1e3 * most:.3f} ms" if most > 0 else "none"


def _way_row(way: Way) -> dict[str, Any]:
    return {
        "way": way.name, "forward ms": 1e3 * way.forward, "backward ms": 1e3 * way.backward,
        "% of ideal": way.percent, "exposed ms": 1e3 * way.exposed, "note": way.note,
    }  # fmt: skip


def _needed(needed: Needed) -> str:
    def told(tokens: int | None) -> str:
        return "more than 4m" if tokens is None else f"{tokens:,}"

    return (
        f"tokens per GPU that hide the links to 1%: forward {told(needed.forward)} (closed form "
        f"{needed.closed_forward:,.0f}), backward {told(needed.backward)} (closed form {needed.closed_backward:,.0f})"
    )


def _slow(found: Straggling) -> str:
    return (
        f"slow GPUs: {1e3 * found.even:.3f} ms without, {1e3 * found.slow:.3f} ms with equal shards "
        f"(+{found.slow / found.even - 1:.1%}), {1e3 * found.balanced:.3f} ms with Layout.balanced "
        f"(+{found.balanced / found.even - 1:.1%})"
    )


def axes_of(text: str) -> dict[str, list[int]]:
    """``tokens=1k..128k,gpus=2..16k``: powers of two from one end to the other.

    Raises:
        ValueError: not both, or not of this form.
    """
    found = {}
    for part in text.split(","):
        name, _, ends = part.partition("=")
        try:
            first, last = (size(end) for end in ends.split(".."))
        except (ValueError, typer.BadParameter):
            raise ValueError(f"sweep is {text!r}: it takes tokens=1k..128k,gpus=2..16k") from None
        found[name] = [first << step for step in range(64) if first << step <= last] if first else []
    if set(found) != {"tokens", "gpus"} or not all(found.values()):
        raise ValueError(f"sweep is {text!r}: it takes tokens=1k..128k,gpus=2..16k")
    return found


@app.command()
def predict(
    tokens: Annotated[Any, typer.Option(parser=size, metavar="SIZE", help="Per GPU.")] = "8k",
    gpus: Annotated[Any, typer.Option(parser=size, metavar="COUNT", help="Ranks of the ring.")] = "8",
    nodes: Annotated[int, typer.Option(min=1, help="Machines; several make a two-level ring.")] = 1,
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(NAMED)}.")] = "zigzag",
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="[default: --heads]")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE")] = "bf16",
    causal: Causal = True,
    window: Window = None,
    cu_seqlens: CuSeqlens = None,
    documents: DocumentsOfMean = None,
    documents_seed: DocumentsSeed = 0,
    gpu: Annotated[str, typer.Option(help=f"Its constants: {', '.join(GPUS)}.")] = "h100",
    tflops: Annotated[float | None, typer.Option(help="Of the forward kernel at 16k tokens, this mask.")] = None,
    backward_tflops: Annotated[float | None, typer.Option(help="Of both backward kernels, 2.5 forwards.")] = None,
    link: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}; GB/s,10us; a file of bench links.")] = "nvlink4",
    link_between: Annotated[str, typer.Option(help="The same, between nodes.")] = "ib400",
    chunks: Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")] = 1,
    slots: Annotated[int, typer.Option(min=1)] = 3,
    prefetch: Annotated[int | None, typer.Option(min=0)] = None,
    wire_dtype: Annotated[str | None, typer.Option(help="What K/V travel as: bfloat16, float8_e4m3fn.")] = None,
    grad_wire_dtype: Annotated[str | None, typer.Option(help="What sums travel as: bfloat16.")] = None,
    slow: Annotated[list[str] | None, typer.Option(metavar="RANK=FACTOR", help="Takes so many times as long.")] = None,
    jitter: Annotated[float, typer.Option(min=0.0, help="Spread of a launch's time, 0.05 is 5%.")] = 0.0,
    beside: Annotated[float | None, typer.Option(help="Speed that kernels lose beside transfers, 0 to 1.")] = None,
    memory_gb: Annotated[float | None, typer.Option("--memory", help="GB of a GPU.")] = None,
    sweep: Annotated[str | None, typer.Option(metavar="tokens=1k..128k,gpus=2..16k", help="A map instead.")] = None,
    picture: Annotated[Path, typer.Option(help="Of the map: PNG or SVG.")] = Path("predict.png"),
    trace: Annotated[Path | None, typer.Option(help="Every rank's timeline, for Perfetto.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the passes, or the points of the map.")] = None,
) -> None:
    """Time, exposed communication and memory of a ring of any size, by the loops that really run."""
    check_targets(json, csv, trace, picture if sweep else None)
    try:
        seqlen = tokens * gpus
        boundaries = boundaries_of(seqlen, cu_seqlens, documents, documents_seed)
        held = Layout.uneven([seqlen])
        mask = mask_of(
            Layouts(held, held), batch, causal=causal, window_size=window or (UNLIMITED, UNLIMITED),
            cu_seqlens=boundaries, seqused_k=None, prefix_length=None, block_mask=None,
        )  # fmt: skip
        call = Call(
            tokens, gpus, layout, mask, heads, grouped(heads, kv_heads), head_dim, batch, dtype, nodes, True, chunks,
            slots, prefetch, 1, wire_dtype, grad_wire_dtype,
        )  # fmt: skip
        device, links = speed_of(gpu, tflops, backward_tflops, call), Links(link_of(link), link_of(link_between))
        device = replace(
            device,
            beside=device.beside if beside is None else beside,
            capacity=device.capacity if memory_gb is None else memory_gb * 1e9,
        )
        if sweep is not None:
            _map(call, device, links, axes_of(sweep), picture, json, csv)
            return
        check_memory(call, device.capacity)
        trouble = Trouble(slow_of(slow or []), jitter)
        _one(call, device, links, trouble, trace, json, csv)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _one(
    call: Call, device: Speed, links: Links, trouble: Trouble, trace: Path | None, json: str | None, csv: Path | None
) -> None:
    if trace is not None and call.world > MOST_RANKS:
        raise ValueError(f"trace draws every rank, of {MOST_RANKS} at most: there are {call.world}")
    passes = predicted(call, device, links, trouble, told_apart=trace is not None)
    found = report(call, device, links, passes, trouble)
    if not prints():
        return
    if trace is not None:
        trace.write_text(jsonlib.dumps(as_chrome(timeline(found["mask"], passes, call.plans()))))
    if json is not None:
        write_json(json, found)
    if csv is not None:
        write_csv(csv, [_without(one, "exposed_by_hop") for one in found["passes"]])
    if json != "-":
        typer.echo(text(call, links, found))


def _map(
    call: Call, device: Speed, links: Links, axes: dict[str, list[int]], picture: Path, json: str | None,
    csv: Path | None,
) -> None:  # fmt: skip
    if not call.is_plain:
        raise ValueError("sweep is of thousands of GPUs: it takes contiguous, zigzag and striped, full or causal")
    rows = rows_of_sweep(call, device, links, axes["tokens"], axes["gpus"])
    if not prints():
        return
    heading = (
        f"{call.layout}, {title(call.mask)}, H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}, forward and "
        f"backward\n{links.inside.rate / 1e9:.0f} GB/s inside nodes of {call.per_node}, "
        f"{links.between.rate / 1e9:.0f} GB/s per GPU between"
    )
    draw(rows, heading, picture)
    if json is not None:
        write_json(json, rows)
    if csv is not None:
        write_csv(csv, rows)
    if json != "-":
        by_tokens = {
            one: {"tokens": binary(one)} | {binary(world): 0.0 for world in axes["gpus"]} for one in axes["tokens"]
        }
        for row in rows:
            by_tokens[int(row["tokens"])][binary(int(row["gpus"]))] = round(row["percent of ideal"], 1)
        typer.echo(table(list(by_tokens.values()), title=f"percent of ideal, {heading}\n"))
        typer.echo(f"\n{picture}")
