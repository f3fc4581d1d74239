"""Kernel for dQ, dK and dV in one pass over the pairs of tiles, with five matrix products instead of seven.

The loop over query tiles is that of dK/dV (``dkdv_tile.py``). It also computes ``dS K``, which ``dq_sum.py`` adds to dQ
in global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dkdv_tile import dkdv_tile
from .tiles import Gradients, Keys, Queries, TileSizes, program_placement, visit_key_tile


@triton.jit
def single_pass_kernel(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, dq, box, turns, bounds, shape, softmax_scale, modifiers,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_K keys of one key head, and add ``scale * dS K`` of these keys to dQ.

    Equations, shapes and dtypes are those of ``backward.py``; ``dq`` is fp32 ``[B, Sq, H, D]``.
    """
    if turns.gates is None:
        tile, batch, head = program_placement(shape, BLOCK_K)
    else:
        tile, batch, head = late_keys_placement(shape, BLOCK_K)
    visit = visit_key_tile(tile, batch, head, bounds, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE and visit.column_range.end <= visit.column_range.start:  # nothing to add
        return
    dkdv_tile(Queries(q, dout, lse, delta), Keys(k, v), Gradients(dq, box, turns, dk_in, dv_in, dk_out, dv_out),
              bounds, shape, softmax_scale, modifiers, visit, TileSizes(HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K),
              HAS_SUM, IN_PLACE, RAGGED)  # fmt: skip


@triton.jit
def late_keys_placement(shape, BLOCK: tl.constexpr):
    """Return (tile, batch, head) of this program for the deterministic order, with the last key tiles first.

    Programs wait for the programs of later keys, so those must be launched first. Heads alternate, so that as few key
    tiles of the same head as possible run at once and wait for each other.
    """
    tiles = tl.cdiv(shape.rows, BLOCK)
    heads = tl.num_programs(0) // tiles
    pid = tl.program_id(0)
    head = pid % heads
    return tiles - 1 - pid // heads, (head // shape.heads).to(tl.int64), (head % shape.heads).to(tl.int64)
