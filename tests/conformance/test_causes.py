"""Every defect of a deliberately broken ring is named, and the same ring without a defect is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.conformance import causes
from ringattn.conformance.cases import DROPOUT, Case
from ringattn.conformance.evidence import Evidence, collect_evidence, run_case
from ringattn.conformance.ranks import Ranks, Reply
from ringattn.conformance.referee import RIGHT, WRONG, Outcome, judge
from ringattn.conformance.standalone import GRADIENTS, Results, attend_plainly

from ..support import broken_rings
from ..support.broken_rings import DEFECTS, reply_alone, run_defect

CASES = {
    "document": Case(documents="ragged"), "window": Case("window", layout="zigzag"), "sink": Case(scores="sink"),
    "lse": Case("padding", "ragged", gradients="out and lse"), "dropout": Case(scores="dropout"),
    "padding": Case("padding"), "sinks": Case(scores="sink"), "unseen": Case("full"), "merge": Case("full"),
    "misrouted": Case("full"), "stale": Case(gradients="out and lse"),
}  # fmt: skip
"""Cases that show a defect; the default shows the others."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Yield processes for one rank and for two, which all tests share."""
    worlds = {world: Ranks(world, f"{broken_rings.__name__}:none") for world in (1, 2)}
    yield worlds
    for processes in worlds.values():
        processes.close()


def verdict(ranks: dict[int, Ranks], defect: str, case: Case) -> Outcome:
    return judge(case, lambda case: ranks[case.world].run(run_defect, case, defect))


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named(defect: str, ranks: dict[int, Ranks]) -> None:
    case = CASES.get(defect, Case())
    outcome = verdict(ranks, defect, case)
    assert outcome.status == WRONG and outcome.cause.startswith(DEFECTS[defect]), outcome.sentence()
    assert (outcome.where and outcome.error and outcome.error > 1) or defect == "dropout"
    if defect == "future":
        assert "(256 pairs, such as key 16 of rank 1 by query 0 of rank 0)" in outcome.cause


@pytest.mark.parametrize("case", [*dict.fromkeys([Case(), *CASES.values()])], ids=lambda case: case.id)
def test_the_ring_without_a_defect_is_right(case: Case, ranks: dict[int, Ranks]) -> None:
    outcome = verdict(ranks, "none", case)
    assert outcome.status == RIGHT, outcome.sentence()


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
    return y


def attend(q: Any, k: Any, v: Any, call: Any, defect: str = "none") -> Any:
    return broken_rings.attend(defect, q, k, v, call)


def change_in_backward(q: Any, k: Any, v: Any, call: Any) -> Any:
    out = attend(q, k, v, call)[0] * 1
    out.register_hook(lambda grad: (out.data.mul_(2), grad)[1])  # type: ignore[no-untyped-call]
    return out


def with_call(**changes: Any) -> Callable[..., Any]:
    """Return a target that gets another call."""
    return lambda q, k, v, call: attend(q, k, v, replace(call, **changes))


