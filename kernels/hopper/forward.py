"""Forward kernel for Hopper (sm_90): TMA loads, two consumer warpgroups, and overlapped matrix products.

The equations are those of ``device/forward.py``. A program has 128 query rows of one head: one warp issues TMA loads,
and two warpgroups compute 64 rows each. Key tiles are visited from the last to the first, so the partial tile comes
before the loop. The overlap is that of FlashAttention-3 (Shah et al., arXiv:2407.08608, sections 3.1 and 3.2)::

    producer warp   K0  K1 V0   K2 V1   K3 V2  ...
    consumer 0      S0 | S1 P0V0 | softmax |  S2 P1V1 | softmax | ...
    consumer 1             softmax | S1 P0V0 | softmax | S2 P1V1 | ...

- Inside a warpgroup, the product S of a tile starts before the product P V of the previous tile, so the softmax of the
  tile overlaps with P V.
- The warpgroups take turns to start products, so the softmax of one overlaps with the products of the other.
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
from . import step_order

LOG2_E = gl.constexpr(tiles.LOG2_E.value)
LN_2 = gl.constexpr(tiles.LN_2.value)
CONSUMERS, CONSUMER_ROWS = gl.constexpr(step_order.CONSUMERS), gl.constexpr(step_order.CONSUMER_ROWS)
PARTITION_WARPS = gl.constexpr([4, 1])  # of consumer 1 and the producer; consumer 0 has the warps of the launch
PARTITION_REGISTERS = gl.constexpr([240, 24])  # per thread of consumer 1 and the producer; consumer 0 gets 240, too

tma_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.8

step_slot, step_parity = gluon.jit(step_order.step_slot), gluon.jit(step_order.step_parity)
step_column, turn_parity = gluon.jit(step_order.step_column), gluon.jit(step_order.turn_parity)
step_phases = gluon.jit(step_order.step_phases)
load_tile_range, select_head, program_placement = tiles.load_tile_range, tiles.select_head, tiles.program_placement


class TileRing(NamedTuple):
    """Ring of tile slots in shared memory, with one barrier for arrival and one for release per slot."""

    tiles: Any
    full: Any
    empty: Any


class ForwardShared(NamedTuple):
    """Shared memory of the forward: query rows, rings of K and V, and the barriers of the consumers' turns."""

    q: Any
    q_full: Any
    k: TileRing
    v: TileRing
    turns: Any


