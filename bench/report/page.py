"""One self-contained page of a folder of results: no network, light and dark, for a phone and for paper."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ... import __version__
from ...kernels.files import read_object
from ..common.result import Result, cell, read
from ..common.theme import in_page_colours, inline
from ..timeline import drawing
from ..timeline.events import PREDICTED, Timeline, alike, from_chrome
from . import charts

FIRST = "results.json"  # of the suite
PROVENANCE = ("gpu", "cpu", "date", "command", "ringattn")  # what is told first
LONGEST = 400  # characters of a cell: what a file says may be anything


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
        provenances = [one.provenance for _, one in self.results] + [
            one.about.get("provenance") for _, one in self.timelines
        ]
        return next((one for one in provenances if isinstance(one, dict) and one), {})


def read_folder(folder: Path) -> Folder:
    """Every JSON file of a folder; one that cannot be read is named with the reason.

    Raises:
        ValueError: there is no folder, or nothing in it that can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: it takes what `ringattn bench suite --out DIR` writes to")
    contents = Folder(printable(folder.absolute().name))
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name != FIRST, path)):
        name = printable(path.name)
        try:
            data = read_object(path)
            if "otherData" in data:
                contents.timelines.append((name, from_chrome(data)))
            else:
                contents.results.append((name, read(path)))
        except ValueError as error:
            contents.refused.append(f"{name}: {printable(str(error).replace(str(path), 'it'))}")
    if not contents.results and not contents.timelines:
        why = f"{folder} holds no results: nothing that a command wrote with --json"
        raise ValueError("; ".join([why, *contents.refused]))
    return contents


def printable(text: str) -> str:
    """What a page and a terminal may show: names of files are any bytes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def html(folder: Folder) -> str:
    """The page, with everything that came from files escaped; what cannot be drawn is added to what is refused."""
    import jinja2
    from markupsafe import Markup

    here = files(__package__)
    script = here.joinpath("report.js").read_text()
    # whatever gets into the page by mistake, a browser runs this script and no other
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"shown": shown}
    sections = [
        {
            "file": file,
            "result": result,
            "columns": [name for name in result.units if any(row.get(name) is not None for row in result.rows)],
            "orders": {name: order([row.get(name) for row in result.rows]) for name in result.units},
            "provenance": list(told_first(result.provenance)),
            "charts": list(drawn(folder, number)),
        }
        for number, (file, result) in enumerate(folder.results)
    ]
    pictures = list(drawn_timelines(folder))
    failed = [(file, why) for file, one in folder.results for why in one.failed]
    return environment.from_string(here.joinpath("report.html.j2").read_text()).render(
        title=f"ringattn: {folder.name}",
        version=__version__,
        provenance=list(told_first(folder.provenance)),
        ended=ended(folder),
        failed=failed + [("not read", why) for why in folder.refused],
        sections=sections,
        timelines=pictures,
        style=Markup(here.joinpath("report.css").read_text()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def ended(folder: Folder) -> str:
    """How many parts of a suite ended how."""
    rows = [row for file, one in folder.results if file == FIRST for row in one.rows]
    states = Counter(plain(row["state"]) for row in rows if "state" in row)
    return ", ".join(f"{count} {state}" for state, count in states.items())


def told_first(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What matters first, then whatever else was written."""
    for name in sorted(provenance, key=lambda name: PROVENANCE.index(name) if name in PROVENANCE else len(PROVENANCE)):
        if text := plain(provenance[name]):
            yield name, text


def plain(value: object) -> str:
    """Anything that JSON holds, in words."""
    if isinstance(value, Mapping):
        texts = {name: plain(one) for name, one in value.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items() if text)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain(one) for one in value)
    return cell(value)


def shown(value: object) -> str:
    """A cell as in the table of a command, cut where it is very long."""
    text = cell(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def order(values: Sequence[object]) -> list[int | str]:
    """The place of each value in its column, sorted: numbers by size, then words by the alphabet; "" of what is empty.

    Equal values share a place.
    """

    def key(value: object) -> tuple[bool, Any]:
        return isinstance(value, str), value.casefold() if isinstance(value, str) else value

    places = {one: place for place, one in enumerate(sorted({key(value) for value in values if value is not None}))}
    return ["" if value is None else places[key(value)] for value in values]


def drawn(folder: Folder, number: int) -> Iterator[tuple[str, Any]]:
    """The charts of a result, each with what it is; numbers that nobody can draw cost a chart alone."""
    file, result = folder.results[number]
    try:
        for place, chart in enumerate(charts.charts(result)):
            yield chart.title, svg(charts.draw(chart), f"chart{number}-{place}")
    except Exception as error:
        folder.refused.append(undrawn(file, error))


def drawn_timelines(folder: Folder) -> Iterator[tuple[str, Any]]:
    """Each measured timeline above the predicted one of the same call; what has no other, alone."""
    predicted = [each for each in folder.timelines if each[1].source == PREDICTED]
    groups = [[each] for each in folder.timelines if each[1].source != PREDICTED]
    for group in groups:
        if match := next((each for each in predicted if alike(group[0][1], each[1])), None):
            predicted.remove(match)
            group.append(match)
    groups += [[each] for each in predicted]
    for number, group in enumerate(groups):
        try:
            figure = drawing.draw([one for _, one in group])
            caption = " above ".join(f"{one.source} ({name})" for name, one in group)
            yield caption, svg(figure, f"timeline{number}")
        except Exception as error:
            folder.refused += [undrawn(name, error) for name, _ in group]


def undrawn(file: str, error: Exception) -> str:
    return f"{file}: " + printable(f"it cannot be drawn: {type(error).__name__}: {error}"[:300])


def svg(figure: Any, name: str) -> Any:
    from markupsafe import Markup

    # matplotlib escapes what it writes; what it draws with is ours
    return Markup(in_page_colours(inline(figure, name)))
