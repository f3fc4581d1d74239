"""Reference results: exact attention in float64, and PyTorch's own attention in the same dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ringattn import reference
from ringattn.reference.masks import add_head_dim
from ringattn.reference.scores import ScoreOptions, alibi_bias, dropout_factors


class Results(NamedTuple):
    """Attention ``[B, S, H, D]`` with its ``lse`` ``[B, H, S]``, and the gradients for a given (dout, dlse)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class ReferenceModifiers(NamedTuple):
    """Changes to scores and weights, given as tensors because SDPA has no arguments for them."""

    softcap: float = 0.0
    bias: Tensor | None = None  # `[1 or B, H, Sq, Sk]`, added to the scores after the softcap
    factors: Tensor | None = None  # `[B, H, Sq, Sk]`, the dropout factors of the weights
    sink: Tensor | None = None  # `[H]`, one extra logit per head

    @classmethod
    def from_scores(
        cls, shape: tuple[int, ...], q_positions: Tensor, k_positions: Tensor, scores: ScoreOptions,
        sink: Tensor | None = None,
    ) -> ReferenceModifiers:  # fmt: skip
        """Compute the reference's modifiers for scores of ``shape`` ``[B, H, Sq, Sk]``."""
        slopes = scores.get("alibi_slopes")
        bias = None if slopes is None else alibi_bias(slopes, q_positions, k_positions)
        return cls(scores.get("softcap", 0.0), bias, dropout_factors(shape, q_positions, k_positions, scores), sink)


PLAIN = ReferenceModifiers()


def exact(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None,
    *, learnable_sink: Tensor | None = None, **options: Any,
) -> Results:  # fmt: skip
    """Return the float64 reference and its autograd gradients; ``options`` are the reference's."""
    return exact_with_sink(q, k, v, dout, dlse, learnable_sink, **options)[0]


def exact_with_sink(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, sink: Tensor | None, **options: Any
) -> tuple[Results, Tensor | None]:
    """Return the same as :func:`exact`, and the gradient of the sink if there is one."""
    leaves = [x.detach().to(torch.float64).requires_grad_() for x in (q, k, v, sink) if x is not None]
    out, lse = reference.attention(*leaves[:3], learnable_sink=None if sink is None else leaves[3], **options)
    dq, dk, dv, *dsink = _gradients(out, lse, leaves, dout, dlse)
    return Results(out.detach(), lse.detach(), dq, dk, dv), dsink[0] if dsink else None


def pytorch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None,
    *, visible: Tensor | None = None, softmax_scale: float | None = None, modified: ReferenceModifiers = PLAIN,
) -> Results:  # fmt: skip
    """Return PyTorch's SDPA and its gradients in the dtype of ``q``.

    SDPA has no softcap and takes no dropout mask. With either, attention is written out in torch, each operation in the
    dtype of ``q``. A sink is one more key per head, with value 0 and the sink as bias. SDPA returns no ``lse``, so it
    is PyTorch's ``logsumexp`` in fp32, or in float64 for float64 inputs. Rows without visible keys get ``out = 0`` and
    ``lse = -inf``, because conventions differ for them.

    Args:
        q: queries.
        k: keys.
        v: values.
        dout: gradient of the output.
        dlse: gradient of ``lse``, or None.
        visible: bool mask ``[Sq, Sk]`` or ``[B, Sq, Sk]``, True where a key is visible.
        softmax_scale: scale of the scores, or None for the default.
        modified: changes to scores and weights.
    """
    inputs = (q, k, v, dout, dlse, modified.sink)
    return pytorch_with_sink(*inputs, visible=visible, softmax_scale=softmax_scale, modified=modified)[0]


def pytorch_with_sink(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, sink: Tensor | None,
    *, visible: Tensor | None, softmax_scale: float | None = None, modified: ReferenceModifiers = PLAIN,
) -> tuple[Results, Tensor | None]:  # fmt: skip
    """Return the same as :func:`pytorch`, and the gradient of the sink if there is one."""
    modified = modified._replace(sink=None if sink is None else sink.detach().clone().requires_grad_())
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    visible = add_head_dim(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool) if visible is None else visible)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    queries, keys, values = (x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in leaves)
    wide = torch.promote_types(q.dtype, torch.float32)
    bias, blind = _bias(visible, modified, wide)
    if modified.sink is not None:
        keys, values = (pad(x, (0, 0, 0, 1)) for x in (keys, values))
    plain = modified.softcap == 0 and modified.factors is None
    if keys.shape[2] == 0:  # SDPA's CPU kernel does not support zero keys
        out = queries.sum() * 0 + values.new_zeros(*queries.shape[:3], v.shape[3])
    elif plain:
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=bias.to(q.dtype), scale=scale)
    else:
        out = _eager_sdpa(queries, keys, values, bias.to(q.dtype), scale, modified)
    scores = _apply_softcap(queries.to(wide) @ keys.to(wide).mT * scale, modified.softcap) + bias
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf)
    out = out.masked_fill(blind[..., None], 0.0).transpose(1, 2)
    if modified.sink is not None:
        leaves.append(modified.sink)
    dq, dk, dv, *dsink = _gradients(out, lse, leaves, dout, dlse)
    return Results(out.detach(), lse.detach(), dq, dk, dv), dsink[0] if dsink else None


def _eager_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, modified: ReferenceModifiers) -> Tensor:
    weights = (_apply_softcap(q @ k.mT * scale, modified.softcap) + bias).softmax(-1)[..., : k.shape[2]]
    if modified.factors is not None:
        weights = weights * pad(modified.factors, (0, k.shape[2] - modified.factors.shape[3])).to(q.dtype)
    return weights @ v


def _apply_softcap(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _bias(visible: Tensor, modified: ReferenceModifiers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the additive bias ``[B or 1, H or 1, Sq, Sk]`` and a mask of the rows without visible keys.

    With a sink, the bias has one more key. Rows without visible keys see all keys here, which keeps NaN out of the
    backward. The callers overwrite their results, and with them their gradients.
    """
    blind = ~visible.any(-1)
    if modified.sink is not None:
        blind = blind & (modified.sink == -torch.inf)[:, None]
    bias = torch.zeros(()).to(dtype) if modified.bias is None else modified.bias.to(dtype)
    bias = (bias + torch.zeros(visible.shape, dtype=dtype)).masked_fill(~(visible | blind[..., None]), -torch.inf)
    if modified.sink is not None:
        heads = len(modified.sink)
        column = modified.sink.to(dtype)[:, None, None].expand(bias.shape[0], heads, bias.shape[2], 1)
        bias = torch.cat([bias.expand(-1, heads, -1, -1), column], -1)
    return bias, blind


def operator_lse(q: Tensor, k: Tensor, visible: Tensor, softmax_scale: float | None, sink: Tensor | None) -> Tensor:
    """Return ``lse`` of PyTorch's CPU flash attention, whose 16-bit exponential is less exact than fp32."""
    bias, blind = _bias(add_head_dim(visible), ReferenceModifiers(sink=sink), q.dtype)
    queries, keys = (x.detach().transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (q, k))
    keys = keys if sink is None else pad(keys, (0, 0, 0, 1))
    if keys.shape[2] == 0:  # the operator does not support zero keys
        return torch.full(queries.shape[:3], -torch.inf)
    bias = bias.expand(*queries.shape[:2], -1, -1)
    lse: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, keys, 0.0, False, attn_mask=bias, scale=softmax_scale
    )[1]
    return lse.masked_fill(blind, -torch.inf)


def _gradients(out: Tensor, lse: Tensor, leaves: list[Tensor], dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    dlse = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    return torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse))
