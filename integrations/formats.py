"""What Megatron-core and TransformerEngine have in common: formats, names of masks, boundaries, who holds which tokens.

The whole sequence, or each document, is cut into ``2 * cp`` equal chunks, and rank r holds chunks r and
``2 * cp - 1 - r``: TransformerEngine's ``thd_get_partitioned_indices`` and Megatron's ``get_batch_on_this_cp_rank``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import Layout, ring_attention
from ..kernels import Shared
from . import unit_stride

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
FORMATS = ("sbhd", "bshd", "thd")
KEPT = 64  # packings of which layout and documents are kept: every layer of a batch asks for the same


class MaskType(NamedTuple):
    """What the name of a mask says."""

    causal: bool
    padding: bool
    bottom_right: bool | None  # None: as the argument of that name says


MASK_TYPES = {
    "no_mask": MaskType(False, False, None),
    "padding": MaskType(False, True, None),
    "causal": MaskType(True, False, False),
    "padding_causal": MaskType(True, True, False),
    "causal_bottom_right": MaskType(True, False, True),
    "padding_causal_bottom_right": MaskType(True, True, True),
}


Host = dict[str, tuple[int, ...]]
"""Boundaries on the host, by the names of their arguments."""


class Boundaries(NamedTuple):
    """Of documents, over the whole sequence, as in TransformerEngine: without padding between them, and with it."""

    q: Tensor | None = None
    kv: Tensor | None = None
    q_padded: Tensor | None = None
    kv_padded: Tensor | None = None


class Packing(NamedTuple):
    """Documents with padding behind each: who holds which tokens, and what sees what."""

    layout: Layout
    cu_seqlens: tuple[int, ...]  # documents and paddings by turns: padding sees itself alone, and nothing sees it
    has_padding: bool


def attend(
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
    **options: Any,
) -> Tensor:
    """Attention of this rank's tokens in one of TransformerEngine's formats; heads and head dim of the result are one.

    ``boundaries`` on a device are copied to the host, where schedules are made: one synchronisation per call, none for
    CPU tensors. An ``attention_mask`` is another one: what it hides is compared on its device. Rows of padding are 0,
    and so are gradients through them. ``options`` go to ``ring_attention``.
    """
    mask_type = MASK_TYPES.get(attn_mask_type)
    if mask_type is None:
        raise NotImplementedError(f"attn_mask_type is {attn_mask_type!r}: it must be one of {', '.join(MASK_TYPES)}")
    if qkv_format not in FORMATS:
        raise ValueError(f"qkv_format is {qkv_format!r}: it must be one of {', '.join(FORMATS)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != len(qkv_format):
            raise ValueError(f"{name} is {list(x.shape)}: with qkv_format {qkv_format!r} it must be [{qkv_format}]")
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    is_padding: Tensor | None
    q, k, v = (_batch_first(x, qkv_format) for x in (query, key, value))
    rows, host = q.shape[1], _on_host(boundaries)
    if qkv_format == "thd":
        if not mask_type.padding:
            raise ValueError(f"attn_mask_type is {attn_mask_type!r} with qkv_format 'thd': it must be a padding one")
        packing = _packing_of(host, world, contiguous, rows, k.shape[1])
        layout = kv_layout = packing.layout
        options["cu_seqlens"] = packing.cu_seqlens
        q, k, v = (x[:, : layout.lengths[rank]] for x in (q, k, v))  # behind them all is padding
        is_padding = _padding(packing, rank, q.device) if packing.has_padding else None
    else:
        layout, kv_layout = (_even_layout(x.shape[1] * world, world, contiguous) for x in (q, k))
        options["seqused_k"] = lengths = _row_lengths(host, mask_type, attn_mask_type, q.shape[0])
        is_padding = None if lengths is None else _behind(lengths, layout, rank, q.device)
    window = _window_of(window_size, attn_mask_type, mask_type.causal)
    aligned = bottom_right is None or bottom_right if mask_type.bottom_right is None else mask_type.bottom_right
    options["align"] = None if layout == kv_layout else "bottom-right" if aligned else "top-left"
    _check_mask(attention_mask, mask_type.causal, layout.positions(rank), kv_layout.seqlen)
    options |= {"causal": mask_type.causal, "window_size": window, "layout": layout, "group": group}
    out = ring_attention(q, k, v, kv_layout=None if kv_layout == layout else kv_layout, **options)
    if is_padding is not None:
        out = out.masked_fill(is_padding[..., None, None], 0)
    out = pad(out.flatten(2), (0, 0, 0, rows - out.shape[1]))
    return out.transpose(0, 1).contiguous() if qkv_format == "sbhd" else out[0] if qkv_format == "thd" else out


def _batch_first(x: Tensor, qkv_format: str) -> Tensor:
    x = unit_stride(x)
    return x[None] if qkv_format == "thd" else x.transpose(0, 1) if qkv_format == "sbhd" else x


def _on_host(boundaries: Boundaries) -> Host:
    """All in one copy, those of the queries for those of the keys where both are one tensor."""
    named = {f"cu_seqlens_{name}": x for name, x in boundaries._asdict().items() if x is not None}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}: it must be a tensor, integers [documents + 1]")
        if x.dim() != 1 or not len(x) or x.is_floating_point() or x.dtype == torch.bool:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}: it must be integers [documents + 1]")
    once = {id(x): x for x in named.values()}
    numbers = iter(torch.cat([*once.values()]).tolist() if once else [])
    of = {key: tuple(next(numbers) for _ in range(len(x))) for key, x in once.items()}
    return {name: of[id(x)] for name, x in named.items()}


def _packing_of(host: Host, world: int, contiguous: bool, rows: int, key_rows: int) -> Packing:
    if "cu_seqlens_q" not in host:
        raise ValueError("cu_seqlens_q is None: qkv_format 'thd' needs the boundaries of its documents")
    real = host["cu_seqlens_q"]
    padded = host.get("cu_seqlens_q_padded", real)
    if host.get("cu_seqlens_kv", real) != real or host.get("cu_seqlens_kv_padded", padded) != padded:
        raise NotImplementedError("cu_seqlens_kv differs from cu_seqlens_q: packed cross-attention is not supported")
    if real != padded and "cu_seqlens_kv" in host and "cu_seqlens_kv_padded" not in host:
        raise ValueError("cu_seqlens_kv_padded is None with cu_seqlens_q_padded: pass both, keys have the same padding")
    packing = _packing(real, padded, world, contiguous)
    if not rows == key_rows >= packing.layout.lengths[0]:
        raise ValueError(
            f"query has {rows} tokens, key {key_rows}: both must have {packing.layout.lengths[0]}, of "
            f"{padded[-1]} by the boundaries over {world} ranks, or more, which are padding at the end"
        )
    return packing


@lru_cache(maxsize=KEPT)
def _packing(real: tuple[int, ...], padded: tuple[int, ...], world: int, contiguous: bool) -> Packing:
    if len(real) != len(padded):
        raise ValueError(f"cu_seqlens_q_padded has {len(padded)} boundaries, cu_seqlens_q {len(real)}: as many")
    chunks = 1 if contiguous or world == 1 else 2 * world
    edges = [0]
    for index, ((start, end), (begin, stop)) in enumerate(zip(pairwise(real), pairwise(padded), strict=True)):
        if not 0 <= end - start <= stop - begin:
            raise ValueError(f"document {index} has {end - start} tokens, {stop - begin} with its padding")
        if (stop - begin) % chunks:
            raise ValueError(
                f"document {index} has {stop - begin} tokens with its padding: the ranks take equal chunks of each, "
                f"pad it to a multiple of {chunks} and pass cu_seqlens_q_padded"
            )
        edges += [begin + end - start, stop]
    layout = _even_layout(padded[-1], world, True) if contiguous else Layout.zigzag(padded[-1], world, padded)
    return Packing(layout, tuple(edges), real != padded)


@lru_cache(maxsize=KEPT)
def _even_layout(seqlen: int, world: int, contiguous: bool) -> Layout:
    chunks = world if contiguous or world == 1 else 2 * world
    if seqlen % chunks:
        raise ValueError(f"the sequence has {seqlen} tokens over {world} ranks: it must be a multiple of {chunks}")
    return Layout.contiguous(seqlen, world) if contiguous else Layout.zigzag(seqlen, world)


def _row_lengths(host: Host, mask_type: MaskType, name: str, batch: int) -> tuple[int, ...] | None:
    """Tokens of each batch row that are not padding; the rest of a row is behind them."""
    if not mask_type.padding:
        if host:
            raise ValueError(f"{next(iter(host))} is given with attn_mask_type {name!r}: it must be a padding one")
        return None
    if "cu_seqlens_q" not in host:
        raise NotImplementedError(f"attn_mask_type is {name!r} without cu_seqlens_q: pass lengths, not attention_mask")
    if host.keys() & {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}:
        raise ValueError("cu_seqlens_q_padded is given: rows of one length have their padding behind them")
    if host.get("cu_seqlens_kv", host["cu_seqlens_q"]) != host["cu_seqlens_q"]:
        raise NotImplementedError(
            "cu_seqlens_kv differs from cu_seqlens_q: padding of cross-attention is not supported"
        )
    lengths = tuple(end - start for start, end in pairwise(host["cu_seqlens_q"]))
    if len(lengths) != batch:
        raise ValueError(f"cu_seqlens_q has {len(lengths)} lengths: it must have {batch}, one per batch row")
    return lengths


# Kept on the device: every layer asks for the same, and the host waits for a copy. Autograd saves them.


def _padding(packing: Packing, rank: int, device: torch.device) -> Tensor:
    """Return which of a rank's tokens are padding, bool ``[tokens]``."""
    return _shared_padding(packing, rank, device).read()


