"""What the suite finds out itself: cases that yield numbers, each with its unit and, where there is one, its limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..common.memory import Needs, free_here, too_large


class NotHere(Exception):
    """This machine lacks what a case needs; the message says what. Not a failure."""


@dataclass(frozen=True)
class Number:
    """One measured number. It fails where it exceeds ``limit``, or where it was demanded and is missing or NaN."""

    name: str
    value: float | None
    unit: str
    labels: Mapping[str, object] = field(default_factory=dict)  # of what: mask, head dim, who computed it …
    limit: float | None = None
    spread: float | None = None  # half the interquartile range over the median
    note: str | None = None

    @property
    def fails(self) -> bool:
        # NaN makes the comparison false, and so fails
        return self.limit is not None and (self.value is None or not self.value <= self.limit)

    def as_json(self) -> dict[str, Any]:
        kept = {name: value for name, value in asdict(self).items() if value is not None or name == "value"}
        return {**kept, "fails": True} if self.fails else kept


Run = Callable[..., Iterator[Number]]


@dataclass(frozen=True)
class Case:
    """One thing to find out: ``run(device, **arguments)`` yields its numbers."""

    name: str
    about: str
    run: Run
    arguments: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let ``torch.empty`` return NaN, so that an element that nobody writes cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # what switches `fill_uninitialized_memory` (on by default) on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def demand_room(device: torch.device, size: int, needed: Callable[[int], Needs], unit: str) -> None:
    """Stop where a case of this size does not fit the free memory: NotHere, with the size that does."""
    if why := too_large(size, needed, free_on(device), unit=unit):
        raise NotHere(why)


def free_on(device: torch.device) -> Needs:
    """What is free on this machine now."""
    return free_here(device)


def taken_on(device: torch.device, nbytes: int) -> Needs:
    """So many bytes of tensors there."""
    return Needs(0, nbytes) if device.type == "cuda" else Needs(nbytes)


def distance(ours: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest ``|a - b| / |b|`` of pairs of tensors, in the Euclidean norm; NaN where any is."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, others, strict=True)]
    found = torch.stack([((a - b).norm() / b.norm()).cpu() for a, b in pairs])
    return float(found.max())
