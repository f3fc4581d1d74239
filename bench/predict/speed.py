"""How long a launch takes on a GPU: what it is asked to do, a few constants that mean something, and what varies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # which brings torch, and a command's --help needs the names of GPUs
    from .call import Call

FOLD, DQ, DKDV, ADD, ENCODE, DECODE, POINT = "fold", "dQ", "dK/dV", "add dK/dV", "encode", "decode", "point"
BACKWARD_FLOPS = 5 / 2  # products of a backward and of a forward
TILE_ROWS = 128  # query rows of one program of every kernel that these speeds are of
TAIL = 0.5  # of a wave is idle while the last programs end: none to all of it, as the count falls
FORWARD_FLOPS = 4  # of a pair and element of the head: two products
DQ_SHARE, DKDV_SHARE = 3 / 7, 4 / 7  # products of the two kernels of a backward: both compute the scores again
STATE_BYTES = 4 + 4  # fp32 out or dQ, read and written, of a row and element of the head
DKV_BYTES = 2 * (4 + 4)  # of fp32 dK and dV, of a key and element
CONSTANTS_OF = ("float16", "bfloat16")
"""Dtypes whose kernels the constants are of, both as fast; float32 takes several products for one."""
Seconds = Any
"""A float, or an array of them: one for each case that is predicted at once."""


class Area(NamedTuple):
    """What one launch computes of the plane of queries and keys, for each head; numbers, or arrays of one length."""

    pairs: Any
    """Visible (query, key) pairs."""
    rows: Any
    """Query rows of the launch, seen or not: its state is theirs."""
    keys: Any
    longest: Any
    """Keys of the row that sees most: how long the last program runs."""
    edges: Any
    """Rows of tiles whose rows end at different keys: those are masked."""


def whole(tokens: Any, *, causal: bool) -> Area:
    """Attention of so many tokens on one device."""
    if causal:
        return Area(tokens * (tokens + 1) / 2, tokens, tokens, tokens, tokens)
    return Area(tokens * tokens, tokens, tokens, tokens, 0)


@dataclass(frozen=True)
class Speed:
    """One GPU. A launch of area A takes ``launch + FLOPs(A + what it wastes) / speed + its state / memory``."""

    name: str
    forward: float
    """FLOP/s of a launch without an end, an edge or a state."""
    backward: float
    """The same, both kernels together, counted as 2.5 forwards."""
    memory: float
    """Bytes per second, nominal."""
    multiprocessors: int
    capacity: float
    """Bytes of memory."""
    launch: float = 5e-6
    """Seconds."""
    edge: float = 256.0
    """Keys: what masking costs a row on an edge, its tile's invisible half among it."""
    passes: float = 0.85
    """Of the memory's nominal speed what one pass over a tensor reaches."""
    beside: float = 0.12
    """Of its speed a kernel loses while a transfer runs beside it: the multiprocessors that NCCL takes, 16 of 132."""
    host: float = 28e-6
    """Seconds of the host for a launch or a post of our loops: `bench host` found 52 us a hop of two, 116 of four."""
    link: str = "nvlink4"
    """The preset of what joins such GPUs."""
    peak: float | None = None
    """Published FLOP/s of dense 16-bit products; None where the speeds are of a file or of flags."""

    def products(self, area: Area, call: Call, *, backward: bool = False) -> Seconds:
        """Seconds of the products of one launch; of a backward those of both kernels."""
        heads, wave = call.batch * call.heads / call.chunks, self.multiprocessors * TILE_ROWS
        operations = heads * (area.pairs + self.edge * area.edges)
        work = np.maximum(operations + TAIL * wave * area.longest, wave * area.longest)
        flops = FORWARD_FLOPS * call.head_dim * work
        return flops * BACKWARD_FLOPS / self.backward if backward else flops / self.forward

    def moved(self, nbytes: Any) -> Seconds:
        """Seconds of passes over memory."""
        return nbytes / (self.memory * self.passes)

    def seconds(self, what: str, area: Area, call: Call, *, hop: int) -> Seconds:
        """Of one launch of our kernels."""
        heads, kv_heads = (call.batch * count / call.chunks * call.head_dim for count in (call.heads, call.kv_heads))
        if what == POINT:
            return 0.0
        if what == ADD:
            return self.moved(DKV_BYTES * area.keys * kv_heads)
        if what in (ENCODE, DECODE):
            return self.launch + self.moved(2 * call.itemsize * area.keys * kv_heads)
        if what == FOLD:
            state = STATE_BYTES * area.rows * heads if hop else 0.0
            return self.launch + self.products(area, call) + self.moved(state)
        state = STATE_BYTES * area.rows * heads if what == DQ else DKV_BYTES * area.keys * kv_heads
        share = {DQ: DQ_SHARE, DKDV: DKDV_SHARE}[what]
        return self.launch + share * self.products(area, call, backward=True) + self.moved(state)

    def fitted(self, forward: tuple[float, Call], backward: tuple[float, Call] | None = None) -> Speed:
        """This GPU with the speeds at which whole calls reach given FLOP/s, as tables and benches tell them.

        Args:
            forward: FLOP/s of visible pairs, and the call, in one launch.
            backward: the same of both kernels, counted as 2.5 forwards; None: as fast as the forward, times what it
                is slower by now.

        Raises:
            ValueError: a launch would take less than it takes to launch.
        """

        def speed(rate: float, call: Call, before: float, *, is_backward: bool) -> float:
            (area,) = call.areas()
            pairs = FORWARD_FLOPS * call.head_dim * call.batch * call.heads * area.pairs
            wanted = pairs * (BACKWARD_FLOPS if is_backward else 1) / rate - self.launch
            if wanted <= 0:
                raise ValueError(f"{rate:.3g} FLOP/s is no speed of this launch: it would take less than to launch it")
            return float(before * self.products(area, call, backward=is_backward) / wanted)

        ahead = speed(*forward, self.forward, is_backward=False)
        if backward is None:
            return replace(self, forward=ahead, backward=self.backward * ahead / self.forward, peak=None)
        return replace(self, peak=None, forward=ahead, backward=speed(*backward, self.backward, is_backward=True))


