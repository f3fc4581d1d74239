"""Pictures of a call: the mask over global positions, and the schedule as a grid of ranks and hops."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import typer

from ..bench.common.call import Call, Grid, mask_cells
from ..bench.common.flags import binary, human
from ..bench.report.theme import LIGHT, Theme, themed, write_figure
from ..ring.schedule.schedule import Hop

SUFFIXES = (".png", ".svg", ".pdf")
CELLS = 512  # of the mask, each way
LABELLED = 12  # ranks: a larger grid has no text in its cells
TAB10 = 10
FEW = 130  # documents or blocks: more would hide what is drawn
ON_CELL = "#222222"  # cells of work are light on any paper
MOVING = "#c2571a"


def picture(text: str) -> Path:
    """The path of a picture that can be drawn; a parser of typer options.

    Raises:
        typer.BadParameter: a suffix that is not one of :data:`SUFFIXES`.
    """
    if not text.lower().endswith(SUFFIXES):
        raise typer.BadParameter(f"{text} is no picture: it must end with one of {', '.join(SUFFIXES)}")
    return Path(text)


def draw_call(call: Call, out: Path) -> None:
    """Draw mask and schedule side by side into ``out``."""
    with themed(LIGHT):
        write_figure(call_figure(call), out, 150)


def call_figure(call: Call, theme: Theme = LIGHT) -> Any:
    """Mask and schedule side by side."""
    from matplotlib import rc_context

    with themed(theme), rc_context({"axes.facecolor": theme.track}):  # what nobody sees stands out from the paper
        return _call_figure(call)


def _call_figure(call: Call) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # room at the left: the layout engine does not count the strips beside the axes
    figure = Figure(figsize=(15, 7.2), layout=ConstrainedLayoutEngine(rect=(0.015, 0.005, 0.98, 0.99)))
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    figure.suptitle(_title(call), fontsize=12)
    _draw_mask(call, left)
    _draw_schedule(call, right)
    return figure


def _now(setting: Literal["text.color", "figure.facecolor"]) -> Any:
    """A colour of what is being drawn."""
    from matplotlib import rcParams

    return rcParams[setting]


def _title(call: Call) -> str:
    kv, sums = call.bytes_per_token
    forward, backward = max(call.plan.bytes(kv)), max(call.plan.bytes(kv, sums))
    return (
        f"{call.title}\nranks compute {call.balance:.0%} of the time, if every hop lasts as long as its slowest rank; "
        f"a rank sends at most {human(forward, 'B')} forward, {human(backward, 'B')} backward"
    )


def _colours(name: str, where: Any) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[name](where))


def _draw_mask(call: Call, axes: Any) -> None:
    world, seqlen, hops = call.layout.world, call.layout.seqlen, call.plan.count
    ranks, grid = mask_cells(call, CELLS)
    image = axes.imshow(
        np.ma.masked_less(grid, 0),
        cmap=_colours("viridis_r", np.linspace(0.03, 0.92, hops)),
        vmin=-0.5,
        vmax=hops - 0.5,
        extent=(0, seqlen, seqlen, 0),
        interpolation="nearest",
    )
    sampled = call.layout.seqlen > CELLS and any(
        span.step > 1 for rank in range(world) for span in call.layout.spans(rank)
    )
    axes.set_title(
        "mask: the hop that computes it" + (" (stripes drawn wider than they are)" if sampled else ""), pad=20
    )
    axes.set_xlabel("key position (above: the shard it is in)")
    axes.set_ylabel("query position (beside: the rank it is on)")
    places = [seqlen * part // 8 for part in range(9)]
    axes.set(xticks=places, yticks=places, xticklabels=map(binary, places), yticklabels=map(binary, places))
    axes.tick_params(axis="y", pad=16)
    _draw_owners(axes, ranks, world)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, label="hop", ticks=_ticks(hops))
    bar.outline.set_visible(False)
    _draw_structure(call, axes)


def _draw_structure(call: Call, axes: Any) -> None:
    """Boxes around documents, lines between blocks and at the ends of rows' keys: where they are few enough to tell."""
    from matplotlib.collections import LineCollection

    seqlen, mask = call.layout.seqlen, call.mask
    if mask.documents is not None and len(mask.documents.boundaries) <= FEW:
        boxes = [[(a, a), (b, a), (b, b), (a, b), (a, a)] for a, b in pairwise(mask.documents.boundaries)]
        axes.add_collection(LineCollection(boxes, colors=MOVING, linewidths=1.0))
    if mask.blocks is not None and len(mask.blocks.visible) <= FEW:
        edges = np.arange(0, seqlen, mask.blocks.block)[1:]
        axes.hlines(edges, 0, seqlen, color="white", lw=0.5)
        axes.vlines(edges, 0, seqlen, color="white", lw=0.5)
    if mask.used is not None and len(ends := {*mask.used}) <= FEW:
        axes.vlines([*ends], 0, seqlen, color=MOVING, lw=1.0, linestyles="dashed")


def _draw_owners(axes: Any, ranks: Grid, world: int) -> None:
    """Strips along the edges that say whose keys and queries these are."""
    palette = _colours("tab10", np.arange(world)) if world <= TAB10 else _colours("turbo", np.linspace(0, 1, world))
    for box, strip in (((0, 1.008, 1, 0.028), ranks[None, :]), ((-0.036, 0, 0.028, 1), ranks[:, None])):
        edge = axes.inset_axes(box)
        edge.imshow(strip, cmap=palette, vmin=-0.5, vmax=world - 0.5, aspect="auto", interpolation="nearest")
        edge.set(xticks=[], yticks=[])
        edge.spines[:].set_visible(False)
        if world <= LABELLED:
            _label_runs(edge, ranks, across=strip.shape[0] == 1)


