"""One self-contained page of a folder of results: no network, light and dark, for a phone and for paper."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from ... import __version__
from ..timeline.events import Timeline, alike, call_of
from . import calls, charts, timelines, views
from .reading import Bench, Folder, printable
from .rows import (
    Table,
    case_rows,
    failing,
    finite,
    layout_of,
    mapping_of,
    mappings_of,
    number_table,
    ours,
    plain,
    ring_runs,
    table,
    world_of_check,
)
from .theme import DARK, LIGHT, VARIABLES, css, inline

NOT_MEASURED = ("not run", "not here", "cut short")


@dataclass(frozen=True)
class Drawing:
    """An SVG element that we drew, and what it is."""

    caption: str
    svg: Any  # markupsafe.Markup


@dataclass(frozen=True)
class CallPicture:
    """The picture of one layout and mask as data URIs, and the cases that are of it."""

    caption: str
    light: str
    dark: str
    cases: str


@dataclass
class Page:
    """What the template shows, part after part."""

    title: str
    version: str
    provenance: list[tuple[str, str]]
    failed: list[tuple[str, str]]
    missing: list[tuple[str, str]]
    decisions: Table | None = None
    cases: Table | None = None
    timelines: list[Drawing] = field(default_factory=list)
    charts: list[Drawing] = field(default_factory=list)
    calls: list[CallPicture] = field(default_factory=list)
    undrawn: list[str] = field(default_factory=list)
    unshown: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[Table] = field(default_factory=list)

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Anchors and names of what is there."""
        named = {"decisions": "Decisions", "cases": "Cases", "timelines": "Timelines", "plots": "Plots"}
        found = {**named, "calls": "Layouts and masks", "numbers": "Every number", "unshown": "Not shown"}
        there = {"plots": self.charts}
        return [(anchor, name) for anchor, name in found.items() if there.get(anchor, getattr(self, anchor, None))]


