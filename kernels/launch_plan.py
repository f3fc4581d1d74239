"""Tile and options of a launch: from the caller's config, a tuned table or the built-in defaults, in this order."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bounds import Bounds
from .config import (
    INTERPRETER_CONFIG,
    MAX_SINGLE_PASS_HEAD_DIM,
    MIN_TILE_SIDE,
    KernelConfig,
    Tile,
    built_in_config,
    is_single_pass,
    single_pass_tile,
    value_columns,
)
from .device.tile_ops import MAX_PART_WIDTH
from .device.tiles import LaunchShape, StridedTensor
from .gpu import arch_name, gpu_or_interpreter, gpu_specs, shared_limit
from .hopper_forward_launch import default_forward_tile
from .launch import (
    Pair,
    TensorCache,
    check_descriptor_support,
    gluon_descriptor,
    has_descriptor_epilogue,
    head_dims,
    launch_shape,
    load_arguments,
    loads_by_tma,
    strided_tensor,
    tile_options,
)
from .scores import PLAIN, Scores
from .tables import (
    BACKWARD_CHOICE,
    DETERMINISTIC_PASS,
    KERNELS,
    SINGLE_PASS_KERNELS,
    TunedTile,
    TunedTiles,
    TuningPoint,
    load_tuned_tiles,
    min_shared_bytes,
    tuned_options,
)
from .tile_schedule import packed_shape, resolve_sm_margin, tile_schedule


def default_config(
    q: Tensor, v: Tensor, *,
    full: bool = True, config_dir: str | os.PathLike[str] | None = None, estimated: bool = False,
) -> KernelConfig:  # fmt: skip
    """Return the tiles of a launch without a config: from tuned tables, or built-in defaults where no table has one.

    The result has two passes and the forward kernel that the table measured. Other options of a table (``order``,
    ``persistent``) are left at their defaults, because a config has only one value for all kernels. A launch without a
    config uses the options that were measured for its kernel.

    Args:
        q: Queries ``[B, Sq, H, D]``; only device, dtype and shape are read.
        v: Values ``[B, Sk, Hkv, Dv]``; only the shape is read.
        full: True for launches without bounds.
        config_dir: Folder with tuned tables, as in :func:`load_tuned_tiles`.
        estimated: Also use entries that were never measured.
    """
    forward, dq, dkdv = (
        _resolve_default_tile(kernel, q, v, full, config_dir=config_dir, estimated=estimated) for kernel in KERNELS
    )
    return KernelConfig(forward, dq, dkdv, forward_kernel=str(tuned_options(forward).get("forward_kernel", "portable")))


def _resolve_default_tile(
    kernel: str, q: Tensor, v: Tensor, full: bool, config_dir: str | os.PathLike[str] | None = None,
    estimated: bool = False,
) -> Tile:  # fmt: skip
    """Return the tuned tile of ``kernel``, or the built-in tile if no table has one."""
    gpu = gpu_specs(q.device)
    tuned_tile = (
        None
        if gpu is None
        else _find_tuned_tile(load_tuned_tiles(gpu, config_dir, estimated=estimated), kernel, q, v, full)
    )
    return tuned_tile or _built_in_tile(kernel, q, v)


def _find_tuned_tile(tiles: TunedTiles, kernel: str, q: Tensor, v: Tensor, full: bool) -> Tile | None:
    """Return the tuned tile for the shapes of q and v; ``full`` is True for launches without bounds."""
    heads, head_dim = q.shape[2:]
    _, length, kv_heads, head_dim_v = v.shape
    return tiles.tile((kernel, q.dtype, head_dim, head_dim_v, heads // max(kv_heads, 1), full), length)


def _built_in_tile(kernel: str, q: Tensor, v: Tensor) -> Tile:
    gpu, head_dim = gpu_specs(q.device), max(q.shape[3], v.shape[3])
    if gpu is None:
        return getattr(INTERPRETER_CONFIG, "dkdv" if kernel in SINGLE_PASS_KERNELS else kernel)  # type: ignore[no-any-return]
    if kernel not in SINGLE_PASS_KERNELS:
        return getattr(built_in_config(gpu.arch, q.dtype, head_dim), kernel)  # type: ignore[no-any-return]
    tile = single_pass_tile(gpu.arch, q.dtype, head_dim)
    if tile is None:
        raise ValueError(
            f"head dim {head_dim} has no default tile for a single-pass backward on this GPU: default tiles go up to "
            f"{MAX_SINGLE_PASS_HEAD_DIM}. Pass config.single_pass=Tile(...), or backward='two_pass'."
        )
    return tile


def resolve_config(config: KernelConfig | None, tile: Tile, q: Tensor, k: Tensor) -> KernelConfig | None:
    """Return the config of one launch: the caller's, else the options that a tuned table has with ``tile``, else None.

    Options of a table that do not suit ``q`` and ``k`` are left out. Options of a config are checked elsewhere.
    """
    if config is not None or not isinstance(tile, TunedTile):
        return config
    return _tuned_config(tile, q.shape[2] // max(k.shape[2], 1), q.device)


@lru_cache(maxsize=256)
def _tuned_config(tile: TunedTile, group: int, device: torch.device) -> KernelConfig:
    """Return the options of a tuned tile that suit ``group`` query heads per key head and the GPU."""
    options: dict[str, Any] = tuned_options(tile)
    if group % options.get("dkdv_splits", 1):
        del options["dkdv_splits"]
    if options.get("sm_margin", 0) >= gpu_or_interpreter(device).multiprocessors:
        options = {name: value for name, value in options.items() if name not in ("persistent", "sm_margin")}
    return KernelConfig(tile, tile, tile, **options)


def backward_config(
    config: KernelConfig | None, q: Tensor, v: Tensor, *, block: int | None, full: bool, plain: bool
) -> KernelConfig | None:
    """Return the config of a backward; without one, a deterministic single pass if a table measured it as faster.

    ``block``, ``full`` and ``plain`` come from :func:`tile_criteria`.
    """
    gpu = gpu_specs(q.device)
    if config is not None or gpu is None or not plain or block is not None:
        return config
    tile = _find_tuned_tile(load_tuned_tiles(gpu), BACKWARD_CHOICE, q, v, full)
    return None if tile is None else _single_pass_config(tile)


@lru_cache(maxsize=256)
def _single_pass_config(tile: Tile) -> KernelConfig:
    return KernelConfig(tile, tile, tile, backward=DETERMINISTIC_PASS, single_pass=tile)


def tile_criteria(bounds: Bounds, scores: Scores) -> dict[str, Any]:
    """Return the arguments ``block``, ``full`` and ``plain`` of :func:`resolve_tile` for these bounds and scores."""
    plain = scores.is_plain and bounds.seqused_k is None and bounds.block_sparse is None
    return {"block": bounds.block, "full": bounds.is_full, "plain": plain}


def resolve_tile(
    kernel: str, config: KernelConfig | None, q: Tensor, v: Tensor, block: int | None, *,
    full: bool = True, plain: bool = True,
) -> Tile:  # fmt: skip
    """Return the tile of ``kernel``: the config's, or the default reduced to divide the mask's ``block``.

    ``full`` says that there are no bounds. ``plain`` says that there are no score modifiers, ``seqused_k`` or
    ``block_sparse``; only such launches use tuned tables, because more code in the loop may not fit.

    Raises:
        ValueError: If the config's tile does not divide ``block`` or does not fit the GPU, or if no tile divides
            ``block``.
    """
    requested: Tile | None = None if config is None else getattr(config, kernel)
    if config is not None and kernel == "single_pass":
        # A config that only names the mode still gets the tuned tile of that mode.
        kernel = config.backward if config.backward in SINGLE_PASS_KERNELS else kernel
    is_hopper = kernel == "forward" and config is not None and config.forward_kernel == "hopper"
    if requested is not None:
        _check_tile_shared_bytes(kernel, tile := requested, q, v)
    elif is_hopper:  # tables have tiles of the portable kernel, and the Hopper kernel supports only a few
        tile = default_forward_tile(q.shape[3])
    else:
        tile = _resolve_default_tile(kernel, q, v, full) if plain and block is None else _built_in_tile(kernel, q, v)
    if block is None:
        return tile
    if block % MIN_TILE_SIDE:
        raise ValueError(f"the block mask has block size {block}: it must be a multiple of {MIN_TILE_SIDE}")
    fit = replace(tile, block_q=gcd(tile.block_q, block), block_k=gcd(tile.block_k, block))
    if requested is not None and fit != tile:
        raise ValueError(
            f"config.{kernel.removesuffix('_deterministic')} has block_q={tile.block_q} and block_k={tile.block_k}: "
            f"both must divide the block mask's block size, {block}"
        )
    return fit


def check_tiles(
    config: KernelConfig | None, q: Tensor, v: Tensor, block: int | None, *, backward: bool = False
) -> None:
    """Raise ValueError if a tile of any kernel of a call does not fit, before the first kernel is launched.

    With ``backward``, check only the kernels of the backward.
    """
    if config is None and block is None:
        return
    passes = ("single_pass",) if is_single_pass(config) else ("dq", "dkdv")
    for kernel in passes if backward else ("forward", *passes):
        resolve_tile(kernel, config, q, v, block)


def _check_tile_shared_bytes(kernel: str, tile: Tile, q: Tensor, v: Tensor) -> None:
    """Raise ValueError if a tile of the config needs more shared memory than a block of this GPU has."""
    gpu = gpu_specs(q.device)
    if gpu is None:
        return
    dtype = "fp32" if q.dtype == torch.float32 else "bf16"
    least = min_shared_bytes(TuningPoint(kernel, dtype, q.shape[3], v.shape[3], 1, "full", 1), tile)
    if least > (limit := shared_limit(gpu.arch)):
        field = "single_pass" if kernel in SINGLE_PASS_KERNELS else kernel
        raise ValueError(
            f"config.{field} is {tile}, which needs at least {least:,} bytes of shared memory, but "
            f"{arch_name(gpu.arch)} allows {limit:,} per block. Use {_built_in_tile(kernel, q, v)}, which fits."
        )


def check_config(config: KernelConfig | None, q: Tensor, v: Tensor) -> None:
    """Raise ValueError if the options of a config do not fit the heads or the GPU."""
    if config is None:
        return
    group = q.shape[2] // max(v.shape[2], 1)
    if isinstance(config.dkdv_splits, int) and group % config.dkdv_splits:
        raise ValueError(
            f"config.dkdv_splits is {config.dkdv_splits}: it must divide {group}, the query heads per key head"
        )
    if is_single_pass(config) and (head_dim := max(q.shape[3], v.shape[3])) > MAX_PART_WIDTH:
        raise ValueError(
            f"config.backward is {config.backward!r} and the head dim {head_dim}: it supports head dims up to "
            f"{MAX_PART_WIDTH}. Use 'two_pass'."
        )
    if config.persistent:
        resolve_sm_margin(config.sm_margin, gpu_or_interpreter(q.device).multiprocessors)
    if has_descriptor_epilogue(config):
        check_descriptor_support(q, v)


class LaunchPlan(NamedTuple):
    """Launch parameters of one kernel for shards of one length."""

    tile: Tile
    config: KernelConfig | None
    grid: int
    shape: LaunchShape
    options: dict[str, int]
    splits: int = 1
    is_hopper: bool = False
    by_tma: bool = False
    """True if TMA loads tiles, where strides allow."""
    dq_descriptor: Any = None
    """TMA descriptor with which a single pass adds to dQ, or None for atomics."""
    value_parts: tuple[slice | None, ...] = (None,)
    """Columns of v of each launch of the forward; None for all columns."""


class QueryLauncher:
    """Base of the launchers for one query tensor; caches everything that the launches of all key shards share.

    Only the config is checked here. The host entries and the ring check the tensors.
    """

    def __init__(self, q: Tensor, softmax_scale: float, config: KernelConfig | None) -> None:
        self._q, self._scale, self._config = q, softmax_scale, config
        self._q_arg = self._carried_arg = strided_tensor(q)
        self._plans: dict[Hashable, LaunchPlan] = {}
        self._descriptors, self._loads = TensorCache(gluon_descriptor), TensorCache(load_arguments)
        self._hopper_decisions: dict[Hashable, tuple[bool, Pair]] = {}

    def _get_plan(self, kernel: str, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> LaunchPlan:
        """Return the cached launch plan of a shard; a plan depends on the shard's length and its kind of bounds."""
        plain = scores is PLAIN or scores.is_plain
        key = kernel, k.shape[1], bounds.lo is None, bounds.seqused_k is None, bounds.block_sparse, plain
        plan = self._plans.get(key)
        if plan is None:
            check_config(self._config, self._q, v)
            tile = resolve_tile(kernel, self._config, self._q, v, **tile_criteria(bounds, scores))
            plan = self._plans[key] = self._make_plan(
                tile, resolve_config(self._config, tile, self._q, k), kernel, k, v
            )
        return plan

    def _make_plan(self, tile: Tile, config: KernelConfig | None, kernel: str, k: Tensor, v: Tensor) -> LaunchPlan:
        grid, shape = tile_schedule(config, packed_shape(config, launch_shape(self._q, k)), tile, (k, v))
        hopper = kernel == "forward" and config is not None and config.forward_kernel == "hopper"
        options = {**head_dims(self._q, v), **tile_options(tile)}
        dim_v, width = v.shape[3], value_columns(tile, v.shape[3])
        parts = tuple(slice(begin, begin + width) if width < dim_v else None for begin in range(0, dim_v, width))
        by_tma = loads_by_tma(kernel, config, self._q, v)
        return LaunchPlan(tile, config, grid, shape, options, is_hopper=hopper, by_tma=by_tma, value_parts=parts)

    def _load_arguments(self, plan: LaunchPlan, *loads: tuple[Tensor, int | None]) -> tuple[list[Any], list[Any]]:
        """Return the first and the second argument (:func:`load_arguments`) of tensors with the rows of their tiles.

        TMA loads all of them or none, except tensors without rows.
        """
        pairs = [self._loads(x, rows) for x, rows in loads] if plan.by_tma else [None]
        if None in pairs:
            pairs = [(strided_tensor(x), None) for x, _ in loads]
        firsts, seconds = zip(*pairs, strict=True)
        return list(firsts), list(seconds)

    def _cached_carried(self, x: Tensor) -> StridedTensor:
        """Return the kernel argument for ``x``, cached for the last tensor because all launches update the same one."""
        if self._carried_arg.ptr is not x:
            self._carried_arg = strided_tensor(x)
        return self._carried_arg

    def _runs_hopper(self, kind: Hashable, k: Tensor, v: Tensor, takes: Callable[[], bool]) -> bool:
        """Return ``takes()``: if the Hopper kernel runs a launch. Cached per ``kind`` and pair of K/V tensors."""
        key = kind, id(k), id(v)
        if key not in self._hopper_decisions:
            self._hopper_decisions[key] = takes(), (k, v)  # keep k and v alive, so that no other tensor gets their ids
        return self._hopper_decisions[key][0]
