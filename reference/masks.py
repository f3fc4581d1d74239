"""Masks as predicates on (query position, key position), from global token positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor], Tensor]
"""Function of query positions ``[Sq, 1]`` and key positions ``[1, Sk]`` that returns bool. The result broadcasts to
``[Sq, Sk]``, or to ``[B, Sq, Sk]`` if batch rows differ."""


class MaskOptions(TypedDict, total=False):
    """Mask arguments; a pair is visible if all given masks allow it."""

    causal: bool
    """See :func:`is_causal`."""
    prefix_length: int | None
    """Number of first positions that a causal mask shows to every query; ignored without ``causal``."""
    islands: Sequence[tuple[int, int]] | None
    """See :func:`in_one_island`; a causal mask hides no key from queries of the same island; ignored without it."""
    window_size: tuple[int, int]
    """See :func:`in_window`."""
    global_tokens: Sequence[tuple[int, int]]
    """See :func:`is_global`; these positions are exempt from the window."""
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None
    """See :func:`in_one_document`; one list for all batch rows or one for each."""
    seqused_k: Sequence[int] | None
    """See :func:`within_seqused`."""
    leftpad_k: Sequence[int] | None
    """See :func:`after_leftpad`."""
    key_mask: Tensor | None
    """See :func:`in_key_mask`; bool ``[B, key positions]``."""
    block_mask: Tensor | None
    """See :func:`in_visible_block`; bool ``[query blocks, key blocks]``, with ``block_size``."""
    block_size: int
    """Positions per block."""
    intervals: Sequence[tuple[Tensor, Tensor]] | None
    """See :func:`in_intervals`; pairs ``(lo, hi)`` of integers ``[query positions]``."""


def is_causal(prefix_length: int) -> Predicate:
    """Return the causal mask: a query at position p sees keys up to position p, and all keys of the prefix.

    Causal with prefix: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, arXiv:1910.10683, section 3.2.1.
    """
    return lambda q, k: (k <= q) | (k < prefix_length)


def in_window(left: int, right: int) -> Predicate:
    """Return the sliding window: a query sees ``left`` positions before it and ``right`` after it; -1 for no limit.

    I. Beltagy, M. Peters and A. Cohan, "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150, section
    3.1, here with two widths.
    """
    return lambda q, k: ((left == -1) | (k >= q - left)) & ((right == -1) | (k <= q + right))


def is_global(stretches: Sequence[tuple[int, int]]) -> Predicate:
    """Return Longformer's global attention: the query or the key lies in one of the ranges ``[start, end)``."""

    def inside(positions: Tensor) -> Tensor:
        is_inside = torch.zeros_like(positions, dtype=torch.bool)
        for start, end in stretches:
            is_inside = is_inside | ((positions >= start) & (positions < end))
        return is_inside

    return lambda q, k: inside(q) | inside(k)


def in_one_island(islands: Sequence[tuple[int, int]]) -> Predicate:
    """Return the mask that shows a query the keys of its own range ``begin <= p < end``, such as an image.

    C. Zhou et al., "Transfusion: Predict the Next Token and Diffuse Images with One Multi-Modal Model", 2024,
    arXiv:2408.11039, section 3.
    """

    def inside(x: Tensor, begin: int, end: int) -> Tensor:
        return (x >= begin) & (x < end)

    return lambda q, k: torch.stack([inside(q, *island) & inside(k, *island) for island in islands]).any(0)


def in_one_document(cu_seqlens: Sequence[int]) -> Predicate:
    """Return the document mask: a query sees its own document, ``cu_seqlens[i] <= p < cu_seqlens[i + 1]``."""

    def number(positions: Tensor) -> Tensor:
        return sum((positions >= start).to(torch.int64) for start in cu_seqlens) + torch.zeros_like(positions)

    return lambda q, k: number(q) == number(k)


def within_seqused(lengths: Sequence[int]) -> Predicate:
    """Return the padding mask: queries of batch row b see the keys before position ``lengths[b]``."""
    ends = torch.tensor([int(length) for length in lengths], dtype=torch.int64)
    return lambda q, k: k < ends.to(k.device)[:, None, None]


def after_leftpad(starts: Sequence[int]) -> Predicate:
    """Return the left padding mask: queries of batch row b see the keys from position ``starts[b]``."""
    begins = torch.tensor([int(start) for start in starts], dtype=torch.int64)
    return lambda q, k: k >= begins.to(k.device)[:, None, None]


