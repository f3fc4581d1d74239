"""The proof of the waits: the ring and its transports as they are, on a recorder; see tests/support/cuda."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.comm import Slots, Topology
from ringattn.comm.transport import DONE
from ringattn.comm.transports.nccl import ByNodeTransport
from ringattn.kernels.experimental import single_pass
from ringattn.ring import buffers
from ringattn.ring.key_values import KeyValues

from ..support.cuda.cases import CASES, CONFIGS, Call, Case
from ..support.cuda.implied import IMPLIED
from ..support.cuda.replay import without
from ..support.cuda.ring import record
from ..support.layouts import layouts, masks
from ..support.nightly import rest_nightly
from .wait_mutants import TARGETS, Counts, counted, verdicts

pytestmark = pytest.mark.usefixtures("one_core")

FIVE = CASES["nccl"]["world 5"]


def told(problems: list[str]) -> str:
    return "\n".join([f"{len(problems)} problems", *problems[:10]])


EVERY = [(transport, name) for transport in CASES for name in CASES[transport]]
OFTEN = [case for target in TARGETS for case in target.cases]
"""Those that catch the mutants of the waits."""


@cache
def waits_of(transport: str, name: str) -> Counts:
    """The waits of one case, in which there is no race and no deadlock."""
    recording = record(CASES[transport][name])
    problems = recording.problems()
    assert not problems, told(problems)
    return counted(recording)


@pytest.mark.parametrize(("transport", "name"), rest_nightly(EVERY, *OFTEN))
def test_every_wait_is_enough_and_needed(transport: str, name: str) -> None:
    """No race and no deadlock; and without any one of the waits there is a race, or the table says why."""
    table, (there, implied) = IMPLIED[transport], waits_of(transport, name)
    needless = {wait for wait in implied if wait not in table}
    needed = {wait for wait in there if wait in table and table[wait].always and implied[wait] < there[wait]}
    wrong = [f"{one}: {implied[one]} of {there[one]} could go, the table says otherwise" for one in needless | needed]
    assert not wrong, "remove it, or say in tests/support/cuda/implied.py why it stays:\n" + "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("transport", CASES)
def test_the_table_says_no_more_than_all_cases_together(transport: str) -> None:
    """What is implied in some case, and whether it is in all of them."""
    found = verdicts(waits_of(transport, name) for name in CASES[transport])
    assert found == {name: reason.always for name, reason in IMPLIED[transport].items()}


REPLAYED = [
    ("nccl", "two slots, no prefetch"),
    ("nccl", "forward twice"),
    ("nccl", "2 x 3, full, then documents"),
    ("nccl", "full, then a longer window"),
    ("nccl", "2 x 2, bfloat16 by wire"),
    ("nccl", "unshard"),
    ("copy_engine", "fp8 by wire, two chunks"),
    ("copy_engine", "2 x 2, contiguous"),
    ("local", "documents"),
    ("local", "two chunks"),
    ("nccl", "single pass in turn, 2 x 2, contiguous"),
    ("copy_engine", "single pass, two chunks"),
    ("local", "parts of dK/dV"),
]


@pytest.mark.parametrize(("transport", "name"), rest_nightly(REPLAYED, *OFTEN))
def test_any_order_that_the_waits_allow_gives_the_result(transport: str, name: str) -> None:
    """Executed on memory in which what is free is NaN: so the recorder knows what every operation reads and writes."""
    recording = record(CASES[transport][name])
    for seed in range(4):
        assert recording.wrong(seed) == []


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Two or three calls that need not have anything in common, through any ring."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    ring = draw(st.fixed_dictionaries(RINGS)) | {"topology": topology}
    ring["prefetch"] = draw(st.integers(0, ring["slots"] - 1))
    some = layouts(world=topology.world, max_seqlen=24).filter(lambda layout: layout.seqlen > 0)
    calls = draw(st.lists(st.builds(Call, some, masks(), st.booleans()), min_size=2, max_size=3))
    transport, config = draw(st.sampled_from(list(CASES))), draw(st.sampled_from(CONFIGS))
    return Case(tuple(calls), transport, ring=ring, config=config)


TOPOLOGIES = [
    *(Topology.grid(*size) for size in [(1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (3, 2)]),
    *map(Topology, [((0,), (1, 2)), ((3, 1, 0), (2,)), ((0, 1), (2, 3), (4,))]),
]
RINGS: dict[str, st.SearchStrategy[Any]] = {
    "slots": st.integers(2, 4),
    "chunks": st.integers(1, 2),
    "direction": st.sampled_from([1, -1]),
    "wire_dtype": st.sampled_from([None, "bfloat16", "float8_e4m3fn"]),
    "grad_wire_dtype": st.sampled_from([None, "bfloat16"]),
}


def check_any(case: Case) -> None:
    recording = record(case)
    assert not recording.problems()
    assert not recording.wrong(0)


@settings(max_examples=10)
@given(any_case())
def test_any_calls(case: Case) -> None:
    check_any(case)


@pytest.mark.nightly
@settings(max_examples=500)
@given(any_case())
def test_many_calls(case: Case) -> None:
    check_any(case)


HIDDEN = "KeyValues"  # a backward receives what the forward received, into the same slots


@pytest.mark.parametrize(
    ("name", "backward"), [("two slots, no prefetch", False), ("world 4", True), ("2 x 2, other direction", True)]
)
def test_without_a_wait_some_order_gives_another_result(name: str, backward: bool) -> None:
    """What the check calls a race is one."""
    case = CASES["nccl"][name]
    recording = record(replace(case, calls=tuple(call._replace(backward=backward) for call in case.calls)))
    seen = Counter[str]()
    for wait in recording.graph.waits:
        race = recording.graph.broken_without(wait)
        if race is None or (backward and HIDDEN in wait.name) or seen[wait.name] >= 5:
            continue
        order = without(recording.graph, wait.edges, [(race.first.number, race.second.number)])
        assert recording.wrong(0, order), recording.graph.told(race)
        seen[wait.name] += 1
    assert sum(seen.values()) >= 10


def broken(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, case: Case = FIVE) -> list[str]:
    monkeypatch.setattr(owner, name, value)
    return record(case).problems()


def test_a_race_names_slot_hop_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody notes what computes on a slot."""
    problems = broken(monkeypatch, buffers.RingBuffer, "computed", lambda self, slot, heads: None)
    kv = next(problem for problem in problems if "K/V slot" in problem)
    assert "kernel" in kv and "hop" in kv and "recv from" in kv and kv.endswith("and nothing orders the two")


