"""Tests of the command line as a whole: command names, help, completion, exit codes and interruptions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from ringattn import __version__
from ringattn.bench import cli
from ringattn.bench.common.flags import LayoutName

from ..support.nightly import rest_nightly

HEAVY = ("torch", "triton", "cupy", "matplotlib")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace ``ringattn demo`` by a command that records its arguments in the returned list."""
    arguments: list[object] = []
    ends = {
        "exit": typer.Exit(7), "interrupt": KeyboardInterrupt(), "value": ValueError("q has 3 dims:\n  4 are needed"),
        "later": NotImplementedError("not yet"), "flag": typer.BadParameter("--text is odd"),
        "extra": ModuleNotFoundError("No module named 'jinja2'", name="jinja2.sandbox"),
        "module": ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"),
    }  # fmt: skip
    app = typer.Typer()

    @app.command()
    def run(
        text: str = "", world: int = typer.Option(1, min=1), end: str = "", layout: LayoutName | None = None
    ) -> None:
        """Print the story."""
        arguments.extend((text, world))
        if end:
            raise ends[end]

    module = ModuleType("ringattn.bench.demo.command")
    vars(module)["app"] = app
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return arguments


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str) -> None:
    result = CliRunner().invoke(cli.app, [flag])
    assert (result.exit_code, result.output) == (0, f"ringattn {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [(["timeline"], "ringattn bench timeline"), (["bench", "predict"], "ringattn predict"), (["bench", "host s"], "")],
)
def test_a_command_in_the_wrong_group_is_suggested(arguments: list[str], suggestion: str) -> None:
    ran = CliRunner().invoke(cli.app, arguments, prog_name="ringattn")
    assert ran.exit_code == 2 and len(ran.output.splitlines()) == 1
    assert ran.output.rstrip("\n").endswith(f"Did you mean `{suggestion}`?") == bool(suggestion)


@pytest.mark.parametrize(
    ("words", "completions"),
    [("ringattn pre", ["predict"]), ("ringattn predict --ti", []), ("ringattn predict --sl", ["--slots", "--slow"]),
     ("ringattn bench ho", ["host"]), ("ringattn bench host --tim", ["--timer"]),
     ("ringattn show --layout z", ["zigzag"])],
)  # fmt: skip
def test_completion(words: str, completions: list[str]) -> None:
    environment = {"_RINGATTN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = CliRunner().invoke(cli.app, [], prog_name="ringattn", env=environment)
    assert (ran.exit_code, ran.output.split()) == (0, completions)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a detached process has no shell among its parents
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: (shell, shell))
    ran = CliRunner().invoke(cli.app, ["--show-completion", shell], prog_name="ringattn")
    assert ran.exit_code == 0 and "_RINGATTN_COMPLETE" in ran.output


CLOSED = [["show"], ["--help"], ["show", "-h"], ["--version"], ["predict", "--json", "-"], ["bench", "host", "-h"]]


@pytest.mark.parametrize("arguments", rest_nightly(CLOSED, CLOSED[0]), ids=" ".join)
def test_a_closed_pipe_ends_a_command_silently(arguments: list[str]) -> None:
    # Like `ringattn show | head -1`: no message, and the exit code of a process that SIGPIPE ends in a shell.
    assert run_with_closed_stream("stdout", arguments) == (141, "")
    assert arguments != ["--help"] or run_with_closed_stream("stderr", ["no-such-command"]) == (141, "")


