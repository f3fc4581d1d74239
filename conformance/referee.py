"""Verdicts: runs the cases of a target within a budget, judges each against float64, and keeps a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from .cases import Case, select_cases
from .causes import DROPOUT_RATE, DROPOUT_WORLD, NO_CAUSE, ROUNDING, Runner, find_cause
from .evidence import Evidence, collect_evidence, run_case
from .protocol import AXES, EVERY_CALL_HINTS, HINTS, Target, resolve_path
from .ranks import Ranks, Reply

RIGHT, WRONG, REFUSED, RAISES, HANGS, DIES, MISUSE = "right", "wrong", "refused", "raises", "hangs", "dies", "misuse"
STATUSES = (RIGHT, WRONG, REFUSED, RAISES, HANGS, DIES, MISUSE)


@dataclass
class Outcome:
    """Verdict on one case."""

    case: Case
    status: str
    cause: str = ""
    where: str = ""
    """The largest error: result, rank, document, head, size."""
    error: float | None = None
    """Largest error as a multiple of its limit."""
    message: str = ""
    """What the target raised or said."""
    notes: str = ""
    """What the target did beside."""

    def as_row(self) -> dict[str, Any]:
        """Return the outcome as a row of a result, with the case's axes as columns."""
        axes = {name: getattr(self.case, name) for name in AXES}
        return axes | {name: value for name, value in vars(self).items() if name != "case"}

    def sentence(self) -> str:
        """Return the verdict in one line."""
        details = "; ".join(text for text in (self.cause, self.where, self.message, self.notes) if text)
        return f"{self.case.id}: {self.status}{': ' if details else ''}{details}"


def judge(case: Case, run: Runner) -> Outcome:
    """Run a case and return the verdict, with the cause if the result is wrong."""
    reply = run(case)
    if reply.status != "ok":
        return _judge_failure(case, reply)
    try:
        evidence = collect_evidence(case, reply.values)
    except ValueError as error:
        return Outcome(case, MISUSE, message=str(error), notes=reply.notes)
    changes = [*dict.fromkeys(note for part in reply.values for note in part["notes"])]
    worst = max(evidence.errors, key=lambda name: evidence.errors[name])
    outcome = Outcome(case, RIGHT, error=evidence.errors[worst], notes="; ".join(filter(None, (*changes, reply.notes))))
    if evidence.wrong_rate:
        return replace(outcome, status=WRONG, cause=explain(evidence, run), error=None)
    if evidence.errors[worst] > 1:
        cause = explain(evidence, run)
        cause = changes[0] if cause == NO_CAUSE and changes else cause
        return replace(outcome, status=WRONG, cause=cause, where=evidence.locate(worst))
    if changes:
        return replace(outcome, status=WRONG, cause=changes[0])
    return _compare_dropout(outcome, evidence, run) if case.scores == "dropout" and case.world > 1 else outcome


def _judge_failure(case: Case, reply: Reply) -> Outcome:
    status, message = {"hangs": HANGS, "dies": DIES}.get(reply.status, RAISES), reply.text
    if reply.error == "MisuseError":
        status = MISUSE
    elif reply.error:
        message = " ".join(f"{reply.error}: {reply.text}".split())[:300]
        hints = {*EVERY_CALL_HINTS, *(hint for feature in case.features for hint in HINTS[feature])}
        if reply.error in ("ValueError", "NotImplementedError") and any(hint in message.lower() for hint in hints):
            status = REFUSED
    return Outcome(case, status, message=message, notes=reply.notes)


def _compare_dropout(outcome: Outcome, evidence: Evidence, run: Runner) -> Outcome:
    """Return the verdict on a dropout mask on several ranks, compared with that of one rank with as many tokens."""
    case = evidence.case
    alone = replace(case, world=1, layout="contiguous", gradients="none", length_world=case.world)
    reply = run(alone)
    if reply.status != "ok" or alone.tokens != case.tokens:
        return replace(outcome, notes="its dropout cannot be compared with that of one rank")
    is_same = torch.equal(collect_evidence(alone, reply.values).factors, evidence.factors)
    return outcome if is_same else replace(outcome, status=WRONG, cause=DROPOUT_WORLD)


