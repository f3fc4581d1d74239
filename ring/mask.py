"""Who sees whom, as intervals: the query at position p sees the keys at positions in ``[lo(p), hi(p))``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels import FULL, Bounds

END = torch.iinfo(torch.int64).max
"""Past every position."""


@dataclass(frozen=True)
class Mask:
    """What a query may see; each field is an interval of positions, and a query sees what lies in all of them.

    Neither end of any of them decreases with the position, which is what makes a mask a :class:`Bounds` for every
    layout. Nothing set: every key.
    """

    causal: bool = False

    def interval(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(lo, hi)``: the query at ``positions[i]`` sees keys at positions ``lo[i] <= p < hi[i]``; int64."""
        lo, hi = torch.zeros_like(positions), torch.full_like(positions, END)
        if self.causal:
            hi = torch.minimum(hi, positions + 1)
        return lo, hi


def bounds(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> Bounds:
    """``mask`` between one shard of queries and one of keys, as an interval of key indices per query row.

    Args:
        mask: what a query may see.
        q_positions: positions of the queries, ascending, int64 ``[Sq]``.
        k_positions: positions of the keys, ascending, int64 ``[Sk]``.

    Returns:
        FULL exactly where every query sees every key and there are both; else int32 vectors ``[Sq]`` whose ends never
        decrease. A row that sees nothing has ``lo == hi`` inside what its neighbours see, so that no tile gets wider.
    """
    lo, hi = _indices(mask, q_positions, k_positions)
    rows, keys = len(lo), len(k_positions)
    if rows and keys and lo[-1] == 0 and hi[0] == keys:  # neither end decreases: these are the extremes
        return FULL
    lo, hi = _with_empty_rows(lo, hi)
    return Bounds(lo.to(torch.int32), hi.to(torch.int32))


def visible_pairs(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> int:
    """How many (query, key) pairs of two shards the mask lets through."""
    lo, hi = _indices(mask, q_positions, k_positions)
    return int((hi - lo).clamp(min=0).sum())


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
