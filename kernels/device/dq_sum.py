"""Adding to dQ from the programs of several key tiles: in whatever order they come, or each in its turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .parts import dot, first_part


class Turns(NamedTuple):
    """Who adds when; all None: in any order."""

    numbers: Any
    """int32 ``[B or 1, key tiles, query tiles]``: how many key tiles add before this one. None: all behind it do."""
    stride: Any
    """Elements between batch rows; 0: all have the same."""
    gates: Any
    """int32 ``[B, H, query tiles]``, 0 at first: how many key tiles have added. None: nobody waits."""


class DqTurn(NamedTuple):
    """Which key tile adds to which query head."""

    batch: Any
    head: Any
    gates: Any
    """Where the gates of that head begin."""
    numbers: Any
    """Where the numbers of that key tile begin."""
    behind: Any
    """Key tiles behind it."""


@triton.jit
def place_of(dq, turns, tile, tiles, batch, head, heads, seqlen_q, BLOCK_Q: tl.constexpr):
    """Of key tile ``tile`` of ``tiles`` at the query head ``head`` of ``heads``; nothing where there is no sum."""
    if dq is None:
        return 0
    else:
        query_tiles = tl.cdiv(seqlen_q, BLOCK_Q)
        gates = (batch * heads + head) * query_tiles
        numbers = tl.cast(tile, tl.int64) * query_tiles
        if turns.numbers is not None:
            numbers += batch * turns.stride
        return DqTurn(batch, head, gates, numbers, tiles - 1 - tile)


@triton.jit
def add_to_dq(dq, box, turns, place, ds, k, start, seqlen_q, softmax_scale, HEAD_DIM: tl.constexpr):
    """Add ``softmax_scale * ds^T k`` to the query rows from ``start``; ``ds [keys, queries]``.

    By atomics, or where there is a ``box`` by the copy engine: a TMA descriptor of dQ in tiles ``[1, BLOCK_Q, 1, D]``.
    Multiplied as ``k^T ds``: the columns of k fill the rows of a wgmma where a tile has fewer queries than those.
    """
    query_tile = start // ds.shape[1]
    ds = ds.to(k[0].dtype)
    first = dot(tl.trans(k[0]), ds, None) * softmax_scale
    if turns.gates is not None:
        wait(turns, place, query_tile)
    add_part(dq, box, place, first, start, seqlen_q, 0, HEAD_DIM)
    if len(k) == 2:
        second = dot(tl.trans(k[1]), ds, None) * softmax_scale
        add_part(dq, box, place, second, start, seqlen_q, first_part(HEAD_DIM), HEAD_DIM)
    if turns.gates is not None:
        pass_on(turns, box, place, query_tile)


@triton.jit
def add_part(dq, box, place, value, start, seqlen_q, BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Columns ``BEGIN`` and following of the rows from ``start``; ``value [columns, rows]``."""
    WIDTH: tl.constexpr = value.shape[0]
    ROWS: tl.constexpr = value.shape[1]
    if box is not None:
        offsets = [place.batch.to(tl.int32), start, place.head.to(tl.int32), BEGIN]
        box.atomic_add(offsets, tl.trans(value).reshape(1, ROWS, 1, WIDTH))
    else:
        rows, offs_d = tl.arange(0, ROWS)[None, :], BEGIN + tl.arange(0, WIDTH)[:, None]
        inside = rows < seqlen_q - start
        if BEGIN + WIDTH > HEAD_DIM:
            inside &= offs_d < HEAD_DIM
        base = dq.ptr + place.batch * dq.stride_b + place.head * dq.stride_h + tl.cast(start, tl.int64) * dq.stride_s
        tl.atomic_add(base + (rows * dq.stride_s + offs_d), value, mask=inside, sem="relaxed")


@triton.jit
def wait(turns, place, query_tile):
    """Until all key tiles before this one have added."""
    number = place.behind
    if turns.numbers is not None:
        number = tl.load(turns.numbers + place.numbers + query_tile)
    gate = turns.gates + place.gates + query_tile
    while tl.atomic_cas(gate, number, number, sem="acquire") != number:
        pass


@triton.jit
def pass_on(turns, box, place, query_tile):
    """To the next key tile."""
    if box is not None:  # what the copy engine adds counts once it is done, not once it is read
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()  # all threads of this program have added before the gate says so
    tl.atomic_add(turns.gates + place.gates + query_tile, 1, sem="release")
