"""Verdicts on targets that misbehave, on merges and on models, the choice of cases, and the journal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from ringattn.conformance import causes, protocol, referee
from ringattn.conformance import ranks as ranks_module
from ringattn.conformance.cases import Case, pairwise_cases, select_cases
from ringattn.conformance.causes import BASE_2_MERGE
from ringattn.conformance.evidence import run_case
from ringattn.conformance.merge import KINDS, judge_merge
from ringattn.conformance.model import judge_model
from ringattn.conformance.protocol import AXES, Target
from ringattn.conformance.ranks import Ranks, Reply
from ringattn.conformance.referee import Outcome, Referee, judge
from ringattn.conformance.standalone import MisuseError

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
    ("changes_defaults", "right", "default dtype; it changes the default device; it changes the"),
    ("closes_output", "right", ""),
])  # fmt: skip
def test_a_target_that_misbehaves_is_named(name: str, status: str, text: str, ranks: Ranks) -> None:
    outcome = verdict(ranks, name)
    assert outcome.status == status and text in outcome.sentence() and (text or not outcome.notes)
    clean = verdict(ranks, "attend", Case())
    assert clean.status == "right" and not clean.notes


def has_ended(pid: int) -> bool:
    """Return True if a process that was killed is gone, or waits for its parent."""
    stat, end = Path("/proc", str(pid), "stat"), time.monotonic() + 10.0
    while time.monotonic() < end:
        with suppress(FileNotFoundError, ProcessLookupError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


@pytest.mark.parametrize(("name", "status", "text", "deadline"), [
    ("raises", "raises", "RuntimeError: out of luck", 60.0),
    ("dies", "dies", "rank 1 exits with code 3: started ", 60.0),
    pytest.param("hangs", "hangs", "no answer from rank 0, 1", 2.0, marks=pytest.mark.nightly),
    pytest.param("exits", "raises", "SystemExit: 0", 2.0, marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_rest_goes_on_in_new_processes(name: str, status: str, text: str, deadline: float, ranks: Ranks) -> None:
    verdict(ranks, "attend")
    begin = time.monotonic()
    outcome = verdict(ranks, name, deadline=deadline)
    assert outcome.status == status and text in outcome.sentence() and time.monotonic() - begin < 30
    if name == "dies":
        assert has_ended(int(outcome.message.rpartition(" ")[2])), "a process that the target started survives"
    assert verdict(ranks, "attend").status == "right"


def test_the_answers_of_all_ranks_are_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, (gone, bug, refused) = list[str](), (
        Reply("error", [], "RuntimeError", "Connection closed by peer"), Reply("error", [], "RuntimeError", "bug"),
        Reply("error", [], "ValueError", "no"),
    )  # fmt: skip
    dead, right = Reply("dies", [], text="rank 1"), [Reply("ok", [rank]) for rank in (0, 1)]
    processes = Ranks(2, "any")
    monkeypatch.setattr(processes, "end", lambda: ended.append("end"))
    for answers, reply, ends in (
        ([gone, bug], bug, True), ([bug, gone], bug, True), ([gone, dead], dead, True), ([refused] * 2, refused, False),
        ([refused, right[1]], refused, True), ([refused, bug], refused, True), ([bug, bug], bug, True),
        (right, Reply("ok", [0, 1]), False), (right[::-1], Reply("ok", [1, 0]), False),
        (right[:1], Reply("hangs", [], text="no answer from rank 1"), True),
        ([], Reply("hangs", [], text="no answer from rank 0, 1"), True),
    ):  # fmt: skip
        ended.clear()
        assert processes._join(dict(enumerate(answers))) == reply and bool(ended) is ends
    seconds: Any = []
    monkeypatch.setattr(processes, "_start", lambda: processes._processes.append("started"))
    monkeypatch.setattr(ranks_module, "wait", lambda pipes, timeout: seconds.append(timeout) or [])
    processes._pipes = [Mock(), Mock()]
    for _ in range(2):
        assert processes.run(max, deadline=5.0).text == "no answer from rank 0, 1"
    assert seconds == pytest.approx([5.0 + ranks_module.START_SECONDS, 5.0], abs=1.0), "only the start takes longer"
    monkeypatch.undo()
    (processes._folder / "0.err").write_text("first\nlast\n")
    processes._processes = [Mock(exitcode=-9)]
    assert processes._last_words(0) == "is killed by SIGKILL: last"
    processes._processes, processes._pipes = [], []
    assert processes._folder.is_dir()
    processes.close()
    assert not processes._folder.exists()


def test_a_refusal_must_name_the_feature(ranks: Ranks) -> None:
    assert verdict(ranks, "refuses", replace(FORWARD, mask="window")).status == "refused"

    def sentence(text: str, error: str = "ValueError") -> str:
        outcome = judge(Case(heads="4/4"), lambda case: Reply("error", [], error, text, "noted"))
        return outcome.sentence().partition(": ")[2]

    assert sentence("4 Heads\n cannot be split") == "refused: ValueError: 4 Heads cannot be split; noted"
    assert sentence("dropout is not supported") == "raises: ValueError: dropout is not supported; noted"
    assert sentence("too many heads", "RuntimeError") == "raises: RuntimeError: too many heads; noted"
    assert len(sentence("long " * 999)) == len("raises: ; noted") + 300
    assert judge(Case(), lambda case: Reply("hangs", [], text="no answer")).sentence().endswith(": hangs: no answer")


def test_a_target_without_a_version_is_known_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    versions = set[str]()
    for text in ("def attend(q, k, v, call): ...", "def attend(q, k, v, call): return q"):
        (tmp_path / "an_edited_target.py").write_text(text)
        versions.add(protocol.load_target("an_edited_target").version)
    assert len(versions) == 2


def test_a_target_that_cannot_be_loaded() -> None:
    name = protocol.__name__
    for target, text in (
        ("no.such:thing", "cannot be imported"), (f"{name}:missing", "cannot be imported: AttributeError"),
        (name, "no function attend"), (f"{name}:AXES", "no function attend"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            protocol.load_target(target)
    with Referee(f"{bad_targets.__name__}:misspelt") as referee, pytest.raises(ValueError, match="windows"):
        referee.describe()


def test_a_referee_shares_its_budget_and_ends_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = [100.0], list[Any]()

    class LoggedRanks:
        def __init__(self, world: int, target: str, device: str) -> None:
            self.world = world
            log.append((world, target, device))

        def run(self, work: Any, *arguments: Any, deadline: float) -> Reply:
            clock[0] += 1.0
            log.append((work, *arguments, deadline))
            return Reply("error", [], "ValueError", f"{self.world} ranks")

        def close(self) -> None:
            log.append(f"end {self.world}")

    monkeypatch.setattr(referee, "Ranks", LoggedRanks)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cases = [Case(world=world, seed=seed) for seed in range(4) for world in (1, 3, 2)]
    with Referee("ringattn", worlds=[1, 2, 3], deadline=7.0, device="cuda") as judging:
        assert judging.shards(cases[0]) == []
        log.clear()
        found = [(outcome.case.world, outcome.status) for outcome in judging.outcomes(cases[:-3], 6.0)]
        assert found == [(world, "refused") for world in (1, 1, 2, 2, 3, 3)]
        ready = "ringattn.conformance.adapters.ours"
        runs = [
            [(run_case, replace(cases[0], world=world, seed=seed), 7.0) for seed in range(2)] for world in (1, 2, 3)
        ]
        assert log == [
            *runs[0], (2, ready, "cuda"), *runs[1], "end 2", (3, ready, "cuda"), *runs[2], "end 3",
        ]  # fmt: skip
        log.clear()
        assert len([*judging.outcomes(cases)]) == 12
        log.clear()
    assert log == ["end 1"]
    monkeypatch.setattr(judging, "request", lambda world, work, case: reply_alone(work, bad_targets.attend, case))
    assert judging.shards(Case(layout="striped")) == [[*range(0, 32, 2)], [*range(1, 32, 2)]]
    for worlds in ((1, 0), (-1,)):
        with pytest.raises(ValueError, match=f"worlds has {min(worlds)}"):
            Referee("ringattn", worlds=worlds)


def test_a_target_says_what_it_supports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target_of_this_folder.py").write_text(
        "def supports(call): return None\ndef attend(*_): ...\nplain = attend"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for name in ("target_of_this_folder", "target_of_this_folder:plain"):
        assert protocol.load_target(name).refusal(Case()) == ""
    few = Target(SimpleNamespace(features={"causal", "float32"}, supports=lambda call: "never"))
    assert few.refusal(Case("window")).endswith("supports contiguous, gradients, grouped heads, window")
    picky = Target(SimpleNamespace(supports=lambda call: f"not {call.tokens} tokens" * call.causal))
    assert (picky.refusal(Case(world=3)), picky.refusal(Case("full"))) == ("not 48 tokens", "")
    assert [Target(SimpleNamespace(version=version)).version for version in (1.5, lambda: "2")] == ["1.5", "2"]
    for positions in ([-1, 0], [0, 32], [[0, 1]]):
        with pytest.raises(MisuseError, match="positions of rank 0"):
            Target(SimpleNamespace(positions=lambda call, positions=positions: positions)).positions(Case().call())


def test_the_example_of_the_protocol_is_right() -> None:
    example, case = dict[str, Any](), Case(world=1, heads="4/4")
    exec(dedent(str(protocol.__doc__).partition("::\n")[2].partition("\n\nOnly")[0]), example)
    target = Target(SimpleNamespace(**example))
    assert target.refusal(case) == "" and "window" in target.refusal(replace(case, mask="window"))
    outcome = judge(case, lambda case: Reply("ok", [run_case(target, 0, case)]))
    assert outcome.status == "right", outcome.sentence()


def test_every_value_of_an_axis_is_in_the_call() -> None:
    plain, sizes = vars(Case("full").call()), {"features", "positions", "group"}
    options: dict[str, tuple[Case, dict[str, Any]]] = {
        "causal": (Case(), {"causal": True}), "window": (Case("window"), {"causal": True, "window_size": (9, 0)}),
        "two-sided": (Case("two-sided window"), {"window_size": (5, 3)}),
        "prefix": (Case("prefix"), {"causal": True, "prefix_length": 10}),
        "padding": (Case("padding"), {"seqused_k": (27, 16)}),
        "scale": (Case("full", scores="scale"), {"softmax_scale": 0.4}),
        "aligned": (Case("full", "aligned"), {"cu_seqlens": (0, 8, 20, 32)}),
        "ragged": (Case("full", "ragged"), {"cu_seqlens": (0, 1, 11, 28, 32)}),
        "softcap": (Case("full", scores="softcap"), {"softcap": 1.5}),
        "dropout": (Case("full", scores="dropout"), {"dropout_p": 0.25, "dropout_seed": 7, "head_dim": 32}),
        "heads": (Case("full", heads="6/1"), {"heads": 6, "kv_heads": 1}),
        "dtype": (Case("full", dtype="float16"), {"dtype": torch.float16}),
        "none": (Case("full", gradients="none"), {}),
        "lse": (Case("full", gradients="out and lse"), {"needs_lse": True}),
        "uneven": (Case("full", layout="uneven", world=4), {"layout": "uneven", "world": 4, "tokens": 49}),
        "length": (Case("full", "aligned", world=1, length_world=3),
                   {"world": 1, "tokens": 48, "cu_seqlens": (0, 12, 30, 48)}),
    }  # fmt: skip
    for case, changed in options.values():
        call = vars(case.call())
        assert {name: x for name, x in call.items() if name not in sizes and x != plain[name]} == changed
    for name, case in (("sink", Case(scores="sink")), ("alibi_slopes", Case(scores="alibi"))):
        assert getattr(case.call(), name).shape == (4,) and case.call(1).rank == 1
    assert Case("prefix", heads="4/4", gradients="none").features == {"prefix", "causal", "contiguous", "float32"}


def test_every_supported_pair_of_values_is_chosen() -> None:
    def refuse(case: Case) -> str:
        return "no" if case.dtype == "float16" or (case.mask == "causal" and case.layout == "striped") else ""

    cases, refused = select_cases(refuse, (1, 2, 3))
    assert not any(map(refuse, cases)) and len(cases) == len({*cases})
    assert [case.dtype for case in refused] == ["float16"]
    assert {(case.mask, case.layout) for case in cases} == {
        (mask, layout) for mask in AXES["mask"] for layout in AXES["layout"]
    } - {("causal", "striped")}
    changes = [sum(getattr(case, axis) != getattr(cases[0], axis) for axis in AXES) for case in cases]
    assert changes == sorted(changes, key=lambda count: count > 1), "simple ones first"
    seeded, _ = select_cases(refuse, (1, 2, 3), seed=5)
    assert (
        seeded == [replace(case, seed=5) for case in cases] and seeded[0].inputs()["q"].ne(cases[0].inputs()["q"]).any()
    )
    assert cases[0] == Case()
    other, _ = select_cases(lambda case: "no" * (case.mask == "causal" or case.dtype == "float32"), (3, 1))
    assert other[0] == Case("full", world=3, dtype="bfloat16")
    rows = pairwise_cases(*[range(3)] * 4)
    assert len(rows) == 9 and all(len({(row[a], row[b]) for row in rows}) == 9 for a, b in combinations(range(4), 2))


def merge(
    outs: Any, lses: Any, weigh: Any = torch.exp, normalise: bool = True, pivot: Any = torch.amax
) -> tuple[Any, Any]:
    lse = torch.stack([*lses])
    weights = weigh(lse - pivot(lse, 0).nan_to_num(neginf=0.0)).transpose(2, 3)[..., None]
    out = (weights * torch.stack([x.float() for x in outs])).sum(0)
    return out / weights.sum(0).clamp(min=1e-30) if normalise else out, lse.logsumexp(0)


def merge_without_pivot(outs: Any, lses: Any) -> tuple[Any, Any]:
    weights = torch.stack([*lses]).exp().transpose(2, 3)[..., None]
    out = (weights * torch.stack([x.float() for x in outs])).sum(0) / weights.sum(0).clamp(min=1e-30)
    return out, torch.stack([*lses]).logsumexp(0)


def merge_roughly(outs: Any, lses: Any, factor: float = 1.0, summand: float = 0.0) -> tuple[Any, Any]:
    """Return the right merge with a small error of ``out`` or ``lse``."""
    out, lse = merge(outs, lses)
    return out * factor, lse + summand


def merge_that_adds_blind_parts(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Merge in the right way, because the out of a part that sees no key is 0."""
    out, lse = bad_targets.merge_by_softmax(outs, lses)
    return out + outs[0].float() * (lses[0] == -torch.inf).transpose(1, 2)[..., None], lse


