"""Files of results: read without trust, refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.strict import Check, checked_as, load_json, read_text, shown, whole

MOST_BYTES = 64 << 20  # of one file: more was not written by a bench
MOST_DEPTH = 32
MOST = 10**30  # of a number: a whole one of hundreds of digits overflows a float


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        ValueError: it cannot be read, is too large, or is something else; the message leaves the path to the caller.
    """
    try:
        data = load_json(read_text(path, MOST_BYTES), MOST_DEPTH)
    except OSError as error:
        raise ValueError(error.strerror) from None
    if not isinstance(data, dict):
        raise ValueError(f"it is {shown(data)}: it must be an object")
    return data


def load(path: Path, schemas: Sequence[str], writer: str) -> Mapping[str, Any]:
    """A JSON object of one of these schemas; ``writer`` is the command that makes it, for errors.

    Raises:
        ValueError: it cannot be read, is too large, is no JSON object, or has another schema.
    """
    takes = f"it takes a JSON file of {writer}, schema {' or '.join(map(repr, schemas))}"
    try:
        data = read_object(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; {takes}") from None
    schema = data.get("schema")
    if not isinstance(schema, str) or schema not in schemas:
        raise ValueError(f"{path} has schema {schema!r:.80}: {takes}")
    return data


def objects(data: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    """A field that is a list of objects; ValueError where it is something else."""
    found: list[Mapping[str, Any]] = _field(data, name, where, _objects)
    return found


def positive(data: Mapping[str, Any], name: str, where: str) -> float:
    """A field that is a number above 0, and of a size that arithmetic survives; ValueError where it is not."""
    found: float = _field(data, name, where, _positive)
    return found


def whole_number(data: Mapping[str, Any], name: str, where: str) -> int:
    """A field that is a whole number, at least 1; ValueError where it is something else."""
    found: int = _field(data, name, where, whole(1, MOST))
    return found


def _field(data: Mapping[str, Any], name: str, where: str, check: Check) -> Any:
    return checked_as(where, {name: data.get(name)}, {name: check})[name]


def _positive(value: object) -> str | None:
    right = type(value) in (int, float) and 1 / MOST < value < MOST  # type: ignore[operator]
    return None if right else f"a number above 0, from {1 / MOST:g} to {MOST:g}"


def _objects(value: object) -> str | None:
    return None if isinstance(value, list) and all(isinstance(one, dict) for one in value) else "a list of objects"
