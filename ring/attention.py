"""``ring_attention``: checks at the door, then one autograd node around the ring loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from .. import __version__
from ..kernels import KernelConfig
from ..kernels.checks import check_qkv, check_scale
from . import loop
from .backends import backward_works, forward_works, joined, resolve_backend
from .layout import Layout
from .mask import Mask
from .plan import Plan, plan
from .ring import Ring, ring_of
from .shards import resolve_layout
from .wire import wire_of

VERSIONS = {"ringattn": __version__, "torch": torch.__version__, "triton": triton.__version__}


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout | str | None = None,
    ring: Ring | None = None,
    group: object = None,
    causal: bool = False,
    softmax_scale: float | None = None,
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
        k: this rank's keys ``[B, S, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
        v: this rank's values ``[B, S, Hkv, Dv]``.
        layout: which global positions each rank holds: a :class:`Layout`, or ``contiguous``, ``zigzag`` or ``striped``
            for equal shards; required with more than one rank.
        ring: keeps transport and slots between calls; by default one per group.
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a ``LocalWorld`` member; None is the
            default group where ``torch.distributed`` is initialised, else one device alone.
        causal: the query at position p sees the keys at positions up to p.
        softmax_scale: positive factor of ``q k^T`` before the exponential; default ``1 / sqrt(D)``.
        return_lse: also return ``lse``; it has a gradient.
        backend: ``triton`` (GPU; CPU tensors under Triton's interpreter alone), ``aten`` (CPU: PyTorch's own
            flash-attention operator), or ``auto``.
        config: tiles of the Triton kernels; by default chosen by GPU and shape.

    Returns:
        ``out [B, S, H, Dv]`` in q's dtype; with ``return_lse`` also ``lse [B, H, S]``, fp32, natural logarithm. A row
        that sees no key has ``out = 0`` and ``lse = -inf``.

    Under autocast q, k and v are cast as by ``scaled_dot_product_attention``. A second derivative raises.

    Raises:
        ValueError: an argument does not fit, before anything is sent; the message names it, what it got and what it
            takes. Where the ranks disagree, every rank raises it.
        NotImplementedError: ``backend="triton"`` on the CPU without Triton's interpreter.
    """
    ring = resolve_ring(ring, group, q.device)
    q, k, v = autocast(q, k, v)
    try:
        scale, backend = check(q, k, v, ring, causal, softmax_scale, backend, config)
        whole = layout_of(layout, ring, q, k)
    except (ValueError, NotImplementedError) as error:
        ring.refuse(error, q.device)  # the other ranks must hear of it instead of waiting
        raise
    mask = Mask(causal=causal)
    ring.agree(signature(q, k, v, whole, mask, scale, backend, ring), q.device)
    ring.open(q.device)
    steps = plan(whole, mask, ring.rank, ring.direction, q.device, ring.topology, ring.slots)
    out, lse = _RingAttention.apply(q, k, v, Settings(ring, steps, scale, backend, config))  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring,
    causal: object,
    softmax_scale: float | None,
    backend: str,
    config: KernelConfig | None,
) -> tuple[float, str]:
    """The scale and the backend of a call, once all that this rank can check alone has been checked."""
    check_qkv(q, k, v)
    if not isinstance(causal, bool):
        raise ValueError(f"causal is {causal!r}: it must be True or False")
    if ring.chunks > k.shape[2]:
        raise ValueError(f"chunks of the ring is {ring.chunks}, k has {k.shape[2]} heads: a chunk has at least one")
    wire_of(ring.wire_dtype, k.dtype)
    name = resolve_backend(backend, q.device)
    if config is not None and name == "aten":
        raise ValueError("config sets the tiles of the Triton kernels, and the backend is aten: leave it out")
    return check_scale(softmax_scale, q.shape[3]), name


class Settings(NamedTuple):
    """What the autograd node needs besides tensors."""

    ring: Ring
    plan: Plan
    softmax_scale: float
    backend: str
    config: KernelConfig | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring, steps, scale, backend, config = settings
        with ring.call(steps, "forward", q, k) as call:
            works = forward_works(backend, call.chunks, q, softmax_scale=scale, config=config)
            loop.forward(call, works, k, v)
        outs, lses = zip(*(work.result() for work in works), strict=True)
        out, lse = joined(outs, 2), joined(lses, 1)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            grads = _RingAttention.gradients(ctx, dout, dlse)
        if torch.is_grad_enabled():  # create_graph: without a node that refuses, the gradients would pass as constants
            given = [x for x in (*ctx.saved_tensors[:3], dout, dlse) if x is not None]
            grads = _NoSecondDerivative.apply(*grads, *given)  # type: ignore[no-untyped-call]
        return *grads, None

    @staticmethod
    def gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ring, steps, scale, backend, config = ctx.settings
        ring.check_thread()
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        with ring.call(steps, "backward", q, k) as call:
            given = (dout, q, out, lse, dlse)
            works = backward_works(backend, call.chunks, *given, softmax_scale=scale, config=config)
            loop.backward(call, works, k, v, (dk, dv))
        return joined([work.result() for work in works], 2), dk, dv


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *given: torch.Tensor) -> Any:
        return dq.clone(), dk.clone(), dv.clone()

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


def layout_of(layout: Layout | str | None, ring: Ring, q: torch.Tensor, k: torch.Tensor) -> Layout:
    """The layout of a call, checked against this rank's shards."""
    rows = q.shape[1]
    if k.shape[1] != rows:
        raise ValueError(f"k has {k.shape[1]} tokens, q has {rows}: a rank's queries and keys are the same tokens")
    seqlen = layout.seqlen if isinstance(layout, Layout) else rows * ring.size
    whole = resolve_layout(layout, seqlen, ring.size)
    if rows != whole.lengths[ring.rank]:
        raise ValueError(f"q has {rows} tokens, the layout gives rank {ring.rank} {whole.lengths[ring.rank]}")
    return whole


def signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    mask: Mask,
    scale: float,
    backend: str,
    ring: Ring,
) -> dict[str, Any]:
    """What all ranks must have in common."""
    return {
        "batch size": q.shape[0],
        "heads": (q.shape[2], k.shape[2]),
        "head dim": (q.shape[3], v.shape[3]),
        "dtype": q.dtype,
        "layout": layout,
        "mask": mask,
        "softmax_scale": scale,
        "backend": backend,
        **ring.settings,
        **VERSIONS,
    }
