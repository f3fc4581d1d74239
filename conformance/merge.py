"""Check of a correction step: a function that merges ``(out, lse)`` parts of attention over different keys.

``merge(outs, lses)`` gets lists of ``[B, S, H, D]`` and of ``[B, H, S]`` (float32, natural log) and returns both
merged. A row that sees no key has ``out = 0`` and ``lse = -inf``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..bench.common.result import Result
from .cases import Case
from .causes import NO_CAUSE, find_output_cause, weigh_parts, wrong_merges
from .evidence import Evidence
from .protocol import Target
from .standalone import MisuseError

if TYPE_CHECKING:
    from .referee import Referee

KINDS = {
    "two parts": 2, "five parts": 5, "one part": 1, "bfloat16 parts": 3, "rows that one part does not see": 3,
    "rows that no part sees": 3, "large lse": 3, "parts in reverse": 5,
}  # fmt: skip
"""Kinds of parts, and how many there are."""
UNITS = dict.fromkeys(("case", "status", "cause", "error", "message"), "")


def build_parts(kind: str, seed: int) -> tuple[list[Tensor], list[Tensor]]:
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
    """Call the target on one rank.

    Raises:
        MisuseError: If it does not return ``(out, lse)`` with the shapes of a part, or if it changes the parts.
    """
    (outs, lses), (old_outs, old_lses) = (build_parts(kind, seed) for _ in range(2))
    merged = target.adapter.attend(outs, lses)
    shapes = [[*getattr(x, "shape", ())] for x in merged] if isinstance(merged, Sequence) else type(merged).__name__
    if shapes != [[*old_outs[0].shape], [*old_lses[0].shape]]:
        raise MisuseError(f"merge returned {shapes}: it must return (out, lse) with the shapes of a part")
    if not all(map(torch.equal, (*outs, *lses), (*old_outs, *old_lses))):
        raise MisuseError("merge changed its parts")
    return [*merged]


def judge_merge(referee: Referee) -> Result:
    """Judge a merge function on every kind of parts."""
    result = Result("conformance --merge", UNITS)
    for kind in KINDS:
        reply = referee.request(1, merge_parts, kind, referee.seed)
        failure = "misuse" if reply.error == "MisuseError" else "raises" if reply.error else reply.status
        status, cause, error, message = failure, "", None, reply.text
        if reply.status == "ok":
            cause, error = _judge_parts(*build_parts(kind, referee.seed), *reply.values[0])
            status = "wrong" if error > 1 else "right"
        result.rows.append(dict(zip(UNITS, (kind, status, cause, error, message), strict=True)))
        result.failed += [f"{kind}: {status}: {cause}{message}"] * (status != "right")
    return result


def _judge_parts(outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> tuple[str, float]:
    """Return the cause of a wrong merge, and the largest error as a multiple of its limit."""
    parts, stacked = torch.stack(outs).double(), torch.stack(lses).double()
    pivot, total = stacked.amax(0).nan_to_num(neginf=0.0), stacked.logsumexp(0)
    mean = weigh_parts(parts, (stacked - pivot).exp())
    # A weight is the exponential of a rounded lse, so it is off by as much as the lse.
    rounding = 4 * len(outs) * 2.0**-23 * max(1.0, float(pivot.abs().max()))
    limits = {"out": (rounding + torch.finfo(outs[0].dtype).eps) * max(1.0, float(mean.abs().max())), "lse": rounding}
    exact = {"out": mean, "lse": total, "blind": total == -math.inf}
    evidence = Evidence(Case(), {}, {"out": out, "lse": lse}, (), exact, limits, torch.ones(()), "")
    error = max(evidence.errors.values())
    return find_output_cause(evidence, wrong_merges(parts, stacked)) or NO_CAUSE if error > 1 else "", error
