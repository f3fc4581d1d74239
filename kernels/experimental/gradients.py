"""The host entry of the single-pass backward: what it takes, who adds when, its launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

from ..bounds import FULL, Bounds
from ..checks import check_backward, check_like, result_like
from ..choice import situation, tile_for
from ..config import KernelConfig, Tile
from ..described import COPY_ENGINE_ARCH, descriptor, fills_boxes, is_aligned
from ..launch import head_dims, interval, launch, modifiers, options, programs, shape_of, strided
from ..lookup import gpu_of
from ..scores import PLAIN, Scores
from . import hopper_backward_launch
from .dq_sum import Turns
from .hopper_launch import Described
from .single_pass import single_pass_kernel
from .turns import numbers

Pair = tuple[torch.Tensor, torch.Tensor]


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
    sums: Pair | None = None,
    into: Pair | None = None,
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
        sums: fp32 ``(dk [B, Sk, Hkv, D], dv [B, Sk, Hkv, Dv])`` from the query shards before.
        into: where dK and dV go; may be ``sums``. Default: new tensors in the dtype of k and v.
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
    dk_sum, dv_sum = sums or (None, None)
    dk_into, dv_into = into or (None, None)
    dk = result_like("into[0]", dk_into, "sums[0]", dk_sum, k)
    dv = result_like("into[1]", dv_into, "sums[1]", dv_sum, v)
    made = Gradients(dout, q, lse, delta, dq, scale, config)
    made(k, v, bounds=bounds, scores=scores, sums=sums, into=(dk, dv))
    return dk, dv


class Gradients:
    """:func:`attention_gradients` of one tensor of queries, one shard after the other; as ``attention.Bound``."""

    def __init__(
        self, dout: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, dq: torch.Tensor,
        softmax_scale: float, config: KernelConfig,
    ) -> None:  # fmt: skip
        self._dout, self._q, self._dq, self._scale, self._config = dout, q, dq, softmax_scale, config
        self._given = strided(dout), strided(q)
        self._rows = lse, delta
        self._described = Described()
        self._taken: dict[Hashable, tuple[bool, Pair]] = {}
        self._ways: dict[Hashable, tuple[Tile, tuple[Any, Any], dict[str, int]]] = {}

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, *, bounds: Bounds, scores: Scores, sums: Pair | None, into: Pair
    ) -> None:
        """``into`` = ``sums``, which it may be, plus what one shard gets; ``dq`` is added to."""
        q, config = self._q, self._config
        if config.backward == "hopper" and self._takes(k, v, bounds, scores):
            hopper_backward_launch.launch_hopper_backward(
                self._dout, q, k, v, *self._rows, self._dq, sums, into, bounds, self._scale, config.single_pass,
                self._described,
            )  # fmt: skip
            return
        tile, added, flags = self._way(v, bounds, scores)
        before = into if sums is None else sums
        in_place = before[0] is into[0] and before[1] is into[1]
        written = strided(into[0]), strided(into[1])
        launch(
            single_pass_kernel, programs(k.shape[1], tile.block_k, k), q.device,
            *self._given, strided(k), strided(v), *self._rows,
            *(written if in_place else (strided(before[0]), strided(before[1]))), *written,
            *added, turns_of(bounds, q, k, tile, config), interval(bounds.transposed(k.shape[1])),
            shape_of(k, q), self._scale, modifiers(scores, q.device, rows_are_keys=True),
            **flags, HAS_SUM=sums is not None, IN_PLACE=sums is not None and in_place,
            RAGGED=bounds.lo is None and bounds.used is None and k.shape[1] % tile.block_k != 0,
        )  # fmt: skip

    def _takes(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, scores: Scores) -> bool:
        """Whether the Hopper kernel does, asked once for each pair of slots."""
        key = id(k), id(v), bounds.used is None, bounds.runs is None
        if key not in self._taken:
            given = self._q, k, v, self._dout, self._dq
            found = hopper_backward_launch.takes(*given, bounds, scores, self._config)
            self._taken[key] = found, (k, v)  # while they are held nothing else has their ids
        return self._taken[key][0]

    def _way(self, v: torch.Tensor, bounds: Bounds, scores: Scores) -> tuple[Tile, tuple[Any, Any], dict[str, int]]:
        """The tile, dQ as it is added to, and the options of a launch."""
        key = bounds.lo is None, bounds.used is None, bounds.runs, scores is PLAIN or scores.is_plain
        way = self._ways.get(key)
        if way is None:
            q, dq = self._q, self._dq
            tile = tile_for("single_pass", self._config, q, v, **situation(bounds, scores))
            for name, x in (("q", q), ("dout", self._dout), ("dq", dq)):
                check_near(name, x, tile)
            added = strided(dq), box_of(dq, tile)
            way = self._ways[key] = tile, added, {**head_dims(q, v), **options(tile)}
        return way


def check_near(name: str, x: torch.Tensor, tile: Tile) -> None:
    """Refuse a stride by which 32 bits do not reach from one end of a tile to the other: ValueError."""
    if x.shape[1] > 1 and abs(x.stride(1)) * tile.block_q >= 2**31:
        raise ValueError(
            f"{name} has strides {x.stride()}: a tile of {tile.block_q} queries must lie within 2^31 elements"
        )


def box_of(dq: torch.Tensor, tile: Tile) -> Any:
    """A TMA descriptor of ``dq`` in tiles of queries; None where atomics must do."""
    gpu = gpu_of(dq.device)
    if gpu is None or gpu.arch < COPY_ENGINE_ARCH or dq.numel() == 0:
        return None
    return descriptor(dq, tile.block_q) if fills_boxes(dq.shape[3]) and is_aligned(dq) else None


def turns_of(bounds: Bounds, q: torch.Tensor, k: torch.Tensor, tile: Tile, config: KernelConfig) -> Turns:
    """Who waits for whom: nobody, or each program for those that add before it."""
    if config.backward != "single_pass_deterministic":
        return Turns(None, None, None)
    batch, queries, heads = q.shape[:3]
    gates = torch.zeros(batch, heads, int(triton.cdiv(queries, tile.block_q)), device=q.device, dtype=torch.int32)
    table = numbers(bounds, batch, queries, k.shape[1], tile, q.device)
    stride = None if table is None else table.stride(0) * (table.shape[0] > 1)
    return Turns(table, stride, gates)
