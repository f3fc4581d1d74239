"""Who sees whom, from global token positions. A mask is a predicate on (query position, key position)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor], Tensor]
"""(query positions ``[Sq, 1]``, key positions ``[1, Sk]``) -> bool, of a shape that broadcasts to ``[Sq, Sk]``, or to
``[B, Sq, Sk]`` where batch rows differ."""


class Masks(TypedDict, total=False):
    """The mask arguments of every function here; a pair is visible where all that are given show it."""

    causal: bool
    """See :func:`is_causal`."""
    prefix_length: int | None
    """What a causal mask shows to all; without ``causal`` it says nothing."""
    window_size: tuple[int, int]
    """See :func:`in_window`."""
    global_tokens: Sequence[tuple[int, int]]
    """See :func:`is_global`: what the window does not hide."""
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None
    """See :func:`in_one_document`; also of each batch row."""
    seqused_k: Sequence[int] | None
    """See :func:`is_used`."""
    leftpad_k: Sequence[int] | None
    """See :func:`begins_at`."""
    key_mask: Tensor | None
    """See :func:`is_there`; bool ``[B, key positions]``."""
    block_mask: Tensor | None
    """See :func:`in_a_visible_block`; bool ``[query blocks, key blocks]``, with ``block_size``."""
    block_size: int
    """Positions per block."""


def is_causal(prefix_length: int) -> Predicate:
    """The query at position p sees the keys at positions up to p, itself included, and those before the prefix's end.

    C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
    arXiv:1910.10683, section 3.2.1: causal with prefix.
    """
    return lambda q, k: (k <= q) | (k < prefix_length)


def in_window(left: int, right: int) -> Predicate:
    """It sees the keys from ``left`` positions before it to ``right`` after it; -1: no end on that side.

    The sliding window of I. Beltagy, M. Peters and A. Cohan, "Longformer: The Long-Document Transformer", 2020,
    arXiv:2004.05150, section 3.1, with sides of their own.
    """
    return lambda q, k: ((left == -1) | (k >= q - left)) & ((right == -1) | (k <= q + right))


def is_global(stretches: Sequence[tuple[int, int]]) -> Predicate:
    """The query or the key lies in one of the stretches ``[start, end)``: Longformer's global attention."""

    def inside(positions: Tensor) -> Tensor:
        is_inside = torch.zeros_like(positions, dtype=torch.bool)
        for start, end in stretches:
            is_inside = is_inside | ((positions >= start) & (positions < end))
        return is_inside

    return lambda q, k: inside(q) | inside(k)


def in_one_document(cu_seqlens: Sequence[int]) -> Predicate:
    """It sees the keys of its own document: document i is ``cu_seqlens[i] <= p < cu_seqlens[i + 1]``."""

    def number(positions: Tensor) -> Tensor:
        return sum((positions >= start).to(torch.int64) for start in cu_seqlens) + torch.zeros_like(positions)

    return lambda q, k: number(q) == number(k)


def is_used(lengths: Sequence[int]) -> Predicate:
    """The queries of batch row b see the keys before position ``lengths[b]``; from there on they are padding."""
    ends = torch.tensor([int(length) for length in lengths], dtype=torch.int64)
    return lambda q, k: k < ends.to(k.device)[:, None, None]


def begins_at(starts: Sequence[int]) -> Predicate:
    """The queries of batch row b see the keys from position ``starts[b]`` on; before it they are padding."""
    begins = torch.tensor([int(start) for start in starts], dtype=torch.int64)
    return lambda q, k: k >= begins.to(k.device)[:, None, None]


def is_there(key_mask: Tensor) -> Predicate:
    """The queries of batch row b see the keys at the positions p with ``key_mask[b, p]``."""
    return lambda q, k: key_mask.to(k.device)[:, k]


def of_each_row(predicates: Sequence[Predicate]) -> Predicate:
    """One of them for each batch row."""
    return lambda q, k: torch.stack([predicate(q, k) for predicate in predicates])


def in_a_visible_block(block_mask: Tensor, block_size: int) -> Predicate:
    """It sees the keys of the blocks that its own block sees; block i is ``i <= p / block_size < i + 1``.

    R. Child, S. Gray, A. Radford and I. Sutskever, "Generating Long Sequences with Sparse Transformers", 2019,
    arXiv:1904.10509, section 5.5: attention in blocks, some of which are not computed.
    """
    return lambda q, k: block_mask[q // block_size, k // block_size]


def predicates(masks: Masks) -> list[Predicate]:
    """The predicates that the mask arguments ask for; a pair is visible where all of them hold."""
    made: list[Predicate] = []
    if masks.get("causal"):
        made.append(is_causal(masks.get("prefix_length") or 0))
    window = masks.get("window_size", (-1, -1))
    if window != (-1, -1):
        near, everywhere = in_window(*window), is_global(masks.get("global_tokens", ()))
        made.append(lambda q, k: near(q, k) | everywhere(q, k))
    boundaries: Any = masks.get("cu_seqlens")
    if boundaries is not None and isinstance(boundaries[0], (list, tuple)):
        made.append(of_each_row([in_one_document(own) for own in boundaries]))
    elif boundaries is not None:
        made.append(in_one_document(boundaries))
    starts, key_mask = masks.get("leftpad_k"), masks.get("key_mask")
    if starts is not None:
        made.append(begins_at(starts))
    if key_mask is not None:
        made.append(is_there(key_mask))
    lengths, pattern = masks.get("seqused_k"), masks.get("block_mask")
    if lengths is not None:
        made.append(is_used(lengths))
    if pattern is not None:
        made.append(in_a_visible_block(pattern, masks["block_size"]))
    return made


def visible(q_positions: Tensor, k_positions: Tensor, **masks: Unpack[Masks]) -> Tensor:
    """Which query sees which key: bool ``[Sq, Sk]``, from integer positions ``[Sq]`` and ``[Sk]`` in any order.

    With ``seqused_k`` the batch rows differ: ``[B, Sq, Sk]``.
    """
    return pairs(q_positions, k_positions, masks)


def pairs(q_positions: Tensor, k_positions: Tensor, masks: Masks) -> Tensor:
    """:func:`visible`, of arguments that may hold others too."""
    q, k = q_positions[:, None], k_positions[None, :]
    seen = torch.ones(len(q_positions), len(k_positions), dtype=torch.bool, device=q.device)
    for predicate in predicates(masks):
        seen = seen & predicate(q, k)
    return seen


def by_batch(seen: Tensor) -> Tensor:
    """What :func:`visible` found, as ``[1 or B, 1, Sq, Sk]``: all heads see the same."""
    return seen[None, None] if seen.dim() == 2 else seen[:, None]
