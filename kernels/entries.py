"""The host entries as everybody calls them: in a graph of torch.compile by their ops, elsewhere as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import attention as host
from .config import KernelConfig, is_single_pass
from .experimental.gradients import attention_gradients as host_gradients
from .op_calls import pack
from .ops import (
    backward_op,
    delta_op,
    dequantize_op,
    dkdv_into_op,
    dkdv_op,
    dq_into_op,
    dq_op,
    finish_op,
    fold_op,
    forward_op,
    gradients_into_op,
    gradients_op,
    quantize_op,
)
from .quantize import dequantize as host_dequantize
from .quantize import quantize as host_quantize

P = ParamSpec("P")
R = TypeVar("R")
Pair = tuple[Tensor, Tensor]


def _either(entry: Callable[P, R], traced: Callable[..., R]) -> Callable[P, R]:
    """``entry``, or in a graph of torch.compile what it can be ``traced`` as."""

    @wraps(entry)
    def chosen(*args: P.args, **call: P.kwargs) -> R:
        return traced(*args, **call) if torch.compiler.is_compiling() else entry(*args, **call)

    return chosen


def _traced_forward(
    q: Tensor, k: Tensor, v: Tensor, *, state: Pair | None = None, final: bool = True, **call: Any
) -> Pair:
    packed = pack(**call)
    if state is None:
        out, lse = forward_op(q, k, v, final, *packed)
        return out, lse
    if final and state[0].dtype != q.dtype:
        return finish_op(q, k, v, *state, *packed), state[1]
    fold_op(q, k, v, *state, *packed)
    return state


def _traced_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    delta: Tensor = delta_op(dout, out, dlse)
    return delta


def _traced_dq(*given: Tensor, sums: Tensor | None = None, into: Tensor | None = None, **call: Any) -> Tensor:
    packed = pack(**call)
    if into is None:
        dq: Tensor = dq_op(*given, sums, *packed)
        return dq
    add = sums is into
    dq_into_op(*given, None if add else sums, into, add, *packed)
    return into


def _traced_dkdv(*given: Tensor, sums: Pair | None = None, into: Pair | None = None, **call: Any) -> Pair:
    packed, (dk, dv) = pack(**call), sums or (None, None)
    if into is None:
        made: Pair = dkdv_op(*given, dk, dv, *packed)
        return made
    add = dk is into[0] and dv is into[1]
    dkdv_into_op(*given, *((None, None) if add else (dk, dv)), *into, add, *packed)
    return into


def _traced_gradients(
    *given: Tensor, dq: Tensor, sums: Pair | None = None, into: Pair | None = None, **call: Any
) -> Pair:
    packed, (dk, dv) = pack(**call), sums or (None, None)
    if into is None:
        made: Pair = gradients_op(*given, dq, dk, dv, *packed)
        return made
    add = dk is into[0] and dv is into[1]
    gradients_into_op(*given, dq, *((None, None) if add else (dk, dv)), *into, add, *packed)
    return into


def _traced_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    dlse: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    config: KernelConfig | None = None, **call: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = (dout, q, k, v, lse, _traced_delta(dout, out, dlse))
    if dq is None and dk is None and dv is None:
        whole: tuple[Tensor, Tensor, Tensor] = backward_op(*given, *pack(config=config, **call))
        return whole
    sums, call = None if dk is None or dv is None else (dk, dv), call | {"config": config}
    if is_single_pass(config):
        total = q.new_zeros(q.shape, dtype=torch.float32) if dq is None else dq
        made = _traced_gradients(*given, dq=total, sums=sums, into=sums, **call)
        return total.to(q.dtype) if dq is None else total, *made
    return _traced_dq(*given, sums=dq, into=dq, **call), *_traced_dkdv(*given, sums=sums, into=sums, **call)


def _traced_quantize(x: Tensor, out: Tensor, scale: Tensor) -> None:
    quantize_op(x, out, scale)


def _traced_dequantize(x: Tensor, scale: Tensor, out: Tensor) -> None:
    dequantize_op(x, scale, out)


attention_forward = _either(host.attention_forward, _traced_forward)
attention_delta = _either(host.attention_delta, _traced_delta)
attention_dq = _either(host.attention_dq, _traced_dq)
attention_dkdv = _either(host.attention_dkdv, _traced_dkdv)
attention_gradients = _either(host_gradients, _traced_gradients)
attention_backward = _either(host.attention_backward, _traced_backward)
quantize = _either(host_quantize, _traced_quantize)
dequantize = _either(host_dequantize, _traced_dequantize)
