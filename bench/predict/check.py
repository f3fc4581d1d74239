"""Is the prediction right? ``python -m ringattn.bench.predict.check``: measured beside predicted, on this machine.

It needs a machine on which nothing else runs. One-thread processes, one per core, measure the link between them as
``ringattn bench links`` does, and in turns with the rows of each mask and length their own speed, at one length for all
rows, each by itself and all at once; from that alone these rows are predicted. A row is right within 10% plus the
measured spread. With ``--local-world`` the ranks are virtual, and take turns on one device: the GPU where
there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.distributed.elastic.multiprocessing.errors import record

from ...ring import Ring
from ..common.flags import device_here, size, sizes
from ..common.launching import cores, member, process_group, started
from ..common.output import write_json
from ..common.provenance import provenance
from ..common.tables import table
from .calibrate import DEADLINE, HOST_SIZES, Rounds, between_processes
from .call import CPU, NAMED
from .host import HostSpeed
from .links import Link, Links
from .ring import predicted
from .rows import ALLOWED, MASKS, SCHEMA, Row, Shape, cases, mask_of, step_of
from .team import HARD, ends_within
from .turns import rows_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Cases = list[tuple[str, str, int]]


def spawned(
    store: str, shape: Shape, wanted: Cases, link: Link, length: int, repeats: int, deadline: float = DEADLINE
) -> tuple[list[HostSpeed], list[Row]]:
    """One rank: the speeds of all, and its part of every row; an error is left where the parent reads it."""
    with ends_within(HARD * deadline):
        found = record(_of_rank)(store, shape, wanted, link, length, repeats, deadline)
    assert found is not None
    return found


def _of_rank(
    store: str, shape: Shape, wanted: Cases, link: Link, length: int, repeats: int, deadline: float
) -> tuple[list[HostSpeed], list[Row]]:
    place = member()
    assert place is not None
    torch.set_num_threads(1)
    with process_group(place, store, device=CPU), Ring(deadline=deadline) as ring:
        speeds, rows = [], []
        for _, alike in groupby(wanted, key=lambda case: case[1:]):  # what the machine is worth changes within minutes
            some = list(alike)
            calls = [shape.call(*case) for case in some]
            rounds = Rounds(length, shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, deadline)
            taken = rounds.beside([step_of(place.rank, call, ring, CPU) for call in calls], repeats)
            speeds.append(speed := rounds.speed())
            for case, call, samples in zip(some, calls, taken, strict=True):
                passes = predicted(call, speed, Links(link, link))
                rows.append(Row(*case, samples.median, samples.spread, sum(one.seconds for one in passes)))
                if place.rank == 0:
                    progress(rows[-1])
        return speeds, rows


def progress(row: Row) -> None:
    """Tell a row as soon as it is done."""
    print(row, "" if row.is_right else "WRONG", f"{row.off:+.1%}", file=sys.stderr, flush=True)


def of_processes(
    shape: Shape, wanted: Cases, calibrate: int, repeats: int, deadline: float
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of one-thread processes, and what they were predicted from."""
    link = between_processes(shape.world, "cpu", ("process_group",), HOST_SIZES, deadline)
    speeds, rows = started(shape.world, spawned, shape, wanted, link, calibrate, repeats, deadline)
    return rows, {"world": shape.world, "link": asdict(link), "speeds": [asdict(speed) for speed in speeds]}


def of_turns(
    shape: Shape, wanted: Cases, device: torch.device, calibrate: int, repeats: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of virtual ranks that take turns."""
    found: list[Row] = []
    for row in rows_of(shape, wanted, device, calibrate, repeats):
        progress(row)
        found.append(row)
    return found, {"world": shape.world}


@app.command()
def check(
    seqlen: Annotated[Any, typer.Option(parser=sizes, metavar="SIZE,…", help="Tokens in all.")] = "4k,8k,16k,32k",
    layout: Annotated[str, typer.Option(help=f"Some of {','.join(NAMED)}.")] = ",".join(NAMED),
    mask: Annotated[str, typer.Option(help=f"Some of {','.join(MASKS)}.")] = ",".join(MASKS),
    calibrate: Annotated[
        Any, typer.Option(parser=size, metavar="SIZE", help="Rows and keys of what speeds are measured with.")
    ] = "2k",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    local_world: Annotated[
        int | None, typer.Option(min=1, help="So many virtual ranks on one device, in place of processes.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of --local-world: cpu or cuda (a GPU if any, where left out).")
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that processes wait for each other.")] = DEADLINE,
    json: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measure rings, predict them, compare; exit 1 where a row is off by more than 10% and its spread."""
    layouts, masks = layout.split(","), mask.split(",")
    refuse_unknown(layouts, masks)
    wanted = list(cases(seqlen, layouts, masks))
    if local_world is None:
        if device is not None:
            raise typer.BadParameter("--device is of --local-world: processes are measured on the CPU")
        rows, about = of_processes(Shape(cores()), wanted, calibrate, repeats, deadline)
    else:
        place = device_here(device)
        shape = Shape(local_world, 16, 16, 128, "bfloat16") if place.type == "cuda" else Shape(local_world)
        rows, about = of_turns(shape, wanted, place, calibrate, repeats)
    finish(rows, about, json)


def refuse_unknown(layouts: Iterable[str], masks: Iterable[str]) -> None:
    """Names that there are not: typer.BadParameter."""
    for one in layouts:
        if one not in NAMED:
            raise typer.BadParameter(f"--layout has {one!r}: it takes {', '.join(NAMED)}")
    for one in masks:
        try:
            mask_of(one, 8)
        except ValueError as error:
            raise typer.BadParameter(f"--{error}") from None


def finish(rows: list[Row], about: dict[str, Any], json: Path | None) -> None:
    """Print and write."""
    title = f"link: {about['link']}\n" if "link" in about else ""
    print(table([row.shown() for row in rows], title=title))
    wrong = sum(not row.is_right for row in rows)
    print(f"{len(rows) - wrong} of {len(rows)} within {ALLOWED:.0%} plus the spread")
    if json is not None:
        data = {"schema": SCHEMA, "provenance": provenance(CPU), **about, "rows": [asdict(row) for row in rows]}
        write_json(str(json), data)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    app()
