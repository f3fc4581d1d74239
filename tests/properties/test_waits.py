"""Proof of the waits: the real ring and transports run on a recorder of stream operations (tests/support/cuda)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.comm import Slots, Topology
from ringattn.comm.transport import DONE
from ringattn.comm.transports.nccl import ByNodeTransport
from ringattn.kernels import single_pass
from ringattn.kernels.shared_cache import SharedValue
from ringattn.ring import buffers
from ringattn.ring.key_values import KeyValues

from ..support.cuda.cases import CASES, CONFIGS, Case, RecordedCall
from ..support.cuda.implied import IMPLIED
from ..support.cuda.replay import without
from ..support.cuda.ring import CACHED_BY, record
from ..support.layouts import layouts, masks
from ..support.nightly import rest_nightly
from .wait_mutants import TARGETS, Counts, counted, verdicts

pytestmark = pytest.mark.usefixtures("one_core")


def told(problems: list[str]) -> str:
    return "\n".join([f"{len(problems)} problems", *problems[:10]])


EVERY = [(transport, name) for transport in CASES for name in CASES[transport]]
OFTEN = [case for target in TARGETS for case in target.cases]
"""Cases that catch the mutants of the waits."""


@cache
def waits_of(transport: str, name: str) -> Counts:
    """Return the waits of one case after checking that it has no race and no deadlock."""
    recording = record(CASES[transport][name])
    problems = recording.problems()
    assert not problems, told(problems)
    return counted(recording)


@pytest.mark.parametrize(("transport", "name"), rest_nightly(EVERY, *OFTEN))
def test_waits_are_sufficient_and_necessary(transport: str, name: str) -> None:
    """Removing any wait must cause a race, unless the table of implied waits gives a reason."""
    table, (counts, implied) = IMPLIED[transport], waits_of(transport, name)
    needless = {wait for wait in implied if wait not in table}
    needed = {wait for wait in counts if wait in table and table[wait][0] and implied[wait] < counts[wait]}
    wrong = [f"{w}: {implied[w]} of {counts[w]} are implied, but the table says otherwise" for w in needless | needed]
    assert not wrong, "remove the wait, or give a reason in tests/support/cuda/implied.py:\n" + "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("transport", CASES)
def test_the_table_of_implied_waits_is_exact(transport: str) -> None:
    """The table lists exactly the waits implied in some case, and whether they are implied in all."""
    merged = verdicts(waits_of(transport, name) for name in CASES[transport])
    assert merged == {name: always for name, (always, _) in IMPLIED[transport].items()}


REPLAYED = [
    *(("nccl", name) for name in ("two slots, no prefetch", "forward twice", "2 x 3, full, then documents", "unshard")),
    *(("nccl", name) for name in ("full, then a longer window", "2 x 2, bfloat16 by wire", "halo", "halo, striped")),
    *(("nccl_one_sided", name) for name in ("fp8 by wire, two chunks", "2 x 2, contiguous", "single pass, two chunks")),
    *(("local", name) for name in ("documents", "two chunks", "parts of dK/dV")),
    ("nccl", "2 x 3, window, three runs of tokens"),
    ("nccl", "single pass in turn, 2 x 2, contiguous"),
    *(("nccl", name) for name in ("2 x 2 by heads", "1 x 2 by heads, striped", "keys that a mask hides")),
    *(("nccl", name) for name in ("largest logits", "2 x 2 by heads, largest logits")),
]


@pytest.mark.parametrize(("transport", "name"), rest_nightly(REPLAYED, *OFTEN))
def test_any_order_that_the_waits_allow_gives_the_result(transport: str, name: str) -> None:
    """Replay in memory whose free bytes are NaN, so unrecorded reads and writes show up."""
    recording = record(CASES[transport][name])
    for seed in range(2):
        assert recording.wrong(seed) == []


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Draw two or three unrelated calls on a ring with any settings."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    ring = draw(st.fixed_dictionaries(RINGS)) | {"topology": topology}
    ring["prefetch"] = draw(st.integers(0, ring["slots"] - 1))
    ring_layouts = layouts(world=topology.world, max_seqlen=24).filter(lambda layout: layout.seqlen > 0)
    calls = draw(
        st.lists(
            st.builds(RecordedCall, ring_layouts, masks(), st.booleans(), st.just(()), st.booleans()),
            min_size=2,
            max_size=3,
        )
    )
    transport, config = draw(st.sampled_from(list(CASES))), draw(st.sampled_from(CONFIGS))
    return Case(tuple(calls), transport, ring=ring, config=config)


TOPOLOGIES = [
    *(Topology.grid(*size) for size in [(1, 2), (1, 3), (1, 4), (1, 5), (2, 2), (2, 3), (3, 2)]),
    *map(Topology, [((0,), (1, 2)), ((3, 1, 0), (2,)), ((0, 1), (2, 3), (4,))]),
]
RINGS: dict[str, st.SearchStrategy[Any]] = {
    "slots": st.integers(2, 4),
    "chunks": st.integers(1, 4),
    "direction": st.sampled_from([1, -1]),
    "wire_dtype": st.sampled_from([None, "bfloat16", "float8_e4m3fn"]),
    "grad_wire_dtype": st.sampled_from([None, "bfloat16"]),
}


def check_any(case: Case) -> None:
    recording = record(case)
    assert not recording.problems()
    assert not recording.wrong(0)


@settings(max_examples=3)
@given(any_case())
def test_any_sequence_of_calls(case: Case) -> None:
    check_any(case)


@pytest.mark.nightly
@settings(max_examples=500)
@given(any_case())
def test_many_sequences_of_calls(case: Case) -> None:
    check_any(case)


HIDDEN = "KeyValues"  # the backward receives the same K/V into the same slots, which hides a missing wait


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("two slots, no prefetch", False),
        ("world 4", True),
        pytest.param("2 x 2, other direction", True, marks=pytest.mark.nightly),
    ],
)
def test_without_a_wait_some_order_gives_another_result(name: str, backward: bool) -> None:
    """Show that races which the check reports are real."""
    case = CASES["nccl"][name]
    recording = record(replace(case, calls=tuple(call._replace(backward=backward) for call in case.calls)))
    outcomes = Counter[str]()
    for wait in recording.graph.waits:
        race = recording.graph.broken_without(wait)
        if race is None or (backward and HIDDEN in wait.name) or outcomes[wait.name] >= 5:
            continue
        order = without(recording.graph, wait.edges, [(race.first.number, race.second.number)])
        assert recording.wrong(0, order), recording.graph.describe_race(race)
        outcomes[wait.name] += 1
    assert sum(outcomes.values()) >= 10


def far_first(self: Any, *, sends: Any, receives: Any, after: Any = (), post: Any = ByNodeTransport.post) -> Any:
    """Post transfers to the other node first on two ranks of four, once warmed up."""
    if self.rank in (0, 3) or not self._warm:
        return post(self, sends=sends, receives=receives, after=after)
    inside, across = (
        [[x for x in some if self._is_in_node(x) is is_near] for some in (sends, receives)] for is_near in (True, False)
    )
    post(self, sends=across[0], receives=across[1], after=after)
    return self._inside.post(sends=inside[0], receives=inside[1])


def backwards(self: Any, hop: Any, *kind: Any, advance: Any = KeyValues.post_kv) -> None:
    """Reverse the chunks on every rank: no race and no deadlock, but a wrong order of posts."""
    self._posts[hop.index].sort(key=lambda pair: (pair[1].recv_hop.index, -pair[0].number))
    advance(self, hop, *kind)


BROKEN = [
    (buffers.RingBuffer, "mark_computed", lambda *_: None, "world 5", ("K/V slot", "kernel", "hop", "recv from")),
    (buffers.Arrival, "wait", lambda self: self.tensors, "world 5", ("recv", "kernel forward_kernel")),
    (Slots, "pop_uses", lambda self, slot: (), "world 5", ("race", "nothing orders the two")),
    (buffers.RingCall, "wait_all", lambda self: None, "forward twice", ("the caller, afterwards", "send")),
    (buffers.RingCall, "mark", lambda self: DONE, "single pass, two chunks", ("single_pass_kernel", "send")),
    (buffers.RingCall, "mark", lambda self: DONE, "parts of dK/dV", ("reduce_kernel", "send")),
    (ByNodeTransport, "post", far_first, "2 x 2, unshard", ("deadlock with eager sends",)),
    (KeyValues, "post_kv", backwards, "two chunks", ("that is not the order of keys",)),
]
"""Owner, attribute, replacement, the case that shows the defect, and words that the problem must contain."""


@pytest.mark.parametrize(("owner", "name", "value", "case", "words"), BROKEN)
def test_injected_defects_are_named(
    owner: Any, name: str, value: Any, case: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    problems = record(CASES["nccl"][case]).problems()
    assert any(all(word in problem for word in words) for problem in problems), told(problems)


MAKERS = {
    "_shared_plan": "two streams",
    "_cached_rows": "two streams, keys that a mask hides",
    "Bounds.transposed": "two streams",
    "dq_add_order": "two streams, single pass in turn",
    "BlockSparseIndex.ranges": "two streams, blocks",
    "Positions.queries": "two streams, dropout",
    "Positions.keys": "two streams, dropout",
    "Layout._order": "two streams, unshard",
    "ExchangePlan.indices": "two streams, halo",
}
"""Functions that cache device tensors, and a case that reads each cache on two streams."""


@pytest.mark.parametrize(("maker", "case"), MAKERS.items())
@pytest.mark.parametrize("left_out", ["wait", "record_stream"])
def test_cached_tensors_need_a_wait_and_record_stream(
    maker: str, case: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait a stream may read too early; without `record_stream` the memory may be freed too early."""

    def broken(self: SharedValue[Any], stream: Any) -> None:
        if left_out == "wait":
            for x in self._tensors:
                x.record_stream(stream)
        else:
            stream.wait_event(self._ready_event)
        self._streams.add(stream.cuda_stream)

    monkeypatch.setattr(SharedValue, "_add_reader", broken)
    problems = record(CASES["local"][case]).problems()
    words = f"race on {CACHED_BY}{maker}: ", "writes it" if left_out == "wait" else "frees it"
    assert any(all(word in problem for word in words) for problem in problems), told(problems)


def test_every_cache_is_read_on_two_streams_somewhere() -> None:
    names = set()
    for case in {*MAKERS.values()}:
        storages = record(CASES["local"][case]).recorder.memory.storages.values()
        names |= {storage.name.removeprefix(CACHED_BY) for storage in storages if storage.name.startswith(CACHED_BY)}
    assert names == {*MAKERS}


def test_gates_are_reset_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that keep their counts would block all programs of the next pass."""
    made: dict[Any, torch.Tensor] = {}
    turns_of = single_pass.make_turns

    def reuse_gates(*args: Any) -> Any:
        turns = turns_of(*args)
        return turns._replace(gates=made.setdefault(turns.gates.shape, turns.gates))

    monkeypatch.setattr(single_pass, "make_turns", reuse_gates)
    assert record(CASES["nccl"]["single pass in turn"]).wrong(0)


@pytest.mark.nightly
def test_a_sample_of_mutants_is_caught() -> None:
    """The command ``tox -e mutants`` runs all of them. A mutant that hangs runs until its time limit."""
    command = [sys.executable, "-m", "tests.properties.wait_mutants", "--sample", "20"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
