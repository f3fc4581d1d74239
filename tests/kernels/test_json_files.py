"""Reading JSON files: which files are accepted, and how values become dataclasses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringattn.kernels.json_files import MAX_FILE_BYTES, MAX_JSON_DEPTH, convert_json, read_object


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Drawing:
    name: str
    points: tuple[Point, ...]
    filled: bool = False
    sizes: Mapping[str, float | None] = field(default_factory=dict)
    about: Any = None


def holds(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, "No such file"),
    (os.mkfifo, "not a regular file"),
    (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    (Path.mkdir, "not a regular file"),
    (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    (holds(b" " * (MAX_FILE_BYTES + 1)), "more than 67,108,864 bytes"),
    (holds(b'{"a": "\xff"}'), "can't decode byte 0xff"),
    (holds(b'{"a": ["\\ud800"]}'), "surrogates not allowed"),
    (holds(b'{"a": ' + b"[" * 100_000), "nested more than 32 levels"),
    (holds(b'{"a": ' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"}"), "nested more than 32 levels"),
    (holds(b'{"a": NaN}'), "NaN is not a number"),
    (holds(b'{"a": ' + b"9" * 5000 + b"}"), "integer string conversion"),
    (holds(b'{"a": 1'), "Expecting ',' delimiter"),
    (holds(b"[1]"), "it is [1]: it must be a JSON object"),
]


def test_invalid_json_files_are_refused(tmp_path: Path) -> None:
    for number, (make, why) in enumerate(FILES):
        make(path := tmp_path / str(number))
        with pytest.raises(ValueError, match=re.escape(why)) as refused:
            read_object(path)
        assert len(str(refused.value)) < 200 and str(refused.value).isprintable()
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "good").write_text('{"a": [1e999]}')
    assert read_object(tmp_path / "link") == {"a": [float("inf")]}


def test_objects_become_dataclasses() -> None:
    data = {"name": "a", "points": [{"x": 1, "y": 2}], "sizes": {"b": None, "c": 1}, "about": [{}]}
    assert convert_json(Drawing, data, "a") == Drawing("a", (Point(1, 2.0),), sizes={"b": None, "c": 1}, about=[{}])


def test_values_of_a_wrong_type_are_refused() -> None:
    for changed, why in (
        ({"name": 1}, "a.name is 1: it must be of type str"),
        ({"points": {}}, "a.points is {}: it must be of type tuple"),
        ({"points": [3]}, "a.points[0] is 3: it must be of type Point"),
        ({"points": [{"x": 1}]}, "missing 1 required positional argument: 'y'"),
        ({"points": [{"x": True, "y": 0}]}, "a.points[0].x is True: it must be of type int"),
        ({"points": [{"x": 1 << 63, "y": 0}]}, "a.points[0].x is 9223372036854775808"),
        ({"points": [{"x": 1, "y": float("inf")}]}, "a.points[0].y is inf: it must be of type float"),
        ({"points": [{"x": 1, "y": 10**400}]}, "it must be of type float"),
        ({"filled": 1}, "a.filled is 1: it must be of type bool"),
        ({"sizes": {"\x1b": "x"}}, "a.sizes['\\x1b'] is 'x': it must be of type float | None"),
        ({"\x1b": 1}, "a has an unknown field '\\x1b'"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)) as refused:
            convert_json(Drawing, {"name": "a", "points": [], **changed}, "a")
        assert len(str(refused.value)) < 200 and str(refused.value).isprintable()
