"""What tuning keeps: tables, written whole or not at all and only as a reader takes them, and what was compiled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..kernels import tables
from ..kernels.strict import load_json, regular_file
from ..kernels.tables import Entry, Gpu, Table, as_json, file_name, parse, read
from .rings import RingEntry, rings_of

PRIVATE = 0o700


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
    before = known(folder, gpu)
    path = private_folder(folder) / file_name(gpu.name, before.triton)
    kept = {one.point: one for one in (*rings_of(before), *rings)}
    of_rings = tuple(one.as_json() for one in kept.values())
    table = Table(gpu.name, gpu.arch, before.triton, tuple(merged(before.entries, entries)), of_rings)
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


def known(folder: Path, gpu: Gpu) -> Table:
    """The table of a GPU and this Triton version in ``folder``; an empty one where there is none.

    Raises:
        RefusedTable: it cannot be read.
    """
    version = tables.triton_version()
    try:
        table = read(folder / file_name(gpu.name, version))
    except (FileNotFoundError, NotADirectoryError):
        return Table(gpu.name, gpu.arch, version, ())
    rings_of(table)
    return table


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
        self.path, self._digest = path, digest
        self._results: dict[str, dict[str, Any]] = {}
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            try:
                record = load_json(line)
                if record["digest"] == digest:
                    self._results[str(record["key"])] = dict(record["value"])
            except (ValueError, TypeError, KeyError):
                continue

    def get(self, key: str) -> dict[str, Any] | None:
        """The last value of a key."""
        return self._results.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keep a value, also across the end of this process."""
        line = json.dumps({"digest": self._digest, "key": key, "value": value}, allow_nan=False)
        with regular_file(self.path, "ab", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) as file:
            file.write(f"\n{line}\n".encode())  # a line that an interrupted write has begun ends here
        self._results[key] = value
