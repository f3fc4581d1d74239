"""What a call computes, forward and backward: two ops of torch.library, which autograd and checkpointing see.

A call of eager is an object, and the ops take its handle. In a graph of torch.compile, what is checked, agreed on,
planned and sent is so when the graph runs, not when it is made, and an op takes tensors, numbers and text. What changes
from call to call travels as values: spans of a layout, boundaries of documents and blocks of a mask as CPU tensors, so
that other ones, and other numbers of them, are no new graph. A ring or a member of a ``LocalWorld``, which is no value,
is named by a number, a process group by its name. The rest is a graph's constants. Over a mesh the exchanges are in the
op, too: how many tokens they bring depends on the spans of a layout, which a graph does not know.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import LocalGroup
from ..comm.groups import dims_of
from ..comm.kept import handle_of, of_handle
from ..kernels.ops import NO_SLOPE, pack_config, unpack_config
from ..kernels.scores import SEEDS
from . import loop
from .args import AttentionArgs, PreparedCall, prepare_call
from .backends import (
    backward_backends,
    backward_result,
    check_backward,
    forward_backends,
    forward_result,
    row_delta,
)
from .checked import sides_of
from .mesh import Rings
from .ring import Ring, resolve_ring
from .rows import Boundaries, is_by_row
from .schedule.layout import Layout
from .schedule.mask import BlockMask, Longformer
from .schedule.plan import PLANS

ONCE = "ring_attention has no second derivative: its gradients cannot be differentiated again"
NAMESPACE = __package__.rpartition(".")[0].replace(".", "__")  # another copy under another name has ops of its own


# --- sinks ----------------------------------------------------------------------------------------------------------


def sink_state(sink: Tensor, q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """The state before any key: as if each row had seen one with the sink for its score and 0 for its value."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, value_dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(batch, heads, rows, device=q.device, dtype=torch.float32)
    return out, lse.copy_(sink[:, None])  # memory of the call's own: kernels continue it in place


def sink_gradient(sink: Tensor, delta: Tensor, lse: Tensor) -> Tensor:
    """``-sum(exp(sink - lse) * delta)`` over batch and rows, ``[H]``, with ``delta = rowsum(dout * out) - dlse``.

    The sink is one more key whose value is 0: of ``dS = P * (dO v^T - delta)`` only ``-P * delta`` is left.
    """
    weights = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)  # a sink at -inf alone
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


# --- arguments of an op -------------------------------------------------------------------------------------------


def _one(value: Any) -> tuple[Any]:
    return (value,)


class OpArgument(NamedTuple):
    """One argument in the op: its part of the schema, what it is packed into, and what that stands for."""

    schema: str
    pack: Callable[[Any], Sequence[Any]] = _one
    unpack: Callable[..., Any] = lambda value: value


def _pack_layout(layout: object) -> tuple[Tensor | None, str | None]:
    """The text also of what is neither a name nor a layout, for the op to refuse."""
    if isinstance(layout, Layout):
        return layout.table, None
    return None, None if layout is None else str(layout)


def _unpack_layout(table: Tensor | None, name: str | None) -> Layout | str | None:
    return name if table is None else _layout(table.numpy().tobytes())


@lru_cache(maxsize=PLANS)
def _layout(table: bytes) -> Layout:
    spans: list[list[tuple[int, ...]]] = []
    for rank, *span in torch.frombuffer(bytearray(table), dtype=torch.int64).view(-1, 4).tolist():
        spans.extend([] for _ in range(len(spans), rank + 1))
        spans[rank].append(tuple(span))
    return Layout(spans)


def _pack_mask(block_mask: Tensor | BlockMask | Longformer | None) -> tuple[Tensor | None, int, list[int] | None]:
    """Its blocks and how many positions each has, 0: as many as make equal ones; or of a Longformer the two sides of
    its window, then begin and end of its stretches."""
    if isinstance(block_mask, Longformer):
        return None, 0, [*block_mask.window, *(edge for stretch in block_mask.global_tokens for edge in stretch)]
    if isinstance(block_mask, BlockMask):
        return block_mask.visible, block_mask.block, None
    return block_mask, 0, None


