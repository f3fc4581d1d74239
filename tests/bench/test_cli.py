"""The command line before any command: names, help, version, and what it hands on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from ringattn import __version__
from ringattn.bench import cli

HEAVY = ("torch", "triton", "cupy", "matplotlib")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A command that keeps what it was given, in place of ``examples/demo.py``."""
    seen: list[object] = []
    app = typer.Typer()

    @app.command()
    def run(text: str = "", world: int = 1, fail: bool = False) -> None:
        """The whole story."""
        seen.extend((text, world))
        raise typer.Exit(7 if fail else 0)

    module = ModuleType("ringattn.examples.demo")
    vars(module)["app"] = app
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"ringattn {__version__}\n")


def test_options_reach_the_command_as_they_are(demo: list[object]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--world", "4", "--text", "a b"])
    assert result.exit_code == 0, result.output
    assert demo == ["a b", 4]


def test_exit_code_is_the_commands_own(demo: list[object]) -> None:
    assert CliRunner().invoke(cli.app, ["demo", "--fail"]).exit_code == 7


def test_bad_option_is_refused(demo: list[object]) -> None:
    assert CliRunner().invoke(cli.app, ["demo", "--wrold", "4"]).exit_code == 2
    assert not demo


def test_help_of_a_command_is_the_commands_own(demo: list[object]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "The whole story." in result.output
    assert "--world" in result.output


def test_unknown_command_is_refused() -> None:
    assert CliRunner().invoke(cli.app, ["dmeo"]).exit_code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from ringattn.bench import cli
try:
    cli.app(args={arguments!r}, prog_name="ringattn")
finally:
    assert not set(sys.modules) & set({HEAVY!r})
"""
    plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | {"TERM": "dumb"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=plain)
    assert result.returncode == 0, result.stderr
    assert "Usage: ringattn" in result.stdout


def test_no_help_has_words_in_brackets() -> None:
    """Rich takes them for markup, and shows nothing in their place."""
    folder = Path(cli.__file__).parent
    hidden = [
        f"{path.relative_to(folder)}: {text}"
        for path in folder.rglob("*.py")
        for text in re.findall(r'help=\s*f?"(.*?)"[,)\n]', path.read_text())
        if re.search(r"\[[a-z]", text)
    ]
    assert not hidden
