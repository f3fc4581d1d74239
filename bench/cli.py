"""The command line: names, one-line helps and ``--version``. What a command does lies in its folder, in ``command.py``.

A command module exposes ``app``, a :class:`typer.Typer`, and is imported when the command is used, not before; with
nothing heavy at its top, so that its ``--help`` is there without torch. How a command ends is the same for all: a
refusal is one line and exit code 2, Ctrl-C one line and 130; a reader that ends early, as ``head`` does, is silent
and 141, the code of a process that SIGPIPE ends.
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
"""What the extra installs, as it is imported."""

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(EXTRA) from None

from .common.output import prints  # noqa: E402

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
Refusal: Any = typer.BadParameter.__mro__[2]  # Click's, which new versions of typer hide


class Group(typer.core.TyperGroup):
    """Commands by name: an unknown one ends as every command that refuses does, in one line."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **__: Any) -> Any:
        """Answer a shell that completes a line, or run a command; does not return."""
        name = prog_name or "ringattn"
        self._main_shell_completion({}, name)
        try:
            code: Any = run(lambda: self, name, list(sys.argv[1:] if args is None else args))
            sys.stdout.flush()
        except BrokenPipeError:
            code = _silenced()
        except SystemExit as ended:  # rich ends so where it meets a closed pipe
            code = _silenced() if isinstance(ended.__context__, BrokenPipeError) else ended.code
        sys.exit(code)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; while a shell completes a line the one with the flags, which else is imported later."""
        path = f"bench {cmd_name}" if self.name == "bench" else cmd_name
        if ctx.resilient_parsing and path in COMMANDS:
            return _imported(COMMANDS[path][0])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return what a name stands for; of a name that the other group has, say where it is."""
        other = args[0] if self.name == "bench" else f"bench {args[0]}"
        if args[0] not in self.commands and other in COMMANDS:
            raise typer.BadParameter(f"No such command '{args[0]}'. Did you mean `ringattn {other}`?", ctx)
        return super().resolve_command(ctx, args)


def _silenced() -> int:
    """Write nothing more, not even what is left at the exit; return the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return 128 + signal.SIGPIPE


app = typer.Typer(
    cls=Group,
    help="Exact attention over a sequence that is split across GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
bench = typer.Typer(
    cls=Group, help="Measure kernels, links, overlap and whole rings.", no_args_is_help=True, context_settings=HELP
)
app.add_typer(bench, name="bench")

# everything after the command's name, --help included, goes to the command as it is
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def _register(group: typer.Typer, name: str, summary: str, module: str) -> None:
    """Let ``name`` in ``group`` stand for the ``app`` of ``module``."""

    @group.command(name, help=summary, context_settings=_PASS_ON)
    def command(context: typer.Context) -> None:
        raise typer.Exit(run(lambda: _imported(module), context.command_path, list(context.args)))


def _imported(module: str) -> Any:
    """Return the command of a module."""
    return typer.main.get_command(import_module(f"{__package__.rpartition('.')[0]}.{module}").app)


def run(made: Callable[[], Any], name: str, arguments: list[str]) -> int:
    """Run the command that is made under a name; its exit code. What refuses or interrupts it is told in one line."""
    try:
        target = made()
        # typer breaks the lines of every paragraph but the first where the source does
        target.help = target.help and re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(target.help))
        with target.make_context(name, arguments, **HELP) as context:
            target.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted", 130) if prints() else 130
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in PACKAGES:
            raise
        return _refuse(EXTRA, 2)
    except Refusal as refused:
        plain = isinstance(refused, typer.BadParameter) and refused.param is None
        message = refused.message if plain else refused.format_message()
        if not message:  # the help was asked for by no argument at all, and stands there
            return int(refused.exit_code)
        # new versions of typer parse by Pydantic, in whose words a flag is an input
        message = message.replace("Input should be", "it must be").replace("Value error, ", "")
        message = re.sub(r", unable to parse .*|, got a .*", "", message)
        where = getattr(getattr(refused, "ctx", None), "command_path", name)
        return _refuse(f"{where}: {message}", refused.exit_code)
    except (ValueError, NotImplementedError) as refused:
        return _refuse(f"{name}: {refused}", 2)
    return 0


def _refuse(line: str, code: int) -> int:
    """A line on standard error, by every rank: it may be one's alone; the exit code."""
    print(" ".join(line.split()), file=sys.stderr)
    return code


COMMANDS = {
    "demo": ("bench.demo.command", "Train a small decoder on one long document, sharded and whole, and compare."),
    "show": ("tools.show", "Print or draw the schedule and the mask of any call."),
    "inspect": ("autotune.cli_inspect", "What any kernel takes on any GPU, and what bounds its main loop."),
    "tune": ("autotune.cli_tune", "Find the tiles of a model's attention for a GPU; without one, by compiling alone."),
    "doctor": ("tools.doctor.command", "Does this machine do what a ring needs? If not, what to do first."),
    "predict": ("bench.predict.command", "How long a ring of any size takes, by the loops that really run."),
    "export": ("tools.export.command", "Write kernels as a C++ framework links them: cubin, C launcher, manifest."),
    "report": ("bench.report.command", "One page of a folder of results: what failed, timelines, plots, every number."),
    "bench kernels": ("bench.kernels.command", "Our kernels beside PyTorch's on one device: ms, TFLOP/s, errors."),
    "bench ring": ("bench.ring.command", "A whole ring in real processes, beside one process and beside other rings."),
    "bench memory": ("bench.memory", "Peak memory per rank, for growing rings of the same tokens per rank."),
    "bench links": ("bench.links.command", "Every transport over every edge of the ring, as nccl-tests does it."),
    "bench overlap": ("bench.overlap.command", "Compute alone, transfers alone, together: does the third buffer pay?"),
    "bench timeline": ("bench.timeline.command", "When each rank of a ring computed, sent, received and waited."),
    "bench host": ("bench.host.command", "The host's time to post one hop, beside what the hop computes."),
    "bench suite": ("bench.suite.command", "Everything this machine can measure, within a time budget, in one folder."),
}
"""By what is typed: the module, and what it does."""

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
