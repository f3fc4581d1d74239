"""What is not as it should be: ranks that are slow, and launches that vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from .clock import Lanes

MOST_JITTER = 1.0  # who means 5% and writes 5 is told
QUANTILES = 1 << 16  # of a normal distribution, as likely each: to be drawn by 16 random bits, a tenth of the time


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
            ValueError: a slow rank that it has not.
        """
        wrong = [rank for rank in self.slow if not 0 <= rank < world]
        if wrong:
            raise ValueError(f"slow names rank {wrong[0]}: ranks are 0 to {world - 1}")

    def factors(self, world: int) -> Lanes:
        """Of every rank how many times as long its launches take, jitter apart."""
        found = np.ones(world)
        for rank, times in self.slow.items():
            found[rank] = times
        return found

    def noise(self) -> Callable[[int], Lanes]:
        """Draws for so many launches how many times as long each takes, from the seed on."""
        if not self.jitter:
            return np.ones
        factors, bits = np.exp(self.jitter * _quantiles()), np.random.PCG64(self.seed)
        words = np.dtype(np.uint64).itemsize // np.dtype(np.uint16).itemsize
        return lambda count: factors.take(bits.random_raw(-(-count // words)).view(np.uint16)[:count], mode="clip")

    def last(self, world: int) -> float:
        """How many times as long one launch takes until all ranks are done with it."""
        return float((self.factors(world) * self.noise()(world)).max())


@lru_cache(1)
def _quantiles() -> Lanes:
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES)])
