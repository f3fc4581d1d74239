"""Errors against float64, and what they may be: of some heads, block of queries by block.

A benchmark's length does not fit the dense reference (scores grow with its square), and one head tells what all do:
they differ in nothing but their data. Where several are asked for, the first and the last key/value head are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...reference.masks import Masks, by_batch

BLOCK_BYTES = 256 << 20  # of the scores of one block of queries
FEW_SCORES = 1 << 28  # with no more of them every head is looked at
RESULTS = ("out", "dq", "dk", "dv")


class Exact(NamedTuple):
    """float64 results of some key/value heads and of the query heads that read them."""

    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]
    exact: tuple[Tensor, ...]  # out, dq, dk, dv of these heads

    def errors(self, results: Sequence[Tensor]) -> dict[str, float]:
        """The largest difference of each of ``[B, S, H, D]`` results; of out alone where no gradients are given."""
        chosen = (self.heads, self.heads, self.kv_heads, self.kv_heads)
        return self.differences([x[:, :, list(heads)].detach() for x, heads in zip(results, chosen, strict=False)])

    def differences(self, part: Sequence[Tensor]) -> dict[str, float]:
        """The same of results that are these heads alone."""
        named = zip(RESULTS, part, self.exact, strict=False)
        return {name: float((x.double() - exact.to(x.device)).abs().max()) for name, x, exact in named}

    def sizes(self) -> dict[str, float]:
        """The largest element of each result."""
        return {name: float(x.abs().max()) for name, x in zip(RESULTS, self.exact, strict=True)}


def chosen_heads(batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> tuple[int, ...]:
    """Which key/value heads are looked at: all of a small problem, else the first and the last."""
    few = batch * heads * rows * keys <= FEW_SCORES
    return tuple(range(kv_heads)) if few else tuple(dict.fromkeys((0, kv_heads - 1)))


def exact_results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, kv_heads: Sequence[int], options: Masks) -> Exact:
    """Compute them on the device of the inputs.

    Args:
        q, k, v, dout: ``[B, S, H, D]``, heads of k and v a divisor of those of q.
        kv_heads: which to look at.
        options: the mask, as :func:`ringattn.reference.attention` takes it.
    """
    group = q.shape[2] // k.shape[2]
    heads = [head * group + member for head in kv_heads for member in range(group)]
    q, dout = (x[:, :, heads].detach().double() for x in (q, dout))
    k, v = (x[:, :, list(kv_heads)].detach().double() for x in (k, v))
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    step = max(1, BLOCK_BYTES // (8 * q.shape[0] * len(heads) * k.shape[1]))
    for start in range(0, q.shape[1], step):
        near = slice(start, start + step)
        leaves = [x.requires_grad_() for x in (q[:, near].clone(), k.detach(), v.detach())]
        block, _ = reference.attention(*leaves, q_positions=rows[near], k_positions=keys, **options)
        grads = torch.autograd.grad(block, leaves, dout[:, near])
        out[:, near], dq[:, near] = block.detach(), grads[0]
        dk += grads[1]
        dv += grads[2]
    return Exact(tuple(kv_heads), tuple(heads), (out, dq, dk, dv))


def is_square(options: Masks) -> bool:
    """Full or causal, and no more."""
    plain = Masks(causal=False, window_size=(-1, -1), cu_seqlens=None, prefix_length=None, block_mask=None)
    return all(name == "causal" or value is plain.get(name) or value == (-1, -1) for name, value in options.items())


def pytorch_results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, of: Exact, options: Masks) -> list[Tensor]:
    """PyTorch's attention in the inputs' own dtype, of the same heads: what errors are compared with."""
    heads, kv_heads = list(of.heads), list(of.kv_heads)
    parts = (q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], dout[:, :, heads])
    *inputs, given = (x.detach().transpose(1, 2).contiguous() for x in parts)
    leaves = [x.requires_grad_() for x in inputs]
    causal = bool(options.get("causal"))
    masked: dict[str, Any] = {"is_causal": causal}
    group = len(heads) // len(kv_heads)
    keys, values = leaves[1:]
    blind: Tensor | None = None
    if not is_square(options):  # by a mask, for which few backends take grouped heads, and math keeps all scores
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        positions = torch.arange(q.shape[1], device=q.device)
        seen = by_batch(reference.visible(positions, positions, **options))
        # rows that see nothing, of which backends make 0 or NaN: they see all, and without dout they add nothing
        blind = ~seen.any(-1, keepdim=True)
        masked, given = {"attn_mask": seen | blind}, given.masked_fill(blind, 0)
    out = F.scaled_dot_product_attention(leaves[0], keys, values, enable_gqa=keys.shape[1] != len(heads), **masked)
    grads = torch.autograd.grad(out, leaves, given)
    out = out if blind is None else out.masked_fill(blind, 0)
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


def tolerance(pytorch_error: float, largest: float, dtype: torch.dtype) -> float:
    """Twice the error of PyTorch's attention in that dtype, plus its rounding of the largest element."""
    return 2 * pytorch_error + torch.finfo(dtype).eps * largest


def tolerances(of: Exact, plain: Sequence[Tensor]) -> dict[str, float]:
    """Of each result, by PyTorch's results of the same heads."""
    usual, dtype = of.differences(plain), plain[0].dtype
    return {name: tolerance(usual[name], size, dtype) for name, size in of.sizes().items()}