def _unpack_mask(
    blocks: Tensor | None, block: int, longformer: list[int] | None
) -> Tensor | BlockMask | Longformer | None:
    if longformer is not None:
        left, right, *edges = longformer
        return Longformer((left, right), tuple(zip(edges[::2], edges[1::2], strict=True)))
    if blocks is None or not block:
        return blocks
    if blocks.device.type != "cpu" or not blocks.numel():
        return BlockMask(blocks, block)  # which says why it refuses
    return _block_mask(blocks.numpy().tobytes(), blocks.shape[1], block)


@lru_cache(maxsize=PLANS)
def _block_mask(visible: bytes, columns: int, block: int) -> BlockMask:
    return BlockMask(torch.frombuffer(bytearray(visible), dtype=torch.bool).view(-1, columns), block)


def _pack_backend(backend: Any) -> tuple[str]:
    """A local kernel is no value of a graph: its text is for the op to refuse."""
    return (backend if isinstance(backend, str) else str(backend),)


def _pack_numbers(numbers: Boundaries | None) -> tuple[Tensor | None]:
    if numbers is None or isinstance(numbers, Tensor):
        return (numbers,)
    given: list[Any] = list(numbers)
    if is_by_row(given):  # filled up by empty documents
        most = max(1, *map(len, given))
        given = [number for row in given for number in (*row, *[*row[-1:], 0][:1] * (most - len(row)))]
        return (torch.tensor(given, device="cpu").view(-1, most),)
    # fractions stay fractions, for the op to refuse
    dtype = None if any(isinstance(x, float) for x in given) else torch.int64
    return (torch.tensor(given, dtype=dtype, device="cpu"),)


def _pack_seed(seed: int | None) -> tuple[Tensor | None, bool]:
    if seed is None:
        return None, False
    if not isinstance(seed, int) or not 0 <= seed < SEEDS:  # signed, others would stand for seeds that there are
        raise ValueError(f"dropout_seed is {seed!r}: it must be 0 to 2^64 - 1")
    return torch.full((), _signed(seed), dtype=torch.int64, device="cpu"), False


def _unpack_seed(seed: Tensor | None, drawn: bool) -> int | None:
    return None if seed is None else int(seed) if drawn else int(seed) % SEEDS


def _signed(seed: int) -> int:
    return seed - SEEDS if seed >= SEEDS // 2 else seed


OP_ARGUMENTS: dict[str, OpArgument] = {
    "layout": OpArgument("Tensor? layout, str? layout_name", _pack_layout, _unpack_layout),
    "causal": OpArgument("bool causal"),
    "window_size": OpArgument("SymInt[] window_size", lambda window: (list(sides_of(window)),), tuple),
    "softmax_scale": OpArgument("float? softmax_scale"),
    "softcap": OpArgument("float? softcap"),
    "learnable_sink": OpArgument("Tensor? learnable_sink"),
    "alibi_slopes": OpArgument("Tensor? alibi_slopes"),
    "dropout_p": OpArgument("float dropout_p"),
    "dropout_seed": OpArgument(
        "Tensor? dropout_seed, bool drawn", _pack_seed, _unpack_seed
    ),  # by every rank for itself
    "first_head": OpArgument("SymInt first_head"),
    "cu_seqlens": OpArgument("Tensor? cu_seqlens", _pack_numbers),
    "seqused_k": OpArgument("Tensor? seqused_k", _pack_numbers),
    "key_mask": OpArgument("Tensor? key_mask"),
    "leftpad_k": OpArgument("Tensor? leftpad_k", _pack_numbers),
    "prefix_length": OpArgument("SymInt? prefix_length"),
    "block_mask": OpArgument("Tensor? blocks, SymInt block, SymInt[]? longformer", _pack_mask, _unpack_mask),
    "kv_layout": OpArgument("Tensor? kv_layout, str? kv_layout_name", _pack_layout, _unpack_layout),
    "align": OpArgument("str? align"),
    "backend": OpArgument("str backend", _pack_backend),
    "config": OpArgument("int[]? tiles, str[] choices", pack_config, unpack_config),
}
"""Of every field of :class:`AttentionArgs`."""

