"""Single-pass backward kernel for Hopper (sm_90): TMA loads and additions, two consumer warpgroups.

The equations are those of ``device/backward.py``, and the structure is that of FlashAttention-3 (Shah et al.,
arXiv:2407.08608, appendix B.1). A program has 128 keys of one key head. One warp issues TMA loads. Two warpgroups keep
dK and dV of 64 keys each in registers and loop over the queries.

- Scores are computed transposed, ``S^T = K Q^T``, so P and dS are in registers in the layout that dV and dK need.
- dQ is a sum over all 128 keys. Each warpgroup stores its dS in shared memory and multiplies the dS of both by K for
  one half of the dQ tile, which TMA adds to global memory.
- dQ of a step is computed one step later. A warpgroup then waits for the other one only if that is more than half a
  step behind, so the exponentials of one overlap with the products of the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..device import tiles
from .forward import (
    CONSUMERS,
    LOG2_E,
    REGISTERS,
    ROWS,
    WARPS,
    Ring,
    barriers,
    load_tile,
    mma_layout,
    parity_of,
    pointers,
    release,
    slot_of,
    tile_of,
    wait_full,
)

OWN = gl.constexpr(6)  # bits of a column index that differ between the four threads of a row; each has pairs of columns
DS_SLOTS = gl.constexpr(2)
"""Number of steps whose dS is in shared memory: the current step, and the previous one for dQ."""


def adder() -> Any:
    """Return ``tma.async_atomic_add`` of Triton 3.8; older versions have the operation but no function for it."""
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
tile_range, of_head, program = tiles.tile_range, tiles.of_head, tiles.program


class Rows(NamedTuple):
    """Ring of tiles of query rows, with one value per row (lse or delta) and the barriers of the slots."""

    tiles: Any
    numbers: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """Shared memory of the backward: K and V, rings of Q and dO, dS by key, and one part of dQ per consumer."""

    k: Any
    v: Any
    kv_full: Any
    q: Rows
    """Ring of Q with ``lse`` in base 2, +inf for rows that see no key."""
    dout: Rows
    """Ring of dO with ``-delta``."""
    ds: Ring
    dq: Any


class ProgramKeys(NamedTuple):
    """Keys of a program and the query tiles that it visits."""

    first: Any
    batch: Any
    head: Any
    start: Any
    end: Any
    steps: Any
    """Query tiles of all query heads of the key head, one head after another."""


@gluon.jit
def rows_of(descriptor, SLOTS: gl.constexpr):
    block: gl.constexpr = descriptor.block_type.shape
    return Rows(
        gl.allocate_shared_memory(descriptor.dtype, [SLOTS] + block, descriptor.layout),  # noqa: RUF005 (jit code has no star)
        gl.allocate_shared_memory(gl.float32, [SLOTS, block[1]], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(SLOTS, 2),  # arrivals: the TMA load and the row values
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
    """Return head and column of the next query tile, which is in the next head after the last tile of a head."""
    last = column + BLOCK_Q >= place.end
    return gl.where(last, head + 1, head), gl.where(last, place.start, column + BLOCK_Q)


@gluon.jit
def numbers_of(lse, delta, place, head, column, shape, BLOCK_Q: gl.constexpr):
    """Load ``lse`` (base 2) and ``-delta`` of a tile; lse is +inf for rows past the end or without visible keys."""
    offs = column + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
    inside = offs < shape.columns
    row = (place.batch.to(gl.int64) * shape.heads * shape.group + head) * shape.columns
    lse_tile = gl.load(lse + row + offs, mask=inside, other=float("-inf"))
    delta_tile = gl.load(delta + row + offs, mask=inside, other=0.0)
    return gl.where(lse_tile == float("-inf"), float("inf"), lse_tile * LOG2_E), -delta_tile


@gluon.jit
def fill(rows, descriptor, numbers, step, where, SLOTS: gl.constexpr):
    """Start the TMA load of the tile of ``step`` and store its row values, once its slot is released."""
    slot = slot_of(step, SLOTS)
    mbarrier.wait(rows.empty.index(slot), parity_of(step, SLOTS) ^ 1)
    mbarrier.expect(rows.full.index(slot), descriptor.block_type.nbytes)
    load_tile(descriptor, where, rows.full.index(slot), rows.tiles.index(slot))
    rows.numbers.index(slot).store(numbers)
    mbarrier.arrive(rows.full.index(slot), count=1)


@gluon.jit
def producer(shared, place, descriptors, vectors, shape, SLOTS: gl.constexpr):
    """Load K and V, then Q and dO of every step with their row values."""
    q, dout, k, v = descriptors
    lse, delta = vectors
    BLOCK_Q: gl.constexpr = q.block_type.shape[1]
    mbarrier.expect(shared.kv_full.index(0), 2 * CONSUMERS * k.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        coords = [place.batch, place.first + i * ROWS, place.head, 0]
        load_tile(k, coords, shared.kv_full.index(0), shared.k.index(i))
        load_tile(v, coords, shared.kv_full.index(0), shared.v.index(i))
    head, column = place.head * shape.group, place.start
    for step in range(place.steps):
        lse_tile, delta_tile = numbers_of(lse, delta, place, head, column, shape, BLOCK_Q)
        coords = [place.batch, column, head, 0]
        fill(shared.q, q, lse_tile, step, coords, SLOTS)
        fill(shared.dout, dout, delta_tile, step, coords, SLOTS)
        head, column = following(head, column, place, BLOCK_Q)


@gluon.jit
def keys_of(tiles_of_keys, CONSUMER: gl.constexpr):
    """Return one consumer's part of K or V, ``[keys, head dim]``."""
    tile = tiles_of_keys.index(CONSUMER)
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def put_ds(ring, ds, step, CONSUMER: gl.constexpr):
    """Store dS ``[keys, queries]`` of a consumer's keys in shared memory, once both consumers have read the slot."""
    slot = slot_of(step, DS_SLOTS)
    mbarrier.wait(ring.empty.index(slot), parity_of(step, DS_SLOTS) ^ 1)
    ring.tiles.index(slot * CONSUMERS + CONSUMER).store(ds)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def add_dq(dq, descriptor, room, where):
    """Add a part of dQ to global memory by TMA, once TMA has read the previous part from shared memory."""
    tma.store_wait(0)
    part = room.reshape([room.shape[1], room.shape[3]])
    part.store(dq)
    fence_async_shared()
    add_tile(descriptor, where, room)


