"""The order of the ring inside one node: the cycle whose worst links are as good and as few as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

EXACT = 16  # ranks of a node up to which the best of all cycles is found
CLASSES = 14  # of links that are told apart: (EXACT + 1) ** CLASSES fits 64 bits

Costs = tuple[tuple[int, ...], ...]
Vector = npt.NDArray[np.int64]


def best_cycle(grades: Sequence[Sequence[object]]) -> tuple[int, ...]:
    """The order, starting at 0, of a cycle through all ranks of a node.

    Of all cycles it has the fewest links of the worst grade, of those the fewest of the second worst, and so on: the
    slowest link is as fast as can be, and no slow link is taken without need. Ties go to the order nearest to
    0, 1, 2, … Above 16 ranks it goes to the best neighbour that is left, which is exact where all links are alike.

    Args:
        grades: ``[n][n]``, symmetric; sortable, smaller is better. The diagonal is not read.
    """
    return _cycle(_costs(grades))


def _costs(grades: Sequence[Sequence[object]]) -> Costs:
    """Grades as numbers whose sum compares cycles: one worse link outweighs a whole cycle of better ones."""
    count = len(grades)
    kinds = sorted({grades[i][j] for i, j in combinations(range(count), 2)}, reverse=True)  # type: ignore[type-var]
    weights = {kind: (EXACT + 1) ** max(CLASSES - 1 - rank, 0) for rank, kind in enumerate(kinds)}
    return tuple(tuple(0 if i == j else weights[grades[i][j]] for j in range(count)) for i in range(count))


@lru_cache(maxsize=64)  # the nodes of a cluster are alike
def _cycle(costs: Costs) -> tuple[int, ...]:
    count = len(costs)
    if count < 4 or len({costs[i][j] for i, j in combinations(range(count), 2)}) == 1:
        return tuple(range(count))
    return _exact(costs) if count <= EXACT else _greedy(costs)


def _greedy(costs: Costs) -> tuple[int, ...]:
    left = list(range(1, len(costs)))
    order = [0]
    while left:
        best = min(left, key=lambda rank: (costs[order[-1]][rank], rank))
        left.remove(best)
        order.append(best)
    return tuple(order)


def _exact(costs: Costs) -> tuple[int, ...]:
    """M. Held and R. M. Karp, "A dynamic programming approach to sequencing problems", 1962, layer by layer."""
    cost = np.array(costs, dtype=np.int64)
    count = len(costs) - 1  # rank 0 starts; bit r of a set is rank r + 1
    sets = np.arange(1 << count)
    sizes = np.array([int(one).bit_count() for one in sets])
    # cheapest[set, r]: of the paths from rank 0 through all of the set that end at rank r + 1
    cheapest = np.full((1 << count, count), np.iinfo(np.int64).max // 2)
    for r in range(count):
        cheapest[1 << r, r] = cost[0, r + 1]
    for size in range(2, count + 1):
        layer = sets[sizes == size]
        for r in range(count):
            here = layer[layer >> r & 1 == 1]
            cheapest[here, r] = (cheapest[here ^ (1 << r)] + cost[1:, r + 1]).min(axis=1)
    return _walk_back(cheapest, cost)


def _walk_back(cheapest: Vector, cost: Vector) -> tuple[int, ...]:
    """Read from its end, which is as good a direction, the cheapest path back to rank 0; lowest ranks first."""
    order, left = [0], len(cheapest) - 1
    while left:
        # argmin takes the lowest of equals
        order.append(int((cheapest[left] + cost[1:, order[-1]]).argmin()) + 1)
        left ^= 1 << (order[-1] - 1)
    return tuple(order)
