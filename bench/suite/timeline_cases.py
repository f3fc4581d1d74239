"""A measured and a predicted timeline of one ring as a case of the suite, left in its folder for its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import typer

from ..launching import cores
from ..launching import threads as threads_of_torch
from ..output import write_json
from ..predict.links import Links
from ..predict.ring import predicted
from ..predict.rows import Shape
from ..predict.timelines import timeline
from ..predict.turns import calibrated_here
from ..ring.candidates import Problem
from ..timeline.command import check_room, title, virtual
from ..timeline.events import LANES, Timeline, as_chrome
from .cases import NotHere, Number

LAYOUT, MASK = "zigzag", "causal"
FILE = "timeline_{}.json"  # by its source


def timelines(
    device: torch.device,
    *,
    folder: Path,
    world: int = 4,
    seqlen: int = 32 * 1024,
    heads: int = 16,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 3,
) -> Iterator[Number]:
    """Virtual ranks of one device, recorded; and the same ring where each rank has such a device of its own."""
    threads = max(1, cores() // world)
    problem = Problem(
        seqlen, world, 1, heads, heads, head_dim, dtype, MASK == "causal", LAYOUT, threads, 0, device.type
    )
    try:
        check_room(problem, device, None)
    except typer.BadParameter as refused:
        raise NotHere(str(refused)) from None
    with threads_of_torch(threads):
        found = virtual(problem, device, repeats)
        assert found is not None
        yield from kept(found, folder)
        shape = Shape(world, heads, heads, head_dim, dtype)
        speed, copies = calibrated_here(shape, device, seqlen // world, repeats)
    call = shape.call(LAYOUT, MASK, seqlen)
    told = f"{title(problem, device)}: one for each rank"
    yield from kept(timeline(told, predicted(call, speed, Links(copies, copies), told_apart=True), call), folder)


def kept(found: Timeline, folder: Path) -> Iterator[Number]:
    """Leave a timeline where the page looks for it, and tell its length, and what ranks did on the average."""
    write_json(folder / FILE.format(found.source), as_chrome(found), indent=None)
    labels = {"by": found.source, "world": found.world, "layout": LAYOUT, "mask": MASK}
    yield Number("forward and backward", found.seconds * 1e3, "ms", labels)
    for lane in LANES[:2]:
        seconds = sum(one.seconds for one in found.events if one.lane == lane) / found.world
        yield Number(f"{lane} of a rank", seconds * 1e3, "ms", labels)
