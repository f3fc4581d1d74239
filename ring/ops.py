"""The forward and backward of a call as two torch.library ops, for autograd, checkpointing and torch.compile.

In eager mode an op takes the handle of a `Call` object. In a torch.compile graph it takes tensors, numbers and text.
Checks, comparison between ranks, planning and transfers then happen when the graph runs, not when it is traced.

Values that change from call to call are op inputs, so that new values need no new graph. These are spans of a layout,
boundaries of documents and blocks of a mask, as CPU tensors. Rings and ``LocalWorld`` members are passed by number,
process groups by name. Everything else is constant in a graph. Over a mesh the exchange of heads is inside the op,
because its number of tokens depends on the spans, which a graph does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import LocalGroup
from ..comm.group_cache import create_handle, resolve_handle
from ..comm.groups import mesh_groups
from ..kernels.launch import is_tma_aligned
from ..kernels.ops import SLOPES_GRADIENT_ERROR
from ..kernels.scores import SEED_RANGE
from . import loop, ulysses
from .args import ARG_SPECS, AttentionArgs, pack_op_args, signed_seed, unpack_op_args
from .backends import (
    backward_backends,
    backward_result,
    check_dlse_support,
    forward_backends,
    forward_max_logits,
    forward_result,
    row_delta,
)
from .mesh import Rings, resolve_mesh_rings
from .prepare import Call, check_tensors, prepare_call
from .ring import Ring, resolve_ring
from .shards import gather_max_logits
from .warm_up import compile_kernels

NO_SECOND_DERIVATIVE = "ring_attention has no second derivative: do not differentiate its gradients"
NAMESPACE = __package__.rpartition(".")[0].replace(".", "__")  # a renamed copy of the package gets its own ops


# --- sinks ----------------------------------------------------------------------------------------------------------


def sink_state(sink: Tensor, q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the start state ``(out, lse)``: each row has seen one key with the sink as score and 0 as value."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, value_dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(batch, heads, rows, device=q.device, dtype=torch.float32)
    return out, lse.copy_(sink[:, None])  # copied, because the kernels update it in place


def sink_gradient(sink: Tensor, delta: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sink, ``-sum(exp(sink - lse) * delta)`` over batch and rows, ``[H]``.

    ``delta = rowsum(dout * out) - dlse``. The sink acts like a key with value 0, so that only ``-P * delta`` remains of
    ``dS = P * (dO v^T - delta)``.
    """
    # lse is -inf only if the sink is -inf and the row sees no key.
    weights = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


# --- arguments of an op -------------------------------------------------------------------------------------------

_RANKS_SCHEMA = "SymInt ring, SymInt member, str group, SymInt ulysses_member, str ulysses_group, SymInt call"
SCHEMA = ", ".join([*(entry.schema for entry in ARG_SPECS.values()), _RANKS_SCHEMA])
ARG_INDEX = {argument.split()[-1]: index for index, argument in enumerate(SCHEMA.split(", "))}
_SINK, _SLOPES, _SEED, _DRAWN, _CALL, _MAX_LOGITS = (
    ARG_INDEX[name] for name in ("learnable_sink", "alibi_slopes", "dropout_seed", "drawn", "call", "return_max_logits")
)
ForwardResults = tuple[Tensor, Tensor, Tensor, Tensor]
"""``out``, ``lse``, ``max_logits`` (empty if not asked for) and ``[seed, call number, exchange number]``."""


def pack_call(args: AttentionArgs, ring: Ring | None, group: Any) -> list[Any]:
    """Pack a call, except q, k and v, into the arguments of an op."""
    along_ring, along_ulysses = mesh_groups(group) or (group, None)
    where = (0 if ring is None else ring.number, *_group_names(along_ring), *_group_names(along_ulysses), 0)
    packed = [*pack_op_args(args), *where]
    if args.dropout_p and args.dropout_seed is None:
        # Drawn by a torch op, so that checkpointing's recomputation repeats the number.
        packed[_SEED] = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
        packed[_DRAWN] = True
    return packed


def _group_names(group: Any) -> tuple[int, str]:
    """Return ``(handle of a LocalWorld group or 0, name of a process group or "")``."""
    if group is None or isinstance(group, LocalGroup):
        return 0 if group is None else group.handle, ""
    process_group = group if isinstance(group, dist.ProcessGroup) else group.get_group()  # 1-D DeviceMesh
    return 0, str(process_group.group_name)


