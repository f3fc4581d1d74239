"""What a proof runs: calls of every rank, the values they are given, and what they should read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Layout
from ringattn.kernels import KernelConfig
from ringattn.kernels.config import is_single_pass
from ringattn.ring import Mask
from ringattn.ring.schedule.active import sent_keys

from . import kernels

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 4, 8
GIVEN = ("q", "k", "v", "dout", "dlse")


class Call(NamedTuple):
    """One forward of every rank, with its backward or without."""

    layout: Layout
    mask: Mask
    backward: bool = True


@dataclass(frozen=True)
class Case:
    """Calls, one after the other on one ring, and the ring that they go through."""

    calls: tuple[Call, ...]
    transport: str = "nccl"
    dtype: torch.dtype = torch.float32
    ring: dict[str, Any] = field(default_factory=dict)  # arguments of Ring
    config: KernelConfig | None = None
    unshards: bool = False  # the calls gather q, and sum up the gradients of all ranks, in place of attention

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.calls[0].layout.world

    def kernels(self, call: Call) -> tuple[str, ...]:
        """What a call launches once per shard, part of the mask and chunk of heads."""
        if self.unshards:
            return ()
        if not call.backward:
            return ("forward_kernel",)
        if is_single_pass(self.config):
            return "forward_kernel", "single_pass_kernel"
        split = self.config is not None and self.config.dkdv_splits != 1
        return "forward_kernel", "dq_kernel", "dkdv_kernel", *(("reduce_kernel",) if split else ())


def inputs(case: Case, number: int) -> dict[str, Tensor]:
    """Ones and twos: every sum of them is exact, in every dtype that travels, and none is what an empty slot gives."""
    draw = torch.Generator().manual_seed(number)
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM_V), "dout": (HEADS, DIM_V)}
    tokens = case.calls[number].layout.seqlen

    def drawn(*shape: int) -> Tensor:
        return torch.randint(1, 3, shape, generator=draw).float()

    whole = {name: drawn(1, tokens, *shape).to(case.dtype) for name, shape in shapes.items()}
    return whole | {"dlse": drawn(1, HEADS, tokens)}


def shard(case: Case, number: int, name: str, rank: int) -> Tensor:
    """What a rank is given in one call."""
    return case.calls[number].layout.shard(inputs(case, number)[name], rank, 2 if name == "dlse" else 1)


def seen(call: Call, rank: int, other: int) -> int:
    """By how many parts of the mask any query of a rank sees any key of a shard: position by position."""
    positions, keys = call.layout.positions(rank), call.layout.positions(other)
    blocks = call.mask.blocks
    shown = True if blocks is None else blocks.visible[positions // blocks.block][:, keys // blocks.block]
    limits = [(lo[:, None], hi[:, None]) for lo, hi in (part.interval(positions) for part in call.mask.parts)]
    return sum(bool(((keys >= lo) & (keys < hi) & shown).any()) for lo, hi in limits)


def there(call: Call, rank: int, other: int) -> Tensor:
    """Which keys of a shard a rank ever has, 0 or 1 each."""
    mine, sent = call.layout.positions(other), sent_keys(call.layout, call.mask, call.layout).positions(other)
    return torch.ones(len(mine)) if rank == other else torch.isin(mine, sent).float()


def expected(case: Case) -> list[dict[str, Tensor]]:
    """What every rank should read: from the mask, the keys that travel and the stand-in kernels; no schedule."""
    found = [dict[str, Tensor]() for _ in range(case.world)]
    for number, call in enumerate(case.calls):
        for rank in range(case.world):
            found[rank] |= (_unsharded if case.unshards else _expected)(case, number, call, rank)
    return found


def _unsharded(case: Case, number: int, call: Call, rank: int) -> dict[str, Tensor]:
    weights = sum(range(1, case.world + 1))
    return {f"whole{number}": inputs(case, number)["q"], f"dq{number}": weights * shard(case, number, "q", rank)}


def _expected(case: Case, number: int, call: Call, rank: int) -> dict[str, Tensor]:
    ranks = range(case.world)
    q, k, v, dout, dlse = ([shard(case, number, name, one).float() for one in ranks] for name in GIVEN)
    held = [there(call, rank, one)[:, None, None] for one in ranks]
    shards = [kernels.keys(k[one] * held[one], v[one] * held[one]) * seen(call, rank, one) for one in ranks]
    whole = kernels.per_head(sum(shards, torch.zeros(1, KV_HEADS)), HEADS)
    out = (whole[:, None, :, None] * kernels.rows(q[rank])).expand(*q[rank].shape[:3], DIM_V)
    found = {f"out{number}": out.to(case.dtype), f"lse{number}": whole[:, :, None].expand(1, HEADS, q[rank].shape[1])}
    if call.backward:
        part = whole[:, None, :, None] * (2 * kernels.rows(dout[rank]) + dlse[rank].transpose(1, 2)[..., None])
        found[f"dq{number}"] = part.expand(q[rank].shape).to(case.dtype)
        for name, given, x in (("dk", q, k[rank]), ("dv", dout, v[rank])):
            by_rank = [(seen(call, one, rank) * there(call, one, rank))[:, None, None] for one in ranks]
            parts = [(kernels.summed(given[one], KV_HEADS) + 5 * x) * by_rank[one] for one in ranks]
            found[f"{name}{number}"] = sum(parts, torch.zeros(x.shape)).to(case.dtype)
    return found