class ProgramRows(NamedTuple):
    """Query rows of a program and the key tiles that it visits."""

    first: Any
    batch: Any
    head: Any
    past: Any
    """One past the last key of the last tile."""
    tail: Any
    """Steps below ``tail`` are masked, because some rows do not see the end of the range."""
    full: Any
    """Steps from ``tail`` to below ``full`` are visible to every row."""
    steps: Any


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate ``COUNT`` barriers that complete a phase after ``ARRIVALS`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def make_tile_ring(descriptor, SLOTS: gl.constexpr):
    block: gl.constexpr = descriptor.block_type.shape
    slots = gl.allocate_shared_memory(descriptor.dtype, [SLOTS] + block, descriptor.layout)  # noqa: RUF005 (jit code has no star)
    return TileRing(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, CONSUMERS))


@gluon.jit
def load_kv_step(ring, descriptor, step, place, head, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Start the TMA load of the tile of ``step`` once both consumers have released its slot."""
    slot = step_slot(step, SLOTS)
    mbarrier.wait(ring.empty.index(slot), step_parity(step, SLOTS) ^ 1)
    mbarrier.expect(ring.full.index(slot), descriptor.block_type.nbytes)
    coords = [place.batch, step_column(step, place.past, BLOCK_K), head, 0]
    tma_load_tile(descriptor, coords, ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def forward_producer(shared, place, descriptors, group, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Load Q, then K and V in the order of the consumers' waits: K of each step before V of the previous step."""
    q, k, v = descriptors
    mbarrier.expect(shared.q_full.index(0), CONSUMERS * q.block_type.nbytes)
    for consumer in gl.static_range(CONSUMERS):
        coords = [place.batch, place.first + consumer * CONSUMER_ROWS, place.head, 0]
        tma_load_tile(q, coords, shared.q_full.index(0), shared.q.index(consumer))
    head = place.head // group
    load_kv_step(shared.k, k, 0, place, head, SLOTS, BLOCK_K)
    for step in range(1, place.steps):
        load_kv_step(shared.k, k, step, place, head, SLOTS, BLOCK_K)
        load_kv_step(shared.v, v, step - 1, place, head, SLOTS, BLOCK_K)
    load_kv_step(shared.v, v, place.steps - 1, place, head, SLOTS, BLOCK_K)


@gluon.jit
def consumer_tile(slots, CONSUMER: gl.constexpr):
    """Return one consumer's rows of Q, K or V in shared memory, ``[rows, head dim]``."""
    tile = slots.index(CONSUMER)
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def wait_tile(ring, step, SLOTS: gl.constexpr):
    """Wait until the tile of ``step`` has arrived."""
    mbarrier.wait(ring.full.index(step_slot(step, SLOTS)), step_parity(step, SLOTS))


@gluon.jit
def step_tile(ring, step, SLOTS: gl.constexpr):
    """Return the tile of ``step`` in shared memory, ``[keys, head dim]``."""
    tile = ring.tiles.index(step_slot(step, SLOTS))
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def release_tile(ring, step, SLOTS: gl.constexpr):
    """Release the slot of ``step``: this warpgroup no longer reads its tile."""
    mbarrier.arrive(ring.empty.index(step_slot(step, SLOTS)), count=1)


@gluon.jit
def wait_turn(turns, CONSUMER: gl.constexpr, turn):
    """Wait until the other consumer has started its products: of this turn (consumer 1) or the last (consumer 0)."""
    mbarrier.wait(turns.index(CONSUMER), turn_parity(turn, CONSUMER))


@gluon.jit
def pass_turn(turns, CONSUMER: gl.constexpr):
    """Let the other consumer start its products."""
    mbarrier.arrive(turns.index(1 - CONSUMER), count=1)


class SoftmaxState(NamedTuple):
    """Online softmax state of a warpgroup's rows: sum of exponentials and pivot (base 2)."""

    l_i: Any
    m_i: Any


class RowScores(NamedTuple):
    """Keys ``lo <= j < hi`` that each row of a warpgroup sees, and the factor that turns scores into exponents of 2."""

    lo: Any
    hi: Any
    unit: Any


@gluon.jit
def hopper_visible_mask(column, offs, rows, BOUNDED: gl.constexpr):
    """Return bool ``[rows, keys]`` of the tile that begins at ``column``: True if the row sees the key."""
    # Shift the bounds, not the keys: with shifted keys, each key of the tile takes a register.
    if BOUNDED:
        return (offs[None, :] >= (rows.lo - column)[:, None]) & (offs[None, :] < (rows.hi - column)[:, None])
    else:
        return (offs < rows.hi - column)[None, :]


@gluon.jit
def online_softmax_step(scores, softmax, unit, mask, MASKED: gl.constexpr):
    """Return p of a tile, the updated softmax state, and the factor alpha of the earlier sums.

    The recurrence is that of ``device/forward.py``.
    """
    if MASKED:
        scores = gl.where(mask, scores, float("-inf"))
    m_new = gl.maximum(softmax.m_i, gl.max(scores, 1) * unit)
    if MASKED:  # keep the pivot finite: a row that has seen no key would compute inf - inf
        pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        pivot = m_new
    p = gl.exp2(scores * unit - pivot[:, None])
    alpha = gl.exp2(softmax.m_i - pivot)
    l_new = softmax.l_i * alpha + gl.sum(p, 1)
    return p, SoftmaxState(l_new, m_new), alpha


@gluon.jit
def hopper_forward_phase(
    acc, p, softmax, shared, place, rows, begin, end,
    CONSUMER: gl.constexpr, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Run the steps ``[begin, end)``: each computes its scores, and the product of the previous ``p`` with V."""
    scores_layout: gl.constexpr = mma_layout(BLOCK_K)
    q = consumer_tile(shared.q, CONSUMER)
    dtype: gl.constexpr = p.dtype
    weights_layout: gl.constexpr = p.type.layout
    for step in range(begin, end):
        wait_tile(shared.k, step, SLOTS)
        k_tile, v_tile = step_tile(shared.k, step, SLOTS), step_tile(shared.v, step - 1, SLOTS)
        wait_turn(shared.turns, CONSUMER, step - 1)
        empty = gl.zeros([CONSUMER_ROWS, BLOCK_K], gl.float32, scores_layout)
        scores = warpgroup_mma(q, k_tile.permute((1, 0)), empty, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_tile, acc, is_async=True)
        pass_turn(shared.turns, CONSUMER)
        scores = warpgroup_mma_wait(1, deps=[scores])
        release_tile(shared.k, step, SLOTS)
        column, offs_k = step_column(step, place.past, BLOCK_K), gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores_layout))
        visible = hopper_visible_mask(column, offs_k, rows, True) if MASKED else None
        p_next, softmax, alpha = online_softmax_step(scores, softmax, rows.unit, visible, MASKED)
        # Wait for V of the next step already here. This branch keeps ptxas from moving the wait for P V up to the
        # beginning of the softmax, as it does in straight-line code.
        wait_tile(shared.v, step, SLOTS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        p = gl.convert_layout(p_next.to(dtype), weights_layout)  # after the wait, because P V reads p's registers
        release_tile(shared.v, step - 1, SLOTS)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p, softmax


@gluon.constexpr_function
def mma_layout(columns):
    """Return the layout of a warpgroup's accumulator: 16 rows per warp, all columns in one instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def tile_pointers(tensor, offs, HEAD_DIM: gl.constexpr, layout: gl.constexpr):
    # 64-bit, because row 262,144 with a stride of 8,192 elements overflows an int32
    rows = gl.convert_layout(offs, gl.SliceLayout(1, layout)).to(gl.int64)
    return tensor.ptr + rows[:, None] * tensor.stride_s + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def store_output(
    acc, softmax, tensors, shape, place, offs, HEAD_DIM: gl.constexpr, HAS_STATE: gl.constexpr,
):  # fmt: skip
    """Divide by the sums, merge with the carried state, and store out and lse."""
    state, out, lse, row_max = tensors
    batch, head = place.batch.to(gl.int64), place.head.to(gl.int64)
    layout: gl.constexpr = acc.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    inside = offs < shape.rows
    lse_pointers = lse + (batch * shape.heads + head) * shape.rows + offs
    if row_max is not None:
        max_pointers = row_max + (batch * shape.heads + head) * shape.rows + offs
        earlier = gl.load(max_pointers, mask=inside, other=float("-inf"))
        tl.debug_barrier()  # updated in place: all threads must have loaded it
        gl.store(max_pointers, gl.maximum(earlier, softmax.m_i * LN_2), mask=inside)
    l_safe = gl.where(softmax.l_i == 0.0, 1.0, softmax.l_i)  # a row that has seen no key gets out = 0, lse = -inf
    new_lse = gl.where(softmax.l_i == 0.0, float("-inf"), (softmax.m_i + gl.log2(l_safe)) * LN_2)
    row_mask = gl.convert_layout(inside, by_row)[:, None]
    if HAS_STATE:
        old_lse = gl.load(lse_pointers, mask=inside, other=float("-inf"))
        pivot = gl.maximum(new_lse, old_lse)
        pivot = gl.where(pivot == float("-inf"), 0.0, pivot)  # a row that has seen no key would compute inf - inf
        new, old = gl.exp2((new_lse - pivot) * LOG2_E), gl.exp2((old_lse - pivot) * LOG2_E)
        total = gl.where(new + old == 0.0, 1.0, new + old)
        new_lse = gl.where(new + old == 0.0, float("-inf"), pivot + gl.log2(total) * LN_2)
        state_pointers = tile_pointers(select_head(state, batch, head), offs, HEAD_DIM, layout)
        carried = gl.load(state_pointers, mask=row_mask, other=0.0)
        acc = acc * gl.convert_layout(new / total / l_safe, by_row)[:, None]
        acc = acc + carried * gl.convert_layout(old / total, by_row)[:, None]
        tl.debug_barrier()  # state and lse may be updated in place: all threads must have loaded them
    else:
        acc = acc / gl.convert_layout(l_safe, by_row)[:, None]
    gl.store(lse_pointers, new_lse, mask=inside)
    out_head = select_head(out, batch, head)
    gl.store(tile_pointers(out_head, offs, HEAD_DIM, layout), acc.to(out_head.ptr.dtype.element_ty), mask=row_mask)


@gluon.jit
def forward_consumer(
    shared, place, tensors, bounds, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_K: gl.constexpr, HAS_STATE: gl.constexpr,
):  # fmt: skip
    """Compute 64 query rows against all visited key tiles, in one warpgroup."""
    BOUNDED: gl.constexpr = bounds.lo is not None
    scores_layout: gl.constexpr = mma_layout(BLOCK_K)
    out_layout: gl.constexpr = mma_layout(HEAD_DIM)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    offs = place.first + CONSUMER * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, scores_layout))
    lo, hi = tiles.load_row_bounds(bounds, offs, shape.rows, shape.columns) if BOUNDED else (0, shape.columns)
    rows = RowScores(lo, hi, softmax_scale * LOG2_E)

    mbarrier.wait(shared.q_full.index(0), 0)
    q = consumer_tile(shared.q, CONSUMER)
    wait_tile(shared.k, 0, SLOTS)
    k_tile = step_tile(shared.k, 0, SLOTS)
    empty = gl.zeros([CONSUMER_ROWS, BLOCK_K], gl.float32, scores_layout)
    scores = warpgroup_mma(q, k_tile.permute((1, 0)), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release_tile(shared.k, 0, SLOTS)
    column, offs_k = step_column(0, place.past, BLOCK_K), gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores_layout))
    visible = hopper_visible_mask(column, offs_k, rows, BOUNDED)
    zeros = gl.zeros([CONSUMER_ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
    softmax = SoftmaxState(zeros, zeros - float("inf"))
    p, softmax, _ = online_softmax_step(scores, softmax, rows.unit, visible, True)
    p = gl.convert_layout(p.to(q.dtype), weights_layout)
    acc = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, out_layout)
    wait_tile(shared.v, 0, SLOTS)
    if BOUNDED:
        acc, p, softmax = hopper_forward_phase(
            acc, p, softmax, shared, place, rows, 1, place.tail, CONSUMER, SLOTS, BLOCK_K, True
        )
    acc, p, softmax = hopper_forward_phase(
        acc, p, softmax, shared, place, rows, place.tail, place.full, CONSUMER, SLOTS, BLOCK_K, False
    )
    if BOUNDED:
        acc, p, softmax = hopper_forward_phase(
            acc, p, softmax, shared, place, rows, place.full, place.steps, CONSUMER, SLOTS, BLOCK_K, True
        )
    v_tile = step_tile(shared.v, place.steps - 1, SLOTS)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_tile, acc, is_async=True)])
    store_output(acc, softmax, tensors, shape, place, offs, HEAD_DIM, HAS_STATE)


@gluon.jit
def hopper_kernel(
    q, k, v, state, out, lse, bounds, shape, softmax_scale, row_max,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, SLOTS: gl.constexpr, HAS_STATE: gl.constexpr,
):  # fmt: skip
    """Compute ``out = softmax(scale * q k^T) v`` and ``lse`` of 128 query rows of one head per program.

    ``q``, ``k`` and ``v`` are TMA descriptors of float16 or bfloat16 tensors; shapes are those of
    ``device.forward.forward_kernel``.
    """
    BLOCK_Q: gl.constexpr = CONSUMERS * CONSUMER_ROWS
    tile, batch, head = program_placement(shape, BLOCK_Q)
    first = (gl.cdiv(shape.rows, BLOCK_Q) - 1 - tile) * BLOCK_Q  # longest first: late rows see most keys
    start, full_start, full_end, end = load_tile_range(bounds, first, shape, BLOCK_Q, BLOCK_K)
    past, tail, full, count = step_phases(start, full_start, full_end, end, shape.columns, BLOCK_K)
    place = ProgramRows(first, batch.to(gl.int32), head.to(gl.int32), past, tail, full, count)
    block: gl.constexpr = q.block_type.shape
    shared = ForwardShared(
        gl.allocate_shared_memory(q.dtype, [CONSUMERS] + block, q.layout),  # noqa: RUF005 (jit code has no star)
        make_barriers(1, 1),
        make_tile_ring(k, SLOTS),
        make_tile_ring(v, SLOTS),
        make_barriers(CONSUMERS, 1),
    )
    fence_async_shared()  # TMA must see the initialised barriers
    tensors = (state, out, lse, row_max)
    gl.warp_specialize(
        [
            (forward_consumer, (shared, place, tensors, bounds, shape, softmax_scale,
                        0, HEAD_DIM, SLOTS, BLOCK_K, HAS_STATE)),
            (forward_consumer, (shared, place, tensors, bounds, shape, softmax_scale,
                        1, HEAD_DIM, SLOTS, BLOCK_K, HAS_STATE)),
            (forward_producer, (shared, place, (q, k, v), shape.group, SLOTS, BLOCK_K)),
        ],
        PARTITION_WARPS,
        PARTITION_REGISTERS,
    )  # fmt: skip
