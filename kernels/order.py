"""The tile schedule of a launch: how many heads come together, how many programs there are, how dK/dV is split.

The jit side is ``tiles.placement``.
"""

from __future__ import annotations

import torch

from .config import KernelConfig, Tile
from .device.tiles import Order, Shape
from .gpu import REGISTERS, gpu_or_interpreter
from .launch import programs

MARGIN = 16
"""Multiprocessors that a persistent kernel leaves free where nobody says: those of two transfers of 8 blocks, as a ring
inside the nodes and one between them run side by side."""

MOST_REGISTERS = 256
"""Per thread, as they are given to warps: what these kernels take, or nearly."""

GOOD_ENOUGH = 0.85
"""Of the best efficiency: a split of fewer parts is taken where it reaches this much (FlashAttention-2's rule)."""

FULL_ENOUGH = 0.8
"""Programs per multiprocessor from which dK/dV is not split: the parts would cost more than idle multiprocessors."""


def l2_group_of(heads: int, group: int, walked: int, row_bytes: int, by_keys: bool, l2_bytes: int) -> int:
    """How many heads' tiles a launch takes together, longest first: those whose other operand fits half of L2.

    Half, as the rest is for what is kept and written meanwhile. Query heads of one key head read the same keys and
    values: they always come together, and so does at least one such group.

    ``heads`` are those of all batch rows, ``group`` the query heads per key head (of dK/dV of one part), ``row_bytes``
    those of one of the ``walked`` rows that every tile walks; ``by_keys``: tiles are of keys, as in dK/dV.
    """
    # of dK/dV a program walks all query heads of its part of a group, and no other program does
    readers, shared = (1, group) if by_keys else (group, 1)
    groups = max(l2_bytes // 2 // max(shared * walked * row_bytes, 1), 1)
    return max(min(groups * readers, heads), 1)


def splits_for(count: int, group: int, multiprocessors: int) -> int:
    """In how many parts the query heads of a key head are cut for dK/dV, where a split is free to choose.

    None where ``count`` programs (tiles x batch rows x key heads) nearly fill the GPU; else the smallest divisor of
    ``group`` whose programs come within 15% of the best use of its multiprocessors, one per multiprocessor at a time.

    Returns:
        A divisor of ``group``, 1 for no split.
    """
    if count == 0 or count >= FULL_ENOUGH * multiprocessors:
        return 1
    divisors = [parts for parts in range(1, group + 1) if group % parts == 0]
    waves = {parts: -(-count * parts // multiprocessors) for parts in divisors}
    used = {parts: count * parts / (waves[parts] * multiprocessors) for parts in divisors}
    return next(parts for parts in divisors if used[parts] >= GOOD_ENOUGH * max(used.values()))


def margin_of(sm_margin: int | None, multiprocessors: int) -> int:
    """How many multiprocessors a persistent kernel leaves free.

    Raises:
        ValueError: all of them.
    """
    if sm_margin is None:
        return min(MARGIN, multiprocessors // 2)
    if sm_margin >= multiprocessors:
        raise ValueError(
            f"config.sm_margin is {sm_margin}: this GPU has {multiprocessors} multiprocessors, of which the kernel "
            "must keep at least 1"
        )
    return sm_margin


def packed_shape(config: KernelConfig | None, shape: Shape) -> Shape:
    """Of a launch of the forward or of dQ whose tiles hold all query heads of a key head, where the config says so."""
    if config is None or not config.pack_gqa or shape.group == 1:
        return shape
    return shape._replace(heads=shape.heads // shape.group, group=1, packed=shape.group)


def splits_of(config: KernelConfig | None, q: torch.Tensor, k: torch.Tensor, block_k: int) -> int:
    """In how many parts the query heads of a key head are cut for dK/dV; 1 for no split."""
    requested = 1 if config is None else config.dkdv_splits
    if isinstance(requested, int):
        return requested
    group = q.shape[2] // max(k.shape[2], 1)
    if q.device.type != "cuda" or group == 1:
        return 1
    return splits_for(programs(k.shape[1], block_k, k), group, gpu_or_interpreter(k.device).multiprocessors)


def split_shape(shape: Shape, splits: int) -> Shape:
    """Of a dK/dV launch whose programs take a part of a key head's query heads each."""
    if splits == 1:
        return shape
    return shape._replace(heads=shape.heads * splits, group=shape.group // splits, splits=splits)


def tile_schedule(
    config: KernelConfig | None,
    shape: Shape,
    tile: Tile,
    walked: tuple[torch.Tensor, ...],
    *,
    rows_are_keys: bool = False,
) -> tuple[int, Shape]:
    """The grid of a launch, and its shape with the order in which tiles are taken.

    ``walked`` are the tensors that the programs walk: K and V, or of dK/dV Q and dO. Of a persistent kernel as many
    programs as stay on the multiprocessors that are not left free.
    """
    block = tile.block_k if rows_are_keys else tile.block_q
    length, heads = walked[0].shape[1], walked[0].shape[0] * shape.heads
    count = -(-shape.rows * (shape.packed or 1) // block) * heads
    if config is None or count == 0 or (config.order == "heads" and not config.persistent):
        return count, shape
    gpu, l2_group = gpu_or_interpreter(walked[0].device), None
    if config.order == "longest":
        row_bytes = sum(x.shape[3] * x.element_size() for x in walked)
        l2_group = l2_group_of(heads, shape.group, length, row_bytes, rows_are_keys, gpu.l2_bytes)
    order = Order(l2_group, None if l2_group is None else heads, count if config.persistent else None)
    if not config.persistent:
        return count, shape._replace(order=order)
    margin = margin_of(config.sm_margin, gpu.multiprocessors)
    # by registers, as if every thread took all it may: what a kernel takes less of leaves room for a transfer
    each = max(REGISTERS // (MOST_REGISTERS * 32 * tile.num_warps), 1)
    return min(count, (gpu.multiprocessors - margin) * each), shape._replace(order=order)
