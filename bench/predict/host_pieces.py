"""What pieces of attention take on a thread of this CPU, measured by the bodies that compute them in a ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...kernels import FULL, Bounds, Runs
from ...ring.cpu import aten, blockwise
from ...ring.cpu.aten import AtenBackward, AtenForward
from ...ring.cpu.regions import MIN_ROWS, Kind, Limits
from ..common.timing import Clock, Step, interleaved
from .host import Body, HostSpeed, tiles_of, work_of
from .program import PASSES

WINDOW = 256  # of the shape that tells what masking costs the blockwise body
THIN = 128  # keys of the shape that tells what a row costs, however few keys it sees
FAR_ROWS, FAR = 1024, 4  # of the shape that tells what more of them cost; so many times the keys of the others
PATTERNS = {"small": (MIN_ROWS, 1), "by 32": (MIN_ROWS, 4), "by 64": (512, 2)}
"""Positions per block, and blocks of keys that each block of rows sees: launches of many calls of one shape each.

They tell what a call costs, with what the ring does about it, and a score where the operator takes fewer rows.
"""


def calibrated(
    tokens: int, *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, clock: Clock, repeats: int = 5
) -> HostSpeed:
    """Measure this thread with pieces of ``tokens`` rows and keys, in turns; medians of ``repeats``."""
    stage = Stage.of(tokens, heads, kv_heads, head_dim, dtype)
    times = interleaved(stage.steps(), clock, repeats=repeats)
    return stage.speed({name: samples.median for name, samples in times.items()})


def pattern(tokens: int, block: int, seen: int) -> Bounds:
    """Every block of rows sees so many blocks of keys in a row, and its neighbours others."""
    blocks = -(-tokens // block)
    starts = torch.arange(blocks) % max(blocks - seen + 1, 1)
    at = torch.arange(blocks) - starts[:, None]
    return replace(FULL, runs=Runs((at >= 0) & (at < seen), block))


class Stage:
    """The tensors that everything is measured with, what is measured, and what the seconds say."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
        self.q, self.k, self.v, self.dout, self.scale = q, k, v, dout, q.shape[-1] ** -0.5
        self.tokens, self.heads, self.kv_heads = q.shape[1], q.shape[2], k.shape[2]
        self.thin = min(THIN, self.tokens // 2)
        self.out, self.lse = aten.operator_forward(q, k, v, Kind.RECTANGLE, scale=self.scale)
        at = torch.arange(self.tokens, dtype=torch.int32)
        ends = {
            "wide": (torch.zeros_like(at), torch.full_like(at, self.tokens)),
            "band": ((at - WINDOW + 1).clamp(min=0), at + 1),
            "thin": (torch.zeros_like(at), torch.full_like(at, self.thin)),
        }
        self.few = slice(0, FAR_ROWS)
        self.far_k, self.far_v = (x.repeat(1, FAR, 1, 1) for x in (k, v))
        self.limits = {name: Limits(lo, hi, ((0, self.keys_of(name)),)) for name, (lo, hi) in ends.items()}
        self.patterns = {name: pattern(self.tokens, *one) for name, one in PATTERNS.items()}

    def keys_of(self, name: str) -> int:
        """Keys of a shape of the blockwise body."""
        return self.thin if name == "thin" else self.tokens

    @classmethod
    def of(cls, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Stage:
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
            "backward hop": lambda: adding.dkdv(k, v, FULL, local=False, accum=None, out=few_into),
            "sums": lambda: [torch.add(a, b, out=a) for a, b in zip(into, came, strict=True)],
        }
        for kind in (Kind.RECTANGLE, Kind.CAUSAL):
            found[f"forward {kind.name}"] = partial(self._operator_forward, kind)
            found[f"backward {kind.name}"] = partial(self._operator_backward, kind)
        found["forward far"], found["backward far"] = self._far_forward, self._far_backward
        for name, seen in self.patterns.items():
            found[f"forward {name}"] = partial(folding.fold, self.k, self.v, seen, final=False)
            found[f"backward {name}"] = partial(adding.dkdv, self.k, self.v, seen, local=False, accum=None, out=into)
        for name, near in self.limits.items():
            found[f"forward {name}"] = partial(self._blockwise_forward, near, self.keys_of(name))
            found[f"backward {name}"] = partial(self._blockwise_backward, near, self.keys_of(name))
        return found

    @property
    def of_operator(self) -> tuple[str, ...]:
        """The steps that are one piece of the operator, forward and backward."""
        return tuple(f"{phase} {Kind.RECTANGLE.name}" for phase in PASSES)

    @property
    def scores(self) -> int:
        """Of such a piece."""
        return self.heads * self.tokens**2

    def speed(self, seconds: Mapping[str, float]) -> HostSpeed:
        """From what every step took, by name."""
        forward, backward = (self.body(phase, seconds) for phase in PASSES)
        return HostSpeed(forward, backward, self.key_seconds(seconds), self.q.shape[-1])

    def body(self, phase: str, seconds: Mapping[str, float]) -> Body:
        """Two shapes of each body tell its two constants; a hop with few keys what a row costs beside its pairs."""
        full, half = (seconds[f"{phase} {kind.name}"] for kind in (Kind.RECTANGLE, Kind.CAUSAL))
        rows, plane = self.heads * self.tokens, self.scores
        edge = max(half - full * (1 + 1 / self.tokens) / 2, 0.0) / rows
        row = max(seconds[f"{phase} hop"] - full * self.thin / self.tokens, 0.0) / rows
        (scores, _), (near, masked), (least, _) = (self._scores(name) for name in ("wide", "band", "thin"))
        wide, band, thin = (seconds[f"{phase} {name}"] / self.heads for name in ("wide", "band", "thin"))
        score = (wide - thin) / (scores - least) if wide > thin else wide / scores  # of tiny shapes noise is the most
        block_row = max(thin - score * least, 0.0) / self.tokens
        edges = max(band - score * near - block_row * self.tokens, 0.0) / masked
        added = 0.0 if phase == "forward" else self.key_seconds(seconds)
        far = self._far(phase, seconds)
        known = Body(full / plane, full / plane, full / plane, edge, score, edges, row, block_row, 0.0, added, far)
        return self._calls(phase, seconds, known)

    def _far(self, phase: str, seconds: Mapping[str, float]) -> float:
        """What a score with a far key costs more; nothing where the shape has none."""
        rows = min(FAR_ROWS, self.tokens)
        work = work_of(FULL, rows, FAR * self.tokens, self.heads, self.kv_heads)
        near = seconds[f"{phase} {Kind.RECTANGLE.name}"] * FAR * rows / self.tokens
        return max(seconds[f"{phase} far"] - near, 0.0) / work.far if work.far else 0.0

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
        return tiles_of(self.limits[name], self.tokens, self.keys_of(name), self.heads, self.kv_heads)

    def _operator_forward(self, kind: Kind) -> None:
        aten.operator_forward(self.q, self.k, self.v, kind, scale=self.scale)

    def _operator_backward(self, kind: Kind) -> None:
        aten.operator_backward(self.dout, self.q, self.k, self.v, self.out, self.lse, kind, scale=self.scale)

    def _far_forward(self) -> None:
        aten.operator_forward(self.q[:, self.few], self.far_k, self.far_v, Kind.RECTANGLE, scale=self.scale)

    def _far_backward(self) -> None:
        dout, q, out, lse = (x[:, self.few] for x in (self.dout, self.q, self.out, self.lse.transpose(1, 2)))
        lse = lse.transpose(1, 2)
        aten.operator_backward(dout, q, self.far_k, self.far_v, out, lse, Kind.RECTANGLE, scale=self.scale)

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
