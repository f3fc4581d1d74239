"""Tuned tables: the JSON file with the tuned tiles of one GPU, and the search for the table of a launch.

``kernels/README.md`` describes the format. A file is data and is never executed. A file that does not have this format
is refused with its path and the reason.

Tables are looked for in the user's folder (``config_dir``, ``RINGATTN_CONFIG_DIR`` or the cache), then in the folders
of the package. A table is read once per process, and a look-up is one dictionary access. A look-up never times a
kernel.
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

from .config import EPILOGUES, FORWARD_KERNELS, LOADS, ORDERS, KernelConfig, Tile, value_columns
from .gpu import GpuSpec, shared_limit
from .json_files import convert_json, read_object

KERNELS = ("forward", "dq", "dkdv")
SINGLE_PASS_KERNELS = ("single_pass", "single_pass_deterministic")
"""Kernels that replace dQ and dK/dV: values of ``KernelConfig.backward``."""

TUNED_KERNELS = KERNELS + SINGLE_PASS_KERNELS
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("full", "bounded")
"""Masks that a kernel distinguishes: none, or an interval of keys per row (causal, window, documents, prefix)."""

ARCH_NAME = re.compile(r"sm_(\d{2,3})")
"""Name in a table that was created without a GPU: a compute capability instead of a product."""

OptionValue = str | int  # or bool, which is an int
OptionItems = tuple[tuple[str, OptionValue], ...]

_TILE_SCHEDULE: dict[str, Sequence[OptionValue]] = {
    "order": ORDERS,
    "persistent": (False, True),
    "sm_margin": range(1, 1025),  # not 0, because rings use tables and their transfers need multiprocessors
}
_PACKED: dict[str, Sequence[OptionValue]] = {"pack_gqa": (False, True)}
TUNABLE_OPTIONS: dict[str, dict[str, Sequence[OptionValue]]] = {
    "forward": {"forward_kernel": FORWARD_KERNELS, "loads": LOADS} | _TILE_SCHEDULE | _PACKED,
    "dq": {"loads": LOADS} | _TILE_SCHEDULE | _PACKED,
    "dkdv": _TILE_SCHEDULE | {"dkdv_splits": range(1, 1025), "dkdv_epilogue": EPILOGUES},
    **{kernel: {} for kernel in SINGLE_PASS_KERNELS},
}
"""Tunable fields of ``KernelConfig`` and their allowed values, by kernel. A file omits fields with default values."""


@dataclass(frozen=True)
class TunedTile(Tile):
    """Tile with the ``KernelConfig`` fields that were tuned with it, as sorted pairs of name and value."""

    options: OptionItems = ()


def tuned_options(tile: Tile) -> dict[str, OptionValue]:
    """Return the ``KernelConfig`` fields that were tuned with a tile; empty if all have their defaults."""
    return dict(tile.options) if isinstance(tile, TunedTile) else {}


def attach_options(tile: Tile, options: Mapping[str, OptionValue]) -> Tile:
    """Return ``tile`` with ``KernelConfig`` fields, or ``tile`` itself if there are none."""
    return TunedTile(**tile_fields(tile), options=tuple(sorted(options.items()))) if options else tile


def tile_fields(tile: Tile) -> dict[str, Any]:
    """Return the fields of ``Tile`` without tuned options."""
    return {field.name: getattr(tile, field.name) for field in fields(Tile)}


class RefusedTable(ValueError):
    """Error for a table that is not used; the message has its path and the reason."""


class TuningPoint(NamedTuple):
    """Kernel, dtype and shape that a tile is chosen for."""

    kernel: str  # one of TUNED_KERNELS
    dtype: str  # one of DTYPES
    head_dim: int
    head_dim_v: int
    group: int  # query heads per key head
    mask: str  # one of MASKS
    length: int  # queries on one GPU, and as many keys


@dataclass(frozen=True)
class TableEntry:
    """Tile of one point, with its measurement.

    ``seconds``, ``spread``, ``beside`` and ``baseline`` are None if the entry is estimated.
    """

    point: TuningPoint
    tile: Tile
    estimated: bool  # never measured, only compiled and ranked by `bound`
    date: str  # ISO 8601
    seconds: float | None = None  # median of one launch
    spread: float | None = None  # half the interquartile range over the median
    beside: float | None = None  # median with a concurrent copy kernel
    baseline: float | None = None  # median of the built-in default in the same run
    bound: float | None = None  # bound of the loop by which an estimate was ranked; larger is better
    bound_by: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    clocks: Mapping[str, float | str | None] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        point, options = self.point, dict[str, Any](tuned_options(self.tile))
        for word, words in ((point.kernel, TUNED_KERNELS), (point.dtype, [*DTYPES]), (point.mask, MASKS)):
            if word not in words:
                raise ValueError(f"{word!r:.60} is not one of {', '.join(words)}")
        if min(point.head_dim, point.head_dim_v, point.group, point.length) < 1:
            sizes = f"{point.head_dim}, {point.head_dim_v}, {point.group} and {point.length}"
            raise ValueError(f"head_dim, head_dim_v, group and length are {sizes}: they must be at least 1")
        if max(self.tile.block_q, self.tile.block_k) > MAX_TILE_SIDE:
            sides = f"{self.tile.block_q} and {self.tile.block_k}"
            raise ValueError(f"tile.block_q and tile.block_k are {sides}: they must be at most {MAX_TILE_SIDE}")
        for name, value in options.items():
            if value not in TUNABLE_OPTIONS[point.kernel].get(name, ()):
                raise ValueError(f"options.{name:.60} is {value!r:.60}: {point.kernel} has no such option or value")
        KernelConfig(self.tile, self.tile, self.tile, **options)  # raises if options contradict each other
        if self.estimated != (self.seconds is None) or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(
                f"estimated is {self.estimated} and seconds is {self.seconds}: seconds must be null for an estimate, "
                "and above 0 otherwise"
            )


@dataclass(frozen=True)
class Table:
    """Content of one table file."""

    gpu: str  # name from the driver, or sm_90 for a table created without a GPU
    arch: int  # compute capability without the dot
    triton: tuple[int, int]
    entries: tuple[TableEntry, ...]


def table_file_name(gpu: str, triton: tuple[int, int]) -> str:
    """Return the name of a table's file, such as ``nvidia-h200_triton-3.7.json``."""
    return f"{gpu_slug(gpu)}_triton-{triton[0]}.{triton[1]}.json"


