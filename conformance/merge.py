"""Check of a correction step: a function that merges ``(out, lse)`` parts of attention over different keys.

``merge(outs, lses)`` gets lists of ``[B, S, H, D]`` and of ``[B, H, S]`` (float32, natural log) and returns both
merged. A row that sees no key has ``out = 0`` and ``lse = -inf``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..bench.common.result import Result
from .causes import BASE_2_MERGE, BLIND, NOT_FINITE, UNSCALED
from .protocol import Target

if TYPE_CHECKING:
    from .referee import Referee

KINDS = {
    "two parts": 2, "five parts": 5, "one part": 1, "bfloat16 parts": 3, "rows that one part does not see": 3,
    "rows that no part sees": 3, "large lse": 3, "parts in reverse": 5,
}  # fmt: skip
"""Kinds of parts, and how many there are."""
UNITS = dict.fromkeys(("case", "status", "cause", "error", "message"), "")
Parts = tuple[list[Tensor], list[Tensor]]


def build_parts(kind: str, seed: int) -> Parts:
    """Return the parts ``(outs, lses)`` of a kind."""
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(2, 8, 3, 16, generator=generator) for _ in range(KINDS[kind])]
    lses = [3 * torch.randn(2, 3, 8, generator=generator) for _ in outs]
    blind = {"rows that one part does not see": lses[:1], "rows that no part sees": lses}.get(kind, [])
    for out, lse in zip(outs, blind, strict=False):
        lse[:, :, ::3], out[:, ::3] = -torch.inf, 0.0
    lses = [lse + 300 * (kind == "large lse") for lse in lses]
    outs = [out.bfloat16() if kind == "bfloat16 parts" else out for out in outs]
    return (outs[::-1], lses[::-1]) if kind == "parts in reverse" else (outs, lses)


def merge_parts(target: Target, rank: int, kind: str, seed: int) -> list[Tensor]:
    """Call the target on one rank."""
    return [*target.adapter.attend(*build_parts(kind, seed))]


def merged(outs: list[Tensor], weights: Tensor, *, is_mean: bool = True) -> Tensor:
    """Return the weighted mean or sum of parts in float64; ``weights`` are ``[parts, B, H, S]``."""
    scaled = weights.transpose(2, 3)[..., None]
    total = (torch.stack(outs).double() * scaled).sum(0)
    return total / scaled.sum(0).clamp(min=1e-300) if is_mean else total


def _alternatives(outs: list[Tensor], lse: Tensor) -> Iterator[tuple[str, Tensor]]:
    relative = (lse - lse.amax(0)).nan_to_num(nan=0.0, neginf=-torch.inf)
    yield BASE_2_MERGE, merged(outs, relative.exp2())
    yield UNSCALED, merged(outs, torch.ones_like(lse))
    yield UNSCALED, merged(outs, torch.ones_like(lse), is_mean=False)


def judge_merge(referee: Referee) -> Result:
    """Judge a merge function on every kind of parts."""
    result = Result("conformance --merge", UNITS)
    for kind in KINDS:
        reply = referee.request(1, merge_parts, kind, referee.seed)
        row = {"case": kind, "status": "right", "cause": "", "error": None, "message": reply.text}
        if reply.status != "ok":
            row |= {"status": "raises" if reply.status == "error" else reply.status}
        else:
            out, lse = (x.double() for x in reply.values[0])
            outs, lses = build_parts(kind, referee.seed)
            stacked = torch.stack(lses).double()
            pivot = stacked.amax(0).nan_to_num(neginf=0.0)
            exact, total = merged(outs, (stacked - pivot).exp()), stacked.logsumexp(0)
            # A weight is the exponential of a rounded lse, so it is off by as much as the lse.
            rounding = 4 * len(outs) * 2.0**-23 * max(1.0, float(pivot.abs().max()))
            limit = (rounding + torch.finfo(outs[0].dtype).eps) * max(1.0, float(exact.abs().max()))
            errors = {"out": (out - exact).abs(), "lse": torch.where(lse == total, 0.0, (lse - total).abs())}
            limits = {"out": limit, "lse": rounding}
            ratios = {
                name: float((error / limits[name]).nan_to_num(nan=torch.inf).max()) for name, error in errors.items()
            }
            row |= {"error": max(ratios.values())}
            if max(ratios.values()) > 1:
                near = (cause for cause, other in _alternatives(outs, stacked) if (out - other).abs().max() <= limit)
                blind = BLIND if (total == -torch.inf).any() else "" if out.isfinite().all() else NOT_FINITE
                wrong = " and ".join(name for name, ratio in ratios.items() if ratio > 1)
                row |= {"status": "wrong", "cause": blind or next(near, "no known cause"), "message": f"{wrong} wrong"}
        result.rows.append(row)
        if row["status"] != "right":
            result.failed.append(f"{kind}: {row['status']}: {row['cause']} {row['message']}")
    return result
