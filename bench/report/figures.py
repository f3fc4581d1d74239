"""The README's pictures: ``python -m ringattn.bench.report.figures`` writes them into ``docs/figures``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ...ring.schedule.layout import Layout
from ...ring.schedule.mask import Mask
from ...ring.schedule.schedule import schedule
from ..common.attention import AttentionConfig
from ..timeline.command import measured, read_timeline
from .theme import VARIABLES, Theme, save, themed
from .timelines import save as save_timelines

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
RANKS = 4


def ring_figure(world: int = RANKS, theme: Theme = VARIABLES) -> Any:
    """Where every shard of K/V is at each hop: a ring of ranks per hop, each with the shard that it computes with."""
    from matplotlib.figure import Figure

    layout = Layout.zigzag(1024 * world, world)
    plan = schedule(layout, Mask(causal=True), direction=1)
    shards = np.argsort(plan.ranks, axis=0)  # [rank, hop]
    colours = [
        theme.compute,
        theme.receive,
        theme.send,
        theme.backward,
        theme.wait,
        theme.faint,
        theme.slot,
        theme.sums,
    ]
    with themed(theme):
        figure = Figure(figsize=(10, 2.7), layout="constrained")
        places = figure.subplots(1, plan.count)
        for hop, axes in enumerate(places):
            _draw_ring(axes, shards[:, hop], colours, theme, last=hop == plan.count - 1)
            axes.set_title(f"hop {hop}" + (": the rank's own shard" if hop == 0 else ""), fontsize=9.5)
        figure.supxlabel(
            "Queries stay. At every hop each rank computes with the K/V shard that it has,"
            " while the shard is already on its way to the next rank.",
            fontsize=8.5,
        )
    return figure


def _draw_ring(axes: Any, shards: Any, colours: list[str], theme: Theme, *, last: bool) -> None:
    world = len(shards)
    angles = np.pi / 2 - 2 * np.pi * np.arange(world) / world
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for rank, (point, shard) in enumerate(zip(points, shards, strict=True)):
        style: dict[str, Any] = {"edgecolors": theme.ink, "linewidths": 0.8, "zorder": 3}
        axes.scatter(*point, s=900, color=colours[shard % len(colours)], **style)
        label = {"ha": "center", "va": "center", "color": theme.paper, "zorder": 4}
        axes.text(*point, f"K/V {shard}", fontsize=7.5, fontweight="bold", **label)
        beside = "left" if point[0] > 0.5 else "right" if point[0] < -0.5 else "center"
        axes.text(*(point * (1.55 if beside == "center" else 1.42)), f"rank {rank}", ha=beside, va="center", fontsize=8)
        if not last:
            to = points[(rank + 1) % world]
            style = {"arrowstyle": "-|>", "color": theme.faint, "lw": 1.3, "shrinkA": 17, "shrinkB": 17}
            axes.annotate("", xy=to, xytext=point, arrowprops={**style, "connectionstyle": "arc3,rad=-0.25"})
    axes.set(xlim=(-2.25, 2.25), ylim=(-1.8, 1.8), aspect="equal")
    axes.axis("off")


def main() -> None:
    """Draw the ring, and a timeline that was recorded here, or in a file that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--trace", type=Path, help="a measured trace, in place of a new one")
    parser.add_argument("--predicted", type=Path, help="a predicted trace of the same call, drawn below")
    given = parser.parse_args()
    save(lambda theme: ring_figure(theme=theme), given.out / "ring.svg", 0)
    if given.trace is None:
        found = [measured(None, AttentionConfig(seqlen=8192, world=2, heads=8, kv_heads=8, head_dim=64), 5)]
    else:
        found = [read_timeline(given.trace)]
    if given.predicted is not None:
        found.append(read_timeline(given.predicted))
    shown = [one for one in found if one is not None]
    save_timelines(shown, given.out / "timeline.svg")


if __name__ == "__main__":
    main()
