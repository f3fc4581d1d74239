"""Set-up and fixtures of all tests: Triton's interpreter, seeds, and profiles of property tests."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read on import of triton, inherited by workers

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from .support import compiles
from .support.interpreter import speed_up_interpreter

speed_up_interpreter()

# No deadline, because the first call of an interpreted kernel is slow. Derandomized, so that a failure comes from the
# change under test.
settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=2000, derandomize=False)


def profile(markexpr: str) -> str:
    """Return the Hypothesis profile for pytest's ``-m``: "nightly" if the expression starts with nightly."""
    return "nightly" if markexpr.split(" ")[0] == "nightly" else "default"


class PlainRoot:
    """Pytest plugin that collects the root as a plain folder.

    Otherwise pytest puts the root's parent first in ``sys.path``, and a clone called ``ringattn`` shadows the installed
    package.
    """

    @staticmethod
    def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(profile(config.option.markexpr))
    config.pluginmanager.register(PlainRoot())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    compiles.mark_nightly(items, nightly=profile(config.option.markexpr) == "nightly")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # `tox -e nightly -- FILE` runs pytest twice, and a file may have tests for only one of the runs.
    config = session.config
    named = config.args_source is pytest.Config.ArgsSource.ARGS and not config.option.keyword
    if named and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and profile(config.option.markexpr) == "nightly":
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Pin the process to one core.

    Virtual ranks are threads and take turns under the GIL. On one core no rank waits for another thread to wake up.
    """
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def forward_rings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gains an entry for every forward ring of every rank."""
    from ringattn.ring import loop

    runs: list[object] = []
    forward = loop.forward

    def counted(*arguments: Any) -> None:
        runs.append(None)
        forward(*arguments)

    monkeypatch.setattr(loop, "forward", counted)
    return runs


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill the results of ``torch.empty`` and its kin with NaN, so that an unwritten output fails the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # `fill_uninitialized_memory` (on by default) needs this
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the environment variables of launchers, so that a command runs as if started by hand."""
    from ringattn.bench.common.ranks import JOB, LAUNCHERS, TORCHRUN

    for name in {*chain(*LAUNCHERS, JOB), TORCHRUN, "MASTER_ADDR", "MASTER_PORT"}:
        monkeypatch.delenv(name, raising=False)
