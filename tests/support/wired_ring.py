"""A ring of ranks in one process in float64: what differs from the exact result is what the wires did.

K/V of the other ranks are encoded once and decoded, sums of dK/dV are encoded and decoded at every hop, the last one
home.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn import reference
from ringattn.reference import visible
from ringattn.reference.blockwise import row_delta, tile_gradients
from ringattn.ring.wire import Wire


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def travelled(x: Tensor, by: Wire | None) -> Tensor:
    """``x`` as it arrives, in its own dtype."""
    if by is None:
        return x
    sent = tuple(torch.empty(size, dtype=dtype, device=x.device) for size, dtype in by.specs(tuple(x.shape)))
    by.encode(x, sent)
    into = torch.empty_like(x)
    by.decode(sent, into)
    return into


def ring(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    wire: Wire | None = None,
    grad_wire: Wire | None = None,
    world: int = 4,
    causal: bool = True,
) -> Results:
    """Forward and backward over contiguous shards; float64 but for what the wires round.

    Args:
        inputs: ``q, k, v, dout`` of the whole sequence.
        wire: how K/V travel; grad_wire: how fp32 sums of dK/dV travel.
    """
    q, k, v, dout = (x.tensor_split(world, 1) for x in inputs)
    positions = torch.arange(inputs[0].shape[1]).tensor_split(world)
    near = list(zip(k, v, strict=True))
    far = [(travelled(key, wire), travelled(value, wire)) for key, value in near]
    outs, levels = [], []
    for rank in range(world):
        pairs = [near[rank] if owner == rank else far[owner] for owner in range(world)]
        keys, values = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        here, everywhere = positions[rank], torch.cat(positions)
        out, lse = reference.attention(q[rank], keys, values, causal=causal, q_positions=here, k_positions=everywhere)
        outs.append(out)
        levels.append((lse, row_delta(dout[rank], out, None)))
    dq, dk, dv = ([torch.zeros(x.shape, dtype=torch.float64) for x in shards] for shards in (q, k, v))
    for owner, hop in product(range(world), (*range(1, world), 0)):  # the owner adds last, when its sums are home
        rank = (owner + hop) % world
        pair = near[owner] if rank == owner else far[owner]
        seen = visible(positions[rank], positions[owner], causal=causal)
        scale = q[rank].shape[-1] ** -0.5
        parts = tile_gradients(dout[rank], q[rank], *pair, *levels[rank], seen=seen, scale=scale)
        dq[rank] += parts[0]
        dk[owner] += parts[1]
        dv[owner] += parts[2]
        if rank != owner and grad_wire is not None:
            dk[owner], dv[owner] = (travelled(x.float(), grad_wire).double() for x in (dk[owner], dv[owner]))
    return Results(*(torch.cat(shards, 1) for shards in (outs, dq, dk, dv)))
