"""Errors against float64, and what they may be: of some heads, block of queries by block.

A benchmark's length does not fit the dense reference (scores grow with its square), and one head tells what all do:
they differ in nothing but their data. Where several are asked for, the first and the last key/value head are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...reference.masks import Masks, by_batch
from .attention import forward_backward

BLOCK_BYTES = 256 << 20  # of the scores of one block of queries
FEW_SCORES = 1 << 28  # with no more of them every head is looked at
RESULTS = ("out", "dq", "dk", "dv")
WITH_LSE = ("out", "lse", "dq", "dk", "dv")
NO_DROPOUT = 0.0


class Inputs(NamedTuple):
    """``[B, S, H, D]``, heads of k and v a divisor of those of q; ``dlse`` is ``[B, H, S]``, where lse counts too."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None = None


class Judge(NamedTuple):
    """What results of some key/value heads, and of the query heads that read them, are held against; all by name."""

    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]
    exact: dict[str, Tensor]  # float64
    usual: dict[str, float]  # the largest errors of PyTorch's attention
    limits: dict[str, float]  # what others may be

    def errors(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """The largest difference of each result of all heads."""
        return self.differences({name: _some(name, x, self.heads, self.kv_heads) for name, x in results.items()})

    def differences(self, part: Mapping[str, Tensor]) -> dict[str, float]:
        """The same of results that are these heads alone."""
        return {name: _largest(x.detach().double() - self.exact[name].to(x.device)) for name, x in part.items()}

    def wrong(self, errors: Mapping[str, float]) -> list[str]:
        """The results that err by more than is allowed; a NaN does."""
        return [name for name, error in errors.items() if not error <= self.limits[name]]


def tolerance(pytorch_error: float, largest: float, dtype: torch.dtype) -> float:
    """Twice the error of PyTorch's attention in that dtype, plus its rounding of the largest element."""
    return 2 * pytorch_error + torch.finfo(dtype).eps * largest


def chosen_heads(batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> tuple[int, ...]:
    """Which key/value heads are looked at: all of a small problem, else the first and the last."""
    few = batch * heads * rows * keys <= FEW_SCORES
    return tuple(range(kv_heads)) if few else tuple(dict.fromkeys((0, kv_heads - 1)))


def judge_of(given: Inputs, options: Masks, kv_heads: Sequence[int] | None = None) -> Judge:
    """Compute it on the device of the inputs.

    Args:
        given: of all heads.
        options: the mask, as :func:`ringattn.reference.attention` takes it; where lse counts, every row sees a key.
        kv_heads: which to look at; default: all.
    """
    count, group = given.k.shape[2], given.q.shape[2] // given.k.shape[2]
    kv_heads = tuple(range(count) if kv_heads is None else kv_heads)
    heads = tuple(head * group + member for head in kv_heads for member in range(group))
    named = {name: x for name, x in given._asdict().items() if x is not None}
    part = Inputs(**{name: _some(name, x, heads, kv_heads) for name, x in named.items()})
    exact, plain = exact_results(part, options), pytorch_results(part, options)
    usual = Judge(kv_heads, heads, exact, {}, {}).differences(plain)
    limits = {name: tolerance(usual[name], _largest(exact[name]), x.dtype) for name, x in plain.items()}
    return Judge(kv_heads, heads, exact, usual, limits)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _some(name: str, x: Tensor, heads: Sequence[int], kv_heads: Sequence[int]) -> Tensor:
    """Some heads of an input or a result."""
    chosen = list(kv_heads if name in ("k", "v", "dk", "dv") else heads)
    return x[:, chosen] if name in ("lse", "dlse") else x[:, :, chosen]


def exact_results(given: Inputs, options: Masks) -> dict[str, Tensor]:
    """The reference and its gradients, in float64."""
    q, k, v, dout = (x.detach().double() for x in given[:4])
    out, dq, dk, dv = torch.empty_like(dout), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype, device=q.device)
    dlse = torch.zeros_like(lse) if given.dlse is None else given.dlse.double()
    rows, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    step = max(1, BLOCK_BYTES // (8 * q.shape[0] * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[1], step):
        near = slice(start, start + step)
        attend = partial(reference.attention, q_positions=rows[near], k_positions=keys, **options)
        made = forward_backward(attend, (q[:, near], k, v), dout[:, near], dlse[:, :, near])
        out[:, near], lse[:, :, near], dq[:, near] = made[:3]
        dk += made[3]
        dv += made[4]
    return dict(zip(WITH_LSE, (out, lse, dq, dk, dv), strict=True))


def is_square(options: Masks) -> bool:
    """Full or causal, and no more."""
    plain = Masks(causal=False, window_size=(-1, -1), cu_seqlens=None, prefix_length=None, block_mask=None)
    return all(name == "causal" or value is plain.get(name) or value == (-1, -1) for name, value in options.items())


def pytorch_results(given: Inputs, options: Masks) -> dict[str, Tensor]:
    """PyTorch's attention in the inputs' own dtype, as it chooses its backend: what errors are compared with.

    It returns no lse: the gradient through it is that of ``logsumexp``.
    """
    *inputs, dout = (x.detach().transpose(1, 2).contiguous() for x in given[:4])
    q, k, v = leaves = [x.requires_grad_() for x in inputs]
    causal, square, group = bool(options.get("causal")), is_square(options), q.shape[1] // k.shape[1]
    if not square or given.dlse is not None:
        positions = torch.arange(q.shape[2], device=q.device)
        seen = by_batch(reference.visible(positions, positions, **options))
    if square:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=group > 1)
    else:  # by a mask, for which few backends take grouped heads, and math keeps all scores
        keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
        # rows that see nothing, of which backends make 0 or NaN: they see all, and without dout they add nothing
        blind = ~seen.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen | blind).masked_fill(blind, 0)
    results, gradients = [out], [dout]
    if given.dlse is not None:
        scores = q.float() @ k.repeat_interleave(group, dim=1).float().mT * q.shape[-1] ** -0.5
        results.append(scores.masked_fill(~seen, -torch.inf).logsumexp(-1))
        gradients.append(given.dlse)
    grads = torch.autograd.grad(results, leaves, gradients)
    named = {name: x.detach().transpose(1, 2) for name, x in zip(RESULTS, (out, *grads), strict=True)}
    if given.dlse is not None:
        told = _lse_of_operator(q.detach(), k.detach(), v.detach(), causal) if square else None
        named["lse"] = results[1].detach() if told is None else told
    return named


def _lse_of_operator(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """``lse`` as PyTorch's flash operator computes it; None where it has none for such inputs."""
    on_gpu = q.device.type == "cuda"
    if q.shape[-1] != v.shape[-1] or (on_gpu and q.dtype == torch.float32):
        return None
    name = "_scaled_dot_product_flash_attention" + ("" if on_gpu else "_for_cpu")
    lse: Tensor = getattr(torch.ops.aten, name)(q, k, v, NO_DROPOUT, causal)[1]
    return lse
