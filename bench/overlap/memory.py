"""What a rank of ``bench overlap`` takes: a ring of slots, inputs and results for every setting, all there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...ring.schedule.schedule import DKV_SLOTS
from ..common.memory_room import Needs, of_ranks, refuse_too_large
from ..common.timing import FLUSH_BYTES
from ..ring.candidates import Problem
from ..ring.memory import FP32, rows_of, tokens_per_rank
from .settings import Setting


def check_room(problem: Problem, settings: Sequence[Setting], ranks_here: int) -> None:
    """Refuse what does not fit this machine's free memory, with the tokens that do: typer.BadParameter."""
    device = torch.device(problem.device)

    def needed(tokens: int) -> Needs:
        return of_ranks(of_rank(replace(problem, seqlen=tokens * problem.world), settings), device, ranks_here)

    unit = f"tokens on each of {problem.world} ranks"
    refuse_too_large("--tokens", problem.seqlen // problem.world, needed, device, unit=unit)


def of_rank(problem: Problem, settings: Sequence[Setting]) -> int:
    """Bytes at the peak; a ring that would ask for K/V further ahead than it has slots is not made."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    kept = rows.inputs + rows.queries * rows.item + problem.batch * problem.heads * FP32
    slots = [2 * rows.keys * (count * rows.item + DKV_SLOTS * FP32) for count, ahead, _ in settings if ahead < count]
    if problem.world == 1:
        slots = [0] * len(settings)
    # a backward's dQ in fp32 and its chunks before they are joined, dK and dV; or the inputs, drawn in fp32
    running = max(
        rows.queries * (FP32 + 2 * rows.item) + 3 * rows.keys * rows.item, 2 * (rows.queries + rows.keys) * FP32
    )
    return n * (sum(kept + each for each in slots) + running) + (FLUSH_BYTES if problem.device != "cpu" else 0)
