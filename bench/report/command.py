"""``ringattn report``: one page of a folder of results."""

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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of `ringattn bench suite --out DIR`, or of any JSON.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=f"The page; default: DIR/{PAGE}.")] = None,
) -> None:
    """Write one self-contained page of a folder: what commands wrote with --json, and traces.

    A trace that says it is predicted is drawn below the measured one of the same call.
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
        typer.echo(f"left out: {why}", err=True)
    typer.echo(str(target))


def write_beside(folder: Path) -> str:
    """The page of a folder that was just measured: where it is, or why there is none.

    What was measured must not be lost, nor called a failure, for a picture of it.
    """
    try:
        write(folder, folder / PAGE)
    except Exception as error:
        return f"no {PAGE}: {type(error).__name__}: {error}"
    return str(folder / PAGE)


def write(folder: Path, target: Path) -> Folder:
    """Write the page of a folder; what was read, and what was not.

    Raises:
        ValueError: nothing can be read there.
        typer.BadParameter: the page cannot be written.
    """
    from ..common.output import check_targets, write_file
    from .page import html, read_folder

    contents = read_folder(folder)  # before its page is refused: there is none in what is no folder
    check_targets(target)
    write_file(target, html(contents))
    return contents
