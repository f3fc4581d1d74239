"""Which cases of a test run with every change, and which at night alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_nightly(values: Iterable[Any], *fast: Any) -> list[Any]:
    """All values of a parameter, or tuples of several parameters; those that are not among ``fast`` are nightly."""

    def nightly(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)

    return [value if value in fast else nightly(value) for value in values]
