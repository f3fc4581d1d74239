"""Pytest plugin: ``pytest --pyargs ringattn.conformance --target TARGET`` runs every case as a test.

Refused cases are skipped with the target's reason. JUnit comes from pytest itself (``--junitxml``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the referee; another plugin's option of the same name stays."""
    group = parser.getgroup("ringattn conformance")
    for name, kind, default, text in (
        ("--target", str, "", "package.module[:name], or the name of a ready adapter, for ringattn.conformance"),
        ("--target-world", str, "1,2,3,4", "numbers of ranks"),
        ("--target-deadline", float, 30.0, "seconds for one case"),
        ("--target-seed", int, 0, "seed of the inputs"),
    ):
        with suppress(ValueError):
            group.addoption(name, type=kind, default=default, help=text)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the target and the seed, if there is a target."""
    target = config.getoption("--target", "")
    return [f"conformance: {target}, seed {config.getoption('--target-seed')}"] if target else []


def _open_referee(config: pytest.Config) -> Any:
    from .referee import Referee

    target, worlds, deadline, seed = (
        config.getoption(f"--target{name}") for name in ("", "-world", "-deadline", "-seed")
    )
    return Referee(target, worlds=[*map(int, worlds.split(","))], seed=seed, deadline=deadline)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests that take ``conformance_case`` by the target's cases."""
    if "conformance_case" in metafunc.fixturenames:
        cases = []
        if metafunc.config.getoption("--target"):
            try:
                with _open_referee(metafunc.config) as referee:
                    cases = sorted(referee.describe()[1], key=lambda case: case.world)
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None
        metafunc.parametrize("conformance_case", cases, ids=lambda case: case.id)


@pytest.fixture(scope="session")
def conformance_referee(pytestconfig: pytest.Config) -> Iterator[Any]:
    """Yield the referee of ``--target``."""
    with _open_referee(pytestconfig) as referee:
        yield referee