MISTAKES: list[tuple[str, Case, Callable[..., Any]]] = [
    (causes.EQUAL_ROWS, Case(), lambda q, k, v, call: attend(q, k, v, call)[0] + torch.rand(q.shape)),
    (f"{causes.NOT_FINITE}: dk", Case(), lambda q, k, v, call: attend(q, scale_gradient(k, torch.nan), v, call)),
    ("dk is 1.001 dk", Case(), lambda q, k, v, call: attend(q, scale_gradient(k, 1.001), v, call)),
    (causes.LSE_GRADIENT, Case(gradients="out and lse"),
     lambda q, k, v, call: (attend(q, k, v, call)[0], scale_gradient(attend(q, k, v, call)[1], 0.0))),
    (causes.DROPOUT_SCALE, Case(scores="dropout"),
     lambda q, k, v, call: attend(q, k, v, call)[0] * (1 - call.dropout_p)),
    (causes.HEADS, Case(scores="dropout"), lambda q, k, v, call: attend(q, k, v, call, "heads")),
    (causes.FUTURE, Case(dtype="bfloat16"),
     lambda q, k, v, call: attend(q, k, v, replace(call, causal=call.dtype == torch.float32))),
    (causes.PADDING, Case("padding", "ragged", gradients="out and lse"), with_call(seqused_k=None)),
    (f"{causes.PADDING} (", Case("padding"),  # only its first token
     lambda q, k, v, call: attend(q, k, v, replace(call, seqused_k=tuple(n + 1 for n in call.seqused_k)))),
    (causes.OUTSIDE_WINDOW, Case("window"), with_call(window_size=(-1, -1))),
    # 16 - distance pairs of each wrong distance: 5 and 4 tokens, and 6 and 3
    (f"{causes.WINDOW_EDGE} ({11 + 12} pairs, such as key 4 of rank 0 by query 0 of rank 0); out of rank",
     Case("two-sided window"), with_call(window_size=(4, 4))),
    (f"{causes.WINDOW_EDGE} ({10 + 13} pairs, such as key 3 of rank 0 by query 0 of rank 0); out of rank",
     Case("two-sided window"), with_call(window_size=(6, 2))),
    (f"{causes.OUTSIDE_WINDOW} (11 pairs", Case("two-sided window"), with_call(window_size=(5, 5))),
    ("softmax_scale is ignored", Case(scores="scale"), with_call(softmax_scale=None)),
    ("softcap is ignored", Case(scores="softcap"), with_call(softcap=0.0)),
    ("alibi_slopes is ignored", Case(scores="alibi"), with_call(alibi_slopes=None)),
    (f"{causes.DROPOUT_RATE}: 0.000, not 0.25", Case(scores="dropout"), with_call(dropout_p=0.0)),
    (f"{causes.DROPOUT_RATE}: 0.", Case(scores="dropout"), with_call(dropout_p=0.5)),
    (f"{causes.NO_GRADIENT}: dq", Case(), lambda q, k, v, call: attend(q.detach(), k, v, call)),
    (f"{causes.NO_GRADIENT}: dsink", Case(scores="sink"),
     lambda q, k, v, call: attend(q, k, v, replace(call, sink=scale_gradient(call.sink, 0.0)))),
    *((f"wrong: {causes.NO_CAUSE}; {name}", Case(), lambda q, k, v, call, at=at: attend(  # type: ignore[call-arg]
        *(scale_gradient(x, torch.rand(x.shape)) if i == at else x for i, x in enumerate((q, k, v))), call))  # type: ignore[arg-type]
      for at, name in enumerate(("dq", "dk"))),
    (causes.ROUNDING, Case(dtype="bfloat16"),
     lambda q, k, v, call: attend(q, k, v, call)[0] * (1.05 if call.dtype == torch.bfloat16 else 1.0)),
    ("the backward changed its output", Case(), change_in_backward),
    ("wrong: it changed q; out of rank 0", Case(gradients="none"),  # which counts if nothing else explains the result
     lambda q, k, v, call: attend(q, k, v, call)[0] + torch.arange(16.0) + 0 * q.data.mul_(2).sum()),
    (f"wrong: {causes.NO_CAUSE}; lse of rank 0", Case(gradients="out and lse"),
     lambda q, k, v, call: (attend(q, k, v, call)[0], attend(q, k, v, call)[1] * torch.nan)),
    ("attend returned tuple", Case(), lambda *_: ()),
    ("attend returned no lse", Case(gradients="out and lse"), lambda q, k, v, call: attend(q, k, v, call)[0]),
    ("lse has no gradient", Case(gradients="out and lse"),
     lambda q, k, v, call: (attend(q, k, v, call)[0], attend(q, k, v, call)[1].detach())),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "case", "mistake"), MISTAKES, ids=[cause for cause, _, _ in MISTAKES])
def test_a_mistake_on_one_rank_is_named(cause: str, case: Case, mistake: Callable[..., Any]) -> None:
    outcome = judge(replace(case, world=1), partial(reply_alone, run_case, mistake))
    assert outcome.status != RIGHT and cause in outcome.sentence(), outcome.sentence()
    assert outcome.error is None or causes.DROPOUT_RATE not in cause


def gathered(case: Case, actual: Results, exact: Results, shards: tuple[Tensor, ...]) -> Evidence:
    """Return the evidence of results that may be off by 1e-5."""
    limits = dict.fromkeys((*GRADIENTS, *actual), 1e-5)
    return Evidence(case, case.inputs(), actual, shards, exact, limits, torch.ones(()), "")


def cause_without_probes(evidence: Evidence) -> str:
    return causes.find_cause(evidence, lambda case: pytest.fail("a probe runs"))


@pytest.mark.parametrize(("name", "needs_lse"), [("dq", True), ("dk", True), ("dk", False)])
def test_a_wrong_gradient_of_unequal_shards_has_no_known_cause(name: str, needs_lse: bool) -> None:
    case = Case(layout="uneven", gradients="out and lse")
    exact = attend_plainly(case.inputs(), case.call())
    others = attend_plainly(case.inputs(), replace(case.call(), needs_lse=needs_lse))  # a cause of dq, not of dk
    actual = {other: others[other] for other in GRADIENTS if other in exact}
    actual[name] = exact[name] + torch.rand(exact[name].shape, generator=torch.Generator().manual_seed(0))
    evidence = gathered(case, actual, exact, torch.arange(case.tokens).split([16, 11]))
    assert cause_without_probes(evidence) == causes.NO_CAUSE


def test_lse_in_base_2_is_named_with_a_sink_of_several_ranks() -> None:
    case = Case(layout="uneven", scores="sink", gradients="none")
    exact = attend_plainly(case.inputs(), case.call())
    actual = {"out": exact["out"], "lse": exact["lse"] / math.log(2)}
    evidence = gathered(case, actual, exact, torch.arange(case.tokens).split([16, 11]))
    assert cause_without_probes(evidence) == causes.BASE_2


