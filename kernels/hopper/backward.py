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

from triton import language as tl
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
    CONSUMER_ROWS,
    CONSUMERS,
    LOG2_E,
    PARTITION_REGISTERS,
    PARTITION_WARPS,
    TileRing,
    consumer_tile,
    make_barriers,
    mma_layout,
    release_tile,
    step_parity,
    step_slot,
    step_tile,
    tile_pointers,
    tma_load_tile,
    wait_tile,
)

THREAD_COLUMN_BITS = gl.constexpr(6)  # column bits that differ between the four threads of a row; each has pairs
DS_SLOTS = gl.constexpr(2)
"""Number of steps whose dS is in shared memory: the current step, and the previous one for dQ."""


def find_tma_add() -> Any:
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


tma_add_tile = find_tma_add()
load_tile_range, select_head, program_placement = tiles.load_tile_range, tiles.select_head, tiles.program_placement


class QueryRing(NamedTuple):
    """Ring of tiles of query rows, with one value per row (lse or delta) and the barriers of the slots."""

    tiles: Any
    row_values: Any
    full: Any
    empty: Any


class BackwardShared(NamedTuple):
    """Shared memory of the backward: K and V, rings of Q and dO, dS by key, and one part of dQ per consumer."""

    k: Any
    v: Any
    kv_full: Any
    q: QueryRing
    """Ring of Q with ``lse`` in base 2, +inf for rows that see no key."""
    dout: QueryRing
    """Ring of dO with ``-delta``."""
    ds: TileRing
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
def make_query_ring(descriptor, SLOTS: gl.constexpr):
    block: gl.constexpr = descriptor.block_type.shape
    return QueryRing(
        gl.allocate_shared_memory(descriptor.dtype, [SLOTS] + block, descriptor.layout),  # noqa: RUF005 (jit code has no star)
        gl.allocate_shared_memory(gl.float32, [SLOTS, block[1]], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        make_barriers(SLOTS, 2),  # arrivals: the TMA load and the row values
        make_barriers(SLOTS, CONSUMERS),
    )


@gluon.jit
def make_backward_shared(q, dout, k, v, dq, SLOTS: gl.constexpr):
    keys: gl.constexpr = k.block_type.shape
    part: gl.constexpr = dq.block_type.shape
    by_key: gl.constexpr = [CONSUMER_ROWS, q.block_type.shape[1]]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(by_key, k.dtype)
    return BackwardShared(
        gl.allocate_shared_memory(k.dtype, [CONSUMERS] + keys, k.layout),  # noqa: RUF005
        gl.allocate_shared_memory(v.dtype, [CONSUMERS] + keys, v.layout),  # noqa: RUF005
        make_barriers(1, 1),
        make_query_ring(q, SLOTS),
        make_query_ring(dout, SLOTS),
        TileRing(
            gl.allocate_shared_memory(k.dtype, [DS_SLOTS * CONSUMERS] + by_key, ds_layout),  # noqa: RUF005
            make_barriers(DS_SLOTS, CONSUMERS),
            make_barriers(DS_SLOTS, CONSUMERS),
        ),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS] + part, dq.layout),  # noqa: RUF005
    )


@gluon.jit
def next_query_tile(head, column, place, BLOCK_Q: gl.constexpr):
    """Return head and column of the next query tile, which is in the next head after the last tile of a head."""
    last = column + BLOCK_Q >= place.end
    return gl.where(last, head + 1, head), gl.where(last, place.start, column + BLOCK_Q)


