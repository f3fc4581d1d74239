"""What each rank computes, receives and sends at every hop: data, that one loop executes and that prints itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .layout import Layout
from .mask import Mask

KV_SLOTS = 3  # one computing, one arriving, one whose send may still be under way
SUMS_SLOTS = 2  # one computing, one arriving
HOME_SLOT = 2  # for sums that come home while the other two slots still serve the journeys of other shards
KEPT = 16  # schedules: a model alternates between a few (layout, mask) pairs
PRINTED = 16  # ranks and hops: a larger table is printed with its middle left out


Vector = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hop:
    """One shard visiting one rank. A rank that a shard only passes through has a hop that does not compute."""

    index: int
    """0 is the rank's own shard."""
    shard: int
    computes: bool
    """This rank sees something of the shard."""
    kv_from: int | None
    """The rank that K/V arrive from; None: they are local, or do not come."""
    kv_to: int | None
    """The rank that K/V go on to."""
    kv_slot: int | None
    """The slot that K/V arrive in."""
    sums_from: int | None
    """The rank that dK/dV partial sums arrive from; of hop 0: the own shard's, coming home."""
    sums_to: int | None
    """Where they go with this rank's part: to the next rank, or home at the end of the journey."""
    sums_slot: int | None
    """The slot that holds the sums; None: this rank has none of this shard."""


@dataclass(frozen=True)
class Schedule:
    """The journey of every shard. At hop t, shard s is on rank ``(s + direction * t) % world``.

    K/V travel up to the last rank that sees something of them. dK/dV sums start at the first rank after home that
    does, follow one group of transfers behind, and go straight home from the last.
    """

    world: int
    direction: int
    visits: tuple[tuple[bool, ...], ...]
    """``visits[shard][hop]``: the rank where the shard is at that hop sees something of it."""
    lengths: tuple[int, ...]
    """Keys of each shard."""

    def rank_at(self, shard: int, hop: int) -> int:
        """The rank where ``shard`` is at ``hop``."""
        return (shard + self.direction * hop) % self.world

    def shard_at(self, rank: int, hop: int) -> int:
        """The shard that is on ``rank`` at ``hop``."""
        return (rank - self.direction * hop) % self.world

    @cached_property
    def journeys(self) -> tuple[tuple[int, int], ...]:
        """For every shard the first and the last hop away from home that computes; (1, 0) where it stays."""
        return tuple(_journey(hops) for hops in self.visits)

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """What ``rank`` does, hop by hop: always ``world`` entries.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}: the schedule has ranks 0 to {self.world - 1}")
        return (_home(self, rank), *(_away(self, rank, index) for index in range(1, self.world)))

    def bytes(self, kv_bytes: int, sums_bytes: int = 0) -> tuple[int, ...]:
        """How much each rank sends in one pass.

        Args:
            kv_bytes: of the K and V of one token, all heads; they move in the forward and again in the backward.
            sums_bytes: of the dK and dV sums of one token, all heads; they move in the backward alone.
        """
        sent = [0] * self.world
        for shard, (first, last) in enumerate(self.journeys):
            for hop in range(last):
                sent[self.rank_at(shard, hop)] += self.lengths[shard] * kv_bytes
            for hop in range(first, last + 1):
                sent[self.rank_at(shard, hop)] += self.lengths[shard] * sums_bytes
        return tuple(sent)

    def __str__(self) -> str:
        return _text(self)


def schedule(layout: Layout, mask: Mask, *, kv_layout: Layout | None = None, direction: int = 1) -> Schedule:
    """The ring that computes every pair that ``mask`` lets through exactly once; pure, so that all ranks agree.

    Args:
        layout: who holds which queries.
        mask: what a query may see; shards that a rank sees nothing of are not computed there, and not sent past the
            last rank that needs them.
        kv_layout: who holds which keys; None: the same tokens as the queries.
        direction: 1 sends K/V to the next rank, -1 to the one before.

    Raises:
        ValueError: the layouts are made for different worlds, or another direction.
    """
    keys = layout if kv_layout is None else kv_layout
    if keys.world != layout.world:
        raise ValueError(f"kv_layout is made for {keys.world} ranks, layout for {layout.world}: both must be the same")
    if direction not in (1, -1):
        raise ValueError(f"direction is {direction!r}: it must be 1 (to the next rank) or -1 (to the one before)")
    return _schedule(layout, mask, keys, direction)


@lru_cache(maxsize=KEPT)
def _schedule(layout: Layout, mask: Mask, keys: Layout, direction: int) -> Schedule:
    return Schedule(layout.world, direction, _visits(layout, mask, keys, direction), keys.lengths)


def _visits(layout: Layout, mask: Mask, keys: Layout, direction: int) -> tuple[tuple[bool, ...], ...]:
    world = layout.world
    # NumPy: this is many small searches, and torch would start its threads for each
    held = [keys.positions(shard).numpy() for shard in range(world)]
    reach = max(int(positions[-1]) + 1 if len(positions) else 0 for positions in held)
    # all shards in one ascending vector, shard s moved up by s * reach: one search answers for every shard
    moved = np.arange(world) * reach
    line = np.concatenate([positions + start for positions, start in zip(held, moved, strict=True)])
    seen = np.stack([_seen(line, moved, *_union(mask, layout.positions(rank), reach)) for rank in range(world)])
    shards = np.arange(world)[:, None]
    visits = seen[(shards + direction * np.arange(world)) % world, shards]
    return tuple(tuple(hops) for hops in visits.tolist())


def _union(mask: Mask, positions: torch.Tensor, reach: int) -> tuple[Vector, Vector]:
    """Starts and ends of the positions below ``reach`` that any of the queries sees: one interval, for most masks.

    The ends never decrease, so an interval that does not touch the one before starts a new one.
    """
    lo, hi = (end.clamp(max=reach).numpy() for end in mask.interval(positions))
    lo, hi = lo[lo < hi], hi[lo < hi]
    new = np.ones(len(lo), dtype=np.bool_)
    new[1:] = lo[1:] > hi[:-1]
    return lo[new], hi[np.roll(new, -1)]


def _seen(line: Vector, moved: Vector, starts: Vector, ends: Vector) -> npt.NDArray[np.bool_]:
    """For each shard on the ``line``: whether it has a key in one of the intervals; ``[world]``."""
    first = np.searchsorted(line, moved[:, None] + starts)
    past = np.searchsorted(line, moved[:, None] + ends)
    return np.asarray((first < past).any(axis=1))


def _journey(hops: tuple[bool, ...]) -> tuple[int, int]:
    away = [index for index, computes in enumerate(hops) if computes and index]
    return (away[0], away[-1]) if away else (1, 0)


def _home(plan: Schedule, rank: int) -> Hop:
    """Hop 0: the rank's own shard, which leaves first and whose sums come home last."""
    _, last = plan.journeys[rank]
    # from the far end of the ring they come at the very end, when the slot that is next in turn is free
    slot = plan.world % SUMS_SLOTS if last == plan.world - 1 else HOME_SLOT
    return Hop(
        index=0,
        shard=rank,
        computes=plan.visits[rank][0],
        kv_from=None,
        kv_to=plan.rank_at(rank, 1) if last else None,
        kv_slot=None,
        sums_from=plan.rank_at(rank, last) if last else None,
        sums_to=None,
        sums_slot=slot if last else None,
    )


