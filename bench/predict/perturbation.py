"""What makes ranks differ: GPUs that are slow, and launches that vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .speed import Seconds

MOST_JITTER = 1.0  # who means 5% and writes 5 is told
MOST_SLOW = 1000  # times as long: slower is broken
MOST_RANKS = 128  # that are simulated one by one
DRAWS = 16  # of a jitter: their mean and spread are told


@dataclass(frozen=True)
class Perturbation:
    """GPUs that are slow, and launches that vary."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """By rank how many times as long its launches take."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a launch's time, drawn for each."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ValueError(f"jitter is {self.jitter}: it must be 0 to {MOST_JITTER:g}, and 0.05 is 5%")
        for rank, factor in self.slow.items():
            if not 1 <= factor <= MOST_SLOW:
                raise ValueError(
                    f"slow is {rank}={factor:g}: a factor is how many times as long the rank takes, 1 to {MOST_SLOW:,}"
                )

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
            ValueError: a slow rank that it has not, or more ranks than are simulated one by one.
        """
        wrong = [rank for rank in self.slow if not 0 <= rank < world]
        if wrong:
            raise ValueError(f"slow names rank {wrong[0]}: ranks are 0 to {world - 1}")
        if self.is_there and world > MOST_RANKS:
            raise ValueError(f"slow and jitter are of rings of at most {MOST_RANKS} GPUs, each simulated: got {world}")

    def factors(self, rank: int, phase: str, count: int) -> Seconds:
        """Of every launch of a rank how many times as long it takes, ``[count]``; with jitter ``[count, draw]``."""
        slower = self.slow.get(rank, 1.0)
        if not self.jitter:
            return [slower] * count
        draw = np.random.default_rng([rank, len(phase)])
        return slower * draw.lognormal(0.0, self.jitter, (count, DRAWS))

    def slowest(self, world: int) -> float:
        """How many times as long one launch takes until all ranks are done with it; the mean of all draws."""
        each = [np.broadcast_to(self.factors(rank, "", 1)[0], DRAWS) for rank in range(world)]
        return float(np.max(each, axis=0).mean())

    def grouped(self, degree: int) -> Perturbation:
        """Of rings of groups of so many ranks: in each place the slowest of its group."""
        slow: dict[int, float] = {}
        for rank, factor in self.slow.items():
            slow[rank // degree] = max(factor, slow.get(rank // degree, 1.0))
        return Perturbation(slow, self.jitter)


NONE = Perturbation()
