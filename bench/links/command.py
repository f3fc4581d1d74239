"""``ringattn bench links`` measures every available transport over every edge, with nccl-tests' columns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..common import flags
from ..common.ranks import launched_rank
from ..common.result import finish_command
from .names import FORWARD, IN_PROCESS, MATMUL, swept_transports

if TYPE_CHECKING:
    from ..common.result import Result

CHANNELS = "auto,1,2,4,8,16,32"  # default channels of nccl

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def message_sizes(minbytes: int, maxbytes: int, factor: int) -> tuple[int, ...]:
    """Return the sizes from ``minbytes`` to ``maxbytes``, each ``factor`` times the last; BadParameter if none."""
    if not 0 < minbytes <= maxbytes:
        raise typer.BadParameter(f"-b is {minbytes}: it must be between 1 and -e, {maxbytes}")
    sizes = [minbytes]
    while sizes[-1] * factor <= maxbytes:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def parse_channel_counts(text: str) -> tuple[int | None, ...]:
    """Parse ``auto,8`` as (None, 8): counts that ``Limits`` takes, where None is a ring's default."""
    from ...comm import Limits

    parts = text.split(",")
    if not all(part == "auto" or part.isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of counts such as auto,8, where auto is a ring's default.")
    counts = tuple(None if part == "auto" else int(part) for part in parts)
    try:
        for count in counts:
            Limits(channels=count)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("channels is ")) from None
    return counts


def parse_transports(text: str) -> tuple[str, ...]:
    """Parse the transports to measure; raise typer.BadParameter if one is unknown."""
    from ...comm import transport_names

    names = transport_names() if text == "all" else text.split(",")
    if not {*names} <= {*transport_names()}:
        known = ", ".join(transport_names())
        raise typer.BadParameter(f"--transport is {text!r}: it must be all, or a comma-separated list of {known}")
    return tuple(names)


def parse_beside(text: str, device: str) -> str:
    """Return the kernel to run beside the transfers (empty: the default); typer.BadParameter if it cannot run."""
    if text not in ("", FORWARD, MATMUL, "none"):
        raise typer.BadParameter(f"--beside is {text!r}: it must be {FORWARD}, {MATMUL} or none")
    if text == FORWARD and device == "cpu":
        raise typer.BadParameter(f"--beside is {FORWARD}: this kernel needs a GPU. On the CPU use {MATMUL}.")
    return text or (FORWARD if device == "cuda" else MATMUL)


@app.command()
def links_command(
    context: typer.Context,
    minbytes: Annotated[
        Any, typer.Option("-b", "--minbytes", parser=flags.parse_size_text, metavar="SIZE", help="Smallest message.")
    ] = "32M",
    maxbytes: Annotated[
        Any, typer.Option("-e", "--maxbytes", parser=flags.parse_size_text, metavar="SIZE", help="Largest message.")
    ] = "32M",
    stepfactor: Annotated[int, typer.Option("-f", "--stepfactor", min=2, help="Factor between sizes.")] = 2,
    iters: Annotated[int, typer.Option("-n", "--iters", min=1, help="Timed transfers, back to back.")] = 20,
    warmup: Annotated[int, typer.Option("-w", "--warmup_iters", min=0, help="Transfers before the timed ones.")] = 5,
    check: Annotated[int, typer.Option("-c", "--check", min=0, help="Transfers whose bytes are checked.")] = 1,
    timer: flags.RingTimer = "",
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks; default: the launcher's, else one per GPU, at least 2.")
    ] = None,
    transport: Annotated[str, typer.Option(metavar="NAME,…", help="all, or names of transports.")] = "all",
    device: flags.DeviceFlag = "",
    channels: Annotated[
        Any,
        typer.Option(
            parser=parse_channel_counts,
            metavar="N,…",
            help=f"NCCL channels; auto: as in a ring; default: {CHANNELS}.",
        ),
    ] = None,
    ctas: Annotated[
        Any,
        typer.Option(parser=parse_channel_counts, metavar="N,…", help="NCCL CTAs; auto: as in a ring; default: auto."),
    ] = None,
    beside: Annotated[
        str,
        typer.Option(help="Compute during transfers: forward, matmul or none; default: forward on a GPU, else matmul."),
    ] = "",
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Measure bandwidth of every transport over every edge: one way, both ways, all at once, and during compute.

    Flags and columns are as in nccl-tests. Times are the slowest rank's. GB/s are per direction.
    """
    import torch

    from ..common.provenance import provenance
    from .measure import LinksConfig, check_message_fits, measure_everywhere

    device, place = flags.parse_device_kind(device), launched_rank()
    if device == "cpu":
        flags.check_mode(context, "on the CPU", context.params.keys() - {"channels", "ctas"})
    timer = flags.resolve_timer(device, timer, flags.RING_TIMERS)
    names = parse_transports(transport)
    if not {*names} & {*swept_transports()}:
        mode = f"unless --transport includes {' or '.join(swept_transports())}"
        flags.check_mode(context, mode, context.params.keys() - {"channels", "ctas"})
    for name in names if transport != "all" else ():
        flags.check_transport_flag(name, device, 1)  # here, local runs between virtual ranks
    config = LinksConfig(
        transports=names,
        device=device,
        sizes=message_sizes(minbytes, maxbytes, stepfactor),
        iters=iters,
        warmup=warmup,
        checks=check,
        timer=timer,
        channels=channels or parse_channel_counts(CHANNELS),
        ctas=ctas or parse_channel_counts("auto"),
        beside=parse_beside(beside, device),
        must_open=transport != "all",
    )
    ranks = flags.resolve_world(world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    check_message_fits(config, ranks if place is None else place.local_world, launched=place is not None)
    with Console(stderr=True).status("measuring"):
        result = measure_everywhere(ranks, config)
    # the environment variables that NCCL reads
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    result.notes = [f"timed by {timer}", *variables, *result.notes, *fastest_link_note(result)]
    result.provenance = provenance(torch.device(device))
    finish_command(result, json, csv)


def fastest_link_note(result: Result) -> list[str]:
    """Return a note on the fastest row of the largest size; rows of processes and of whole rings come first."""
    rows = [row for row in result.rows if row["transport"] != IN_PROCESS] or result.rows
    rows = [row for row in rows if row["edge"] == "all"] or rows
    if not rows:
        return []
    row = max(rows, key=lambda row: (row["size"], row["algbw"]))
    channels = "" if row["channels"] is None else f", {row['channels']} channels"
    kind = "within one process" if row["transport"] == IN_PROCESS else "between processes"
    what = f"{row['transport']}{channels}, {flags.size_text(row['size'])} bytes, {row['way']}"
    return [f"best {kind}: {what}: {row['algbw']:.4g} GB/s"]
