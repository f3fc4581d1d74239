"""``ringattn bench overlap``: compute alone, communication alone, together; what buffers and prefetch are worth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from ...comm import Limits
from ...ring import Ring
from ..common.attention import AttentionConfig
from ..common.flags import (
    LayoutName,
    TimerOfRings,
    binary,
    check_chunks,
    check_transport,
    count,
    device_name,
    dtype_name,
    human,
    kv_heads_of,
    sizes,
    timer_of_rings,
)
from ..common.launching import Member, cores, member, process_group, started, world_of
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.provenance import provenance
from ..common.tables import table
from ..common.timing import Clock, Ranks, Samples, interleaved
from .memory import check_room
from .rows import Row, contention, step_of, verdict
from .runs import BACKWARD, COMMUNICATION, COMPUTE, FORWARD, STEP, TOGETHER, Shard, Step, shard_of
from .settings import check_settings

LINK_SHARE = 0.8
PROBES = 3  # runs of compute alone that the link's speed is set by
PHASES = (FORWARD, BACKWARD)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Wish:
    """What the command was asked for; the same on every rank."""

    problem: AttentionConfig
    slots: tuple[int, ...] = (1, 2, 3)
    prefetch: tuple[int, ...] = (0, 1, 2)
    chunks: tuple[int, ...] = (1,)
    repeats: int = 5
    link_share: float | None = LINK_SHARE  # communication alone over compute alone; None: the link as it is
    transport: str = "process_group"
    device: str = "cpu"
    timer: str = ""  # one of OF_RINGS; empty: the device's own


@dataclass
class Report:
    """What every rank knows after a measurement."""

    rows: list[Row] = field(default_factory=list)
    bytes_per_second: float | None = None  # of the throttled link
    transport: str = ""


def spawned(store: str, wish: Wish) -> Report:
    """The entry of the processes that the command starts itself."""
    place = member()
    assert place is not None
    return measure(place, wish, store)


def measure(place: Member, wish: Wish, store: str | None = None) -> Report:
    """One rank of the measurement."""
    torch.set_num_threads(wish.problem.threads)
    torch.manual_seed(wish.problem.seed + place.rank)
    device = place.shared_device(wish.device)
    with process_group(place, store, device=device):
        report = Report(bytes_per_second=link_speed(wish, device) if wish.link_share is not None else None)
        limits = Limits(bytes_per_second=report.bytes_per_second)
        with (
            ExitStack() as stack,
            Progress(console=Console(stderr=True), disable=place.rank != 0, transient=True) as bar,
        ):
            rings: dict[tuple[int, int, int], Ring | str] = {}
            for setting in settings_of(wish):
                rings[setting] = opened = ring_of(wish, setting, limits)
                if isinstance(opened, Ring):
                    stack.enter_context(opened)
            report.rows = rows_of(wish, rings, device, bar)
            report.transport = next(ring.transport for ring in rings.values() if isinstance(ring, Ring))
        return report


def settings_of(wish: Wish) -> list[tuple[int, int, int]]:
    """(slots, prefetch, chunks) of every ring."""
    return [(slots, ahead, chunks) for chunks in wish.chunks for slots in wish.slots for ahead in wish.prefetch]


def ring_of(wish: Wish, setting: tuple[int, int, int], limits: Limits) -> Ring | str:
    """The ring, or why there is no such ring."""
    slots, prefetch, chunks = setting
    try:
        return Ring(transport=wish.transport, slots=slots, prefetch=prefetch, chunks=chunks, limits=limits)
    except ValueError as error:
        return str(error)


def link_speed(wish: Wish, device: torch.device) -> float:
    """Bytes per second at which the transfers of a step take the wished share of its compute."""
    with Ring(transport=wish.transport, chunks=wish.chunks[0]) as ring:
        shard = prepared(wish, ring, device)
        steps = {phase: Step(ring, shard, phase, COMPUTE) for phase in PHASES}
        taken = interleaved(steps, Clock(device, Ranks(), wish.timer), repeats=PROBES)
    moved = Ranks().slowest(sum(step.nbytes for step in steps.values()))
    assert wish.link_share is not None
    return moved / (wish.link_share * sum(samples.median for samples in taken.values()))


def prepared(wish: Wish, ring: Ring, device: torch.device) -> Shard:
    """Inputs of this rank, with the results that a backward reads; K/V of real shards lie in the ring's slots then."""
    shard = shard_of(wish.problem, ring, device)
    shard.out, shard.lse = Step(ring, shard, FORWARD, TOGETHER)()
    return shard


def rows_of(
    wish: Wish, rings: dict[tuple[int, int, int], Ring | str], device: torch.device, bar: Progress
) -> list[Row]:
    """Time everything in turns; a row per ring and phase, and per ring's step."""
    steps: dict[tuple[object, ...], Step] = {}
    for setting, ring in rings.items():
        if isinstance(ring, Ring):
            shard = prepared(wish, ring, device)
            for phase in PHASES:
                steps[*setting, phase] = Step(ring, shard, phase, TOGETHER)
                # alone, once for all rings with these chunks: the last one has the most buffers
                steps[setting[2], phase, COMPUTE] = Step(ring, shard, phase, COMPUTE)
                steps[setting[2], phase, COMMUNICATION] = Step(ring, shard, phase, COMMUNICATION)
    task = bar.add_task("timing", total=len(steps) * (wish.repeats + 1))
    named: dict[str, Callable[[], object]] = {str(key): step for key, step in steps.items()}
    clock = Clock(device, Ranks(), wish.timer)
    taken = interleaved(named, clock, repeats=wish.repeats, progress=lambda: bar.advance(task))
    found = {key: taken[str(key)] for key in steps}
    inside = {key: [run.seconds for run in step.inside[-wish.repeats :]] for key, step in steps.items()}
    rows = []
    for setting, ring in rings.items():
        if isinstance(ring, str):
            rows.append(Row(STEP, *setting, note=ring))
            continue
        phases = [row_of(setting, phase, found, inside, wish) for phase in PHASES]
        rows += [*phases, step_of(*phases)]
    return rows


