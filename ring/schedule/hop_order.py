"""The order in which a shard visits the ranks of a ring."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def order_distances(seen: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """Return the distances at which any rank sees anything, in the order that moves fewer K/V.

    ``seen`` is ``[shard, outer, distance]``. The candidates are counting up, which sends everything to a neighbour, and
    nearest first on both sides. Nearest first wins if windows or documents reach to both sides, because K/V would
    otherwise pass all ranks to arrive from behind.
    """
    count = seen.shape[2]
    upward = (0, *(np.flatnonzero(np.asarray(seen.any(axis=(0, 1)))[1:]) + 1).tolist())
    nearest = tuple(sorted(upward, key=lambda far: (min(far, count - far), far)))

    def moved_keys(order: tuple[int, ...]) -> int:
        return int((last_indices(seen[:, :, order]) * lengths[:, None]).sum())

    return min(upward, nearest, key=moved_keys)


def last_indices(used: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the index of the last True along the last dimension, 0 if there is none."""
    last: npt.NDArray[np.int64] = np.where(used.any(axis=2), used.shape[2] - 1 - used[:, :, ::-1].argmax(axis=2), 0)
    return last
