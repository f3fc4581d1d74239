"""Every file that a user names, read or written: what is none of ours is told in a line, and never waited for."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.inspect.report import row_of
from ringattn.bench.report import timelines
from ringattn.bench.timeline.events import as_chrome

from . import report_cases
from .nightly import rest_nightly
from .test_inspect import COMPILED, VARIANT
from .test_predict_measured import FILE as KERNELS
from .test_predict_measured import SUITE as KERNELS_OF_SUITE
from .test_report_views import host, kernels, links, overlap, recorded
from .test_space import LLAMA

pytestmark = pytest.mark.timeout(60)  # what waits for a FIFO's other end does not end by itself

WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(one) for one in arguments], env=WIDE)


def told(result: Any) -> str:
    return " ".join(result.output.replace("│", " ").split())


def links_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def holds(data: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data.encode() if isinstance(data, str) else data) and None


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
    "tune --from-config": ("tune", "--list", "--from-config", "FILE"),
    "inspect --correlate": ("inspect", "--correlate", "FILE"),
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
        assert f"<strong>{one}</strong>: not read: " in page and f"left out: {one}" in told(ended), one
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
        assert f"<strong>{name}</strong>: not read: it cannot be drawn: KeyError" in page
        assert f"left out: {name}: it cannot be drawn" in told(ended)


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1.5, 10**9, 10**299, 1e299, -1e299, 1e-320, "", "x", "1e9", "$\\frac{", "\x00", "\x1b[2J",
    "x" * 10_000, [], {}, [[]], [None], [0], {"a": 1}, {"median": "x"},
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, name))


def mutant(data: Any, draw: random.Random) -> str:
    """The text of a file with one to three changes: values of other kinds, fields that are gone or twice, bytes."""
    made = json.loads(json.dumps(data))
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice([one for one in places(made) if one])
        held = made
        for name in path:
            held = held[name]
        match draw.randint(0, 9):
            case 0:
                del held[last]
            case 1 if isinstance(held, list):
                held.append(held[last])
            case _:
                held[last] = copy.deepcopy(draw.choice(VALUES))
        if not made:
            break
    text = json.dumps(made)
    at = draw.randrange(len(text))
    return draw.choice([text] * 8 + [text[:at], text[:at] + draw.choice('[]{},:"0-e\\') + text[at + 1 :]])


ROWS = [
    row_of(VARIANT, COMPILED, []) | {"seconds": 1.0 + number, "bound": 50.0 - number, "length": 8192, "group": 1}
    for number in range(20)
]  # fmt: skip
FILES = report_cases.everything() | {
    "one_ring": report_cases.rings((1, 2), ("zigzag",)),
    "overlap": overlap(), "kernels": kernels(), "host": host(False), "recorded": recorded(), "links_of_bench": links(),
}  # fmt: skip
ASKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "predict --kernels": (KERNELS, ("predict", "--tokens", "16k", "--kernels", "FILE")),
    "predict --kernels of a suite": (KERNELS_OF_SUITE, ("predict", "--tokens", "16k", "--kernels", "FILE")),
    "predict --link": (links(), ("predict", "--link", "FILE")),
    "tune --from-config": (LLAMA, ("tune", "--list", "--from-config", "FILE")),
    "inspect --correlate": ({"rows": ROWS}, ("inspect", "--correlate", "FILE")),
    "inspect --diff": ({"rows": ROWS[:1]}, ("inspect", "--gate", "--diff", "FILE", "SOUND")),
}


def reported(data: Any, draw: random.Random, folder: Path) -> None:
    """A mutant beside a sound file is on the page, or named there."""
    report_cases.write(folder, sound=report_cases.memory())
    (folder / ("results.json" if "cases" in data else "mutant.json")).write_text(mutant(data, draw))
    ended = run("report", folder, "--plots", folder / "plots")
    assert ended.exit_code == 0 and ended.exception is None, ended.exception
    assert "memory per rank differs" in (folder / "report.html").read_text() and "\x1b" not in ended.output


def answered(reader: str, draw: random.Random, folder: Path) -> None:
    """A mutant is taken, or refused in a line."""
    data, arguments = ASKED[reader]
    (folder / "mutant.json").write_text(mutant(data, draw))
    (folder / "sound.json").write_text(json.dumps(data))
    places = {"FILE": folder / "mutant.json", "SOUND": folder / "sound.json"}
    ended = run(*(places.get(word, word) for word in arguments))
    assert isinstance(ended.exception, SystemExit | None) and ended.exit_code in (0, 1, 2), ended.exception
    named = "mutant.json" in told(ended) or "no variant in common" in told(ended)
    assert ended.exit_code != 2 or named, told(ended)
    assert "\x1b" not in ended.output


@pytest.mark.parametrize("seed", rest_nightly(range(25)))
@pytest.mark.parametrize("file", FILES)
def test_mutants_of_results(file: str, seed: int, tmp_path: Path) -> None:
    reported(FILES[file], random.Random(f"{file} {seed}"), tmp_path)


@pytest.mark.parametrize("seed", rest_nightly(range(25), 0))
@pytest.mark.parametrize("reader", ASKED)
def test_mutants_of_given_files(reader: str, seed: int, tmp_path: Path) -> None:
    answered(reader, random.Random(f"{reader} {seed}"), tmp_path)
