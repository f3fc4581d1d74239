"""Attention with any bounds in plain torch, tile by tile: the cases that PyTorch's CPU operator cannot compute.

The loops follow FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), for one batch item and a few
key/value heads at a time. Query heads that share a key/value head are rows of one matrix, so that K and V are never
expanded. Everything is fp32. Exponentials use ``exp2``, because torch's ``exp`` is a hundred times slower when it
underflows. If the norms of queries and keys show that no score is large, the forward skips the maximum.

Tiles that no row sees are skipped; only edge tiles pay for the mask. As with the operator, a NaN or inf can spread to
masked rows of the same tile: from ``v`` to rows, and from any input to gradients.

A region is cut into chunks of heads, blocks of rows, and the tiles that each block sees. Softcap, ALiBi and dropout are
functions of global positions. Dropout uses Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011) in int64 arithmetic, which torch supports on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels import Bounds, Scores
from ..local.regions import KeyLimits, KeyRanges, Region, key_limits

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
ROUNDS = 10
WORD = 0xFFFFFFFF

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_word(seed: int, counter: Counter) -> Tensor:
    """Return the first of the four Philox words for ``counter`` under the key ``(low word, high word)`` of ``seed``.

    ``counter`` is four int64 tensors of 32-bit words that broadcast. The words stay unexpanded as long as the rounds
    keep them apart. So a counter of row, key and head costs seven full rounds and not ten.
    """
    key = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS - 1):
        counter = _round(counter, key)
        key = [word + step & WORD for word, step in zip(key, WEYL, strict=True)]
    _, c1, c2, _ = counter
    return _mix_word(c2 * MULTIPLIERS[1], c1, key[0])


def _round(counter: Counter, key: list[int]) -> Counter:
    """Compute one round. The second and fourth words keep their upper half, which the next round masks."""
    c0, c1, c2, c3 = counter
    products = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    return _mix_word(products[1], c1, key[0]), products[1], _mix_word(products[0], c3, key[1]), products[0]


def _mix_word(product: Tensor, word: Tensor, key: int) -> Tensor:
    """Return the upper word of a 64-bit product, xor ``word``, xor ``key``. The mask drops the shift's sign bits."""
    return torch.bitwise_xor(product >> 32, word ^ key).bitwise_and_(WORD)


LOG2_E = 1 / math.log(2)


class RegionTile(NamedTuple):
    """Batch item, heads, rows and keys of a tile of scores, counted from the start of its region."""

    item: int
    heads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True)
class RegionModifiers:
    """Softcap, ALiBi and dropout of one region. Positions, slopes and random numbers are those of the whole call.

    A tile is fp32 ``[heads, rows, keys]``.
    """

    scores: Scores
    region: Region

    def apply(self, tile: Tensor, tile_position: RegionTile, *, backward: bool = False) -> Tensor | None:
        """Apply softcap and ALiBi to ``tile`` in place.

        ``tile`` holds ``scale * log2(e) * q k^T`` and becomes ``log2(e)`` times ``cap * tanh(score / cap)`` and then
        ``- slope * |p_q - p_k|``. With ``backward``, return the factor of the gradient, ``1 - tanh^2`` (None without
        softcap).
        """
        derivative, cap = None, self.scores.softcap * LOG2_E
        if cap:
            tile.div_(cap).tanh_()
            derivative = (tile * tile).neg_().add_(1) if backward else None
            tile.mul_(cap)
        slopes = self.scores.alibi_slopes
        if slopes is not None:
            own = slopes if slopes.dim() == 1 else slopes[self.region.batch + tile_position.item]
            rows, keys = self._positions(tile_position)
            distance = (rows[:, None] - keys).abs_().float()
            tile.addcmul_(own[tile_position.heads, None, None], distance, value=-LOG2_E)
        return derivative

    def dropout_factors(self, tile_position: RegionTile) -> Tensor:
        """Return the factors of dropout: 0, or ``1 / (1 - p)``.

        A weight is kept if the first Philox4x32-10 word is at least ``scores.threshold``. The key is the seed, the
        counter is (query position, key position, head, batch item).
        """
        seed, threshold = self.scores.dropout_seed, self.scores.threshold
        rows, keys = self._positions(tile_position)
        item = torch.tensor(self.region.batch + tile_position.item)
        first = self.scores.first_head + tile_position.heads.start
        factors = torch.empty(
            tile_position.heads.stop - tile_position.heads.start, len(rows), len(keys), dtype=torch.float32
        )
        for number, factor in enumerate(factors):  # one head at a time, so that the 64-bit words stay in the cache
            head = torch.tensor(first + number)
            factor.copy_(philox_word(seed, (rows[:, None], keys, head, item)) >= threshold)
        return factors.mul_(1 / (1 - self.scores.dropout_p))

    def _positions(self, at: RegionTile) -> tuple[Tensor, Tensor]:
        """Return the global positions of the rows and of the keys of a tile, int64."""
        q_positions, k_positions = self.scores.q_positions, self.scores.k_positions
        assert q_positions is not None and k_positions is not None
        rows, keys = _shift_slice(at.rows, self.region.row), _shift_slice(at.keys, self.region.key)
        return q_positions[rows].long(), k_positions[keys].long()


