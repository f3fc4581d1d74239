"""Which tuned tables serve a GPU, and the tile that they have for a launch.

Tables are looked for in the user's folder (``config_dir``, ``RINGATTN_CONFIG_DIR``, or the cache) and then in the
package's. A table is read once per process and a look-up is one dictionary access: nothing is timed, ever.
"""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from .config import Tile
from .table_files import read
from .tables import Entry, Point, RefusedTable, Table, file_name, options_of
from .target import target

CONFIG_DIR = "RINGATTN_CONFIG_DIR"
HERE = Path(__file__).parent
# what ships with the kernels: `tuned/` in this folder, where a vendor puts tables, or the folder beside it
PACKAGE = (HERE / "tuned", HERE.parent / "autotune" / "tables")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Version = tuple[int, int]
Key = tuple[str, torch.dtype, int, int, int, bool]  # kernel, dtype, D, Dv, query heads per key head, without a mask
Lengths = tuple[tuple[float, ...], tuple[Tile | None, ...]]  # where one tile gives way to the next, and the tiles

BACKWARD = "backward"
"""In a key: not a kernel, but whether one pass was measured as faster than two, and its tile."""

TWO_PASSES, ONE_PASS = ("dq", "dkdv"), "single_pass_deterministic"


class Gpu(NamedTuple):
    """What a table is for."""

    name: str
    arch: int  # compute capability without the dot


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU of a device; None for any other device."""
    if device.type == "meta":
        found = target()
        return None if found is None else Gpu(found.name, found.arch)
    return _gpu_of(device) if device.type == "cuda" else None


@cache
def _gpu_of(device: torch.device) -> Gpu:
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(torch.cuda.get_device_name(device), major * 10 + minor)


def triton_version() -> Version:
    """(3, 7) of 3.7.1: code generation changes with it, and a tile's worth with that."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def user_folder() -> Path | None:
    """The user's cache by the XDG rules: ``$XDG_CACHE_HOME/ringattn/tiles``; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "ringattn", "tiles")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "ringattn", "tiles") if os.path.isabs(home) else None


class Tuned:
    """The tiles of some tables, the first table that knows a key deciding it."""

    def __init__(self, tables: Iterable[Table] = (), *, estimated: bool = False) -> None:
        self._lengths: dict[Key, Lengths] = {}
        for table in tables:
            self._lengths = _by_length(table.entries, estimated) | self._lengths

    def tile(self, key: Key, length: int) -> Tile | None:
        """The tile of the nearest length, by ratio; None where nothing was tuned for the key."""
        found = self._lengths.get(key)
        return None if found is None else found[1][bisect_left(found[0], length)]


def _by_length(entries: Iterable[Entry], estimated: bool) -> dict[Key, Lengths]:
    grouped: dict[Key, dict[int, Tile | None]] = {}
    offered = [(entry.point, entry.tile) for entry in entries if is_offered(entry, estimated)]
    for point, tile in [*offered, *_backwards(entries)]:
        key = (point.kernel, DTYPES[point.dtype], point.head_dim, point.head_dim_v, point.group, point.mask == "full")
        grouped.setdefault(key, {})[point.length] = tile
    made = {}
    for key, tiles in grouped.items():
        lengths = sorted(tiles)
        edges = tuple(math.sqrt(a * b) for a, b in pairwise(lengths))
        made[key] = edges, tuple(tiles[length] for length in lengths)
    return made


def is_offered(entry: Entry, estimated: bool) -> bool:
    """What was measured; if ``estimated`` also what was not, but never a kernel or an order that never ran here."""
    return not entry.estimated or (estimated and not options_of(entry.tile))


def _backwards(entries: Iterable[Entry]) -> Iterator[tuple[Point, Tile | None]]:
    """Where all were measured: the tile of the deterministic single pass, or None where two passes took no longer.

    One that adds in no fixed order is the caller's to choose, however fast it is.
    """
    measured = {entry.point: entry for entry in entries if entry.seconds is not None}
    for point, entry in measured.items():
        passes = [measured.get(point._replace(kernel=kernel)) for kernel in TWO_PASSES]
        if point.kernel == ONE_PASS and None not in passes:
            both = sum(one.seconds or 0.0 for one in passes if one is not None)
            faster = (entry.seconds or 0.0) * (1 + (entry.spread or 0.0)) < both
            yield point._replace(kernel=BACKWARD), entry.tile if faster else None


_LOADING = threading.Lock()


@lru_cache(maxsize=64)
def _load(gpu: Gpu, config_dir: str | None, estimated: bool) -> Tuned:
    if config_dir and not os.path.isdir(config_dir):  # from the environment: nobody to raise to
        _warn(f"{CONFIG_DIR} is {config_dir!r}: there is no such folder; `ringattn tune --save-dir` makes it")
    return Tuned(tables_of(gpu, config_dir, estimated=estimated), estimated=estimated)


def tables_of(gpu: Gpu, config_dir: str | None, *, estimated: bool = False) -> list[Table]:
    """The tables that serve a GPU under this version of Triton, the one to ask first first.

    Args:
        config_dir: looked into in place of the user's cache, before what ships with the kernels.
        estimated: also those made for a compute capability, without a GPU.
    """
    folders = [*([Path(config_dir)] if config_dir else [user_folder()]), *PACKAGE]
    there = [folder for folder in folders if folder is not None]
    names = dict.fromkeys([gpu.name, *([f"sm_{gpu.arch}"] if estimated else [])])
    return [table for name in names for table in _tables(name, gpu, there)]


def forget() -> None:
    """Read every table again at the next look-up; for who has just written one."""
    _load.cache_clear()


def tuned(gpu: Gpu, config_dir: str | os.PathLike[str] | None = None, *, estimated: bool = False) -> Tuned:
    """The tiles that tables have for a GPU and this version of Triton.

    Args:
        config_dir: looked into before the package's tables; default ``$RINGATTN_CONFIG_DIR``, else the user's cache.
        estimated: also entries that were never measured. They are never a default: ask for them.

    Raises:
        ValueError: ``config_dir`` is no folder.
    """
    folder = folder_of(config_dir)
    with _LOADING:  # virtual ranks are threads: a warning comes once
        return _load(gpu, folder, estimated)


def folder_of(config_dir: str | os.PathLike[str] | None) -> str | None:
    """``config_dir``, which must be there, else ``$RINGATTN_CONFIG_DIR``, which need not; None: the user's cache.

    Raises:
        ValueError: ``config_dir`` is no folder.
    """
    if config_dir is None:
        return os.environ.get(CONFIG_DIR) or None
    if not os.path.isdir(folder := os.fspath(config_dir)):
        raise ValueError(f"config_dir is {folder!r}: there is no such folder; `ringattn tune --save-dir` makes it")
    return folder


def _tables(name: str, gpu: Gpu, folders: list[Path]) -> list[Table]:
    """This version's tables in order of the folders; where there is none, those of the nearest older version."""
    versions = {folder: _versions(folder, name) for folder in folders}
    ours = triton_version()
    serving = max((version for found in versions.values() for version in found if version <= ours), default=None)
    if serving is None:
        return []
    paths = [folder / found[serving] for folder, found in versions.items() if serving in found]
    tables = [table for path in paths if (table := _read(path, name, gpu, serving)) is not None]
    if serving != ours and tables:
        _warn(
            f"no tuned tiles for Triton {ours[0]}.{ours[1]} at {folders[0] / file_name(name, ours)}: those for "
            f"{serving[0]}.{serving[1]}, {paths[0]}, serve instead. To make it: {command_for(tables[0], folders[0])}"
        )
    return tables


