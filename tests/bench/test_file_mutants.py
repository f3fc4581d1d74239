"""Files with a few changes each, drawn by a seed: taken or refused in a line, on a page that is always written."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringattn.autotune.inspect import result_of, row_of

from ..autotune.test_inspect import COMPILED, VARIANT
from ..support import report_cases
from ..support.nightly import rest_nightly
from .test_files import run, told

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


INSPECTED = result_of([row_of(VARIANT, COMPILED, [])], gate=False).as_json()
FILES = report_cases.everything()
ASKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "predict --kernels": (FILES["kernels"], ("predict", "--tokens", "1k", "--world", "2", "--kernels", "FILE")),
    "predict --link": (FILES["links"], ("predict", "--tokens", "1k", "--world", "2", "--link", "FILE")),
    "inspect --diff": (INSPECTED, ("inspect", "--gate", "--diff", "FILE", "SOUND")),
}


def reported(data: Any, draw: random.Random, folder: Path) -> None:
    """A mutant beside a sound file is on the page, or named there."""
    report_cases.write(folder, sound=report_cases.memory())
    (folder / "mutant.json").write_text(mutant(data, draw))
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