def _shift_slice(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


Vector = npt.NDArray[np.int32]


FOLDED_ROWS = 256  # rows of one product, over all query heads of the group; sgemm reaches full speed there
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 128  # fewer rows read K and V too often, more waste work at window edges
TILE_KEYS = 512
TILE_SCORES = 1 << 18  # scores per tile and thread: 1 MiB in fp32, half of a typical L2 cache
EDGE_CACHE_SIZE = 64  # cached edge masks; all blocks of a window have equal ones


@dataclass(frozen=True)
class HeadChunk:
    """One batch item and a group of key/value heads, with their query heads; ``keys`` are ``[Hkv, Sk, D]``."""

    item: int
    heads: slice
    kv_heads: slice
    keys: Tensor
    values: Tensor

    @cached_property
    def max_norms(self) -> tuple[float, float]:
        """Largest norm of a key and of a value."""
        key, value = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self.keys, self.values))
        return key, value


class MaskEdge(NamedTuple):
    """Mask for the columns of a tile that some rows do not see.

    Weights are masked by ``&`` with ``bits``. Scores are masked in the same way, and ``ceiling`` is then added.
    """

    columns: slice
    bits: Tensor  # int32 [rows, columns]: -1 (all bits) if the row sees the key, otherwise 0
    ceiling: Tensor  # fp32 [rows, columns]: 0 if the row sees the key, otherwise -inf


class KeyTile(NamedTuple):
    """Keys ``[key, end)`` against one block of rows."""

    key: int
    end: int
    edges: tuple[MaskEdge, ...]


class RowBlock(NamedTuple):
    """Query rows ``[row, end)`` and the tiles that they see."""

    row: int
    end: int
    tiles: tuple[KeyTile, ...]


