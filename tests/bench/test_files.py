"""Every file that a user names, read or written: what is none of ours is told in a line, and never waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import output
from ringattn.bench.common.files import read_object
from ringattn.bench.common.output import write_json
from ringattn.bench.common.result import read
from ringattn.bench.predict import command as predict_command
from ringattn.bench.report import timelines
from ringattn.bench.suite.cases import Number, result_of
from ringattn.bench.timeline.events import as_chrome

from ..support import report_cases
from ..support.nightly import rest_nightly

pytestmark = pytest.mark.timeout(60)  # what waits for a FIFO's other end does not end by itself

WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(one) for one in arguments], env=WIDE)


def told(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


def links_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def holds(data: str | bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return make


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "no regular file"),
    "device": (links_to("/dev/zero"), "no regular file"),
    "folder": (Path.mkdir, "no regular file"),
    "loop of links": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "1 GiB of nothing": (sparse, "1,073,741,824 bytes: at most"),
}
NO_JSON: dict[str, tuple[Callable[[Path], None], str]] = {
    "invalid UTF-8": (holds(b'{"schema": "\xff\xfe"}'), "can't decode byte 0xff"),
    "lone surrogate": (holds('{"schema": ["\\ud800"]}'), "surrogates not allowed"),
    "lone surrogate in a name": (holds('{"schema": {"\\udfff": 1}}'), "surrogates not allowed"),
    "100,000 lists": (holds("[" * 100_000), "it nests deeper than"),
    "100 objects": (holds('{"a":' * 100 + "1" + "}" * 100), "it nests deeper than"),
    "no finite number": (holds('{"schema": -1e999999}'), "-1e999999 is not a finite number"),
    "a whole number of 5,000 digits": (holds(f'{{"schema": {"9" * 5000}}}'), "a number of 5,000 digits"),
    "no number": (holds('{"schema": NaN}'), "NaN is not a number"),
    "a name twice": (holds('{"schema": 1, "schema": 2}'), "a name is there twice"),
    "cut": (holds('{"schema": "ringa'), "Unterminated string"),
    "empty": (holds(""), "Expecting value"),
}
NO_OBJECT: dict[str, tuple[Callable[[Path], None], str]] = {
    "text": (holds('"x"'), "'x'"),
    "number": (holds("3"), "3"),
    "nothing": (holds("null"), "None"),
    "no fields": (holds("{}"), ""),
}
BAD = NO_FILES | NO_JSON | NO_OBJECT

READERS: dict[str, tuple[str, ...]] = {
    "predict --kernels": ("predict", "--kernels", "FILE"),
    "predict --link": ("predict", "--link", "FILE"),
    "predict --link-between": ("predict", "--nodes", "2", "--link-between", "FILE"),
    "inspect --diff": ("inspect", "--diff", "FILE", "FILE"),
    "bench timeline --predicted": ("bench", "timeline", "--device", "cpu", "--out", "OUT.svg", "--predicted", "FILE"),
    "bench suite --out": ("bench", "suite", "--device", "cpu", "--budget", "1", "--out", "FOLDER"),
    "report": ("report", "FOLDER"),
}


FAST = ("FIFO", "lone surrogate", "nothing")
CASES = [*product(READERS, BAD)]


@pytest.mark.parametrize(
    ("reader", "bad"), rest_nightly(CASES, *(one for one in CASES if one[0] == "report" or one[1] in FAST))
)
def test_bad_file_is_named(reader: str, bad: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the suite sets its own
    make, why = BAD[bad]
    make(path := tmp_path / "results.json")
    places = {"FILE": path, "FOLDER": tmp_path, "OUT.svg": tmp_path / "out.svg"}
    ended = run(*(places.get(word, word) for word in READERS[reader]))
    assert ended.exit_code == 2 and isinstance(ended.exception, SystemExit), ended.output
    assert "results.json" in told(ended) and why in told(ended) and "Traceback" not in ended.output, told(ended)
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("bad", NO_FILES)
def test_text_of_the_demo(bad: str, tmp_path: Path) -> None:
    if bad == "1 GiB of nothing":
        return  # of which it takes the head
    make, why = NO_FILES[bad]
    make(path := tmp_path / "text")
    ended = run("demo", "--text", path)
    assert ended.exit_code == 2 and f"cannot read {path}" in told(ended) and why in told(ended), ended.output


def test_bad_files_cost_the_page_themselves_alone(tmp_path: Path) -> None:
    """Among sound ones, as the suite's and as any other's."""
    folder = report_cases.write(tmp_path / "run", memory=report_cases.memory())
    for number, (make, _) in enumerate(BAD.values()):
        make(folder / f"bad{number}.json")
    (folder / "results.json").write_text('{"cases": [')
    name = os.fsdecode(b"\x1b]0;\xff.json")  # of no text, and of a terminal's commands
    (folder / name).write_text("{")
    ended = run("report", folder)
    assert ended.exit_code == 0, ended.output
    page = (folder / "report.html").read_text()
    assert "memory per rank differs" in page
    for one in [*(f"bad{number}.json" for number in range(len(BAD))), "results.json", "?]0;?.json"]:
        assert f"<strong>not read</strong>: {one}: " in page and f"left out: {one}" in told(ended), one
    assert "\x1b" not in ended.output


def test_what_cannot_be_drawn_costs_the_page_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that its reader lets through: of several files each that is broken, and no other."""
    draw = timelines.draw

    def fails(shown: Any, *more: Any, **named: Any) -> Any:
        if any(one.title == "\x1b[2J" for one in shown):
            raise KeyError("\x1b[2J")
        return draw(shown, *more, **named)

    monkeypatch.setattr(timelines, "draw", fails)
    wrong = as_chrome(replace(report_cases.timeline("measured"), title="\x1b[2J"))
    sound = {"memory": report_cases.memory(), "predicted": as_chrome(report_cases.timeline("predicted"))}
    folder = report_cases.write(tmp_path / "run", **sound, a=wrong, b=wrong)
    ended = run("report", folder)
    page = (folder / "report.html").read_text()
    assert ended.exit_code == 0 and "memory per rank differs" in page and "predicted (predicted.json)" in page
    for name in ("a.json", "b.json"):
        assert f"<strong>not read</strong>: {name}: it cannot be drawn: KeyError" in page
        assert f"left out: {name}: it cannot be drawn" in told(ended)


