"""The schedule of a ring: which shard each rank computes with, receives and sends at every hop.

`schedule` builds it as plain data, one loop executes it, and ``print(schedule)`` shows it. Example: 4 ranks, causal,
contiguous shards. ``N >`` computes with shard N and sends its K/V to the next rank, ``.`` is an empty hop::

            hop 0  hop 1  hop 2  hop 3
    rank 0  0 >    .      .      .
    rank 1  1 >    0 >    .      .
    rank 2  2 >    1 >    0 >    .
    rank 3  3      2      1      0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .formatting import format_schedule
from .hop_order import order_distances
from .layout import Layout
from .mask import Mask
from .visibility import active_shards, sent_keys

if TYPE_CHECKING:
    from ...comm.topology.topology import Topology

KV_SLOTS = 3  # one is computed with, one is received, one may still be sent
ROOT_SLOTS = 2  # two-level ring: one is sent and one received over the slow link during a whole outer step
DKV_SLOTS = 2  # one is computed with, one is received
RAIL_SLOTS = 2  # two-level ring: one is sent to the owner, one is received from another node
SCHEDULE_CACHE_SIZE = 16  # cached schedules; a model alternates between a few (layout, mask) pairs

Vector = npt.NDArray[np.int64]
Edge = tuple[int, int]


class TransferTable(NamedTuple):
    """All transfers of one kind on one level, as vectors of equal length in no particular order.

    Entry i moves K/V or dK/dV of ``shards[i]`` from rank ``sources[i]`` to rank ``destinations[i]``.
    """

    kind: str  # ``kv`` or ``dkv``
    level: int  # 0 inside a node, 1 between nodes, along a rail
    shards: Vector
    sources: Vector
    destinations: Vector


@dataclass(frozen=True)
class Hop:
    """One shard visiting one rank. If the shard only passes through, the hop does not compute."""

    index: int
    """Number of the hop; hop 0 has the rank's own shard."""
    shard: int
    computes: bool
    """True if this rank sees any key of the shard."""
    kv_from: int | None
    """Rank that K/V arrive from; None if they are local or not needed."""
    kv_to: int | None
    """Rank of the same node that K/V are sent on to."""
    kv_slot: int | None
    """Slot that K/V arrive in."""
    dkv_from: int | None
    """Rank that partial dK/dV arrive from. At a root: the rank that returns this node's sum."""
    dkv_to: int | None
    """Rank that the sum is sent to: the next rank, or the root at the end of the active range."""
    dkv_slot: int | None
    """Slot that holds dK/dV; None if this rank has none of this shard."""
    rail_to: int | None = None
    """Rank of the next node that K/V are sent to over the slow link, during the whole outer step."""
    return_to: int | None = None
    """Owner of the shard. This node's dK/dV return to it over the slow link at the end of the outer step."""
    return_from: int | None = None
    """Rank that returns its node's dK/dV of this rank's own shard over the slow link, after the outer step."""
    dkv_into: int | None = None
    """Slot of the receiving rank that dK/dV arrive in."""


