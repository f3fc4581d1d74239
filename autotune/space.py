"""The candidates that may be tried at a point, and why the others are not: pure, and fast enough to list.

A candidate is a tile, or a tile with fields of ``KernelConfig`` that are chosen with it (``kernels.tables.Chosen``).
Which kernel, is tried with every tile; in what order programs take its tiles, with the best few alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from math import log2
from typing import Any

from ..kernels import KernelConfig, Tile
from ..kernels.config import EPILOGUES, FORWARD_KERNELS, ORDERS
from ..kernels.experimental.hopper_launch import HEAD_DIMS, check_tile
from ..kernels.launch import COPY_ENGINE_ARCH, fills_boxes
from ..kernels.order import MARGIN
from ..kernels.tables import SINGLE_PASS, TUNED, Option, Point, least_shared, options_of, shared_limit, with_options

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
# `kernels/tables.py`; where not every tile or point takes its values, a rule in `RULES`.
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

DEFAULTS: dict[str, object] = {one.name: one.default for one in fields(KernelConfig)}
"""Of ``KernelConfig``: what a candidate need not say."""

MOST_VALUES = 224
"""fp32 values of accumulators and scores per thread, of its 255 registers."""

LEAST_VALUES = 8
"""Scores per thread: with fewer a warp's part is smaller than one matrix instruction."""

TENSOR_MEMORY = (100, 103)
"""Compute capabilities whose accumulators do not lie in registers."""


def space(point: Point, arch: int) -> list[Tile]:
    """The candidates worth compiling."""
    return [tile for tile in grid(point) if why_not(tile, point, arch) is None]


def nearest(tiles: Sequence[Tile], tile: Tile, count: int) -> list[Tile]:
    """Of candidates the few that are the fewest steps of the grid from a tile, without options; itself is the first.

    A step is half or twice a side or the warps, or a stage more or less.
    """

    def steps(other: Tile) -> float:
        doubled = [(other.block_q, tile.block_q), (other.block_k, tile.block_k), (other.num_warps, tile.num_warps)]
        return sum(abs(log2(one / its)) for one, its in doubled) + abs(other.num_stages - tile.num_stages)

    plain = [other for other in tiles if not options_of(other)]
    return sorted(plain, key=steps)[:count]


def grid(point: Point) -> list[Tile]:
    """All combinations, whether they fit or not."""
    return [with_options(tile, options) for options in _choices(CONFIG_FIELDS[point.kernel]) for tile in _sides(point)]


def schedules(tile: Tile, point: Point, arch: int) -> list[Tile]:
    """A tile with every other tile schedule; none where it already has options, whose schedule is their own."""
    if options_of(tile):
        return []
    others = [with_options(tile, options) for options in _choices(SCHEDULE_FIELDS[point.kernel]) if options]
    return [other for other in others if why_not(other, point, arch) is None]


def _choices(tried: Fields) -> Iterator[dict[str, Any]]:
    """Every combination of the values; what is the default is left out."""
    for values in product(*tried.values()):
        chosen = zip(tried, values, strict=True)
        yield {name: value for name, value in chosen if name not in DEFAULTS or value != DEFAULTS[name]}


def _sides(point: Point) -> list[Tile]:
    small = point.dtype == "fp32"
    kept, streamed = (FLOAT32_SIDES, FLOAT32_SIDES) if small else (KEPT, STREAMED)
    queries, keys = (kept, streamed) if point.kernel in ("forward", "dq") else (streamed, kept)
    return [Tile(*sizes) for sizes in product(queries, keys, WARPS, STAGES)]


def why_not(tile: Tile, point: Point, arch: int) -> str | None:
    """What is wrong with a candidate as far as arithmetic tells; None where it is worth compiling."""
    options = options_of(tile)
    for name in options:
        if name in RULES and (reason := RULES[name](tile, point, arch)) is not None:
            return reason
    if options.get("forward_kernel") == "hopper":
        return None  # its registers and shared memory are what it was written for: nothing else is to be asked
    if (shared := least_shared(point, tile)) > (limit := shared_limit(arch)):
        return f"takes at least {shared} bytes of shared memory, a block of sm_{arch} has {limit}"
    longest = max(min(KEPT), 1 << (point.length - 1).bit_length())
    if max(tile.block_q, tile.block_k) > longest:
        return f"a side is longer than {point.length} tokens"
    scores, threads = tile.block_q * tile.block_k, 32 * tile.num_warps
    if scores < min(LEAST_VALUES * threads, longest * longest):  # a short shard has no larger tile
        return f"{scores / threads:g} scores per thread, fewer than {LEAST_VALUES}"
    values = values_kept(tile, point) / threads
    if arch not in TENSOR_MEMORY and values > MOST_VALUES:
        return f"{values:g} fp32 values per thread, more than {MOST_VALUES}"
    return None


def _not_hopper(tile: Tile, point: Point, arch: int) -> str | None:
    if arch != 90 or point.dtype == "fp32" or point.head_dim not in HEAD_DIMS or point.head_dim_v != point.head_dim:
        dims = "/".join(map(str, HEAD_DIMS))
        return f"the Hopper forward takes sm_90, 16 bits and head dims {dims}: not this point"
    try:
        check_tile(point.head_dim, tile)
    except ValueError as error:
        return f"the Hopper forward does not take it: {error}"
    return None


def _not_packed(tile: Tile, point: Point, arch: int) -> str | None:
    return None if point.group > 1 else "no query heads share a key head: there is nothing to pack"


def _not_split(tile: Tile, point: Point, arch: int) -> str | None:
    splits = options_of(tile)["dkdv_splits"]
    return f"{splits} splits do not divide {point.group} query heads" if point.group % int(splits) else None


def _not_described(tile: Tile, point: Point, arch: int) -> str | None:
    if arch >= COPY_ENGINE_ARCH and fills_boxes(point.head_dim) and fills_boxes(point.head_dim_v):
        return None
    return "descriptors take compute capability 9.0 on and head dims that are powers of two: not this point"


def _no_margin(tile: Tile, point: Point, arch: int) -> str | None:
    return None if options_of(tile).get("persistent") else "sm_margin is of persistent kernels"


RULES: dict[str, Callable[[Tile, Point, int], str | None]] = {
    "forward_kernel": _not_hopper,
    "pack_gqa": _not_packed,
    "dkdv_splits": _not_split,
    "dkdv_epilogue": _not_described,
    "sm_margin": _no_margin,
}
"""By a field that does not have its default: what is wrong with a candidate."""


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
