"""The baseline: a ring attention of the usual kind, on the operator that our ``aten`` backend calls.

Written from the method's description in zhuzilin's ring-flash-attention (zigzag): two buffers, of which one is
received while the other is computed with; every hop a separate attention call, causal on the local shard and half of
the queries or half of the keys on the others; partial outputs merged by torch operations; dK/dV travelling in fp32
behind K/V. It is what a ring is without the ideas of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..common.timing import Stopwatch

NO_DROPOUT = 0.0


def usual_ring_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, waits: Stopwatch | None = None) -> Tensor:
    """Attention of this rank's queries over the default group; with ``causal`` the shards must be an even zigzag.

    Shapes: q ``[B, S, H, D]``, k and v ``[B, S, Hkv, D]``, S equal on all ranks and, with ``causal``, even. ``waits``
    counts the time that it waits for the network.
    """
    out: Tensor = _UsualRing.apply(q, k, v, causal, waits or Stopwatch(q.device))  # type: ignore[no-untyped-call]
    return out


class Exchange:
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
        """What has come."""
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


class _UsualRing(torch.autograd.Function):
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
        coming = Exchange(held, waits) if step + 1 < world else None
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
    sums: list[Tensor] = []
    coming: Exchange | None = None
    coming_sums: Exchange | None = None
    for step in range(world):
        coming = Exchange(held, waits) if step + 1 < world else None
        part = Part(step, q.shape[1], causal)
        mine = tuple(x[:, part.rows] for x in (dout, q, out, lse))
        block_dq, *block_sums = _attention_backward(mine, [x[:, part.keys] for x in held], part.causal)
        dq[:, part.rows] += block_dq
        if coming_sums is None:
            sums = [x.float() for x in block_sums]
        else:
            sums = coming_sums.wait()
            for total, grad in zip(sums, block_sums, strict=True):
                total[:, part.keys] += grad
        held = coming.wait() if coming else held
        coming_sums = Exchange(sums, waits) if world > 1 else None
    if coming_sums is not None:
        sums = coming_sums.wait()
    return [dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)]


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