def test_an_arrival_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = broken(monkeypatch, buffers.Arrival, "wait", lambda self: self.tensors)
    assert any("recv" in problem and "kernel forward_kernel" in problem for problem in problems)


def test_slots_that_are_taken_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken(monkeypatch, Slots, "free", lambda self, slot: ())


def test_a_call_that_returns_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = broken(monkeypatch, buffers.Call, "settle", lambda self: None, CASES["nccl"]["forward twice"])
    assert any("the caller, afterwards" in problem and "send" in problem for problem in problems)


@pytest.mark.parametrize("name", ["single pass, two chunks", "parts of dK/dV"])
def test_sums_that_leave_before_they_are_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launch makes them."""
    problems = broken(monkeypatch, buffers.Call, "mark", lambda self: DONE, CASES["nccl"][name])
    kernel = "single_pass_kernel" if "single" in name else "reduce_kernel"
    assert any(kernel in problem and "send" in problem for problem in problems)


def test_gates_are_closed_when_a_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the pass before would let in nobody."""
    made: dict[Any, torch.Tensor] = {}
    fresh = single_pass.turns_of

    def kept(*given: Any) -> Any:
        turns = fresh(*given)
        return turns._replace(gates=made.setdefault(turns.gates.shape, turns.gates))

    monkeypatch.setattr(single_pass, "turns_of", kept)
    assert record(CASES["nccl"]["single pass in turn"]).wrong(0)


def test_communicators_in_another_order_on_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of four begin with the other node: all wait for each other."""
    post = ByNodeTransport.post

    def far_first(self: Any, *, sends: Any, receives: Any, after: Any = ()) -> Any:
        if self.rank in (1, 2):
            return post(self, sends=sends, receives=receives, after=after)
        near, far = (
            [[x for x in some if self._near(x) is here] for some in (sends, receives)] for here in (True, False)
        )
        post(self, sends=far[0], receives=far[1], after=after)
        return self._inside.post(sends=near[0], receives=near[1])

    (problem,) = broken(monkeypatch, ByNodeTransport, "post", far_first, CASES["nccl"]["2 x 2, unshard"])
    assert problem.startswith("deadlock with eager sends")


def test_ranks_that_post_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks the wrong way round on every rank: no race and no deadlock, but not the one order."""
    post = KeyValues.advance

    def backwards(self: Any, now: Any) -> None:
        call = self.call
        object.__setattr__(call, "chunks", call.chunks[::-1])
        post(self, now)
        object.__setattr__(call, "chunks", call.chunks[::-1])

    problems = broken(monkeypatch, KeyValues, "advance", backwards, CASES["nccl"]["two chunks"])
    assert problems and all("that is not the order of keys" in problem for problem in problems)