@gluon.jit
def load_lse_and_delta(lse, delta, place, head, column, shape, BLOCK_Q: gl.constexpr):
    """Load ``lse`` (base 2) and ``-delta`` of a tile; lse is +inf for rows past the end or without visible keys."""
    offs = column + gl.arange(0, BLOCK_Q, gl.BlockedLayout([BLOCK_Q // 32], [32], [1], [0]))
    inside = offs < shape.columns
    row = (place.batch.to(gl.int64) * shape.heads * shape.group + head) * shape.columns
    lse_tile = gl.load(lse + row + offs, mask=inside, other=float("-inf"))
    delta_tile = gl.load(delta + row + offs, mask=inside, other=0.0)
    return gl.where(lse_tile == float("-inf"), float("inf"), lse_tile * LOG2_E), -delta_tile


@gluon.jit
def load_query_step(rows, descriptor, row_values, step, coords, SLOTS: gl.constexpr):
    """Start the TMA load of the tile of ``step`` and store its row values, once its slot is released."""
    slot = step_slot(step, SLOTS)
    mbarrier.wait(rows.empty.index(slot), step_parity(step, SLOTS) ^ 1)
    mbarrier.expect(rows.full.index(slot), descriptor.block_type.nbytes)
    tma_load_tile(descriptor, coords, rows.full.index(slot), rows.tiles.index(slot))
    rows.row_values.index(slot).store(row_values)
    mbarrier.arrive(rows.full.index(slot), count=1)


@gluon.jit
def backward_producer(shared, place, descriptors, vectors, shape, SLOTS: gl.constexpr):
    """Load K and V, then Q and dO of every step with their row values."""
    q, dout, k, v = descriptors
    lse, delta = vectors
    BLOCK_Q: gl.constexpr = q.block_type.shape[1]
    mbarrier.expect(shared.kv_full.index(0), 2 * CONSUMERS * k.block_type.nbytes)
    for i in gl.static_range(CONSUMERS):
        coords = [place.batch, place.first + i * CONSUMER_ROWS, place.head, 0]
        tma_load_tile(k, coords, shared.kv_full.index(0), shared.k.index(i))
        tma_load_tile(v, coords, shared.kv_full.index(0), shared.v.index(i))
    head, column = place.head * shape.group, place.start
    for step in range(place.steps):
        lse_tile, delta_tile = load_lse_and_delta(lse, delta, place, head, column, shape, BLOCK_Q)
        coords = [place.batch, column, head, 0]
        load_query_step(shared.q, q, lse_tile, step, coords, SLOTS)
        load_query_step(shared.dout, dout, delta_tile, step, coords, SLOTS)
        head, column = next_query_tile(head, column, place, BLOCK_Q)


@gluon.jit
def store_ds(ring, ds, step, CONSUMER: gl.constexpr):
    """Store dS ``[keys, queries]`` of a consumer's keys in shared memory, once both consumers have read the slot."""
    slot = step_slot(step, DS_SLOTS)
    mbarrier.wait(ring.empty.index(slot), step_parity(step, DS_SLOTS) ^ 1)
    ring.tiles.index(slot * CONSUMERS + CONSUMER).store(ds)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def tma_add_dq(dq, descriptor, staging, coords):
    """Add a part of dQ to global memory by TMA, once TMA has read the previous part from shared memory."""
    tma.store_wait(0)
    part = staging.reshape([staging.shape[1], staging.shape[3]])
    part.store(dq)
    fence_async_shared()
    tma_add_tile(descriptor, coords, staging)


class KeyBounds(NamedTuple):
    """Queries ``lo <= i < hi`` that see each key, shifted by the column bits that :func:`key_visible_mask` ignores."""

    lo: Any
    hi: Any


@gluon.jit
def load_key_bounds(bounds, offs, shape, MASKED: gl.constexpr, layout: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Load the bounds of the keys ``offs``; no query sees a key past the end."""
    if not MASKED:
        return KeyBounds(0, 0)
    else:
        lo, hi = tiles.load_row_bounds(bounds, offs, shape.rows, shape.columns)
        own = (gl.arange(0, BLOCK_Q, gl.SliceLayout(0, layout)) & THREAD_COLUMN_BITS)[None, :]
        return KeyBounds(lo[:, None] - own, hi[:, None] - own)


@gluon.jit
def key_visible_mask(bounds, column, offs):
    """Return bool ``[keys, queries]`` of the tile that begins at ``column``: True if the query sees the key.

    `load_key_bounds` has already subtracted the bits of ``offs`` that differ between threads, because a thread has only
    two rows of bounds but sixteen columns. The rest of ``offs`` is a compile-time constant.
    """
    offs = (offs & ~THREAD_COLUMN_BITS)[None, :]
    return (offs >= bounds.lo - column) & (offs < bounds.hi - column)


@gluon.jit
def compute_p_ds(
    shared, k, v, step, column, bounds, unit, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr
):
    """Return ``P = exp(S - lse)`` and ``dS = P * (V dO^T - delta)`` of this consumer's keys, ``[keys, queries]``."""
    layout: gl.constexpr = mma_layout(BLOCK_Q)
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    empty = gl.zeros([CONSUMER_ROWS, BLOCK_Q], gl.float32, layout)
    slot = step_slot(step, SLOTS)
    wait_tile(shared.q, step, SLOTS)
    q = step_tile(shared.q, step, SLOTS)
    scores = warpgroup_mma(k, q.permute((1, 0)), empty, use_acc=False, is_async=True)
    wait_tile(shared.dout, step, SLOTS)
    dout = step_tile(shared.dout, step, SLOTS)
    minus_delta = shared.dout.row_values.index(slot).load(by_query)
    # start the accumulator at -delta, which saves its registers
    dp = warpgroup_mma(v, dout.permute((1, 0)), empty + minus_delta[None, :], is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = shared.q.row_values.index(slot).load(by_query)  # loaded late to save registers
    p = gl.exp2(scores * unit - lse[None, :])
    if MASKED:
        p = gl.where(key_visible_mask(bounds, column, gl.arange(0, BLOCK_Q, by_query)), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    return p, p * dp


@gluon.jit
def start_dq(shared, step, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Start ``dS K`` over all keys for this consumer's part of dQ, 64 x 64.

    The part is half of the columns of 64 queries (head dim 128), or half of the rows of 128 queries (head dim 64).
    """
    wait_tile(shared.ds, step, DS_SLOTS)
    slot = step_slot(step, DS_SLOTS)
    dq = gl.zeros([CONSUMER_ROWS, CONSUMER_ROWS], gl.float32, mma_layout(CONSUMER_ROWS))
    for i in gl.static_range(CONSUMERS):
        ds = shared.ds.tiles.index(slot * CONSUMERS + i).slice(CONSUMER * (BLOCK_Q - CONSUMER_ROWS), CONSUMER_ROWS, 1)
        k = consumer_tile(shared.k, i).slice(CONSUMER * (HEAD_DIM - CONSUMER_ROWS), CONSUMER_ROWS, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def loop_query_tiles(
    shared, place, dq_sum, bounds, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Loop over all query tiles: return dK (unscaled) and dV of this consumer's keys, and add its part of dQ."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_layout(HEAD_DIM), 2)
    zeros = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, mma_layout(HEAD_DIM))
    dk, dv = zeros, zeros
    ROW: gl.constexpr = CONSUMER * (BLOCK_Q - CONSUMER_ROWS)
    COLUMN: gl.constexpr = CONSUMER * (HEAD_DIM - CONSUMER_ROWS)
    unit = softmax_scale * LOG2_E
    k, v, staging = consumer_tile(shared.k, CONSUMER), consumer_tile(shared.v, CONSUMER), shared.dq.index(CONSUMER)
    dtype: gl.constexpr = k.dtype
    head, column = place.head * shape.group, place.start
    # Start with dS = 0, so that the first step is like all others. Its dQ is written past the end, where TMA drops it.
    store_ds(shared.ds, gl.zeros([CONSUMER_ROWS, BLOCK_Q], dtype, mma_layout(BLOCK_Q)), 0, CONSUMER)
    last_head, last_column = head, shape.columns
    for step in range(place.steps):
        p, ds = compute_p_ds(shared, k, v, step, column, bounds, unit, SLOTS, BLOCK_Q, MASKED)
        ds = ds.to(dtype)
        q, dout = step_tile(shared.q, step, SLOTS), step_tile(shared.dout, step, SLOTS)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), dout, dv, is_async=True)
        store_ds(shared.ds, ds, step + 1, CONSUMER)
        dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        dq = start_dq(shared, step, CONSUMER, HEAD_DIM, BLOCK_Q)
        dk, dv = warpgroup_mma_wait(CONSUMERS, deps=[dk, dv])  # all products but those of dQ
        release_tile(shared.q, step, SLOTS)
        release_tile(shared.dout, step, SLOTS)
        dq = warpgroup_mma_wait(0, deps=[dq])
        release_tile(shared.ds, step, DS_SLOTS)
        tma_add_dq(dq * softmax_scale, dq_sum, staging, [place.batch, last_column + ROW, last_head, COLUMN])
        last_head, last_column = head, column
        head, column = next_query_tile(head, column, place, BLOCK_Q)
    dq = warpgroup_mma_wait(0, deps=[start_dq(shared, place.steps, CONSUMER, HEAD_DIM, BLOCK_Q)])
    tma_add_dq(dq * softmax_scale, dq_sum, staging, [place.batch, last_column + ROW, last_head, COLUMN])
    return dk, dv


@gluon.jit
def backward_consumer(
    shared, place, gradients, bounds, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr,
    HAS_SUM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys over all visited query tiles, in one warpgroup."""
    MASKED: gl.constexpr = RAGGED or bounds.lo is not None
    layout: gl.constexpr = mma_layout(BLOCK_Q)
    offs = place.first + CONSUMER * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, layout))
    seen = load_key_bounds(bounds, offs, shape, MASKED, layout, BLOCK_Q)
    mbarrier.wait(shared.kv_full.index(0), 0)
    dk, dv = loop_query_tiles(
        shared, place, gradients.dq_box, seen, shape, softmax_scale, CONSUMER, HEAD_DIM, SLOTS, BLOCK_Q, MASKED
    )
    first = place.first + CONSUMER * CONSUMER_ROWS
    store_dk_or_dv(dk * softmax_scale, gradients.dk_in, gradients.dk_out, place, first, shape, HEAD_DIM, HAS_SUM)
    store_dk_or_dv(dv, gradients.dv_in, gradients.dv_out, place, first, shape, HEAD_DIM, HAS_SUM)
    tma.store_wait(0)  # keep shared memory alive until TMA has read it


@gluon.jit
def store_dk_or_dv(acc, accum, out, place, first, shape, HEAD_DIM: gl.constexpr, HAS_SUM: gl.constexpr):
    """Store dK or dV of the keys from ``first``, plus ``accum`` if HAS_SUM."""
    layout: gl.constexpr = acc.type.layout
    offs = first + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, layout))
    inside = (offs < shape.rows)[:, None]
    batch, head = place.batch.to(gl.int64), place.head.to(gl.int64)
    if HAS_SUM:  # load the sum last, because the loop needs the registers
        sum_pointers = tile_pointers(select_head(accum, batch, head), offs, HEAD_DIM, layout)
        acc = acc + gl.load(sum_pointers, mask=inside, other=0.0)
        tl.debug_barrier()  # accum may be out: all threads must have loaded it
    out_head = select_head(out, batch, head)
    gl.store(tile_pointers(out_head, offs, HEAD_DIM, layout), acc.to(out_head.ptr.dtype.element_ty), mask=inside)


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
    BLOCK_K: gl.constexpr = CONSUMERS * CONSUMER_ROWS
    shape = tiles.LaunchShape(shape.rows, shape.columns, shape.heads, group, shape.order, None, None)
    tile, batch, head = program_placement(shape, BLOCK_K)
    start, _, _, end = load_tile_range(bounds, tile * BLOCK_K, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE and end <= start:  # nothing to add
        return
    steps = (end - start) // BLOCK_Q * shape.group
    place = ProgramKeys(tile * BLOCK_K, batch.to(gl.int32), head.to(gl.int32), start, end, steps)
    shared = make_backward_shared(q, dout, k, v, dq, SLOTS)
    fence_async_shared()  # TMA must see the initialised barriers
    gradients = tiles.Gradients(None, dq, None, dk_in, dv_in, dk_out, dv_out)
    gl.warp_specialize(
        [
            (backward_consumer, (shared, place, gradients, bounds, shape, softmax_scale,
                        0, HEAD_DIM, SLOTS, BLOCK_Q, HAS_SUM, RAGGED)),
            (backward_consumer, (shared, place, gradients, bounds, shape, softmax_scale,
                        1, HEAD_DIM, SLOTS, BLOCK_Q, HAS_SUM, RAGGED)),
            (backward_producer, (shared, place, (q, dout, k, v), (lse, delta), shape, SLOTS)),
        ],
        PARTITION_WARPS,
        PARTITION_REGISTERS,
    )  # fmt: skip
