"""Points to tune for a model's attention on a GPU, and the candidate tiles that are worth compiling.

A candidate is a tile, optionally with fields of ``KernelConfig`` (``kernels.tables.TunedTile``). All kernels are
tried with every tile, but tile schedules only with the best few tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Any

from ..kernels import Tile
from ..kernels.checks import MAX_HEAD_DIM
from ..kernels.config import EPILOGUES, FORWARD_KERNELS, LOADS, MIN_TILE_SIDE, ORDERS, value_columns
from ..kernels.device.tile_ops import MAX_PART_WIDTH
from ..kernels.gpu import ARCHS, GpuSpec, assumed_gpu, shared_limit
from ..kernels.hopper_forward_launch import FORWARD_HEAD_DIMS, check_forward_tile
from ..kernels.tables import (
    DTYPES,
    SINGLE_PASS_KERNELS,
    TUNED_KERNELS,
    OptionValue,
    TuningPoint,
    attach_options,
    min_shared_bytes,
    tuned_options,
)
from ..kernels.tile_schedule import DEFAULT_SM_MARGIN
from .compile import DEFAULTS, KernelVariant, unsupported_option

SHORT_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class ModelShape:
    """Heads, head dims and dtype of a model's attention on one GPU.

    Raises:
        ValueError: ``heads`` is not a multiple of ``kv_heads``, or no kernel supports a head dim or the dtype.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of kv_heads, {self.kv_heads}")
        for name in ("head_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be between 1 and {MAX_HEAD_DIM}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def gpu_for_arch(name: str) -> GpuSpec:
    """Return a generic GPU of a compute capability such as ``sm_90``, for tuning without a GPU.

    Raises:
        ValueError: The compute capability is not supported.
    """
    archs = {f"sm_{arch}": arch for arch in ARCHS}
    if name not in archs:
        raise ValueError(f"arch is {name!r}: it must be one of {', '.join(archs)}")
    return assumed_gpu(archs[name])


def model_points(
    shape: ModelShape, lengths: Sequence[int], *, causal: bool, kernels: Iterable[str] = TUNED_KERNELS
) -> list[TuningPoint]:
    """Return the points of every kernel and length, with ``causal`` also those with bounds.

    A causal ring needs the points without bounds as well, because most of its hops are unmasked.

    Raises:
        ValueError: There is no length, or a length is below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"seqlen is {[*lengths]}: it must have at least one length, and all must be at least 1")
    masks = ("full", "bounded") if causal else ("full",)
    return [
        TuningPoint(kernel, shape.dtype, shape.head_dim, shape.value_dim, shape.group, mask, length)
        for kernel, mask, length in product(kernels, masks, sorted({*lengths}))
    ]


# candidates

RESIDENT_ROWS = (32, 64, 128)
"""Tile sides of the rows that a program keeps: queries of forward and dQ, keys of dK/dV."""

STREAMED_ROWS = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
FLOAT32_SIDES = (16, 32, 64)
"""Tile sides for fp32, where `tf32x3` stores every operand twice with 4 bytes per element."""

FieldValues = Mapping[str, Sequence[OptionValue | None]]
"""Values to try for each field, including the default."""

# Fields of `KernelConfig` to try besides the tile, by kernel. A new field needs a line here and in `kernels/tables.py`,
# and a line in `_accepts_options` if some tiles or points do not support all values.
CONFIG_FIELDS: dict[str, FieldValues] = {
    **{kernel: {} for kernel in TUNED_KERNELS},
    "forward": {"forward_kernel": FORWARD_KERNELS},
}
"""Fields of ``KernelConfig`` to try with every tile."""

COMMUNICATOR_MARGIN = DEFAULT_SM_MARGIN // 2
"""Multiprocessors that one communicator uses. 0 is not tried, because a ring uses the same tables."""

_SCHEDULE: FieldValues = {"order": ORDERS, "persistent": (False, True), "sm_margin": (None, COMMUNICATOR_MARGIN)}
_PACKED: FieldValues = {"pack_gqa": (False, True)}
SCHEDULE_FIELDS: dict[str, FieldValues] = {
    "forward": {**_SCHEDULE, **_PACKED, "loads": LOADS},
    "dq": {**_SCHEDULE, **_PACKED, "loads": LOADS},
    "dkdv": {**_SCHEDULE, "dkdv_splits": (1, 2, 4, 8), "dkdv_epilogue": EPILOGUES},
    **{kernel: {} for kernel in SINGLE_PASS_KERNELS},
}
"""Fields to try with the best tiles only: the order of tiles, which is not part of the main loop, and loads."""

MAX_THREAD_VALUES = 224
"""Maximum number of fp32 accumulators and scores per thread, out of 255 registers."""

MIN_THREAD_SCORES, MIN_WIDE_THREAD_SCORES = 8, 2
"""Minimum number of scores per thread; with fewer, a warp's part is smaller than one matrix instruction.

Head dims above ``MAX_PART_WIDTH`` leave room for small tiles only.
"""

TENSOR_MEMORY_ARCHS = (100, 103)
"""Compute capabilities whose accumulators are in tensor memory, not in registers."""


def tile_candidates(point: TuningPoint, arch: int) -> list[Tile]:
    """Return the candidates of a point that are worth compiling."""
    tiles = (attach_options(tile, fields) for fields in _choices(CONFIG_FIELDS[point.kernel]) for tile in _tiles(point))
    return [tile for tile in tiles if is_worth_compiling(tile, point, arch)]


def nearest_tiles(tiles: Sequence[Tile], tile: Tile, count: int) -> list[Tile]:
    """Return the ``count`` candidates without options that are nearest to ``tile``, the nearest first.

    The distance counts doublings of a side or of the warps, and stages.
    """

    def steps(other: Tile) -> float:
        sizes = [(other.block_q, tile.block_q), (other.block_k, tile.block_k), (other.num_warps, tile.num_warps)]
        return sum(abs(log2(size / own)) for size, own in sizes) + abs(other.num_stages - tile.num_stages)

    return sorted((other for other in tiles if not tuned_options(other)), key=steps)[:count]


def tile_schedules(tile: Tile, point: TuningPoint, arch: int) -> list[Tile]:
    """Return ``tile`` with every other tile schedule; empty if the tile has options, which imply a schedule."""
    if tuned_options(tile):
        return []
    others = [attach_options(tile, options) for options in _choices(SCHEDULE_FIELDS[point.kernel]) if options]
    return [other for other in others if is_worth_compiling(other, point, arch)]


def _choices(field_values: FieldValues) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values, without defaults."""
    for values in product(*field_values.values()):
        yield {name: value for name, value in zip(field_values, values, strict=True) if value != DEFAULTS[name]}


def _tiles(point: TuningPoint) -> list[Tile]:
    """Return every combination of tile sides, warps and stages that is tried for a kernel."""
    rows = (MIN_TILE_SIDE, *RESIDENT_ROWS) if is_wide(point) else RESIDENT_ROWS
    resident, streamed = (FLOAT32_SIDES, FLOAT32_SIDES) if point.dtype == "fp32" else (rows, STREAMED_ROWS)
    queries, keys = (resident, streamed) if point.kernel in ("forward", "dq") else (streamed, resident)
    return [Tile(*sizes) for sizes in product(queries, keys, WARPS, STAGES)]


def is_wide(point: TuningPoint) -> bool:
    """Return True if a head dim takes more columns than a matrix instruction has."""
    return max(point.head_dim, point.head_dim_v) > MAX_PART_WIDTH


def is_worth_compiling(tile: Tile, point: TuningPoint, arch: int) -> bool:
    """Return True if the point supports the options, the tile fits, and each thread has a reasonable share of work."""
    options = tuned_options(tile)
    if not _accepts_options(options, tile, point, arch):
        return False
    if options.get("forward_kernel") == "hopper":
        return True  # registers and shared memory are fixed by the kernel
    longest = max(min(RESIDENT_ROWS), 1 << (point.length - 1).bit_length())
    scores, threads = tile.block_q * tile.block_k, 32 * tile.num_warps
    least = MIN_WIDE_THREAD_SCORES if is_wide(point) else MIN_THREAD_SCORES
    return (
        min_shared_bytes(point, tile) <= shared_limit(arch)
        and max(tile.block_q, tile.block_k) <= longest
        and scores >= min(least * threads, longest * longest)  # a short shard cannot have a larger tile
        and (arch in TENSOR_MEMORY_ARCHS or register_values(tile, point) <= MAX_THREAD_VALUES * threads)
    )


def _accepts_options(options: Mapping[str, Any], tile: Tile, point: TuningPoint, arch: int) -> bool:
    """Return True if the point supports these options with this tile."""
    if options.get("forward_kernel") == "hopper":
        if (
            arch != 90
            or point.dtype == "fp32"
            or point.head_dim not in FORWARD_HEAD_DIMS
            or point.head_dim_v != point.head_dim
        ):
            return False
        try:
            check_forward_tile(point.head_dim, tile)
        except ValueError:
            return False
    launched = KernelVariant(
        point.kernel, arch, point.dtype, point.head_dim, point.head_dim_v, tile, grouped=point.group > 1
    )  # fmt: skip
    if unsupported_option(launched, tuple(options.items())) is not None or point.group % int(
        options.get("dkdv_splits", 1)
    ):
        return False
    if "loads" in options and len(options) > 1:  # the order of tiles matters little to loads
        return False
    return "sm_margin" not in options or bool(options.get("persistent"))


def register_values(tile: Tile, point: TuningPoint) -> int:
    """Return the number of fp32 values of a program in registers: accumulators, scores and gradients of scores."""
    scores = tile.block_q * tile.block_k
    if point.kernel == "forward":
        return tile.block_q * value_columns(tile, point.head_dim_v) + scores
    if point.kernel == "dq":
        return tile.block_q * point.head_dim + 2 * scores
    # the dQ tile of a single pass does not count, because it reuses the registers of the scores
    return tile.block_k * (point.head_dim + point.head_dim_v) + 2 * scores


def tile_text(tile: Tile) -> str:
    """Format a tile as ``128x64 8w 2s``, followed by its options, such as ``forward_kernel=hopper``."""
    options = "".join(f" {name}={value}" for name, value in tuned_options(tile).items())
    return f"{tile.block_q}x{tile.block_k} {tile.num_warps}w {tile.num_stages}s{options}"


def point_text(point: TuningPoint) -> str:
    """Format a point as ``forward bf16 D128/128 group 4 full 8192``."""
    dims = f"D{point.head_dim}/{point.head_dim_v}"
    return f"{point.kernel} {point.dtype} {dims} group {point.group} {point.mask} {point.length}"
