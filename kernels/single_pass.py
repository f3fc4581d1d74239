"""The host side of the single-pass backward: the entry, the launch, and the fixed order in which key tiles add to dQ.

The kernel is ``device/single_pass.py``; for ``backward="hopper"`` it is ``hopper/backward.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from . import hopper_backward_launch
from .bounds import FULL, Bounds
from .checks import check_backward, check_like, result_like
from .choice import Bound, LaunchPlan
from .config import KernelConfig, Tile
from .device.dq_sum import Turns
from .device.single_pass import single_pass_kernel
from .gpu import gpu_specs
from .launch import (
    COPY_ENGINE_ARCH,
    Pair,
    descriptor,
    fills_boxes,
    head_dims,
    interval,
    is_aligned,
    launch,
    modifiers,
    options,
    programs,
    shape_of,
    strided,
)
from .scores import PLAIN, Scores


def attention_gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    dq: torch.Tensor,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    accum: Pair | None = None,
    out: Pair | None = None,
    config: KernelConfig,
) -> Pair:
    """dQ, dK and dV of one query shard and one key shard in a single pass: ``dq`` is added to, dK and dV returned.

    Five matrix products per pair of tiles where :func:`attention_dq` and :func:`attention_dkdv` have seven. A program
    keeps dK and dV of a tile of keys in registers and adds each ``scale * dS K`` to ``dq`` in global memory, by the
    copy engine where the GPU has one that can (sm_90 on; D a power of two), else by atomics.

    With ``config.backward="single_pass"`` the programs add in whatever order they come: the last bits of dQ change from
    run to run. With ``"single_pass_deterministic"`` each waits for its turn, so that dQ has the same bits on every run
    with the same tile. dK and dV have them either way.

    Args:
        dout, q, k, v, lse, delta, bounds, scores, softmax_scale: as in :func:`attention_dq`.
        dq: fp32 ``[B, Sq, H, D]``, what is added to: zeros, or the dQ of the shards before.
        accum: fp32 ``(dk [B, Sk, Hkv, D], dv [B, Sk, Hkv, Dv])`` from the query shards before.
        out: where dK and dV go; may be ``accum``. Default: new tensors in the dtype of k and v.
        config: one whose ``backward`` is a single pass.

    Returns:
        ``(dk, dv)``.

    Raises:
        ValueError: an argument does not fit, or there is no tile for the head dim.
    """
    scale = check_backward(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    if config.backward == "two_pass":
        raise ValueError(
            "config.backward is 'two_pass': attention_gradients takes 'single_pass', 'single_pass_deterministic' or "
            "'hopper'; the two passes are attention_dq and attention_dkdv"
        )
    check_like("dq", dq, tuple(q.shape), torch.float32, q.device, written=True)
    dk_accum, dv_accum = accum or (None, None)
    dk_out, dv_out = out or (None, None)
    dk = result_like("out[0]", dk_out, "accum[0]", dk_accum, k)
    dv = result_like("out[1]", dv_out, "accum[1]", dv_accum, v)
    made = Gradients(dout, q, lse, delta, dq, scale, config)
    made(k, v, bounds=bounds, scores=scores, accum=accum, out=(dk, dv))
    return dk, dv


class Gradients(Bound):
    """:func:`attention_gradients` of one tensor of queries, one shard after the other."""

    def __init__(
        self, dout: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, dq: torch.Tensor,
        softmax_scale: float, config: KernelConfig,
    ) -> None:  # fmt: skip
        super().__init__(q, softmax_scale, config)
        self._dout, self._dq, self._rows, self._hopper = dout, dq, (lse, delta), config.backward == "hopper"
        self._given, self._added = (strided(dout), self._queries), strided(dq)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, *, bounds: Bounds, scores: Scores, accum: Pair | None, out: Pair
    ) -> None:
        """``out`` = ``accum``, which it may be, plus what one shard gets; ``dq`` is added to."""
        q, config = self._q, self._config
        assert config is not None
        if self._hopper and self._takes(
            (bounds.seqused_k is None, bounds.block_sparse is None), k, v,
            lambda: hopper_backward_launch.takes(q, k, v, self._dout, self._dq, bounds, scores, config),
        ):  # fmt: skip
            hopper_backward_launch.launch_hopper_backward(
                self._dout, q, k, v, *self._rows, self._dq, accum, out, bounds, self._scale, config.single_pass,
                self._described,
            )  # fmt: skip
            return
        plan = self._plan("single_pass", k, v, bounds, scores)
        before = out if accum is None else accum
        in_place = before[0] is out[0] and before[1] is out[1]
        written = strided(out[0]), strided(out[1])
        launch(
            single_pass_kernel, plan.grid, q.device,
            *self._given, strided(k), strided(v), *self._rows,
            *(written if in_place else (strided(before[0]), strided(before[1]))), *written,
            self._added, plan.box, turns_of(bounds, q, k, plan.tile, config), interval(bounds.transposed(k.shape[1])),
            plan.shape, self._scale, modifiers(scores, rows_are_keys=True),
            **plan.options, HAS_SUM=accum is not None, IN_PLACE=accum is not None and in_place,
            RAGGED=bounds.lo is None and bounds.seqused_k is None and k.shape[1] % plan.tile.block_k != 0,
        )  # fmt: skip

    def _planned(
        self, tile: Tile, config: KernelConfig | None, kernel: str, k: torch.Tensor, v: torch.Tensor
    ) -> LaunchPlan:
        q, dq = self._q, self._dq
        for name, x in (("q", q), ("dout", self._dout), ("dq", dq)):
            check_near(name, x, tile)
        flags = {**head_dims(q, v), **options(tile)}
        return LaunchPlan(
            tile, config, programs(k.shape[1], tile.block_k, k), shape_of(k, q), flags, box=box_of(dq, tile)
        )


def check_near(name: str, x: torch.Tensor, tile: Tile) -> None:
    """Refuse a stride by which 32 bits do not reach from one end of a tile to the other: ValueError."""
    if x.shape[1] > 1 and abs(x.stride(1)) * tile.block_q >= 2**31:
        raise ValueError(
            f"{name} has strides {x.stride()}: a tile of {tile.block_q} queries must lie within 2^31 elements"
        )


def box_of(dq: torch.Tensor, tile: Tile) -> Any:
    """A TMA descriptor of ``dq`` in tiles of queries; None where atomics must do."""
    gpu = gpu_specs(dq.device)
    if gpu is None or gpu.arch < COPY_ENGINE_ARCH or dq.numel() == 0:
        return None
    return descriptor(dq, tile.block_q) if fills_boxes(dq.shape[3]) and is_aligned(dq) else None


def turns_of(bounds: Bounds, q: torch.Tensor, k: torch.Tensor, tile: Tile, config: KernelConfig) -> Turns:
    """Who waits for whom: nobody, or each program for those that add before it."""
    if config.backward != "single_pass_deterministic":
        return Turns(None, None, None)
    batch, queries, heads = q.shape[:3]
    gates = torch.zeros(batch, heads, int(triton.cdiv(queries, tile.block_q)), device=q.device, dtype=torch.int32)
    table = add_order(bounds, batch, queries, k.shape[1], tile, q.device)
    stride = None if table is None else table.stride(0) * (table.shape[0] > 1)
    return Turns(table, stride, gates)


def add_order(
    bounds: Bounds, batch: int, queries: int, keys: int, tile: Tile, device: torch.device
) -> torch.Tensor | None:
    """How many key tiles add to a query tile before each of them: int32 ``[B or 1, key tiles, query tiles]``; cached.

    Those behind it that visit the query tile: late keys add first. Under a causal mask the last key tile to see a query
    tile begins with it, the one before it comes there a step later, and nobody waits; FlashAttention-3 calls it the
    shortest processing time first. None where every key tile visits every query tile, so that it is the number of
    those behind.

    Whoever waits, waits for programs launched before, which is what keeps the order from locking up: a table, and not
    arithmetic in the kernel, because a number too high would wait for nobody.
    """
    if bounds.lo is None and bounds.seqused_k is None and bounds.block_sparse is None:
        return None

    def make() -> torch.Tensor:
        visited = key_tile_visits(bounds, queries, keys, tile, device).to(torch.int32)
        return visited.flip(1).cumsum(1, dtype=torch.int32).flip(1) - visited

    return bounds._add_orders.get((batch, queries, keys, tile.block_q, tile.block_k), make, lambda made: (made,))


def key_tile_visits(bounds: Bounds, queries: int, keys: int, tile: Tile, device: torch.device) -> torch.Tensor:
    """Which key tile visits which query tile, bool ``[B or 1, key tiles, query tiles]``: ``tiles.tile_range``."""
    by_key = bounds.transposed(keys)
    first = torch.arange(0, keys, tile.block_k, device=device)
    columns = torch.arange(0, queries, tile.block_q, device=device)
    rows = torch.full((1, 1), keys, device=device) if bounds.seqused_k is None else bounds.seqused_k[:, None]
    last = torch.maximum(torch.minimum(first + tile.block_k, rows) - 1, first)
    there = (first < rows)[:, :, None]
    if by_key.lo is not None and by_key.hi is not None:
        start, stop = by_key.lo[first][None], by_key.hi[last]
        begin = start // tile.block_q * tile.block_q
        there = there & (stop > start)[:, :, None] & (columns >= begin[:, :, None]) & (columns < stop[:, :, None])
    if bounds.block_sparse is not None:
        blocks = bounds.block_sparse.visible.to(device)
        there = there & blocks[columns // bounds.block_sparse.block][:, first // bounds.block_sparse.block].T
    return there.expand(-1, -1, len(columns))
