"""``ring_attention``: checks at the door, then one autograd node around the ring loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..kernels import KernelConfig, Scores
from . import loop
from .arguments import changing, check, check_tiles, layouts_of, mask_of, scores_of, seeded, signature, sink_of
from .backends import backward_works, forward_works, joined, row_delta
from .block_mask import BlockMask, Longformer
from .layout import Layout
from .plan import Plan, plan
from .ring import Ring, ring_of


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | str | None = None,
    ring: Ring | None = None,
    group: object = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    learnable_sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    cu_seqlens: Iterable[int] | torch.Tensor | None = None,
    seqused_k: Iterable[int] | torch.Tensor | None = None,
    prefix_length: int | None = None,
    block_mask: torch.Tensor | BlockMask | Longformer | None = None,
    kv_layout: Layout | str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    config: KernelConfig | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries over the keys of all ranks: ``softmax(scale * q k^T) v``.

    Ring Attention (Liu et al., arXiv:2310.01889): K/V visit the ranks one after the other while each computes; the
    softmax state of FlashAttention (arXiv:2205.14135, algorithm 1) is carried from hop to hop in fp32. Every rank of
    the group calls it with its own shard; the result does not depend on the number of ranks, up to rounding.

    Args:
        q: this rank's queries ``[B, S, H, D]``; float16, bfloat16 or float32; any strides with a unit last one.
        k: this rank's keys ``[B, Sk, Hkv, D]``, ``Sk = S`` without ``kv_layout``; ``H`` is a multiple of ``Hkv``.
        v: this rank's values ``[B, Sk, Hkv, Dv]``.
        layout: which global positions each rank holds: a :class:`Layout`, or ``contiguous``, ``zigzag`` or ``striped``
            for equal shards; required with more than one rank.
        ring: keeps transport and slots between calls; by default one per group.
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a ``LocalWorld`` member; None is the
            default group where ``torch.distributed`` is initialised, else one device alone.
        causal: the query at position p sees the keys at positions up to p.
        window_size: ``(left, right)``: it sees the keys at positions p - left to p + right, both included; -1: no end
            on that side. With ``causal`` nothing after p, whatever ``right``.
        softmax_scale: positive factor of ``q k^T`` before the exponential; default ``1 / sqrt(D)``.
        softcap: ``cap``, where positive: the scaled score s becomes ``cap * tanh(s / cap)``.
        learnable_sink: ``[H]``, one more logit per row that takes part in the softmax and has no value; it counts in
            ``lse``. Its gradient is this rank's part, to be reduced like any replicated parameter's.
        alibi_slopes: ``[H]`` or ``[B, H]``, fp32: ``-slope * |p_q - p_k|``, of global positions, is added to the score,
            after the softcap. Without a gradient.
        dropout_p: weights that are dropped, 0 to below 1; the others are divided by ``1 - dropout_p``. ``lse`` is that
            before. Which ones is a function of seed, positions, head and batch row, by Philox4x32-10 (Salmon et al.,
            SC11): the same for every number of ranks, layout and backend.
        dropout_seed: 64 bits; None: rank 0 draws one from torch's generator and tells the others, a round trip through
            the group's store.
        cu_seqlens: boundaries ``[0, ..., seqlen]`` of documents packed into the sequence, over global positions: a
            query sees keys of its own document only. A list or a CPU tensor; they need not divide by anything.
        seqused_k: ``[B]``, host data as ``cu_seqlens``: keys at this global position and after it are padding.
        prefix_length: positions at the start that ``causal`` hides from no query (prefix-LM).
        block_mask: bool ``[query blocks, key blocks]`` over global positions, on the CPU, whose blocks all have one
            size; a ``ring.BlockMask``, which says the size, and is made once and kept; or what one of the builders
            ``ring.strided``, ``fixed``, ``bigbird`` and ``longformer`` made. The spans of the layouts must be whole
            blocks. The kernels take blocks that are a multiple of 16, and cut their default tiles to divide them.
        kv_layout: which positions the keys of each rank have, where they are not the queries': cross-attention, or
            queries behind a cache.
        return_lse: also return ``lse``; it has a gradient.
        backend: ``triton`` (GPU; CPU tensors under Triton's interpreter alone), ``aten`` (CPU: PyTorch's own
            flash-attention operator), or ``auto``.
        config: tiles of the Triton kernels; by default chosen by GPU and shape.

    Returns:
        ``out [B, S, H, Dv]`` in q's dtype; with ``return_lse`` also ``lse [B, H, S]``, fp32, natural logarithm. A row
        that sees no key has ``out = 0`` and ``lse = -inf`` (with a sink, ``lse`` is the sink).

    What several of the arguments show is what all of them show. Under autocast q, k and v are cast as by
    ``scaled_dot_product_attention``. A second derivative raises.

    Raises:
        ValueError: an argument does not fit, before anything is sent; the message names it, what it got and what it
            takes. Where the ranks disagree, every rank raises it.
        NotImplementedError: ``backend="triton"`` on the CPU without Triton's interpreter.
    """
    ring = resolve_ring(ring, group, q.device)
    q, k, v = autocast(q, k, v)
    try:
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
        check_tiles(mask, backend, config, q, v)
        sink, scores = sink_of(learnable_sink, q), scores_of(q, softcap, alibi_slopes, dropout_p, dropout_seed)
    except (ValueError, NotImplementedError) as error:
        ring.refuse(error, q.device)  # the other ranks must hear of it instead of waiting
        raise
    fixed = signature(q, k, v, layouts, mask, sink, scores, scale, backend, ring)
    ring.agree(fixed, q.device, changing(mask, scores))
    scores = seeded(scores, dropout_seed, ring)
    ring.open(q.device)
    where = (ring.rank, ring.direction, q.device, ring.topology, ring.slots)
    steps = plan(layouts.queries, mask, *where, kv_layout=layouts.keys)
    out, lse = _RingAttention.apply(q, k, v, sink, Settings(ring, steps, scale, scores, backend, config))  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class Settings(NamedTuple):
    """What the autograd node needs besides tensors."""

    ring: Ring
    plan: Plan
    softmax_scale: float
    scores: Scores
    backend: str
    config: KernelConfig | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring, steps, scale, scores, backend, config = settings
        with ring.call(steps, "forward", q, k, scores) as call:
            start = None if sink is None else sink_state(sink, q, v.shape[3])
            works = forward_works(backend, call.chunks, q, softmax_scale=scale, config=config, start=start)
            loop.forward(call, works, k, v)
        outs, lses = zip(*(work.result() for work in works), strict=True)
        out, lse = joined(outs, 2), joined(lses, 1)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        # slopes are saved for autograd's check that nobody has changed them in place by the time of the backward
        ctx.save_for_backward(q, k, v, out, lse, sink, scores.alibi_slopes)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            grads = _RingAttention.gradients(ctx, dout, dlse)
        if torch.is_grad_enabled():  # create_graph: without a node that refuses, the gradients would pass as constants
            given = [x for x in (*ctx.saved_tensors[:3], dout, dlse) if x is not None]
            known = [x for x in grads if x is not None]
            refusing = iter(_NoSecondDerivative.apply(len(known), *known, *given))  # type: ignore[no-untyped-call]
            grads = tuple(None if x is None else next(refusing) for x in grads)
        return *grads, None

    @staticmethod
    def gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ring, steps, scale, scores, backend, config = ctx.settings
        ring.check_thread()
        q, k, v, out, lse, sink, _ = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        with ring.call(steps, "backward", q, k, scores) as call:
            given = (dout, q, out, lse, dlse)
            works = backward_works(backend, call.chunks, *given, softmax_scale=scale, config=config)
            loop.backward(call, works, k, v, (dk, dv))
        dsink = None if sink is None else sink_gradient(sink, row_delta(backend, dout, out, dlse), lse)
        return joined([work.result() for work in works], 2), dk, dv, dsink


def sink_state(sink: torch.Tensor, q: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before any key: as if each row had seen one with the sink for its score and 0 for its value."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, value_dim, device=q.device)
    return out, sink.float()[None, :, None].expand(batch, heads, rows).contiguous()


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
        raise RuntimeError("ring_attention has no second derivative: its gradients cannot be differentiated again")


def resolve_ring(ring: Ring | None, group: object, device: torch.device) -> Ring:
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