_WHERE = "SymInt ring, SymInt member, str group, SymInt ulysses_member, str ulysses_group, SymInt call"
SCHEMA = ", ".join([*(argument.schema for argument in OP_ARGUMENTS.values()), _WHERE])
_made: Any = namedtuple  # of names that no type checker knows
Packed = _made("Packed", [one.split()[-1] for one in SCHEMA.split(", ")])


def pack_args(args: AttentionArgs, ring: Ring | None, group: Any) -> Any:
    """A call besides q, k and v as the arguments of an op, a ``Packed``."""
    along_ring, along_ulysses = dims_of(group) or (group, None)
    packed = Packed(
        *(part for name, argument in OP_ARGUMENTS.items() for part in argument.pack(getattr(args, name))),
        0 if ring is None else ring.number,
        *_names_of(along_ring),
        *_names_of(along_ulysses),
        call=0,
    )
    if not args.dropout_p or args.dropout_seed is not None:
        return packed
    # an op of torch's own, so that checkpointing repeats the number that it drew
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return packed._replace(dropout_seed=drawn, drawn=True)


def _names_of(group: Any) -> tuple[int, str]:
    """The number of a virtual rank, the name of processes."""
    if group is None or isinstance(group, LocalGroup):
        return 0 if group is None else group.number, ""
    whole = group if isinstance(group, dist.ProcessGroup) else group.get_group()  # of a one-dimensional DeviceMesh
    return 0, str(whole.group_name)


_NOTHING = pack_args(AttentionArgs(), None, None)


def unpack_args(packed: Any) -> AttentionArgs:
    """What :func:`pack_args` was given."""
    parts = iter(packed)
    made = {
        name: argument.unpack(*islice(parts, argument.schema.count(",") + 1)) for name, argument in OP_ARGUMENTS.items()
    }
    return AttentionArgs(**made)


def ring_of_call(packed: Any, device: torch.device) -> Ring:
    """The ring that a call names.

    Raises:
        RuntimeError: it, or the group, is gone.
    """
    call: Any = of_handle(packed.call)
    if call is not None:
        made: Ring = call.ring
        return made
    return resolve_ring(_kept("ring", packed.ring), _group(packed.member, packed.group), device)


def _kept(what: str, number: int) -> Any:
    thing: Any = of_handle(number)
    if number and thing is None:
        raise RuntimeError(f"the {what} of a compiled call is gone: keep it until its backward is done")
    return thing


def _group(member: int, name: str) -> Any:
    c10d: Any = dist.distributed_c10d  # what functional collectives find a group by
    return c10d._resolve_process_group(name) if name else _kept("group", member)


def mesh_of_call(packed: Any) -> tuple[Any, Ring | None] | None:
    """The mesh that a call of a graph names, and the ring beside it; None: the call is of one dimension."""
    ulysses = _group(packed.ulysses_member, packed.ulysses_group)
    if ulysses is None:
        return None
    return (_group(packed.member, packed.group), ulysses), _kept("ring", packed.ring)


def entered(packed: Any, ring: Ring, device: torch.device) -> AbstractContextManager[None]:
    """One forward or backward, whose errors reach the other ranks."""
    call: Any = of_handle(packed.call)
    rings: Ring | Rings = ring if call is None or call.rings is None else call.rings
    return rings._entered(device)


# --- the ops --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class EagerCall:
    """A call that no graph holds: its arguments as they were given, and what the forward has prepared of them."""

    args: AttentionArgs
    ring: Ring
    has_backward: bool
    prepared: PreparedCall | None = None
    rings: Rings | None = None
    """Both of a mesh, all of whose ranks hear of an error."""


def traced(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, ring: Ring | None, group: Any
) -> tuple[Tensor, Tensor]:
    """``ring_attention`` as torch.compile reads it: it only packs."""
    out, lse, _ = _FORWARD(q, k, v, *pack_args(args, ring, group))
    return out, lse


def packed_call(call: EagerCall) -> Any:
    """The handle of a call as the arguments of an op, which lives as long as the call; and what autograd is to see."""
    given = (call.args.learnable_sink, call.args.alibi_slopes)
    sink, slopes = (x if isinstance(x, Tensor) else None for x in given)
    return _NOTHING._replace(learnable_sink=sink, alibi_slopes=slopes, call=handle_of(call))


