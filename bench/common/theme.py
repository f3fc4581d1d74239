"""Colours of pictures, and the files that they are written into."""

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
    """Every colour that a picture uses."""

    paper: str = "#ffffff"
    ink: str = "#1f2328"
    faint: str = "#6b7280"
    grid: str = "#d9dce1"
    track: str = "#f3f4f6"  # behind the bars of a lane
    compute: str = "#3a76b5"
    backward: str = "#7a5ea8"  # compute of the backward
    wait: str = "#d1463f"
    send: str = "#2a9d8f"
    receive: str = "#d98e04"
    slot: str = "#b9c4d0"
    sums: str = "#cfbfdc"
    on_bar: str = "#fefefe"  # text on dark bars, and on light ones: the same on a dark page
    on_slot: str = "#20242a"


LIGHT = Theme()
OF_THE_PAGE = ("paper", "ink", "faint", "grid", "track")
"""Colours that a page has by the same names, so that they follow its dark form."""

LINES = (LIGHT.compute, LIGHT.receive, LIGHT.send, LIGHT.backward, LIGHT.wait, LIGHT.faint)
"""Colours of a chart's lines, in the order in which they are taken."""


def picture(text: str) -> Path:
    """The path of a picture that can be drawn; a parser of typer options.

    Raises:
        typer.BadParameter: a suffix that is not one of :data:`PICTURES`.
    """
    if not text.lower().endswith(PICTURES):
        raise typer.BadParameter(f"{text} is no picture: it must end with one of {', '.join(PICTURES)}")
    return Path(text)


@contextmanager
def themed() -> Iterator[None]:
    """Draw in these colours for a while; text of files is never read as mathematics."""
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
    """A figure in the format that the file's name ends in."""
    if target.suffix.lower() == ".svg":
        write_file(target, '<?xml version="1.0" encoding="utf-8"?>\n' + inline(figure, "f"))
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, format=target.suffix[1:].lower(), dpi=dpi)
    write_file(target, drawn.getvalue())


def in_page_colours(svg: str) -> str:
    """Return an SVG for the page, whose background, text and lines take the page's colours."""
    names = {getattr(LIGHT, name): f"var(--{name})" for name in OF_THE_PAGE}
    return re.sub("|".join(names), lambda colour: names[colour[0]], svg)


def inline(figure: Any, name: str) -> str:
    """An SVG element for a page with several: the same for the same figure, with ids of its own.

    ``name``: letters, digits and dashes, different for every picture of a page.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg")
    # matplotlib names its version and its home page in a comment and a block of metadata
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    # and its ids by digests of places, whose last bits the layout's solver gives as it likes: numbers in their place
    ids = dict[str, str]()
    text = re.sub(
        r'(\bid="|url\(#|href="#)([\w.]+)', lambda each: each[1] + ids.setdefault(each[2], f"{name}-{len(ids)}"), text
    )
    # a hundredth of a point is finer than any screen
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", " "), text)
    return re.sub(r"\s*\n\s*", "\n", text[text.index("<svg") :])
