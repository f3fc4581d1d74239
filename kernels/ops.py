"""The host entries as everybody calls them: in a graph of torch.compile as ``torch.library`` ops, else as they are.

An op takes tensors and numbers, and what it returns is new: bounds, scores and a config travel as their fields, and
what continues a state or sums in place is an op of its own. The transposed bounds that dK/dV read are made in each
backward.
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
from .scores import PLAIN, SEEDS, Scores
from .single_pass import attention_gradients as host_gradients

P = ParamSpec("P")
R = TypeVar("R")

SCHEMA = (
    "Tensor? lo, Tensor? hi, Tensor? seqused_k, Tensor? visible, SymInt block, float softcap, Tensor? alibi_slopes, "
    "float dropout_p, SymInt dropout_seed, SymInt first_head, Tensor? q_positions, Tensor? k_positions, "
    "float? softmax_scale, int[]? tiles, str[] choices"
)

TILES = tuple(one.name for one in fields(KernelConfig) if one.type in ("Tile", "Tile | None"))
CHOICES = tuple(one.name for one in fields(KernelConfig) if one.name not in TILES)
SIDES = tuple(one.name for one in fields(Tile))
NO_TILE = (0,) * len(SIDES)


class OpArgs(NamedTuple):
    """What every entry takes beside its tensors, as ``SCHEMA`` has it."""

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


def pack(
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    config: KernelConfig | None = None,
) -> OpArgs:
    """The arguments of an entry as those of an op."""
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
        seed - SEEDS if seed >= SEEDS // 2 else seed,
        scores.first_head,
        scores.q_positions,
        scores.k_positions,
        softmax_scale,
        *pack_config(config),
    )


def pack_config(config: KernelConfig | None) -> tuple[list[int] | None, list[str]]:
    """The numbers of a config's tiles, and what else it has."""
    if config is None:
        return None, []
    tiles = (getattr(config, kernel) for kernel in TILES)
    numbers = [n for tile in tiles for n in (NO_TILE if tile is None else (getattr(tile, side) for side in SIDES))]
    return numbers, [str(getattr(config, choice)) for choice in CHOICES]


def unpack_config(tiles: Sequence[int] | None, choices: Sequence[str]) -> KernelConfig | None:
    """What :func:`pack_config` was given; the same object each time."""
    return None if tiles is None else _config(tuple(tiles), tuple(choices))


@lru_cache(maxsize=64)
def _config(tiles: tuple[int, ...], choices: tuple[str, ...]) -> KernelConfig:
    sizes = len(SIDES)
    given = (tiles[i * sizes : (i + 1) * sizes] for i in range(len(TILES)))
    made: dict[str, Any] = {
        kernel: None if one == NO_TILE else Tile(*one) for kernel, one in zip(TILES, given, strict=True)
    }
    return KernelConfig(**made | dict(zip(CHOICES, map(_choice, choices), strict=True)))


def _choice(word: str) -> str | int | bool | None:
    """What has been made text by ``str``; the words of a config are none of these."""
    names = {"None": None, "True": True, "False": False}
    return names[word] if word in names else int(word) if word.isdecimal() else word


