"""Flags that have no say are refused, by one mechanism: a command says which flags each of its modes takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import typer


def typed(context: typer.Context) -> dict[str, str]:
    """The parameters that the user gave on the command line, by name, each with its flag as it is spelled."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = max(parameter.opts, key=len)
    return found


def check_mode(context: typer.Context, mode: str, takes: Collection[str], always: Collection[str] = ()) -> None:
    """Refuse flags that have no say in ``mode``: by parameter names, those that it takes.

    Raises:
        typer.BadParameter: one that it does not take was given.
    """
    allowed = {*takes, *always, "json", "csv"}
    idle = [flag for name, flag in typed(context).items() if name not in allowed]
    if idle:
        raise typer.BadParameter(f"{', '.join(idle)} has no say {mode}: leave it out")


def check_needs(context: typer.Context, needs: Mapping[str, str]) -> None:
    """Refuse flags that mean nothing without another: parameter names, each with the one that it needs.

    Raises:
        typer.BadParameter: one was given without the other.
    """
    given = typed(context)
    flags = {parameter.name: max(parameter.opts, key=len) for parameter in context.command.params}
    for name, other in needs.items():
        if name in given and other not in given:
            raise typer.BadParameter(f"{given[name]} is given without {flags[other]}: it has no say alone")
