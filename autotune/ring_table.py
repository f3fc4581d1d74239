"""Settings that all ranks of a ring share, and their table ``<gpu>_rings.json`` next to the tables of tiles."""

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
from ..comm.control import open_control
from ..comm.registry import AUTO, transports
from ..kernels.gpu import INTERPRETER_GPU, GpuSpec
from ..kernels.json_files import convert_json, read_object
from ..kernels.tables import RefusedTable, gpu_slug, resolve_config_dir, table_folders
from .store import write_private_json

CHUNKS = (1, 2, 4, 8)
CHANNELS = (None, 2, 4, 8, 16)
"""NCCL's point-to-point channels; each uses one multiprocessor. None: NCCL chooses, at most 8."""


class RingPoint(NamedTuple):
    """Attention problem for which ring settings are tuned."""

    world: int  # ranks
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    dtype: str  # one of DTYPES
    mask: str  # full, or bounded: a causal ring in a balanced layout
    length: int  # tokens per rank


@dataclass(frozen=True)
class RingSetting:
    """Arguments of ``ringattn.Ring``, with the same defaults."""

    transport: str = "auto"
    chunks: int = 1
    channels: int | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``Ring(**setting.arguments)``."""
        return {"transport": self.transport, "chunks": self.chunks, "limits": Limits(channels=self.channels)}

    def __str__(self) -> str:
        """Return the Python expression that creates the ring."""
        limits = "" if self.channels is None else f", limits=Limits(channels={self.channels})"
        return f"Ring(transport={self.transport!r}, chunks={self.chunks}{limits})"


DEFAULT = RingSetting()


@dataclass(frozen=True)
class RingEntry:
    """Best setting of a point with its measurement; seconds are of forward and backward on the slowest rank."""

    point: RingPoint
    setting: RingSetting
    seconds: float  # median of one step
    spread: float  # half the interquartile range over the median
    baseline: float  # median of the default setting in the same search
    about: Mapping[str, Any] = field(default_factory=dict)
    """Date, versions, driver, command line, clocks of rank 0's GPU, and throttle reasons of all ranks."""

    def __post_init__(self) -> None:
        if self.point.length < 1:
            raise ValueError(f"length is {self.point.length}: it must be at least 1")


def ring_table_path(folder: Path, gpu: GpuSpec) -> Path:
    return folder / f"{gpu_slug(gpu.name)}_rings.json"


def read_ring_table(folder: Path, gpu: GpuSpec) -> tuple[RingEntry, ...]:
    """Return the entries of a GPU's table of ring settings, empty without a table.

    Raises:
        RefusedTable: The file is not such a table; the message names the path and the field.
    """
    path = ring_table_path(folder, gpu)
    try:
        data = read_object(path) if path.exists() else {"rings": []}
        rings: tuple[RingEntry, ...] = convert_json(tuple[RingEntry, ...], data.get("rings"), "rings")
    except ValueError as error:
        raise RefusedTable(f"{path} is rejected: {error}") from error
    return rings


def save_ring(folder: Path, gpu: GpuSpec, entry: RingEntry) -> Path:
    """Add an entry to a GPU's table in ``folder``, replace an older entry of its point, and return the path.

    Raises:
        RefusedTable: The existing table cannot be read; the file stays unchanged.
        ValueError: The folder cannot be created.
    """
    entries = {old.point: old for old in read_ring_table(folder, gpu)} | {entry.point: entry}
    data = {"rings": [{**asdict(each), "point": each.point._asdict()} for each in entries.values()]}
    write_private_json(path := ring_table_path(folder, gpu), data)
    return path


def ring_settings(
    point: RingPoint, gpu: GpuSpec | None, config_dir: str | os.PathLike[str] | None = None
) -> RingSetting | None:
    """Return the tuned setting of a point with the nearest length by ratio, or None without a matching entry.

    All ranks must use the same setting; :func:`shared_ring_settings` takes care of that. A table that cannot be read
    is ignored with a warning.

    ``gpu`` is ``kernels.gpu.gpu_specs(device)`` of the ranks, or None on the CPU. ``config_dir`` is as for
    ``kernels.default_config``.

    Raises:
        ValueError: ``config_dir`` is not a folder.
    """
    matching, gpu = list[RingEntry](), gpu or INTERPRETER_GPU
    for folder in table_folders(resolve_config_dir(config_dir)):
        try:
            entries = read_ring_table(folder, gpu)
            matching += [entry for entry in entries if entry.point._replace(length=point.length) == point]
        except RefusedTable as error:
            warnings.warn(f"{error}; using the default settings of the ring", UserWarning, stacklevel=2)
    if not matching:
        return None
    return min(matching, key=lambda entry: abs(math.log(entry.point.length / point.length))).setting


def shared_ring_settings(
    point: RingPoint,
    gpu: GpuSpec | None,
    group: dist.ProcessGroup | None = None,
    config_dir: str | os.PathLike[str] | None = None,
) -> RingSetting | None:
    """Return :func:`ring_settings` of the group's first rank on all ranks; every rank must call the function.

    Ranks with different GPUs or tables would otherwise find different settings, but both ends of an edge must agree.

    ``point``, ``gpu`` and ``config_dir`` of the first rank decide. ``group`` defaults to torch's default group.

    Raises:
        ValueError: ``config_dir`` of the first rank is not a folder. Every rank raises.
    """
    control = open_control(resolve_group(group)).scope("ring settings")
    own: object = None
    if control.rank == 0:
        try:
            setting = ring_settings(point, gpu, config_dir)
            own = None if setting is None else asdict(setting)
        except ValueError as error:  # send the error, because the other ranks wait for an answer
            own = str(error)
    shared: Any = control.gather_merged(own, lambda answers: answers[0], what="the settings of a ring")
    if isinstance(shared, str):
        raise ValueError(shared)
    return None if shared is None else RingSetting(**shared)


def candidate_settings(point: RingPoint, device: str) -> list[RingSetting]:
    """Return the settings to try on a ``cuda`` or ``cpu`` device, the default first."""
    chunks = [count for count in CHUNKS if count <= max(point.kv_heads, 2)]  # one key head: two runs of tokens
    gpu_transports = [entry for entry in transports() if device == "cuda" and entry.devices == ("cuda",)]
    channels_by_name = {entry.name: CHANNELS if "channels" in entry.limits else (None,) for entry in gpu_transports}
    others = [
        RingSetting(transport, count, channels)
        for transport, count in product(channels_by_name or [AUTO], chunks)
        for channels in channels_by_name.get(transport, (None,))
    ]
    return [*dict.fromkeys([DEFAULT, *others])]
