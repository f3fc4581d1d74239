"""What ``ringattn doctor`` finds: one line per check, and one verdict of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from ...comm import Group
from ...comm.control import Control

T = TypeVar("T")

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
NAME_WIDTH = 23  # of a check
MOST_RANKS = 8  # that a line names


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: str
    text: str
    """What was found, or why it failed, or why it was skipped."""
    todo: str = ""
    """What to do where it failed."""
    more: tuple[str, ...] = ()
    """Lines that follow the first."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For JSON."""

    def __str__(self) -> str:
        first = f"{self.status:<7}  {self.check:<{NAME_WIDTH}}  {self.text}".rstrip()
        return "\n".join([first, *(f"{'':9}{line}" for line in self.more)])

    def row(self) -> dict[str, str]:
        """For CSV."""
        return {"check": self.check, "status": self.status, "text": self.text, "todo": self.todo}

    def as_json(self) -> dict[str, Any]:
        return {**self.row(), "more": list(self.more), "data": dict(self.data)}


class Ranks(NamedTuple):
    """The ranks that are examined together, as one of them sees them."""

    group: Group
    control: Control
    device: torch.device
    alone: bool
    """Virtual ranks of one process."""

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def size(self) -> int:
        return self.control.size

    def together(self, what: str, do: Callable[[], T]) -> list[T]:
        """``do()`` of every rank, ready for JSON, in rank order; every rank calls it with its own ``do``.

        Raises:
            Skipped, Failed: the same on every rank, where any of them was skipped or raised anything else.
        """
        value, skipped, failed = None, "", ""
        try:
            value = do()
        except Skipped as reason:
            skipped = str(reason)
        except Exception as error:
            failed = told(error)
        everyone: list[Any] = self.control.gather((value, skipped, failed), what=what)
        for kind, texts in (
            (Failed, [one[2] for one in everyone]),
            (Skipped, [one[1] for one in everyone]),
        ):
            if any(texts):
                raise kind(by_rank(texts))
        return [one[0] for one in everyone]


class Skipped(Exception):
    """A check that does not apply here; the message says why."""


class Failed(Exception):
    """A check that failed; the message says what was found."""


def examined(check: str, todo: str, examine: Callable[[], Finding]) -> Finding:
    """What ``examine`` finds, the same on every rank; ``todo`` says what to do where it raises `Failed`."""
    try:
        return examine()
    except Skipped as reason:
        return Finding(check, SKIPPED, str(reason))
    except Failed as error:
        return Finding(check, FAIL, str(error), todo)


def by_rank(texts: Sequence[str]) -> str:
    """What ranks said, each text once and with its ranks unless all said it; the empty ones said nothing."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return texts[0]
    return "; ".join(f"{ranks_text(held)}: {text}" for text, held in ranks.items() if text)


def differing(values: Sequence[object]) -> str | None:
    """``x on rank 0, y on ranks 1 and 2``; None where all are the same."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return None
    return ", ".join(f"{value} on {ranks_text(held)}" for value, held in ranks.items())


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 5``; a few of many."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST_RANKS:
        return f"ranks {', '.join(names[: MOST_RANKS - 1])} and {len(names) - MOST_RANKS + 1} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def told(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_failure(findings: Iterable[Finding]) -> Finding | None:
    return next((one for one in findings if one.status == FAIL), None)


def closing(findings: Sequence[Finding]) -> str:
    """The last lines: how many checks passed, and the first failure with what to do."""
    counts = {status: sum(one.status == status for one in findings) for status in (OK, FAIL, SKIPPED)}
    first = first_failure(findings)
    if first is None:
        return f"\nall well: {counts[OK]} checks ok, {counts[SKIPPED]} skipped"
    lines = [
        f"\n{counts[FAIL]} of {len(findings)} checks failed, {counts[SKIPPED]} skipped",
        f"first failure: {first.check}: {first.text}",
    ]
    return "\n".join([*lines, f"what to do: {first.todo}"] if first.todo else lines)
