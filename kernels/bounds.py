"""What a kernel knows of a mask: one interval of key indices per query row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

import torch

from .checks import check_tensor, is_real
from .shared import SharedCache


class BlockRanges(NamedTuple):
    """The ranges of keys that blocks of queries see; see :class:`BlockSparseIndex`."""

    offsets: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockSparseIndex:
    """A block-sparse pattern: block i of ``block`` queries sees block j of ``block`` keys where ``visible[i, j]``.

    ``visible`` is bool ``[query blocks, key blocks]`` on the CPU; the last block of either side may be shorter. As the
    kernels read it: query block i sees the keys ``begins[r] <= j < ends[r]`` for ``offsets[i] <= r < offsets[i + 1]``,
    ascending and disjoint ranges; int32, on ``device``.
    """

    visible: torch.Tensor
    block: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _ranges: SharedCache[BlockRanges] = field(default_factory=SharedCache, init=False, repr=False)

    def __post_init__(self) -> None:
        """ValueError: another dtype or shape, or no positive block."""
        check_tensor("visible", self.visible, may_be_meta=True)
        if self.visible.dtype != torch.bool or self.visible.dim() != 2:
            got = f"{self.visible.dtype} {list(self.visible.shape)}"
            raise ValueError(f"visible is {got}: it must be bool [query blocks, key blocks]")
        if not is_real(self.block, Integral) or self.block < 1:
            raise ValueError(f"block is {self.block!r}: it must be a whole number of at least 1")

    @property
    def ranges(self) -> BlockRanges:
        """The visible ranges, for work on the current stream; made once."""
        return self._ranges.get(self.device, self._made_ranges, tuple)

    @property
    def offsets(self) -> torch.Tensor:
        """``[query blocks + 1]``."""
        return self.ranges.offsets

    @property
    def begins(self) -> torch.Tensor:
        """Of all ranges, one query block after the other."""
        return self.ranges.begins

    @property
    def ends(self) -> torch.Tensor:
        """Of all ranges; the last one may be past the last key."""
        return self.ranges.ends

    @cached_property
    def transposed(self) -> BlockSparseIndex:
        """By key: which ranges of queries each block of keys is seen by."""
        return BlockSparseIndex(self.visible.T, self.block, self.device)

    @cached_property
    def _steps(self) -> torch.Tensor:
        """Along the keys: 1 where a range begins, -1 one past its end."""
        return torch.nn.functional.pad(self.visible.to(torch.int8), (1, 1)).diff(dim=1)

    def _made_ranges(self) -> BlockRanges:
        counts = (self._steps == 1).sum(1)
        edges = ((self._steps == step).nonzero()[:, 1] * self.block for step in (1, -1))
        made = (torch.cat([counts.new_zeros(1), counts.cumsum(0)]), *edges)
        return BlockRanges(*(x.to(self.device, torch.int32) for x in made))


@dataclass(frozen=True, eq=False)
class Bounds:
    """The query at row ``i`` sees the keys at indices ``lo[i] <= j < hi[i]`` of this shard; see :data:`FULL`.

    ``lo`` and ``hi`` are int32 tensors ``[Sq]`` on the device of the queries. Neither ever decreases, and
    ``0 <= lo <= hi <= Sk``; a row that sees nothing has ``lo == hi``. Any mask whose ends never decrease along the
    positions of a shard becomes such a pair, for any layout (causal, sliding window, packed documents, prefix-LM).
    Both None: all keys. Two things narrow that further: ``seqused_k``, int32 ``[B]``, how many of the shard's keys each
    batch row has, and ``block_sparse``, which blocks of queries see which blocks of keys.

    Compared by identity: a ``Bounds`` is made once per (layout, mask, hop) and reused.
    """

    lo: torch.Tensor | None
    hi: torch.Tensor | None
    seqused_k: torch.Tensor | None = None
    block_sparse: BlockSparseIndex | None = None
    _transposed: SharedCache[Bounds] = field(default_factory=SharedCache, init=False, repr=False)
    _add_orders: SharedCache[torch.Tensor] = field(default_factory=SharedCache, init=False, repr=False)

    @property
    def is_full(self) -> bool:
        """Whether there are no vectors; then the kernels compile the mask away."""
        return self.lo is None

    @property
    def block(self) -> int | None:
        """Positions per block, where there are blocks."""
        return None if self.block_sparse is None else self.block_sparse.block

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key; reads the vectors, so that it is for the host's."""
        intervals = self.lo is not None and self.hi is not None and not bool((self.lo < self.hi).any())
        seqused_k = self.seqused_k is not None and not bool((self.seqused_k > 0).any())
        return intervals or seqused_k or (self.block_sparse is not None and not bool(self.block_sparse.visible.any()))

    def transposed(self, seqlen_k: int) -> Bounds:
        """The same mask by key: the key at row ``j`` is seen by the queries ``lo[j] <= i < hi[j]``, ``[Sk]``; cached.

        As neither end decreases, ``i`` sees ``j`` exactly from the first row with ``hi > j`` up to the first row with
        ``lo > j``. ``seqused_k`` stays: it is then about rows.
        """
        if self.lo is None and self.block_sparse is None:
            return self
        return self._transposed.get(seqlen_k, lambda: self._made_transposed(seqlen_k), lambda made: (made.lo, made.hi))

    def _made_transposed(self, seqlen_k: int) -> Bounds:
        first = last = None
        if self.lo is not None and self.hi is not None:
            keys = torch.arange(seqlen_k, device=self.lo.device, dtype=torch.int32)
            first, last = (torch.searchsorted(end, keys, right=True, out_int32=True) for end in (self.hi, self.lo))
        by_key = self.block_sparse and self.block_sparse.transposed
        return Bounds(first, last, self.seqused_k, by_key)

    def to(self, device: torch.device) -> Bounds:
        """These bounds on another device."""
        lo, hi, seqused_k = (None if x is None else x.to(device) for x in (self.lo, self.hi, self.seqused_k))
        block_sparse = self.block_sparse and replace(self.block_sparse, device=device)
        return self if (lo, hi, seqused_k, block_sparse) == (None,) * 4 else Bounds(lo, hi, seqused_k, block_sparse)

    def check(self, batch: int, rows: int, columns: int, device: torch.device) -> None:
        """Refuse what does not fit ``rows`` queries and ``columns`` keys, ``batch`` rows, on ``device``: ValueError."""
        if (self.lo is None) != (self.hi is None):
            raise ValueError("bounds has only one of lo and hi: pass both vectors, or FULL")
        vectors = {"lo": (rows, "query row"), "hi": (rows, "query row"), "seqused_k": (batch, "batch row")}
        for name, (length, what) in vectors.items():
            end = getattr(self, name)
            if end is not None:
                check_tensor(f"bounds.{name}", end, may_be_meta=True)
            if end is not None and (end.dtype != torch.int32 or end.shape != (length,) or end.device != device):
                got = f"{end.dtype} {list(end.shape)} on {end.device}"
                raise ValueError(f"bounds.{name} is {got}: it must be int32 [{length}] on {device}, one per {what}")
            if end is not None and not end.is_contiguous():
                raise ValueError(f"bounds.{name} has stride {end.stride()}: it must be contiguous")
        if self.block_sparse is not None:
            self._check_block_sparse(self.block_sparse, rows, columns, device)

    def _check_block_sparse(self, index: BlockSparseIndex, rows: int, columns: int, device: torch.device) -> None:
        wanted = tuple(-(-length // index.block) for length in (rows, columns))
        if tuple(index.visible.shape) != wanted:
            raise ValueError(
                f"bounds.block_sparse is {list(index.visible.shape)} blocks: for {rows} queries and {columns} keys in "
                f"blocks of {index.block} it must be {list(wanted)}"
            )
        if index.device != device:
            raise ValueError(f"bounds.block_sparse is for {index.device}: it must be for {device}")


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
