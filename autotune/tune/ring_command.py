"""``--ring`` of ``ringattn tune``: what is asked of a search over rings, and what is said and written of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from typer import Exit

from ...bench.common.launching import Member, cores, member, started, world_of
from ...bench.common.output import prints
from ...kernels.lookup import gpu_of
from .. import Shape, known, private_folder
from ..rings import CPU, WIRES, RingPoint, settings
from .ring import RingReport, RingWish, journal_of, search, spawned
from .ring_memory import check_room
from .shown import finish


def ring_wishes(
    shape: Shape, lengths: Sequence[int], causal: bool, device: str, world: int | None, wire: str, budget: float,
    folder: Path,
) -> list[RingWish]:  # fmt: skip
    """A wish per length.

    Raises:
        typer.BadParameter: not as many ranks as the launcher started.
        ValueError: an attention or a wire that a ring here is not tuned for, or one rank alone.
    """
    wires = tuple(wire.split(",")) if wire else ()
    if unknown := {*wires} - {*WIRES}:
        raise ValueError(f"--wire is {', '.join(sorted(unknown))}: it takes some of {', '.join(WIRES)}")
    if shape.value_dim != shape.head_dim:
        raise ValueError(f"--value-dim is {shape.value_dim}: rings are tuned with values of --head-dim")
    place = member()
    ranks = ranks_of(place, world, device)
    share = max(1, cores() // (place.local_world if place is not None else ranks))
    mask = "bounded" if causal else "full"
    points = [
        RingPoint(ranks, shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, mask, tokens) for tokens in lengths
    ]
    return [RingWish(point, device, wires, budget / len(points), folder, share) for point in points]


def ranks_of(place: Member | None, world: int | None, device: str) -> int:
    """The launcher's ranks, or as many as asked for, or one per GPU.

    Raises:
        typer.BadParameter: not as many as the launcher started.
        ValueError: one rank alone.
    """
    if place is not None and place.world < 2:
        raise ValueError("the launcher started 1 rank: a ring to tune takes at least 2")
    return world_of(place, world, max(2, torch.cuda.device_count() if device == "cuda" else 0))


def list_rings(wishes: Sequence[RingWish], json: str | None, csv: Path | None) -> None:
    """``--list``: a row per length and setting."""
    rows = [
        {"tokens": wish.point.length, **asdict(one)}
        for wish in wishes
        for one in settings(wish.point, wish.device, wish.wires)
    ]
    first, points = wishes[0], [wish.point for wish in wishes]
    words = f"{len(rows)} candidates for rings of {first.point.world} ranks on {first.device}"
    finish(words, rows, {"points": [point._asdict() for point in points]}, json, csv)


def tune_rings(wishes: Sequence[RingWish], json: str | None, csv: Path | None) -> None:
    """A search per length.

    Raises:
        RefusedTable: the folder has a table of this GPU that cannot be read.
        ValueError: the folder cannot be made.
        typer.BadParameter: a length that does not fit the free memory, with the one that does.
        typer.Exit: 1 where no setting runs, or a rank failed.
        KeyboardInterrupt: by the user, or who else ends processes.
    """
    if prints():
        check_folder(wishes[0])
    for wish in wishes:
        check_room(wish)
    reports = [searched(wish) for wish in wishes]
    if not prints():
        return
    rows = [{"tokens": wish.point.length, **row} for wish, one in zip(wishes, reports, strict=True) for row in one.rows]
    words = "\n".join(f"{wish.point.length} tokens: {told(one)}" for wish, one in zip(wishes, reports, strict=True))
    if all(one.complete for one in reports):
        journal_of(wishes[0], reports[0].gpu).forget()  # the answers are in the table
    chosen = [one.entry.as_json() for one in reports if one.entry is not None]
    finish(words, rows, {"rings": chosen}, json, csv, torch.device(wishes[0].device))
    if len(chosen) < len(reports):
        raise Exit(1)


def check_folder(wish: RingWish) -> None:
    """What could not be added to is refused before minutes of work."""
    place = member()
    device = torch.device(wish.device, 0) if place is None else place.shared_device(wish.device)
    known(private_folder(wish.folder), gpu_of(device) or CPU)


def searched(wish: RingWish) -> RingReport:
    """Here, or in new processes."""
    place = member()
    if place is not None:
        return search(place, wish)
    try:
        return started(wish.point.world, spawned, wish)
    except SignalException:  # what torch's launcher makes of Ctrl-C
        raise KeyboardInterrupt from None


def told(report: RingReport) -> str:
    """The choice in words."""
    if report.entry is None:
        return "no setting runs here: see the notes"
    one = report.entry
    gain = 1 - one.seconds / one.baseline
    against = f"{gain:.1%} less than a ring takes by itself" if gain > 0 else "as a ring does by itself"
    lines = [f"best: {one.setting}, {one.seconds * 1e3:.4g} ms ± {one.spread:.1%} a step, {against}"]
    if report.kept:
        lines.append(f"{report.kept} runs were known from before")
    if not report.complete:
        lines.append("cut short by --budget; the same command goes on")
    lines.append(f"written: {report.path}; autotune.shared_ring_settings looks it up")
    return "\n".join(lines)
