"""The host side of the Hopper forward: what it takes, its descriptors, its launch."""

from __future__ import annotations

import torch

from .bounds import Bounds
from .config import Tile
from .gpu import gpu_specs, shared_limit
from .hopper.steps import CONSUMERS, ROWS
from .launch import Descriptors, check_describable, interval, launch, programs, shape_of, strided
from .scores import Scores

HEAD_DIMS = (64, 128, 256)
"""What one wgmma takes as columns of the result, and a TMA box holds without padding."""

ARCH = 90

THREAD_REGISTERS = 168
"""Per thread at launch: 65,536 among three warpgroups; the producer's are handed to the consumers."""

MIN_SLOTS = 2  # a consumer waits for the V of the next step before it gives back that of this one

TAKES = "forward_kernel='hopper' takes"


def takes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    scores: Scores,
    tile: Tile,
    *,
    requested: bool = True,
) -> bool:
    """Whether the Hopper kernel runs this hop: not with ``seqused_k`` or ``block_sparse``, nor without rows or keys.

    These come and go from hop to hop, and the portable kernel takes them, with the same tile. What is the same for
    all hops of a call is the caller's to choose, and refused on every hop alike: where the caller ``requested`` this
    kernel. Where a tuned table did, what does not suit it goes to the portable one.

    Raises:
        ValueError: a GPU, dtype, head dim, modified scores, an address or stride, or a tile that it does not take.
    """
    try:
        check_call(q, v, scores, tile)
        check_describable(TAKES, q=q, k=k, v=v)
    except ValueError:
        if requested:
            raise
        return False
    return runs(bounds, q, k)


def check_call(q: torch.Tensor, v: torch.Tensor, scores: Scores, tile: Tile | None) -> None:
    """Refuse what is the same for all hops, so known before the first: all but addresses and strides; ValueError."""
    check_kind(q, v, scores, HEAD_DIMS, TAKES, "the portable kernel")
    if tile is not None:  # the built-in one fits
        check_tile(q.shape[3], tile)


def check_kind(
    q: torch.Tensor, v: torch.Tensor, scores: Scores, head_dims: tuple[int, ...], takes: str, portable: str
) -> None:
    """Refuse a GPU, dtype, head dim or scores that a Hopper kernel does not take, in its own words: ValueError."""
    if not is_hopper(q.device):
        raise ValueError(f"q is on {q.device}: {takes} GPUs of compute capability 9.0")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q is {q.dtype}: {takes} float16 and bfloat16")
    if q.shape[3] not in head_dims or v.shape[3] != q.shape[3]:
        raise ValueError(
            f"q has head dim {q.shape[3]} and v {v.shape[3]}: {takes} one of {', '.join(map(str, head_dims))}, "
            "the same of both"
        )
    if not scores.is_plain:
        raise ValueError(f"scores have a softcap, ALiBi slopes or dropout: {takes} plain ones, {portable} these")


def check_room(field: str, head_dim: int, nbytes: int, fewer: str) -> None:
    """Refuse a tile whose shared memory, with 1 KiB for the barriers, a block does not have: ValueError."""
    if (needed := nbytes + 1024) > (limit := shared_limit(ARCH)):
        raise ValueError(
            f"{field} needs {needed} bytes of shared memory at head dim {head_dim}, sm_{ARCH} has "
            f"{limit}: take fewer {fewer}"
        )


def runs(bounds: Bounds, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a hop is one of the Hopper kernels': with queries and keys, without padding or blocks."""
    return bounds.seqused_k is None and bounds.block_sparse is None and q.numel() > 0 and k.numel() > 0


def is_hopper(device: torch.device) -> bool:
    gpu = gpu_specs(device)
    return gpu is not None and gpu.arch == ARCH


def shared_bytes(head_dim: int, tile: Tile) -> int:
    """Of the tiles of Q, K and V; the barriers take a few hundred more."""
    return 2 * head_dim * (tile.block_q + 2 * tile.num_stages * tile.block_k)


def check_tile(head_dim: int, tile: Tile) -> None:
    """Refuse a tile that the kernel is not written for: ValueError."""
    if tile.block_q != CONSUMERS * ROWS or tile.num_warps != 4 * CONSUMERS:
        raise ValueError(
            f"config.forward has {tile.block_q} rows and {tile.num_warps} warps: forward_kernel='hopper' takes "
            f"{CONSUMERS * ROWS} rows and {4 * CONSUMERS} warps, two warpgroups of {ROWS} rows"
        )
    if tile.block_k not in (64, 128) or tile.num_stages < MIN_SLOTS:
        raise ValueError(
            f"config.forward has {tile.block_k} keys and {tile.num_stages} stages: forward_kernel='hopper' takes 64 or "
            f"128 keys and at least {MIN_SLOTS} stages"
        )
    check_room("config.forward", head_dim, shared_bytes(head_dim, tile), "keys or stages")


def launch_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: Bounds,
    softmax_scale: float,
    tile: Tile,
    described: Descriptors,
) -> None:
    """As the launch of ``forward_kernel`` in ``attention.Forward``, for what :func:`takes` lets through."""
    from .hopper.forward import hopper_kernel  # Gluon takes a while to import, and only this kernel needs it

    into = strided(out)
    launch(
        hopper_kernel, programs(q.shape[1], tile.block_q, q), q.device,
        described(q, ROWS), described(k, tile.block_k), described(v, tile.block_k),
        into if state is None or state is out else strided(state), into, lse, interval(bounds), shape_of(q, k),
        softmax_scale,
        HEAD_DIM=q.shape[3], BLOCK_K=tile.block_k, SLOTS=tile.num_stages, HAS_STATE=state is not None,
        num_warps=4, maxnreg=THREAD_REGISTERS,
    )  # fmt: skip
