"""Masks as the kernels read them: one interval of key indices per query row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor, is_real
from .device.tiles import TileRange
from .shared_cache import SharedCache


class BlockRanges(NamedTuple):
    """Visible key ranges of all query blocks, in the format of :class:`BlockSparseIndex`."""

    offsets: Tensor
    begins: Tensor
    ends: Tensor


@dataclass(frozen=True, eq=False)
class BlockSparseIndex:
    """Block-sparse mask: the queries of block i see the keys of block j if ``visible[i, j]`` is True.

    ``visible`` is bool ``[query blocks, key blocks]`` on the CPU. A block has ``block`` positions; the last one may be
    shorter. The kernels read int32 ranges on ``device``, ascending and disjoint. Query block i sees the keys
    ``begins[r] <= j < ends[r]`` for all ``offsets[i] <= r < offsets[i + 1]``.
    """

    visible: Tensor
    block: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _ranges: SharedCache[BlockRanges] = field(default_factory=SharedCache, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError if ``visible`` or ``block`` does not fit."""
        check_tensor("visible", self.visible, may_be_meta=True)
        if self.visible.dtype != torch.bool or self.visible.dim() != 2:
            got = f"a {self.visible.dtype} tensor of shape {list(self.visible.shape)}"
            raise ValueError(f"visible is {got}: it must be a bool tensor of shape [query blocks, key blocks]")
        if not is_real(self.block, Integral) or self.block < 1:
            raise ValueError(f"block is {self.block!r}: it must be a positive integer")

    @property
    def ranges(self) -> BlockRanges:
        """Return the visible ranges for work on the current stream; built once."""
        return self._ranges.get(self.device, self._build_ranges, tuple)

    @property
    def offsets(self) -> Tensor:
        """Index of each query block's first range, ``[query blocks + 1]``."""
        return self.ranges.offsets

    @property
    def begins(self) -> Tensor:
        """First key of every range, one query block after another."""
        return self.ranges.begins

    @property
    def ends(self) -> Tensor:
        """End of every range, which may exceed the number of keys."""
        return self.ranges.ends

    @cached_property
    def transposed(self) -> BlockSparseIndex:
        """Index by key: the ranges of queries that see each block of keys."""
        return BlockSparseIndex(self.visible.T, self.block, self.device)

    @cached_property
    def _range_edges(self) -> Tensor:
        """Marks along the keys: 1 at the first block of a range, -1 one past its last block."""
        return torch.nn.functional.pad(self.visible.to(torch.int8), (1, 1)).diff(dim=1)

    def _build_ranges(self) -> BlockRanges:
        counts = (self._range_edges == 1).sum(1)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        begins, ends = ((self._range_edges == mark).nonzero()[:, 1] * self.block for mark in (1, -1))
        return BlockRanges(*(x.to(self.device, torch.int32) for x in (offsets, begins, ends)))


