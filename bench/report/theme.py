"""Colours of pictures: on light paper, on dark, and as CSS variables of a page that knows which it is on."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ..common.output import write_file

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
    on_slot: str = "#1f2328"  # text on a slot


LIGHT = Theme()
DARK = Theme(
    paper="#14171c",
    ink="#e6e8eb",
    faint="#9aa3ad",
    grid="#333a44",
    track="#1d2229",
    compute="#5b9bd8",
    backward="#a48bd0",
    wait="#f0716a",
    send="#3fbfae",
    receive="#eab045",
    slot="#465364",
    sums="#574a6b",
    on_slot="#e6e8eb",
)
LINES = ("compute", "receive", "send", "backward", "wait", "faint")
"""Colours of a chart's lines, in the order in which they are taken."""

# colours that no picture has by itself, each put in the place of a variable: matplotlib knows no variables
_STAND_INS = {name: f"#0a1b{number:02x}" for number, name in enumerate(asdict(LIGHT))}
VARIABLES = Theme(**_STAND_INS)
"""What to draw with for :func:`inline`."""


def css(theme: Theme) -> str:
    """The variables of a theme, for a rule of a style sheet."""
    return " ".join(f"--{name.replace('_', '-')}: {colour};" for name, colour in asdict(theme).items())


def picture(text: str) -> Path:
    """The path of a picture that can be drawn; a parser of typer options.

    Raises:
        typer.BadParameter: a suffix that is not one of :data:`PICTURES`.
    """
    if not text.lower().endswith(PICTURES):
        raise typer.BadParameter(f"{text} is no picture: it must end with one of {', '.join(PICTURES)}")
    return Path(text)


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Draw with a theme for a while; text of files is never read as mathematics."""
    from matplotlib import rc_context

    settings: Any = {
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": theme.ink,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "font.size": 9,
        "text.parse_math": False,
        "svg.fonttype": "none",
    }
    with rc_context(settings):
        yield


def inline(figure: Any, name: str) -> str:
    """An SVG element drawn with :data:`VARIABLES`, for a page with several: the page's colours, ids of its own.

    ``name``: letters, digits and dashes, different for every picture of a page.
    """
    text = as_svg(figure)
    for variable, stand_in in _STAND_INS.items():
        plain = getattr(LIGHT, variable)
        # twice: what knows no variables takes the first, what does not find them the one inside the second
        text = re.sub(
            rf"([a-z-]+): {stand_in}", rf"\1: {plain}; \1: var(--{variable.replace('_', '-')}, {plain})", text
        )
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return text[text.index("<svg") :]


def adaptive(figure: Any) -> str:
    """A whole SVG file drawn with :data:`VARIABLES` that is light or dark as its reader's page is."""
    style = f"<style>:root {{ {css(LIGHT)} }} @media (prefers-color-scheme: dark) {{ :root {{ {css(DARK)} }} }}</style>"
    text = inline(figure, "f")
    start = text.index(">") + 1
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text[:start] + style + text[start:]


def save(draw: Callable[[Theme], Any], target: Path, dpi: int) -> None:
    """Draw into a file; an SVG is light or dark as its reader's page is."""
    if target.suffix.lower() == ".svg":
        write_file(target, adaptive(draw(VARIABLES)))
    else:
        with themed(LIGHT):
            write_figure(draw(LIGHT), target, dpi)


def write_figure(figure: Any, target: Path, dpi: int) -> None:
    """A figure in the format that the file's name ends in."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=target.suffix[1:].lower(), dpi=dpi)
    write_file(target, drawn.getvalue())


def as_svg(figure: Any) -> str:
    """The text of a figure's SVG: the same for the same figure, and without a date."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "ringattn", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib names its version and its home page in a comment and a block of metadata
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"[ \t]+\n|\n[ \t]+", "\n", text)
    # a hundredth of a point is finer than any screen
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace("\n", " "), text)
