"""Ranks that wait for each other, but not for ever: who does not come is named, and who hangs is ended."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..common.timing import Ranks

GRACE = 1.25  # of the deadline, for all but rank 0: it knows who is missing, and is to be the first to say so
HARD = 2.0  # deadlines after which a process that nothing else has ended shows where it stands, and ends


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End this process, non-zero and with the stacks of all its threads, where what runs inside takes longer.

    It is for what no deadline reaches: a wait inside a library, or in closing what another rank has left.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Missing(RuntimeError):
    """A rank did not come, or is gone."""


class Named(Ranks):
    """All ranks of the default group, which is gloo's: every wait ends, and names the ranks that did not come.

    Inside of :func:`ends_within`, whose time starts anew whenever all ranks have met.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def slowest(self, seconds: float) -> float:
        """The longest time of any rank.

        Raises:
            Missing: a rank did not come within the deadline, or is gone.
        """
        try:
            return self._slowest(seconds)
        except RuntimeError as error:
            raise Missing(str(error)) from None

    def _slowest(self, seconds: float) -> float:
        patience = self._deadline if dist.get_rank() == 0 else GRACE * self._deadline
        dist.monitored_barrier(timeout=timedelta(seconds=patience), wait_all_ranks=True)
        faulthandler.dump_traceback_later(HARD * self._deadline, exit=True)
        return super().slowest(seconds)


class Each(Named):
    """The same ranks, which begin together; each keeps its own time."""

    def ready(self) -> None:
        super().slowest(0.0)

    def slowest(self, seconds: float) -> float:
        """This rank's time."""
        return seconds
