"""Who sees whom, as intervals: the query at position p sees the keys at positions in ``[lo(p), hi(p))``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...kernels import FULL, Bounds
from .block_mask import BlockMask
from .documents import Documents

END = torch.iinfo(torch.int64).max
"""Past every position."""

UNLIMITED = -1
"""A side of a window without an end."""

Stretch = tuple[int, int]
"""Positions ``[start, end)``."""


@dataclass(frozen=True)
class Mask:
    """What a query may see; each field is an interval of positions, and a query sees what lies in all of them.

    Neither end of any of them decreases with the position, which is what makes a mask a :class:`Bounds` for every
    layout. Two things are not intervals: a pattern of blocks, inside which the intervals apply, and tokens that see
    all and are seen by all, which make the mask a union of a few disjoint ones, its :attr:`parts`. Nothing set: every
    key.
    """

    causal: bool = False
    """Up to the query's own position."""
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    """From ``left`` positions before the query to ``right`` after it, both included; -1: no end on that side."""
    documents: Documents | None = None
    """The document that the query's position lies in."""
    prefix: int = 0
    """Positions at the start that a causal mask hides from nobody (prefix-LM)."""
    used: tuple[int, ...] | None = None
    """Per batch row the positions that have keys; those from there on are padding."""
    blocks: BlockMask | None = None
    """Which blocks of queries see which blocks of keys."""
    global_tokens: tuple[Stretch, ...] = ()
    """Tokens that the window neither hides nor blinds (Longformer)."""
    queries: Stretch = (0, END)
    """Of a part: the queries that it is about; the others see nothing."""
    keys: Stretch = (0, END)
    """Of a part: the keys that it is about."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Disjoint masks without global tokens, which together let the same pairs through."""
        if not self.global_tokens:
            return (self,)
        plain = replace(self, global_tokens=())
        wide = replace(plain, window=(UNLIMITED, UNLIMITED))
        edges = [0, *(edge for stretch in self.global_tokens for edge in stretch), END]
        gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
        # one stretch of queries each: between two of them there would be rows that see nothing, and ends that decrease
        return (
            *(replace(wide, keys=keys) for keys in self.global_tokens),
            *(replace(wide, queries=queries, keys=keys) for queries in self.global_tokens for keys in gaps),
            *(replace(plain, queries=queries, keys=keys) for queries in gaps for keys in gaps),
        )

    @property
    def rows(self) -> tuple[Mask, ...]:
        """One mask per batch row, where they differ."""
        return (self,) if self.used is None else tuple(replace(self, used=(used,)) for used in self.used)

    def interval(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(lo, hi)``: the query at ``positions[i]`` sees keys at positions ``lo[i] <= p < hi[i]``; int64.

        Of the queries that see any; of all batch rows, the one with the most keys. Without the pattern of blocks.
        """
        lo, hi = (torch.full_like(positions, end) for end in self.keys)
        if self.causal:
            hi = torch.minimum(hi, (positions + 1).clamp(min=self.prefix))
        left, right = self.window
        if left != UNLIMITED:
            lo = torch.maximum(lo, positions - left)
        if right != UNLIMITED:
            hi = torch.minimum(hi, positions + right + 1)
        if self.documents is not None:
            start, end = self.documents.around(positions)
            lo, hi = torch.maximum(lo, start), torch.minimum(hi, end)
        if self.used is not None:
            hi = hi.clamp(max=max(self.used, default=0))
        if self.queries != (0, END):
            first, past = self.queries
            hi = torch.where((positions >= first) & (positions < past), hi, 0)
        return lo, hi


def bounds(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> Bounds:
    """``mask``, one part, between one shard of queries and one of keys: an interval of key indices per query row.

    Args:
        mask: what a query may see; its blocks are left to whoever knows the shards.
        q_positions: positions of the queries, ascending, int64 ``[Sq]``.
        k_positions: positions of the keys, ascending, int64 ``[Sk]``.

    Returns:
        FULL exactly where every query sees every key and there are both; else int32 vectors ``[Sq]`` whose ends never
        decrease. A row that sees nothing has ``lo == hi`` inside what its neighbours see, so that no tile gets wider.
    """
    lo, hi = _indices(mask, q_positions, k_positions)
    rows, keys = len(lo), len(k_positions)
    used = _used(mask, k_positions)
    if rows and keys and int(lo.max()) == 0 and int(hi.min()) == keys:
        return FULL if used is None else Bounds(None, None, used)
    lo, hi = _with_empty_rows(lo, hi)
    return Bounds(lo.to(torch.int32), hi.to(torch.int32), used)


def visible_pairs(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> int:
    """How many (query, key) pairs of two shards the mask lets through.

    Of one batch row, where all are alike; where ``mask.used`` tells them apart, of all those that it lists together.
    """
    return sum(_pairs(part, q_positions, k_positions) for row in mask.rows for part in row.parts)


def _pairs(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> int:
    lo, hi = _indices(mask, q_positions, k_positions)
    seen = lo < hi
    lo, hi, queries = lo[seen], hi[seen], q_positions[seen]
    if mask.blocks is None:
        return int((hi - lo).sum())
    return _pairs_in_blocks(mask.blocks, queries, k_positions, lo, hi)


def _pairs_in_blocks(
    blocks: BlockMask, queries: torch.Tensor, keys: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> int:
    """Those of the pairs inside the intervals, none of them empty, that lie in a visible block."""
    rows, row = torch.unique_consecutive(queries // blocks.block, return_inverse=True)
    column, visible = keys // blocks.block, blocks.visible[rows]
    counts = column.bincount(minlength=visible.shape[1])
    starts = counts.cumsum(0) - counts
    before = (visible * counts).cumsum(1) - visible * counts  # visible keys in front of each block

    def up_to(last: torch.Tensor) -> torch.Tensor:
        """Visible keys up to a key and with it."""
        block = column[last]
        return before[row, block] + visible[row, block] * (last + 1 - starts[block])

    return int((up_to(hi - 1) - up_to(lo) + visible[row, column[lo]]).sum())


def _used(mask: Mask, k_positions: torch.Tensor) -> torch.Tensor | None:
    """Keys of a shard that each batch row has, int32 ``[B]``; None: all."""
    if mask.used is None:
        return None
    found = torch.searchsorted(k_positions, torch.tensor(mask.used))
    return None if bool((found == len(k_positions)).all()) else found.to(torch.int32)


def _indices(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The interval as indices into the keys; ``lo >= hi`` where a row sees nothing."""
    lo, hi = mask.interval(q_positions)
    return torch.searchsorted(k_positions, lo), torch.searchsorted(k_positions, hi)


def _with_empty_rows(lo: torch.Tensor, hi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same intervals; a row that sees nothing starts and ends where the next row that sees something starts, or
    where the last one ends. Neighbours of an empty row never overlap, so that both ends stay in order."""
    seen = lo < hi
    if not seen.any():
        return torch.zeros_like(lo), torch.zeros_like(hi)
    after = torch.where(seen, lo, hi[seen][-1]).flip(0).cummin(0).values.flip(0)
    return torch.where(seen, lo, after), torch.where(seen, hi, after)
