"""Pictures of a call: its mask over global positions, and its schedule as a grid of ranks and hops."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.common.flags import human_count, size_text
from ..bench.common.theme import LIGHT, use_theme, write_figure
from ..ring.schedule.schedule import Hop
from .call_summary import CallSummary, IntGrid, mask_cells

CELLS = 512  # rows and columns of the mask
LABELLED = 12  # ranks; cells of larger grids have no text
TAB10 = 10
MOST_RUNS = 40  # runs along an edge strip; with more they are too narrow for a number
ON_CELL = "#222222"  # text colour, because the cells are light in every theme


def draw_call(call: CallSummary, out: Path) -> None:
    """Draw mask and schedule side by side into ``out``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with use_theme(), rc_context({"axes.facecolor": LIGHT.track}):  # invisible cells differ from the background
        # leave room at the left, because the layout engine ignores the strips next to the axes
        figure = Figure(figsize=(15, 7.2), layout=ConstrainedLayoutEngine(rect=(0.015, 0.005, 0.98, 0.99)))
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
        figure.suptitle(_title(call), fontsize=12)
        _draw_mask(call, left)
        _draw_schedule(call, right)
        write_figure(figure, out, 150)


def _title(call: CallSummary) -> str:
    kv, sums = call.bytes_per_token
    forward, backward = max(call.bytes(kv)), max(call.bytes(kv, sums))
    return (
        f"{call.title}\nranks compute {call.balance:.0%} of the time, if every hop lasts as long as its slowest rank; "
        f"one rank sends up to {human_count(forward, 'B')} forward, {human_count(backward, 'B')} backward"
    )


def _colours(name: str, where: Any) -> Any:
    """Return a colour map with the colours of matplotlib's map ``name`` at the positions ``where``, from 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps[name](where))


def _draw_mask(call: CallSummary, axes: Any) -> None:
    world, seqlen, hops = call.layout.world, call.layout.seqlen, call.schedule.count
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
        "mask: hop that computes each cell" + (" (stripes drawn wider than they are)" if sampled else ""), pad=20
    )
    axes.set_xlabel("key position (strip above: shard)")
    axes.set_ylabel("query position (strip at the left: rank)")
    places = [seqlen * part // 8 for part in range(9)]
    axes.set(xticks=places, yticks=places, xticklabels=map(size_text, places), yticklabels=map(size_text, places))
    axes.tick_params(axis="y", pad=16)
    _draw_owners(axes, ranks, world)
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, label="hop", ticks=_ticks(hops))
    bar.outline.set_visible(False)


def _draw_owners(axes: Any, ranks: IntGrid, world: int) -> None:
    """Draw strips along the edges with the shard of the keys and the rank of the queries."""
    palette = _colours("tab10", np.arange(world)) if world <= TAB10 else _colours("turbo", np.linspace(0, 1, world))
    for box, strip in (((0, 1.008, 1, 0.028), ranks[None, :]), ((-0.036, 0, 0.028, 1), ranks[:, None])):
        edge = axes.inset_axes(box)
        edge.imshow(strip, cmap=palette, vmin=-0.5, vmax=world - 0.5, aspect="auto", interpolation="nearest")
        edge.set(xticks=[], yticks=[])
        edge.spines[:].set_visible(False)
        cuts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
        if len(cuts) < MOST_RUNS:
            style: Any = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": "white"}
            for start, stop in pairwise(cuts):
                middle = [(start + stop - 1) / 2, 0]
                edge.text(*(middle if strip.shape[0] == 1 else middle[::-1]), f"{ranks[start]}", **style)


def _ticks(world: int) -> list[int]:
    """Return evenly spaced ticks, at most LABELLED."""
    return list(range(0, world, -(-world // LABELLED)))


def _draw_schedule(call: CallSummary, axes: Any) -> None:
    world, hops = call.layout.world, call.schedule.count
    work = np.ma.masked_equal(call.pairs, 0) / max(int(call.pairs.max()), 1)
    image = axes.imshow(work, cmap=_colours("Blues", np.linspace(0.08, 0.55, 64)), vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="hop", ylabel="rank", xticks=_ticks(hops), yticks=_ticks(world))
    axes.set_title("schedule: visible pairs per rank and hop", pad=10)
    if world <= LABELLED:
        rails = ", » N: over a rail to rank N" if call.nodes > 1 else ""
        axes.set_title(f"schedule: shard, visible pairs, and destination of its K/V, → N: to rank N{rails}", pad=10)
        for rank in range(world):
            for hop in call.schedule.hops(rank):
                _label_hop(axes, call, rank, hop)
    if call.nodes > 1:  # lines between nodes, and between the inner rings
        size, inner = len(call.schedule.nodes[0]), call.schedule.inner
        axes.hlines(np.arange(size, world, size) - 0.5, -0.5, hops - 0.5, color=LIGHT.ink, lw=1.2)
        axes.vlines(np.arange(inner, hops, inner) - 0.5, -0.5, world - 0.5, color=LIGHT.ink, lw=1.2)
    axes.set(xlim=(-0.5, hops - 0.5), ylim=(world - 0.5, -0.5))
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.8, label="visible pairs, relative to the maximum")
    bar.outline.set_visible(False)


def _label_hop(axes: Any, call: CallSummary, rank: int, hop: Hop) -> None:
    style = {"ha": "center", "color": ON_CELL}
    if hop.computes:
        axes.text(hop.index, rank, f"{hop.shard}", va="bottom", fontsize=13, fontweight="bold", **style)
        axes.text(hop.index, rank, human_count(int(call.pairs[rank, hop.index])), va="top", fontsize=8, **style)
    elif hop.kv_from is not None:
        axes.text(hop.index, rank, f"({hop.shard})", va="center", fontsize=11, **style)
    arrows = [f"{mark} {to}" for mark, to in (("→", hop.kv_to), ("»", hop.rail_to)) if to is not None]
    label: Any = {"ha": "right", "va": "bottom", "fontsize": 9, "fontweight": "bold", "color": ON_CELL}
    place: Any = {"xy": (hop.index + 0.5, rank + 0.5), "xytext": (-4, 3), "textcoords": "offset points"}
    axes.annotate("  ".join(arrows), **place, **label)
