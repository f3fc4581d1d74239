"""What to export, and which tiles it has: built-in ones, or those of a GPU's tuned table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...autotune.compile import ROLES, default_tile, hopper_tile
from ...kernels.attention import DELTA_BLOCK
from ...kernels.config import BACKWARDS, FORWARD_KERNELS, Tile
from ...kernels.gpu import assumed_gpu
from ...kernels.tables import KERNELS, Entry, Table, folder_of, is_offered, options_of, tables_of

BUILT_IN = "built-in default, never timed"


@dataclass(frozen=True)
class ExportConfig:
    """What to export.

    Raises:
        ValueError: what there is not; what a Hopper kernel does not take its entry says.
    """

    arch: int  # compute capability without the dot
    dtype: str = "bf16"  # one of DTYPES
    head_dim: int = 128
    head_dim_v: int = 128
    bounded: bool = False  # an interval of keys per query, which every mask is
    grouped: bool = True  # any number of query heads per key head
    role: str = "only"  # one of ROLES
    forward_kernel: str = "portable"  # one of FORWARD_KERNELS
    backward: str = "two_pass"  # one of BACKWARDS
    gpu: str | None = None  # whose table has the tiles, as the driver names it; None: built-in ones
    config_dir: Path | None = None  # where that is; None: $RINGATTN_CONFIG_DIR, else the user's cache

    def __post_init__(self) -> None:
        for what, got, known in (
            ("role", self.role, ROLES),
            ("forward_kernel", self.forward_kernel, FORWARD_KERNELS),
            ("backward", self.backward, BACKWARDS),
        ):
            if got not in known:
                raise ValueError(f"{what} is {got}: it must be one of {', '.join(known)}")
        if self.backward == "hopper" and not self.grouped:
            raise ValueError("grouped is False: backward='hopper' takes any number of query heads per key head")

    @property
    def prefix(self) -> str:
        """Of every name in C and of every file."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = ["bounded" if self.bounded else "full", *([] if self.grouped else ["mha"])]
        words += [] if self.role == "only" else [self.role]
        words += ["hopper"] if self.forward_kernel == "hopper" else []
        words += {"two_pass": [], "hopper": ["hopper_backward"]}.get(self.backward, [self.backward])
        return "_".join(["ringattn", f"sm{self.arch}", self.dtype, dims, *words])

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of what is exported."""
        return ("forward", "delta", *(("dq", "dkdv") if self.backward == "two_pass" else ("gradients",)))


Tiles = dict[str, tuple[Tile, str]]
"""By kernel: the tile, and where it comes from."""


@lru_cache
def chosen_tiles(config: ExportConfig) -> Tiles:
    """The tile of every kernel: of a table that of the longest shard, and of equals of the most heads per key head.

    Raises:
        ValueError: no such folder or table, or a head dim that has no tile.
    """
    tables: list[Table] = []
    if config.gpu is not None:
        tables = tables_of(assumed_gpu(config.arch, config.gpu), folder_of(config.config_dir))
        if not tables:
            raise ValueError(
                f"there is no table of {config.gpu}, sm_{config.arch}, for this version of Triton: `ringattn tune "
                "--save-dir DIR` makes one, and --config-dir DIR says where it is"
            )
    tiles: Tiles = {"delta": (Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1), "fixed")}
    for name in (*KERNELS, "gradients") if config.backward != "two_pass" else KERNELS:
        kernel = config.backward if name == "gradients" else name
        tuned = next((one for table in tables if (one := _tuned(table, config, kernel)) is not None), None)
        tiles[name] = (_built_in(config, kernel), BUILT_IN) if tuned is None else tuned
    return tiles


def _tuned(table: Table, config: ExportConfig, kernel: str) -> tuple[Tile, str] | None:
    """A table's tile for a kernel, and whence it is; the built-in one where it is of something not exported."""
    wanted = kernel, config.dtype, config.head_dim, config.head_dim_v
    mask = "bounded" if config.bounded else "full"
    fitting = [
        one
        for one in table.entries
        if one.point[:4] == wanted and one.point.mask == mask and is_offered(one, estimated=False)
    ]
    if not fitting:
        return None
    entry: Entry = max(fitting, key=lambda one: (one.point.length, one.point.group))
    version = ".".join(map(str, table.triton))
    origin = (
        f"table of {table.gpu}, Triton {version}, at {entry.point.length} tokens on {entry.date[:10]}: "
        f"{entry.seconds:.3g} s"
    )
    options = options_of(entry.tile)
    if kernel == "forward" and options.setdefault("forward_kernel", "portable") == config.forward_kernel:
        del options["forward_kernel"]
    if not options:
        return entry.tile, origin
    named = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return _built_in(config, kernel), f"{BUILT_IN}; the {origin}, is for {named}, which is not exported"


def _built_in(config: ExportConfig, kernel: str) -> Tile:
    widest = max(config.head_dim, config.head_dim_v)
    if kernel == "hopper":
        return hopper_tile(widest)
    if (tile := default_tile(kernel, config.arch, config.dtype, widest)) is None:
        raise ValueError(
            f"head dim {widest} has no tile for a single-pass backward that fits sm_{config.arch}; "
            "backward='two_pass' takes any"
        )
    return tile
