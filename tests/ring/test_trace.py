"""A ring's trace: spans in order, every byte moved, slots with one content at a time, and the cost of recording."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringattn import Layout, Ring, ring_attention
from ringattn.comm import LocalGroup
from ringattn.comm.topology.topology import Topology
from ringattn.comm.transports.process_group import HostFence
from ringattn.ring import Mask, Trace, TraceSpan
from ringattn.ring import trace as trace_module
from ringattn.ring.buffers import Payload, PostKey, TransferKind
from ringattn.ring.schedule.plan import plan
from ringattn.ring.schedule.schedule import Hop, schedule
from ringattn.ring.trace import CompletedPost, _Clock, _PostBegin, slot_trace

from ..support.cuda.device import FakeCuda
from ..support.ring_cases import run_ranks

WORLD, SEQLEN, HEADS, DIM = 4, 256, 2, 16
FP32 = 4
CUDA = torch.device("cuda", 0)
Traces = list[tuple[list[TraceSpan], list[TraceSpan], list[TraceSpan]]]


def traces(*, causal: bool = True, nodes: int = 1, **settings: Any) -> Traces:
    """Return spans, transfers and slots of every rank for one forward and backward."""
    layout = Layout.zigzag(SEQLEN, WORLD)
    topology = Topology.grid(nodes, WORLD // nodes)

    def step(ring: Ring) -> None:
        leaves = [torch.randn(1, SEQLEN // WORLD, HEADS, DIM, requires_grad=True) for _ in range(3)]
        out = ring_attention(*leaves, layout=layout, ring=ring, causal=causal)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()  # type: ignore[no-untyped-call]

    def rank(group: LocalGroup) -> Any:
        with Ring(group, topology=topology, **settings) as ring:
            step(ring)
            with ring.record() as trace:
                step(ring)
            return trace.spans, trace.transfers, trace.slots

    return run_ranks(WORLD, rank)


@pytest.fixture(scope="module")
def flat() -> Traces:
    return traces()


def waits(spans: list[TraceSpan]) -> dict[str, list[int]]:
    """Return the number of waits at each hop: for K/V (of dQ and of dK/dV), for dK/dV, and at the end for all posts."""
    made = Counter((span.phase, span.hop) for span in spans if span.kind == "wait")
    return {phase: [made[phase, hop] for hop in range(WORLD)] for phase in ("forward", "backward")}


def assert_sent_equals_received(recorded: Traces) -> None:
    """Compare names and bytes of what all ranks sent with those of what all ranks received."""
    sent, received = (
        Counter((x.phase, x.name, x.nbytes) for _, moved, _ in recorded for x in moved if x.kind == kind)
        for kind in ("send", "receive")
    )
    assert sent == received


def test_every_byte_that_moves_is_recorded(flat: Traces) -> None:
    whole = schedule(Layout.zigzag(SEQLEN, WORLD), Mask(causal=True), direction=1, topology=Topology.grid(1, WORLD))
    per_token = 2 * HEADS * DIM * FP32
    names = {span.name for _, moved, _ in flat for span in moved}
    assert names == {f"{what} of {rank}" for what in ("K/V", "dK/dV") for rank in range(WORLD)}
    sent = [sum(span.nbytes for span in moved if span.kind == "send") for _, moved, _ in flat]
    assert sent == [a + b for a, b in zip(whole.bytes(per_token), whole.bytes(per_token, per_token), strict=True)]
    assert_sent_equals_received(flat)


def test_the_last_dkv_that_leave_a_rank_are_those_of_the_other_node() -> None:
    assert_sent_equals_received(recorded := traces(nodes=2))
    for rank, (spans, moved, _) in enumerate(recorded):
        last, received = (
            [span.name for span in moved if (span.phase, span.kind, span.hop) == ("backward", kind, WORLD - 1)]
            for kind in ("send", "receive")
        )
        assert received[-1] == f"dK/dV of {rank}"
        assert {*last} == {f"dK/dV of {other}" for other in range(WORLD) if other // 2 != rank // 2}
        assert waits(spans) == {"forward": [1, 1, 1, 2], "backward": [3, 3, 4, 4]}


def test_spans_do_not_overlap_and_transfers_have_a_duration(flat: Traces) -> None:
    for spans, moved, _ in flat:
        assert all(span.end >= span.begin for span in (*spans, *moved))
        ordered = sorted(spans, key=lambda span: (span.begin, span.end))
        assert all(before.end <= after.begin for before, after in pairwise(ordered))
        assert {span.kind for span in spans} == {"compute", "wait"}
        assert waits(spans) == {"forward": [1, 1, 1, 2], "backward": [2, 3, 3, 4]}


@pytest.mark.parametrize(("nodes", "settings"), [(1, {}), (2, {}), (1, {"slots": 2, "prefetch": 1})])
def test_a_slot_holds_one_shard_at_a_time(flat: Traces, nodes: int, settings: dict[str, Any]) -> None:
    recorded = flat if (nodes, settings) == (1, {}) else traces(nodes=nodes, **settings)
    for spans, moved, slots in recorded:
        for kind in {span.kind for span in slots}:
            uses = sorted((span for span in slots if span.kind == kind), key=lambda span: span.begin)
            assert all(before.end <= after.begin for before, after in pairwise(uses)), (kind, uses)
        for span in (slot for slot in slots if slot.kind.startswith("slot")):
            read = [use for use in spans if (use.phase, use.hop, use.kind) == (span.phase, span.hop, "compute")]
            read += [use for use in moved if (use.phase, use.name) == (span.phase, span.name)]
            assert read and all(span.begin <= c.begin and c.end <= span.end for c in read)
        assert {span.phase for span in slots} == {"forward", "backward"}
        names = [span.name for span in slots if span.phase == "forward"]
        assert len(names) == len(set(names)) == WORLD - 1


def test_runs_of_tokens_use_slots_of_their_own() -> None:
    """The same bytes move as without chunks, and every run has a use of its slot for each shard."""
    whole = schedule(Layout.zigzag(SEQLEN, WORLD), Mask(), direction=1, topology=Topology.grid(1, WORLD))
    per_token, runs = 2 * HEADS * DIM * FP32, 3
    for rank, (_, moved, slots) in enumerate(traces(causal=False, chunks=runs)):
        sent = sum(span.nbytes for span in moved if span.kind == "send")
        assert sent == whole.bytes(per_token)[rank] + whole.bytes(per_token, per_token)[rank]
        received = Counter(span.name for span in moved if span.kind == "receive")
        others = [other for other in range(WORLD) if other != rank]
        assert received == {f"K/V of {other}": 2 * runs for other in others} | {
            f"dK/dV of {other}": runs
            for other in range(WORLD)
            if other != (rank - 1) % WORLD  # starts their sum
        }
        names = Counter(span.name for span in slots if span.phase == "forward")
        assert names == {f"K/V of {other}": runs for other in others}


Uses = list[tuple[str, float, float]]


def uses_of_slots(posts: list[CompletedPost], computed: dict[int, list[tuple[float, float]]], runs: int = 1) -> Uses:
    """Return name, begin and end of each use of a slot of rank 0 of 4."""
    steps = plan(Layout.contiguous(8, 4), Mask(), 0, 1, torch.device("cpu"), None, 3, runs=runs)
    return [(use.name, use.begin, use.end) for use in slot_trace(posts[0].key.phase, steps, posts, computed)]


@pytest.mark.parametrize(
    ("first_received", "last_sent", "expected"),
    [
        # the K/V of hop 1 are received by the post of hop 0 and sent by that of hop 1; those of hop 3 stay
        (4, 4, [("K/V of 3", 0.0, 45.0), ("K/V of 2", 10.0, 55.0), ("K/V of 1", 20.0, 55.0)]),
        (0, 0, [("K/V of 3", 9.0, 45.0), ("K/V of 2", 10.0, 45.0), ("K/V of 1", 20.0, 55.0)]),
    ],
)
def test_a_slot_is_in_use_until_its_content_is_sent_on(first_received: int, last_sent: int, expected: Uses) -> None:
    posts = [
        CompletedPost(PostKey("forward", hop, TransferKind.KV, hop + 1, 0), 10.0 * hop, 10.0 * hop + 35, *sizes)
        for hop, sizes in enumerate([(4, first_received), (4, 4), (last_sent, 4)])
    ]
    assert uses_of_slots(posts, {hop: [(10.0 * hop - 1, 10.0 * hop + 1)] for hop in range(4)}) == expected


@pytest.mark.parametrize(("sent", "received"), [(4, 4), (4, 0), (0, 4)])
def test_a_slot_for_dkv_is_in_use_from_the_first_part_or_arrival(sent: int, received: int) -> None:
    """At hop 1 this rank computes the first part of dK/dV of rank 3; those of rank 2 arrive for hop 2."""
    post = CompletedPost(PostKey("backward", 1, TransferKind.DKV, 1, 0), 20.0, 30.0, sent, received)
    own, other = [("dK/dV of 3", 10.0, 30.0)] * bool(sent), [("dK/dV of 2", 20.0, 40.0)] * bool(received)
    assert uses_of_slots([post], {1: [(10.0, 15.0)], 2: [(31.0, 40.0)]}) == own + other


def test_each_run_of_tokens_has_its_own_transfers() -> None:
    posts = [
        CompletedPost(PostKey("forward", 0, TransferKind.KV, 1, chunk), 100.0 * chunk, 100.0 * chunk + 9, 4, 4)
        for chunk in range(2)
    ]
    assert uses_of_slots(posts, {}, runs=2) == [("K/V of 3", 0.0, 9.0), ("K/V of 3", 100.0, 109.0)]


def test_a_transfer_on_the_host_ends_when_its_fence_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes without a GPU: the end of a post is known only afterwards."""
    monkeypatch.setattr(trace_module, "transfer_names", lambda *_: ("sent", "received"))
    trace, begin, fence = Trace(torch.device("cpu")), Mock(at=2.0), Mock(spec=HostFence, finished_at=9.0)
    trace._plans.append(("forward", Mock()))
    trace.record_post(Mock(hop=1), begin, fence, Payload((), ((1, 12), (2, 8))), Payload((), ((1, 5),)))
    trace.record_post(Mock(hop=2), begin, fence, Payload(), Payload((), ((1, 6),)))
    assert not fence.wait.called
    assert trace.transfers == [
        TraceSpan("forward", "send", 1, 2.0, 9.0, "sent", 20),
        TraceSpan("forward", "receive", 1, 2.0, 9.0, "received", 5),
        TraceSpan("forward", "receive", 2, 2.0, 9.0, "received", 6),
    ]
    assert fence.wait.called