def _ring_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse``, and what a graph's backward must have: the seed of dropout, and the numbers of the forward."""
    packed = Packed(*args)
    mesh = mesh_of_call(packed)
    if mesh is not None:
        from . import ulysses  # here: it calls this op for its ring

        with torch.no_grad():
            out, lse, numbers = ulysses.attention_over_mesh(
                q, k, v, unpack_args(packed), *mesh, return_lse=True, drawn=packed.drawn
            )
        assert lse is not None
        return out, lse, _numbers(*numbers)
    ring = ring_of_call(packed, q.device)
    with entered(packed, ring, q.device):
        call, sink = prepare_packed(packed, q, k, v, ring)
        rows = call.rows
        if rows is not None:
            q, k, v = rows.pack(q), rows.pack_keys(k), rows.pack_keys(v)
        with ring.call(call.plan, "forward", q, k, call.scores) as running:
            backends = forward_backends(
                call.backend,
                running.chunks,
                q,
                softmax_scale=call.softmax_scale,
                config=call.config,
                start=None if sink is None else sink_state(sink, q, v.shape[3]),
            )
            loop.forward(running, backends, k, v)
        out, lse = forward_result(call.backend, backends, running.chunks, q, v)
        if rows is not None:
            out, lse = rows.unpack(out), rows.unpack_lse(lse)
    return _without_base(out), _without_base(lse), _numbers(call.scores.dropout_seed, call.number)


def _without_base(x: Tensor) -> Tensor:
    """Return ``x`` as no view: autograd refuses to change a view that a function returned in place."""
    return x.data if x._is_view() else x  # nobody else has the tensor that it is a view of


def _numbers(seed: int, number: int, in_ulysses: int = 0) -> Tensor:
    """Of a graph's forward, for its backward."""
    return torch.tensor([_signed(seed), number, in_ulysses], dtype=torch.int64, device="cpu")


def _of_forward(packed: Any, numbers: Tensor) -> tuple[AttentionArgs, int, int]:
    """The arguments with the seed that the forward took, and its numbers."""
    args, (seed, number, in_ulysses) = unpack_args(packed), numbers.tolist()
    return args._replace(dropout_seed=seed % SEEDS if args.dropout_p else None), number, in_ulysses


