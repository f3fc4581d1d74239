"""The CPU backend: PyTorch's own flash-attention operator where it can, a blockwise body where it cannot.

The operator takes rectangles and square causal regions with ``D == Dv``, without softcap, ALiBi and dropout: squares of
which row i sees the first i + 1 keys; seen from the other end, the rows and the keys in reverse, that is also a square
of which row i sees all but the first i. Its backward takes ``out`` and ``lse`` from outside, those over all shards, so
that the gradients of the regions of a ring add up exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import PLAIN, Bounds, Scores
from ..buffers import Pair, Tensors
from . import blockwise
from .blockwise import Modifiers
from .regions import Kind, Region, halves, limits, regions

NO_DROPOUT = 0.0
LEAST_ROWS = 128  # of a square on the diagonal: in smaller ones a call costs more than it saves


def operator_forward(q: Tensor, k: Tensor, v: Tensor, kind: Kind, *, scale: float) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, Sq, H, D]`` in q's dtype and ``lse`` ``[B, H, Sq]``, fp32, natural log."""
    flipped = kind is Kind.ANTICAUSAL
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *((x.flip(1) if flipped else x).transpose(1, 2) for x in (q, k, v)),
        NO_DROPOUT, kind is not Kind.RECTANGLE, scale=scale,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out.flip(1), lse.flip(2)) if flipped else (out, lse)


