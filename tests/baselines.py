"""The two results that ours is measured against: exact in float64, and PyTorch's own attention in the same dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringattn import reference


class Results(NamedTuple):
    """Attention ``[B, S, H, D]`` with its ``lse`` ``[B, H, S]``, and the gradients for a given (dout, dlse)."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Results:
    """The reference and its gradients by autograd, all float64."""
    leaves = [x.detach().to(torch.float64).requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(
        *leaves, causal=causal, softmax_scale=softmax_scale, q_positions=q_positions, k_positions=k_positions
    )
    return _with_gradients(out, lse, leaves, dout, dlse)


def pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    seen: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Results:
    """PyTorch's SDPA in the dtype of ``q``, with ``seen`` as its mask (bool ``[Sq, Sk]``, True: visible).

    SDPA returns no ``lse``: it is PyTorch's ``logsumexp`` in fp32 (float64 for float64), which every attention uses.
    Rows that see nothing are kept from it, since conventions differ on them: ``out = 0``, ``lse = -inf``.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool) if seen is None else seen
    rows = seen.any(-1).nonzero().squeeze(-1)
    queries, keys, values = (x.transpose(1, 2) for x in (leaves[0][:, rows], *leaves[1:]))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    grouped = q.shape[2] != k.shape[2]
    some = scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen[rows], scale=scale, enable_gqa=grouped
    ).transpose(1, 2)
    out = some.new_zeros(*q.shape[:3], v.shape[3]).index_copy(1, rows, some)
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = (queries.to(wide) @ keys.to(wide).mT * scale).masked_fill(~seen[rows], -torch.inf)
    lse = scores.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf).index_copy(2, rows, scores.logsumexp(-1))
    return _with_gradients(out, lse, leaves, dout, dlse)


def _with_gradients(out: Tensor, lse: Tensor, leaves: list[Tensor], dout: Tensor, dlse: Tensor | None) -> Results:
    dlse = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse))
    return Results(out.detach(), lse.detach(), dq, dk, dv)
