"""Ranks that behave badly, for `bench ring` to end well."""

from __future__ import annotations

import os

import torch

from ringattn.bench.common.launching import Member
from ringattn.bench.common.result import Result
from ringattn.bench.ring import candidates
from ringattn.bench.ring.candidates import Candidate, Setting
from ringattn.bench.ring.runs import RingConfig, measure


def rank_one_raises(place: Member, device: torch.device, config: RingConfig) -> Result:
    """As the command's ranks, but one of them cannot compute."""
    if place.rank == 1:

        def refuse(setting: Setting) -> Candidate:
            raise ValueError("rank 1 has had enough")

        candidates.whole = refuse
    return measure(place, device, config)


def rank_one_dies(place: Member, device: torch.device, config: RingConfig) -> Result:
    """Another one is killed, and says nothing."""
    if place.rank == 1:
        os._exit(9)
    return measure(place, device, config)
