"""Local kernels for full and causal rectangles: cut a hop's bounds into rectangles and merge their results in fp32."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import PLAIN, Bounds, KernelConfig, Scores
from ...kernels.launch import Pair
from ...validators import short_repr
from .protocol import LocalForward, Supports
from .regions import Region, RegionKind, regions, split_work

Tensors = tuple[Tensor, ...]
DOT_ROWS = 1024
DLSE_COLUMNS = 2  # the gradient through lse, rounded to the model dtype, and its rounding error
RECTANGLE_FEATURES = {"bounds", "seqused_k", "block_sparse", "learnable_sink", "state"}
SCORE_FEATURES = {"softcap", "alibi_slopes", "dropout_p", "return_max_logits"}
MANY_RECTANGLES = 16  # more per hop are reported, because each is a kernel call and a merge

logger = logging.getLogger(__name__)


class RectangleAttention:
    """A :class:`LocalAttention` built from functions that only know full and causal rectangles.

    The bounds of every hop, for any mask and layout, are cut into such rectangles: a few for common masks, up to one
    per row for irregular masks. Results are merged in fp32, which also implements ``learnable_sink``. For a gradient
    through lse, q, k and v are padded with columns of zeros.

    Args:
        name: name of the kernel.
        forward: ``forward(q, k, v, *, causal, scale)`` returns ``out [B, Sq, H, Dv]`` in q's dtype and
            ``lse [B, H, Sq]``, fp32, natural log. ``causal`` means a square in which row i sees the first i + 1 keys.
        backward: ``backward(dout, q, k, v, out, lse, *, causal, scale)`` returns dq, dk and dv in fp32 or q's dtype.
            Its ``out`` and ``lse`` cover all keys that a row sees; ``lse`` is inf for a row without keys. None: calls
            that need gradients raise. Both functions may return the same memory in every call.
        supports: devices, dtypes and head dims. Masks and gradients are added automatically.
        dlse_columns: number of columns by which q, k and v may grow, at least 2. 0: gradients through lse raise.
        blockwise: a module like ``ring/cpu/blockwise.py`` that computes irregular parts of a mask, other head dims of
            v, and scores. None: every part is cut into rectangles.
    """

    def __init__(
        self, name: str, forward: Callable[..., Pair], backward: Callable[..., Tensors] | None = None, *,
        supports: Supports, dlse_columns: int = DLSE_COLUMNS, blockwise: Any = None,
    ) -> None:  # fmt: skip
        for argument, function in (("forward", forward), ("backward", backward)):
            if not callable(function) and (function is not None or argument == "forward"):
                raise ValueError(f"{argument} is {short_repr(function)}: it must be a function")
        if not isinstance(supports, Supports):
            raise ValueError(f"supports is {short_repr(supports)}: it must be a ringattn.Supports")
        if not isinstance(dlse_columns, int) or dlse_columns in (True, 1) or dlse_columns < 0:
            raise ValueError(f"dlse_columns is {short_repr(dlse_columns)}: it must be 0 or an integer of at least 2")
        if blockwise is None and (wrong := sorted(SCORE_FEATURES & {*supports.features})):
            raise ValueError(
                f"features has {', '.join(wrong)}, which rectangles do not support. Pass blockwise, or omit them."
            )
        own = {"backward"} if backward is not None else set[str]()
        own |= {"lse_gradient"} if backward is not None and dlse_columns >= DLSE_COLUMNS else set()
        self.name = name
        self.supports = replace(supports, features={*supports.features, *RECTANGLE_FEATURES, *own})
        self.dlse_columns, self.blockwise = dlse_columns, blockwise
        self._forward, self._backward = forward, backward
        self._has_logged = False

    def forward(
        self, q: Tensor, *, softmax_scale: float, config: KernelConfig | None = None, start: Pair | None = None,
        max_logits: bool = False,
    ) -> RectangleForward:  # fmt: skip
        return RectangleForward(self, q, softmax_scale=softmax_scale, start=start, max_logits=max_logits)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *, softmax_scale: float,
        config: KernelConfig | None = None,
    ) -> RectangleBackward:  # fmt: skip
        return RectangleBackward(self, dout, q, out, lse, dlse, softmax_scale=softmax_scale)

    def cut(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores, *, use_operator: bool = True
    ) -> tuple[Region, ...]:
        """Cut the bounds of one shard into regions that this kernel can compute; none for empty tensors.

        ``use_operator`` is False if the operator cannot compute this call.
        """
        if 0 in (q.numel(), k.numel(), v.numel()):
            return ()
        operator = self.blockwise is None or (use_operator and k.shape[-1] == v.shape[-1] and scores.is_plain)
        cut = regions(bounds, q.shape[1], k.shape[1], use_operator=operator, exact=self.blockwise is None)
        if self.blockwise is None and len(cut) > MANY_RECTANGLES and not self._has_logged:
            self._has_logged = True
            text = (
                "backend %r: a mask splits a hop into %d rectangles, each a kernel call; backend='triton' needs fewer"
            )
            logger.info(text, self.name, len(cut))
        return cut

    def compute(self, q: Tensor, k: Tensor, v: Tensor, kind: RegionKind, *, scale: float) -> Pair:
        """Return ``out`` and ``lse`` of one region that is not blockwise."""
        flipped = kind is RegionKind.ANTICAUSAL  # causal after reversing rows and keys
        inputs = [x.flip(1) for x in (q, k, v)] if flipped else [q, k, v]
        results = self._forward(*inputs, causal=kind is not RegionKind.RECTANGLE, scale=scale)
        out, lse = check_forward(self.name, results, q, v.shape[3])
        return (out.flip(1), lse.flip(2)) if flipped else (out, lse)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: RegionKind, *, scale: float
    ) -> Tensors:
        """Return dq, dk and dv of one region that is not blockwise."""
        assert self._backward is not None
        flipped, inputs = kind is RegionKind.ANTICAUSAL, (dout, q, k, v, out)
        if flipped:
            inputs, lse = tuple(x.flip(1) for x in inputs), lse.flip(2)  # type: ignore[assignment]
        grads = self._backward(*inputs, lse, causal=kind is not RegionKind.RECTANGLE, scale=scale)
        for name, x, like in zip(("dq", "dk", "dv"), _items(self.name, grads, 3), (q, k, v), strict=True):
            check_result(self.name, name, x, like.shape, q.device, torch.float32, q.dtype)
        return tuple(x.flip(1) for x in grads) if flipped else grads


def check_result(
    kernel: str, name: str, x: object, shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype
) -> None:
    """Raise RuntimeError if the result ``name`` of a kernel has another type, shape, device or dtype."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype not in dtypes or x.device != device:
        got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else short_repr(x)
        raise RuntimeError(
            f"backend {kernel!r} returned {name} as {got}: it must be {' or '.join(dict.fromkeys(map(str, dtypes)))} "
            f"of shape {list(shape)} on {device}"
        )


