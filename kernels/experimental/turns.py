"""In which order the key tiles of a deterministic single pass add to the dQ of a query tile."""

from __future__ import annotations

import torch

from ..bounds import Bounds
from ..config import Tile


def numbers(
    bounds: Bounds, batch: int, queries: int, keys: int, tile: Tile, device: torch.device
) -> torch.Tensor | None:
    """How many key tiles add to a query tile before each of them: int32 ``[B or 1, key tiles, query tiles]``; cached.

    Those behind it that visit the query tile: late keys add first. Under a causal mask the last key tile to see a query
    tile begins with it, the one before it comes there a step later, and nobody waits; FlashAttention-3 calls it the
    shortest processing time first. None where every key tile visits every query tile, so that it is the number of
    those behind.

    Whoever waits, waits for programs launched before, which is what keeps the order from locking up: a table, and not
    arithmetic in the kernel, because a number too high would wait for nobody.
    """
    if bounds.lo is None and bounds.used is None and bounds.runs is None:
        return None
    key = (batch, queries, keys, tile.block_q, tile.block_k)
    if key not in bounds._turns:
        seen = visits(bounds, queries, keys, tile, device).to(torch.int32)
        bounds._turns[key] = seen.flip(1).cumsum(1, dtype=torch.int32).flip(1) - seen
    return bounds._turns[key]


def visits(bounds: Bounds, queries: int, keys: int, tile: Tile, device: torch.device) -> torch.Tensor:
    """Which key tile visits which query tile, bool ``[B or 1, key tiles, query tiles]``: ``tiles.tile_range``."""
    by_key = bounds.transposed(keys)
    first = torch.arange(0, keys, tile.block_k, device=device)
    columns = torch.arange(0, queries, tile.block_q, device=device)
    rows = torch.full((1, 1), keys, device=device) if bounds.used is None else bounds.used[:, None]
    last = torch.maximum(torch.minimum(first + tile.block_k, rows) - 1, first)
    there = (first < rows)[:, :, None]
    if by_key.lo is not None and by_key.hi is not None:
        start, stop = by_key.lo[first][None], by_key.hi[last]
        begin = start // tile.block_q * tile.block_q
        there = there & (stop > start)[:, :, None] & (columns >= begin[:, :, None]) & (columns < stop[:, :, None])
    if bounds.runs is not None:
        blocks = bounds.runs.visible.to(device)
        there = there & blocks[columns // bounds.runs.block][:, first // bounds.runs.block].T
    return there.expand(-1, -1, len(columns))
