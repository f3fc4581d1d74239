"""Checkpoints whose files cannot run commands: the job in JSON, the tensors by torch's distributed checkpoint.

``torch.distributed.checkpoint.load`` unpickles the file ``.metadata``, and every entry that is no tensor, so that
whoever wrote the folder can run any command. Here both are restricted to an allow-list. A checkpoint is a folder
``DIR/<steps>``, complete once ``.metadata`` is there, which is written last.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

JOB, METADATA = "job.json", ".metadata"
MOST_JOB_BYTES = 1 << 16

_RECORDS = (
    _MEM_FORMAT_ENCODING, BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta,
    TensorProperties, TensorStorageMetadata, _StorageInfo,
)  # fmt: skip
ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # where the checkpoint was written, on whatever system and by whatever Python; nothing opens it
    **{
        (module, f"{system}Path"): PurePath
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows")
    },
}
"""Everything that a ``.metadata`` of torch may name, and what it gets: plain records and no other function."""


def find_latest(folder: Path) -> Path | None:
    """Return the complete checkpoint in ``folder`` that has taken the most steps, or None if there is none."""
    complete = [path.parent for path in folder.glob(f"*/{METADATA}") if re.fullmatch("[0-9]{8,}", path.parent.name)]
    return max(complete, key=lambda path: int(path.name), default=None)


def read_job(path: Path) -> dict[str, Any]:
    """Return the description of the job that wrote a checkpoint.

    Raises:
        ValueError: the file cannot be read; the message names the checkpoint.
    """
    try:
        if not (path / JOB).is_file():  # a FIFO waits for its other end, a device may never end
            raise ValueError("it is no regular file")
        with (path / JOB).open("rb") as file:
            data = file.read(MOST_JOB_BYTES + 1)
        job = json.loads(data) if len(data) <= MOST_JOB_BYTES else None
        if not isinstance(job, dict):
            raise ValueError(f"it must be a JSON object of at most {MOST_JOB_BYTES:,} bytes")
        return job
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"--checkpoint {path} cannot be read: {JOB}: {error}") from None


def read_metadata(path: Path) -> Metadata:
    """Return torch's list of what a checkpoint holds and in which of its files.

    Raises:
        ValueError: the file cannot be read, names a class that is not allowed, or names a file that is not in the
            checkpoint; the message names the checkpoint.
    """
    try:
        file = path / METADATA
        if not file.is_file():
            raise ValueError("it is no regular file")
        metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds {type(metadata).__name__} and must hold Metadata")
        for name in {entry.relative_path for entry in metadata.storage_data.values()}:
            if PurePath(name).name != name or not (path / name).is_file():
                raise ValueError(f"{name!r:.60} is no file of this folder")
    except Exception as error:  # bytes that are no pickle of torch raise almost any error
        raise ValueError(f"--checkpoint {path} cannot be read: {METADATA}: {error or type(error).__name__}") from error
    return metadata


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Load a checkpoint into the tensors of ``state``; each rank reads its own parts, without the others.

    Raises:
        ValueError: the checkpoint cannot be read or holds another state; the message names the checkpoint.
    """
    reader = _Reader(path)
    try:
        load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # which is no Exception
        raise ValueError(f"--checkpoint {path} cannot be read: {_last_line(error)}") from error


def save_state(path: Path, state: dict[str, Any], job: dict[str, Any], *, no_dist: bool) -> None:
    """Write a checkpoint: all ranks their parts of ``state``, or with ``no_dist`` this process alone."""
    save(state, storage_writer=_Writer(path, job), no_dist=no_dist)


class _Unpickler(pickle._Unpickler):  # in Python: the one in C would set attributes of anything
    """An unpickler that finds what is allowed, imports nothing and sets attributes of records alone."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
        return ALLOWED[module, name]

    def load_build(self) -> None:
        """Set the attributes of a record: classes and members of enums belong to the whole process."""
        target = self.stack[-2]
        if type(target) not in _RECORDS or isinstance(target, Enum):
            raise ValueError(f"it changes {target!r:.60}, which no checkpoint needs")
        super().load_build()  # type: ignore[misc]  # unknown to the stub

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class _Reader(FileSystemReader):
    """Torch's reader, except that it has read ``.metadata`` already."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = read_metadata(path)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Torch's planner, except that entries that are no tensors are numbers, strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own unpickles without restriction, so it gets what this process has pickled
        trusted = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), trusted)
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


class _Writer(FileSystemWriter):
    """Torch's writer, except that the first rank writes the job before ``.metadata``."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        super().__init__(path)
        self._job = job

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = Path(self.path, f"{JOB}.tmp")
        draft.write_text(json.dumps(self._job, indent=1) + "\n")
        os.replace(draft, Path(self.path, JOB))
        super().finish(metadata, results)


def _last_line(error: BaseException) -> str:
    """Return the cause alone: torch's message holds the traceback of every rank, and where its manual is."""
    lines = [line for line in str(error).splitlines() if line.strip() and "Check the documentation" not in line]
    return lines[-1].strip() if lines else type(error).__name__