# -- written

SMALL_CALL = ("show", "--seqlen", "16", "--world", "2")
SMALL_RING = ("predict", "--tokens", "1k", "--world", "2")
WRITERS: dict[str, tuple[str, ...]] = {
    "show --json": (*SMALL_CALL, "--json", "FILE.json"),
    "show --csv": (*SMALL_CALL, "--csv", "FILE.csv"),
    "show --out": (*SMALL_CALL, "--out", "FILE.png"),
    "predict --json": (*SMALL_RING, "--json", "FILE.json"),
    "predict --trace": (*SMALL_RING, "--trace", "FILE.json"),
    "predict --picture": (*SMALL_RING[:1], "--sweep", "tokens=1k..4k,gpus=2..8", "--picture", "FILE.svg"),
    "report --out": ("report", "FOLDER", "--out", "FILE.html"),
}
NO_TARGETS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "device": links_to("/dev/null"),
    "folder": Path.mkdir,
    "link": links_to("precious"),
    "link to nothing": links_to("new"),
    "loop of links": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("writer", "bad"),
    rest_nightly([*product(WRITERS, NO_TARGETS)], *((one, "link") for one in WRITERS), ("show --json", "FIFO")),
)
def test_bad_target_is_named(
    writer: str, bad: str, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the work, and where it came there meanwhile."""
    if not checked:
        for module in (predict_command, output):
            monkeypatch.setattr(module, "check_targets", lambda *targets: None)
    report_cases.write(tmp_path / "run", memory=report_cases.memory())
    (tmp_path / "precious").write_text("kept")
    name = next(word for word in WRITERS[writer] if word.startswith("FILE."))
    NO_TARGETS[bad](target := tmp_path / name)
    places = {name: target, "FOLDER": tmp_path / "run"}
    ended = run(*(places.get(word, word) for word in WRITERS[writer]))
    assert ended.exit_code == 2 and isinstance(ended.exception, SystemExit), ended.output
    assert f"cannot write {target}: " in told(ended), told(ended)
    assert {one.name for one in tmp_path.iterdir()} == {"precious", "run", name}
    assert (tmp_path / "precious").read_text() == "kept" and [*(tmp_path / "run").iterdir()] == [
        tmp_path / "run/memory.json"
    ]


def test_links_among_plots_are_not_followed(tmp_path: Path) -> None:
    folder = report_cases.write(tmp_path / "run", memory=report_cases.memory())
    assert run("report", folder, "--plots", folder / "plots").exit_code == 0
    (plot,) = (folder / "plots").iterdir()
    plot.unlink()
    plot.symlink_to(tmp_path / "new")
    ended = run("report", folder, "--plots", folder / "plots")
    assert ended.exit_code == 2 and "it is a symbolic link" in told(ended) and not (tmp_path / "new").exists()


def test_shorter_file_in_the_place_of_a_longer_one(tmp_path: Path) -> None:
    (target := tmp_path / "a.json").write_text("x" * 1000)
    write_json(target, {"a": (1.5, float("nan"), {"b": -float("inf")})})
    assert json.loads(target.read_text()) == read_object(target) == {"a": [1.5, None, {"b": None}]}


def test_what_is_not_finite_comes_back(tmp_path: Path) -> None:
    """As a number that failed."""
    number = Number("error", float("inf"), "", {}, limit=1.0, spread=float("nan"))
    write_json(tmp_path / "a.json", result_of("a", [number], {}).as_json())
    found = read(tmp_path / "a.json")
    assert found.rows[0]["value"] is None and found.failed == ["error () is inf, at most 1 allowed"]
