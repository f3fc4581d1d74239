"""Tests of the report: the files it reads, its order, its charts, and that a file's text cannot become markup."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from typer.testing import CliRunner

from ringattn.bench.common.result import Result
from ringattn.bench.common.theme import LIGHT, PAGE_COLOURS, inline_svg, write_figure
from ringattn.bench.report import charts, command
from ringattn.bench.report.page import (
    ResultFolder,
    cell_text,
    count_outcomes,
    ordered_provenance,
    plain_text,
    read_folder,
    render_page,
    sort_keys,
)  # fmt: skip
from ringattn.bench.timeline import drawing
from ringattn.bench.timeline.events import Event, Timeline, as_chrome

from ..support import report_cases
from ..support.report_cases import HOSTILE, Outline, all_result_files, taint_strings, timeline, write

DRAWN = ("g", "path", "use", "text", "clippath", "rect", "defs", "style")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def page_of(folder: Path, **files: object) -> str:
    return render_page(read_folder(write(folder, **files)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("results"), **all_result_files())


def test_the_command_writes_one_page_into_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", results=report_cases.suite(), other={"schema": "ringattn bench links 9"})
    ran = invoke(folder)
    assert ran.exit_code == 0 and ran.stdout == f"{folder / 'report.html'}\n", ran.output
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "skipped: other.json: it cannot be read: its schema is not 'ringattn result'" in ran.stderr


@pytest.mark.parametrize(("flags", "message"), [
    ("run/results.json", "results.json is not a folder"),
    ("empty", "empty has no file that a command wrote with --json"),
    ("damaged", "has no file that a command wrote with --json; a.json: Expecting"),
    ("run --out .", "cannot write .: it is a folder. Name a file in it."),
    ("run --out nowhere/page.html", "there is no folder nowhere"),
])  # fmt: skip
def test_refusals(flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", results=report_cases.suite())
    write(tmp_path / "empty")
    (write(tmp_path / "damaged") / "a.json").write_text("{")
    ran = invoke(*flags.split())
    assert ran.exit_code == 2 and message in " ".join(ran.output.split()), ran.output
    assert not (tmp_path / "run/report.html").exists()


def test_page_shows_provenance_failures_and_files_in_order(page: str) -> None:
    places = [
        page.index(text)
        for text in ("ringattn bench suite</dd>", "2 failed", 'id="timelines"', "<small>results", "<small>kernels")
    ]
    assert places == sorted(places)
    failed = page[places[1] : places[2]]
    assert "<strong>results.json</strong>: right: error of dq (dtype float16) is 2.0, at most 1 allowed" in failed
    assert "<strong>memory.json</strong>: memory per rank differs by 33.3% between worlds, 2% allowed" in failed
    assert "<p>Parts of the suite: 1 done, 1 failed.</p>" in failed
    assert "<p>nccl_one_sided does not open here: device is cpu</p>" in page
    assert '<button type="button">busbw, GB/s</button>' in page and ">note<" not in page  # an empty column is left out
    outline = Outline(page)
    assert all(re.fullmatch(r"\d*", tag["data-order"] or "") for tag in outline.tags("td"))
    assert len(outline.tags("caption")) == len(outline.tags("table")) == 4


@pytest.mark.parametrize(
    ("other", "same"), [({}, True), ({"threads": 3}, True), ({"nodes": 2}, True), ({"layout": "striped"}, False)]
)
def test_the_predicted_timeline_is_below_the_measured_one_of_the_same_call(
    other: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    measured = replace(timeline("measured"), about={"call": {**report_cases.CALL, **other}})
    page = page_of(tmp_path, a=as_chrome(timeline("predicted")), b=as_chrome(measured))
    headings = [text for text in Outline(page).text["text"] if re.match("(measured|predicted):", text)]
    assert [text.partition(":")[0] for text in headings] == ["measured", "predicted"]
    assert page.count('class="scroll timeline"') == (1 if same else 2)


def test_the_page_needs_no_network(page: str) -> None:
    outline = Outline(page)
    attributes = [(name, value or "") for _, each in outline.elements for name, value in each.items()]
    links = [value for name, value in attributes if name in ("src", "href", "srcset", "xlink:href", "action", "data")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not [value for name, value in attributes if "://" in value and not name.startswith("xmlns")]
    assert not re.search(r"@import|url\((?!#)", page)
    (script,) = [text for text in outline.text["script"]]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [tag["content"] for tag in outline.tags("meta") if tag.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


def test_no_string_of_a_file_becomes_markup(page: str, tmp_path: Path) -> None:
    # Whatever the strings say, the page has the same elements with the same attributes in the same order.
    hostile = page_of(tmp_path / "run", **taint_strings(all_result_files()))
    assert hostile.count("&lt;script&gt;alert(1)") > 50
    harmless, attacked = Outline(page), Outline(hostile)

    def shape(outline: Outline) -> list[tuple[str, list[str]]]:
        # Long text leaves less room for a picture, which changes its ticks.
        return [(tag, sorted(each)) for tag, each in outline.elements if tag not in DRAWN]

    assert shape(attacked) == shape(harmless)
    assert len(attacked.text["script"]) == 1
    names = {name for _, each in attacked.elements for name in each}
    assert not [name for name in names if name.startswith("on") or name == HOSTILE]
    targets = [value or "" for _, each in attacked.elements for key, value in each.items() if key in ("href", "src")]
    assert not [value for value in targets if "javascript" in value]
    assert "{{ 7*7 }}" in hostile and ">49<" not in hostile


def test_tables_sort_by_numbers_and_by_words() -> None:
    assert sort_keys([3, 0.5, True, None, 10, 3]) == [2, 0, 1, "", 3, 2]
    assert sort_keys(["b", None, "a", "b", "C", 7]) == [2, "", 1, 2, 3, 0]


def test_numbers_in_cells_are_short() -> None:
    assert [cell_text(value) for value in (12345, 0.123456, 1e10, False)] == ["12345", "0.1235", "1e+10", "no"]
    assert len(cell_text("x" * 10_000)) < 500


def drawn(data: dict[str, Any]) -> list[charts.Chart]:
    return charts.build_charts(Result(**{name: value for name, value in data.items() if name != "schema"}))


def chart(units: dict[str, str], *rows: tuple[Any, ...]) -> list[charts.Chart]:
    return charts.build_charts(Result("x", units, [dict(zip(units, row, strict=True)) for row in rows]))


def test_charts_show_the_columns_that_vary() -> None:
    (links,) = drawn(report_cases.links())
    assert (links.title, links.x, links.y) == ("bench links: busbw by size", "size, bytes", "busbw, GB/s")
    assert links.lines == {"0->1": {2.0**16: 1.0, 2.0**20: 9.0}, "1->0": {2.0**16: 2.0, 2.0**20: 8.0}}
    (kernels,) = drawn(report_cases.kernels())  # a single length makes no line
    rates = {1024.0: 90.0, 2048.0: 360.0, 4096.0: 1440.0}
    assert kernels.y == "value, TFLOP/s" and kernels.lines == {"ringattn": rates, "flash": rates}
    assert drawn(report_cases.suite()) == []


def test_axes_and_lines_of_a_chart() -> None:
    units = {"world": "", "seqlen": "tokens", "by": "", "ms": "ms", "rate": "TFLOP/s", "note": "", "hits": "elements"}
    rows = [(w, s, "a", 1.0, float(w * s), str(w * s), w * s) for w in (2, 4) for s in (64, 128)]
    (drawn,) = chart(units, *rows)  # a rate takes precedence over a time, lengths over ranks; ranks are the lines
    assert drawn.y == "rate, TFLOP/s" and drawn.lines["world 4"] == {64.0: 256.0, 128.0: 512.0}
    twice = {"seqlen": "", "ms": "ms"}
    (drawn,) = chart(twice, (1, 1.0), (1, 3.0), (1, 9.0), (2, 1.0))
    assert drawn.lines == {"ms": {1.0: 3.0, 2.0: 1.0}}  # median of the repeats
    assert charts.draw_chart(drawn).axes[0].get_xscale() == "linear"
    (drawn,) = chart(twice, (64, 99.0), (1, 1.0))
    axes = charts.draw_chart(drawn).axes[0]
    assert axes.lines[0].get_xdata().tolist() == [1, 64]  # sorted
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "64"]
    assert charts.draw_chart(drawn).axes[0].get_xscale() == charts.draw_chart(drawn).axes[0].get_yscale() == "log"
    (drawn,) = chart(twice, *((x, 1.0) for x in range(1, 12)))
    assert charts.draw_chart(drawn).axes[0].get_xticks().tolist() == [1, 3, 5, 7, 9, 11]  # at most 9 ticks
    (drawn,) = chart(twice, (1, 60.0), (2, 1.0))
    assert charts.draw_chart(drawn).axes[0].get_yscale() == "linear"
    by = {"seqlen": "", "by": "", "ms": "ms"}
    (drawn,) = chart(by, (1, "a", 1.0), (2, "a", 1.0), (2, "b", 1.0))
    assert {name: len(points) for name, points in drawn.lines.items()} == {"a": 2, "b": 1}
    assert chart(by, (1, "a", 1.0), (2, "b", 1.0)) == []  # no line has two points
    (drawn,) = chart(twice, (1, 0.0), (2, 99.0))
    assert charts.draw_chart(drawn).axes[0].get_yscale() == "linear"  # a log axis cannot show zero
    for value in (HOSTILE, None, True, 10**299):
        assert chart(twice, (1, value), (2, value)) == []
    (many,) = chart(by, *((s, f"n{n}", 1.0) for s in (1, 2) for n in range(20)))
    assert len(many.lines) == 12 and many.title.endswith("first 12 of 20 lines")


def test_measured_and_predicted_share_one_time_axis() -> None:
    upper, lower = drawing.draw_timeline_figure([timeline("measured"), timeline("predicted", slower=0.5)]).axes
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[1] > 1900
    assert upper.get_title(loc="left").startswith("measured: causal, zigzag, 64 tokens; 1,900 ms, ranks compute 84%")
    assert lower.get_title(loc="left").startswith("predicted: ")
    upper, _ = drawing.draw_timeline_figure([timeline("predicted", slower=0.5), timeline("measured")]).axes
    assert upper.get_xlim() == lower.get_xlim()


def test_every_row_has_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[set[tuple[int, str]]] = []
    monkeypatch.setattr(drawing, "_draw_lane", lambda axes, events, *_: rows.append({(e.rank, e.lane) for e in events}))
    drawing.draw_timeline_figure([timeline("measured")])
    assert any(rows) and all(len(row) <= 1 for row in rows)


def test_every_kind_of_bar_has_its_colour() -> None:
    bars = {
        ("compute", "forward"): LIGHT.compute, ("compute", "backward"): LIGHT.backward, ("wait", "forward"): LIGHT.wait,
        ("send", "backward"): LIGHT.send, ("receive", "forward"): LIGHT.receive, ("slot 0", "forward"): LIGHT.slot,
        ("dK/dV slot 1", "backward"): LIGHT.sums,
    }  # fmt: skip
    assert {bar: drawing._colour(Event(0, *bar, 0, 0.0, 1.0)) for bar in bars} == bars
    figure = drawing.draw_timeline_figure([timeline("measured")])
    legend = {patch.get_label(): to_hex(patch.get_facecolor()) for patch in figure.legends[0].get_patches()}
    assert [*legend.values()] == [*bars.values()]
    boxes, _ = drawing.lane_boxes([timeline("measured")])
    assert boxes[0, "wait"] == boxes[0, "compute"] != boxes[0, "send"]  # a rank computes or waits
    (backward,) = (x for x in figure.axes[0].collections if isinstance(x, LineCollection))
    assert backward.get_segments()[0][0][0] == pytest.approx(1000)
    middles = {text.get_position()[0] for text in figure.axes[0].texts if text.get_text().startswith("hop ")}
    assert sorted(middles) == pytest.approx([200, 700, 1200, 1700])


@pytest.mark.parametrize("world", [4, 5])
def test_more_ranks_have_no_slots(world: int) -> None:
    events = tuple(Event(rank, "slot 0", "forward", 0, 0, 1, "K/V of 0") for rank in range(world))
    svg = drawing.draw_timeline_figure([Timeline("no mathematics: $\\frac{$", "measured", world, events)])
    named = {text.get_text() for text in svg.axes[0].texts}
    assert ("slot 0" in named) == (world == 4)
    assert f"rank {world - 1}" in named
    inline_svg(svg, "a")


def test_an_svg_is_the_same_for_the_same_figure_and_has_ids_of_its_own() -> None:
    first, again, other = (
        inline_svg(drawing.draw_timeline_figure([timeline("measured", name=HOSTILE)]), name) for name in "aab"
    )
    ElementTree.fromstring(first)
    assert first == again and first.startswith("<svg") and len(first) < 60_000 and "<metadata" not in first
    ids = [{*re.findall(r'\bid="([^"]+)"', text)} for text in (first, other)]
    assert ids[0] and ids[0].isdisjoint(ids[1])
    assert {*re.findall(r'(?:url\(|href=")#([^")]+)', first)} <= ids[0]


def test_an_svg_does_not_depend_on_rounding_of_the_layout() -> None:
    # The last bits of a constrained layout depend on the order of a solver, which differs between processes.

    def drawn(left: float) -> str:
        figure = Figure()
        figure.add_axes((left, 0.1, 0.5, 0.8)).plot([0, 1], [0, 1], marker="o")
        return inline_svg(figure, "a")

    assert drawn(0.1) == drawn(math.nextafter(0.1, 1)) != drawn(0.2)


def test_pictures_use_the_colours_of_the_page(page: str) -> None:
    # In the page's dark form there must be no white box and no dark text.
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert svgs and all("var(--paper)" in svg and "var(--ink)" in svg for svg in svgs)
    assert not any(getattr(LIGHT, name) in svg for svg in svgs for name in PAGE_COLOURS)
    assert all(f"--{name}:" in page for name in PAGE_COLOURS)


def test_a_partly_filled_column_does_not_split_lines() -> None:
    # `bench links` measures compute only beside the largest transfer, and channels only tell some rows apart.
    units = {"transport": "", "channels": "", "size": "B", "busbw": "GB/s", "compute": "", "compute note": ""}
    rows: list[Any] = [
        {"transport": "nccl", "channels": n, "size": 4**i, "busbw": i + 1.0} for n in (1, 4) for i in range(3)
    ]
    rows += [{"transport": "local", "channels": None, "size": 4**i, "busbw": i + 2.0} for i in range(3)]
    for row in rows[2::3]:
        row |= {"compute": "matmul", "compute note": "why"}
    chart = charts.build_chart("links", rows, units)
    assert chart is not None
    assert {name: len(points) for name, points in chart.lines.items()} == {
        "nccl, channels 1": 3, "nccl, channels 4": 3, "local": 3,
    }  # fmt: skip


def test_legends_are_outside_of_the_axes(tmp_path: Path) -> None:
    lines = {f"line {number}": {1.0: 1.0, 2.0: 2.0} for number in range(12)}
    figure = charts.draw_chart(charts.Chart("t", "x", "y", lines))
    figure.draw_without_rendering()
    write_figure(figure, tmp_path / "a.PDF", 10)
    assert (tmp_path / "a.PDF").read_bytes().startswith(b"%PDF")
    (axes,), (legend,) = figure.axes, figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_the_run_of_the_suite_and_the_first_known_provenance_are_shown() -> None:
    run = Result("bench suite", {"state": ""}, [{"state": "done"}])
    known = replace(run, provenance={"versions": "1", "command": "c", "gpu": "A"})
    folder = ResultFolder("x", [("results.json", run), ("other.json", known)])
    assert count_outcomes(folder) == "1 done"
    assert [name for name, _ in ordered_provenance(folder.provenance)] == ["gpu", "command", "versions"]


def test_provenance_without_a_commit() -> None:
    assert plain_text({"version": "1", "commit": None, "modified": None}) == "version 1"
    assert plain_text({"gpus": [0, {"links": 2.5}], "nics": None}) == "gpus 0, links 2.5"