def gpu_slug(gpu: str) -> str:
    """Return a GPU's name in lower-case letters, digits and dashes, such as ``nvidia-h200``.

    The result has no path separators, so a file name cannot leave its folder.

    Raises:
        ValueError: If the name has no letter or digit.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")[:80]
    if not slug:
        raise ValueError(f"gpu is {gpu!r}: it must have at least one letter or digit")
    return slug


def min_shared_bytes(point: TuningPoint, tile: Tile) -> int:
    """Return a lower bound of the shared memory of a tile in bytes: the streamed tiles of its software pipeline.

    The forward and dQ stream K and V; dK/dV and a single pass stream Q and dO. One of the ``num_stages`` may be in
    registers.
    """
    rows = tile.block_k if point.kernel in ("forward", "dq") else tile.block_q
    element_size = 4 if point.dtype == "fp32" else 2
    dim_v = value_columns(tile, point.head_dim_v) if point.kernel == "forward" else point.head_dim_v
    stage = rows * (point.head_dim + dim_v) * element_size
    return stage * (tile.num_stages - 1)


SCHEMA = "ringattn tiles"
VERSION = 1
MAX_TILE_SIDE = 512


class _File(NamedTuple):
    """Top-level fields of a table file."""

    schema: str
    version: int
    gpu: str
    arch: int
    triton: str
    entries: list[dict[str, Any]]


def read_table(path: Path) -> Table:
    """Return the table in a file.

    Raises:
        RefusedTable: If the file cannot be read or is no valid table.
    """
    try:
        return parse_table(read_object(path))
    except ValueError as error:
        raise RefusedTable(f"{path} is rejected: {error}") from error


def parse_table(data: Mapping[str, Any]) -> Table:
    """Return the table in a JSON object.

    Raises:
        ValueError: If the object is no valid table. The message names the field, its value and what is allowed.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {data.get('schema')!r:.60}: it must be {SCHEMA!r}")
    if (version := data.get("version")) != VERSION:
        raise ValueError(f"version is {version!r:.60}: this ringattn reads only version {VERSION}")
    file: _File = convert_json(_File, data, "table")
    release = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", file.triton)
    if release is None:
        raise ValueError(f"triton is {file.triton!r:.60}: it must be a version such as 3.7")
    entries = tuple(_parse_entry(row, f"entries[{i}]") for i, row in enumerate(file.entries))
    if ARCH_NAME.fullmatch(file.gpu) and (
        file.gpu != f"sm_{file.arch}" or not all(entry.estimated for entry in entries)
    ):
        raise ValueError(
            f"gpu is {file.gpu} and arch {file.arch}: a table without a GPU's name must have only estimates of its arch"
        )
    limit = shared_limit(file.arch)
    for i, entry in enumerate(entries):
        if (least := min_shared_bytes(entry.point, entry.tile)) > limit:
            raise ValueError(
                f"entries[{i}].tile needs at least {least:,} bytes of shared memory, but a block has only {limit:,}"
            )
    if len({entry.point for entry in entries}) < len(entries):
        raise ValueError("two entries have the same kernel, dtype, shape and mask")
    return Table(file.gpu, file.arch, (int(release[1]), int(release[2])), entries)


