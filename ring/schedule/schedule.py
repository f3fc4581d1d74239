"""What each rank computes, receives and sends at every hop: data, that one loop executes and that prints itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .active import active_shards, sent_keys
from .layout import Layout
from .mask import Mask
from .text import text

if TYPE_CHECKING:
    from ...comm.topology.topology import Topology

KV_SLOTS = 3  # one computing, one arriving, one whose send may still be under way
ROOT_SLOTS = 2  # of a two-level ring: one leaving and one arriving over the slow link during a whole outer step
DKV_SLOTS = 2  # one computing, one arriving
RAIL_SLOTS = 2  # of a two-level ring: dK/dV of a node on their way to the owner, and another node's arriving
KEPT = 16  # schedules: a model alternates between a few (layout, mask) pairs


Vector = npt.NDArray[np.int64]
Edge = tuple[int, int]


class Moves(NamedTuple):
    """All transfers of one kind on one level: for each the shard whose K/V or dK/dV it is, its source and destination.

    Vectors of one length, in no particular order.
    """

    kind: str
    """``kv`` or ``dkv``."""
    level: int
    """0: inside a node; 1: between nodes, along a rail."""
    shards: Vector
    sources: Vector
    destinations: Vector


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
    """The rank of this node that K/V go on to."""
    kv_slot: int | None
    """The slot that K/V arrive in."""
    dkv_from: int | None
    """The rank that partial dK/dV arrive from; of a root: this node's, coming back to it."""
    dkv_to: int | None
    """Where they go with this rank's part: to the next rank, or to the root at the end of the active range."""
    dkv_slot: int | None
    """The slot that holds them; None: this rank has none of this shard."""
    rail_to: int | None = None
    """The rank of the next node that K/V go on to over the slow link, during the whole outer step."""
    return_to: int | None = None
    """The owner of the shard, to which this node's dK/dV return over the slow link at the end of the outer step."""
    return_from: int | None = None
    """The rank from which its node's dK/dV of this rank's own shard arrive over the slow link after the outer step."""
    dkv_into: int | None = None
    """The slot that dK/dV arrive in where they go to."""


