"""The map that answers where a ring pays: tokens per GPU x GPUs, in percent of ideal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..shapes import binary


def draw(rows: Sequence[Mapping[str, float]], title: str, target: Path) -> None:
    """Write the map as PNG or SVG, by the file's ending.

    Raises:
        ValueError: another ending.
    """
    if target.suffix not in (".png", ".svg"):
        raise ValueError(f"picture is {str(target)!r}: its name must end in .png or .svg")
    import matplotlib  # no picture, no need for it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = sorted({int(row["tokens"]) for row in rows})
    gpus = sorted({int(row["gpus"]) for row in rows})
    values = {(int(row["tokens"]), int(row["gpus"])): row["percent of ideal"] for row in rows}
    grid = [[values[one, world] for world in gpus] for one in tokens]
    figure, axes = pyplot.subplots(figsize=(1.6 + 0.62 * len(gpus), 1.6 + 0.42 * len(tokens)), layout="constrained")
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=100)
    axes.set_xticks(range(len(gpus)), [binary(world) for world in gpus])
    axes.set_yticks(range(len(tokens)), [binary(one) for one in tokens])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens per GPU")
    axes.set_title(title, fontsize=9, loc="left")
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            color = "black" if value > 60 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    if min(len(tokens), len(gpus)) > 1:
        axes.contour(grid, levels=[90], colors="red", linewidths=1.2)
    figure.colorbar(image, label="percent of ideal: one GPU divided by the GPUs; red: 90")
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
