"""Verdicts: runs the cases of a target within a budget, judges each against float64, and keeps a journal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .cases import DROPOUT, Case
from .causes import DROPOUT_RATE, DROPOUT_WORLD, ROUNDING, Evidence, find_cause
from .oracle import GRADIENTS, Expected, Results, attend_plainly, compute_expected
from .protocol import AXES, HINTS, resolve_path
from .ranks import Ranks, Reply
from .worker import describe, run_case

RIGHT, WRONG, REFUSED, RAISES, HANGS, DIES, MISUSE = "right", "wrong", "refused", "raises", "hangs", "dies", "misuse"
STATUSES = (RIGHT, WRONG, REFUSED, RAISES, HANGS, DIES, MISUSE)
FAILURES = (WRONG, RAISES, HANGS, DIES, MISUSE)
RATE_SIGMAS = 6.0  # deviation of the share of dropped weights that chance does not explain
PROBE_THRESHOLD = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}


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
    notes: list[str] = field(default_factory=list)

    def as_row(self) -> dict[str, Any]:
        """Return the outcome as a row of a result, with the case's axes as columns."""
        row = {name: value for name, value in asdict(self).items() if name not in ("case", "notes")}
        return {name: getattr(self.case, name) for name in AXES} | row | {"notes": "; ".join(self.notes)}

    def sentence(self) -> str:
        """Return the verdict in one line."""
        details = [text for text in (self.cause, self.where, self.message, "; ".join(self.notes)) if text]
        return f"{self.case.id}: {self.status}{': ' if details else ''}{'; '.join(details)}"


class Joined(NamedTuple):
    """Results of the whole sequence, and the positions of every rank's tokens."""

    results: Results
    shards: list[Tensor]
    notes: list[str]


class Judged(NamedTuple):
    """Results of a case, its inputs and what is expected."""

    joined: Joined
    whole: Results
    expected: Expected


Runner = Callable[[Case, bool], Reply]
"""Function that runs a case on all its ranks; the second argument asks for the probe's inputs."""


def join_parts(case: Case, parts: Sequence[dict[str, Any]]) -> Joined:
    """Join what the ranks returned.

    Raises:
        ValueError: If the shards do not hold every token once.
    """
    shards = [part["positions"] for part in parts]
    order = torch.cat(shards)
    if order.sort().values.tolist() != [*range(case.tokens)]:
        counts = torch.bincount(order.clamp(min=0), minlength=case.tokens)
        odd = (counts != 1).nonzero().flatten().tolist()
        raise ValueError(f"its shards do not hold every token once: see token {odd[0] if odd else order.max()}")
    results = Results()
    for name in ("out", "lse", *GRADIENTS[:3]):
        if all(name in part for part in parts):
            dim = 2 if name == "lse" else 1
            results[name] = torch.cat([part[name] for part in parts], dim).index_select(dim, order.argsort())
    if all("dsink" in part for part in parts):
        results["dsink"] = torch.stack([part["dsink"].double() for part in parts]).sum(0)
    return Joined(results, shards, [*dict.fromkeys(note for part in parts for note in part["notes"])])


def judge(case: Case, seed: int, run: Runner) -> Outcome:
    """Run a case and return the verdict, with the cause if the result is wrong."""
    reply = run(case, False)
    printed = [f"it prints {reply.printed.splitlines()[0][:60]!r}"] if reply.printed.strip() else []
    if reply.status != "ok":
        return replace(_judge_failure(case, reply), notes=printed)
    try:
        joined = join_parts(case, reply.values)
    except ValueError as error:
        return Outcome(case, MISUSE, message=str(error), notes=printed)
    notes, whole, factors = [*joined.notes, *printed], case.inputs(seed), None
    if case.scores == "dropout":
        factors, cause = find_dropout(case, whole, joined.results["out"])
        if cause:
            return Outcome(case, WRONG, cause, notes=notes)
    expected = compute_expected(case, whole, factors)
    errors = expected.errors(joined.results)
    worst = max(errors, key=lambda name: errors[name])
    changed = [note for note in notes if "changed" in note]
    outcome = Outcome(case, RIGHT, error=errors[worst], notes=notes)
    if errors[worst] > 1:
        where = locate(case, joined, expected, worst)
        cause = explain(case, seed, run, Judged(joined, whole, expected))
        outcome = replace(outcome, status=WRONG, where=where, cause=cause)
    elif changed:
        outcome = replace(outcome, status=WRONG, cause=changed[0])
    elif factors is not None and case.world > 1:
        outcome = replace(outcome, **_compare_dropout(case, factors, seed, run))
    return outcome


