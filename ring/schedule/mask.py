"""Masks as intervals of positions, and block-sparse patterns.

A query sees the keys in ``[lo, hi)``. Neither end decreases with the query's position, so one interval per row is
enough for every layout. Example: causal, ``window_size=(2, -1)``, documents ``[0, 5, 8]``::

    query  keys 0 1 2 3 4 5 6 7   [lo, hi)
      0         # . . . . . . .   [0, 1)
      1         # # . . . . . .   [0, 2)
      2         # # # . . . . .   [0, 3)
      3         . # # # . . . .   [1, 4)   the window hides key 0
      4         . . # # # . . .   [2, 5)
      5         . . . . . # . .   [5, 6)   the next document starts
      6         . . . . . # # .   [5, 7)
      7         . . . . . # # #   [5, 8)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch

from ...kernels import FULL, Bounds
from ...kernels.checks import check_not_dtensor
from ...validators import integer_between, short_repr
from .intervals import Intervals, fill_empty_rows
from .layout import POSITIONS, Documents, Layout, check_at_least

SEED = integer_between(-(1 << 63), (1 << 64) - 1)  # range of torch.Generator.manual_seed
MAX_BLOCKS = 1 << 15  # most blocks of queries and of keys in a pattern built here; the table then has 1 GiB


class BlockMask:
    """Block-sparse mask: a query sees a key if the query's block sees the key's block. Immutable and hashable.

    Args:
        visible: bool ``[query blocks, key blocks]`` on the CPU. Block i holds the positions
            ``[i * block, (i + 1) * block)``; the last block may be shorter.
        block: number of positions per block.

    Raises:
        ValueError: ``visible`` is not such a tensor, or ``block`` is below 1.
    """

    __slots__ = ("__dict__", "block", "visible")

    def __init__(self, visible: torch.Tensor, block: int) -> None:
        check_not_dtensor("block_mask", visible)
        if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool or visible.dim() != 2:
            got = f"{visible.dtype} {list(visible.shape)}" if isinstance(visible, torch.Tensor) else repr(visible)
            raise ValueError(f"block_mask is {got}: it must be a bool tensor of shape [query blocks, key blocks]")
        if visible.device.type != "cpu":
            raise ValueError(
                f"block_mask is on {visible.device}: it must be on the CPU, because schedules are built on the host"
            )
        self.visible = visible.clone()
        self.block = check_at_least(1, "block", block)

    def shard_blocks(self, layout: Layout, rank: int, kv_layout: Layout, shard: int) -> torch.Tensor:
        """Return which query blocks of ``rank`` see which key blocks of ``shard``, bool ``[query blocks, key blocks]``.

        Raises:
            ValueError: a span of either shard begins or ends inside a block.
        """
        rows = self._blocks("layout", layout, rank, len(self.visible))
        return self.visible[rows][:, self._blocks("kv_layout", kv_layout, shard, self.visible.shape[1])]

    def check_layout(self, name: str, layout: Layout) -> None:
        """Raise ValueError if a span of the layout begins or ends inside a block."""
        for rank in range(layout.world):
            self._blocks(name, layout, rank, -(-layout.reach // self.block))

    def _blocks(self, name: str, layout: Layout, rank: int, count: int) -> torch.Tensor:
        """Return the indices of the blocks of one shard, ascending; ``count`` is the number of blocks of the mask."""
        runs = []
        for start, length, step in layout.spans(rank):
            end = start + length
            if step != 1 or start % self.block or (end % self.block and end != layout.reach):
                raise ValueError(
                    f"{name} gives rank {rank} the span {(start, length, step)}: with block_mask every span must be a "
                    f"contiguous run of whole blocks of {self.block} positions"
                )
            runs.append(torch.arange(start // self.block, -(-end // self.block)))
        blocks = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
        if len(blocks) and int(blocks[-1]) >= count:
            raise ValueError(
                f"block_mask has {count} blocks of {self.block} positions, but {name} has {layout.reach} positions"
            )
        return blocks

    @cached_property
    def _digest(self) -> str:
        return sha256(self.visible.numpy().tobytes()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash((self._digest, self.block))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMask) and self.block == other.block and self.visible.equal(other.visible)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockMask, (self.visible, self.block)

    def __repr__(self) -> str:
        rows, columns = self.visible.shape
        seen = int(self.visible.sum())
        return f"<{rows} x {columns} blocks of {self.block} positions, {seen} visible, {self._digest}>"


def strided(seqlen: int, block: int, *, stride: int) -> BlockMask:
    """Build Sparse Transformer's strided pattern: the last ``stride`` positions and every ``stride``-th before them.

    R. Child et al., arXiv:1904.10509, section 4.3, with both heads in one mask. With l = ``stride``, query i sees the
    keys j <= i with ``i - j <= l`` or ``(i - j) mod l = 0``. A block is visible if any of its pairs is. Use it with
    ``causal=True``; otherwise a query sees all of its own block.

    Args:
        seqlen: number of positions of queries and of keys.
        block: number of positions per block.
        stride: a multiple of ``block``.

    Raises:
        ValueError: ``seqlen`` is negative, there are more than 2^15 blocks, or ``stride`` is not a positive multiple of
            ``block``.
    """
    queries, keys = _grid(seqlen, block)
    step = _multiple("stride", stride, block)
    distance = queries - keys
    return BlockMask((distance >= 0) & ((distance < step) | (distance % step == 0)), block)


def fixed(seqlen: int, block: int, *, stride: int, summary: int) -> BlockMask:
    """Build Sparse Transformer's fixed pattern: local runs of ``stride`` positions, and the end of every earlier run.

    R. Child et al., arXiv:1904.10509, section 4.3, with both heads in one mask. With l = ``stride`` and c =
    ``summary``, query i sees the keys j <= i with ``floor(j / l) = floor(i / l)`` or ``j mod l >= l - c``. Blocks as in
    :func:`strided`.

    Args:
        seqlen: number of positions of queries and of keys.
        block: number of positions per block.
        stride: length of a run, a multiple of ``block``.
        summary: positions at the end of a run that all later queries see, a multiple of ``block``, at most ``stride``.

    Raises:
        ValueError: ``seqlen`` is negative, there are more than 2^15 blocks, or ``stride`` or ``summary`` is out of
            range.
    """
    queries, keys = _grid(seqlen, block)
    step, last = _multiple("stride", stride, block), _multiple("summary", summary, block)
    if last > step:
        raise ValueError(f"summary is {summary}: it must be at most {stride}, the stride")
    same_run = queries // step == keys // step
    return BlockMask((keys <= queries) & (same_run | (keys % step >= step - last)), block)


def bigbird(seqlen: int, block: int, *, window: int, global_: int, random: int, seed: int = 0) -> BlockMask:
    """Build BigBird's pattern of window, global and random blocks.

    A query block sees the ``window`` blocks around it, the first ``global_`` blocks, and ``random`` more blocks. The
    global blocks see all blocks.

    M. Zaheer et al., arXiv:2007.14062, section 2 and appendix D, in the blocked form of the internal transformer
    construction: the global tokens are tokens of the sequence. Random blocks are drawn from those that are not visible
    already. The same seed and version of torch give the same blocks.

    Args:
        seqlen: number of positions of queries and of keys.
        block: number of positions per block.
        window: number of blocks, odd: the query's own block and equally many on either side.
        global_: number of global blocks at the start.
        random: number of random blocks per query block.
        seed: seed of the generator.

    Raises:
        ValueError: a length or count is negative, there are more than 2^15 blocks, ``seed`` is out of torch's range, or
            ``window`` is even or not positive.
    """
    queries, keys = _grid(seqlen, block)
    window, global_ = check_at_least(1, "window", window), check_at_least(0, "global_", global_)
    random = check_at_least(0, "random", random)
    if window % 2 == 0:
        raise ValueError(f"window is {window}: it must be odd, to cover the query's block and as many on either side")
    seen = ((queries - keys).abs() <= window // 2) | (queries < global_) | (keys < global_)
    generator = torch.Generator().manual_seed(SEED.check("seed", seed))
    for row in seen:
        hidden = (~row).nonzero().squeeze(1)
        row[hidden[torch.randperm(len(hidden), generator=generator)[:random]]] = True
    return BlockMask(seen, block)


@dataclass(frozen=True)
class Longformer:
    """Longformer's mask, a window and global tokens; see :func:`longformer`."""

    window: tuple[int, int]
    global_tokens: tuple[tuple[int, int], ...]


