"""Every defect of a deliberately broken ring is named, and the same ring without a defect is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ringattn.conformance import causes
from ringattn.conformance.cases import Case
from ringattn.conformance.causes import Evidence
from ringattn.conformance.oracle import compute_expected
from ringattn.conformance.ranks import Ranks
from ringattn.conformance.referee import RIGHT, WRONG, Outcome, judge

from ..support import broken_rings
from ..support.broken_rings import DEFECTS, run_defect
from ..support.rank_processes import PRELOADED

CASES = {
    "document": Case(documents="ragged"), "window": Case("window", layout="zigzag"), "sink": Case(scores="sink"),
    "lse": Case(gradients="out and lse"), "dropout": Case(scores="dropout"), "padding": Case("padding"),
    "unseen": Case("full"), "merge": Case("full"), "misrouted": Case("full"),
}  # fmt: skip
"""Cases that show a defect; the default shows the others."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Yield processes for one rank and for two, which all tests share."""
    worlds = {world: Ranks(world, f"{broken_rings.__name__}:none", preload=PRELOADED) for world in (1, 2)}
    yield worlds
    for processes in worlds.values():
        processes.close()


def verdict(ranks: dict[int, Ranks], defect: str, case: Case) -> Outcome:
    return judge(case, 0, lambda case, probe: ranks[case.world].run(run_defect, case, 0, probe, defect))


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named(defect: str, ranks: dict[int, Ranks]) -> None:
    case = CASES.get(defect, Case())
    outcome = verdict(ranks, defect, case)
    assert outcome.status == WRONG and outcome.cause.startswith(DEFECTS[defect]), outcome.sentence()
    assert (outcome.where and outcome.error and outcome.error > 1) or defect == "dropout"
    assert verdict(ranks, "none", case).status == RIGHT


def test_the_first_token_of_padding_is_padding() -> None:
    case = Case("padding")
    lengths = case.call(probe=True).seqused_k
    assert lengths is not None
    seen = case.visible(seqused_k=lengths[:1]).reshape(case.tokens, case.tokens).clone()
    seen[-1, lengths[0]] = True
    whole = case.inputs(0)
    evidence = Evidence(case, whole, {}, compute_expected(case, whole), [torch.arange(case.tokens)], lambda: seen)
    assert causes._visibility(evidence).startswith(f"{causes.PADDING} (1 pairs")


@pytest.mark.parametrize("step", [1, -1])
def test_stale_keys_of_either_direction_are_named(step: int) -> None:
    case = Case(world=3)
    whole = case.inputs(0)
    expected, shards = compute_expected(case, whole), [*torch.arange(case.tokens).chunk(3)]
    evidence = Evidence(case, whole, dict(expected.exact), expected, shards, lambda: None)
    evidence.actual["dq"] = causes._stale_dq(evidence, step, 1)
    assert causes.find_cause(evidence) == causes.STALE


def test_each_hop_may_round_once() -> None:
    case = Case(world=4)
    alone = replace(case, world=1, length_world=4)
    limits, alone_limits = (compute_expected(each, each.inputs(0)).limits for each in (case, alone))
    assert all(limits[name] > limit for name, limit in alone_limits.items())
