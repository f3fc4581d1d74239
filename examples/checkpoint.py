"""Checkpoints that cannot run code when loaded: the job as JSON, tensors with torch's distributed checkpoint.

``torch.distributed.checkpoint.load`` unpickles the file ``.metadata`` and all entries that are not tensors, so a
crafted checkpoint can run any command. This module restricts both to an allow-list.

A checkpoint is a folder ``DIR/<steps>``. Its ``.metadata`` is written last, and marks the checkpoint as complete.
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
MAX_JOB_BYTES = 1 << 16

_RECORDS = (
    _MEM_FORMAT_ENCODING, BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta,
    TensorProperties, TensorStorageMetadata, _StorageInfo,
)  # fmt: skip
ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # the folder in which the checkpoint was written, of any system and Python version; never opened
    **{
        (module, f"{system}Path"): PurePath
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows")
    },
}
"""Maps every ``(module, name)`` that a ``.metadata`` may contain to its object: plain records, dtypes and paths."""


def find_latest(folder: Path) -> Path | None:
    """Return the complete checkpoint in ``folder`` with the most steps, or None."""
    complete = [path.parent for path in folder.glob(f"*/{METADATA}") if re.fullmatch("[0-9]{8,}", path.parent.name)]
    return max(complete, key=lambda path: int(path.name), default=None)


def read_job(path: Path) -> dict[str, Any]:
    """Return the settings of the job that wrote a checkpoint.

    Raises:
        ValueError: The file cannot be read; the message names the checkpoint.
    """
    try:
        if not (path / JOB).is_file():  # reading a FIFO or a device could block or never end
            raise ValueError("it is not a regular file")
        with (path / JOB).open("rb") as file:
            data = file.read(MAX_JOB_BYTES + 1)
        job = json.loads(data) if len(data) <= MAX_JOB_BYTES else None
        if not isinstance(job, dict):
            raise ValueError(f"it must be a JSON object of at most {MAX_JOB_BYTES:,} bytes")
        return job
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"--checkpoint {path} cannot be read: {JOB}: {error}") from None


def read_metadata(path: Path) -> Metadata:
    """Return torch's index of a checkpoint: its entries, and the file of each.

    Raises:
        ValueError: The file cannot be read, or contains a class that is not allowed or a file outside the checkpoint.
            The message names the checkpoint.
    """
    try:
        file = path / METADATA
        if not file.is_file():
            raise ValueError("it is not a regular file")
        metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it contains a {type(metadata).__name__} in place of torch's Metadata")
        for name in {entry.relative_path for entry in metadata.storage_data.values()}:
            if PurePath(name).name != name or not (path / name).is_file():
                raise ValueError(f"{name!r:.60} is not a file in this folder")
    except Exception as error:  # arbitrary bytes can raise almost any error
        raise ValueError(f"--checkpoint {path} cannot be read: {METADATA}: {error or type(error).__name__}") from error
    return metadata


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Load a checkpoint into the tensors of ``state``; each rank reads its own parts without communication.

    Raises:
        ValueError: The checkpoint cannot be read or has another state; the message names the checkpoint.
    """
    reader = _Reader(path)
    try:
        load(state, storage_reader=reader, planner=_Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException only
        raise ValueError(f"--checkpoint {path} cannot be read: {_last_line(error)}") from error


def save_state(path: Path, state: dict[str, Any], job: dict[str, Any], *, no_dist: bool) -> None:
    """Write a checkpoint of ``state`` and of the job's settings.

    Each rank writes its part. With ``no_dist`` this process writes everything.
    """
    save(state, storage_writer=_Writer(path, job), no_dist=no_dist)


class _Unpickler(pickle._Unpickler):  # the Python version, because the C version has no hook for BUILD
    """Unpickler that finds only allowed classes, imports nothing and sets attributes only of these classes' objects."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ValueError(f"it contains {module}.{name}, which is not allowed")
        return ALLOWED[module, name]

    def load_build(self) -> None:
        """Set the attributes of a record, but not of classes or enum members, which the whole process shares."""
        target = self.stack[-2]
        if type(target) not in _RECORDS or isinstance(target, Enum):
            raise ValueError(f"it changes {target!r:.60}, which is not allowed")
        super().load_build()  # type: ignore[misc]  # unknown to the stub

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class _Reader(FileSystemReader):
    """Torch's reader with the ``.metadata`` that :func:`read_metadata` has checked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata = read_metadata(path)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Torch's load planner, restricted to numbers, strings and containers in entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # the base class unpickles without restriction, so pickle again what the restricted loader has read
        trusted = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), trusted)
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


class _Writer(FileSystemWriter):
    """Torch's writer that also writes the job's settings, on the first rank and before ``.metadata``."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        super().__init__(path)
        self._job = job

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        draft = Path(self.path, f"{JOB}.tmp")
        draft.write_text(json.dumps(self._job, indent=1) + "\n")
        os.replace(draft, Path(self.path, JOB))
        super().finish(metadata, results)


def _last_line(error: BaseException) -> str:
    """Return the last line of torch's message, which has the reason after the tracebacks of all ranks."""
    lines = [line for line in str(error).splitlines() if line.strip() and "Check the documentation" not in line]
    return lines[-1].strip() if lines else type(error).__name__