def table_to_json(table: Table) -> dict[str, Any]:
    """Return a table as the JSON object that :func:`parse_table` reads."""
    entries = [_entry_as_json(entry) for entry in sorted(table.entries, key=lambda entry: entry.point)]
    version = ".".join(map(str, table.triton))
    return _File(SCHEMA, VERSION, table.gpu, table.arch, version, entries)._asdict()


def _entry_as_json(entry: TableEntry) -> dict[str, Any]:
    data = {field.name: getattr(entry, field.name) for field in fields(TableEntry) if field.name != "point"}
    data |= {"tile": tile_fields(entry.tile), "options": tuned_options(entry.tile)}
    data |= {"versions": dict(entry.versions), "clocks": dict(entry.clocks)}
    return entry.point._asdict() | data


def _parse_entry(row: dict[str, Any], where: str) -> TableEntry:
    point = {name: row[name] for name in TuningPoint._fields if name in row}
    rest = {name: value for name, value in row.items() if name not in (*point, "options")}
    options = convert_json(dict[str, Any], row.get("options", {}), f"{where}.options")
    tile = attach_options(convert_json(Tile, row.get("tile"), f"{where}.tile"), options)
    entry: TableEntry = convert_json(TableEntry, rest | {"point": point, "tile": tile}, where)
    return entry


CONFIG_DIR = "RINGATTN_CONFIG_DIR"
KERNELS_FOLDER = Path(__file__).parent
# `tuned/` in this folder is for tables of vendors; ringattn's own tables are in `autotune/tables`
PACKAGE_TABLE_FOLDERS = (KERNELS_FOLDER / "tuned", KERNELS_FOLDER.parent / "autotune" / "tables")

Version = tuple[int, int]
Key = tuple[str, torch.dtype, int, int, int, bool]  # kernel, dtype, D, Dv, query heads per key head, no mask
Lengths = tuple[tuple[float, ...], tuple[Tile | None, ...]]  # lengths at which the next tile begins, and the tiles

BACKWARD_CHOICE = "backward"
"""Kernel name of the keys for the choice of a backward: the single pass's tile, or None if two passes are faster."""

TWO_PASSES, DETERMINISTIC_PASS = ("dq", "dkdv"), "single_pass_deterministic"


