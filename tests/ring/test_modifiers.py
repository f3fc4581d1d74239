"""The CPU backend under what an interval alone does not say: padding, patterns of blocks, modified scores.

Against a dense formula of plain torch: float64 for the truth, the inputs' own dtype for PyTorch's error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import PLAIN, Bounds, Runs, Scores
from ringattn.ring.buffers import Seen
from ringattn.ring.cpu import blockwise
from ringattn.ring.cpu import regions as cutting
from ringattn.ring.cpu.aten import AtenBackward, AtenForward
from ringattn.ring.cpu.blockwise import first_word
from ringattn.ring.loop import add

from ..support.baselines import Results
from ..support.kernel_cases import Inputs
from ..support.tolerance import assert_as_exact_as_pytorch

SCALE = 0.3
QUERIES, SHARDS, BLOCK = 53, (40, 24, 37), 8
KEYS = sum(SHARDS)
Q_POSITIONS = torch.arange(QUERIES, dtype=torch.int32) * 3 + 1
K_POSITIONS = torch.arange(KEYS, dtype=torch.int32) * 2
SLOPES = {"alibi": torch.tensor([0.5, 0.1, 0.02, 0.0]), "alibi per batch row": torch.linspace(0, 0.7, 12).view(3, 4)}


class Fold(NamedTuple):
    """One shard of keys ``[start, end)``, and the disjoint parts of its mask."""

    start: int
    end: int
    parts: tuple[Bounds, ...]

    @property
    def keys(self) -> slice:
        return slice(self.start, self.end)


@dataclass(frozen=True)
class Case:
    """What ``mask`` and the other fields say about 53 queries and three shards of 101 keys."""

    mask: str = "full"
    used: tuple[int, ...] | None = None
    """Keys of each batch row, of all shards."""
    runs: bool = False
    parts: int = 1
    scores: Scores = PLAIN
    batch: int = 3
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    tiles: dict[str, int] = field(default_factory=dict)

    def inputs(self) -> Inputs:
        (heads, kv_heads), (dim, value_dim) = self.heads, self.dims
        shapes = (QUERIES, heads, dim), (KEYS, kv_heads, dim), (KEYS, kv_heads, value_dim), (QUERIES, heads, value_dim)
        q, k, v, dout = (torch.randn(self.batch, *shape).to(self.dtype) for shape in shapes)
        return Inputs(q, k, v, dout, torch.randn(self.batch, heads, QUERIES))

    def interval(self) -> tuple[Tensor, Tensor]:
        """Of key indices, per query."""
        rows, none = torch.arange(QUERIES), torch.zeros(QUERIES, dtype=torch.int64)
        lo, hi = {
            "full": (none, none + KEYS),
            "causal": (none, 2 * rows + 1),
            "diagonal": (none, rows + 31),  # the operator's causal squares
            "window": (rows - 5, rows + 41),
            "forward": (rows + 12, none + KEYS),
            "documents": (rows // 20 * 40, (rows // 20 + 1) * 40),
            "blind": (rows * 0 + 50, (rows - 20) * 3 + 50),
        }[self.mask]
        lo, hi = lo.clamp(0, KEYS), hi.clamp(0, KEYS)
        return lo, torch.maximum(lo, hi)

    def folds(self) -> list[Fold]:
        lo, hi = self.interval()
        edges = torch.tensor([0, *SHARDS]).cumsum(0).tolist()
        pattern = torch.rand(-(-QUERIES // BLOCK), -(-KEYS // BLOCK)) < 0.6
        found = []
        for start, end in pairwise(edges):
            used = None if self.used is None else torch.tensor(self.used).clamp(start, end).sub(start).int()
            runs = Runs(pattern[:, start // BLOCK : -(-end // BLOCK)], BLOCK) if self.runs else None
            cuts = [start + (end - start) * cut // self.parts for cut in range(self.parts + 1)]
            parts = []
            for a, b in pairwise(cuts):
                full = self.mask == "full" and self.parts == 1
                first, last = (None if full else x.clamp(a, b).sub(start).int() for x in (lo, hi))
                parts.append(Bounds(first, last, used, runs))
            found.append(Fold(start, end, tuple(parts)))
        return found


def dense(bounds: Bounds, batch: int, keys: int) -> Tensor:
    """Who sees whom, bool ``[B, Sq, Sk]``."""
    at = torch.arange(keys)
    seen = torch.ones(batch, QUERIES, keys, dtype=torch.bool)
    if bounds.lo is not None and bounds.hi is not None:
        seen &= (at >= bounds.lo[:, None]) & (at < bounds.hi[:, None])
    if bounds.used is not None:
        seen &= at < bounds.used[:, None, None]
    if bounds.runs is not None:
        by_query = bounds.runs.visible.repeat_interleave(BLOCK, 0)[:QUERIES]
        seen &= by_query.repeat_interleave(BLOCK, 1)[:, :keys]
    return seen


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention with every score and weight in memory; the scores in fp32 at least, the weights in q's dtype."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    wide = torch.promote_types(q.dtype, torch.float32)
    s = SCALE * q.to(wide) @ k.to(wide).mT
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.alibi_slopes is not None:
        s = s - scores.alibi_slopes[..., None, None] * (Q_POSITIONS[:, None] - K_POSITIONS).abs()
    seen = seen[:, None]
    blind = ~seen.any(-1)
    s = s.masked_fill(~seen, -torch.inf).masked_fill(blind[..., None], 0.0)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp().masked_fill(~seen, 0.0)
    if scores.dropout_p:
        weights = weights * kept(scores, *q.shape[:2]) / (1 - scores.dropout_p)
    return (weights.to(q.dtype) @ v).transpose(1, 2), lse.masked_fill(blind, -torch.inf)


def kept(scores: Scores, batch: int, heads: int) -> Tensor:
    items, numbers = torch.arange(batch)[:, None, None, None], scores.first_head + torch.arange(heads)[:, None, None]
    words = first_word(scores.dropout_seed, (Q_POSITIONS.long()[:, None], K_POSITIONS.long(), numbers, items))
    return words >= scores.dropout_p * 2**32


def operator_lse(x: Inputs, seen: Tensor) -> Tensor:
    """PyTorch's own lse in 16 bit, for plain scores: its quicker exponential there leaves an error of 6e-5."""
    q, k, v = (t.transpose(1, 2) for t in x[:3])
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    hidden = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)[:, None]
    lse: Tensor = operator(q, k, v, 0.0, False, attn_mask=hidden, scale=SCALE)[1]
    return lse.masked_fill(~seen.any(-1)[:, None], -torch.inf)