def _items(kernel: str, results: Any, count: int) -> Any:
    """Return what a kernel returned, or raise RuntimeError if it is no tuple of ``count`` items."""
    if not isinstance(results, tuple | list) or len(results) != count:
        raise RuntimeError(
            f"backend {kernel!r} returned {type(results).__name__}: it must be a tuple of {count} tensors"
        )
    return results


def check_forward(kernel: str, results: Any, q: Tensor, value_dim: int) -> Pair:
    """Return ``out`` and ``lse``, or raise RuntimeError if they do not fit the queries."""
    out, lse = _items(kernel, results, 2)
    check_result(kernel, "out", out, (*q.shape[:3], value_dim), q.device, q.dtype)
    check_result(kernel, "lse", lse, (q.shape[0], q.shape[2], q.shape[1]), q.device, torch.float32)
    return out, lse


def check_max_logits(kernel: str, forward: Any, q: Tensor) -> Tensor:
    """Return ``max_logits`` of a forward, or raise RuntimeError if they are not one fp32 number per head of q."""
    max_logits: Tensor = forward.max_logits()
    check_result(kernel, "max_logits", max_logits, q.shape[2:3], q.device, torch.float32)
    return max_logits


class RunningState:
    """Softmax state over the keys seen so far: ``out`` (normalised, fp32) and ``lse`` (natural log, float64).

    ``lse`` is float64 because it is small, and rounding it at every hop would show in all gradients. ``start`` is the
    fp32 state before any key; its ``out`` is overwritten.
    """

    def __init__(self, q: Tensor, start: Pair | None) -> None:
        self._q, self._value_dim = q, q.shape[-1]
        self._state: Pair | None = None if start is None else (start[0], start[1].double())
        self._written = torch.full(q.shape[:2], start is not None, device="cpu")

    def rows(self, region: Region) -> Pair:
        """Return views of the state of a region's rows."""
        out, lse = self._whole()
        return out[region.items, region.rows], lse[region.items, :, region.rows]

    def mark_written(self, region: Region) -> None:
        """Mark the rows of a region as written."""
        self._written[region.items, region.rows] = True

    def set_value_dim(self, v: Tensor) -> None:
        """Set the head dim of ``out`` to that of ``v``; by default it is that of q."""
        self._value_dim = v.shape[-1]

    def merge(self, region: Region, part: Tensor, part_lse: Tensor) -> None:
        """Merge the result of a region into the state of its rows.

        The new part has weight ``w = e^part_lse / (e^lse + e^part_lse)``. The first part of a row is copied instead. If
        it covers all rows, it becomes the state itself.
        """
        if self._state is None and part.shape[:2] == self._q.shape[:2]:
            # Copied, because merges write to it, and the kernel may reuse its memory.
            self._state = part.to(torch.float32, copy=True), part_lse.double()
        else:
            out, lse = self.rows(region)
            if self._written[region.items, region.rows].any():
                # For a row with lse -inf the weight is 1.
                weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
                out.lerp_(part.float(), weight.float().transpose(1, 2).unsqueeze(-1))
                torch.logaddexp(lse, part_lse.double(), out=lse)
            else:
                out.copy_(part)
                lse.copy_(part_lse)
        self.mark_written(region)

    def result(self) -> Pair:
        """Return ``out [B, S, H, Dv]`` in q's dtype and ``lse [B, H, S]`` in fp32; 0 and -inf for rows without keys."""
        out, lse = self._whole()
        return out.to(self._q.dtype), lse.to(torch.float32, memory_format=torch.contiguous_format)

    def _whole(self) -> Pair:
        """Return the state of all rows, created on first use."""
        if self._state is None:
            (batch, rows, heads, _), device = self._q.shape, self._q.device
            out = torch.zeros(batch, rows, heads, self._value_dim, device=device, dtype=torch.float32)
            self._state = out, torch.full((batch, heads, rows), -torch.inf, device=device, dtype=torch.float64)
        return self._state


