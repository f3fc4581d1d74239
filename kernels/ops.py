"""Public entries of the kernels: plain calls in eager mode, ``torch.library`` ops under torch.compile.

An op takes only tensors and numbers, so bounds, scores and a config are passed as their fields. An op must return new
tensors, so each entry that updates its inputs in place is an op of its own. A compiled backward computes the transposed
bounds for dK/dV in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import attention as host
from . import quantize as fp8
from .bounds import FULL, BlockSparseIndex, Bounds
from .config import KernelConfig, Tile, is_single_pass
from .launch import Pair
from .scores import PLAIN, SEED_RANGE, Scores
from .single_pass import attention_gradients as host_gradients

P = ParamSpec("P")
R = TypeVar("R")

SCHEMA = (
    "Tensor? lo, Tensor? hi, Tensor? seqused_k, Tensor? visible, SymInt block, float softcap, Tensor? alibi_slopes, "
    "float dropout_p, SymInt dropout_seed, SymInt first_head, Tensor? q_positions, Tensor? k_positions, "
    "float? softmax_scale, int[]? tiles, str[] choices"
)

TILE_FIELDS = tuple(field.name for field in fields(KernelConfig) if field.type in ("Tile", "Tile | None"))
OPTION_FIELDS = tuple(field.name for field in fields(KernelConfig) if field.name not in TILE_FIELDS)
TILE_SIZES = tuple(field.name for field in fields(Tile))
NO_TILE = (0,) * len(TILE_SIZES)


class OpArgs(NamedTuple):
    """Arguments of ``SCHEMA``: everything that an entry takes besides q, k, v and the gradients."""

    lo: Tensor | None
    hi: Tensor | None
    seqused_k: Tensor | None
    visible: Tensor | None
    block: int
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int  # signed
    first_head: int
    q_positions: Tensor | None
    k_positions: Tensor | None
    softmax_scale: float | None
    tiles: list[int] | None
    choices: list[str]


def pack_kernel_args(
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    config: KernelConfig | None = None,
) -> OpArgs:
    """Return the keyword arguments of a host entry as the tensors and numbers that its ``torch.library`` op takes."""
    index, seed = bounds.block_sparse, scores.dropout_seed
    return OpArgs(
        bounds.lo,
        bounds.hi,
        bounds.seqused_k,
        None if index is None else index.visible,
        0 if index is None else index.block,
        scores.softcap,
        scores.alibi_slopes,
        scores.dropout_p,
        seed - SEED_RANGE if seed >= SEED_RANGE // 2 else seed,
        scores.first_head,
        scores.q_positions,
        scores.k_positions,
        softmax_scale,
        *pack_config(config),
    )


def pack_config(config: KernelConfig | None) -> tuple[list[int] | None, list[str]]:
    """Return a config as the numbers of its tiles and the text of its other fields."""
    if config is None:
        return None, []
    tiles = (getattr(config, kernel) for kernel in TILE_FIELDS)
    numbers = [n for tile in tiles for n in (NO_TILE if tile is None else (getattr(tile, side) for side in TILE_SIZES))]
    return numbers, [str(getattr(config, choice)) for choice in OPTION_FIELDS]


def unpack_config(tiles: Sequence[int] | None, choices: Sequence[str]) -> KernelConfig | None:
    """Return the config that :func:`pack_config` packed; equal arguments give the same object."""
    return None if tiles is None else _cached_config(tuple(tiles), tuple(choices))


@lru_cache(maxsize=64)
def _cached_config(tiles: tuple[int, ...], choices: tuple[str, ...]) -> KernelConfig:
    count = len(TILE_SIZES)
    sizes = (tiles[i * count : (i + 1) * count] for i in range(len(TILE_FIELDS)))
    tile_of_kernel: dict[str, Any] = {
        kernel: None if size == NO_TILE else Tile(*size) for kernel, size in zip(TILE_FIELDS, sizes, strict=True)
    }
    return KernelConfig(**tile_of_kernel | dict(zip(OPTION_FIELDS, map(_parse_option, choices), strict=True)))


def _parse_option(word: str) -> str | int | bool | None:
    """Return the value of an option from its ``str``; no text option reads as None, a bool or a number."""
    constants = {"None": None, "True": True, "False": False}
    return constants[word] if word in constants else int(word) if word.isdecimal() else word


def unpack_kernel_args(device: torch.device, *args: Any) -> dict[str, Any]:
    """Return the arguments of a ``torch.library`` op as keyword arguments of its host entry."""
    call = OpArgs(*args)
    block_sparse = None if call.visible is None else BlockSparseIndex(call.visible, call.block, device)
    plain = all(x is None for x in (call.lo, call.hi, call.seqused_k, block_sparse))
    scores = Scores(
        call.softcap, call.alibi_slopes, call.dropout_p, call.dropout_seed % SEED_RANGE, call.first_head,
        call.q_positions, call.k_positions,
    )  # fmt: skip
    return {
        "bounds": FULL if plain else Bounds(call.lo, call.hi, call.seqused_k, block_sparse),
        "scores": scores,
        "softmax_scale": call.softmax_scale,
        "config": unpack_config(call.tiles, call.choices),
    }


def op_namespace(package: str) -> str:
    """Return the namespace of the ops for this folder as ``package``, so that a vendored copy has its own ops."""
    parts = package.split(".")
    return "__".join(parts[:-1] if parts[-2:] == ["ringattn", "kernels"] else parts)


NAMESPACE = op_namespace(__package__)

SLOPES_GRADIENT_ERROR = "alibi_slopes requires a gradient, which is not computed. Pass alibi_slopes.detach()."


def _define_op(
    name: str, tensors: str, returns: str, body: Any, fake: Any = None, mutates: tuple[str, ...] = ()
) -> Any:
    """Define and return a ``torch.library`` op with the schema ``(tensors) -> returns``, which runs ``body``.

    ``fake`` is the implementation on fake tensors; None for an op that returns nothing.
    """
    schema = f"({tensors}) -> {returns}"
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", body, mutates_args=mutates, schema=schema)
    op.register_fake(fake or (lambda *_: None))

    def refuse(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(f"{name} has no derivative: second derivatives of attention are not supported")

    if not mutates and name != "attention_forward":
        op.register_autograd(refuse)
    return op


def _out_like(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty ``out [B, Sq, H, Dv]``."""
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def _rows_like(q: Tensor) -> Tensor:
    """Return an empty ``lse`` or ``delta``, fp32 ``[B, H, Sq]``."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, final: bool, *_: Any) -> tuple[Tensor, Tensor]:
    return _out_like(q, v, q.dtype if final else torch.float32), _rows_like(q)


def _forward(q: Tensor, k: Tensor, v: Tensor, final: bool, *call: Any) -> tuple[Tensor, Tensor]:
    return host.attention_forward(q, k, v, final=final, **unpack_kernel_args(q.device, *call))


def _fold(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any) -> None:
    """Add one shard of keys to the state ``(out, lse)``, in place."""
    host.attention_forward(q, k, v, state=(out, lse), final=False, **unpack_kernel_args(q.device, *call))


def _finish(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any) -> Tensor:
    """Add the last shard of keys to the state; update ``lse`` in place, and return ``out`` in q's dtype."""
    # with fp32 queries the kernel would update out in place
    state = (out if out.dtype != q.dtype else out.clone(), lse)
    return host.attention_forward(q, k, v, state=state, **unpack_kernel_args(q.device, *call))[0]


