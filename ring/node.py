"""What a call of ``ring_attention`` means, forward and backward, and the autograd node of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..comm import GroupLike
from ..kernels import KernelConfig, Scores
from . import loop
from .arguments import (
    changing,
    check,
    check_reach,
    check_tiles,
    layouts_of,
    mask_of,
    scores_of,
    seeded,
    signature,
    sink_of,
)
from .backends import backward_works, forward_works, joined, row_delta
from .ring import Ring, ring_of
from .schedule.block_mask import BlockMask, Longformer
from .schedule.layout import LayoutLike
from .schedule.plan import Plan, plan

ONCE = "ring_attention has no second derivative: its gradients cannot be differentiated again"


class Settings(NamedTuple):
    """What the autograd node needs besides tensors."""

    ring: Ring
    number: int  # of the forward, among the ring's calls
    plan: Plan
    softmax_scale: float
    scores: Scores
    backend: str
    config: KernelConfig | None


def settled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring,
    *,
    layout: LayoutLike,
    kv_layout: LayoutLike,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    learnable_sink: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    dropout_seed: int | None,
    cu_seqlens: Iterable[int] | torch.Tensor | None,
    seqused_k: Iterable[int] | torch.Tensor | None,
    prefix_length: int | None,
    block_mask: torch.Tensor | BlockMask | Longformer | None,
    backend: str,
    config: KernelConfig | None,
    number: int | None = None,
    drawn: bool = False,
) -> tuple[Settings, torch.Tensor | None]:
    """The settings and the sink of a call, checked here and, unless the forward has a ``number``, between the ranks.

    ``drawn``: every rank has drawn ``dropout_seed``, and rank 0's counts.

    Raises:
        ValueError, NotImplementedError: as ``ring_attention``.
    """
    scale, backend = check(q, k, v, ring, softmax_scale, backend, config)
    layouts = layouts_of(layout, kv_layout, ring, q, k)
    mask = mask_of(
        layouts,
        q.shape[0],
        causal=causal,
        window_size=window_size,
        cu_seqlens=cu_seqlens,
        seqused_k=seqused_k,
        prefix_length=prefix_length,
        block_mask=block_mask,
    )
    sink, scores = sink_of(learnable_sink, q), scores_of(q, softcap, alibi_slopes, dropout_p, dropout_seed)
    check_tiles(mask, scores, backend, config, q, v)
    check_reach(layouts, scores)
    if number is None:
        fields = signature(q, k, v, layouts, mask, sink, scores, scale, backend)
        values = changing(mask, None if drawn else dropout_seed)
        number = ring._agree(fields, q.device, values)
        scores = seeded(scores, dropout_seed, ring, drawn=drawn)
        ring.open(q.device)
    where = (ring.rank, ring.direction, q.device, ring.topology, ring.slots)
    steps = plan(layouts.queries, mask, *where, kv_layout=layouts.keys)
    return Settings(ring, number, steps, scale, scores, backend, ring.leaving_room(config)), sink


def forward(
    settings: Settings, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's queries."""
    ring, _, steps, scale, scores, backend, config = settings
    with ring.call(steps, "forward", q, k, scores) as call:
        start = None if sink is None else sink_state(sink, q, v.shape[3])
        works = forward_works(backend, call.chunks, q, softmax_scale=scale, config=config, start=start)
        loop.forward(call, works, k, v)
    outs, lses = zip(*(work.result() for work in works), strict=True)
    return joined(outs, 2), joined(lses, 1)


def gradients(
    settings: Settings,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``(dq, dk, dv, dsink)``: of this rank's queries and keys, and this rank's part of that of the sink.

    Raises:
        ValueError: another rank is at the backward of another forward.
    """
    ring, number, steps, scale, scores, backend, config = settings
    ring._agree({"call": "backward"}, q.device, of=number)
    dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    with ring.call(steps, "backward", q, k, scores) as call:
        given = (dout, q, out, lse, dlse)
        works = backward_works(backend, call.chunks, *given, softmax_scale=scale, config=config)
        loop.backward(call, works, k, v, (dk, dv))
    dsink = None if sink is None else sink_gradient(sink, row_delta(backend, dout, out, dlse), lse)
    return joined([work.result() for work in works], 2), dk, dv, dsink


class RingAttention(torch.autograd.Function):
    """The node of a call that is not traced."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        settings: Settings,
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(out, lse)``, which :func:`forward` has computed."""
        out, lse = results
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        # slopes are saved for autograd's check that nobody has changed them in place by the time of the backward
        ctx.save_for_backward(q, k, v, out, lse, sink, settings.scores.alibi_slopes)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Of q, k, v and the sink; refuses to be differentiated again."""
        *saved, _ = ctx.saved_tensors
        with ctx.settings.ring._entered(saved[0].device), torch.no_grad():
            grads: tuple[torch.Tensor | None, ...] = gradients(ctx.settings, dout, dlse, *saved)
        if torch.is_grad_enabled():  # create_graph: without a node that refuses, the gradients would pass as constants
            given = [x for x in (*saved[:3], dout, dlse) if x is not None]
            known = [x for x in grads if x is not None]
            refusing = iter(_NoSecondDerivative.apply(len(known), *known, *given))  # type: ignore[no-untyped-call]
            grads = tuple(None if x is None else next(refusing) for x in grads)
        return *grads, None, None


def sink_state(sink: torch.Tensor, q: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before any key: as if each row had seen one with the sink for its score and 0 for its value."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, value_dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(batch, heads, rows, device=q.device, dtype=torch.float32)
    return out, lse.copy_(sink[:, None])  # memory of the call's own: kernels continue it in place


def sink_gradient(sink: torch.Tensor, delta: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """``-sum(exp(sink - lse) * delta)`` over batch and rows, ``[H]``, with ``delta = rowsum(dout * out) - dlse``.

    The sink is one more key whose value is 0: of ``dS = P * (dO v^T - delta)`` only ``-P * delta`` is left.
    """
    weights = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)  # a sink at -inf alone
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        return tuple(grad.clone() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(ONCE)


def resolve_ring(ring: Ring | None, group: GroupLike, device: torch.device) -> Ring:
    """The ring of a call; ``ring`` and ``group`` name the same thing, so that only one may be given."""
    if ring is None:
        return ring_of(group, device)
    if not isinstance(ring, Ring):
        raise ValueError(f"ring is a {type(ring).__name__}: it must be a Ring")
    if group is not None:
        raise ValueError("ring and group are both given: a Ring has its group, pass one of them")
    return ring


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast floating tensors to autocast's dtype where it is on for their device, as SDPA does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
