"""Attention under any bounds in plain torch, tile by tile: what PyTorch's CPU operator cannot express.

FlashAttention-2's loops (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), one batch item and a few key/value heads at a
time. The query heads that share a key/value head are rows of one matrix, so K and V are never expanded. Everything is
fp32. Exponentials go by ``exp2``: torch's ``exp`` is a hundred times slower where it underflows.

A tile that no row sees is skipped, and only tiles on the edge pay for the mask. As with the operator, a NaN or inf may
reach what shares a tile with something that sees it: the rows by ``v``, the gradients by any input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = 1 / math.log(2)
FOLDED_ROWS = 256  # rows of one product, all query heads of the group together: sgemm is at full speed there
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 128  # fewer would read K and V too often; more would waste the edges of a window
TILE_KEYS = 512
TILE_SCORES = 1 << 18  # scores per tile and thread: 1 MiB in fp32, half of a usual L2 cache


class Chunk(NamedTuple):
    """One batch item and some key/value heads, with the query heads that read them; ``keys`` are ``[Hkv, Sk, D]``."""

    batch: int
    heads: slice
    kv_heads: slice
    keys: Tensor
    values: Tensor


class Edge(NamedTuple):
    """Columns of a tile that not every row sees."""

    columns: slice
    ceiling: Tensor  # [rows, columns]: inf where the row sees the key, else -inf


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


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lo: Tensor, hi: Tensor, *, scale: float) -> None:
    """Fold ``k`` and ``v`` into the running ``out`` and ``lse``, in place.

    The online softmax restarts from the state, ``m = lse, l = 1, acc = out``; a row that has seen nothing has
    ``lse = -inf`` and ``out = 0``.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any float dtype; out ``[B, Sq, H, Dv]``
    and lse ``[B, H, Sq]``, fp32, natural log. Row i sees the keys ``lo[i] <= j < hi[i]``.
    """
    group = q.shape[2] // k.shape[2]
    chunks = _chunks(k, v, group, len(lo))
    for block in _blocks(lo, hi, group):
        rows = slice(block.row, block.end)
        for batch, heads, _, keys, values in chunks:
            queries, acc = _fold(q[batch, rows, heads], group).mul_(scale), _fold(out[batch, rows, heads], group)
            m = _fold_vector(lse[batch, heads, rows], group)
            acc, m = _attend(queries, keys, values, acc, m, block.tiles)
            out[batch, rows, heads] = _unfold(acc, group)
            lse[batch, heads, rows] = m.view(-1, block.end - block.row)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, acc: Tensor, m: Tensor, tiles: tuple[Tile, ...]
) -> tuple[Tensor, Tensor]:
    """One block of rows: the new ``out`` and the new ``lse``."""
    total = torch.ones_like(m)
    for key, end, edges in tiles:
        scores = _hide(torch.bmm(queries, keys[:, key:end].mT), edges)
        peak = torch.maximum(m, scores.amax(-1, keepdim=True))
        pivot = peak.masked_fill(peak == -torch.inf, 0.0)  # finite: a row without a key yet would give -inf - -inf
        weights = scores.sub_(pivot).mul_(LOG2_E).exp2_()
        decay = (m - pivot).mul_(LOG2_E).exp2_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc.mul_(decay).baddbmm_(weights, values[:, key:end])
        m = peak
    total.masked_fill_(total == 0, 1.0)  # rows that have seen nothing stay at out 0, lse -inf
    return acc.div_(total), m + total.log_()


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
    chunks = _chunks(k, v, group, len(lo))
    for block in _blocks(lo, hi, group):
        rows = slice(block.row, block.end)
        for batch, heads, kv_heads, keys, values in chunks:
            dkeys, dvalues = (x[batch, :, kv_heads].transpose(0, 1) for x in (dk, dv))
            queries, douts = _fold(q[batch, rows, heads], group).mul_(scale), _fold(dout[batch, rows, heads], group)
            lses, deltas = (_fold_vector(x[batch, heads, rows], group) for x in (lse, delta))
            dqueries = torch.zeros_like(queries)
            for key, end, edges in block.tiles:
                scores = _hide(torch.baddbmm(lses, queries, keys[:, key:end].mT, beta=-1), edges)
                weights = scores.mul_(LOG2_E).exp2_()
                dvalues[:, key:end] += torch.bmm(weights.mT, douts)
                dscores = torch.bmm(douts, values[:, key:end].mT).sub_(deltas).mul_(weights)
                dkeys[:, key:end] += torch.bmm(dscores.mT, queries)  # queries carry the scale
                dqueries.baddbmm_(dscores, keys[:, key:end])
            dq[batch, rows, heads] += _unfold(dqueries, group).mul_(scale)


def _hide(scores: Tensor, edges: tuple[Edge, ...]) -> Tensor:
    """-inf in place where the row does not see the key; ``fmin`` lets no NaN of a hidden key through."""
    for columns, ceiling in edges:
        by_head = scores.view(-1, len(ceiling), scores.shape[-1])[..., columns]
        torch.fmin(by_head, ceiling, out=by_head)  # masked_fill takes four times as long
    return scores


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


def _block_rows(group: int) -> int:
    return min(max(FOLDED_ROWS // group, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)


def _chunks(k: Tensor, v: Tensor, group: int, rows: int) -> list[Chunk]:
    """As many key/value heads at a time as keep each thread busy, and its tile of scores in the cache."""
    batches, keys, kv_heads, _ = k.shape
    scores = group * min(_block_rows(group), rows) * min(TILE_KEYS, keys)
    step = max(1, TILE_SCORES // scores) * torch.get_num_threads()
    chunks = []
    for batch in range(batches):
        for first in range(0, kv_heads, step):
            end = min(first + step, kv_heads)
            near = (x[batch, :, first:end].transpose(0, 1).float() for x in (k, v))
            chunks.append(Chunk(batch, slice(first * group, end * group), slice(first, end), *near))
    return chunks


def _blocks(lo: Tensor, hi: Tensor, group: int) -> Iterator[Block]:
    """Blocks of rows with the tiles they see; a block that sees nothing is left out."""
    for row in range(0, len(lo), _block_rows(group)):
        near = slice(row, row + _block_rows(group))
        tiles = _tiles(lo[near], hi[near])
        if tiles:
            yield Block(row, min(near.stop, len(lo)), tiles)


def _tiles(lo: Tensor, hi: Tensor) -> tuple[Tile, ...]:
    """What one block of rows sees, in tiles of equal width; only the head and the tail of it are masked."""
    start, full_start, full_end, end = (int(x) for x in (lo[0], lo[-1], hi[0], hi[-1]))  # neither end decreases
    edges = [(start, full_start), (full_end, end)] if full_start < full_end else [(start, end)]
    count = -(-(end - start) // TILE_KEYS)
    cuts = [start + (end - start) * cut // count for cut in range(count + 1)] if count else []
    return tuple(
        Tile(key, stop, tuple(_edge(lo, hi, max(key, a), min(stop, b), key) for a, b in edges if a < stop and key < b))
        for key, stop in pairwise(cuts)
    )


def _edge(lo: Tensor, hi: Tensor, key: int, end: int, base: int) -> Edge:
    at = torch.arange(key, end, dtype=lo.dtype)
    visible = (at >= lo[:, None]) & (at < hi[:, None])
    return Edge(slice(key - base, end - base), visible.float().sub_(0.5).mul_(torch.inf))
