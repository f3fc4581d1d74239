"""Index arithmetic on whole tensors for ``relayout``, ``roll`` and ``halo``: expected pieces, gradients and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn import Layout, halo, relayout, roll
from ringattn.comm import GroupLike

CALLS: dict[str, Any] = {"relayout": relayout, "roll": roll, "halo": halo}


@dataclass
class MoveCase:
    """One call of every rank, with small integers as values, whose sums are exact in every dtype."""

    call: str
    args: list[Any]  # target, shift, or left and right
    layout: Layout
    named: Any = None  # layout as it is passed, if it has a name
    cu_seqlens: list[int] | None = None
    dim: int = 1
    shape: tuple[int, ...] = (2, 3, 2)  # tokens replace one entry
    dtype: torch.dtype = torch.float32
    is_strided: bool = False  # x and the gradient are not contiguous
    seed: int = 0

    def wanted(self, rank: int) -> list[list[int | None]]:
        """Return the pieces that a rank gets, as positions; None stands for zeros."""
        held = self.layout.positions(rank).tolist()
        if self.call == "relayout":
            return [self.args[0].positions(rank).tolist()]
        ends = {p: (a, b) for a, b in pairwise(self.cu_seqlens or [0, self.layout.seqlen]) for p in range(a, b)}
        if self.call == "roll":
            return [[a + (p - a - self.args[0]) % (b - a) for p, (a, b) in ((p, ends[p]) for p in held)]]
        runs: list[list[int]] = []
        for p in held:
            if runs and p == runs[-1][-1] + 1 and ends[p][0] < p:
                runs[-1].append(p)
            else:
                runs.append([p])
        left, right = self.args
        around = [range(run[0] - left, run[-1] + right + 1) for run in runs]
        return [
            [p if ends[run[0]][0] <= p < ends[run[0]][1] else None for p in positions]
            for run, positions in zip(runs, around, strict=True)
        ] or [[]]

    def tokens(self, count: int, seed: int) -> Tensor:
        """Return a tensor of ``count`` tokens."""
        shape = [*self.shape]
        shape[self.dim] = count
        drawn = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return drawn.transpose(0, -1).contiguous().transpose(0, -1) if self.is_strided else drawn

    def run(self, rank: int, group: GroupLike) -> None:
        """Make the call on one rank, and compare its result and gradient with index arithmetic."""
        whole, ranks = self.tokens(self.layout.reach, self.seed), range(self.layout.world)
        x = whole.index_select(self.dim, self.layout.positions(rank))
        if self.is_strided:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        x.requires_grad_(self.dtype.is_floating_point)
        named = self.layout if self.named is None else self.named
        options = {"group": group, "dim": self.dim} | ({} if self.call == "relayout" else {"layout": named})
        options |= {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}
        out = CALLS[self.call](x, *[named] * (self.call == "relayout"), *self.args, **options)
        pieces = out if isinstance(out, tuple) else (out,)
        wanted = [self.wanted(other) for other in ranks]
        zeros = torch.cat([whole, 0 * self.tokens(1, 0)], self.dim)
        assert len(pieces) == len(wanted[rank])
        for piece, positions in zip(pieces, wanted[rank], strict=True):
            index = torch.tensor([self.layout.reach if p is None else p for p in positions]).long()
            assert piece.equal(zeros.index_select(self.dim, index)), f"{self}: rank {rank} gets other tokens"
        if self.dtype.is_floating_point:
            losses = [
                [self.tokens(len(part), 9 * other + i) for i, part in enumerate(wanted[other])] for other in ranks
            ]
            gradient = torch.autograd.grad(pieces, x, losses[rank])[0]
            assert gradient.equal(self._gradient(rank, wanted, losses)), f"{self}: rank {rank} has another gradient"

    def _gradient(self, rank: int, wanted: list[list[list[int | None]]], losses: list[list[Tensor]]) -> Tensor:
        total = self.tokens(self.layout.reach, 0).zero_()
        for parts, weights in zip(wanted, losses, strict=True):
            for positions, weight in zip(parts, weights, strict=True):
                for i, p in enumerate(positions):
                    if p is not None:
                        total.select(self.dim, p).add_(weight.select(self.dim, i))
        return total.index_select(self.dim, self.layout.positions(rank))

    def fewest_rows(self) -> Counter[tuple[int, int]]:
        """Return for each (source, destination) the number of different tokens that only the source holds."""
        owner = {p: rank for rank in range(self.layout.world) for p in self.layout.positions(rank).tolist()}
        rows = Counter[tuple[int, int]]()
        for rank in range(self.layout.world):
            needed = {p for positions in self.wanted(rank) for p in positions if p is not None}
            rows.update((owner[p], rank) for p in needed if owner[p] != rank)
        return rows
