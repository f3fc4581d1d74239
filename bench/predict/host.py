"""How long a launch takes on a CPU: the pieces that it really falls into, by the body that really computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...kernels import FULL, Bounds
from ...ring.cpu.blockwise import blocks, chunks
from ...ring.cpu.regions import Kind, Limits, Region, limits, regions
from .launch import Launch
from .program import ADD, DKDV, DQ, FOLD, PASSES, Form

BY_256, BY_64 = 768, 192  # rows from which on the operator takes so many at a time, else 32: FlashAttentionKernel.cpp
NEAR = 2048  # keys of a head that are still in a core's cache when the operator's next rows come to them


class Work(NamedTuple):
    """What the pieces of a launch add up to, for all its heads."""

    by_256: float
    """Scores of calls of the operator that take 256 rows at a time, edges apart."""
    by_64: float
    by_32: float
    edges: float
    """Rows of its triangles."""
    scores: float
    """Scores of the tiles of the blockwise body, seen or not."""
    masked: float
    """Of them those of tiles on an edge."""
    rows: float
    """Rows of the operator's results, which are merged into the state."""
    block_rows: float
    """Rows of the blockwise body's, likewise."""
    pieces: float
    """Calls of the operator."""
    added: float = 0.0
    """Keys of these calls, by key head, where there are several, whose dK and dV are then added up."""
    far: float = 0.0
    """Scores of these calls with keys after a row's first ``NEAR``."""


@dataclass(frozen=True)
class Body:
    """Seconds of one thing each, in one pass and with one head dim; in the order of :class:`Work`."""

    by_256: float
    by_64: float
    by_32: float
    edge: float
    score: float
    masked: float
    row: float
    block_row: float = 0.0
    piece: float = 0.0
    added: float = 0.0
    far: float = 0.0
    """More than a score costs anyway."""


@dataclass(frozen=True)
class HostSpeed:
    """One thread of a CPU. A launch takes the sum over its pieces of what :class:`Body` says."""

    forward: Body
    backward: Body
    key: float
    """Seconds to add up dK and dV of one key and key head."""
    head_dim: int
    beside: float = 0.9
    """The transfers' thread takes the core for as long as it copies."""
    alone: float = 1.0
    """The part of these seconds, measured by all ranks at once, that a launch takes while no other one computes."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> HostSpeed:
        """Of what ``asdict`` gave."""
        return cls(**{**told, "forward": Body(**told["forward"]), "backward": Body(**told["backward"])})

    @property
    def on_host(self) -> bool:
        """It does everything itself."""
        return True

    def launch_seconds(self, launch: Launch, form: Form) -> float:
        """Seconds of one launch.

        Raises:
            ValueError: it was calibrated for another head dim.
        """
        if form.head_dim != self.head_dim:
            raise ValueError(f"head_dim is {form.head_dim}: this speed was measured at {self.head_dim}")
        if launch.what == ADD:
            return self.key * launch.area.keys * form.batch * form.kv_heads / form.chunks
        if launch.what == FOLD:
            return self._of(self.forward, launch, form)
        if launch.what == DKDV:  # the operator computes all three gradients at once, of the own shard in two halves
            return self._of(self.backward, launch, form) * (0.5 if launch.hop == 0 else 1.0)
        if launch.what == DQ:
            return self._of(self.backward, launch, form) / 2 if launch.hop == 0 else 0.0
        return 0.0

    def _of(self, body: Body, launch: Launch, form: Form) -> float:
        rows, keys = int(launch.area.rows), int(launch.area.keys)
        bounds = FULL if launch.bounds is None else launch.bounds
        work = work_of(bounds, rows, keys, form.heads // form.chunks, form.kv_heads // form.chunks)
        each: tuple[float, ...] = astuple(body)
        return form.batch * sum(count * seconds for count, seconds in zip(work, each, strict=True))


@lru_cache(4096)
def work_of(bounds: Bounds, rows: int, keys: int, heads: int, kv_heads: int) -> Work:
    """Of one launch, one batch item."""
    cut = regions(bounds, rows, keys)
    found = [_of_piece(bounds, piece, heads, kv_heads) for piece in cut]
    work = Work(*(sum(one) for one in zip(*found, strict=True))) if found else Work(*[0] * len(Work._fields))
    by_operator = [piece.key_end - piece.key for piece in cut if piece.kind is not Kind.BLOCKWISE]
    return work._replace(added=kv_heads * sum(by_operator) if len(cut) > 1 else 0)


def _of_piece(bounds: Bounds, piece: Region, heads: int, kv_heads: int) -> Work:
    rows, keys = piece.row_end - piece.row, piece.key_end - piece.key
    if piece.kind is Kind.BLOCKWISE:
        scores, masked = tiles_of(limits(bounds, piece), rows, keys, heads, kv_heads)
        return Work(0, 0, 0, 0, heads * scores, heads * masked, 0, heads * rows, 0)
    beyond = max(keys - NEAR, 0)
    if piece.kind is Kind.RECTANGLE:
        pairs, far, edges = float(rows * keys), float(rows * beyond), 0
    else:
        pairs, far, edges = rows * (rows + 1) / 2, beyond * (beyond + 1) / 2, heads * rows
    by_256, by_64, by_32 = (heads * pairs * one for one in (rows >= BY_256, BY_256 > rows >= BY_64, rows < BY_64))
    return Work(by_256, by_64, by_32, edges, 0, 0, heads * rows, 0, 1, far=heads * far)


def tiles_of(near: Limits, rows: int, keys: int, heads: int, kv_heads: int) -> tuple[float, float]:
    """Scores of the tiles of one head, and of them those of masked columns."""
    group = heads // kv_heads
    thin = torch.empty(1, keys, kv_heads, 1)  # its head dim is nothing that cutting looks at
    scores = masked = 0
    for block in blocks(near, group, len(chunks(thin, thin, group, rows)[0].keys)):
        count = block.end - block.row
        scores += count * sum(tile.end - tile.key for tile in block.tiles)
        masked += count * sum(edge.columns.stop - edge.columns.start for tile in block.tiles for edge in tile.edges)
    return scores, masked


def mean_of(speeds: Sequence[HostSpeed]) -> HostSpeed:
    """Of all ranks: in a sum of many launches noise that hits now one and now the other counts by its mean."""

    def mean(*values: float) -> float:
        return sum(values) / len(values)

    forward, backward = (
        Body(*(mean(*same) for same in zip(*(astuple(getattr(one, phase)) for one in speeds), strict=True)))
        for phase in PASSES
    )
    key, alone = mean(*(one.key for one in speeds)), mean(*(one.alone for one in speeds))
    return replace(speeds[0], forward=forward, backward=backward, key=key, alone=alone)
