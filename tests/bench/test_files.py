"""Every file that a user names, read or written: what is none of ours is told in a line, and never waited for."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.files import read_object
from ringattn.bench.common.output import write_json
from ringattn.bench.common.result import read
from ringattn.bench.report import timelines
from ringattn.bench.suite.cases import Number, result_of

from ..support import report_cases
from ..support.nightly import rest_nightly

pytestmark = pytest.mark.timeout(60)  # what waits for a FIFO's other end does not end by itself

WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
SOUND = "memory per rank differs"  # on the page of report_cases.memory()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(one) for one in arguments], env=WIDE)


def told(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


def holds(data: str | bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return make


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    "folder": (Path.mkdir, "no regular file"),
    "loop of links": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "1 GiB of nothing": (sparse, "1,073,741,824 bytes: at most"),
    "invalid UTF-8": (holds(b'{"schema": "\xff\xfe"}'), "can't decode byte 0xff"),
    "lone surrogate": (holds('{"schema": ["\\ud800"]}'), "surrogates not allowed"),
    "100,000 lists": (holds("[" * 100_000), "it nests deeper than"),
    "no number": (holds('{"schema": NaN}'), "NaN is not a number"),
    "nothing": (holds("null"), "None"),
    "no fields": (holds("{}"), ""),
}

READERS: dict[str, tuple[str, ...]] = {
    "predict --kernels": ("predict", "--kernels", "FILE"),
    "predict --link": ("predict", "--link", "FILE"),
    "predict --link-between": ("predict", "--nodes", "2", "--link-between", "FILE"),
    "bench suite --out": ("bench", "suite", "--device", "cpu", "--budget", "1", "--out", "FOLDER"),
}


@pytest.mark.parametrize(("reader", "bad"), [*product(READERS, ("FIFO", "nothing"))])
def test_bad_file_is_named(reader: str, bad: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the suite sets its own
    make, why = BAD[bad]
    make(path := tmp_path / "results.json")
    places = {"FILE": path, "FOLDER": tmp_path}
    ended = run(*(places.get(word, word) for word in READERS[reader]))
    assert ended.exit_code == 2 and isinstance(ended.exception, SystemExit), ended.output
    assert "results.json" in told(ended) and why in told(ended) and "Traceback" not in ended.output, told(ended)
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]


def test_bad_files_cost_the_page_themselves_alone(tmp_path: Path) -> None:
    """Among sound ones, as the suite's and as any other's."""
    folder = report_cases.write(tmp_path / "run", memory=report_cases.memory())
    for number, (make, _) in enumerate(BAD.values()):
        make(folder / f"bad{number}.json")
    (folder / "results.json").write_text('{"cases": [')
    name = os.fsdecode(b"\x1b]0;\xff.json")  # of no text, and of a terminal's commands
    (folder / name).write_text("{")
    ended = run("report", folder)
    assert ended.exit_code == 0 and "\x1b" not in ended.output, ended.output
    page = (folder / "report.html").read_text()
    assert SOUND in page
    for number, (_, why) in enumerate(BAD.values()):
        (line,) = [line for line in ended.output.splitlines() if line.startswith(f"left out: bad{number}.json: ")]
        assert why in line
    for one in [*(f"bad{number}.json" for number in range(len(BAD))), "results.json", "?]0;?.json"]:
        assert f"<strong>not read</strong>: {one}: " in page and f"left out: {one}" in told(ended), one


def test_what_cannot_be_drawn_costs_the_page_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shown: Any) -> Any:
        raise KeyError("\x1b[2J")

    monkeypatch.setattr(timelines, "draw", fails)
    folder = report_cases.write(tmp_path / "run", **report_cases.everything())
    ended = run("report", folder)
    page = (folder / "report.html").read_text()
    assert ended.exit_code == 0 and SOUND in page and "\x1b" not in ended.output
    for name in ("measured.json", "predicted.json"):
        assert f"<strong>not read</strong>: {name}: it cannot be drawn: KeyError" in page
        assert f"left out: {name}: it cannot be drawn" in told(ended)


# -- files with a few changes each, drawn by a seed: taken or refused in a line, on a page that is always written

VALUES: tuple[Any, ...] = (None, True, -1, 1.5, 10**299, 1e-320, "", "1e9", "$\\frac{", "\x1b[2J", [], {}, [None])
FILES = report_cases.everything()
ASKED = {"kernels": "--kernels", "links": "--link"}
"""Files that `predict` reads, too, and by which flag."""


def places_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places_in(value, (*path, name))


def mutant(data: Any, draw: random.Random) -> str:
    """The text of a file with one to three values of other kinds, and sometimes another letter."""
    made = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice([one for one in places_in(made) if one])
        held = made
        for name in path:
            held = held[name]
        held[last] = copy.deepcopy(draw.choice(VALUES))
    text = json.dumps(made)
    at = draw.randrange(len(text))
    return draw.choice([text] * 8 + [text[:at], text[:at] + draw.choice('[]{},:"0-e\\') + text[at + 1 :]])


@pytest.mark.parametrize("seed", rest_nightly(range(25), 0))
def test_mutants_of_results(seed: int, tmp_path: Path) -> None:
    """Beside a sound file: on the page, or named there; and read by `predict`, or refused by name."""
    draw = random.Random(seed)
    report_cases.write(tmp_path, sound=report_cases.memory())
    for name, data in FILES.items():
        (tmp_path / f"{name}.json").write_text(mutant(data, draw))
    ended = run("report", tmp_path)
    assert ended.exit_code == 0 and ended.exception is None, ended.exception
    assert SOUND in (tmp_path / "report.html").read_text() and "\x1b" not in ended.output
    for name, flag in ASKED.items():
        ended = run("predict", "--tokens", "1k", "--world", "2", flag, tmp_path / f"{name}.json")
        assert isinstance(ended.exception, SystemExit | None) and ended.exit_code in (0, 1, 2), ended.exception
        assert (ended.exit_code != 2 or f"{name}.json" in told(ended)) and "\x1b" not in ended.output, told(ended)


# -- written

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
    ("writer", "bad"), [*((one, "link") for one in WRITERS), *(("show --json", bad) for bad in NO_TARGETS)]
)
def test_bad_target_is_named(writer: str, bad: str, tmp_path: Path) -> None:
    """Before the work."""
    report_cases.write(tmp_path / "run", memory=report_cases.memory())
    (tmp_path / "precious").write_text("kept")
    name = next(word for word in WRITERS[writer] if word.startswith("FILE."))
    NO_TARGETS[bad](target := tmp_path / name)
    places = {name: target, "FOLDER": tmp_path / "run"}
    ended = run(*(places.get(word, word) for word in WRITERS[writer]))
    assert ended.exit_code == 2 and isinstance(ended.exception, SystemExit), ended.output
    assert f"cannot write {target}: " in told(ended) and "; name a" in told(ended), told(ended)
    assert {one.name for one in tmp_path.iterdir()} == {"precious", "run", name}


@pytest.mark.parametrize("bad", NO_TARGETS)
def test_bad_target_that_came_meanwhile_is_left_as_it_is(bad: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    NO_TARGETS[bad](target := tmp_path / "a.json")
    with pytest.raises(typer.BadParameter, match=r"cannot write .*a\.json: "):
        write_json(target, {})
    assert (tmp_path / "precious").read_text() == "kept" and not (tmp_path / "new").exists()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Also where a longer file was; a number that is not finite comes back as one that failed."""
    (target := tmp_path / "a.json").write_text("x" * 1000)
    write_json(target, {"a": (1.5, float("nan"), {"b": -float("inf")})})
    assert json.loads(target.read_text()) == read_object(target) == {"a": [1.5, None, {"b": None}]}
    number = Number("error", float("inf"), "", {}, limit=1.0, spread=float("nan"))
    write_json(target, result_of("a", [number], {}).as_json())
    found = read(target)
    assert found.rows[0]["value"] is None and found.failed == ["error () is inf, at most 1 allowed"]
