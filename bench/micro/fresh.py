"""What is made of a call's layout and mask once, and kept: forgotten, so that making it is what is timed."""

from __future__ import annotations

from ...ring.schedule.active import seen_blocks, sent_keys, unions
from ...ring.schedule.schedule import _schedule


def forget() -> None:
    """As before the first call."""
    for cached in (_schedule, sent_keys, seen_blocks, unions):
        cached.cache_clear()
