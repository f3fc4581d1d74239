"""Measured numbers of one case of the suite, with units and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .result import Result, Row


class UnavailableError(Exception):
    """Raised by a case, candidate or contender that cannot run here or compute this problem; the message says why."""


@dataclass(frozen=True)
class MeasuredNumber:
    """One measured number; it fails if it exceeds ``limit``, or has a limit and is missing or NaN."""

    name: str
    value: float | None
    unit: str
    labels: Mapping[str, Any] = field(default_factory=dict)  # mask, head dim, backend …
    limit: float | None = None
    spread: float | None = None  # half the interquartile range over the median
    note: str | None = None

    @property
    def fails(self) -> bool:
        # A NaN compares false, so it fails.
        return self.limit is not None and (self.value is None or not self.value <= self.limit)


def case_result(case: str, numbers: Sequence[MeasuredNumber], provenance: dict[str, Any]) -> Result:
    """Build a result with one row per number and its labels as columns; numbers above their limit are its failures."""
    labels = dict.fromkeys(name for number in numbers for name in number.labels)
    units = dict.fromkeys(("number", "value", "unit", *labels, "limit", "spread", "note"), "")
    rows: list[Row] = [{"number": number.name, **vars(number), **number.labels} for number in numbers]
    rows = [{name: row[name] for name in units if name in row} for row in rows]
    failed = [
        f"{number.name} ({', '.join(f'{name} {value}' for name, value in number.labels.items())}) is {number.value}."
        f" At most {number.limit:.3g} is allowed."
        for number in numbers
        if number.fails
    ]
    verdicts = Counter(str(number.labels["verdict"]) for number in numbers if "verdict" in number.labels)
    unlimited = [number for number in numbers if number.limit is None and number.value is not None]
    best = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    if unlimited and not best:
        best = f"{unlimited[0].name}: {unlimited[0].value:.3g} {unlimited[0].unit}"
    return Result(case, units, rows, failed, [best] if best else [], provenance)


@contextmanager
def poison_allocations() -> Iterator[None]:
    """Fill every ``torch.empty`` with NaN, so that an element that is never written fails the comparison."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # also turns on fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def relative_distance(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest ``|ours - expected| / |expected|`` of all pairs of tensors (Euclidean norm), NaN if one is."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, expected, strict=True)]
    errors = torch.stack([((a - b).norm() / b.norm()).cpu() for a, b in pairs])
    return float(errors.max())
