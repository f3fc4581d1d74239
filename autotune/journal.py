"""What a tuning run has found so far, line by line: interrupted at any point, the next run goes on from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..kernels.strict import load_json, read_text, regular_file

MOST_BYTES = 64 << 20


class Journal:
    """Values by key in a file of JSON lines, each appended as soon as it is known.

    Lines that were written for another ``digest`` (of the kernels' sources and of Triton), by an interrupted write or
    by somebody else are passed over: what they would have told is found out again.
    """

    def __init__(self, path: Path, digest: str) -> None:
        """Read it.

        Raises:
            ValueError: it is no regular file, or a larger one than was written here.
        """
        self.path = path
        self._digest = digest
        self._found: dict[str, list[dict[str, Any]]] = {}
        for line in _lines(path):
            self._take_in(line)

    def _take_in(self, line: str) -> None:
        try:
            told = load_json(line)
        except ValueError:
            return
        if isinstance(told, dict) and {*told} == {"digest", "key", "value"} and told["digest"] == self._digest:
            key, value = told["key"], told["value"]
            if isinstance(key, str) and isinstance(value, dict):
                self._found.setdefault(key, []).append(value)

    def all(self, key: str) -> list[dict[str, Any]]:
        """Every value of a key, in the order they were put."""
        return self._found.get(key, [])

    def last(self, key: str) -> dict[str, Any] | None:
        return found[-1] if (found := self.all(key)) else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keep a value, also across the end of this process."""
        line = json.dumps({"digest": self._digest, "key": key, "value": value}, allow_nan=False)
        # a line that an interrupted write has begun ends here
        with regular_file(self.path, "r+b", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write((b"\n" if torn else b"") + line.encode() + b"\n")
        self._found.setdefault(key, []).append(value)

    def forget(self) -> None:
        """The run is over and its answers are in a table."""
        self.path.unlink(missing_ok=True)
        self._found.clear()


def _lines(path: Path) -> list[str]:
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, and what it points to is not written")
        return read_text(path, MOST_BYTES, errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no journal: {error}; move it away") from None
