"""Host side of the single-pass backward: entry, launch, and the fixed order in which key tiles add to dQ.

The kernel is in ``device/single_pass.py``, or in ``hopper/backward.py`` for ``backward="hopper"``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from . import hopper_backward_launch
from .bounds import FULL, Bounds
from .checks import check_backward_inputs, check_like, resolve_dkdv_output
from .config import KernelConfig, Tile
from .device.dq_sum import AddTurns
from .device.single_pass import single_pass_kernel
from .gpu import gpu_specs
from .launch import (
    Pair,
    grid_size,
    has_tma,
    head_dims,
    is_tma_aligned,
    is_tma_head_dim,
    launch,
    launch_shape,
    mask_interval,
    score_modifiers,
    strided_tensor,
    tile_options,
    tma_descriptor,
)
from .launch_plan import LaunchPlan, QueryLauncher
from .scores import PLAIN, Scores


def attention_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *,
    dq: Tensor, bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None,
    accum: Pair | None = None, out: Pair | None = None, config: KernelConfig,
) -> Pair:  # fmt: skip
    """Compute dQ, dK and dV of one query shard and one key shard in one kernel; add dQ to ``dq`` and return dK and dV.

    A pair of tiles takes five matrix products; :func:`attention_dq` and :func:`attention_dkdv` together take seven. A
    program keeps dK and dV of a tile of keys in registers and adds ``scale * dS K`` to ``dq`` in global memory. From
    sm_90 on TMA adds if D is a power of two; otherwise atomics do.

    With ``config.backward="single_pass"`` the programs add in no fixed order, so the last bits of dQ change from run to
    run. With ``"single_pass_deterministic"`` each program waits for its turn, and dQ has the same bits on every run
    with the same tile. dK and dV have the same bits on every run in both modes.

    ``dq`` is fp32 ``[B, Sq, H, D]``: zeros, or dQ from the earlier key shards. ``config`` must have a single-pass
    ``backward``. The other arguments are those of :func:`attention_dkdv`.

    Raises:
        ValueError: If an argument does not fit, or if the head dim has no tile.
    """
    scale = check_backward_inputs(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    if config.backward == "two_pass":
        raise ValueError(
            "config.backward is 'two_pass': it must be 'single_pass', 'single_pass_deterministic' or 'hopper'. For two "
            "passes call attention_dq and attention_dkdv."
        )
    check_like("dq", dq, tuple(q.shape), torch.float32, q.device, is_output=True)
    dk_dv = resolve_dkdv_output(out, accum, k, v)
    SinglePassLauncher(dout, q, lse, delta, dq, scale, config)(
        k, v, bounds=bounds, scores=scores, accum=accum, out=dk_dv
    )
    return dk_dv


class SinglePassLauncher(QueryLauncher):
    """Single-pass backward of one query tensor over one key shard after another."""

    def __init__(
        self, dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
        softmax_scale: float, config: KernelConfig,
    ) -> None:  # fmt: skip
        super().__init__(q, softmax_scale, config)
        self._dout, self._dq, self._lse_and_delta, self._wants_hopper = (
            dout,
            dq,
            (lse, delta),
            config.backward == "hopper",
        )
        self._dout_and_q, self._dq_arg = (strided_tensor(dout), self._q_arg), strided_tensor(dq)

    def __call__(self, k: Tensor, v: Tensor, *, bounds: Bounds, scores: Scores, accum: Pair | None, out: Pair) -> None:
        """Write ``accum`` plus dK and dV of one key shard to ``out``, which may be ``accum``, and add to dQ."""
        q, config = self._q, self._config
        assert config is not None
        if self._wants_hopper and self._runs_hopper(
            (bounds.seqused_k is None, bounds.block_sparse is None), k, v,
            lambda: hopper_backward_launch.runs_hopper_backward(q, k, v, self._dout, self._dq, bounds, scores, config),
        ):  # fmt: skip
            hopper_backward_launch.launch_hopper_backward(
                self._dout, q, k, v, *self._lse_and_delta, self._dq, accum, out, bounds, self._scale,
                config.single_pass,
                self._descriptors,
            )  # fmt: skip
            return
        plan = self._get_plan("single_pass", k, v, bounds, scores)
        sums = out if accum is None else accum
        in_place = sums[0] is out[0] and sums[1] is out[1]
        out_args = strided_tensor(out[0]), strided_tensor(out[1])
        launch(
            single_pass_kernel, plan.grid, q.device,
            *self._dout_and_q, strided_tensor(k), strided_tensor(v), *self._lse_and_delta,
            *(out_args if in_place else (strided_tensor(sums[0]), strided_tensor(sums[1]))), *out_args,
            self._dq_arg, plan.dq_descriptor, make_turns(bounds, q, k, plan.tile, config),
            mask_interval(bounds.transposed(k.shape[1])),
            plan.shape, self._scale, score_modifiers(scores, rows_are_keys=True),
            **plan.options, HAS_SUM=accum is not None, IN_PLACE=accum is not None and in_place,
            RAGGED=bounds.lo is None and bounds.seqused_k is None and k.shape[1] % plan.tile.block_k != 0,
        )  # fmt: skip

    def _make_plan(self, tile: Tile, config: KernelConfig | None, kernel: str, k: Tensor, v: Tensor) -> LaunchPlan:
        q, dq = self._q, self._dq
        for name, x in (("q", q), ("dout", self._dout), ("dq", dq)):
            check_tile_span(name, x, tile)
        flags = {**head_dims(q, v), **tile_options(tile)}
        return LaunchPlan(
            tile,
            config,
            grid_size(k.shape[1], tile.block_k, k),
            launch_shape(k, q),
            flags,
            dq_descriptor=make_dq_descriptor(dq, tile),
        )


def check_tile_span(name: str, x: Tensor, tile: Tile) -> None:
    """Raise ValueError if 32-bit offsets cannot address all rows of a tile."""
    if x.shape[1] > 1 and abs(x.stride(1)) * tile.block_q >= 2**31:
        raise ValueError(
            f"{name} has strides {x.stride()}: a tile of {tile.block_q} queries must lie within 2^31 elements"
        )


def make_dq_descriptor(dq: Tensor, tile: Tile) -> Any:
    """Return a TMA descriptor of ``dq`` in tiles of queries, or None if atomics must add."""
    gpu = gpu_specs(dq.device)
    if gpu is None or not has_tma(gpu.arch) or dq.numel() == 0:
        return None
    return tma_descriptor(dq, tile.block_q) if is_tma_head_dim(dq.shape[3]) and is_tma_aligned(dq) else None


def make_turns(bounds: Bounds, q: Tensor, k: Tensor, tile: Tile, config: KernelConfig) -> AddTurns:
    """Return the order in which key tiles add to dQ; all fields are None unless the mode is deterministic."""
    if config.backward != "single_pass_deterministic":
        return AddTurns(None, None, None)
    batch, queries, heads = q.shape[:3]
    gates = torch.zeros(batch, heads, int(triton.cdiv(queries, tile.block_q)), device=q.device, dtype=torch.int32)
    table = dq_add_order(bounds, batch, queries, k.shape[1], tile, q.device)
    stride = None if table is None else table.stride(0) * (table.shape[0] > 1)
    return AddTurns(table, stride, gates)


def dq_add_order(
    bounds: Bounds, batch: int, queries: int, keys: int, tile: Tile, device: torch.device
) -> Tensor | None:
    """Return how many key tiles add to a query tile before each key tile; int32 ``[B or 1, key tiles, query tiles]``.

    Later keys add first, so the number counts the later key tiles that visit the query tile::

        causal mask, 3 x 3 tiles       query tile  0  1  2
                          key tile 0               0  1  2
                          key tile 1               -  0  1
                          key tile 2               -  -  0

    Under a causal mask the last key tile that sees a query tile begins with it, and each earlier one arrives a step
    later, so no program waits. FlashAttention-3 calls this order shortest processing time first. A program waits only
    for programs that were launched before it, so the kernel cannot deadlock. The numbers come from a table, because a
    number that is too high would wait forever.

    The result is cached. It is None if every key tile visits every query tile; then all later key tiles count.
    """
    if bounds.lo is None and bounds.seqused_k is None and bounds.block_sparse is None:
        return None

    def make() -> Tensor:
        visited = key_tile_visits(bounds, queries, keys, tile, device).to(torch.int32)
        return visited.flip(1).cumsum(1, dtype=torch.int32).flip(1) - visited

    return bounds._add_orders.get((batch, queries, keys, tile.block_q, tile.block_k), make, lambda order: (order,))


def key_tile_visits(bounds: Bounds, queries: int, keys: int, tile: Tile, device: torch.device) -> Tensor:
    """Return which key tile visits which query tile, bool ``[B or 1, key tiles, query tiles]``.

    The rule is that of ``device.tiles.load_tile_range``.
    """
    by_key = bounds.transposed(keys)
    first = torch.arange(0, keys, tile.block_k, device=device)
    columns = torch.arange(0, queries, tile.block_q, device=device)
    rows = torch.full((1, 1), keys, device=device) if bounds.seqused_k is None else bounds.seqused_k[:, None]
    last = torch.maximum(torch.minimum(first + tile.block_k, rows) - 1, first)
    visits = (first < rows)[:, :, None]
    if by_key.lo is not None and by_key.hi is not None:
        start, stop = by_key.lo[first][None], by_key.hi[last]
        begin = start // tile.block_q * tile.block_q
        visits = visits & (stop > start)[:, :, None] & (columns >= begin[:, :, None]) & (columns < stop[:, :, None])
    if bounds.block_sparse is not None:
        blocks = bounds.block_sparse.visible.to(device)
        visits = visits & blocks[columns // bounds.block_sparse.block][:, first // bounds.block_sparse.block].T
    return visits.expand(-1, -1, len(columns))