@dataclass(frozen=True, eq=False)
class Bounds:
    """Mask of one hop, as one interval of keys per query.

    The query at row ``i`` sees the keys at indices ``lo[i] <= j < hi[i]`` of the shard::

        key      0 1 2 3 4 5 6 7
        query 0  # # . . . . . .     lo = 0, hi = 2
        query 1  . # # # . . . .     lo = 1, hi = 4
        query 2  . # # # # # . .     lo = 1, hi = 6

    ``lo`` and ``hi`` are int32 ``[Sq]`` on the device of the queries; if both are None, every query sees every key.
    Neither vector ever decreases, and ``0 <= lo <= hi <= Sk``. A row that sees no key has ``lo == hi``. Causal masks,
    sliding windows, packed documents and prefix-LM have this form in any layout.

    ``seqused_k``, int32 ``[B]``, also limits each batch row to its first keys of the shard. ``block_sparse`` also
    limits blocks of queries to blocks of keys.

    A ``Bounds`` is compared by identity. Create one per (layout, mask, hop) and reuse it, because it caches tensors.
    """

    lo: Tensor | None
    hi: Tensor | None
    seqused_k: Tensor | None = None
    block_sparse: BlockSparseIndex | None = None
    _transposed: SharedCache[Bounds] = field(default_factory=SharedCache, init=False, repr=False)
    _add_orders: SharedCache[Tensor] = field(default_factory=SharedCache, init=False, repr=False)

    @property
    def is_full(self) -> bool:
        """True if ``lo`` and ``hi`` are None. Kernels are then compiled without the interval mask."""
        return self.lo is None

    @property
    def block(self) -> int | None:
        """Positions per block of ``block_sparse``, or None."""
        return None if self.block_sparse is None else self.block_sparse.block

    @property
    def is_empty(self) -> bool:
        """True if no query sees any key; reads the values, so call it only for CPU tensors."""
        intervals = self.lo is not None and self.hi is not None and not bool((self.lo < self.hi).any())
        seqused_k = self.seqused_k is not None and not bool((self.seqused_k > 0).any())
        return intervals or seqused_k or (self.block_sparse is not None and not bool(self.block_sparse.visible.any()))

    def transposed(self, seqlen_k: int) -> Bounds:
        """Return the mask by key, cached: the queries ``lo[j] <= i < hi[j]`` see key ``j``, with vectors ``[Sk]``.

        ``lo`` and ``hi`` never decrease, so the rows that see key ``j`` are consecutive. They begin at the first row
        with ``hi > j`` and end before the first row with ``lo > j``. In the result ``seqused_k`` limits rows.
        """
        if self.lo is None and self.block_sparse is None:
            return self
        return self._transposed.get(
            seqlen_k, lambda: self._build_transposed(seqlen_k), lambda by_key: (by_key.lo, by_key.hi)
        )

    def _build_transposed(self, seqlen_k: int) -> Bounds:
        first = last = None
        if self.lo is not None and self.hi is not None:
            keys = torch.arange(seqlen_k, device=self.lo.device, dtype=torch.int32)
            first, last = (torch.searchsorted(end, keys, right=True, out_int32=True) for end in (self.hi, self.lo))
        by_key = self.block_sparse and self.block_sparse.transposed
        return Bounds(first, last, self.seqused_k, by_key)

    def to(self, device: torch.device) -> Bounds:
        """Return the bounds on another device."""
        lo, hi, seqused_k = (None if x is None else x.to(device) for x in (self.lo, self.hi, self.seqused_k))
        block_sparse = self.block_sparse and replace(self.block_sparse, device=device)
        return self if (lo, hi, seqused_k, block_sparse) == (None,) * 4 else Bounds(lo, hi, seqused_k, block_sparse)

    def check(self, batch: int, rows: int, columns: int, device: torch.device) -> None:
        """Raise ValueError if the bounds do not fit ``batch`` rows of ``rows`` queries and ``columns`` keys."""
        if (self.lo is None) != (self.hi is None):
            raise ValueError("bounds has only one of lo and hi: pass both vectors, or FULL")
        vectors = {"lo": (rows, "query row"), "hi": (rows, "query row"), "seqused_k": (batch, "batch row")}
        for name, (length, unit) in vectors.items():
            vector = getattr(self, name)
            if vector is None:
                continue
            check_tensor(f"bounds.{name}", vector, may_be_meta=True)
            if vector.dtype != torch.int32 or vector.shape != (length,) or vector.device != device:
                got = f"a {vector.dtype} tensor of shape {list(vector.shape)} on {vector.device}"
                raise ValueError(
                    f"bounds.{name} is {got}: it must be int32 of shape [{length}] on {device}, one element per {unit}"
                )
            if not vector.is_contiguous():
                raise ValueError(f"bounds.{name} has stride {vector.stride()}: it must be contiguous")
        if self.block_sparse is not None:
            self._check_block_sparse(self.block_sparse, rows, columns, device)

    def _check_block_sparse(self, index: BlockSparseIndex, rows: int, columns: int, device: torch.device) -> None:
        blocks = [-(-length // index.block) for length in (rows, columns)]
        if list(index.visible.shape) != blocks:
            raise ValueError(
                f"bounds.block_sparse has {list(index.visible.shape)} blocks: for {rows} queries and {columns} keys in "
                f"blocks of {index.block} positions it must have {blocks}"
            )
        if index.device != device:
            raise ValueError(f"bounds.block_sparse is on {index.device}: it must be on {device}")


FULL = Bounds(None, None)
"""Every query sees every key."""


def tile_range(lo_first: int, lo_last: int, hi_first: int, hi_last: int, block: int) -> TileRange:
    """Return the tiles of ``block`` keys that a block of rows visits, from the bounds of its first and its last row.

    If no tile is visible to all rows, all tiles are in the tail. The jit mirror is ``device.tiles.load_tile_range``.
    """
    start = lo_first // block * block
    end = -(-hi_last // block) * block if hi_last > lo_first else start
    full_start = max(-(-lo_last // block) * block, start)
    full_end = hi_first // block * block
    if full_end <= full_start:
        full_start = full_end = start
    return TileRange(start, full_start, full_end, end)
