"""Tile schedule of a launch: heads per L2 group, number of persistent programs, and splits of dK/dV.

``device.tiles.tile_placement`` computes the same order in the kernel::

    order="heads"                     order="longest", two heads per L2 group
    head 0: tiles 0 1 2 3             heads 0 and 1: tiles 0 0 1 1 2 2 3 3
    head 1: tiles 0 1 2 3             heads 2 and 3: tiles 0 0 1 1 2 2 3 3
"""

from __future__ import annotations

from torch import Tensor

from .config import KernelConfig, Tile
from .device.tiles import LaunchShape, TileOrder
from .gpu import REGISTERS, gpu_or_interpreter, gpu_specs
from .launch import grid_size

DEFAULT_SM_MARGIN = 16
"""Multiprocessors that a persistent kernel leaves free by default: two transfers of 8 blocks each, because the rings
inside and between nodes run concurrently."""

MAX_THREAD_REGISTERS = 256
"""Registers per thread that are assumed for a persistent kernel; these kernels use nearly all of them."""

SPLIT_EFFICIENCY_SHARE = 0.85
"""Share of the best efficiency at which a smaller number of splits is preferred (FlashAttention-2's rule)."""

FULL_GPU_SHARE = 0.8
"""Programs per multiprocessor from which dK/dV is not split, because the parts cost more than idle multiprocessors."""


def heads_per_l2_group(
    heads: int, group: int, streamed_rows: int, row_bytes: int, rows_are_keys: bool, l2_bytes: int
) -> int:
    """Return how many heads the order "longest" interleaves: those whose streamed operand fits into half of L2.

    The other half of L2 is for the tiles that stay and the results. Query heads of one key head read the same K and V,
    so they are never separated.

    Args:
        heads: Heads of all batch rows.
        group: Query heads per key head; in a split dK/dV, per part.
        streamed_rows: Rows that every program loops over.
        row_bytes: Bytes of one such row.
        rows_are_keys: True if tiles are keys, as in dK/dV.
        l2_bytes: Size of the L2 cache.
    """
    # In dK/dV one program loops over all query heads of its part of a group, and no other program reads them.
    readers, shared = (1, group) if rows_are_keys else (group, 1)
    groups = max(l2_bytes // 2 // max(shared * streamed_rows * row_bytes, 1), 1)
    return max(min(groups * readers, heads), 1)


def choose_splits(count: int, group: int, multiprocessors: int) -> int:
    """Choose the number of dK/dV splits: a divisor of ``group``, or 1 if ``count`` programs nearly fill the GPU.

    The result is the smallest divisor whose use of the multiprocessors is at least ``SPLIT_EFFICIENCY_SHARE`` of the
    best, with one program per multiprocessor at a time. ``count`` is tiles x batch rows x key heads.
    """
    if count == 0 or count >= FULL_GPU_SHARE * multiprocessors:
        return 1
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    waves = {parts: -(-count * parts // multiprocessors) for parts in divisors}
    used = {parts: count * parts / (waves[parts] * multiprocessors) for parts in divisors}
    return next(parts for parts in divisors if used[parts] >= SPLIT_EFFICIENCY_SHARE * max(used.values()))


def resolve_sm_margin(sm_margin: int | None, multiprocessors: int) -> int:
    """Return how many multiprocessors a persistent kernel leaves free; raise ValueError if it would be all of them."""
    if sm_margin is None:
        return min(DEFAULT_SM_MARGIN, multiprocessors // 2)
    if sm_margin >= multiprocessors:
        raise ValueError(
            f"config.sm_margin is {sm_margin}: this GPU has {multiprocessors} multiprocessors, and the kernel needs at "
            "least one of them"
        )
    return sm_margin


def packed_shape(config: KernelConfig | None, shape: LaunchShape) -> LaunchShape:
    """Return the shape of a forward or dQ launch, packed if ``config.pack_gqa`` is set."""
    if config is None or not config.pack_gqa or shape.group == 1:
        return shape
    return shape._replace(heads=shape.heads // shape.group, group=1, packed=shape.group)


def resolve_splits(config: KernelConfig | None, q: Tensor, k: Tensor, block_k: int) -> int:
    """Return the number of dK/dV splits that the config requests, with "auto" resolved; 1 for no split."""
    requested = 1 if config is None else config.dkdv_splits
    if isinstance(requested, int):
        return requested
    group, gpu = q.shape[2] // max(k.shape[2], 1), gpu_specs(k.device)
    if gpu is None or group == 1:
        return 1
    return choose_splits(grid_size(k.shape[1], block_k, k), group, gpu.multiprocessors)


def split_shape(shape: LaunchShape, splits: int) -> LaunchShape:
    """Return the shape of a dK/dV launch with ``splits`` programs per key head."""
    if splits == 1:
        return shape
    return shape._replace(heads=shape.heads * splits, group=shape.group // splits, splits=splits)


def tile_schedule(
    config: KernelConfig | None,
    shape: LaunchShape,
    tile: Tile,
    streamed: tuple[Tensor, ...],
    *,
    rows_are_keys: bool = False,
) -> tuple[int, LaunchShape]:
    """Return the grid of a launch, and its shape with the order of tiles.

    ``streamed`` holds the tensors that the programs loop over: K and V, or Q and dO in dK/dV.
    """
    block = tile.block_k if rows_are_keys else tile.block_q
    length, heads = streamed[0].shape[1], streamed[0].shape[0] * shape.heads
    count = -(-shape.rows * (shape.packed or 1) // block) * heads
    if config is None or count == 0 or (config.order == "heads" and not config.persistent):
        return count, shape
    gpu, l2_group = gpu_or_interpreter(streamed[0].device), None
    if config.order == "longest":
        row_bytes = sum(x.shape[3] * x.element_size() for x in streamed)
        l2_group = heads_per_l2_group(heads, shape.group, length, row_bytes, rows_are_keys, gpu.l2_bytes)
    order = TileOrder(l2_group, None if l2_group is None else heads, count if config.persistent else None)
    if not config.persistent:
        return count, shape._replace(order=order)
    margin = resolve_sm_margin(config.sm_margin, gpu.multiprocessors)
    # Assume the maximum of registers per thread. If a kernel uses fewer, the rest is room for a transfer.
    programs_per_sm = max(REGISTERS // (MAX_THREAD_REGISTERS * 32 * tile.num_warps), 1)
    return min(count, (gpu.multiprocessors - margin) * programs_per_sm), shape._replace(order=order)
