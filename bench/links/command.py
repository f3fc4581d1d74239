"""``ringattn bench links``: every transport that opens here, over every edge of the ring, as nccl-tests tells it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ... import __version__
from ...comm import Limits
from ..common.flags import TIMERS, check_transport, device_name, size, timer_on
from ..common.launching import Member, member, started, world_of
from ..common.output import check_targets, prints, write_csv, write_json
from ..common.provenance import cpu, gpu, provenance
from .beside import FORWARD, MATMUL
from .group import SWEPT, Findings, between_processes, in_process, spawned
from .memory import check_room
from .runs import REGISTERED, Row, Wish
from .text import beside_table, block

IN_PROCESS = "local"
BETWEEN = ("nccl", "copy_engine", "process_group")
EVERY = (*BETWEEN, IN_PROCESS)
CHANNELS = "auto,1,2,4,8,16,32"  # of nccl, where none are given
STEP_BYTES = 1 << 20  # of nccl-tests, where no step is given
GRAPHS = {
    "copy_engine": "its ready flags count up from post to post: a replay would wait for counts that are past",
    IN_PROCESS: "its receives wait on the host until the sender has posted, which a replay would not do",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def steps(minbytes: int, maxbytes: int, factor: int | None, step: int | None) -> tuple[int, ...]:
    """The sizes of nccl-tests' ``-b -e -f -i``.

    Raises:
        typer.BadParameter: a range or a step that yields nothing, or never ends.
    """
    if factor is not None and step is not None:
        raise typer.BadParameter("-f and -i are both given: sizes grow by a factor or by a step, not by both")
    if not 0 < minbytes <= maxbytes:
        raise typer.BadParameter(f"-b is {minbytes} and -e is {maxbytes}: sizes run from -b, at least 1, up to -e")
    if factor is not None and factor < 2:
        raise typer.BadParameter(f"-f is {factor}: a factor of at least 2")
    if step is not None and step < 1:
        raise typer.BadParameter(f"-i is {step}: a step of at least 1 byte")
    found = [minbytes]
    while (following := found[-1] * factor if factor else found[-1] + (step or STEP_BYTES)) <= maxbytes:
        found.append(following)
    return tuple(found)


def limits_list(text: str) -> tuple[int | None, ...]:
    """A comma list of counts, ``auto`` for a ring's default; a parser of typer options.

    Raises:
        typer.BadParameter: one of them is neither.
    """
    parts = text.split(",")
    if not all(part == "auto" or (part.isdigit() and int(part)) for part in parts):
        raise typer.BadParameter(f"{text!r}: it takes a comma list of counts, or auto for a ring's default")
    counts = tuple(None if part == "auto" else int(part) for part in parts)
    try:
        for count in counts:
            Limits(channels=count)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("channels is ")) from None
    return counts


def timer_of(device: str, timer: str, graphs: int) -> tuple[str, int]:
    """What transfers are timed by, and how often a graph of them is replayed: ``-G`` is nccl-tests' word for graph.

    Raises:
        typer.BadParameter: no such timer on this device, or ``-G`` with another one.
    """
    if graphs and device == "cpu":
        raise typer.BadParameter("-G replays work of a GPU, and the device is cpu: leave it out")
    if graphs and timer not in ("", "graph"):
        raise typer.BadParameter(f"--timer is {timer!r}, and -G is {graphs}, which is --timer graph: leave one out")
    try:
        timer = timer_on(device, "graph" if graphs else timer)
    except ValueError as error:
        raise typer.BadParameter(f"--timer: {error}") from None
    return timer, graphs or int(timer == "graph")


def transports_of(text: str, graphs: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The transports to try, and those that no graph can be made of, with the reason, where one is to be.

    Raises:
        typer.BadParameter: an unknown name, or one asked for by name that no graph can be made of.
    """
    names = list(EVERY) if text == "all" else text.split(",")
    for name in names:
        if name not in EVERY:
            raise typer.BadParameter(f"--transport is {text!r}: it takes all, or a comma list of {', '.join(EVERY)}")
    if not graphs:
        return names, []
    refused = [(name, f"no CUDA graph of it: {GRAPHS[name]}") for name in names if name in GRAPHS]
    if refused and text != "all":
        name = refused[0][0]
        raise typer.BadParameter(f"--timer graph (-G) cannot be with --transport {name}: {GRAPHS[name]}")
    return [name for name in names if name not in GRAPHS], refused


