"""The rings of ``bench overlap``: which there could be, known before any process starts."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ...ring.ring import depth_of

Setting = tuple[int, int, int]
"""Slots, prefetch and chunks of a ring."""


def check_settings(settings: Sequence[Setting], world: int) -> None:
    """Refuse a choice of which no ring can be made: there would be nothing to time.

    Raises:
        typer.BadParameter: why, of every one.
    """
    why = []
    for slots, prefetch, _ in settings:
        try:
            depth_of(slots, prefetch, world)
        except ValueError as error:
            why.append(str(error))
        else:
            return
    raise typer.BadParameter(f"no ring can be made with these --slots and --prefetch: {'; '.join(dict.fromkeys(why))}")
