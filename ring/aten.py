"""The CPU backend: PyTorch's own flash-attention operator where it can, a blockwise body where it cannot.

The operator takes full rectangles and square causal pieces with ``D == Dv``. Its backward takes ``out`` and ``lse``
from outside, those over all shards, so that the gradients of the pieces of a ring add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Bounds
from . import blockwise
from .pieces import Kind, Piece, limits, pieces
from .traffic import Tensors

NO_DROPOUT = 0.0
DLSE_COLUMNS = 2  # a gradient through lse, rounded to the model dtype, and what that left of it


class AtenForward:
    """Folds key shards into a running ``out``, normalised, fp32, and ``lse``, natural log.

    The running ``lse`` is float64: it is small, and rounding it at every hop would show in all gradients.
    """

    def __init__(self, q: Tensor, *, softmax_scale: float) -> None:
        self._q = _rows(q)
        self._scale = softmax_scale
        self._value_dim = q.shape[-1]
        self._state: Tensors | None = None
        self._seen: list[Piece] = []

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, final: bool) -> None:
        """Fold one shard in; ``final`` changes nothing here, since :meth:`result` is what casts."""
        k, v = _rows(k), _rows(v)
        self._value_dim = v.shape[-1]
        for piece in _pieces(self._q, k, v, bounds):
            near = k[:, piece.keys], v[:, piece.keys]
            if piece.kind is Kind.BLOCKWISE:
                self._fold_blockwise(*near, bounds, piece)
            else:
                self._merge(piece, *self._operator(*near, piece))
            self._seen.append(piece)

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

    def _fold_blockwise(self, k: Tensor, v: Tensor, bounds: Bounds, piece: Piece) -> None:
        out, lse = self._started()
        q, out, lse = self._q[:, piece.rows], out[:, piece.rows], lse[..., piece.rows]
        blockwise.forward(q, k, v, out, lse, *limits(bounds, piece), scale=self._scale)

    def _operator(self, k: Tensor, v: Tensor, piece: Piece) -> Tensors:
        q, causal = self._q[:, piece.rows], piece.kind is Kind.CAUSAL
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_by_head(q, k, v), NO_DROPOUT, causal, scale=self._scale
        )
        return out.transpose(1, 2), lse

    def _merge(self, piece: Piece, part: Tensor, part_lse: Tensor) -> None:
        """Average what these rows had with the new part, each weighted by the exponentials it stands for.

        ``w = e^part_lse / (e^lse + e^part_lse)``. A row's first part is written, not merged; where it covers all rows
        it becomes the state as it is.
        """
        if self._state is None and piece.row_end - piece.row == self._q.shape[1]:
            self._state = part.float(), part_lse.double()
            return
        out, lse = self._started()
        out, lse = out[:, piece.rows], lse[..., piece.rows]
        if any(seen.row < piece.row_end and piece.row < seen.row_end for seen in self._seen):
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
    nothing: the sums travel behind the next shard. The local one is cut in two by heads: :meth:`dq` does the first
    half, which hides the first K/V, :meth:`dkdv` the second, which hides the sums' way home.

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
        self._local: list[_Part] = []

    def dq(self, k: Tensor, v: Tensor, bounds: Bounds, *, local: bool, final: bool = False) -> None:
        """The first half of the local shard. A remote one is done by :meth:`dkdv`; ``final``: see :meth:`result`."""
        if local:
            first, _ = _halves(self._q, k)
            self._local = [self._part(k, v, bounds, first)]

    def dkdv(
        self,
        k: Tensor,
        v: Tensor,
        bounds: Bounds,
        *,
        local: bool,
        sums: Callable[[], Tensors] | None,
        into: Tensors,
    ) -> None:
        """Fill ``into`` with this shard's dK and dV plus ``sums()``, which may lie in the same memory.

        ``sums`` is called after all else, since it waits for the network.
        """
        if local:
            _, second = _halves(self._q, k)
            parts = [*self._local, self._part(k, v, bounds, second)]
        else:
            parts = [self._part(k, v, bounds, _heads(self._q, k, 0, k.shape[2]))]
        arrived = (None, None) if sums is None else sums()
        for part in parts:
            for buffer, base, grad in zip(into, arrived, (part.dk, part.dv), strict=True):
                _settle(buffer[:, :, part.heads], None if base is None else base[:, :, part.heads], grad, part)

    def result(self) -> Tensor:
        """dQ in q's dtype."""
        return self._dq.to(self._dtype)

    def _part(self, k: Tensor, v: Tensor, bounds: Bounds, heads: _Heads) -> _Part:
        """Add dQ of these key/value heads and return their dK and dV: the operator's own where one call does it."""
        k, v = _rows(k)[:, :, heads.keys], _rows(v)[:, :, heads.keys]
        todo = _pieces(self._q, k, v, bounds)
        if len(todo) == 1 and todo[0].kind is not Kind.BLOCKWISE:
            (piece,) = todo
            return _Part(heads.keys, piece.key, piece.key_end, *self._operator(k, v, heads.queries, piece))
        key, end = min((piece.key for piece in todo), default=0), max((piece.key_end for piece in todo), default=0)
        dk, dv = (torch.zeros(x.shape[0], end - key, *x.shape[2:], dtype=torch.float32) for x in (k, v))
        for piece in todo:
            near = slice(piece.key - key, piece.key_end - key)
            if piece.kind is Kind.BLOCKWISE:
                self._blockwise(k, v, bounds, heads.queries, piece, (dk[:, near], dv[:, near]))
            else:
                for total, grad in zip((dk, dv), self._operator(k, v, heads.queries, piece), strict=True):
                    total[:, near] += grad
        return _Part(heads.keys, key, end, dk, dv)

    def _operator(self, k: Tensor, v: Tensor, heads: slice, piece: Piece) -> Tensors:
        dout, q, out = (x[:, piece.rows, heads] for x in (self._dout, self._q, self._out))
        k, v = (F.pad(x[:, piece.keys], (0, self._extra)) if self._extra else x[:, piece.keys] for x in (k, v))
        lse, causal = self._lse[:, heads, piece.rows], piece.kind is Kind.CAUSAL
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_by_head(dout, q, k, v, out), lse, NO_DROPOUT, causal, scale=self._scale
        )
        dq, dk, dv = (x.transpose(1, 2)[..., : x.shape[-1] - self._extra] for x in grads)
        self._dq[:, piece.rows, heads] += dq
        return dk, dv

    def _blockwise(self, k: Tensor, v: Tensor, bounds: Bounds, heads: slice, piece: Piece, dkdv: Tensors) -> None:
        if self._delta is None:
            self._delta = (self._dout.float() * self._out.float()).sum(-1).transpose(1, 2)
        dout, q, dq = (x[:, piece.rows, heads] for x in (self._dout, self._q, self._dq))
        dout, q = dout[..., : v.shape[-1]], q[..., : k.shape[-1]]
        lse, delta = (x[:, heads, piece.rows] for x in (self._lse, self._delta))
        k, v, grads = k[:, piece.keys], v[:, piece.keys], (dq, *dkdv)
        blockwise.backward(dout, q, k, v, lse, delta, *limits(bounds, piece), scale=self._scale, grads=grads)


def _rows(x: Tensor) -> Tensor:
    """As the operator can read it: a unit last stride, and rows that do not overlap (those of an expanded dout do)."""
    return x if x.stride(-1) == 1 and x.stride(1) >= x.shape[-1] else x.contiguous()


def _by_head(*tensors: Tensor) -> Tensors:
    return tuple(x.transpose(1, 2) for x in tensors)


def _pieces(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Piece, ...]:
    if 0 in (q.numel(), k.numel(), v.numel()):
        return ()
    return pieces(bounds, q.shape[1], k.shape[1], operator=k.shape[-1] == v.shape[-1])


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
