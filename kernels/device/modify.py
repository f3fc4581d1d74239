"""What becomes of scores inside a kernel: softcap, ALiBi, dropout. The jit side of ``scores.Scores``."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import LOG2_E

SERIES = tl.constexpr(0.25)  # below it tanh is its series, whose first four terms are exact to fp32


class Counter(NamedTuple):
    """Seed of dropout and number of the first head, as fp32 numbers of 16 bits each.

    They are passed by value, so that no stream has to wait for them. They are floats because Triton compiles anew for
    some integers, but for no float; fp32 holds 16 bits exactly.
    """

    seed_0: Any
    """The lowest 16 bits of the seed."""
    seed_1: Any
    seed_2: Any
    seed_3: Any
    head_0: Any
    """The lowest 16 bits of the first head's number."""
    head_1: Any


class Modifiers(NamedTuple):
    """What a kernel is told; None where it is off. ``rows`` and ``columns`` as in ``Shape``."""

    softcap: Any
    slopes: Any
    """fp32, of one batch row after the other."""
    slopes_stride: Any
    """Elements between batch rows; 0: all have the same."""
    rows: Any
    """int32 positions."""
    columns: Any
    counter: Any
    """A ``Counter``: the key of philox and the first head."""
    threshold: Any
    kept: Any
    """What kept weights are multiplied with."""


UNMODIFIED = Modifiers(*[None] * len(Modifiers._fields))


class TilePosition(NamedTuple):
    """Where a tile of scores lies, for those that depend on it."""

    positions: Any
    """Of its rows."""
    batch: Any
    head: Any
    """Query head."""
    slope: Any
    seed: Any


@triton.jit
def placed(modifiers, offs, limit, batch, head, heads):
    """The place of the rows ``offs`` against the query head ``head`` of ``heads``; nothing where nobody asks."""
    if modifiers.rows is None:
        return 0
    else:
        positions = tl.load(modifiers.rows + offs, mask=offs < limit, other=0)
        slope, seed, number = 0.0, 0, head.to(tl.int32)
        if modifiers.slopes is not None:
            slope = tl.load(modifiers.slopes + batch * modifiers.slopes_stride + head)
        if modifiers.counter is not None:
            counter = modifiers.counter
            high = joined(counter.seed_2, counter.seed_3).to(tl.int64)
            seed = (high << 32) | joined(counter.seed_0, counter.seed_1).to(tl.int64)
            number = (joined(counter.head_0, counter.head_1).to(tl.int64) + head).to(tl.int32)
        return TilePosition(positions, batch.to(tl.int32), number, slope, seed)


@triton.jit
def joined(low, high):
    """Return the 32 bits whose halves are two fp32 numbers."""
    return tl.cast(low, tl.uint32) | (tl.cast(high, tl.uint32) << 16)


@triton.jit
def column_positions(modifiers, offs, limit):
    """Positions of the columns ``offs``; nothing where nobody asks."""
    if modifiers.columns is None:
        return 0
    else:
        return tl.load(modifiers.columns + offs, mask=offs < limit, other=0)


@triton.jit
def score_unit(modifiers, softmax_scale):
    """What scores are multiplied with to be exponents of 2: those that are modified carry their scale already."""
    if modifiers.softcap is None and modifiers.rows is None:
        return softmax_scale * LOG2_E
    else:
        return LOG2_E


@triton.jit
def modified(qk, modifiers, place, positions, softmax_scale):
    """(scores, tanh): ``cap * tanh(scale * qk / cap) - slope * |p_q - p_k|``, and what the gradient of a cap needs."""
    tanh = qk
    if modifiers.softcap is not None:
        tanh = hyperbolic_tangent(qk * (softmax_scale / modifiers.softcap))
        qk = tanh * modifiers.softcap
    elif modifiers.rows is not None:
        qk = qk * softmax_scale
    if modifiers.slopes is not None:
        distance = tl.abs(place.positions[:, None] - positions[None, :])
        qk -= place.slope * distance.to(tl.float32)
    return qk, tanh


@triton.jit
def hyperbolic_tangent(x):
    """By its series near 0, where the difference of exponentials would leave few digits."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * (2 * LOG2_E)) + 1.0)
    return tl.where(magnitude < SERIES, series, tl.where(x < 0, -far, far))


@triton.jit
def is_kept(modifiers, place, positions, ROWS_ARE_KEYS: tl.constexpr):
    """Which weights dropout keeps, ``[rows, columns]``: philox4x32-10 (Salmon et al., SC11) of where they are."""
    if ROWS_ARE_KEYS:
        queries, keys = positions[None, :], place.positions[:, None]
    else:
        queries, keys = place.positions[:, None], positions[None, :]
    word, _, _, _ = tl.philox(place.seed, queries, keys, place.head, place.batch)
    return word >= tl.cast(modifiers.threshold, tl.uint32)
