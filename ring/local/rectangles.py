"""Local kernels of full and causal rectangles: a hop's bounds are cut into those, and their results merged in fp32."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import PLAIN, Bounds, KernelConfig, Scores
from ...kernels.launch import Pair
from .protocol import LocalForward, Supports
from .regions import Kind, Region, halves, regions

Tensors = tuple[Tensor, ...]
DOT_ROWS = 1024
DLSE_COLUMNS = 2  # a gradient through lse, rounded to the model dtype, and what that left of it
BY_RECTANGLES = {"bounds", "seqused_k", "block_sparse", "learnable_sink", "state"}
SCORES = {"softcap", "alibi_slopes", "dropout_p"}


class RectangleAttention:
    """A :class:`LocalAttention` made of functions that know full and causal rectangles alone.

    Every hop's bounds, whatever mask and layout, are cut into such rectangles, a few for common masks, and up to one
    per row for irregular ones. Results are merged in fp32, which serves ``learnable_sink``, too. For a gradient through
    lse, q, k and v get more columns of zeros.

    Args:
        name: the kernel's.
        forward: ``forward(q, k, v, *, causal, scale)`` returns ``out [B, Sq, H, Dv]`` in q's dtype and ``lse [B, H,
            Sq]``, fp32, natural log. ``causal``: of a square of which row i sees the first i + 1 keys.
        backward: ``backward(dout, q, k, v, out, lse, *, causal, scale)`` returns dq, dk and dv, fp32 or in q's dtype,
            for ``out`` and ``lse`` over all keys that a row sees. Where that is none, ``lse`` is inf. None: calls with
            gradients are refused.
        supports: devices, dtypes and head dims; masks and gradients are added.
        dlse_columns: by how many columns q, k and v may grow, at least 2; 0: gradients through lse are refused.
        blockwise: a module that computes irregular parts of a mask, other head dims of v, and scores, as
            ``ring/cpu/blockwise.py`` does; None: all parts are rectangles.
    """

    def __init__(
        self, name: str, forward: Callable[..., Pair], backward: Callable[..., Tensors] | None = None, *,
        supports: Supports, dlse_columns: int = DLSE_COLUMNS, blockwise: Any = None,
    ) -> None:  # fmt: skip
        if blockwise is None and (wrong := sorted(SCORES & {*supports.features})):
            raise ValueError(f"features has {', '.join(wrong)}: full and causal rectangles do not know of scores")
        own = {"backward"} if backward is not None else set[str]()
        own |= {"lse_gradient"} if backward is not None and dlse_columns >= DLSE_COLUMNS else set()
        self.name = name
        self.supports = replace(supports, features={*supports.features, *BY_RECTANGLES, *own})
        self.dlse_columns, self.blockwise = dlse_columns, blockwise
        self._forward, self._backward = forward, backward

    def forward(
        self, q: Tensor, *, softmax_scale: float, config: KernelConfig | None = None, start: Pair | None = None
    ) -> RectangleForward:
        """Begin a forward."""
        return RectangleForward(self, q, softmax_scale=softmax_scale, start=start)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float,
        config: KernelConfig | None = None,
    ) -> RectangleBackward:  # fmt: skip
        """Begin a backward."""
        return RectangleBackward(self, dout, q, out, lse, dlse, softmax_scale=softmax_scale)

    def cut(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> tuple[Region, ...]:
        """Return the regions of one hop."""
        if 0 in (q.numel(), k.numel(), v.numel()):
            return ()
        operator = self.blockwise is None or (k.shape[-1] == v.shape[-1] and scores.is_plain)
        return regions(bounds, q.shape[1], k.shape[1], operator=operator, exact=self.blockwise is None)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, kind: Kind, *, scale: float) -> Pair:
        """Return ``out`` and ``lse`` of one region."""
        flipped = kind is Kind.ANTICAUSAL  # causal, seen from the other end
        given = [x.flip(1) for x in (q, k, v)] if flipped else [q, k, v]
        results = self._forward(*given, causal=kind is not Kind.RECTANGLE, scale=scale)
        out, lse = check_forward(self.name, results, q, v.shape[3])
        return (out.flip(1), lse.flip(2)) if flipped else (out, lse)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, *, scale: float
    ) -> Tensors:
        """Return dq, dk and dv of one region."""
        assert self._backward is not None
        flipped, given = kind is Kind.ANTICAUSAL, (dout, q, k, v, out)
        if flipped:
            given, lse = tuple(x.flip(1) for x in given), lse.flip(2)  # type: ignore[assignment]
        grads = self._backward(*given, lse, causal=kind is not Kind.RECTANGLE, scale=scale)
        for name, x, like in zip(("dq", "dk", "dv"), _items(self.name, grads, 3), (q, k, v), strict=True):
            check_result(self.name, name, x, like.shape, torch.float32, q.dtype)
        return tuple(x.flip(1) for x in grads) if flipped else grads


def check_result(kernel: str, name: str, x: object, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise RuntimeError if what a kernel returned has another shape or dtype."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype not in dtypes:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise RuntimeError(
            f"backend {kernel!r} returned {name} as {got}: it must be {' or '.join(map(str, dtypes))} {list(shape)}"
        )


def _items(kernel: str, results: Any, count: int) -> Any:
    if not isinstance(results, tuple | list) or len(results) != count:
        raise RuntimeError(f"backend {kernel!r} returned {type(results).__name__}: it must be {count} tensors")
    return results


def check_forward(kernel: str, results: Any, q: Tensor, value_dim: int) -> Pair:
    """Return ``out`` and ``lse``, or raise RuntimeError if they do not fit the queries."""
    out, lse = _items(kernel, results, 2)
    check_result(kernel, "out", out, (*q.shape[:3], value_dim), q.dtype)
    check_result(kernel, "lse", lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    return out, lse


class RunningState:
    """The ``out``, normalised, fp32, and ``lse``, natural log, of the keys so far.

    ``lse`` is float64: it is small, and rounding it at every hop would show in all gradients. ``start`` is the state
    before any key, fp32; its ``out`` is written to.
    """

    def __init__(self, q: Tensor, start: Pair | None) -> None:
        self._q, self._value_dim = q, q.shape[-1]
        self._state: Pair | None = None if start is None else (start[0], start[1].double())
        self._written = torch.full(q.shape[:2], start is not None, device="cpu")

    def rows(self, region: Region) -> Pair:
        """Return the state of a region's rows, to be written to."""
        out, lse = self._whole()
        return out[region.items, region.rows], lse[region.items, :, region.rows]

    def written(self, region: Region) -> None:
        """Mark the rows of a region as written to."""
        self._written[region.items, region.rows] = True

    def expect(self, v: Tensor) -> None:
        """Take the head dim of the values."""
        self._value_dim = v.shape[-1]

    def merge(self, region: Region, part: Tensor, part_lse: Tensor) -> None:
        """Average what these rows had with the new part, each weighted by the exponentials it stands for.

        ``w = e^part_lse / (e^lse + e^part_lse)``. A row's first part is written, not merged; where it covers all rows
        it becomes the state as it is.
        """
        if self._state is None and part.shape[:2] == self._q.shape[:2]:
            self._state = part.float(), part_lse.double()
        else:
            out, lse = self.rows(region)
            if self._written[region.items, region.rows].any():
                weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)  # 1 for a row at -inf
                out.lerp_(part.float(), weight.float().transpose(1, 2).unsqueeze(-1))
                torch.logaddexp(lse, part_lse.double(), out=lse)
            else:
                out.copy_(part)
                lse.copy_(part_lse)
        self.written(region)

    def result(self) -> Pair:
        """``out`` ``[B, S, H, Dv]`` in q's dtype and ``lse`` ``[B, H, S]``, fp32; 0 and -inf where nothing was seen."""
        out, lse = self._whole()
        return out.to(self._q.dtype), lse.to(torch.float32, memory_format=torch.contiguous_format)

    def _whole(self) -> Pair:
        if self._state is None:
            (batch, rows, heads, _), device = self._q.shape, self._q.device
            out = torch.zeros(batch, rows, heads, self._value_dim, device=device, dtype=torch.float32)
            self._state = out, torch.full((batch, heads, rows), -torch.inf, device=device, dtype=torch.float64)
        return self._state


