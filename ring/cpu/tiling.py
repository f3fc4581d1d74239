"""Cuts a piece for the blockwise body: heads that are computed together, blocks of rows, and the tiles they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .pieces import KeyRuns, Limits

Vector = npt.NDArray[np.int32]


FOLDED_ROWS = 256  # rows of one product, all query heads of the group together: sgemm is at full speed there
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 128  # fewer would read K and V too often; more would waste the edges of a window
TILE_KEYS = 512
TILE_SCORES = 1 << 18  # scores per tile and thread: 1 MiB in fp32, half of a usual L2 cache
EDGES = 64  # masks that are kept: the blocks of a window all have the same


@dataclass(frozen=True)
class Chunk:
    """One batch item and some key/value heads, with the query heads that read them; ``keys`` are ``[Hkv, Sk, D]``."""

    item: int
    heads: slice
    kv_heads: slice
    keys: Tensor
    values: Tensor

    @cached_property
    def longest(self) -> tuple[float, float]:
        """The greatest norm of a key, and of a value."""
        key, value = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self.keys, self.values))
        return key, value


class Edge(NamedTuple):
    """Columns of a tile that not every row sees, and what hides scores: first ``&`` of their bits, then ``+``."""

    columns: slice
    bits: Tensor  # int32 [rows, columns]: all bits where the row sees the key, else none
    ceiling: Tensor  # fp32 [rows, columns]: 0, else -inf


class Tile(NamedTuple):
    """Keys ``[key, end)`` against one block of rows."""

    key: int
    end: int
    edges: tuple[Edge, ...]


class Block(NamedTuple):
    """Query rows ``[row, end)`` and the tiles they see."""

    row: int
    end: int
    tiles: tuple[Tile, ...]


def chunks(k: Tensor, v: Tensor, group: int, rows: int) -> list[Chunk]:
    """As many key/value heads at a time as keep each thread busy, and its tile of scores in the cache."""
    items, keys, kv_heads, _ = k.shape
    scores = group * min(_block_rows(group), rows) * min(TILE_KEYS, keys)
    step = max(1, TILE_SCORES // scores) * torch.get_num_threads()
    found = []
    for item in range(items):
        for first in range(0, kv_heads, step):
            end = min(first + step, kv_heads)
            near = [x[item, :, first:end].transpose(0, 1).float().contiguous() for x in (k, v)]
            heads = slice(first * group, end * group), slice(first, end)
            found.append(Chunk(item, *heads, *near))
    return found


def blocks(limits: Limits, group: int, kv_heads: int) -> list[Block]:
    """Blocks of rows with the tiles they see; a block that sees nothing is left out.

    ``kv_heads`` are those of a chunk: of fewer, a tile has more keys.
    """
    lo, hi = limits.lo.numpy(), limits.hi.numpy()
    step = _block_rows(group)
    width = max(TILE_KEYS, TILE_SCORES * torch.get_num_threads() // (kv_heads * group * min(step, len(lo))))
    rows = [slice(row, min(row + step, len(lo))) for row in range(0, len(lo), step)]
    found = (Block(near.start, near.stop, tuple(_tiles(lo[near], hi[near], limits.runs, width))) for near in rows)
    return [block for block in found if block.tiles]


def _block_rows(group: int) -> int:
    return min(max(FOLDED_ROWS // group, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)


def _tiles(lo: Vector, hi: Vector, runs: KeyRuns, width: int) -> Iterator[Tile]:
    """What one block of rows sees, run by run in tiles of equal width; only the head and the tail are masked."""
    first, full_first, full_last, last = (int(x) for x in (lo[0], lo[-1], hi[0], hi[-1]))  # neither end decreases
    edges = [(first, full_first), (full_last, last)] if full_first < full_last else [(first, last)]
    for run, run_end in runs:
        start, end = max(first, run), min(last, run_end)
        count = max(-(-(end - start) // width), 0)
        cuts = [start + (end - start) * cut // count for cut in range(count + 1)] if count else []
        for key, stop in pairwise(cuts):
            masked = [(max(key, a), min(stop, b)) for a, b in edges]
            yield Tile(key, stop, tuple(_edge(lo, hi, a, b, key) for a, b in masked if a < b))


def _edge(lo: Vector, hi: Vector, key: int, end: int, base: int) -> Edge:
    ends = ((x - key).clip(0, end - key).tobytes() for x in (lo, hi))
    return Edge(slice(key - base, end - base), *_hiding(*ends, end - key))


@lru_cache(EDGES)
def _hiding(lo: bytes, hi: bytes, columns: int) -> tuple[Tensor, Tensor]:
    """Bits and ceiling of an edge: row i sees the columns ``lo[i] <= j < hi[i]``, int32."""
    at = np.arange(columns)
    first, last = (np.frombuffer(x, np.int32)[:, None] for x in (lo, hi))
    seen = torch.from_numpy((at >= first) & (at < last))
    return -seen.int(), torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
