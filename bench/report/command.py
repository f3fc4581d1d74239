"""``ringattn report`` writes one page of a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .page import Folder

PAGE = "report.html"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of `ringattn bench suite --out DIR`, or of any results in JSON."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=f"File of the page; default: DIR/{PAGE}.")] = None,
) -> None:
    """Write one self-contained page of a folder's results (files of --json) and traces.

    A predicted trace is drawn below the measured trace of the same call.
    """
    from ..common.output import prints

    if not prints():
        return
    target = folder / PAGE if out is None else out
    try:
        contents = write(folder, target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for why in contents.refused:
        typer.echo(f"skipped: {why}", err=True)
    typer.echo(str(target))


def write_beside(folder: Path) -> str:
    """Write the page of a folder just measured; return its path, or the reason why writing it failed."""
    try:
        write(folder, folder / PAGE)
    except Exception as error:
        return f"no {PAGE}: {type(error).__name__}: {error}"
    return str(folder / PAGE)


def write(folder: Path, target: Path) -> Folder:
    """Write the page of a folder; return its contents, with the files that could not be read."""
    from ..common.output import check_targets, write_file
    from .page import html, read_folder

    contents = read_folder(folder)  # first, for the better error if this is not a folder
    check_targets(target)
    write_file(target, html(contents))
    return contents
