"""Host side of the Hopper backward: requirements, tile and launch."""

from __future__ import annotations

from torch import Tensor

from .bounds import Bounds
from .config import KernelConfig, Tile
from .hopper.step_order import CONSUMER_ROWS, CONSUMERS
from .hopper_forward_launch import THREAD_REGISTERS, check_hopper_inputs, check_shared_bytes, is_hopper_hop
from .launch import (
    Pair,
    TensorCache,
    check_tma_alignment,
    grid_size,
    launch,
    launch_shape,
    mask_interval,
    strided_tensor,
)
from .scores import Scores

BACKWARD_HEAD_DIMS = (64, 128)
"""Supported head dims. With 256, dK and dV of 128 keys do not fit the registers of two warpgroups."""

BACKWARD_ERROR_PREFIX = "backward='hopper' supports"


def default_backward_tile(head_dim: int) -> Tile:
    """Return the default tile for ``head_dim``, in which each of the two consumers computes 64 x 64 of dQ per step."""
    return Tile(CONSUMERS * CONSUMER_ROWS * CONSUMER_ROWS // head_dim, CONSUMERS * CONSUMER_ROWS, 4 * CONSUMERS, 2)


def runs_hopper_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dq: Tensor, bounds: Bounds, scores: Scores, config: KernelConfig
) -> bool:
    """Return True if the Hopper kernel runs this hop, False if the portable single pass must.

    Raises:
        ValueError: If the kernel does not support the GPU, dtype, head dim, scores, alignment or tile.
    """
    check_hopper_backward(q, v, scores, config.single_pass)
    check_tma_alignment(BACKWARD_ERROR_PREFIX, q=q, k=k, v=v, dout=dout, dq=dq)
    return is_hopper_hop(bounds, q, k)


def check_hopper_backward(q: Tensor, v: Tensor, scores: Scores, tile: Tile | None) -> None:
    """Raise ValueError if the kernel does not support a call; addresses and strides are checked per hop."""
    check_hopper_inputs(q, v, scores, BACKWARD_HEAD_DIMS, BACKWARD_ERROR_PREFIX, "'single_pass'")
    check_backward_tile(q.shape[3], tile or default_backward_tile(q.shape[3]))


def backward_shared_bytes(head_dim: int, tile: Tile) -> int:
    """Return the bytes of all tiles in shared memory; the barriers take a few hundred more."""
    kv = 2 * tile.block_k * head_dim * 2
    q_and_dout = tile.num_stages * tile.block_q * (2 * head_dim * 2 + 2 * 4)  # with lse and delta
    ds_of_two_steps = 2 * tile.block_q * tile.block_k * 2
    return kv + q_and_dout + ds_of_two_steps + CONSUMERS * CONSUMER_ROWS * CONSUMER_ROWS * 4  # dQ in fp32


def check_backward_tile(head_dim: int, tile: Tile) -> None:
    """Raise ValueError if the kernel does not support a tile."""
    default = default_backward_tile(head_dim)
    if (tile.block_q, tile.block_k, tile.num_warps) != (default.block_q, default.block_k, default.num_warps):
        raise ValueError(
            f"config.single_pass has block_q={tile.block_q}, block_k={tile.block_k} and num_warps={tile.num_warps}: "
            f"{BACKWARD_ERROR_PREFIX} only block_q={default.block_q}, block_k={default.block_k} and "
            f"num_warps={default.num_warps} at head dim {head_dim}"
        )
    check_shared_bytes("config.single_pass", head_dim, backward_shared_bytes(head_dim, tile), "num_stages")


def launch_hopper_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, accum: Pair | None,
    out: Pair, bounds: Bounds, softmax_scale: float, tile: Tile | None, descriptors: TensorCache,
) -> None:  # fmt: skip
    """Launch the Hopper backward: add a key shard's dQ to ``dq``, and write ``accum`` plus its dK and dV to ``out``.

    ``out`` may be ``accum``. Call it only if :func:`runs_hopper_backward` returned True for the hop.
    """
    from .hopper.backward import hopper_backward_kernel  # importing Gluon is slow, and only this kernel needs it

    tile = tile or default_backward_tile(q.shape[3])
    sums = out if accum is None else accum
    out_args, in_place = (strided_tensor(out[0]), strided_tensor(out[1])), sums[0] is out[0] and sums[1] is out[1]
    launch(
        hopper_backward_kernel, grid_size(k.shape[1], tile.block_k, k), q.device,
        descriptors(dout, tile.block_q), descriptors(q, tile.block_q), descriptors(k, CONSUMER_ROWS),
        descriptors(v, CONSUMER_ROWS),
        descriptors(dq, CONSUMER_ROWS, CONSUMER_ROWS), lse, delta,
        *(out_args if in_place else map(strided_tensor, sums)), *out_args, mask_interval(bounds.transposed(k.shape[1])),
        launch_shape(k, q)._replace(group=None), q.shape[2] // k.shape[2], softmax_scale,
        HEAD_DIM=q.shape[3], BLOCK_Q=tile.block_q, SLOTS=tile.num_stages, HAS_SUM=accum is not None,
        IN_PLACE=accum is not None and in_place,
        RAGGED=bounds.is_full and k.shape[1] % tile.block_k != 0,
        num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
