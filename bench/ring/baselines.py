"""Other methods for the attention of a ring: a conventional ring, all-gather of K/V, and Ulysses' all-to-all.

All-gather and Ulysses compute with the same kernels as our ring, in one launch per pass. They differ only in what they
send.

The baseline ring follows the description of zhuzilin's ring-flash-attention (zigzag). It uses the operator that our
``aten`` backend calls:

- two buffers: one is received while the other is used for compute
- one attention call per hop, causal on the local shard, and on half of the queries or keys on other shards
- partial outputs merged by torch operators
- dK/dV sent in fp32 after K/V
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
from ...ring.buffers import split_heads
from ...ring.local.registry import resolve_backend
from ..common.timing import DeviceStopwatch

NO_DROPOUT = 0.0
# torch 2.13 renamed both and warns about the old names.
ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# The baseline ring.


def baseline_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, waits: DeviceStopwatch | None = None
) -> Tensor:
    """Return the attention of this rank's queries, from a conventional ring over the default group.

    Shapes: q ``[B, S, H, D]``, k and v ``[B, S, Hkv, D]``. S is equal on all ranks. With ``causal`` the layout must be
    zigzag and S even. ``waits`` times the waits for the network.
    """
    out: Tensor = _BaselineRing.apply(q, k, v, causal, waits or DeviceStopwatch(q.device))  # type: ignore[no-untyped-call]
    return out


class RingTransfer:
    """A transfer in progress: ``tensors`` go to the next rank, and those of the previous rank arrive."""

    def __init__(self, tensors: Sequence[Tensor], waits: DeviceStopwatch) -> None:
        self._waits = waits
        rank, world = dist.get_rank(), dist.get_world_size()
        self._sent = [x.contiguous() for x in tensors]
        self._received = [torch.empty_like(x) for x in self._sent]
        sends = [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in self._received]
        self._works = dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> list[Tensor]:
        """Wait for the transfer; return the received tensors."""
        with self._waits.count_block():
            for work in self._works:
                work.wait()
        return self._received


class StepSlices:
    """Slices of the ``rows`` local queries and of the current keys that a step computes, and its ``causal`` flag."""

    def __init__(self, step: int, rows: int, causal: bool) -> None:
        self.causal = causal and step == 0
        self.rows = self.keys = slice(0, rows)
        if causal and 0 < step <= dist.get_rank():  # an earlier rank's shard: its second half lies after our queries
            self.keys = slice(0, rows // 2)
        elif causal and step > 0:  # a later rank's shard: only our second half sees it
            self.rows = slice(rows // 2, rows)


class _BaselineRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, waits: DeviceStopwatch) -> Tensor:
        world, current = dist.get_world_size(), [k, v]
        state: tuple[Tensor, Tensor] | None = None
        for step in range(world):
            incoming = RingTransfer(current, waits) if step + 1 < world else None
            part = StepSlices(step, q.shape[1], causal)
            part_k, part_v = (x[:, part.keys] for x in current)
            block, block_lse = _attention(q[:, part.rows], part_k, part_v, part.causal)
            if state is None:
                state = block.float(), block_lse
            else:
                _merge(state[0][:, part.rows], state[1][:, part.rows], block, block_lse)
            current = incoming.wait() if incoming else current
        assert state is not None
        out, lse = state[0].to(q.dtype), state[1]
        ctx.causal, ctx.waits = causal, waits
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        world, current = dist.get_world_size(), [k, v]
        dq = torch.zeros_like(q, dtype=torch.float32)
        dkv: list[Tensor] = []
        incoming_dkv: RingTransfer | None = None
        for step in range(world):
            incoming = RingTransfer(current, ctx.waits) if step + 1 < world else None
            part = StepSlices(step, q.shape[1], ctx.causal)
            queries = tuple(x[:, part.rows] for x in (dout, q, out, lse))
            block_dq, *block_dkv = _attention_backward(queries, [x[:, part.keys] for x in current], part.causal)
            dq[:, part.rows] += block_dq
            if incoming_dkv is None:
                dkv = [x.float() for x in block_dkv]
            else:
                dkv = incoming_dkv.wait()
                for total, grad in zip(dkv, block_dkv, strict=True):
                    total[:, part.keys] += grad
            current = incoming.wait() if incoming else current
            incoming_dkv = RingTransfer(dkv, ctx.waits) if world > 1 else None
        dk, dv = incoming_dkv.wait() if incoming_dkv is not None else dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge a block into ``out`` and ``lse`` in place, which become the attention over both sets of keys."""
    merged = out - torch.sigmoid(block_lse - lse) * (out - block)
    merged_lse = lse - F.logsigmoid(lse - block_lse)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return ``out [B, S, H, D]`` and ``lse [B, S, H, 1]`` of one block from PyTorch's CPU operator."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_head, NO_DROPOUT, causal)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def _attention_backward(query_tensors: Sequence[Tensor], key_tensors: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """Return dq, dk and dv of one block; ``query_tensors`` is dout, q, out and lse, ``key_tensors`` is k and v."""
    dout, q, out, lse, k, v = (x.transpose(1, 2) for x in (*query_tensors, *key_tensors))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.squeeze(-1), NO_DROPOUT, causal
    )
    return [x.transpose(1, 2) for x in grads]


