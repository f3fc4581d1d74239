"""Ulysses x ring: heads are exchanged for tokens along one dimension of a mesh, K/V travel along the other.

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509) around the rings of Ring Attention, as in USP (Fang and Zhao,
arXiv:2405.07719). By an all-to-all among U ranks each gets the tokens of all of them, ascending, of its part of the
heads; the R ranks that have the same heads make a ring; another all-to-all brings tokens and heads home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.checks import check_qkv
from .args import (
    AttentionArgs,
    autocast,
    by_row,
    check,
    check_tensors,
    compared,
    layouts_of,
    mask_of,
    prepare_call,
    scores_of,
    sink_of,
)
from .backends import check_call
from .checked import FIRST_HEADS, checked
from .mesh import Mesh, Rings, joined, rings_of, shared
from .ops import EagerCall, RingAttention, gradients, packed_call
from .ring import Ring, device_of
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


# --- the call -------------------------------------------------------------------------------------------------------


def attention_over_mesh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: AttentionArgs,
    mesh: Mesh,
    ring: Ring | None,
    *,
    return_lse: bool,
    drawn: bool = False,
) -> tuple[Tensor, Tensor | None, tuple[int, int, int]]:
    """``ring_attention`` of all ranks of a mesh; ``lse`` is None where it is not to be returned.

    ``drawn``: every rank has drawn ``dropout_seed``, and rank 0's counts. Last the seed, and the numbers of the call in
    the ring and in Ulysses' dimension.
    """
    device = device_of(q, k, v)
    rings = rings_of(mesh, device, ring)
    ring, ulysses = rings
    with rings._entered(device):
        check_tensors(q, k, v, args)
        (return_lse,) = checked(return_lse=return_lse)
        q, k, v = autocast(q, k, v)
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        sink = args.learnable_sink
        has_backward = has_gradient or (torch.is_grad_enabled() and isinstance(sink, Tensor) and sink.requires_grad)
        inner, of_queries, of_keys, fields, values = prepare(
            q, k, v, args, rings, drawn=drawn, has_backward=has_backward
        )
        fields |= {"gradient": (has_gradient, has_backward), "return_lse": return_lse}
        _, number = rings._agree(fields, device, values)
        if inner.dropout_p and (drawn or inner.dropout_seed is None):  # one for all: that of the first of both
            inner = inner._replace(dropout_seed=rings._draw_seed(inner.dropout_seed))
        shares = [of_queries, of_keys, of_keys]
        q, k, v = _Exchange.apply(heads_for_tokens, rings, shares, number, q, k, v)  # type: ignore[no-untyped-call]
    call = EagerCall(inner, ring, has_backward, rings=rings)
    out, lse, _ = RingAttention.apply(None, q, k, v, *packed_call(call))  # type: ignore[no-untyped-call]
    del q, k, v  # the exchange needs memory of its own
    # 0: checkpointing has kept the ring's results
    numbers = inner.dropout_seed or 0, 0 if call.prepared is None else call.prepared.number, number
    results = (out, in_rows(lse)) if return_lse else (out,)
    with rings._entered(device):
        number = ulysses._agree({"call": "tokens for heads"}, device)
        shares = [of_queries] * len(results)
        results = _Exchange.apply(tokens_for_heads, rings, shares, number, *results)  # type: ignore[no-untyped-call]
    return results[0], from_rows(results[1]) if return_lse else None, numbers


def gradients_over_mesh(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: AttentionArgs,
    mesh: Mesh,
    ring: Ring | None,
    number: int,
    in_ulysses: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward in a graph, which has kept what the ranks hold: q, k, v and the result are exchanged once more.

    dq, dk, dv and this rank's part of that of the sink; the numbers are those of the forward.
    """
    rings, device = rings_of(mesh, q.device, ring), q.device
    ring, ulysses = rings
    with rings._entered(device):
        inner, of_queries, of_keys, *_ = prepare(q, k, v, args, rings)
        fields = {"call": "backward in a graph", "gradient of lse": dlse is not None}
        ulysses._agree(fields, device, of=in_ulysses)
        dout = torch.zeros_like(out) if dout is None else dout
        tensors = [q, k, v, out, dout, in_rows(lse), *([] if dlse is None else [in_rows(dlse)])]
        shares = [of_queries, of_keys, of_keys, *[of_queries] * (len(tensors) - 3)]
        q_in, k_in, v_in, out, dout, *lses = heads_for_tokens(ulysses, shares, tensors)
        prepared, _ = prepare_call(q_in, k_in, v_in, inner, ring, number=number)
    call = EagerCall(inner, ring, True, prepared, rings)
    its_lse, its_dlse = from_rows(lses[0]), None if dlse is None else from_rows(lses[1])
    numbers = torch.empty(0)  # a call that is prepared has them
    *grads, its_dsink = gradients(dout, its_dlse, q_in, k_in, v_in, out, its_lse, numbers, *packed_call(call))
    del q_in, k_in, v_in, out, dout, lses  # as in the forward
    with rings._entered(device):
        ulysses._agree({"call": "gradients of a graph"}, device, of=in_ulysses)
        dq, dk, dv = tokens_for_heads(ulysses, shares[:3], grads)
    sink, dsink = args.learnable_sink, its_dsink
    if sink is not None:
        dsink = sink.new_zeros(sink.shape)
        dsink[of_queries.heads[ulysses.rank]] = its_dsink
    return dq, dk, dv, dsink


