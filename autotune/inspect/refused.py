"""Flags of ``ringattn inspect`` that have no say beside others."""

from __future__ import annotations

import typer

from .names import HOPPER
from .variant import ATTENTION, MEMORY_BOUND

OF_FLAGS = ("kernel", "arch", "dtype", "head_dim", "role", "tile", "feature", "option", "full", "grouped")
"""What says which variants are meant, where no spec does."""
FLAG = {"grouped": "--gqa"}

HEARD_BY = {
    "role": (*ATTENTION, *HOPPER, "reduce"), "full": (*ATTENTION, *HOPPER, "reduce"), "grouped": (*ATTENTION, *HOPPER),
}  # fmt: skip
"""Which kernels a flag says something to."""


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has this flag."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unheard(context: typer.Context, kernels: str) -> None:
    """Refuse a flag that says nothing to any of the kernels: ValueError."""
    for name, hearing in HEARD_BY.items():
        if is_given(context, name) and {*kernels.split(",")} <= {*MEMORY_BOUND} - {*hearing}:
            flag = FLAG.get(name, f"--{name}")
            raise ValueError(f"{flag} beside --kernel {kernels}, to which it says nothing: leave out one or the other")


def refuse_beside(
    context: typer.Context, spec: list[str] | None, diff: tuple[str, str] | None, correlate: str | None
) -> None:
    """Refuse what has no say in what is asked for: ValueError."""
    given = [FLAG.get(name, f"--{name.replace('_', '-')}") for name in OF_FLAGS if is_given(context, name)]
    if correlate is not None:
        more = [*(["--gate"] if is_given(context, "gate") else []), *(["--diff"] if diff else []), *(spec or [])]
        if given := [*given, *more]:
            raise ValueError(
                f"{', '.join(given)} beside --correlate, which compiles nothing: leave out one or the other"
            )
    elif diff is not None:
        if spec:
            raise ValueError(f"{spec[0]!r} beside --diff, which takes two specs itself: leave out one or the other")
        if all(is_report(side) or is_spec(side) for side in diff) and given:
            what = "two reports" if all(map(is_report, diff)) else "what names all of a variant"
            raise ValueError(f"{', '.join(given)} beside --diff of {what}: leave out one or the other")
        if "--tile" in given:
            raise ValueError(
                f"--tile beside --diff {' '.join(diff)}, which says both tiles: leave out one or the other"
            )
    elif spec and given:
        flags = ", ".join(given)
        raise ValueError(f"{flags} beside {spec[0]!r}, which names all of a variant: leave out one or the other")


def is_report(word: str) -> bool:
    return word.endswith(".json")


def is_spec(word: str) -> bool:
    return ":" in word and not is_report(word)