# Collectives before and after attention.


class CollectiveAttention:
    """Attention with equal shards in one launch per pass, with collectives before and after.

    Subclasses define the collectives. ``queries`` turns a shard of q or dout into what this rank computes with, and
    ``keys`` a shard of k or v. ``results`` turns the computed out or dq into this rank's shard, and ``gradients`` the
    computed fp32 dk or dv. ``positions`` are those of the queries, and ``waits`` times the collectives.
    """

    def __init__(self, layout: Layout, positions: Tensor, mask: Mask, device: torch.device) -> None:
        self.world, self.waits = layout.world, DeviceStopwatch(device)
        self.bounds = bounds(mask, positions, torch.arange(layout.seqlen)).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's queries, differentiable by q, k and v."""
        out: Tensor = _CollectiveFunction.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out


class AllGatherAttention(CollectiveAttention):
    """Attention that gathers K/V on every rank in position order, and reduce-scatters dK/dV."""

    def __init__(self, layout: Layout, mask: Mask, device: torch.device) -> None:
        super().__init__(layout, layout.positions(dist.get_rank()), mask, device)
        self._order = torch.cat([layout.positions(rank) for rank in range(layout.world)]).to(device)

    def queries(self, shard: Tensor) -> Tensor:
        return shard

    def keys(self, shard: Tensor) -> Tensor:
        parts = torch.empty((self.world, *shard.shape), device=shard.device, dtype=shard.dtype)
        with self.waits.count_block():
            ALL_GATHER(parts.flatten(0, 1), shard.contiguous())
        rows = parts.transpose(0, 1).flatten(1, 2)
        return torch.empty_like(rows).index_copy_(1, self._order, rows)

    def results(self, computed: Tensor) -> Tensor:
        return computed

    def gradients(self, computed: Tensor, dtype: torch.dtype) -> Tensor:
        batch, tokens, heads, dim = computed.shape
        parts = computed[:, self._order].view(batch, self.world, tokens // self.world, heads, dim)
        parts = parts.transpose(0, 1).contiguous()
        shard = torch.empty_like(parts[0])
        with self.waits.count_block():
            REDUCE_SCATTER(shard, parts.flatten(0, 1))
        return shard.to(dtype)


class AllToAllAttention(CollectiveAttention):
    """Attention that exchanges shards of tokens for shards of heads by all-to-all, and exchanges the results back."""

    def __init__(self, layout: Layout, mask: Mask, device: torch.device) -> None:
        super().__init__(layout, torch.arange(layout.seqlen), mask, device)

    def queries(self, shard: Tensor) -> Tensor:
        """Return ``[B, S, H / P, D]``, this rank's heads of all tokens, for a shard ``[B, S / P, H, D]``."""
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
        received = torch.empty_like(parts)
        with self.waits.count_block():
            dist.all_to_all_single(received, parts)
        return received


class _CollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, net: AllGatherAttention | AllToAllAttention) -> Tensor:
        q, k, v = net.queries(q), net.keys(k), net.keys(v)
        ctx.net, ctx.scale, ctx.chunks = net, q.shape[-1] ** -0.5, split_heads(1, q.shape[2], k.shape[2])
        ctx.backend = resolve_backend("auto", q.device)
        (backend,) = forward_backends(ctx.backend, ctx.chunks, q, softmax_scale=ctx.scale)
        backend.fold(k, v, net.bounds, scores=PLAIN, final=True)
        out, lse = backend.result()
        ctx.save_for_backward(q, k, v, out, lse)
        return net.results(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        net: AllGatherAttention | AllToAllAttention = ctx.net
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (net.queries(dout), q, out, lse)
        (backend,) = backward_backends(ctx.backend, ctx.chunks, *tensors, softmax_scale=ctx.scale)
        dkv = tuple(torch.empty_like(x, dtype=torch.float32) for x in (k, v))
        backend.dq(k, v, net.bounds, scores=PLAIN, local=True, final=True)
        backend.dkdv(k, v, net.bounds, scores=PLAIN, local=True, accum=None, out=dkv)
        return net.results(backend.result()), *(net.gradients(x, k.dtype) for x in dkv), None