def differentiated(x: Inputs, seen: Tensor, scores: Scores, dtype: torch.dtype) -> Results:
    q, k, v = leaves = [t.to(dtype).requires_grad_() for t in x[:3]]
    out, lse = formula(q, k, v, seen, scores)
    grads = torch.autograd.grad((out, lse), leaves, (x.dout.to(dtype), x.dlse.to(lse.dtype)))
    return Results(out.detach(), lse.detach(), *grads)


def sizes(x: Inputs, truth: Results, seen: Tensor, scores: Scores) -> dict[str, float]:
    """The largest sum of absolute terms behind an entry: what rounding is relative to, as in ``kernel_cases``."""
    terms = Inputs(*(t.double() for t in x))
    q, k, v, dout, out = (t.abs().transpose(1, 2) for t in (*terms[:4], truth.out))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    eye = torch.eye(KEYS, dtype=torch.float64)[None, :, None].expand(len(x.k), KEYS, x.k.shape[2], KEYS)
    weights = formula(terms.q, terms.k, eye, seen, replace(scores, dropout_p=0.0))[0].transpose(1, 2)
    lse = truth.lse.nan_to_num(neginf=0.0)[..., None]
    exponents = ((weights.log() + lse).abs() + lse.abs()).nan_to_num(posinf=0.0)  # rounded in fp32, whatever the dtype
    weights = weights * (1 + torch.finfo(torch.float32).eps / torch.finfo(x.q.dtype).eps * exponents)
    factor = kept(scores, *q.shape[:2]) / (1 - scores.dropout_p) if scores.dropout_p else torch.ones(())
    ds = SCALE * weights * (factor * (dout @ v.mT) + (dout * out).sum(-1, keepdim=True) + terms.dlse.abs()[..., None])
    weights = weights * factor
    found = {"out": weights @ v, "dq": ds @ k, "dk": ds.mT @ q, "dv": weights.mT @ dout}
    return {name: sums.max().item() * (group if name in ("dk", "dv") else 1) for name, sums in found.items()}


def run(x: Inputs, folds: list[Fold], scores: Scores) -> Results:
    """One rank's calls: the first shard is its own."""
    q, k, v, dout, dlse = x
    work = AtenForward(q, softmax_scale=SCALE)
    seen = [[Seen(bounds=bounds, scores=placed(scores, fold)) for bounds in fold.parts] for fold in folds]
    near = [(k[:, fold.keys], v[:, fold.keys]) for fold in folds]
    for pair, parts in zip(near, seen, strict=True):
        for part in parts:
            work.fold(*pair, **part, final=part is seen[-1][-1])
    out, lse = work.result()
    back = AtenBackward(dout, q, out, lse, dlse, softmax_scale=SCALE)
    dk, dv = (torch.full_like(t, torch.nan, dtype=torch.float32) for t in (k, v))
    into = [(dk[:, fold.keys], dv[:, fold.keys]) for fold in folds]
    for part in seen[0]:
        back.dq(*near[0], **part, local=True)
    for number in range(1, len(folds)):
        add(back, near[number], seen[number], local=False, sums=None, into=into[number])
        for part in seen[number]:
            back.dq(*near[number], **part, local=False)
    add(back, near[0], seen[0], local=True, sums=None, into=into[0])
    return Results(out, lse, back.result(), dk.to(k.dtype), dv.to(v.dtype))


