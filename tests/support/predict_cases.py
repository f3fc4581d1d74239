"""A device that is easy to predict, and ranks that behave badly, for the check of the predictor to end well."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ringattn.bench.predict import check
from ringattn.bench.predict.launch import Launch
from ringattn.bench.predict.program import DKDV, DQ, FOLD, Form


class Steady:
    """A device on which every launch takes a second, half of one for each kernel of a backward."""

    on_host = False
    beside = 0.0
    alone = 1.0

    def launch_seconds(self, launch: Launch, form: Form) -> float:
        return {FOLD: 1.0, DQ: 0.5, DKDV: 0.5}.get(launch.what, 0.0)


def in_place_of_steps(do: Callable[..., object], *arguments: Any) -> Any:
    """As the check's ranks, but for rank 1, which does this instead of making what is timed."""
    if os.environ["RANK"] == "1":
        vars(check)["step_of"] = do
    return check.spawned(*arguments)


def refuse(*step: object) -> None:
    raise ValueError("rank 1 has had enough")


def rank_one_raises(*arguments: Any) -> Any:
    """One of them cannot compute."""
    return in_place_of_steps(refuse, *arguments)


def rank_one_dies(*arguments: Any) -> Any:
    """Another one is gone, and says nothing."""
    return in_place_of_steps(lambda *step: os._exit(9), *arguments)


def rank_one_hangs(*arguments: Any) -> Any:
    """A third one never gets to its first row."""
    return in_place_of_steps(lambda *step: time.sleep(3600), *arguments)
