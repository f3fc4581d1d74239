"""Findings of ``ringattn doctor``, one per check, which all ranks agree on."""

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
MOST_RANKS = 8  # ranks that a line names


class Finding(NamedTuple):
    """Result of one check."""

    check: str
    status: str
    text: str = ""
    """Observation, or reason of the failure or of the skip; may have several lines."""
    todo: str = ""
    """Advice after a failure."""

    def __str__(self) -> str:
        first, *rest = f"{self.check}: {self.text}".splitlines()
        lines = textwrap.wrap(f"{self.status:<7}  {first}", COLUMNS, subsequent_indent=INDENT)
        return "\n".join([*lines, *(INDENT + line for line in rest)])


class CheckSkippedError(Exception):
    """Exception for a check that does not apply here, with the reason."""


class CheckFailedError(Exception):
    """Exception for a check that failed, with the observation."""


@dataclass
class DoctorRanks:
    """Ranks of one doctor run, as seen by one rank."""

    group: Group
    control: Control
    device: torch.device
    alone: bool
    """Whether the ranks are virtual ranks of one process."""
    ring: Topology | None = None
    """Topology, or None before its discovery; only rank 0 has the devices."""

    @property
    def rank(self) -> int:
        return self.control.rank

    def merge_on_rank_0(
        self, key: str, work: Callable[[], Any], merge: Callable[[list[Any]], Any] = lambda values: None
    ) -> Any:
        """Run ``work`` on every rank, merge the results on rank 0, and return the merged value on every rank.

        Results and merged value must be valid JSON. Every rank must call the method. ``key`` names the step in errors.

        Raises:
            CheckFailedError: ``work`` or ``merge`` raised on some rank. Every rank raises.
            CheckSkippedError: ``work`` raised this error on some rank, and nothing failed. Every rank raises.
        """
        outcome = {"value": None, "skipped": "", "failed": ""}
        try:
            outcome["value"] = work()
        except CheckSkippedError as reason:
            outcome["skipped"] = str(reason)
        except Exception as error:
            outcome["failed"] = str(error) if isinstance(error, CheckFailedError) else error_text(error)

        def merge_outcomes(outcomes: list[Any]) -> dict[str, Any]:
            for status in ("failed", "skipped"):
                if any(texts := [each[status] for each in outcomes]):
                    return {status: text_by_rank(texts)}
            try:
                return {"value": merge([each["value"] for each in outcomes])}
            except CheckFailedError as error:
                return {"failed": str(error)}

        merged: Any = self.control.gather_merged(outcome, merge_outcomes, what=key)
        if "failed" in merged:
            raise CheckFailedError(merged["failed"])
        if "skipped" in merged:
            raise CheckSkippedError(merged["skipped"])
        return merged["value"]


def run_check(check: str, todo: str, examine: Callable[[], str]) -> Finding:
    """Run a check and return its finding; ``todo`` is the advice if the check raises :class:`CheckFailedError`."""
    try:
        return Finding(check, OK, examine())
    except CheckSkippedError as reason:
        return Finding(check, SKIPPED, str(reason))
    except CheckFailedError as error:
        return Finding(check, FAIL, str(error), todo)


def text_by_rank(texts: Sequence[Any]) -> str:
    """Join the texts of all ranks. Each distinct text occurs once, with its ranks; empty texts are left out."""
    ranks: dict[Any, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return str(texts[0])
    return "; ".join(f"{list_ranks(its_ranks)}: {text}" for text, its_ranks in ranks.items() if text != "")


def list_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0, 2 and 5``; a long list is abridged."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(names) > MOST_RANKS:
        return f"ranks {', '.join(names[: MOST_RANKS - 1])} and {len(names) - MOST_RANKS + 1} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def error_text(error: BaseException) -> str:
    """Return type and message of an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def closing_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the last lines of the output: the number of checks, and the first failure with advice."""
    failed, skipped = ([it for it in findings if it.status == status] for status in (FAIL, SKIPPED))
    if not failed:
        return [f"no problems found: {len(findings) - len(skipped)} checks ok, {len(skipped)} skipped"]
    first = failed[0]
    lines = [
        f"{len(failed)} of {len(findings)} checks failed, {len(skipped)} skipped",
        f"first failure: {first.check}: {first.text}",
    ]
    return [*lines, f"what to do: {first.todo}"] if first.todo else lines