def _judge_failure(case: Case, reply: Reply) -> Outcome:
    text = " ".join(f"{reply.error}: {reply.text}".split())[:300] if reply.error else reply.text
    if reply.status != "error":
        return Outcome(case, HANGS if reply.status == "hangs" else DIES, message=text)
    if reply.error == "MisuseError":
        return Outcome(case, MISUSE, message=reply.text)
    hints = {hint for feature in case.features for hint in HINTS[feature]} | {"rank", "world"}
    honest = reply.error in ("ValueError", "NotImplementedError") and any(hint in text.lower() for hint in hints)
    return Outcome(case, REFUSED if honest else RAISES, message=text)


def find_dropout(case: Case, whole: Results, out: Tensor) -> tuple[Tensor, str]:
    """Return the dropout factors that ``out`` shows, ``[B, H, S, S]``, and what is wrong with their share, if anything.

    The values are the identity, so ``out`` is the weights after dropout.
    """
    weights, shown = attend_plainly(whole, case)["weights"], out.double().transpose(1, 2)
    kept = shown > 0.5 * weights
    share = kept[weights > 0].double().mean().item()
    sigma = (DROPOUT * (1 - DROPOUT) / max(1, int((weights > 0).sum()))) ** 0.5
    wrong = abs(share - (1 - DROPOUT)) > RATE_SIGMAS * sigma
    return kept.double() / (1 - DROPOUT), f"{DROPOUT_RATE}: {1 - share:.3f}, not {DROPOUT}" if wrong else ""


def _compare_dropout(case: Case, factors: Tensor, seed: int, run: Runner) -> dict[str, Any]:
    """Return the verdict on a dropout mask on several ranks, compared with that of one rank with as many tokens."""
    alone = replace(case, world=1, layout="contiguous", gradients="none", length_world=case.world)
    reply = run(alone, False)
    if reply.status != "ok" or alone.tokens != case.tokens:
        return {"notes": ["its dropout cannot be compared with that of one rank"]}
    differs = not find_dropout(alone, alone.inputs(seed), reply.values[0]["out"])[0].equal(factors)
    return {"status": WRONG, "cause": DROPOUT_WORLD} if differs else {}


def explain(case: Case, seed: int, run: Runner, judged: Judged) -> str:
    """Return the cause of a wrong result; a case in 16 bit is first repeated in float32."""
    exact = replace(case, dtype="float32")
    repeated = None if case == exact else run(exact, False)
    if repeated is not None and repeated.status == "ok":
        case, joined, whole = exact, join_parts(exact, repeated.values), exact.inputs(seed)
        factors = find_dropout(case, whole, joined.results["out"])[0] if case.scores == "dropout" else None
        judged = Judged(joined, whole, compute_expected(case, whole, factors))
        if max(judged.expected.errors(joined.results).values()) <= 1:
            return f"{ROUNDING}: the same case is right in float32"
    joined, whole, expected = judged

    def probe() -> Tensor | None:
        probed = run(replace(case, gradients="none"), True)
        if probed.status != "ok":
            return None
        out = join_parts(case, probed.values).results["out"].double()
        return ((out[1:] - out[:1]).abs().amax((2, 3)) > PROBE_THRESHOLD[case.dtype]).T

    return find_cause(Evidence(case, whole, joined.results, expected, joined.shards, probe))


