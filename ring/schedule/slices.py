"""`slices`: a mask from rectangles of queries and keys, in the form of MagiAttention, as intervals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...validators import integer_between, list_like, short_repr
from .intervals import MAX_INTERVAL_POSITIONS, MAX_INTERVALS, Intervals
from .layout import POSITIONS

KINDS = {"full": (0, 0), "causal": (0, 1), "inverse causal": (1, 0), "both": (1, 1)}
"""Keys by which the start and the end of a slice move from one query to the next."""

Slice = tuple[Sequence[int], Sequence[int], str | int]


class SliceRun(NamedTuple):
    """One interval of keys for each of the queries ``start`` to ``end - 1``; its ends are linear in the query."""

    start: int
    end: int
    lo: int  # first key of query 0, if the run reached it
    lo_step: int
    hi: int
    hi_step: int

    def keys(self, query: Any) -> tuple[Any, Any]:
        """Return the interval of one query, or of a tensor of queries."""
        return self.lo + self.lo_step * query, self.hi + self.hi_step * query


def slices(slices: Iterable[Slice], positions: int) -> Intervals:
    """Build a mask from rectangles of queries and keys, as MagiAttention's ``flex_flash_attn_func`` takes them.

    Args:
        slices: list of ``((begin, end) of queries, (begin, end) of keys, kind)``. Within its rectangle, a slice shows
            all keys to all queries (``full``), hides one key more at the end from each query before the last one
            (``causal``), one key more at the start from each query after the first one (``inverse causal``), or does
            both (``both``). MagiAttention's numbers 0 to 3 stand for the kinds in this order. Slices may not overlap.
        positions: number of positions of the queries.

    Returns:
        The mask, for ``intervals`` of ``ring_attention``.

    Raises:
        ValueError: a slice is of another form, two slices overlap, or a query would need more than 64 intervals, as in
            periodic masks and masks with many holes.
    """
    positions = integer_between(0, MAX_INTERVAL_POSITIONS).check("positions", positions)
    given = list_like("a list of slices (queries, keys, kind)").check("slices", slices)
    runs = [_read_slice(number, each, positions) for number, each in enumerate(given)]
    edges = sorted({edge for run in runs for edge in run[:2] if run.start < run.end})
    active: list[list[int]] = [[] for _ in edges]
    for number, run in enumerate(runs):
        for index in range(bisect_left(edges, run.start), bisect_left(edges, run.end)):
            active[index].append(number)
    parts: list[list[SliceRun]] = []
    for (start, end), numbers in zip(pairwise(edges), active, strict=False):
        for run in _join_touching(runs, sorted(numbers, key=lambda number: runs[number].keys(start)), start, end):
            _add_to_parts(parts, run)
    ends = torch.zeros(max(len(parts), 1), 2, positions, dtype=torch.int64)
    at = torch.arange(positions)
    for row, part in zip(ends, parts, strict=False):
        for run in part:
            row[:, run.start : run.end] = torch.stack(run.keys(at[run.start : run.end]))
    return Intervals(ends)


def _read_slice(number: int, given: Slice, positions: int) -> SliceRun:
    """Return a checked slice without queries that see nothing."""
    try:
        (start, end), (first, past) = (map(POSITIONS.convert, both) for both in given[:2])
        _, _, kind = given
        lo_step, hi_step = KINDS[kind] if isinstance(kind, str) else [*KINDS.values()][POSITIONS.convert(kind)]
        if start > end or first > past:
            raise ValueError
    except (TypeError, ValueError, KeyError, IndexError):
        raise ValueError(
            f"slices[{number}] is {short_repr(given)}: it must be (queries, keys, kind), two ranges (begin, end) and "
            f"one of {', '.join(KINDS)}"
        ) from None
    if end > positions:
        raise ValueError(
            f"slices[{number}] has queries up to {end}: they must end at {positions} (positions) or earlier"
        )
    run = SliceRun(start, end, first - lo_step * start, lo_step, past - hi_step * (end - 1), hi_step)
    if lo_step == hi_step:
        return run if run.keys(start)[0] < run.keys(start)[1] else run._replace(end=start)
    keys = past - first
    return run._replace(start=max(start, end - keys)) if hi_step else run._replace(end=min(end, start + keys))


def _join_touching(runs: list[SliceRun], numbers: list[int], start: int, end: int) -> list[SliceRun]:
    """Return the runs of the queries ``start`` to ``end - 1``, ascending, and one for neighbours that touch everywhere.

    Raises:
        ValueError: two of them overlap.
    """
    joined: list[SliceRun] = []
    for before, number in zip([None, *numbers], numbers, strict=False):
        run = runs[number]._replace(start=start, end=end)
        overlap = [-1 if before is None else runs[before].keys(at)[1] - run.keys(at)[0] for at in (start, end - 1)]
        if max(overlap) > 0:
            first, second = sorted((before or 0, number))
            query = start if overlap[0] > 0 else start + 1 - overlap[0]
            raise ValueError(
                f"slices[{second}] overlaps slices[{first}]: both show key {run.keys(query)[0]} to query {query}"
            )
        if overlap == [0, 0]:
            run = run._replace(lo=joined[-1].lo, lo_step=joined.pop().lo_step)
        joined.append(run)
    return joined


def _add_to_parts(parts: list[list[SliceRun]], run: SliceRun) -> None:
    """Append a run to the part that ends closest before it, or to a new one, so that both ends of a part ascend."""
    lo, hi = run.keys(run.start)

    def fits(last: SliceRun) -> bool:
        last_lo, last_hi = last.keys(last.end - 1)
        return last.end <= run.start and (last_hi <= lo or (last.end == run.start and last_lo <= lo and last_hi <= hi))

    fitting = [part for part in parts if fits(part[-1])]
    if fitting:
        max(fitting, key=lambda part: int(part[-1].keys(part[-1].end - 1)[1])).append(run)
        return
    if len(parts) == MAX_INTERVALS:
        raise ValueError(
            f"slices need more than {MAX_INTERVALS} intervals at query {run.start}, each of them a launch per hop. Use "
            "block_mask for a periodic mask or one with many holes."
        )
    parts.append([run])
