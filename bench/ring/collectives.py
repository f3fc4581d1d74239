"""The two ways around a ring: gather all of K/V on every rank, or exchange heads for tokens (Ulysses).

Both compute with the kernels that the ring computes with, in one launch per pass: what differs is what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels import Bounds
from ...ring import Layout, Mask, bounds
from ...ring.backends import backward_backends, forward_backends, resolve_backend
from ...ring.buffers import chunks_of
from ..common.timing import Stopwatch

# torch 2.13 renamed both, and warns of the old names
ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# one launch of the kernels per pass


def attended(q: Tensor, k: Tensor, v: Tensor, limits: Bounds) -> tuple[Tensor, Tensor]:
    """Out and lse of one shard of queries on any keys."""
    (work,) = forward_backends(backend_of(q), one_chunk(q, k), q, softmax_scale=q.shape[-1] ** -0.5)
    work.fold(k, v, limits, final=True)
    return work.result()


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: Bounds) -> list[Tensor]:
    """dq in q's dtype; dk and dv in fp32, as sums over ranks want them."""
    given = (dout, q, out, lse)
    (work,) = backward_backends(backend_of(q), one_chunk(q, k), *given, softmax_scale=q.shape[-1] ** -0.5)
    into = tuple(torch.empty(x.shape, device=x.device, dtype=torch.float32) for x in (k, v))
    work.dq(k, v, limits, local=True, final=True)
    work.dkdv(k, v, limits, local=True, accum=None, out=into)
    return [work.result(), *into]


def backend_of(q: Tensor) -> str:
    return resolve_backend("auto", q.device)


def one_chunk(q: Tensor, k: Tensor) -> Any:
    """All heads at once."""
    return chunks_of(1, q.shape[2], k.shape[2])


def seen_by(layout: Layout, rank: int, causal: bool, device: torch.device) -> Bounds:
    """What a rank's queries see of all keys."""
    keys = torch.arange(layout.seqlen)
    return bounds(Mask(causal=causal), layout.positions(rank), keys).to(device)


# all-gather


class Gather:
    """Where the tokens of all ranks belong, and the network between them; equal shards."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        self.world, self.waits = layout.world, Stopwatch(device)
        self.limits = seen_by(layout, dist.get_rank(), causal, device)
        self._order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries, with gradients."""
        out: Tensor = _AllGather.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def whole(self, shard: Tensor) -> Tensor:
        """``[B, S, H, D]`` in the order of positions."""
        parts = torch.empty((self.world, *shard.shape), device=shard.device, dtype=shard.dtype)
        with self.waits.stretch():
            ALL_GATHER(parts.flatten(0, 1), shard.contiguous())
        rows = parts.transpose(0, 1).flatten(1, 2)
        return torch.empty_like(rows).index_copy_(1, self._order, rows)

    def summed(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum over ranks."""
        batch, tokens, heads, dim = whole.shape
        parts = whole[:, self._order].view(batch, self.world, tokens // self.world, heads, dim)
        parts = parts.transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        with self.waits.stretch():
            REDUCE_SCATTER(mine, parts.flatten(0, 1))
        return mine


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: Gather) -> Tensor:
        keys, values = net.whole(k), net.whole(v)
        out, lse = attended(q, keys, values, net.limits)
        ctx.net = net
        ctx.save_for_backward(q, keys, values, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        dq, dk, dv = gradients(dout, q, keys, values, out, lse, ctx.net.limits)
        return dq, ctx.net.summed(dk).to(keys.dtype), ctx.net.summed(dv).to(values.dtype), None


# Ulysses


class Exchange:
    """Heads for tokens and back, between equal shards in rank order."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        self.world, self.waits = layout.world, Stopwatch(device)
        positions = torch.arange(layout.seqlen)
        self.limits = bounds(Mask(causal=causal), positions, positions).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries, with gradients."""
        out: Tensor = _Ulysses.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def by_head(self, shard: Tensor) -> Tensor:
        """``[B, S / P, H, D]`` -> ``[B, S, H / P, D]``."""
        batch, tokens, heads, dim = shard.shape
        parts = shard.view(batch, tokens, self.world, heads // self.world, dim).permute(2, 0, 1, 3, 4).contiguous()
        return self._exchanged(parts).transpose(0, 1).flatten(1, 2)

    def by_token(self, whole: Tensor) -> Tensor:
        """Back again."""
        batch, tokens, heads, dim = whole.shape
        parts = whole.view(batch, self.world, tokens // self.world, heads, dim).transpose(0, 1).contiguous()
        return self._exchanged(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, parts: Tensor) -> Tensor:
        arrived = torch.empty_like(parts)
        with self.waits.stretch():
            dist.all_to_all_single(arrived, parts)
        return arrived


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: Exchange) -> Tensor:
        mine = [net.by_head(x.contiguous()) for x in (q, k, v)]
        out, lse = attended(mine[0], mine[1], mine[2], net.limits)
        ctx.net = net
        ctx.save_for_backward(*mine, out, lse)
        return net.by_token(out.contiguous())

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        net = ctx.net
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = gradients(net.by_head(dout.contiguous()), q, k, v, out, lse, net.limits)
        back = [net.by_token(x.to(like.dtype).contiguous()) for x, like in zip((dq, dk, dv), (q, k, v), strict=True)]
        return (*back, None)
