"""How long a launch takes on a GPU: what it is asked to do, and a few constants that mean something."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # which brings torch, and a command's --help needs the names of GPUs
    from .program import Form

FOLD, DQ, DKDV, ADD, ENCODE, DECODE, POINT = "fold", "dQ", "dK/dV", "add sums", "encode", "decode", "point"
BACKWARD_FLOPS = 5 / 2  # products of a backward and of a forward
TILE_ROWS = 128  # query rows of one program of every kernel that these speeds are of
TAIL = 0.5  # of a wave is idle while the last programs end: none to all of it, as the count falls
FORWARD_FLOPS = 4  # of a pair and element of the head: two products
DQ_SHARE, DKDV_SHARE = 3 / 7, 4 / 7  # products of the two kernels of a backward: both compute the scores again
STATE_BYTES = 4 + 4  # fp32 out or dQ, read and written, of a row and element of the head
SUMS_BYTES = 2 * (4 + 4)  # of dK and dV, of a key and element
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
    memory: float = 3.35e12
    """Bytes per second, nominal."""
    multiprocessors: int = 132
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
    capacity: float = 80e9
    """Bytes of memory."""
    link: str = "nvlink4"
    """The preset of what joins such GPUs."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "memory", "multiprocessors", "passes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be above 0")
        if not 0 <= self.beside < 1:
            raise ValueError(f"beside is {self.beside}: the part of its speed that a kernel loses must be 0 to below 1")

    def products(self, area: Area, form: Form, *, backward: bool = False) -> Seconds:
        """Seconds of the products of one launch; of a backward those of both kernels."""
        heads, wave = form.batch * form.heads / form.chunks, self.multiprocessors * TILE_ROWS
        asked = heads * (area.pairs + self.edge * area.edges)
        work = np.maximum(asked + TAIL * wave * area.longest, wave * area.longest)
        flops = FORWARD_FLOPS * form.head_dim * work
        return flops * BACKWARD_FLOPS / self.backward if backward else flops / self.forward

    def moved(self, nbytes: Any) -> Seconds:
        """Seconds of passes over memory."""
        return nbytes / (self.memory * self.passes)

    def seconds(self, what: str, area: Area, form: Form, *, hop: int) -> Seconds:
        """Of one launch of our kernels."""
        heads, kv_heads = (form.batch * count / form.chunks * form.head_dim for count in (form.heads, form.kv_heads))
        if what == POINT:
            return 0.0
        if what == ADD:
            return self.moved(SUMS_BYTES * area.keys * kv_heads)
        if what in (ENCODE, DECODE):
            return self.launch + self.moved(2 * form.dtype.itemsize * area.keys * kv_heads)
        if what == FOLD:
            state = STATE_BYTES * area.rows * heads if hop else 0.0
            return self.launch + self.products(area, form) + self.moved(state)
        state = STATE_BYTES * area.rows * heads if what == DQ else SUMS_BYTES * area.keys * kv_heads
        share = {DQ: DQ_SHARE, DKDV: DKDV_SHARE}[what]
        return self.launch + share * self.products(area, form, backward=True) + self.moved(state)

    def fitted(self, *, forward: tuple[float, Area, Form], backward: tuple[float, Area, Form] | None = None) -> Speed:
        """This GPU with the speeds at which given launches reach given FLOP/s, as tables and benches tell them.

        Args:
            forward: FLOP/s of visible pairs, of a launch of this area and form.
            backward: the same of both kernels, counted as 2.5 forwards; None: as fast as the forward, times what it
                is slower by now.
        """

        def speed(told: tuple[float, Area, Form], before: float, *, is_backward: bool) -> float:
            rate, area, form = told
            pairs = FORWARD_FLOPS * form.head_dim * form.batch * form.heads * area.pairs
            wanted = pairs * (BACKWARD_FLOPS if is_backward else 1) / rate - self.launch
            if wanted <= 0:
                raise ValueError(f"{rate:.3g} FLOP/s is no speed of this launch: it would take less than to launch it")
            return float(before * self.products(area, form, backward=is_backward) / wanted)

        ahead = speed(forward, self.forward, is_backward=False)
        if backward is None:
            return replace(self, forward=ahead, backward=self.backward * ahead / self.forward)
        return replace(self, forward=ahead, backward=speed(backward, self.backward, is_backward=True))


H100 = Speed("H100", forward=560e12, backward=430e12)
"""Rough until it is fitted: what Triton's and PyTorch's kernels reach there."""
A100 = Speed("A100", forward=215e12, backward=170e12, memory=2.04e12, multiprocessors=108, link="nvlink3")
GPUS = {
    "h100": H100,
    "h200": replace(H100, name="H200", memory=4.8e12, capacity=141e9),
    "h800": replace(H100, name="H800", link="nvlink4-h800"),
    # 350 W in the place of 700 W, HBM2e
    "h100-pcie": replace(
        H100, name="H100 PCIe", forward=380e12, backward=290e12, memory=2.0e12, multiprocessors=114, link="pcie5"
    ),
    "a100": A100,
    "a800": replace(A100, name="A800", link="nvlink3-a800"),
    "a100-pcie": replace(A100, name="A100 PCIe", forward=190e12, backward=150e12, memory=1.94e12, link="pcie4"),
}
