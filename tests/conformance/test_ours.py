"""``ring_attention`` on the list of cases that ``ringattn conformance`` runs on every target."""

from __future__ import annotations

import pytest

from ringattn import Layout
from ringattn.conformance.cases import Case, select_cases
from ringattn.conformance.protocol import default_positions
from ringattn.conformance.referee import RIGHT, Referee

from ..support.mask_cases import RingCase, check_case
from ..support.rank_processes import PRELOADED

CASES = select_cases(lambda case: "", (1, 2, 3, 4, 5, 6))[0]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_as_exact_as_pytorch(case: Case) -> None:
    """Virtual ranks are compared with a stricter limit than that of other targets."""
    call = case.call()
    options = case.options() | {"prefix_length": call.prefix_length or None}
    options |= {"dropout_p": call.dropout_p, "dropout_seed": call.dropout_seed}
    arguments = {name: value for name, value in options.items() if value is not None}
    shards = [default_positions(case.call(rank)).tolist() for rank in range(case.world)]
    layout = Layout([[(at, 1) for at in shard] for shard in shards])
    grads = "" if case.gradients == "none" else "qkvs"
    check_case(RingCase(layout, case.inputs(0), arguments, sink=call.sink, through_lse=call.needs_lse, grads=grads))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_case_is_right_in_processes() -> None:
    with Referee("ringattn", preload=PRELOADED) as referee:
        cases = referee.describe()["cases"]
        assert {case.world for case in cases} == {1, 2, 3, 4, 5, 6}
        assert [outcome.sentence() for outcome in referee.outcomes(cases) if outcome.status != RIGHT] == []
