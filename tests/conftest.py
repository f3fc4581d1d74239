"""What every test relies on: Triton's interpreter, seeds, and properties that are the same on every run."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported; workers and child processes inherit it

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from .support import compiles
from .support.interpreter import quicken

quicken()

# no deadline: the first call of an interpreted kernel is slow; derandomized: a change fails for what it changed
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("default"), max_examples=2000, derandomize=False)


def profile(markexpr: str) -> str:
    """Of properties, by ``-m``: thousands of examples where nightly tests alone are asked for."""
    return "nightly" if markexpr.split(" ")[0] == "nightly" else "default"


class PlainRoot:
    """A plugin of pytest: the root is a folder as any, else its parent comes first in ``sys.path``, and a clone that is
    called ``ringattn`` before the installed package."""

    @staticmethod
    def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(profile(config.option.markexpr))
    config.pluginmanager.register(PlainRoot())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    compiles.settle(items, nightly=profile(config.option.markexpr) == "nightly")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`tox -e nightly -- FILE` asks for two kinds of tests, and a file may hold one of them alone."""
    config = session.config
    named = config.args_source is pytest.Config.ArgsSource.ARGS and not config.option.keyword
    if named and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and profile(config.option.markexpr) == "nightly":
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Ranks that are threads take turns under Python's lock: on one core none waits until another one has woken up."""
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def forward_rings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each forward ring of each rank from now on."""
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
    """Fill what ``torch.empty`` and its kin return with NaN, so that an output nobody wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # what switches `fill_uninitialized_memory` (on by default) on
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As started by hand, whatever the tests run under: no variable of a launcher is set."""
    from ringattn.bench.common.ranks import JOB, LAUNCHERS, TORCHRUN

    for name in {*chain(*LAUNCHERS, JOB), TORCHRUN, "MASTER_ADDR", "MASTER_PORT"}:
        monkeypatch.delenv(name, raising=False)
