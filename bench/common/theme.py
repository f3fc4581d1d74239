"""Colours of figures, and how figures are written to files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from .output import write_file

PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Theme:
    """Colours of a figure, by use."""

    paper: str = "#ffffff"
    ink: str = "#1f2328"
    faint: str = "#6b7280"
    grid: str = "#d9dce1"
    track: str = "#f3f4f6"  # behind the bars of a lane
    compute: str = "#3a76b5"
    backward: str = "#7a5ea8"  # compute in the backward
    wait: str = "#d1463f"
    send: str = "#2a9d8f"
    receive: str = "#d98e04"
    slot: str = "#b9c4d0"
    sums: str = "#cfbfdc"
    on_bar: str = "#fefefe"  # text on dark and (on_slot) on light bars, also on a dark page
    on_slot: str = "#20242a"


LIGHT = Theme()
PAGE_COLOURS = ("paper", "ink", "faint", "grid", "track")
"""Colours with the same names in the report's CSS, so that they follow its dark mode."""

LINES = (LIGHT.compute, LIGHT.receive, LIGHT.send, LIGHT.backward, LIGHT.wait, LIGHT.faint)
"""Colours of a chart's lines, in order."""


def parse_picture_path(text: str) -> Path:
    """Parse the path of a figure; raise typer.BadParameter for other suffixes than :data:`PICTURES`."""
    if not text.lower().endswith(PICTURES):
        raise typer.BadParameter(f"{text} is not a valid figure name: it must end with one of {', '.join(PICTURES)}")
    return Path(text)


@contextmanager
def use_theme() -> Iterator[None]:
    """Use this theme for matplotlib figures inside the block; text is never parsed as mathematics."""
    from matplotlib import rc_context

    settings: Any = {
        "axes.edgecolor": LIGHT.grid,
        "axes.labelcolor": LIGHT.ink,
        "axes.titlecolor": LIGHT.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": LIGHT.ink,
        "xtick.color": LIGHT.faint,
        "ytick.color": LIGHT.faint,
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "font.size": 9,
        "text.parse_math": False,
    }
    with rc_context(settings):
        yield


def write_figure(figure: Any, target: Path, dpi: int) -> None:
    """Write a figure in the format of the file's suffix."""
    if target.suffix.lower() == ".svg":
        write_file(target, '<?xml version="1.0" encoding="utf-8"?>\n' + inline_svg(figure, "f"))
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, format=target.suffix[1:].lower(), dpi=dpi)
    write_file(target, drawn.getvalue())


def use_page_colours(svg: str) -> str:
    """Replace colours of an SVG by the page's CSS variables, for background, text and lines."""
    names = {getattr(LIGHT, name): f"var(--{name})" for name in PAGE_COLOURS}
    return re.sub("|".join(names), lambda colour: names[colour[0]], svg)


def inline_svg(figure: Any, name: str) -> str:
    """Return a figure as SVG with ids that start with ``name``, the same for the same figure."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg")
    # matplotlib writes its version and home page into a comment and a metadata block.
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    # Its ids are digests of positions whose last bits vary from run to run, so number them instead.
    ids = dict[str, str]()
    text = re.sub(
        r'(\bid="|url\(#|href="#)([\w.]+)', lambda each: each[1] + ids.setdefault(each[2], f"{name}-{len(ids)}"), text
    )
    # A hundredth of a point is finer than any screen.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", " "), text)
    return re.sub(r"\s*\n\s*", "\n", text[text.index("<svg") :])
