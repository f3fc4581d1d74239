"""What the partitions of the Hopper forward pass to each other: tiles of K and V, and turns."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import steps

CONSUMERS, ROWS = gl.constexpr(steps.CONSUMERS), gl.constexpr(steps.ROWS)

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.8

slot_of, parity_of = gluon.jit(steps.slot_of), gluon.jit(steps.parity_of)
column_of, turn_parity = gluon.jit(steps.column_of), gluon.jit(steps.turn_parity)


class Ring(NamedTuple):
    """Tiles in shared memory, and the barriers that say when one is there and when it may be overwritten."""

    tiles: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """What the partitions share: the query rows, the rings, and whose turn it is to start matrix products."""

    q: Any
    q_full: Any
    k: Ring
    v: Ring
    turns: Any


class Place(NamedTuple):
    """Which rows and which tiles of keys this program works on."""

    first: Any
    batch: Any
    head: Any
    past: Any
    """One past the last key of the last tile."""
    tail: Any
    """Steps below this one are masked, as they hold the end of an interval."""
    full: Any
    """Steps below this one and from ``tail`` on are seen by every row."""
    steps: Any


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """``COUNT`` barriers that complete a phase after ``ARRIVALS``."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring_of(descriptor, SLOTS: gl.constexpr):
    block: gl.constexpr = descriptor.block_type.shape
    made = gl.allocate_shared_memory(descriptor.dtype, [SLOTS] + block, descriptor.layout)  # noqa: RUF005 (jit code takes no star)
    return Ring(made, barriers(SLOTS, 1), barriers(SLOTS, CONSUMERS))


@gluon.jit
def fill(ring, descriptor, step, place, head, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Start the load of the tile of ``step``, as soon as both consumers are done with what its slot holds."""
    slot = slot_of(step, SLOTS)
    mbarrier.wait(ring.empty.index(slot), parity_of(step, SLOTS) ^ 1)
    mbarrier.expect(ring.full.index(slot), descriptor.block_type.nbytes)
    where = [place.batch, column_of(step, place.past, BLOCK_K), head, 0]
    load_tile(descriptor, where, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def producer(shared, place, descriptors, group, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Load Q, and K and V in the order in which the consumers want them: K of the next step before V of this one."""
    q, k, v = descriptors
    mbarrier.expect(shared.q_full.index(0), CONSUMERS * q.block_type.nbytes)
    for consumer in gl.static_range(CONSUMERS):
        where = [place.batch, place.first + consumer * ROWS, place.head, 0]
        load_tile(q, where, shared.q_full.index(0), shared.q.index(consumer))
    head = place.head // group
    fill(shared.k, k, 0, place, head, SLOTS, BLOCK_K)
    for step in range(1, place.steps):
        fill(shared.k, k, step, place, head, SLOTS, BLOCK_K)
        fill(shared.v, v, step - 1, place, head, SLOTS, BLOCK_K)
    fill(shared.v, v, place.steps - 1, place, head, SLOTS, BLOCK_K)


@gluon.jit
def wait_full(ring, step, SLOTS: gl.constexpr):
    """Until the tile of ``step`` is there."""
    mbarrier.wait(ring.full.index(slot_of(step, SLOTS)), parity_of(step, SLOTS))


@gluon.jit
def tile_of(ring, step, SLOTS: gl.constexpr):
    """The tile of ``step``, ``[keys, head dim]``."""
    tile = ring.tiles.index(slot_of(step, SLOTS))
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def release(ring, step, SLOTS: gl.constexpr):
    """Nothing of this warpgroup reads the tile of ``step`` any more."""
    mbarrier.arrive(ring.empty.index(slot_of(step, SLOTS)), count=1)


@gluon.jit
def wait_turn(turns, CONSUMER: gl.constexpr, turn):
    """Until the other consumer has started its products: of this turn for the second, of the last one for the first."""
    mbarrier.wait(turns.index(CONSUMER), turn_parity(turn, CONSUMER))


@gluon.jit
def give_turn(turns, CONSUMER: gl.constexpr):
    """This consumer has started its products: the other one may."""
    mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
