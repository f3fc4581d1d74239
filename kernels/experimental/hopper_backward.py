"""dQ, dK and dV in a single pass for Hopper (sm_90): the copy engine both ways, two consumer warpgroups.

One program is 128 keys of one key head: a warp that only starts TMA loads, and two warpgroups of 64 keys, which keep dK
and dV of theirs in registers and walk over the queries (FlashAttention-3, Shah et al., arXiv:2407.08608, appendix B.1).
Scores are made by key, ``S^T = K Q^T``, so that the weights are in registers as dV and dK want them. dQ is a sum over
all 128 keys: each warpgroup leaves its dS in shared memory and multiplies that of both with K for one half of the tile
of dQ, which the copy engine adds to global memory. It does so a step later, and so waits for the other warpgroup only
where that one is more than half a step behind: the exponentials of one run under the products of the other.
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
from .hopper import mma_layout, pointers
from .hopper_backward_ring import (
    DS_SLOTS,
    Place,
    add_dq,
    following,
    keys_of,
    producer,
    put_ds,
    shared_of,
)
from .hopper_ring import CONSUMERS, ROWS, release, slot_of, tile_of, wait_full

LOG2_E = gl.constexpr(tiles.LOG2_E.value)
WARPS = gl.constexpr([4, 1])  # of the second consumer and the producer; the first consumer has the launch's
OWN = gl.constexpr(6)  # bits of a column that tell the threads of a row apart: pairs of columns, four threads
REGISTERS = gl.constexpr([240, 24])  # per thread of these; the first consumer gets what is left of 3 * 168, 240 too

tile_range, of_head, program = tiles.tile_range, tiles.of_head, tiles.program


class Seen(NamedTuple):
    """By key: the queries ``lo <= i < hi`` see it; each less what :func:`visible` leaves out."""

    lo: Any
    hi: Any


@gluon.jit
def seen_of(bounds, offs, shape, MASKED: gl.constexpr, layout: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Of the keys ``offs``; those past the end are seen by nobody."""
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
    """[keys, queries] of the tile that begins at ``column``: whether the query sees the key.

    The part of ``offs`` that is a thread's own is on the other side already, where a thread has two rows and not
    sixteen columns: what is left of it is a constant.
    """
    offs = (offs & ~OWN)[None, :]
    return (offs >= seen.lo - column) & (offs < seen.hi - column)


