"""From a whole tensor to this rank's shard and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm import GroupLike, group_rank_size
from ..kernels.checks import check_tensor
from ..kinds import one_of, shown
from .buffers import Tensors, load, together
from .checked import check_autograd
from .mesh import Rings, joined, ranks_of, shared
from .ring import Ring, device_of
from .schedule.layout import DIM, POSITIONS, Layout, LayoutLike, check_tokens, tokens_of

NAMES = ("contiguous", "zigzag", "striped")
GRAD = one_of("slice", "sum")


def resolve_layout(layout: LayoutLike, seqlen: int, world: int, name: str = "layout") -> Layout:
    """The ``Layout`` that a layout argument means for ``seqlen`` tokens in all.

    Raises:
        ValueError: none given with several ranks, an unknown name, a name for shards that are not equal, or a layout of
            another world or length.
    """
    if layout is None:
        if world > 1:
            raise ValueError(f"{name} is None with {world} ranks: it must be a Layout or one of {', '.join(NAMES)}")
        return Layout.contiguous(seqlen, 1)
    if isinstance(layout, str):
        if layout not in NAMES:
            raise ValueError(f"{name} is {layout!r}: it must be a Layout or one of {', '.join(NAMES)}")
        if seqlen % world:
            raise ValueError(
                f"{name} is {layout!r} with {seqlen} tokens over {world} ranks: a name means equal shards; "
                f"pass Layout.{layout}({seqlen}, {world}) for shards that differ by a token"
            )
        made: Layout = getattr(Layout, layout)(seqlen, world)
        return made
    if not isinstance(layout, Layout):
        raise ValueError(f"{name} is {shown(layout)}: it must be a Layout or one of {', '.join(NAMES)}")
    if layout.world != world:
        raise ValueError(f"{name} is made for {layout.world} ranks, the group has {world}")
    if layout.seqlen != seqlen:
        raise ValueError(f"{name} is made for {layout.seqlen} tokens, got {seqlen}")
    return layout


def shard(x: torch.Tensor, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of ``x``, which holds the whole sequence along ``dim``; differentiable.

    Every rank of the group calls it: they compare what they pass, as in :func:`ring_attention`, though nothing moves.
    For one rank alone there is ``layout.shard(x, rank)``.

    Raises:
        ValueError: the layout does not fit the group or the length of ``x``; or the ranks disagree.
    """
    ring = ranks_of(group, device_of(x))
    with ring._entered(device_of(x)):
        tokens = tokens_of(x, "x", dim)
        whole = resolve_layout(layout, _seqlen(layout, tokens), ring.size)
        ring._agree(_signature("shard", x, whole, dim), device_of(x), always=True)
        return whole.shard(x, ring.rank, dim)


def _signature(call: str, x: torch.Tensor, layout: Layout, dim: int, **more: object) -> dict[str, object]:
    """What all ranks must have in common."""
    dim %= x.dim()
    sizes = [*x.shape[:dim], "tokens", *x.shape[dim + 1 :]]
    return {
        "call": call,
        "shape": sizes,
        "dtype": x.dtype,
        "tokens": layout.seqlen,
        "layout": layout,
        "dim": dim,
        **more,
    }


def positions(seqlen: int, *, layout: LayoutLike, group: GroupLike = None) -> torch.Tensor:
    """Global positions of this rank's tokens, ascending, int64 ``[S]``, of ``seqlen`` tokens in all.

    Raises:
        ValueError: the layout does not fit the group or ``seqlen``.
    """
    seqlen, (rank, world) = POSITIONS.of("seqlen", seqlen), group_rank_size(group)
    return resolve_layout(layout, seqlen, world).positions(rank).clone()


