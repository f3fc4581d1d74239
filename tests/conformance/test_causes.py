"""Every defect of a deliberately broken ring is named, and the same ring without a defect is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringattn.conformance.cases import Case
from ringattn.conformance.ranks import Ranks
from ringattn.conformance.referee import RIGHT, WRONG, Outcome, judge

from ..support import broken_rings
from ..support.broken_rings import DEFECTS, run_defect

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