def unpack(device: torch.device, *args: Any) -> dict[str, Any]:
    """The arguments of an op as those of an entry."""
    call = OpArgs(*args)
    block_sparse = None if call.visible is None else BlockSparseIndex(call.visible, call.block, device)
    plain = all(x is None for x in (call.lo, call.hi, call.seqused_k, block_sparse))
    scores = Scores(
        call.softcap, call.alibi_slopes, call.dropout_p, call.dropout_seed % SEEDS, call.first_head,
        call.q_positions, call.k_positions,
    )  # fmt: skip
    return {
        "bounds": FULL if plain else Bounds(call.lo, call.hi, call.seqused_k, block_sparse),
        "scores": scores,
        "softmax_scale": call.softmax_scale,
        "config": unpack_config(call.tiles, call.choices),
    }


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

    def refuse(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(f"{name} has no derivative: of attention there is only the first")

    if not mutates and name != "attention_forward":
        op.register_autograd(refuse)
    return op


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


def _pair(dk: Tensor | None, dv: Tensor | None) -> Pair | None:
    return None if dk is None or dv is None else (dk, dv)


def _dq(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    accum: Tensor | None, out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    given = out if add else accum
    host.attention_dq(dout, q, k, v, lse, delta, accum=given, out=out, **unpack(q.device, *call))


def _dkdv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_out: Tensor, dv_out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    out = (dk_out, dv_out)
    accum = out if add else _pair(dk, dv)
    host.attention_dkdv(dout, q, k, v, lse, delta, accum=accum, out=out, **unpack(q.device, *call))


def _backward_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return host.backward_of(dout, q, k, v, lse, delta, **unpack(q.device, *call))


def _single_pass(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    dk: Tensor | None, dv: Tensor | None, dk_out: Tensor, dv_out: Tensor, add: bool, *call: Any,
) -> None:  # fmt: skip
    out = (dk_out, dv_out)
    accum = out if add else _pair(dk, dv)
    host_gradients(dout, q, k, v, lse, delta, dq=dq, accum=accum, out=out, **unpack(q.device, *call))


_QKV = "Tensor q, Tensor k, Tensor v"
_BACKWARD = f"Tensor dout, {_QKV}, Tensor lse, Tensor delta"
_KEYS = "Tensor? dk, Tensor? dv, Tensor({}!) dk_out, Tensor({}!) dv_out, bool add"

forward_op = _defined("attention_forward", f"{_QKV}, bool final, {SCHEMA}", "(Tensor, Tensor)", _forward, _fake_forward)
fold_op = _defined(
    "attention_fold", f"{_QKV}, Tensor(a!) out, Tensor(b!) lse, {SCHEMA}", "()", _fold, mutates=("out", "lse")
)
finish_op = _defined(
    "attention_finish", f"{_QKV}, Tensor out, Tensor(a!) lse, {SCHEMA}", "Tensor", _finish,
    lambda q, k, v, *_: _out_like(q, v, q.dtype), ("lse",),
)  # fmt: skip
delta_op = _defined(
    "attention_delta", "Tensor dout, Tensor out, Tensor? dlse=None", "Tensor", host.attention_delta,
    lambda dout, out, dlse=None: _rows_like(out),
)  # fmt: skip
dq_op = _defined(
    "attention_dq", f"{_BACKWARD}, Tensor? accum, Tensor(a!) out, bool add, {SCHEMA}", "()", _dq, mutates=("out",)
)
dkdv_op = _defined(
    "attention_dkdv", f"{_BACKWARD}, {_KEYS.format('a', 'b')}, {SCHEMA}", "()", _dkdv, mutates=("dk_out", "dv_out")
)
gradients_op = _defined(
    "attention_gradients", f"{_BACKWARD}, Tensor(a!) dq, {_KEYS.format('b', 'c')}, {SCHEMA}", "()", _single_pass,
    mutates=("dq", "dk_out", "dv_out"),
)  # fmt: skip
backward_op = _defined(
    "attention_backward", f"{_BACKWARD}, {SCHEMA}", "(Tensor, Tensor, Tensor)", _backward_of,
    lambda dout, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)),
)  # fmt: skip
quantize_op = _defined(
    "quantize", "Tensor x, Tensor(a!) out, Tensor(b!) scale", "()", fp8.quantize, mutates=("out", "scale")
)
dequantize_op = _defined("dequantize", "Tensor x, Tensor scale, Tensor(a!) out", "()", fp8.dequantize, mutates=("out",))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, *args = inputs
    ctx.set_materialize_grads(False)
    call = OpArgs(*args)
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


def _traced_dq(*given: Tensor, accum: Tensor | None = None, out: Tensor | None = None, **call: Any) -> Tensor:
    target = given[1].new_empty(given[1].shape) if out is None else out
    dq_op(*given, None if accum is target else accum, target, accum is target, *pack(**call))
    return target


def _traced_keys(
    op: Any, *given: Tensor, dq: Tensor | None = None, accum: Pair | None = None, out: Pair | None = None, **call: Any
) -> Pair:
    """``dk`` and ``dv`` by an op that leaves them in ``out``, which may be ``accum``, and may add to ``dq``."""
    k, v, (dk, dv) = given[2], given[3], accum or (None, None)
    target = (k.new_empty(k.shape), v.new_empty(v.shape)) if out is None else out
    add = dk is target[0] and dv is target[1]
    rows = () if dq is None else (dq,)
    op(*given, *rows, *((None, None) if add else (dk, dv)), *target, add, *pack(**call))
    return target


def _traced_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    dlse: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    config: KernelConfig | None = None, **call: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = (dout, q, k, v, lse, delta_op(dout, out, dlse))
    if dq is None and dk is None and dv is None:
        whole: tuple[Tensor, Tensor, Tensor] = backward_op(*given, *pack(config=config, **call))
        return whole
    accum, call = _pair(dk, dv), call | {"config": config}
    if is_single_pass(config):
        total = q.new_zeros(q.shape, dtype=torch.float32) if dq is None else dq
        made = _traced_keys(gradients_op, *given, dq=total, accum=accum, out=accum, **call)
        return total.to(q.dtype) if dq is None else total, *made
    dq = _traced_dq(*given, accum=dq, out=dq, **call)
    return dq, *_traced_keys(dkdv_op, *given, accum=accum, out=accum, **call)


attention_forward = _either(host.attention_forward, _traced_forward)
attention_delta = _either(host.attention_delta, delta_op)
attention_dq = _either(host.attention_dq, _traced_dq)
attention_dkdv = _either(host.attention_dkdv, partial(_traced_keys, dkdv_op))
attention_gradients = _either(host_gradients, partial(_traced_keys, gradients_op))
attention_backward = _either(host.attention_backward, _traced_backward)
quantize = _either(fp8.quantize, quantize_op)
dequantize = _either(fp8.dequantize, dequantize_op)


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