def head_chunks(k: Tensor, v: Tensor, group: int, rows: int) -> list[HeadChunk]:
    """Split K and V into chunks of heads, so that every thread is busy and its tile of scores fits into the cache.

    ``group`` is the number of query heads per key/value head, and ``rows`` the number of queries.
    """
    items, keys, kv_heads, _ = k.shape
    scores = group * min(_block_rows(group), rows) * min(TILE_KEYS, keys)
    step = max(1, TILE_SCORES // scores) * torch.get_num_threads()
    result = []
    for item in range(items):
        for first in range(0, kv_heads, step):
            end = min(first + step, kv_heads)
            chunk_kv = [x[item, :, first:end].transpose(0, 1).float().contiguous() for x in (k, v)]
            heads = slice(first * group, end * group), slice(first, end)
            result.append(HeadChunk(item, *heads, *chunk_kv))
    return result


def row_blocks(visible: KeyLimits, group: int, kv_heads: int) -> list[RowBlock]:
    """Return the blocks of rows that see any key, with their tiles.

    ``group`` is the number of query heads per key/value head. ``kv_heads`` is the number of key/value heads of a chunk;
    with fewer heads a tile has more keys.
    """
    lo, hi = visible.lo.numpy(), visible.hi.numpy()
    step = _block_rows(group)
    width = max(TILE_KEYS, TILE_SCORES * torch.get_num_threads() // (kv_heads * group * min(step, len(lo))))
    rows = [slice(row, min(row + step, len(lo))) for row in range(0, len(lo), step)]
    all_blocks = (RowBlock(x.start, x.stop, tuple(_tiles(lo[x], hi[x], visible.key_ranges, width))) for x in rows)
    return [block for block in all_blocks if block.tiles]


def _block_rows(group: int) -> int:
    """Return the query rows per block, for ``group`` query heads per key/value head."""
    return min(max(FOLDED_ROWS // group, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)


def _tiles(lo: Vector, hi: Vector, key_ranges: KeyRanges, width: int) -> Iterator[KeyTile]:
    """Yield the tiles of one block of rows, of equal width in each key range. Only the head and the tail are masked."""
    # All rows see [full_first, full_last), because lo and hi never decrease.
    first, full_first, full_last, last = (int(x) for x in (lo[0], lo[-1], hi[0], hi[-1]))
    edges = [(first, full_first), (full_last, last)] if full_first < full_last else [(first, last)]
    for begin, past in key_ranges:
        start, end = max(first, begin), min(last, past)
        count = max(-(-(end - start) // width), 0)
        cuts = [start + (end - start) * cut // count for cut in range(count + 1)] if count else []
        for key, stop in pairwise(cuts):
            masked = [(max(key, a), min(stop, b)) for a, b in edges]
            yield KeyTile(key, stop, tuple(_edge(lo, hi, a, b, key) for a, b in masked if a < b))


def _edge(lo: Vector, hi: Vector, key: int, end: int, base: int) -> MaskEdge:
    """Return the mask of the keys ``[key, end)`` of a tile that begins at key ``base``."""
    ends = ((x - key).clip(0, end - key).tobytes() for x in (lo, hi))
    return MaskEdge(slice(key - base, end - base), *_edge_mask(*ends, end - key))


@lru_cache(EDGE_CACHE_SIZE)
def _edge_mask(lo: bytes, hi: bytes, columns: int) -> tuple[Tensor, Tensor]:
    """Return ``bits`` and ``ceiling`` of an edge whose row i sees the columns ``lo[i] <= j < hi[i]``.

    ``lo`` and ``hi`` are int32 as bytes, so that the result can be cached.
    """
    at = np.arange(columns)
    first, last = (np.frombuffer(x, np.int32)[:, None] for x in (lo, hi))
    seen = torch.from_numpy((at >= first) & (at < last))
    return -seen.int(), torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)


FP32_LOWEST = torch.finfo(torch.float32).min
# 2^MAX_SAFE_SCORE * MAX_SAFE_VALUE, summed over a million keys, does not overflow fp32
MAX_SAFE_SCORE, MAX_SAFE_VALUE = 60.0, 1e14


@torch.inference_mode()  # its calls are small, and autograd's bookkeeping would add 4%
def blockwise_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, region: Region, scores: Scores,
    *, scale: float, max_logits: Tensor | None = None,
) -> None:  # fmt: skip
    """Add ``k`` and ``v`` to the running ``out`` and ``lse``, in place.

    The online softmax restarts from the state: ``m = lse, l = 1, acc = out``. A row that has seen no key has
    ``lse = -inf`` and ``out = 0``. Dropped weights count in ``lse``.

    Shapes of the region: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any float dtype. ``out``
    ``[B, Sq, H, Dv]`` and ``lse [B, H, Sq]`` (natural log) are fp32 or wider. ``max_logits``, fp32 ``[H]`` or None, is
    raised to the largest score of each head.
    """
    modifiers = None if scores.is_plain else RegionModifiers(scores, region)
    group = q.shape[2] // k.shape[2]
    all_heads = head_chunks(k, v, group, q.shape[1])
    todo = row_blocks(key_limits(bounds, region), group, len(all_heads[0].keys))
    workspace = _workspace(todo, all_heads[0], group)
    for block in todo:
        rows = slice(block.row, block.end)
        for chunk in all_heads:
            item, heads = chunk.item, chunk.heads
            queries, acc = _fold(q[item, rows, heads], group), _fold(out[item, rows, heads], group)
            m = _fold_vector(lse[item, heads, rows] * LOG2_E, group)
            largest = None if max_logits is None else max_logits[heads]
            acc, m = _attend(queries.mul_(scale * LOG2_E), acc, m, block, chunk, modifiers, workspace, largest)
            out[item, rows, heads] = _unfold(acc, group)
            lse[item, heads, rows] = m.view(-1, block.end - block.row).mul_(1 / LOG2_E)


def _attend(
    queries: Tensor,
    acc: Tensor,
    m: Tensor,
    block: RowBlock,
    chunk: HeadChunk,
    modifiers: RegionModifiers | None,
    workspace: Tensor,
    max_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend from one block of rows to its tiles, starting from the state ``(acc, m)``; return the new ``(out, lse)``.

    Here and below, ``m`` and ``lse`` are in base-2 units.
    """
    if modifiers is None and max_logits is None and _is_small(queries, m, chunk):
        total = m.exp2_()
        acc.mul_(total)
        for tile in block.tiles:
            weights = _product(queries, chunk.keys[:, tile.key : tile.end], workspace).exp2_()
            _clear(weights, block, tile.edges)
            total.add_(weights.sum(-1, keepdim=True))
            acc.baddbmm_(weights, chunk.values[:, tile.key : tile.end])
        return _normalize(acc, torch.zeros_like(total), total)
    total = torch.ones_like(m)
    for tile in block.tiles:
        scores = _product(queries, chunk.keys[:, tile.key : tile.end], workspace)
        if modifiers is not None:
            modifiers.apply(_by_head(scores, block), _place(chunk, block, tile))
        _hide(scores, block, tile.edges)
        largest = scores.amax(-1, keepdim=True)
        if max_logits is not None:
            torch.maximum(max_logits, largest.view(len(max_logits), -1).amax(1) / LOG2_E, out=max_logits)
        peak = torch.maximum(m, largest)
        pivot = peak.clamp(min=FP32_LOWEST)  # finite, because a row without keys would compute inf - inf
        weights = scores.sub_(pivot).exp2_()
        decay = m.sub_(pivot).exp2_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        if modifiers is not None and modifiers.scores.dropout_p > 0:
            _by_head(weights, block).mul_(modifiers.dropout_factors(_place(chunk, block, tile)))
        acc.mul_(decay).baddbmm_(weights, chunk.values[:, tile.key : tile.end])
        m = peak
    return _normalize(acc, m, total)


def _is_small(queries: Tensor, m: Tensor, chunk: HeadChunk) -> bool:
    """Return True if ``exp2`` of all scores is safe without subtracting the maximum.

    By Cauchy-Schwarz, the norms of queries and keys limit the scores. The state and the values must also be small.
    """
    key, value = chunk.max_norms
    score = float(torch.linalg.vector_norm(queries, dim=-1).amax()) * key
    return score < MAX_SAFE_SCORE and value < MAX_SAFE_VALUE and float(m.amax()) < MAX_SAFE_SCORE


def _normalize(acc: Tensor, m: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` for the accumulator, the pivot and the sum of exponentials."""
    lse = m.double() + total.double().log2()
    total.masked_fill_(total == 0, 1.0)  # rows without keys keep out = 0 and lse = -inf
    return acc.div_(total), lse


@torch.inference_mode()
def blockwise_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, bounds: Bounds, region: Region,
    scores: Scores, *, scale: float, grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Add the gradients of these queries and keys to ``grads``: dq, dk and dv, fp32, in place.

    ``lse`` covers the keys of all shards and is +inf for a row without keys. ``delta`` is ``rowsum(dout * out) -
    dlse``. Both are fp32 ``[B, H, Sq]``. All other shapes are as in :func:`blockwise_forward`.
    """
    modifiers = None if scores.is_plain else RegionModifiers(scores, region)
    dq, dk, dv = grads
    base_2 = lse * LOG2_E
    group = q.shape[2] // k.shape[2]
    all_heads = head_chunks(k, v, group, q.shape[1])
    todo = row_blocks(key_limits(bounds, region), group, len(all_heads[0].keys))
    workspace, more_workspace = (_workspace(todo, all_heads[0], group) for _ in range(2))
    for block in todo:
        rows = slice(block.row, block.end)
        for chunk in all_heads:
            item, heads = chunk.item, chunk.heads
            dkeys, dvalues = (x[item, :, chunk.kv_heads].transpose(0, 1) for x in (dk, dv))
            queries, douts = _fold(q[item, rows, heads], group), _fold(dout[item, rows, heads], group)
            lses, deltas = (_fold_vector(x[item, heads, rows], group) for x in (base_2, delta))
            scaled, dqueries = queries * (scale * LOG2_E), torch.zeros_like(queries)
            for tile in block.tiles:
                tile_keys = slice(tile.key, tile.end)
                keys, values = chunk.keys[:, tile_keys], chunk.values[:, tile_keys]
                weights, dropout, derivative = _weights(scaled, keys, lses, block, tile, chunk, modifiers, workspace)
                dscores = _product(douts, values, more_workspace)
                if dropout is None:
                    dvalues[:, tile_keys].baddbmm_(weights.mT, douts)
                else:
                    dvalues[:, tile_keys].baddbmm_((weights * dropout).mT, douts)
                    dscores.mul_(dropout)
                dscores.sub_(deltas).mul_(weights)
                if derivative is not None:
                    dscores.mul_(derivative)
                dkeys[:, tile_keys].baddbmm_(dscores.mT, queries, alpha=scale)
                dqueries.baddbmm_(dscores, keys, alpha=scale)
            dq[item, rows, heads] += _unfold(dqueries, group)


def _weights(
    queries: Tensor,
    keys: Tensor,
    lses: Tensor,
    block: RowBlock,
    tile: KeyTile,
    chunk: HeadChunk,
    modifiers: RegionModifiers | None,
    workspace: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the softmax weights of a tile, its dropout factors and the derivative of softcap (each None if unused)."""
    scores, dropout, derivative = _product(queries, keys, workspace), None, None
    if modifiers is not None:
        at = _place(chunk, block, tile)
        derivative = modifiers.apply(_by_head(scores, block), at, backward=True)
        derivative = None if derivative is None else derivative.view_as(scores)
        dropout = modifiers.dropout_factors(at).view_as(scores) if modifiers.scores.dropout_p > 0 else None
    scores.sub_(lses)
    _hide(scores, block, tile.edges)
    return scores.exp2_(), dropout, derivative


def _workspace(blocks: list[RowBlock], chunk: HeadChunk, group: int) -> Tensor:
    """Allocate memory for the scores of the largest tile, once, because fresh memory for every tile is slow."""
    sizes = ((block.end - block.row) * (tile.end - tile.key) for block in blocks for tile in block.tiles)
    return torch.empty(len(chunk.keys) * group * max(sizes, default=0), dtype=torch.float32)


def _product(rows: Tensor, columns: Tensor, workspace: Tensor) -> Tensor:
    """Compute ``rows columns^T`` in ``workspace``."""
    shape = *rows.shape[:2], columns.shape[1]
    return torch.bmm(rows, columns.mT, out=workspace[: math.prod(shape)].view(shape))


def _place(chunk: HeadChunk, block: RowBlock, tile: KeyTile) -> RegionTile:
    """Return where a tile of scores is in its region."""
    return RegionTile(chunk.item, chunk.heads, slice(block.row, block.end), slice(tile.key, tile.end))


def _by_head(scores: Tensor, block: RowBlock) -> Tensor:
    """Return ``[Hkv, group * rows, keys]`` as ``[H, rows, keys]``."""
    return scores.view(-1, block.end - block.row, scores.shape[-1])


def _hide(scores: Tensor, block: RowBlock, edges: tuple[MaskEdge, ...]) -> None:
    """Set scores to -inf in place where the row does not see the key. ``masked_fill`` would take twice as long."""
    for columns, bits, ceiling in edges:
        edge_scores = _by_head(scores, block)[..., columns]
        edge_scores.view(torch.int32).bitwise_and_(bits)
        edge_scores.add_(ceiling)


def _clear(weights: Tensor, block: RowBlock, edges: tuple[MaskEdge, ...]) -> None:
    """Set weights to 0 in place where the row does not see the key."""
    for columns, bits, _ in edges:
        _by_head(weights, block)[..., columns].view(torch.int32).bitwise_and_(bits)


def _fold(x: Tensor, group: int) -> Tensor:
    """Copy ``[S, H, D]`` to fp32 ``[Hkv, group * S, D]``: all rows that read a key/value head become one matrix."""
    rows, heads, dim = x.shape
    by_head = torch.empty(heads // group, group, rows, dim, dtype=torch.float32)
    return by_head.copy_(x.view(rows, heads // group, group, dim).permute(1, 2, 0, 3)).view(-1, group * rows, dim)


def _fold_vector(x: Tensor, group: int) -> Tensor:
    """Return ``[H, S]`` as fp32 ``[Hkv, group * S, 1]``."""
    return x.reshape(len(x) // group, -1, 1).float()


def _unfold(x: Tensor, group: int) -> Tensor:
    """Return ``[Hkv, group * S, D]`` as ``[S, H, D]``."""
    kv_heads, folded, dim = x.shape
    return x.view(kv_heads * group, folded // group, dim).transpose(0, 1)
