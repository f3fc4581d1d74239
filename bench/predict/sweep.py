"""The map that answers where a ring pays: tokens per GPU x GPUs, in percent of ideal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.flags import binary
from ..common.tables import table
from ..report.theme import LIGHT, Theme, save, themed
from .call import Call
from .links import Links
from .memory import memory, most_tokens
from .program import PASSES
from .ring import alike_pass, cases, ideal_seconds
from .speed import Speed
from .trouble import Trouble

Point = dict[str, Any]
"""A row of the map."""
PERCENT = "percent of ideal"
"""The column of the map; None where a point fits no GPU."""


def rows_of_sweep(
    call: Call,
    device: Speed,
    links: Links,
    tokens: Sequence[int],
    gpus: Sequence[int],
    trouble: Trouble | None = None,
    *,
    capacity: float = math.inf,
) -> list[Point]:
    """Percent of ideal for tokens x GPUs; as many per node as the call has.

    Args:
        call: all but the tokens and the ranks.
        device: the speed of a GPU.
        links: what joins them.
        tokens: per rank.
        gpus: ranks.
        trouble: slow ranks and jitter, the same in every ring.
        capacity: bytes of a GPU; a point that does not fit has a note in place of numbers.

    Raises:
        ValueError: ranks that make no whole nodes, a ring without the slow rank, zigzags that are not even, or nothing
            that fits.
    """
    trouble = trouble or Trouble()
    for world in gpus:
        trouble.check(world)
    points = {world: [_point(call, one, world) for one in tokens] for world in gpus}
    if not any(_fits(one, capacity) for calls in points.values() for one in calls):
        least = min(tokens)
        raise ValueError(
            f"sweep begins at {least:,} tokens per GPU, which do not fit {capacity / 1e9:.3g} GB: at most "
            f"{most_tokens(points[min(gpus)][0], capacity):,} fit"
        )
    return [row for calls in points.values() for row in _column(calls, device, links, trouble, capacity)]


def _point(call: Call, tokens: int, world: int) -> Call:
    """The call at one point of the map."""
    nodes = max(1, world // call.per_node)
    if world > call.per_node and world % call.per_node:
        raise ValueError(f"sweep has rings of {world} GPUs: they must make whole nodes, of {call.per_node}")
    made = replace(call, tokens=tokens, world=world, nodes=nodes)
    if not made.is_plain:
        raise ValueError(f"sweep has zigzags of {tokens} tokens per GPU: they must be even")
    return made


def _fits(call: Call, capacity: float) -> bool:
    return sum(memory(call).values()) <= capacity


def _column(calls: Sequence[Call], device: Speed, links: Links, trouble: Trouble, capacity: float) -> list[Point]:
    """The points of one number of ranks."""
    fitting = [one for one in calls if _fits(one, capacity)]
    times = dict(zip(fitting, _times(fitting, device, links, trouble), strict=True))
    rows = []
    for one in calls:
        row: Point = {"gpus": one.world, "tokens": one.tokens}
        if one in times:
            seconds, waited = times[one]
            ideal = sum(ideal_seconds(one, device, phase) for phase in PASSES)
            row |= {"seconds": seconds, "exposed": waited, PERCENT: 100 * ideal / seconds, "note": ""}
        else:
            note = f"does not fit {capacity / 1e9:.3g} GB: at most {most_tokens(one, capacity):,} tokens do"
            row |= {"seconds": None, "exposed": None, PERCENT: None, "note": note}
        rows.append(row)
    return rows


def _times(calls: Sequence[Call], device: Speed, links: Links, trouble: Trouble) -> list[tuple[float, float]]:
    """Seconds of both passes, and those exposed; without trouble in one run of as many lanes."""
    if trouble.is_there:
        each = [[alike_pass(one, device, links, trouble, phase) for phase in PASSES] for one in calls]
        return [(sum(one.seconds for one in passes), sum(one.waited for one in passes)) for passes in each]
    if not calls:
        return []
    ahead, back = (cases(calls, device, links, phase) for phase in PASSES)
    both = zip(ahead.seconds + back.seconds, ahead.waited + back.waited, strict=True)
    return [(float(seconds), float(waited)) for seconds, waited in both]


def shown(rows: Sequence[Point], title: str) -> str:
    """The map for the terminal, empty where a point fits no GPU."""
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["tokens"], {"tokens": binary(row["tokens"])})
        line[binary(row["gpus"])] = None if row[PERCENT] is None else round(row[PERCENT], 1)
    noted: dict[str, dict[str, None]] = {}
    for row in rows:
        if row["note"]:
            noted.setdefault(row["note"], {})[binary(row["gpus"])] = None
    notes = [f"empty at {', '.join(gpus)} GPUs: {note}" for note, gpus in noted.items()]
    return "\n".join([table([*lines.values()], title=f"{PERCENT}, {title}\n"), *notes])


def check_ending(target: Path) -> None:
    """Refuse a picture of another format.

    Raises:
        ValueError: an ending other than ``.png`` and ``.svg``.
    """
    if target.suffix not in (".png", ".svg"):
        raise ValueError(f"picture is {str(target)!r}: its name must end in .png or .svg")


def draw(rows: Sequence[Point], title: str, target: Path) -> None:
    """Write the map as a PNG, or as an SVG that is light or dark as its page is, by the file's ending."""
    save(lambda theme: figure(rows, title, theme), target, dpi=150)


def figure(rows: Sequence[Point], title: str, theme: Theme = LIGHT) -> Any:
    """The map; empty, with a dash, where a point fits no GPU."""
    from matplotlib import colormaps  # no picture, no need for it
    from matplotlib.figure import Figure

    tokens, gpus = (sorted({row[axis] for row in rows}) for axis in ("tokens", "gpus"))
    values = {(row["tokens"], row["gpus"]): row[PERCENT] for row in rows}
    grid = [[math.nan if values[one, world] is None else values[one, world] for world in gpus] for one in tokens]
    with themed(theme):
        made = Figure(figsize=(1.6 + 0.62 * len(gpus), 1.6 + 0.42 * len(tokens)), layout="constrained")
        axes = made.subplots()
        axes.set_facecolor(theme.track)  # shows where there is no number
        image = axes.pcolormesh(grid, cmap=colormaps["viridis"], vmin=0, vmax=100)
        middles = [[0.5 + place for place in range(len(axis))] for axis in (gpus, tokens)]
        axes.set_xticks(middles[0], [binary(world) for world in gpus])
        axes.set_yticks(middles[1], [binary(one) for one in tokens])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("tokens per GPU")
        axes.set_title(title, fontsize=9, loc="left")
        for row, line in enumerate(grid):
            for column, value in enumerate(line):
                # on viridis, the same in both themes; a dash is on the theme's own ground
                color = theme.ink if math.isnan(value) else "white" if value <= 60 else "black"
                told = "-" if math.isnan(value) else f"{value:.0f}"
                axes.text(column + 0.5, row + 0.5, told, ha="center", va="center", color=color, fontsize=8)
        if min(len(tokens), len(gpus)) > 1:
            axes.contour(*middles, grid, levels=[90], colors="red", linewidths=1.2)
        made.colorbar(image, label="percent of ideal: one GPU divided by the GPUs; red: 90")
    return made
