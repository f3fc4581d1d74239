"""What a case of the suite yields: numbers, each with its unit and, where there is one, its limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .result import Result, Row


class NotHere(Exception):
    """This machine lacks what a case needs; the message says what. Not a failure."""


@dataclass(frozen=True)
class Number:
    """One measured number. It fails where it exceeds ``limit``, or where it was demanded and is missing or NaN."""

    name: str
    value: float | None
    unit: str
    labels: Mapping[str, Any] = field(default_factory=dict)  # of what: mask, head dim, who computed it …
    limit: float | None = None
    spread: float | None = None  # half the interquartile range over the median
    note: str | None = None

    @property
    def fails(self) -> bool:
        # NaN makes the comparison false, and so fails
        return self.limit is not None and (self.value is None or not self.value <= self.limit)


def result_of(case: str, numbers: Sequence[Number], provenance: dict[str, Any]) -> Result:
    """A row per number, its labels as columns; those that exceed their limit have failed."""
    labels = dict.fromkeys(name for number in numbers for name in number.labels)
    units = dict.fromkeys(("number", "value", "unit", *labels, "limit", "spread", "note"), "")
    rows: list[Row] = [{"number": one.name, **vars(one), **one.labels} for one in numbers]
    rows = [{name: row[name] for name in units if name in row} for row in rows]
    failed = [
        f"{one.name} ({', '.join(f'{name} {value}' for name, value in one.labels.items())}) is {one.value},"
        f" at most {one.limit:.3g} allowed"
        for one in numbers
        if one.fails
    ]
    verdicts = Counter(str(one.labels["verdict"]) for one in numbers if "verdict" in one.labels)
    free = [f"{one.name}: {one.value:.3g} {one.unit}" for one in numbers if one.limit is None and one.value is not None]
    best = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or (free[0] if free else "")
    return Result(case, units, rows, failed, [best] if best else [], provenance)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let ``torch.empty`` return NaN, so that an element that nobody writes cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # what switches `fill_uninitialized_memory` (on by default) on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def distance(ours: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest ``|a - b| / |b|`` of pairs of tensors, in the Euclidean norm; NaN where any is."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, others, strict=True)]
    errors = torch.stack([((a - b).norm() / b.norm()).cpu() for a, b in pairs])
    return float(errors.max())
