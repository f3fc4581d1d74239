"""How long a launch takes on a CPU: the pieces that it really falls into, by the body that really computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import FULL, Bounds
from ...ring import blockwise, flash_cpu
from ...ring.aten import AtenBackward, AtenForward
from ...ring.pieces import Kind, Limits, Piece, limits, pieces
from ...ring.tiling import blocks, chunks
from .launch import Launch
from .program import ADD, DKDV, DQ, FOLD, Form

BODIES = ("operator", "blockwise")
WINDOW = 256  # of the shape that tells what masking costs the blockwise body


class Work(NamedTuple):
    """What the pieces of a launch add up to, for all its heads."""

    pairs: float
    """Scores that the operator computes, edges apart."""
    edges: float
    """Rows of its triangles."""
    scores: float
    """Scores of the tiles of the blockwise body, seen or not."""
    masked: float
    """Of them those of tiles on an edge."""
    rows: float
    """Rows of the operator's results, which are merged into the state."""


@dataclass(frozen=True)
class Body:
    """Seconds of one thing each, in one pass and with one head dim."""

    pair: float
    edge: float
    score: float
    masked: float
    row: float
    call: float


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
        kinds = zip(work, (body.pair, body.edge, body.score, body.masked, body.row), strict=True)
        return body.call + form.batch * sum(count * seconds for count, seconds in kinds)


@lru_cache(4096)
def work_of(bounds: Bounds, rows: int, keys: int, heads: int, kv_heads: int) -> Work:
    """Of one launch, one batch item."""
    found = [_of_piece(bounds, piece, heads, kv_heads) for piece in pieces(bounds, rows, keys)]
    return Work(*(sum(one) for one in zip(*found, strict=True))) if found else Work(0, 0, 0, 0, 0)


def _of_piece(bounds: Bounds, piece: Piece, heads: int, kv_heads: int) -> Work:
    rows, keys = piece.row_end - piece.row, piece.key_end - piece.key
    if piece.kind is Kind.RECTANGLE:
        return Work(heads * rows * keys, 0, 0, 0, heads * rows)
    if piece.kind is not Kind.BLOCKWISE:
        return Work(heads * rows * (rows + 1) / 2, heads * rows, 0, 0, heads * rows)
    return Work(0, 0, *(heads * count for count in _tiles(limits(bounds, piece), rows, keys, heads, kv_heads)), 0)


def _tiles(near: Limits, rows: int, keys: int, heads: int, kv_heads: int) -> tuple[float, float]:
    """Scores of the tiles of one head, and of them those of masked columns."""
    group = heads // kv_heads
    thin = torch.empty(1, keys, kv_heads, 1)  # its head dim is nothing that cutting looks at
    scores = masked = 0
    for block in blocks(near, group, len(chunks(thin, thin, group, rows)[0].keys)):
        count = block.end - block.row
        scores += count * sum(tile.end - tile.key for tile in block.tiles)
        masked += count * sum(
            edge.columns.stop - edge.columns.start for tile in block.tiles for edge in tile.edges
        )
    return scores, masked


