"""How long a launch takes on a CPU: the pieces that it really falls into, by the body that really computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import FULL, Bounds, Runs
from ...ring import blockwise, flash_cpu
from ...ring.aten import AtenBackward, AtenForward
from ...ring.pieces import MIN_ROWS, Kind, Limits, Piece, limits, pieces
from ...ring.tiling import blocks, chunks
from ..timing import Clock, Step, interleaved
from .launch import Launch
from .program import ADD, DKDV, DQ, FOLD, PASSES, Form

WINDOW = 256  # of the shape that tells what masking costs the blockwise body
THIN = 128  # keys of the shape that tells what a row costs, however few keys it sees
BY_256, BY_64 = 768, 192  # rows from which on the operator takes so many at a time, else 32: FlashAttentionKernel.cpp
PATTERNS = {"small": (MIN_ROWS, 1), "by 32": (MIN_ROWS, 4), "by 64": (512, 2)}
"""Positions per block, and blocks of keys that each block of rows sees: launches of many calls of one shape each.

They tell what a call costs, with what the ring does about it, and a score where the operator takes fewer rows.
"""


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
    cut = pieces(bounds, rows, keys)
    found = [_of_piece(bounds, piece, heads, kv_heads) for piece in cut]
    work = Work(*(sum(one) for one in zip(*found, strict=True))) if found else Work(*[0] * len(Work._fields))
    by_operator = [piece.key_end - piece.key for piece in cut if piece.kind is not Kind.BLOCKWISE]
    return work._replace(added=kv_heads * sum(by_operator) if len(cut) > 1 else 0)


def _of_piece(bounds: Bounds, piece: Piece, heads: int, kv_heads: int) -> Work:
    rows, keys = piece.row_end - piece.row, piece.key_end - piece.key
    if piece.kind is Kind.BLOCKWISE:
        scores, masked = _tiles(limits(bounds, piece), rows, keys, heads, kv_heads)
        return Work(0, 0, 0, 0, heads * scores, heads * masked, 0, heads * rows, 0)
    pairs, edges = (rows * keys, 0) if piece.kind is Kind.RECTANGLE else (rows * (rows + 1) / 2, heads * rows)
    by_256, by_64, by_32 = (heads * pairs * one for one in (rows >= BY_256, BY_256 > rows >= BY_64, rows < BY_64))
    return Work(by_256, by_64, by_32, edges, 0, 0, heads * rows, 0, 1)


def _tiles(near: Limits, rows: int, keys: int, heads: int, kv_heads: int) -> tuple[float, float]:
    """Scores of the tiles of one head, and of them those of masked columns."""
    group = heads // kv_heads
    thin = torch.empty(1, keys, kv_heads, 1)  # its head dim is nothing that cutting looks at
    scores = masked = 0
    for block in blocks(near, group, len(chunks(thin, thin, group, rows)[0].keys)):
        count = block.end - block.row
        scores += count * sum(tile.end - tile.key for tile in block.tiles)
        masked += count * sum(edge.columns.stop - edge.columns.start for tile in block.tiles for edge in tile.edges)
    return scores, masked


def calibrated(
    tokens: int, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, clock: Clock, repeats: int = 5
) -> HostSpeed:
    """Measure this thread with pieces of ``tokens`` rows and keys, in turns; medians of ``repeats``.

    The team of the clock is every process of a ring: all measure at once, so that each finds the machine as busy as a
    ring does.
    """
    stage = _Stage.of(tokens, heads, kv_heads, head_dim, dtype)
    times = interleaved(stage.steps(), clock, repeats=repeats)
    seconds = {name: samples.median for name, samples in times.items()}
    forward, backward = (stage.body(phase, seconds) for phase in PASSES)
    return HostSpeed(forward, backward, stage.key_seconds(seconds), head_dim)


def operator_seconds(
    tokens: int, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, repeats: int = 5
) -> float:
    """Forward and backward of one piece by the operator, on this thread while nobody else is asked to compute."""
    stage = _Stage.of(tokens, heads, kv_heads, head_dim, dtype)
    steps = {phase: step for phase, step in stage.steps().items() if phase.endswith(Kind.RECTANGLE.name)}
    times = interleaved(steps, Clock(torch.device("cpu")), repeats=repeats)
    return sum(samples.median for samples in times.values())


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


def pattern(tokens: int, block: int, seen: int) -> Bounds:
    """Every block of rows sees so many blocks of keys in a row, and its neighbours others."""
    blocks = -(-tokens // block)
    starts = torch.arange(blocks) % max(blocks - seen + 1, 1)
    at = torch.arange(blocks) - starts[:, None]
    return replace(FULL, runs=Runs((at >= 0) & (at < seen), block))


class _Stage:
    """The tensors that everything is measured with, and what is measured."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self.q, self.k, self.v, self.dout, self.scale = q, k, v, dout, q.shape[-1] ** -0.5
        self.tokens, self.heads, self.kv_heads = q.shape[1], q.shape[2], k.shape[2]
        self.thin = min(THIN, self.tokens // 2)
        self.out, self.lse = flash_cpu.forward(q, k, v, Kind.RECTANGLE, scale=self.scale)
        at = torch.arange(self.tokens, dtype=torch.int32)
        ends = {
            "wide": (torch.zeros_like(at), torch.full_like(at, self.tokens)),
            "band": ((at - WINDOW + 1).clamp(min=0), at + 1),
            "thin": (torch.zeros_like(at), torch.full_like(at, self.thin)),
        }
        self.limits = {name: Limits(lo, hi, ((0, self.keys_of(name)),)) for name, (lo, hi) in ends.items()}
        self.patterns = {name: pattern(self.tokens, *one) for name, one in PATTERNS.items()}

    def keys_of(self, name: str) -> int:
        """Keys of a shape of the blockwise body."""
        return self.thin if name == "thin" else self.tokens

    @classmethod
    def of(cls, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> _Stage:
        draw = torch.Generator().manual_seed(0)
        shapes = [(1, tokens, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        return cls(*(torch.randn(shape, generator=draw).to(dtype) for shape in shapes))

    def steps(self) -> dict[str, Step]:
        """What to time, by name."""
        folding = AtenForward(self.q, softmax_scale=self.scale)
        adding = AtenBackward(self.dout, self.q, self.out, self.lse, None, softmax_scale=self.scale)
        into, came = (tuple(make(x.shape) for x in (self.k, self.v)) for make in (torch.empty, torch.zeros))
        k, v = (x[:, : self.thin].contiguous() for x in (self.k, self.v))
        few_into = torch.empty(k.shape), torch.empty(v.shape)
        found: dict[str, Step] = {
            "forward hop": lambda: folding.fold(k, v, FULL, final=False),
            "backward hop": lambda: adding.dkdv(k, v, FULL, local=False, sums=None, into=few_into),
            "sums": lambda: [torch.add(a, b, out=a) for a, b in zip(into, came, strict=True)],
        }
        for kind in (Kind.RECTANGLE, Kind.CAUSAL):
            found[f"forward {kind.name}"] = partial(self._operator_forward, kind)
            found[f"backward {kind.name}"] = partial(self._operator_backward, kind)
        for name, seen in self.patterns.items():
            found[f"forward {name}"] = partial(folding.fold, self.k, self.v, seen, final=False)
            found[f"backward {name}"] = partial(adding.dkdv, self.k, self.v, seen, local=False, sums=None, into=into)
        for name, near in self.limits.items():
            found[f"forward {name}"] = partial(self._blockwise_forward, near, self.keys_of(name))
            found[f"backward {name}"] = partial(self._blockwise_backward, near, self.keys_of(name))
        return found

    def body(self, phase: str, seconds: Mapping[str, float]) -> Body:
        """Two shapes of each body tell its two constants; a hop with few keys what a row costs beside its pairs."""
        full, half = (seconds[f"{phase} {kind.name}"] for kind in (Kind.RECTANGLE, Kind.CAUSAL))
        rows, plane = self.heads * self.tokens, self.heads * self.tokens**2
        edge = max(half - full * (1 + 1 / self.tokens) / 2, 0.0) / rows
        row = max(seconds[f"{phase} hop"] - full * self.thin / self.tokens, 0.0) / rows
        (scores, _), (near, masked), (least, _) = (self._scores(name) for name in ("wide", "band", "thin"))
        wide, band, thin = (seconds[f"{phase} {name}"] / self.heads for name in ("wide", "band", "thin"))
        score = (wide - thin) / (scores - least) if wide > thin else wide / scores  # of tiny shapes noise is the most
        block_row = max(thin - score * least, 0.0) / self.tokens
        edges = max(band - score * near - block_row * self.tokens, 0.0) / masked
        added = 0.0 if phase == "forward" else self.key_seconds(seconds)
        known = Body(full / plane, full / plane, full / plane, edge, score, edges, row, block_row, 0.0, added)
        return self._calls(phase, seconds, known)

    def _calls(self, phase: str, seconds: Mapping[str, float], known: Body) -> Body:
        """With what a call costs, and a score in calls of few rows, as far as the patterns have such calls.

        Fewer rows at a time are never faster: where noise says so, it is noise.
        """
        works = {
            name: work_of(seen, self.tokens, self.tokens, self.heads, self.kv_heads)
            for name, seen in self.patterns.items()
        }
        left = {
            name: seconds[f"{phase} {name}"] - known.row * work.rows - known.added * work.added
            for name, work in works.items()
        }
        small, few, some = (works[name] for name in PATTERNS)
        if few.by_32 > small.by_32:
            by_32 = max((left["by 32"] - left["small"]) / (few.by_32 - small.by_32), known.by_256)
            known = replace(known, by_32=by_32, piece=max(left["small"] - by_32 * small.by_32, 0.0) / small.pieces)
        if some.by_64:
            by_64 = (left["by 64"] - known.piece * some.pieces) / some.by_64
            known = replace(known, by_64=max(by_64, known.by_256))
        return known

    def key_seconds(self, seconds: Mapping[str, float]) -> float:
        """To add up dK and dV of one key and key head."""
        return seconds["sums"] / (self.tokens * self.kv_heads)

    def _scores(self, name: str) -> tuple[float, float]:
        return _tiles(self.limits[name], self.tokens, self.keys_of(name), self.heads, self.kv_heads)

    def _operator_forward(self, kind: Kind) -> None:
        flash_cpu.forward(self.q, self.k, self.v, kind, scale=self.scale)

    def _operator_backward(self, kind: Kind) -> None:
        flash_cpu.backward(self.dout, self.q, self.k, self.v, self.out, self.lse, kind, scale=self.scale)

    def _blockwise_forward(self, near: Limits, keys: int) -> None:
        lse = torch.full((1, self.heads, self.tokens), -torch.inf, dtype=torch.float64)
        out = torch.zeros(1, self.tokens, self.heads, self.v.shape[-1])
        k, v = (x[:, :keys].float() for x in (self.k, self.v))
        blockwise.forward(self.q, k, v, out, lse, near, scale=self.scale)

    def _blockwise_backward(self, near: Limits, keys: int) -> None:
        k, v = (x[:, :keys].float() for x in (self.k, self.v))
        grads = tuple(torch.zeros(x.shape) for x in (self.q, k, v))
        delta = torch.zeros(1, self.heads, self.tokens)
        blockwise.backward(self.dout, self.q, k, v, self.lse, delta, near, scale=self.scale, grads=grads)
