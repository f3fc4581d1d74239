"""What is tuned, a model's attention on a GPU, and the candidates that are worth compiling for it: pure, and fast.

A candidate is a tile, or a tile with fields of ``KernelConfig`` that are chosen with it (``kernels.tables.Chosen``).
Which kernel, is tried with every tile; in what order programs take its tiles, with the best few alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Any

from ..kernels import Tile
from ..kernels.config import EPILOGUES, FORWARD_KERNELS, ORDERS
from ..kernels.gpu import ARCHS, GpuSpec, assumed_gpu, shared_limit
from ..kernels.hopper_launch import HEAD_DIMS, check_tile
from ..kernels.order import MARGIN
from ..kernels.tables import (
    DTYPES,
    SINGLE_PASS,
    TUNED,
    Option,
    Point,
    least_shared,
    options_of,
    with_options,
)
from .compile import DEFAULTS, Variant, lacking

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Shape:
    """The attention of a model, as one GPU computes it.

    Raises:
        ValueError: heads that are not a multiple of the key heads, a head dim or dtype that no kernel has.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of the {self.kv_heads} heads of keys")
        for name in ("head_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 to 256")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def gpu_for_arch(name: str) -> GpuSpec:
    """Return the GPU that a table is for which is made without one: any of a compute capability such as ``sm_90``.

    Raises:
        ValueError: not the name of a supported compute capability.
    """
    known = {f"sm_{arch}": arch for arch in ARCHS}
    if name not in known:
        raise ValueError(f"arch is {name!r}: it must be one of {', '.join(known)}")
    return assumed_gpu(known[name])


def points_of(shape: Shape, lengths: Sequence[int], *, causal: bool, kernels: Iterable[str] = TUNED) -> list[Point]:
    """Every kernel at every length; with ``causal`` also with bounds: most hops of a causal ring have none.

    Raises:
        ValueError: no length, or one that is not positive.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"seqlen is {[*lengths]}: it takes at least one length, and each at least 1")
    masks = ("full", "bounded") if causal else ("full",)
    return [
        Point(kernel, shape.dtype, shape.head_dim, shape.value_dim, shape.group, mask, length)
        for kernel, mask, length in product(kernels, masks, sorted({*lengths}))
    ]


# candidates

KEPT = (32, 64, 128)
"""Rows that a program keeps: queries of forward and dQ, keys of dK/dV. What it streams is loaded once per so many."""

STREAMED = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
FLOAT32_SIDES = (16, 32, 64)
"""`tf32x3` holds every operand twice, in 4-byte elements."""

Fields = Mapping[str, Sequence[Option | None]]
"""Values by name, the default among them."""

# What is tried beside the four numbers of a tile, by kernel. Another field is one line here and one in
# `kernels/tables.py`; where not every tile or point takes its values, a line in `_takes`.
CONFIG_FIELDS: dict[str, Fields] = {**{kernel: {} for kernel in TUNED}, "forward": {"forward_kernel": FORWARD_KERNELS}}
"""Fields of ``KernelConfig`` that are tried with every tile."""

FEW = MARGIN // 2
"""What one communicator of a ring takes; never none, since a ring launches by the same tables."""

_SCHEDULE: Fields = {"order": ORDERS, "persistent": (False, True), "sm_margin": (None, FEW)}
_PACKED: Fields = {"pack_gqa": (False, True)}
SCHEDULE_FIELDS: dict[str, Fields] = {
    "forward": {**_SCHEDULE, **_PACKED},
    "dq": {**_SCHEDULE, **_PACKED},
    "dkdv": {**_SCHEDULE, "dkdv_splits": (1, 2, 4, 8), "dkdv_epilogue": EPILOGUES},
    **{kernel: {} for kernel in SINGLE_PASS},
}
"""Those that are tried with the best tiles alone: they change when a tile is taken, not what its loop does."""

MOST_VALUES = 224
"""fp32 values of accumulators and scores per thread, of its 255 registers."""

LEAST_VALUES = 8
"""Scores per thread: with fewer a warp's part is smaller than one matrix instruction."""

TENSOR_MEMORY = (100, 103)
"""Compute capabilities whose accumulators do not lie in registers."""


def space(point: Point, arch: int) -> list[Tile]:
    """The candidates worth compiling."""
    every = (with_options(tile, chosen) for chosen in _choices(CONFIG_FIELDS[point.kernel]) for tile in _tiles(point))
    return [tile for tile in every if is_worth_compiling(tile, point, arch)]


