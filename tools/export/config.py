"""Configuration of an export, and its tiles: built-in ones or those of a GPU's tuned table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...autotune.compile import ROLES, builtin_tile, hopper_tile
from ...kernels.attention import DELTA_BLOCK
from ...kernels.config import BACKWARD_MODES, FORWARD_KERNELS, Tile
from ...kernels.gpu import assumed_gpu
from ...kernels.tables import (
    KERNELS,
    Table,
    TableEntry,
    find_tables,
    is_usable_entry,
    resolve_config_dir,
    tuned_options,
)

BUILTIN_TILE_NOTE = "built-in default, never timed"


@dataclass(frozen=True)
class ExportConfig:
    """Configuration of an export.

    Raises:
        ValueError: ``role``, ``forward_kernel`` or ``backward`` is unknown, or ``backward="hopper"`` is not grouped.
            Further limits of the Hopper kernels are checked when they compile.
    """

    arch: int  # compute capability without the dot
    dtype: str = "bf16"  # one of DTYPES
    head_dim: int = 128
    head_dim_v: int = 128
    bounded: bool = False  # the kernels take an interval of keys per query, and so support every mask
    grouped: bool = True  # any number of query heads per key head
    role: str = "only"  # one of ROLES
    forward_kernel: str = "portable"  # one of FORWARD_KERNELS
    backward: str = "two_pass"  # one of BACKWARDS
    gpu: str | None = None  # GPU whose tuned table to use, by the driver's name; None: built-in tiles
    config_dir: Path | None = None  # folder of the table; None: $RINGATTN_CONFIG_DIR, else the user's cache

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("role", self.role, ROLES),
            ("forward_kernel", self.forward_kernel, FORWARD_KERNELS),
            ("backward", self.backward, BACKWARD_MODES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value}: it must be one of {', '.join(allowed)}")
        if self.backward == "hopper" and not self.grouped:
            raise ValueError("grouped is False: with backward='hopper' it must be True")

    @property
    def prefix(self) -> str:
        """Prefix of all C names and file names."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = ["bounded" if self.bounded else "full", *([] if self.grouped else ["mha"])]
        words += [] if self.role == "only" else [self.role]
        words += ["hopper"] if self.forward_kernel == "hopper" else []
        words += {"two_pass": [], "hopper": ["hopper_backward"]}.get(self.backward, [self.backward])
        return "_".join(["ringattn", f"sm{self.arch}", self.dtype, dims, *words])

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("forward", "delta", *(("dq", "dkdv") if self.backward == "two_pass" else ("gradients",)))


Tiles = dict[str, tuple[Tile, str]]
"""Tile of each kernel, and a description of its origin."""


@lru_cache
def chosen_tiles(config: ExportConfig) -> Tiles:
    """Return the tile of every kernel, and where the tile comes from.

    If a table has several entries for a kernel, the longest shard wins, then the most query heads per key head.

    Raises:
        ValueError: The folder or the table does not exist, or no tile fits the head dim.
    """
    tables: list[Table] = []
    if config.gpu is not None:
        tables = find_tables(assumed_gpu(config.arch, config.gpu), resolve_config_dir(config.config_dir))
        if not tables:
            raise ValueError(
                f"there is no table for {config.gpu}, sm_{config.arch}, and this version of Triton; create one with "
                "`ringattn tune --save-dir DIR` and pass --config-dir DIR"
            )
    tiles: Tiles = {"delta": (Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1), "fixed")}
    for name in (*KERNELS, "gradients") if config.backward != "two_pass" else KERNELS:
        kernel = config.backward if name == "gradients" else name
        tuned = next((tile for table in tables if (tile := _tuned(table, config, kernel)) is not None), None)
        tiles[name] = (_built_in(config, kernel), BUILTIN_TILE_NOTE) if tuned is None else tuned
    return tiles


def _tuned(table: Table, config: ExportConfig, kernel: str) -> tuple[Tile, str] | None:
    """Return a kernel's tile from a table and its origin; the built-in tile if the entry needs other options."""
    key = kernel, config.dtype, config.head_dim, config.head_dim_v
    mask = "bounded" if config.bounded else "full"
    matching = [
        entry
        for entry in table.entries
        if entry.point[:4] == key and entry.point.mask == mask and is_usable_entry(entry, estimated=False)
    ]
    if not matching:
        return None
    entry: TableEntry = max(matching, key=lambda entry: (entry.point.length, entry.point.group))
    version = ".".join(map(str, table.triton))
    origin = (
        f"table of {table.gpu}, Triton {version}, at {entry.point.length} tokens on {entry.date[:10]}: "
        f"{entry.seconds:.3g} s"
    )
    options = tuned_options(entry.tile)
    if kernel == "forward" and options.setdefault("forward_kernel", "portable") == config.forward_kernel:
        del options["forward_kernel"]
    if not options:
        return entry.tile, origin
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return _built_in(config, kernel), f"{BUILTIN_TILE_NOTE}; the tuned tile ({origin}) is for {text}, not exported"


def _built_in(config: ExportConfig, kernel: str) -> Tile:
    """Return the built-in tile of a kernel.

    Raises:
        ValueError: No tile fits the head dim.
    """
    head_dim = max(config.head_dim, config.head_dim_v)
    if (kernel, config.forward_kernel) == ("forward", "hopper"):
        return hopper_tile("forward_kernel", head_dim)
    if kernel == "hopper":
        return hopper_tile("backward", head_dim)
    if (tile := builtin_tile(kernel, config.arch, config.dtype, head_dim)) is None:
        raise ValueError(
            f"head dim {head_dim}: no tile for a single-pass backward fits sm_{config.arch}. "
            "backward='two_pass' supports all head dims"
        )
    return tile