def triton_version() -> Version:
    """Return major and minor version, such as (3, 7); tables depend on them because code generation does."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def user_table_folder() -> Path | None:
    """Return the user's cache folder, ``$XDG_CACHE_HOME/ringattn/tiles`` by the XDG rules; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "ringattn", "tiles")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "ringattn", "tiles") if os.path.isabs(home) else None


class TunedTiles:
    """Tiles of several tables. If several tables have a key, the first table decides."""

    def __init__(self, tables: Iterable[Table] = (), *, estimated: bool = False) -> None:
        self._lengths: dict[Key, Lengths] = {}
        for table in tables:
            self._lengths = _by_length(table.entries, estimated) | self._lengths

    def tile(self, key: Key, length: int) -> Tile | None:
        """Return the tile for the tuned length nearest to ``length`` by ratio, or None if ``key`` was not tuned."""
        entries = self._lengths.get(key)
        return None if entries is None else entries[1][bisect_left(entries[0], length)]


def _by_length(entries: Iterable[TableEntry], estimated: bool) -> dict[Key, Lengths]:
    """Return the usable tiles of every key by length, and the lengths at which the next tile begins."""
    grouped: dict[Key, dict[int, Tile | None]] = {}
    usable = [(entry.point, entry.tile) for entry in entries if is_usable_entry(entry, estimated)]
    for point, tile in [*usable, *_backward_choices(entries)]:
        key = (point.kernel, DTYPES[point.dtype], point.head_dim, point.head_dim_v, point.group, point.mask == "full")
        grouped.setdefault(key, {})[point.length] = tile
    result = {}
    for key, tiles in grouped.items():
        lengths = sorted(tiles)
        edges = tuple(math.sqrt(a * b) for a, b in pairwise(lengths))
        result[key] = edges, tuple(tiles[length] for length in lengths)
    return result


def is_usable_entry(entry: TableEntry, estimated: bool) -> bool:
    """Return True if an entry was measured, or if ``estimated`` is set and the entry has no tuned options."""
    return not entry.estimated or (estimated and not tuned_options(entry.tile))


def _backward_choices(entries: Iterable[TableEntry]) -> Iterator[tuple[TuningPoint, Tile | None]]:
    """Yield the tile of the deterministic single pass for each point, or None if two passes were not slower.

    Points where a pass was not measured are skipped. A mode without a fixed order is never chosen by a table.
    """
    measured = {entry.point: entry for entry in entries if entry.seconds is not None}
    for point, entry in measured.items():
        passes = [measured.get(point._replace(kernel=kernel)) for kernel in TWO_PASSES]
        if point.kernel == DETERMINISTIC_PASS and None not in passes:
            two_passes = sum(entry.seconds or 0.0 for entry in passes if entry is not None)
            is_faster = (entry.seconds or 0.0) * (1 + (entry.spread or 0.0)) < two_passes
            yield point._replace(kernel=BACKWARD_CHOICE), entry.tile if is_faster else None


_LOADING = threading.Lock()


@lru_cache(maxsize=64)
def _load_tuned_tiles(gpu: GpuSpec, config_dir: str | None, estimated: bool) -> TunedTiles:
    if config_dir and not os.path.isdir(config_dir):  # the environment variable must not break a launch
        _warn(f"{CONFIG_DIR} is {config_dir!r}: there is no such folder. `ringattn tune --save-dir` creates it.")
    return TunedTiles(find_tables(gpu, config_dir, estimated=estimated), estimated=estimated)


def find_tables(gpu: GpuSpec, config_dir: str | None, *, estimated: bool = False) -> list[Table]:
    """Return the tables for a GPU and this version of Triton; earlier tables have priority.

    Args:
        gpu: The GPU.
        config_dir: Folder to search instead of the user's cache, before the folders of the package.
        estimated: Also return tables that were created for a compute capability, without a GPU.
    """
    folders = table_folders(config_dir)
    names = dict.fromkeys([gpu.name, *([f"sm_{gpu.arch}"] if estimated else [])])
    return [table for name in names for table in _find_serving_tables(name, gpu, folders)]


