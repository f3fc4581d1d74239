"""JSON files that a user names: read whole or refused, then turned into dataclasses by their annotations."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MOST_BYTES = 64 << 20
MOST_DEPTH = 32
MOST_INT, MOST_FLOAT = 1 << 63, 1e300  # what is computed from less overflows nowhere


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a regular file of at most 64 MiB holds.

    Raises:
        ValueError: it cannot be read, or is something else; the message leaves the path to the caller.
    """
    return parse_object(read_file(path))


def read_file(path: Path) -> bytes:
    """Return what a regular file of at most 64 MiB holds.

    Raises:
        ValueError: it cannot be read, or is something else; the message leaves the path to the caller.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO waits for its other end, a device may never end
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror) from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return data


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the object that JSON text in UTF-8 holds.

    Raises:
        ValueError: the text is something else, has NaN or nests deeply.
    """
    try:
        made = json.loads(data.decode(), parse_constant=_no_constant)
        if _depth(made) > MOST_DEPTH:
            raise RecursionError
        json.dumps(made, ensure_ascii=False).encode()  # half of a surrogate pair could not be written again
    except RecursionError:
        raise ValueError(f"it nests deeper than {MOST_DEPTH}") from None
    if not isinstance(made, dict):
        raise ValueError(f"it is {made!r:.60}: it must be an object")
    return made


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def converted(hint: Any, value: object, where: str) -> Any:
    """A value of JSON as an annotation says: dataclasses and named tuples of objects, tuples of lists.

    Raises:
        ValueError: it is of another type, has a field that is unknown or lacks one, or the class refuses it.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(converted(inner[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: converted(inner[1], one, f"{where}[{name!r:.60}]") for name, one in value.items()}
    if (is_dataclass(hint) or hasattr(hint, "_fields")) and isinstance(value, dict):
        hints = _hints(hint)
        if unknown := [name for name in value if name not in hints]:
            raise ValueError(f"{where} has {unknown[0]!r:.60}, which is not known")
        fields = {name: converted(hints[name], one, f"{where}.{name}") for name, one in value.items()}
        try:
            return hint(**fields)
        except (TypeError, ValueError) as error:  # a field is missing, or is not what the class takes
            raise ValueError(f"{where}: {error}") from None
    if not _is_a(hint, value):
        raise ValueError(f"{where} is {value!r:.60}: it must be of type {getattr(hint, '__name__', hint)}")
    return value


_hints = cache(get_type_hints)


def _is_a(hint: Any, value: Any) -> bool:
    """``True`` is no number here, and no number is too large to compute with."""
    if isinstance(hint, UnionType):
        return any(_is_a(one, value) for one in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and abs(value) < MOST_FLOAT
    if hint is int:
        return type(value) is int and abs(value) < MOST_INT
    return hint is Any or isinstance(value, get_origin(hint) or hint)
