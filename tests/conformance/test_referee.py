"""Verdicts on targets that misbehave, on merges and on models, the choice of cases, and the journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.conformance import protocol
from ringattn.conformance.cases import DROPOUT, Case, pairwise_cases, select_cases
from ringattn.conformance.causes import BASE_2_MERGE, DOCUMENT, FUTURE
from ringattn.conformance.merge import judge_merge
from ringattn.conformance.model import judge_model
from ringattn.conformance.oracle import attend_plainly
from ringattn.conformance.protocol import AXES, Target
from ringattn.conformance.ranks import Ranks, Reply
from ringattn.conformance.referee import Outcome, Referee, VerdictJournal, find_dropout, judge
from ringattn.conformance.worker import run_case

from ..support import bad_targets
from ..support.rank_processes import PRELOADED

FORWARD = Case(gradients="none")


def run_bad(target: Target, rank: int, case: Case, probe: bool, name: str) -> dict[str, Any]:
    """Run a case on a bad target, in processes that were started for another one."""
    found = getattr(bad_targets, name)
    adapter = found if hasattr(found, "attend") else protocol.load_target(f"{bad_targets.__name__}:{name}").adapter
    return run_case(replace(target, adapter=adapter), rank, case, 0, probe)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, bad_targets.__name__, preload=PRELOADED) as processes:
        yield processes


def verdict(ranks: Ranks, name: str, case: Case = FORWARD, deadline: float = 30.0) -> Outcome:
    return judge(case, 0, lambda case, probe: ranks.run(run_bad, case, probe, name, deadline=deadline))


@pytest.mark.parametrize(("name", "status", "text"), [
    ("prints", "right", "it prints 'hello from 0 "), ("refuses", "raises", "ValueError: no"),
    ("forks", "wrong", "it forks processes"), ("changes_input", "wrong", "it changed k"),
    ("overlaps", "misuse", "every token once: see token 0"), ("shifted", "misuse", "out has shape [2, 15, 4, 16]"),
    ("returns_nothing", "misuse", "attend returned NoneType"),
])  # fmt: skip
def test_a_target_that_misbehaves_is_named(name: str, status: str, text: str, ranks: Ranks) -> None:
    outcome = verdict(ranks, name)
    assert outcome.status == status and text in outcome.sentence()
    assert verdict(ranks, "attend").status == "right"


@pytest.mark.parametrize(("name", "status", "text"), [
    ("raises", "raises", "RuntimeError: out of luck"), ("dies", "dies", "rank 1 exits with code 3"),
    pytest.param("hangs", "hangs", "no answer from rank 0, 1", marks=pytest.mark.nightly),
    pytest.param("exits", "raises", "SystemExit: 0", marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_rest_goes_on_in_new_processes(name: str, status: str, text: str, ranks: Ranks) -> None:
    verdict(ranks, "attend")
    outcome = verdict(ranks, name, deadline=2.0)
    assert outcome.status == status and text in outcome.sentence()
    assert verdict(ranks, "attend").status == "right"


def test_a_refusal_must_name_the_feature(ranks: Ranks) -> None:
    assert verdict(ranks, "refuses", replace(FORWARD, mask="window")).status == "refused"


def test_a_target_that_cannot_be_loaded() -> None:
    for target, text in (("no.such:thing", "cannot be imported"), (protocol.__name__, "no function attend")):
        with pytest.raises(ValueError, match=text):
            protocol.load_target(target)


def test_registered_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_registered", {})
    protocol.register("mine", bad_targets.__name__)
    assert protocol.load_target("mine").adapter is bad_targets
    with pytest.raises(ValueError, match="already registered"):
        protocol.register("lucidrains", bad_targets.__name__)


def test_the_example_of_the_protocol_is_right() -> None:
    example, case = dict[str, Any](), Case(world=1, heads="4/4")
    exec(dedent(str(protocol.__doc__).partition("::\n")[2].partition("\n\nOnly")[0]), example)
    target = Target(SimpleNamespace(**example))
    assert target.refusal(case) == "" and "window" in target.refusal(replace(case, mask="window"))
    outcome = judge(case, 0, lambda case, probe: Reply("ok", [run_case(target, 0, case, 0, probe)]))
    assert outcome.status == "right", outcome.sentence()


def test_every_supported_pair_of_values_is_chosen() -> None:
    def refuse(case: Case) -> str:
        return "no" if case.dtype == "float16" or (case.mask == "window" and case.layout == "striped") else ""

    cases, refused = select_cases(refuse, (1, 2, 3))
    assert not any(map(refuse, cases)) and len(cases) == len({*cases})
    assert [case.dtype for case in refused] == ["float16"]
    assert {(case.mask, case.layout) for case in cases} == {
        (mask, layout) for mask in AXES["mask"] for layout in AXES["layout"]
    } - {("window", "striped")}
    rows = pairwise_cases("ab", range(3), (True, False))
    assert len({(a, b) for a, b, _ in rows}) == 6 and len({(b, c) for _, b, c in rows}) == 6


def test_a_journal_resumes_only_its_own_run(tmp_path: Path) -> None:
    path, header = tmp_path / "journal.jsonl", {"target": "a", "seed": 0}
    outcome = Outcome(Case(world=3), "wrong", "a cause", notes=["a note"], error=2.0)
    VerdictJournal(path, header).add(outcome)
    with path.open("a") as file:
        file.write('{"case": {"mask": "cau')  # the run was killed while it wrote
    assert VerdictJournal(path, header).outcomes == {outcome.case: outcome}
    assert [*map(json.loads, path.read_text().splitlines())][1]["cause"] == "a cause"
    with pytest.raises(ValueError, match="another run"):
        VerdictJournal(path, header | {"seed": 1})


def failures(name: str, judged: Any, worlds: tuple[int, ...] = (1,)) -> list[str]:
    with Referee(f"{bad_targets.__name__}:{name}", worlds=worlds, preload=PRELOADED) as referee:
        return list(judged(referee).failed)


def test_merges() -> None:
    assert failures("merge_by_softmax", judge_merge) == []
    found = failures("merge_by_powers_of_2", judge_merge)
    assert len(found) > 3 and BASE_2_MERGE in found[0]


@pytest.mark.parametrize(("name", "text"), [
    ("build", ""), ("build_leaky", FUTURE), ("build_mixed", DOCUMENT), ("build_scaled", "loss on 2 ranks"),
])  # fmt: skip
@pytest.mark.nightly
def test_models(name: str, text: str) -> None:
    found = failures(name, judge_model, (1, 2))
    assert any(text in failure for failure in found) if text else not found


@pytest.mark.parametrize(("share", "is_wrong"), [(0.0, True), (DROPOUT, False), (0.5, True)])
def test_too_few_and_too_many_dropped_weights_are_wrong(share: float, is_wrong: bool) -> None:
    case = Case(scores="dropout")
    whole = case.inputs(0)
    weights = attend_plainly(whole, case)["weights"]
    kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)) >= share
    out = (weights * kept / (1 - share)).transpose(1, 2)
    assert bool(find_dropout(case, whole, out)[1]) is is_wrong
