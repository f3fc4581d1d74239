"""Exchanges by global position: which rows each rank keeps, sends and receives. Pure functions on NumPy vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.shared_cache import SharedCache
from .layout import Documents, Layout
from .visibility import Marks, Vector

ZEROS = -1  # wanted instead of a position: a row of zeros
EXCHANGE_CACHE_SIZE = 16  # cached plans; a plan has up to 64 bytes per token of a rank, half of them on its device
MAX_SPARSITY = 4  # position table: at most this many entries per held position; beyond, positions are renumbered first


class RankPositions(NamedTuple):
    """Global positions that all ranks hold or want, as pieces in rank order."""

    values: Vector  # positions of all pieces; a wanted one may be ZEROS
    lengths: Vector  # of each piece
    ranks: Vector  # of each piece, ascending

    @property
    def owners(self) -> Vector:
        """Rank of each value."""
        return np.repeat(self.ranks, self.lengths)

    def select(self, pieces: Marks, ranks: Vector) -> RankPositions:
        """Return some pieces, with other numbers for the ranks of all pieces."""
        return RankPositions(self.values[np.repeat(pieces, self.lengths)], self.lengths[pieces], ranks[pieces])


def layout_positions(layout: Layout) -> RankPositions:
    """Return the positions that each rank of a layout holds."""
    ranks, starts, lengths, steps = layout.table.numpy().T
    return RankPositions(_series(starts, lengths, steps), lengths, ranks)


def _series(starts: Vector, lengths: Vector, steps: Vector | None = None) -> Vector:
    """Return arithmetic series, one after the other."""
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if steps is not None:
        offsets *= np.repeat(steps, lengths)
    series: Vector = np.repeat(starts, lengths) + offsets
    return series


# --- moves ----------------------------------------------------------------------------------------------------------


class Relayout(NamedTuple):
    """Each token moves to the rank that holds its position in the layout ``target``."""

    target: Layout

    def wanted_positions(self, held: RankPositions) -> RankPositions:
        """Return the positions whose tokens each rank gets."""
        return layout_positions(self.target)


class Roll(NamedTuple):
    """Each token gets the one ``shift`` positions before it; the tokens of a document form a circle."""

    shift: int
    cu_seqlens: Documents

    def wanted_positions(self, held: RankPositions) -> RankPositions:
        """Return the positions whose tokens each rank gets."""
        starts, ends = np.array(self.cu_seqlens.boundaries[:-1]), np.array(self.cu_seqlens.boundaries[1:])
        cuts = ends - self.shift % np.maximum(ends - starts, 1)  # the tokens from here on enter at the start
        rolled = _series(*(np.stack(pair, 1).ravel() for pair in ((cuts, starts), (ends - cuts, cuts - starts))))
        return RankPositions(rolled[held.values], held.lengths, held.ranks)


class Halo(NamedTuple):
    """Each run of consecutive tokens in one document gets its neighbours: ``left`` before it and ``right`` after it."""

    left: int
    right: int
    cu_seqlens: Documents

    def wanted_positions(self, held: RankPositions) -> RankPositions:
        """Return the positions whose tokens each rank gets, one piece per run."""
        values, owners, edges = held.values, held.owners, np.array(self.cu_seqlens.boundaries)
        begins = np.zeros(self.cu_seqlens.seqlen + 1, dtype=np.bool_)  # a document begins at this position
        begins[edges] = True
        starts = (np.diff(values, prepend=-2) != 1) | (np.diff(owners, prepend=-1) != 0) | begins[values]
        first = np.flatnonzero(starts)
        lengths = np.diff(first, append=len(values)) + self.left + self.right
        wanted = _series(values[first] - self.left, lengths)
        past = np.searchsorted(edges, values[first], side="right")  # index of the end of a run's document
        outside = (wanted < np.repeat(edges[past - 1], lengths)) | (wanted >= np.repeat(edges[past], lengths))
        return RankPositions(np.where(outside, ZEROS, wanted), lengths, owners[first])


Move = Relayout | Roll | Halo


def find_missing_position(source: Layout, target: Layout) -> str:
    """Return which of two layouts of equal length lacks a position of the other, or ""."""
    if source.reach == target.reach == source.seqlen:
        return ""
    ours, theirs = (np.sort(layout_positions(layout).values) for layout in (source, target))
    if (ours == theirs).all():
        return ""
    first = (ours != theirs).argmax()
    if ours[first] < theirs[first]:
        return f"target does not hold position {ours[first]}, which source holds"
    return f"target holds position {theirs[first]}, which source does not hold"


# --- plans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One rank's part of an exchange.

    Rows move through a buffer: received rows by rank, rows that stay, sent rows by rank, and one row of zeros.
    """

    receive_counts: list[int]  # rows from each rank
    send_counts: list[int]  # rows to each rank
    packed: Vector  # held rows that stay, then those that are sent
    placed: Vector  # buffer row of each wanted row
    pieces: list[int]  # rows of each wanted piece
    _indices: SharedCache[tuple[torch.Tensor, ...]] = field(default_factory=SharedCache)

    @property
    def received(self) -> int:
        """Number of rows that other ranks send."""
        return sum(self.receive_counts)

    @property
    def size(self) -> int:
        """Number of buffer rows without the row of zeros."""
        return self.received + len(self.packed)

    @property
    def first_sent(self) -> int:
        """Buffer row of the first sent row."""
        return self.size - sum(self.send_counts)

    @torch.inference_mode(False)  # cached, and a later call may need it for autograd
    def indices(self, device: torch.device, *, packs: bool, transposed: bool) -> tuple[torch.Tensor, ...]:
        """Return the index tensors that pack held rows (``packs``) or place wanted rows; see :func:`transpose_index`.

        They are cached on ``device``.
        """

        def make() -> tuple[torch.Tensor, ...]:
            index = self.packed if packs else self.placed
            parts = transpose_index(index, self.size) if transposed else [index]
            return tuple(torch.from_numpy(part).to(device) for part in parts)

        return self._indices.get((device, packs, transposed), make, lambda made: made)


