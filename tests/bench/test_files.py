"""Tests of the files that a user names: unusable ones are reported in one line and never block."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import flags
from ringattn.bench.common.cases import MeasuredNumber, case_result
from ringattn.bench.common.output import write_json
from ringattn.bench.common.result import read_result
from ringattn.bench.report import charts
from ringattn.bench.timeline import drawing
from ringattn.kernels.json_files import read_object

from ..support import report_cases
from ..support.nightly import rest_nightly

WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
SOUND = "memory per rank differs"  # text on the page of report_cases.memory()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=WIDE)


def told(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


READERS: dict[str, tuple[str, ...]] = {
    "predict --kernels": ("predict", "--kernels", "FILE"),
    "predict --link": ("predict", "--link", "FILE"),
    "predict --link-between": ("predict", "--nodes", "2", "--link-between", "FILE"),
    "bench suite --out": ("bench", "suite", "--device", "cpu", "--budget", "1", "--out", "FOLDER"),
}


@pytest.mark.parametrize("reader", READERS)
def test_bad_file_is_named(reader: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the suite sets the variable itself
    os.mkfifo(path := tmp_path / "results.json")
    places = {"FILE": path, "FOLDER": tmp_path}
    result = run(*(places.get(word, word) for word in READERS[reader]))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "results.json" in told(result) and "not a regular file" in told(result), told(result)
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_bad_files_are_left_out_of_the_page(tmp_path: Path) -> None:
    folder = report_cases.write(tmp_path / "run", memory=report_cases.memory())
    bad = {"a.json": '{"schema": "\\ud800"}', "b.json": "[" * 100_000, "c.json": "{}", "results.json": '{"cases": ['}
    for name, text in bad.items():
        (folder / name).write_text(text)
    os.mkfifo(folder / "fifo.json")
    (folder / os.fsdecode(b"\x1b]0;\xff.json")).write_text("{")  # not UTF-8, and with a terminal escape
    result = run("report", folder)
    assert result.exit_code == 0 and "\x1b" not in result.output, result.output
    page = (folder / "report.html").read_text()
    assert SOUND in page
    for name in [*bad, "fifo.json", "?]0;?.json"]:
        assert f"<strong>not read</strong>: {name}: " in page and f"skipped: {name}: " in told(result), name


def test_failed_charts_are_left_out_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shown: Any) -> Any:
        raise KeyError("\x1b[2J")

    monkeypatch.setattr(drawing, "draw_timeline_figure", fails)
    monkeypatch.setattr(charts, "draw_chart", fails)
    folder = report_cases.write(tmp_path / "run", **report_cases.all_result_files())
    result = run("report", folder)
    page = (folder / "report.html").read_text()
    assert result.exit_code == 0 and SOUND in page and "\x1b" not in result.output
    for name in ("measured.json", "predicted.json", "links.json"):
        assert f"<strong>not read</strong>: {name}: it cannot be drawn: KeyError" in page
        assert f"skipped: {name}: it cannot be drawn" in told(result)


VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 10**299, 1e-320, "", "1e9", "$\\frac{", "\x1b[2J", [], {}, [None])
FILES = report_cases.all_result_files()
PREDICT_FLAGS = {"kernels": "--kernels", "links": "--link"}
"""Files that `predict` reads, and the flag for each."""


def places_in(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in [*data] if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places_in(data[key])


@pytest.mark.parametrize("seed", rest_nightly(range(25), 0))
def test_files_with_random_values_are_read_or_named(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    report_cases.write(tmp_path, sound=report_cases.memory())
    for name, data in copy.deepcopy(FILES).items():
        for _ in range(draw.randint(1, 3)):
            holder, key = draw.choice([*places_in(data)])
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        report_cases.write(tmp_path, **{name: data})
    result = run("report", tmp_path)
    assert result.exit_code == 0 and result.exception is None, result.exception
    assert SOUND in (tmp_path / "report.html").read_text() and "\x1b" not in result.output
    for name, flag in PREDICT_FLAGS.items():
        result = run("predict", "--tokens", "1k", "--world", "2", flag, tmp_path / f"{name}.json")
        assert isinstance(result.exception, SystemExit | None) and result.exit_code in (0, 1, 2), result.exception
        assert (result.exit_code != 2 or f"{name}.json" in told(result)) and "\x1b" not in result.output, told(result)


WRITERS: dict[str, tuple[str, ...]] = {
    "show --json": ("show", "--seqlen", "16", "--world", "2", "--json", "FILE.json"),
    "show --csv": ("show", "--seqlen", "16", "--world", "2", "--csv", "FILE.csv"),
    "show --out": ("show", "--seqlen", "16", "--world", "2", "--out", "FILE.png"),
    "predict --trace": ("predict", "--tokens", "1k", "--world", "2", "--trace", "FILE.json"),
    "predict --picture": ("predict", "--sweep", "tokens=1k..4k,gpus=2..8", "--picture", "FILE.svg"),
    "report --out": ("report", "FOLDER", "--out", "FILE.html"),
}
NO_TARGETS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("precious"),
    "link to nothing": lambda path: path.symlink_to("new"),
}


@pytest.mark.parametrize(
    ("writer", "bad"), [*((writer, "link") for writer in WRITERS), *(("show --json", bad) for bad in NO_TARGETS)]
)
def test_bad_target_is_named(writer: str, bad: str, tmp_path: Path) -> None:
    report_cases.write(tmp_path / "run", memory=report_cases.memory())
    (tmp_path / "precious").write_text("kept")
    name = next(word for word in WRITERS[writer] if word.startswith("FILE."))
    NO_TARGETS[bad](target := tmp_path / name)
    places = {name: target, "FOLDER": tmp_path / "run"}
    result = run(*(places.get(word, word) for word in WRITERS[writer]))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert f"cannot write {target}: " in told(result) and ". Name a" in told(result), told(result)
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "run", name}


FOLDERS: dict[str, tuple[str, ...]] = {
    "--out": ("bench", "suite", "--device", "cpu"),
    "--save-dir": ("tune", "--compile-only", "--tiles", "1"),
    "--out-dir": ("export", "--arch", "sm_90"),
}


@pytest.mark.parametrize("flag", FOLDERS)
def test_bad_folder_is_named(flag: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for work in ("bench.suite.part_processes.run_parts", "autotune.tune.tune", "tools.export.kernels.export"):
        monkeypatch.setattr(f"ringattn.{work}", lambda *_, **__: pytest.fail("it started"))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/no"), Path("/proc")):
        result = run(*FOLDERS[flag], flag, folder)
        assert result.exit_code == 2 and len(result.output.splitlines()) == 1, result.output
        assert f"{flag} is {folder}: cannot write to this folder" in result.output
    flags.check_folder(flag, tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_dash_writes_only_rows_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = WRITERS["show --csv"][:-2]
    output, _ = run(*words, "--csv", "-"), run(*words, "--csv", tmp_path / "rows")
    assert output.exit_code == 0 and output.stdout.splitlines() == (tmp_path / "rows").read_text().splitlines()
    assert json.loads(run(*words, "--json", "-").stdout)["case"] == "show"
    refused = [(*words, "--csv", "-", "--json", "-"), (*words, "--out", "-"), (*WRITERS["predict --trace"][:-1], "-")]
    for arguments in [*refused, ("bench", "timeline", "--trace", "-")]:
        result = run(*arguments)
        assert result.exit_code == 2 and "standard output" in result.output, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"rows"}


def test_a_link_created_during_the_work_is_kept(tmp_path: Path) -> None:
    NO_TARGETS["link to nothing"](target := tmp_path / "a.json")
    with pytest.raises(typer.BadParameter, match=r"cannot write .*a\.json: "):
        write_json(target, {})
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(typer.BadParameter, match=r"cannot write .*file/a\.json: File exists\."):
        write_json(tmp_path / "file" / "a.json", {})


def test_written_files_read_back(tmp_path: Path) -> None:
    (target := tmp_path / "a.json").write_text("x" * 1000)
    write_json(target, {"a": (1.5, float("nan"), {"b": -float("inf")})})
    assert json.loads(target.read_text()) == read_object(target) == {"a": [1.5, None, {"b": None}]}
    number = MeasuredNumber("error", float("inf"), "", {}, limit=1.0, spread=float("nan"))
    write_json(target, case_result("a", [number], {}).as_json())
    result = read_result(target)
    assert result.rows[0]["value"] is None and result.failed == ["error () is inf. At most 1 is allowed."]
