"""The local kernel of a call: check it, begin a forward or backward per group of heads, and join the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import KernelConfig, Scores
from .buffers import Heads, Pair
from .local.operators import OperatorAttention
from .local.protocol import FEATURES, LocalAttention, LocalBackward, LocalForward
from .local.rectangles import MergedForward, check_forward, check_max_logits, check_result, row_dot
from .local.registry import check_supports
from .schedule.mask import Mask

_NAN_CHECKED: set[str] = set()  # names of kernels whose lse was checked for NaN


def check_kernel_features(
    kernel: LocalAttention, q: Tensor, v: Tensor, mask: Mask, scores: Scores, args: Any, *, has_backward: bool | None,
    by_row: bool,
) -> None:  # fmt: skip
    """Raise if a call needs a feature that its kernel lacks.

    ``has_backward`` means that gradients are needed, and ``by_row`` that batch rows see different keys.
    """
    needs = {
        "bounds": by_row or replace(mask, used=None, blocks=None) != Mask(),
        "seqused_k": mask.used is not None,
        "block_sparse": mask.blocks is not None,
        "softcap": bool(scores.softcap),
        "alibi_slopes": scores.alibi_slopes is not None,
        "dropout_p": scores.dropout_p > 0,
        "learnable_sink": args.learnable_sink is not None,
        "return_max_logits": args.return_max_logits,
        "backward": bool(has_backward),
        "config": args.config is not None,
    }
    check_supports(kernel, q, v, needs, scores, None if mask.blocks is None else mask.blocks.block, args.config)


def forward_backends(
    kernel: LocalAttention, groups: Sequence[Heads], q: Tensor, *, softmax_scale: float,
    config: KernelConfig | None = None, start: Pair | None = None, max_logits: bool = False,
) -> list[LocalForward]:  # fmt: skip
    """Begin a forward per group of heads, in order. ``start`` is the fp32 state ``(out, lse)`` before the first key.

    With ``max_logits``, the forwards also keep the largest score of each head.
    """
    parts: list[tuple[Tensor, Pair | None]] = [(q[:, :, heads.q], None) for heads in groups]
    if start is not None:
        out, lse = start
        parts = [(q[:, :, heads.q], (out[:, :, heads.q], lse[:, heads.q].contiguous())) for heads in groups]
    more: dict[str, Any] = {"max_logits": True} if max_logits else {}  # only for kernels with this feature
    begin: Any = partial(kernel.forward, softmax_scale=softmax_scale, config=config, **more)
    if "state" in kernel.supports.features:
        return [begin(part, start=state) for part, state in parts]
    return [
        MergedForward(partial(begin, part, start=None), part, state, kernel.name, max_logits=max_logits)
        for part, state in parts
    ]


def backward_backends(
    kernel: LocalAttention, groups: Sequence[Heads], dout: Tensor, q: Tensor, out: Tensor, lse: Tensor,
    dlse: Tensor | None = None, *, softmax_scale: float, config: KernelConfig | None = None,
) -> list[LocalBackward]:  # fmt: skip
    """Begin a backward per group of heads, in order, from ``out`` and ``lse`` over all keys."""
    parts = [
        (
            dout[:, :, heads.q],
            q[:, :, heads.q],
            out[:, :, heads.q],
            lse[:, heads.q].contiguous(),  # the kernels take a contiguous lse
            None if dlse is None else dlse[:, heads.q].contiguous(),
        )
        for heads in groups
    ]
    return [kernel.backward(*part, softmax_scale=softmax_scale, config=config) for part in parts]


def check_dlse_support(kernel: LocalAttention, q: Tensor, v: Tensor, dlse: Tensor | None) -> None:
    """Raise ValueError if there is a gradient through lse and the kernel does not support it."""
    if dlse is None:
        return
    if "lse_gradient" not in kernel.supports.features:
        raise ValueError(f"backend {kernel.name!r} does not support {FEATURES['lse_gradient']}")
    if isinstance(kernel, OperatorAttention):
        kernel.check_dlse(q, v)


def forward_result(
    kernel: LocalAttention, backends: Sequence[LocalForward], groups: Sequence[Heads], q: Tensor, v: Tensor
) -> Pair:
    """Join the results of all groups to ``out`` and ``lse`` of all heads.

    Raises:
        RuntimeError: a kernel returned another shape or dtype, or NaN in lse. The check for NaN runs in every call on
            the CPU. On a GPU it waits for the device, so it runs only in a kernel's first call.
    """
    parts = zip(groups, backends, strict=True)
    results = [check_forward(kernel.name, run.result(), q[:, :, heads.q], v.shape[3]) for heads, run in parts]
    outs, lses = zip(*results, strict=True)
    out, lse = cat_heads(outs, 2).contiguous(), cat_heads(lses, 1).contiguous()
    if "nan_inputs" not in kernel.supports.features and (lse.device.type == "cpu" or kernel.name not in _NAN_CHECKED):
        if bool(lse.isnan().any()):
            raise RuntimeError(
                f"backend {kernel.name!r} returned NaN in lse. Either q, k or v contain NaN, or the kernel is wrong."
            )
        _NAN_CHECKED.add(kernel.name)
    return out, lse


def forward_max_logits(
    kernel: LocalAttention, backends: Sequence[LocalForward], groups: Sequence[Heads], q: Tensor, lse: Tensor
) -> Tensor:
    """Join the largest scores of all groups, fp32 ``[H]``; NaN for a head whose ``lse`` has a NaN."""
    parts = zip(groups, backends, strict=True)
    largest = [check_max_logits(kernel.name, run, q[:, :, heads.q]) for heads, run in parts]
    # kernels may ignore a NaN when they compare scores
    return torch.cat(largest).masked_fill(lse.isnan().any(2).any(0), torch.nan)


def backward_result(
    kernel: LocalAttention, backends: Sequence[LocalBackward], groups: Sequence[Heads], q: Tensor
) -> Tensor:
    """Join dQ of all groups to dQ of all heads; raise RuntimeError if a kernel returned another shape or dtype."""
    grads = [backend.result() for backend in backends]
    for heads, dq in zip(groups, grads, strict=True):
        check_result(kernel.name, "dq", dq, q[:, :, heads.q].shape, q.device, q.dtype)
    return cat_heads(grads, 2).contiguous()


def skip_nan_check(kernel: LocalAttention) -> None:
    """Do not check the first results of a kernel on a GPU, because a self-check has done so."""
    _NAN_CHECKED.add(kernel.name)


def row_delta(kernel: LocalAttention, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """Return ``rowsum(dout * out) - dlse``, fp32 ``[B, H, S]``, by the kernel's own ``delta`` if it has this method."""
    own = getattr(kernel, "delta", None)
    if own is not None:
        given: Tensor = own(dout, out, dlse)
        batch, rows, heads, _ = out.shape
        check_result(kernel.name, "delta", given, (batch, heads, rows), out.device, torch.float32)
        return given
    delta = row_dot(dout, out).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def cat_heads(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate the groups of a result along ``dim``, its dimension of heads."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
