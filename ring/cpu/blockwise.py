"""Attention under any bounds in plain torch, tile by tile: what PyTorch's CPU operator cannot express.

FlashAttention-2's loops (Dao 2023, arXiv:2307.08691, algorithms 1 and 2), one batch item and a few key/value heads at a
time. The query heads that share a key/value head are rows of one matrix, so K and V are never expanded. Everything is
fp32. Exponentials go by ``exp2``: torch's ``exp`` is a hundred times slower where it underflows. Where no score can be
large, by the norms of the queries and keys, the forward subtracts no maximum.

A tile that no row sees is skipped, and only tiles on the edge pay for the mask. As with the operator, a NaN or inf may
reach what shares a tile with something that sees it: the rows by ``v``, the gradients by any input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .modifiers import LOG2_E, Modifiers, Place
from .pieces import Limits
from .tiling import Block, Chunk, Edge, Tile, blocks, chunks

LOWEST = torch.finfo(torch.float32).min
SMALL, LARGEST_VALUE = 60.0, 1e14  # 2^SMALL * LARGEST_VALUE, times a million keys, is still a number


@torch.inference_mode()  # what it calls is small: bookkeeping for autograd would be 4% of it
def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, limits: Limits,
    *, scale: float, modifiers: Modifiers | None = None,
) -> None:  # fmt: skip
    """Fold ``k`` and ``v`` into the running ``out`` and ``lse``, in place.

    The online softmax restarts from the state, ``m = lse, l = 1, acc = out``; a row that has seen nothing has
    ``lse = -inf`` and ``out = 0``. Dropped weights count in ``lse``.

    Shapes: q ``[B, Sq, H, D]``, k ``[B, Sk, Hkv, D]``, v ``[B, Sk, Hkv, Dv]``, any float dtype; out ``[B, Sq, H, Dv]``
    and lse ``[B, H, Sq]``, fp32 or wider, natural log. Row i sees the keys ``lo[i] <= j < hi[i]`` that lie in one of
    the runs.
    """
    group = q.shape[2] // k.shape[2]
    all_heads = chunks(k, v, group, q.shape[1])
    todo = blocks(limits, group, len(all_heads[0].keys))
    room = _room(todo, all_heads[0], group)
    for block in todo:
        rows = slice(block.row, block.end)
        for chunk in all_heads:
            item, heads = chunk.item, chunk.heads
            queries, acc = _fold(q[item, rows, heads], group), _fold(out[item, rows, heads], group)
            m = _fold_vector(lse[item, heads, rows] * LOG2_E, group)
            acc, m = _attend(queries.mul_(scale * LOG2_E), acc, m, block, chunk, modifiers, room)
            out[item, rows, heads] = _unfold(acc, group)
            lse[item, heads, rows] = m.view(-1, block.end - block.row).mul_(1 / LOG2_E)


def _attend(
    queries: Tensor, acc: Tensor, m: Tensor, block: Block, chunk: Chunk, modifiers: Modifiers | None, room: Tensor
) -> tuple[Tensor, Tensor]:
    """One block of rows: the new ``out`` and the new ``lse``, here and below in units of the base-2 logarithm."""
    if modifiers is None and _is_small(queries, m, chunk):
        total = m.exp2_()
        acc.mul_(total)
        for tile in block.tiles:
            weights = _product(queries, chunk.keys[:, tile.key : tile.end], room).exp2_()
            _clear(weights, block, tile.edges)
            total.add_(weights.sum(-1, keepdim=True))
            acc.baddbmm_(weights, chunk.values[:, tile.key : tile.end])
        return _divided(acc, torch.zeros_like(total), total)
    total = torch.ones_like(m)
    for tile in block.tiles:
        scores = _product(queries, chunk.keys[:, tile.key : tile.end], room)
        if modifiers is not None:
            modifiers.apply(_by_head(scores, block), _place(chunk, block, tile))
        _hide(scores, block, tile.edges)
        peak = torch.maximum(m, scores.amax(-1, keepdim=True))
        pivot = peak.clamp(min=LOWEST)  # finite: a row without a key yet would give -inf - -inf
        weights = scores.sub_(pivot).exp2_()
        decay = m.sub_(pivot).exp2_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        if modifiers is not None and modifiers.drops:
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, limits: Limits,
    *, scale: float, grads: tuple[Tensor, ...], modifiers: Modifiers | None = None,
) -> None:  # fmt: skip
    """Add these queries' and keys' part of the gradients to ``grads``: dq, dk and dv, fp32, in place.

    ``lse`` is the row's over all shards, +inf for a row that has seen nothing, and ``delta`` is
    ``rowsum(dout * out) - dlse``, both ``[B, H, Sq]`` fp32; the rest is shaped as in :func:`forward`.
    """
    dq, dk, dv = grads
    base_2 = lse * LOG2_E
    group = q.shape[2] // k.shape[2]
    all_heads = chunks(k, v, group, q.shape[1])
    todo = blocks(limits, group, len(all_heads[0].keys))
    room, more_room = (_room(todo, all_heads[0], group) for _ in range(2))
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
                weights, kept, derivative = _weights(scaled, keys, lses, block, tile, chunk, modifiers, room)
                dscores = _product(douts, values, more_room)
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
    room: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The final weights of a tile, and where the modifiers say so what they and dscores are multiplied with."""
    scores, kept, derivative = _product(queries, keys, room), None, None
    if modifiers is not None:
        at = _place(chunk, block, tile)
        derivative = modifiers.apply(_by_head(scores, block), at, backward=True)
        derivative = None if derivative is None else derivative.view_as(scores)
        kept = modifiers.kept(at).view_as(scores) if modifiers.drops else None
    scores.sub_(lses)
    _hide(scores, block, tile.edges)
    return scores.exp2_(), kept, derivative


def _room(blocks: list[Block], chunk: Chunk, group: int) -> Tensor:
    """Memory for the scores of any tile: what is allocated tile by tile may come fresh from the system each time."""
    sizes = ((block.end - block.row) * (tile.end - tile.key) for block in blocks for tile in block.tiles)
    return torch.empty(len(chunk.keys) * group * max(sizes, default=0), dtype=torch.float32)


def _product(rows: Tensor, columns: Tensor, room: Tensor) -> Tensor:
    """``rows columns^T``, in ``room``."""
    shape = *rows.shape[:2], columns.shape[1]
    return torch.bmm(rows, columns.mT, out=room[: math.prod(shape)].view(shape))


def _place(chunk: Chunk, block: Block, tile: Tile) -> Place:
    return Place(chunk.item, chunk.heads, slice(block.row, block.end), slice(tile.key, tile.end))


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