@gluon.jit
def weights(shared, k, v, step, column, seen, unit, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr):
    """(P, dS), ``[keys, queries]`` of this consumer's keys: ``P = exp(S - lse)``, ``dS = P * (V dO^T - delta)``."""
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
    # the accumulator starts from -delta: as many registers fewer
    dp = warpgroup_mma(v, dout.permute((1, 0)), empty + minus_delta[None, :], is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = shared.q.numbers.index(slot).load(by_query)  # only now, as for the registers
    p = gl.exp2(scores * unit - lse[None, :])
    if MASKED:
        p = gl.where(visible(seen, column, gl.arange(0, BLOCK_Q, by_query)), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    return p, p * dp


@gluon.jit
def start_dq(shared, step, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Start ``dS K`` of all keys for this consumer's part of dQ: 64 by 64, columns of 64 rows or rows of 64 columns."""
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
    """Over all tiles of queries: (dK unscaled, dV) of this consumer's keys, and its part of dQ added."""
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_layout(HEAD_DIM), 2)
    ROW: gl.constexpr = CONSUMER * (BLOCK_Q - ROWS)
    COLUMN: gl.constexpr = CONSUMER * (HEAD_DIM - ROWS)
    unit = softmax_scale * LOG2_E
    k, v, room = keys_of(shared.k, CONSUMER), keys_of(shared.v, CONSUMER), shared.dq.index(CONSUMER)
    dtype: gl.constexpr = k.dtype
    head, column = place.head * shape.group, place.start
    # dS of no step: so there is no first step that differs; what it adds is past the end
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
        dk, dv = warpgroup_mma_wait(CONSUMERS, deps=[dk, dv])  # all but those of dQ
        release(shared.q, step, SLOTS)
        release(shared.dout, step, SLOTS)
        dq = warpgroup_mma_wait(0, deps=[dq])
        release(shared.ds, step, DS_SLOTS)
        add_dq(dq * softmax_scale, dq_sum, room, [place.batch, last_column + ROW, last_head, COLUMN])
        last_head, last_column = head, column
        head, column = following(head, column, place, BLOCK_Q)
    dq = warpgroup_mma_wait(0, deps=[start_dq(shared, place.steps, CONSUMER, HEAD_DIM, BLOCK_Q)])
    add_dq(dq * softmax_scale, dq_sum, room, [place.batch, last_column + ROW, last_head, COLUMN])
    return dk, dv


@gluon.jit
def consumer(
    shared, place, dq_sum, tensors, bounds, shape, softmax_scale,
    CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_Q: gl.constexpr,
    HAS_SUM: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys against every tile of queries that sees one of the program's."""
    dk_in, dv_in, dk_out, dv_out = tensors
    MASKED: gl.constexpr = RAGGED or bounds.lo is not None
    layout: gl.constexpr = mma_layout(BLOCK_Q)
    offs = place.first + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    seen = seen_of(bounds, offs, shape, MASKED, layout, BLOCK_Q)
    mbarrier.wait(shared.kv_full.index(0), 0)
    nothing = gl.zeros([ROWS, HEAD_DIM], gl.float32, mma_layout(HEAD_DIM))
    dk, dv = walk(
        nothing, nothing, shared, place, dq_sum, seen, shape, softmax_scale,
        CONSUMER, HEAD_DIM, SLOTS, BLOCK_Q, MASKED,
    )  # fmt: skip
    first = place.first + CONSUMER * ROWS
    finish(dk * softmax_scale, dk_in, dk_out, place, first, shape, HEAD_DIM, HAS_SUM)
    finish(dv, dv_in, dv_out, place, first, shape, HEAD_DIM, HAS_SUM)
    tma.store_wait(0)  # shared memory is there until the copy engine has read it


@gluon.jit
def finish(acc, before, out, place, first, shape, HEAD_DIM: gl.constexpr, HAS_SUM: gl.constexpr):
    """Store dK or dV of the keys from ``first``, added to what was there ``before``."""
    layout: gl.constexpr = acc.type.layout
    offs = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    inside = (offs < shape.rows)[:, None]
    batch, head = place.batch.to(gl.int64), place.head.to(gl.int64)
    if HAS_SUM:  # read last: during the loop the registers belong to the matrix products
        acc = acc + gl.load(pointers(of_head(before, batch, head), offs, HEAD_DIM, layout), mask=inside, other=0.0)
    to = of_head(out, batch, head)
    gl.store(pointers(to, offs, HEAD_DIM, layout), acc.to(to.ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["group"])  # as a constant 1 it leaves another order of instructions, which spills
def hopper_backward_kernel(
    dout, q, k, v, dq, lse, delta, dk_in, dv_in, dk_out, dv_out, bounds, shape, group, softmax_scale,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, SLOTS: gl.constexpr,
    HAS_SUM: gl.constexpr, IN_PLACE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """One program: dK and dV of 128 keys of one key head, and what these keys add to dQ of all queries."""
    BLOCK_K: gl.constexpr = CONSUMERS * ROWS
    shape = tiles.Shape(shape.rows, shape.columns, shape.heads, group, shape.order, None, None)
    tile, batch, head = program(shape, BLOCK_K)
    start, _, _, end = tile_range(bounds, tile * BLOCK_K, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE:
        if end <= start:  # the sums stay as they are
            return
    steps = (end - start) // BLOCK_Q * shape.group
    place = Place(tile * BLOCK_K, batch.to(gl.int32), head.to(gl.int32), start, end, steps)
    shared = shared_of(q, dout, k, v, dq, SLOTS)
    fence_async_shared()  # the copy engine must find the barriers initialised
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