def unshard(x: torch.Tensor, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1, grad: str) -> torch.Tensor:
    """The whole sequence along ``dim`` from every rank's shard ``x``, on every rank.

    Args:
        x: this rank's shard; every rank passes its own.
        layout: who holds which tokens.
        grad: ``slice`` where every rank computes the same loss from the result: each takes its part of its own
            gradient; ``sum`` where each rank computes its own: the parts of all ranks are summed.

    Raises:
        ValueError: an argument does not fit, or the ranks disagree.
    """
    ring = ranks_of(group, device_of(x))
    with ring._entered(device_of(x)):
        check_tensor("x", x)
        check_autograd("unshard", x)
        tokens, dim, grad = tokens_of(x, "x", dim), DIM.of("dim", dim), GRAD.of("grad", grad)
        whole = resolve_layout(layout, _seqlen(layout, tokens * ring.size), ring.size)
        length = whole.lengths[ring.rank]
        check_tokens(x, "x", dim, length, f"the layout gives rank {ring.rank} {length}")
        number: Any = ring._agree(_signature("unshard", x, whole, dim, grad=grad), x.device)
        if isinstance(ring, Rings):  # of all ranks in one place of the ring first
            (ring, ulysses), (number, first) = ring, number
            held = shared(whole, ulysses.size, ring.rank)
            x = _Unshard.apply(x, held, ulysses, dim, grad, first)  # type: ignore[no-untyped-call]
            whole = joined(whole, ulysses.size)
        result: torch.Tensor = _Unshard.apply(x, whole, ring, dim, grad, number)  # type: ignore[no-untyped-call]
    return result


def _seqlen(layout: object, otherwise: int) -> int:
    return layout.seqlen if isinstance(layout, Layout) else otherwise


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: Layout, ring: Ring, dim: int, grad: str, number: int
    ) -> torch.Tensor:
        ctx.layout, ctx.ring, ctx.dim, ctx.grad, ctx.number = layout, ring, dim, grad, number
        shapes = [(*x.shape[:dim], length, *x.shape[dim:][1:]) for length in layout.lengths]
        return layout.unshard(exchange(ring, [x] * ring.size, shapes), dim)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout, ring, dim = ctx.layout, ctx.ring, ctx.dim
        own = layout.shard(dout, ring.rank, dim)
        if ctx.grad == "sum":
            with ring._entered(dout.device):
                ring._agree({"call": "backward of unshard"}, dout.device, of=ctx.number)
                parts = [layout.shard(dout, rank, dim) for rank in range(ring.size)]
                own = torch.stack(exchange(ring, parts, [own.shape] * ring.size)).sum(0)
        return own, None, None, None, None, None


def exchange(ring: Ring, outgoing: list[torch.Tensor], shapes: list[Any]) -> list[torch.Tensor]:
    """Send ``outgoing[r]`` to every rank r, receive a tensor of ``shapes[r]`` from each."""
    each = [(x,) for x in outgoing], [(shape,) for shape in shapes]
    return [x for (x,) in exchange_all(ring, *each, "unshard")]


def exchange_all(
    ring: Ring, outgoing: Sequence[Tensors], shapes: Sequence[Sequence[tuple[int, ...]]], label: str
) -> list[Tensors]:
    """Send the tensors ``outgoing[r]`` to every rank r, receive as many of ``shapes[r]`` from each, in one group of
    transfers; ``label`` is what errors call it."""
    own = outgoing[ring.rank]
    incoming = [
        tuple(x.new_empty(shape) for x, shape in zip(own, each, strict=True)) if rank != ring.rank else own
        for rank, each in enumerate(shapes)
    ]
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    if others:
        sends = together([load(rank, tuple(x.contiguous() for x in outgoing[rank])) for rank in others])
        receives = together([load(rank, incoming[rank]) for rank in others])
        with ring._exchange(label, own[0].device) as (transport, posted):
            after = (transport.mark(),)
            fence = transport.post(sends=sends.messages, receives=receives.messages, after=after)
            posted(label, fence, after, sends.sizes, receives.sizes)
            fence.wait()
    return incoming
