"""Set-up of the tests of the referee."""

from __future__ import annotations

import pytest

from ringattn.conformance import ranks

from ..support.rank_processes import PRELOADED


@pytest.fixture(autouse=True, scope="session")
def _shared_server() -> None:
    """Let the referee start its processes from the server of the other tests."""
    ranks.PRELOADED = PRELOADED