def _pair(dk: Tensor | None, dv: Tensor | None) -> Pair | None:
    return None if dk is None or dv is None else (dk, dv)


def _dq(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    accum: Tensor | None, out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    accum = out if add else accum
    host.attention_dq(dout, q, k, v, lse, delta, accum=accum, out=out, **unpack_kernel_args(q.device, *call))


def _dkdv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_out: Tensor, dv_out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    out = (dk_out, dv_out)
    accum = out if add else _pair(dk, dv)
    host.attention_dkdv(dout, q, k, v, lse, delta, accum=accum, out=out, **unpack_kernel_args(q.device, *call))


def _backward_from_delta(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return host.backward_from_delta(dout, q, k, v, lse, delta, **unpack_kernel_args(q.device, *call))


def _single_pass(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_out: Tensor, dv_out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    out = (dk_out, dv_out)
    accum = out if add else _pair(dk, dv)
    host_gradients(dout, q, k, v, lse, delta, dq=dq, accum=accum, out=out, **unpack_kernel_args(q.device, *call))


_QKV = "Tensor q, Tensor k, Tensor v"
_BACKWARD = f"Tensor dout, {_QKV}, Tensor lse, Tensor delta"
_KEYS = "Tensor? dk, Tensor? dv, Tensor({}!) dk_out, Tensor({}!) dv_out, bool add"

forward_op = _define_op(
    "attention_forward", f"{_QKV}, bool final, {SCHEMA}", "(Tensor, Tensor)", _forward, _fake_forward
)
fold_op = _define_op(
    "attention_fold", f"{_QKV}, Tensor(a!) out, Tensor(b!) lse, {SCHEMA}", "()", _fold, mutates=("out", "lse")
)
finish_op = _define_op(
    "attention_finish", f"{_QKV}, Tensor out, Tensor(a!) lse, {SCHEMA}", "Tensor", _finish,
    lambda q, k, v, *_: _out_like(q, v, q.dtype), ("lse",),
)  # fmt: skip
delta_op = _define_op(
    "attention_delta", "Tensor dout, Tensor out, Tensor? dlse=None", "Tensor", host.attention_delta,
    lambda dout, out, dlse=None: _rows_like(out),
)  # fmt: skip
dq_op = _define_op(
    "attention_dq", f"{_BACKWARD}, Tensor? accum, Tensor(a!) out, bool add, {SCHEMA}", "()", _dq, mutates=("out",)
)
dkdv_op = _define_op(
    "attention_dkdv", f"{_BACKWARD}, {_KEYS.format('a', 'b')}, {SCHEMA}", "()", _dkdv, mutates=("dk_out", "dv_out")
)
gradients_op = _define_op(
    "attention_gradients", f"{_BACKWARD}, Tensor(a!) dq, {_KEYS.format('b', 'c')}, {SCHEMA}", "()", _single_pass,
    mutates=("dq", "dk_out", "dv_out"),
)  # fmt: skip
backward_op = _define_op(
    "attention_backward", f"{_BACKWARD}, {SCHEMA}", "(Tensor, Tensor, Tensor)", _backward_from_delta,
    lambda dout, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip
quantize_op = _define_op(
    "quantize", "Tensor x, Tensor(a!) out, Tensor(b!) scale", "()", fp8.quantize, mutates=("out", "scale")
)
dequantize_op = _define_op(
    "dequantize", "Tensor x, Tensor scale, Tensor(a!) out", "()", fp8.dequantize, mutates=("out",)
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, *args = inputs
    ctx.set_materialize_grads(False)
    call = OpArgs(*args)
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    cleared: dict[str, Any] = dict.fromkeys(tensors)
    if any(x.requires_grad for x in tensors.values()):
        raise ValueError(SLOPES_GRADIENT_ERROR)
    ctx.names, ctx.call = tuple(tensors), call._replace(**cleared)
    ctx.save_for_backward(q, k, v, *output, *tensors.values())


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(ctx.names, tensors, strict=True)))
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    delta = delta_op(dout, out, None if dlse is None else dlse.contiguous())
    dq, dk, dv = backward_op(dout.to(q.dtype), q, k, v, lse, delta, *call)
    return dq, dk, dv, None, *(None for _ in call)


forward_op.register_autograd(_gradients, setup_context=_save_for_backward)


def _use_op_when_compiling(entry: Callable[P, R], traced: Callable[..., R]) -> Callable[P, R]:
    """Return a function that calls ``traced`` while torch.compile traces, and ``entry`` otherwise."""

    @wraps(entry)
    def call_entry(*args: P.args, **call: P.kwargs) -> R:
        return traced(*args, **call) if torch.compiler.is_compiling() else entry(*args, **call)

    return call_entry


def _traced_forward(
    q: Tensor, k: Tensor, v: Tensor, *, state: Pair | None = None, final: bool = True, **call: Any
) -> Pair:
    packed = pack_kernel_args(**call)
    if state is None:
        out, lse = forward_op(q, k, v, final, *packed)
        return out, lse
    if final and state[0].dtype != q.dtype:
        return finish_op(q, k, v, *state, *packed), state[1]
    fold_op(q, k, v, *state, *packed)
    return state


def _traced_dq(
    dout: Tensor, q: Tensor, *inputs: Tensor, accum: Tensor | None = None, out: Tensor | None = None, **call: Any
) -> Tensor:
    dq = q.new_empty(q.shape) if out is None else out
    dq_op(dout, q, *inputs, None if accum is dq else accum, dq, accum is dq, *pack_kernel_args(**call))
    return dq


def _traced_keys(
    op: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor, dq: Tensor | None = None,
    accum: Pair | None = None, out: Pair | None = None, **call: Any,
) -> Pair:  # fmt: skip
    """Call an op that writes dK and dV to ``out``, which may be ``accum``, and that may add to ``dq``."""
    dk, dv = accum or (None, None)
    result = (k.new_empty(k.shape), v.new_empty(v.shape)) if out is None else out
    add = dk is result[0] and dv is result[1]
    dq_args = () if dq is None else (dq,)
    op(dout, q, k, v, *inputs, *dq_args, *((None, None) if add else (dk, dv)), *result, add, *pack_kernel_args(**call))
    return result


def _traced_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    dlse: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    config: KernelConfig | None = None, **call: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (dout, q, k, v, lse, delta_op(dout, out, dlse))
    if dq is None and dk is None and dv is None:
        grads: tuple[Tensor, Tensor, Tensor] = backward_op(*inputs, *pack_kernel_args(config=config, **call))
        return grads
    accum, call = _pair(dk, dv), call | {"config": config}
    if is_single_pass(config):
        dq_sum = q.new_zeros(q.shape, dtype=torch.float32) if dq is None else dq
        dk_dv = _traced_keys(gradients_op, *inputs, dq=dq_sum, accum=accum, out=accum, **call)
        return dq_sum.to(q.dtype) if dq is None else dq_sum, *dk_dv
    dq = _traced_dq(*inputs, accum=dq, out=dq, **call)
    return dq, *_traced_keys(dkdv_op, *inputs, accum=accum, out=accum, **call)


attention_forward = _use_op_when_compiling(host.attention_forward, _traced_forward)
attention_delta = _use_op_when_compiling(host.attention_delta, delta_op)
attention_dq = _use_op_when_compiling(host.attention_dq, _traced_dq)
attention_dkdv = _use_op_when_compiling(host.attention_dkdv, partial(_traced_keys, dkdv_op))
attention_gradients = _use_op_when_compiling(host_gradients, partial(_traced_keys, gradients_op))
attention_backward = _use_op_when_compiling(host.attention_backward, _traced_backward)
quantize = _use_op_when_compiling(fp8.quantize, quantize_op)
dequantize = _use_op_when_compiling(fp8.dequantize, dequantize_op)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *,
    bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None,
    config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of one shard with autograd: q, k and v get gradients from ``out`` and ``lse``.

    The arguments are those of :func:`attention_forward`, and the backward is :func:`attention_backward`. Second
    derivatives are not supported.

    Returns:
        ``out [B, Sq, H, Dv]`` in q's dtype, and ``lse [B, H, Sq]`` in fp32, a natural log.

    Raises:
        ValueError: If an argument does not fit, or if ``scores.alibi_slopes`` requires a gradient.
    """
    if scores.alibi_slopes is not None and scores.alibi_slopes.requires_grad:
        raise ValueError(SLOPES_GRADIENT_ERROR)
    out, lse = forward_op(q, k, v, True, *pack_kernel_args(bounds, scores, softmax_scale, config))
    return out, lse
