"""Ranks that behave badly, for `bench ring` to end well."""

from __future__ import annotations

import os

from ringattn.bench.common.result import Result
from ringattn.bench.ring import candidates
from ringattn.bench.ring.candidates import Candidate, Setting
from ringattn.bench.ring.runs import RingConfig, spawned


def rank_one_raises(store: str, config: RingConfig) -> Result:
    """As the command's ranks, but one of them cannot compute."""
    if os.environ["RANK"] == "1":

        def refuse(setting: Setting) -> Candidate:
            raise ValueError("rank 1 has had enough")

        candidates.whole = refuse
    return spawned(store, config)


def rank_one_dies(store: str, config: RingConfig) -> Result:
    """Another one is killed, and says nothing."""
    if os.environ["RANK"] == "1":
        os._exit(9)
    return spawned(store, config)
