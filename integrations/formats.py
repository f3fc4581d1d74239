"""Tensor formats, mask types, document boundaries and layouts shared by Megatron-core and TransformerEngine.

The whole sequence, or each document, is split into ``2 * cp`` equal chunks. Rank r holds chunks r and
``2 * cp - 1 - r``, as with TransformerEngine's ``thd_get_partitioned_indices`` and Megatron's
``get_batch_on_this_cp_rank``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import Layout, ring_attention
from ..kernels import SharedValue
from . import unit_stride

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
FORMATS = ("sbhd", "bshd", "thd")
PACKING_CACHE_SIZE = 64  # cached packings; all layers share the packing of a batch


class MaskType(NamedTuple):
    """Properties of one ``attn_mask_type``: causal or not, with padding or not, and how unequal lengths align."""

    causal: bool
    padding: bool
    bottom_right: bool | None  # None: the argument `bottom_right` decides


MASK_TYPES = {
    "no_mask": MaskType(False, False, None),
    "padding": MaskType(False, True, None),
    "causal": MaskType(True, False, False),
    "padding_causal": MaskType(True, True, False),
    "causal_bottom_right": MaskType(True, False, True),
    "padding_causal_bottom_right": MaskType(True, True, True),
}


HostBoundaries = dict[str, tuple[int, ...]]
"""Boundaries on the host; the keys are argument names such as ``cu_seqlens_q``."""


class Boundaries(NamedTuple):
    """The ``cu_seqlens_*`` tensors of TransformerEngine, over the whole sequence; ``*_padded`` include padding."""

    q: Tensor | None = None
    kv: Tensor | None = None
    q_padded: Tensor | None = None
    kv_padded: Tensor | None = None


class Packing(NamedTuple):
    """Layout and mask of packed documents, each followed by its padding."""

    layout: Layout
    # alternates documents and paddings, so that a document and its padding do not see each other
    cu_seqlens: tuple[int, ...]
    has_padding: bool


def attend_format(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any,
    qkv_format: str,
    attn_mask_type: str,
    boundaries: Boundaries,
    window_size: tuple[int, int] | None = None,
    attention_mask: Tensor | None = None,
    bottom_right: bool | None = None,
    contiguous: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> Any:
    """Compute attention of this rank's tokens in one of TransformerEngine's tensor formats.

    The result has heads and head dim in one dimension. Rows of padding are 0, and so are the gradients through them.
    ``boundaries`` on a GPU cost one synchronisation per call, because the schedule is built on the host. An
    ``attention_mask`` on a GPU costs another one. ``options`` are arguments of ``ring_attention``. With
    ``return_max_logits`` return a tuple of the result and ``max_logits``, to which padding does not contribute.
    """
    mask_type = MASK_TYPES.get(attn_mask_type)
    if mask_type is None:
        raise NotImplementedError(f"attn_mask_type is {attn_mask_type!r}: it must be one of {', '.join(MASK_TYPES)}")
    if qkv_format not in FORMATS:
        raise ValueError(f"qkv_format is {qkv_format!r}: it must be one of {', '.join(FORMATS)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != len(qkv_format):
            raise ValueError(
                f"{name} has shape {list(x.shape)}. With qkv_format {qkv_format!r} it must be [{qkv_format}]."
            )
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    q, k, v = (_batch_first(x, qkv_format) for x in (query, key, value))
    rows, host = q.shape[1], _boundaries_on_host(boundaries)
    if qkv_format == "thd":
        if not mask_type.padding:
            raise ValueError(f"attn_mask_type is {attn_mask_type!r} with qkv_format 'thd': it must be a padding mask")
        packing = _resolve_packing(host, world, contiguous, rows, k.shape[1])
        layout = kv_layout = packing.layout
        options["cu_seqlens"] = packing.cu_seqlens
        q, k, v = (x[:, : layout.lengths[rank]] for x in (q, k, v))  # the remaining tokens are padding
        edges = packing.cu_seqlens if packing.has_padding else None
    else:
        layout, kv_layout = (_even_layout(x.shape[1] * world, world, contiguous) for x in (q, k))
        options["seqused_k"] = edges = _row_lengths(host, mask_type, attn_mask_type, q.shape[0])
    window = _resolve_window(window_size, attn_mask_type, mask_type.causal)
    aligned = bottom_right is None or bottom_right if mask_type.bottom_right is None else mask_type.bottom_right
    options["align"] = None if layout == kv_layout else "bottom-right" if aligned else "top-left"
    _check_mask(attention_mask, mask_type.causal, layout.positions(rank), kv_layout.seqlen)
    options |= {"causal": mask_type.causal, "window_size": window, "layout": layout, "group": group}
    if return_max_logits:
        options |= {"return_max_logits": True}
        if edges is not None:
            options |= _hide_padding(qkv_format == "thd", edges, kv_layout.seqlen)
    result = ring_attention(q, k, v, kv_layout=None if kv_layout == layout else kv_layout, **options)
    out, max_logits = result if isinstance(result, tuple) else (result, None)
    if edges is not None:
        is_padding = _padding(qkv_format == "thd", edges, layout, rank, q.device).read()
        out = out.masked_fill(is_padding[..., None, None], 0)
    out = pad(out.flatten(2), (0, 0, 0, rows - out.shape[1]))
    out = out.transpose(0, 1).contiguous() if qkv_format == "sbhd" else out[0] if qkv_format == "thd" else out
    return out if max_logits is None else (out, max_logits)


@lru_cache(maxsize=PACKING_CACHE_SIZE)
@torch.inference_mode(False)
def _hide_padding(packed: bool, edges: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """Return the masks with which queries in padding see no key; ``edges`` as in `_padding`. All layers share them."""
    rows = [edges] if packed else [(0, length, tokens) for length in edges]
    numbers = [torch.searchsorted(torch.tensor(row), torch.arange(tokens), right=True) for row in rows]
    return {"cu_seqlens": [[*row] for row in rows], "key_mask": torch.stack(numbers) % 2 == 1}


def _batch_first(x: Tensor, qkv_format: str) -> Tensor:
    x = unit_stride(x)
    return x[None] if qkv_format == "thd" else x.transpose(0, 1) if qkv_format == "sbhd" else x


def _boundaries_on_host(boundaries: Boundaries) -> HostBoundaries:
    """Return all given boundaries by argument name, copied to the host in one transfer.

    Raises:
        ValueError: A boundary is not an integer tensor with one dimension.
    """
    named = {f"cu_seqlens_{name}": x for name, x in boundaries._asdict().items() if x is not None}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: it must be an integer tensor of shape [documents + 1]")
        if x.dim() != 1 or not len(x) or x.is_floating_point() or x.dtype == torch.bool:
            raise ValueError(
                f"{name} is {x.dtype} of shape {list(x.shape)}: it must be an integer tensor of shape [documents + 1]"
            )
    distinct = {id(x): x for x in named.values()}
    numbers = iter(torch.cat([*distinct.values()]).tolist() if distinct else [])
    on_host = {key: tuple(next(numbers) for _ in range(len(x))) for key, x in distinct.items()}
    return {name: on_host[id(x)] for name, x in named.items()}


def _resolve_packing(host: HostBoundaries, world: int, contiguous: bool, rows: int, key_rows: int) -> Packing:
    """Return the packing of a call with qkv_format 'thd', or raise if boundaries and numbers of tokens disagree."""
    if "cu_seqlens_q" not in host:
        raise ValueError("cu_seqlens_q is None. With qkv_format 'thd' it must have the document boundaries.")
    real = host["cu_seqlens_q"]
    padded = host.get("cu_seqlens_q_padded", real)
    if host.get("cu_seqlens_kv", real) != real or host.get("cu_seqlens_kv_padded", padded) != padded:
        raise NotImplementedError(
            "cu_seqlens_kv differs from cu_seqlens_q. Cross-attention between packed documents is not supported."
        )
    if real != padded and "cu_seqlens_kv" in host and "cu_seqlens_kv_padded" not in host:
        raise ValueError("cu_seqlens_kv_padded is None and cu_seqlens_q_padded is given; pass both or neither")
    packing = _packing(real, padded, world, contiguous)
    if not rows == key_rows >= packing.layout.lengths[0]:
        raise ValueError(
            f"query has {rows} tokens and key has {key_rows}. Both must have the same number, at least "
            f"{packing.layout.lengths[0]}, because the boundaries give {padded[-1]} tokens over {world} ranks."
        )
    return packing


@lru_cache(maxsize=PACKING_CACHE_SIZE)
def _packing(real: tuple[int, ...], padded: tuple[int, ...], world: int, contiguous: bool) -> Packing:
    """Return the packing of documents with boundaries ``real`` that start at ``padded``, over ``world`` ranks.

    Raises:
        ValueError: The boundaries disagree, or the number of chunks does not divide a document with its padding.
    """
    if len(real) != len(padded):
        raise ValueError(
            f"cu_seqlens_q_padded has {len(padded)} boundaries: it must have {len(real)}, as many as cu_seqlens_q"
        )
    chunks = 1 if contiguous or world == 1 else 2 * world
    edges = [0]
    for index, ((start, end), (padded_start, padded_end)) in enumerate(
        zip(pairwise(real), pairwise(padded), strict=True)
    ):
        length, padded_length = end - start, padded_end - padded_start
        if not 0 <= length <= padded_length:
            raise ValueError(
                f"document {index} has {length} tokens in cu_seqlens_q and {padded_length} in cu_seqlens_q_padded. "
                "Padding cannot make a document shorter."
            )
        if padded_length % chunks:
            raise ValueError(
                f"document {index} has {padded_length} tokens with its padding, which is not a multiple of {chunks}. "
                "Pad every document and pass cu_seqlens_q_padded."
            )
        edges += [padded_start + length, padded_end]
    layout = _even_layout(padded[-1], world, True) if contiguous else Layout.zigzag(padded[-1], world, padded)
    return Packing(layout, tuple(edges), real != padded)


@lru_cache(maxsize=PACKING_CACHE_SIZE)
def _even_layout(seqlen: int, world: int, contiguous: bool) -> Layout:
    """Return the contiguous or zigzag layout with equal shards, or raise ValueError if there is none."""
    chunks = world if contiguous or world == 1 else 2 * world
    if seqlen % chunks:
        raise ValueError(f"the sequence has {seqlen} tokens over {world} ranks: use a multiple of {chunks}")
    return Layout.contiguous(seqlen, world) if contiguous else Layout.zigzag(seqlen, world)


def _row_lengths(host: HostBoundaries, mask_type: MaskType, name: str, batch: int) -> tuple[int, ...] | None:
    """Return the number of real tokens of each batch row, before its padding, or None without padding.

    ``name`` is the ``attn_mask_type`` for error messages.
    """
    if not mask_type.padding:
        if host:
            raise ValueError(f"{next(iter(host))} is given with attn_mask_type {name!r}: it needs a padding mask")
        return None
    if "cu_seqlens_q" not in host:
        raise NotImplementedError(
            f"attn_mask_type is {name!r} and cu_seqlens_q is None. Pass cu_seqlens_q, which says where padding begins."
        )
    if host.keys() & {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}:
        raise ValueError("cu_seqlens_q_padded is given; only qkv_format 'thd' takes padded boundaries")
    if host.get("cu_seqlens_kv", host["cu_seqlens_q"]) != host["cu_seqlens_q"]:
        raise NotImplementedError(
            "cu_seqlens_kv differs from cu_seqlens_q. Padding in cross-attention is not supported."
        )
    lengths = tuple(end - start for start, end in pairwise(host["cu_seqlens_q"]))
    if len(lengths) != batch:
        raise ValueError(f"cu_seqlens_q has {len(lengths)} documents. It must have one per batch row, {batch}.")
    return lengths


@lru_cache(maxsize=PACKING_CACHE_SIZE)
@torch.inference_mode(False)
def _padding(
    packed: bool, edges: tuple[int, ...], layout: Layout, rank: int, device: torch.device
) -> SharedValue[Tensor]:
    """Return a bool mask of a rank's tokens, True for padding: ``[tokens]`` if ``packed``, or ``[B, tokens]``.

    ``edges`` alternates the ends of documents and of their padding, or has the length of each row. Masks stay cached
    on the device, because all layers use the same one and each copy synchronises the host. They are normal tensors
    even in inference mode, because autograd saves them.
    """
    where, at = layout.positions(rank), torch.tensor(edges)
    is_padding = torch.searchsorted(at, where, right=True) % 2 == 0 if packed else where >= at[:, None]
    is_padding = is_padding.to(device)
    return SharedValue(is_padding, (is_padding,))


def _resolve_window(window_size: tuple[int, int] | None, name: str, causal: bool) -> tuple[int, int]:
    """Return ``window_size`` as (left, right), (-1, -1) for None, or raise ValueError if it does not fit the mask."""
    window = (-1, -1) if window_size is None else window_size
    if not isinstance(window, (tuple, list)) or [type(end) for end in window] != [int, int]:
        raise ValueError(f"window_size is {window_size!r}: it must be two integers (left, right)")
    left, right = window
    if right > 0 if causal else (left < 0) != (right < 0):
        ends = "(left, 0), or (-1, 0)" if causal else "(left, right), both at least 0, or (-1, -1)"
        raise ValueError(f"window_size is {(left, right)} with attn_mask_type {name!r}: it must be {ends}")
    return left, right


def _check_mask(mask: Tensor | None, causal: bool, positions: Tensor, keys: int) -> None:
    """Raise NotImplementedError if ``mask`` is neither None nor the causal mask of this rank's rows.

    True means hidden. ``positions`` are those of the rows, and ``keys`` is the length of the whole sequence. The
    check synchronises a GPU.
    """
    if mask is None:
        return
    shape, rows = tuple(getattr(mask, "shape", ())), len(positions)
    if not causal or shape[-2:] != (rows, keys) or _differs_from_causal(mask, positions):
        raise NotImplementedError(
            f"attention_mask has shape {list(shape)}. It must be None, or the causal mask of this rank's rows, of "
            f"shape {[rows, keys]}. Pass padding as cu_seqlens_q, and documents as qkv_format 'thd'."
        )


def _differs_from_causal(mask: Tensor, positions: Tensor) -> bool:
    """Return True if ``mask`` (True: hidden) is not the causal mask of rows at ``positions``."""
    hidden = torch.arange(mask.shape[-1], device=mask.device) > positions.to(mask.device)[:, None]
    return bool((mask != hidden).any())


def check_softmax_type(softmax_type: str) -> str:
    """Return ``softmax_type``, or raise ValueError if the type is unknown."""
    if softmax_type not in SOFTMAX_TYPES:
        raise ValueError(f"softmax_type is {softmax_type!r}: it must be one of {', '.join(SOFTMAX_TYPES)}")
    return softmax_type


def softmax_sink(softmax_type: str, offset: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the sink logit of each head: None, zeros (``off-by-one``) or the learnable ``offset``."""
    return query.new_zeros(query.shape[-2]) if softmax_type == "off-by-one" else offset


def check_comm_type(cp_comm_type: str | None) -> None:
    """Raise NotImplementedError if ``cp_comm_type`` asks for anything but a ring."""
    if cp_comm_type not in (None, "p2p"):
        raise NotImplementedError(f"cp_comm_type is {cp_comm_type!r}: it must be 'p2p', which is the ring")
