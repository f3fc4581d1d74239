"""The aten backend on PyTorch's CPU flash-attention operator, with `blockwise` as fallback.

The operator computes rectangles and causal squares with ``D == Dv``, without softcap, ALiBi and dropout. Its backward
takes ``out`` and ``lse`` over all shards as inputs, so that gradients of a ring's regions add up exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.checks import MAX_HEAD_DIM
from ..local.operators import NO_DROPOUT, Operator
from ..local.protocol import FEATURES, Supports
from ..local.rectangles import RectangleAttention
from ..local.registry import register_backend
from . import blockwise

aten: Any = torch.ops.aten
MIN_SPLIT_ROWS = 128  # least rows of a diagonal square; with smaller ones a call costs more than it saves


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Call PyTorch's flash attention for CPUs on ``[B, H, S, D]``, and return out and ``lse [B, H, S]``."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, NO_DROPOUT, causal, scale=scale)
    return out, lse


def cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Call the backward of PyTorch's flash attention for CPUs, and return dq, dk and dv."""
    grads: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, NO_DROPOUT, causal, scale=scale
    )
    return grads


CPU_OPERATOR = Operator(cpu_forward, cpu_backward, is_heads_first=True, multiple=1)


def operator_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, in fp32 or q's dtype, for ``out`` and ``lse`` over all keys that the rows see.

    In a causal square the operator computes blocks of 512 keys in full, visible or not. Therefore the square is cut
    into small squares along the diagonal, and rectangles below them whose size doubles. One call computes all of one
    size.
    """
    inputs = dout, q, k, v, out
    if causal:
        return _causal_operator_backward(inputs, lse, scale=scale)
    return _operator_backward(inputs, lse, causal=False, scale=scale)


def _causal_operator_backward(given: tuple[Tensor, ...], lse: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a causal square; ``given`` holds dout, q, k, v and out."""
    rows, squares = lse.shape[2], 1
    while rows % (2 * squares) == 0 and rows // (2 * squares) >= MIN_SPLIT_ROWS:
        squares *= 2
    pieces = _operator_backward(
        tuple(_cut(x, squares) for x in given), _cut_lse(lse, squares), causal=True, scale=scale
    )
    if squares == 1:
        return pieces
    joined = (x.reshape(-1, rows, *x.shape[2:]) for x in pieces)
    dq, dk, dv = (x.float().contiguous() for x in joined)  # fp32, because several calls are summed
    del pieces, joined  # free the results of one call before the next
    while squares > 1:
        squares //= 2
        _add_rectangles((dq, dk, dv), given, lse, squares, scale=scale)
    return dq, dk, dv


def _add_rectangles(
    grads: tuple[Tensor, ...], given: tuple[Tensor, ...], lse: Tensor, squares: int, *, scale: float
) -> None:
    """Cut the causal square into ``squares`` along the diagonal, and add the rectangle below the diagonal of each.

    The rectangle has the late half of the square's rows and the early half of its keys.
    """
    rows = lse.shape[2] // squares
    early, late = slice(0, rows // 2), slice(rows // 2, None)
    halves = late, late, early, early, late  # of dout, q, k, v and out
    parts = tuple(_cut(x, squares)[:, half] for x, half in zip(given, halves, strict=True))
    pieces = _operator_backward(parts, _cut_lse(lse, squares)[..., late], causal=False, scale=scale)
    for grad, piece, half in zip(grads, pieces, (late, early, early), strict=True):
        _cut(grad, squares)[:, half] += piece


def _operator_backward(
    given: tuple[Tensor, ...], lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = given
    dq, dk, dv = CPU_OPERATOR.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    return dq, dk, dv


def _cut(x: Tensor, count: int) -> Tensor:
    """Return ``[B, S, ...]`` as ``[B * count, S / count, ...]``."""
    return x.reshape(-1, x.shape[1] // count, *x.shape[2:])


def _cut_lse(lse: Tensor, count: int) -> Tensor:
    """Return ``[B, H, S]`` as ``[B * count, H, S / count]``."""
    return _cut(lse.transpose(1, 2), count).transpose(1, 2)


ATEN = RectangleAttention(
    "aten",
    CPU_OPERATOR.forward,
    operator_backward,
    supports=Supports(devices=("cpu",), value_dims=range(1, MAX_HEAD_DIM + 1), features=FEATURES.keys() - {"config"}),
    blockwise=blockwise,
)
register_backend(ATEN.name, lambda: ATEN, default_for="cpu")
