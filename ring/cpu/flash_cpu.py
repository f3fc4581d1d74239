"""PyTorch's own CPU flash-attention operator on one piece, as ``[B, S, H, D]``.

It takes rectangles and squares of which row i sees the first i + 1 keys; seen from the other end, the rows and the
keys in reverse, that is also a square of which row i sees all but the first i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pieces import Kind

NO_DROPOUT = 0.0
LEAST_ROWS = 128  # of a square on the diagonal: in smaller ones a call costs more than it saves


def forward(q: Tensor, k: Tensor, v: Tensor, kind: Kind, *, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, Sq, H, D]`` in q's dtype and ``lse`` ``[B, H, Sq]``, fp32, natural log."""
    flipped = kind is Kind.ANTICAUSAL
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *((x.flip(1) if flipped else x).transpose(1, 2) for x in (q, k, v)),
        NO_DROPOUT, kind is not Kind.RECTANGLE, scale=scale,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out.flip(1), lse.flip(2)) if flipped else (out, lse)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for the ``out`` and the ``lse`` of whole rows, whatever other keys they saw; fp32 or q's dtype.

    Of a causal square the operator computes blocks of 512 keys whole, whether its rows see them or not. So it is cut
    into small squares along the diagonal and, under them, rectangles that double in size: one call for those of a size.
    """
    given: tuple[Tensor, ...] = dout, q, k, v, out
    if kind is Kind.RECTANGLE:
        return _backward(given, lse, causal=False, scale=scale)
    flipped = kind is Kind.ANTICAUSAL
    if flipped:
        given, lse = tuple(x.flip(1) for x in given), lse.flip(2)
    grads = _causal_backward(given, lse, scale=scale)
    return tuple(x.flip(1) for x in grads) if flipped else grads  # type: ignore[return-value]


def _causal_backward(given: tuple[Tensor, ...], lse: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, squares = lse.shape[2], 1
    while rows % (2 * squares) == 0 and rows // (2 * squares) >= LEAST_ROWS:
        squares *= 2
    found = _backward(tuple(_cut(x, squares) for x in given), _cut_lse(lse, squares), causal=True, scale=scale)
    if squares == 1:
        return found
    grads = tuple(_joined(x, squares).float().contiguous() for x in found)  # a sum of several calls: in fp32
    while squares > 1:
        squares //= 2
        early, late = slice(0, rows // squares // 2), slice(rows // squares // 2, None)
        whose = late, late, early, early, late
        parts = tuple(_cut(x, squares)[:, near] for x, near in zip(given, whose, strict=True))
        found = _backward(parts, _cut_lse(lse, squares)[..., late], causal=False, scale=scale)
        for grad, part, near in zip(grads, found, (late, early, early), strict=True):
            _cut(grad, squares)[:, near] += part
    dq, dk, dv = grads
    return dq, dk, dv


def _backward(given: tuple[Tensor, ...], lse: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in given), lse, NO_DROPOUT, causal, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cut(x: Tensor, count: int) -> Tensor:
    """``[B, S, ...]`` as ``[B * count, S / count, ...]``."""
    return x.reshape(-1, x.shape[1] // count, *x.shape[2:])


def _joined(x: Tensor, count: int) -> Tensor:
    """What :func:`_cut` has cut."""
    return x.reshape(-1, x.shape[1] * count, *x.shape[2:])


def _cut_lse(lse: Tensor, count: int) -> Tensor:
    """``[B, H, S]`` as ``[B * count, H, S / count]``."""
    return _cut(lse.transpose(1, 2), count).transpose(1, 2)