def _label_runs(edge: Any, ranks: Grid, *, across: bool) -> None:
    """The number of a rank on every run of a strip that is wide enough for it."""
    cuts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
    for start, stop in pairwise(cuts):
        if (stop - start) * 40 > len(ranks):
            middle = (start + stop - 1) / 2
            where = (middle, 0) if across else (0, middle)
            edge.text(*where, f"{ranks[start]}", ha="center", va="center_baseline", fontsize=8, color="white")


def _ticks(world: int) -> list[int]:
    return list(range(0, world, -(-world // LABELLED)))


def _draw_schedule(call: Call, axes: Any) -> None:
    world, hops = call.layout.world, call.plan.count
    work = np.ma.masked_equal(call.pairs, 0) / max(int(call.pairs.max()), 1)
    image = axes.imshow(work, cmap=_colours("Blues", np.linspace(0.08, 0.55, 64)), vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="hop", ylabel="rank", xticks=_ticks(hops), yticks=_ticks(world))
    axes.set_title("schedule: visible pairs per rank and hop", pad=10)
    _draw_lines(axes, call)
    if world <= LABELLED:
        rails = ", » N by rail to rank N" if call.nodes > 1 else ""
        rails += ", → N straight to rank N" if call.plan.steps != (*range(call.plan.inner),) else ""
        axes.set_title(f"schedule: shard, visible pairs, and where its K/V go next{rails}", pad=10)
        for rank in range(world):
            for hop in call.plan.hops(rank):
                _label_hop(axes, call, rank, hop)
    axes.set(xlim=(-0.5, hops - 0.5), ylim=(world - 0.5, -0.5))
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, label="visible pairs / most of any rank and hop")
    bar.outline.set_visible(False)


def _draw_lines(axes: Any, call: Call) -> None:
    """White between ranks and hops where these have text, dark between nodes and turns."""
    world, hops, size = call.layout.world, call.plan.count, len(call.plan.nodes[0])
    across, down = {"xmin": -0.5, "xmax": hops - 0.5}, {"ymin": -0.5, "ymax": world - 0.5}
    if world <= LABELLED:
        axes.hlines(np.arange(1, world) - 0.5, **across, color=_now("figure.facecolor"), lw=2)
        axes.vlines(np.arange(1, hops) - 0.5, **down, color=_now("figure.facecolor"), lw=2)
    if call.nodes > 1:
        axes.hlines(np.arange(size, world, size) - 0.5, **across, color=_now("text.color"), lw=1.2)
        axes.vlines(np.arange(call.plan.inner, hops, call.plan.inner) - 0.5, **down, color=_now("text.color"), lw=1.2)


def _label_hop(axes: Any, call: Call, rank: int, hop: Hop) -> None:
    if hop.computes:
        style = {"ha": "center", "color": ON_CELL}
        axes.text(hop.index, rank, f"{hop.shard}", va="bottom", fontsize=13, fontweight="bold", **style)
        axes.text(hop.index, rank, human(int(call.pairs[rank, hop.index])), va="top", fontsize=8, **style)
    elif hop.kv_from is not None:
        axes.text(hop.index, rank, f"({hop.shard})", ha="center", va="center", fontsize=11, color="#888888")
    if hop.kv_to is not None:
        _draw_move(axes, call, rank, hop)
    if hop.rail_to is not None:
        # the left corner of a turn's first hop is free: no arrow comes in there
        where = {"xytext": (4, -3), "textcoords": "offset points", "ha": "left", "va": "top"}
        corner = (hop.index - 0.5, rank - 0.5)
        axes.annotate(f"» {hop.rail_to}", xy=corner, fontsize=9, fontweight="bold", color=MOVING, **where)


def _draw_move(axes: Any, call: Call, rank: int, hop: Hop) -> None:
    """An arrow to where the shard is at the next hop; around a node it leaves at the edge and comes in again."""
    step, size, steps = call.direction, len(call.plan.nodes[0]), call.plan.steps
    near, far = 0.33, 0.67
    start, end = (hop.index + near, rank + near * step), (hop.index + far, rank + far * step)
    style = {"arrowstyle": "-|>", "color": MOVING, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    first, inside = rank - rank % size, hop.index % call.plan.inner
    if steps[inside + 1] != steps[inside] + 1:  # further than to a neighbour
        where = {"ha": "right", "va": "bottom", "textcoords": "offset points", "xytext": (-4, 3)}
        corner = (hop.index + 0.5, rank + 0.5)
        axes.annotate(f"→ {hop.kv_to}", xy=corner, fontsize=9, fontweight="bold", color=MOVING, **where)
        return
    if hop.kv_to == rank + step:
        axes.annotate("", xy=end, xytext=start, arrowprops=style)
        return
    axes.plot([start[0], hop.index + 0.5], [start[1], rank + 0.5 * step], color=MOVING, lw=1.3)
    entry = first if step == 1 else first + size - 1
    axes.annotate("", xy=(end[0], entry - near * step), xytext=(hop.index + 0.5, entry - 0.5 * step), arrowprops=style)
