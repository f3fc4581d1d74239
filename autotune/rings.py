"""Settings that all ranks of a ring share, and the file of a GPU's: ``<gpu>_rings.json``, beside its tables of tiles.

Nothing here runs a ring: what does is handed in.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..comm import Limits, resolve_group
from ..comm.control import control_of
from ..comm.registry import AUTO, transports
from ..kernels.files import converted, read_object
from ..kernels.gpu import INTERPRETER_GPU, GpuSpec
from ..kernels.tables import RefusedTable, folder_of, folders_of, slug_of
from .store import write

CHUNKS = (1, 2, 4, 8)
CHANNELS = (None, 2, 4, 8, 16)
"""Of NCCL's point-to-point transfers; each takes a multiprocessor from the kernels. None: NCCL's choice, at most 8."""


class RingPoint(NamedTuple):
    """What settings are chosen for."""

    world: int  # ranks
    heads: int  # of the queries
    kv_heads: int
    head_dim: int
    dtype: str  # one of DTYPES
    mask: str  # full, or bounded: a causal ring in a balanced layout
    length: int  # tokens per rank


@dataclass(frozen=True)
class RingSetting:
    """Arguments of ``ringattn.Ring``; the default is what a ring takes by itself."""

    transport: str = "auto"
    chunks: int = 1
    channels: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """``Ring(**setting.arguments)``."""
        return {"transport": self.transport, "chunks": self.chunks, "limits": Limits(channels=self.channels)}

    def __str__(self) -> str:
        """As it is written in a program."""
        limits = "" if self.channels is None else f", limits=Limits(channels={self.channels})"
        return f"Ring(transport={self.transport!r}, chunks={self.chunks}{limits})"


DEFAULT = RingSetting()


@dataclass(frozen=True)
class RingEntry:
    """The best setting of a point, and how it was measured. Seconds are of a forward and backward, slowest rank."""

    point: RingPoint
    setting: RingSetting
    seconds: float  # median of one step
    spread: float  # half the interquartile range over the median
    baseline: float  # median of the default in the same turns
    about: Mapping[str, Any] = field(default_factory=dict)
    """For people: date, versions, driver, command; clocks of rank 0's GPU, "throttled" of any rank's."""

    def __post_init__(self) -> None:
        if self.point.length < 1:
            raise ValueError(f"length is {self.point.length}: it must be at least 1")


def rings_file(folder: Path, gpu: GpuSpec) -> Path:
    """Of the settings of a GPU."""
    return folder / f"{slug_of(gpu.name)}_rings.json"


def read_rings(folder: Path, gpu: GpuSpec) -> tuple[RingEntry, ...]:
    """The settings that a folder has for a GPU; none where it has no file of them.

    Raises:
        RefusedTable: the file is something else; the message has the path, the field, what it got, what it takes.
    """
    path = rings_file(folder, gpu)
    try:
        data = read_object(path) if path.exists() else {"rings": []}
        rings: tuple[RingEntry, ...] = converted(tuple[RingEntry, ...], data.get("rings"), "rings")
    except ValueError as error:
        raise RefusedTable(f"{path} is refused: {error}") from error
    return rings


def save_ring(folder: Path, gpu: GpuSpec, entry: RingEntry) -> Path:
    """Add an entry to a GPU's file in ``folder``, in the place of an older one of its point; the file's path.

    Raises:
        RefusedTable: there is one that cannot be read: it is left as it is.
        ValueError: the folder cannot be made.
    """
    entries = {one.point: one for one in (*read_rings(folder, gpu), entry)}.values()
    data = {"rings": [{**asdict(one), "point": one.point._asdict()} for one in entries]}
    write(path := rings_file(folder, gpu), data)
    return path


def ring_settings(
    point: RingPoint, gpu: GpuSpec | None, config_dir: str | os.PathLike[str] | None = None
) -> RingSetting | None:
    """What was measured as the best for a ring like this one, of the nearest length by ratio; None: nothing was.

    All ranks must take the same: :func:`shared_ring_settings`. A table that is refused is passed over with a warning.

    Args:
        gpu: of the ranks, ``kernels.gpu.gpu_specs(device)``; None: they are on the CPU.
        config_dir: as of ``kernels.default_config``.

    Raises:
        ValueError: ``config_dir`` is no folder.
    """
    found, gpu = [], gpu or INTERPRETER_GPU
    for folder in folders_of(folder_of(config_dir)):
        try:
            found += [one for one in read_rings(folder, gpu) if one.point._replace(length=point.length) == point]
        except RefusedTable as error:
            warnings.warn(f"{error}; what a ring takes by itself is used", UserWarning, stacklevel=2)
    if not found:
        return None
    return min(found, key=lambda one: abs(math.log(one.point.length / point.length))).setting


def shared_ring_settings(
    point: RingPoint,
    gpu: GpuSpec | None,
    group: dist.ProcessGroup | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> RingSetting | None:
    """What :func:`ring_settings` finds on the group's first rank, on all of its ranks, which call this together.

    Ranks whose GPUs, or tables, are not the same would find settings of their own, and both ends of a link need one.

    Args:
        gpu: of this rank; the first rank's decides, as its ``point`` and its ``config_dir`` do.
        group: None: the default group of torch.distributed.

    Raises:
        ValueError: on every rank: ``config_dir`` of the first is no folder.
    """
    control = control_of(resolve_group(group)).scope("ring settings")
    answer: object = None
    if control.rank == 0:
        try:
            found = ring_settings(point, gpu, config_dir)
            answer = None if found is None else asdict(found)
        except ValueError as error:  # the others wait to be told, too
            answer = str(error)
    told: Any = control.merged(answer, lambda answers: answers[0], what="the settings of a ring")
    if isinstance(told, str):
        raise ValueError(told)
    return None if told is None else RingSetting(**told)


def settings(point: RingPoint, device: str) -> list[RingSetting]:
    """All that are tried on a ``cuda`` or ``cpu`` device, the default first."""
    chunks = [count for count in CHUNKS if count <= point.kv_heads]
    made_for_gpus = [entry for entry in transports() if device == "cuda" and entry.devices == ("cuda",)]
    names = {entry.name: CHANNELS if "channels" in entry.limits else (None,) for entry in made_for_gpus}
    others = [
        RingSetting(transport, count, channels)
        for transport, count in product(names or [AUTO], chunks)
        for channels in names.get(transport, (None,))
    ]
    return [*dict.fromkeys([DEFAULT, *others])]
