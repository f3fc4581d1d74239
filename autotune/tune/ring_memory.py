"""What a rank of ``tune --ring`` takes: one step of a ring, and the slots of all the others, which stay open."""

from __future__ import annotations

import torch

from ...bench.common.launching import member
from ...bench.common.memory import Needs, needs_of_ranks, refuse_too_large
from ...bench.common.memory_table import tuned_bytes
from ..rings import settings
from .ring import RingWish


def check_room(wish: RingWish) -> None:
    """Refuse what does not fit this machine's free memory, with the tokens that do: typer.BadParameter."""
    place, device = member(), torch.device(wish.device)
    ranks_here = wish.point.world if place is None else place.local_world
    rings = len(settings(wish.point, wish.device, wish.wires))

    def needed(tokens: int) -> Needs:
        return needs_of_ranks(tuned_bytes(wish.problem(tokens), rings), device, ranks_here)

    unit = f"tokens on each of {wish.point.world} ranks"
    refuse_too_large("--seqlen", wish.point.length, needed, device, unit=unit)
