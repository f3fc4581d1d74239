"""What computes one attention on one device in ``bench kernels``, what it is given and what it makes of that.

A contender is a name and a function that makes what to time of the inputs, and refuses what it does not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import Bounds
from ..common.timing import Step
from .shape import Shape

OURS = "ringattn"
FORWARD, STATE, BACKWARD = "forward", "forward with state", "backward"
PASSES = (FORWARD, STATE, BACKWARD)
PARTS = ("delta", "dq", "dkdv")  # of our backward


class Cannot(Exception):
    """A contender does not compute this, or not here; the message says why."""


@dataclass(frozen=True)
class Given:
    """What every contender computes with."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        return self.shape.bounds(self.device)


@dataclass
class Ready:
    """Steps to time, by what they compute, and the results: out, dq, dk and dv, or out alone."""

    steps: dict[str, Step]
    results: list[Tensor] = field(default_factory=list)
    carried: Tensor | None = None
    """Out of two hops, where there is a state to carry."""


class Contender(NamedTuple):
    """One implementation."""

    name: str
    make: Callable[[Given], Ready]

    @property
    def ours(self) -> bool:
        return self.name.partition(" ")[0] == OURS
