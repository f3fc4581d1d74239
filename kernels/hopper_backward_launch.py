"""The host side of the Hopper backward: what it takes, its tile, its launch."""

from __future__ import annotations

import torch

from .bounds import Bounds
from .config import KernelConfig, Tile
from .hopper.steps import CONSUMERS, ROWS
from .hopper_launch import THREAD_REGISTERS, check_kind, check_room, runs
from .launch import Descriptors, Pair, check_describable, interval, launch, programs, shape_of, strided
from .scores import Scores

HEAD_DIMS = (64, 128)
"""Of 256 no dK and dV of 128 keys fit the registers of two warpgroups."""

TAKES = "backward='hopper' takes"


def default_tile(head_dim: int) -> Tile:
    """As many queries as give each of two consumers 64 by 64 of dQ; two slots of Q and of dO."""
    return Tile(CONSUMERS * ROWS * ROWS // head_dim, CONSUMERS * ROWS, 4 * CONSUMERS, 2)


def takes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    bounds: Bounds,
    scores: Scores,
    config: KernelConfig,
) -> bool:
    """As :func:`.hopper_launch.takes` of a caller who requested it; what is not taken goes to the portable single pass.

    Raises:
        ValueError: a GPU, dtype, head dim, modified scores, an address or stride, or a tile that it does not take.
    """
    check_call(q, v, scores, config.single_pass)
    check_describable(TAKES, q=q, k=k, v=v, dout=dout, dq=dq)
    return runs(bounds, q, k)


def check_call(q: torch.Tensor, v: torch.Tensor, scores: Scores, tile: Tile | None) -> None:
    """Refuse what is known before there is a forward, all but addresses and strides: ValueError."""
    check_kind(q, v, scores, HEAD_DIMS, TAKES, "'single_pass'")
    check_tile(q.shape[3], tile or default_tile(q.shape[3]))


def shared_bytes(head_dim: int, tile: Tile) -> int:
    """Of K, V, the slots of Q and dO with their numbers, dS of two steps, and dQ; barriers take a few hundred more."""
    rows = tile.num_stages * tile.block_q * (2 * head_dim * 2 + 2 * 4)
    return 2 * tile.block_k * head_dim * 2 + rows + 2 * tile.block_q * tile.block_k * 2 + CONSUMERS * ROWS * ROWS * 4


def check_tile(head_dim: int, tile: Tile) -> None:
    """Refuse a tile that the kernel is not written for: ValueError."""
    wanted = default_tile(head_dim)
    if (tile.block_q, tile.block_k, tile.num_warps) != (wanted.block_q, wanted.block_k, wanted.num_warps):
        raise ValueError(
            f"config.single_pass has {tile.block_q} queries, {tile.block_k} keys and {tile.num_warps} warps: "
            f"backward='hopper' takes {wanted.block_q} queries at head dim {head_dim}, {wanted.block_k} keys and "
            f"{wanted.num_warps} warps, two warpgroups of {ROWS} keys"
        )
    check_room("config.single_pass", head_dim, shared_bytes(head_dim, tile), "stages")


def launch_hopper_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    accum: Pair | None,
    out: Pair,
    bounds: Bounds,
    softmax_scale: float,
    tile: Tile | None,
    described: Descriptors,
) -> None:
    """As the launch of ``single_pass_kernel`` in ``single_pass.Gradients``, for what :func:`takes` lets through."""
    from .hopper.backward import hopper_backward_kernel  # Gluon takes a while to import, and only this needs it

    tile = tile or default_tile(q.shape[3])
    before = out if accum is None else accum
    written, in_place = (strided(out[0]), strided(out[1])), before[0] is out[0] and before[1] is out[1]
    launch(
        hopper_backward_kernel, programs(k.shape[1], tile.block_k, k), q.device,
        described(dout, tile.block_q), described(q, tile.block_q), described(k, ROWS), described(v, ROWS),
        described(dq, ROWS, ROWS), lse, delta,
        *(written if in_place else map(strided, before)), *written, interval(bounds.transposed(k.shape[1])),
        shape_of(k, q)._replace(group=None), q.shape[2] // k.shape[2], softmax_scale,
        HEAD_DIM=q.shape[3], BLOCK_Q=tile.block_q, SLOTS=tile.num_stages, HAS_SUM=accum is not None,
        IN_PLACE=accum is not None and in_place,
        RAGGED=bounds.is_full and k.shape[1] % tile.block_k != 0,
        num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