class MergedForward:
    """Forward for a kernel without a running state: runs a new forward for every shard and merges the results."""

    def __init__(
        self, begin: Callable[[], LocalForward], q: Tensor, start: Pair | None, name: str, *, max_logits: bool
    ) -> None:
        self._begin, self._name, self._q, self._state = begin, name, q, RunningState(q, start)
        self._has_max_logits = max_logits
        self._region = Region(RegionKind.BLOCKWISE, 0, q.shape[1], 0, 0)  # all rows
        self._max_logits: Tensor | None = None

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Compute one shard and merge it into the state."""
        forward = self._begin()
        forward.fold(k, v, bounds, scores=scores, final=True)
        self._state.set_value_dim(v)
        self._state.merge(self._region, *check_forward(self._name, forward.result(), self._q, v.shape[3]))
        if self._has_max_logits:
            own = check_max_logits(self._name, forward, self._q)
            self._max_logits = own if self._max_logits is None else torch.maximum(self._max_logits, own)

    def result(self) -> Pair:
        return self._state.result()

    def max_logits(self) -> Tensor | None:
        """Return the largest score of each head over all shards."""
        return self._max_logits


class RectangleForward:
    """Forward that merges key shards into a running state, region by region."""

    def __init__(
        self, kernel: RectangleAttention, q: Tensor, *, softmax_scale: float, start: Pair | None, max_logits: bool
    ) -> None:
        self._kernel, self._q, self._scale = kernel, _rows(q), softmax_scale
        self._state = RunningState(self._q, start)
        self._max_logits = q.new_full(q.shape[2:3], -torch.inf, dtype=torch.float32) if max_logits else None

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Add one shard. ``final`` has no effect, because :meth:`result` casts."""
        k, v = _rows(k), _rows(v)
        self._state.set_value_dim(v)
        wide: Pair | None = None
        # the operator does not return the largest score
        for region in self._kernel.cut(self._q, k, v, bounds, scores, use_operator=self._max_logits is None):
            q = self._q[region.items, region.rows]
            if region.kind is RegionKind.BLOCKWISE:
                wide = wide or (k.float(), v.float())  # convert once for all regions
                state, region_kv = self._state.rows(region), _keys(region, *wide)
                self._kernel.blockwise.blockwise_forward(
                    q, *region_kv, *state, bounds, region, scores, scale=self._scale, max_logits=self._max_logits
                )
                self._state.mark_written(region)
            else:
                region_kv = _keys(region, k, v)
                self._state.merge(region, *self._kernel.compute(q, *region_kv, region.kind, scale=self._scale))

    def result(self) -> Pair:
        return self._state.result()

    def max_logits(self) -> Tensor | None:
        """Return the largest score of each head so far."""
        return self._max_logits


