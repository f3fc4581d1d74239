"""``shard``, ``unshard`` and ``positions``: convert between a whole tensor and this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..comm import GroupLike, group_rank_size
from ..kernels.checks import check_tensor
from ..validators import short_repr, word_choice
from .arg_checks import check_autograd
from .buffers import Tensors, build_payload, combine_payloads
from .mesh import Ranks, Rings, resolve_call_ranks, ring_layout, ulysses_layout
from .ring import Ring, call_device
from .schedule.layout import DIM, POSITIONS, Layout, LayoutLike, check_tokens, token_count

LAYOUT_NAMES = ("contiguous", "zigzag", "striped")
GRAD_KIND = word_choice("slice", "sum")


def resolve_layout(layout: LayoutLike, seqlen: int, world: int, name: str = "layout") -> Layout:
    """Return the ``Layout`` that a layout argument describes for ``seqlen`` tokens of all ranks.

    Raises:
        ValueError: no layout for several ranks, an unknown name, a name although the shards are not equal, or a layout
            for another number of ranks or tokens.
    """
    if layout is None:
        if world > 1:
            raise ValueError(
                f"{name} is None with {world} ranks: it must be a Layout or one of {', '.join(LAYOUT_NAMES)}"
            )
        return Layout.contiguous(seqlen, 1)
    if isinstance(layout, str):
        if layout not in LAYOUT_NAMES:
            raise ValueError(f"{name} is {layout!r}: it must be a Layout or one of {', '.join(LAYOUT_NAMES)}")
        if seqlen % world:
            raise ValueError(
                f"{name} is {layout!r}, which needs equal shards, but {world} does not divide the {seqlen} tokens. "
                f"Pass Layout.{layout}({seqlen}, {world}) for shards that differ by a token."
            )
        resolved: Layout = getattr(Layout, layout)(seqlen, world)
        return resolved
    if not isinstance(layout, Layout):
        raise ValueError(f"{name} is {short_repr(layout)}: it must be a Layout or one of {', '.join(LAYOUT_NAMES)}")
    if layout.world != world:
        raise ValueError(f"{name} is made for {layout.world} ranks, but the group has {world}")
    if layout.seqlen != seqlen:
        raise ValueError(f"{name} is made for {layout.seqlen} tokens, but there are {seqlen}")
    return layout


def shard(x: torch.Tensor, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1) -> torch.Tensor:
    """Return this rank's tokens of ``x``, which holds the whole sequence along ``dim``; differentiable.

    Every rank of the group calls it. Ranks compare their arguments as in :func:`ring_attention`, but nothing is sent.
    Use ``layout.shard(x, rank)`` to shard on one rank alone.

    Raises:
        ValueError: the layout does not fit the group or the length of ``x``, or the ranks disagree.
    """
    ring = resolve_call_ranks(group, call_device(x))
    with ring._call_guard(call_device(x)):
        tokens = token_count(x, "x", dim)
        resolved = resolve_layout(layout, _seqlen(layout, tokens), ring.size)
        ring._agree(call_fields("shard", x, dim, resolved.seqlen, layout=resolved), call_device(x), always=True)
        return resolved.shard(x, ring.rank, dim)


def call_fields(call: str, x: torch.Tensor, dim: int, tokens: int, **more: object) -> dict[str, object]:
    """Return the fields of a call that must be equal on all ranks, for ``tokens`` of all ranks along ``dim`` of x."""
    dim %= x.dim()
    sizes = [*x.shape[:dim], "tokens", *x.shape[dim + 1 :]]
    return {"call": call, "shape": sizes, "dtype": x.dtype, "tokens": tokens, "dim": dim, **more}


def resolve_shard(
    call: str, x: torch.Tensor, layout: LayoutLike, ranks: Ranks, dim: int, name: str = "layout"
) -> tuple[Layout, int]:
    """Return the layout of all shards and the dimension of the tokens, checked against this rank's shard ``x``.

    ``call`` and ``name`` name the called function and the layout argument in messages.
    """
    check_tensor("x", x)
    if x.is_quantized:
        raise ValueError("x is a quantized tensor: it must be a plain tensor, such as x.int_repr()")
    check_autograd(call, x)
    tokens = token_count(x, "x", dim)
    resolved = resolve_layout(layout, _seqlen(layout, tokens * ranks.size), ranks.size, name)
    length = resolved.lengths[ranks.rank]
    check_tokens(x, "x", dim, length, f"but {name} has {length} for rank {ranks.rank}")
    return resolved, DIM.check("dim", dim) % x.dim()


def positions(seqlen: int, *, layout: LayoutLike, group: GroupLike = None) -> torch.Tensor:
    """Return the global positions of this rank's tokens, ascending, int64 ``[S]``, out of ``seqlen`` tokens.

    Raises:
        ValueError: the layout does not fit the group or ``seqlen``.
    """
    seqlen, (rank, world) = POSITIONS.check("seqlen", seqlen), group_rank_size(group)
    return resolve_layout(layout, seqlen, world).positions(rank).clone()


def unshard(x: torch.Tensor, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1, grad: str) -> torch.Tensor:
    """Return the whole sequence along ``dim``, on every rank, from the shards ``x`` of all ranks.

    Args:
        x: this rank's shard.
        layout: positions that each rank holds.
        group: as for :func:`ring_attention`.
        dim: dimension of the tokens.
        grad: ``slice`` if every rank computes the same loss from the result; each rank then takes its part of its own
            gradient. ``sum`` if every rank computes a different loss; the gradients of all ranks are then summed.

    Raises:
        ValueError: an argument does not fit, or the ranks disagree.
    """
    ring = resolve_call_ranks(group, call_device(x))
    with ring._call_guard(call_device(x)):
        resolved, dim = resolve_shard("unshard", x, layout, ring, dim)
        grad = GRAD_KIND.check("grad", grad)
        fields = call_fields("unshard", x, dim, resolved.seqlen, layout=resolved, grad=grad)
        number: Any = ring._agree(fields, x.device)
        if isinstance(ring, Rings):  # first along Ulysses, then along the ring
            (ring, ulysses), (number, ulysses_number) = ring, number
            own_layout = ulysses_layout(resolved, ulysses.size, ring.rank)
            x = _Unshard.apply(x, own_layout, ulysses, dim, grad, ulysses_number)  # type: ignore[no-untyped-call]
            resolved = ring_layout(resolved, ulysses.size)
        result: torch.Tensor = _Unshard.apply(x, resolved, ring, dim, grad, number)  # type: ignore[no-untyped-call]
    return result


def _seqlen(layout: object, otherwise: int) -> int:
    """Return the number of tokens of a Layout, or ``otherwise`` if ``layout`` is a name or None."""
    return layout.seqlen if isinstance(layout, Layout) else otherwise


class _Unshard(torch.autograd.Function):
    """Autograd function of :func:`unshard` along one ring."""

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
            with ring._call_guard(dout.device):
                ring._agree({"call": "backward of unshard"}, dout.device, forward_number=ctx.number)
                parts = [layout.shard(dout, rank, dim) for rank in range(ring.size)]
                own = torch.stack(exchange(ring, parts, [own.shape] * ring.size)).sum(0)
        return own, None, None, None, None, None


def exchange(ring: Ring, outgoing: list[torch.Tensor], shapes: list[Any], label: str = "unshard") -> list[torch.Tensor]:
    """Send ``outgoing[r]`` to every rank r and receive a tensor of shape ``shapes[r]`` from each."""
    each = [(x,) for x in outgoing], [(shape,) for shape in shapes]
    return [x for (x,) in exchange_all(ring, *each, label)]


def gather_max_logits(ring: Ring, own: torch.Tensor) -> list[torch.Tensor]:
    """Return ``max_logits`` of every rank, in rank order. All have the same shape."""
    return exchange(ring, [own] * ring.size, [own.shape] * ring.size, "max_logits")


def exchange_all(
    ring: Ring, outgoing: Sequence[Tensors], shapes: Sequence[Sequence[tuple[int, ...]]], label: str
) -> list[Tensors]:
    """Send the tensors ``outgoing[r]`` to every rank r and receive tensors of ``shapes[r]`` from each, in one group.

    ``label`` names the exchange in errors.
    """
    own = outgoing[ring.rank]
    incoming = [
        tuple(x.new_empty(shape) for x, shape in zip(own, each, strict=True)) if rank != ring.rank else own
        for rank, each in enumerate(shapes)
    ]
    others = [rank for rank in range(ring.size) if rank != ring.rank]
    sends = {rank: tuple(x.contiguous() for x in outgoing[rank]) for rank in others}
    transfer(ring, label, sends, {rank: incoming[rank] for rank in others}, own[0].device)
    return incoming


def transfer(
    ring: Ring, label: str, outgoing: Mapping[int, Tensors], incoming: Mapping[int, Tensors], device: torch.device
) -> None:
    """Send the tensors ``outgoing[r]`` to rank r and receive ``incoming[r]``, in one group, and wait for its end."""
    if ring.size == 1:
        return
    sends, receives = (
        combine_payloads([build_payload(*item) for item in tensors.items()]) for tensors in (outgoing, incoming)
    )
    with ring._exchange(label, device) as (transport, posted):
        after = (transport.mark(),)
        fence = transport.post(sends=sends.messages, receives=receives.messages, after=after)
        posted(label, fence, after, sends.sizes, receives.sizes)
        fence.wait()
