"""Addition to dQ in global memory by the programs of several key tiles, in any order or in a fixed one."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile_ops import dot, first_part_width


class AddTurns(NamedTuple):
    """Order of the additions to dQ; all fields are None if the order is free."""

    numbers: Any
    """int32 ``[B or 1, key tiles, query tiles]``: number of key tiles that add first. None: all later key tiles."""
    stride: Any
    """Elements between batch rows of ``numbers``; 0 if all rows share them."""
    gates: Any
    """int32 ``[B, H, query tiles]``, initially 0: number of key tiles that have added."""


class DqTurn(NamedTuple):
    """Place of one key tile in the order of one query head."""

    batch: Any
    head: Any
    done_offset: Any
    """Offset of this head's counters in ``AddTurns.gates``."""
    wait_offset: Any
    """Offset of this key tile's row in ``AddTurns.numbers``."""
    tiles_behind: Any
    """Number of later key tiles."""


@triton.jit
def make_dq_turn(gradients, visit, head, shape, sizes):
    """Return where the key tile of ``visit`` adds to dQ of a query head, and its turn. 0 if there is no dQ."""
    if gradients.dq is None:
        return 0
    else:
        tile, query_tiles = visit.first // sizes.BLOCK_K, tl.cdiv(shape.columns, sizes.BLOCK_Q)
        gates = (visit.batch * (shape.heads * shape.group) + head) * query_tiles
        numbers = tl.cast(tile, tl.int64) * query_tiles
        if gradients.turns.numbers is not None:
            numbers += visit.batch * gradients.turns.stride
        return DqTurn(visit.batch, head, gates, numbers, tl.cdiv(shape.rows, sizes.BLOCK_K) - 1 - tile)


@triton.jit
def add_to_dq(gradients, turn, ds, k, start, seqlen_q, softmax_scale, HEAD_DIM: tl.constexpr):
    """Add ``softmax_scale * ds^T k`` to the query rows from ``start``, where ``ds`` is ``[keys, queries]``.

    TMA adds if ``gradients`` has a descriptor of dQ; otherwise atomics do. The product is computed as ``k^T ds``,
    because the columns of k fill the rows of a wgmma even if a tile has few queries.
    """
    query_tile = start // ds.shape[1]
    ds = ds.to(k[0].dtype)
    first = dot(tl.trans(k[0]), ds, None) * softmax_scale
    if gradients.turns.gates is not None:
        wait_for_turn(gradients.turns, turn, query_tile)
    add_dq_part(gradients, turn, first, start, seqlen_q, 0, HEAD_DIM)
    if len(k) == 2:
        second = dot(tl.trans(k[1]), ds, None) * softmax_scale
        add_dq_part(gradients, turn, second, start, seqlen_q, first_part_width(HEAD_DIM), HEAD_DIM)
    if gradients.turns.gates is not None:
        end_turn(gradients, turn, query_tile)


@triton.jit
def add_dq_part(gradients, turn, value, start, seqlen_q, BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Add ``value [columns, rows]`` to the columns of dQ from BEGIN, in the query rows from ``start``."""
    WIDTH: tl.constexpr = value.shape[0]
    ROWS: tl.constexpr = value.shape[1]
    dq = gradients.dq
    if gradients.dq_box is not None:
        offsets = [turn.batch.to(tl.int32), start, turn.head.to(tl.int32), BEGIN]
        gradients.dq_box.atomic_add(offsets, tl.trans(value).reshape(1, ROWS, 1, WIDTH))
    else:
        rows, offs_d = tl.arange(0, ROWS)[None, :], BEGIN + tl.arange(0, WIDTH)[:, None]
        inside = rows < seqlen_q - start
        if BEGIN + WIDTH > HEAD_DIM:
            inside &= offs_d < HEAD_DIM
        base = dq.ptr + turn.batch * dq.stride_b + turn.head * dq.stride_h + tl.cast(start, tl.int64) * dq.stride_s
        tl.atomic_add(base + (rows * dq.stride_s + offs_d), value, mask=inside, sem="relaxed")


@triton.jit
def wait_for_turn(turns, turn, query_tile):
    """Wait until all key tiles with an earlier turn have added to a query tile."""
    number = turn.tiles_behind
    if turns.numbers is not None:
        number = tl.load(turns.numbers + turn.wait_offset + query_tile)
    gate = turns.gates + turn.done_offset + query_tile
    while tl.atomic_cas(gate, number, number, sem="acquire") != number:
        pass


@triton.jit
def end_turn(gradients, turn, query_tile):
    """Let the next key tile add to a query tile."""
    if gradients.dq_box is not None:  # wait until TMA has added to global memory, not only read shared memory
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()  # all threads must have added before the counter is raised
    tl.atomic_add(gradients.turns.gates + turn.done_offset + query_tile, 1, sem="release")
