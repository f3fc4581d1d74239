"""The README's picture: ``python -m ringattn.bench.report.figures`` writes it into ``docs/figures``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...ring.schedule.layout import Layout
from ...ring.schedule.mask import Mask
from ...ring.schedule.schedule import schedule
from .theme import LIGHT, LINES, Theme, save

TARGET = Path(__file__).parents[2] / "docs" / "figures" / "ring.svg"
RANKS = 4


def ring_figure(theme: Theme = LIGHT) -> Any:
    """Where every shard of K/V is at each hop: a ring of ranks per hop, each with the shard that it computes with."""
    from matplotlib.figure import Figure

    plan = schedule(Layout.zigzag(1024 * RANKS, RANKS), Mask(causal=True), direction=1)
    shards = np.argsort(plan.ranks, axis=0)  # [rank, hop]
    figure = Figure(figsize=(10, 2.7), layout="constrained")
    for hop, axes in enumerate(figure.subplots(1, plan.count)):
        _draw_ring(axes, shards[:, hop], theme, last=hop == plan.count - 1)
        axes.set_title(f"hop {hop}" + (": the rank's own shard" if hop == 0 else ""), fontsize=9.5)
    figure.supxlabel(
        "Queries stay. At every hop each rank computes with the K/V shard that it has,"
        " while the shard is already on its way to the next rank.",
        fontsize=8.5,
    )
    return figure


def _draw_ring(axes: Any, shards: Any, theme: Theme, *, last: bool) -> None:
    angles = np.pi / 2 - 2 * np.pi * np.arange(RANKS) / RANKS
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for rank, (point, shard) in enumerate(zip(points, shards, strict=True)):
        axes.scatter(*point, s=900, color=LINES[shard], edgecolors=theme.ink, linewidths=0.8, zorder=3)
        label = {"ha": "center", "va": "center", "color": theme.paper, "zorder": 4}
        axes.text(*point, f"K/V {shard}", fontsize=7.5, fontweight="bold", **label)
        beside = "left" if point[0] > 0.5 else "right" if point[0] < -0.5 else "center"
        axes.text(*(point * (1.55 if beside == "center" else 1.42)), f"rank {rank}", ha=beside, va="center", fontsize=8)
        if not last:
            style = {"arrowstyle": "-|>", "color": theme.faint, "lw": 1.3, "shrinkA": 17, "shrinkB": 17}
            style["connectionstyle"] = "arc3,rad=-0.25"
            axes.annotate("", xy=points[(rank + 1) % RANKS], xytext=point, arrowprops=style)
    axes.set(xlim=(-2.25, 2.25), ylim=(-1.8, 1.8), aspect="equal")
    axes.axis("off")


if __name__ == "__main__":
    save(ring_figure, TARGET, 0)
