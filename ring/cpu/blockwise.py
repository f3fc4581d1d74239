"""Attention under any bounds in plain torch, tile by tile: what PyTorch's CPU operator cannot express.

FlashAttention-2's loops (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), one batch item and a few key/value heads at a
time. The query heads that share a key/value head are rows of one matrix, so K and V are never expanded. Everything is
fp32. Exponentials go by ``exp2``: torch's ``exp`` is a hundred times slower where it underflows. Where no score can be
large, by the norms of the queries and keys, the forward subtracts no maximum.

A tile that no row sees is skipped, and only tiles on the edge pay for the mask. As with the operator, a NaN or inf may
reach what shares a tile with something that sees it: the rows by ``v``, the gradients by any input.

A region is cut into heads that are computed together, blocks of rows, and the tiles they see. Softcap, ALiBi and
dropout are functions of global positions, the latter by Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy
as 1, 2, 3", SC 2011), in int64 arithmetic, which torch has everywhere.
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
from ..local.regions import KeyRanges, Limits, Region, limits

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after every round
ROUNDS = 10
WORD = 0xFFFFFFFF

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def first_word(seed: int, counter: Counter) -> Tensor:
    """The first of the four words that ``counter`` becomes under the key ``(low word, high word)`` of ``seed``.

    ``counter`` is four int64 tensors of 32-bit words that broadcast. They are left as narrow as they come for as long
    as the rounds keep them apart, so that a counter of a row, a key and a head costs seven full rounds and not ten.
    """
    key = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS - 1):
        counter = _round(counter, key)
        key = [word + step & WORD for word, step in zip(key, WEYL, strict=True)]
    _, c1, c2, _ = counter
    return _mixed(c2 * MULTIPLIERS[1], c1, key[0])


def _round(counter: Counter, key: list[int]) -> Counter:
    """One round; the second and the fourth word keep their upper half, which the next round's mask takes away."""
    c0, c1, c2, c3 = counter
    products = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    return _mixed(products[1], c1, key[0]), products[1], _mixed(products[0], c3, key[1]), products[0]


def _mixed(product: Tensor, word: Tensor, key: int) -> Tensor:
    """Upper word of a 64-bit product, xor ``word``, xor ``key``; the mask cuts the sign that the shift drags along."""
    return torch.bitwise_xor(product >> 32, word ^ key).bitwise_and_(WORD)


LOG2_E = 1 / math.log(2)


class RegionTile(NamedTuple):
    """Where a tile of scores lies in its region."""

    item: int
    heads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True)
class Modifiers:
    """``scores`` as one region sees it. Positions, slopes and random numbers are those of the whole call.

    Shapes: a tile is ``[heads, rows, keys]``, fp32.
    """

    scores: Scores
    region: Region

    def apply(self, tile: Tensor, at: RegionTile, *, backward: bool = False) -> Tensor | None:
        """Modify ``scale * q k^T``, here and behind it times log2(e), in place.

        ``cap * tanh(score / cap)``, then ``- slope * |p_q - p_k|``. Returns what a gradient in the ``backward`` is
        multiplied with on its way through: ``1 - tanh^2``, None without softcap.
        """
        derivative, cap = None, self.scores.softcap * LOG2_E
        if cap:
            tile.div_(cap).tanh_()
            derivative = (tile * tile).neg_().add_(1) if backward else None
            tile.mul_(cap)
        slopes = self.scores.alibi_slopes
        if slopes is not None:
            own = slopes if slopes.dim() == 1 else slopes[self.region.batch + at.item]
            rows, keys = self._positions(at)
            distance = (rows[:, None] - keys).abs_().float()
            tile.addcmul_(own[at.heads, None, None], distance, value=-LOG2_E)
        return derivative

    def kept(self, at: RegionTile) -> Tensor:
        """What dropout multiplies the weights with: 0, or ``1 / (1 - p)``.

        A weight stays where the first word of philox4x32-10 (key: the seed; counter: query position, key position,
        head, batch item) is at least ``scores.threshold``.
        """
        seed, threshold = self.scores.dropout_seed, self.scores.threshold
        rows, keys = self._positions(at)
        item = torch.tensor(self.region.batch + at.item)
        first = self.scores.first_head + at.heads.start
        factors = torch.empty(at.heads.stop - at.heads.start, len(rows), len(keys), dtype=torch.float32)
        for number, factor in enumerate(factors):  # one head at a time: 64-bit words of more would leave the cache
            head = torch.tensor(first + number)
            factor.copy_(first_word(seed, (rows[:, None], keys, head, item)) >= threshold)
        return factors.mul_(1 / (1 - self.scores.dropout_p))

    def _positions(self, at: RegionTile) -> tuple[Tensor, Tensor]:
        """Of the rows and of the keys of a tile, int64."""
        q_positions, k_positions = self.scores.q_positions, self.scores.k_positions
        assert q_positions is not None and k_positions is not None
        rows, keys = _moved(at.rows, self.region.row), _moved(at.keys, self.region.key)
        return q_positions[rows].long(), k_positions[keys].long()


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


