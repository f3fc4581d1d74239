"""``ringattn report`` writes one HTML page of a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .page import ResultFolder

PAGE_NAME = "report.html"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder from `ringattn bench suite --out DIR`, or with any JSON results."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"File for the page; default: DIR/{PAGE_NAME}.")
    ] = None,
) -> None:
    """Write one self-contained HTML page from a folder's results (files written with --json) and traces.

    A predicted trace is drawn below the measured trace of the same call.
    """
    from ..common.output import is_printing_rank

    if not is_printing_rank():
        return
    target = folder / PAGE_NAME if out is None else out
    try:
        contents = write_report(folder, target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for why in contents.refusals:
        typer.echo(f"skipped: {why}", err=True)
    typer.echo(str(target))


def write_report_or_reason(folder: Path) -> str:
    """Write the page of a folder; return the page's path, or the reason why writing it failed."""
    try:
        write_report(folder, folder / PAGE_NAME)
    except Exception as error:
        return f"no {PAGE_NAME}: {type(error).__name__}: {error}"
    return str(folder / PAGE_NAME)


def write_report(folder: Path, target: Path) -> ResultFolder:
    """Write the page of a folder; return what was read, with the reasons why other files were not."""
    from ..common.output import check_writable, write_file
    from .page import read_folder, render_page

    contents = read_folder(folder)  # first, for the better error if this is not a folder
    check_writable(target)
    write_file(target, render_page(contents))
    return contents
