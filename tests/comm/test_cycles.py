"""The order of the ring inside one node, against every order there is."""

from __future__ import annotations

import time
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.comm.topology.cycles import best_cycle


@settings(max_examples=60)
@given(st.integers(2, 7).flatmap(lambda n: st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n)))
def test_cycles_are_the_best_there_are(flat: list[int]) -> None:
    count = int(len(flat) ** 0.5)
    grades = [[flat[min(i, j) * count + max(i, j)] for j in range(count)] for i in range(count)]

    def worst_first(order: tuple[int, ...]) -> list[int]:
        return sorted((grades[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)), reverse=True)

    found = best_cycle(grades)
    assert sorted(found) == [*range(count)]
    assert worst_first(found) == min(worst_first((0, *rest)) for rest in permutations(range(1, count)))


def test_cycles_of_many_ranks() -> None:
    # two halves that only rank 0 and rank 20 join well
    grades = [[int((a < 20) != (b < 20)) for b in range(40)] for a in range(40)]
    order = best_cycle(grades)
    assert sum(grades[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)) == 2
    assert best_cycle([[1] * 16] * 16) == tuple(range(16))


def test_sixteen_ranks_in_a_moment() -> None:
    grades = [[(a * 7 + b * 7) % 5 for b in range(16)] for a in range(16)]
    begun = time.perf_counter()
    best_cycle(grades)
    assert time.perf_counter() - begun < 5
