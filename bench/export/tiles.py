"""Which tiles an export has, and whence: of tuned tables where it is told of which, else the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels import hopper_backward_launch
from ...kernels.attention import DELTA_BLOCK
from ...kernels.config import Tile, config_for, single_pass_tile
from ...kernels.lookup import Gpu, tables_of
from ...kernels.tables import KERNELS, Entry, RefusedTable, Table, options_of, read
from ..inspect.variant import DTYPES

BUILT_IN = "built-in default, never timed"
LONGEST = 1 << 40


@dataclass(frozen=True)
class Source:
    """Where to look for tuned tiles, and for which launches: an exported kernel takes any heads and lengths."""

    gpu: str | None = None  # as the driver names it; None: the only one that `config_dir` has a table for
    config_dir: Path | None = None
    group: int | None = None  # query heads per key head; None: whichever was tuned
    length: int = LONGEST  # tokens on one GPU; the nearest that was tuned
    estimated: bool = False  # also entries that were never measured

    @property
    def is_asked(self) -> bool:
        return self.gpu is not None or self.config_dir is not None


BUILT_IN_TILES = Source()

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
        ValueError: no table where one was asked for, several GPUs to choose from, or a head dim that has no tile.
    """
    config = config_for(arch, DTYPES[dtype], max(head_dims))
    found: Tiles = {"delta": (Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1), "fixed")}
    if backward != "two_pass":
        found["gradients"] = _single_pass(backward, arch, dtype, max(head_dims)), BUILT_IN
    tables = list(_tables(source, arch)) if source.is_asked else []
    for kernel in KERNELS:
        found[kernel] = getattr(config, kernel), BUILT_IN
        for table in tables:
            fitting = [
                entry
                for entry in table.entries
                if entry.point[:4] == (kernel, dtype, *head_dims)
                and entry.point.mask == ("bounded" if bounded else "full")
                and source.group in (None, entry.point.group)
                and (source.estimated or not entry.estimated)
            ]
            if fitting:
                found[kernel] = _told(table, _nearest(fitting, source.length), found[kernel][0], forward_kernel)
                break
    return found


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


def _tables(source: Source, arch: int) -> Iterator[Table]:
    folder = source.config_dir
    name = source.gpu or _only_gpu(folder, arch)
    if not (found := tables_of(Gpu(name, arch), str(folder) if folder else None, estimated=source.estimated)):
        raise ValueError(
            f"there is no table of {name}, sm_{arch}, for this version of Triton: `ringattn tune --save-dir DIR` makes "
            "one, and --config-dir DIR says where it is"
        )
    yield from found


def _only_gpu(folder: Path | None, arch: int) -> str:
    """The GPU that a folder has tables for.

    Raises:
        ValueError: none, or several.
    """
    assert folder is not None
    names = set()
    for path in folder.glob("*_triton-*.json"):
        try:
            table = read(path)
        except RefusedTable as error:
            raise ValueError(str(error)) from None
        if table.arch == arch:
            names.add(table.gpu)
    if len(names) != 1:
        told = f"tables of {', '.join(sorted(names))}: --gpu says which" if names else f"no table for sm_{arch}"
        raise ValueError(f"config_dir is {str(folder)!r}: it has {told}")
    return names.pop()


def _nearest(entries: list[Entry], length: int) -> Entry:
    """By ratio of lengths; of equals the one with most query heads per key head."""
    return min(
        entries,
        key=lambda entry: (max(entry.point.length / length, length / entry.point.length), -entry.point.group),
    )


def _told(table: Table, entry: Entry, built_in: Tile, forward_kernel: str | None) -> tuple[Tile, str]:
    """An entry's tile; the built-in one where it belongs to another kernel, or to one that is not exported."""
    version = ".".join(map(str, table.triton))
    how = "estimated, never timed" if entry.estimated else f"{entry.seconds:.3g} s"
    told = f"table of {table.gpu}, Triton {version}, at {entry.point.length} tokens on {entry.date[:10]}: {how}"
    options = options_of(entry.tile)
    kernel = options.pop("forward_kernel", "portable")
    if options:
        named = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return built_in, f"{BUILT_IN}; the {told}, is for {named}, which is not exported"
    if entry.point.kernel == "forward" and forward_kernel not in (None, kernel):
        return built_in, f"{BUILT_IN}; the {told}, is for forward_kernel={kernel!r}, this is {forward_kernel!r}"
    return entry.tile, told