def unpack_call(packed: Sequence[Any], device: torch.device) -> Call:
    """Unpack the call that :func:`pack_call` packed.

    Raises:
        RuntimeError: its ring or group has been deleted.
    """
    *_, number, member, name, ulysses_member, ulysses_name, _call = packed
    ring: Ring | None = _find_live("ring", number)
    group, ulysses = _find_group(member, name), _find_group(ulysses_member, ulysses_name)
    ranks = resolve_ring(ring, group, device) if ulysses is None else resolve_mesh_rings((group, ulysses), device, ring)
    return Call(unpack_op_args(packed), ranks, {"gradient": None}, packed[_DRAWN])  # unknown in a graph


def _find_live(what: str, number: int) -> Any:
    """Return the object with handle ``number``, or None for 0; ``what`` names it in the message."""
    found: Any = resolve_handle(number)
    if number and found is None:
        raise RuntimeError(
            f"the {what} of a compiled call was deleted. Keep a reference to it until the backward is done."
        )
    return found


def _find_group(member: int, name: str) -> Any:
    """Return the group that :func:`_group_names` packed as ``(member, name)``, or None for ``(0, "")``."""
    c10d: Any = dist.distributed_c10d  # the same lookup as for functional collectives
    return c10d._resolve_process_group(name) if name else _find_live("group", member)


_EMPTY_ARGS = pack_call(AttentionArgs(), None, None)


def pack_call_handle(call: Call) -> list[Any]:
    """Pack an eager call into op arguments: its handle, which lives as long as the call, and tensors for autograd."""
    packed = [*_EMPTY_ARGS]
    tensors = call.args.learnable_sink if call.number is None else call.sink, call.args.alibi_slopes
    packed[_SINK], packed[_SLOPES] = (x if isinstance(x, Tensor) else None for x in tensors)
    packed[_CALL] = create_handle(call)
    return packed


# --- the ops --------------------------------------------------------------------------------------------------------


