"""One self-contained page of a folder of results: no network, light and dark mode, for phones and for paper."""

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
from ...kernels.json_files import read_object
from ..common.result import HEADINGS, Result, format_cell, read_result
from ..common.theme import inline_svg, use_page_colours
from ..timeline import drawing
from ..timeline.events import PREDICTED, Timeline, from_chrome, is_same_call
from . import charts

SUITE_FILE = "results.json"  # written by the suite
PROVENANCE = ("gpu", "cpu", "date", "command", "ringattn")  # shown first, in this order
MAX_CELL_LENGTH = 400  # characters of a cell, because files can hold anything


@dataclass
class ResultFolder:
    """Results and timelines of a folder, each with its file's name, and why other files were refused."""

    name: str
    results: list[tuple[str, Result]] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Provenance of the first result or timeline that has one."""
        provenances = [result.provenance for _, result in self.results] + [
            timeline.about.get("provenance") for _, timeline in self.timelines
        ]
        return next((provenance for provenance in provenances if isinstance(provenance, dict) and provenance), {})


def read_folder(folder: Path) -> ResultFolder:
    """Read every JSON file of a folder; list files that cannot be read, or raise ValueError if no file can."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of results, such as `ringattn bench suite --out DIR` writes")
    contents = ResultFolder(printable_text(folder.absolute().name))
    for path in sorted(folder.glob("*.json"), key=lambda path: (path.name != SUITE_FILE, path)):
        name = printable_text(path.name)
        try:
            data = read_object(path)
            if "otherData" in data:
                contents.timelines.append((name, from_chrome(data)))
            else:
                contents.results.append((name, read_result(path)))
        except ValueError as error:
            contents.refusals.append(f"{name}: {printable_text(str(error).replace(str(path), 'it'))}")
    if not contents.results and not contents.timelines:
        message = f"{folder} has no file that a command wrote with --json"
        raise ValueError("; ".join([message, *contents.refusals]))
    return contents


def printable_text(text: str) -> str:
    """Replace unprintable characters, because file names can hold any bytes."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def render_page(folder: ResultFolder) -> str:
    """Return the page as HTML, with all file contents escaped; failed drawings are added to ``folder.refusals``."""
    import jinja2
    from markupsafe import Markup

    package_files = files(__package__)
    script = package_files.joinpath("report.js").read_text()
    # The browser runs only the script with this hash, whatever else gets into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"shown": cell_text}
    sections = [
        {
            "file": file,
            "result": result,
            "columns": [name for name in result.units if any(row.get(name) is not None for row in result.rows)],
            "orders": {name: sort_keys([row.get(name) for row in result.rows]) for name in result.units},
            "provenance": list(ordered_provenance(result.provenance)),
            "charts": list(draw_result(folder, number)),
        }
        for number, (file, result) in enumerate(folder.results)
    ]
    pictures = list(draw_timelines(folder))
    failed = [(file, reason) for file, one in folder.results for reason in one.failed]
    return environment.from_string(package_files.joinpath("report.html.j2").read_text()).render(
        title=f"ringattn: {folder.name}",
        version=__version__,
        provenance=list(ordered_provenance(folder.provenance)),
        ended=count_outcomes(folder),
        failed=failed + [("not read", reason) for reason in folder.refusals],
        sections=sections,
        timelines=pictures,
        headings=HEADINGS,
        style=Markup(package_files.joinpath("report.css").read_text()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def count_outcomes(folder: ResultFolder) -> str:
    """Return how many parts of the suite are in each state, such as ``20 done, 1 failed``."""
    rows = [row for file, result in folder.results if file == SUITE_FILE for row in result.rows]
    states = Counter(plain_text(row["state"]) for row in rows if "state" in row)
    return ", ".join(f"{count} {state}" for state, count in states.items())


def ordered_provenance(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of every field that is not empty, in the order of ``PROVENANCE``."""
    for name in sorted(provenance, key=lambda name: PROVENANCE.index(name) if name in PROVENANCE else len(PROVENANCE)):
        if text := plain_text(provenance[name]):
            yield name, text


def plain_text(value: object) -> str:
    """Return any JSON value as text."""
    if isinstance(value, Mapping):
        texts = {name: plain_text(item) for name, item in value.items()}
        return ", ".join(f"{name} {text}" for name, text in texts.items() if text)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(plain_text(item) for item in value)
    return format_cell(value)


def cell_text(value: object) -> str:
    """Return a cell as a command's table shows it, shortened if very long."""
    text = format_cell(value)
    return text if len(text) <= MAX_CELL_LENGTH else f"{text[:MAX_CELL_LENGTH]} …"


def sort_keys(values: Sequence[object]) -> list[int | str]:
    """Return the rank of each cell when the column is sorted: numbers first, then words; "" for empty cells."""

    def key(value: object) -> tuple[bool, Any]:
        return isinstance(value, str), value.casefold() if isinstance(value, str) else value

    places = {item: place for place, item in enumerate(sorted({key(value) for value in values if value is not None}))}
    return ["" if value is None else places[key(value)] for value in values]


def draw_result(folder: ResultFolder, number: int) -> Iterator[tuple[str, Any]]:
    """Yield (title, SVG) of every chart of a result; a failure is added to ``folder.refusals``."""
    file, result = folder.results[number]
    try:
        for place, chart in enumerate(charts.build_charts(result)):
            yield chart.title, safe_svg(charts.draw_chart(chart), f"chart{number}-{place}")
    except Exception as error:
        folder.refusals.append(drawing_failure(file, error))


def draw_timelines(folder: ResultFolder) -> Iterator[tuple[str, Any]]:
    """Yield (caption, SVG) of each measured timeline above a prediction of the same call; then other predictions."""
    predicted = [named for named in folder.timelines if named[1].source == PREDICTED]
    groups = [[named] for named in folder.timelines if named[1].source != PREDICTED]
    for group in groups:
        if match := next((named for named in predicted if is_same_call(group[0][1], named[1])), None):
            predicted.remove(match)
            group.append(match)
    groups += [[named] for named in predicted]
    for number, group in enumerate(groups):
        try:
            figure = drawing.draw_timeline_figure([timeline for _, timeline in group])
            caption = " above ".join(f"{timeline.source} ({name})" for name, timeline in group)
            yield caption, safe_svg(figure, f"timeline{number}")
        except Exception as error:
            folder.refusals += [drawing_failure(name, error) for name, _ in group]


def drawing_failure(file: str, error: Exception) -> str:
    return f"{file}: " + printable_text(f"it cannot be drawn: {type(error).__name__}: {error}"[:300])


def safe_svg(figure: Any, name: str) -> Any:
    from markupsafe import Markup

    # matplotlib escapes text, and the rest of the drawing is ours.
    return Markup(use_page_colours(inline_svg(figure, name)))
