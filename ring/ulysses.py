"""Ulysses x ring: heads are exchanged for tokens along one dimension of a mesh, K/V travel along the other.

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509) around the rings of Ring Attention, as in USP (Fang and Zhao,
arXiv:2405.07719). By an all-to-all among U ranks each gets the tokens of all of them, ascending, of its part of the
heads; the R ranks that have the same heads make a ring; another all-to-all brings tokens and heads home.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .mesh import Rings
from .ring import Ring
from .schedule.layout import Layout
from .shards import exchange_all

# --- heads ----------------------------------------------------------------------------------------------------------


def heads_of(heads: int, kv_heads: int, ulysses: int) -> tuple[list[slice], list[slice]]:
    """The query heads and the key heads with which each of ``ulysses`` ranks computes.

    Where there are fewer key heads than ranks, several ranks have the same one.

    Raises:
        ValueError: the ranks would not all have as many.
    """
    if not heads_fit(heads, kv_heads, ulysses):
        fitting = [str(size) for size in range(1, heads + 1) if heads_fit(heads, kv_heads, size)]
        raise ValueError(
            f"group has {ulysses} ranks in Ulysses' dimension, q has {heads} heads and k {kv_heads}: each takes "
            f"as many heads, at least one of both; with these heads it may have {', '.join(fitting)}"
        )
    edges = [heads * rank // ulysses for rank in range(ulysses + 1)]
    kv_edges = [kv_heads * rank // ulysses for rank in range(ulysses + 1)]
    few = max(1, kv_heads // ulysses)
    return [slice(*pair) for pair in pairwise(edges)], [slice(start, start + few) for start in kv_edges[:-1]]


def heads_fit(heads: int, kv_heads: int, ulysses: int) -> bool:
    """Whether each of ``ulysses`` ranks can compute with as many heads, at least one of both."""
    return heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)


# --- the exchange ---------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Of one tensor ``[B, S, H, D]``: which tokens the ranks of Ulysses' dimension hold, which heads they compute."""

    tokens: Layout
    heads: Sequence[slice]

    def sizes(self, x: Tensor, tokens_of: int, heads_of: int) -> tuple[int, ...]:
        """Of a piece: the tokens of one rank, and the heads of one."""
        heads = self.heads[heads_of]
        return x.shape[0], self.tokens.lengths[tokens_of], heads.stop - heads.start, x.shape[3]


def heads_for_tokens(ring: Ring, shares: Sequence[Shares], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All heads of this rank's tokens become all tokens of this rank's heads, ``[B, tokens, its heads, D]``."""
    each, ranks = [*zip(shares, tensors, strict=True)], range(ring.size)
    outgoing = [tuple(x[:, :, share.heads[rank]] for share, x in each) for rank in ranks]
    shapes = [[share.sizes(x, rank, ring.rank) for share, x in each] for rank in ranks]
    incoming = zip(*exchange_all(ring, outgoing, shapes, "heads for tokens"), strict=True)
    return tuple(share.tokens.unshard(parts) for share, parts in zip(shares, incoming, strict=True))


def tokens_for_heads(ring: Ring, shares: Sequence[Shares], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inverse; of a head with which several ranks computed the sum."""
    each, ranks = [*zip(shares, tensors, strict=True)], range(ring.size)
    shapes = [[share.sizes(x, ring.rank, rank) for share, x in each] for rank in ranks]
    # not kept: these copies are gone before the results are joined
    pieces = (tuple(share.tokens.shard(x, rank) for share, x in each) for rank in ranks)
    incoming = zip(*exchange_all(ring, [*pieces], shapes, "tokens for heads"), strict=True)
    return tuple(_together(share, parts) for share, parts in zip(shares, incoming, strict=True))


def _together(share: Shares, parts: Sequence[Tensor]) -> Tensor:
    whole, heads = torch.cat([*parts], 2), share.heads[-1].stop
    if whole.shape[2] == heads:
        return whole
    copies = whole.shape[2] // heads
    return whole.view(*whole.shape[:2], heads, copies, whole.shape[3]).float().sum(3).to(whole.dtype)


class _Exchange(torch.autograd.Function):
    """One of the two, inside of an agreed call; its backward is the other. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, there: Any, rings: Rings, shares: Sequence[Shares], number: int, *xs: Tensor) -> Any:
        ctx.there, ctx.rings, ctx.shares, ctx.number = there, rings, shares, number
        return there(rings.ulysses, shares, xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = tokens_for_heads if ctx.there is heads_for_tokens else heads_for_tokens
        with ctx.rings._entered(grads[0].device):
            fields = {"call": f"backward of {ctx.there.__name__}"}
            ctx.rings.ulysses._agree(fields, grads[0].device, of=ctx.number)
            return None, None, None, None, *back(ctx.rings.ulysses, ctx.shares, grads)


class Exchange(NamedTuple):
    """Both exchanges of one call over a mesh."""

    rings: Rings
    queries: Shares
    keys: Shares

    def gather_tokens(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Give heads of q, k and v for tokens, in the agreed call of this number; differentiable."""
        shares = (self.queries, self.keys, self.keys)
        made: tuple[Tensor, ...] = _Exchange.apply(heads_for_tokens, self.rings, shares, number, q, k, v)  # type: ignore[no-untyped-call]
        return made

    def gather_heads(self, out: Tensor, lse: Tensor | None = None) -> tuple[Tensor, ...]:
        """Give tokens of ``out`` and ``lse`` for heads, in a call of its own; differentiable."""
        results: tuple[Tensor, ...] = (out,) if lse is None else (out, in_rows(lse))
        with self.rings._entered(out.device):
            number = self.rings.ulysses._agree({"call": "tokens for heads"}, out.device)
            shares = [self.queries] * len(results)
            results = _Exchange.apply(tokens_for_heads, self.rings, shares, number, *results)  # type: ignore[no-untyped-call]
        return results[0], *map(from_rows, results[1:])


def in_rows(lse: Tensor) -> Tensor:
    """Return ``[B, H, S]`` as the exchange takes it, ``[B, S, H, 1]``."""
    return lse.transpose(1, 2).unsqueeze(3)


def from_rows(x: Tensor) -> Tensor:
    """Invert :func:`in_rows`."""
    return x.squeeze(3).transpose(1, 2).contiguous()
