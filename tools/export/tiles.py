"""Which tiles an export has, and whence: of tuned tables where it is told of which, else the built-in ones.

Tables are looked for where a launch looks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...autotune.inspect.variant import DTYPES
from ...kernels import tables as tuned_tables
from ...kernels.attention import DELTA_BLOCK
from ...kernels.config import Tile, config_for, single_pass_tile
from ...kernels.experimental import hopper_backward_launch
from ...kernels.tables import (
    CONFIG_DIR,
    KERNELS,
    Entry,
    Gpu,
    Point,
    RefusedTable,
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
    def folder_in_words(self) -> str:
        """And who named it."""
        return f"{'config_dir' if self.config_dir else CONFIG_DIR} is {str(self.folder)!r}"

    @property
    def choices(self) -> dict[str, int]:
        """By flag, what was said of which entries to take."""
        said = {"--group": self.group, "--seqlen": self.length, "--estimated": self.estimated or None}
        return {flag: value for flag, value in said.items() if value is not None}

    @property
    def is_asked(self) -> bool:
        """Whether a table must be there: for launches, too, the environment may name a folder without one."""
        return self.gpu is not None or self.config_dir is not None or bool(self.choices)


UNASKED = Source()
"""Built-in tiles, but for a folder that the environment names."""

Tiles = dict[str, tuple[Tile, str]]
"""By kernel: the tile, and where it comes from."""


def tiles_of(
    source: Source,
    arch: int,
    dtype: str,
    head_dims: tuple[int, int],
    *,
    bounded: bool,
    forward_kernel: str | None = None,
    backward: str = "two_pass",
) -> Tiles:
    """The tile of every kernel; that of a table's Hopper forward says so among its ``options_of``.

    Raises:
        ValueError: no table or folder where one was asked for, several GPUs to choose from, entries to choose from
            without a table, or a head dim that has no tile.
    """
    config = config_for(arch, DTYPES[dtype], max(head_dims))
    tables, mask = _tables(source, arch), "bounded" if bounded else "full"
    found: Tiles = {"delta": (Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1), "fixed")}
    for kernel in KERNELS:
        built_in: Tile = getattr(config, kernel)
        tuned = _tuned(tables, source, (kernel, dtype, *head_dims), mask)
        found[kernel] = _told(*tuned, built_in, forward_kernel) if tuned else (built_in, BUILT_IN)
    if backward != "two_pass":  # no table has Hopper's
        if tuned := _tuned(tables, source, (backward, dtype, *head_dims), mask):
            found["gradients"] = tuned[1].tile, _whence(*tuned)
        else:
            found["gradients"] = _single_pass(backward, arch, dtype, max(head_dims)), BUILT_IN
    return found


def _tuned(
    tables: list[Table], source: Source, kernel: tuple[str, str, int, int], mask: str
) -> tuple[Table, Entry] | None:
    """The entry that serves a kernel, dtype and head dims, of the first table that has one; None where none has."""

    def serves(point: Point) -> bool:
        return point[:4] == kernel and point.mask == mask and source.group in (None, point.group)

    for table in tables:
        fitting = [one for one in table.entries if serves(one.point) and is_offered(one, source.estimated)]
        if fitting:
            return table, _nearest(fitting, source.length or LONGEST)
    return None


def _single_pass(backward: str, arch: int, dtype: str, head_dim: int) -> Tile:
    if backward == "hopper":
        return hopper_backward_launch.default_tile(head_dim)
    if (tile := single_pass_tile(arch, DTYPES[dtype], head_dim)) is None:
        most = max(size for size in (32, 64, 128, 256) if single_pass_tile(arch, DTYPES[dtype], size))
        raise ValueError(
            f"head dim {head_dim} has no tile for a single-pass backward that fits sm_{arch}: it takes up to {most}; "
            "backward='two_pass' takes any"
        )
    return tile


def _tables(source: Source, arch: int) -> list[Table]:
    """Those that serve, the one to ask first first; none where built-in tiles do.

    Raises:
        ValueError: there is none and one was asked for, or nobody says of which GPU.
    """
    folder = source.folder
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{source.folder_in_words}: there is no such folder; `ringattn tune --save-dir` makes it")
    if (name := source.gpu or _only_gpu(source, arch)) is None:
        return []
    found = tables_of(Gpu(name, arch), str(folder) if folder else None, estimated=source.estimated)
    if not found and source.is_asked:
        raise ValueError(
            f"there is no table of {name}, sm_{arch}, for this version of Triton{others_of(folder, arch)}: "
            "`ringattn tune --save-dir DIR` makes one, and --config-dir DIR says where it is"
        )
    return found


def others_of(folder: Path | None, arch: int) -> str:
    """In words, which tables of such GPUs there are, and where."""
    found = []
    for place in dict.fromkeys([folder or tuned_tables.user_folder(), *tuned_tables.PACKAGE]):
        for path in sorted(place.glob("*_triton-*.json")) if place is not None else ():
            try:
                table = read(path)
            except RefusedTable:  # one that is asked for says why
                continue
            if table.arch == arch:
                guessed = ", never timed" if all(one.estimated for one in table.entries) else ""
                found.append(f"{table.gpu} (Triton {'.'.join(map(str, table.triton))}{guessed}, {path.parent})")
    return f"; of sm_{arch} there are {', '.join(found)}" if found else f", and none of any sm_{arch}"


def _only_gpu(source: Source, arch: int) -> str | None:
    """The GPU that a folder has tables for; None where there is none and none was asked for.

    Raises:
        ValueError: several, none that was asked for, or no folder to choose entries from.
    """
    if source.folder is None:
        if not source.choices:
            return None
        flag, value = next(iter(source.choices.items()))
        raise ValueError(
            f"{flag} is {value}: it chooses among the entries of a tuned table: it takes --gpu NAME, --config-dir DIR "
            f"or {CONFIG_DIR} beside it"
        )
    names = set()
    for path in source.folder.glob("*_triton-*.json"):
        try:
            table = read(path)
        except RefusedTable as error:
            raise ValueError(str(error)) from None
        if table.arch == arch:
            names.add(table.gpu)
    if len(names) > 1:
        raise ValueError(f"{source.folder_in_words}: it has tables of {', '.join(sorted(names))}: --gpu says which")
    if not names and source.is_asked:
        raise ValueError(f"{source.folder_in_words}: it has no table for sm_{arch}")
    return next(iter(names), None)


def _nearest(entries: list[Entry], length: int) -> Entry:
    """By ratio of lengths; of equals the one with most query heads per key head."""
    return min(
        entries,
        key=lambda entry: (max(entry.point.length / length, length / entry.point.length), -entry.point.group),
    )


def _told(table: Table, entry: Entry, built_in: Tile, forward_kernel: str | None) -> tuple[Tile, str]:
    """An entry's tile; the built-in one where it belongs to another kernel, or to one that is not exported."""
    told, options = _whence(table, entry), options_of(entry.tile)
    kernel = options.pop("forward_kernel", "portable")
    if options:
        named = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return built_in, f"{BUILT_IN}; the {told}, is for {named}, which is not exported"
    if entry.point.kernel == "forward" and forward_kernel not in (None, kernel):
        return built_in, f"{BUILT_IN}; the {told}, is for forward_kernel={kernel!r}, this is {forward_kernel!r}"
    return entry.tile, told


def _whence(table: Table, entry: Entry) -> str:
    version = ".".join(map(str, table.triton))
    how = "estimated, never timed" if entry.estimated else f"{entry.seconds:.3g} s"
    return f"table of {table.gpu}, Triton {version}, at {entry.point.length} tokens on {entry.date[:10]}: {how}"