def test_a_wait_splits_the_compute_span(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hop = Trace(torch.device("cpu")), Hop(3, 0, True, None, None, None, None, None, None)
    times = iter(range(10))
    monkeypatch.setattr(trace._clock, "now", lambda: float(next(times)))
    with trace.span("backward", "compute", hop), trace.span("backward", "wait", hop):
        pass
    assert [(span.kind, span.begin, span.end) for span in trace.spans] == [
        ("compute", 0, 1),
        ("wait", 1, 2),
        ("compute", 2, 3),
    ]
    assert trace.seconds("compute") == 2 and [trace.seconds("wait", hop) for hop in (3, 1, 0)] == [1, 0, 0]


def test_gpu_times_come_from_events_on_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are relative to one start event, and the host does not wait during the call."""
    fake = FakeCuda(monkeypatch)
    clock = _Clock(CUDA)
    assert fake.calls[0] == "synchronize"  # earlier work would delay the start event
    fake.calls.clear()
    begin, stream = _PostBegin(clock), object()
    for stream_of_call in (stream, object()):  # a second stream does not change it
        begin.order(stream_of_call)  # type: ignore[arg-type]
    end = clock.now(stream)  # type: ignore[arg-type]
    assert begin.stream is stream and fake.calls == []
    assert 0 <= clock.seconds(end) - clock.seconds(begin.at) < 10


def test_clock_error_is_half_the_time_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start event lies between two readings of the host clock, so the middle is off by half at most."""
    FakeCuda(monkeypatch)
    times = iter([10.0, 10.5])
    with monkeypatch.context() as patch:
        patch.setattr(trace_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
        trace = Trace(CUDA)
    clock = trace._clock
    assert (trace.clock_error, clock.seconds(clock._start)) == (0.25, 10.25)
    monkeypatch.setattr(clock, "_start", Mock(**{"elapsed_time.return_value": 500.0}))  # milliseconds, as of a GPU
    assert clock.seconds(Mock()) == 10.75
    assert _Clock(torch.device("cpu")).error == 0.0