def in_key_mask(key_mask: Tensor) -> Predicate:
    """Return the key mask: queries of batch row b see the keys at positions p with ``key_mask[b, p]``."""
    return lambda q, k: key_mask.to(k.device)[:, k]


def per_batch_row(predicates: Sequence[Predicate]) -> Predicate:
    """Return the mask that applies one predicate to each batch row."""
    return lambda q, k: torch.stack([predicate(q, k) for predicate in predicates])


def in_visible_block(block_mask: Tensor, block_size: int) -> Predicate:
    """Return the block-sparse mask: a query in block i sees block j of keys if ``block_mask[i, j]``.

    Block i has the positions p with ``p // block_size == i``. R. Child, S. Gray, A. Radford and I.
    Sutskever, "Generating Long Sequences with Sparse Transformers", 2019, arXiv:1904.10509, section 5.5.
    """
    return lambda q, k: block_mask[q // block_size, k // block_size]


def in_intervals(intervals: Sequence[tuple[Tensor, Tensor]]) -> Predicate:
    """Return the mask that shows the keys ``lo[q] <= k < hi[q]`` of each pair to the query at position q."""
    pairs = [(lo.to(torch.int64), hi.to(torch.int64)) for lo, hi in intervals]

    def inside(q: Tensor, k: Tensor) -> Tensor:
        each = [(lo.to(q.device)[q] <= k) & (k < hi.to(q.device)[q]) for lo, hi in pairs]
        return torch.stack(each).any(0)

    return inside


def mask_predicates(masks: MaskOptions) -> list[Predicate]:
    """Return the predicates of the given mask arguments; a pair is visible if all of them hold."""
    result: list[Predicate] = []
    if masks.get("causal"):
        causal, islands = is_causal(masks.get("prefix_length") or 0), masks.get("islands")
        within = in_one_island(islands) if islands else None
        result.append(lambda q, k: causal(q, k) | within(q, k) if within else causal(q, k))
    window = masks.get("window_size", (-1, -1))
    if window != (-1, -1):
        in_reach, global_pair = in_window(*window), is_global(masks.get("global_tokens", ()))
        result.append(lambda q, k: in_reach(q, k) | global_pair(q, k))
    boundaries: Any = masks.get("cu_seqlens")
    if boundaries is not None and isinstance(boundaries[0], (list, tuple)):
        result.append(per_batch_row([in_one_document(cu_seqlens) for cu_seqlens in boundaries]))
    elif boundaries is not None:
        result.append(in_one_document(boundaries))
    starts, key_mask = masks.get("leftpad_k"), masks.get("key_mask")
    if starts is not None:
        result.append(after_leftpad(starts))
    if key_mask is not None:
        result.append(in_key_mask(key_mask))
    lengths, pattern = masks.get("seqused_k"), masks.get("block_mask")
    if lengths is not None:
        result.append(within_seqused(lengths))
    if pattern is not None:
        result.append(in_visible_block(pattern, masks["block_size"]))
    intervals = masks.get("intervals")
    if intervals is not None:
        result.append(in_intervals(intervals))
    return result


def visible(q_positions: Tensor, k_positions: Tensor, **masks: Unpack[MaskOptions]) -> Tensor:
    """Return which query sees which key, bool ``[Sq, Sk]``, or ``[B, Sq, Sk]`` if a mask differs between batch rows.

    ``q_positions [Sq]`` and ``k_positions [Sk]`` are integers in any order.
    """
    return evaluate_masks(q_positions, k_positions, masks)


def evaluate_masks(q_positions: Tensor, k_positions: Tensor, masks: MaskOptions) -> Tensor:
    """Evaluate :func:`visible`; ``masks`` may also contain arguments that are not masks."""
    q, k = q_positions[:, None], k_positions[None, :]
    result = torch.ones(len(q_positions), len(k_positions), dtype=torch.bool, device=q.device)
    for predicate in mask_predicates(masks):
        result = result & predicate(q, k)
    return result


def add_head_dim(seen: Tensor) -> Tensor:
    """Return the result of :func:`visible` with batch and head dims, ``[1 or B, 1, Sq, Sk]``."""
    return seen[None, None] if seen.dim() == 2 else seen[:, None]
