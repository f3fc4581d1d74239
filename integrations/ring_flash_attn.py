"""Functions of zhuzilin's ring-flash-attention on top of ``ringattn.ring_attention``.

Only the import changes: ``from ringattn.integrations.ring_flash_attn import ...``. Names, argument
order, layouts and results are those of ring_flash_attn 0.1.8, which need not be installed.

==================================  ====================  ===========================================================
functions                           q                     tokens of rank r of P
==================================  ====================  ===========================================================
``ring_flash_attn_*``               ``[B, S, H, D]``      run r of P equal ones
``zigzag_ring_flash_attn_*``        ``[B, S, H, D]``      runs r and 2P - 1 - r of 2P equal ones, one after the other
``stripe_flash_attn_*``             ``[B, S, H, D]``      r, r + P, r + 2P, ...
``ring_flash_attn_varlen_*``        ``[total, H, D]``     run r of P of every document, packed
``zigzag_ring_flash_attn_varlen_*`` ``[total, H, D]``     runs r and 2P - 1 - r of 2P of every document, packed
``llama3_flash_attn_varlen_*``      ``[total, H, D]``     run r of P of the packed sequence, across documents
==================================  ====================  ===========================================================

Each has the variants ``*_func(q, k, v, ...)``, ``*_kvpacked_func(q, kv, ...)`` and ``*_qkvpacked_func(qkv, ...)``,
where ``kv`` is ``[..., 2, Hkv, D]`` and ``qkv`` is ``[..., 3, H, D]``. They return ``out``, or ``(out, lse, None)``
with ``return_attn_probs``. ``lse`` is the fp32 natural logarithm, ``[B, H, S]`` or varlen ``[H, total]``.

Some options work here that the original rejects or computes wrongly: windows and ALiBi over the ring, zigzag and
stripes without ``causal``, and dropout that does not depend on the number of ranks. The backward is always
deterministic, whatever ``deterministic`` says. :class:`ExtraOptions` lists additional keyword arguments.

``cu_seqlens`` are needed on the host, so a tensor on a GPU synchronises. The llama3 functions do so only in
``llama3_flash_attn_prepare_cu_seqlens``. Pass ``layout=`` for documents that the ranks do not divide, and for zigzags
with two unequal runs.
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
"""``out``, or ``(out, lse, None)`` with ``return_attn_probs``; the attention probabilities are never materialised."""
DocumentEdges = tuple[int, ...]
Placement = tuple[Layout | str, DocumentEdges | None]
"""Layout, and the document boundaries in the whole sequence, or None if the tensors are not packed."""


class ExtraOptions(TypedDict, total=False):
    """Keyword arguments beyond those of ring_flash_attn, with the meaning of :func:`ringattn.ring_attention`."""

    layout: Layout
    """Layout that replaces the function's own. ``cu_seqlens`` are then boundaries of the whole sequence, and documents
    need not divide by the ranks, as in ``Layout.zigzag(total, world, cu_seqlens)``."""
    softcap: float
    learnable_sink: Tensor | None
    dropout_seed: int | None
    prefix_length: int | None


class _Call(NamedTuple):
    """Arguments of a call that determine the layout."""

    q: Tensor
    k: Tensor
    causal: bool
    group: GroupLike
    layout: Layout | None


def _attention(
    place: Callable[..., Placement],
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
    **more: Unpack[ExtraOptions],
) -> Attention:
    """Compute attention for every public function of this module.

    ``place`` returns the layout from the call and from ``arguments``, the arguments between tensors and ``dropout_p``.
    """
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


def _dense(rule: str, call: _Call) -> Placement:
    """Return the placement of unpacked tensors: the layout named ``rule``, or the call's own."""
    if rule == "zigzag" and call.layout is None and call.q.ndim == 4:
        _two_equal_runs("q", call.q.shape[1], call)
    return call.layout or rule, None


def _varlen(
    rule: Callable[[DocumentEdges, int], Layout], call: _Call, cu_seqlens: Tensor, max_seqlen: int
) -> Placement:
    """Return the placement for ``cu_seqlens`` of one rank's part, those of the whole sequence over the world size."""
    documents = Documents(_on_host(cu_seqlens)).boundaries
    if max_seqlen is None or max_seqlen < _longest(documents):
        raise ValueError(
            f"max_seqlen is {max_seqlen}: it must be at least {_longest(documents)}, the longest document of cu_seqlens"
        )
    if call.layout is not None:
        return call.layout, documents
    if documents[-1] != call.q.shape[0]:
        raise ValueError(
            f"cu_seqlens ends at {documents[-1]} and q has {call.q.shape[0]} tokens. Pass the boundaries within this "
            "rank's part, or layout= with the boundaries of the whole sequence."
        )
    world = group_rank_size(call.group)[1]
    if rule is _zigzag_of_documents:
        for start, stop in pairwise(documents):
            _two_equal_runs(f"a document of cu_seqlens, {start} to {stop},", stop - start, call)
    documents = tuple(world * boundary for boundary in documents)
    return rule(documents, world), documents


