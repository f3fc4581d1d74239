"""The command line: names, one-line helps and ``--version``. What a command does lies in its folder, in ``command.py``.

A command module exposes ``app``, a :class:`typer.Typer`, and is imported when the command is used, not before: the
list of commands appears without importing torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the command line needs the extra `cli`: pip install 'ringattn[cli]'") from error

from .. import __version__

app = typer.Typer(
    help="Exact attention over a sequence that is split across GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure kernels, links, overlap and whole rings.", no_args_is_help=True)
app.add_typer(bench, name="bench")

# everything after the command's name, --help included, goes to the command as it is
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def _register(group: typer.Typer, name: str, summary: str, *, module: str | None = None) -> None:
    """Let ``name`` in ``group`` stand for the ``app`` of ``module``, or of ``bench/name/command.py``."""

    @group.command(name, help=summary, context_settings=_PASS_ON)
    def command(context: typer.Context) -> None:
        target: typer.Typer = import_module(f".{module or f'{name}.command'}", __package__).app
        target(args=list(context.args), prog_name=context.command_path)


_register(app, "demo", "Train a small decoder on one long document, sharded and whole, and compare.")
_register(app, "show", "Print or draw the schedule and the mask of any call.", module="show")
_register(app, "inspect", "What any kernel takes on any GPU, and what bounds its main loop.")
_register(app, "tune", "Find the tiles of a model's attention for a GPU; without one, by compiling alone.")
_register(app, "doctor", "Does this machine do what a ring needs? If not, what to do first.")
_register(app, "predict", "How long a ring of any size takes, by the loops that really run.")
_register(app, "export", "Write kernels as a C++ framework links them: cubin, C launcher, manifest.")
_register(bench, "kernels", "Our kernels beside PyTorch's backends on one device: ms, TFLOP/s, errors.")
_register(app, "report", "One page of a folder of results: what failed, timelines, plots, every number.")
_register(bench, "ring", "A whole ring in real processes, beside one process and beside other rings.")
_register(
    bench, "memory", "Peak memory per rank, for growing rings of the same tokens per rank.", module="memory_bench"
)
_register(bench, "links", "Every transport over every edge of the ring, with nccl-tests' flags and columns.")
_register(bench, "overlap", "Compute alone, communication alone, together: does the third buffer pay?")
_register(bench, "timeline", "When each rank of a ring computed, sent, received and waited: a trace, a picture.")
_register(bench, "host", "The host's time to post one hop, beside what the hop computes.", module="host_time")
_register(bench, "suite", "Everything this machine can measure, within a time budget, in one result folder.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ringattn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line on ``sys.argv``; does not return."""
    app(args=sys.argv[1:], prog_name="ringattn")