def in_rows(lse: Tensor) -> Tensor:
    """``[B, H, S]`` as what is exchanged, ``[B, S, H, 1]``."""
    return lse.transpose(1, 2).unsqueeze(3)


def from_rows(x: Tensor) -> Tensor:
    """The inverse."""
    return x.squeeze(3).transpose(1, 2).contiguous()


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    args: AttentionArgs,
    rings: Rings,
    *,
    drawn: bool = False,
    has_backward: bool = False,
) -> tuple[AttentionArgs, Shares, Shares, dict[str, Any], dict[str, Any]]:
    """The arguments of the ring's call, who has what of q and of k and v, and what all ranks must have in common.

    Raises:
        ValueError, NotImplementedError: as ``ring_attention``.
    """
    ring, ulysses = rings
    check_qkv(q, k, v)
    # what can be read once is read here and by the ring
    lists: dict[str, Any] = {name: [*value] for name, value in args._asdict().items() if isinstance(value, Iterator)}
    args = args._replace(**lists)
    heads, kv_heads = heads_of(q.shape[2], k.shape[2], ulysses.size)
    mine, its = heads[ulysses.rank], kv_heads[ulysses.rank]
    scale, backend = check(q[:, :, mine], k[:, :, its], v[:, :, its], args, ring)
    layouts = layouts_of(q, k, args, rings)
    same, rows, said_of_rows = by_row(args, layouts, q.shape[0])
    mask = mask_of(layouts, q.shape[0], **same._asdict())
    sink, scores = sink_of(q, args.learnable_sink), scores_of(q, args, layouts)
    check_call(backend, q, v, mask, scores, args, has_backward=has_backward, by_row=rows is not None)
    fields, values = compared(q, k, v, same, layouts, mask, scores, scale, backend, drawn=drawn, has_backward=None)
    if scores.first_head > FIRST_HEADS - q.shape[2]:  # some rank's may be as large
        raise ValueError(
            f"first_head is {scores.first_head}: with {q.shape[2]} heads of q over a mesh it must be 0 to "
            f"{FIRST_HEADS - q.shape[2]}, since every rank counts from the first of its own"
        )
    slopes = args.alibi_slopes
    inner = args._replace(
        layout=joined(layouts.queries, ulysses.size),
        kv_layout=None if layouts.keys is layouts.queries else joined(layouts.keys, ulysses.size),
        align=None,  # it is in the layouts
        learnable_sink=None if sink is None else sink[mine],
        alibi_slopes=None if slopes is None else slopes[..., mine].contiguous(),
        first_head=scores.first_head + mine.start,
    )
    tokens, keys = (shared(layout, ulysses.size, ring.rank) for layout in layouts)
    return inner, Shares(tokens, heads), Shares(keys, kv_heads), fields, values | said_of_rows
