"""``ringattn report`` writes one HTML page of a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        refusals = write_report(folder, target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for why in refusals:
        typer.echo(f"skipped: {why}", err=True)
    typer.echo(str(target))


def write_report(folder: Path, target: Path) -> list[str]:
    """Write the page of a folder; return why files were left out."""
    from ..common.output import check_writable, write_file
    from .page import read_folder, render_page

    contents = read_folder(folder)  # first, for the better error if this is not a folder
    check_writable(target)
    write_file(target, render_page(contents))
    return contents.refusals
