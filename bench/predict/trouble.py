"""What is not as it should be: ranks that are slow, and launches that vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .clock import Lanes

MOST_LANES = 1024  # of ranks that do the same, but not in the same time
MOST_JITTER = 1.0  # who means 5% and writes 5 is told


@dataclass(frozen=True)
class Trouble:
    """What is not as it should be: ranks that are slow, and launches that vary."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank how many times as long its launches take."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a launch's time, drawn for each."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ValueError(f"jitter is {self.jitter}: it must be 0 to {MOST_JITTER:g}, and 0.05 is 5%")

    @property
    def is_there(self) -> bool:
        return bool(self.slow) or self.jitter > 0

    @property
    def words(self) -> str:
        """For headings; empty where nothing is wrong."""
        told = [f"rank {rank} takes {factor:g} times as long" for rank, factor in self.slow.items()]
        return ", ".join(told + ([f"launches vary by {self.jitter:.3g}"] if self.jitter else []))

    def check(self, world: int) -> None:
        """Refuse what a ring of so many ranks cannot have.

        Raises:
            ValueError: a slow rank that it has not, or more ranks than launches are drawn for.
        """
        wrong = [rank for rank in self.slow if not 0 <= rank < world]
        if wrong:
            raise ValueError(f"slow names rank {wrong[0]}: ranks are 0 to {world - 1}")
        if self.jitter and world > MOST_LANES:
            raise ValueError(f"jitter is told for {MOST_LANES} GPUs at most, and there are {world}")

    def factors(self, world: int) -> Lanes:
        """Of every rank how many times as long its launches take, jitter apart."""
        found = np.ones(world)
        for rank, times in self.slow.items():
            found[rank] = times
        return found

    def last(self, world: int) -> float:
        """How many times as long one launch takes until all ranks are done with it."""
        noise = np.exp(np.random.default_rng(self.seed).normal(0.0, self.jitter, world)) if self.jitter else 1.0
        return float((self.factors(world) * noise).max())