def operator_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv for the ``out`` and the ``lse`` of whole rows, whatever other keys they saw; fp32 or q's dtype.

    Of a causal square the operator computes blocks of 512 keys whole, whether its rows see them or not. So it is cut
    into small squares along the diagonal and, under them, rectangles that double in size: one call for those of a size.
    """
    given: tuple[Tensor, ...] = dout, q, k, v, out
    if kind is Kind.RECTANGLE:
        return _operator_backward(given, lse, causal=False, scale=scale)
    flipped = kind is Kind.ANTICAUSAL
    if flipped:
        given, lse = tuple(x.flip(1) for x in given), lse.flip(2)
    grads = _causal_operator_backward(given, lse, scale=scale)
    return tuple(x.flip(1) for x in grads) if flipped else grads  # type: ignore[return-value]


def _causal_operator_backward(given: tuple[Tensor, ...], lse: Tensor, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, squares = lse.shape[2], 1
    while rows % (2 * squares) == 0 and rows // (2 * squares) >= LEAST_ROWS:
        squares *= 2
    pieces = _operator_backward(
        tuple(_cut(x, squares) for x in given), _cut_lse(lse, squares), causal=True, scale=scale
    )
    if squares == 1:
        return pieces
    whole = (x.reshape(-1, rows, *x.shape[2:]) for x in pieces)
    dq, dk, dv = (x.float().contiguous() for x in whole)  # a sum of several calls: in fp32
    del pieces, whole  # of one size alone: what a call returns is not kept beside the next one's
    while squares > 1:
        squares //= 2
        _add_rectangles((dq, dk, dv), given, lse, squares, scale=scale)
    return dq, dk, dv


def _add_rectangles(
    grads: tuple[Tensor, ...], given: tuple[Tensor, ...], lse: Tensor, squares: int, *, scale: float
) -> None:
    """Add what the late half of the rows of every square sees of the early half of its keys."""
    rows = lse.shape[2] // squares
    early, late = slice(0, rows // 2), slice(rows // 2, None)
    whose = late, late, early, early, late
    parts = tuple(_cut(x, squares)[:, near] for x, near in zip(given, whose, strict=True))
    pieces = _operator_backward(parts, _cut_lse(lse, squares)[..., late], causal=False, scale=scale)
    for grad, piece, near in zip(grads, pieces, (late, early, early), strict=True):
        _cut(grad, squares)[:, near] += piece


def _operator_backward(
    given: tuple[Tensor, ...], lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in given), lse, NO_DROPOUT, causal, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cut(x: Tensor, count: int) -> Tensor:
    """``[B, S, ...]`` as ``[B * count, S / count, ...]``."""
    return x.reshape(-1, x.shape[1] // count, *x.shape[2:])


def _cut_lse(lse: Tensor, count: int) -> Tensor:
    """``[B, H, S]`` as ``[B * count, H, S / count]``."""
    return _cut(lse.transpose(1, 2), count).transpose(1, 2)


DOT_ROWS = 1024
DLSE_COLUMNS = 2  # a gradient through lse, rounded to the model dtype, and what that left of it


class AtenForward:
    """Folds key shards into a running ``out``, normalised, fp32, and ``lse``, natural log.

    The running ``lse`` is float64: it is small, and rounding it at every hop would show in all gradients. ``start`` is
    the state before any key, fp32; its ``out`` is written to.
    """

    def __init__(self, q: Tensor, *, softmax_scale: float, start: tuple[Tensor, Tensor] | None = None) -> None:
        self._q = _rows(q)
        self._scale = softmax_scale
        self._value_dim = q.shape[-1]
        self._state: Tensors | None = None if start is None else (start[0], start[1].double())
        self._written = torch.full(q.shape[:2], start is not None)

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Fold one shard in; ``final`` changes nothing here, since :meth:`result` is what casts."""
        k, v = _rows(k), _rows(v)
        self._value_dim = v.shape[-1]
        wide: Pair | None = None
        for region in _regions(self._q, k, v, bounds, scores):
            if region.kind is Kind.BLOCKWISE:
                wide = wide or (k.float(), v.float())  # once for all regions
                self._fold_blockwise(*_keys(region, *wide), bounds, region, scores)
            else:
                q = self._q[region.items, region.rows]
                self._merge(region, *operator_forward(q, *_keys(region, k, v), region.kind, scale=self._scale))
            self._written[region.items, region.rows] = True

    def result(self) -> tuple[Tensor, Tensor]:
        """``out`` ``[B, S, H, Dv]`` in q's dtype and ``lse`` ``[B, H, S]``, fp32; 0 and -inf where nothing was seen."""
        out, lse = self._started()
        return out.to(self._q.dtype), lse.to(torch.float32, memory_format=torch.contiguous_format)

    def _started(self) -> Tensors:
        if self._state is None:
            batch, rows, heads, _ = self._q.shape
            out = torch.zeros(batch, rows, heads, self._value_dim, dtype=torch.float32)
            self._state = out, torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64)
        return self._state

    def _of_region(self, region: Region) -> Tensors:
        """What the rows of a region have so far."""
        out, lse = self._started()
        return out[region.items, region.rows], lse[region.items, :, region.rows]

    def _fold_blockwise(self, k: Tensor, v: Tensor, bounds: Bounds, region: Region, scores: Scores) -> None:
        q, (out, lse) = self._q[region.items, region.rows], self._of_region(region)
        modifiers = None if scores.is_plain else Modifiers(scores, region)
        blockwise.forward(q, k, v, out, lse, limits(bounds, region), scale=self._scale, modifiers=modifiers)

    def _merge(self, region: Region, part: Tensor, part_lse: Tensor) -> None:
        """Average what these rows had with the new part, each weighted by the exponentials it stands for.

        ``w = e^part_lse / (e^lse + e^part_lse)``. A row's first part is written, not merged; where it covers all rows
        it becomes the state as it is.
        """
        if self._state is None and part.shape[:2] == self._q.shape[:2]:
            self._state = part.float(), part_lse.double()
            return
        out, lse = self._of_region(region)
        if self._written[region.items, region.rows].any():
            weight = torch.sigmoid(part_lse - lse)  # 1 for a row at -inf; part_lse never is, each of its rows has keys
            out.lerp_(part.float(), weight.float().transpose(1, 2).unsqueeze(-1))
            torch.logaddexp(lse, part_lse.double(), out=lse)
        else:
            out.copy_(part)
            lse.copy_(part_lse)


class _Heads(NamedTuple):
    """Some key/value heads, and the query heads that read them."""

    queries: slice
    keys: slice


class _Share(NamedTuple):
    """What there is to do about a shard, or a half of it."""

    heads: _Heads
    regions: tuple[Region, ...]
    key: int  # of all regions, also those of the other half
    end: int
    one_call: bool  # of the operator, for these heads


class _Part(NamedTuple):
    """dK and dV of the keys ``[key, end)`` and the key/value heads ``heads`` of a shard, from this rank's queries."""

    heads: slice
    key: int
    end: int
    dk: Tensor
    dv: Tensor


