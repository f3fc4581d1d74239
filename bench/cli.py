"""The command line: command names, one-line helps and ``--version``.

A command module (``command.py`` in the command's folder) exposes ``app``, a :class:`typer.Typer`. It is imported when
the command is used. It imports torch late, so that ``--help`` is fast. All commands end alike:

- A refusal prints one line and exits with code 2.
- Ctrl-C prints one line and exits with code 130.
- A closed pipe, as with ``head``, prints nothing and exits with code 141, as a process ended by SIGPIPE does.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

from .. import __version__

EXTRA = "the command line needs the extra `cli`: pip install 'ringattn[cli]'"
PACKAGES = ("typer", "rich", "matplotlib", "jinja2", "pynvml")
"""Import names of the packages that the extra installs."""

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(EXTRA) from None

from .common.output import is_printing_rank  # noqa: E402

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
Refusal: Any = typer.BadParameter.__mro__[2]  # Click's ClickException, which new versions of typer hide


class CommandGroup(typer.core.TyperGroup):
    """Group of commands. An unknown command ends with one line, as every refusal does."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **__: Any) -> Any:
        """Complete a line for the shell or run a command, then exit."""
        name = prog_name or "ringattn"
        self._main_shell_completion({}, name)
        try:
            code: Any = run_command(lambda: self, name, list(sys.argv[1:] if args is None else args))
            sys.stdout.flush()
        except BrokenPipeError:
            code = _silence_output()
        except SystemExit as exit_request:  # rich raises SystemExit at a closed pipe
            code = _silence_output() if isinstance(exit_request.__context__, BrokenPipeError) else exit_request.code
        sys.exit(code)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command ``cmd_name``; shell completion gets the one in its module, which has the flags."""
        path = f"bench {cmd_name}" if self.name == "bench" else cmd_name
        if ctx.resilient_parsing and path in COMMANDS:
            return _import_command(COMMANDS[path][0])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command ``args[0]`` as typer does; if only the other group has it, the error says so."""
        other = args[0] if self.name == "bench" else f"bench {args[0]}"
        if args[0] not in self.commands and other in COMMANDS:
            raise typer.BadParameter(f"No such command '{args[0]}'. Did you mean `ringattn {other}`?", ctx)
        return super().resolve_command(ctx, args)


def _silence_output() -> int:
    """Discard all further output, including buffered output at exit; return the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return 128 + signal.SIGPIPE


app = typer.Typer(
    cls=CommandGroup,
    help="Exact attention over a sequence that is split across GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
bench = typer.Typer(
    cls=CommandGroup,
    help="Measure kernels, links, overlap and whole rings.",
    no_args_is_help=True,
    context_settings=HELP,
)
app.add_typer(bench, name="bench")

# Pass everything after the command's name, including --help, to the command unchanged.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _register(group: typer.Typer, name: str, summary: str, module: str) -> None:
    """Add the command ``name`` to ``group``; it imports ``module`` and runs its ``app`` when it is called."""

    @group.command(name, help=summary, context_settings={**_PASS_ON, "help_option_names": []})
    def command(context: typer.Context) -> None:
        raise typer.Exit(run_command(lambda: _import_command(module), context.command_path, list(context.args)))


def _import_command(module: str) -> Any:
    return typer.main.get_command(import_module(f"{__package__.rpartition('.')[0]}.{module}").app)


def run_command(make_command: Callable[[], Any], name: str, arguments: list[str]) -> int:
    """Run a command and return its exit code; refusals and Ctrl-C print one line that starts with ``name``.

    ``make_command`` returns the command. ``arguments`` are the words typed after its name.
    """
    try:
        target = make_command()
        # typer keeps the source's line breaks in every paragraph but the first.
        target.help = target.help and re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(target.help))
        with target.make_context(name, arguments, **HELP) as context:
            target.invoke(context)
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _print_refusal("interrupted", 130) if is_printing_rank() else 130
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in PACKAGES:
            raise
        return _print_refusal(EXTRA, 2)
    except Refusal as refused:
        plain = isinstance(refused, typer.BadParameter) and refused.param is None
        message = refused.message if plain else refused.format_message()
        if not message:  # no argument was given, and the help was printed
            return int(refused.exit_code)
        # New versions of typer parse with Pydantic, which calls a flag an input.
        message = message.replace("Input should be", "it must be").replace("Value error, ", "")
        message = re.sub(r", unable to parse .*|, got a .*", "", message)
        where = getattr(getattr(refused, "ctx", None), "command_path", name)
        return _print_refusal(f"{where}: {message}", refused.exit_code)
    except (ValueError, NotImplementedError) as refused:
        return _print_refusal(f"{name}: {refused}", 2)
    return 0


def _print_refusal(line: str, code: int) -> int:
    """Print a line on standard error, on every rank because only one rank may refuse; return the exit code."""
    print(" ".join(line.split()), file=sys.stderr)
    return code


COMMANDS = {
    "demo": ("bench.demo.command", "Train a small decoder with and without sharding; compare losses and gradients."),
    "show": ("tools.show", "Print or draw the schedule and the mask of any call."),
    "inspect": ("autotune.cli_inspect", "Print registers, shared memory and loop bound of any kernel on any GPU."),
    "tune": ("autotune.cli_tune", "Find the best tiles for an attention on a GPU; without a GPU, by compiling only."),
    "doctor": ("tools.doctor.command", "Check that this machine can run a ring; if not, print what to fix first."),
    "predict": ("bench.predict.command", "Predict the time of a ring of any size by simulating its real loops."),
    "export": ("tools.export.command", "Export kernels for C++ frameworks: cubin, C launcher and manifest."),
    "conformance": (
        "conformance.command",
        "Judge any context-parallel attention against float64: masks, ranks, gradients.",
    ),
    "report": (
        "bench.report.command",
        "Write an HTML page from a folder of results: failures, timelines, plots, numbers.",
    ),
    "bench kernels": ("bench.kernels.command", "Compare our kernels with PyTorch's on one device: time and errors."),
    "bench ring": ("bench.ring.command", "Time a whole ring of processes, next to one process and other methods."),
    "bench memory": ("bench.memory", "Measure peak memory per rank for growing rings with equal tokens per rank."),
    "bench links": ("bench.links.command", "Measure every transport over every edge of the ring, like nccl-tests."),
    "bench overlap": ("bench.overlap.command", "Time compute, transfers and both: is triple buffering worth it?"),
    "bench timeline": ("bench.timeline.command", "Record when each rank computes, sends, receives and waits."),
    "bench host": ("bench.host.command", "Measure the host's time to post one hop, next to the hop's compute time."),
    "bench suite": ("bench.suite.command", "Run every benchmark that this machine can run, within a time budget."),
}
"""Module and one-line help of every command, by the words typed."""

for _name, (_module, _summary) in COMMANDS.items():
    _register(bench if _name.startswith("bench ") else app, _name.rpartition(" ")[2], _summary, _module)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ringattn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass
