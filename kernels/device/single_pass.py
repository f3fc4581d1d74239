"""dQ, dK and dV of one shard in a single pass over the pairs of tiles: five matrix products instead of seven.

The loop over query tiles is that of dK/dV (``key_tile.py``). Its ``dS`` also makes ``dS K``, which ``dq_sum.py`` adds
to dQ in global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .key_tile import key_tile
from .tiles import program, visit_key_tile


@triton.jit
def single_pass_kernel(
    dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, dq, box, turns, bounds, shape, softmax_scale, modifiers,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_SUM: tl.constexpr, IN_PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_K keys of one key head, and what these keys add to dQ of all queries."""
    if turns.gates is None:
        tile, batch, head = program(shape, BLOCK_K)
    else:
        tile, batch, head = late_keys_first(shape, BLOCK_K)
    first, keys, visited = visit_key_tile(tile, batch, bounds, shape, BLOCK_K, BLOCK_Q)
    if IN_PLACE:
        if visited[3] <= visited[0]:  # the sums stay as they are
            return
    key_tile(dout, q, k, v, lse, delta, dk_in, dv_in, dk_out, dv_out, dq, box, turns, bounds, shape, softmax_scale,
             modifiers, batch, head, first, keys, visited,
             HEAD_DIM, HEAD_DIM_V, BLOCK_Q, BLOCK_K, HAS_SUM, IN_PLACE, RAGGED)  # fmt: skip


@triton.jit
def late_keys_first(shape, BLOCK: tl.constexpr):
    """(tile, batch, head) where programs wait for those of later keys, which must therefore be launched before them.

    All heads take turns: of a head no more key tiles run at once, each a step behind the one before it, than there are
    multiprocessors for.
    """
    tiles = tl.cdiv(shape.rows, BLOCK)
    heads = tl.num_programs(0) // tiles
    pid = tl.program_id(0)
    head = pid % heads
    return tiles - 1 - pid // heads, (head // shape.heads).to(tl.int64), (head % shape.heads).to(tl.int64)