def html(folder: Folder) -> str:
    """The page, with everything that came from files escaped."""
    import jinja2
    from markupsafe import Markup

    here = files(__package__)
    script = here.joinpath("report.js").read_text()
    style = here.joinpath("report.css").read_text().replace("LIGHT;", css(LIGHT)).replace("DARK", css(DARK))
    # whatever gets into the page by mistake, a browser runs this script and no other
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(here.joinpath("report.html.j2").read_text())
    parts = {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return template.render(page=page_of(folder), **parts)


def page_of(folder: Folder) -> Page:
    """Everything that the page shows; a file that cannot be drawn costs that file alone, which is told as refused."""
    try:
        return _whole(folder)
    except Exception:  # which file it is, nobody says: each is tried beside those that can be drawn
        shown = replace(folder, suite=None, benches=[], timelines=[])
        for name, part in folder.parts():
            try:
                _whole(more := shown.joined(part))
            except Exception as error:
                folder.refused.append((name, printable(f"it cannot be drawn: {type(error).__name__}: {error}"[:300])))
            else:
                shown = more
        folder.suite, folder.benches, folder.timelines = shown.suite, shown.benches, shown.timelines
        return _whole(folder)


def _whole(folder: Folder) -> Page:
    cases = cases_of(folder)
    page = Page(
        f"ringattn: {folder.name}",
        __version__,
        list(_provenance(folder.provenance)),
        failures(folder),
        [(case["name"], f"{case['state']}: {case['reason']}") for case in cases if case["state"] in NOT_MEASURED],
        table("What the suite decides", mappings_of((folder.suite or {}).get("decisions"))),
        case_rows(cases),
    )
    page.unshown = folder.unshown
    page.timelines = list(_timelines(folder.timelines))
    page.charts = [
        Drawing(chart.title, _svg(charts.draw(chart, VARIABLES, titled=False), f"chart{number}"))
        for number, chart in enumerate(charts.charts(folder))
    ]
    found = pictured(folder)
    page.calls = list(_drawn(found[: calls.MOST_PICTURES]))
    page.undrawn = [calls.title(call) for call, _ in found[calls.MOST_PICTURES :]]
    page.numbers = list(_numbers(folder, cases))
    return page


def failures(folder: Folder) -> list[tuple[str, str]]:
    """What failed and why: cases of the suite, what single benches wrote, files that could not be read."""
    found = [(case["name"], why) for case in cases_of(folder) for why in failing(case)]
    found += [(bench.file, why) for bench in folder.benches for why in views.failures(bench)]
    return found + [(name, f"not read: {why}") for name, why in folder.refused]


def cases_of(folder: Folder) -> Sequence[Mapping[str, Any]]:
    """Those of the suite, where there is one."""
    return folder.suite["cases"] if folder.suite is not None else []


def _provenance(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What matters first, then whatever else was written."""
    first = {"gpu": "GPU", "cpu": "CPU", "date": "date", "command": "command", "ringattn": "ringattn"}
    for name in (*first, *(name for name in told if name not in first)):
        if told.get(name) not in (None, {}, [], ""):
            yield first.get(name, str(name)), plain(told[name])


def _timelines(found: Sequence[tuple[str, Timeline]]) -> Iterator[Drawing]:
    """Each measured timeline above the predicted one of the same call; what has no other, alone."""
    predicted = [(name, one) for name, one in found if one.source == "predicted"]
    groups: list[list[tuple[str, Timeline]]] = []
    for name, one in found:
        if one.source == "measured":
            match = next((each for each in predicted if alike(one, each[1])), None)
            groups.append([(name, one), *([match] if match else [])])
            predicted = [each for each in predicted if each is not match]
    for number, group in enumerate(groups + [[each] for each in predicted]):
        figure = timelines.draw([one for _, one in group], VARIABLES)
        caption = " above ".join(f"{one.source} ({name})" for name, one in group)
        yield Drawing(caption, _svg(figure, f"timeline{number}"))


def pictured(folder: Folder) -> list[calls.Wanted]:
    """Each layout, mask and world that something in a folder is of, with the names of what is of it."""
    words = [(case["name"], said) for case in cases_of(folder) for said in _said_by(case)]
    words += [(bench.file, told) for bench in folder.benches for told in _said(bench)]
    words += [(name, call_of(one)) for name, one in folder.timelines]
    words += _checked(folder)
    return calls.wanted(words)


def _drawn(found: Sequence[calls.Wanted]) -> Iterator[CallPicture]:
    for call, names in found:
        uris = [f"data:image/png;base64,{base64.b64encode(calls.png(call, theme)).decode()}" for theme in (LIGHT, DARK)]
        yield CallPicture(calls.title(call), uris[0], uris[1], ", ".join(names))


def _said_by(case: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a case of the suite says of itself and of each of its numbers."""
    arguments = mapping_of(case.get("arguments"))
    for labels in _labels(case):
        said = {**arguments, **labels}
        if "layouts" in arguments and "layout" not in said:
            # a whole ring of when it did not say these: causal, as all were, in the layout that its name ends with
            said |= {"layout": ours(said.get("by")), "mask": "causal"}
        yield said


def _said(bench: Bench) -> Iterator[Mapping[str, Any]]:
    """The problems that a bench was asked."""
    if bench.kind == "ring":
        for run in ring_runs(bench.data):
            problem = mapping_of(run.get("problem"))
            layouts = (layout_of(run, one) for one in mappings_of(run.get("candidates")))
            yield from ({**problem, "layout": layout} for layout in layouts if layout is not None)
        return
    if bench.kind == "predicted":
        return  # of which one length in the whole folder is enough
    asked = mapping_of(bench.data.get("asked"))
    problem = mapping_of(bench.data.get("problem", asked.get("problem", asked)))
    nodes = mapping_of(bench.data.get("ring")).get("nodes", 1)
    told = {"nodes": nodes, "tokens": problem.get("tokens_per_rank"), **problem}
    worlds = [one.get("world") for one in mappings_of(bench.data.get("worlds"))]
    yield from ({**told, "world": world} for world in worlds or [told.get("world")])


def _checked(folder: Folder) -> list[tuple[str, Mapping[str, Any]]]:
    """The calls of predictor's checks: each layout and mask once, at its shortest length, where a window is widest."""
    found: dict[tuple[object, ...], tuple[str, Mapping[str, Any]]] = {}
    for bench in (one for one in folder.benches if one.kind == "predicted"):
        world = world_of_check(bench.data)
        for row in mappings_of(bench.data.get("rows")):
            of, length = (world, str(row.get("layout")), str(row.get("mask"))), row.get("seqlen")
            if finite(length) and (of not in found or length < found[of][1]["seqlen"]):
                found[of] = bench.file, {**row, "world": world}
    return [*found.values()]


def _labels(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a case's numbers say of themselves, each once; nothing said counts as one."""
    labels = [one["labels"] for one in case["numbers"] if isinstance(one.get("labels"), dict)]
    return [dict(items) for items in dict.fromkeys(tuple(each.items()) for each in labels if _flat(each))] or [{}]


def _flat(labels: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str | int | float | bool | None) for value in labels.values())


def _numbers(folder: Folder, cases: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    for case in cases:
        found = number_table(f"Numbers of {case['name']}", case["numbers"])
        if found is not None:
            yield found
    for bench in folder.benches:
        yield from views.tables(bench)


def _svg(figure: Any, name: str) -> Any:
    from markupsafe import Markup

    # matplotlib escapes what it writes; what it draws with is ours
    return Markup(inline(figure, name))