@lru_cache(maxsize=KEPT)
@torch.inference_mode(False)
def _shared_padding(packing: Packing, rank: int, device: torch.device) -> Shared[Tensor]:
    after = torch.searchsorted(torch.tensor(packing.cu_seqlens), packing.layout.positions(rank), right=True)
    made = (after % 2 == 0).to(device)
    return Shared(made, (made,))


def _behind(lengths: tuple[int, ...], layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Return which of a rank's tokens are behind the end of each row, bool ``[B, tokens]``."""
    return _shared_behind(lengths, layout, rank, device).read()


@lru_cache(maxsize=KEPT)
@torch.inference_mode(False)
def _shared_behind(lengths: tuple[int, ...], layout: Layout, rank: int, device: torch.device) -> Shared[Tensor]:
    made = (layout.positions(rank) >= torch.tensor(lengths)[:, None]).to(device)
    return Shared(made, (made,))


def _window_of(window_size: tuple[int, int] | None, name: str, causal: bool) -> tuple[int, int]:
    window = (-1, -1) if window_size is None else window_size
    if not isinstance(window, (tuple, list)) or [type(end) for end in window] != [int, int]:
        raise ValueError(f"window_size is {window_size!r}: it must be (left, right), whole numbers")
    left, right = window
    if right > 0 if causal else (left < 0) != (right < 0):
        ends = "(left, 0), or (-1, 0)" if causal else "(left, right), both at least 0, or (-1, -1)"
        raise ValueError(f"window_size is {(left, right)} with attn_mask_type {name!r}: it must be {ends}")
    return left, right


def _check_mask(mask: Tensor | None, causal: bool, positions: Tensor, keys: int) -> None:
    """Refuse a mask that hides anything else than a causal one, True: hidden; a comparison on its device."""
    if mask is None:
        return
    shape, rows = tuple(getattr(mask, "shape", ())), len(positions)
    if not causal or shape[-2:] != (rows, keys) or _is_other(mask, positions):
        raise NotImplementedError(
            f"attention_mask is {list(shape)}: it must be None, or the causal mask {[rows, keys]} of this rank's "
            "rows; pass padding as cu_seqlens_q, and documents as qkv_format 'thd'"
        )


def _is_other(mask: Tensor, positions: Tensor) -> bool:
    hidden = torch.arange(mask.shape[-1], device=mask.device) > positions.to(mask.device)[:, None]
    return bool((mask != hidden).any())


def check_softmax_type(softmax_type: str) -> str:
    """The kind of sink."""
    if softmax_type not in SOFTMAX_TYPES:
        raise ValueError(f"softmax_type is {softmax_type!r}: it must be one of {', '.join(SOFTMAX_TYPES)}")
    return softmax_type


def sink_of(softmax_type: str, offset: Tensor | None, query: Tensor) -> Tensor | None:
    """One more logit per head: none, 0, or a learned one."""
    return query.new_zeros(query.shape[-2]) if softmax_type == "off-by-one" else offset


def check_comm_type(cp_comm_type: str | None) -> None:
    """Refuse what is no ring."""
    if cp_comm_type not in (None, "p2p"):
        raise NotImplementedError(f"cp_comm_type is {cp_comm_type!r}: keys and values go round a ring here, pass 'p2p'")
