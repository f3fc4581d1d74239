"""Ulysses x ring: exchange heads for tokens along one mesh dimension, and run the ring along the other.

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509) around Ring Attention, as in USP (Fang and Zhao, arXiv:2405.07719).
An all-to-all among U ranks gives each rank all their tokens, in order, for its part of the heads. The R ranks with
equal heads form a ring. A second all-to-all returns tokens and heads.
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
from .shards import exchange_all, gather_max_logits

# --- heads ----------------------------------------------------------------------------------------------------------


def split_ulysses_heads(heads: int, kv_heads: int, ulysses: int) -> tuple[list[slice], list[slice]]:
    """Return the query heads and the key heads of each of ``ulysses`` ranks.

    If there are fewer key heads than ranks, several ranks have the same key head.

    Raises:
        ValueError: the heads cannot be split evenly.
    """
    if not can_split_heads(heads, kv_heads, ulysses):
        fitting = [str(size) for size in range(1, heads + 1) if can_split_heads(heads, kv_heads, size)]
        raise ValueError(
            f"group has {ulysses} ranks in the Ulysses dimension, which cannot split {heads} heads of q and {kv_heads} "
            f"of k evenly. With these heads the dimension can have {', '.join(fitting)} ranks."
        )
    edges = [heads * rank // ulysses for rank in range(ulysses + 1)]
    kv_edges = [kv_heads * rank // ulysses for rank in range(ulysses + 1)]
    few = max(1, kv_heads // ulysses)
    return [slice(*pair) for pair in pairwise(edges)], [slice(start, start + few) for start in kv_edges[:-1]]


def can_split_heads(heads: int, kv_heads: int, ulysses: int) -> bool:
    """Return True if the heads split evenly over ``ulysses`` ranks, with at least one query and key head each."""
    return heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)


# --- the exchange ---------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Tokens that each rank of the Ulysses dimension holds of a tensor ``[B, S, H, D]``, and heads that it computes."""

    tokens: Layout
    heads: Sequence[slice]

    def piece_shape(self, x: Tensor, token_rank: int, head_rank: int) -> tuple[int, ...]:
        """Return the shape of a piece: the tokens of rank ``token_rank`` and the heads of rank ``head_rank``."""
        heads = self.heads[head_rank]
        return x.shape[0], self.tokens.lengths[token_rank], heads.stop - heads.start, x.shape[3]


def heads_for_tokens(ring: Ring, shares: Sequence[Shares], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Exchange all heads of this rank's tokens for all tokens of its heads, ``[B, tokens, its heads, D]``."""
    each, ranks = [*zip(shares, tensors, strict=True)], range(ring.size)
    outgoing = [tuple(x[:, :, share.heads[rank]] for share, x in each) for rank in ranks]
    shapes = [[share.piece_shape(x, rank, ring.rank) for share, x in each] for rank in ranks]
    incoming = zip(*exchange_all(ring, outgoing, shapes, "heads for tokens"), strict=True)
    return tuple(share.tokens.unshard(parts) for share, parts in zip(shares, incoming, strict=True))


def tokens_for_heads(ring: Ring, shares: Sequence[Shares], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Invert :func:`heads_for_tokens`. Sum over the ranks that computed with the same head."""
    each, ranks = [*zip(shares, tensors, strict=True)], range(ring.size)
    shapes = [[share.piece_shape(x, ring.rank, rank) for share, x in each] for rank in ranks]
    # a generator, so that the copies are freed before the results are joined
    pieces = (tuple(share.tokens.shard(x, rank) for share, x in each) for rank in ranks)
    incoming = zip(*exchange_all(ring, [*pieces], shapes, "tokens for heads"), strict=True)
    return tuple(_join_heads(share, parts) for share, parts in zip(shares, incoming, strict=True))


def _join_heads(share: Shares, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the heads of all ranks; sum the copies of a key head that several ranks computed with."""
    joined, heads = torch.cat([*parts], 2), share.heads[-1].stop
    if joined.shape[2] == heads:
        return joined
    copies = joined.shape[2] // heads
    return joined.view(*joined.shape[:2], heads, copies, joined.shape[3]).float().sum(3).to(joined.dtype)


class _Exchange(torch.autograd.Function):
    """Autograd function of one exchange inside an agreed call; its backward is the inverse exchange. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, exchange_op: Any, rings: Rings, shares: Sequence[Shares], number: int, *xs: Tensor) -> Any:
        ctx.exchange_op, ctx.rings, ctx.shares, ctx.number = exchange_op, rings, shares, number
        return exchange_op(rings.ulysses, shares, xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inverse = tokens_for_heads if ctx.exchange_op is heads_for_tokens else heads_for_tokens
        with ctx.rings._call_guard(grads[0].device):
            fields = {"call": f"backward of {ctx.exchange_op.__name__}"}
            ctx.rings.ulysses._agree(fields, grads[0].device, forward_number=ctx.number)
            return None, None, None, None, *inverse(ctx.rings.ulysses, ctx.shares, grads)


class Exchange(NamedTuple):
    """The exchanges of one call over a mesh: heads for tokens before the ring, and tokens for heads after it."""

    rings: Rings
    queries: Shares
    keys: Shares

    def gather_tokens(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Exchange heads of q, k and v for tokens, inside the agreed call ``number``; differentiable."""
        shares = (self.queries, self.keys, self.keys)
        exchanged: tuple[Tensor, ...] = _Exchange.apply(heads_for_tokens, self.rings, shares, number, q, k, v)  # type: ignore[no-untyped-call]
        return exchanged

    def gather_heads(self, out: Tensor, lse: Tensor | None, max_logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Exchange tokens of ``out`` and ``lse`` for heads, in a call of its own; differentiable.

        ``max_logits`` of this rank's heads become those of all heads, unless they are empty.
        """
        results: tuple[Tensor, ...] = (out,) if lse is None else (out, lse_to_rows(lse))
        with self.rings._call_guard(out.device):
            number = self.rings.ulysses._agree({"call": "tokens for heads"}, out.device)
            shares = [self.queries] * len(results)
            results = _Exchange.apply(tokens_for_heads, self.rings, shares, number, *results)  # type: ignore[no-untyped-call]
            if max_logits.numel():
                max_logits = torch.cat(gather_max_logits(self.rings.ulysses, max_logits))
        return results[0], None if lse is None else lse_from_rows(results[1]), max_logits


def lse_to_rows(lse: Tensor) -> Tensor:
    """Return ``lse [B, H, S]`` as ``[B, S, H, 1]``, the shape that an exchange takes."""
    return lse.transpose(1, 2).unsqueeze(3)


def lse_from_rows(x: Tensor) -> Tensor:
    """Invert :func:`lse_to_rows`."""
    return x.squeeze(3).transpose(1, 2).contiguous()