def explain(evidence: Evidence, run: Runner) -> str:
    """Return the cause of a wrong result; a case in 16 bit or with dropout is first repeated without."""
    case = evidence.case
    simple = replace(case, dtype="float32", scores="plain" if case.scores == "dropout" else case.scores)
    reply = run(simple) if simple != case else None
    if reply is not None and reply.status == "ok":
        repeated = collect_evidence(simple, reply.values)
        if any(map(repeated.is_wrong, repeated.errors)):
            return find_cause(repeated, run)
    if evidence.wrong_rate:
        return f"{DROPOUT_RATE}: {evidence.wrong_rate}"
    cause = find_cause(evidence, run)
    is_rounding = cause == NO_CAUSE and case.dtype != "float32"
    return f"{ROUNDING}: the same case is right in float32" if is_rounding else cause


class Referee:
    """Runs the cases of one target in child processes; they stay alive until a case hangs, dies or fails."""

    def __init__(
        self, target: str, *, worlds: Sequence[int] = (1, 2, 3, 4, 5, 6), seed: int = 0, deadline: float = 30.0,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        if min(worlds) < 1:
            raise ValueError(f"worlds has {min(worlds)}: a number of ranks is at least 1.")
        self.target, self.worlds, self.seed, self.deadline = target, worlds, seed, deadline
        self.device, self._ranks = device, dict[int, Ranks]()

    def run(self, case: Case) -> Reply:
        """Run a case on all its ranks."""
        return self.request(case.world, run_case, case)

    def request(self, world: int, work: Callable[..., Any], *arguments: Any) -> Reply:
        """Call ``work(target, rank, *arguments)`` on every rank of a world."""
        if world not in self._ranks:
            self._ranks[world] = Ranks(world, resolve_path(self.target), self.device)
        return self._ranks[world].run(work, *arguments, deadline=self.deadline)

    def describe(self) -> tuple[str, list[Case], dict[Case, str]]:
        """Return the target's version, its cases, and the reasons for those outside what it says it supports.

        Raises:
            ValueError: If the target cannot be loaded or described.
        """
        reply = self.request(1, _describe, self.worlds, self.seed)
        if reply.status != "ok":
            reason = reply.text if reply.error == "ValueError" else f"{reply.error} {reply.text}".strip()
            raise ValueError(f"TARGET is {self.target}: it cannot be described: {reason or reply.status}")
        version, cases, refused = reply.values[0]
        return version, cases, refused

    def shards(self, case: Case) -> list[list[int]]:
        """Return the positions of every rank's tokens; empty if the target cannot name them."""
        reply = self.request(1, _list_shards, case)
        return reply.values[0] if reply.status == "ok" else []

    def outcomes(self, cases: Sequence[Case], seconds: float = float("inf")) -> Iterator[Outcome]:
        """Judge cases world by world, each with its share of ``seconds``; yield the verdicts."""
        end, left = time.monotonic() + seconds, len(cases)
        for world in self.worlds:
            chosen = [case for case in cases if case.world == world]
            world_end = time.monotonic() + max(0.0, end - time.monotonic()) * len(chosen) / max(1, left)
            left -= len(chosen)
            for case in chosen:
                if time.monotonic() >= world_end:
                    break
                yield judge(case, self.run)
            for other in {*self._ranks} - {1}:
                self._ranks.pop(other).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._ranks:
            self._ranks.popitem()[1].close()


def _describe(target: Target, rank: int, worlds: Sequence[int], seed: int) -> tuple[str, list[Case], dict[Case, str]]:
    if unknown := {*getattr(target.adapter, "features", ())} - {*HINTS}:
        raise ValueError(f"its features have {sorted(unknown)}, which are not among {', '.join(HINTS)}")
    return target.version, *select_cases(target.refusal, worlds, seed)


def _list_shards(target: Target, rank: int, case: Case) -> list[list[int]]:
    return [target.positions(case.call(other)).tolist() for other in range(case.world)]