Vector = npt.NDArray[np.int32]


FOLDED_ROWS = 256  # rows of one product, all query heads of the group together: sgemm is at full speed there
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 128  # fewer would read K and V too often; more would waste the edges of a window
TILE_KEYS = 512
TILE_SCORES = 1 << 18  # scores per tile and thread: 1 MiB in fp32, half of a usual L2 cache
EDGES = 64  # masks that are kept: the blocks of a window all have the same


@dataclass(frozen=True)
class Chunk:
    """One batch item and some key/value heads, with the query heads that read them; ``keys`` are ``[Hkv, Sk, D]``."""

    item: int
    heads: slice
    kv_heads: slice
    keys: Tensor
    values: Tensor

    @cached_property
    def longest(self) -> tuple[float, float]:
        """The greatest norm of a key, and of a value."""
        key, value = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self.keys, self.values))
        return key, value


class Edge(NamedTuple):
    """Columns of a tile that not every row sees, and what hides scores: first ``&`` of their bits, then ``+``."""

    columns: slice
    bits: Tensor  # int32 [rows, columns]: all bits where the row sees the key, else none
    ceiling: Tensor  # fp32 [rows, columns]: 0, else -inf


class Tile(NamedTuple):
    """Keys ``[key, end)`` against one block of rows."""

    key: int
    end: int
    edges: tuple[Edge, ...]


class Block(NamedTuple):
    """Query rows ``[row, end)`` and the tiles they see."""

    row: int
    end: int
    tiles: tuple[Tile, ...]


