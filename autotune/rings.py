"""Settings that all ranks of a ring share, tuned with the kernels that they run beside, and where they are kept.

They stand in the section ``rings`` of a GPU's table, beside the tiles, and are checked here: kernels do not know rings.
Nothing here runs a ring: what does is handed in.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist

from ..comm import Limits, resolve_group
from ..comm.control import control_of
from ..kernels import tables
from ..kernels.strict import Check, checked_as, either, named, number, one_of, optional, text, whole
from ..kernels.tables import DTYPES, MASKS, MOST_TOKENS, NO_GPU, Gpu, RefusedTable, Table

TRANSPORTS = {"cuda": ("nccl", "copy_engine"), "cpu": ("auto",)}  # on the CPU there is one
CHUNKS = (1, 2, 4, 8)
CHANNELS = (None, 2, 4, 8, 16)
"""Of NCCL's point-to-point transfers; each takes a multiprocessor from the kernels. None: NCCL's choice, at most 8."""

CPU = Gpu("CPU", NO_GPU)
MOST_RANKS = 1 << 20


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
    date: str  # ISO 8601
    seconds: float  # median of one step
    spread: float  # half the interquartile range over the median
    baseline: float  # median of the default in the same turns
    versions: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    clocks: Mapping[str, float | str | None] = field(default_factory=dict)
    """Of rank 0's GPU; ``throttled``: of any rank's."""
    command: str = ""

    def as_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {**data.pop("point")._asdict(), **data}


_SETTING: dict[str, Check] = {
    "transport": one_of("auto", "nccl", "copy_engine", "process_group"),
    "chunks": whole(1, 1024),
    "channels": optional(one_of(1, 2, 4, 8, 16, 32, 64)),
}
_RING: dict[str, Check] = {
    "world": whole(2, MOST_RANKS),
    "heads": whole(1, 4096),
    "kv_heads": whole(1, 4096),
    "head_dim": whole(1, 256),
    "dtype": one_of(*DTYPES),
    "mask": one_of(*MASKS),
    "length": whole(1, MOST_TOKENS),
    "setting": lambda value: None if isinstance(value, dict) else "an object",
    "date": text(r"\d{4}-\d\d-\d\d[ -~]{0,30}", "an ISO 8601 date"),
    "seconds": number(zero=False),
    "spread": number(),
    "baseline": number(zero=False),
    "versions": named(text()),
    "driver": optional(text()),
    "clocks": named(optional(either(number(), text()))),
    "command": text(),
}


def rings_of(table: Table) -> tuple[RingEntry, ...]:
    """The settings of a table.

    Raises:
        RefusedTable: an entry is not of this schema; the message has the path, the field, what it got, what it takes.
    """
    try:
        return tuple(_entry(f"rings[{i}]", given) for i, given in enumerate(table.rings))
    except ValueError as error:
        raise RefusedTable(f"{table.path} is refused: {error}") from error


def _entry(where: str, given: object) -> RingEntry:
    taken = checked_as(where, given, _RING)
    setting = RingSetting(**checked_as(f"{where}.setting", taken.pop("setting"), _SETTING))
    point = RingPoint(*(taken.pop(name) for name in RingPoint._fields))
    if setting.chunks > point.kv_heads:
        raise ValueError(f"{where}.setting.chunks is {setting.chunks}: there are {point.kv_heads} key heads")
    return RingEntry(point, setting, **taken)


def ring_settings(
    point: RingPoint, gpu: Gpu | None, config_dir: str | os.PathLike[str] | None = None
) -> RingSetting | None:
    """What was measured as the best for a ring like this one, of the nearest length by ratio; None: nothing was.

    All ranks must take the same: :func:`shared_ring_settings`. A table that is refused is passed over with a warning.

    Args:
        gpu: of the ranks, ``kernels.tables.gpu_of(device)``; None: they are on the CPU.
        config_dir: as of ``kernels.default_config``.

    Raises:
        ValueError: ``config_dir`` is no folder.
    """
    entries = [
        one
        for table in tables.tables_of(gpu or CPU, tables.folder_of(config_dir))
        for one in _serving(table)
        if one.point._replace(length=point.length) == point
    ]
    if not entries:
        return None
    return min(entries, key=lambda one: abs(math.log(one.point.length / point.length))).setting


def shared_ring_settings(
    point: RingPoint,
    gpu: Gpu | None,
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
            settings = ring_settings(point, gpu, config_dir)
            answer = None if settings is None else asdict(settings)
        except ValueError as error:  # the others wait to be told, too
            answer = str(error)
    shared: Any = control.merged(answer, lambda answers: answers[0], what="the settings of a ring")
    if isinstance(shared, str):
        raise ValueError(shared)
    return None if shared is None else RingSetting(**shared)


def _serving(table: Table) -> tuple[RingEntry, ...]:
    """The settings of a table; with a warning none, where it is refused."""
    try:
        return rings_of(table)
    except RefusedTable as error:
        warnings.warn(f"{error}; what a ring takes by itself is used", UserWarning, stacklevel=3)
        return ()


def settings(point: RingPoint, device: str) -> list[RingSetting]:
    """All that are tried on a ``cuda`` or ``cpu`` device, the default first."""
    chunks = [count for count in CHUNKS if count <= point.kv_heads]
    others = [
        RingSetting(transport, count, channels)
        for transport, count in product(TRANSPORTS[device], chunks)
        for channels in (CHANNELS if transport == "nccl" else (None,))
    ]
    return [*dict.fromkeys([DEFAULT, *others])]
