"""Cuts the bounds of one hop into pieces that PyTorch's CPU attention operator can take."""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..kernels import Bounds

MIN_ROWS = 128  # below it a call of the operator costs more than it computes: such rows share one blockwise piece


class Kind(Enum):
    """What a piece looks like in the plane of query rows and key indices."""

    RECTANGLE = "every row sees every key"
    CAUSAL = "square: row i of the piece sees its first i + 1 keys"
    BLOCKWISE = "anything else, row by row as the bounds say"


class Piece(NamedTuple):
    """The query rows ``[row, row_end)`` against the keys ``[key, key_end)``, as indices into the two shards."""

    kind: Kind
    row: int
    row_end: int
    key: int
    key_end: int

    @property
    def rows(self) -> slice:
        """The query rows."""
        return slice(self.row, self.row_end)

    @property
    def keys(self) -> slice:
        """The keys."""
        return slice(self.key, self.key_end)


_cache: WeakKeyDictionary[Bounds, tuple[Piece, ...]] = WeakKeyDictionary()


def pieces(bounds: Bounds, rows: int, keys: int, *, operator: bool = True) -> tuple[Piece, ...]:
    """Disjoint pieces that cover every visible pair once, by ascending rows; ``operator=False``: one blockwise piece.

    Every row of a piece for the operator sees a key: an empty query or key kills the process there, and a row without
    keys gets ``lse = 0``. Cached for as long as ``bounds`` lives.
    """
    if rows == 0 or keys == 0:
        return ()
    if bounds.lo is None or bounds.hi is None:
        found: tuple[Piece, ...] = (Piece(Kind.RECTANGLE, 0, rows, 0, keys),)
    else:
        if bounds not in _cache:
            _cache[bounds] = _cut(bounds.lo, bounds.hi)
        found = _cache[bounds]
    return found if operator or not found else (_whole(found),)


def limits(bounds: Bounds, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """``lo`` and ``hi`` of a piece's rows, counted from its first key."""
    if bounds.lo is None or bounds.hi is None:
        lo = torch.zeros(piece.row_end - piece.row, dtype=torch.int32)
        return lo, lo + (piece.key_end - piece.key)
    return bounds.lo[piece.rows] - piece.key, bounds.hi[piece.rows] - piece.key


def _whole(found: tuple[Piece, ...]) -> Piece:
    key, key_end = min(piece.key for piece in found), max(piece.key_end for piece in found)
    return Piece(Kind.BLOCKWISE, found[0].row, found[-1].row_end, key, key_end)


def _cut(lo: torch.Tensor, hi: torch.Tensor) -> tuple[Piece, ...]:
    """Long regular runs first; then what lies between two of them, whole."""
    runs = _regular_runs(lo, hi)
    found: list[Piece] = []
    for (_, gap), (start, end) in pairwise([(0, 0), *runs, (len(lo), len(lo))]):
        found += _shape(lo, hi, gap, start)
        found += _shape(lo, hi, start, end)
    return tuple(found)


def _steps(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """How each row follows the one before: 0 the same keys, 1 one key more, 2 otherwise or a row that sees nothing."""
    rise = hi.diff()
    regular = (lo.diff() == 0) & (rise <= 1) & (hi > lo)[:-1]
    return torch.where(regular, rise, 2)


def _regular_runs(lo: torch.Tensor, hi: torch.Tensor) -> list[tuple[int, int]]:
    """Runs ``[start, end)`` of at least MIN_ROWS rows that follow each other in one way, 0 or 1."""
    steps, counts = torch.unique_consecutive(_steps(lo, hi), return_counts=True)
    ends = counts.cumsum(0)
    long = (steps < 2) & (counts >= MIN_ROWS)
    runs: list[tuple[int, int]] = []
    for count, end in zip(counts[long].tolist(), ends[long].tolist(), strict=True):
        taken = runs[-1][1] if runs else 0  # two runs that touch share a row: it stays with the first
        runs.append((max(end - count, taken), end + 1))
    return runs


def _shape(lo: torch.Tensor, hi: torch.Tensor, start: int, end: int) -> list[Piece]:
    """The pieces of the rows ``[start, end)``, less the rows at either end that see nothing."""
    visible = (hi > lo)[start:end].nonzero()
    if len(visible) == 0:
        return []
    start, end = start + int(visible[0]), start + int(visible[-1]) + 1
    steps = _steps(lo[start:end], hi[start:end])
    key, first, last = int(lo[start]), int(hi[start]), int(hi[end - 1])
    if bool((steps == 0).all()):
        return [Piece(Kind.RECTANGLE, start, end, key, last)]
    if not bool((steps == 1).all()):
        return [Piece(Kind.BLOCKWISE, start, end, key, last)]
    square = Piece(Kind.CAUSAL, start, end, first - 1, last)
    return [Piece(Kind.RECTANGLE, start, end, key, first - 1), square] if first - 1 > key else [square]
