"""Who sees whom: intervals of positions, and block-sparse patterns with the known ones among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import index
from typing import Any

import torch

from ...kernels import FULL, Bounds
from ...kernels.checks import check_local
from ...kinds import whole
from .layout import Documents, Layout, at_least

SEED = whole(-(1 << 63), (1 << 64) - 1)  # what torch.Generator takes
MOST_BLOCKS = 1 << 15  # of queries, and of keys, of a pattern that is built here: a table of 1 GiB


class BlockMask:
    """A query sees a key where its block of queries sees the key's block; immutable and hashable.

    Args:
        visible: bool ``[query blocks, key blocks]`` on the CPU; block i holds the positions ``[i * block, (i + 1) *
            block)``, the last one may be shorter.
        block: positions per block.

    Raises:
        ValueError: not such a tensor, or no positive block.
    """

    __slots__ = ("__dict__", "block", "visible")

    def __init__(self, visible: torch.Tensor, block: int) -> None:
        check_local("block_mask", visible)
        if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool or visible.dim() != 2:
            got = f"{visible.dtype} {list(visible.shape)}" if isinstance(visible, torch.Tensor) else repr(visible)
            raise ValueError(f"block_mask is {got}: it must be bool [query blocks, key blocks]")
        if visible.device.type != "cpu":
            raise ValueError(f"block_mask is on {visible.device}: it must be on the CPU, since schedules are host data")
        self.visible = visible.clone()
        self.block = at_least(1, "block", block)

    def between(self, layout: Layout, rank: int, kv_layout: Layout, shard: int) -> torch.Tensor:
        """What the blocks of one shard of queries see of one of keys, bool ``[query blocks, key blocks]``.

        Raises:
            ValueError: a span of either begins or ends inside a block.
        """
        rows = self._blocks("layout", layout, rank, len(self.visible))
        return self.visible[rows][:, self._blocks("kv_layout", kv_layout, shard, self.visible.shape[1])]

    def check(self, name: str, layout: Layout) -> None:
        """Refuse a layout with a span that begins or ends inside a block: ValueError."""
        for rank in range(layout.world):
            self._blocks(name, layout, rank, -(-layout.reach // self.block))

    def _blocks(self, name: str, layout: Layout, rank: int, count: int) -> torch.Tensor:
        """The blocks that a shard consists of, ascending."""
        runs = []
        for start, length, step in layout.spans(rank):
            end = start + length
            if step != 1 or start % self.block or (end % self.block and end != layout.reach):
                raise ValueError(
                    f"{name} gives rank {rank} the span {(start, length, step)}: with block_mask the spans must be "
                    f"runs of whole blocks of {self.block} positions"
                )
            runs.append(torch.arange(start // self.block, -(-end // self.block)))
        blocks = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
        if len(blocks) and int(blocks[-1]) >= count:
            raise ValueError(
                f"block_mask has {count} blocks of {self.block} positions for {name}, which holds {layout.reach}"
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
        return f"<{rows} x {columns} blocks of {self.block} positions, {int(self.visible.sum())} seen, {self._digest}>"


def strided(seqlen: int, block: int, *, stride: int) -> BlockMask:
    """Sparse Transformer's strided pattern: the last ``stride`` positions, and every ``stride``-th block before them.

    R. Child et al., arXiv:1904.10509, section 4.3 (there ``l``), both heads as one: query i sees the keys j <= i where
    ``i - j <= l`` or ``(i - j) mod l = 0``. Blocks are seen where one of their pairs is; made for ``causal=True``,
    without which a query sees its whole block.

    Args:
        seqlen: positions of queries and of keys.
        block: positions per block.
        stride: a multiple of ``block``.

    Raises:
        ValueError: a length below 0, more than 2^15 blocks, or ``stride`` is not a positive multiple of ``block``.
    """
    queries, keys = _grid(seqlen, block)
    step = _multiple("stride", stride, block)
    distance = queries - keys
    return BlockMask((distance >= 0) & ((distance < step) | (distance % step == 0)), block)


def fixed(seqlen: int, block: int, *, stride: int, summary: int) -> BlockMask:
    """Sparse Transformer's fixed pattern: the query's own stretch of ``stride`` positions, and the last ``summary``
    positions of every stretch before it.

    R. Child et al., arXiv:1904.10509, section 4.3 (there ``l`` and ``c``), both heads as one: query i sees the keys
    j <= i where ``floor(j / l) = floor(i / l)`` or ``j mod l >= l - c``. Blocks as in :func:`strided`.

    Args:
        seqlen: positions of queries and of keys.
        block: positions per block.
        stride: a multiple of ``block``.
        summary: a multiple of ``block``, at most ``stride``.

    Raises:
        ValueError: a length below 0, more than 2^15 blocks, ``stride`` or ``summary`` is not a positive multiple of
            ``block``, or the summary is the longer.
    """
    queries, keys = _grid(seqlen, block)
    step, last = _multiple("stride", stride, block), _multiple("summary", summary, block)
    if last > step:
        raise ValueError(f"summary is {summary}: it must be at most stride, {stride}")
    same = queries // step == keys // step
    return BlockMask((keys <= queries) & (same | (keys % step >= step - last)), block)


def bigbird(seqlen: int, block: int, *, window: int, global_: int, random: int, seed: int = 0) -> BlockMask:
    """BigBird: ``window`` blocks around the query's, ``global_`` first blocks that see all and are seen by all, and
    ``random`` more blocks per block of queries.

    M. Zaheer et al., arXiv:2007.14062, section 2 and appendix D: the blocked form of the internal transformer
    construction, in which tokens of the sequence itself are the global ones. The random blocks are drawn from those
    that a block of queries does not see already; they are the same for one seed (and version of torch).

    Args:
        seqlen: positions of queries and of keys.
        block: positions per block.
        window: blocks, odd: the query's own and as many on either side.
        global_: blocks at the start.
        random: blocks, for each block of queries.
        seed: of the generator that draws them.

    Raises:
        ValueError: a length or a count below 0, more than 2^15 blocks, a seed that torch's generators do not take, or
            ``window`` is even or not positive.
    """
    queries, keys = _grid(seqlen, block)
    window, global_ = at_least(1, "window", window), at_least(0, "global_", global_)
    random = at_least(0, "random", random)
    if window % 2 == 0:
        raise ValueError(f"window is {window}: it must be odd, the query's own block and as many on either side")
    seen = ((queries - keys).abs() <= window // 2) | (queries < global_) | (keys < global_)
    generator = torch.Generator().manual_seed(SEED.of("seed", seed))
    for row in seen:
        others = (~row).nonzero().squeeze(1)
        row[others[torch.randperm(len(others), generator=generator)[:random]]] = True
    return BlockMask(seen, block)


@dataclass(frozen=True)
class Longformer:
    """A window and global tokens; see :func:`longformer`."""

    window: tuple[int, int]
    global_tokens: tuple[tuple[int, int], ...]


def longformer(window: int, global_tokens: Iterable[tuple[int, int]]) -> Longformer:
    """Longformer (I. Beltagy et al., arXiv:2004.05150, section 3.1), for ``block_mask`` of ``ring_attention``.

    Computed as a few disjoint interval masks, folded one after the other into the carried state.

    Args:
        window: positions that a query sees around it, half on either side; even.
        global_tokens: stretches ``(start, end)`` of global positions, ascending, that see all and are seen by all.

    Raises:
        ValueError: a window that is odd or below 0, or stretches that are empty, overlap or descend.
    """
    if at_least(0, "window", window) % 2:
        raise ValueError(f"window is {window}: it must be even, half of it on either side")
    try:
        made = tuple((index(start), index(end)) for start, end in global_tokens)
    except (TypeError, ValueError):
        raise ValueError(f"global_tokens is {global_tokens!r}: it must be stretches (start, end)") from None
    for number, (start, end) in enumerate(made):
        if not (made[number - 1][1] if number else 0) <= start < end:
            raise ValueError(f"global_tokens[{number}] is {(start, end)}: stretches must ascend and hold a position")
    return Longformer((window // 2, window // 2), made)


def _grid(seqlen: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of queries, a column, and of keys, a row."""
    blocks = -(-at_least(0, "seqlen", seqlen) // at_least(1, "block", block))
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"block is {block}: {blocks:,} blocks of {seqlen:,} positions make a table of {blocks**2:,} bytes, 2^30 at "
            f"most: pass a block of at least {-(-seqlen // MOST_BLOCKS):,}"
        )
    # int32: at a million positions a pattern has 10^8 blocks, and this is read several times for each
    count = torch.arange(blocks, dtype=torch.int32)
    return count[:, None], count[None, :]


def _multiple(name: str, value: int, block: int) -> int:
    """``value`` in blocks."""
    if at_least(1, name, value) % block:
        raise ValueError(f"{name} is {value}: it must be a positive multiple of block, {block}")
    return value // block


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
    counts = torch.searchsorted(k_positions, torch.tensor(mask.used))
    return None if bool((counts == len(k_positions)).all()) else counts.to(torch.int32)


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