class Preset(NamedTuple):
    """What a GPU model reaches, and what joins several of them; ``kernels/gpu.py`` has the facts about the model."""

    forward: float
    """FLOP/s of ``Speed.forward``: rough until it is fitted, what Triton's and PyTorch's kernels reach there."""
    backward: float
    link: str
    scaled_from: str = ""
    """The model on which these rates were reached, if another; they are scaled by the ratio of the peaks."""


GPUS = {
    "h100": Preset(560e12, 430e12, "nvlink4"),
    "h200": Preset(560e12, 430e12, "nvlink4"),
    "h800": Preset(560e12, 430e12, "nvlink4-h800"),
    "h100-pcie": Preset(380e12, 290e12, "pcie5"),  # 350 W in the place of 700 W, HBM2e
    "b200": Preset(560e12, 430e12, "nvlink5", scaled_from="h100"),
    "a100": Preset(215e12, 170e12, "nvlink3"),
    "a800": Preset(215e12, 170e12, "nvlink3-a800"),
    "a100-pcie": Preset(190e12, 150e12, "pcie4"),
    # both have mma.sync, as an A100
    "l40s": Preset(215e12, 170e12, "pcie4", scaled_from="a100"),
    "a10": Preset(215e12, 170e12, "pcie4", scaled_from="a100"),
}
"""By the keys of ``kernels.gpu.GPU_MODELS``."""


def gpu_speed(key: str) -> Speed:
    """Return the preset of a GPU model, by its key in ``GPUS``."""
    from ...kernels.gpu import GPU_MODELS  # brings torch, and a command's --help needs the keys alone

    preset, gpu = GPUS[key], GPU_MODELS[key]
    peak, measured_peak = gpu.tensor_flops, GPU_MODELS[preset.scaled_from or key].tensor_flops
    assert peak and measured_peak and gpu.memory_bandwidth is not None and gpu.memory_bytes is not None
    share = peak / measured_peak
    return Speed(
        gpu.name, share * preset.forward, share * preset.backward, gpu.memory_bandwidth, gpu.multiprocessors,
        gpu.memory_bytes, link=preset.link, peak=peak,
    )  # fmt: skip


MOST_JITTER = 1.0  # who means 5% and writes 5 is told
MOST_SLOW = 1000  # times as long: slower is broken
MOST_RANKS = 128  # that are simulated one by one
DRAWS = 16  # of a jitter: their mean and spread are told


@dataclass(frozen=True)
class Perturbation:
    """What makes ranks differ: GPUs that are slow, and launches that vary."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank how many times as long its launches take."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a launch's time, drawn for each."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ValueError(f"jitter is {self.jitter}: it must be 0 to {MOST_JITTER:g}, and 0.05 is 5%")
        for rank, factor in self.slow.items():
            if not 1 <= factor <= MOST_SLOW:
                raise ValueError(
                    f"slow is {rank}={factor:g}: a factor is how many times as long the rank takes, 1 to {MOST_SLOW:,}"
                )

    @property
    def is_there(self) -> bool:
        return bool(self.slow) or self.jitter > 0

    def __str__(self) -> str:
        parts = [f"rank {rank} takes {factor:g} times as long" for rank, factor in self.slow.items()]
        return ", ".join(parts + ([f"launches vary by {self.jitter:.3g}"] if self.jitter else []))

    def check(self, world: int) -> None:
        """Refuse what a ring of so many ranks cannot have.

        Raises:
            ValueError: a slow rank that it has not, or more ranks than are simulated one by one.
        """
        wrong = [rank for rank in self.slow if not 0 <= rank < world]
        if wrong:
            raise ValueError(f"slow names rank {wrong[0]}: ranks are 0 to {world - 1}")
        if self.is_there and world > MOST_RANKS:
            raise ValueError(f"slow and jitter are of rings of at most {MOST_RANKS} GPUs, each simulated: got {world}")

    def factors(self, rank: int, phase: str, count: int) -> Seconds:
        """Of every launch of a rank how many times as long it takes, ``[count]``; with jitter ``[count, draw]``."""
        slower = self.slow.get(rank, 1.0)
        if not self.jitter:
            return [slower] * count
        draw = np.random.default_rng([rank, len(phase)])
        return slower * draw.lognormal(0.0, self.jitter, (count, DRAWS))

    def slowest(self, world: int) -> float:
        """How many times as long one launch takes until all ranks are done with it; the mean of all draws."""
        each = [np.broadcast_to(self.factors(rank, "", 1)[0], DRAWS) for rank in range(world)]
        return float(np.max(each, axis=0).mean())

    def grouped(self, degree: int) -> Perturbation:
        """Of rings of groups of so many ranks: in each place the slowest of its group."""
        slow: dict[int, float] = {}
        for rank, factor in self.slow.items():
            slow[rank // degree] = max(factor, slow.get(rank // degree, 1.0))
        return Perturbation(slow, self.jitter)


NONE = Perturbation()