def calibrated(
    tokens: int, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, repeats: int = 5,
    ready: Callable[[], None] = lambda: None,
) -> HostSpeed:  # fmt: skip
    """Measure this thread with pieces of ``tokens`` rows: a dozen launches, each ``repeats`` times.

    ``ready`` is called before each, so that several processes measure at once and each finds the machine as busy as a
    ring does.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    stage = _Stage(q, k, v, dout, repeats, ready)
    forward, backward = stage.body("forward"), stage.body("backward")
    sums = [torch.zeros(1, tokens, kv_heads, head_dim) for _ in range(4)]
    key = stage.time(lambda: [torch.add(a, b, out=a) for a, b in zip(sums[:2], sums[2:], strict=True)])
    return HostSpeed(forward, backward, key / (tokens * kv_heads), head_dim)


class _Stage:
    """The tensors that everything is measured with."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, repeats: int, ready: Callable[[], None]
    ) -> None:
        self.q, self.k, self.v, self.dout, self.repeats, self.ready = q, k, v, dout, repeats, ready
        self.scale = q.shape[-1] ** -0.5
        self.tokens, self.heads, self.kv_heads = q.shape[1], q.shape[2], k.shape[2]
        self.out, self.lse = flash_cpu.forward(q, k, v, Kind.RECTANGLE, scale=self.scale)

    def time(self, run: Callable[[], object]) -> float:
        """Median seconds, after one run that is not counted."""
        taken = []
        for _ in range(self.repeats + 1):
            self.ready()
            begun = perf_counter()
            run()
            taken.append(perf_counter() - begun)
        return median(taken[1:])

    def body(self, phase: str) -> Body:
        """Two shapes for each body tell its two constants; what a hop adds to its operator is the difference."""
        operator = self._operator_forward if phase == "forward" else self._operator_backward
        full, half = (self.time(lambda kind=kind: operator(kind)) for kind in (Kind.RECTANGLE, Kind.CAUSAL))  # type: ignore[misc]
        plane = self.heads * self.tokens**2
        pair = full / plane
        edge = max(half - pair * plane / 2, 0.0) / (self.heads * self.tokens)
        hop = self._fold() if phase == "forward" else self._dkdv()
        row = max(hop - full, 0.0) / (self.heads * self.tokens)
        score, masked = self._blockwise(phase)
        return Body(pair, edge, score, masked, row, 0.0)

    def _operator_forward(self, kind: Kind) -> None:
        flash_cpu.forward(self.q, self.k, self.v, kind, scale=self.scale)

    def _operator_backward(self, kind: Kind) -> None:
        flash_cpu.backward(self.dout, self.q, self.k, self.v, self.out, self.lse, kind, scale=self.scale)

    def _fold(self) -> float:
        work = AtenForward(self.q, softmax_scale=self.scale)
        return self.time(lambda: work.fold(self.k, self.v, FULL, final=False))

    def _dkdv(self) -> float:
        work = AtenBackward(self.dout, self.q, self.out, self.lse, None, softmax_scale=self.scale)
        into = tuple(torch.empty(x.shape) for x in (self.k, self.v))
        return self.time(lambda: work.dkdv(self.k, self.v, FULL, local=False, sums=None, into=into))

    def _blockwise(self, phase: str) -> tuple[float, float]:
        at = torch.arange(self.tokens, dtype=torch.int32)
        wide = torch.zeros_like(at), torch.full_like(at, self.tokens)
        band = (at - WINDOW + 1).clamp(min=0), at + 1
        found = []
        for lo, hi in (wide, band):
            near = Limits(lo, hi, ((0, self.tokens),))
            counts = _tiles(near, self.tokens, self.tokens, self.heads, self.kv_heads)
            found.append((self.time(lambda near=near: self._run(phase, near)), *counts))  # type: ignore[misc]
        (full, scores, _), (thin, few, masked) = found
        score = full / (self.heads * scores)
        return score, (thin / self.heads - score * few) / masked

    def _run(self, phase: str, near: Limits) -> None:
        rows = (1, self.tokens, self.heads, self.v.shape[-1])
        if phase == "forward":
            lse = torch.full((1, self.heads, self.tokens), -torch.inf, dtype=torch.float64)
            blockwise.forward(self.q, self.k.float(), self.v.float(), torch.zeros(rows), lse, near, scale=self.scale)
            return
        grads = tuple(torch.zeros(x.shape) for x in (self.q, self.k, self.v))
        delta = torch.zeros(1, self.heads, self.tokens)
        blockwise.backward(
            self.dout, self.q, self.k.float(), self.v.float(), self.lse, delta, near, scale=self.scale, grads=grads
        )


def typical(speeds: Sequence[HostSpeed]) -> HostSpeed:
    """Of processes that measured at once, each constant's median."""

    def merged(bodies: Sequence[Body]) -> Body:
        return Body(*(median(getattr(one, field.name) for one in bodies) for field in fields(Body)))

    forward, backward = merged([one.forward for one in speeds]), merged([one.backward for one in speeds])
    return HostSpeed(forward, backward, median(one.key for one in speeds), speeds[0].head_dim)
