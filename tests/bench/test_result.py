"""Tests of the result of every command: its table, its files, and files that are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from ringattn.bench.common.result import HEADINGS, Result, Row, finish_command, format_cell, read_result
from ringattn.bench.kernels import speed
from ringattn.bench.ring import measure

ROWS: list[Row] = [
    {"edge": "0 -> 1", "GB/s": 12.34567, "checked": True, "remark": "x" * 40},
    {"edge": "1 -> 0", "GB/s": None},
]
FOUND = Result(
    "bench links",
    {"edge": "", "GB/s": "GB/s", "checked": "", "remark": ""},
    ROWS,
    notes=["best: 0 -> 1"],
    provenance={"command": "ringattn bench links"},
)


def test_duplicate_notes_are_printed_once() -> None:
    result = Result("", FOUND.units, notes=["a"])
    for part in (FOUND, Result("", {}, failed=["b"], notes=["a", "c"])):
        result.add(part)
    assert (result.rows, result.failed, result.notes) == (ROWS, ["b"], ["a", "best: 0 -> 1", "c"])


def test_table_leaves_out_columns_from_the_right_and_names_them() -> None:
    lines = FOUND.text(60).splitlines()
    assert max(map(len, lines[:3])) <= 60
    assert lines[1].split() == ["0", "->", "1", "12.35", "yes"] and lines[2].split() == ["1", "->", "0"]
    assert lines[0].find("GB/s GB/s") + 9 == lines[1].find("12.35") + 5  # numbers end below their heading
    assert "remark" in lines[3] and lines[-1] == "best: 0 -> 1"
    assert "x" * 40 in FOUND.text(100)


def test_constant_columns_of_wide_tables_are_printed_once() -> None:
    rows: list[Row] = [{"edge": edge, "GB/s": 12.5, "checked": "", "remark": edge * 9} for edge in ("0 -> 1", "1 -> 0")]
    wide, narrow = Result("", FOUND.units, rows).text(100).splitlines(), Result("", FOUND.units, rows).text(70)
    assert wide[0].split() == ["edge", "GB/s", "GB/s", "remark"]  # empty columns are left out
    assert Result("", {"wrong": ""}, [{"wrong": 0}]).text().split() == ["wrong", "0"]
    assert narrow.splitlines()[0] == "GB/s 12.5 GB/s" and narrow.splitlines()[1].split() == ["edge", "remark"]
    single = Result("", FOUND.units, rows[:1]).text(40).splitlines()
    assert single[0].split() == ["edge", "GB/s", "GB/s"] and "remark" in single[-1]  # nothing is constant in one row


def test_files_read_back(tmp_path: Path) -> None:
    found = replace(FOUND, rows=ROWS[::-1])  # the first row does not have every column
    finish_command(found, str(tmp_path / "r.json"), str(tmp_path / "r.csv"))
    assert read_result(tmp_path / "r.json") == found
    assert (tmp_path / "r.csv").read_text().splitlines()[0] == "edge,GB/s,checked,remark"


@pytest.mark.parametrize("json", [None, "-"])
def test_failure_ends_with_exit_code_1(json: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        finish_command(replace(FOUND, failed=["edge 0 -> 1 is wrong"]), json)
    out, err = capsys.readouterr()
    assert ended.value.exit_code == 1 and "FAILED: edge 0 -> 1 is wrong" in (err if json else out)
    assert ("FAILED" in out) != bool(json) and (not json or out.startswith("{"))


def test_a_failure_ends_every_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Ranks that print nothing fail, too.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(typer.Exit) as ended:
        finish_command(Result("bench ring", {}, failed=["wrong"]))
    assert ended.value.exit_code == 1 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("change", "why"), [
    ({"schema": "other"}, "its schema is not"),
    ({"rows": 3}, "result.rows is 3: it must be of type list"),
    ({"rows": [{"other": 1}]}, "fields that units lacks"),
    ({"rows": [{"edge": [1]}]}, "must be of type str | bool | float | None"),
    ({"notes": [3]}, "is 3: it must be of type str"),
    ({"units": {"edge": 3}}, "is 3: it must be of type str"),
    ({"extra": 3}, "result has an unknown field 'extra'"),
])  # fmt: skip
def test_files_without_a_result_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**FOUND.as_json(), **change}))
    with pytest.raises(ValueError, match=re.escape(why)):
        read_result(path)


@pytest.mark.parametrize(("number", "text"), [
    (11960.4, "11960"),
    (8803.2, "8803"),
    (9999.96, "10000"),
    (0.084, "0.084"),
    (-12345.6, "-12346"),
    (2.5e12, "2.5e+12"),
])  # fmt: skip
def test_numbers_of_one_table_have_no_exponent_beside_others(number: float, text: str) -> None:
    assert format_cell(number) == text


def test_headings_name_the_units_of_their_columns() -> None:
    for units, name in ((measure.UNITS, "rate of a rank"), (speed.UNITS, "rate by S²/2"), (measure.UNITS, "of ideal")):
        assert HEADINGS[name].startswith(units[name])
