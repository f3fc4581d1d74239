"""The truth in float64 by ``ringattn.reference``, and how far a result may be from it.

A result may be off by twice the error of PyTorch's plain formula in the same dtype, plus one rounding of its largest
term per rank, because a ring may round the part of every hop. The largest term counts, not the sum, since terms cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference.masks import add_head_dim
from ..reference.scores import apply_score_options
from .cases import Case

Results = dict[str, Tensor]
"""out, lse, dq, dk, dv and dsink of the whole sequence, those that there are."""
OUTPUTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv", "dsink")


@dataclass(frozen=True)
class Expected:
    """Exact results of a case, the error that each may have, and the rows that see no key, ``[B, H, S]``."""

    exact: Results
    limits: dict[str, float]
    blind: Tensor

    def errors(self, actual: Results) -> dict[str, float]:
        """Return the largest error of each result as a multiple of its limit; infinite for NaN."""
        ratios = {name: self.distance(name, x) for name, x in actual.items() if name in self.exact}
        return {name: float("inf") if ratio != ratio else ratio for name, ratio in ratios.items()}

    def distance(self, name: str, actual: Tensor) -> float:
        """Return the largest error of a result as a multiple of its limit."""
        return float((self.difference(name, actual).max() / self.limits[name]).item())

    def difference(self, name: str, actual: Tensor) -> Tensor:
        """Return the error of every element; rows that see no key count only where they are not 0 or -inf."""
        exact = self.exact[name]
        off = (actual.double() - exact).abs()
        return torch.where((actual == exact).to(off.device), 0.0, off) if name in OUTPUTS else off


def attend_plainly(
    whole: Results, case: Case, *, dtype: torch.dtype = torch.float64, factors: Tensor | None = None,
    heads: Tensor | None = None, **changes: Any,
) -> Results:  # fmt: skip
    """Compute out, lse and gradients by the plain formula in ``dtype``, with changed options.

    Args:
        whole: q, k, v, dout and dlse.
        case: the case, whose options apply where ``changes`` has no other.
        dtype: dtype of every product and of the weights; scores and their sum are at least float32.
        factors: dropout factors of the weights.
        heads: key/value head of every query head; default: in groups.
        **changes: options of the reference, ``sink``, and ``visible`` in place of the mask.
    """
    call = case.call()
    options: Any = {**case.options(), **changes}
    sink = changes.get("sink", call.sink)
    q, k, v = leaves = [whole[name].detach().to(dtype).requires_grad_() for name in "qkv"]
    leaves += [] if sink is None else [sink.detach().to(dtype).requires_grad_()]
    groups = torch.arange(call.heads) // (call.heads // call.kv_heads) if heads is None else heads
    queries, keys, values = q.transpose(1, 2), k.transpose(1, 2)[:, groups], v.transpose(1, 2)[:, groups]
    scale = options["softmax_scale"] or q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1])
    mask = add_head_dim(changes["visible"] if "visible" in changes else case.visible())
    wide = torch.promote_types(dtype, torch.float32)
    scores = apply_score_options((queries @ keys.mT * scale).to(wide), at, at, options).to(wide)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, leaves[3][None, :, None, None].expand(*scores.shape[:3], 1).to(wide)], -1)
    blind = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(blind[..., None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind, -torch.inf)
    weights = scores.softmax(-1)[..., : k.shape[1]].masked_fill(blind[..., None], 0.0).to(dtype)
    weights = weights if factors is None else weights * factors.to(dtype)
    out = (weights @ values).transpose(1, 2)
    grads = whole["dout"].to(dtype), whole["dlse"].to(wide).masked_fill(blind, 0.0) * call.needs_lse
    gradients = torch.autograd.grad((out, lse), leaves, grads)
    results = {"out": out, "lse": lse, "weights": weights, "blind": blind}
    results |= zip(GRADIENTS, gradients, strict=False)
    return {name: x.detach() for name, x in results.items()}


def compute_expected(case: Case, whole: Results, factors: Tensor | None = None) -> Expected:
    """Compute the exact results and the limits; ``factors`` are the dropout factors that the target drew."""
    plain = attend_plainly(whole, case, factors=factors)
    exact = {name: plain[name] for name in (*OUTPUTS, *GRADIENTS) if name in plain}
    if factors is None:
        exact |= _reference(case, whole)
    dtype = getattr(torch, case.dtype)
    theirs = attend_plainly(whole, case, dtype=dtype, factors=factors)
    sizes, limits = _sizes(case, whole, plain), dict[str, float]()
    for name, truth in exact.items():
        finite = truth.isfinite()
        error = (theirs[name].double() - truth)[finite].abs().max().item() if finite.any() else 0.0
        limits[name] = 2 * error + torch.finfo(dtype).eps * sizes[name] * max(1, case.world)
    return Expected(exact, limits, plain["blind"])


def _reference(case: Case, whole: Results) -> Results:
    """Return the reference's results, differentiated by autograd."""
    call = case.call()
    leaves = [whole[name].detach().double().requires_grad_() for name in "qkv"]
    leaves += [] if call.sink is None else [call.sink.double().requires_grad_()]
    sink = None if call.sink is None else leaves[3]
    out, lse = reference.attention(*leaves[:3], learnable_sink=sink, **case.options())
    dlse = whole["dlse"].double().masked_fill(lse == -torch.inf, 0.0) * call.needs_lse
    grads = torch.autograd.grad((out, lse), leaves, (whole["dout"].double(), dlse))
    return dict(zip((*OUTPUTS, *GRADIENTS), (out.detach(), lse.detach(), *grads), strict=False))


def _sizes(case: Case, whole: Results, plain: Results) -> dict[str, float]:
    """Return the largest sum of absolute terms behind an element of each result."""
    call, group = case.call(), case.call().heads // case.call().kv_heads
    q, k, v, dout = (whole[name].double().abs().transpose(1, 2) for name in ("q", "k", "v", "dout"))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = plain["weights"].double()
    delta = (dout * plain["out"].transpose(1, 2).abs()).sum(-1, keepdim=True)
    delta = delta + whole["dlse"].double().abs()[..., None] * call.needs_lse
    ds = weights * (dout @ v.mT + delta) * (call.softmax_scale or call.head_dim**-0.5)
    dk, dv = ((x @ y).reshape(len(x), -1, group, *y.shape[2:]).sum(2) for x, y in ((ds.mT, q), (weights.mT, dout)))
    lse = plain["lse"]
    sizes = {"out": weights @ v, "lse": lse[lse.isfinite()].abs(), "dq": ds @ k, "dk": dk, "dv": dv}
    # A score is a sum of products, and its rounding changes lse and the weights by as much.
    largest = {name: x.max().item() if x.numel() else 0.0 for name, x in sizes.items()}
    return largest | {"lse": max(1.0, largest["lse"]), "dsink": float(delta.sum((0, 2)).max())}
