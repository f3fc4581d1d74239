"""Choice of the test cases that run with every change; the others run nightly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_nightly(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return all values (or tuples) of a parameter; those that are not in ``fast`` are marked nightly."""

    def nightly(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)

    return [value if value in fast else nightly(value) for value in values]
