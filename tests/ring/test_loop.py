"""The order in which the ring posts, waits and computes, recorded by a fake transport and kernel."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from ringattn import Layout
from ringattn.comm import Placed, Slots
from ringattn.comm.topology.topology import Topology
from ringattn.ring import Mask, Trace
from ringattn.ring.buffers import Chunk, Heads, PostKey, RingBuffer, RingCall, TransferKind, build_payload
from ringattn.ring.dkv import DkvAccumulators
from ringattn.ring.loop import compute_dkdv, partial_sums
from ringattn.ring.schedule.schedule import schedule

from ..support.rendezvous import run_ranks


def lines(
    layout: Layout, *, topology: Topology | None = None, prefetch: int = 1, groups: int = 1, runs: int = 1
) -> list[list[str]]:
    """Return what each rank did in a causal backward, in order."""
    whole = schedule(layout, Mask(causal=True), topology=topology)
    return [rank.lines for rank in run_ranks(*[whole] * runs, phase="backward", prefetch=prefetch, groups=groups)]


def test_dkv_transfers_overlap_with_dq() -> None:
    for line in lines(Layout.zigzag(24, 3)):
        assert line == [
            "post K/V 1: 2 out, 2 in",  # overlaps with the local dQ
            "dq",
            "post K/V 2: 2 out, 2 in",
            "dkdv",
            "post dK/dV: 2 out, 2 in",  # send those of hop 1, receive those for hop 2
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",  # return to the owner; overlaps with the last dQ
            "dq final",
            "dkdv continued",
        ]


def test_kv_of_later_hops_are_posted_behind_dkv() -> None:
    for line in lines(Layout.zigzag(16, 4), prefetch=2):
        assert line == [
            "post K/V 1: 2 out, 2 in",
            "post K/V 2: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",  # before K/V, because the next rank needs dK/dV first
            "post K/V 3: 2 out, 2 in",
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "dkdv continued",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv continued",
        ]


@pytest.mark.parametrize(("groups", "runs"), [(2, 1), (1, 2)])
def test_each_chunk_is_sent_while_the_next_computes(groups: int, runs: int) -> None:
    both_final = " final" if groups > 1 else ""  # every group of heads has a result of its own
    for line in lines(Layout.zigzag(16, 2), groups=groups, runs=runs):
        assert line == [
            "post K/V 1: 2 out, 2 in",
            "post K/V 1 chunk 1: 2 out, 2 in",
            "dq",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            f"dq{both_final}",
            "dkdv",
            "post dK/dV chunk 1: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "dkdv continued",
        ]


def test_rail_transfers_overlap_with_a_whole_outer_step() -> None:
    for line in lines(Layout.zigzag(24, 6), topology=Topology.grid(3, 2)):
        assert line == [
            "post K/V 2 by rail: 2 out, 2 in",  # has a whole outer step to arrive
            "post K/V 1: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "post K/V 4 by rail: 2 out, 2 in",
            "post K/V 3: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq",
            "dkdv continued",  # the root adds its part last
            "post dK/dV by rail: 2 out, 2 in",
            "post K/V 5: 2 out, 2 in",
            "dq",
            "dkdv",
            "post dK/dV: 2 out, 2 in",
            "dq final",
            "dkdv continued",
            "post dK/dV by rail: 2 out, 2 in",  # overlaps with dK/dV of this rank's shard
            "dkdv continued",
        ]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_only_the_last_part_of_the_last_hop_is_final(phase: str) -> None:
    """Any earlier part would round the result to the model dtype."""
    whole = schedule(Layout.contiguous(4, 2), Mask())
    for rank in run_ranks(whole, phase=phase, parts=2):
        computed = [line for line in rank.lines if line.startswith(("out", "dq"))]
        assert [line.endswith("final") for line in computed] == [False, False, False, True]


def test_parts_before_the_last_are_added_in_fp32() -> None:
    parts: Any = [{}, {}]
    out = torch.zeros(1).half(), torch.zeros(1).half()
    sums = [(accum and accum(), into)[1] for _, accum, into in partial_sums(parts, None, out)]
    assert [{x.dtype for x in into} for into in sums] == [{torch.float32}, {torch.float16}]


def test_dkv_that_only_pass_through_are_not_waited_for() -> None:
    call, dkv, chunk = Mock(**{"plan.is_outer_root.return_value": False}), Mock(), Mock(**{"plan.hop_masks": [()]})
    compute_dkdv(call, Mock(), dkv, Mock(), Mock(index=0), chunk)
    assert [name for name, *_ in dkv.mock_calls] == ["incoming_dkv"]


def test_own_dkv_are_summed_in_fp32_and_in_place_if_possible() -> None:
    """Rounding the sum of the nodes to 16 bits would cost one more rounding."""
    chunk, exact = Mock(**{"plan.returns_once": False}), (torch.zeros(1), torch.zeros(1))
    for dkdv, expected in (
        (exact, exact),
        (tuple(x.half() for x in exact), "fp32"),
        ((exact[0].half(), *exact), "fp32"),
    ):
        sums = Mock(_totals={}, _own_shard=lambda _: "fp32")
        for _ in range(2):
            assert DkvAccumulators.own_accumulator(sums, chunk, dkdv) is expected


@pytest.mark.parametrize("hops", [1, 2])
def test_views_of_slots_are_cached_and_one_rank_needs_no_memory(hops: int) -> None:
    heads, pair = Heads(0, slice(0, 2), slice(0, 4)), (torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 8))
    chunk = Chunk(0, heads, Mock(lengths=(3,) * hops))
    call: Any = Mock(chunks=(chunk,), heads=(heads,), plan=Mock(lengths=(3,), hops=[0] * hops, max_shard_keys=3))
    slots = Slots(1, torch.device("cpu"))
    buffer, hop = RingBuffer(call, slots, pair, torch.float32, None), Mock(index=hops - 1)
    assert (slots.nbytes > 0) == (hops > 1)
    for view in (buffer.buffers, buffer.slot_payload) if hops > 1 else ():
        where = (0, hop, chunk) if view == buffer.buffers else (1, 0, hop, chunk)
        assert view(*where) is view(*where)
    first, second = buffer.staging(hop, chunk), buffer.staging(hop, chunk)
    assert first is second and [x.shape for x in first] == [x.shape for x in pair]


def test_a_post_is_named_by_its_phase_hop_content_and_chunk() -> None:
    kv, dkv = "K/V for hop 5", "dK/dV"
    contents = ["K/V by rail for hop 5", kv, dkv, kv, "dK/dV by rail"]
    names = [str(PostKey("backward", 3, kind, 5, 1)) for kind in sorted(TransferKind)]
    assert names == [f"backward hop 3: {content}, chunk 1" for content in contents]


def test_a_post_reports_its_sizes_and_leaves_out_empty_tensors() -> None:
    reports: list[Any] = []
    spans: Any = MagicMock()
    call = RingCall(
        plan=Mock(), phase="forward", transports=(Mock(),), kv_slots=Mock(), dkv_slots=Mock(), record_span=spans,
        heads=(), prefetch=1, on_post=lambda *report: reports.append(report[2:]),
    )  # fmt: skip
    here, there = (torch.zeros(3), torch.zeros(0)), (torch.ones(3), torch.ones(0))
    sends, receives = build_payload(1, here, there), build_payload(2, (torch.zeros(5),))
    assert sends.messages == (Placed(1, here[0], there[0]),)
    call.post(0, Mock(), sends, receives, [])
    assert reports == [([], ((1, 12),), ((2, 20),))]
    fence, trace = Mock(), Trace(torch.device("cpu"))
    recorded = trace.wrap_call(call)
    recorded.post(0, Mock(), sends, receives, [fence])
    first, begin = call.transports[0].post.call_args.kwargs["after"]  # type: ignore[attr-defined]
    assert first is fence  # a transfer begins when everything that it waits for is done
    begin.wait()
    begun = begin.at
    begin.wait()
    assert begin.at == begun and begin.done()
    with recorded.record_span("compute", Mock(index=2)):
        pass
    assert spans.call_args.args[0] == "compute" and [span.hop for span in trace.spans] == [2]  # telemetry goes on
