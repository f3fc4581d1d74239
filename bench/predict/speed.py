"""How long a launch takes on a GPU: a few constants that mean something, and what a launch is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..common.attention import BACKWARD_FLOPS
from .launch import TILE_ROWS, Area, Launch
from .program import ADD, DECODE, DKDV, DQ, ENCODE, FOLD, POINT, Form

TAIL = 0.5  # of a wave is idle while the last programs end: none to all of it, as the count falls
FORWARD_FLOPS = 4  # of a pair and element of the head: two products
DQ_SHARE, DKDV_SHARE = 3 / 7, 4 / 7  # products of the two kernels of a backward: both compute the scores again
STATE_BYTES = 2 * (4 + 4)  # fp32 out and its like, read and written, of a row and element of the head
SUMS_BYTES = 2 * (4 + 4)  # of dK and dV, of a key and element


@dataclass(frozen=True)
class Speed:
    """One GPU. A launch of area A takes ``launch + FLOPs(A + what it wastes) / speed + its state / memory``."""

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
    capacity: float = 80e9
    """Bytes of memory."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "memory", "multiprocessors", "passes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be above 0")
        if not 0 <= self.beside < 1:
            raise ValueError(f"beside is {self.beside}: the part of its speed that a kernel loses must be 0 to below 1")

    def products(self, area: Area, form: Form, *, backward: bool = False) -> float:
        """Seconds of the products of one launch; of a backward those of both kernels."""
        heads, wave = form.batch * form.heads / form.chunks, self.multiprocessors * TILE_ROWS
        if not area.pairs:
            return 0.0
        asked = heads * (area.pairs + self.edge * area.edges)
        work = max(asked + TAIL * wave * area.longest, wave * area.longest)
        flops = FORWARD_FLOPS * form.head_dim * work
        return flops * BACKWARD_FLOPS / self.backward if backward else flops / self.forward

    def moved(self, nbytes: float) -> float:
        """Seconds of passes over memory."""
        return nbytes / (self.memory * self.passes)

    def seconds(self, what: str, area: Area, form: Form, *, hop: int) -> float:
        """Of one launch of our kernels."""
        heads, kv_heads = (form.batch * count / form.chunks * form.head_dim for count in (form.heads, form.kv_heads))
        if what == POINT:
            return 0.0
        if what == ADD:
            return self.moved(SUMS_BYTES * area.keys * kv_heads)
        if what in (ENCODE, DECODE):
            return self.launch + self.moved(2 * form.dtype.itemsize * area.keys * kv_heads)
        if what == FOLD:
            state = STATE_BYTES / 2 * area.rows * heads if hop else 0.0
            return self.launch + self.products(area, form) + self.moved(state)
        state = STATE_BYTES / 2 * area.rows * heads if what == DQ else SUMS_BYTES * area.keys * kv_heads
        share = {DQ: DQ_SHARE, DKDV: DKDV_SHARE}[what]
        return self.launch + share * self.products(area, form, backward=True) + self.moved(state)

    @property
    def on_host(self) -> bool:
        """A GPU's host only posts."""
        return False

    @property
    def alone(self) -> float:
        """Every rank has a GPU of its own."""
        return 1.0

    def launch_seconds(self, launch: Launch, form: Form) -> float:
        """Of one launch of our kernels."""
        return self.seconds(launch.what, launch.area, form, hop=launch.hop)

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
            return before * self.products(area, form, backward=is_backward) / wanted

        ahead = speed(forward, self.forward, is_backward=False)
        if backward is None:
            return replace(self, forward=ahead, backward=self.backward * ahead / self.forward)
        return replace(self, forward=ahead, backward=speed(backward, self.backward, is_backward=True))


def form_of(
    *,
    tokens: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Form:
    """A form with the ring's usual settings."""
    return Form(batch, tokens, heads, kv_heads or heads, head_dim, dtype)


H100 = Speed(forward=560e12, backward=430e12)
"""Rough until it is fitted: what Triton's and PyTorch's kernels reach there."""
CONSTANTS_OF = ("float16", "bfloat16")
"""Dtypes whose kernels the constants are of, both as fast; float32 takes several products for one."""
GPUS = {
    "h100": H100,
    "h200": replace(H100, memory=4.8e12, capacity=141e9),
    "h800": H100,
    "a100": Speed(forward=215e12, backward=170e12, memory=2.04e12, multiprocessors=108),
}