def row_of(
    setting: tuple[int, int, int],
    phase: str,
    found: dict[tuple[object, ...], Samples],
    inside: dict[tuple[object, ...], list[float]],
    wish: Wish,
) -> Row:
    """One phase of one ring."""
    slots, prefetch, chunks = setting
    slowed = contention(inside[*setting, phase], inside[chunks, phase, COMPUTE])
    return Row(
        phase,
        slots,
        prefetch,
        chunks,
        pieces=wish.problem.world * chunks,
        compute=found[chunks, phase, COMPUTE],
        communication=found[chunks, phase, COMMUNICATION],
        together=found[*setting, phase],
        contention=None if slowed is None else Ranks().slowest(slowed),
    )


@app.command()
def overlap(
    world: Annotated[int | None, typer.Option(min=1, help="Processes; default: the GPUs, or 2; or its ranks.")] = None,
    tokens: Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")] = "2k",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[
        str | None, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16 [CPU: fp32, GPU: bf16].")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")] = True,
    layout: Annotated[LayoutName, typer.Option(help="Who holds which tokens.")] = LayoutName.zigzag,
    slots: Annotated[Any, typer.Option(parser=sizes, metavar="N,…", help="Buffers of K/V.")] = "1,2,3",
    prefetch: Annotated[Any, typer.Option(parser=sizes, metavar="N,…", help="Hops ahead; 0: blocking.")] = "0,1,2",
    chunks: Annotated[
        Any, typer.Option(parser=sizes, metavar="N,…", help="Runs of heads that a hop is cut into.")
    ] = "1,2",
    link_share: Annotated[
        float | None,
        typer.Option(min=0.01, help="Throttle the link: communication alone over compute alone. [CPU: 0.8]"),
    ] = None,
    transport: Annotated[str, typer.Option(help="As of Ring; default: process_group on the CPU, else auto.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    timer: TimerOfRings = "",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each; medians count.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per ring and phase.")] = None,
) -> None:
    """What a ring hides of its communication, for every number of buffers and every depth of prefetch."""
    device = device_name(device)
    if device == "cuda" and link_share is not None:
        raise typer.BadParameter("--link-share throttles transfers between CPUs, and the device is cuda: leave it out")
    place = member()
    world = world_of(place, world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    kv_heads = kv_heads_of(heads, kv_heads)
    check_chunks(chunks, kv_heads)
    check_targets(json, csv)
    share = threads or max(1, cores() // (place.local_world if place is not None else world))
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    wish = Wish(
        AttentionConfig(
            world * tokens, world, batch, heads, kv_heads, head_dim, dtype, causal, layout.value, share, seed, device
        ),
        slots=tuple(slots),
        prefetch=tuple(prefetch),
        chunks=tuple(chunks),
        repeats=repeats,
        link_share=None if device == "cuda" else link_share or LINK_SHARE,
        transport=transport or ("auto" if device == "cuda" else "process_group"),
        device=device,
        timer=timer_of_rings(device, timer),
    )
    check_transport(wish.transport, device, world)
    check_settings(settings_of(wish), world)
    check_room(wish.problem, settings_of(wish), world if place is None else place.local_world)
    report = started(world, spawned, wish) if place is None else measure(place, wish)
    if prints():
        finish(wish, report, json, csv)


def finish(wish: Wish, report: Report, json: str | None, csv: Path | None) -> None:
    """Print and write."""
    if json != "-":
        typer.echo(text(wish, report))
    if json is not None:
        write_json(json, as_json(wish, report))
    if csv is not None:
        write_csv(csv, [row.as_row() for row in report.rows])


def text(wish: Wish, report: Report) -> str:
    problem = wish.problem
    link = ""
    if report.bytes_per_second is not None:
        link = f"; link throttled to {human(report.bytes_per_second, 'B/s')}"
    title = (
        f"{'causal' if problem.causal else 'full'}, B{problem.batch} H{problem.heads}/{problem.kv_heads} "
        f"D{problem.head_dim} {problem.dtype}, {binary(problem.seqlen // problem.world)} tokens per rank, "
        f"{problem.layout}; {problem.world} processes over {report.transport}{link}; slowest rank, medians of "
        f"{wish.repeats} interleaved runs\n"
    )
    return f"{table([row.as_row() for row in report.rows], title=title)}\n\n{verdict(report.rows, problem.world)}"


def as_json(wish: Wish, report: Report) -> dict[str, Any]:
    return {
        "schema": "ringattn bench overlap 1",
        "provenance": provenance(torch.device(wish.device)),
        "asked": asdict(wish),
        "transport": report.transport,
        "bytes_per_second": report.bytes_per_second,
        "rows": [row.as_json() for row in report.rows],
        "verdict": verdict(report.rows, wish.problem.world),
    }
