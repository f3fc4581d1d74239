"""From torch tensors to a launch: argument tuples, grids and the lock around an interpreted kernel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from .bounds import Bounds
from .config import KernelConfig, Tile
from .described import check_described, is_described
from .device.modify import UNMODIFIED, Modifiers
from .device.parts import dot
from .device.tiles import BlockRuns, Interval, Order, Shape, Strided
from .order import chip_of, margin_of, persistent_programs, splits_for, swath_of, tiles_of
from .scores import PLAIN, Scores
from .target import target

# Triton's interpreter patches its language module while a kernel runs, and a first launch compiles: one at a time.
_LOCK = threading.Lock()
_NO_DEVICE = contextlib.nullcontext()


def launch(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Launch ``kernel`` on ``grid`` programs on the current stream of ``device``; an empty grid is no launch.

    Raises:
        NotImplementedError: as :func:`check_cpu`.
        ValueError: what was compiled takes more of the GPU than there is.
    """
    if device.type == "cpu":
        check_cpu(args, kernel)
    if grid == 0:
        return
    if device.type == "meta" and (compiling := target()) is not None:
        compiling.take(kernel, grid, *args, **options)
        return
    with _LOCK, torch.cuda.device(device) if device.type == "cuda" else _NO_DEVICE:
        try:
            kernel[(grid,)](*args, **options)
        except OutOfResources as error:
            told = ", ".join(f"{name}={value}" for name, value in options.items())
            raise ValueError(
                f"{kernel.__name__} with {told} takes {error.required:,} of {error.name}, this GPU has "
                f"{error.limit:,}: smaller BLOCK_Q or BLOCK_K, or fewer num_stages, take less"
            ) from error


def check_cpu(given: Sequence[Any], kernel: Any = dot) -> None:
    """Refuse CPU tensors without Triton's interpreter, and of dtypes that it does not compute: NotImplementedError."""
    if isinstance(kernel, JITFunction):
        raise NotImplementedError(
            "tensors are on the CPU: Triton kernels run there under Triton's interpreter alone. Set TRITON_INTERPRET=1 "
            "before triton is imported (slow, for tests), or use the aten backend of ring_attention."
        )
    pointers = (getattr(x, "ptr", x) for x in given)
    if isinstance(kernel, type(dot)) and any(getattr(x, "dtype", None) == torch.bfloat16 for x in pointers):
        raise NotImplementedError(
            "tensors are torch.bfloat16 on the CPU: Triton's interpreter multiplies their bits as integers. It takes "
            "float16 and float32; the aten backend of ring_attention computes all three."
        )