def table_folders(config_dir: str | None) -> list[Path]:
    """Return the folders to search in order: ``config_dir`` or the user's cache, then those of the package."""
    user = Path(config_dir) if config_dir else user_table_folder()
    return [*([user] if user is not None else []), *PACKAGE_TABLE_FOLDERS]


def clear_table_cache() -> None:
    """Clear the cache, so that the next look-up reads newly written tables."""
    _load_tuned_tiles.cache_clear()


def load_tuned_tiles(
    gpu: GpuSpec, config_dir: str | os.PathLike[str] | None = None, *, estimated: bool = False
) -> TunedTiles:
    """Return the tuned tiles for a GPU and this version of Triton.

    Args:
        gpu: The GPU.
        config_dir: Folder to search before the package's. Default: ``$RINGATTN_CONFIG_DIR``, else the user's cache.
        estimated: Also use entries that were never measured.

    Raises:
        ValueError: If ``config_dir`` is no folder.
    """
    folder = resolve_config_dir(config_dir)
    with _LOADING:  # virtual ranks are threads, and each warning should appear once
        return _load_tuned_tiles(gpu, folder, estimated)


def resolve_config_dir(config_dir: str | os.PathLike[str] | None) -> str | None:
    """Return ``config_dir``, else ``$RINGATTN_CONFIG_DIR``, else None for the user's cache.

    Raises:
        ValueError: If ``config_dir`` is no folder. The environment variable is not checked.
    """
    if config_dir is None:
        return os.environ.get(CONFIG_DIR) or None
    if not os.path.isdir(folder := os.fspath(config_dir)):
        raise ValueError(f"config_dir is {folder!r}: there is no such folder. `ringattn tune --save-dir` creates it.")
    return folder


def _find_serving_tables(name: str, gpu: GpuSpec, folders: list[Path]) -> list[Table]:
    """Return the tuned tables for this Triton version, or with a warning those for the nearest older version.

    Invalid tables and those for another GPU are left out with a warning.

    Args:
        name: name of the GPU, or ``sm_NN`` for tables that were estimated without a GPU.
        gpu: the GPU whose compute capability a table must have.
        folders: folders to search; the result has the same order.
    """
    current = triton_version()
    found = [
        (version, path) for folder in folders for version, path in _list_versions(folder, name) if version <= current
    ]
    nearest = max((version for version, _ in found), default=current)
    paths = [path for version, path in found if version == nearest]
    tables = [table for path in paths if (table := _read_matching_table(path, name, gpu, nearest)) is not None]
    if nearest != current and tables:
        _warn(
            f"no tuned tiles for Triton {current[0]}.{current[1]} at {folders[0] / table_file_name(name, current)}: "
            f"using those for {nearest[0]}.{nearest[1]} in {paths[0]}. `ringattn tune` creates the missing table."
        )
    return tables


def _list_versions(folder: Path, name: str) -> list[tuple[Version, Path]]:
    """Return version and path of every table for a GPU in a folder, which need not exist."""
    stem = table_file_name(name, (0, 0)).removesuffix("0.0.json")
    pattern = re.compile(re.escape(stem) + r"(\d{1,3})\.(\d{1,3})\.json")
    matches = ((path, pattern.fullmatch(path.name)) for path in folder.glob(f"{stem}*"))
    return [((int(match[1]), int(match[2])), path) for path, match in matches if match]


def _read_matching_table(path: Path, name: str, gpu: GpuSpec, version: Version) -> Table | None:
    """Return the table in a file; warn and return None if it is invalid or for another GPU or version."""
    try:
        table = read_table(path)
    except RefusedTable as error:
        _warn(f"{error}. Using the built-in tiles.")
        return None
    expected = {"gpu": name, "arch": gpu.arch, "triton": version}
    for key, value in expected.items():
        if (got := getattr(table, key)) != value:
            _warn(f"{path} is rejected: its {key} is {got!r:.60}, not {value!r}. Using the built-in tiles.")
            return None
    return table


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