def placed(scores: Scores, fold: Fold) -> Scores:
    if not scores.by_position:
        return scores
    return replace(scores, q_positions=Q_POSITIONS, k_positions=K_POSITIONS[fold.keys])


def check(case: Case) -> None:
    torch.manual_seed(0)
    x, folds = case.inputs(), case.folds()
    by_shard = [torch.stack([dense(one, case.batch, end - start) for one in parts]) for start, end, parts in folds]
    seen = torch.cat([parts.any(0) for parts in by_shard], -1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in case.tiles.items():
            patch.setattr(cutting if hasattr(cutting, name) else blockwise, name, value)
        ours = run(x, folds, case.scores)
    theirs = differentiated(x, seen, case.scores, case.dtype)
    if case.dtype != torch.float32 and case.scores.is_plain and case.dims[0] == case.dims[1]:
        theirs = theirs._replace(lse=operator_lse(x, seen))
    truth = differentiated(x, seen, case.scores, torch.float64)
    magnitudes = sizes(x, truth, seen, case.scores)
    for name, a, b, c in zip(Results._fields, ours, theirs, truth, strict=True):
        assert_as_exact_as_pytorch(name, a, b, c, magnitude=magnitudes.get(name))


SMALL = {"MIN_ROWS": 6, "FOLDED_ROWS": 16, "MIN_BLOCK_ROWS": 4, "TILE_KEYS": 8, "TILE_SCORES": 64}
SQUARES = {"MIN_ROWS": 6, "BAND_ROWS": 8, "NARROW_KEYS": 7}
DROPOUT = Scores(dropout_p=0.3, dropout_seed=2**63 + 11, first_head=5)
EVERYTHING = replace(DROPOUT, softcap=1.5, alibi_slopes=SLOPES["alibi per batch row"])
ALONE: dict[str, dict[str, Any]] = {
    "padding": {"used": (70, 0, 101)},
    "padding alike": {"used": (30, 30, 64), "mask": "diagonal"},
    "runs": {"runs": True},
    "runs in an interval": {"runs": True, "mask": "window"},
    "runs in squares": {"runs": True, "mask": "diagonal"},
    "window": {"mask": "window"},
    "parts": {"parts": 3, "mask": "window"},
    "softcap": {"scores": Scores(softcap=0.8), "mask": "causal"},
    **{name: {"scores": Scores(alibi_slopes=slopes), "mask": "diagonal"} for name, slopes in SLOPES.items()},
    "dropout": {"scores": DROPOUT, "mask": "causal"},
    "all scores": {"scores": EVERYTHING, "mask": "documents"},
    "all": {"scores": EVERYTHING, "mask": "blind", "used": (90, 0, 61), "runs": True, "parts": 2, "dims": (16, 24)},
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", [{}, SMALL, SQUARES], ids=["as it is", "small tiles", "squares"])
@pytest.mark.parametrize("name", ALONE)
def test_each_alone_and_all_together(name: str, tiles: dict[str, int], dtype: torch.dtype) -> None:
    check(Case(**ALONE[name], tiles=tiles, dtype=dtype))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = draw(st.sampled_from([(4, 2), (3, 3), (4, 1)]))
    batch = draw(st.integers(1, 3))
    by_row = torch.linspace(0, 0.5, batch * heads[0]).view(batch, heads[0])
    slopes = draw(st.sampled_from([None, by_row[0], by_row]))
    scores = Scores(
        softcap=draw(st.sampled_from([0.0, 1.5])),
        alibi_slopes=slopes,
        dropout_p=draw(st.sampled_from([0.0, 0.2])),
        dropout_seed=draw(st.integers(0, 2**64 - 1)),
        first_head=draw(st.integers(0, 40)),
    )
    return Case(
        mask=draw(st.sampled_from(["full", "causal", "diagonal", "window", "forward", "documents", "blind"])),
        used=draw(st.none() | st.tuples(*[st.integers(0, KEYS)] * batch)),
        runs=draw(st.booleans()),
        parts=draw(st.integers(1, 2)),
        scores=draw(st.sampled_from([PLAIN, scores])),
        batch=batch,
        heads=heads,
        dims=(16, draw(st.sampled_from([16, 24]))),
        tiles=draw(st.sampled_from([{}, SMALL, SQUARES])),
    )


@given(cases())
def test_any_combination(case: Case) -> None:
    check(case)
