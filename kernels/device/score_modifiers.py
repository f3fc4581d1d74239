"""Softcap, ALiBi and dropout inside a kernel, the jit side of ``scores.Scores``."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import LOG2_E

TANH_SERIES_LIMIT = tl.constexpr(0.25)  # below this value the first four terms of the series of tanh are exact to fp32


class DropoutCounter(NamedTuple):
    """Seed of dropout and index of the first head, in fp32 numbers of 16 bits each.

    They are passed by value, so no stream waits for a copy. They are floats because Triton recompiles for some integer
    values but never for a float value, and fp32 holds 16 bits exactly.
    """

    seed_0: Any
    """Lowest 16 bits of the seed."""
    seed_1: Any
    seed_2: Any
    seed_3: Any
    head_0: Any
    """Lowest 16 bits of the first head's index."""
    head_1: Any


class ScoreModArgs(NamedTuple):
    """Kernel argument with the score modifiers; the fields of a modifier that is off are None.

    ``rows`` and ``columns`` are those of ``LaunchShape``.
    """

    softcap: Any
    slopes: Any
    """ALiBi slopes, fp32, one batch row after another."""
    slopes_stride: Any
    """Elements between batch rows of the slopes; 0 if all rows share them."""
    rows: Any
    """Positions of the rows, int32."""
    columns: Any
    """Positions of the columns, int32."""
    counter: Any
    """``DropoutCounter`` with the key of philox and the first head."""
    threshold: Any
    """Smallest philox word that keeps its weight."""
    kept: Any
    """Factor of the weights that dropout keeps, ``1 / (1 - dropout_p)``."""


NO_MODIFIERS = ScoreModArgs(*[None] * len(ScoreModArgs._fields))


class TilePosition(NamedTuple):
    """Position of a tile of scores, for ALiBi and dropout."""

    positions: Any
    """Positions of the rows."""
    batch: Any
    head: Any
    """Global index of the query head."""
    slope: Any
    seed: Any


@triton.jit
def load_tile_position(modifiers, offs, limit, batch, head, heads):
    """Load the position of a tile with the rows ``offs``; return 0 if no modifier needs it."""
    if modifiers.rows is None:
        return 0
    else:
        positions = tl.load(modifiers.rows + offs, mask=offs < limit, other=0)
        slope, seed, number = 0.0, 0, head.to(tl.int32)
        if modifiers.slopes is not None:
            slope = tl.load(modifiers.slopes + batch * modifiers.slopes_stride + head)
        if modifiers.counter is not None:
            counter = modifiers.counter
            high = join_halves(counter.seed_2, counter.seed_3).to(tl.int64)
            seed = (high << 32) | join_halves(counter.seed_0, counter.seed_1).to(tl.int64)
            number = (join_halves(counter.head_0, counter.head_1).to(tl.int64) + head).to(tl.int32)
        return TilePosition(positions, batch.to(tl.int32), number, slope, seed)


@triton.jit
def join_halves(low, high):
    """Return the 32-bit word whose halves are two fp32 numbers."""
    return tl.cast(low, tl.uint32) | (tl.cast(high, tl.uint32) << 16)


@triton.jit
def load_column_positions(modifiers, offs, limit):
    """Load the positions of the columns ``offs``; return 0 if no modifier needs them."""
    if modifiers.columns is None:
        return 0
    else:
        return tl.load(modifiers.columns + offs, mask=offs < limit, other=0)


@triton.jit
def score_scale_log2(modifiers, softmax_scale):
    """Return the factor that turns scores into exponents of 2; modified scores already include the softmax scale."""
    if modifiers.softcap is None and modifiers.rows is None:
        return softmax_scale * LOG2_E
    else:
        return LOG2_E


@triton.jit
def modify_scores(qk, modifiers, place, positions, softmax_scale):
    """Return ``cap * tanh(scale * qk / cap) - slope * |p_q - p_k|`` and the tanh, which the backward needs.

    Without a softcap the tanh is ``qk``, and the scale is applied here only if there are per-row modifiers.
    """
    tanh = qk
    if modifiers.softcap is not None:
        tanh = tanh_with_series(qk * (softmax_scale / modifiers.softcap))
        qk = tanh * modifiers.softcap
    elif modifiers.rows is not None:
        qk = qk * softmax_scale
    if modifiers.slopes is not None:
        distance = tl.abs(place.positions[:, None] - positions[None, :])
        qk -= place.slope * distance.to(tl.float32)
    return qk, tanh


@triton.jit
def tanh_with_series(x):
    """Compute tanh; near 0 use its series, because the difference of exponentials would lose digits there."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * (2 * LOG2_E)) + 1.0)
    return tl.where(magnitude < TANH_SERIES_LIMIT, series, tl.where(x < 0, -far, far))


@triton.jit
def dropout_keep_mask(modifiers, place, positions, ROWS_ARE_KEYS: tl.constexpr):
    """Return the weights ``[rows, columns]`` that dropout keeps, by philox4x32-10 (Salmon et al., SC11)."""
    if ROWS_ARE_KEYS:
        queries, keys = positions[None, :], place.positions[:, None]
    else:
        queries, keys = place.positions[:, None], positions[None, :]
    word, _, _, _ = tl.philox(place.seed, queries, keys, place.head, place.batch)
    return word >= tl.cast(modifiers.threshold, tl.uint32)
