"""What to export, whether there is such a thing, and which tiles it has: of tuned tables where it is told of which.

Tables are looked for where a launch looks for them; without one tiles are the built-in ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ...autotune.compile import ROLES, default_tile
from ...kernels.attention import DELTA_BLOCK
from ...kernels.config import BACKWARDS, FORWARD_KERNELS, SHARED_LIMIT, Tile, single_pass_tile
from ...kernels.experimental import hopper_backward_launch, hopper_launch
from ...kernels.tables import (
    CONFIG_DIR,
    DTYPES,
    KERNELS,
    Entry,
    Gpu,
    Table,
    folder_of,
    is_offered,
    options_of,
    read,
    tables_of,
)

BUILT_IN = "built-in default, never timed"
LONGEST = 1 << 40


@dataclass(frozen=True)
class Source:
    """Where to look for tuned tiles, and for which launches: an exported kernel takes any heads and lengths.

    Raises:
        ValueError: no such group or length.
    """

    gpu: str | None = None  # as the driver names it; None: the only one that `folder` has a table for
    config_dir: Path | None = None
    group: int | None = None  # query heads per key head; None: whichever was tuned
    length: int | None = None  # tokens on one GPU, of which the nearest that was tuned; None: the longest
    estimated: bool = False  # also entries that were never measured

    def __post_init__(self) -> None:
        for flag, value in self.choices.items():
            if value < 1:
                raise ValueError(f"{flag} is {value}: it must be 1 or more")

    @property
    def folder(self) -> Path | None:
        """``config_dir``, else ``$RINGATTN_CONFIG_DIR``; None: the user's cache.

        Raises:
            ValueError: ``config_dir`` is no folder.
        """
        named = folder_of(self.config_dir)
        return None if named is None else Path(named)

    @property
    def choices(self) -> dict[str, int]:
        """By flag, which entries to take."""
        flags = {"--group": self.group, "--seqlen": self.length, "--estimated": self.estimated or None}
        return {flag: value for flag, value in flags.items() if value is not None}

    @property
    def is_asked(self) -> bool:
        """Whether a table must be there: for launches, too, the environment may name a folder without one."""
        return self.gpu is not None or self.config_dir is not None or bool(self.choices)


@dataclass(frozen=True)
class ExportConfig:
    """What to export."""

    arch: int  # compute capability without the dot
    dtype: str = "bf16"  # one of DTYPES
    head_dim: int = 128
    head_dim_v: int = 128
    bounded: bool = False  # an interval of keys per query, which every mask is
    grouped: bool = True  # any number of query heads per key head
    role: str = "only"  # one of ROLES
    source: Source = Source()
    forward_kernel: str | None = "portable"  # one of FORWARD_KERNELS; None: what the table has, else portable
    backward: str = "two_pass"  # one of BACKWARDS

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


def resolved(config: ExportConfig) -> ExportConfig:
    """The same, with the forward kernel that a tuned table has where nobody said which; checked.

    Raises:
        ValueError: what there is not.
    """
    check(config)
    tile, _ = chosen_tiles(config)["forward"]
    if config.forward_kernel is None:
        config = replace(config, forward_kernel=str(options_of(tile).get("forward_kernel", "portable")))
    if config.forward_kernel == "hopper":
        check_kind(config, "forward_kernel='hopper'", hopper_launch.HEAD_DIMS, "portable")
        hopper_launch.check_tile(config.head_dim, chosen_tiles(config)["forward"][0])
    return config


def check(config: ExportConfig) -> None:
    """Refuse what is not there: ValueError."""
    for what, got, known in (
        ("arch", config.arch, SHARED_LIMIT),
        ("dtype", config.dtype, DTYPES),
        ("role", config.role, ROLES),
        ("forward_kernel", config.forward_kernel, (None, *FORWARD_KERNELS)),
        ("backward", config.backward, BACKWARDS),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: it must be one of {', '.join(map(str, known))}")
    for what, got in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if not 2 <= got <= 256:  # the stride of heads of one element is 1, which Triton makes a constant
            raise ValueError(f"{what} is {got}: it must be 2 to 256")
    if config.backward == "hopper":
        check_kind(config, "backward='hopper'", hopper_backward_launch.HEAD_DIMS, "two_pass")
        if not config.grouped:
            raise ValueError("grouped is False: backward='hopper' takes any number of query heads per key head")


def check_kind(config: ExportConfig, hopper: str, head_dims: tuple[int, ...], other: str) -> None:
    """Refuse what a Hopper kernel is not written for, in words that say which kernel is: ValueError."""
    for what, got, known in (
        ("arch", f"sm_{config.arch}", ("sm_90",)),
        ("dtype", config.dtype, ("bf16", "fp16")),
        ("head_dim", config.head_dim, head_dims),
        ("head_dim_v", config.head_dim_v, (config.head_dim,)),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: {hopper} takes {', '.join(map(str, known))}; {other!r} takes any")


# tiles

Tiles = dict[str, tuple[Tile, str]]
"""By kernel: the tile, and where it comes from."""


@lru_cache
def chosen_tiles(config: ExportConfig) -> Tiles:
    """The tile of every kernel; that of a table's Hopper forward says so among its ``options_of``.

    Raises:
        ValueError: no table or folder where one was asked for, several GPUs to choose from, entries to choose from
            without a table, or a head dim that has no tile.
    """
    tables, widest = _tables(config.source, config.arch), max(config.head_dim, config.head_dim_v)
    found: Tiles = {"delta": (Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1), "fixed")}
    for kernel in KERNELS:
        built_in = default_tile(kernel, config.arch, config.dtype, widest)
        assert built_in is not None
        tuned = _tuned(tables, config, kernel)
        found[kernel] = _described(*tuned, built_in, config.forward_kernel) if tuned else (built_in, BUILT_IN)
    if config.backward != "two_pass":  # no table has Hopper's
        if tuned := _tuned(tables, config, config.backward):
            found["gradients"] = tuned[1].tile, _origin(*tuned)
        else:
            found["gradients"] = _single_pass(config, widest), BUILT_IN
    return found


def _tuned(tables: list[Table], config: ExportConfig, kernel: str) -> tuple[Table, Entry] | None:
    """The entry of the nearest length of the first table that serves; of equals that of most heads per key head."""
    source, mask = config.source, "bounded" if config.bounded else "full"
    wanted, length = (kernel, config.dtype, config.head_dim, config.head_dim_v), config.source.length or LONGEST
    for table in tables:
        fitting = [
            one
            for one in table.entries
            if one.point[:4] == wanted and one.point.mask == mask and source.group in (None, one.point.group)
            and is_offered(one, source.estimated)
        ]  # fmt: skip
        if fitting:
            ratios = {id(one): max(one.point.length / length, length / one.point.length) for one in fitting}
            return table, min(fitting, key=lambda one: (ratios[id(one)], -one.point.group))
    return None


def _single_pass(config: ExportConfig, head_dim: int) -> Tile:
    if config.backward == "hopper":
        return hopper_backward_launch.default_tile(head_dim)
    if (tile := default_tile(config.backward, config.arch, config.dtype, head_dim)) is None:
        sizes = (32, 64, 128, 256)
        most = max(size for size in sizes if single_pass_tile(config.arch, DTYPES[config.dtype], size))
        raise ValueError(
            f"head dim {head_dim} has no tile for a single-pass backward that fits sm_{config.arch}: it takes up to "
            f"{most}; backward='two_pass' takes any"
        )
    return tile


def _tables(source: Source, arch: int) -> list[Table]:
    """Those that serve, the one to ask first first; none where built-in tiles do.

    Raises:
        ValueError: there is none and one was asked for, or nobody says of which GPU.
    """
    folder = source.folder
    if folder is None and source.gpu is None:
        if source.choices:
            flag, value = next(iter(source.choices.items()))
            raise ValueError(
                f"{flag} is {value}: it chooses among the entries of a tuned table: it takes --gpu NAME, --config-dir "
                f"DIR or {CONFIG_DIR} beside it"
            )
        return []
    where = f"{'config_dir' if source.config_dir else CONFIG_DIR} is {str(folder)!r}"
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{where}: there is no such folder; `ringattn tune --save-dir` makes it")
    name = source.gpu
    if name is None and folder is not None:
        names = {table.gpu for table in map(read, sorted(folder.glob("*_triton-*.json"))) if table.arch == arch}
        if len(names) > 1:
            raise ValueError(f"{where}: it has tables of {', '.join(sorted(names))}: --gpu says which")
        if not names and source.is_asked:
            raise ValueError(f"{where}: it has no table for sm_{arch}")
        name = next(iter(names), None)
    if name is None:
        return []
    found = tables_of(Gpu(name, arch), str(folder) if folder else None, estimated=source.estimated)
    if not found and source.is_asked:
        raise ValueError(
            f"there is no table of {name}, sm_{arch}, for this version of Triton: `ringattn tune --save-dir DIR` makes "
            "one, and --config-dir DIR says where it is"
        )
    return found


def _described(table: Table, entry: Entry, built_in: Tile, forward_kernel: str | None) -> tuple[Tile, str]:
    """An entry's tile; the built-in one where it belongs to another kernel, or to one that is not exported."""
    origin, options = _origin(table, entry), options_of(entry.tile)
    kernel = options.pop("forward_kernel", "portable")
    if options:
        named = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return built_in, f"{BUILT_IN}; the {origin}, is for {named}, which is not exported"
    if entry.point.kernel == "forward" and forward_kernel not in (None, kernel):
        return built_in, f"{BUILT_IN}; the {origin}, is for forward_kernel={kernel!r}, this is {forward_kernel!r}"
    return entry.tile, origin


def _origin(table: Table, entry: Entry) -> str:
    version = ".".join(map(str, table.triton))
    how = "estimated, never timed" if entry.estimated else f"{entry.seconds:.3g} s"
    return f"table of {table.gpu}, Triton {version}, at {entry.point.length} tokens on {entry.date[:10]}: {how}"
