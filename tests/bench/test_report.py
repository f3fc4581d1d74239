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

from ringattn.bench.predict.call import Call
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.ring import predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.timelines import timeline
from ringattn.bench.report import command
from ringattn.bench.report.page import html
from ringattn.bench.report.reading import Refused, read
from ringattn.bench.report.rows import cell, table
from ringattn.bench.timeline.events import Timeline, alike, as_chrome, from_chrome
from ringattn.ring import Mask

from ..support import report_cases
from ..support.report_cases import HOSTILE, Outline, everything, tainted, write

DRAWN = ("g", "path", "use", "text", "clippath", "rect", "defs", "style")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return html(read(write(tmp_path_factory.mktemp("results"), **everything())))


def test_the_command_writes_one_page_into_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", results=report_cases.suite(), other={"schema": "ringattn bench links 9"})
    ran = CliRunner().invoke(command.app, [str(folder)])
    assert ran.exit_code == 0, ran.output
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "left out: other.json: schema is 'ringattn bench links 9'" in ran.stderr


def test_the_page_names_the_file_that_cases_are_of(page: str) -> None:
    assert page.count("Every case of results.json, in the order in which they ran") == 2  # seen, and read out


def test_a_results_file_of_another_schema_is_named_and_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", results={**report_cases.suite(), "schema": "ringattn bench suite 7"})
    ran = CliRunner().invoke(command.app, [str(folder)], env={"COLUMNS": "300"})
    assert ran.exit_code == 2
    told = " ".join(ran.output.split())
    assert "results.json: schema is 'ringattn bench suite 7': this version reads 'ringattn bench suite 1'" in told
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("nowhere", "nowhere is no folder: it takes what"),
        ("run/results.json", "results.json is no folder: it takes what"),
        ("run --plots taken", "taken: it is a file, and --plots takes a folder"),
        ("run --plots nowhere/plots", "there is no folder nowhere"),
        ("run --out .", "cannot write .: it is a folder; name a file in it"),
        ("run --out nowhere/page.html", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_before_anything_is(
    asked: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", results=report_cases.suite())
    (tmp_path / "taken").touch()
    ran = CliRunner().invoke(command.app, asked.split(), env={"COLUMNS": "300"})
    assert ran.exit_code == 2 and told in " ".join(ran.output.split()), ran.output
    assert not (tmp_path / "run/report.html").exists()


def test_a_folder_without_plots_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", results={**report_cases.suite(), "cases": []})
    ran = CliRunner().invoke(command.app, [str(folder), "--plots", str(folder / "plots")])
    assert ran.exit_code == 0 and "no plots: " in ran.stderr and not (folder / "plots").exists(), ran.output
    ran = CliRunner().invoke(command.app, [str(folder)])
    assert ran.exit_code == 0 and "no plots" not in ran.stderr


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"cases": 3}, "results.json: cases is 3: it must be a list"),
        ({"cases": ["x"]}, r"results.json: cases\[0\] is 'x': it must be an object"),
        ({"cases": [{"name": 1}]}, r"cases\[0\].about is missing"),
        ({"provenance": None}, "results.json: provenance is None: it must be an object"),
    ],
)
def test_a_broken_results_file_is_refused_by_the_place_that_is_wrong(
    broken: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=told):
        read(write(tmp_path / "run", results={**report_cases.suite(), **broken}))


