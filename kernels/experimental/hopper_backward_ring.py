"""What the partitions of the Hopper backward pass to each other: rows of Q and dO, gradients of scores, parts of dQ."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..device import tiles
from .hopper_ring import CONSUMERS, ROWS, Ring, barriers, load_tile, parity_of, slot_of

LOG2_E = gl.constexpr(tiles.LOG2_E.value)

DS_SLOTS = gl.constexpr(2)
"""Steps of which dS lies in shared memory: that of the step at hand, and that of the step before, for dQ."""


def adder() -> Any:
    """``tma.async_atomic_add`` of Triton 3.8; before, the operation is there without a name."""
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)

    return async_atomic_add


add_tile = adder()


class Rows(NamedTuple):
    """A ring of tiles of query rows, with one number per row beside them."""

    tiles: Any
    numbers: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """What the partitions share: the keys and values, the rings of query rows, dS by key, a part of dQ each."""

    k: Any
    v: Any
    kv_full: Any
    q: Rows
    """With ``lse``, base 2, +inf of rows that see nothing."""
    dout: Rows
    """With ``-delta``."""
    ds: Ring
    dq: Any


class Place(NamedTuple):
    """Which keys and which tiles of queries this program works on."""

    first: Any
    batch: Any
    head: Any
    start: Any
    end: Any
    steps: Any
    """Tiles of all query heads of the key head, one head after the other."""


@gluon.jit
def rows_of(descriptor, SLOTS: gl.constexpr):
    block: gl.constexpr = descriptor.block_type.shape
    return Rows(
        gl.allocate_shared_memory(descriptor.dtype, [SLOTS] + block, descriptor.layout),  # noqa: RUF005 (jit code takes no star)
        gl.allocate_shared_memory(gl.float32, [SLOTS, block[1]], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(SLOTS, 2),  # the copy engine's bytes, and the numbers
        barriers(SLOTS, CONSUMERS),
    )


@gluon.jit
def shared_of(q, dout, k, v, dq, SLOTS: gl.constexpr):
    keys: gl.constexpr = k.block_type.shape
    part: gl.constexpr = dq.block_type.shape
    by_key: gl.constexpr = [ROWS, q.block_type.shape[1]]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(by_key, k.dtype)
    return Shared(
        gl.allocate_shared_memory(k.dtype, [CONSUMERS] + keys, k.layout),  # noqa: RUF005
        gl.allocate_shared_memory(v.dtype, [CONSUMERS] + keys, v.layout),  # noqa: RUF005
        barriers(1, 1),
        rows_of(q, SLOTS),
        rows_of(dout, SLOTS),
        Ring(
            gl.allocate_shared_memory(k.dtype, [DS_SLOTS * CONSUMERS] + by_key, ds_layout),  # noqa: RUF005
            barriers(DS_SLOTS, CONSUMERS),
            barriers(DS_SLOTS, CONSUMERS),
        ),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS] + part, dq.layout),  # noqa: RUF005
    )


@gluon.jit
def following(head, column, place, BLOCK_Q: gl.constexpr):
    """The tile of queries after this one: of the next head after the last one of a head."""
    last = column + BLOCK_Q >= place.end
    return gl.where(last, head + 1, head), gl.where(last, place.start, column + BLOCK_Q)


@gluon.jit
def numbers_of(lse, delta, place, head, column, shape, BLOCK_Q: gl.constexpr):
    """``lse`` and ``-delta`` of a tile; rows past the end see nothing, as do those whose ``lse`` is -inf."""
    offs = column + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
    inside = offs < shape.columns
    row = (place.batch.to(gl.int64) * shape.heads * shape.group + head) * shape.columns
    lse_tile = gl.load(lse + row + offs, mask=inside, other=float("-inf"))
    delta_tile = gl.load(delta + row + offs, mask=inside, other=0.0)
    return gl.where(lse_tile == float("-inf"), float("inf"), lse_tile * LOG2_E), -delta_tile


@gluon.jit
def fill(rows, descriptor, numbers, step, where, SLOTS: gl.constexpr):
    """Start the load of the tile of ``step``, as soon as both consumers are done with what its slot holds."""
    slot = slot_of(step, SLOTS)
    mbarrier.wait(rows.empty.index(slot), parity_of(step, SLOTS) ^ 1)
    mbarrier.expect(rows.full.index(slot), descriptor.block_type.nbytes)
    load_tile(descriptor, where, rows.full.index(slot), rows.tiles.index(slot))
    rows.numbers.index(slot).store(numbers)
    mbarrier.arrive(rows.full.index(slot), count=1)


@gluon.jit
def producer(shared, place, descriptors, vectors, shape, SLOTS: gl.constexpr):
    """Load K and V, and Q and dO of every step with their numbers."""
    q, dout, k, v = descriptors
    lse, delta = vectors
    BLOCK_Q: gl.constexpr = q.block_type.shape[1]
    mbarrier.expect(shared.kv_full.index(0), 2 * CONSUMERS * k.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        where = [place.batch, place.first + i * ROWS, place.head, 0]
        load_tile(k, where, shared.kv_full.index(0), shared.k.index(i))
        load_tile(v, where, shared.kv_full.index(0), shared.v.index(i))
    head, column = place.head * shape.group, place.start
    for step in range(place.steps):
        lse_tile, delta_tile = numbers_of(lse, delta, place, head, column, shape, BLOCK_Q)
        where = [place.batch, column, head, 0]
        fill(shared.q, q, lse_tile, step, where, SLOTS)
        fill(shared.dout, dout, delta_tile, step, where, SLOTS)
        head, column = following(head, column, place, BLOCK_Q)


@gluon.jit
def keys_of(tiles_of_keys, CONSUMER: gl.constexpr):
    """``[keys, head dim]`` of one consumer, of K or V."""
    tile = tiles_of_keys.index(CONSUMER)
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def put_ds(ring, ds, step, CONSUMER: gl.constexpr):
    """Leave dS ``[keys, queries]`` of a consumer's keys where both consumers read it, once that of its slot is read."""
    slot = slot_of(step, DS_SLOTS)
    mbarrier.wait(ring.empty.index(slot), parity_of(step, DS_SLOTS) ^ 1)
    ring.tiles.index(slot * CONSUMERS + CONSUMER).store(ds)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def add_dq(dq, descriptor, room, where):
    """Add a part of dQ by the copy engine, once it has read the part before."""
    tma.store_wait(0)
    part = room.reshape([room.shape[1], room.shape[3]])
    part.store(dq)
    fence_async_shared()
    add_tile(descriptor, where, room)
