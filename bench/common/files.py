"""Files of results: read without trust, refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...kernels.strict import load_json, read_text, shown

MOST_BYTES = 64 << 20  # of one file: more was not written by a bench
MOST_DEPTH = 32


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
