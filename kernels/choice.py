"""What a launch takes: tile and options of the caller's config, else of a tuned table, else the built-in default."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from .bounds import Bounds
from .config import (
    INTERPRETER,
    LEAST_SIDE,
    MOST_SINGLE_PASS,
    KernelConfig,
    Tile,
    config_for,
    is_single_pass,
    single_pass_tile,
)
from .device.tiles import Shape, Strided
from .gpu import gpu_or_interpreter, gpu_specs, shared_limit
from .launch import Descriptors, Pair, check_described, head_dims, is_described, options, shape_of, strided
from .order import margin_of, packed_shape, tile_schedule
from .scores import PLAIN, Scores
from .tables import (
    BACKWARD,
    KERNELS,
    ONE_PASS,
    SINGLE_PASS,
    Chosen,
    Point,
    Tuned,
    least_shared,
    options_of,
    tuned,
)


def default_config(
    q: torch.Tensor,
    v: torch.Tensor,
    *,
    full: bool = True,
    config_dir: str | os.PathLike[str] | None = None,
    estimated: bool = False,
) -> KernelConfig:
    """The tiles of launches without ``config``: of tuned tables, and where they have none the built-in default.

    Such a launch takes all that its kernel was measured with (``order``, ``persistent``, …). A config has one order for
    all its kernels, so that this one has their defaults, but for the kernel of the forward; and two passes.

    Args:
        q: queries ``[B, Sq, H, D]``, for their device, dtype and shape.
        v: values ``[B, Sk, Hkv, Dv]``.
        full: without a mask, or with bounds.
        config_dir, estimated: as in :func:`tuned`.
    """
    forward, dq, dkdv = (_tile(one, q, v, full, config_dir=config_dir, estimated=estimated) for one in KERNELS)
    return KernelConfig(forward, dq, dkdv, forward_kernel=str(options_of(forward).get("forward_kernel", "portable")))


def _tile(
    kernel: str,
    q: torch.Tensor,
    v: torch.Tensor,
    full: bool,
    config_dir: str | os.PathLike[str] | None = None,
    estimated: bool = False,
) -> Tile:
    gpu = gpu_specs(q.device)
    tuned_tile = None if gpu is None else _tuned(tuned(gpu, config_dir, estimated=estimated), kernel, q, v, full)
    return tuned_tile or _built_in(kernel, q, v)


def _tuned(tiles: Tuned, kernel: str, q: torch.Tensor, v: torch.Tensor, full: bool) -> Tile | None:
    heads, head_dim = q.shape[2:]
    _, length, kv_heads, head_dim_v = v.shape
    return tiles.tile((kernel, q.dtype, head_dim, head_dim_v, heads // max(kv_heads, 1), full), length)


def _built_in(kernel: str, q: torch.Tensor, v: torch.Tensor) -> Tile:
    gpu, head_dim = gpu_specs(q.device), max(q.shape[3], v.shape[3])
    if gpu is None:
        return getattr(INTERPRETER, "dkdv" if kernel in SINGLE_PASS else kernel)  # type: ignore[no-any-return]
    if kernel not in SINGLE_PASS:
        return getattr(config_for(gpu.arch, q.dtype, head_dim), kernel)  # type: ignore[no-any-return]
    tile = single_pass_tile(gpu.arch, q.dtype, head_dim)
    if tile is None:
        raise ValueError(
            f"head dim {head_dim} has no default tile for a single-pass backward that fits this GPU: it takes up to "
            f"{MOST_SINGLE_PASS}; pass config.single_pass=Tile(...) to try one, or backward='two_pass'"
        )
    return tile


def resolve_config(config: KernelConfig | None, tile: Tile, q: torch.Tensor, k: torch.Tensor) -> KernelConfig | None:
    """What one kernel is launched by: the config; without one what a tuned table has beside ``tile``, or None.

    Args:
        tile: of :func:`tile_for`.
        q, k: of the launch. A table's options that do not suit them are left out, a config's are refused elsewhere.
    """
    if config is not None or not isinstance(tile, Chosen):
        return config
    return _with_options(tile, q.shape[2] // max(k.shape[2], 1), q.device)


@lru_cache(maxsize=256)
def _with_options(tile: Chosen, group: int, device: torch.device) -> KernelConfig:
    options: dict[str, Any] = options_of(tile)
    if group % options.get("dkdv_splits", 1):
        del options["dkdv_splits"]
    if options.get("sm_margin", 0) >= gpu_or_interpreter(device).multiprocessors:
        options = {name: value for name, value in options.items() if name not in ("persistent", "sm_margin")}
    return KernelConfig(tile, tile, tile, **options)


def backward_config(
    config: KernelConfig | None, q: torch.Tensor, v: torch.Tensor, *, block: int | None, full: bool, plain: bool
) -> KernelConfig | None:
    """The config; without one, where a tuned table measured a single pass as faster than two, one that says so.

    It is a deterministic one: two passes are. The last three arguments are those of :func:`launch_traits`.
    """
    gpu = gpu_specs(q.device)
    if config is not None or gpu is None or not plain or block is not None:
        return config
    tile = _tuned(tuned(gpu), BACKWARD, q, v, full)
    return None if tile is None else _one_pass(tile)


@lru_cache(maxsize=256)
def _one_pass(tile: Tile) -> KernelConfig:
    return KernelConfig(tile, tile, tile, backward=ONE_PASS, single_pass=tile)


def launch_traits(bounds: Bounds, scores: Scores) -> dict[str, Any]:
    """What of a launch decides its tile, beside its tensors: arguments of :func:`tile_for`."""
    plain = scores.is_plain and bounds.seqused_k is None and bounds.block_sparse is None
    return {"block": bounds.block, "full": bounds.is_full, "plain": plain}


def tile_for(
    kernel: str,
    config: KernelConfig | None,
    q: torch.Tensor,
    v: torch.Tensor,
    block: int | None,
    *,
    full: bool = True,
    plain: bool = True,
) -> Tile:
    """The tile of ``kernel``: the config's, or the default; where a mask has blocks, one that divides ``block``.

    Tuned tables serve ``plain`` launches (nothing but bounds): with more in the loop a tile that just fits may not.

    Raises:
        ValueError: the config's does not, or does not fit the GPU; or blocks that no tile divides.
    """
    given: Tile | None = None if config is None else getattr(config, kernel)
    if config is not None and kernel == "single_pass":
        # its default is a table's, too: the caller chose no more than the way, and what Hopper's leaves is the portable
        kernel = config.backward if config.backward in SINGLE_PASS else kernel
    is_hopper = kernel == "forward" and config is not None and config.forward_kernel == "hopper"
    if given is not None:
        _check_room(kernel, tile := given, q, v)
    elif is_hopper:  # takes few tiles, the built-in one among them; a table has those of the portable kernel
        tile = _built_in(kernel, q, v)
    else:
        tile = _tile(kernel, q, v, full) if plain and block is None else _built_in(kernel, q, v)
    if block is None:
        return tile
    if block % LEAST_SIDE:
        raise ValueError(
            f"the block mask has blocks of {block}: they must be a multiple of {LEAST_SIDE}, a tile's least"
        )
    fit = replace(tile, block_q=gcd(tile.block_q, block), block_k=gcd(tile.block_k, block))
    if given is not None and fit != tile:
        raise ValueError(
            f"config.{kernel} has tiles of {tile.block_q} x {tile.block_k}: they must divide the blocks of {block} "
            "positions of the block mask"
        )
    return fit


def check_tiles(
    config: KernelConfig | None, q: torch.Tensor, v: torch.Tensor, block: int | None, *, backward: bool = False
) -> None:
    """Refuse what :func:`tile_for` refuses of any kernel of a call, or of its ``backward``, before one is launched."""
    if config is None and block is None:
        return
    passes = ("single_pass",) if is_single_pass(config) else ("dq", "dkdv")
    for kernel in passes if backward else ("forward", *passes):
        tile_for(kernel, config, q, v, block)


def _check_room(kernel: str, tile: Tile, q: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse a tile of the config that takes more shared memory than a block has, however it is compiled."""
    gpu = gpu_specs(q.device)
    if gpu is None:
        return
    dtype = "fp32" if q.dtype == torch.float32 else "bf16"
    least = least_shared(Point(kernel, dtype, q.shape[3], v.shape[3], 1, "full", 1), tile)
    if least > (limit := shared_limit(gpu.arch)):
        field = "single_pass" if kernel in SINGLE_PASS else kernel
        raise ValueError(
            f"config.{field} is {tile}: it takes at least {least:,} bytes of shared memory, a block of sm_{gpu.arch} "
            f"has {limit:,}; {_built_in(kernel, q, v)} fits"
        )


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
        margin_of(config.sm_margin, gpu_or_interpreter(q.device).multiprocessors)
    if is_described(config):
        check_described(q, v)


