"""The cases of ``--target`` as tests; see :mod:`.plugin`."""

from __future__ import annotations

from typing import Any

import pytest

from .referee import judge


def test_conformance(conformance_case: Any, conformance_referee: Any) -> None:
    """Judge a case; a refusal that names the feature is skipped."""
    outcome = judge(conformance_case, conformance_referee.run)
    if outcome.status == "refused":
        pytest.skip(outcome.message)
    assert outcome.status == "right", outcome.sentence()