def longformer(window: int, global_tokens: Iterable[tuple[int, int]]) -> Longformer:
    """Build Longformer's mask for ``block_mask`` of ``ring_attention``: a window and global tokens.

    I. Beltagy et al., arXiv:2004.05150, section 3.1. The mask is computed as a few disjoint interval masks, one after
    the other.

    Args:
        window: number of positions that a query sees around it, half on either side; even.
        global_tokens: ascending ranges ``(start, end)`` of positions that see all positions and are seen by all.

    Raises:
        ValueError: ``window`` is odd or negative, or the ranges are empty, overlap or descend.
    """
    if check_at_least(0, "window", window) % 2:
        raise ValueError(f"window is {window}: it must be even, because half of it is on either side")
    return Longformer((window // 2, window // 2), read_ranges("global_tokens", global_tokens))


def read_ranges(name: str, given: Iterable[tuple[int, int]] | torch.Tensor) -> tuple[PositionRange, ...]:
    """Return the argument ``name`` as ranges of positions.

    Raises:
        ValueError: it is no list of pairs of whole numbers, or the ranges are empty, overlap or descend.
    """
    check_not_dtensor(name, given)
    try:
        pairs = given.tolist() if isinstance(given, torch.Tensor) and given.device.type == "cpu" else given
        ranges = tuple((POSITIONS.convert(start), POSITIONS.convert(end)) for start, end in pairs)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {short_repr(given)}: it must be a list of ranges (start, end)") from None
    for number, (start, end) in enumerate(ranges):
        if not (ranges[number - 1][1] if number else 0) <= start < end:
            raise ValueError(
                f"{name}[{number}] is {(start, end)}: ranges must ascend, without overlap, and must not be empty"
            )
    return ranges


def _grid(seqlen: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the query blocks as a column and of the key blocks as a row."""
    blocks = -(-check_at_least(0, "seqlen", seqlen) // check_at_least(1, "block", block))
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"block is {block}: {seqlen:,} positions have {blocks:,} blocks, and the table would need {blocks**2:,} "
            f"bytes, more than 2^30. Pass a block of at least {-(-seqlen // MAX_BLOCKS):,}."
        )
    # int32, because a pattern of a million positions has 10^8 blocks, and each is computed from these several times
    count = torch.arange(blocks, dtype=torch.int32)
    return count[:, None], count[None, :]


def _multiple(name: str, value: int, block: int) -> int:
    """Return ``value`` as a number of blocks, or raise ValueError if it is not a positive multiple of ``block``."""
    if check_at_least(1, name, value) % block:
        raise ValueError(f"{name} is {value}: it must be a positive multiple of {block}, the block size")
    return value // block


END = torch.iinfo(torch.int64).max  # end of an interval without a limit, past every position

UNLIMITED = -1  # side of a window without a limit
NO_WINDOW = (UNLIMITED, UNLIMITED)

PositionRange = tuple[int, int]  # positions ``[start, end)``


@dataclass(frozen=True)
class Mask:
    """Rule that says which keys a query sees. Each field is an interval of positions; a key must lie in all of them.

    Neither end of an interval decreases with the query's position, so that a hop's mask is one :class:`Bounds` for
    every layout. There are two exceptions. ``blocks`` is a block-sparse pattern inside the intervals. ``global_tokens``
    and ``intervals`` turn the mask into a union of a few disjoint masks, its :attr:`parts`. The default shows all keys.
    """

    causal: bool = False
    """A query sees keys up to its own position."""
    window: tuple[int, int] = NO_WINDOW
    """Positions that a query sees to the left and to the right of itself, both included; -1: no limit on that side."""
    documents: Documents | None = None
    """A query sees only keys of its own document."""
    prefix: int = 0
    """Number of positions at the start that a causal mask hides from no query (prefix-LM)."""
    islands: tuple[PositionRange, ...] = ()
    """Ranges of positions that a causal mask hides from no query of the same range (tokens of an image)."""
    used: tuple[int, ...] | None = None
    """Number of positions with keys, per batch row; later positions are padding."""
    blocks: BlockMask | None = None
    """Which blocks of queries see which blocks of keys."""
    global_tokens: tuple[PositionRange, ...] = ()
    """Tokens that see all keys, and that all queries see, whatever the window (Longformer)."""
    intervals: Intervals | None = None
    """Keys that each query sees, as a list of intervals."""
    interval_number: int = 0
    """Which of the intervals a part of a mask covers."""
    queries: PositionRange = (0, END)
    """Queries that a part of a mask covers; other queries see nothing."""
    keys: PositionRange = (0, END)
    """Keys that a part of a mask covers."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Disjoint masks without global tokens, with one interval each, that together allow the same pairs."""
        if self.intervals is None:
            return self._parts
        numbers = range(len(self.intervals.table))
        return tuple(replace(part, interval_number=number) for part in self._parts for number in numbers)

    @property
    def _parts(self) -> tuple[Mask, ...]:
        if not self.global_tokens:
            return (self,)
        plain = replace(self, global_tokens=())
        wide = replace(plain, window=NO_WINDOW)
        edges = [0, *(edge for interval in self.global_tokens for edge in interval), END]
        gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
        # Each part has one range of queries. Rows between two ranges would see nothing, and the ends would decrease.
        return (
            *(replace(wide, keys=keys) for keys in self.global_tokens),
            *(replace(wide, queries=queries, keys=keys) for queries in self.global_tokens for keys in gaps),
            *(replace(plain, queries=queries, keys=keys) for queries in gaps for keys in gaps),
        )

    @property
    def rows(self) -> tuple[Mask, ...]:
        """Masks of the batch rows if they have different numbers of keys, and otherwise this mask alone."""
        return (self,) if self.used is None else tuple(replace(self, used=(used,)) for used in self.used)

    def interval(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(lo, hi)``, int64: the query at ``positions[i]`` sees the keys at positions ``lo[i] <= p < hi[i]``.

        The block pattern is not applied. If batch rows differ, the interval is that of the row with the most keys.
        """
        lo, hi = (torch.full_like(positions, end) for end in self.keys)
        if self.causal:
            end = range_ends(self.islands, positions) if self.islands else positions + 1
            hi = torch.minimum(hi, end.clamp(min=self.prefix))
        left, right = self.window
        if left != UNLIMITED:
            lo = torch.maximum(lo, positions - left)
        if right != UNLIMITED:
            hi = torch.minimum(hi, positions + right + 1)
        if self.documents is not None:
            start, end = self.documents.document_bounds(positions)
            lo, hi = torch.maximum(lo, start), torch.minimum(hi, end)
        if self.intervals is not None:
            start, end = self.intervals.table[self.interval_number][:, positions]
            lo, hi = torch.maximum(lo, start), torch.minimum(hi, end)
        if self.used is not None:
            hi = hi.clamp(max=max(self.used, default=0))
        if self.queries != (0, END):
            first, past = self.queries
            hi = torch.where((positions >= first) & (positions < past), hi, 0)
        return lo, hi


def range_ends(ranges: tuple[PositionRange, ...], positions: torch.Tensor) -> torch.Tensor:
    """Return the end of the range that holds each position, or else the position plus one."""
    edges = torch.tensor(ranges).flatten()
    index = torch.searchsorted(edges, positions, right=True)  # odd inside a range
    return torch.where(index % 2 == 1, edges[index.clamp(max=len(edges) - 1)], positions + 1)


def bounds(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> Bounds:
    """Return the bounds of ``mask`` between one shard of queries and one of keys: an interval of key indices per query.

    Args:
        mask: one part of a mask; its block pattern is ignored.
        q_positions: positions of the queries, ascending, int64 ``[Sq]``.
        k_positions: positions of the keys, ascending, int64 ``[Sk]``.

    Returns:
        FULL if every query sees every key and there are both. Otherwise int32 vectors ``[Sq]`` whose ends never
        decrease. A row that sees nothing has ``lo == hi`` inside the range of its neighbours, so that no tile gets
        wider.
    """
    lo, hi = _indices(mask, q_positions, k_positions)
    rows, keys = len(lo), len(k_positions)
    used = _used(mask, k_positions)
    if rows and keys and int(lo.max()) == 0 and int(hi.min()) == keys:
        return FULL if used is None else Bounds(None, None, used)
    lo, hi = fill_empty_rows(lo, hi)
    return Bounds(lo.to(torch.int32), hi.to(torch.int32), used)


def visible_pairs(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> int:
    """Return the number of visible (query, key) pairs of two shards.

    If ``mask.used`` is set, the result is the sum over its batch rows, and otherwise the number for one row.
    """
    return sum(_pairs(part, q_positions, k_positions) for row in mask.rows for part in row.parts)


def _pairs(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> int:
    """Count the visible pairs of one part of a mask, for one batch row."""
    lo, hi = _indices(mask, q_positions, k_positions)
    seen = lo < hi
    lo, hi, queries = lo[seen], hi[seen], q_positions[seen]
    if mask.blocks is None:
        return int((hi - lo).sum())
    return _pairs_in_blocks(mask.blocks, queries, k_positions, lo, hi)


def _pairs_in_blocks(
    blocks: BlockMask, queries: torch.Tensor, keys: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> int:
    """Count the pairs of nonempty intervals that lie in a visible block."""
    rows, row = torch.unique_consecutive(queries // blocks.block, return_inverse=True)
    column, visible = keys // blocks.block, blocks.visible[rows]
    counts = column.bincount(minlength=visible.shape[1])
    starts = counts.cumsum(0) - counts
    before = (visible * counts).cumsum(1) - visible * counts  # visible keys in front of each block

    def up_to(last: torch.Tensor) -> torch.Tensor:
        """Count the visible keys up to and including key ``last``."""
        block = column[last]
        return before[row, block] + visible[row, block] * (last + 1 - starts[block])

    return int((up_to(hi - 1) - up_to(lo) + visible[row, column[lo]]).sum())


def _used(mask: Mask, k_positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of keys of a shard that each batch row has, int32 ``[B]``; None if all rows have all keys."""
    if mask.used is None:
        return None
    counts = torch.searchsorted(k_positions, torch.tensor(mask.used))
    return None if bool((counts == len(k_positions)).all()) else counts.to(torch.int32)


def _indices(mask: Mask, q_positions: torch.Tensor, k_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the interval as indices into the keys; ``lo >= hi`` if a row sees nothing."""
    lo, hi = mask.interval(q_positions)
    return torch.searchsorted(k_positions, lo), torch.searchsorted(k_positions, hi)
