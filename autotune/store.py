"""Files that tuning writes: tables of tiles, written atomically and validated first, and the compile journal."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..kernels import tables
from ..kernels.gpu import GpuSpec
from ..kernels.json_files import convert_json, parse_object, read_file
from ..kernels.tables import Table, TableEntry, parse_table, read_table, table_file_name, table_to_json

PRIVATE = 0o700
T = TypeVar("T")


def private_folder(folder: Path) -> Path:
    """Create ``folder`` and its missing parents with access for this user only, and return it.

    Raises:
        ValueError: The path is not a folder, or cannot be created.
    """
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.is_dir():
                part.mkdir(PRIVATE)
    except OSError as error:
        raise ValueError(f"{folder} cannot be used as a folder: {error}") from error
    return folder


def save(folder: Path, gpu: GpuSpec, entries: Iterable[TableEntry]) -> Path:
    """Add entries to the table of a GPU and this Triton version in ``folder``, and return the table's path.

    Raises:
        RefusedTable: The existing table cannot be read; the file stays unchanged.
        ValueError: The folder cannot be created, or an entry is invalid.
    """
    before = read_tuned_table(folder, gpu)
    data = table_to_json(Table(gpu.name, gpu.arch, before.triton, tuple(merge_entries(before.entries, entries))))
    parse_table(data)  # never write a table that a reader would reject
    path = folder / table_file_name(gpu.name, before.triton)
    write_private_json(path, data)
    tables.clear_table_cache()
    return path


def write_private_json(path: Path, data: object) -> None:
    """Write JSON atomically into a file of a private folder."""
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


def read_tuned_table(folder: Path, gpu: GpuSpec) -> Table:
    """Return the table of a GPU and this Triton version in ``folder``, or an empty table if there is none.

    Raises:
        RefusedTable: The table cannot be read.
    """
    version = tables.triton_version()
    path = folder / table_file_name(gpu.name, version)
    return read_table(path) if path.exists() else Table(gpu.name, gpu.arch, version, ())


def merge_entries(old_entries: Iterable[TableEntry], new_entries: Iterable[TableEntry]) -> list[TableEntry]:
    """Return the newest entry of each point, except that an estimate never replaces a measurement."""
    entries = {entry.point: entry for entry in old_entries}
    for entry in new_entries:
        old = entries.get(entry.point)
        if old is None or old.estimated or not entry.estimated:
            entries[entry.point] = entry
    return list(entries.values())


class Line(NamedTuple):
    """One line of the journal."""

    digest: str
    key: str
    value: Mapping[str, Any]


class Journal:
    """Key-value store in a file of JSON lines to which each new value is appended.

    Lines with another ``digest`` (of the kernels' sources and of Triton) and damaged lines are ignored, so that their
    values are computed again.
    """

    def __init__(self, path: Path, digest: str) -> None:
        """Read the existing lines.

        Raises:
            ValueError: The path is not a regular file of at most 64 MiB.
        """
        self.path, self._digest = path, digest
        self._values: dict[str, Mapping[str, Any]] = {}
        try:
            lines = read_file(path).splitlines() if path.exists() else []
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}. Delete the file.") from None
        for line in lines:
            with suppress(ValueError):
                read: Line = convert_json(Line, parse_object(line), "line")
                if read.digest == digest:
                    self._values[read.key] = read.value

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the last value of a key, or None if there is none or its type is not ``kind``."""
        if key not in self._values:
            return None
        try:
            value: T = convert_json(kind, self._values[key], key)
        except ValueError:
            return None
        return value

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store a value, and append it to the file."""
        line = json.dumps({"digest": self._digest, "key": key, "value": value}, allow_nan=False)
        with self.path.open("ab") as file:
            file.write(f"\n{line}\n".encode())  # the first newline ends a line that an interrupted write left
        self._values[key] = parse_object(json.dumps(value).encode())  # the value as a later run reads it
