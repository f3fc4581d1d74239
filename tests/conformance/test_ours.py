"""``ring_attention`` on the list of cases that ``ringattn conformance`` runs on every target."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn import Layout
from ringattn.conformance.cases import Case, select_cases
from ringattn.conformance.referee import RIGHT, Referee
from ringattn.conformance.standalone import default_positions, uneven_lengths
from ringattn.reference.scores import AttentionOptions

from ..support.mask_cases import RingCase, check_case

CASES = select_cases(lambda case: "", (1, 2, 3, 4, 5, 6))[0]


def attention_options(call: Any) -> dict[str, Any]:
    """Return the mask and the scores of a call as arguments of ``ring_attention`` and of the reference."""
    options = {name: getattr(call, name) for name in AttentionOptions.__annotations__ if hasattr(call, name)}
    options["prefix_length"] = call.prefix_length or None
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_as_exact_as_pytorch(case: Case) -> None:
    """Virtual ranks are compared with a stricter limit than that of other targets."""
    call, lengths = case.call(), uneven_lengths(case.world)
    is_uneven = case.layout == "uneven"
    layout = Layout.uneven(lengths) if is_uneven else getattr(Layout, case.layout)(case.tokens, case.world)
    assert all(layout.positions(rank).equal(default_positions(case.call(rank))) for rank in range(case.world))
    grads = "" if case.gradients == "none" else "qkvs"
    check_case(
        RingCase(
            layout, case.inputs(), attention_options(call), sink=call.sink, through_lse=call.needs_lse, grads=grads
        )
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_case_is_right_in_processes() -> None:
    with Referee("ringattn") as referee:
        cases = referee.describe()[1]
        assert {case.world for case in cases} == {1, 2, 3, 4, 5, 6}
        assert [outcome.sentence() for outcome in referee.outcomes(cases) if outcome.status != RIGHT] == []