class MergedForward:
    """Forwards of a kernel without a state: a new one for every fold, whose results are merged."""

    def __init__(self, begin: Callable[[], LocalForward], q: Tensor, start: Pair | None, name: str) -> None:
        self._begin, self._name, self._q, self._state = begin, name, q, RunningState(q, start)
        self._region = Region(Kind.BLOCKWISE, 0, q.shape[1], 0, 0)  # all rows

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Compute one shard and merge it in."""
        one = self._begin()
        one.fold(k, v, bounds, scores=scores, final=True)
        self._state.expect(v)
        self._state.merge(self._region, *check_forward(self._name, one.result(), self._q, v.shape[3]))

    def result(self) -> Pair:
        """As :meth:`LocalForward.result`."""
        return self._state.result()


class RectangleForward:
    """Folds key shards into a running state, rectangle by rectangle."""

    def __init__(self, kernel: RectangleAttention, q: Tensor, *, softmax_scale: float, start: Pair | None) -> None:
        self._kernel, self._q, self._scale = kernel, _rows(q), softmax_scale
        self._state = RunningState(self._q, start)

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Fold one shard in; ``final`` changes nothing here, since :meth:`result` is what casts."""
        k, v = _rows(k), _rows(v)
        self._state.expect(v)
        wide: Pair | None = None
        for region in self._kernel.cut(self._q, k, v, bounds, scores):
            q = self._q[region.items, region.rows]
            if region.kind is Kind.BLOCKWISE:
                wide = wide or (k.float(), v.float())  # once for all regions
                state, near = self._state.rows(region), _keys(region, *wide)
                self._kernel.blockwise.forward(q, *near, *state, bounds, region, scores, scale=self._scale)
                self._state.written(region)
            else:
                near = _keys(region, k, v)
                self._state.merge(region, *self._kernel.compute(q, *near, region.kind, scale=self._scale))

    def result(self) -> Pair:
        """As :meth:`LocalForward.result`."""
        return self._state.result()


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


