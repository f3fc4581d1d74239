"""Ranks that behave badly, for the check of the predictor to end well."""

from __future__ import annotations

import os
import time
from typing import Any

from ringattn.bench.predict import check


def rank_one_raises(*arguments: Any) -> Any:
    """As the check's ranks, but one of them cannot compute."""
    if os.environ["RANK"] == "1":

        def refuse(*step: object) -> None:
            raise ValueError("rank 1 has had enough")

        check.step_of = refuse  # type: ignore[assignment]
    return check.spawned(*arguments)


def rank_one_dies(*arguments: Any) -> Any:
    """Another one is gone, and says nothing."""
    if os.environ["RANK"] == "1":
        check.step_of = lambda *step: os._exit(9)  # type: ignore[assignment]
    return check.spawned(*arguments)


def rank_one_hangs(*arguments: Any) -> Any:
    """A third one never gets to its first row."""
    if os.environ["RANK"] == "1":
        check.step_of = lambda *step: time.sleep(3600)  # type: ignore[assignment,return-value]
    return check.spawned(*arguments)
