"""Other ways to the attention of a ring: a ring as it is usually written, all-gather of K/V, Ulysses' all-to-all.

All-gather and Ulysses compute with the kernels that our ring computes with, in one launch per pass: what differs is
what moves. The baseline ring is written from the description of the method in zhuzilin's ring-flash-attention (zigzag)
on the operator that our ``aten`` backend calls: two buffers, of which one is received while the other is computed with;
every hop a separate attention call, causal on the local shard and half of the queries or half of the keys on the
others; partial outputs merged by torch operations; dK/dV travelling in fp32 behind K/V. It is what a ring is without
the ideas of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...kernels import Bounds
from ...ring import Layout, Mask, bounds
from ...ring.backends import backward_backends, forward_backends, resolve_backend
from ...ring.buffers import chunks_of
from ..common.timing import Stopwatch

NO_DROPOUT = 0.0
# torch 2.13 renamed both, and warns of the old names
ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# the baseline ring


def baseline_ring_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, waits: Stopwatch | None = None) -> Tensor:
    """Attention of this rank's queries over the default group; with ``causal`` the shards must be an even zigzag.

    Shapes: q ``[B, S, H, D]``, k and v ``[B, S, Hkv, D]``, S equal on all ranks and, with ``causal``, even. ``waits``
    counts the time that it waits for the network.
    """
    out: Tensor = _BaselineRing.apply(q, k, v, causal, waits or Stopwatch(q.device))  # type: ignore[no-untyped-call]
    return out


class Transfer:
    """Tensors on their way to the next rank while others come from the one before."""

    def __init__(self, tensors: Sequence[Tensor], waits: Stopwatch) -> None:
        self._waits = waits
        rank, world = dist.get_rank(), dist.get_world_size()
        self._sent = [x.contiguous() for x in tensors]
        self._received = [torch.empty_like(x) for x in self._sent]
        sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in self._received]
        self._works = dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> list[Tensor]:
        """What has arrived."""
        with self._waits.stretch():
            for work in self._works:
                work.wait()
        return self._received


class Part:
    """Which of the local queries see which of the keys that are here at one step."""

    def __init__(self, step: int, rows: int, causal: bool) -> None:
        self.causal = causal and step == 0
        self.rows = self.keys = slice(0, rows)
        if causal and 0 < step <= dist.get_rank():  # a shard that starts before ours: its late half lies after us
            self.keys = slice(0, rows // 2)
        elif causal and step > 0:  # a shard that starts after ours: only our late half sees it
            self.rows = slice(rows // 2, rows)


class _BaselineRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, waits: Stopwatch) -> Tensor:
        out, lse = _forward(q, k, v, causal, waits)
        out = out.to(q.dtype)
        ctx.causal, ctx.waits = causal, waits
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*_backward(dout, q, k, v, out, lse, ctx.causal, ctx.waits), None, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, waits: Stopwatch) -> tuple[Tensor, Tensor]:
    world, held = dist.get_world_size(), [k, v]
    state: tuple[Tensor, Tensor] | None = None
    for step in range(world):
        coming = Transfer(held, waits) if step + 1 < world else None
        part = Part(step, q.shape[1], causal)
        near_k, near_v = (x[:, part.keys] for x in held)
        block, block_lse = _attention(q[:, part.rows], near_k, near_v, part.causal)
        if state is None:
            state = block.float(), block_lse
        else:
            _merge(state[0][:, part.rows], state[1][:, part.rows], block, block_lse)
        held = coming.wait() if coming else held
    assert state is not None
    return state


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """``out - sigmoid(block_lse - lse) * (out - block)`` and ``lse - logsigmoid(lse - block_lse)``, in place."""
    merged = out - torch.sigmoid(block_lse - lse) * (out - block)
    merged_lse = lse - F.logsigmoid(lse - block_lse)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, waits: Stopwatch
) -> list[Tensor]:
    world, held = dist.get_world_size(), [k, v]
    dq = torch.zeros_like(q, dtype=torch.float32)
    dkv: list[Tensor] = []
    coming: Transfer | None = None
    coming_dkv: Transfer | None = None
    for step in range(world):
        coming = Transfer(held, waits) if step + 1 < world else None
        part = Part(step, q.shape[1], causal)
        mine = tuple(x[:, part.rows] for x in (dout, q, out, lse))
        block_dq, *block_dkv = _attention_backward(mine, [x[:, part.keys] for x in held], part.causal)
        dq[:, part.rows] += block_dq
        if coming_dkv is None:
            dkv = [x.float() for x in block_dkv]
        else:
            dkv = coming_dkv.wait()
            for total, grad in zip(dkv, block_dkv, strict=True):
                total[:, part.keys] += grad
        held = coming.wait() if coming else held
        coming_dkv = Transfer(dkv, waits) if world > 1 else None
    if coming_dkv is not None:
        dkv = coming_dkv.wait()
    return [dq.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype)]


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """``out [B, S, H, D]`` and ``lse [B, S, H, 1]``."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_head, NO_DROPOUT, causal)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _attention_backward(mine: Sequence[Tensor], held: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """dq, dk and dv of one block; ``mine`` is dout, q, out and lse."""
    dout, q, out, lse, k, v = (x.transpose(1, 2) for x in (*mine, *held))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.squeeze(-1), NO_DROPOUT, causal
    )
    return [x.transpose(1, 2) for x in grads]


# one launch of the kernels per pass


def attended(q: Tensor, k: Tensor, v: Tensor, limits: Bounds) -> tuple[Tensor, Tensor]:
    """Out and lse of one shard of queries on any keys."""
    (work,) = forward_backends(backend_of(q), one_chunk(q, k), q, softmax_scale=q.shape[-1] ** -0.5)
    work.fold(k, v, limits, final=True)
    return work.result()


def gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: Bounds) -> list[Tensor]:
    """dq in q's dtype; dk and dv in fp32, as sums over ranks want them."""
    tensors = (dout, q, out, lse)
    (work,) = backward_backends(backend_of(q), one_chunk(q, k), *tensors, softmax_scale=q.shape[-1] ** -0.5)
    sums = tuple(torch.empty(x.shape, device=x.device, dtype=torch.float32) for x in (k, v))
    work.dq(k, v, limits, local=True, final=True)
    work.dkdv(k, v, limits, local=True, accum=None, out=sums)
    return [work.result(), *sums]


def backend_of(q: Tensor) -> str:
    return resolve_backend("auto", q.device)


def one_chunk(q: Tensor, k: Tensor) -> Any:
    """All heads at once."""
    return chunks_of(1, q.shape[2], k.shape[2])


def visible_keys(layout: Layout, rank: int, causal: bool, device: torch.device) -> Bounds:
    """What a rank's queries see of all keys."""
    keys = torch.arange(layout.seqlen)
    return bounds(Mask(causal=causal), layout.positions(rank), keys).to(device)


# all-gather


class AllGather:
    """Where the tokens of all ranks belong, and the network between them; equal shards."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        self.world, self.waits = layout.world, Stopwatch(device)
        self.limits = visible_keys(layout, dist.get_rank(), causal, device)
        self._order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries, with gradients."""
        out: Tensor = _AllGatherAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
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


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: AllGather) -> Tensor:
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


class Ulysses:
    """Heads for tokens and back, between equal shards in rank order."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        self.world, self.waits = layout.world, Stopwatch(device)
        positions = torch.arange(layout.seqlen)
        self.limits = bounds(Mask(causal=causal), positions, positions).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries, with gradients."""
        out: Tensor = _UlyssesAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
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


class _UlyssesAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: Ulysses) -> Tensor:
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
