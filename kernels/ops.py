"""The host entries as ``torch.library`` ops, for torch.compile and autograd.

An op takes tensors and numbers, and what it returns is new: bounds and scores travel as their fields, and what
continues a state or sums in place is an op of its own. The transposed bounds that dK/dV read are made in each backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import attention as host
from .bounds import FULL, Bounds
from .config import KernelConfig
from .experimental.gradients import attention_gradients
from .op_calls import SCHEMA, Call, pack, unpack
from .quantize import dequantize, quantize
from .scores import PLAIN, Scores


def namespace_of(package: str) -> str:
    """Of the ops of this folder as ``package``: another copy under another name has ops of its own."""
    parts = package.split(".")
    return "__".join(parts[:-1] if parts[-2:] == ["ringattn", "kernels"] else parts)


NAMESPACE = namespace_of(__package__)

NO_SLOPE = "alibi_slopes requires a gradient, and there is none: pass alibi_slopes.detach()"


def _defined(name: str, tensors: str, returns: str, body: Any, fake: Any = None, mutates: tuple[str, ...] = ()) -> Any:
    """Define an op; the function of ``torch.library`` and what to call."""
    schema = f"({tensors}) -> {returns}"
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=mutates, schema=schema)
    op.register_fake(fake or (lambda *_: None))
    if not mutates and name != "attention_forward":
        op.register_autograd(_refusal(name))
    return op


def _refusal(name: str) -> Callable[..., None]:
    def refuse(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(f"{name} has no derivative: of attention there is only the first")

    return refuse


def _out_like(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def _rows_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, final: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return _out_like(q, v, q.dtype if final else torch.float32), _rows_like(q)


def _forward(q: Tensor, k: Tensor, v: Tensor, final: bool, *call: Any) -> tuple[Tensor, Tensor]:
    return host.attention_forward(q, k, v, final=final, **unpack(q.device, *call))


def _fold(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any) -> None:
    host.attention_forward(q, k, v, state=(out, lse), final=False, **unpack(q.device, *call))


def _finish(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any) -> Tensor:
    state = (out if out.dtype != q.dtype else out.clone(), lse)  # of fp32 queries it would be continued in place
    return host.attention_forward(q, k, v, state=state, **unpack(q.device, *call))[0]


def _dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, sums: Any, *call: Any) -> Tensor:
    return host.attention_dq(dout, q, k, v, lse, delta, sums=sums, **unpack(q.device, *call))


def _dq_into(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    sums: Tensor | None, into: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    given = into if add else sums
    host.attention_dq(dout, q, k, v, lse, delta, sums=given, into=into, **unpack(q.device, *call))


def _dkdv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    dk: Tensor | None, dv: Tensor | None, *call: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums = None if dk is None or dv is None else (dk, dv)
    return host.attention_dkdv(dout, q, k, v, lse, delta, sums=sums, **unpack(q.device, *call))


def _dkdv_into(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_into: Tensor, dv_into: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    into = (dk_into, dv_into)
    sums = into if add else None if dk is None or dv is None else (dk, dv)
    host.attention_dkdv(dout, q, k, v, lse, delta, sums=sums, into=into, **unpack(q.device, *call))


def _backward_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return host.backward_of(dout, q, k, v, lse, delta, **unpack(q.device, *call))


def _gradients_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    dk: Tensor | None, dv: Tensor | None, *call: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sums = None if dk is None or dv is None else (dk, dv)
    return attention_gradients(dout, q, k, v, lse, delta, dq=dq, sums=sums, **unpack(q.device, *call))


def _gradients_into(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_into: Tensor, dv_into: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    into = (dk_into, dv_into)
    sums = into if add else None if dk is None or dv is None else (dk, dv)
    attention_gradients(dout, q, k, v, lse, delta, dq=dq, sums=sums, into=into, **unpack(q.device, *call))


_QKV = "Tensor q, Tensor k, Tensor v"
_BACKWARD = f"Tensor dout, {_QKV}, Tensor lse, Tensor delta"

forward_op = _defined("attention_forward", f"{_QKV}, bool final, {SCHEMA}", "(Tensor, Tensor)", _forward, _fake_forward)
fold_op = _defined(
    "attention_fold", f"{_QKV}, Tensor(a!) out, Tensor(b!) lse, {SCHEMA}", "()", _fold, mutates=("out", "lse")
)
finish_op = _defined(
    "attention_finish", f"{_QKV}, Tensor out, Tensor(a!) lse, {SCHEMA}", "Tensor", _finish,
    lambda q, k, v, *_: _out_like(q, v, q.dtype), ("lse",),
)  # fmt: skip
delta_op = _defined(
    "attention_delta", "Tensor dout, Tensor out, Tensor? dlse", "Tensor", host.attention_delta,
    lambda dout, out, dlse: _rows_like(out),
)  # fmt: skip
dq_op = _defined(
    "attention_dq", f"{_BACKWARD}, Tensor? sums, {SCHEMA}", "Tensor", _dq,
    lambda dout, q, *_: q.new_empty(q.shape),
)  # fmt: skip
dq_into_op = _defined(
    "attention_dq_into", f"{_BACKWARD}, Tensor? sums, Tensor(a!) into, bool add, {SCHEMA}", "()", _dq_into,
    mutates=("into",),
)  # fmt: skip
dkdv_op = _defined(
    "attention_dkdv", f"{_BACKWARD}, Tensor? dk, Tensor? dv, {SCHEMA}", "(Tensor, Tensor)", _dkdv,
    lambda dout, q, k, v, *_: (k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip
dkdv_into_op = _defined(
    "attention_dkdv_into",
    f"{_BACKWARD}, Tensor? dk, Tensor? dv, Tensor(a!) dk_into, Tensor(b!) dv_into, bool add, {SCHEMA}", "()",
    _dkdv_into, mutates=("dk_into", "dv_into"),
)  # fmt: skip
backward_op = _defined(
    "attention_backward", f"{_BACKWARD}, {SCHEMA}", "(Tensor, Tensor, Tensor)", _backward_of,
    lambda dout, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip
gradients_op = _defined(
    "attention_gradients", f"{_BACKWARD}, Tensor(a!) dq, Tensor? dk, Tensor? dv, {SCHEMA}", "(Tensor, Tensor)",
    _gradients_op, lambda dout, q, k, v, *_: (k.new_empty(k.shape), v.new_empty(v.shape)), ("dq",),
)  # fmt: skip
gradients_into_op = _defined(
    "attention_gradients_into",
    f"{_BACKWARD}, Tensor(a!) dq, Tensor? dk, Tensor? dv, Tensor(b!) dk_into, Tensor(c!) dv_into, bool add, {SCHEMA}",
    "()", _gradients_into, mutates=("dq", "dk_into", "dv_into"),
)  # fmt: skip

quantize_op = _defined(
    "quantize", "Tensor x, Tensor(a!) out, Tensor(b!) scale", "()", quantize, mutates=("out", "scale")
)
dequantize_op = _defined("dequantize", "Tensor x, Tensor scale, Tensor(a!) out", "()", dequantize, mutates=("out",))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, *args = inputs
    ctx.set_materialize_grads(False)
    call = Call(*args)
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    nothing: dict[str, Any] = dict.fromkeys(tensors)
    if any(x.requires_grad for x in tensors.values()):
        raise ValueError(NO_SLOPE)
    ctx.names, ctx.call = tuple(tensors), call._replace(**nothing)
    ctx.save_for_backward(q, k, v, *output, *tensors.values())


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(ctx.names, tensors, strict=True)))
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    delta = delta_op(dout, out, None if dlse is None else dlse.contiguous())
    dq, dk, dv = backward_op(dout.to(q.dtype), q, k, v, lse, delta, *call)
    return dq, dk, dv, None, *(None for _ in call)


forward_op.register_autograd(_gradients, setup_context=_keep)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention_forward` of one shard alone, with gradients for q, k and v: of ``out`` and of ``lse``.

    Its gradient is :func:`attention_backward`; there is no second one.

    Args:
        q, k, v, bounds, scores, softmax_scale, config: as in :func:`attention_forward`.

    Returns:
        ``out [B, Sq, H, Dv]`` in q's dtype, and ``lse [B, H, Sq]``, fp32, natural logarithm.

    Raises:
        ValueError: an argument does not fit, or the slopes of ``scores`` require a gradient, which there is not.
    """
    if scores.alibi_slopes is not None and scores.alibi_slopes.requires_grad:
        raise ValueError(NO_SLOPE)
    out, lse = forward_op(q, k, v, True, *pack(bounds, scores, softmax_scale, config))
    return out, lse
