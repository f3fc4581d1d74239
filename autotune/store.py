"""What tuning keeps: tables, written whole or not at all and only as a reader takes them, and what was compiled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..kernels import tables
from ..kernels.files import converted, parse_object, read_file
from ..kernels.gpu import GpuSpec
from ..kernels.tables import Entry, Table, as_json, file_name, parse, read

PRIVATE = 0o700
T = TypeVar("T")


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


def save(folder: Path, gpu: GpuSpec, entries: Iterable[Entry]) -> Path:
    """Add entries to the table of a GPU and this Triton version in ``folder``; its path.

    Raises:
        RefusedTable: there is one that cannot be read: it is left as it is.
        ValueError: the folder cannot be made, or an entry is not what a reader takes.
    """
    before = known(folder, gpu)
    data = as_json(Table(gpu.name, gpu.arch, before.triton, tuple(merged(before.entries, entries))))
    parse(data)  # what is written is what is read
    path = folder / file_name(gpu.name, before.triton)
    write(path, data)
    tables.forget()
    return path


def write(path: Path, data: object) -> None:
    """JSON into a file of a private folder, whole or not at all."""
    folder = private_folder(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{path.name}.", delete=False) as draft:  # 0600
        try:
            draft.write(json.dumps(data, indent=1) + "\n")
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise


def known(folder: Path, gpu: GpuSpec) -> Table:
    """The table of a GPU and this Triton version in ``folder``; an empty one where there is none.

    Raises:
        RefusedTable: it cannot be read.
    """
    version = tables.triton_version()
    path = folder / file_name(gpu.name, version)
    return read(path) if path.exists() else Table(gpu.name, gpu.arch, version, ())


def merged(before: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """One entry per point, the newer one; but an estimate never takes the place of a measurement."""
    made = {entry.point: entry for entry in before}
    for entry in new:
        known = made.get(entry.point)
        if known is None or known.estimated or not entry.estimated:
            made[entry.point] = entry
    return list(made.values())


class Line(NamedTuple):
    """One line of a journal."""

    digest: str
    key: str
    value: Mapping[str, Any]


class Journal:
    """Values by key in a file of JSON lines, each appended as soon as it is known.

    Lines that were written for another ``digest`` (of the kernels' sources and of Triton), by an interrupted write or
    by somebody else are passed over: what they would have told is found out again.
    """

    def __init__(self, path: Path, digest: str) -> None:
        """Read what is there.

        Raises:
            ValueError: there is something else than a regular file of at most 64 MiB.
        """
        self.path, self._digest = path, digest
        self._values: dict[str, Mapping[str, Any]] = {}
        try:
            lines = read_file(path).splitlines() if path.exists() else []
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; delete it") from None
        for line in lines:
            with suppress(ValueError):
                read: Line = converted(Line, parse_object(line), "line")
                if read.digest == digest:
                    self._values[read.key] = read.value

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the last value of a key, or None if there is none or one of another kind."""
        if key not in self._values:
            return None
        try:
            value: T = converted(kind, self._values[key], key)
        except ValueError:
            return None
        return value

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keep a value, also across the end of this process."""
        line = json.dumps({"digest": self._digest, "key": key, "value": value}, allow_nan=False)
        with self.path.open("ab") as file:
            file.write(f"\n{line}\n".encode())  # a line that an interrupted write has begun ends here
        self._values[key] = parse_object(json.dumps(value).encode())  # as it is read
