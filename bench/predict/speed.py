"""The time of a launch on a GPU: the area it computes, a few physical constants, and variation between ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # imports torch, which would slow --help
    from .predicted_call import PredictedCall

FOLD, DQ, DKDV, ADD, ENCODE, DECODE, POINT = "fold", "dQ", "dK/dV", "add dK/dV", "encode", "decode", "point"
BACKWARD_FLOPS = 5 / 2  # matrix products of a backward per product of a forward
TILE_ROWS = 128  # query rows of one program, in every kernel modelled here
IDLE_WAVE_SHARE = 0.5  # share of a wave that is idle at the end; between 0 and 1, depending on the number of programs
FORWARD_FLOPS = 4  # per pair and element of the head: two products
DQ_SHARE, DKDV_SHARE = 3 / 7, 4 / 7  # shares of the backward's two kernels, which both recompute the scores
STATE_BYTES = 4 + 4  # read and write fp32 out or dQ, per row and element of the head
DKV_BYTES = 2 * (4 + 4)  # read and write fp32 dK and dV, per key and element of the head
MODELLED_DTYPES = ("float16", "bfloat16")
"""Dtypes that the bounds cover, equally fast. float32 needs several products for one."""
Seconds = Any
"""A float, or an array with one element per length or per random draw."""


class Area(NamedTuple):
    """Work of one launch per head, counted in the (query, key) plane; numbers, or arrays over several lengths."""

    pairs: Any
    """Visible (query, key) pairs."""
    rows: Any
    """Query rows of the launch; each has a state, even without visible keys."""
    keys: Any
    longest: Any
    """Most visible keys of any row, which bounds the last program's time."""
    edges: Any
    """Rows in tiles whose rows have different bounds; these tiles are masked."""


def full_area(tokens: Any, *, causal: bool) -> Area:
    """Return the area of one launch on a full or causal square of ``tokens``."""
    if causal:
        return Area(tokens * (tokens + 1) / 2, tokens, tokens, tokens, tokens)
    return Area(tokens * tokens, tokens, tokens, tokens, 0)


@dataclass(frozen=True)
class Speed:
    """Speed of one GPU.

    A launch of area A takes ``launch + (FLOPs(A) + wasted FLOPs) / speed + state bytes / memory``.
    """

    name: str
    forward: float
    """FLOP/s of a forward that has no idle tail, no masked tiles and no state."""
    backward: float
    """The same for both backward kernels together, counted as 2.5 forwards."""
    memory: float
    """Nominal bytes per second."""
    multiprocessors: int
    capacity: float
    """Bytes of memory."""
    launch: float = 5e-6
    """Seconds per launch."""
    edge: float = 256.0
    """Extra cost of a row of a masked tile, in keys: the tile's invisible half and the mask itself."""
    passes: float = 0.85
    """Share of the nominal memory speed that a pass over a tensor reaches."""
    beside: float = 0.12
    """Share of its speed that a kernel loses during a transfer: NCCL takes 16 of 132 multiprocessors."""
    host: float = 28e-6
    """Host seconds per launch or post: `bench host` measured 52 us for two and 116 us for four."""
    link: str = "nvlink4"
    """Preset of the link between such GPUs."""
    peak: float | None = None
    """Published dense 16-bit FLOP/s; None if the speeds come from a file or flags."""

    def product_seconds(self, area: Area, call: PredictedCall, *, backward: bool = False) -> Seconds:
        """Return the seconds of the matrix products of one forward launch, or of both backward kernels together."""
        heads, wave = call.batch * call.heads / call.head_groups, self.multiprocessors * TILE_ROWS
        operations = heads * (area.pairs + self.edge * area.edges)
        work = np.maximum(operations + IDLE_WAVE_SHARE * wave * area.longest, wave * area.longest)
        flops = FORWARD_FLOPS * call.head_dim * work
        return flops * BACKWARD_FLOPS / self.backward if backward else flops / self.forward

    def memory_seconds(self, nbytes: Any) -> Seconds:
        """Return the seconds to read or write ``nbytes``."""
        return nbytes / (self.memory * self.passes)

    def seconds(self, what: str, area: Area, call: PredictedCall, *, hop: int) -> Seconds:
        """Return the seconds of the launch ``what``, such as ``FOLD``, on one chunk; hop 0 reads no state."""
        each = call.batch * call.head_dim / call.head_groups
        heads, kv_heads = call.heads * each, call.kv_heads * each
        if what == POINT:
            return 0.0
        if what == ADD:
            return self.memory_seconds(DKV_BYTES * area.keys * kv_heads)
        if what in (ENCODE, DECODE):
            return self.launch + self.memory_seconds(2 * call.itemsize * area.keys * kv_heads)
        if what == FOLD:
            state = STATE_BYTES * area.rows * heads if hop else 0.0
            return self.launch + self.product_seconds(area, call) + self.memory_seconds(state)
        state = STATE_BYTES * area.rows * heads if what == DQ else DKV_BYTES * area.keys * kv_heads
        share = {DQ: DQ_SHARE, DKDV: DKDV_SHARE}[what]
        return self.launch + share * self.product_seconds(area, call, backward=True) + self.memory_seconds(state)

    def fit_speeds(
        self, forward: tuple[float, PredictedCall], backward: tuple[float, PredictedCall] | None = None
    ) -> Speed:
        """Return this GPU with the speeds at which the two calls reach the given FLOP/s on their visible pairs.

        The backward counts as 2.5 forwards; None keeps its ratio to the forward. Raise ValueError if a call would take
        less time than the launch itself.
        """

        def speed(rate: float, call: PredictedCall, before: float, *, is_backward: bool) -> float:
            (area,) = call.areas()
            pairs = FORWARD_FLOPS * call.head_dim * call.batch * call.heads * area.pairs
            wanted = pairs * (BACKWARD_FLOPS if is_backward else 1) / rate - self.launch
            if wanted <= 0:
                raise ValueError(f"{rate:.3g} FLOP/s is too fast: this call would take less time than its launch")
            return float(before * self.product_seconds(area, call, backward=is_backward) / wanted)

        forward_speed = speed(*forward, self.forward, is_backward=False)
        backward_speed = self.backward * forward_speed / self.forward
        if backward is not None:
            backward_speed = speed(*backward, self.backward, is_backward=True)
        return replace(self, forward=forward_speed, backward=backward_speed, peak=None)


