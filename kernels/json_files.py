"""Reading of JSON files from users: size and type checks, and conversion to dataclasses by their annotations."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MAX_FILE_BYTES = 64 << 20
MAX_JSON_DEPTH = 32
MAX_JSON_INT, MAX_JSON_FLOAT = 1 << 63, 1e300  # computations with smaller numbers do not overflow


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a regular file of at most 64 MiB.

    Raises:
        ValueError: If the file cannot be read or holds no JSON object. The caller adds the path to the message.
    """
    return parse_object(read_file(path))


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of at most 64 MiB.

    Raises:
        ValueError: If the file cannot be read, is no regular file or is larger. The caller adds the path to the
            message.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO or a device may never end
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror) from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    return data


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in UTF-8 text.

    Raises:
        ValueError: If the text is no JSON object, contains NaN or infinity, or nests too deeply.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
        if _depth(value) > MAX_JSON_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {value!r:.60}: it must be a JSON object")
    return value


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inside), default=0)


def convert_json(hint: Any, value: object, json_path: str) -> Any:
    """Return a JSON value in the type of an annotation: objects as dataclasses or named tuples, lists as tuples.

    ``json_path`` is the path of the value inside the file, for messages.

    Raises:
        ValueError: If the value has another type, an unknown or missing field, or a value that the class rejects.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(convert_json(inner[0], item, f"{json_path}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: convert_json(inner[1], item, f"{json_path}[{name!r:.60}]") for name, item in value.items()}
    if (is_dataclass(hint) or hasattr(hint, "_fields")) and isinstance(value, dict):
        hints = _hints(hint)
        if unknown := [name for name in value if name not in hints]:
            raise ValueError(f"{json_path} has an unknown field {unknown[0]!r:.60}")
        fields = {name: convert_json(hints[name], item, f"{json_path}.{name}") for name, item in value.items()}
        try:
            return hint(**fields)
        except (TypeError, ValueError) as error:  # a field is missing, or the class rejects a value
            raise ValueError(f"{json_path}: {error}") from None
    if not _is_a(hint, value):
        raise ValueError(f"{json_path} is {value!r:.60}: it must be of type {getattr(hint, '__name__', hint)}")
    return value


_hints = cache(get_type_hints)


def _is_a(hint: Any, value: Any) -> bool:
    """Return True if a value has the annotated type. Bools and huge numbers do not count as numbers."""
    if isinstance(hint, UnionType):
        return any(_is_a(member, value) for member in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and abs(value) < MAX_JSON_FLOAT
    if hint is int:
        return type(value) is int and abs(value) < MAX_JSON_INT
    return hint is Any or isinstance(value, get_origin(hint) or hint)
