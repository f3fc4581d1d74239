"""Shape checks, default arguments, and conversion to and from float64 ``[B, H, S, D]``."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_attention_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if the shapes of q, k and v do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}: it must be [B, S, H, D]")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k is {list(k.shape)} and v is {list(v.shape)}: all but the head dim must be the same")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q is {list(q.shape)} and k is {list(k.shape)}: batch and head dim must be the same")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k has {k.shape[2]} heads and q has {q.shape[2]}. The heads of q must be a multiple of the heads of k."
        )


def positions_or_default(
    q: Tensor, k: Tensor, q_positions: Tensor | None, k_positions: Tensor | None, *, is_needed: bool
) -> tuple[Tensor, Tensor]:
    """Return the given positions, or 0, 1, 2, … by default.

    Raises:
        ValueError: If positions do not fit, or if they are ``is_needed`` and a default would be ambiguous.
    """
    if is_needed and (q_positions is None) != (k_positions is None):
        raise ValueError(
            "only one of q_positions and k_positions is given: a mask, ALiBi or dropout needs both, or neither"
        )
    if is_needed and q_positions is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} tokens and k has {k.shape[1]}. With different lengths pass q_positions and "
            "k_positions, because libraries align queries and keys differently."
        )
    chosen = []
    for name, x, positions in (("q", q, q_positions), ("k", k, k_positions)):
        positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions.to(x.device)
        if positions.shape != (x.shape[1],):
            raise ValueError(
                f"{name}_positions has shape {list(positions.shape)}: it must have {x.shape[1]}, one per token"
            )
        chosen.append(positions)
    return chosen[0], chosen[1]


def scale_or_default(q: Tensor, softmax_scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


def to_head_layout(x: Tensor, heads: int) -> Tensor:
    """Convert ``[B, S, Hx, D]`` to float64 ``[B, H, S, D]``; query head h reads head ``h // (H / Hx)``."""
    return x.to(torch.float64).transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def to_token_layout(x: Tensor, heads: int) -> Tensor:
    """Convert ``[B, H, S, D]`` to ``[B, S, heads, D]``, summing each group: the transpose of :func:`to_head_layout`."""
    batch, all_heads, seqlen, dim = x.shape
    return x.reshape(batch, heads, all_heads // heads, seqlen, dim).sum(2).transpose(1, 2)
