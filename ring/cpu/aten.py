"""The CPU backend: PyTorch's own flash-attention operator where it can, a blockwise body where it cannot.

The operator takes rectangles and square causal regions with ``D == Dv``, without softcap, ALiBi and dropout. Its
backward takes ``out`` and ``lse`` from outside, those over all shards, so that the gradients of the regions of a ring
add up exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.checks import MAX_HEAD_DIM
from ..local.protocol import FEATURES, Supports
from ..local.rectangles import RectangleAttention
from ..local.registry import register_backend
from . import blockwise

NO_DROPOUT = 0.0
LEAST_ROWS = 128  # of a square on the diagonal: in smaller ones a call costs more than it saves


def operator_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` of a rectangle."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), NO_DROPOUT, causal, scale=scale
    )
    return out.transpose(1, 2), lse


def operator_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for the ``out`` and the ``lse`` of whole rows, whatever other keys they saw; fp32 or q's dtype.

    Of a causal square the operator computes blocks of 512 keys whole, whether its rows see them or not. So it is cut
    into small squares along the diagonal and, under them, rectangles that double in size: one call for those of a size.
    """
    given = dout, q, k, v, out
    if causal:
        return _causal_operator_backward(given, lse, scale=scale)
    return _operator_backward(given, lse, causal=False, scale=scale)


def _causal_operator_backward(given: tuple[Tensor, ...], lse: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, squares = lse.shape[2], 1
    while rows % (2 * squares) == 0 and rows // (2 * squares) >= LEAST_ROWS:
        squares *= 2
    pieces = _operator_backward(
        tuple(_cut(x, squares) for x in given), _cut_lse(lse, squares), causal=True, scale=scale
    )
    if squares == 1:
        return pieces
    whole = (x.reshape(-1, rows, *x.shape[2:]) for x in pieces)
    dq, dk, dv = (x.float().contiguous() for x in whole)  # a sum of several calls: in fp32
    del pieces, whole  # of one size alone: what a call returns is not kept beside the next one's
    while squares > 1:
        squares //= 2
        _add_rectangles((dq, dk, dv), given, lse, squares, scale=scale)
    return dq, dk, dv


def _add_rectangles(
    grads: tuple[Tensor, ...], given: tuple[Tensor, ...], lse: Tensor, squares: int, *, scale: float
) -> None:
    """Add what the late half of the rows of every square sees of the early half of its keys."""
    rows = lse.shape[2] // squares
    early, late = slice(0, rows // 2), slice(rows // 2, None)
    whose = late, late, early, early, late
    parts = tuple(_cut(x, squares)[:, near] for x, near in zip(given, whose, strict=True))
    pieces = _operator_backward(parts, _cut_lse(lse, squares)[..., late], causal=False, scale=scale)
    for grad, piece, near in zip(grads, pieces, (late, early, early), strict=True):
        _cut(grad, squares)[:, near] += piece


def _operator_backward(
    given: tuple[Tensor, ...], lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in given), lse, NO_DROPOUT, causal, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cut(x: Tensor, count: int) -> Tensor:
    """``[B, S, ...]`` as ``[B * count, S / count, ...]``."""
    return x.reshape(-1, x.shape[1] // count, *x.shape[2:])


def _cut_lse(lse: Tensor, count: int) -> Tensor:
    """``[B, H, S]`` as ``[B * count, H, S / count]``."""
    return _cut(lse.transpose(1, 2), count).transpose(1, 2)


ATEN = RectangleAttention(
    "aten",
    operator_forward,
    operator_backward,
    supports=Supports(devices=("cpu",), value_dims=range(1, MAX_HEAD_DIM + 1), features=FEATURES.keys() - {"config"}),
    blockwise=blockwise,
)
register_backend(ATEN.name, lambda: ATEN, default_for="cpu")