def programs(rows: int, block: int, x: torch.Tensor) -> int:
    """One program per tile of rows, batch row and head of ``x [B, S, H, D]``."""
    return -(-rows // block) * x.shape[0] * x.shape[2]


def strided(x: torch.Tensor) -> Strided:
    batch, row, head, _ = x.stride()
    return Strided(x, batch, row, head)


def interval(bounds: Bounds) -> Interval:
    runs = bounds.runs
    listed = None if runs is None else BlockRuns(runs.offsets, runs.begins, runs.ends, runs.block)
    return Interval(bounds.lo, bounds.hi, bounds.used, listed)


def modifiers(scores: Scores, device: torch.device, *, rows_are_keys: bool = False) -> Modifiers:
    """Of a launch whose rows are queries, or keys."""
    if scores is PLAIN or scores.is_plain:
        return UNMODIFIED
    slopes, drops = scores.alibi_slopes, scores.dropout_p > 0
    rows, columns = scores.q_positions, scores.k_positions
    if rows_are_keys:
        rows, columns = columns, rows
    return Modifiers(
        softcap=scores.softcap or None,
        slopes=slopes,
        slopes_stride=None if slopes is None else slopes.shape[-1] * (slopes.dim() - 1),
        rows=rows if scores.by_position else None,
        columns=columns if scores.by_position else None,
        counter=scores.counter(device) if drops else None,
        threshold=scores.threshold if drops else None,
        kept=1 / (1 - scores.dropout_p) if drops else None,
    )


def shape_of(rows: torch.Tensor, columns: torch.Tensor) -> Shape:
    """Of a launch whose programs are tiles of ``rows`` and walk ``columns``, both ``[B, S, heads, D]``."""
    heads = (rows.shape[2], columns.shape[2])
    return Shape(rows.shape[1], columns.shape[1], rows.shape[2], max(heads) // min(heads))


def packed_shape(config: KernelConfig | None, shape: Shape) -> Shape:
    """Of a launch of the forward or of dQ whose tiles hold all query heads of a key head, where the config says so."""
    if config is None or not config.pack_gqa or shape.group == 1:
        return shape
    return shape._replace(heads=shape.heads // shape.group, group=1, packed=shape.group)


def check_config(config: KernelConfig | None, q: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse a config that does not fit the heads or the GPU: ValueError."""
    if config is None:
        return
    group = q.shape[2] // max(v.shape[2], 1)
    if isinstance(config.dkdv_splits, int) and group % config.dkdv_splits:
        raise ValueError(
            f"config.dkdv_splits is {config.dkdv_splits}: it must divide the {group} query heads per key head"
        )
    if config.persistent:
        margin_of(config.sm_margin, chip_of(q.device).multiprocessors)
    if is_described(config):
        check_described(q, v)


def splits_of(config: KernelConfig | None, q: torch.Tensor, k: torch.Tensor, block_k: int) -> int:
    """In how many parts the query heads of a key head are cut for dK/dV; 1 for no split."""
    asked = 1 if config is None else config.dkdv_splits
    if isinstance(asked, int):
        return asked
    group = q.shape[2] // max(k.shape[2], 1)
    if q.device.type != "cuda" or group == 1:
        return 1
    return splits_for(programs(k.shape[1], block_k, k), group, chip_of(k.device).multiprocessors)


def split_shape(shape: Shape, splits: int) -> Shape:
    """Of a dK/dV launch whose programs take a part of a key head's query heads each."""
    if splits == 1:
        return shape
    return shape._replace(heads=shape.heads * splits, group=shape.group // splits, splits=splits)


def empty_parts(like: torch.Tensor, splits: int) -> torch.Tensor:
    """Room for ``splits`` fp32 sums per head of ``like [B, S, H, D]``: ``[B, S, H * splits, D]``, rows side by side."""
    batch, length, heads, head_dim = like.shape
    room = torch.empty(batch, heads * splits, length, head_dim, device=like.device, dtype=torch.float32)
    return room.transpose(1, 2)


def dealt(
    config: KernelConfig | None,
    shape: Shape,
    tile: Tile,
    walked: tuple[torch.Tensor, ...],
    *,
    rows_are_keys: bool = False,
) -> tuple[int, Shape]:
    """The grid of a launch, and its shape with the order in which tiles are taken.

    ``walked`` are the tensors that the programs walk: K and V, or of dK/dV Q and dO.
    """
    block = tile.block_k if rows_are_keys else tile.block_q
    length, heads = walked[0].shape[1], walked[0].shape[0] * shape.heads
    count = tiles_of(shape.rows, shape.packed or 1, block, heads)
    if config is None or count == 0 or (config.order == "heads" and not config.persistent):
        return count, shape
    chip, swath = chip_of(walked[0].device), None
    if config.order == "longest":
        row_bytes = sum(x.shape[3] * x.element_size() for x in walked)
        swath = swath_of(heads, shape.group, length, row_bytes, rows_are_keys, chip.l2_bytes)
    order = Order(swath, None if swath is None else heads, count if config.persistent else None)
    if not config.persistent:
        return count, shape._replace(order=order)
    margin = margin_of(config.sm_margin, chip.multiprocessors)
    grid = persistent_programs(count, tile.num_warps, chip.multiprocessors, margin)
    return grid, shape._replace(order=order)


def head_dims(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    return {"HEAD_DIM": q.shape[3], "HEAD_DIM_V": v.shape[3]}


def options(tile: Tile) -> dict[str, int]:
    return {
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
