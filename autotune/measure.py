"""What ``tune`` does on a GPU with one tile: check it against the reference, time it alone and beside a transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..bench.common.errors import Inputs, Judge, judge_of
from ..bench.common.timing import Clock
from ..bench.kernels.accuracy import draw
from ..bench.kernels.beside import Copy, bytes_for
from ..comm.cuda_threads import HIGH_PRIORITY, new_stream
from ..comm.topology import nvml
from ..kernels import FULL, Bounds, Tile, attention_delta
from ..kernels.tables import DTYPES, SINGLE_PASS, Point
from ..reference.masks import Masks
from ..ring import Mask, bounds
from .candidates import job_of
from .compile import call
from .search import Reading
from .space import Shape

CHECKED_ROLES = ("first", "middle", "last")  # of a hop per shard
# What is checked is launched as what is timed, of one sequence with the same heads, so that its binaries are those that
# workers compiled, and none is made at the expense of the budget. Compiled here are two small kernels alone, `delta`
# and, where dK/dV is split, `reduce`: a second each, once for all candidates of a point that share their sides.
CHECKED = 1008  # tokens: of shards that 16 divides, as launches are compiled for, and no side of 32 or more
CHECKED_WHOLE = 1024  # of single passes without a mask, which have another binary where a side does not divide the keys
COPY_LASTS = 2.0  # times the kernel alone: it is beside the kernel to its end
OF_DEVICE = 0
"""In the place of a compute capability: what is launched here is compiled for this device."""

RESULTS = {"forward": ("out", "lse"), "dq": ("dq",)}
"""Of entries; all others return dk and dv."""

CONTINUED = {"out": "state", "lse": "lse", "dq": "dq_in", "dk": "dk_in", "dv": "dv_in"}
"""As what the next hop takes a result."""


def checked_sides(point: Point) -> tuple[int, int]:
    """Of a check: tokens of the side that programs are cut from, and of the one that they walk."""
    whole = point.kernel in SINGLE_PASS and point.mask == "full"
    return CHECKED_WHOLE if whole else CHECKED, CHECKED // len(CHECKED_ROLES)


class DeviceTrials:
    """Checks and times tiles at one point on one device.

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
        self._tensors: dict[str, Tensor] = {}
        self._copy: Copy | None = None

    def wrong(self, tile: Tile) -> str | None:
        """The result that errs by more than twice PyTorch's error plus rounding; or why there is none."""
        try:
            ours = self._results(tile)
        except torch.AcceleratorError:
            raise  # nothing works on this device any more
        except Exception as failed:
            return f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
        errors = self._judge.differences(ours)
        for name in self._judge.wrong(errors):
            return f"{name} errs by {errors[name]:.3g}, PyTorch's by {self._judge.usual[name]:.3g}"
        return None

    def run(self, tile: Tile) -> Reading:
        """One run on fresh inputs with nothing beside it, and on a GPU another one beside a transfer."""
        if tile not in self._warm:  # compiles, or takes what the compile-only part left in Triton's cache
            self._launch(tile)
            self._warm.add(tile)
        seconds, beside = self._timed(lambda: self._launch(tile)), None
        if self._device.type == "cuda":
            if self._copy is None:  # of one size for all tiles, longer than the kernel by the first that is timed
                self._copy = Copy(self._device, bytes_for(self._device, COPY_LASTS * seconds))
            beside = self._timed(self._copy.beside(lambda: self._launch(tile), self._stream))
        return Reading.of(seconds, self._reader(), beside)

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

    def _make(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor of a name, for all tiles."""
        if name not in self._tensors:
            self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._tensors[name]

    def _renew(self) -> None:
        """Other values in the same memory: a kernel's power, and with it its clock, depends on what it multiplies."""
        for name, x in self._tensors.items():
            if name == "lse":  # of normal scores: the mean of their exponentials is sqrt(e)
                x.fill_(math.log(self.point.length) + 0.5)
            else:
                x.normal_()

    def _launch(self, tile: Tile) -> None:
        call(job_of(self.point, tile, OF_DEVICE, self._shape.heads), self._make, self._bounds)

    @cached_property
    def _bounds(self) -> Bounds:
        return self._limits(slice(0, self.point.length), slice(0, self.point.length))

    def _limits(self, rows: slice, keys: slice) -> Bounds:
        if self.point.mask == "full":
            return FULL
        rows_at, keys_at = (torch.arange(part.start, part.stop) for part in (rows, keys))
        return bounds(Mask(causal=True), rows_at, keys_at).to(self._device)

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
    def _judge(self) -> Judge:
        return judge_of(self._given, Masks(causal=self.point.mask == "bounded"))

    def _shards(self) -> list[slice]:
        count = len(CHECKED_ROLES)
        edges = [self._checked * i // count // 16 * 16 for i in range(count)]
        return [slice(*edge) for edge in pairwise([*edges, self._checked])]

    def _results(self, tile: Tile) -> dict[str, Tensor]:
        kernel, given, exact = self.point.kernel, self._given, self._judge.exact
        over_keys = kernel in ("forward", "dq")  # else the shards are of queries
        whole: dict[str, Tensor] = given._asdict() | {"lse": exact["lse"].float().contiguous()}
        if kernel != "forward":
            whole["delta"] = attention_delta(given.dout, exact["out"].to(given.q.dtype), given.dlse)
        if kernel in SINGLE_PASS:
            whole["dq"] = torch.zeros(given.q.shape, device=self._device)
        names = RESULTS.get(kernel, ("dk", "dv"))
        results: tuple[Tensor, ...] = ()
        for role, part in zip(CHECKED_ROLES, self._shards(), strict=True):
            continued = dict(zip([CONTINUED[name] for name in names], results, strict=False))

            def make(
                name: str, *shape: int, dtype: torch.dtype = torch.float32,
                part: slice = part, continued: Mapping[str, Tensor] = continued,
            ) -> Tensor:  # fmt: skip
                if name in continued:
                    return continued[name]
                if name not in whole:
                    return torch.empty(shape, dtype=dtype, device=self._device)
                if over_keys != (name in ("k", "v")):
                    return whole[name]
                return whole[name][:, :, part].contiguous() if name in ("lse", "delta") else whole[name][:, part]

            all_rows = slice(0, self._checked)
            limits = self._limits(all_rows, part) if over_keys else self._limits(part, all_rows)
            sides = self._checked, part.stop - part.start
            made = call(job_of(self.point, tile, OF_DEVICE, self._shape.heads, role, sides), make, limits)
            results = (made,) if isinstance(made, Tensor) else made
        by_name = dict(zip(names, results, strict=True))
        return by_name | ({"dq": whole["dq"].to(given.q.dtype)} if kernel in SINGLE_PASS else {})