@dataclass(frozen=True)
class Schedule:
    """The path of every shard, one outer step after the other.

    A flat ring is a single outer step. In a two-level ring of N nodes with L ranks each, every outer step brings the
    shards of another node. Hop ``t = o * len(steps) + i`` brings shard (node, local) to rank
    ``(node + direction * outer_steps[o], local + direction * steps[i])``, modulo N and L.

    - The first hop of an outer step is its root.
    - Inside an outer step, K/V move up to the last rank that sees any of their keys.
    - Between outer steps, K/V cross to the next node along their rail, up to the last node that sees any of their keys.
      A whole outer step hides this transfer.
    - If every rank sees every shard, ``outer_steps`` and ``steps`` count up, and K/V move to a neighbour. A distance at
      which no rank sees anything has no hop.

    Partial dK/dV of an outer step start at the first rank after the root that computes. They follow K/V one group of
    transfers later, and return from the last rank straight to the root. In the first outer step the root is the owner.
    In every later one the root adds its own part, and returns the node's dK/dV to the owner along the rail during the
    next outer step.
    """

    nodes: tuple[tuple[int, ...], ...]
    """Ranks in ring order, per node; a flat ring is one node."""
    direction: int
    active: tuple[tuple[bool, ...], ...]
    """``active[shard][hop]`` is True if the rank that the shard visits at that hop sees any of its keys."""
    lengths: tuple[int, ...]
    """Number of keys of each shard that are sent."""
    slots: int = KV_SLOTS
    """Number of slots that K/V rotate through inside an outer step."""
    outer_steps: tuple[int, ...] = ()
    """Distance from the owner's node at each outer step, in nodes; the first is 0. Default: all, counting up."""
    steps: tuple[int, ...] = ()
    """Distance from the root at each hop, in ranks; the first is 0. Default: all, counting up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer_steps", self.outer_steps or tuple(range(len(self.nodes))))
        object.__setattr__(self, "steps", self.steps or tuple(range(len(self.nodes[0]))))

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def inner(self) -> int:
        """Hops per outer step, at most the number of ranks of a node."""
        return len(self.steps)

    @property
    def count(self) -> int:
        """Hops per pass, at most the number of ranks."""
        return len(self.outer_steps) * len(self.steps)

    @cached_property
    def _places(self) -> dict[int, Edge]:
        """Node of each rank, and the rank's index in it."""
        return {rank: (n, i) for n, node in enumerate(self.nodes) for i, rank in enumerate(node)}

    def _moved(self, rank: int, hop: int, direction: int) -> int:
        """Return the rank at the distance of ``hop`` from ``rank``, in ``direction``."""
        (node, local), (outer, step) = self._places[rank], divmod(hop, self.inner)
        ranks = self.nodes[(node + direction * self.outer_steps[outer]) % len(self.nodes)]
        return ranks[(local + direction * self.steps[step]) % len(ranks)]

    def rank_at(self, shard: int, hop: int) -> int:
        """Return the rank that ``shard`` visits at ``hop``."""
        return self._moved(shard, hop, self.direction)

    def shard_at(self, rank: int, hop: int) -> int:
        """Return the shard that visits ``rank`` at ``hop``."""
        return self._moved(rank, hop, -self.direction)

    @property
    def ranks(self) -> Vector:
        """Rank that each shard visits at each hop, ``[shard, hop]``: :meth:`rank_at` as an array."""
        grid = np.array(self.nodes)
        node, local = (place[:, None] for place in np.divmod(np.argsort(grid.ravel()), grid.shape[1]))
        outer, step = np.repeat(self.outer_steps, self.inner), np.tile(self.steps, len(self.outer_steps))
        nodes, locals_ = node + self.direction * outer, local + self.direction * step
        ranks: Vector = grid[nodes % grid.shape[0], locals_ % grid.shape[1]]
        return ranks

    @cached_property
    def active_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """First and last step after the root that computes, per shard and outer step; (1, 0) if no step computes."""
        outers = range(0, self.count, self.inner)
        return tuple(tuple(_active_range(hops[outer : outer + self.inner]) for outer in outers) for hops in self.active)

    @cached_property
    def last_outer_steps(self) -> tuple[int, ...]:
        """Last outer step in which any rank computes with the shard, per shard."""
        return tuple(
            max((hop // self.inner for hop, sees in enumerate(hops) if sees), default=0) for hops in self.active
        )

    @property
    def returns_early(self) -> bool:
        """True if dK/dV of any shard return to their root before an outer step ends."""
        return any(0 < last < self.inner - 1 for outers in self.active_ranges for _, last in outers)

    @property
    def early_slot(self) -> int:
        """Slot of dK/dV that return to their root while the rotating slots still serve other shards."""
        return DKV_SLOTS + (RAIL_SLOTS if len(self.outer_steps) > 1 else 0)

    def node_sees(self, shard: int, outer: int) -> bool:
        """Return True if a rank of the node that ``shard`` visits in outer step ``outer`` computes with the shard."""
        return any(self.active[shard][outer * self.inner : (outer + 1) * self.inner])

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """Return the hops of ``rank``. Every rank has the same number of hops.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}: the schedule has ranks 0 to {self.world - 1}")
        return tuple((_away if index % self.inner else _root)(self, rank, index) for index in range(self.count))

    def select_keys(self, layout: Layout, mask: Mask, keys: Layout, sent: Layout) -> Schedule:
        """Return the schedule with the same hops for ``keys``, a part of each shard, of which ``sent`` are sent."""
        seen = active_shards(layout, mask, keys)[self.ranks, np.arange(layout.world)[:, None]]
        return replace(self, active=tuple(map(tuple, seen.tolist())), lengths=sent.lengths)

    def bytes(self, kv_bytes: int, dkv_bytes: int = 0, *, level: int | None = None) -> tuple[int, ...]:
        """Return the bytes that each rank sends in one pass.

        Args:
            kv_bytes: bytes of K and V per token, all heads. They move in the forward and again in the backward.
            dkv_bytes: bytes of partial dK and dV per token, all heads. They move only in the backward.
            level: 0 counts transfers inside nodes, 1 those between nodes, None both.
        """
        per_token = {"kv": kv_bytes, "dkv": dkv_bytes}
        sent, lengths = np.zeros(self.world, dtype=np.int64), np.array(self.lengths, dtype=np.int64)
        for moves in self.moves():
            if level in (None, moves.level):
                np.add.at(sent, moves.sources, lengths[moves.shards] * per_token[moves.kind])
        return tuple(sent.tolist())

    @cached_property
    def edges(self) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
        """``(source, destination)`` pairs of all transfers of a forward or backward, inside nodes and between nodes."""
        moves = self.moves()
        inside, between = ([table for table in moves if table.level == level] for level in (0, 1))
        return _pairs(inside, self.world), _pairs(between, self.world)

    def moves(self) -> tuple[TransferTable, ...]:
        """Return every transfer of a backward. A forward has the same K/V transfers and no dK/dV."""
        seen = np.array(self.active).reshape(self.world, -1, self.inner)  # [shard, outer step, step]
        ranks, steps, outers = self.ranks.reshape(seen.shape), np.arange(self.inner), np.arange(seen.shape[1])
        first, last = np.moveaxis(np.array(self.active_ranges), 2, 0)[..., None]
        roots, following = ranks[:, :, 0], np.roll(ranks, -1, axis=2)
        onward, carries = steps < last, (first <= steps) & (steps <= last)
        by_rail = outers < np.array(self.last_outer_steps)[:, None]
        returns = (outers > 0) & seen.any(axis=2)
        owners = np.broadcast_to(np.arange(self.world)[:, None], roots.shape)
        return (
            _select_moves("kv", 0, onward, ranks, following),
            _select_moves("dkv", 0, carries, ranks, np.where(onward, following, roots[:, :, None])),
            _select_moves("kv", 1, by_rail, roots, np.roll(roots, -1, axis=1)),
            _select_moves("dkv", 1, returns, roots, owners),
        )

    def __str__(self) -> str:
        return format_schedule(self)


def schedule(
    layout: Layout,
    mask: Mask,
    *,
    kv_layout: Layout | None = None,
    direction: int = 1,
    topology: Topology | None = None,
    slots: int = KV_SLOTS,
) -> Schedule:
    """Return the schedule that computes every visible pair exactly once. A pure function, so that all ranks agree.

    Ranks do not compute with shards of which they see nothing. K/V are not sent past the last rank that needs them, and
    keys that no other rank sees may stay on their rank, see :func:`sent_keys`.

    Args:
        layout: positions of the queries of each rank.
        mask: which query sees which key.
        kv_layout: positions of the keys of each rank; None: the same as the queries.
        direction: 1 sends K/V to the next rank, -1 to the previous rank.
        topology: order of the ranks. Several nodes of equal size make a two-level ring. None: flat, in rank order.
        slots: number of slots that K/V rotate through.

    Raises:
        ValueError: the layouts or the topology have different numbers of ranks, or direction or slots are out of range.
    """
    keys = layout if kv_layout is None else kv_layout
    if keys.world != layout.world:
        raise ValueError(
            f"kv_layout is made for {keys.world} ranks and layout for {layout.world}: the numbers must be equal"
        )
    if direction not in (1, -1):
        raise ValueError(f"direction is {direction!r}: it must be 1 (to the next rank) or -1 (to the previous rank)")
    if topology is not None and topology.world != layout.world:
        raise ValueError(f"topology has {topology.world} ranks, but layout is made for {layout.world}")
    if slots < 1:
        raise ValueError(f"slots is {slots}: it must be at least 1")
    nodes: tuple[tuple[int, ...], ...] = (tuple(range(layout.world)),)
    if topology is not None:
        nodes = topology.nodes if topology.two_level else (topology.order,)
    return _schedule(layout, mask, keys, direction, nodes, slots)


@lru_cache(maxsize=SCHEDULE_CACHE_SIZE)
def _schedule(
    layout: Layout, mask: Mask, keys: Layout, direction: int, nodes: tuple[tuple[int, ...], ...], slots: int
) -> Schedule:
    plan = Schedule(nodes, direction, (), (), slots).select_keys(layout, mask, keys, sent_keys(layout, mask, keys))
    seen = np.array(plan.active).reshape(layout.world, len(plan.outer_steps), len(plan.steps))
    lengths = np.array(plan.lengths, dtype=np.int64)
    shards, outer, distances = np.nonzero(seen)
    outer_count, inner_count = seen.shape[1:]
    outers = order_distances(shards, outer, lengths, outer_count)
    steps = order_distances(shards * outer_count + outer, distances, np.repeat(lengths, outer_count), inner_count)
    active = seen[:, outers][:, :, steps].reshape(layout.world, -1).tolist()
    return replace(plan, outer_steps=outers, steps=steps, active=tuple(map(tuple, active)))


def _select_moves(
    kind: str, level: int, where: npt.NDArray[np.bool_], sources: Vector, destinations: Vector
) -> TransferTable:
    """Build the table of the transfers that ``where`` selects; the first dimension is the shard."""
    return TransferTable(kind, level, np.nonzero(where)[0], sources[where], destinations[where])


def _pairs(moves: Sequence[TransferTable], world: int) -> tuple[Edge, ...]:
    """Return each ``(source, destination)`` of the transfers once, in ascending order."""
    codes = np.unique(np.concatenate([table.sources * world + table.destinations for table in moves]))
    sources, destinations = np.divmod(codes, world)
    return tuple(zip(sources.tolist(), destinations.tolist(), strict=True))


def _active_range(hops: tuple[bool, ...]) -> tuple[int, int]:
    """Return one pair of :attr:`Schedule.active_ranges`."""
    away = [index for index, computes in enumerate(hops) if computes and index]
    return (away[0], away[-1]) if away else (1, 0)


def _root(plan: Schedule, rank: int, index: int) -> Hop:
    """Build the first hop of an outer step.

    Its K/V stay in their slot during the whole outer step and are sent first. The node's dK/dV return to it last.
    """
    shard, outer = plan.shard_at(rank, index), index // plan.inner
    _, last = plan.active_ranges[shard][outer]
    comes, goes = 0 < outer <= plan.last_outer_steps[shard], outer < plan.last_outer_steps[shard]
    sees = outer > 0 and plan.node_sees(shard, outer)
    return Hop(
        index=index,
        shard=shard,
        computes=plan.active[shard][index],
        kv_from=plan.rank_at(shard, index - plan.inner) if comes else None,
        kv_to=plan.rank_at(shard, index + 1) if last else None,
        kv_slot=kv_slot_at(index, plan.inner, plan.slots) if comes else None,
        dkv_from=plan.rank_at(shard, index + last) if last else None,
        dkv_to=None,
        dkv_slot=_return_slot(plan, index, last) if last else None,
        rail_to=plan.rank_at(shard, index + plan.inner) if goes else None,
        return_to=shard if sees else None,
        return_from=plan.rank_at(rank, index) if outer and plan.node_sees(rank, outer) else None,
    )


def kv_slot_at(index: int, inner: int, slots: int) -> int:
    """Return the slot that K/V of a hop arrive in, on every rank."""
    return index % slots if index % inner else slots + index // inner % ROOT_SLOTS


def _return_slot(plan: Schedule, root: int, last: int) -> int:
    """Return the slot of dK/dV that return to their root.

    From the last hop of an outer step they arrive at its very end, when the next rotating slot is free.
    """
    return (root + plan.inner) % DKV_SLOTS if last == plan.inner - 1 else plan.early_slot


def _away(plan: Schedule, rank: int, index: int) -> Hop:
    """Build a hop that is not the first of its outer step."""
    shard, (outer, step) = plan.shard_at(rank, index), divmod(index, plan.inner)
    first, last = plan.active_ranges[shard][outer]
    comes, goes, adds = step <= last, step < last, first <= step <= last
    previous = plan.rank_at(shard, index - 1)
    # the next rank, or the root at the end of the active range
    following = plan.rank_at(shard, index + 1 if goes else index - step)
    return Hop(
        index=index,
        shard=shard,
        computes=plan.active[shard][index],
        kv_from=previous if comes else None,
        kv_to=following if goes else None,
        kv_slot=kv_slot_at(index, plan.inner, plan.slots) if comes else None,
        dkv_from=previous if adds and step > first else None,
        dkv_to=following if adds else None,
        dkv_slot=index % DKV_SLOTS if adds else None,
        dkv_into=((index + 1) % DKV_SLOTS if goes else _return_slot(plan, index - step, last)) if adds else None,
    )
