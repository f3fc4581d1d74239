"""What ``bench links`` takes: the buffers of its largest message, and what a check of its bytes keeps beside them."""

from __future__ import annotations

import torch

from ..common.memory import Needs, needs_of_ranks, refuse_too_large
from .runs import Wish

MIB = 1 << 20
BUFFERS = 2  # what leaves and what arrives
CHECKED = {"cpu": 2, "cuda": 10}
"""Messages beside them: what is expected, which bytes differ from it, and on a GPU those as int64, to be counted."""


def check_room(wish: Wish, ranks_here: int, *, launched: bool) -> None:
    """Refuse a largest message that does not fit this machine's free memory: typer.BadParameter.

    Virtual ranks, which ``local`` is measured between, are counted as processes on the CPU, and lie on one GPU; under
    a launcher there are none.
    """
    device = torch.device(wish.device)
    messages = BUFFERS + (CHECKED[wish.device] if wish.checks else 0)
    virtual = "local" in wish.transports and not launched

    def needed(nbytes: int) -> Needs:
        shared = needs_of_ranks(messages * nbytes, device, ranks_here)
        on_one = ranks_here * messages * nbytes if virtual and device.type == "cuda" else 0
        return Needs(shared.host, max(shared.gpu, on_one))

    refuse_too_large("-e", wish.sizes[-1], needed, device, unit="bytes", step=MIB)
