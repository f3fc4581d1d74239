"""zhuzilin's ring-flash-attention by its own names, on ``ringattn.ring_attention``.

``from ringattn.integrations.ring_flash_attn import zigzag_ring_flash_attn_func`` is the one line to change: names,
argument order, layouts and results are those of ring_flash_attn 0.1.8, which need not be installed.

==================================  ====================  ===========================================================
functions                           q                     which tokens rank r of P holds
==================================  ====================  ===========================================================
``ring_flash_attn_*``               ``[B, S, H, D]``      run r of P equal ones
``zigzag_ring_flash_attn_*``        ``[B, S, H, D]``      runs r and 2P - 1 - r of 2P equal ones, one after the other
``stripe_flash_attn_*``             ``[B, S, H, D]``      r, r + P, r + 2P, ...
``ring_flash_attn_varlen_*``        ``[total, H, D]``     run r of P of every document, packed
``zigzag_ring_flash_attn_varlen_*`` ``[total, H, D]``     runs r and 2P - 1 - r of 2P of every document, packed
``llama3_flash_attn_varlen_*``      ``[total, H, D]``     run r of P of the packed sequence, wherever documents end
==================================  ====================  ===========================================================

Each as ``*_func(q, k, v, ...)``, ``*_kvpacked_func(q, kv, ...)`` and ``*_qkvpacked_func(qkv, ...)``: ``kv`` is
``[..., 2, Hkv, D]``, ``qkv`` is ``[..., 3, H, D]``. They return ``out``, with ``return_attn_probs`` ``(out, lse,
None)``: ``lse`` is ``[B, H, S]``, varlen ``[H, total]``, fp32, natural logarithm.

What theirs refuses or gets wrong holds here as in ``ring_attention``: windows and ALiBi over the ring, dropout that
does not depend on the number of ranks, zigzag and stripes without ``causal``. ``deterministic`` may be either: the
backward is. By keyword, beside their arguments, see :class:`More`.

``cu_seqlens`` are host data here: a tensor on a GPU is copied, and the host waits for it; in the llama3 functions once,
in ``llama3_flash_attn_prepare_cu_seqlens``. Documents that do not divide by the ranks, and zigzags whose two runs would
not be equal: say ``layout=``.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, Unpack

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import Documents, Layout, ring_attention
from ..comm import GroupLike, group_rank_size
from . import unit_stride

Attention = Tensor | tuple[Tensor, Tensor, None]
"""``out``, or ``(out, lse, None)`` with ``return_attn_probs``: there are no attention probabilities to return."""
Boundaries = tuple[int, ...]
Placed = tuple[Layout | str, Boundaries | None]
"""Who holds which tokens, and where documents end in the whole sequence; None: the tensors are not packed."""


class More(TypedDict, total=False):
    """What their functions do not have, by keyword, as :func:`ringattn.ring_attention` takes it."""

    layout: Layout
    """Who holds which tokens, in place of the function's own rule; ``cu_seqlens`` are then those of the whole sequence,
    and documents need not divide: ``Layout.zigzag(total, world, cu_seqlens)``."""
    softcap: float
    learnable_sink: Tensor | None
    dropout_seed: int | None
    prefix_length: int | None


class _Call(NamedTuple):
    """What the place of the tokens depends on."""

    q: Tensor
    k: Tensor
    causal: bool
    group: GroupLike
    layout: Layout | None


def _attention(
    place: Callable[..., Placed],
    arguments: Iterable[Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike = None,
    **more: Unpack[More],
) -> Attention:
    """Every function: ``place`` has its rule, ``arguments`` are what it takes between the tensors and ``dropout_p``."""
    layout, documents = place(_Call(q, k, causal, group, more.pop("layout", None)), *arguments)
    if documents is not None:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    options: Any = {"layout": layout, "cu_seqlens": documents, **more}
    out, lse = ring_attention(
        q, k, v,
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, group=group, return_lse=True, **options,
    )  # fmt: skip
    if documents is not None:
        out, lse = out[0], lse[0]
    return (out, lse, None) if return_attn_probs else out


def _dense(rule: str, call: _Call) -> Placed:
    if rule == "zigzag" and call.layout is None and call.q.ndim == 4:
        _two_equal_runs("q", call.q.shape[1], call)
    return call.layout or rule, None


def _varlen(rule: Callable[[Boundaries, int], Layout], call: _Call, cu_seqlens: Tensor, max_seqlen: int) -> Placed:
    """``cu_seqlens`` are the boundaries in every rank's part: those of the whole sequence over the number of ranks."""
    documents = Documents(_on_host(cu_seqlens)).boundaries
    if max_seqlen is None or max_seqlen < _longest(documents):
        raise ValueError(f"max_seqlen is {max_seqlen}, the longest document of cu_seqlens is {_longest(documents)}")
    if call.layout is not None:
        return call.layout, documents
    if documents[-1] != call.q.shape[0]:
        raise ValueError(
            f"cu_seqlens ends at {documents[-1]}, q has {call.q.shape[0]} tokens: it has the boundaries in this rank's "
            "part; with layout= those of the whole sequence"
        )
    world = group_rank_size(call.group)[1]
    if rule is _zigzag_of_documents:
        for start, stop in pairwise(documents):
            _two_equal_runs(f"a document of cu_seqlens, {start} to {stop},", stop - start, call)
    documents = tuple(world * boundary for boundary in documents)
    return rule(documents, world), documents


