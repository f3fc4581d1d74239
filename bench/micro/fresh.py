"""What is made of a call's layout and mask once, and kept: forgotten, so that making it is what is timed."""

from __future__ import annotations

from ...ring.schedule import _schedule
from ...ring.travel import travelling
from ...ring.visits import seen_blocks, unions


def forget() -> None:
    """As before the first call."""
    for cached in (_schedule, travelling, seen_blocks, unions):
        cached.cache_clear()
