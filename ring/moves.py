"""``relayout``, ``roll`` and ``halo``: move tokens between ranks by their global positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..comm import GroupLike
from ..validators import integer_between
from .mesh import Rings, resolve_call_ranks
from .ring import Ring, call_device
from .schedule.exchange import ExchangePlan, Halo, Move, Relayout, Roll, find_missing_position, plan_exchanges
from .schedule.layout import INTEGERS, Layout, LayoutLike, resolve_documents
from .shards import call_fields, resolve_layout, resolve_shard, transfer

MIN_HALO_LIMIT = 1 << 16  # positions on a side; more only for longer sequences, because they take memory
CuSeqlens = Iterable[int] | Tensor | None


def relayout(x: Tensor, source: LayoutLike, target: LayoutLike, *, group: GroupLike = None, dim: int = 1) -> Tensor:
    """Return this rank's tokens in the layout ``target`` from its tokens ``x`` in the layout ``source``.

    A token that stays on its rank is not sent. All others go directly to their rank, in one message per pair of ranks.
    The gradient goes the opposite way.

    Args:
        x: this rank's tokens, of any dtype.
        source: layout of ``x``.
        target: layout of the result, which holds the same positions on as many ranks.
        group: as for :func:`ring_attention`. In a mesh of two dimensions tokens move along the second dimension first.
        dim: dimension of the tokens.

    Raises:
        ValueError: an argument does not fit, or the ranks disagree.
    """

    def prepare(held: Layout) -> Relayout:
        wanted = resolve_layout(target, held.seqlen, held.world, "target")
        missing = find_missing_position(held, wanted)
        if missing:
            raise ValueError(f"{missing}. Both layouts must hold the same positions.")
        return Relayout(wanted)

    return _gather(x, "relayout", source, group, dim, prepare, "source")[0]


def roll(
    x: Tensor, shift: int, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1, cu_seqlens: CuSeqlens = None
) -> Tensor:
    """Return this rank's shard of ``torch.roll(whole, shift, dim)``, from its shard ``x`` of the whole. Differentiable.

    Args:
        x: this rank's shard, of any dtype.
        shift: number of positions that every token moves up; tokens that pass the end enter at the start.
        layout: positions that each rank holds.
        group: as for :func:`relayout`.
        dim: dimension of the tokens.
        cu_seqlens: boundaries of packed documents, as for :func:`ring_attention`; each document is rolled by itself.

    Raises:
        ValueError: an argument does not fit, or the ranks disagree.
    """

    def prepare(held: Layout) -> Roll:
        held.require_whole()
        return Roll(INTEGERS.check("shift", shift), resolve_documents(cu_seqlens, held.seqlen))

    return _gather(x, "roll", layout, group, dim, prepare)[0]


def halo(
    x: Tensor, left: int, right: int, *, layout: LayoutLike, group: GroupLike = None, dim: int = 1,
    cu_seqlens: CuSeqlens = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return this rank's runs of tokens, each with ``left`` positions before it and ``right`` after it. Differentiable.

    A run is a longest sequence of consecutive positions on this rank, inside one document if there are several. The
    runs come in ascending order: one in a contiguous layout, up to two in a zigzag one, one per token in a striped one.
    So a convolution of ``left + 1 + right`` taps without padding, applied to each piece, gives the results of the run's
    tokens, and their concatenation along ``dim`` is this rank's shard of the result. Positions outside of the document
    or of the sequence are zeros. The pieces are views of one tensor.

    A rank without tokens gets one piece of length 0. It must take part in the backward like all others.

    Args:
        x: this rank's shard, of any dtype.
        left: number of positions before each run, at most 2^16 or the length of the sequence.
        right: number of positions after each run, at most 2^16 or the length of the sequence.
        layout: positions that each rank holds.
        group: as for :func:`relayout`.
        dim: dimension of the tokens.
        cu_seqlens: boundaries of packed documents, as for :func:`ring_attention`.

    Raises:
        ValueError: an argument does not fit, or the ranks disagree.
    """

    def prepare(held: Layout) -> Halo:
        held.require_whole()
        sides = integer_between(0, max(held.seqlen, MIN_HALO_LIMIT))
        return Halo(sides.check("left", left), sides.check("right", right), resolve_documents(cu_seqlens, held.seqlen))

    wanted, pieces = _gather(x, "halo", layout, group, dim, prepare)
    starts = accumulate(pieces, initial=0)
    # narrow, because autograd refuses to modify the results of split in place
    return tuple(wanted.narrow(dim, *piece) for piece in zip(starts, pieces or [0], strict=False))