def test_what_is_no_folder_of_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is no folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(Refused, match="holds no results"):
        read(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(Refused, match=r"holds no results.*a.json: Expecting"):
        read(tmp_path)


def test_provenance_is_first_then_what_failed_then_the_rest(page: str) -> None:
    places = [
        page.index(text)
        for text in ("ringattn bench suite</dd>", "4 failed", 'id="decisions"', 'id="cases"', 'id="timelines"')
    ]
    assert places == sorted(places)
    failed = page[places[1] : places[2]]
    assert "<strong>right</strong>: error of dq (dtype float16) is 2.0, at most 1.0 allowed" in failed
    assert "<strong>raised</strong>: KeyError: &#39;x&#39;" in failed
    assert "<strong>late</strong>: not run: 3 s were left" in failed
    assert "<strong>memory.json</strong>: memory per rank differs by 33.3% between worlds, 2% allowed" in failed
    off = "zigzag, causal, 128 tokens: off by -20.0%, at most 11.0% allowed"
    assert f"<strong>check.json</strong>: {off}" in failed and "64 tokens" not in failed


def test_the_predicted_timeline_is_below_the_measured_one_of_the_same_call(page: str) -> None:
    outline = Outline(page)
    headings = [text for text in outline.text["text"] if re.match("(measured|predicted):", text)]
    assert [text.partition(":")[0] for text in headings] == ["measured", "predicted"]
    assert page.count('class="scroll timeline"') == 1


def test_timelines_of_different_calls_are_apart(tmp_path: Path) -> None:
    other = as_chrome(report_cases.timeline("predicted"))
    other["otherData"]["about"]["call"] = {**report_cases.CALL, "layout": "striped"}
    told = html(read(write(tmp_path, a=as_chrome(report_cases.timeline("measured")), b=other)))
    assert told.count('class="scroll timeline"') == 2


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": 1024},
        {"heads": 4},
        {"dtype": "bfloat16"},
        {"layout": "striped"},
        {"mask": Mask()},
        {"mask": Mask(causal=True, window=(8, 0))},
    ],
)
def test_a_prediction_of_another_call_is_not_its_pair(other: dict[str, Any]) -> None:
    measured, call = report_cases.timeline("measured"), report_cases.PREDICTED
    links = Links(PRESETS["nvlink4"], PRESETS["ib400"])

    def trace(call: Call) -> Timeline:
        made = timeline("causal", predicted(call, H100, links), call)
        return from_chrome(json.loads(json.dumps(as_chrome(made))))

    assert alike(measured, trace(call))
    assert not alike(measured, trace(replace(call, **other)))
    assert not alike(measured, replace(trace(call), about={}))  # of what call it is is not known


def test_every_header_of_a_table_is_a_button_that_sorts(page: str) -> None:
    outline = Outline(page)
    headers = outline.tags("th")
    assert len(headers) >= 30
    assert {(one["scope"], one["aria-sort"]) for one in headers} == {("col", "none")}
    assert len([one for one in outline.tags("button") if one["type"] == "button"]) == len(headers)
    assert all("data-key" in one for one in outline.tags("td"))
    assert len(outline.tags("caption")) == len(outline.tags("table"))


def test_the_page_needs_no_network(page: str) -> None:
    outline = Outline(page)
    attributes = [(name, value or "") for _, each in outline.elements for name, value in each.items()]
    links = [value for name, value in attributes if name in ("src", "href", "srcset", "xlink:href", "action", "data")]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not [value for name, value in attributes if "://" in value and not name.startswith("xmlns")]
    assert not re.search(r"@import|url\((?!#)", page)
    (script,) = [text for text in outline.text["script"]]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [one["content"] for one in outline.tags("meta") if one.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


def test_no_string_of_a_file_becomes_markup(page: str, tmp_path: Path) -> None:
    """Whatever the strings say, the page has the same elements with the same attributes, in the same order."""
    hostile = html(read(write(tmp_path / "run", **tainted(everything()))))
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
    assert len(cell("x" * 10_000).text) < 500
    made = table("", [{"a": 1, "b": "x"}, {"a": 2.5}])
    assert made is not None and made.numeric == [True, False]


def test_suites_result_has_the_form_that_is_read(tmp_path: Path) -> None:
    """What the suite writes and what the report reads are one schema: by the suite's own writer."""
    from ringattn.bench.suite.cases import Number
    from ringattn.bench.suite.command import as_json
    from ringattn.bench.suite.parts import Part
    from ringattn.bench.suite.processes import Outcome

    number = Number("error", 2.0, "absolute", {"dtype": "float16"}, 1.0, 0.1)
    told = json.loads(json.dumps(as_json(Outcome(Part("right", "errors", (), 1), "done", "", 1.0, [number]))))
    folder = write(tmp_path, results={**report_cases.suite(), "cases": [told]})
    assert "error (dtype float16) is 2.0, at most 1.0 allowed" in html(read(folder))


def test_a_page_that_cannot_be_drawn_costs_no_results(tmp_path: Path) -> None:
    write(tmp_path, results=report_cases.suite())
    assert command.write_beside(tmp_path) == str(tmp_path / "report.html")
    drawn = sorted((tmp_path / "plots").iterdir())
    assert drawn and all(one.suffix == ".png" and one.read_bytes().startswith(b"\x89PNG") for one in drawn)
    write(tmp_path, results={"schema": "other"})
    assert command.write_beside(tmp_path).startswith(f"no report.html: Refused: {tmp_path} holds no results")
