"""One self-contained page of a folder of results: no network, light and dark, for a phone and for paper."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..common.files import read_object
from ..common.result import Result, read
from ..timeline.events import PREDICTED, Timeline, alike, from_chrome
from . import charts, timelines
from .theme import DARK, LIGHT, VARIABLES, css, inline

FIRST = ("results.json", "decisions.json")  # of the suite
PROVENANCE = {"gpu": "GPU", "cpu": "CPU", "date": "date", "command": "command", "ringattn": "ringattn"}
LONGEST = 400  # characters of a cell: what a file says may be anything


class Cell(NamedTuple):
    """What a table shows, and what it sorts by: a number as Python writes it, or text."""

    text: str
    key: str


class Drawing(NamedTuple):
    """An SVG element that we drew, and what it is."""

    caption: str
    svg: Any  # markupsafe.Markup


@dataclass
class Section:
    """A result file, as the template shows it."""

    file: str
    case: str
    failed: list[str]
    notes: list[str]
    provenance: list[tuple[str, str]]  # where it differs from the page's
    columns: list[tuple[str, bool]]  # name with its unit; whether it holds numbers
    rows: list[list[Cell]]
    charts: list[Drawing]


@dataclass
class Folder:
    """What a folder of results holds: what commands wrote with --json, Chrome traces of rings, and what is refused."""

    name: str
    results: list[tuple[str, Result]] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Of the first result or timeline."""
        told = [one.provenance for _, one in self.results] + [one.about.get("provenance") for _, one in self.timelines]
        return next((one for one in told if isinstance(one, dict) and one), {})


def read_folder(folder: Path) -> Folder:
    """Every JSON file of a folder; one that cannot be read is named with the reason.

    Raises:
        ValueError: there is no folder, or nothing in it that can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: it takes what `ringattn bench suite --out DIR` writes to")
    found = Folder(printable(folder.absolute().name))
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name not in FIRST, path.name != FIRST[0], path)):
        name = printable(path.name)
        try:
            data = read_object(path)
            if "otherData" in data:
                found.timelines.append((name, from_chrome(data)))
            else:
                found.results.append((name, read(path)))
        except ValueError as error:
            found.refused.append(f"{name}: {printable(str(error).replace(str(path), 'it'))}")
    if not found.results and not found.timelines:
        why = f"{folder} holds no results: nothing that a command wrote with --json"
        raise ValueError("; ".join([why, *found.refused]))
    return found


def printable(text: str) -> str:
    """What a page and a terminal may show: names of files are any bytes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def html(folder: Folder) -> str:
    """The page, with everything that came from files escaped; what cannot be drawn is added to what is refused."""
    import jinja2
    from markupsafe import Markup

    here = files(__package__)
    script = here.joinpath("report.js").read_text()
    style = here.joinpath("report.css").read_text().replace("LIGHT;", css(LIGHT)).replace("DARK", css(DARK))
    # whatever gets into the page by mistake, a browser runs this script and no other
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(here.joinpath("report.html.j2").read_text())
    sections = list(_sections(folder))
    drawn = list(_timelines(folder))
    failed = [(one.file, why) for one in sections for why in one.failed] + [("not read", why) for why in folder.refused]
    return template.render(
        title=f"ringattn: {folder.name}",
        version=__version__,
        provenance=list(_told(folder.provenance)),
        failed=failed,
        sections=sections,
        timelines=drawn,
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _sections(folder: Folder) -> Iterator[Section]:
    for number, (file, result) in enumerate(folder.results):
        try:
            drawn = [
                Drawing(chart.title, _svg(charts.draw(chart, VARIABLES, titled=False), f"chart{number}-{place}"))
                for place, chart in enumerate(charts.charts(result))
            ]
            yield section(file, result, folder.provenance, drawn)
        except Exception as error:  # numbers that nobody can draw cost their file alone
            folder.refused.append(f"{file}: {_undrawn(error)}")


def section(file: str, result: Result, page: Mapping[str, Any], drawn: Sequence[Drawing] = ()) -> Section:
    """A result as the template shows it."""
    columns = [name for name in result.units if any(row.get(name) is not None for row in result.rows)]
    numbers = [all(isinstance(row.get(name), int | float | None) for row in result.rows) for name in columns]
    heads = [f"{name}, {unit}" if (unit := result.units[name]) else name for name in columns]
    differs = {name: value for name, value in result.provenance.items() if page.get(name) != value}
    return Section(
        file,
        result.case,
        result.failed,
        result.notes,
        list(_told(differs)),
        list(zip(heads, numbers, strict=True)),
        [[cell(row.get(name)) for name in columns] for row in result.rows],
        list(drawn),
    )


def cell(value: object) -> Cell:
    """Four digits of a number; words as they are, cut where they are very long; nothing for None."""
    if value is None:
        return Cell("", "")
    if isinstance(value, bool):
        return Cell("yes" if value else "no", str(int(value)))
    if isinstance(value, int):
        return Cell(f"{value:,}", str(value))
    if isinstance(value, float):
        return Cell(f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}", repr(value))
    text = str(value) if len(str(value)) <= LONGEST else f"{str(value)[:LONGEST]} …"
    return Cell(text, text)


def _told(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What matters first, then whatever else was written."""
    for name in (*PROVENANCE, *(name for name in provenance if name not in PROVENANCE)):
        if provenance.get(name) not in (None, {}, [], ""):
            yield PROVENANCE.get(name, name), plain(provenance[name])


def plain(value: object) -> str:
    """Anything that JSON holds, in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(one)}" for key, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(one) for one in value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _timelines(folder: Folder) -> Iterator[Drawing]:
    """Each measured timeline above the predicted one of the same call; what has no other, alone."""
    predicted = [(name, one) for name, one in folder.timelines if one.source == PREDICTED]
    groups: list[list[tuple[str, Timeline]]] = []
    for name, one in folder.timelines:
        if one.source != PREDICTED:
            match = next((each for each in predicted if alike(one, each[1])), None)
            groups.append([(name, one), *([match] if match else [])])
            predicted = [each for each in predicted if each is not match]
    groups += [[each] for each in predicted]
    for number, group in enumerate(groups):  # which grows
        caption = " above ".join(f"{one.source} ({name})" for name, one in group)
        try:
            figure = timelines.draw([one for _, one in group], VARIABLES)
            yield Drawing(caption, _svg(figure, f"timeline{number}"))
        except Exception as error:
            if len(group) > 1:
                groups += [[each] for each in group]
            else:
                folder.refused.append(f"{group[0][0]}: {_undrawn(error)}")


def _undrawn(error: Exception) -> str:
    return printable(f"it cannot be drawn: {type(error).__name__}: {error}"[:300])


def _svg(figure: Any, name: str) -> Any:
    from markupsafe import Markup

    # matplotlib escapes what it writes; what it draws with is ours
    return Markup(inline(figure, name))
