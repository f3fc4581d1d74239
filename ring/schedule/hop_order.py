"""The order in which a shard visits the ranks of a ring."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.int64]


def order_distances(rows: Vector, distances: Vector, keys: Vector, count: int) -> tuple[int, ...]:
    """Return the distances at which any rank sees anything, in the order that moves fewer K/V.

    Row ``rows[i]``, a shard on its way through a node, is seen at the distance ``distances[i]`` of ``count``. It moves
    ``keys[row]`` keys. The candidates are counting up, which sends everything to a neighbour, and nearest first on both
    sides. Nearest first wins if windows or documents reach to both sides, because K/V would otherwise pass all ranks to
    arrive from behind.
    """
    upward = tuple(np.unique(np.append(distances, 0)).tolist())
    nearest = tuple(sorted(upward, key=lambda far: (min(far, count - far), far)))

    def moved_keys(order: tuple[int, ...]) -> int:
        return int((last_indices(rows, distances, order, len(keys)) * keys).sum())

    return min(upward, nearest, key=moved_keys)


def last_indices(rows: Vector, distances: Vector, order: tuple[int, ...], count: int) -> Vector:
    """Return for each of ``count`` rows the index in ``order`` of the last distance at which it is seen, or 0."""
    places, last = np.zeros(max(order) + 1, np.int64), np.zeros(count, np.int64)
    places[[*order]] = np.arange(len(order))
    np.maximum.at(last, rows, places[distances])
    return last