GPUS = {
    "h100": "nvlink4", "h200": "nvlink4", "h800": "nvlink4-h800", "h100-pcie": "pcie5", "b200": "nvlink5",
    "a100": "nvlink3", "a800": "nvlink3-a800", "a100-pcie": "pcie4", "l40s": "pcie4", "a10": "pcie4",
}  # fmt: skip
"""Preset of the link inside a node by GPU model, a key of ``kernels.gpu.GPU_MODELS``."""

BOUNDS = Path(__file__).with_name("bounds.json")
"""Bounds of the default kernels in percent of peak; ``python -m tests.support.kernel_bounds`` records them."""


@cache
def default_kernel_shares(arch: int, head_dim: int) -> tuple[float, float]:
    """Return the shares of the peak that the default kernels' instructions allow: forward, and the backward's two.

    The backward counts five products, of which its kernels compute seven.
    """
    by_head_dim = json.loads(BOUNDS.read_text())["percent"][str(arch)]
    forward, dq, dkdv = by_head_dim[next((size for size in by_head_dim if head_dim <= int(size)), [*by_head_dim][-1])]
    return forward / 100, 5 / 7 / (DQ_SHARE / dq + DKDV_SHARE / dkdv) / 100


def gpu_speed(key: str, head_dim: int = 128) -> Speed:
    """Return the speed of the default kernels on a GPU model, by its key in ``GPUS``."""
    from ...kernels.gpu import GPU_MODELS  # imports torch; --help needs only the keys

    gpu = GPU_MODELS[key]
    assert gpu.tensor_flops and gpu.memory_bandwidth is not None and gpu.memory_bytes is not None
    forward, backward = (share * gpu.tensor_flops for share in default_kernel_shares(gpu.arch, head_dim))
    return Speed(
        gpu.name, forward, backward, gpu.memory_bandwidth, gpu.multiprocessors, gpu.memory_bytes, link=GPUS[key],
        peak=gpu.tensor_flops,
    )  # fmt: skip


MOST_JITTER = 1.0  # refuses 5 for 5%
MOST_SLOW = 1000  # times as long
MOST_RANKS = 128  # ranks that are simulated one by one
DRAWS = 16  # random draws of jitter, reported by mean and spread


@dataclass(frozen=True)
class Perturbation:
    """Differences between ranks: GPUs that are slow, and launches whose times vary at random."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on the time of every launch, by rank."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of launch times, drawn per launch."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ValueError(f"jitter is {self.jitter}: it must be between 0 and {MOST_JITTER:g}, where 0.05 is 5%")
        for rank, factor in self.slow.items():
            if not 1 <= factor <= MOST_SLOW:
                raise ValueError(f"slow is {rank}={factor:g}: the factor must be between 1 and {MOST_SLOW:,}")

    @property
    def is_active(self) -> bool:
        return bool(self.slow) or self.jitter > 0

    def __str__(self) -> str:
        parts = [f"rank {rank} takes {factor:g} times as long" for rank, factor in self.slow.items()]
        return ", ".join(parts + ([f"launches vary by {self.jitter:.3g}"] if self.jitter else []))

    def check(self, world: int) -> None:
        """Raise ValueError if a slow rank is not among ``world`` ranks, or if these are too many to simulate."""
        unknown = [rank for rank in self.slow if not 0 <= rank < world]
        if unknown:
            raise ValueError(f"slow has rank {unknown[0]}: the rank must be between 0 and {world - 1}")
        if self.is_active and world > MOST_RANKS:
            raise ValueError(f"slow and jitter support rings of at most {MOST_RANKS} GPUs, not {world}")

    def launch_factors(self, rank: int, phase: str, count: int) -> Seconds:
        """Return the factors on a rank's ``count`` launch times: ``[count]``, or with jitter ``[count, draw]``."""
        factor = self.slow.get(rank, 1.0)
        if not self.jitter:
            return [factor] * count
        generator = np.random.default_rng([rank, len(phase)])
        return factor * generator.lognormal(0.0, self.jitter, (count, DRAWS))

    def slowest_factor(self, world: int) -> float:
        """Return the largest factor on a launch of any of ``world`` ranks, the mean of all draws."""
        factors = [np.broadcast_to(self.launch_factors(rank, "", 1)[0], DRAWS) for rank in range(world)]
        return float(np.max(factors, axis=0).mean())

    def group_ranks(self, degree: int) -> Perturbation:
        """Return the perturbation of a ring over groups of ``degree`` ranks, each as slow as its slowest rank."""
        slow: dict[int, float] = {}
        for rank, factor in self.slow.items():
            slow[rank // degree] = max(factor, slow.get(rank // degree, 1.0))
        return Perturbation(slow, self.jitter)


NO_PERTURBATION = Perturbation()
