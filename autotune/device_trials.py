"""Trials of one tile on a GPU: a check against the reference, and timings alone and during a transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..bench.common.errors import AttentionInputs, ErrorJudge, build_judge
from ..bench.common.timing import StepTimer
from ..bench.kernels.accuracy import draw_inputs
from ..bench.kernels.background_copy import BackgroundCopy, copy_bytes_for
from ..comm.cuda_threads import HIGH_PRIORITY, new_stream
from ..comm.topology import nvml
from ..kernels import FULL, Bounds, Tile, attention_delta
from ..kernels.tables import DTYPES, SINGLE_PASS_KERNELS, TuningPoint
from ..reference.masks import MaskOptions
from ..ring import Mask, bounds
from .candidates import ranking_job
from .compile import call_entry
from .search import TimedRun
from .tile_space import ModelShape

CHECK_ROLES = ("first", "middle", "last")  # the check has one hop per shard
# The check launches the same variants as the timing, with one sequence and the same heads. Workers have therefore
# compiled its binaries, and the budget of the GPU is not spent on compilation. Only `delta` and `reduce` (for split
# dK/dV) compile here, which takes about a second each per point and pair of tile sides.
CHECK_TOKENS = 1008  # tokens; shards are multiples of 16, as the compiler assumes, but not of tile sides from 32
# Tokens for unmasked single passes, whose binary differs if a tile side does not divide the keys.
SINGLE_PASS_CHECK_TOKENS = 1024
COPY_TIME_FACTOR = 2.0  # duration of the transfer relative to the kernel, so that the kernel ends first
THIS_DEVICE = 0
"""Replaces the compute capability of a variant, because launches here always compile for this device."""

RESULTS = {"forward": ("out", "lse"), "dq": ("dq",)}
"""Results of a host entry; all others return dk and dv."""

CARRY_ARGUMENTS = {"out": "state", "lse": "lse", "dq": "dq_in", "dk": "dk_in", "dv": "dv_in"}
"""Argument of the next hop for each result."""


def check_lengths(point: TuningPoint) -> tuple[int, int]:
    """Return (tokens of the side that is split over programs, tokens of the side that they loop over) in the check."""
    is_unmasked_single_pass = point.kernel in SINGLE_PASS_KERNELS and point.mask == "full"
    return SINGLE_PASS_CHECK_TOKENS if is_unmasked_single_pass else CHECK_TOKENS, CHECK_TOKENS // len(CHECK_ROLES)


class DeviceTrials:
    """Checks and timings of tiles at one point on one device.

    The device is a GPU, or in tests the CPU with Triton's interpreter.
    """

    def __init__(self, point: TuningPoint, shape: ModelShape, device: torch.device) -> None:
        self.point, self._shape, self._device = point, shape, device
        self._checked = check_lengths(point)[0]
        self._warm: set[Tile] = set()
        self._tensors: dict[str, Tensor] = {}
        self._copy: BackgroundCopy | None = None
        self._clock, self._reader = StepTimer(device), nvml.GpuReader(device)

    def find_error(self, tile: Tile) -> str | None:
        """Return text on the first wrong result of a tile or on its exception, or None if the tile passes.

        A result is wrong if its error is above twice PyTorch's plus rounding.

        Raises:
            torch.AcceleratorError: The tile broke the device.
        """
        try:
            results = self._results(tile)
        except torch.AcceleratorError:
            raise  # the device is unusable now
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:300]
        errors = self._judge.head_errors(results)
        for name in self._judge.failing_results(errors):
            return f"error of {name} is {errors[name]:.3g}, but PyTorch's is {self._judge.pytorch_errors[name]:.3g}"
        return None

    def run(self, tile: Tile) -> TimedRun:
        """Time one run of a tile on fresh inputs, and on a GPU another run during a transfer."""
        if tile not in self._warm:  # compile, or load from Triton's cache
            self._launch(tile)
            self._warm.add(tile)
        seconds, with_transfer = self._timed(lambda: self._launch(tile)), None
        if self._device.type == "cuda":
            if self._copy is None:  # one transfer size for all tiles, from the time of the first tile
                self._copy = BackgroundCopy(self._device, copy_bytes_for(self._device, COPY_TIME_FACTOR * seconds))
            with_transfer = self._timed(self._copy.run_alongside(lambda: self._launch(tile), self._stream))
        return TimedRun.from_nvml(seconds, self._reader(), with_transfer)

    def _timed(self, step: Callable[[], None]) -> float:
        """Return the seconds of ``step`` on fresh inputs."""
        self._refill_inputs()
        return self._clock(step)

    # timing: one middle hop of the point's length

    def _make(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor ``name``, which all tiles share."""
        if name not in self._tensors:
            self._tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._tensors[name]

    def _refill_inputs(self) -> None:
        """Fill the inputs with new random values, because power and clocks depend on the data."""
        for name, x in self._tensors.items():
            if name == "lse":  # for normal scores, whose exponentials have mean sqrt(e)
                x.fill_(math.log(self.point.length) + 0.5)
            else:
                x.normal_()

    def _launch(self, tile: Tile) -> None:
        call_entry(ranking_job(self.point, tile, THIS_DEVICE, self._shape.heads), self._make, self._bounds)

    @cached_property
    def _bounds(self) -> Bounds:
        return self._limits(slice(0, self.point.length), slice(0, self.point.length))

    def _limits(self, rows: slice, keys: slice) -> Bounds:
        """Return causal bounds of the queries at ``rows`` and the keys at ``keys``; none if the point is unmasked."""
        if self.point.mask == "full":
            return FULL
        q_positions, k_positions = (torch.arange(part.start, part.stop) for part in (rows, keys))
        return bounds(Mask(causal=True), q_positions, k_positions).to(self._device)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return new_stream(self._device, HIGH_PRIORITY)

    # check: one hop per shard, so that a first, a middle and a last hop run

    @cached_property
    def _check_inputs(self) -> AttentionInputs:
        shape = self._shape
        sizes = (self._checked, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim)
        torch.manual_seed(0)
        return draw_inputs(self._device, DTYPES[self.point.dtype], sizes, batch=1)

    @cached_property
    def _judge(self) -> ErrorJudge:
        return build_judge(self._check_inputs, MaskOptions(causal=self.point.mask == "bounded"))

    def _shards(self) -> list[slice]:
        """Return the tokens of each hop of the check, in multiples of 16."""
        count = len(CHECK_ROLES)
        edges = [self._checked * i // count // 16 * 16 for i in range(count)]
        return [slice(*edge) for edge in pairwise([*edges, self._checked])]

    def _results(self, tile: Tile) -> dict[str, Tensor]:
        """Run the hops of the check with a tile, and return the results by name."""
        kernel, inputs, exact = self.point.kernel, self._check_inputs, self._judge.exact
        shards_keys = kernel in ("forward", "dq")  # otherwise the queries are sharded
        tensors: dict[str, Tensor] = inputs._asdict() | {"lse": exact["lse"].float().contiguous()}
        if kernel != "forward":
            tensors["delta"] = attention_delta(inputs.dout, exact["out"].to(inputs.q.dtype), inputs.dlse)
        if kernel in SINGLE_PASS_KERNELS:
            tensors["dq"] = torch.zeros(inputs.q.shape, device=self._device)
        names = RESULTS.get(kernel, ("dk", "dv"))
        results: tuple[Tensor, ...] = ()
        for role, shard in zip(CHECK_ROLES, self._shards(), strict=True):
            carried = dict(zip([CARRY_ARGUMENTS[name] for name in names], results, strict=False))

            def make(
                name: str, *shape: int, dtype: torch.dtype = torch.float32,
                shard: slice = shard, carried: Mapping[str, Tensor] = carried,
            ) -> Tensor:  # fmt: skip
                if name in carried:
                    return carried[name]
                if name not in tensors:
                    return torch.empty(shape, dtype=dtype, device=self._device)
                if shards_keys != (name in ("k", "v")):
                    return tensors[name]
                return tensors[name][:, :, shard].contiguous() if name in ("lse", "delta") else tensors[name][:, shard]

            all_tokens = slice(0, self._checked)
            hop_bounds = self._limits(all_tokens, shard) if shards_keys else self._limits(shard, all_tokens)
            sides = self._checked, shard.stop - shard.start
            result = call_entry(
                ranking_job(self.point, tile, THIS_DEVICE, self._shape.heads, role, sides), make, hop_bounds
            )
            results = (result,) if isinstance(result, Tensor) else result
        by_name = dict(zip(names, results, strict=True))
        return by_name | ({"dq": tensors["dq"].to(inputs.q.dtype)} if kernel in SINGLE_PASS_KERNELS else {})
