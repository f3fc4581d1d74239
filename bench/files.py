"""Files of results: read without trust, refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels.strict import load_json, read_text, shown

MOST_BYTES = 64 << 20  # of one file: more was not written by a bench
MOST_DEPTH = 32
MOST = 1e30  # of a number: a whole one of hundreds of digits overflows a float


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
    """A field that is a list of objects.

    Raises:
        ValueError: it is something else.
    """
    found = data.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{where}: {name} must be a list of objects")
    return found


def positive(data: Mapping[str, Any], name: str, where: str) -> float:
    """A field that is a number above 0, and of a size that arithmetic survives.

    Raises:
        ValueError: it is something else.
    """
    found = data.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < MOST:
        raise ValueError(f"{where}: {name} is {found!r:.80}: it must be a number above 0, below {MOST:g}")
    return found


def whole_number(data: Mapping[str, Any], name: str, where: str) -> int:
    """A field that is a whole number, at least 1.

    Raises:
        ValueError: it is something else.
    """
    found = positive(data, name, where)
    if not isinstance(found, int):
        raise ValueError(f"{where}: {name} is {found!r}: it must be a whole number")
    return found
