"""What the checks of the predictor compare: attentions of every layout and mask, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from ...ring import Mask, Ring, ring_attention
from ...ring.schedule.layout import Documents
from ...ring.schedule.mask import bigbird
from ..common.shapes import binary
from ..common.timing import Step
from .call import DTYPES, Call

SCHEMA = "ringattn predict check 1"
"""Of the file in which ``check`` leaves its rows."""
ALLOWED = 0.10
"""What a prediction may be off by, above the measured spread."""
MASKS = ("full", "causal", "window", "documents", "prefix", "blocks")


@dataclass(frozen=True)
class Row:
    """One attention, forward and backward, measured and predicted."""

    layout: str
    mask: str
    seqlen: int
    measured: float
    """Seconds, the median."""
    spread: float
    """Half the interquartile range over the median."""
    predicted: float

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        return abs(self.off) <= ALLOWED + self.spread

    def shown(self) -> dict[str, Any]:
        """For a table."""
        told = {"seqlen": binary(self.seqlen), "off": f"{self.off:+.1%}", "": "" if self.is_right else "WRONG"}
        return asdict(self) | told


@dataclass(frozen=True)
class Shape:
    """What all rows have in common."""

    world: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"

    def call(self, layout: str, mask: str, seqlen: int) -> Call:
        """What is predicted."""
        return Call(
            seqlen // self.world, self.world, layout, mask_of(mask, seqlen), self.heads, self.kv_heads, self.head_dim,
            dtype=self.dtype,
        )  # fmt: skip


def mask_of(name: str, seqlen: int) -> Mask:
    """A mask of each kind that the CPU computes in its own way.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in MASKS:
        raise ValueError(f"mask is {name!r}: it must be one of {', '.join(MASKS)}")
    if name == "window":
        return Mask(causal=True, window=(1023, 0))
    if name == "documents":
        return Mask(causal=True, documents=Documents([0, seqlen // 8, seqlen // 2, seqlen]))
    if name == "prefix":
        return Mask(causal=True, prefix=seqlen // 4)
    if name == "blocks":
        return Mask(blocks=bigbird(seqlen, max(1, seqlen // 32), window=3, global_=1, random=2))
    return Mask(causal=name == "causal")


def cases(lengths: Sequence[int], layouts: Sequence[str], masks: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Layout, mask and length of every row; none of block masks in stripes, which are no runs of whole blocks."""
    every = product(lengths, masks, layouts)
    return ((layout, mask, length) for length, mask, layout in every if (layout, mask) != ("striped", "blocks"))


def step_of(rank: int, call: Call, ring: Ring, device: torch.device) -> Step:
    """Forward and backward of a rank's part."""
    held, mask = call.held, call.mask
    boundaries = None if mask.documents is None else list(mask.documents.boundaries)
    shape, draw = (1, held.lengths[rank]), torch.Generator().manual_seed(rank)
    heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    *inputs, dout = (
        torch.randn(*shape, count, call.head_dim, generator=draw).to(device, DTYPES[call.dtype]) for count in heads
    )

    def run() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(
            *leaves, layout=held, ring=ring, causal=mask.causal, window_size=mask.window, cu_seqlens=boundaries,
            prefix_length=mask.prefix or None, block_mask=mask.blocks,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, leaves, dout)

    return run