def gradients(
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
    """dq, dk, dv, and this rank's part of that of the sink, empty where there is none.

    Raises:
        ValueError: another rank is at the backward of another forward.
    """
    packed = Packed(*args)
    mesh = mesh_of_call(packed)
    if mesh is not None:
        from . import ulysses  # as in the forward

        call_args, *calls = _of_forward(packed, numbers)
        return ulysses.gradients_over_mesh(dout, dlse, q, k, v, out, lse, call_args, *mesh, *calls)
    ring = ring_of_call(packed, q.device)
    with entered(packed, ring, q.device):
        call, sink = prepare_packed(packed, q, k, v, ring, numbers)
        check_backward(call.backend, dlse)
        ring._agree({"call": "backward"}, q.device, of=call.number)
        dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        rows, of_keys = call.rows, (k, v)
        if rows is not None:
            dout, q, out, lse = rows.pack(dout), rows.pack(q), rows.pack(out), rows.pack_lse(lse)
            dlse = None if dlse is None else rows.pack_lse(dlse)
            k, v = rows.pack_keys(k), rows.pack_keys(v)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        with ring.call(call.plan, "backward", q, k, call.scores) as running:
            given = (dout, q, out, lse, dlse)
            scale, config = call.softmax_scale, call.config
            backends = backward_backends(call.backend, running.chunks, *given, softmax_scale=scale, config=config)
            loop.backward(running, backends, k, v, (dk, dv))
        delta = None if sink is None else row_delta(call.backend, dout, out, dlse)
        dsink = lse.new_empty(0) if sink is None or delta is None else sink_gradient(sink, delta, lse)
        dq = backward_result(call.backend, backends, running.chunks, q)
        if rows is not None:
            dq = rows.unpack(dq)
            dk, dv = (rows.unpack_keys(grad, like) for grad, like in zip((dk, dv), of_keys, strict=True))
    return dq, dk, dv, dsink


def prepare_packed(
    packed: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, numbers: Tensor | None = None
) -> tuple[PreparedCall, Tensor | None]:
    """The call of an op and its sink; ``numbers`` are those of the forward whose backward this is."""
    call: Any = of_handle(packed.call)
    if call is None:
        args, number = (unpack_args(packed), None) if numbers is None else _of_forward(packed, numbers)[:2]
        return prepare_call(q, k, v, args, ring, number=number, drawn=packed.drawn)
    if numbers is None:
        call.prepared, _ = prepare_call(q, k, v, call.args, ring, has_backward=call.has_backward)
    return call.prepared, packed.learnable_sink


def _fake_ring_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if Packed(*args).call:  # no graph's: the dispatcher comes here for a tensor on meta, which the checks refuse
        return _ring_attention(q, k, v, *args)
    batch, rows, heads, _dim = q.shape
    out, lse = q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(batch, heads, rows, dtype=torch.float32)
    return out, lse, torch.empty(3, dtype=torch.int64, device="cpu")


def _fake_gradients(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sink = Packed(*rest[1:]).learnable_sink
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


class RingAttention(torch.autograd.Function):
    """The node of the forward op."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The op's results; ``keyset``: of the dispatcher that is at it, or None."""
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, numbers = (
                _FORWARD(q, k, v, *args)
                if keyset is None
                else _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, q, k, v, *args)
            )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(numbers)
        packed = Packed(*args)
        if packed.alibi_slopes is not None and packed.alibi_slopes.requires_grad:
            raise ValueError(NO_SLOPE)
        ctx.call = of_handle(packed.call)  # kept for the backward
        packed = packed._replace(dropout_seed=None, drawn=False)
        # slopes too, for autograd's check that nobody has changed them in place by the time of the backward
        tensors = {name: x for name, x in zip(packed._fields, packed, strict=True) if isinstance(x, Tensor)}
        ctx.names, ctx.packed = tuple(tensors), packed._replace(**dict.fromkeys(tensors))
        ctx.save_for_backward(q, k, v, out, lse, numbers, *tensors.values())
        return out, lse, numbers

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Of q, k, v and the sink; refuses to be differentiated again."""
        q, k, v, out, lse, numbers, *tensors = ctx.saved_tensors
        packed = ctx.packed._replace(**dict(zip(ctx.names, tensors, strict=True)))
        dq, dk, dv, dsink = _GRADIENTS(dout, dlse, q, k, v, out, lse, numbers, *packed)
        of_args = packed._replace(**dict.fromkeys(packed._fields))
        return None, dq, dk, dv, *of_args._replace(learnable_sink=None if packed.learnable_sink is None else dsink)


def _autograd(keyset: Any, *args: Any) -> Any:
    """What ``torch.library.register_autograd`` makes, which spends 0.2 ms in every call to look for defaults."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return RingAttention.apply(keyset, *args)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _refuse(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(ONCE)


_library: Any = torch.library
_LIBRARY = _library.Library(NAMESPACE, "FRAGMENT")


def _defined(name: str, function: Any, tensors: str, returns: str, fake: Any) -> Any:
    """Define an op. Not by ``custom_op``, whose checks take the host longer than all else outside the hops."""
    # waits on the host and talks to other ranks, which no CUDA graph can replay
    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    _LIBRARY.define(f"{name}({tensors}, {SCHEMA}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_GRADIENTS = _defined(
    "ring_attention_backward",
    gradients,
    "Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor numbers",
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
)
_FORWARD = _defined(
    "ring_attention",
    _ring_attention,
    "Tensor q, Tensor k, Tensor v",
    "(Tensor, Tensor, Tensor)",
    _fake_ring_attention,
)
torch.library.register_autograd(f"{NAMESPACE}::ring_attention_backward", _refuse, lib=_LIBRARY)
_LIBRARY.impl("ring_attention", _autograd, "Autograd", with_keyset=True)

checkpoint_policy = [_FORWARD]
"""Ops whose results selective checkpointing keeps, so that no ring runs twice: of
``create_selective_checkpoint_contexts``."""