def call_forward_op(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, ring: Ring | None, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward op from code that torch.compile traces."""
    out, lse, max_logits, _ = _FORWARD(q, k, v, *pack_call(args, ring, group))
    return out, lse, max_logits


def _ring_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> ForwardResults:
    """Run the forward."""
    call: Any = resolve_handle(args[_CALL])
    if call is None:
        return _forward_in_graph(q, k, v, *args)
    with call.ranks._call_guard(q.device):
        if call.number is None:
            prepare_call(call, q, k, v)
        else:  # over a mesh the call was prepared before the exchange
            call.ring._agree({"call": "forward along the ring"}, q.device, forward_number=call.number)
        if call.rows is not None:
            q, k, v = call.rows.pack(q), call.rows.pack_keys(k), call.rows.pack_keys(v)
        with call.ring.call(call.plan, "forward", q, k, call.scores, call.chunks) as running:
            start = None if call.sink is None else sink_state(call.sink, q, v.shape[3])
            compile_kernels(call, running, q, k, v, start)
            options = {"softmax_scale": call.softmax_scale, "config": call.config}
            has_max = call.args.return_max_logits
            backends = forward_backends(call.backend, running.heads, q, **options, start=start, max_logits=has_max)
            loop.forward(running, backends, k, v)
        out, lse = forward_result(call.backend, backends, running.heads, q, v)
        max_logits = lse.new_empty(0)
        if has_max:
            own = forward_max_logits(call.backend, backends, running.heads, q, lse)
            max_logits = torch.stack(gather_max_logits(call.ring, own)).amax(0)
        if call.rows is not None:
            out, lse = call.rows.unpack(out), call.rows.unpack_lse(lse)
    numbers = [signed_seed(call.scores.dropout_seed), call.number, call.exchange_number]
    return _without_base(out), _without_base(lse), max_logits, torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _without_base(x: Tensor) -> Tensor:
    """Return ``x`` as a tensor that is no view, because autograd forbids in-place changes of returned views."""
    return x.data if x._is_view() else x  # safe: nothing else refers to the base tensor


def _forward_in_graph(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> ForwardResults:
    """Check and prepare a call from the arguments of a graph, and run its forward and exchanges."""
    call = unpack_call(args, q.device)
    with call.ranks._call_guard(q.device), torch.no_grad():
        check_tensors(q, k, v, call.args)
        if isinstance(call.ranks, Rings):
            prepare_call(call, q, k, v)
        if call.exchange is not None:
            q, k, v = call.exchange.gather_tokens(call.exchange_number, q, k, v)
    out, lse, max_logits, numbers = _ring_attention(q, k, v, *pack_call_handle(call))
    if call.exchange is not None:
        del q, k, v  # free memory for the exchange
        with torch.no_grad():
            out, lse, max_logits = call.exchange.gather_heads(out, lse, max_logits)  # type: ignore[assignment]
    return out, lse, max_logits, numbers


def run_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    numbers: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward. Return dq, dk, dv and this rank's part of the sink's gradient, which is empty without a sink.

    Raises:
        ValueError: another rank runs the backward of another forward.
    """
    call: Any = resolve_handle(args[_CALL])
    if call is None:
        return _gradients_in_graph(dout, dlse, q, k, v, out, lse, numbers, *args)
    sink, rows = args[_SINK], call.rows
    with call.ranks._call_guard(q.device):
        check_dlse_support(call.backend, q, v, dlse)
        call.ring._agree({"call": "backward"}, q.device, forward_number=call.number)
        dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
        if call.config is not None and call.args.config is None and not is_tma_aligned(dout):
            # an adopted kernel may need aligned gradients, unlike the portable kernels
            dout = dout.clone(memory_format=torch.contiguous_format)
        dlse, unpacked_kv = None if dlse is None else dlse.contiguous(), (k, v)
        if rows is not None:
            dout, q, out, lse = rows.pack(dout), rows.pack(q), rows.pack(out), rows.pack_lse(lse)
            dlse = None if dlse is None else rows.pack_lse(dlse)
            k, v = rows.pack_keys(k), rows.pack_keys(v)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        with call.ring.call(call.plan, "backward", q, k, call.scores, call.chunks) as running:
            compile_kernels(call, running, q, k, v, None)
            inputs, scale = (dout, q, out, lse, dlse), call.softmax_scale
            backends = backward_backends(call.backend, running.heads, *inputs, softmax_scale=scale, config=call.config)
            loop.backward(running, backends, k, v, (dk, dv))
        delta = None if sink is None else row_delta(call.backend, dout, out, dlse)
        dsink = lse.new_empty(0) if sink is None or delta is None else sink_gradient(sink, delta, lse)
        dq = backward_result(call.backend, backends, running.heads, q)
        if rows is not None:
            dq = rows.unpack(dq)
            dk, dv = (rows.unpack_keys(grad, like) for grad, like in zip((dk, dv), unpacked_kv, strict=True))
    return dq, dk, dv, dsink


def _gradients_in_graph(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, numbers: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prepare the call of a graph again, and run its backward and exchanges.

    A graph over a mesh saves this rank's shards, so q, k, v and the results must be exchanged again first.
    """
    call, (seed, call_number, exchange_number) = unpack_call(args, q.device), numbers.tolist()
    call.args = call.args._replace(dropout_seed=seed % SEED_RANGE if call.args.dropout_p else None)
    call.number, call.exchange_number = call_number, exchange_number
    with call.ranks._call_guard(q.device):
        prepare_call(call, q, k, v)
        if call.exchange is not None:
            (_, exchange), queries, keys = call.exchange
            fields = {"call": "backward in a graph", "gradient of lse": dlse is not None}
            exchange._agree(fields, q.device, forward_number=exchange_number)
            dout = torch.zeros_like(out) if dout is None else dout
            tensors = [q, k, v, out, dout, *(ulysses.lse_to_rows(x) for x in (lse, dlse) if x is not None)]
            shares = [queries, keys, keys, *[queries] * (len(tensors) - 3)]
            q, k, v, out, dout, *in_rows = ulysses.heads_for_tokens(exchange, shares, tensors)
            lse, *more = map(ulysses.lse_from_rows, in_rows)
            dlse = more[0] if more else None
    dq, dk, dv, dsink = run_backward(dout, dlse, q, k, v, out, lse, numbers, *pack_call_handle(call))
    if call.exchange is not None:
        del q, k, v, out, dout, lse, dlse, tensors, in_rows, more  # free memory for the exchange
        with call.ranks._call_guard(dq.device):
            exchange._agree({"call": "gradients of a graph"}, dq.device, forward_number=exchange_number)
            dq, dk, dv = ulysses.tokens_for_heads(exchange, shares[:3], (dq, dk, dv))
        sink = call.args.learnable_sink
        if sink is not None:
            own, dsink = dsink, sink.new_zeros(sink.shape)
            dsink[queries.heads[exchange.rank]] = own
    return dq, dk, dv, dsink


def _fake_ring_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> ForwardResults:
    if args[_CALL]:  # an eager call: the dispatcher comes here for meta tensors, which the checks refuse
        return _ring_attention(q, k, v, *args)
    batch, rows, heads, _dim = q.shape
    out, lse = q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)
    max_logits = lse.new_empty(heads if args[_MAX_LOGITS] else 0)
    return out, lse, max_logits, torch.empty(3, dtype=torch.int64, device="cpu")


def _fake_gradients(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sink = rest[1 + _SINK]
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


class RingAttention(torch.autograd.Function):
    """Autograd function of the forward op."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> ForwardResults:
        """Run the forward op and save what the backward needs.

        Args:
            ctx: context of autograd.
            keyset: dispatch keys if the dispatcher called, None if eager code did.
            q: queries ``[B, S, H, D]``.
            k: keys ``[B, Sk, Hkv, D]``.
            v: values ``[B, Sk, Hkv, Dv]``.
            *args: op arguments, see :func:`pack_call` and :func:`pack_call_handle`.
        """
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, max_logits, numbers = (
                _FORWARD(q, k, v, *args)
                if keyset is None
                else _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, *args)
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logits, numbers)
        packed = [*args]
        if packed[_SLOPES] is not None and packed[_SLOPES].requires_grad:
            raise ValueError(SLOPES_GRADIENT_ERROR)
        ctx.call = resolve_handle(packed[_CALL])  # keeps the call alive for the backward
        packed[_SEED], packed[_DRAWN] = None, False
        # Save the slopes too, so that autograd detects in-place changes before the backward.
        ctx.tensors = [index for index, x in enumerate(packed) if isinstance(x, Tensor)]
        ctx.save_for_backward(q, k, v, out, lse, numbers, *(packed[index] for index in ctx.tensors))
        ctx.packed = [None if isinstance(x, Tensor) else x for x in packed]
        return out, lse, max_logits, numbers

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and the sink. A second derivative raises RuntimeError."""
        q, k, v, out, lse, numbers, *tensors = ctx.saved_tensors
        packed = [*ctx.packed]
        for index, x in zip(ctx.tensors, tensors, strict=True):
            packed[index] = x
        dq, dk, dv, dsink = _GRADIENTS(dout, dlse, q, k, v, out, lse, numbers, *packed)
        grads: list[Tensor | None] = [None] * len(packed)
        grads[_SINK] = None if packed[_SINK] is None else dsink
        return None, dq, dk, dv, *grads


def _autograd(keyset: Any, *args: Any) -> Any:
    """Dispatch the forward with or without autograd.

    This equals the kernel of ``torch.library.register_autograd``, which spends 0.2 ms per call on looking up defaults.
    """
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return RingAttention.apply(keyset, *args)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


_library: Any = torch.library
_LIBRARY = _library.Library(NAMESPACE, "FRAGMENT")


def _define_op(name: str, function: Any, tensors: str, returns: str, fake: Any) -> Any:
    """Define and return the op ``(tensors, SCHEMA) -> returns``; ``fake`` implements it on fake tensors.

    This does not use ``custom_op``, whose checks take more host time than everything else outside the hops.
    """
    # The op waits on the host and exchanges data with other ranks, which a CUDA graph cannot replay.
    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    _LIBRARY.define(f"{name}({tensors}, {SCHEMA}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_GRADIENTS = _define_op(
    "ring_attention_backward",
    run_backward,
    "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor numbers",
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
)
_FORWARD = _define_op(
    "ring_attention",
    _ring_attention,
    "Tensor q, Tensor k, Tensor v",
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_ring_attention,
)
torch.library.register_autograd(f"{NAMESPACE}::ring_attention_backward", _refuse, lib=_LIBRARY)
_LIBRARY.impl("ring_attention", _autograd, "Autograd", with_keyset=True)

checkpoint_policy = [_FORWARD]
"""Ops whose results selective checkpointing saves, so that no ring runs twice. For
``create_selective_checkpoint_contexts``.
"""