class AtenBackward:
    """This rank's part of the gradients, one key shard after the other.

    The operator computes dQ, dK and dV at once, so :meth:`dkdv` does the whole of a remote shard and its :meth:`dq`
    nothing: dK/dV travel behind the next shard. The local one is cut in two, by heads where it is one call of the
    operator, else by rows: :meth:`dq` does the first half, which hides the first K/V, :meth:`dkdv` the second, which
    hides the way of what returns.

    A gradient through ``lse`` only changes ``delta = rowsum(dout * out)``, which the operator computes itself, into
    ``delta - dlse``: dout is widened by -dlse, out by 1, and q, k and v by 0.
    """

    def __init__(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float
    ) -> None:
        self._dq = torch.zeros(q.shape, dtype=torch.float32)
        self._dtype = q.dtype
        self._extra = 0 if dlse is None else DLSE_COLUMNS
        if dlse is not None:
            dout, out, q = _widen(dout, -dlse), F.pad(out, (0, self._extra), value=1.0), F.pad(q, (0, self._extra))
        self._dout, self._q, self._out = _rows(dout), _rows(q), _rows(out)
        self._lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(score - lse) of such a row is 0, and not NaN
        self._delta: Tensor | None = None
        self._scale = softmax_scale
        self._local: deque[_Part] = deque()  # one per part of the mask, in order

    def dq(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool = False
    ) -> None:
        """The first half of the local shard. A remote one is done by :meth:`dkdv`; ``final``: see :meth:`result`."""
        if local:
            first, _ = self._halves(k, v, bounds, scores)
            self._local.append(self._part(k, v, bounds, first, scores))

    def dkdv(
        self,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        *,
        scores: Scores = PLAIN,
        local: bool,
        accum: Callable[[], Tensors] | None,
        out: Tensors,
    ) -> None:
        """Fill ``out`` with this shard's dK and dV plus ``accum()``, which may lie in the same memory.

        ``accum`` is called after all else, since it waits for the network.
        """
        if local:
            _, second = self._halves(k, v, bounds, scores)
            half = self._local.popleft()
            if second.one_call:
                parts = [half, self._part(k, v, bounds, second, scores)]
            else:
                parts = [self._part(k, v, bounds, second, scores, half)]
        else:
            parts = [self._part(k, v, bounds, self._whole(k, v, bounds, scores), scores)]
        arrived = (None, None) if accum is None else accum()
        for part in parts:
            for buffer, base, grad in zip(out, arrived, (part.dk, part.dv), strict=True):
                _settle(buffer[:, :, part.heads], None if base is None else base[:, :, part.heads], grad, part)

    def result(self) -> Tensor:
        """dQ in q's dtype."""
        return self._dq.to(self._dtype)

    def _whole(self, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> _Share:
        todo = _regions(self._q, k, v, bounds, scores)
        key, end = min((region.key for region in todo), default=0), max((region.key_end for region in todo), default=0)
        one_call = len(todo) == 1 and todo[0].kind is not Kind.BLOCKWISE and todo[0].items == slice(0, None)
        return _Share(_heads(self._q, k, 0, k.shape[2]), todo, key, end, one_call)

    def _halves(self, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> tuple[_Share, _Share]:
        whole = self._whole(k, v, bounds, scores)
        if not whole.one_call:
            first, second = halves(whole.regions)
            return whole._replace(regions=first), whole._replace(regions=second)
        some, others = _halves(self._q, k)
        return whole._replace(heads=some), whole._replace(heads=others)

    def _part(
        self, k: Tensor, v: Tensor, bounds: Bounds, share: _Share, scores: Scores, accum: _Part | None = None
    ) -> _Part:
        """Add dQ of a share and return its dK and dV: the operator's own where one call does it, or ``accum``."""
        heads, todo = share.heads, share.regions
        k, v = _rows(k)[:, :, heads.keys], _rows(v)[:, :, heads.keys]
        if share.one_call and k.numel():
            (region,) = todo
            return _Part(heads.keys, region.key, region.key_end, *self._operator(*_keys(region, k, v), heads, region))
        accum = accum or _Part(heads.keys, share.key, share.end, *(_zeros(x[:, share.key : share.end]) for x in (k, v)))
        wide: Pair | None = None
        for region in todo if k.numel() else ():
            near = slice(region.key - accum.key, region.key_end - accum.key)
            grads = accum.dk[region.items, near], accum.dv[region.items, near]
            if region.kind is Kind.BLOCKWISE:
                wide = wide or (k.float(), v.float())  # once for all regions
                self._blockwise(*_keys(region, *wide), bounds, heads, region, scores, grads)
            else:
                for total, grad in zip(grads, self._operator(*_keys(region, k, v), heads, region), strict=True):
                    total += grad
        return accum

    def _operator(self, k: Tensor, v: Tensor, heads: _Heads, region: Region) -> Tensors:
        dout, q, out = (x[region.items, region.rows, heads.queries] for x in (self._dout, self._q, self._out))
        k, v = (F.pad(x, (0, self._extra)) if self._extra else x for x in (k, v))
        lse = self._lse[region.items, heads.queries, region.rows]
        grads = operator_backward(dout, q, k, v, out, lse, region.kind, scale=self._scale)
        dq, dk, dv = (x[..., : x.shape[-1] - self._extra] for x in grads)
        self._dq[region.items, region.rows, heads.queries] += dq
        return dk, dv

    def _blockwise(
        self, k: Tensor, v: Tensor, bounds: Bounds, heads: _Heads, region: Region, scores: Scores, accum: Tensors
    ) -> None:
        if self._delta is None:
            self._delta = row_dot(self._dout, self._out).transpose(1, 2)
        dout, q, dq = (x[region.items, region.rows, heads.queries] for x in (self._dout, self._q, self._dq))
        dout, q = dout[..., : v.shape[-1]], q[..., : k.shape[-1]]
        lse, delta = (x[region.items, heads.queries, region.rows] for x in (self._lse, self._delta))
        modifiers = None if scores.is_plain else Modifiers(scores, region)
        blockwise.backward(
            dout, q, k, v, lse, delta, limits(bounds, region),
            scale=self._scale, grads=(dq, *accum), modifiers=modifiers,
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """As the operator can read it: a unit last stride, and rows that do not overlap (those of an expanded dout do)."""
    return x if x.stride(-1) == 1 and x.stride(1) >= x.shape[-1] else x.contiguous()


def _regions(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> tuple[Region, ...]:
    if 0 in (q.numel(), k.numel(), v.numel()):
        return ()
    return regions(bounds, q.shape[1], k.shape[1], operator=k.shape[-1] == v.shape[-1] and scores.is_plain)


def _zeros(x: Tensor) -> Tensor:
    """Zeros in fp32, shaped as ``x``, in memory head by head: what is added to them are products of one head each."""
    items, keys, heads, dim = x.shape
    return torch.zeros(items, heads, keys, dim, dtype=torch.float32).transpose(1, 2)


def _keys(region: Region, k: Tensor, v: Tensor) -> Pair:
    """The keys of a region."""
    return k[region.items, region.keys], v[region.items, region.keys]


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """``sum(x * y)`` of each row, fp32, ``[B, S, H]``; in regions, since new memory is slow memory."""
    regions = [slice(row, row + DOT_ROWS) for row in range(0, max(x.shape[1], 1), DOT_ROWS)]
    return torch.cat([(x[:, near].float() * y[:, near].float()).sum(-1) for near in regions], 1)


def _heads(q: Tensor, k: Tensor, first: int, end: int) -> _Heads:
    group = q.shape[2] // k.shape[2]
    return _Heads(slice(first * group, end * group), slice(first, end))


def _halves(q: Tensor, k: Tensor) -> tuple[_Heads, _Heads]:
    """The heads in two halves; all in the first where two calls would leave threads idle that one keeps busy."""
    batch, heads, threads = k.shape[0], k.shape[2], torch.get_num_threads()
    half = heads // 2
    rounds = [-(-batch * count // threads) for count in (half, heads - half, heads)]
    first = half if half and rounds[0] + rounds[1] == rounds[2] else heads
    return _heads(q, k, 0, first), _heads(q, k, first, heads)


def _widen(dout: Tensor, extra: Tensor) -> Tensor:
    """dout with the columns of ``extra`` ``[B, H, S]``: what rounding to dout's dtype keeps, and what it drops."""
    column = extra.transpose(1, 2).unsqueeze(-1)
    kept = column.to(dout.dtype)
    return torch.cat([dout, kept, (column - kept).to(dout.dtype)], dim=-1)


def _settle(buffer: Tensor, base: Tensor | None, grad: Tensor, part: _Part) -> None:
    """``buffer = base + grad``, in one pass; ``grad`` covers the part's keys alone, and ``base`` may be ``buffer``."""
    outside = (slice(0, part.key), slice(part.end, None))
    inside = slice(part.key, part.end)
    if base is None:
        for keys in outside:
            buffer[:, keys].zero_()
        buffer[:, inside].copy_(grad)
        return
    if base.data_ptr() != buffer.data_ptr():
        for keys in outside:
            buffer[:, keys].copy_(base[:, keys])
    torch.add(base[:, inside], grad, out=buffer[:, inside])