def locate(case: Case, joined: Joined, expected: Expected, name: str) -> str:
    """Describe the largest error of a result: rank, token, document, head, and by how much."""
    off = expected.difference(name, joined.results[name]).nan_to_num(nan=float("inf"))
    limit, size = expected.limits[name], off.max().item()
    place = torch.unravel_index(off.argmax(), off.shape)
    if name == "dsink":
        return f"{name} of head {int(place[0])}: off by {size:.3g}, at most {limit:.2g} allowed"
    batch, token, head = (int(place[at]) for at in ((0, 2, 1) if name == "lse" else (0, 1, 2)))
    rank = next(rank for rank, at in enumerate(joined.shards) if token in at)
    edges = torch.tensor(case.cu_seqlens or (0,))
    document = f", document {int((edges <= token).sum()) - 1}" if case.cu_seqlens else ""
    others = [other for other, distance in expected.errors(joined.results).items() if distance > 1 and other != name]
    also = f"; {', '.join(others)} wrong, too" if others else ""
    return (
        f"{name} of rank {rank}, row {batch}, token {token}{document}, head {head}: "
        f"off by {size:.3g}, at most {limit:.2g} allowed{also}"
    )


class Referee:
    """Runs the cases of one target in child processes; they stay alive until a case hangs, dies or fails."""

    def __init__(
        self, target: str, *, worlds: Sequence[int] = (1, 2, 3, 4, 5, 6), seed: int = 0, deadline: float = 30.0,
        device: str = "cpu", preload: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.target, self.worlds, self.seed, self.deadline = target, worlds, seed, deadline
        self._settings, self._ranks = (resolve_path(target), device, preload), dict[int, Ranks]()

    def run(self, case: Case, probe: bool = False) -> Reply:
        """Run a case on all its ranks."""
        return self.request(case.world, run_case, case, self.seed, probe)

    def request(self, world: int, work: Callable[..., Any], *arguments: Any) -> Reply:
        """Call ``work(target, rank, *arguments)`` on every rank of a world."""
        if world not in self._ranks:
            self._ranks[world] = Ranks(world, *self._settings)
        return self._ranks[world].run(work, *arguments, deadline=self.deadline)

    def describe(self) -> dict[str, Any]:
        """Return the target's version, its cases, and the reasons for those outside what it says it supports.

        Raises:
            ValueError: If the target cannot be loaded or described.
        """
        reply = self.request(1, describe, [*self.worlds])
        if reply.status != "ok":
            said = reply.text if reply.error == "ValueError" else f"{reply.error} {reply.text}".strip()
            raise ValueError(f"TARGET is {self.target}: it cannot be described: {said or reply.status}")
        return dict(reply.values[0])

    def judge(self, case: Case) -> Outcome:
        """Run a case and return the verdict."""
        return judge(case, self.seed, self.run)

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
                yield self.judge(case)
            for other in {*self._ranks} - {1}:
                self._ranks.pop(other).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._ranks:
            self._ranks.popitem()[1].close()


class VerdictJournal:
    """Verdicts by case. If it has a file, it has a line per verdict, from which a run of the same target resumes."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """Open a journal.

        Raises:
            ValueError: If the file belongs to another target, version or seed.
        """
        self.path, self.outcomes = path, dict[Case, Outcome]()
        lines = path.read_text().splitlines() if path is not None and path.exists() else [json.dumps(header)]
        if json.loads(lines[0]) != header:
            raise ValueError(f"--out has a journal of another run, {lines[0]}. Choose another folder, or delete it.")
        for line in lines[1:]:
            if line.endswith("}"):  # else the run was killed while it wrote
                fields = json.loads(line)
                outcome = Outcome(Case(**fields.pop("case")), **fields)
                self.outcomes[outcome.case] = outcome
        if path is not None:
            path.write_text("".join(f"{line}\n" for line in [lines[0], *map(self._line, self.outcomes.values())]))

    def add(self, outcome: Outcome) -> None:
        """Append a verdict."""
        self.outcomes[outcome.case] = outcome
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{self._line(outcome)}\n")

    @staticmethod
    def _line(outcome: Outcome) -> str:
        return json.dumps(asdict(outcome))