def _two_equal_runs(name: str, tokens: int, call: _Call) -> None:
    """Of an odd number no cut is theirs; alone a rank has them all."""
    if tokens % 2 and group_rank_size(call.group)[1] > 1:
        raise ValueError(f"{name} has {tokens} tokens: a zigzag has two equal runs of them, or say which in layout=")


@lru_cache
def _runs_of_documents(documents: tuple[int, ...], world: int) -> Layout:
    """Of every document run ``rank`` of ``world`` equal ones."""
    lengths = [(start, (stop - start) // world) for start, stop in pairwise(documents)]
    return Layout([(start + rank * length, length) for start, length in lengths] for rank in range(world))


@lru_cache
def _zigzag_of_documents(documents: tuple[int, ...], world: int) -> Layout:
    return Layout.zigzag(documents[-1], world, documents)


class _Prepared(NamedTuple):
    """What ``llama3_flash_attn_prepare_cu_seqlens`` returned beside ``cu_seqlens_q``, and what it was made from."""

    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    local_k_slice: slice
    causal: bool
    rank: int
    world: int
    documents: tuple[int, ...]


_PREPARED = WeakTensorKeyDictionary()
"""By ``cu_seqlens_q``: a ring needs the documents of all ranks, and their functions are told those of one."""


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What the llama3 functions take, from the boundaries of a packed sequence that is cut into ``world_size`` runs.

    Returns:
        ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``, those of ring_flash_attn: the
        boundaries of the documents in rank's run, the boundaries among the keys that they need, the longest of each,
        and which keys those are. Pass them on as they are: the documents of the other ranks are known by
        ``cu_seqlens_q``, the tensor itself. Runs need not be equal: they are ``Layout.contiguous``.

    Raises:
        ValueError: boundaries that are none, no such rank, or a rank without tokens.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens is {cu_seqlens!r}: it must be a torch.Tensor")
    documents = Documents(_on_host(cu_seqlens)).boundaries
    spans = Layout.contiguous(documents[-1], world_size).spans(rank)
    if not spans:
        raise ValueError(f"cu_seqlens ends at {documents[-1]}: rank {rank} of {world_size} has no tokens")
    start, stop = spans[0].start, spans[0].stop
    left, right = bisect_left(documents, start), bisect_left(documents, stop)
    left -= documents[left] != start
    first_key, last_key = documents[left], stop if causal else documents[right]
    inner = documents[left + 1 : right]
    q = (0, *(boundary - start for boundary in inner), stop - start)
    k = (0, *(boundary - first_key for boundary in inner), last_key - first_key)
    cu_seqlens_q, cu_seqlens_k = cu_seqlens.new_tensor(q), cu_seqlens.new_tensor(k)
    needed = _longest(q), _longest(k), slice(first_key, last_key)
    _PREPARED[cu_seqlens_q] = _Prepared(cu_seqlens_k, *needed, causal, rank, world_size, documents)
    return cu_seqlens_q, cu_seqlens_k, *needed


def _llama3(
    call: _Call,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
) -> Placed:
    """Keys travel around the ring, where theirs gathers ``heads_k_stride`` heads of all of them."""
    prepared = _PREPARED.get(cu_seqlens_q)  # type: ignore[no-untyped-call]
    if prepared is None:
        raise ValueError(
            "cu_seqlens_q is not a tensor that llama3_flash_attn_prepare_cu_seqlens of "
            "ringattn.integrations.ring_flash_attn returned: it does not say where the documents of other ranks end"
        )
    values = (cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, call.causal, *group_rank_size(call.group))
    for name, value, made in zip(_Prepared._fields, values, prepared, strict=False):
        if value is not made if isinstance(made, Tensor) else value != made:
            raise ValueError(f"{name} is {value}, llama3_flash_attn_prepare_cu_seqlens made cu_seqlens_q with {made}")
    if heads_k_stride is None or heads_k_stride < 1 or call.k.shape[1] % heads_k_stride:
        raise ValueError(f"heads_k_stride is {heads_k_stride}: it must divide the {call.k.shape[1]} heads of k")
    documents = prepared.documents
    return call.layout or Layout.contiguous(documents[-1], prepared.world), documents


def _on_host(cu_seqlens: Tensor | Iterable[int]) -> Any:
    """Boundaries as a list: of a tensor on a GPU the host waits for the copy."""
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _longest(boundaries: Boundaries) -> int:
    return max(stop - start for start, stop in pairwise(boundaries))


def _functions(stem: str, place: Callable[..., Placed], *arguments: str) -> list[Callable[..., Attention]]:
    """``*_func``, ``*_kvpacked_func`` and ``*_qkvpacked_func``, which take ``arguments`` after the tensors."""
    tensors = {"": ("q", "k", "v"), "kvpacked_": ("q", "kv"), "qkvpacked_": ("qkv",)}
    return [_function(f"{stem}_{packing}func", names, place, arguments) for packing, names in tensors.items()]


def _function(
    name: str, tensors: tuple[str, ...], place: Callable[..., Placed], arguments: tuple[str, ...]
) -> Callable[..., Attention]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    rest = [*inspect.signature(_attention).parameters.values()][5:]
    signature = inspect.Signature([*(inspect.Parameter(each, kind) for each in (*tensors, *arguments)), *rest])
    first, second = len(tensors), len(tensors) + len(arguments)

    def call(*positional: Any, **named: Any) -> Attention:
        bound = signature.bind(*positional, **named)
        q, k, v = (part for name, x in zip(tensors, bound.args, strict=False) for part in _parts(name, x))
        return _attention(place, bound.args[first:second], q, k, v, *bound.args[second:], **bound.kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "Attention of this rank's queries over the keys of all ranks; see the module."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _parts(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """The tensors that one holds, a letter of its name for each."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: it must be a torch.Tensor")
    x = unit_stride(x)
    if len(name) > 1 and (x.ndim < 4 or x.shape[-3] != len(name)):
        raise ValueError(f"{name} is {list(x.shape)}: it must be [..., {len(name)}, heads, head dim]")
    return x.unbind(-3) if len(name) > 1 else (x,)


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _functions(
    "ring_flash_attn", partial(_dense, "contiguous")
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _functions(
    "zigzag_ring_flash_attn", partial(_dense, "zigzag")
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _functions(
    "stripe_flash_attn", partial(_dense, "striped")
)
(
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
) = _functions("ring_flash_attn_varlen", partial(_varlen, _runs_of_documents), "cu_seqlens", "max_seqlen")
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _functions("zigzag_ring_flash_attn_varlen", partial(_varlen, _zigzag_of_documents), "cu_seqlens", "max_seqlen")
(
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
) = _functions("llama3_flash_attn_varlen", _llama3, *[*inspect.signature(_llama3).parameters][1:])
