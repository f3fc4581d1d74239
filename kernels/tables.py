"""Tuned tiles: what one is chosen for, the JSON file of all of a GPU, and which tables serve a launch.

A file is data, never executed, and what is not of the schema below is refused with the file's path and the reason.
``kernels/README.md`` has the format for people.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .config import EPILOGUES, FORWARD_KERNELS, ORDERS, KernelConfig, Tile
from .files import converted, read_object
from .gpu import GpuSpec, shared_limit

KERNELS = ("forward", "dq", "dkdv")
SINGLE_PASS = ("single_pass", "single_pass_deterministic")
"""In place of the last two: `KernelConfig.backward`."""

TUNED = KERNELS + SINGLE_PASS
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("full", "bounded")
"""What a kernel knows of a mask: none, or an interval of keys per row (causal, window, documents, prefix)."""

ARCH = re.compile(r"sm_(\d{2,3})")
"""The name of a table that was made without a GPU: of a compute capability, not of a product."""

Option = str | int  # bool too
Options = tuple[tuple[str, Option], ...]

_TILE_SCHEDULE: dict[str, Sequence[Option]] = {
    "order": ORDERS,
    "persistent": (False, True),
    "sm_margin": range(1, 1025),  # a ring launches by tables, and its transfers need a place
}
_PACKED: dict[str, Sequence[Option]] = {"pack_gqa": (False, True)}
OPTIONS: dict[str, dict[str, Sequence[Option]]] = {
    "forward": {"forward_kernel": FORWARD_KERNELS} | _TILE_SCHEDULE | _PACKED,
    "dq": _TILE_SCHEDULE | _PACKED,
    "dkdv": _TILE_SCHEDULE | {"dkdv_splits": range(1, 1025), "dkdv_epilogue": EPILOGUES},
    **{kernel: {} for kernel in SINGLE_PASS},  # their order is their own
}
"""Fields of ``KernelConfig`` that may be tuned and their values, by kernel; a file leaves out a default.

``autotune/space.py`` says which values are tried.
"""


@dataclass(frozen=True)
class Chosen(Tile):
    """A tile together with fields of ``KernelConfig`` that go with it: sorted pairs of ``OPTIONS``."""

    options: Options = ()


def options_of(tile: Tile) -> dict[str, Option]:
    """The fields of ``KernelConfig`` that go with a tile; none where all have their defaults."""
    return dict(tile.options) if isinstance(tile, Chosen) else {}


def with_options(tile: Tile, options: Mapping[str, Option]) -> Tile:
    """``tile`` with fields of ``KernelConfig``; itself without any."""
    return Chosen(**fields_of(tile), options=tuple(sorted(options.items()))) if options else tile


def fields_of(tile: Tile) -> dict[str, Any]:
    """Those of ``Tile``, without options."""
    return {one.name: getattr(tile, one.name) for one in fields(Tile)}


class RefusedTable(ValueError):
    """A table that is not used; the message has its path and the reason."""


class Point(NamedTuple):
    """What a tile is chosen for."""

    kernel: str  # of TUNED
    dtype: str  # one of DTYPES
    head_dim: int
    head_dim_v: int
    group: int  # query heads per key head
    mask: str  # one of MASKS
    length: int  # tokens on one GPU, of queries and of keys


@dataclass(frozen=True)
class Entry:
    """One tile, and how it was found; ``seconds``, ``spread``, ``beside`` and ``baseline`` are None where estimated."""

    point: Point
    tile: Tile
    estimated: bool  # never measured: compiled, and ranked by `bound`
    date: str  # ISO 8601
    seconds: float | None = None  # median of one launch
    spread: float | None = None  # half the interquartile range over the median
    beside: float | None = None  # median with a communication kernel beside it
    baseline: float | None = None  # median of the built-in default in the same run
    bound: float | None = None  # what an estimate was ranked by; larger is better
    bound_by: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    clocks: Mapping[str, float | str | None] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        point, options = self.point, dict[str, Any](options_of(self.tile))
        for word, words in ((point.kernel, TUNED), (point.dtype, [*DTYPES]), (point.mask, MASKS)):
            if word not in words:
                raise ValueError(f"{word!r:.60} is not one of {', '.join(words)}")
        if min(point.head_dim, point.head_dim_v, point.group, point.length) < 1:
            raise ValueError(f"{point} must have head dims, group and length of at least 1")
        if max(self.tile.block_q, self.tile.block_k) > MOST_SIDE:
            raise ValueError(f"{self.tile} has a side of more than {MOST_SIDE}")
        for name, value in options.items():
            if value not in OPTIONS[point.kernel].get(name, ()):
                raise ValueError(f"options.{name:.60} is {value!r:.60}: {point.kernel} has no such option or value")
        KernelConfig(self.tile, self.tile, self.tile, **options)  # refuses options that do not go together
        if self.estimated != (self.seconds is None) or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(
                f"estimated is {self.estimated} and seconds {self.seconds}: null of an estimate, else above 0"
            )


@dataclass(frozen=True)
class Table:
    """All entries of one file."""

    gpu: str  # as the driver names it; sm_90 for a table made without a GPU
    arch: int  # compute capability without the dot
    triton: tuple[int, int]
    entries: tuple[Entry, ...]


def file_name(gpu: str, triton: tuple[int, int]) -> str:
    """``nvidia-h200_triton-3.7.json``.

    Raises:
        ValueError: a name without a letter or digit.
    """
    return f"{slug_of(gpu)}_triton-{triton[0]}.{triton[1]}.json"


def slug_of(gpu: str) -> str:
    """``nvidia-h200``: letters, digits and dashes of a GPU's name, so that no name leaves a folder."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:80]
    if not slug:
        raise ValueError(f"gpu is {gpu!r}: a name of a table takes at least one letter or digit")
    return slug


