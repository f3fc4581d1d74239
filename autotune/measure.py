"""What ``tune`` does on a GPU with one tile: check it against the reference, time it alone and beside a transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..bench.common.timing import Clock
from ..bench.kernels.accuracy import Inputs, Results, by_pytorch, draw, exactly, judged
from ..bench.kernels.beside import Copy, bytes_for
from ..comm.topology import nvml
from ..comm.transports.lanes import HIGH_PRIORITY, new_stream
from ..kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Tile,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    attention_gradients,
)
from ..kernels.config import is_single_pass
from ..kernels.tables import DTYPES, SINGLE_PASS, Point
from ..ring import Mask, bounds
from .compile import config_of
from .model import Shape
from .search import Reading

CHECKED_SHARDS = 3  # a first, a middle and a last hop
# What is checked is launched as what is timed, of one sequence with the same heads, so that its binaries are those that
# workers compiled, and none is made at the expense of the budget. Compiled here are two small kernels alone, `delta`
# and, where dK/dV is split, `reduce`: a second each, once for all candidates of a point that share their sides.
CHECKED = 1008  # tokens: of shards that 16 divides, as launches are compiled for, and no side of 32 or more
CHECKED_WHOLE = 1024  # of single passes without a mask, which have another binary where a side does not divide the keys
MOST_SCORES = 128 << 20  # bytes of float64 scores at a time; the reference and its gradients keep about eight such
COPY_LASTS = 2.0  # times the kernel alone: it is beside the kernel to its end
SLOWING = {
    "power cap", "hardware slowdown", "sync boost", "software thermal slowdown", "hardware thermal slowdown",
    "power brake",
}  # fmt: skip
"""Throttle reasons that make a run slower than the next one; an idle GPU and clocks that the user set do not."""


def reading_of(seconds: float, clocks: Mapping[str, Any], beside: float | None = None) -> Reading:
    """A run with what NVML said after it."""
    throttled = tuple(reason for reason in clocks.get("throttled", ()) if reason in SLOWING)
    return Reading(
        seconds, throttled, {name: float(clocks[name]) for name in clocks if name != "throttled"}, beside
    )  # fmt: skip


def in_parts(of: Callable[[Inputs, bool], Results], given: Inputs, causal: bool) -> Results:
    """``of`` of so many key heads at a time that their float64 scores take no more than they may, or of one."""
    batch, tokens, heads, _ = given.q.shape
    kv_heads = given.k.shape[2]
    group = heads // kv_heads
    step = max(1, MOST_SCORES // (8 * batch * group * tokens * tokens))
    parts = [
        of(heads_of(given, slice(first, first + step), slice(first * group, (first + step) * group)), causal)
        for first in range(0, kv_heads, step)
    ]
    dims = {"out": 2, "lse": 1, "dq": 2, "dk": 2, "dv": 2}
    return Results(**{name: torch.cat([getattr(part, name) for part in parts], dim) for name, dim in dims.items()})


def heads_of(given: Inputs, keys: slice, queries: slice) -> Inputs:
    """Of the inputs the heads of keys and those of the queries that see them."""
    q, k, v, dout, dlse = given
    return Inputs(q[:, :, queries], k[:, :, keys], v[:, :, keys], dout[:, :, queries], dlse[:, queries])


def checked_sides(point: Point) -> tuple[int, int]:
    """Of a check: tokens of the side that programs are cut from, and of the one that they walk."""
    whole = point.kernel in SINGLE_PASS and point.mask == "full"
    return CHECKED_WHOLE if whole else CHECKED, CHECKED // CHECKED_SHARDS


class DeviceTrials:
    """Checks and times tiles at one point on one device: :class:`~ringattn.autotune.search.Trials`.

    Args:
        point: what for.
        shape: its heads.
        device: a GPU; the CPU under Triton's interpreter, in tests.
        checked: tokens of the check; default: a few tiles of any size.
    """

    def __init__(self, point: Point, shape: Shape, device: torch.device, *, checked: int | None = None) -> None:
        self.point, self._shape, self._device = point, shape, device
        self._checked = checked or checked_sides(point)[0]
        self._warm: set[Tile] = set()
        self._copy: Copy | None = None

    def wrong(self, tile: Tile) -> str | None:
        """The result that errs by more than twice PyTorch's error plus rounding; or why there is none."""
        try:
            ours = self._results(tile)
        except torch.AcceleratorError:
            raise  # nothing works on this device any more
        except Exception as failed:
            return f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
        exact, pytorch = self._right
        for name, mine in ours.items():
            error, usual, limit = judged(mine, getattr(pytorch, name), getattr(exact, name))
            if not error <= limit:  # also NaN
                return f"{name} errs by {error:.3g}, PyTorch's by {usual:.3g}"
        return None

    def run(self, tile: Tile) -> Reading:
        seconds, beside = self._seconds(tile), None
        if self._device.type == "cuda":
            if self._copy is None:  # of one size for all tiles, longer than the kernel by the first that is timed
                nbytes = bytes_for(self._device, COPY_LASTS * seconds)
                self._copy = Copy(self._device, nbytes)
            beside = self._timed(self._copy.beside(lambda: self._launch(tile), self._stream))
        return reading_of(seconds, self._reader(), beside)

    def _seconds(self, tile: Tile) -> float:
        if tile not in self._warm:  # compiles, or takes what the compile-only part left in Triton's cache
            self._renew()
            self._launch(tile)
            self._warm.add(tile)
        return self._timed(lambda: self._launch(tile))

    def _timed(self, step: Callable[[], None]) -> float:
        self._renew()
        return self._clock(step)

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self._device)

    @cached_property
    def _reader(self) -> Callable[[], dict[str, Any]]:
        return nvml.Reader(self._device)

    # what is timed: a hop in the middle of a ring, of the size that the point says

    @cached_property
    def _inputs(self) -> Inputs:
        shape, dtype = self._shape, DTYPES[self.point.dtype]
        sizes = [
            (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.value_dim), (shape.heads, shape.value_dim),
        ]  # fmt: skip
        tensors = [torch.empty(1, self.point.length, *size, device=self._device, dtype=dtype) for size in sizes]
        q, k, v, dout = tensors
        return Inputs(q, k, v, dout, torch.empty(1, shape.heads, self.point.length, device=self._device))

    @cached_property
    def _state(self) -> tuple[Tensor, ...]:
        """What the kernel continues, fp32; and lse and delta of inputs of this kind, which the backward reads."""
        given = self._inputs
        sums = {"forward": [given.dout], "dq": [given.q], "dkdv": [given.k, given.v]}
        continued = sums.get(self.point.kernel, [given.k, given.v, given.q])
        lse, delta = torch.empty_like(given.dlse), torch.empty_like(given.dlse)
        return lse, delta, *(torch.empty(x.shape, device=x.device, dtype=torch.float32) for x in continued)

    def _renew(self) -> None:
        """Other values in the same memory: a kernel's power, and with it its clock, depends on what it multiplies."""
        lse, delta, *sums = self._state
        for x in (*self._inputs[:4], delta, *sums):
            x.normal_()
        # of normal scores: the mean of their exponentials is sqrt(e)
        lse.fill_(math.log(self.point.length) + 0.5)

    @cached_property
    def _bounds(self) -> Bounds:
        return self._limits(slice(0, self.point.length), slice(0, self.point.length))

    def _limits(self, rows: slice, keys: slice) -> Bounds:
        if self.point.mask == "full":
            return FULL
        rows_at, keys_at = (torch.arange(part.start, part.stop) for part in (rows, keys))
        return bounds(Mask(causal=True), rows_at, keys_at).to(self._device)

    def _launch(self, tile: Tile) -> None:
        q, k, v, dout, _ = self._inputs
        lse, delta, *sums = self._state
        config = config_of(self.point.kernel, tile)
        if self.point.kernel == "forward":
            attention_forward(q, k, v, bounds=self._bounds, state=(sums[0], lse), final=False, config=config)
        elif self.point.kernel == "dq":
            attention_dq(
                dout, q, k, v, lse, delta, bounds=self._bounds, accum=sums[0], out=sums[0], config=config
            )  # fmt: skip
        else:
            pair, given = (sums[0], sums[1]), (dout, q, k, v, lse, delta)
            if self.point.kernel == "dkdv":
                attention_dkdv(*given, bounds=self._bounds, accum=pair, out=pair, config=config)
            else:
                attention_gradients(*given, dq=sums[2], bounds=self._bounds, accum=pair, out=pair, config=config)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return new_stream(self._device, HIGH_PRIORITY)

    # what is checked: the same kernel over a few shards, so that it starts, continues and ends

    @cached_property
    def _given(self) -> Inputs:
        shape = self._shape
        sizes = (self._checked, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim)
        torch.manual_seed(0)
        return draw(self._device, DTYPES[self.point.dtype], sizes, batch=1)

    @cached_property
    def _right(self) -> tuple[Results, Results]:
        causal = self.point.mask == "bounded"
        return in_parts(exactly, self._given, causal), in_parts(by_pytorch, self._given, causal)

    def _shards(self) -> list[slice]:
        edges = [self._checked * i // CHECKED_SHARDS // 16 * 16 for i in range(CHECKED_SHARDS)]
        return [slice(*edge) for edge in pairwise([*edges, self._checked])]

    def _results(self, tile: Tile) -> dict[str, Tensor]:
        config = config_of(self.point.kernel, tile)
        exact = self._right[0]
        out, lse = exact.out.to(self._given.q.dtype), exact.lse.float().contiguous()
        if self.point.kernel == "forward":
            return self._forward(config)
        delta = attention_delta(self._given.dout, out, self._given.dlse)
        return self._dq(config, lse, delta) if self.point.kernel == "dq" else self._over_queries(config, lse, delta)

    def _forward(self, config: KernelConfig) -> dict[str, Tensor]:
        q, k, v = self._given[:3]
        state = None
        for keys in (shards := self._shards()):
            state = attention_forward(
                q, k[:, keys], v[:, keys], bounds=self._limits(slice(0, self._checked), keys), state=state,
                final=keys == shards[-1], config=config,
            )  # fmt: skip
        assert state is not None
        return {"out": state[0], "lse": state[1]}

    def _dq(self, config: KernelConfig, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
        q, k, v, dout, _ = self._given
        sums = None
        for keys in (shards := self._shards()):
            last = keys == shards[-1]
            into = torch.empty(q.shape, device=q.device, dtype=q.dtype if last else torch.float32)
            sums = attention_dq(
                dout, q, k[:, keys], v[:, keys], lse, delta, bounds=self._limits(slice(0, self._checked), keys),
                accum=sums, out=into if last or sums is None else sums, config=config,
            )  # fmt: skip
        assert sums is not None
        return {"dq": sums}

    def _over_queries(self, config: KernelConfig, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """dK and dV; of a single pass dQ too."""
        q, k, v, dout, _ = self._given
        sums = None
        dq = torch.zeros(q.shape, device=q.device) if is_single_pass(config) else None
        for rows in (shards := self._shards()):
            last = rows == shards[-1]
            dtype = q.dtype if last else torch.float32
            into = (torch.empty(x.shape, device=x.device, dtype=dtype) for x in (k, v))
            given = dout[:, rows], q[:, rows], k, v, lse[:, :, rows].contiguous(), delta[:, :, rows].contiguous()
            call: dict[str, Any] = {
                "bounds": self._limits(rows, slice(0, self._checked)), "accum": sums,
                "out": (next(into), next(into)) if last or sums is None else sums, "config": config,
            }  # fmt: skip
            sums = attention_dkdv(*given, **call) if dq is None else attention_gradients(*given, dq=dq[:, rows], **call)
        assert sums is not None
        return {"dk": sums[0], "dv": sums[1]} | ({} if dq is None else {"dq": dq.to(q.dtype)})