class Seen(NamedTuple):
    """Queries ``lo <= i < hi`` that see each key, shifted by the column bits that :func:`visible` ignores."""

    lo: Any
    hi: Any


@gluon.jit
def seen_of(bounds, offs, shape, MASKED: gl.constexpr, layout: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Load the bounds of the keys ``offs``; no query sees a key past the end."""
    if not MASKED:
        return Seen(0, 0)
    else:
        inside = offs < shape.rows
        if bounds.lo is not None:
            lo = gl.load(bounds.lo + offs, mask=inside, other=0)
            hi = gl.load(bounds.hi + offs, mask=inside, other=0)
        else:
            lo, hi = offs * 0, gl.where(inside, shape.columns, 0)
        own = (gl.arange(0, BLOCK_Q, gl.SliceLayout(0, layout)) & OWN)[None, :]
        return Seen(lo[:, None] - own, hi[:, None] - own)


@gluon.jit
def visible(seen, column, offs):
    """Return bool ``[keys, queries]`` of the tile that begins at ``column``: True if the query sees the key.

    `seen_of` has already subtracted the bits of ``offs`` that differ between threads, because a thread has only two
    rows of bounds but sixteen columns. The rest of ``offs`` is a compile-time constant.
    """
    offs = (offs & ~OWN)[None, :]
    return (offs >= seen.lo - column) & (offs < seen.hi - column)


@gluon.jit
def weights(shared, k, v, step, column, seen, unit, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr):
    """Return ``P = exp(S - lse)`` and ``dS = P * (V dO^T - delta)`` of this consumer's keys, ``[keys, queries]``."""
    layout: gl.constexpr = mma_layout(BLOCK_Q)
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    empty = gl.zeros([ROWS, BLOCK_Q], gl.float32, layout)
    slot = slot_of(step, SLOTS)
    wait_full(shared.q, step, SLOTS)
    q = tile_of(shared.q, step, SLOTS)
    scores = warpgroup_mma(k, q.permute((1, 0)), empty, use_acc=False, is_async=True)
    wait_full(shared.dout, step, SLOTS)
    dout = tile_of(shared.dout, step, SLOTS)
    minus_delta = shared.dout.numbers.index(slot).load(by_query)
    # start the accumulator at -delta, which saves its registers
    dp = warpgroup_mma(v, dout.permute((1, 0)), empty + minus_delta[None, :], is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = shared.q.numbers.index(slot).load(by_query)  # loaded late to save registers
    p = gl.exp2(scores * unit - lse[None, :])
    if MASKED:
        p = gl.where(visible(seen, column, gl.arange(0, BLOCK_Q, by_query)), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    return p, p * dp


@gluon.jit
def start_dq(shared, step, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Start ``dS K`` over all keys for this consumer's part of dQ, 64 x 64.

    The part is half of the columns of 64 queries (head dim 128), or half of the rows of 128 queries (head dim 64).
    """
    wait_full(shared.ds, step, DS_SLOTS)
    slot = slot_of(step, DS_SLOTS)
    dq = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS))
    for i in gl.static_range(CONSUMERS):
        ds = shared.ds.tiles.index(slot * CONSUMERS + i).slice(CONSUMER * (BLOCK_Q - ROWS), ROWS, 1)
        k = keys_of(shared.k, i).slice(CONSUMER * (HEAD_DIM - ROWS), ROWS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def walk(
    dk, dv, shared, place, dq_sum, seen, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Loop over all query tiles: return dK (unscaled) and dV of this consumer's keys, and add its part of dQ."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_layout(HEAD_DIM), 2)
    ROW: gl.constexpr = CONSUMER * (BLOCK_Q - ROWS)
    COLUMN: gl.constexpr = CONSUMER * (HEAD_DIM - ROWS)
    unit = softmax_scale * LOG2_E
    k, v, staging = keys_of(shared.k, CONSUMER), keys_of(shared.v, CONSUMER), shared.dq.index(CONSUMER)
    dtype: gl.constexpr = k.dtype
    head, column = place.head * shape.group, place.start
    # Start with dS = 0, so that the first step is like all others. Its dQ is written past the end, where TMA drops it.
    put_ds(shared.ds, gl.zeros([ROWS, BLOCK_Q], dtype, mma_layout(BLOCK_Q)), 0, CONSUMER)
    last_head, last_column = head, shape.columns
    for step in range(place.steps):
        p, ds = weights(shared, k, v, step, column, seen, unit, SLOTS, BLOCK_Q, MASKED)
        ds = ds.to(dtype)
        q, dout = tile_of(shared.q, step, SLOTS), tile_of(shared.dout, step, SLOTS)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), dout, dv, is_async=True)
        put_ds(shared.ds, ds, step + 1, CONSUMER)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        dq = start_dq(shared, step, CONSUMER, HEAD_DIM, BLOCK_Q)
        dk, dv = warpgroup_mma_wait(CONSUMERS, deps=[dk, dv])  # all products but those of dQ
        release(shared.q, step, SLOTS)
        release(shared.dout, step, SLOTS)
        dq = warpgroup_mma_wait(0, deps=[dq])
        release(shared.ds, step, DS_SLOTS)
        add_dq(dq * softmax_scale, dq_sum, staging, [place.batch, last_column + ROW, last_head, COLUMN])
        last_head, last_column = head, column
        head, column = following(head, column, place, BLOCK_Q)
    dq = warpgroup_mma_wait(0, deps=[start_dq(shared, place.steps, CONSUMER, HEAD_DIM, BLOCK_Q)])
    add_dq(dq * softmax_scale, dq_sum, staging, [place.batch, last_column + ROW, last_head, COLUMN])
    return dk, dv


@gluon.jit
def consumer(
    shared, place, dq_sum, tensors, bounds, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr,
    HAS_SUM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys over all visited query tiles, in one warpgroup."""
    dk_in, dv_in, dk_out, dv_out = tensors
    MASKED: gl.constexpr = RAGGED or bounds.lo is not None
    layout: gl.constexpr = mma_layout(BLOCK_Q)
    offs = place.first + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    seen = seen_of(bounds, offs, shape, MASKED, layout, BLOCK_Q)
    mbarrier.wait(shared.kv_full.index(0), 0)
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, mma_layout(HEAD_DIM))
    dk, dv = walk(
        zeros, zeros, shared, place, dq_sum, seen, shape, softmax_scale,
        CONSUMER, HEAD_DIM, SLOTS, BLOCK_Q, MASKED,
    )  # fmt: skip
    first = place.first + CONSUMER * ROWS
    finish(dk * softmax_scale, dk_in, dk_out, place, first, shape, HEAD_DIM, HAS_SUM)
    finish(dv, dv_in, dv_out, place, first, shape, HEAD_DIM, HAS_SUM)
    tma.store_wait(0)  # keep shared memory alive until TMA has read it


@gluon.jit
def finish(acc, before, out, place, first, shape, HEAD_DIM: gl.constexpr, HAS_SUM: gl.constexpr):
    """Store dK or dV of the keys from ``first``, plus ``before`` if HAS_SUM."""
    layout: gl.constexpr = acc.type.layout
    offs = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = (offs < shape.rows)[:, None]
    batch, head = place.batch.to(gl.int64), place.head.to(gl.int64)
    if HAS_SUM:  # load the sum last, because the loop needs the registers
        acc = acc + gl.load(pointers(of_head(before, batch, head), offs, HEAD_DIM, layout), mask=inside, other=0.0)
    out_head = of_head(out, batch, head)
    gl.store(pointers(out_head, offs, HEAD_DIM, layout), acc.to(out_head.ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["group"])  # specialised to 1, the kernel spills
def hopper_backward_kernel(
    dout, q, k, v, dq, lse, delta, dk_in, dv_in, dk_out, dv_out, bounds, shape, group, softmax_scale,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, SLOTS: gl.constexpr,
    HAS_SUM: gl.constexpr, IN_PLACE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 128 keys of one key head per program, and add their part of dQ.

    ``dout``, ``q``, ``k``, ``v`` (float16 or bfloat16) and ``dq`` (fp32) are TMA descriptors. Shapes are those of
    ``device/backward.py``.
    """
    BLOCK_K: gl.constexpr = CONSUMERS * ROWS
    shape = tiles.Shape(shape.rows, shape.columns, shape.heads, group, shape.order, None, None)
    tile, batch, head = program(shape, BLOCK_K)
    start, _, _, end = tile_range(bounds, tile * BLOCK_K, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE:
        if end <= start:  # nothing to add
            return
    steps = (end - start) // BLOCK_Q * shape.group
    place = ProgramKeys(tile * BLOCK_K, batch.to(gl.int32), head.to(gl.int32), start, end, steps)
    shared = shared_of(q, dout, k, v, dq, SLOTS)
    fence_async_shared()  # TMA must see the initialised barriers
    tensors = (dk_in, dv_in, dk_out, dv_out)
    gl.warp_specialize(
        [
            (consumer, (shared, place, dq, tensors, bounds, shape, softmax_scale,
                        0, HEAD_DIM, SLOTS, BLOCK_Q, HAS_SUM, RAGGED)),
            (consumer, (shared, place, dq, tensors, bounds, shape, softmax_scale,
                        1, HEAD_DIM, SLOTS, BLOCK_Q, HAS_SUM, RAGGED)),
            (producer, (shared, place, (q, dout, k, v), (lse, delta), shape, SLOTS)),
        ],
        WARPS,
        REGISTERS,
    )  # fmt: skip
