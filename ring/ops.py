"""``ring_attention`` in a graph of torch.compile: one ``torch.library`` op forward and one backward.

What is checked, agreed on, planned and sent is so when the graph runs, not when it is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.ops import NO_SLOPE
from ..kernels.scores import SEEDS
from .node import ONCE, forward, gradients, settled
from .packed import SCHEMA, Packed, meaning, pack, ring_of_call
from .ring import Ring

NAMESPACE = __package__.rpartition(".")[0].replace(".", "__")  # another copy under another name has ops of its own


def traced(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring | None, group: Any, *, learnable_sink: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor]:
    """``ring_attention`` as torch.compile reads it: it only packs."""
    out, lse, *_ = _FORWARD(q, k, v, learnable_sink, *pack(ring, group, **call))
    return out, lse


def _ring_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """``out``, ``lse``, and what the backward must have: the seed of dropout, and the number of the forward."""
    packed = Packed(*args)
    ring = ring_of_call(packed, q.device)
    given = None if packed.dropout_seed is None else int(packed.dropout_seed)
    seed = given if given is None or packed.drawn else given % SEEDS
    with ring._entered(q.device):
        settings, checked = settled(q, k, v, ring, **meaning(packed, sink, seed), drawn=packed.drawn)
        out, lse = forward(settings, q, k, v, checked)
    used = settings.scores.dropout_seed
    signed = used - SEEDS if used >= SEEDS // 2 else used
    numbers = (torch.tensor(number, device="cpu") for number in (signed, settings.number))
    return out.contiguous(), lse.contiguous(), *numbers


def _gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    number: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and that of the sink, empty where there is none."""
    packed = Packed(*args)
    ring = ring_of_call(packed, q.device)
    assert packed.dropout_seed is not None
    seed = int(packed.dropout_seed) % SEEDS if packed.dropout_p else None
    with ring._entered(q.device):
        settings, checked = settled(q, k, v, ring, **meaning(packed, sink, seed), number=int(number))
        dq, dk, dv, dsink = gradients(settings, dout, dlse, q, k, v, out, lse, checked)
    return dq.contiguous(), dk, dv, lse.new_empty(0) if dsink is None else dsink


def _fake_ring_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch, rows, heads, _dim = q.shape
    out, lse = q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)
    numbers = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out, lse, *numbers


def _fake_gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), torch.empty_like(k), torch.empty_like(v), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, *args = inputs
    out, lse, seed, number = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(seed, number)
    packed = Packed(*args)._replace(dropout_seed=seed, drawn=False)
    tensors = {name: x for name, x in packed._asdict().items() if isinstance(x, Tensor)}
    nothing: dict[str, Any] = dict.fromkeys(tensors)
    if any(x.requires_grad for x in tensors.values()):
        raise ValueError(NO_SLOPE)
    ctx.names, ctx.packed = tuple(tensors), packed._replace(**nothing)
    ctx.save_for_backward(q, k, v, out, lse, sink, number, *tensors.values())


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sink, number, *tensors = ctx.saved_tensors
    packed = ctx.packed._replace(**dict(zip(ctx.names, tensors, strict=True)))
    dq, dk, dv, dsink = _GRADIENTS(dout, dlse, q, k, v, out, lse, sink, number, *packed)
    return dq, dk, dv, None if sink is None else dsink, *(None for _ in packed)


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(ONCE)


def _defined(name: str, function: Any, tensors: str, returns: str, fake: Any, autograd: Any, keep: Any = None) -> Any:
    """Define an op; what torch.compile calls."""
    # waits on the host and talks to other ranks, which no CUDA graph can replay
    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    op = torch.library.custom_op(
        f"{NAMESPACE}::{name}", function, mutates_args=(), schema=f"({tensors}, {SCHEMA}) -> {returns}", tags=tags
    )
    op.register_fake(fake)
    op.register_autograd(autograd, setup_context=keep)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_GRADIENTS = _defined(
    "ring_attention_backward",
    _gradients,
    "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sink, Tensor number",
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
    _refuse,
)
_FORWARD = _defined(
    "ring_attention",
    _ring_attention,
    "Tensor q, Tensor k, Tensor v, Tensor? sink",
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_ring_attention,
    _backward,
    _keep,
)