ONE, ALL_SEEN = {"one part"}, {*KINDS} - {"rows that one part does not see", "rows that no part sees"}
WRONG_MERGES: dict[str, tuple[Any, set[str]]] = {
    "": (merge_that_adds_blind_parts, {*KINDS}),
    f"two parts: wrong: {BASE_2_MERGE}": (bad_targets.merge_by_powers_of_2, ONE),
    "2 of a natural lse, and the sum is": (lambda outs, lses: merge(outs, lses, torch.exp2, False), ONE),
    f"two parts: wrong: {BASE_2_MERGE}, and": (
        lambda outs, lses: merge(outs, lses, torch.exp2, False, torch.logsumexp), ONE),
    causes.BASE_E_MERGE: (lambda outs, lses: merge(outs, lses, lambda x: (x / 0.6931472).exp()), ONE),
    causes.NOT_NORMALISED: (lambda outs, lses: merge(outs, lses, normalise=False), ONE),
    causes.UNSCALED: (lambda outs, lses: (sum(outs), merge(outs, lses)[1]), ONE),
    f"does not see: wrong: {causes.UNSCALED}": (lambda outs, lses: (sum(outs) / len(outs), merge(outs, lses)[1]), ONE),
    f"not see: wrong: {causes.UNSCALED}": (lambda outs, lses: merge(outs, lses, lambda x: (x > -torch.inf) * 1.0), ONE),
    f"two parts: wrong: {causes.ONE_PART}": (lambda outs, lses: (outs[0], lses[0]), ONE),
    f"one part: wrong: {causes.LSE_16}": (lambda outs, lses: merge(outs, [lse.half().float() for lse in lses]), set()),
    "one part: raises: list index out of range": (lambda outs, lses: outs[9], set()),
    causes.ONE_PART: (lambda outs, lses: (outs[-1], lses[-1]), ONE),
    causes.LSE_16: (lambda outs, lses: merge(outs, [lse.bfloat16().float() for lse in lses]), set()),
    causes.BASE_2: (lambda outs, lses: (merge(outs, lses)[0], merge(outs, lses)[1] / 0.6931472), set()),
    causes.LARGEST_LSE: (lambda outs, lses: (merge(outs, lses)[0], torch.stack([*lses]).amax(0)), ONE),
    causes.ZERO_LSE: (lambda outs, lses: merge(outs, [lse.nan_to_num(neginf=0.0) for lse in lses]), ALL_SEEN),
    causes.BLIND: (
        lambda outs, lses: (merge(outs, lses)[0], merge(outs, lses)[1].nan_to_num(neginf=-1e4)),
        {*KINDS} - {"rows that no part sees"},
    ),
    causes.NOT_FINITE: (merge_without_pivot, {*KINDS} - {"large lse"}),
    f"one part: wrong: {causes.NO_CAUSE}": (partial(merge_roughly, factor=1 + 3e-5), {"bfloat16 parts", "large lse"}),
    f"two parts: wrong: {causes.NO_CAUSE}": (partial(merge_roughly, summand=1e-4), {"large lse"}),
    "merge returned Tensor": (lambda outs, lses: merge(outs, lses)[0], set()),
    "five parts: misuse: merge changed its parts": (lambda outs, lses: (outs[0].zero_(), lses[0]), set()),
    "bfloat16 parts: misuse: merge changed its parts": (lambda outs, lses: (outs[0].float(), lses[-1].zero_()), set()),
}  # fmt: skip
"""A cause, a merge, and the kinds of parts that the merge gets right."""


@pytest.mark.parametrize("cause", WRONG_MERGES)
def test_every_wrong_merge_is_named(cause: str) -> None:
    wrong_merge, right = WRONG_MERGES[cause]

    def request(world: int, work: Any, *arguments: Any) -> Reply:
        return reply_alone(work, wrong_merge, *arguments)

    result = judge_merge(cast(Referee, SimpleNamespace(seed=3, request=request)))
    assert {row["case"] for row in result.rows if row["status"] == "right"} == right
    assert len(result.failed) == len(KINDS) - len(right)
    assert not cause or any(cause in failure for failure in result.failed), result.failed


@pytest.mark.parametrize(("name", "judged", "text"), [
    ("build", judge_model, ""), ("build_scaled", judge_model, "loss on 2 ranks"), ("merge_by_softmax", judge_merge, ""),
])  # fmt: skip
@pytest.mark.nightly
def test_models_and_merges_run_in_processes(name: str, judged: Any, text: str) -> None:
    with Referee(f"{bad_targets.__name__}:{name}", worlds=(1, 2)) as referee:
        failures = judged(referee).failed
    assert any(text in failure for failure in failures) if text else not failures