def test_more_results_than_out_and_lse_are_ignored() -> None:
    def more(q: Any, k: Any, v: Any, call: Any) -> Any:
        return [*attend(q, k, v, call), None, "state"]

    for case in (Case(world=1), Case("padding", world=1, gradients="out and lse"), Case(world=1, gradients="none")):
        assert judge(case, partial(reply_alone, run_case, more)).sentence() == f"{case.id}: right"


@pytest.mark.parametrize(("step", "reach"), [(1, 1), (-1, 1), (1, 3)])
def test_stale_keys_of_either_direction_are_named(step: int, reach: int) -> None:
    case = Case(world=3)
    exact = attend_plainly(case.inputs(), case.call())
    actual = {name: exact[name] for name in ("dk", "dv")}
    evidence = gathered(case, actual, exact, torch.arange(case.tokens).chunk(3))
    actual["dq"] = causes._compute_stale_dq(evidence, step, reach)
    assert cause_without_probes(evidence) == causes.STALE
    actual |= {"dq": exact["dq"], "dk": exact["dk"] + 0.5 * exact["dv"].roll(-16, 1)}
    assert cause_without_probes(replace(evidence)) == "dk is 1 dk + 0.5 dv of the rank 1 further"


def test_a_result_may_be_off_by_twice_pytorchs_error_and_one_rounding_per_hop() -> None:
    for case in (Case(world=4), Case(world=1, gradients="out and lse"), Case(dtype="bfloat16")):
        whole, call = case.inputs(), case.call()
        exact, rounded = attend_plainly(whole, call), attend_plainly(whole, call, dtype=call.dtype)
        limits = collect_evidence(case, [{"positions": torch.arange(case.tokens), **exact}]).limits
        positive = attend_plainly({name: x.abs() if name in ("v", "dout") else x for name, x in whole.items()}, call)
        q, k, v, dout = (whole[name].double().abs().transpose(1, 2) for name in ("q", "k", "v", "dout"))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        delta = (dout * exact["out"].transpose(1, 2).abs()).sum(-1) + whole["dlse"].abs() * call.needs_lse
        ds = exact["weights"] * (dout @ v.mT + delta[..., None]) * 0.25
        sizes = {
            "out": positive["out"], "lse": exact["lse"].abs().clamp(min=1.0), "dq": ds @ k,
            "dk": (ds.mT @ q).reshape(2, 2, 2, *q.shape[2:]).sum(2), "dv": positive["dv"],
        }  # fmt: skip
        for name, limit in limits.items():
            per_hop = (limit - 2 * float((rounded[name] - exact[name]).abs().max())) / case.world
            assert per_hop == pytest.approx(torch.finfo(call.dtype).eps * float(sizes[name].max())), name


def test_the_largest_error_is_located() -> None:
    case = Case(documents="ragged", scores="sink", layout="striped", gradients="out and lse")
    exact = attend_plainly(case.inputs(), case.call())
    shards, limits = [torch.arange(case.tokens)[rank::2] for rank in range(2)], dict.fromkeys(exact, 1e-3)
    for name in ("out", "lse", "dq", "dk", "dv", "dsink"):
        actual = {other: exact[other].clone() for other in ("out", "lse", *GRADIENTS)}
        place = {"lse": (1, 0, 29), "dsink": (3,)}.get(name, (1, 29, 0, 5))
        actual[name][place] += 0.5
        if name == "dk":
            actual["dv"][0, 0, 0, 0] += 0.1
        evidence = Evidence(case, case.inputs(), actual, shards, exact, limits, torch.ones(()), "")
        size = "off by 0.5, at most 0.001 allowed" + "; dv wrong, too" * (name == "dk")
        text = "of head 3" if name == "dsink" else "of rank 1, row 1, token 29, document 3, head 0"
        assert evidence.locate(name) == f"{name} {text}: {size}"


@pytest.mark.parametrize("layout", ["contiguous", "uneven"])
def test_dropout_that_one_rank_refuses_or_has_other_tokens_is_not_compared(layout: str) -> None:
    def run(case: Case) -> Reply:
        if case.world == 1 and layout == "contiguous":
            return Reply("error", [], "ValueError", "no")
        exact, parts = attend_plainly(case.inputs(), case.call()), torch.arange(case.tokens).chunk(case.world)
        out = torch.nn.functional.dropout(exact["weights"], DROPOUT).transpose(1, 2)
        return Reply("ok", [{"positions": at, "out": out[:, at], "notes": []} for at in parts])

    torch.manual_seed(0)
    outcome = judge(Case(scores="dropout", layout=layout, gradients="none"), run)
    assert outcome.status == RIGHT and "cannot be compared" in outcome.notes
