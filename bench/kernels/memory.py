"""What ``bench kernels`` takes: inputs, what every contender keeps to be timed, and the judge's float64 beside them.

A contender whose own scores or mask grow with the square of the length is refused by itself, as a row: see ``rivals``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..common.attention import DTYPES
from ..common.errors import BLOCK_BYTES, chosen_heads
from ..common.memory import Needs, refuse_too_large
from ..common.timing import FLUSH_BYTES
from ..ring.memory import FP32, FP64
from .rivals import contenders
from .shape import Shape
from .speed import PRODUCT_SIDE

BLOCKS = 4  # tensors of a block's scores that the judge has at once, in its backward
MASKS = 5  # bytes per query and key: a mask as a tensor while it is made, beside its additive form


@dataclass(frozen=True)
class Field:
    """Who is timed, on what."""

    device: torch.device
    ours: int
    theirs: int

    @classmethod
    def of(cls, device: torch.device, by: Sequence[str]) -> Field:
        """The contenders that ``--by`` names; none: all."""
        mine = [one.ours for one in contenders(device) if not by or one.name in by]
        return cls(device, sum(mine), len(mine) - sum(mine))


def check_room(shapes: Sequence[Shape], field: Field) -> None:
    """Refuse a shape that does not fit the free memory, with the length that does: typer.BadParameter."""

    def needed_of(shape: Shape) -> Callable[[int], Needs]:
        def needed(seqlen: int) -> Needs:
            nbytes = peak(shape, seqlen, field)
            return Needs(0, nbytes) if field.device.type == "cuda" else Needs(nbytes)

        return needed

    for shape in shapes:
        refuse_too_large("--seqlen", shape.seqlen, needed_of(shape), field.device, unit="tokens")


def peak(shape: Shape, seqlen: int, field: Field) -> int:
    """Bytes at the peak, were this shape so many tokens long."""
    item, tokens = DTYPES[shape.dtype].itemsize, shape.batch * seqlen
    dims = shape.head_dim + shape.value_dim
    inputs = tokens * (shape.heads + shape.kv_heads) * dims * item  # q, k, v and dout; as much are out, dq, dk and dv
    out, row = tokens * shape.heads * shape.value_dim, tokens * shape.heads * FP32
    kept = field.ours * (out * (item + FP32) + 3 * row) + field.theirs * (inputs + out * item + row)
    running = inputs + tokens * shape.heads * shape.head_dim * FP32
    if shape.mask.global_tokens and field.ours:  # dK and dV between the parts: what came and what goes on
        running += 2 * tokens * shape.kv_heads * dims * FP32
    product = 3 * PRODUCT_SIDE[field.device.type] ** 2 * FP32
    on_gpu = field.device.type == "cuda"
    return inputs + kept + running + judged(shape, seqlen) + product + FLUSH_BYTES * on_gpu


def judged(shape: Shape, seqlen: int) -> int:
    """float64 of the heads that are looked at; beside it a block's scores, or PyTorch's own attention in its dtype."""
    chosen = len(chosen_heads(shape.batch, shape.heads, shape.kv_heads, seqlen, seqlen))
    heads, item = chosen * shape.heads // shape.kv_heads, DTYPES[shape.dtype].itemsize
    once = shape.batch * seqlen * (heads + chosen) * (shape.head_dim + shape.value_dim)
    row = shape.batch * heads * seqlen
    block = max(min(BLOCK_BYTES, row * seqlen * FP64), row * FP64)
    plain = 2 * once * item
    if not shape.square:
        masks = 1 if shape.mask.used is None else shape.batch
        plain += masks * seqlen**2 * (item + MASKS)
        plain += shape.batch * seqlen * heads * (shape.head_dim + shape.value_dim) * item
    return once * FP64 + max(once * FP64 + BLOCKS * block, plain)
