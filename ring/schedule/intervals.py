"""`Intervals`: a mask as a short list of intervals per query.

Example: a prompt of 2 tokens with two answers of 2 tokens each. Two intervals describe it, and each of them ascends::

    query  keys 0 1 2 3 4 5   [lo, hi) of interval 0, 1
      0         # . . . . .   [0, 1)
      1         # # . . . .   [0, 2)
      2         # # # . . .   [0, 2)  [2, 3)
      3         # # # # . .   [0, 2)  [2, 4)
      4         # # . . # .   [0, 2)  [4, 5)
      5         # # . . # #   [0, 2)  [4, 6)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch

from ...kernels.checks import check_not_dtensor
from ...validators import Validator, short_repr

MAX_INTERVAL_POSITIONS = 1 << 28  # of trees and slices; an interval has 16 bytes per position
MAX_INTERVALS = 64  # each interval of a mask is one launch per hop

Pair = tuple[torch.Tensor, torch.Tensor]


class Intervals:
    """Disjoint intervals of keys that each query sees; immutable and hashable.

    Args:
        pairs: list of ``(lo, hi)``, int32 or int64 CPU tensors ``[positions of the queries]``. For every pair, the
            query at position p sees the keys at the positions ``lo[p] <= k < hi[p]``, and none if ``lo[p] >= hi[p]``.
            Among the queries that see a key, neither end of a pair decreases.
        path_positions: int32 or int64 ``[positions]``, the position of each token on its path of a prefix tree, which
            windows count. It rises by 1 from key to key of an interval. None: windows count the global positions.

    Raises:
        ValueError: a pair or ``path_positions`` is of another kind, an end decreases, two intervals of a query overlap,
            or there are more than 64 intervals. The message names the first position.
    """

    __slots__ = ("__dict__", "path_positions", "table")

    def __init__(self, pairs: Iterable[Pair] | torch.Tensor, path_positions: torch.Tensor | None = None) -> None:
        table = _read_pairs(pairs)
        _refuse_overlap(table)
        parts = [part for number, pair in enumerate(table) for part in _ascending(number, *pair)]
        parts = parts or [*table[:1].mul(0)]  # no query sees anything
        if len(parts) > MAX_INTERVALS:
            raise ValueError(f"intervals has {len(parts)} intervals {TOO_MANY}")
        self.table = torch.stack(parts)
        """The ends, int64 ``[intervals, 2, positions]``. They ascend, also where ``lo == hi``."""
        self.path_positions = None if path_positions is None else self._check_path(path_positions)

    def check_ends(self, queries: int, keys: int) -> None:
        """Raise ValueError unless there are ``queries`` positions of queries and ``keys`` positions of keys."""
        lo, hi = self.table.unbind(1)
        if len(lo[0]) != queries:
            raise ValueError(f"intervals has {len(lo[0])} positions: it must have {queries}, those of the queries")
        ends = torch.where(lo < hi, hi, 0).amax(0)
        if len(past := (ends > keys).nonzero()):
            raise ValueError(
                f"intervals ends at {int(ends[past[0]])} at position {int(past[0])}: it must end at {keys} at most, "
                "the number of keys"
            )

    def _check_path(self, path: torch.Tensor) -> torch.Tensor:
        check_not_dtensor("path_positions", path)
        positions = self.table.shape[2]
        if not _is_index(path) or len(path) != positions:
            raise ValueError(
                f"path_positions is {short_repr(path)}: it must be an int32 or int64 CPU tensor of shape [{positions}]"
            )
        lo, hi = (ends.clamp(max=positions) for ends in self.table.unbind(1))
        jumps = torch.cat([torch.zeros(1).long(), path.long().diff(prepend=path[:1] - 1).ne(1).cumsum(0)])
        wrong = ((lo + 1 < hi) & (jumps[hi] > jumps[(lo + 1).clamp(max=positions)])).any(0).nonzero()
        if len(wrong):
            raise ValueError(
                f"path_positions has a jump between two keys of an interval of position {int(wrong[0])}: it must rise "
                "by 1 from key to key"
            )
        return path.long()

    @cached_property
    def _digest(self) -> str:
        digest = sha256(self.table.numpy().data)
        digest.update(b"" if self.path_positions is None else self.path_positions.numpy().data)
        return digest.hexdigest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and (self.table.shape, self._digest) == (other.table.shape, other._digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Intervals, (self.table, self.path_positions)

    def __repr__(self) -> str:
        count, _, positions = self.table.shape
        pairs = int(self.table.diff(dim=1).sum())
        return f"<{count} intervals of {positions} positions, {pairs} pairs, {self._digest[:16]}>"


TOO_MANY = f"per query: there may be at most {MAX_INTERVALS}, because each is one launch per hop"


@lru_cache(maxsize=8)  # a model alternates between a few windows
def limit_paths(intervals: Intervals, left: int) -> Intervals:
    """Return the intervals of a prefix tree without keys more than ``left`` positions back on the query's path.

    Raises:
        ValueError: an end would decrease, because branches of different length reach different keys.
    """
    path = intervals.path_positions
    assert path is not None
    lo, hi = intervals.table.unbind(1)
    behind = path - left - path[lo.clamp(max=len(path) - 1)]  # keys of an interval have consecutive path positions
    try:
        return Intervals([*zip(torch.where(lo < hi, lo + behind.clamp(min=0), lo), hi, strict=True)])
    except ValueError as error:
        raise ValueError(
            f"window_size is ({left}, …), counted in path positions of the prefix tree, and cuts branches differently: "
            f"{error}"
        ) from None


def fill_empty_rows(lo: torch.Tensor, hi: torch.Tensor) -> Pair:
    """Replace the intervals of rows that see nothing by empty ones that keep both ends in order.

    Such a row starts and ends at the start of the next row that sees something, or at the end of the last one. The
    neighbours of an empty row must not overlap, so that both ends stay ascending.
    """
    seen = lo < hi
    if not seen.any():
        return torch.zeros_like(lo), torch.zeros_like(hi)
    after = torch.where(seen, lo, hi[seen][-1]).flip(0).cummin(0).values.flip(0)
    return torch.where(seen, lo, after), torch.where(seen, hi, after)


def _read_pairs(pairs: Iterable[Pair] | torch.Tensor) -> torch.Tensor:
    """Return checked pairs as int64 ``[pairs, 2, positions]``."""
    check_not_dtensor("intervals", pairs)
    read: list[torch.Tensor] = []
    if isinstance(getattr(pairs, "intervals", None), Intervals):
        raise ValueError(f"intervals is {short_repr(pairs)}: it must be its intervals. Pass tree.intervals.")
    for number, pair in enumerate(PAIRS.check("intervals", pairs)):
        is_pair = isinstance(pair, (tuple, list)) or (isinstance(pair, torch.Tensor) and pair.dim() > 0)
        ends = [*pair] if is_pair else [pair]
        for end in ends:
            check_not_dtensor("intervals", end)
        if len(ends) != 2 or not all(map(_is_index, ends)) or any(end.shape != ends[0].shape for end in ends):
            got = ", ".join(map(short_repr, ends))
            raise ValueError(f"intervals[{number}] is ({got}): it must be a pair (lo, hi) {OF_TENSORS}")
        read.append(torch.stack([end.long() for end in ends]))
        if (count := len(ends[0])) != (first := read[0].shape[1]):
            raise ValueError(f"intervals[{number}] has {count} positions: it must have {first}, as intervals[0]")
    if not read:
        raise ValueError("intervals is empty: it must have at least one pair (lo, hi)")
    return torch.stack(read)


def _is_index(x: Any) -> bool:
    is_vector = isinstance(x, torch.Tensor) and x.dim() == 1 and x.device.type == "cpu"
    return is_vector and x.dtype in (torch.int32, torch.int64)


OF_TENSORS = "of int32 or int64 CPU tensors of shape [positions of the queries]"
PAIRS = Validator(f"a list of pairs (lo, hi) {OF_TENSORS}", list)


def _refuse_overlap(table: torch.Tensor) -> None:
    """Raise ValueError if two intervals of a query overlap, or an interval begins below 0."""
    lo, hi = table.unbind(1)
    starts, order = torch.where(lo < hi, lo, torch.iinfo(torch.int64).max).sort(0)
    ends = hi.gather(0, order)
    wrong = torch.cat([starts[:1] < 0, ends[:-1] > starts[1:]])
    if len(at := wrong.any(0).nonzero()):
        position = int(at[0])
        pairs = order[:, position].tolist()
        number = int(wrong[:, position].nonzero()[0])
        name, start = f"intervals[{pairs[number]}]", int(starts[number, position])
        if not number:
            raise ValueError(f"{name} begins at {start} at position {position}: it must begin at 0 or later")
        raise ValueError(
            f"{name} overlaps intervals[{pairs[number - 1]}] at position {position}: one begins at {start}, and the "
            f"other ends at {int(ends[number - 1, position])}"
        )


def _ascending(number: int, lo: torch.Tensor, hi: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield one pair, int64 ``[2, positions]``, with ends that never decrease.

    The pair is cut in two where a query that sees nothing lies between two overlapping intervals.

    Raises:
        ValueError: an end decreases among the queries that see a key, or the pair would be cut too often.
    """
    (seen,) = torch.where(lo < hi)
    starts, ends = lo[seen], hi[seen]
    falls = (starts.diff() < 0) | (ends.diff() < 0)
    if falls.any():
        before = int(falls.nonzero()[0])
        two = zip(*(x[before : before + 2].tolist() for x in (starts, ends, seen)), strict=True)
        first, second = (f"[{start}, {end}) at position {position}" for start, end, position in two)
        raise ValueError(f"intervals[{number}] is {second}, after {first}: neither end may decrease")
    cuts = (torch.where((seen.diff() > 1) & (ends[:-1] > starts[1:]))[0] + 1).tolist()
    if len(cuts) >= MAX_INTERVALS:
        raise ValueError(f"intervals[{number}] is cut by queries that see no key into {len(cuts) + 1} {TOO_MANY}")
    for start, end in pairwise([0, *cuts, len(seen)] if len(seen) else []):
        part = torch.zeros(2, len(lo), dtype=torch.int64)
        part[:, seen[start:end]] = torch.stack([starts[start:end], ends[start:end]])
        yield torch.stack(fill_empty_rows(*part))
