"""Host side of the Hopper forward: requirements and launch."""

from __future__ import annotations

import torch
from torch import Tensor

from .bounds import Bounds
from .config import Tile
from .gpu import gpu_specs, shared_limit
from .hopper.step_order import CONSUMER_ROWS, CONSUMERS
from .launch import (
    TensorCache,
    check_tma_alignment,
    device_text,
    grid_size,
    launch,
    launch_shape,
    mask_interval,
    strided_tensor,
)
from .scores import Scores

FORWARD_HEAD_DIMS = (64, 128, 256)
"""Head dims that fit the columns of one wgmma result and fill a TMA box without padding."""

HOPPER_CAPABILITY = 90

THREAD_REGISTERS = 168
"""Registers per thread at launch: 65,536 over three warpgroups. The producer then gives most of its share away."""

MIN_SLOTS = 2  # a consumer waits for V of the next step before it releases V of the current one

FORWARD_ERROR_PREFIX = "forward_kernel='hopper' supports"


def default_forward_tile(head_dim: int) -> Tile:
    """Return the default tile for ``head_dim``: as many keys as shared memory holds in two slots."""
    return Tile(CONSUMERS * CONSUMER_ROWS, 128 if head_dim <= 128 else 64, 4 * CONSUMERS, MIN_SLOTS)


def runs_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores, tile: Tile, *, requested: bool = True
) -> bool:
    """Return True if the Hopper kernel runs this hop, False if the portable kernel must.

    The portable kernel runs empty hops and hops with ``seqused_k`` or ``block_sparse``, because these vary from hop to
    hop. All other requirements are the same for all hops: an unsupported call raises if the caller ``requested`` the
    Hopper kernel, and falls back if a tuned table chose it.

    Raises:
        ValueError: If the kernel was requested and does not support the GPU, dtype, head dim, scores, alignment or
            tile.
    """
    try:
        check_hopper_forward(q, v, scores, tile)
        check_tma_alignment(FORWARD_ERROR_PREFIX, q=q, k=k, v=v)
    except ValueError:
        if requested:
            raise
        return False
    return is_hopper_hop(bounds, q, k)


def check_hopper_forward(q: Tensor, v: Tensor, scores: Scores, tile: Tile | None) -> None:
    """Raise ValueError if the kernel does not support a call; addresses and strides are checked per hop."""
    check_hopper_inputs(q, v, scores, FORWARD_HEAD_DIMS, FORWARD_ERROR_PREFIX, "the portable kernel")
    if tile is not None:  # the default tile fits
        check_forward_tile(q.shape[3], tile)


def check_hopper_inputs(
    q: Tensor, v: Tensor, scores: Scores, head_dims: tuple[int, ...], error_prefix: str, fallback: str
) -> None:
    """Raise ValueError if a Hopper kernel does not support the GPU, dtype, head dim or scores.

    ``error_prefix`` begins the second half of the message, and ``fallback`` names the kernel to use instead.
    """
    if not is_hopper_device(q.device):
        raise ValueError(f"q is on {device_text(q.device)}: {error_prefix} only GPUs of compute capability 9.0")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q is {q.dtype}: {error_prefix} only float16 and bfloat16")
    if q.shape[3] not in head_dims or v.shape[3] != q.shape[3]:
        raise ValueError(
            f"q has head dim {q.shape[3]} and v has {v.shape[3]}: {error_prefix} only head dim "
            f"{' or '.join(map(str, head_dims))}, the same for q and v"
        )
    if not scores.is_plain:
        raise ValueError(
            f"scores have a softcap, ALiBi slopes or dropout: {error_prefix} only plain scores. Use {fallback}."
        )


def check_shared_bytes(field: str, head_dim: int, nbytes: int, remedy: str) -> None:
    """Raise ValueError if ``nbytes`` of tiles and 1 KiB of barriers do not fit the shared memory of a block.

    ``field`` is the field of the config with the tile, and ``remedy`` says what to reduce, for the message.
    """
    if (needed := nbytes + 1024) > (limit := shared_limit(HOPPER_CAPABILITY)):
        raise ValueError(
            f"{field} needs {needed:,} bytes of shared memory at head dim {head_dim}, but sm_{HOPPER_CAPABILITY} "
            f"allows {limit:,} per block. Use a smaller {remedy}."
        )


def is_hopper_hop(bounds: Bounds, q: Tensor, k: Tensor) -> bool:
    """Return True if a hop has queries and keys, and no ``seqused_k`` or ``block_sparse``."""
    return bounds.seqused_k is None and bounds.block_sparse is None and q.numel() > 0 and k.numel() > 0


def is_hopper_device(device: torch.device) -> bool:
    gpu = gpu_specs(device)
    return gpu is not None and gpu.arch == HOPPER_CAPABILITY


def forward_shared_bytes(head_dim: int, tile: Tile) -> int:
    """Return the bytes of the tiles of Q, K and V; the barriers take a few hundred more."""
    return 2 * head_dim * (tile.block_q + 2 * tile.num_stages * tile.block_k)


def check_forward_tile(head_dim: int, tile: Tile) -> None:
    """Raise ValueError if the kernel does not support a tile."""
    if tile.block_q != CONSUMERS * CONSUMER_ROWS or tile.num_warps != 4 * CONSUMERS:
        raise ValueError(
            f"config.forward has block_q={tile.block_q} and num_warps={tile.num_warps}: {FORWARD_ERROR_PREFIX} only "
            f"block_q={CONSUMERS * CONSUMER_ROWS} and num_warps={4 * CONSUMERS}"
        )
    if tile.block_k not in (64, 128) or tile.num_stages < MIN_SLOTS:
        raise ValueError(
            f"config.forward has block_k={tile.block_k} and num_stages={tile.num_stages}: {FORWARD_ERROR_PREFIX} only "
            f"block_k=64 or 128, and num_stages of at least {MIN_SLOTS}"
        )
    check_shared_bytes("config.forward", head_dim, forward_shared_bytes(head_dim, tile), "block_k or num_stages")


def launch_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, out: Tensor, lse: Tensor, bounds: Bounds,
    softmax_scale: float, tile: Tile, descriptors: TensorCache, row_max: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the Hopper forward for a hop for which :func:`runs_hopper_forward` returned True."""
    from .hopper.forward import hopper_kernel  # importing Gluon is slow, and only this kernel needs it

    out_arg = strided_tensor(out)
    launch(
        hopper_kernel, grid_size(q.shape[1], tile.block_q, q), q.device,
        descriptors(q, CONSUMER_ROWS), descriptors(k, tile.block_k), descriptors(v, tile.block_k),
        out_arg if state is None or state is out else strided_tensor(state), out_arg, lse, mask_interval(bounds),
        launch_shape(q, k),
        softmax_scale, row_max,
        HEAD_DIM=q.shape[3], BLOCK_K=tile.block_k, SLOTS=tile.num_stages, HAS_STATE=state is not None,
        num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