def chunks(k: Tensor, v: Tensor, group: int, rows: int) -> list[Chunk]:
    """As many key/value heads at a time as keep each thread busy, and its tile of scores in the cache."""
    items, keys, kv_heads, _ = k.shape
    scores = group * min(_block_rows(group), rows) * min(TILE_KEYS, keys)
    step = max(1, TILE_SCORES // scores) * torch.get_num_threads()
    made = []
    for item in range(items):
        for first in range(0, kv_heads, step):
            end = min(first + step, kv_heads)
            near = [x[item, :, first:end].transpose(0, 1).float().contiguous() for x in (k, v)]
            heads = slice(first * group, end * group), slice(first, end)
            made.append(Chunk(item, *heads, *near))
    return made


def blocks(visible: Limits, group: int, kv_heads: int) -> list[Block]:
    """Blocks of rows with the tiles they see; a block that sees nothing is left out.

    ``kv_heads`` are those of a chunk: of fewer, a tile has more keys.
    """
    lo, hi = visible.lo.numpy(), visible.hi.numpy()
    step = _block_rows(group)
    width = max(TILE_KEYS, TILE_SCORES * torch.get_num_threads() // (kv_heads * group * min(step, len(lo))))
    rows = [slice(row, min(row + step, len(lo))) for row in range(0, len(lo), step)]
    made = (Block(near.start, near.stop, tuple(_tiles(lo[near], hi[near], visible.key_ranges, width))) for near in rows)
    return [block for block in made if block.tiles]


def _block_rows(group: int) -> int:
    return min(max(FOLDED_ROWS // group, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)


def _tiles(lo: Vector, hi: Vector, key_ranges: KeyRanges, width: int) -> Iterator[Tile]:
    """What one block of rows sees, range by range in tiles of equal width; only the head and the tail are masked."""
    first, full_first, full_last, last = (int(x) for x in (lo[0], lo[-1], hi[0], hi[-1]))  # neither end decreases
    edges = [(first, full_first), (full_last, last)] if full_first < full_last else [(first, last)]
    for begin, past in key_ranges:
        start, end = max(first, begin), min(last, past)
        count = max(-(-(end - start) // width), 0)
        cuts = [start + (end - start) * cut // count for cut in range(count + 1)] if count else []
        for key, stop in pairwise(cuts):
            masked = [(max(key, a), min(stop, b)) for a, b in edges]
            yield Tile(key, stop, tuple(_edge(lo, hi, a, b, key) for a, b in masked if a < b))


def _edge(lo: Vector, hi: Vector, key: int, end: int, base: int) -> Edge:
    ends = ((x - key).clip(0, end - key).tobytes() for x in (lo, hi))
    return Edge(slice(key - base, end - base), *_hiding(*ends, end - key))


@lru_cache(EDGES)
def _hiding(lo: bytes, hi: bytes, columns: int) -> tuple[Tensor, Tensor]:
    """Bits and ceiling of an edge: row i sees the columns ``lo[i] <= j < hi[i]``, int32."""
    at = np.arange(columns)
    first, last = (np.frombuffer(x, np.int32)[:, None] for x in (lo, hi))
    seen = torch.from_numpy((at >= first) & (at < last))
    return -seen.int(), torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)


LOWEST = torch.finfo(torch.float32).min
SMALL, LARGEST_VALUE = 60.0, 1e14  # 2^SMALL * LARGEST_VALUE, times a million keys, is still a number


@torch.inference_mode()  # what it calls is small: bookkeeping for autograd would be 4% of it
def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, region: Region, scores: Scores,
    *, scale: float,
) -> None:  # fmt: skip
    """Fold ``k`` and ``v`` into the running ``out`` and ``lse``, in place.

    The online softmax restarts from the state, ``m = lse, l = 1, acc = out``; a row that has seen nothing has
    ``lse = -inf`` and ``out = 0``. Dropped weights count in ``lse``.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any float dtype; out ``[B, Sq, H, Dv]``
    and lse ``[B, H, Sq]``, fp32 or wider, natural log; all those of the region.
    """
    modifiers = None if scores.is_plain else Modifiers(scores, region)
    group = q.shape[2] // k.shape[2]
    all_heads = chunks(k, v, group, q.shape[1])
    todo = blocks(limits(bounds, region), group, len(all_heads[0].keys))
    workspace = _workspace(todo, all_heads[0], group)
    for block in todo:
        rows = slice(block.row, block.end)
        for chunk in all_heads:
            item, heads = chunk.item, chunk.heads
            queries, acc = _fold(q[item, rows, heads], group), _fold(out[item, rows, heads], group)
            m = _fold_vector(lse[item, heads, rows] * LOG2_E, group)
            acc, m = _attend(queries.mul_(scale * LOG2_E), acc, m, block, chunk, modifiers, workspace)
            out[item, rows, heads] = _unfold(acc, group)
            lse[item, heads, rows] = m.view(-1, block.end - block.row).mul_(1 / LOG2_E)


def _attend(
    queries: Tensor, acc: Tensor, m: Tensor, block: Block, chunk: Chunk, modifiers: Modifiers | None, workspace: Tensor
) -> tuple[Tensor, Tensor]:
    """One block of rows: the new ``out`` and the new ``lse``, here and below in units of the base-2 logarithm."""
    if modifiers is None and _is_small(queries, m, chunk):
        total = m.exp2_()
        acc.mul_(total)
        for tile in block.tiles:
            weights = _product(queries, chunk.keys[:, tile.key : tile.end], workspace).exp2_()
            _clear(weights, block, tile.edges)
            total.add_(weights.sum(-1, keepdim=True))
            acc.baddbmm_(weights, chunk.values[:, tile.key : tile.end])
        return _divided(acc, torch.zeros_like(total), total)
    total = torch.ones_like(m)
    for tile in block.tiles:
        scores = _product(queries, chunk.keys[:, tile.key : tile.end], workspace)
        if modifiers is not None:
            modifiers.apply(_by_head(scores, block), _place(chunk, block, tile))
        _hide(scores, block, tile.edges)
        peak = torch.maximum(m, scores.amax(-1, keepdim=True))
        pivot = peak.clamp(min=LOWEST)  # finite: a row without a key yet would give -inf - -inf
        weights = scores.sub_(pivot).exp2_()
        decay = m.sub_(pivot).exp2_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        if modifiers is not None and modifiers.scores.dropout_p > 0:
            _by_head(weights, block).mul_(modifiers.kept(_place(chunk, block, tile)))
        acc.mul_(decay).baddbmm_(weights, chunk.values[:, tile.key : tile.end])
        m = peak
    return _divided(acc, m, total)


def _is_small(queries: Tensor, m: Tensor, chunk: Chunk) -> bool:
    """Whether no score leaves ``[-SMALL, SMALL]``, by the Cauchy-Schwarz inequality, and no state is beyond it."""
    key, value = chunk.longest
    score = float(torch.linalg.vector_norm(queries, dim=-1).amax()) * key
    return score < SMALL and value < LARGEST_VALUE and float(m.amax()) < SMALL


def _divided(acc: Tensor, m: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    lse = m.double() + total.double().log2()
    total.masked_fill_(total == 0, 1.0)  # rows that have seen nothing stay at out 0, lse -inf
    return acc.div_(total), lse


@torch.inference_mode()
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, bounds: Bounds, region: Region,
    scores: Scores, *, scale: float, grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Add these queries' and keys' part of the gradients to ``grads``: dq, dk and dv, fp32, in place.

    ``lse`` is the row's over all shards, +inf for a row that has seen nothing, and ``delta`` is
    ``rowsum(dout * out) - dlse``, both ``[B, H, Sq]`` fp32; the rest is shaped as in :func:`forward`.
    """
    modifiers = None if scores.is_plain else Modifiers(scores, region)
    dq, dk, dv = grads
    base_2 = lse * LOG2_E
    group = q.shape[2] // k.shape[2]
    all_heads = chunks(k, v, group, q.shape[1])
    todo = blocks(limits(bounds, region), group, len(all_heads[0].keys))
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
                near = slice(tile.key, tile.end)
                keys, values = chunk.keys[:, near], chunk.values[:, near]
                weights, kept, derivative = _weights(scaled, keys, lses, block, tile, chunk, modifiers, workspace)
                dscores = _product(douts, values, more_workspace)
                if kept is None:
                    dvalues[:, near].baddbmm_(weights.mT, douts)
                else:
                    dvalues[:, near].baddbmm_((weights * kept).mT, douts)
                    dscores.mul_(kept)
                dscores.sub_(deltas).mul_(weights)
                if derivative is not None:
                    dscores.mul_(derivative)
                dkeys[:, near].baddbmm_(dscores.mT, queries, alpha=scale)
                dqueries.baddbmm_(dscores, keys, alpha=scale)
            dq[item, rows, heads] += _unfold(dqueries, group)


def _weights(
    queries: Tensor,
    keys: Tensor,
    lses: Tensor,
    block: Block,
    tile: Tile,
    chunk: Chunk,
    modifiers: Modifiers | None,
    workspace: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The final weights of a tile, and where the modifiers say so what they and dscores are multiplied with."""
    scores, kept, derivative = _product(queries, keys, workspace), None, None
    if modifiers is not None:
        at = _place(chunk, block, tile)
        derivative = modifiers.apply(_by_head(scores, block), at, backward=True)
        derivative = None if derivative is None else derivative.view_as(scores)
        kept = modifiers.kept(at).view_as(scores) if modifiers.scores.dropout_p > 0 else None
    scores.sub_(lses)
    _hide(scores, block, tile.edges)
    return scores.exp2_(), kept, derivative


def _workspace(blocks: list[Block], chunk: Chunk, group: int) -> Tensor:
    """Memory for the scores of any tile: what is allocated tile by tile may come fresh from the system each time."""
    sizes = ((block.end - block.row) * (tile.end - tile.key) for block in blocks for tile in block.tiles)
    return torch.empty(len(chunk.keys) * group * max(sizes, default=0), dtype=torch.float32)


def _product(rows: Tensor, columns: Tensor, workspace: Tensor) -> Tensor:
    """``rows columns^T``, in ``workspace``."""
    shape = *rows.shape[:2], columns.shape[1]
    return torch.bmm(rows, columns.mT, out=workspace[: math.prod(shape)].view(shape))


def _place(chunk: Chunk, block: Block, tile: Tile) -> RegionTile:
    return RegionTile(chunk.item, chunk.heads, slice(block.row, block.end), slice(tile.key, tile.end))


def _by_head(scores: Tensor, block: Block) -> Tensor:
    """``[Hkv, group * rows, keys]`` as ``[H, rows, keys]``."""
    return scores.view(-1, block.end - block.row, scores.shape[-1])


def _hide(scores: Tensor, block: Block, edges: tuple[Edge, ...]) -> None:
    """-inf in place where the row does not see the key, whatever was there; masked_fill takes twice as long."""
    for columns, bits, ceiling in edges:
        near = _by_head(scores, block)[..., columns]
        near.view(torch.int32).bitwise_and_(bits)
        near.add_(ceiling)


def _clear(weights: Tensor, block: Block, edges: tuple[Edge, ...]) -> None:
    """0 in place where the row does not see the key."""
    for columns, bits, _ in edges:
        _by_head(weights, block)[..., columns].view(torch.int32).bitwise_and_(bits)


def _fold(x: Tensor, group: int) -> Tensor:
    """``[S, H, D]`` as ``[Hkv, group * S, D]`` in fp32, a new tensor: what reads a key/value head is one matrix."""
    rows, heads, dim = x.shape
    by_head = torch.empty(heads // group, group, rows, dim, dtype=torch.float32)
    return by_head.copy_(x.view(rows, heads // group, group, dim).permute(1, 2, 0, 3)).view(-1, group * rows, dim)


def _fold_vector(x: Tensor, group: int) -> Tensor:
    """``[H, S]`` as ``[Hkv, group * S, 1]``."""
    return x.reshape(len(x) // group, -1, 1).float()


def _unfold(x: Tensor, group: int) -> Tensor:
    """``[Hkv, group * S, D]`` as ``[S, H, D]``."""
    kv_heads, folded, dim = x.shape
    return x.view(kv_heads * group, folded // group, dim).transpose(0, 1)