def check_limits(names: Sequence[str], device: str, **given: object) -> None:
    """Refuse limits that none of the transports takes.

    Raises:
        typer.BadParameter: there are some.
    """
    flags = [f"--{name}" for name, value in given.items() if value is not None]
    swept = [name for name in names if name in SWEPT] if device == "cuda" else []
    if flags and not swept:
        asked = f"--transport is {','.join(names)}" if device == "cuda" else "the device is cpu"
        raise typer.BadParameter(f"{flags[0]} is of {', '.join(SWEPT)} on a GPU, and {asked}: leave it out")


@app.command()
def links(
    minbytes: Annotated[Any, typer.Option("-b", "--minbytes", parser=size, metavar="SIZE")] = "32M",
    maxbytes: Annotated[Any, typer.Option("-e", "--maxbytes", parser=size, metavar="SIZE")] = "32M",
    stepfactor: Annotated[int | None, typer.Option("-f", "--stepfactor", help="Sizes grow by this factor.")] = None,
    stepbytes: Annotated[
        Any, typer.Option("-i", "--stepbytes", parser=size, metavar="SIZE", help="… or by this step; default: 1M.")
    ] = None,
    iters: Annotated[int, typer.Option("-n", "--iters", min=1, help="Timed transfers, back to back.")] = 20,
    warmup: Annotated[int, typer.Option("-w", "--warmup_iters", min=0, help="Transfers before them.")] = 5,
    check: Annotated[int, typer.Option("-c", "--check", min=0, help="Transfers whose bytes are checked.")] = 1,
    cudagraph: Annotated[int, typer.Option("-G", "--cudagraph", min=0, help="Replays of a CUDA graph of them.")] = 0,
    timer: Annotated[
        str, typer.Option(metavar="|".join(TIMERS), help="Default: events; on the CPU clock; with -G graph.")
    ] = "",
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default: as many as GPUs, or 2; under a launcher, its ranks.")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="NAME,…", help=f"all, or some of {', '.join(EVERY)}.")] = "all",
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    channels: Annotated[
        Any,
        typer.Option(parser=limits_list, metavar="N,…", help=f"Of nccl; auto: a ring's default; default: {CHANNELS}."),
    ] = None,
    ctas: Annotated[
        Any, typer.Option(parser=limits_list, metavar="N,…", help="Of nccl, likewise; default: auto.")
    ] = None,
    beside: Annotated[
        str,
        typer.Option(help="What computes beside: forward, matmul or none; default: forward on a GPU, else matmul."),
    ] = "",
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write everything as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row per transport, way, edge and size.")] = None,
) -> None:
    """Bandwidth of every transport over every edge: one way, both ways, all edges at once, and beside compute.

    Flags, columns and closing lines are those of nccl-tests.
    """
    device, place = device_name(device), member()
    timer, cudagraph = timer_of(device, timer, cudagraph)
    names, closed = transports_of(transport, cudagraph)
    check_limits(names, device, channels=channels, ctas=ctas)
    for name in names if transport != "all" else ():
        check_transport(name, device, 1)  # local is between virtual ranks here
    wish = Wish(
        transports=tuple(names),
        device=device,
        sizes=steps(minbytes, maxbytes, stepfactor, stepbytes),
        step=f"{stepfactor}(factor)" if stepfactor else f"{stepbytes or STEP_BYTES}(bytes)",
        iters=iters,
        warmup=warmup,
        checks=check,
        timer=timer,
        graphs=cudagraph,
        channels=channels or limits_list(CHANNELS),
        ctas=ctas or limits_list("auto"),
        beside=beside_name(beside, device),
    )
    check_targets(json, csv)
    ranks = world_of(place, world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    check_room(wish, ranks if place is None else place.local_world, launched=place is not None)
    found = Findings(closed=closed)
    found += everywhere(place, ranks, wish)
    if prints():
        finish(wish, found, [] if transport == "all" else names, json, csv)


def everywhere(place: Member | None, world: int, wish: Wish) -> Findings:
    """In the processes of the launcher; or in new ones and, for ``local``, in this one."""
    if place is not None:
        return between_processes(place, wish)
    found = Findings()
    between = tuple(name for name in wish.transports if name != IN_PROCESS)
    with Console(stderr=True).status("measuring") as status:
        if between:
            status.update(f"{world} processes: {', '.join(between)}")
            found += started(world, spawned, replace(wish, transports=between))
        if IN_PROCESS in wish.transports:
            status.update(f"{world} virtual ranks of one process")
            found += in_process(world, replace(wish, transports=(IN_PROCESS,)))
    return found


def beside_name(text: str, device: str) -> str:
    """What computes beside the transfers.

    Raises:
        typer.BadParameter: nothing of that name, or not on this device.
    """
    if text not in ("", FORWARD, MATMUL, "none"):
        raise typer.BadParameter(f"--beside is {text!r}: it takes {FORWARD}, {MATMUL} or none")
    if text == FORWARD and device == "cpu":
        raise typer.BadParameter(f"--beside is {FORWARD}, the kernel of a GPU, and the device is cpu: take {MATMUL}")
    return text or (FORWARD if device == "cuda" else MATMUL)


def finish(wish: Wish, found: Findings, demanded: list[str], json: str | None, csv: Path | None) -> None:
    """Print and write; exit 1 where bytes were wrong, or where a transport asked for by name does not open."""
    if json != "-":
        typer.echo(text(wish, found))
    if json is not None:
        write_json(json, as_json(wish, found))
    if csv is not None:
        write_csv(csv, [{**row.as_json(), "ends": len(row.ends)} for row in found.rows])
    wrong = sum(row.wrong or 0 for row in found.rows)
    if wrong:
        print(f"{wrong} bytes did not arrive as they left", file=sys.stderr)
    closed = [(name, why) for name, why in found.closed if not name.endswith(REGISTERED)]
    missing = [f"{name} does not open here: {why}" for name, why in closed if name.partition(",")[0] in demanded]
    for line in missing:
        print(line, file=sys.stderr)
    if wrong or missing or not found.rows:
        raise typer.Exit(1)


def text(wish: Wish, found: Findings) -> str:
    """As nccl-tests prints it: what was asked for, a block per transport, limits and way, and what is left to say."""
    where = gpu(torch.device("cuda", 0))["name"] if wish.device == "cuda" else cpu()["model"]
    lines = [
        f"# ringattn {__version__} bench links",
        f"# minBytes {wish.sizes[0]} maxBytes {wish.sizes[-1]} step: {wish.step} warmup iters: {wish.warmup} "
        f"iters: {wish.iters} validation: {wish.checks} graph: {wish.graphs}",
        f"# on {where}; by {timer_on(wish.device, wish.timer)}; time of the slowest rank that takes part; GB/s per "
        "direction",
        *(f"# {name}={value}" for name, value in nccl_settings().items()),
        "#",
    ]
    for _, rows in groupby(found.rows, _block):
        lines.append(block(list(rows)))
    lines += [f"# {name} does not open here: {why}" for name, why in found.closed]
    if found.beside:
        lines += ["", beside_table(found.beside)]
    return "\n".join(lines)


def nccl_settings() -> dict[str, str]:
    """What the environment says to NCCL, which it reads once: another value takes another run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def _block(row: Row) -> tuple[object, ...]:
    return row.transport, row.channels, row.ctas, row.way


def as_json(wish: Wish, found: Findings) -> dict[str, Any]:
    return {
        "schema": "ringattn bench links 1",
        "provenance": provenance(torch.device(wish.device)),
        "asked": asdict(wish),
        "settings": nccl_settings(),
        "links": [row.as_json() for row in found.rows],
        "beside": [asdict(row) for row in found.beside],
        "closed": [{"transport": name, "reason": why} for name, why in found.closed],
    }
