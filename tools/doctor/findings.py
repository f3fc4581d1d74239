"""What ``ringattn doctor`` finds: one finding per check, and one answer of all ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...comm import Group
from ...comm.control import Control
from ...comm.topology.topology import Topology

OK, FAIL, SKIPPED = "ok", "FAIL", "skipped"
COLUMNS, INDENT = 80, " " * 9
MOST_RANKS = 8  # that a line names


class Finding(NamedTuple):
    """The outcome of one check."""

    check: str
    status: str
    text: str = ""
    """What was found, or why it failed, or why it was skipped; lines."""
    todo: str = ""
    """What to do where it failed."""

    def __str__(self) -> str:
        first, *rest = f"{self.check}: {self.text}".splitlines()
        lines = textwrap.wrap(f"{self.status:<7}  {first}", COLUMNS, subsequent_indent=INDENT)
        return "\n".join([*lines, *(INDENT + line for line in rest)])


class Skipped(Exception):
    """A check that does not apply here; the message says why."""


class Failed(Exception):
    """A check that failed; the message says what was found."""


@dataclass
class Ranks:
    """The ranks that are examined together, as one of them sees them."""

    group: Group
    control: Control
    device: torch.device
    alone: bool
    """Virtual ranks of one process."""
    ring: Topology | None = None
    """As soon as it is known; devices on rank 0 alone."""

    @property
    def rank(self) -> int:
        return self.control.rank

    def together(
        self, what: str, do: Callable[[], Any], merge: Callable[[list[Any]], Any] = lambda values: None
    ) -> Any:
        """What rank 0 makes of ``do()`` of every rank, both ready for JSON; every rank calls it with its own ``do``.

        Raises:
            Skipped, Failed: the same on every rank, where any of them was skipped or raised anything else.
        """
        outcome = {"value": None, "skipped": "", "failed": ""}
        try:
            outcome["value"] = do()
        except Skipped as reason:
            outcome["skipped"] = str(reason)
        except Exception as error:
            outcome["failed"] = str(error) if isinstance(error, Failed) else error_text(error)

        def of_all(outcomes: list[Any]) -> dict[str, Any]:
            for kind in ("failed", "skipped"):
                if any(texts := [one[kind] for one in outcomes]):
                    return {kind: by_rank(texts)}
            try:
                return {"value": merge([one["value"] for one in outcomes])}
            except Failed as error:
                return {"failed": str(error)}

        answer: Any = self.control.merged(outcome, of_all, what=what)
        if "failed" in answer:
            raise Failed(answer["failed"])
        if "skipped" in answer:
            raise Skipped(answer["skipped"])
        return answer["value"]


def checked(check: str, todo: str, examine: Callable[[], str]) -> Finding:
    """Ok with what ``examine`` says, or what it raised, the same on every rank; ``todo`` is for `Failed`."""
    try:
        return Finding(check, OK, examine())
    except Skipped as reason:
        return Finding(check, SKIPPED, str(reason))
    except Failed as error:
        return Finding(check, FAIL, str(error), todo)


def by_rank(texts: Sequence[Any]) -> str:
    """What ranks said, each text once and with its ranks unless all said it; the empty ones said nothing."""
    ranks: dict[Any, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return str(texts[0])
    return "; ".join(f"{ranks_text(held)}: {text}" for text, held in ranks.items() if text != "")


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
