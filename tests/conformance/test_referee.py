"""Verdicts on targets that misbehave, on merges and on models, the choice of cases, and the journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ringattn.conformance import causes, protocol
from ringattn.conformance.cases import Case, pairwise_cases, select_cases
from ringattn.conformance.causes import BASE_2_MERGE, DOCUMENT, FUTURE
from ringattn.conformance.evidence import run_case
from ringattn.conformance.merge import judge_merge
from ringattn.conformance.model import judge_model
from ringattn.conformance.protocol import AXES, Target
from ringattn.conformance.ranks import Ranks, Reply
from ringattn.conformance.referee import Outcome, Referee, judge

from ..support import bad_targets
from ..support.broken_rings import reply_alone

FORWARD = Case(gradients="none")


def run_bad(target: Target, rank: int, case: Case, name: str) -> dict[str, Any]:
    """Run a case on a bad target, in processes that were started for another one."""
    found = getattr(bad_targets, name)
    adapter = found if hasattr(found, "attend") else protocol.load_target(f"{bad_targets.__name__}:{name}").adapter
    return run_case(replace(target, adapter=adapter), rank, case)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    processes = Ranks(2, bad_targets.__name__)
    yield processes
    processes.close()


def verdict(ranks: Ranks, name: str, case: Case = FORWARD, deadline: float = 30.0) -> Outcome:
    return judge(case, lambda case: ranks.run(run_bad, case, name, deadline=deadline))


@pytest.mark.parametrize(("name", "status", "text"), [
    ("prints", "right", "it prints 'hello from 0 "), ("refuses", "raises", "ValueError: no"),
    ("forks", "wrong", "it forks processes"), ("changes_input", "wrong", "it changed k"),
    ("overlaps", "misuse", "every token once: see token 0"), ("shifted", "misuse", "out has shape [2, 15, 4, 16]"),
    ("returns_nothing", "misuse", "attend returned NoneType"), ("beyond", "misuse", "positions of rank 1 are not"),
    ("changes_defaults", "right", "it changes the default dtype"), ("closes_output", "right", ""),
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

    def status(text: str) -> str:
        return judge(Case(heads="4/4"), lambda case: Reply("error", [], "ValueError", text)).status

    assert (status("4 heads cannot be split over 3"), status("dropout is not supported")) == ("refused", "raises")


def test_a_target_without_a_version_is_known_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    versions = set[str]()
    for text in ("def attend(q, k, v, call): ...", "def attend(q, k, v, call): return q"):
        (tmp_path / "an_edited_target.py").write_text(text)
        versions.add(protocol.load_target("an_edited_target").version)
    assert len(versions) == 2


def test_a_target_that_cannot_be_loaded() -> None:
    for target, text in (("no.such:thing", "cannot be imported"), (protocol.__name__, "no function attend")):
        with pytest.raises(ValueError, match=text):
            protocol.load_target(target)
    with Referee(f"{bad_targets.__name__}:misspelt") as referee, pytest.raises(ValueError, match="windows"):
        referee.describe()


def test_the_example_of_the_protocol_is_right() -> None:
    example, case = dict[str, Any](), Case(world=1, heads="4/4")
    exec(dedent(str(protocol.__doc__).partition("::\n")[2].partition("\n\nOnly")[0]), example)
    target = Target(SimpleNamespace(**example))
    assert target.refusal(case) == "" and "window" in target.refusal(replace(case, mask="window"))
    outcome = judge(case, lambda case: Reply("ok", [run_case(target, 0, case)]))
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


def failures(name: str, judged: Any, worlds: tuple[int, ...] = (1,)) -> list[str]:
    with Referee(f"{bad_targets.__name__}:{name}", worlds=worlds) as referee:
        return list(judged(referee).failed)


def test_merges() -> None:
    assert failures("merge_by_softmax", judge_merge) == []
    found = failures("merge_by_powers_of_2", judge_merge)
    assert len(found) > 3 and all(BASE_2_MERGE in failure for failure in found)


def merge(outs: Any, lses: Any, weigh: Any = torch.exp, normalise: bool = True) -> tuple[Any, Any]:
    lse, pivot = torch.stack([*lses]), torch.stack([*lses]).amax(0).nan_to_num(neginf=0.0)
    weights = weigh(lse - pivot).transpose(2, 3)[..., None]
    out = (weights * torch.stack([x.float() for x in outs])).sum(0)
    return out / weights.sum(0).clamp(min=1e-30) if normalise else out, lse.logsumexp(0)


WRONG_MERGES = {
    "2 of a natural lse, and the sum is": lambda outs, lses: merge(outs, lses, torch.exp2, False),
    causes.NOT_NORMALISED: lambda outs, lses: merge(outs, lses, normalise=False),
    causes.UNSCALED: lambda outs, lses: (sum(outs), merge(outs, lses)[1]),
    causes.ONE_PART: lambda outs, lses: (outs[-1], lses[-1]),
    causes.LSE_16: lambda outs, lses: merge(outs, [lse.bfloat16().float() for lse in lses]),
    causes.BASE_2: lambda outs, lses: (merge(outs, lses)[0], merge(outs, lses)[1] / 0.6931472),
    causes.LARGEST_LSE: lambda outs, lses: (merge(outs, lses)[0], torch.stack([*lses]).amax(0)),
    causes.ZERO_LSE: lambda outs, lses: merge(outs, [lse.nan_to_num(neginf=0.0) for lse in lses]),
    causes.BLIND: lambda outs, lses: (merge(outs, lses)[0], merge(outs, lses)[1].nan_to_num(neginf=-1e4)),
    causes.NOT_FINITE: lambda outs, lses: merge(outs, lses, lambda x: (x + 300).exp()),
    "merge returned Tensor": lambda outs, lses: merge(outs, lses)[0],
    "merge changed its parts": lambda outs, lses: (outs[0].zero_(), lses[0]),
}  # fmt: skip


@pytest.mark.parametrize("cause", WRONG_MERGES)
def test_every_wrong_merge_is_named(cause: str) -> None:
    def request(world: int, work: Any, *arguments: Any) -> Reply:
        return reply_alone(work, WRONG_MERGES[cause], *arguments)

    found = judge_merge(cast(Referee, SimpleNamespace(seed=0, request=request))).failed
    assert any(cause in failure for failure in found), found


@pytest.mark.parametrize(("name", "text"), [
    ("build", ""), ("build_leaky", FUTURE), ("build_mixed", DOCUMENT), ("build_scaled", "loss on 2 ranks"),
    ("build_noisy", causes.EQUAL_ROWS),
])  # fmt: skip
@pytest.mark.nightly
def test_models(name: str, text: str) -> None:
    found = failures(name, judge_model, (1, 2))
    assert any(text in failure for failure in found) if text else not found
