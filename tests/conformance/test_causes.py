"""Every defect of a deliberately broken ring is named, and the same ring without a defect is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ringattn.conformance import causes
from ringattn.conformance.cases import DROPOUT, Case
from ringattn.conformance.evidence import Evidence, collect_evidence, run_case
from ringattn.conformance.ranks import Ranks
from ringattn.conformance.referee import RIGHT, WRONG, Outcome, judge
from ringattn.conformance.standalone import GRADIENTS, attend_plainly

from ..support import broken_rings
from ..support.broken_rings import DEFECTS, reply_alone, run_defect

CASES = {
    "document": Case(documents="ragged"), "window": Case("window", layout="zigzag"), "sink": Case(scores="sink"),
    "lse": Case(gradients="out and lse"), "dropout": Case(scores="dropout"), "padding": Case("padding"),
    "unseen": Case("full"), "merge": Case("full"), "misrouted": Case("full"),
}  # fmt: skip
"""Cases that show a defect; the default shows the others."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Yield processes for one rank and for two, which all tests share."""
    worlds = {world: Ranks(world, f"{broken_rings.__name__}:none") for world in (1, 2)}
    yield worlds
    for processes in worlds.values():
        processes.close()


def verdict(ranks: dict[int, Ranks], defect: str, case: Case) -> Outcome:
    return judge(case, lambda case: ranks[case.world].run(run_defect, case, defect))


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named(defect: str, ranks: dict[int, Ranks]) -> None:
    case = CASES.get(defect, Case())
    outcome = verdict(ranks, defect, case)
    assert outcome.status == WRONG and outcome.cause.startswith(DEFECTS[defect]), outcome.sentence()
    assert (outcome.where and outcome.error and outcome.error > 1) or defect == "dropout"
    assert verdict(ranks, "none", case).status == RIGHT


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    return y


def attend(q: Any, k: Any, v: Any, call: Any, defect: str = "none") -> Any:
    return broken_rings.attend(defect, q, k, v, call)


MISTAKES: list[tuple[str, Case, Callable[..., Any]]] = [
    (causes.EQUAL_ROWS, Case(), lambda q, k, v, call: attend(q, k, v, call)[0] + torch.rand(q.shape)),
    (f"{causes.NOT_FINITE}: dk", Case(), lambda q, k, v, call: attend(q, scale_gradient(k, torch.nan), v, call)),
    ("dk is 1.001 dk", Case(), lambda q, k, v, call: attend(q, scale_gradient(k, 1.001), v, call)),
    (
        causes.LSE_GRADIENT,
        Case(gradients="out and lse"),
        lambda q, k, v, call: (attend(q, k, v, call)[0], scale_gradient(attend(q, k, v, call)[1], 0.0)),
    ),
    (
        causes.DROPOUT_SCALE,
        Case(scores="dropout"),
        lambda q, k, v, call: attend(q, k, v, call)[0] * (1 - call.dropout_p),
    ),
    (causes.HEADS, Case(scores="dropout"), lambda q, k, v, call: attend(q, k, v, call, "heads")),
    (
        causes.FUTURE,
        Case(dtype="bfloat16"),
        lambda q, k, v, call: attend(q, k, v, replace(call, causal=call.dtype == torch.float32)),
    ),
    (
        causes.PADDING,
        Case("padding", "ragged", gradients="out and lse"),
        lambda q, k, v, call: attend(q, k, v, replace(call, seqused_k=None)),
    ),
    (
        f"{causes.PADDING} (",  # only its first token
        Case("padding"),
        lambda q, k, v, call: attend(q, k, v, replace(call, seqused_k=tuple(n + 1 for n in call.seqused_k))),
    ),
    (
        "lse has no gradient",
        Case(gradients="out and lse"),
        lambda q, k, v, call: (attend(q, k, v, call)[0], attend(q, k, v, call)[1].detach()),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "case", "mistake"), MISTAKES, ids=[cause for cause, _, _ in MISTAKES])
def test_a_mistake_on_one_rank_is_named(cause: str, case: Case, mistake: Callable[..., Any]) -> None:
    outcome = judge(replace(case, world=1), partial(reply_alone, run_case, mistake))
    assert outcome.status != RIGHT and cause in outcome.cause + outcome.message, outcome.sentence()


@pytest.mark.parametrize("step", [1, -1])
def test_stale_keys_of_either_direction_are_named(step: int) -> None:
    case = Case(world=3)
    exact = attend_plainly(case.inputs(), case.call())
    shards, limits = torch.arange(case.tokens).chunk(3), dict.fromkeys(GRADIENTS, 1e-5)
    actual = {name: exact[name] for name in ("dk", "dv")}
    evidence = Evidence(case, case.inputs(), actual, shards, exact, limits, torch.ones(()), "")
    actual["dq"] = causes._compute_stale_dq(evidence, step, 1)
    assert causes.find_cause(evidence, lambda case: pytest.fail("a probe runs")) == causes.STALE


def test_each_hop_may_round_once() -> None:
    case = Case(world=4)
    limits = []
    for each in (case, replace(case, world=1, length_world=4)):
        results = {"positions": torch.arange(case.tokens), **attend_plainly(each.inputs(), each.call())}
        limits.append(collect_evidence(each, [results]).limits)
    assert all(limit > 1.5 * limits[1][name] for name, limit in limits[0].items())


@pytest.mark.parametrize(("share", "is_wrong"), [(0.0, True), (DROPOUT, False), (0.5, True)])
def test_too_few_and_too_many_dropped_weights_are_wrong(share: float, is_wrong: bool) -> None:
    case = Case(scores="dropout")
    weights = attend_plainly(case.inputs(), case.call())["weights"]
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)) >= share
    results = {"positions": torch.arange(case.tokens), "out": (weights * kept / (1 - share)).transpose(1, 2)}
    assert bool(collect_evidence(case, [results]).wrong_rate) is is_wrong
