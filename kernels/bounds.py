"""What a kernel knows of a mask: one interval of key indices per query row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(frozen=True, eq=False)
class Bounds:
    """The query at row ``i`` sees the keys at indices ``lo[i] <= j < hi[i]`` of this shard; see :data:`FULL`.

    ``lo`` and ``hi`` are int32 tensors ``[Sq]`` on the device of the queries. Neither ever decreases, and
    ``0 <= lo <= hi <= Sk``; a row that sees nothing has ``lo == hi``. Any mask whose ends never decrease along the
    positions of a shard becomes such a pair, for any layout (causal, sliding window, packed documents, prefix-LM).

    Compared by identity: a ``Bounds`` is made once per (layout, mask, hop) and reused.
    """

    lo: torch.Tensor | None
    hi: torch.Tensor | None
    _transposed: dict[int, Bounds] = field(default_factory=dict, repr=False)

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key; then there are no vectors and the kernels compile the mask away."""
        return self.lo is None

    def transposed(self, seqlen_k: int) -> Bounds:
        """The same mask by key: the key at row ``j`` is seen by the queries ``lo[j] <= i < hi[j]``, ``[Sk]``; cached.

        As neither end decreases, ``i`` sees ``j`` exactly from the first row with ``hi > j`` up to the first row with
        ``lo > j``.
        """
        if self.lo is None or self.hi is None:
            return self
        if seqlen_k not in self._transposed:
            keys = torch.arange(seqlen_k, device=self.lo.device, dtype=torch.int32)
            first, last = (torch.searchsorted(end, keys, right=True, out_int32=True) for end in (self.hi, self.lo))
            self._transposed[seqlen_k] = Bounds(first, last)
        return self._transposed[seqlen_k]

    def to(self, device: torch.device) -> Bounds:
        """These bounds on another device."""
        if self.lo is None or self.hi is None:
            return self
        return Bounds(self.lo.to(device), self.hi.to(device))

    def check(self, rows: int, device: torch.device) -> None:
        """Refuse vectors that do not fit ``rows`` query rows on ``device``: ValueError."""
        for name, end in (("lo", self.lo), ("hi", self.hi)):
            if (end is None) != self.is_full:
                raise ValueError("bounds has only one of lo and hi: pass both vectors, or FULL")
            if end is not None and (end.dtype != torch.int32 or end.shape != (rows,) or end.device != device):
                got = f"{end.dtype} {list(end.shape)} on {end.device}"
                raise ValueError(f"bounds.{name} is {got}: it must be int32 [{rows}] on {device}, one per query row")
            if end is not None and not end.is_contiguous():
                raise ValueError(f"bounds.{name} has stride {end.stride()}: it must be contiguous")


FULL = Bounds(None, None)
"""Every query sees every key."""


class TileRange(NamedTuple):
    """The key tiles that a block of query rows visits, as key indices that are multiples of the tile.

    ``[start, full_start)`` and ``[full_end, end)`` need the mask, ``[full_start, full_end)`` is seen by every row.
    """

    start: int
    full_start: int
    full_end: int
    end: int


def tile_range(lo_first: int, lo_last: int, hi_first: int, hi_last: int, block: int) -> TileRange:
    """The range for rows whose bounds begin with (lo_first, hi_first) and end with (lo_last, hi_last).

    The jit mirror is ``tiles.tile_range``. Where no tile is seen whole, all are in the tail.
    """
    start = lo_first // block * block
    end = -(-hi_last // block) * block if hi_last > lo_first else start
    full_start = max(-(-lo_last // block) * block, start)
    full_end = hi_first // block * block
    if full_end <= full_start:
        full_start = full_end = start
    return TileRange(start, full_start, full_end, end)