def _two_equal_runs(name: str, tokens: int, call: _Call) -> None:
    """Raise ValueError if ``tokens`` per rank are odd, because a zigzag has two equal runs per rank."""
    if tokens % 2 and group_rank_size(call.group)[1] > 1:
        raise ValueError(
            f"{name} has {tokens} tokens: zigzag needs an even number per rank. For an odd number pass layout=."
        )


@lru_cache
def _runs_of_documents(documents: tuple[int, ...], world: int) -> Layout:
    """Return the layout in which each rank holds one of ``world`` equal runs of every document."""
    lengths = [(start, (stop - start) // world) for start, stop in pairwise(documents)]
    return Layout([(start + rank * length, length) for start, length in lengths] for rank in range(world))


@lru_cache
def _zigzag_of_documents(documents: tuple[int, ...], world: int) -> Layout:
    """Return the zigzag layout of every document with these boundaries."""
    return Layout.zigzag(documents[-1], world, documents)


class _Prepared(NamedTuple):
    """Results of ``llama3_flash_attn_prepare_cu_seqlens`` except ``cu_seqlens_q``, and its arguments."""

    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    local_k_slice: slice
    causal: bool
    rank: int
    world: int
    documents: tuple[int, ...]


_PREPARED = WeakTensorKeyDictionary()
"""Maps ``cu_seqlens_q`` to its :class:`_Prepared`, because a ring needs the documents of all ranks."""


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Compute the arguments of the llama3 functions for a packed sequence that is split into ``world_size`` runs.

    The runs are those of ``Layout.contiguous`` and may differ in length.

    Returns:
        ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)`` as in ring_flash_attn. They are the
        document boundaries in the rank's run and in the keys that the run sees, the longest document in each, and the
        slice of those keys. Pass the tensor ``cu_seqlens_q`` itself to the functions, not a copy: ringattn looks up
        the documents of the other ranks by that object.

    Raises:
        ValueError: ``cu_seqlens`` are not boundaries, or ``rank`` is out of range or has no tokens.
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
) -> Placement:
    """Return the placement for the arguments of ``llama3_flash_attn_prepare_cu_seqlens``, or raise if they differ."""
    prepared = _PREPARED.get(cu_seqlens_q)  # type: ignore[no-untyped-call]
    if prepared is None:
        raise ValueError(
            "cu_seqlens_q is not prepared. Pass the tensor object that llama3_flash_attn_prepare_cu_seqlens of "
            "ringattn.integrations.ring_flash_attn returned, not a copy."
        )
    values = (cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, call.causal, *group_rank_size(call.group))
    for name, value, expected in zip(_Prepared._fields, values, prepared, strict=False):
        if value is not expected if isinstance(expected, Tensor) else value != expected:
            raise ValueError(f"{name} is {value}: it must be {expected}, as for llama3_flash_attn_prepare_cu_seqlens")
    if heads_k_stride is None or heads_k_stride < 1 or call.k.shape[1] % heads_k_stride:
        raise ValueError(f"heads_k_stride is {heads_k_stride}: it must divide {call.k.shape[1]}, the heads of k")
    documents = prepared.documents
    return call.layout or Layout.contiguous(documents[-1], prepared.world), documents


def _on_host(cu_seqlens: Tensor | Iterable[int]) -> Any:
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens


def _longest(boundaries: DocumentEdges) -> int:
    """Return the length of the longest document."""
    return max(stop - start for start, stop in pairwise(boundaries))


def _functions(stem: str, place: Callable[..., Placement], *arguments: str) -> list[Callable[..., Attention]]:
    """Build ``*_func``, ``*_kvpacked_func`` and ``*_qkvpacked_func``, which take ``arguments`` after the tensors."""
    tensors = {"": ("q", "k", "v"), "kvpacked_": ("q", "kv"), "qkvpacked_": ("qkv",)}
    return [_function(f"{stem}_{packing}func", names, place, arguments) for packing, names in tensors.items()]


def _function(
    name: str, tensors: tuple[str, ...], place: Callable[..., Placement], arguments: tuple[str, ...]
) -> Callable[..., Attention]:
    """Build one public function that takes ``tensors`` and ``arguments``, then the options of :func:`_attention`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    rest = [*inspect.signature(_attention).parameters.values()][5:]
    signature = inspect.Signature([*(inspect.Parameter(name, kind) for name in (*tensors, *arguments)), *rest])
    first, last = len(tensors), len(tensors) + len(arguments)

    def call(*positional: Any, **named: Any) -> Attention:
        bound = signature.bind(*positional, **named)
        q, k, v = (part for name, x in zip(tensors, bound.args, strict=False) for part in _parts(name, x))
        return _attention(place, bound.args[first:last], q, k, v, *bound.args[last:], **bound.kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "Compute attention of this rank's queries over the keys of all ranks; see the module."
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _parts(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors packed in ``x``: ``name`` has one letter for each, such as ``qkv``."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: it must be a torch.Tensor")
    x = unit_stride(x)
    if len(name) > 1 and (x.ndim < 4 or x.shape[-3] != len(name)):
        raise ValueError(f"{name} has shape {list(x.shape)}: it must be [..., {len(name)}, heads, head dim]")
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
