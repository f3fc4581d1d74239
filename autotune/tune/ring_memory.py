"""What a rank of ``tune --ring`` takes: one step of a ring, and the slots of all the others, which stay open."""

from __future__ import annotations

import torch

from ...bench.common.attention import AttentionConfig
from ...bench.common.launching import member
from ...bench.common.memory import Needs, needs_of_ranks, refuse_too_large
from ...bench.ring.memory import of_ours, rows_of, slots_of, tokens_per_rank
from ..rings import settings
from .ring import RingWish


def check_room(wish: RingWish) -> None:
    """Refuse what does not fit this machine's free memory, with the tokens that do: typer.BadParameter."""
    place, device = member(), torch.device(wish.device)
    ranks_here = wish.point.world if place is None else place.local_world
    rings = len(settings(wish.point, wish.device, wish.wires))

    def needed(tokens: int) -> Needs:
        return needs_of_ranks(of_rank(wish.problem(tokens), rings), device, ranks_here)

    unit = f"tokens on each of {wish.point.world} ranks"
    refuse_too_large("--seqlen", wish.point.length, needed, device, unit=unit)


def of_rank(problem: AttentionConfig, rings: int) -> int:
    """Bytes at the peak; all settings share the inputs, and results of chunks are there twice while they are joined."""
    joined = 2 * tokens_per_rank(problem) * rows_of(problem).queries * rows_of(problem).item
    return of_ours(problem) + joined + (rings - 1) * slots_of(problem)
