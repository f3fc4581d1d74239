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

from ...kernels import PLAIN
from ...ring import Layout, Mask, bounds
from ...ring.backends import backward_backends, forward_backends
from ...ring.buffers import chunks_of
from ...ring.local.registry import resolve_backend
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
        out, lse = state[0].to(q.dtype), state[1]
        ctx.causal, ctx.waits = causal, waits
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        world, held = dist.get_world_size(), [k, v]
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv: list[Tensor] = []
        coming_dkv: Transfer | None = None
        for step in range(world):
            coming = Transfer(held, ctx.waits) if step + 1 < world else None
            part = Part(step, q.shape[1], ctx.causal)
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
            coming_dkv = Transfer(dkv, ctx.waits) if world > 1 else None
        dk, dv = coming_dkv.wait() if coming_dkv is not None else dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """``out - sigmoid(block_lse - lse) * (out - block)`` and ``lse - logsigmoid(lse - block_lse)``, in place."""
    merged = out - torch.sigmoid(block_lse - lse) * (out - block)
    merged_lse = lse - F.logsigmoid(lse - block_lse)
    out.copy_(merged)
    lse.copy_(merged_lse)


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


# by exchanges before and after attention


class Exchange:
    """What moves before and after one launch of the kernels per pass, between equal shards, and the time that it takes.

    ``queries`` makes of a shard of q or dout what this rank computes with, ``keys`` of k or v; ``results`` and
    ``gradients`` make of what it computed its shard of out and dq, and of dk and dv, which are fp32 before.
    """

    def __init__(self, layout: Layout, positions: Tensor, causal: bool, device: torch.device) -> None:
        self.world, self.waits = layout.world, Stopwatch(device)
        self.bounds = bounds(Mask(causal=causal), positions, torch.arange(layout.seqlen)).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries, with gradients."""
        out: Tensor = _ExchangedAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out


class AllGather(Exchange):
    """K/V of all ranks on every rank, in the order of positions; dK/dV reduced and scattered."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        super().__init__(layout, layout.positions(dist.get_rank()), causal, device)
        self._order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).to(device)

    def queries(self, shard: Tensor) -> Tensor:
        return shard

    def keys(self, shard: Tensor) -> Tensor:
        parts = torch.empty((self.world, *shard.shape), device=shard.device, dtype=shard.dtype)
        with self.waits.stretch():
            ALL_GATHER(parts.flatten(0, 1), shard.contiguous())
        rows = parts.transpose(0, 1).flatten(1, 2)
        return torch.empty_like(rows).index_copy_(1, self._order, rows)

    def results(self, computed: Tensor) -> Tensor:
        return computed

    def gradients(self, computed: Tensor, dtype: torch.dtype) -> Tensor:
        batch, tokens, heads, dim = computed.shape
        parts = computed[:, self._order].view(batch, self.world, tokens // self.world, heads, dim)
        parts = parts.transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        with self.waits.stretch():
            REDUCE_SCATTER(mine, parts.flatten(0, 1))
        return mine.to(dtype)


class Ulysses(Exchange):
    """Heads for tokens and back, in rank order."""

    def __init__(self, layout: Layout, causal: bool, device: torch.device) -> None:
        super().__init__(layout, torch.arange(layout.seqlen), causal, device)

    def queries(self, shard: Tensor) -> Tensor:
        """``[B, S / P, H, D]`` -> ``[B, S, H / P, D]``."""
        batch, tokens, heads, dim = shard.shape
        parts = shard.contiguous().view(batch, tokens, self.world, heads // self.world, dim)
        return self._exchanged(parts.permute(2, 0, 1, 3, 4).contiguous()).transpose(0, 1).flatten(1, 2)

    keys = queries

    def results(self, computed: Tensor) -> Tensor:
        batch, tokens, heads, dim = computed.shape
        parts = computed.contiguous().view(batch, self.world, tokens // self.world, heads, dim)
        return self._exchanged(parts.transpose(0, 1).contiguous()).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def gradients(self, computed: Tensor, dtype: torch.dtype) -> Tensor:
        return self.results(computed.to(dtype))

    def _exchanged(self, parts: Tensor) -> Tensor:
        arrived = torch.empty_like(parts)
        with self.waits.stretch():
            dist.all_to_all_single(arrived, parts)
        return arrived


class _ExchangedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: AllGather | Ulysses) -> Tensor:
        q, k, v = net.queries(q), net.keys(k), net.keys(v)
        ctx.net, ctx.scale, ctx.chunks = net, q.shape[-1] ** -0.5, chunks_of(1, q.shape[2], k.shape[2])
        ctx.backend = resolve_backend("auto", q.device)
        (backend,) = forward_backends(ctx.backend, ctx.chunks, q, softmax_scale=ctx.scale)
        backend.fold(k, v, net.bounds, scores=PLAIN, final=True)
        out, lse = backend.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return net.results(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        net: AllGather | Ulysses = ctx.net
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (net.queries(dout), q, out, lse)
        (backend,) = backward_backends(ctx.backend, ctx.chunks, *tensors, softmax_scale=ctx.scale)
        dkv = tuple(torch.empty_like(x, dtype=torch.float32) for x in (k, v))
        backend.dq(k, v, net.bounds, scores=PLAIN, local=True, final=True)
        backend.dkdv(k, v, net.bounds, scores=PLAIN, local=True, accum=None, out=dkv)
        return net.results(backend.result()), *(net.gradients(x, k.dtype) for x in dkv), None