def transpose_index(index: Vector, end: int) -> list[Vector]:
    """Return indices ``first, *pairs`` that sum rows back to where ``index`` took them from, in a fixed order.

    Row i of the sum is row ``first[i]`` at first. Then each pair ``(targets, sources)`` adds rows. Within a pair no
    target occurs twice. Every row that was taken must be one of 0, 1, 2, ... without a gap; from ``end`` on, rows are
    ignored.
    """
    sources = np.argsort(index, kind="stable")
    sources = sources[: np.count_nonzero(index < end)]
    targets = index[sources]
    starts = np.flatnonzero(np.diff(targets, prepend=-1))
    earlier = np.arange(len(targets)) - np.repeat(starts, np.diff(starts, append=len(targets)))  # of the same target
    order, cuts = np.argsort(earlier, kind="stable"), np.cumsum(np.bincount(earlier))[:-1]
    (_, first), *pairs = zip(*(np.split(x[order], cuts) for x in (targets, sources)), strict=True)
    return [first, *(x for pair in pairs for x in pair)]


@lru_cache(maxsize=EXCHANGE_CACHE_SIZE)
def plan_exchanges(layout: Layout, move: Move, sizes: tuple[int, ...], rank: int) -> tuple[ExchangePlan, ...]:
    """Return the exchanges of ``rank``: one, or two in a mesh, where ``sizes`` has two numbers."""
    held = layout_positions(layout)
    wanted = move.wanted_positions(held)
    if len(sizes) == 1:
        return (plan_exchange(held, wanted, layout.world, rank),)
    return plan_mesh_exchanges(held, wanted, sizes, rank)


def plan_exchange(held: RankPositions, wanted: RankPositions, world: int, rank: int) -> ExchangePlan:
    """Return the part of ``rank`` in the exchange that gives each rank its wanted positions.

    A row that stays is not sent, and any other row is sent once to each rank that wants it. Every held position must
    be wanted by some rank.
    """
    owners, receivers, rows = held.owners, wanted.owners, _find_rows(held, wanted)
    first, past = np.searchsorted(owners, [rank, rank + 1])
    leaves = (rows >= first) & (rows < past) & (receivers != rank)
    to, sent = np.divmod(np.unique(receivers[leaves] * (past - first) + rows[leaves] - first), past - first)
    mine = rows[slice(*np.searchsorted(receivers, [rank, rank + 1]))]
    is_needed = np.zeros(len(owners) + 1, dtype=np.bool_)  # the last entry is that of ZEROS
    is_needed[mine] = True
    needed = np.flatnonzero(is_needed[:-1])
    stays = owners[needed] == rank
    received = np.count_nonzero(~stays)
    places = np.full(len(is_needed), len(needed) + len(sent))
    places[needed] = np.where(stays, received + np.cumsum(stays), np.cumsum(~stays)) - 1
    return ExchangePlan(
        receive_counts=np.bincount(owners[needed[~stays]], minlength=world).tolist(),
        send_counts=np.bincount(to, minlength=world).tolist(),
        packed=np.concatenate([needed[stays] - first, sent]),
        placed=places[mine],
        pieces=wanted.lengths[wanted.ranks == rank].tolist(),
    )


def plan_mesh_exchanges(
    held: RankPositions, wanted: RankPositions, sizes: tuple[int, ...], rank: int
) -> tuple[ExchangePlan, ExchangePlan]:
    """Return the two exchanges of a rank in a mesh of ``R x U`` ranks: along its U ranks, then along its R ranks.

    A row moves first within its mesh row, to the column of the ranks that want it, and then along that column.
    """
    ring_size, ulysses = sizes
    ring_rank, column = divmod(rank, ulysses)
    rows = _find_rows(held, wanted)
    columns = np.repeat(wanted.ranks % ulysses, wanted.lengths)
    sources = np.append(np.repeat(held.ranks // ulysses, held.lengths), ZEROS)[rows]

    def passed_on(groups: Vector, chosen: Marks, size: int) -> RankPositions:
        """Return the chosen rows of each group, without repetitions, in the order of ``held``."""
        count = len(held.values)
        group, row = np.divmod(np.unique(groups[chosen] * count + rows[chosen]), count)
        return RankPositions(held.values[row], np.bincount(group, minlength=size), np.arange(size))

    in_row = passed_on(columns, sources == ring_rank, ulysses)
    in_column = passed_on(sources, (columns == column) & (sources != ZEROS), ring_size)
    own_row = held.select(held.ranks // ulysses == ring_rank, held.ranks % ulysses)
    own_column = wanted.select(wanted.ranks % ulysses == column, wanted.ranks // ulysses)
    return (
        plan_exchange(own_row, in_row, ulysses, column),
        plan_exchange(in_column, own_column, ring_size, ring_rank),
    )


def _find_rows(held: RankPositions, wanted: RankPositions) -> Vector:
    """Return where each wanted position is among the held ones; -1 for ZEROS."""
    positions, targets = held.values, wanted.values
    end = int(positions.max(initial=-1)) + 1
    if end > MAX_SPARSITY * len(positions):
        ascending, end = np.sort(positions), len(positions)
        targets = np.where(targets < 0, ZEROS, np.searchsorted(ascending, targets))
        positions = np.searchsorted(ascending, positions)
    table = np.full(end + 1, ZEROS)
    table[positions] = np.arange(len(positions))
    found: Vector = table[targets]
    return found