def _gather(
    x: Tensor, call: str, layout: LayoutLike, group: GroupLike, dim: int, prepare: Callable[[Layout], Move],
    name: str = "layout",
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """Return the tokens that this rank gets, and the lengths of their pieces.

    ``name`` is that of ``layout``. ``prepare`` checks the other arguments and returns them.
    """
    if torch.compiler.is_compiling():  # run eagerly between two graphs
        gather: Any = torch.compiler.disable(_gather)  # type: ignore[no-untyped-call]
        wanted: tuple[Tensor, list[int]] = gather(x, call, layout, group, dim, prepare, name)
        return wanted
    device = call_device(x)
    ranks = resolve_call_ranks(group, device)
    with ranks._call_guard(device):
        held, dim = resolve_shard(call, x, layout, ranks, dim, name)
        move = prepare(held)
        rings = ranks if isinstance(ranks, Rings) else (ranks,)
        plans = plan_exchanges(held, move, tuple(ring.size for ring in rings), ranks.rank)
        fields = move._asdict() | {name: held, "gradient": torch.is_grad_enabled() and x.requires_grad}
        documents = fields.pop("cu_seqlens", None)
        compared = call_fields(call, x, dim, held.seqlen, **fields)
        number: Any = ranks._agree(compared, x.device, {"cu_seqlens": documents})
        numbers = number if isinstance(ranks, Rings) else (number,)
        for plan, ring, ring_number in zip(plans, rings[::-1], numbers[::-1], strict=True):
            x = _Exchange.apply(x, plan, ring, dim, call, ring_number, False)  # type: ignore[no-untyped-call]
    return x, plans[-1].pieces


class _Exchange(torch.autograd.Function):
    """Autograd function of one exchange. Its backward is the transposed exchange, which is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: ExchangePlan, ring: Ring, dim: int, call: str, number: int, transposed: bool
    ) -> Tensor:
        ctx.arguments = plan, ring, dim, call, number, transposed
        return exchange_rows(ring, plan, x, dim, call, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan, ring, dim, call, number, transposed = ctx.arguments
        with ring._call_guard(dout.device):
            number = ring._agree({"call": f"backward of {call}"}, dout.device, forward_number=number)
            dx = _Exchange.apply(dout, plan, ring, dim, call, number, not transposed)  # type: ignore[no-untyped-call]
        return dx, None, None, None, None, None, None


def exchange_rows(ring: Ring, plan: ExchangePlan, x: Tensor, dim: int, label: str, *, transposed: bool) -> Tensor:
    """Exchange rows of ``x`` along ``dim``, or with ``transposed`` sum rows back where the exchange took them from."""
    rows = x.movedim(dim, 0)
    buffer = x.new_empty((plan.size + 1, *rows.shape[1:]))
    held, wanted = buffer[plan.received : -1], buffer[: plan.first_sent]
    received = torch.split(buffer[: plan.received], plan.receive_counts)
    sent = torch.split(buffer[plan.first_sent : -1], plan.send_counts)
    incoming, outgoing = ({rank: (part,) for rank, part in enumerate(parts)} for parts in (received, sent))
    if transposed:
        incoming, outgoing = outgoing, incoming
    source, target = (wanted, held) if transposed else (held, buffer)
    _sum_rows(rows, 0, plan.indices(x.device, packs=not transposed, transposed=transposed), out=source)
    buffer[-1:].zero_()
    transfer(ring, label, outgoing, incoming, x.device)
    indices = plan.indices(x.device, packs=transposed, transposed=transposed)
    return _sum_rows(target.movedim(0, dim), dim, indices)


def _sum_rows(x: Tensor, dim: int, indices: tuple[Tensor, ...], out: Tensor | None = None) -> Tensor:
    """Return the sums of rows that :func:`.exchange.transpose_index` describes, computed in fp32 or wider."""
    first, *pairs = indices
    total = torch.index_select(x, dim, first, out=out)
    if pairs:
        wide = total.to(torch.promote_types(x.dtype, torch.float32))
        for targets, sources in zip(pairs[::2], pairs[1::2], strict=True):  # index_add_ has a fixed order here
            wide.index_add_(dim, targets, x.index_select(dim, sources).to(wide.dtype))
        total.copy_(wide)
    return total
