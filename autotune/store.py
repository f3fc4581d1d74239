"""Writes tables: into a private folder, whole or not at all, and only what a reader will take."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..kernels import tables
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
