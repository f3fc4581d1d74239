"""What tuning keeps: tables, written whole or not at all and only as a reader takes them, and journals of runs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..kernels import tables
from ..kernels.strict import load_json, read_text, regular_file
from ..kernels.tables import Entry, Gpu, Table, as_json, file_name, parse, read
from .rings import RingEntry, rings_of

PRIVATE = 0o700
MOST_JOURNAL = 64 << 20  # bytes


def private_folder(folder: Path) -> Path:
    """``folder``, made where it is not there, with every folder above it that is missing, for this user alone.

    Raises:
        ValueError: it is something else, or cannot be made.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.is_dir():
                part.mkdir(PRIVATE)
    except OSError as error:
        raise ValueError(f"{folder} is no folder to save in: {error}") from error
    return folder


def save(folder: Path, gpu: Gpu, entries: Iterable[Entry] = (), rings: Iterable[RingEntry] = ()) -> Path:
    """Add entries, and settings of rings, to the table of a GPU and this Triton version in ``folder``; its path.

    Raises:
        RefusedTable: there is one that cannot be read: it is left as it is.
        ValueError: the folder cannot be made, or an entry is not what a reader takes.
    """
    version = tables.triton_version()
    before, before_rings = _there(folder, gpu)
    path = private_folder(folder) / file_name(gpu.name, version)
    kept = {one.point: one for one in (*before_rings, *rings)}
    told = tuple(one.as_json() for one in kept.values())
    table = Table(gpu.name, gpu.arch, version, tuple(merged(before.entries, entries)), told)
    written = json.dumps(as_json(table), indent=1) + "\n"
    rings_of(replace(parse(written), path=path))  # what is written is what is read
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{path.name}.", delete=False) as draft:  # 0600
        try:
            draft.write(written)
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
    tables.forget()
    return path


def known(folder: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """What the table of a GPU and this Triton version in ``folder`` has; nothing where there is none.

    Raises:
        RefusedTable: it cannot be read.
    """
    return _there(folder, gpu)[0].entries


def _there(folder: Path, gpu: Gpu) -> tuple[Table, tuple[RingEntry, ...]]:
    version = tables.triton_version()
    path = folder / file_name(gpu.name, version)
    try:
        table = read(path)
    except (FileNotFoundError, NotADirectoryError):
        table = Table(gpu.name, gpu.arch, version, ())
    return table, rings_of(table)


def merged(before: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """One entry per point, the newer one; but an estimate never takes the place of a measurement."""
    made = {entry.point: entry for entry in before}
    for entry in new:
        known = made.get(entry.point)
        if known is None or known.estimated or not entry.estimated:
            made[entry.point] = entry
    return list(made.values())


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
        return read_text(path, MOST_JOURNAL, errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no journal: {error}; move it away") from None
