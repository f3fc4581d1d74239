"""Local kernels written outside of the package, from public names of ringattn and torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringattn import RectangleAttention, Supports, register_backend
from ringattn.kernels import Bounds, Scores

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return SDPA's flash attention on the CPU, with its ``lse``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    inputs = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, causal, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def sdpa() -> RectangleAttention:
    return RectangleAttention("sdpa", forward, backward, supports=Supports(devices=("cpu",)))


class Dense:
    """Local kernel without state in plain torch, for equal numbers of query and key heads."""

    name = "dense"
    supports = Supports(devices=("cpu",), dtypes=(torch.float32,), features=("bounds", "backward"))

    def forward(self, q: Tensor, *, softmax_scale: float, **_: Any) -> DenseShards:
        return DenseShards(q, softmax_scale)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float, **_: Any
    ) -> DenseShards:
        return DenseShards(q, softmax_scale, dout, (dout * out).sum(-1).transpose(1, 2), lse)


class DenseShards:
    """Forward or backward of one query shard."""

    def __init__(self, q: Tensor, scale: float, *given: Tensor) -> None:
        self.q, self.scale, self.given = q, scale, given
        self.results: Any = torch.zeros_like(q)

    def scores(self, k: Tensor, bounds: Bounds) -> Tensor:
        scores = self.scale * torch.einsum("bqhd,bkhd->bhqk", self.q, k)
        if bounds.lo is None or bounds.hi is None:
            return scores
        keys = torch.arange(k.shape[1])
        return scores.masked_fill((keys < bounds.lo[:, None]) | (keys >= bounds.hi[:, None]), -torch.inf)

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, final: bool) -> None:
        shard = self.scores(k, bounds)
        lse = shard.logsumexp(-1)
        weights = (shard - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        self.results = torch.einsum("bhqk,bkhd->bqhd", weights, v), lse

    def dscores(self, k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
        dout, delta, lse = self.given
        weights = (self.scores(k, bounds) - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        return weights, self.scale * weights * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta[..., None])

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores, local: bool, final: bool) -> None:
        self.results += torch.einsum("bhqk,bkhd->bqhd", self.dscores(k, v, bounds)[1], k)

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, accum: Callable[[], tuple[Tensor, ...]] | None,
        out: tuple[Tensor, ...], **_: Any,
    ) -> None:  # fmt: skip
        weights, dscores = self.dscores(k, v, bounds)
        grads = (
            torch.einsum("bhqk,bqhd->bkhd", dscores, self.q),
            torch.einsum("bhqk,bqhd->bkhd", weights, self.given[0]),
        )
        arrived = (torch.zeros(()),) * 2 if accum is None else accum()
        for x, grad, base in zip(out, grads, arrived, strict=True):
            x.copy_(base + grad)

    def result(self) -> Any:
        return self.results


register_backend("sdpa", sdpa)
