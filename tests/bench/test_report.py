"""The report: what it reads and refuses, what stands where, that it needs no network, that files cannot script it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.bench.common.result import Result
from ringattn.bench.report import charts, command
from ringattn.bench.report.page import cell, html, read_folder
from ringattn.bench.timeline.events import alike, as_chrome

from ..support import report_cases
from ..support.report_cases import HOSTILE, Outline, everything, tainted, write

DRAWN = ("g", "path", "use", "text", "clippath", "rect", "defs", "style")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(command.app, [str(one) for one in arguments], env={"COLUMNS": "300"})


def page_of(folder: Path, **files: object) -> str:
    return html(read_folder(write(folder, **files)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("results"), **everything())


def test_the_command_writes_one_page_into_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", results=report_cases.suite(), other={"schema": "ringattn bench links 9"})
    ran = invoke(folder, "--plots", folder / "plots")
    assert ran.exit_code == 0, ran.output
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "left out: other.json: it cannot be read: its schema is not 'ringattn result'" in ran.stderr
    assert "no plots: " in ran.stderr and not (folder / "plots").exists()


def test_plots_are_pngs_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", links=report_cases.links(), kernels=report_cases.kernels())
    assert invoke(folder, "--plots", folder / "plots").exit_code == 0
    drawn = sorted((folder / "plots").iterdir())
    assert [one.name for one in drawn] == ["kernels-forward-value-by-seqlen.png", "links-bench-links-busbw-by-size.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in drawn)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nowhere", "nowhere is no folder: it takes what"),
        ("run/results.json", "results.json is no folder: it takes what"),
        ("empty", "empty holds no results: nothing that a command wrote with --json"),
        ("damaged", "holds no results: nothing that a command wrote with --json; a.json: Expecting"),
        ("run --plots taken", "taken: it is a file, and --plots takes a folder"),
        ("run --plots nowhere/plots", "there is no folder nowhere"),
        ("run --out .", "cannot write .: it is a folder; name a file in it"),
        ("run --out nowhere/page.html", "there is no folder nowhere"),
    ],
)
def test_refusals(asked: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", results=report_cases.suite())
    write(tmp_path / "empty")
    write(tmp_path / "damaged")
    (tmp_path / "damaged" / "a.json").write_text("{")
    (tmp_path / "taken").touch()
    ran = invoke(*asked.split())
    assert ran.exit_code == 2 and message in " ".join(ran.output.split()), ran.output
    assert not (tmp_path / "run/report.html").exists()


def test_provenance_is_first_then_what_failed_then_the_files(page: str) -> None:
    places = [
        page.index(text)
        for text in ("ringattn bench suite</dd>", "2 failed", 'id="timelines"', "<small>results", "<small>kernels")
    ]
    assert places == sorted(places)
    failed = page[places[1] : places[2]]
    assert "<strong>results.json</strong>: right: error of dq (dtype float16) is 2.0, at most 1 allowed" in failed
    assert "<strong>memory.json</strong>: memory per rank differs by 33.3% between worlds, 2% allowed" in failed
    memory = page[page.index("<small>memory") :]
    assert "<dd>ringattn bench memory</dd>" in memory and "<dd>2026-01-02</dd>" not in memory  # which is the page's
    assert memory.index('class="failed"') < memory.index("<table>")
    assert "<p>copy_engine does not open here: device is cpu</p>" in page
    assert '<button type="button">busbw, GB/s</button>' in page


def test_the_predicted_timeline_is_below_the_measured_one_of_the_same_call(page: str, tmp_path: Path) -> None:
    outline = Outline(page)
    headings = [text for text in outline.text["text"] if re.match("(measured|predicted):", text)]
    assert [text.partition(":")[0] for text in headings] == ["measured", "predicted"]
    assert page.count('class="scroll timeline"') == 1
    other = as_chrome(report_cases.timeline("predicted"))
    other["otherData"]["about"]["call"] = {**report_cases.CALL, "layout": "striped"}
    told = page_of(tmp_path, a=as_chrome(report_cases.timeline("measured")), b=other)
    assert told.count('class="scroll timeline"') == 2


@pytest.mark.parametrize(
    ("other", "same"),
    [({}, True), ({"threads": 3}, True), ({"nodes": 2}, True), ({"seqlen": 128}, False), ({"causal": False}, False)],
)
def test_timelines_of_the_same_call(other: dict[str, Any], same: bool) -> None:
    measured, predicted = report_cases.timeline("measured"), report_cases.timeline("predicted")
    assert alike(replace(measured, about={"call": {**report_cases.CALL, **other}}), predicted) is same
    assert not alike(measured, replace(predicted, about={}))  # of what call it is is not known


def test_every_header_of_a_table_is_a_button_that_sorts(page: str) -> None:
    outline = Outline(page)
    headers = outline.tags("th")
    assert len(headers) >= 18
    assert {(one["scope"], one["aria-sort"]) for one in headers} == {("col", "none")}
    assert len([one for one in outline.tags("button") if one["type"] == "button"]) == len(headers)
    assert all("data-key" in one for one in outline.tags("td"))
    assert len(outline.tags("caption")) == len(outline.tags("table")) == 4


def test_the_page_needs_no_network(page: str) -> None:
    outline = Outline(page)
    attributes = [(name, value or "") for _, each in outline.elements for name, value in each.items()]
    links = [value for name, value in attributes if name in ("src", "href", "srcset", "xlink:href", "action", "data")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not [value for name, value in attributes if "://" in value and not name.startswith("xmlns")]
    assert not re.search(r"@import|url\((?!#)", page)
    (script,) = [text for text in outline.text["script"]]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [one["content"] for one in outline.tags("meta") if one.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


def test_no_string_of_a_file_becomes_markup(page: str, tmp_path: Path) -> None:
    """Whatever the strings say, the page has the same elements with the same attributes, in the same order."""
    hostile = page_of(tmp_path / "run", **tainted(everything()))
    assert hostile.count("&lt;script&gt;alert(1)") > 50
    harmless, attacked = Outline(page), Outline(hostile)

    def shape(outline: Outline) -> list[tuple[str, list[str]]]:
        # long text leaves a picture less room, and it has other ticks
        return [(tag, sorted(each)) for tag, each in outline.elements if tag not in DRAWN]

    assert shape(attacked) == shape(harmless)
    assert len(attacked.text["script"]) == 1
    names = {name for _, each in attacked.elements for name in each}
    assert not [name for name in names if name.startswith("on") or name == HOSTILE]
    targets = [value or "" for _, each in attacked.elements for key, value in each.items() if key in ("href", "src")]
    assert not [value for value in targets if "javascript" in value]
    assert "{{ 7*7 }}" in hostile and ">49<" not in hostile


def test_cells_are_short_and_sort_as_numbers() -> None:
    assert [cell(value).key for value in (3, 0.5, True, None, "a")] == ["3", "0.5", "1", "", "a"]
    assert [cell(value).text for value in (12345, 0.123456, 1e7, False)] == ["12,345", "0.1235", "1e+07", "no"]
    assert len(cell("x" * 10_000).text) < 500


def test_a_page_that_cannot_be_drawn_costs_no_results(tmp_path: Path) -> None:
    write(tmp_path, results=report_cases.suite())
    assert command.write_beside(tmp_path) == str(tmp_path / "report.html")
    write(tmp_path, results={"schema": "other"})
    assert command.write_beside(tmp_path).startswith(f"no report.html: ValueError: {tmp_path} holds no results")


# charts


def drawn(data: dict[str, Any]) -> list[charts.Chart]:
    data = {name: value for name, value in json.loads(json.dumps(data)).items() if name != "schema"}
    return charts.charts(Result(**data))


def chart(units: dict[str, str], *rows: tuple[Any, ...]) -> list[charts.Chart]:
    return drawn(report_cases.result("x", units, [dict(zip(units, row, strict=True)) for row in rows]))


def test_charts_are_of_the_columns_that_vary() -> None:
    (links,) = drawn(report_cases.links())
    assert (links.title, links.x, links.y) == ("bench links: busbw by size", "size, bytes", "busbw, GB/s")
    assert links.lines == {"0->1": {2.0**16: 1.0, 2.0**20: 9.0}, "1->0": {2.0**16: 2.0, 2.0**20: 8.0}}
    (kernels,) = drawn(report_cases.kernels())  # one length of an error is no course
    rates = {1024.0: 90.0, 2048.0: 360.0, 4096.0: 1440.0}
    assert kernels.y == "value, TFLOP/s" and kernels.lines == {"ringattn": rates, "flash": rates}
    (memory,) = drawn(report_cases.memory())
    assert memory.lines == {"peak": {2.0: 6.0, 4.0: 12.0}}
    assert drawn(report_cases.suite()) == []


def test_what_a_chart_is_drawn_of() -> None:
    units = {"world": "", "seqlen": "tokens", "by": "", "ms": "ms", "rate": "TFLOP/s", "note": ""}
    rows = [(w, s, "a", 1.0, float(w * s), str(w * s)) for w in (2, 4) for s in (64, 128)]
    (found,) = chart(units, *rows)  # a rate before a time; lengths before ranks, which are the lines
    assert found.y == "rate, TFLOP/s" and found.lines["world 4"] == {64.0: 256.0, 128.0: 512.0}
    twice = {"seqlen": "", "ms": "ms"}
    (found,) = chart(twice, (1, 1.0), (1, 3.0), (1, 9.0), (2, 1.0))
    assert found.lines == {"ms": {1.0: 3.0, 2.0: 1.0}}  # the median
    for value in (HOSTILE, None, True, 10**299):
        assert chart(twice, (1, value), (2, value)) == []
    (many,) = chart({"seqlen": "", "by": "", "ms": "ms"}, *((s, f"n{n}", 1.0) for s in (1, 2) for n in range(20)))
    assert len(many.lines) == 12 and many.title.endswith("the first 12 of 20 lines")


@pytest.mark.parametrize(
    ("xs", "ys", "scales"), [((1, 64), (1.0, 99.0), ("log", "log")), ((1, 2), (-1.0, 0.0), 2 * ("linear",))]
)
def test_axes_are_logarithmic_over_wide_ranges(xs: tuple[int, int], ys: tuple[float, float], scales: Any) -> None:
    (found,) = chart({"size": "", "ms": "ms"}, *zip(xs, ys, strict=True))
    (axes,) = charts.draw(found).axes
    assert (axes.get_xscale(), axes.get_yscale()) == scales