def _away(plan: Schedule, rank: int, index: int) -> Hop:
    shard = plan.shard_at(rank, index)
    first, last = plan.journeys[shard]
    previous, following = plan.rank_at(rank, -1), plan.rank_at(rank, 1)
    comes, sums = index <= last, first <= index <= last
    return Hop(
        index=index,
        shard=shard,
        computes=plan.visits[shard][index],
        kv_from=previous if comes else None,
        kv_to=following if index < last else None,
        kv_slot=index % KV_SLOTS if comes else None,
        sums_from=previous if sums and index > first else None,
        sums_to=(following if index < last else shard) if sums else None,
        sums_slot=index % SUMS_SLOTS if sums else None,
    )


def _text(plan: Schedule) -> str:
    computing = sum(map(sum, plan.visits))
    to = "next" if plan.direction == 1 else "previous"
    return "\n".join(
        [
            f"{plan.world} ranks, K/V move to the {to} rank, {computing} of {plan.world**2} hops compute",
            "",
            "K/V: N shard N is computed with, (N) only passes, > goes on, . nothing comes",
            *_table(plan, _kv_cell),
            "",
            "dK/dV sums: N of shard N, > go on, ^ go home, . none; hop 0: < come home",
            *_table(plan, _sums_cell),
        ]
    )


def _kv_cell(hop: Hop) -> str:
    if not hop.computes and hop.kv_from is None and hop.kv_to is None:
        return "."
    return (f"{hop.shard}" if hop.computes else f"({hop.shard})") + (" >" if hop.kv_to is not None else "")


def _sums_cell(hop: Hop) -> str:
    if hop.sums_slot is None:
        return "."
    return f"{hop.shard} " + ("<" if hop.index == 0 else "^" if hop.sums_to == hop.shard else ">")


def _table(plan: Schedule, cell: Callable[[Hop], str]) -> list[str]:
    numbers = shown(plan.world)
    rows = [["", *("…" if index is None else f"hop {index}" for index in numbers)]]
    for rank in numbers:
        if rank is None:
            rows.append(["…"] * len(rows[0]))
            continue
        hops = plan.hops(rank)
        rows.append([f"rank {rank}", *("…" if index is None else cell(hops[index]) for index in numbers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown(count: int) -> Sequence[int | None]:
    """The ranks or hops that are printed; None where some are left out."""
    if count <= PRINTED:
        return range(count)
    return [*range(PRINTED - 4), None, *range(count - 3, count)]
