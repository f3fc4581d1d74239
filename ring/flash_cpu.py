"""PyTorch's own CPU flash-attention operator on one piece, as ``[B, S, H, D]``.

It takes rectangles and squares of which row i sees the first i + 1 keys; seen from the other end, the rows and the
keys in reverse, that is also a square of which row i sees all but the first i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces import Kind

NO_DROPOUT = 0.0


def forward(q: Tensor, k: Tensor, v: Tensor, kind: Kind, *, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, Sq, H, D]`` in q's dtype and ``lse`` ``[B, H, Sq]``, fp32, natural log."""
    flipped = kind is Kind.ANTICAUSAL
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_by_head(x, flipped) for x in (q, k, v)), NO_DROPOUT, kind is not Kind.RECTANGLE, scale=scale
    )
    return _by_head(out, flipped, rows=2), lse.flip(2) if flipped else lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for the ``out`` and the ``lse`` of whole rows, whatever other keys they saw."""
    flipped = kind is Kind.ANTICAUSAL
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_by_head(x, flipped) for x in (dout, q, k, v, out)),
        lse.flip(2) if flipped else lse,
        NO_DROPOUT,
        kind is not Kind.RECTANGLE,
        scale=scale,
    )
    dq, dk, dv = (_by_head(x, flipped, rows=2) for x in grads)
    return dq, dk, dv


def _by_head(x: Tensor, flipped: bool, *, rows: int = 1) -> Tensor:
    """``[B, S, H, D]`` as ``[B, H, S, D]`` or back, in reverse order of S where ``flipped``."""
    return (x.flip(rows) if flipped else x).transpose(1, 2)
