"""What a bound is worth: does it order configs as their measured time does?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..space import DEALT_FIELDS
from .report import IDENTITY, Row, key_of

WORK = ("length", "group")
"""What rows of `ringattn tune` have beside: seconds of different work are not compared."""

ORDERS = frozenset(name for tried in DEALT_FIELDS.values() for name in tried)
"""Options that change when a tile is taken, not its loop: to the bound a tile in all of its orders is one config."""

LEAST_CONFIGS = 20
LEAST_CORRELATION = 0.6


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for i in order[start:end]:
            found[i] = (start + 1 + end) / 2
        start = end
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation of two lists, ties by mean ranks (Pearson's coefficient of the ranks).

    Raises:
        ValueError: lists of different lengths, fewer than two, a NaN, or one whose values are all equal.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} values: a correlation takes two lists of the same length, at least 2")
    if any(map(math.isnan, (*a, *b))):
        raise ValueError("a value is NaN: a rank takes numbers")
    x, y = ranks(a), ranks(b)
    mean = (len(a) + 1) / 2
    across = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    spread = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    if not spread:
        raise ValueError("all values of a list are equal: they have no order to compare")
    return across / spread


def correlations(rows: Sequence[Row], source: str = "the report") -> list[Row]:
    """Per kernel, GPU and shape: how well the bound predicts which config is faster (1: always, 0: not at all).

    ``rows`` are those of a report, each with ``seconds`` measured on the same work. What was not measured or has no
    bound is left out, and so is a tile in another order of its launch.

    Raises:
        ValueError: no group has 20 measured configs.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        known = isinstance(row.get("seconds"), int | float) and isinstance(row.get("bound"), int | float)
        if known and not ORDERS & {*(row.get("options") or {})}:
            groups.setdefault(key_of(row, (*IDENTITY, *WORK)), []).append(row)
    enough = [group for group in groups.values() if len(group) >= LEAST_CONFIGS]
    if not enough:
        most = max(map(len, groups.values()), default=0)
        raise ValueError(
            f"{source}: at most {most} configs of one kernel and shape have a bound and measured `seconds`: "
            f"a correlation takes {LEAST_CONFIGS}"
        )
    return [
        {key: group[0].get(key) for key in ("kernel", "arch", "dtype", "head_dim", "role", "full", *WORK)}
        | {"configs": len(group), "correlation": spearman(*_speeds(group))}
        for group in enough
    ]


def _speeds(group: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["bound"] for row in group], [-row["seconds"] for row in group]
