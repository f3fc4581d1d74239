"""What ``ringattn doctor`` finds: one line per check, and one verdict of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from ...comm import Group
from ...comm.control import Control, control_of
from ...comm.topology.topology import Topology

T = TypeVar("T")

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
NAME_WIDTH = 23  # of a check
MOST_RANKS = 8  # that a line names


class Finding(NamedTuple):
    """The outcome of one check."""

    check: str
    status: str
    text: str = ""
    """What was found, or why it failed, or why it was skipped."""
    todo: str = ""
    """What to do where it failed."""
    more: tuple[str, ...] = ()
    """Lines that follow the first."""

    def __str__(self) -> str:
        first = f"{self.status:<7}  {self.check:<{NAME_WIDTH}}  {self.text}".rstrip()
        return "\n".join([first, *(f"{'':9}{line}" for line in self.more)])


@dataclass
class Ranks:
    """The ranks that are examined together, as one of them sees them."""

    group: Group
    control: Control
    device: torch.device
    alone: bool
    """Virtual ranks of one process."""
    ring: Topology | None = None
    """As soon as it is known."""

    @classmethod
    def of(cls, group: Group, device: torch.device, *, alone: bool) -> Ranks:
        """With a scope of the control channel to themselves."""
        return cls(group, control_of(group).scope("doctor"), device, alone)

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
            failed = str(error) if isinstance(error, Failed) else error_text(error)
        everyone: list[Any] = self.control.gather((value, skipped, failed), what=what)
        for place, kind in ((2, Failed), (1, Skipped)):
            if any(texts := [one[place] for one in everyone]):
                raise kind(by_rank(texts))
        return [one[0] for one in everyone]


class Skipped(Exception):
    """A check that does not apply here; the message says why."""


class Failed(Exception):
    """A check that failed; the message says what was found."""


def checked(check: str, todo: str, examine: Callable[[], str]) -> Finding:
    """Ok with what ``examine`` says, or what it raised, the same on every rank; ``todo`` is for `Failed`."""
    try:
        return Finding(check, OK, examine())
    except Skipped as reason:
        return Finding(check, SKIPPED, str(reason))
    except Failed as error:
        return Finding(check, FAIL, str(error), todo)


def _ranks_by(values: Sequence[Any]) -> dict[Any, list[int]]:
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def by_rank(texts: Sequence[str]) -> str:
    """What ranks said, each text once and with its ranks unless all said it; the empty ones said nothing."""
    ranks = _ranks_by(texts)
    if len(ranks) == 1:
        return texts[0]
    return "; ".join(f"{ranks_text(held)}: {text}" for text, held in ranks.items() if text)


def differing(values: Sequence[object]) -> str | None:
    """``x on rank 0, y on ranks 1 and 2``; None where all are the same."""
    ranks = _ranks_by(values)
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


def error_text(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def closing(findings: Sequence[Finding]) -> list[str]:
    """The last lines: how many checks passed, and the first failure with what to do."""
    failed, skipped = ([one for one in findings if one.status == status] for status in (FAIL, SKIPPED))
    if not failed:
        return [f"all well: {len(findings) - len(skipped)} checks ok, {len(skipped)} skipped"]
    first = failed[0]
    lines = [
        f"{len(failed)} of {len(findings)} checks failed, {len(skipped)} skipped",
        f"first failure: {first.check}: {first.text}",
    ]
    return [*lines, f"what to do: {first.todo}"] if first.todo else lines
