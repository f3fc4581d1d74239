"""The tiles that may be tried at a point, and why the others are not: pure, and fast enough to list."""

from __future__ import annotations

from itertools import product

from ..kernels import Tile
from ..kernels.tables import Point, least_shared, shared_limit

KEPT = (32, 64, 128)
"""Rows that a program keeps: queries of forward and dQ, keys of dK/dV. What it streams is loaded once per so many."""

STREAMED = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
FLOAT32_SIDES = (16, 32, 64)
"""`tf32x3` holds every operand twice, in 4-byte elements."""

MOST_VALUES = 224
"""fp32 values of accumulators and scores per thread, of its 255 registers."""

LEAST_VALUES = 8
"""Scores per thread: with fewer a warp's part is smaller than one matrix instruction."""

TENSOR_MEMORY = (100, 103)
"""Compute capabilities whose accumulators do not lie in registers."""


def space(point: Point, arch: int) -> list[Tile]:
    """The tiles worth compiling."""
    return [tile for tile in grid(point) if why_not(tile, point, arch) is None]


def grid(point: Point) -> list[Tile]:
    """All combinations, whether they fit or not."""
    small = point.dtype == "fp32"
    kept, streamed = (FLOAT32_SIDES, FLOAT32_SIDES) if small else (KEPT, STREAMED)
    queries, keys = (streamed, kept) if point.kernel == "dkdv" else (kept, streamed)
    return [Tile(*sizes) for sizes in product(queries, keys, WARPS, STAGES)]


def why_not(tile: Tile, point: Point, arch: int) -> str | None:
    """What is wrong with a tile as far as arithmetic tells; None where it is worth compiling."""
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


def values_kept(tile: Tile, point: Point) -> int:
    """fp32 values of a program: accumulators, and the scores of one step (in the backward their gradient too)."""
    scores = tile.block_q * tile.block_k
    if point.kernel == "forward":
        return tile.block_q * point.head_dim_v + scores
    if point.kernel == "dq":
        return tile.block_q * point.head_dim + 2 * scores
    return tile.block_k * (point.head_dim + point.head_dim_v) + 2 * scores