def nearest(tiles: Sequence[Tile], tile: Tile, count: int) -> list[Tile]:
    """Of candidates the few that are the fewest steps of the grid from a tile, without options; itself is the first.

    A step is half or twice a side or the warps, or a stage more or less.
    """

    def steps(other: Tile) -> float:
        doubled = [(other.block_q, tile.block_q), (other.block_k, tile.block_k), (other.num_warps, tile.num_warps)]
        return sum(abs(log2(one / its)) for one, its in doubled) + abs(other.num_stages - tile.num_stages)

    return sorted((other for other in tiles if not options_of(other)), key=steps)[:count]


def schedules(tile: Tile, point: Point, arch: int) -> list[Tile]:
    """A tile with every other tile schedule; none where it already has options, whose schedule is their own."""
    if options_of(tile):
        return []
    others = [with_options(tile, options) for options in _choices(SCHEDULE_FIELDS[point.kernel]) if options]
    return [other for other in others if is_worth_compiling(other, point, arch)]


def _choices(tried: Fields) -> Iterator[dict[str, Any]]:
    """Every combination of the values; what is the default is left out."""
    for values in product(*tried.values()):
        yield {name: value for name, value in zip(tried, values, strict=True) if value != DEFAULTS[name]}


def _tiles(point: Point) -> list[Tile]:
    kept, streamed = (FLOAT32_SIDES, FLOAT32_SIDES) if point.dtype == "fp32" else (KEPT, STREAMED)
    queries, keys = (kept, streamed) if point.kernel in ("forward", "dq") else (streamed, kept)
    return [Tile(*sizes) for sizes in product(queries, keys, WARPS, STAGES)]


def is_worth_compiling(tile: Tile, point: Point, arch: int) -> bool:
    """Whether arithmetic leaves a candidate: its options are of this point, it fits, and no thread has too little."""
    options = options_of(tile)
    if not _takes(options, tile, point, arch):
        return False
    if options.get("forward_kernel") == "hopper":
        return True  # its registers and shared memory are what it was written for: nothing else is to be asked
    longest = max(min(KEPT), 1 << (point.length - 1).bit_length())
    scores, threads = tile.block_q * tile.block_k, 32 * tile.num_warps
    return (
        least_shared(point, tile) <= shared_limit(arch)
        and max(tile.block_q, tile.block_k) <= longest
        and scores >= min(LEAST_VALUES * threads, longest * longest)  # a short shard has no larger tile
        and (arch in TENSOR_MEMORY or values_kept(tile, point) <= MOST_VALUES * threads)
    )


def _takes(options: Mapping[str, Any], tile: Tile, point: Point, arch: int) -> bool:
    """Whether a point takes what is not the default."""
    if options.get("forward_kernel") == "hopper":
        if arch != 90 or point.dtype == "fp32" or point.head_dim not in HEAD_DIMS or point.head_dim_v != point.head_dim:
            return False
        try:
            check_tile(point.head_dim, tile)
        except ValueError:
            return False
    launched = Variant(
        point.kernel, arch, point.dtype, point.head_dim, point.head_dim_v, tile, grouped=point.group > 1
    )  # fmt: skip
    if lacking(launched, tuple(options.items())) is not None or point.group % int(options.get("dkdv_splits", 1)):
        return False
    return "sm_margin" not in options or bool(options.get("persistent"))


def values_kept(tile: Tile, point: Point) -> int:
    """fp32 values of a program: accumulators, and the scores of one step (in the backward their gradient too)."""
    scores = tile.block_q * tile.block_k
    if point.kernel == "forward":
        return tile.block_q * point.head_dim_v + scores
    if point.kernel == "dq":
        return tile.block_q * point.head_dim + 2 * scores
    # of a single pass the tile of dQ that is added counts no more: it is made when one of the two scores is used up
    return tile.block_k * (point.head_dim + point.head_dim_v) + 2 * scores


def tile_text(tile: Tile) -> str:
    """``128x64 8w 2s``, and what else is not the default: ``128x128 8w 2s forward_kernel=hopper``."""
    more = "".join(f" {name}={value}" for name, value in options_of(tile).items())
    return f"{tile.block_q}x{tile.block_k} {tile.num_warps}w {tile.num_stages}s{more}"


def point_text(point: Point) -> str:
    """``forward bf16 D128/128 group 4 full 8192``."""
    dims = f"D{point.head_dim}/{point.head_dim_v}"
    return f"{point.kernel} {point.dtype} {dims} group {point.group} {point.mask} {point.length}"
