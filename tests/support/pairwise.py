"""Pairwise test cases: fewer than all combinations."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise_cases(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows of the product of the axes in which any two values of two axes occur together.

    The choice is greedy and deterministic.
    """
    values = [tuple(axis) for axis in axes]
    rows = list(product(*(range(len(choices)) for choices in values)))
    pairs = {row: {(i, j, row[i], row[j]) for i, j in combinations(range(len(row)), 2)} for row in rows}
    uncovered = {pair for open_pairs in pairs.values() for pair in open_pairs}
    chosen = []
    while uncovered:
        best = max(rows, key=lambda row: len(pairs[row] & uncovered))
        uncovered -= pairs[best]
        chosen.append(best)
    return [tuple(choices[at] for choices, at in zip(values, row, strict=True)) for row in chosen]
