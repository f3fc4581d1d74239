"""Merge attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.checks import check_tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of the same queries over disjoint sets of keys into attention over all of them. Differentiable.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) * out_i``: the softmax over blocks of
    FlashAttention (arXiv:2205.14135, algorithm 1). Computed in fp32, or in float64 if ``outs`` are.

    Args:
        outs: attention over each set, ``[B, S, H, D]``, all of one dtype.
        lses: ``lse`` over each set, ``[B, H, S]``, natural logarithm; -inf if a row sees none of the keys.

    Returns:
        ``out [B, S, H, D]`` in the dtype of ``outs`` and ``lse [B, H, S]`` in the dtype of the computation. A row that
        sees no key of any set has ``out = 0`` and ``lse = -inf``, and gradients of 0.

    Raises:
        ValueError: there is no set, or numbers, shapes, dtypes or devices do not match.
    """
    _check(outs, lses)
    wide = torch.promote_types(outs[0].dtype, torch.float32)
    exponents = [lse.to(wide) for lse in lses]
    highest = torch.stack([lse.detach() for lse in exponents]).amax(0)
    is_blind = highest == -torch.inf
    pivot = highest.masked_fill(is_blind, 0.0)  # finite, because -inf would compute inf - inf
    weights = [(lse - pivot).exp() for lse in exponents]
    total = torch.stack(weights).sum(0).masked_fill(is_blind, 1.0)
    out = torch.zeros_like(outs[0], dtype=wide)
    for part, weight in zip(outs, weights, strict=True):
        out = out + (weight / total).transpose(1, 2)[..., None] * part
    return out.to(outs[0].dtype), (total.log() + pivot).masked_fill(is_blind, -torch.inf)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise ValueError(f"{name} is {type(parts).__name__}: it must be a list of tensors, one per set of keys")
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs has {len(outs)} tensors and lses has {len(lses)}. They must have the same number, at least 1."
        )
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x, dims in ((f"outs[{number}]", out, "[B, S, H, D]"), (f"lses[{number}]", lse, "[B, H, S]")):
            check_tensor(name, x, may_be_meta=True)
            if not x.is_floating_point() or x.dim() != dims.count(",") + 1:
                raise ValueError(
                    f"{name} is {x.dtype} of shape {list(x.shape)}: it must be a floating-point tensor of shape {dims}"
                )
        batch, rows, heads, _ = first = outs[0].shape
        if (out.shape, out.dtype, out.device) != (first, outs[0].dtype, outs[0].device):
            raise ValueError(f"outs[{number}] is {_kind(out)}: it must be like outs[0], {_kind(outs[0])}")
        if tuple(lse.shape) != (batch, heads, rows) or lse.device != out.device:
            raise ValueError(f"lses[{number}] is {_kind(lse)}: it must be [B, H, S] for outs[{number}], {_kind(out)}")


def _kind(x: Tensor) -> str:
    """Return dtype, shape and device for a message."""
    return f"{x.dtype} of shape {list(x.shape)} on {x.device}"
