"""Errors of attention results against float64, and the largest errors allowed.

The dense reference is computed in blocks of queries, because scores grow with the square of the length. Long problems
check only the first and the last key/value head, because heads differ in nothing but their data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...reference.masks import MaskOptions, add_head_dim
from .attention import forward_backward

BLOCK_BYTES = 256 << 20  # limit for the scores of one block of queries
MAX_SCORES_AT_ONCE = 1 << 28  # up to this many scores, every head is checked
RESULTS = ("out", "dq", "dk", "dv")
RESULTS_WITH_LSE = ("out", "lse", "dq", "dk", "dv")
NO_DROPOUT = 0.0


class AttentionInputs(NamedTuple):
    """Attention inputs ``[B, S, H, D]``; ``dlse`` is ``[B, H, S]``, or None if lse is not checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None = None


class ErrorJudge(NamedTuple):
    """Exact results and error limits, by result name, of the checked ``kv_heads`` and their query heads ``heads``."""

    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]
    exact: dict[str, Tensor]  # float64
    pytorch_errors: dict[str, float]  # largest errors of PyTorch's attention
    limits: dict[str, float]  # largest errors allowed

    def errors(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the largest error of each result; ``results`` hold all heads."""
        chosen = {name: _select_heads(name, x, self.heads, self.kv_heads) for name, x in results.items()}
        return self.head_errors(chosen)

    def head_errors(self, head_results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the largest error of each result; ``head_results`` hold only the checked heads."""
        return {name: _largest(x.detach().double() - self.exact[name].to(x.device)) for name, x in head_results.items()}

    def failing_results(self, errors: Mapping[str, float]) -> list[str]:
        """Return the names of results whose error is NaN or above its limit."""
        return [name for name, error in errors.items() if not error <= self.limits[name]]


def allowed_error(pytorch_error: float, largest: float, dtype: torch.dtype) -> float:
    """Return twice the error of PyTorch's attention in this dtype, plus the rounding of the largest element."""
    return 2 * pytorch_error + torch.finfo(dtype).eps * largest


def judged_heads(batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> tuple[int, ...]:
    """Return the key/value heads to check: all of a small problem, else the first and the last."""
    is_small = batch * heads * rows * keys <= MAX_SCORES_AT_ONCE
    return tuple(range(kv_heads)) if is_small else tuple(dict.fromkeys((0, kv_heads - 1)))


def build_judge(tensors: AttentionInputs, options: MaskOptions, kv_heads: Sequence[int] | None = None) -> ErrorJudge:
    """Compute float64 results and error limits for the heads to check, on the device of the inputs.

    ``kv_heads`` are the indices of those key/value heads; None means all. ``options`` are the mask. If
    ``tensors.dlse`` is given, every query row must see a key.
    """
    count, group = tensors.k.shape[2], tensors.q.shape[2] // tensors.k.shape[2]
    kv_heads = tuple(range(count) if kv_heads is None else kv_heads)
    heads = tuple(head * group + member for head in kv_heads for member in range(group))
    named = {name: x for name, x in tensors._asdict().items() if x is not None}
    part = AttentionInputs(**{name: _select_heads(name, x, heads, kv_heads) for name, x in named.items()})
    exact, pytorch = reference_results(part, options), pytorch_results(part, options)
    pytorch_errors = ErrorJudge(kv_heads, heads, exact, {}, {}).head_errors(pytorch)
    limits = {name: allowed_error(pytorch_errors[name], _largest(exact[name]), x.dtype) for name, x in pytorch.items()}
    return ErrorJudge(kv_heads, heads, exact, pytorch_errors, limits)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _select_heads(name: str, x: Tensor, heads: Sequence[int], kv_heads: Sequence[int]) -> Tensor:
    chosen = list(kv_heads if name in ("k", "v", "dk", "dv") else heads)
    return x[:, chosen] if name in ("lse", "dlse") else x[:, :, chosen]


def reference_results(tensors: AttentionInputs, options: MaskOptions) -> dict[str, Tensor]:
    """Return float64 out, lse, dq, dk and dv of the reference by name, computed block by block of queries."""
    q, k, v, dout = (x.detach().double() for x in tensors[:4])
    out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype, device=q.device)
    dlse = torch.zeros_like(lse) if tensors.dlse is None else tensors.dlse.double()
    rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    step = max(1, BLOCK_BYTES // (8 * q.shape[0] * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[1], step):
        block = slice(start, start + step)
        attend = partial(reference.attention, q_positions=rows[block], k_positions=keys, **options)
        results = forward_backward(attend, (q[:, block], k, v), dout[:, block], dlse[:, :, block])
        out[:, block], lse[:, :, block], dq[:, block] = results[:3]
        dk += results[3]
        dv += results[4]
    return dict(zip(RESULTS_WITH_LSE, (out, lse, dq, dk, dv), strict=True))


def is_full_or_causal(options: MaskOptions) -> bool:
    """Return True if ``options`` hold a full or a causal mask without a window, documents or other restrictions."""
    plain = MaskOptions(causal=False, window_size=(-1, -1), cu_seqlens=None, prefix_length=None, block_mask=None)
    return all(name == "causal" or value is plain.get(name) or value == (-1, -1) for name, value in options.items())


def pytorch_results(tensors: AttentionInputs, options: MaskOptions) -> dict[str, Tensor]:
    """Return PyTorch's out, dq, dk, dv in the inputs' dtype by name; also lse (from ``logsumexp``) if dlse is given."""
    *inputs, dout = (x.detach().transpose(1, 2).contiguous() for x in tensors[:4])
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    causal, square, group = bool(options.get("causal")), is_full_or_causal(options), q.shape[1] // k.shape[1]
    if not square or tensors.dlse is not None:
        positions = torch.arange(q.shape[2], device=q.device)
        visible = add_head_dim(reference.visible(positions, positions, **options))
    if square:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=group > 1)
    else:  # few backends take a mask with grouped heads, and the math backend keeps all scores
        keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
        # Backends return 0 or NaN for rows without visible keys. Let these rows see every key and zero their output.
        blind = ~visible.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible | blind).masked_fill(blind, 0)
    results, gradients = [out], [dout]
    if tensors.dlse is not None:
        scores = q.float() @ k.repeat_interleave(group, dim=1).float().mT * q.shape[-1] ** -0.5
        results.append(scores.masked_fill(~visible, -torch.inf).logsumexp(-1))
        gradients.append(tensors.dlse)
    grads = torch.autograd.grad(results, leaves, gradients)
    named = {name: x.detach().transpose(1, 2) for name, x in zip(RESULTS, (out, *grads), strict=True)}
    if tensors.dlse is not None:
        lse = _lse_of_operator(q.detach(), k.detach(), v.detach(), causal) if square else None
        named["lse"] = results[1].detach() if lse is None else lse
    return named


def _lse_of_operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """Return lse from PyTorch's flash operator, or None for fp32 on a GPU and for unequal head dims of q and v."""
    on_gpu = q.device.type == "cuda"
    if q.shape[-1] != v.shape[-1] or (on_gpu and q.dtype == torch.float32):
        return None
    name = "_scaled_dot_product_flash_attention" + ("" if on_gpu else "_for_cpu")
    lse: Tensor = getattr(torch.ops.aten, name)(q, k, v, NO_DROPOUT, causal)[1]
    return lse