class _Heads(NamedTuple):
    """A group of key/value heads and the query heads that read them."""

    queries: slice
    keys: slice


class _Share(NamedTuple):
    """Heads and regions to compute: all of a shard, or one half of the work on it."""

    heads: _Heads
    regions: tuple[Region, ...]
    key: int  # first key of all regions of the shard, including those of the other half
    end: int
    one_call: bool  # True if one operator call computes these heads


class _Part(NamedTuple):
    """This rank's dK and dV of the keys ``[key, end)`` and the key/value heads ``heads`` of a shard."""

    heads: slice
    key: int
    end: int
    dk: Tensor
    dv: Tensor


class RectangleBackward:
    """Backward of one query tensor against one key shard after the other.

    The operator computes dQ, dK and dV of a rectangle at once. Therefore :meth:`dkdv` does all work of a remote shard
    and :meth:`dq` does nothing; dK/dV are sent while the next shard computes. The local shard is cut in two halves: by
    heads if one operator call computes it, and by rows otherwise. :meth:`dq` computes the first half, which hides the
    first K/V. :meth:`dkdv` computes the second half, which hides the returning dK/dV.

    A gradient through ``lse`` turns ``delta = rowsum(dout * out)`` into ``delta - dlse``. The operator computes delta
    itself, so dout is padded with -dlse, out with 1, and q, k and v with 0.
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
        # For rows without keys use +inf, so that exp(score - lse) is 0 and not NaN.
        self._lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        self._delta: Tensor | None = None
        self._scale = softmax_scale
        self._local: deque[_Part] = deque()  # one per part of the mask, in order

    def dq(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool, final: bool = False
    ) -> None:
        """Compute the first half of the local shard. :meth:`dkdv` computes remote shards. ``final`` has no effect."""
        if local:
            first, _ = self._halves(k, v, bounds, scores)
            part = self._part(k, v, bounds, first, scores)
            if first.one_call:  # the kernel may reuse the memory of its results before dkdv
                part = part._replace(dk=part.dk.clone(), dv=part.dv.clone())
            self._local.append(part)

    def dkdv(
        self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, local: bool,
        accum: Callable[[], Tensors] | None, out: Tensors,
    ) -> None:  # fmt: skip
        """Write this shard's dK and dV plus ``accum()`` to ``out``; both may share memory.

        ``accum`` is called last, because it waits for the network.
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
        incoming = (None, None) if accum is None else accum()
        for part in parts:
            for buffer, base, grad in zip(out, incoming, (part.dk, part.dv), strict=True):
                _settle(buffer[:, :, part.heads], None if base is None else base[:, :, part.heads], grad, part)

    def result(self) -> Tensor:
        return self._dq.to(self._dtype)

    def _whole(self, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> _Share:
        """Return the share with all heads and regions of a shard."""
        todo = self._kernel.cut(self._q, k, v, bounds, scores)
        key, end = min((region.key for region in todo), default=0), max((region.key_end for region in todo), default=0)
        one_call = len(todo) == 1 and todo[0].kind is not RegionKind.BLOCKWISE and todo[0].items == slice(0, None)
        return _Share(_heads(self._q, k, 0, k.shape[2]), todo, key, end, one_call)

    def _halves(self, k: Tensor, v: Tensor, bounds: Bounds, scores: Scores) -> tuple[_Share, _Share]:
        """Split a shard into two shares: by heads if one operator call computes it, by rows otherwise."""
        shard = self._whole(k, v, bounds, scores)
        if not shard.one_call:
            first, second = split_work(shard.regions)
            return shard._replace(regions=first), shard._replace(regions=second)
        first_heads, other_heads = _halves(self._q, k)
        return shard._replace(heads=first_heads), shard._replace(heads=other_heads)

    def _part(
        self, k: Tensor, v: Tensor, bounds: Bounds, share: _Share, scores: Scores, accum: _Part | None = None
    ) -> _Part:
        """Add dQ of a share and return its dK and dV.

        If one operator call computes the share, its results are returned as they are. Otherwise they are added to
        ``accum``.
        """
        heads, todo = share.heads, share.regions
        k, v = _rows(k)[:, :, heads.keys], _rows(v)[:, :, heads.keys]
        if share.one_call and k.numel():
            (region,) = todo
            return _Part(heads.keys, region.key, region.key_end, *self._operator(*_keys(region, k, v), heads, region))
        accum = accum or _Part(heads.keys, share.key, share.end, *(_zeros(x[:, share.key : share.end]) for x in (k, v)))
        wide: Pair | None = None
        for region in todo if k.numel() else ():
            keys = slice(region.key - accum.key, region.key_end - accum.key)
            grads = accum.dk[region.items, keys], accum.dv[region.items, keys]
            if region.kind is RegionKind.BLOCKWISE:
                wide = wide or (k.float(), v.float())  # convert once for all regions
                self._blockwise(*_keys(region, *wide), bounds, heads, region, scores, grads)
            else:
                for total, grad in zip(grads, self._operator(*_keys(region, k, v), heads, region), strict=True):
                    total += grad
        return accum

    def _operator(self, k: Tensor, v: Tensor, heads: _Heads, region: Region) -> Tensors:
        """Add dQ of a region by one operator call, and return its dK and dV."""
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
        """Add the gradients of a region that is no rectangle or triangle, and that the ``blockwise`` module computes.

        dQ is added to the region's rows of ``self._dq``, dK and dV to ``accum``, which has the region's keys only.
        """
        if self._delta is None:
            self._delta = row_dot(self._dout, self._out).transpose(1, 2)
        dout, q, dq = (x[region.items, region.rows, heads.queries] for x in (self._dout, self._q, self._dq))
        dout, q = dout[..., : v.shape[-1]], q[..., : k.shape[-1]]
        lse, delta = (x[region.items, heads.queries, region.rows] for x in (self._lse, self._delta))
        self._kernel.blockwise.blockwise_backward(
            dout, q, k, v, lse, delta, bounds, region, scores, scale=self._scale, grads=(dq, *accum)
        )


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` with a unit last stride and rows that do not overlap, unlike those of an expanded dout."""
    return x if x.stride(-1) == 1 and x.stride(1) >= x.shape[-1] else x.contiguous()


def _zeros(x: Tensor) -> Tensor:
    """Return fp32 zeros shaped as ``x``, stored head by head, because each product that is added covers one head."""
    items, keys, heads, dim = x.shape
    return torch.zeros(items, heads, keys, dim, device=x.device, dtype=torch.float32).transpose(1, 2)


def _keys(region: Region, k: Tensor, v: Tensor) -> Pair:
    """Return K and V of a region."""
    return k[region.items, region.keys], v[region.items, region.keys]


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return ``sum(x * y)`` of each row, fp32, ``[B, S, H]``. Computed in row blocks, because fresh memory is slow."""
    blocks = [slice(row, row + DOT_ROWS) for row in range(0, max(x.shape[1], 1), DOT_ROWS)]
    return torch.cat([(x[:, rows].float() * y[:, rows].float()).sum(-1) for rows in blocks], 1)


def _heads(q: Tensor, k: Tensor, first: int, end: int) -> _Heads:
    """Return the key/value heads ``[first, end)`` with their query heads."""
    group = q.shape[2] // k.shape[2]
    return _Heads(slice(first * group, end * group), slice(first, end))


def _halves(q: Tensor, k: Tensor) -> tuple[_Heads, _Heads]:
    """Split the heads in two halves. The first has all heads if two calls would leave more threads idle than one."""
    batch, heads, threads = k.shape[0], k.shape[2], torch.get_num_threads() if k.device.type == "cpu" else 1
    half = heads // 2
    rounds = [-(-batch * count // threads) for count in (half, heads - half, heads)]
    first = half if half and rounds[0] + rounds[1] == rounds[2] else heads
    return _heads(q, k, 0, first), _heads(q, k, first, heads)


def _widen(dout: Tensor, extra: Tensor) -> Tensor:
    """Append ``extra [B, H, S]`` to dout as two columns: its value rounded to dout's dtype, and the rounding error."""
    column = extra.transpose(1, 2).unsqueeze(-1)
    rounded = column.to(dout.dtype)
    return torch.cat([dout, rounded, (column - rounded).to(dout.dtype)], dim=-1)


def _settle(buffer: Tensor, base: Tensor | None, grad: Tensor, part: _Part) -> None:
    """Compute ``buffer = base + grad`` in one pass, where ``grad`` covers only the keys of ``part``.

    ``base`` may be ``buffer``; None stands for 0.
    """
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