def run_with_closed_stream(stream: str, arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of a command with one stream closed, and its output on the other."""
    read, write = os.pipe()
    os.close(read)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: write}
    ran = subprocess.run([sys.executable, "-m", "ringattn", *arguments], **streams, text=True, timeout=150)
    os.close(write)
    return ran.returncode, (ran.stdout or "") + (ran.stderr or "")


@pytest.mark.parametrize(("arguments", "line"), [
    (["dmeo"], "ringattn: No such command 'dmeo'"),
    (["bench", "foo"], "ringattn bench: No such command 'foo'"),
    (["bench", "--foo"], "ringattn bench: No such option: --foo"),
    ([], " Usage: ringattn [OPTIONS] COMMAND"),
    (["bench"], " Usage: ringattn bench [OPTIONS] COMMAND"),
])  # fmt: skip
def test_unknown_commands_are_refused(arguments: list[str], line: str) -> None:
    ran = CliRunner().invoke(cli.app, arguments, prog_name="ringattn")
    lines = ran.output.strip("\n ").splitlines()
    assert ran.exit_code == 2 and lines[0].startswith(line.strip()) and (len(lines) == 1) == ("No such" in line)
    assert "No such" in line or lines[-1].startswith("╰")


def test_options_and_help_reach_the_command(demo: list[object]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--world", "4", "--text", "a b"])
    assert result.exit_code == 0 and demo == ["a b", 4], result.output
    for flag in ("-h", "--help"):
        result = CliRunner().invoke(cli.app, ["demo", flag])
        assert result.exit_code == 0 and "Print the story." in result.output and "--world" in result.output


@pytest.mark.parametrize(("arguments", "code", "line"), [
    (["--end", "exit"], 7, ""),
    (["--end", "interrupt"], 130, "interrupted"),
    (["--end", "value"], 2, "ringattn demo: q has 3 dims: 4 are needed"),
    (["--end", "later"], 2, "ringattn demo: not yet"),
    (["--end", "flag"], 2, "ringattn demo: --text is odd"),
    (["--end", "extra"], 2, cli.EXTRA),
    (["--wrold", "4"], 2, "ringattn demo: No such option: --wrold"),
    (["--world", "0"], 2, "ringattn demo: Invalid value for '--world': "),
    (["--layout", "foo"], 2, "ringattn demo: Invalid value for '--layout': 'foo' is not one of 'contiguous', "),
])  # fmt: skip
def test_exit_codes_and_messages(arguments: list[str], code: int, line: str, alone: None, demo: list[object]) -> None:
    result = CliRunner().invoke(cli.app, ["demo", *arguments], prog_name="ringattn")
    assert result.exit_code == code and result.stderr.startswith(line) and not result.stdout, result.output
    assert len(result.output.splitlines()) == (1 if line else 0) and "Input" not in result.output


def test_a_module_outside_of_the_extra_is_named(demo: list[object]) -> None:
    ran = CliRunner().invoke(cli.app, ["demo", "--end", "module"], prog_name="ringattn")
    assert isinstance(ran.exception, ModuleNotFoundError) and ran.exception.name == "flash_attn"


def test_a_closed_pipe_discards_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w") as first, open(os.dup(write), "w") as second:
        monkeypatch.setattr(sys, "stdout", first)
        monkeypatch.setattr(sys, "stderr", second)
        assert cli._silence_output() == 141
        for stream in (first, second):
            print("lost", file=stream, flush=True)
    with open(read) as rest:
        assert rest.read() == ""


def test_only_rank_0_reports_an_interruption(demo: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank prints its own errors.
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    interrupted, later = (CliRunner().invoke(cli.app, ["demo", "--end", end]) for end in ("interrupt", "later"))
    assert (interrupted.exit_code, interrupted.output) == (130, "") and "demo: not yet" in later.output


def python(code: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | {"TERM": "dumb"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, env=plain)


def test_help_imports_nothing_heavy() -> None:
    # All commands run in one process, because a heavy module would stay imported.
    commands = [["-h"], ["bench", "--help"], *([*name.split(), "-h"] for name in cli.COMMANDS)]
    result = python(f"""
import sys
import ringattn
assert {{*ringattn.__all__}} <= {{*dir(ringattn)}}
from ringattn.bench import cli
for arguments in {commands!r}:
    try:
        cli.app(args=arguments, prog_name="ringattn")
    except SystemExit as ended:
        assert not ended.code, arguments
    assert not set(sys.modules) & set({HEAVY!r}), arguments
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: ringattn") == len(commands)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)  # typer read TERMINAL_WIDTH on its import
    lines = CliRunner().invoke(cli.app, [*name.split(), "-h"], env={"COLUMNS": "80"}).output.splitlines()
    assert not [line for line in lines if line.endswith("… │")]
    text = [line.strip() for line in lines if "│" not in line]
    early = [row for row, after in pairwise(text) if after and row and len(f"{row} {after.split()[0]}") <= 78]
    assert not [row for row in early if row[0] not in "╭╰"]


def test_a_missing_extra_is_one_line() -> None:
    result = python("import sys\nsys.modules['typer'] = None\nfrom ringattn.bench import cli")
    assert (result.returncode, result.stderr) == (1, f"{cli.EXTRA}\n")


def test_an_interruption_while_the_command_line_is_imported() -> None:
    result = python("""
import sys
from ringattn.__main__ import main
class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
main()
""")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.nightly
def test_an_interruption_ends_ranks_and_command() -> None:
    command = [sys.executable, "-m", "ringattn", "bench", "memory", "--world", "2", "--tokens", "8k"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(children(process.pid)) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C in a terminal
    out, _ = process.communicate(timeout=28)  # PyTorch's elastic agent would wait 30 seconds for its ranks
    assert (process.returncode, out) == (130, "interrupted\n")


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def test_no_help_has_words_in_brackets() -> None:
    # Rich takes words in brackets for markup and hides them.
    folder = Path(cli.__file__).parent
    hidden = [
        f"{path.relative_to(folder)}: {text}"
        for path in folder.rglob("*.py")
        for text in re.findall(r'help=\s*f?"(.*?)"[,)\n]', path.read_text())
        if re.search(r"\[[a-z]", text)
    ]
    assert not hidden


def test_an_unexpected_error_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.run_command(Mock(side_effect=RuntimeError("a fault of ours")), "bench x", [])