def least_shared(point: Point, tile: Tile) -> int:
    """Bytes of shared memory that a tile takes in any case: what its pipeline has in flight of the streamed pair.

    Forward and dQ stream K and V, dK/dV and a single pass Q and dO; one of ``num_stages`` may be in registers. What a
    compiled kernel takes is this or more.
    """
    rows = tile.block_k if point.kernel in ("forward", "dq") else tile.block_q
    size = 4 if point.dtype == "fp32" else 2
    both = rows * (point.head_dim + point.head_dim_v) * size
    return both * (tile.num_stages - 1) if tile.num_stages > 1 else 0


SCHEMA = "ringattn tiles"
VERSION = 1
MOST_SIDE = 512


class _File(NamedTuple):
    """What a file holds, by its names."""

    schema: str
    version: int
    gpu: str
    arch: int
    triton: str
    entries: list[dict[str, Any]]


def read(path: Path) -> Table:
    """The table of a file.

    Raises:
        RefusedTable: it cannot be read, is no regular file, too large, not JSON, or not of this schema.
    """
    try:
        return parse(read_object(path))
    except ValueError as error:
        raise RefusedTable(f"{path} is refused: {error}") from error


def parse(data: Mapping[str, Any]) -> Table:
    """The table that a JSON object describes.

    Raises:
        ValueError: the object is not of this schema; the message names the field, what it got, what it takes.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {data.get('schema')!r:.60}, not {SCHEMA!r}")
    if (version := data.get("version")) != VERSION:
        raise ValueError(f"its schema is version {version!r:.60}, this code reads {VERSION}: update ringattn")
    file: _File = converted(_File, data, "table")
    release = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", file.triton)
    if release is None:
        raise ValueError(f"triton is {file.triton!r:.60}: it must be a version such as 3.7")
    entries = tuple(_entry(row, f"entries[{i}]") for i, row in enumerate(file.entries))
    if ARCH.fullmatch(file.gpu) and (file.gpu != f"sm_{file.arch}" or not all(one.estimated for one in entries)):
        raise ValueError(f"gpu is {file.gpu} and arch {file.arch}: such a table has estimates alone, of that arch")
    limit = shared_limit(file.arch)
    for i, entry in enumerate(entries):
        if (least := least_shared(entry.point, entry.tile)) > limit:
            raise ValueError(f"entries[{i}].tile takes at least {least} bytes of shared memory, a block has {limit}")
    if len({entry.point for entry in entries}) < len(entries):
        raise ValueError("two entries are for the same point")
    return Table(file.gpu, file.arch, (int(release[1]), int(release[2])), entries)


def as_json(table: Table) -> dict[str, Any]:
    """What :func:`parse` reads."""
    entries = [_entry_as_json(entry) for entry in sorted(table.entries, key=lambda one: one.point)]
    version = ".".join(map(str, table.triton))
    return _File(SCHEMA, VERSION, table.gpu, table.arch, version, entries)._asdict()


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    data = {one.name: getattr(entry, one.name) for one in fields(Entry) if one.name != "point"}
    more = {"versions": dict(entry.versions), "clocks": dict(entry.clocks)}
    return entry.point._asdict() | data | {"tile": fields_of(entry.tile), "options": options_of(entry.tile)} | more


def _entry(row: dict[str, Any], where: str) -> Entry:
    point = {name: row[name] for name in Point._fields if name in row}
    rest = {name: value for name, value in row.items() if name not in (*point, "options")}
    options = converted(dict[str, Any], row.get("options", {}), f"{where}.options")
    tile = with_options(converted(Tile, row.get("tile"), f"{where}.tile"), options)
    entry: Entry = converted(Entry, rest | {"point": point, "tile": tile}, where)
    return entry


CONFIG_DIR = "RINGATTN_CONFIG_DIR"
HERE = Path(__file__).parent
# what ships with the kernels: `tuned/` in this folder, where a vendor puts tables, or the folder beside it
PACKAGE = (HERE / "tuned", HERE.parent / "autotune" / "tables")

Version = tuple[int, int]
Key = tuple[str, torch.dtype, int, int, int, bool]  # kernel, dtype, D, Dv, query heads per key head, without a mask
Lengths = tuple[tuple[float, ...], tuple[Tile | None, ...]]  # where one tile gives way to the next, and the tiles

BACKWARD = "backward"
"""In a key: not a kernel, but whether one pass was measured as faster than two, and its tile."""

TWO_PASSES, ONE_PASS = ("dq", "dkdv"), "single_pass_deterministic"


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
        entries = self._lengths.get(key)
        return None if entries is None else entries[1][bisect_left(entries[0], length)]


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
def _load(gpu: GpuSpec, config_dir: str | None, estimated: bool) -> Tuned:
    if config_dir and not os.path.isdir(config_dir):  # from the environment: nobody to raise to
        _warn(f"{CONFIG_DIR} is {config_dir!r}: there is no such folder; `ringattn tune --save-dir` makes it")
    return Tuned(tables_of(gpu, config_dir, estimated=estimated), estimated=estimated)


def tables_of(gpu: GpuSpec, config_dir: str | None, *, estimated: bool = False) -> list[Table]:
    """The tables that serve a GPU under this version of Triton, the one to ask first first.

    Args:
        config_dir: looked into in place of the user's cache, before what ships with the kernels.
        estimated: also those made for a compute capability, without a GPU.
    """
    folders = folders_of(config_dir)
    names = dict.fromkeys([gpu.name, *([f"sm_{gpu.arch}"] if estimated else [])])
    return [table for name in names for table in _tables(name, gpu, folders)]


def folders_of(config_dir: str | None) -> list[Path]:
    """The folders that are looked into, the one to ask first first: ``config_dir`` or the user's, and the package's."""
    own = Path(config_dir) if config_dir else user_folder()
    return [*([own] if own is not None else []), *PACKAGE]


def forget() -> None:
    """Read every table again at the next look-up; for who has just written one."""
    _load.cache_clear()


def tuned(gpu: GpuSpec, config_dir: str | os.PathLike[str] | None = None, *, estimated: bool = False) -> Tuned:
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


def _tables(name: str, gpu: GpuSpec, folders: list[Path]) -> list[Table]:
    """This version's tables in order of the folders; where there is none, those of the nearest older version."""
    ours = triton_version()
    versions = [(version, path) for folder in folders for version, path in _versions(folder, name) if version <= ours]
    serving = max((version for version, _ in versions), default=ours)
    paths = [path for version, path in versions if version == serving]
    tables = [table for path in paths if (table := _read(path, name, gpu, serving)) is not None]
    if serving != ours and tables:
        _warn(
            f"no tuned tiles for Triton {ours[0]}.{ours[1]} at {folders[0] / file_name(name, ours)}: those for "
            f"{serving[0]}.{serving[1]}, {paths[0]}, serve instead; `ringattn tune` makes it"
        )
    return tables


def _versions(folder: Path, name: str) -> list[tuple[Version, Path]]:
    """The versions that a folder, which need not be there, has a table of this GPU for."""
    stem = file_name(name, (0, 0)).removesuffix("0.0.json")
    pattern = re.compile(re.escape(stem) + r"(\d{1,3})\.(\d{1,3})\.json")
    matches = ((path, pattern.fullmatch(path.name)) for path in folder.glob(f"{stem}*"))
    return [((int(match[1]), int(match[2])), path) for path, match in matches if match]


def _read(path: Path, name: str, gpu: GpuSpec, version: Version) -> Table | None:
    """A table that is for this GPU and version; None, with a warning, for what is not or is refused."""
    try:
        table = read(path)
    except RefusedTable as error:
        _warn(f"{error}; the built-in tiles are used")
        return None
    for what, got, wanted in (
        ("gpu", table.gpu, name),
        ("arch", table.arch, gpu.arch),
        ("triton", table.triton, version),
    ):
        if got != wanted:
            _warn(f"{path} is refused: its {what} is {got!r:.60}, this is {wanted!r}; the built-in tiles are used")
            return None
    return table


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
