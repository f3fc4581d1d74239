"""``ringattn conformance``: a referee for anybody's context-parallel attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.common import flags
from ..bench.common.result import Result, finish_command
from .protocol import AXES

if TYPE_CHECKING:
    from .referee import Outcome, Referee

UNITS = dict.fromkeys(("status", "cause", *AXES, "where", "error", "message", "notes"), "")
MAX_WORLD = 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def count_outcomes_by_axis(outcomes: Sequence[Outcome]) -> str:
    """Return the matrix of verdicts: a line for every value of every axis, a column for every status."""
    from .referee import STATUSES

    present = [status for status in STATUSES if any(outcome.status == status for outcome in outcomes)]
    lines = [f"{'':28}" + "".join(f"{status:>9}" for status in present)]
    for axis, values in {**AXES, "all": ("",)}.items():
        for value in sorted(values) if axis == "world" else values:
            counts = Counter(x.status for x in outcomes if getattr(x.case, axis, "") == value)
            if counts:
                label = f"{axis} {value}".strip()
                lines.append(f"{label:28}" + "".join(f"{counts[status] or '':>9}" for status in present))
    return "\n".join(lines)


def first_of_each_kind(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the first failure of each status and cause; numbers and tokens in a cause do not count."""
    from .referee import REFUSED, RIGHT

    kinds = dict[tuple[str, str], Any]()
    for outcome in outcomes:
        if outcome.status not in (RIGHT, REFUSED):
            kind = outcome.cause.partition("(")[0] or outcome.message.partition(":")[0]
            kinds.setdefault((outcome.status, kind), outcome)
    return [*kinds.values()]


@app.command()
def conformance(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="package.module[:name], or the name of a ready adapter.")
    ] = "",
    model: Annotated[str, typer.Option(metavar="PACKAGE:BUILD", help="Check a model's tokens to logits instead.")] = "",
    merge: Annotated[str, typer.Option(metavar="PACKAGE:FUNCTION", help="Check a merge of (out, lse) instead.")] = "",
    minutes: Annotated[float, typer.Option(min=0.0, help="Time budget; simple cases come first.")] = 10.0,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds for one case, then its processes end.")] = 30.0,
    worlds: Annotated[
        Any, typer.Option("--world", parser=flags.counts, metavar="N,…", help="Numbers of ranks.")
    ] = "1,2,3,4,5,6",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Run only cases whose id contains TEXT.")] = "",
    seed: flags.Seed = 0,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, one GPU per rank).")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results and reproductions; continue an earlier run.")
    ] = None,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Judge a context-parallel attention against float64 on masks, layouts, ranks, dtypes, heads and gradients.

    Each case is right, wrong (with the cause), refused, or it raises, hangs, dies or misuses the protocol. Exit with
    code 1 unless every case is right or refused by name.
    """
    if sum(map(bool, (target, model, merge))) != 1:
        raise typer.BadParameter("Name one of TARGET, --model and --merge.")
    if model or merge:
        mode, unused = ("--model", {"minutes", "only"}) if model else ("--merge", {"minutes", "only", "worlds"})
        flags.check_mode(context, f"with {mode}", {*flags.flag_spellings(context)} - unused)
    if max(worlds) > MAX_WORLD:
        raise typer.BadParameter(f"--world is {max(worlds)}: it must be at most {MAX_WORLD}")
    import torch

    from ..bench.common.output import is_printing_rank, write_json
    from ..bench.common.provenance import provenance
    from .merge import judge_merge
    from .model import judge_model
    from .referee import Referee

    if not is_printing_rank():
        return  # the ranks of targets are child processes
    flags.parse_device_kind(device)
    if device == "cuda" and max(worlds) > torch.cuda.device_count():
        raise typer.BadParameter(f"--world is {max(worlds)}: this machine has {torch.cuda.device_count()} GPUs")
    if out is not None:
        flags.check_folder("--out", out)
        out.mkdir(parents=True, exist_ok=True)
    name, text = target or model or merge, None
    with Referee(name, worlds=worlds, seed=seed, deadline=deadline, device=device) as referee:
        if model:
            result = judge_model(referee)
        elif merge:
            result = judge_merge(referee)
        else:
            result, text = judge_cases(referee, minutes * 60, only, out)
    result.provenance = provenance(torch.device(device))
    if out is not None:
        write_json(out / "conformance.json", result.as_json())
    finish_command(result, json, csv, text=text)


def judge_cases(referee: Referee, seconds: float, only: str, out: Path | None) -> tuple[Result, str]:
    """Judge the cases of a target; return the result and its text for a terminal."""
    from ..autotune.store import Journal
    from ..bench.common.progress import progress
    from .cases import Case
    from .referee import REFUSED, Outcome
    from .reproduce import write_reproduction

    version, cases, refused = referee.describe()
    run = f"{referee.target}: {version}, seed {referee.seed}, {referee.device}"
    cases = [case for case in cases if only in case.id]
    if only and not cases:
        raise typer.BadParameter(f"--only is {only!r}: no case's id contains it. An id is like {Case().id}.")
    journal = None if out is None else Journal(out / "journal.jsonl", run)
    known = {case: outcome for case in cases if journal and (outcome := journal.get(case.id, Outcome))}
    open_cases = [case for case in cases if case not in known]
    with progress() as step:
        step(referee.target, len(open_cases))
        for outcome in referee.outcomes(open_cases, seconds):
            known[outcome.case] = outcome
            if journal:
                error = None if outcome.error == math.inf else outcome.error  # JSON has no infinity
                journal.put(outcome.case.id, asdict(replace(outcome, error=error)))
            step(referee.target, None)
    verdicts = [known[case] for case in cases if case in known]
    outcomes = [*verdicts, *(Outcome(case, REFUSED, message=reason) for case, reason in refused.items())]
    failures = first_of_each_kind(verdicts)
    notes = [run]
    notes += [f"{len(cases) - len(verdicts)} cases were not run: --minutes is over"] * (len(verdicts) < len(cases))
    for outcome in failures:
        if out is not None and outcome.case.scores != "dropout" and (shards := referee.shards(outcome.case)):
            title = f"{version or referee.target}: {outcome.sentence()}"
            path = write_reproduction(out / "reproductions", referee.target, title, outcome.case, shards)
            notes.append(f"reproduction: {path}")
    notes.append(", ".join(f"{count} {status}" for status, count in Counter(x.status for x in verdicts).items()))
    failed = [outcome.sentence() for outcome in failures] or ["no case was run"] * (not verdicts)
    result = Result("conformance", UNITS, [outcome.as_row() for outcome in outcomes], failed, notes)
    return result, "\n".join([count_outcomes_by_axis(outcomes), *notes, *(f"FAILED: {text}" for text in failed)])