def _versions(folder: Path, name: str) -> dict[Version, str]:
    """The versions that a folder has a table of this GPU for, with its name."""
    pattern = re.escape(file_name(name, (0, 0)).removesuffix("0.0.json")) + r"(\d{1,3})\.(\d{1,3})\.json"
    try:
        names = os.listdir(folder)
    except OSError:  # no such folder: most users have none
        return {}
    found = (re.fullmatch(pattern, one) for one in names)
    return {(int(match[1]), int(match[2])): match[0] for match in found if match}


def _read(path: Path, name: str, gpu: Gpu, version: Version) -> Table | None:
    """A table that is for this GPU and version; None, with a warning, for what is not or is refused."""
    try:
        table = read(path)
    except RefusedTable as error:
        _warn(f"{error}; the built-in tiles are used")
        return None
    except FileNotFoundError:  # gone since it was listed
        return None
    for what, got, wanted in (
        ("gpu", table.gpu, name),
        ("arch", table.arch, gpu.arch),
        ("triton", table.triton, version),
    ):
        if got != wanted:
            _warn(f"{path} is refused: its {what} is {got!r}, this is {wanted!r}; the built-in tiles are used")
            return None
    return table


def command_for(table: Table, folder: Path) -> str:
    """What makes such a table again for the shape it has most of; of checked numbers alone, as it may be pasted."""
    points = [entry.point for entry in table.entries]
    if not points:
        return "ringattn tune"
    shapes = [point[1:5] for point in points]
    dtype, head_dim, head_dim_v, group = most = max(shapes, key=shapes.count)
    of_shape = [point for point in points if point[1:5] == most]
    lengths = ",".join(str(length) for length in sorted({point.length for point in of_shape}))
    value = f" --value-dim {head_dim_v}" if head_dim_v != head_dim else ""
    mask = " --causal" if any(point.mask == "bounded" for point in of_shape) else " --full"
    return (
        f"ringattn tune --heads {8 * group} --kv-heads 8 --head-dim {head_dim}{value} --dtype {dtype} "
        f"--seqlen {lengths}{mask} --save-dir {folder}"
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
