"""``ringattn report``: one page of a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .page import Folder

PAGE, PLOTS = "report.html", "plots"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of `ringattn bench suite --out DIR`, or of any JSON.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help=f"The page; default: DIR/{PAGE}.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Every plot as a PNG there too.")] = None,
) -> None:
    """Write one self-contained page of a folder: what commands wrote with --json, and traces.

    A trace that says it is predicted is drawn below the measured one of the same call.
    """
    from ..common.output import prints

    if not prints():
        return
    try:
        found = write(folder, out, plots)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for why in found.refused:
        typer.echo(f"left out: {why}", err=True)
    if plots is not None and not plots.exists():
        typer.echo(f"no plots: {folder} holds nothing that one is drawn of", err=True)
    typer.echo(str(out or folder / PAGE))


def write_beside(folder: Path) -> str:
    """The page of a folder that was just measured: where it is, or why there is none.

    What was measured must not be lost, nor called a failure, for a picture of it.
    """
    try:
        write(folder)
    except Exception as error:
        return f"no {PAGE}: {type(error).__name__}: {error}"
    return str(folder / PAGE)


def write(folder: Path, out: Path | None = None, plots: Path | None = None) -> Folder:
    """Write the page of a folder, and the plots of its results where asked; what was read, and what was not.

    Raises:
        ValueError: nothing can be read there, or --plots is no folder.
        typer.BadParameter: the page cannot be written.
    """
    from ..common.output import check_targets, write_file
    from .charts import save
    from .page import html, read_folder

    found = read_folder(folder)  # before its page is refused: there is none in what is no folder
    target = folder / PAGE if out is None else out
    check_targets(target, None if plots is None or plots.is_dir() else plots)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise ValueError(f"cannot write plots to {plots}: it is a file, and --plots takes a folder")
    write_file(target, html(found))
    if plots is not None:
        save(found.results, plots)
    return found
