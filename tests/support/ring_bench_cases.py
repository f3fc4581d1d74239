"""Ranks that behave badly, for `bench ring` to end well."""

from __future__ import annotations

import os

from ringattn.bench.ring import candidates
from ringattn.bench.ring.candidates import Candidate, Setting
from ringattn.bench.ring.runs import Report, Wish, spawned


def rank_one_raises(store: str, wish: Wish) -> list[Report]:
    """As the command's ranks, but one of them cannot compute."""
    if os.environ["RANK"] == "1":

        def refuse(setting: Setting) -> Candidate:
            raise ValueError("rank 1 has had enough")

        candidates.whole = refuse
    return spawned(store, wish)


def rank_one_dies(store: str, wish: Wish) -> list[Report]:
    """Another one is killed, and says nothing."""
    if os.environ["RANK"] == "1":
        os._exit(9)
    return spawned(store, wish)