class RectangleBackward:
    """This rank's part of the gradients, one key shard after the other.

    A rectangle's dQ, dK and dV are computed at once, so :meth:`dkdv` does the whole of a remote shard and :meth:`dq`
    nothing: dK/dV travel behind the next shard. The local one is cut in two, by heads where it is one call of the
    operator, else by rows: :meth:`dq` does the first half, which hides the first K/V, :meth:`dkdv` the second, which
    hides the way of what returns.

    A gradient through ``lse`` only changes ``delta = rowsum(dout * out)``, which the operator computes itself, into
    ``delta - dlse``: dout is widened by -dlse, out by 1, and q, k and v by 0.
    """

    def __init__(
        self, kernel: RectangleAttention, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *,
        softmax_scale: float,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        self._dq = torch.zeros(q.shape, device=q.device, dtype=torch.float32)
        self._dtype = q.dtype
        self._extra = 0 if dlse is None else kernel.dlse_columns
        if dlse is not None:
            dout = F.pad(_widen(dout, -dlse), (0, self._extra - DLSE_COLUMNS))
            out, q = F.pad(out, (0, self._extra), value=1.0), F.pad(q, (0, self._extra))
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
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool,
        accum: Callable[[], Tensors] | None, out: Tensors,
    ) -> None:  # fmt: skip
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
        todo = self._kernel.cut(self._q, k, v, bounds, scores)
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
        grads = self._kernel.gradients(dout, q, k, v, out, lse, region.kind, scale=self._scale)
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
        self._kernel.blockwise.backward(
            dout, q, k, v, lse, delta, bounds, region, scores, scale=self._scale, grads=(dq, *accum)
        )


def _rows(x: Tensor) -> Tensor:
    """As the operator can read it: a unit last stride, and rows that do not overlap (those of an expanded dout do)."""
    return x if x.stride(-1) == 1 and x.stride(1) >= x.shape[-1] else x.contiguous()


def _zeros(x: Tensor) -> Tensor:
    """Zeros in fp32, shaped as ``x``, in memory head by head: what is added to them are products of one head each."""
    items, keys, heads, dim = x.shape
    return torch.zeros(items, heads, keys, dim, device=x.device, dtype=torch.float32).transpose(1, 2)


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
