"""Attention under any bounds in plain torch, tile by tile: what PyTorch's CPU operator cannot express.

FlashAttention-2's loops (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), one batch item and a few key/value heads at a
time. The query heads that share a key/value head are rows of one matrix, so K and V are never expanded. Everything is
fp32. Exponentials have base 2: torch's ``exp`` is a hundred times slower where it underflows, its ``exp2`` is not.

A tile that no row sees is skipped, and only tiles on the edge pay for the mask. As with the operator, a NaN or inf may
reach what shares a tile with something that sees it: the rows by ``v``, the gradients by any input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1 / math.log(2)
FOLDED_ROWS = 256  # rows of one product, all query heads of the group together: sgemm is at full speed there
MIN_BLOCK_ROWS = 32  # with many heads in the group, too: fewer rows would read K and V too often
TILE_KEYS = 512
TILE_SCORES = 1 << 18  # scores per thread and tile: 1 MiB in fp32, so that two of them stay in the cache


class Chunk(NamedTuple):
    """One batch item and some key/value heads, with the query heads that read them."""

    batch: int
    heads: slice
    kv_heads: slice


class Tile(NamedTuple):
    """Keys ``[key, end)`` against one block of rows; ``masked``: not every row sees all of them."""

    key: int
    end: int
    masked: bool


class Block(NamedTuple):
    """Query rows ``[row, end)`` and the tiles they see."""

    row: int
    end: int
    tiles: tuple[Tile, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lo: Tensor, hi: Tensor, *, scale: float) -> None:
    """Fold ``k`` and ``v`` into the running ``out`` and ``lse``, in place.

    The online softmax restarts from the state, ``m = lse, l = 1, acc = out``; a row that has seen nothing has
    ``lse = -inf`` and ``out = 0``.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any float dtype; out ``[B, Sq, H, Dv]``
    and lse ``[B, H, Sq]``, fp32, natural log. Row i sees the keys ``lo[i] <= j < hi[i]``.
    """
    group = q.shape[2] // k.shape[2]
    blocks = _blocks(lo, hi, group)
    for batch, heads, kv_heads in _chunks(q, k, blocks):
        keys, values = (x[batch, :, kv_heads].transpose(0, 1).float() for x in (k, v))
        for block in blocks:
            rows = slice(block.row, block.end)
            queries = _fold(q[batch, rows, heads], group) * (scale * LOG2_E)
            acc, m = _fold(out[batch, rows, heads], group), _fold_vector(lse[batch, heads, rows], group) * LOG2_E
            acc, m = _attend(queries, keys, values, acc, m, block, (lo[rows], hi[rows]))
            out[batch, rows, heads] = _unfold(acc, group)
            lse[batch, heads, rows] = m.view(-1, block.end - block.row).div_(LOG2_E)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, acc: Tensor, m: Tensor, block: Block, limits: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One block of rows: the new ``out`` and the new ``lse`` (base 2)."""
    total = torch.ones_like(m)
    for tile in block.tiles:
        scores = torch.bmm(queries, keys[:, tile.key : tile.end].mT)
        if tile.masked:
            _hide(scores, tile, *limits)
        peak = torch.maximum(m, scores.amax(-1, keepdim=True))
        pivot = peak.masked_fill(peak == -torch.inf, 0.0)  # finite: a row without a key yet would give -inf - -inf
        weights = scores.sub_(pivot).exp2_()
        decay = torch.exp2(m - pivot)
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc = torch.baddbmm(acc.mul_(decay), weights, values[:, tile.key : tile.end])
        m = peak
    total.masked_fill_(total == 0, 1.0)  # rows that have seen nothing stay at out 0, lse -inf
    return acc.div_(total), m.add_(total.log2_())


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lo: Tensor, hi: Tensor,
    *, scale: float, grads: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Add these queries' and keys' part of the gradients to ``grads``: dq, dk and dv, fp32, in place.

    ``lse`` is the row's over all shards, +inf for a row that has seen nothing, and ``delta`` is
    ``rowsum(dout * out) - dlse``, both ``[B, H, Sq]`` fp32; the rest is shaped as in :func:`forward`.
    """
    dq, dk, dv = grads
    group = q.shape[2] // k.shape[2]
    blocks = _blocks(lo, hi, group)
    for batch, heads, kv_heads in _chunks(q, k, blocks):
        keys, values = (x[batch, :, kv_heads].transpose(0, 1).float() for x in (k, v))
        dkeys, dvalues = (x[batch, :, kv_heads].transpose(0, 1) for x in (dk, dv))
        for block in blocks:
            rows = slice(block.row, block.end)
            queries, douts = _fold(q[batch, rows, heads], group) * scale, _fold(dout[batch, rows, heads], group)
            lses, deltas = (_fold_vector(x[batch, heads, rows], group) for x in (lse, delta))
            dqueries = torch.zeros_like(queries)
            for tile in block.tiles:
                near = slice(tile.key, tile.end)
                scores = torch.baddbmm(lses * -LOG2_E, queries, keys[:, near].mT, alpha=LOG2_E)
                if tile.masked:
                    _hide(scores, tile, lo[rows], hi[rows])
                weights = scores.exp2_()
                dvalues[:, near] += torch.bmm(weights.mT, douts)
                dscores = torch.bmm(douts, values[:, near].mT).sub_(deltas).mul_(weights)
                dkeys[:, near] += torch.bmm(dscores.mT, queries)  # queries carry the scale
                dqueries.baddbmm_(dscores, keys[:, near])
            dq[batch, rows, heads] += _unfold(dqueries, group).mul_(scale)


def _hide(scores: Tensor, tile: Tile, lo: Tensor, hi: Tensor) -> None:
    """-inf where the row does not see the key; ``fmin``, since the NaN of a hidden key must not come through."""
    at = torch.arange(tile.key, tile.end, dtype=lo.dtype)
    visible = (at >= lo[:, None]) & (at < hi[:, None])
    ceiling = visible.float().sub_(0.5).mul_(torch.inf)  # torch.where and masked_fill take ten times as long
    by_head = scores.view(-1, *visible.shape)
    torch.fmin(by_head, ceiling, out=by_head)


def _fold(x: Tensor, group: int) -> Tensor:
    """``[S, H, D]`` as ``[Hkv, group * S, D]`` in fp32, a new tensor: what reads a key/value head is one matrix."""
    rows, heads, dim = x.shape
    by_head = torch.empty(heads // group, group, rows, dim)
    return by_head.copy_(x.view(rows, heads // group, group, dim).permute(1, 2, 0, 3)).view(-1, group * rows, dim)


def _fold_vector(x: Tensor, group: int) -> Tensor:
    """``[H, S]`` as ``[Hkv, group * S, 1]``."""
    return x.reshape(len(x) // group, -1, 1)


def _unfold(x: Tensor, group: int) -> Tensor:
    """``[Hkv, group * S, D]`` as ``[S, H, D]``."""
    kv_heads, folded, dim = x.shape
    return x.view(kv_heads * group, folded // group, dim).transpose(0, 1)


def _chunks(q: Tensor, k: Tensor, blocks: list[Block]) -> Iterator[Chunk]:
    """As many key/value heads at a time as keep each thread busy, and its tile of scores in the cache."""
    if not blocks:
        return
    heads, kv_heads = q.shape[2], k.shape[2]
    group, rows = heads // kv_heads, blocks[0].end - blocks[0].row
    step = max(1, TILE_SCORES // (group * rows * TILE_KEYS)) * torch.get_num_threads()
    for batch in range(q.shape[0]):
        for first in range(0, kv_heads, step):
            end = min(first + step, kv_heads)
            yield Chunk(batch, slice(first * group, end * group), slice(first, end))


def _blocks(lo: Tensor, hi: Tensor, group: int) -> list[Block]:
    """Blocks of rows with the tiles they see; a block that sees nothing is left out."""
    rows = max(FOLDED_ROWS // group, MIN_BLOCK_ROWS)
    starts = list(range(0, len(lo), rows))
    ends = [min(start + rows, len(lo)) for start in starts]
    last = [end - 1 for end in ends]
    limits = zip(*(x[index].tolist() for x in (lo, hi) for index in (starts, last)), strict=True)
    found = (Block(start, end, _tiles(*edges)) for start, end, edges in zip(starts, ends, limits, strict=True))
    return [block for block in found if block.tiles]


def _tiles(lo_first: int, lo_last: int, hi_first: int, hi_last: int) -> tuple[Tile, ...]:
    """Masked head, full middle, masked tail; lo and hi are those of the first and the last row."""
    if lo_last >= hi_first:  # no key that every row sees
        return _cut(lo_first, hi_last, masked=True)
    head, tail = _cut(lo_first, lo_last, masked=True), _cut(hi_first, hi_last, masked=True)
    return head + _cut(lo_last, hi_first, masked=False) + tail


def _cut(key: int, end: int, *, masked: bool) -> tuple[Tile, ...]:
    return tuple(Tile(start, min(start + TILE_KEYS, end), masked) for start in range(key, end, TILE_KEYS))
