"""The pytest plugin and its test, with options and referees that are given directly."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ringattn.conformance import plugin, referee, test_target
from ringattn.conformance.cases import Case
from ringattn.conformance.ranks import Reply

OPTIONS = {"--target": "mine:ring", "--target-world": "4,2", "--target-deadline": 7.5, "--target-seed": 3}


class Opened:
    """Stand-in for a referee whose target has three cases."""

    log: ClassVar = list[Any]()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.log.append((*arguments, named))

    def describe(self) -> tuple[str, list[Case], dict[Case, str]]:
        if self.log[-1][0] == "bad":
            raise ValueError("TARGET is bad")
        return "1.0", [Case(world=world, mask=mask) for world, mask in ((4, "full"), (2, "full"), (4, "causal"))], {}

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("closed")


def config(**changes: Any) -> Any:
    values = {name: changes.get(name.removeprefix("--"), value) for name, value in OPTIONS.items()}
    return SimpleNamespace(getoption=lambda name, default=None: values[name])


def test_the_options_reach_the_referee(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = pytest.Parser(_ispytest=True)
    parser.getgroup("other").addoption("--target-seed", type=int, default=9)
    plugin.pytest_addoption(parser)  # the option of the other plugin stays
    defaults = vars(parser.parse_known_args([]))
    assert {**defaults}.items() >= {
        "target": "", "target_world": "1,2,3,4", "target_deadline": 30.0, "target_seed": 9,
    }.items()  # fmt: skip
    monkeypatch.setattr(referee, "Referee", Opened)
    monkeypatch.setattr(Opened, "log", log := list[Any]())
    made = list[Any]()
    metafunc: Any = SimpleNamespace(
        config=config(), fixturenames=["conformance_case"], parametrize=lambda *how, **named: made.append((*how, named))
    )
    plugin.pytest_generate_tests(metafunc)
    opened = ("mine:ring", {"worlds": [4, 2], "seed": 3, "deadline": 7.5})
    assert log == [opened, "closed"]
    (name, cases, named), *others = made
    assert name == "conformance_case" and [case.world for case in cases] == [2, 4, 4] and not others
    assert [named["ids"](case) for case in cases] == [case.id for case in cases]
    log.clear()
    fixture: Any = inspect.unwrap(plugin.conformance_referee)
    assert [type(each) for each in fixture(config())] == [Opened] and log == [opened, "closed"]
    made.clear()
    metafunc.config = config(target="")
    plugin.pytest_generate_tests(metafunc)
    metafunc.fixturenames = ["tmp_path"]
    plugin.pytest_generate_tests(metafunc)
    assert [cases for _, cases, _ in made] == [[]]
    metafunc.config, metafunc.fixturenames = config(target="bad"), ["conformance_case"]
    with pytest.raises(pytest.UsageError, match="TARGET is bad"):
        plugin.pytest_generate_tests(metafunc)
    assert plugin.pytest_report_header(config()) == ["conformance: mine:ring, seed 3"]
    assert plugin.pytest_report_header(config(target="")) == []


def test_a_case_passes_fails_or_is_skipped() -> None:
    def run(error: str, text: str) -> None:
        judging = SimpleNamespace(run=lambda case: Reply("error", [], error, text))
        test_target.test_conformance(Case("window"), judging)

    with pytest.raises(pytest.skip.Exception, match="window_size is not supported"):
        run("ValueError", "window_size is not supported")
    with pytest.raises(AssertionError, match="raises: RuntimeError: window_size"):
        run("RuntimeError", "window_size is not supported")