class LaunchPlan(NamedTuple):
    """How one kernel is launched against keys of one length."""

    tile: Tile
    config: KernelConfig | None
    grid: int
    shape: Shape
    options: dict[str, int]
    splits: int = 1
    hopper: bool = False
    box: Any = None
    """Of a single pass: the TMA descriptor by which the copy engine adds to dQ, or None."""


class Bound:
    """Launches for one tensor of queries, bound once: what all shards of keys and values share is made once.

    Of what a call is given only the config is checked here: the entries check a launch, and a ring at its door what it
    then cuts and moves.
    """

    def __init__(self, q: torch.Tensor, softmax_scale: float, config: KernelConfig | None) -> None:
        self._q, self._scale, self._config = q, softmax_scale, config
        self._queries = self._carried = strided(q)
        self._plans: dict[Hashable, LaunchPlan] = {}
        self._described = Descriptors()
        self._taken: dict[Hashable, tuple[bool, Pair]] = {}

    def _plan(self, kernel: str, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores) -> LaunchPlan:
        """As planned at the first launch of its kind: shards differ in their length and their part of the mask."""
        plain = scores is PLAIN or scores.is_plain
        key = kernel, k.shape[1], bounds.lo is None, bounds.seqused_k is None, bounds.block_sparse, plain
        plan = self._plans.get(key)
        if plan is None:
            check_config(self._config, self._q, v)
            tile = tile_for(kernel, self._config, self._q, v, **launch_traits(bounds, scores))
            plan = self._plans[key] = self._planned(tile, resolve_config(self._config, tile, self._q, k), kernel, k, v)
        return plan

    def _planned(
        self, tile: Tile, config: KernelConfig | None, kernel: str, k: torch.Tensor, v: torch.Tensor
    ) -> LaunchPlan:
        grid, shape = tile_schedule(config, packed_shape(config, shape_of(self._q, k)), tile, (k, v))
        hopper = kernel == "forward" and config is not None and config.forward_kernel == "hopper"
        return LaunchPlan(tile, config, grid, shape, {**head_dims(self._q, v), **options(tile)}, hopper=hopper)

    def _continued(self, x: torch.Tensor) -> Strided:
        """Of a tensor that launch after launch continues."""
        if self._carried.ptr is not x:
            self._carried = strided(x)
        return self._carried

    def _takes(self, kind: Hashable, k: torch.Tensor, v: torch.Tensor, takes: Callable[[], bool]) -> bool:
        """Whether a Hopper kernel ``takes`` a launch of its kind, asked once for each pair of slots."""
        key = kind, id(k), id(v)
        if key not in self._taken:
            self._taken[key] = takes(), (k, v)  # while they are held nothing else has their ids
        return self._taken[key][0]