@dataclass(frozen=True)
class Schedule:
    """Where every shard goes, one outer step after the other.

    A flat ring is one outer step. In a two-level ring of N nodes of L ranks, an outer step brings the shards of another
    node: hop ``t = o * len(steps) + i`` brings shard (node, local) to rank ``(node + direction * outer_steps[o], local
    + direction * steps[i])``, modulo N and L. The first hop of an outer step is its root. Within an outer step K/V
    travel up to the last rank that sees something of them; between outer steps they cross to the next node along their
    rail, up to the last node that sees something of them, hidden behind a whole outer step. Where every rank sees
    something of every shard, ``outer_steps`` and ``steps`` count up, and K/V move to a neighbour. Where at some
    distance nobody sees anything, there is no hop.

    Partial dK/dV of an outer step start at the first rank after its root that computes, follow one group of transfers
    behind, and go straight back to the root from the last. In the first outer step the root is the owner. In every
    other the root adds its own part and returns the node's dK/dV straight to the owner along the rail, during the next
    outer step.
    """

    nodes: tuple[tuple[int, ...], ...]
    """Ranks in ring order; one node is a flat ring."""
    direction: int
    active: tuple[tuple[bool, ...], ...]
    """``active[shard][hop]``: the rank where the shard is at that hop sees something of it."""
    lengths: tuple[int, ...]
    """Keys of each shard that travel."""
    slots: int = KV_SLOTS
    """Slots that K/V rotate through inside an outer step."""
    outer_steps: tuple[int, ...] = ()
    """How many nodes from its owner's each outer step brings a shard; first 0. Nothing given: all, counting up."""
    steps: tuple[int, ...] = ()
    """How many ranks from its root each hop brings a shard; first 0. Nothing given: all, counting up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer_steps", self.outer_steps or tuple(range(len(self.nodes))))
        object.__setattr__(self, "steps", self.steps or tuple(range(len(self.nodes[0]))))

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def inner(self) -> int:
        """Hops of an outer step: at most as many as a node has ranks."""
        return len(self.steps)

    @property
    def count(self) -> int:
        """Hops of a pass: at most as many as there are ranks."""
        return len(self.outer_steps) * len(self.steps)

    @cached_property
    def _places(self) -> dict[int, Edge]:
        return {rank: (n, i) for n, node in enumerate(self.nodes) for i, rank in enumerate(node)}

    def _moved(self, rank: int, hop: int, direction: int) -> int:
        (node, local), (outer, step) = self._places[rank], divmod(hop, self.inner)
        there = self.nodes[(node + direction * self.outer_steps[outer]) % len(self.nodes)]
        return there[(local + direction * self.steps[step]) % len(there)]

    def rank_at(self, shard: int, hop: int) -> int:
        """The rank where ``shard`` is at ``hop``."""
        return self._moved(shard, hop, self.direction)

    def shard_at(self, rank: int, hop: int) -> int:
        """The shard that is on ``rank`` at ``hop``."""
        return self._moved(rank, hop, -self.direction)

    @property
    def ranks(self) -> Vector:
        """The rank where each shard is at each hop; ``[shard, hop]``, :meth:`rank_at` for all at once."""
        grid = np.array(self.nodes)
        node, local = (place[:, None] for place in np.divmod(np.argsort(grid.ravel()), grid.shape[1]))
        outer, step = np.repeat(self.outer_steps, self.inner), np.tile(self.steps, len(self.outer_steps))
        nodes, locals_ = node + self.direction * outer, local + self.direction * step
        ranks: Vector = grid[nodes % grid.shape[0], locals_ % grid.shape[1]]
        return ranks

    @cached_property
    def active_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per shard and outer step the first and the last step away from the root that computes; (1, 0): none."""
        outers = range(0, self.count, self.inner)
        return tuple(tuple(_active_range(hops[outer : outer + self.inner]) for outer in outers) for hops in self.active)

    @cached_property
    def last_outer_steps(self) -> tuple[int, ...]:
        """For every shard the last outer step in which any rank computes with it."""
        return tuple(
            max((hop // self.inner for hop, sees in enumerate(hops) if sees), default=0) for hops in self.active
        )

    @property
    def returns_early(self) -> bool:
        """Whether dK/dV of any shard come back to their root before an outer step ends."""
        return any(0 < last < self.inner - 1 for outers in self.active_ranges for _, last in outers)

    @property
    def early_slot(self) -> int:
        """The slot of dK/dV that come back to their root while the others still serve other shards."""
        return DKV_SLOTS + (RAIL_SLOTS if len(self.nodes) > 1 else 0)

    def node_sees(self, shard: int, outer: int) -> bool:
        """Whether any rank of the node where ``shard`` is in outer step ``outer`` computes with it."""
        return any(self.active[shard][outer * self.inner : (outer + 1) * self.inner])

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """What ``rank`` does, hop by hop: as many entries on every rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}: the schedule has ranks 0 to {self.world - 1}")
        return tuple((_away if index % self.inner else _root)(self, rank, index) for index in range(self.count))

    def bytes(self, kv_bytes: int, dkv_bytes: int = 0, *, level: int | None = None) -> tuple[int, ...]:
        """How much each rank sends in one pass.

        Args:
            kv_bytes: of the K and V of one token, all heads; they move in the forward and again in the backward.
            dkv_bytes: of the partial dK and dV of one token, all heads; they move in the backward alone.
            level: 0 counts what moves inside nodes, 1 between them; None both.
        """
        per_token = {"kv": kv_bytes, "dkv": dkv_bytes}
        sent, lengths = np.zeros(self.world, dtype=np.int64), np.array(self.lengths, dtype=np.int64)
        for moves in self.moves():
            if level in (None, moves.level):
                np.add.at(sent, moves.sources, lengths[moves.shards] * per_token[moves.kind])
        return tuple(sent.tolist())

    @cached_property
    def edges(self) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
        """(source, destination) of all that moves in a forward or a backward: inside nodes, and between them."""
        moves = self.moves()
        inside, between = ([one for one in moves if one.level == level] for level in (0, 1))
        return _pairs(inside, self.world), _pairs(between, self.world)

    def moves(self) -> tuple[Moves, ...]:
        """Everything that any rank sends in a backward; a forward leaves out dK/dV."""
        seen = np.array(self.active).reshape(self.world, -1, self.inner)  # [shard, outer step, step]
        ranks, steps, outers = self.ranks.reshape(seen.shape), np.arange(self.inner), np.arange(seen.shape[1])
        first, last = np.moveaxis(np.array(self.active_ranges), 2, 0)[..., None]
        roots, following = ranks[:, :, 0], np.roll(ranks, -1, axis=2)
        onward, carries = steps < last, (first <= steps) & (steps <= last)
        by_rail = outers < np.array(self.last_outer_steps)[:, None]
        returns = (outers > 0) & seen.any(axis=2)
        owners = np.broadcast_to(np.arange(self.world)[:, None], roots.shape)
        return (
            _chosen("kv", 0, onward, ranks, following),
            _chosen("dkv", 0, carries, ranks, np.where(onward, following, roots[:, :, None])),
            _chosen("kv", 1, by_rail, roots, np.roll(roots, -1, axis=1)),
            _chosen("dkv", 1, returns, roots, owners),
        )

    def __str__(self) -> str:
        return text(self)


def schedule(
    layout: Layout,
    mask: Mask,
    *,
    kv_layout: Layout | None = None,
    direction: int = 1,
    topology: Topology | None = None,
    slots: int = KV_SLOTS,
) -> Schedule:
    """The ring that computes every pair that ``mask`` lets through exactly once; pure, so that all ranks agree.

    Args:
        layout: who holds which queries.
        mask: what a query may see; shards that a rank sees nothing of are not computed there, and not sent past the
            last rank that needs them; keys that no other rank sees may stay where they are, as :func:`sent_keys` says.
        kv_layout: who holds which keys; None: the same tokens as the queries.
        direction: 1 sends K/V to the next rank, -1 to the one before.
        topology: the ring's order; several nodes of one size make a two-level ring. None: flat, in rank order.
        slots: how many slots K/V rotate through.

    Raises:
        ValueError: layouts or topology are made for different worlds, another direction, or no slot.
    """
    keys = layout if kv_layout is None else kv_layout
    if keys.world != layout.world:
        raise ValueError(f"kv_layout is made for {keys.world} ranks, layout for {layout.world}: both must be the same")
    if direction not in (1, -1):
        raise ValueError(f"direction is {direction!r}: it must be 1 (to the next rank) or -1 (to the one before)")
    if topology is not None and topology.world != layout.world:
        raise ValueError(f"topology has {topology.world} ranks, layout is made for {layout.world}")
    if slots < 1:
        raise ValueError(f"slots is {slots}: K/V need at least one")
    nodes: tuple[tuple[int, ...], ...] = (tuple(range(layout.world)),)
    if topology is not None:
        nodes = topology.nodes if topology.two_level else (topology.order,)
    return _schedule(layout, mask, keys, direction, nodes, slots)


@lru_cache(maxsize=KEPT)
def _schedule(
    layout: Layout, mask: Mask, keys: Layout, direction: int, nodes: tuple[tuple[int, ...], ...], slots: int
) -> Schedule:
    plan = Schedule(nodes, direction, (), sent_keys(layout, mask, keys).lengths, slots)
    seen = active_shards(layout, mask, keys)[plan.ranks, np.arange(layout.world)[:, None]]
    seen = seen.reshape(layout.world, len(plan.outer_steps), len(plan.steps))
    lengths = np.array(plan.lengths, dtype=np.int64)
    outers, steps = _order(np.asarray(seen.any(axis=2))[:, None], lengths), _order(seen, lengths)
    active = seen[:, outers][:, :, steps].reshape(layout.world, -1).tolist()
    return replace(plan, outer_steps=outers, steps=steps, active=tuple(map(tuple, active)))


def _order(seen: npt.NDArray[np.bool_], lengths: Vector) -> tuple[int, ...]:
    """Distances at which somebody sees something, in the order in which K/V move less; ``[shard, outer, distance]``.

    Counting up, which moves everything to a neighbour, or the nearest of both sides first: where windows and documents
    reach to both sides, K/V that went round to come from behind would pass all the others.
    """
    count = seen.shape[2]
    upward = (0, *(np.flatnonzero(np.asarray(seen.any(axis=(0, 1)))[1:]) + 1).tolist())
    nearest = tuple(sorted(upward, key=lambda far: (min(far, count - far), far)))

    def moved(order: tuple[int, ...]) -> int:
        used = seen[:, :, order]
        last = np.where(used.any(axis=2), len(order) - 1 - used[:, :, ::-1].argmax(axis=2), 0)
        return int((last * lengths[:, None]).sum())

    return min(upward, nearest, key=moved)


def _chosen(kind: str, level: int, where: npt.NDArray[np.bool_], sources: Vector, destinations: Vector) -> Moves:
    """The transfers ``where`` there is one; the first dimension of all is the shard."""
    return Moves(kind, level, np.nonzero(where)[0], sources[where], destinations[where])


def _pairs(moves: Sequence[Moves], world: int) -> tuple[Edge, ...]:
    """(source, destination) of every transfer, each once, in ascending order."""
    codes = np.unique(np.concatenate([one.sources * world + one.destinations for one in moves]))
    sources, destinations = np.divmod(codes, world)
    return tuple(zip(sources.tolist(), destinations.tolist(), strict=True))


def _active_range(hops: tuple[bool, ...]) -> tuple[int, int]:
    away = [index for index, computes in enumerate(hops) if computes and index]
    return (away[0], away[-1]) if away else (1, 0)


def _root(plan: Schedule, rank: int, index: int) -> Hop:
    """An outer root: K/V stay for the whole outer step, leave first, and the node's dK/dV come back to them last."""
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
    """Where dK/dV come back to: from the far end of an outer step at its very end, when the next slot is free."""
    return (root + plan.inner) % DKV_SLOTS if last == plan.inner - 1 else plan.early_slot


def _away(plan: Schedule, rank: int, index: int) -> Hop:
    shard, (outer, step) = plan.shard_at(rank, index), divmod(index, plan.inner)
    first, last = plan.active_ranges[shard][outer]
    comes, goes, adds = step <= last, step < last, first <= step <= last
    previous = plan.rank_at(shard, index - 1)
    # onward, and from the end of the active range back to the root
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
