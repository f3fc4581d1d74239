"""Tests of the predictor on a simulated clock, against results computed by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from ringattn import Layout
from ringattn.bench.common.flags import human_count
from ringattn.bench.predict import alternatives, baseline_ring, command, ring_time
from ringattn.bench.predict.alternatives import (
    all_gather_passes,
    check_memory,
    exchange_seconds,
    group_call,
    percent_of_ideal,
    predict_alternatives,
    straggler_seconds,
    tokens_needed,
    ulysses_passes,
)
from ringattn.bench.predict.inputs import PredictionInputs
from ringattn.bench.predict.links import PRESETS, ClusterLinks, LinkSpeed
from ringattn.bench.predict.predicted_call import PredictedCall, bounds_area
from ringattn.bench.predict.program import COMPUTE, INSIDE, PASSES, Op, Program, record_program
from ringattn.bench.predict.ring_time import ideal_seconds, predict_passes, predicted_timeline
from ringattn.bench.predict.simulator import run_programs, slow_launches
from ringattn.bench.predict.speed import (
    ADD,
    DECODE,
    DKDV,
    DQ,
    DRAWS,
    ENCODE,
    FOLD,
    GPUS,
    POINT,
    TILE_ROWS,
    Area,
    Perturbation,
    Speed,
    gpu_speed,
)
from ringattn.kernels import Bounds
from ringattn.ring import Mask
from ringattn.ring.buffers import PostKey, TransferKind
from ringattn.ring.schedule.layout import Documents
from ringattn.ring.schedule.mask import BlockMask, bigbird, visible_pairs
from ringattn.ring.schedule.schedule import schedule
from ringattn.ring.schedule.visibility import cut_keys

from ..support.nightly import rest_nightly

LINKS = ClusterLinks(PRESETS["nvlink4"], PRESETS["ib400"])
H100 = replace(gpu_speed("h100"), forward=560e12, backward=430e12)
INPUTS = PredictionInputs(H100, LINKS)
SMALL = PredictedCall(tokens=16, world=4, heads=4, kv_heads=2, head_dim=8)
CAUSAL = Mask(causal=True)
FORWARD = ("forward",)


class Steady(Speed):
    """GPU whose launches take 1 s, each backward kernel 0.5 s, and whose host takes no time."""

    def seconds(self, what: str, area: object, call: object, *, hop: int) -> float:
        return {FOLD: 1.0, DQ: 0.5, DKDV: 0.5}.get(what, 0.0)

    def product_seconds(self, area: object, call: object, *, backward: bool = False) -> float:
        return 1.0


STEADY = Steady("steady", 1.0, 1.0, H100.memory, H100.multiprocessors, H100.capacity, beside=0.0, host=0.0)


def seconds(call: PredictedCall, links: ClusterLinks, speed: Speed = STEADY) -> tuple[float, ...]:
    return tuple(simulated.seconds for simulated in predict_passes(call, speed, links))


def late(inside: float, between: float | None = None) -> ClusterLinks:
    """Return links with a latency and unlimited rate."""
    return ClusterLinks(LinkSpeed(1e30, inside), LinkSpeed(1e30, inside if between is None else between))


OWN = Layout([[(0, 8), (48, 16)], [(8, 16)], [(32, 16)], [(24, 8)]])


@pytest.mark.parametrize(("layout", "nodes", "mask", "chunks"), [
    ("striped", 2, CAUSAL, 1), ("contiguous", 2, Mask(causal=True, window=(12, 0)), 1),
    ("zigzag", 1, Mask(causal=True, documents=Documents([0, 8, 40, 64])), 1),
    (OWN, 2, Mask(causal=True, window=(20, 0), blocks=BlockMask(torch.arange(256).view(16, 16) % 7 != 3, 4)), 1),
    ("zigzag", 1, CAUSAL, 2), ("contiguous", 2, CAUSAL, 4), (OWN, 2, CAUSAL, 3),
])  # fmt: skip
def test_predicted_programs_send_the_bytes_of_the_schedule(layout: Any, nodes: int, mask: Mask, chunks: int) -> None:
    # With one key head, chunks are runs of tokens.
    call = replace(SMALL, kv_heads=1, chunks=chunks, layout=layout, mask=mask, nodes=nodes)
    tokens, per_token = call.token_layout, 2 * call.kv_heads * call.head_dim
    whole = schedule(tokens, mask, topology=call.topology)
    cuts = cut_keys(tokens, mask, tokens, chunks) if chunks > 1 else []
    runs = [whole.select_keys(tokens, mask, *run) for run in cuts] or [whole]
    for phase, dkv in zip(PASSES, (0, 4 * per_token), strict=True):
        for plan in call.plans():
            rows = tokens.positions(plan.rank)
            ops = record_program(call, plan, phase, tokens=len(rows)).ops
            sent = sum(nbytes for op in ops for _, nbytes in op.sends)
            assert sent == sum(run.bytes(2 * per_token, dkv)[plan.rank] for run in runs)
            launches = [op for op in ops if op.what in (FOLD, DQ)]
            if chunks > 1:
                pairs = sum(bounds_area(op.bounds, len(rows), op.keys).pairs for op in launches)
                assert pairs == int((rows + 1).sum())
            else:  # the local shard has a launch even if no local query sees it
                assert {op.hop for op in launches} - {0} == {hop.index for hop in plan.hops if hop.computes} - {0}
    assert call.memory()
    predict_passes(call, H100, LINKS)  # every send has a receive, and no rank waits forever


def test_runs_of_tokens_are_priced_by_their_areas() -> None:
    """Runs hide a part of the first transfer over a slow link."""
    links = ClusterLinks(LinkSpeed(1e9, 0.0), LinkSpeed(1e9, 0.0))
    whole = replace(SMALL, tokens=4096, heads=16, kv_heads=1, head_dim=128)
    cut, speed = replace(whole, chunks=2), replace(H100, host=0.0, launch=0.0)
    assert seconds(cut, links, speed)[0] < seconds(whole, links, speed)[0]
    many = [predict_passes(cut, speed, links, tokens=np.array([4096, 8192]))[at].seconds for at in (0, 1)]
    assert [times[0] for times in many] == pytest.approx(list(seconds(cut, links, speed)))
    assert all(times[1] > 2 * times[0] for times in many)


@pytest.mark.parametrize(("layout", "world", "nodes"), [("zigzag", 4, 2), ("striped", 3, 1), ("contiguous", 4, 1)])
def test_plain_plans_match_looked_up_plans(layout: str, world: int, nodes: int) -> None:
    # Plain plans look up no bounds, because the owner of a shard determines what a launch sees.
    call = PredictedCall(512, world, layout, nodes=nodes)
    looked_up = replace(call, mask=Mask(causal=True, prefix=1)).plans()  # sees the same pairs, but is not plain
    for plan, expected in zip(call.plans(), looked_up, strict=True):
        for name in (
            "rank", "hops", "inner", "lengths", "max_shard_keys", "send_index", "last_launch_hop", "slots",
            "returns_early", "dkv_returns", "kv_slots", "dkv_slots",
        ):  # fmt: skip
            assert getattr(plan, name) == getattr(expected, name), name
        for hop in plan.hops:
            if hop.computes:
                area = call.plain_launch_area((hop.shard > plan.rank) - (hop.shard < plan.rank), 512)
                assert area == bounds_area(expected.hop_masks[hop.index][0].bounds, 512, 512)
                pairs = visible_pairs(
                    CAUSAL, call.token_layout.positions(plan.rank), call.token_layout.positions(hop.shard)
                )
                assert area.pairs == pairs


def test_documents_over_more_ranks_than_a_perturbed_ring_may_have() -> None:
    """Documents that fit a rank cost the same on 8 ranks and on 160."""
    few, many = (
        PredictedCall(64, world, "contiguous", Mask(causal=True, documents=Documents([*range(0, 64 * world + 1, 32)])))
        for world in (8, 160)
    )
    assert seconds(few, LINKS, H100) == pytest.approx(seconds(many, LINKS, H100))


def test_areas_of_a_block_mask_count_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = PredictedCall(512, 2, "contiguous", Mask(blocks=bigbird(1024, 128, window=3, global_=1, random=1)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    plans = call.plans()
    assert threads == [1, 7]  # restored
    for plan in plans:
        for hop in plan.hops:
            pairs = visible_pairs(
                call.mask, call.token_layout.positions(plan.rank), call.token_layout.positions(hop.shard)
            )
            assert sum(bounds_area(hop_mask.bounds, 512, 512).pairs for hop_mask in plan.hop_masks[hop.index]) == pairs
    assert call.mask.blocks is not None
    assert call.areas()[0].pairs == pytest.approx(float(call.mask.blocks.visible.float().mean()) * 1024**2)


def test_exposed_communication_by_hand() -> None:
    assert seconds(SMALL, late(0.0)) == pytest.approx((4, 4))
    assert seconds(SMALL, late(0.4))[0] == pytest.approx(4)
    assert seconds(SMALL, late(0.2))[1] == pytest.approx(4)  # K/V and dK/dV alternate on one stream
    assert seconds(SMALL, late(0.7))[1] > 4.2
    forward = predict_passes(SMALL, STEADY, late(10.0))[0]
    assert forward.seconds == pytest.approx(3 * 10 + 1) and forward.exposed == pytest.approx(forward.seconds - 4)
    assert forward.worst == pytest.approx(9)  # the local shard's launch hides 1 s of the first transfer
    (last,) = predict_passes(replace(SMALL, layout="contiguous"), STEADY, late(10.0), phases=FORWARD)
    assert last.exposed == pytest.approx(27)  # of the rank that finishes last; the first rank waits for no one
    links, call = ClusterLinks(LinkSpeed(1e9, 0.0), LinkSpeed(1e9, 0.0)), replace(SMALL, tokens=4096, kv_heads=4)
    assert seconds(replace(call, chunks=4), links, H100)[0] < seconds(call, links, H100)[0]


def test_gradients_wait_behind_prefetched_keys() -> None:
    # Transfers run in posting order. Each further slot lets one more group of K/V pass before the first dK/dV.
    call = PredictedCall(2048, 8, kv_heads=32)
    times = [seconds(replace(call, slots=slots), LINKS, replace(H100, host=0.0))[1] for slots in (2, 3, 4, 7)]
    assert times == sorted(times) and times[-1] > 1.1 * times[0]


def test_rail_transfers_are_hidden_behind_an_outer_step() -> None:
    # A transfer between the two nodes takes as long as three hops.
    call = replace(SMALL, world=8, nodes=2)
    assert seconds(call, late(0.1, 3.0))[0] == pytest.approx(8)
    assert seconds(replace(call, two_level=False), late(0.1, 3.0))[0] > 15


def test_concurrent_senders_share_nics() -> None:
    links = ClusterLinks(LinkSpeed(1e30, 0.0), LinkSpeed(4e9, 1e-3), nics=2)
    assert [links.far(senders).rate for senders in (1, 2, 4, 8)] == [4e9, 4e9, 2e9, 1e9]
    assert links.beside(4).far(1).rate == 2e9 and links.far(8).latency == 1e-3
    call = PredictedCall(1024, 16, nodes=2, kv_heads=8)
    for ring, factor in ((call, 1.2), (replace(call, two_level=False), 1.0)):
        few, many = (seconds(ring, replace(LINKS, nics=nics), H100)[0] for nics in (1, None))
        assert few >= factor * many and (factor > 1 or few == many)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_message_waits_for_both_ends(behind: int) -> None:
    # One rank posts after a launch of 2 s, and the transfer takes 1 s, whichever rank is late.
    key = PostKey("forward", 0, TransferKind.KV, 1, 0)
    groups: list[Any] = [{"sends": ((1, 8),)}, {"receives": ((0, 8),)}]
    programs, costs = [], []
    for rank, messages in enumerate(groups):
        launch = Op(COMPUTE, FOLD, 0, 0, ())
        programs.append(Program(rank, "forward", (launch, Op(INSIDE, "K/V", 0, 0, (0,), key=key, **messages))))
        costs.append([2.0 if rank == behind else 0.0, 0.0])
    assert [track.seconds for track in run_programs(programs, costs, lambda a, b, nbytes: 1.0)] == [3.0, 3.0]
    issued = run_programs(programs, costs, lambda a, b, nbytes: 1.0, host=lambda op: 4.0)
    assert [track.seconds for track in issued] == [9.0, 9.0]  # the host issues the second operation after 8 s
    point = Op(COMPUTE, POINT, 0, 0, ())  # takes none of the host's time
    (track,) = run_programs([Program(0, "forward", (point, point))], [[1.0] * 2], lambda *_: 0.0, host=lambda op: 4.0)
    assert track.seconds == 2.0
    with pytest.raises(ValueError, match="wait for each other forever"):
        run_programs(programs[:1], costs[:1], lambda a, b, nbytes: 0.0)


@pytest.mark.parametrize(("later", "exposed"), [(0.0, 0.0), (1e-12, 0.0), (1e-3, 2.5)])
def test_of_ranks_that_end_together_the_one_that_waited_least_counts(later: float, exposed: float) -> None:
    issued = {"late": 2.0, "later": 0.5, "early": 0.0}  # by the host
    programs = [
        Program(0, "forward", (Op(COMPUTE, "late", 0, 0, ()), Op(COMPUTE, "later", 1, 0, ()))),
        Program(1, "forward", (Op(COMPUTE, "early", 0, 0, ()), Op(COMPUTE, "early", 1, 0, ()))),
    ]
    costs = [[0.0, 0.5 + later], [2.0, 1.0]]
    found = ring_time.simulate_pass(programs, costs, lambda *_: 0.0, 0.0, lambda op: issued[op.what])
    assert found.seconds == pytest.approx(3.0 + later) and found.exposed == pytest.approx(exposed)
    assert found.worst == pytest.approx(2.0 if exposed else 0.0) and len(found.tracks) == 2


def test_transfers_slow_concurrent_launches() -> None:
    # Transfers of 6 s take 0.1 of the speed of the three launches of 1.8 s beside them.
    ops = (Op(INSIDE, "K/V", 0, 0, ()), *(Op(COMPUTE, FOLD, hop, 0, ()) for hop in range(4)))
    program = Program(0, "forward", ops)
    times = slow_launches(program, [0.0, *[np.array([1.8, 6.0])] * 4], [np.array([6.0, 1.0])] + [0.0] * 4, 0.1)
    assert [time.tolist() for time in times[1:]] == [[2.0, 6.1], [2.0, 6.0], [2.0, 6.0], [1.8, 6.0]]
    call = PredictedCall(8192, 8, kv_heads=32)
    few, more = (seconds(replace(call, slots=slots), LINKS, replace(H100, host=0.0))[0] for slots in (2, 8))
    assert few == pytest.approx(more, rel=1e-3)  # early posts do not change the bytes that overlap with launches


LARGE_RINGS = [
    PredictedCall(2048, 34, kv_heads=8), PredictedCall(1024, 36, "striped", Mask(), kv_heads=8, nodes=9),
    PredictedCall(1024, 36, kv_heads=8, nodes=9, two_level=False, chunks=2),
    PredictedCall(1024, 34, kv_heads=1, chunks=2),
    PredictedCall(2048, 36, nodes=2, kv_heads=8, wire_dtype="bfloat16", dtype="float32"),
]  # fmt: skip


@pytest.mark.parametrize("call", rest_nightly(LARGE_RINGS, LARGE_RINGS[0]))
def test_extrapolated_rings_match_the_simulation(call: PredictedCall) -> None:
    # A large ring is extrapolated from two small rings and compared with a full simulation.
    for line, simulated in zip(
        predict_passes(call, H100, LINKS), predict_passes(call, H100, LINKS, simulated=True), strict=True
    ):
        assert not line.tracks and len(simulated.tracks) == call.world
        assert (line.seconds, line.exposed) == pytest.approx(
            (simulated.seconds, simulated.exposed), rel=1e-9, abs=1e-12
        )
        assert line.worst == pytest.approx(simulated.worst, abs=1e-9)


def test_large_rings_with_a_slow_rank_are_simulated_whole() -> None:
    call, slow = PredictedCall(64, 34, kv_heads=8), Perturbation({33: 2.0})
    (line,) = predict_passes(call, H100, LINKS, slow, phases=FORWARD)
    assert len(line.tracks) == call.world


def test_worst_hop_grows_with_contiguous_shards_over_nodes() -> None:
    # Only here the worst hop depends on the size: the last rank's gradients wait for one more node.
    call = PredictedCall(1024, 40, "contiguous", kv_heads=8, nodes=10, two_level=False)
    line, simulated = (
        predict_passes(call, H100, LINKS, phases=PASSES[1:], simulated=whole)[0] for whole in (False, True)
    )
    assert line.seconds == pytest.approx(simulated.seconds, rel=1e-9)
    assert line.worst == pytest.approx(simulated.worst, rel=0.02)


def test_an_array_of_lengths_matches_single_calls() -> None:
    batched = predict_passes(PredictedCall(8192, 40, kv_heads=8), H100, LINKS, tokens=np.array([1024.0, 4096.0]))
    single = [predict_passes(PredictedCall(tokens, 40, kv_heads=8), H100, LINKS) for tokens in (1024, 4096)]
    for batch, *alone in zip(batched, *single, strict=True):
        assert batch.seconds.tolist() == pytest.approx([other.seconds for other in alone])
        assert batch.exposed.tolist() == pytest.approx([other.exposed for other in alone])


def test_tokens_for_ninety_percent() -> None:
    call = PredictedCall(8192, 40, kv_heads=8)
    needed = tokens_needed(call, INPUTS)
    assert needed is not None and percent_of_ideal(call, INPUTS, np.array([float(needed)])) >= 90
    assert percent_of_ideal(call, INPUTS, np.array([needed * 0.9])) < 90
    slow = PredictionInputs(H100, ClusterLinks(LinkSpeed(5e9, 0.0), LinkSpeed(5e9, 0.0)), phases=FORWARD)
    assert (tokens_needed(call, slow) or 0) > needed
    ideal = replace(H100, multiprocessors=1, memory=1e30, launch=0.0, host=0.0, beside=0.0)
    assert (
        tokens_needed(replace(call, world=2, mask=Mask()), PredictionInputs(ideal, late(0.0), phases=FORWARD)) == 256
    )  # the shortest
    # at any length half of the hops wait for the last rank
    assert tokens_needed(replace(call, layout="contiguous"), INPUTS) is None


def test_ideal_is_one_device_with_all_the_work() -> None:
    call = PredictedCall(8192, 4)
    assert ideal_seconds(call, H100, "forward") == pytest.approx(
        ideal_seconds(PredictedCall(32768, 1), H100, "forward") / 4
    )
    (alone,) = predict_passes(replace(call, world=1), H100, LINKS, phases=FORWARD)  # the first hop reads no state
    assert alone.seconds == pytest.approx(H100.host + ideal_seconds(replace(call, world=1), H100, "forward"))
    for phase in ("forward", "backward"):
        assert ideal_seconds(replace(call, chunks=4), H100, phase) == ideal_seconds(call, H100, phase)
    masks = Mask(window=(64, 64)), Mask(window=(64, 64), global_tokens=((0, 256),)), Mask()
    times = [ideal_seconds(PredictedCall(1 << 12, 2, "contiguous", mask), H100, "forward") for mask in masks]
    assert times == sorted(times) and times[1] > 1.2 * times[0]


def test_memory_does_not_grow_with_the_ring() -> None:
    assert PredictedCall(8192, 8).memory() == PredictedCall(8192, 4096).memory()
    parts = replace(SMALL, batch=3, chunks=2).memory(backward=False)
    assert parts["out of the chunks"] == 3 * 16 * 4 * 8 * 2
    assert "out of the chunks" not in replace(SMALL, kv_heads=1, chunks=2).memory(backward=False)  # runs of tokens
    with pytest.raises(ValueError, match="chunks is 0: it must be at least 1"):
        replace(SMALL, chunks=0)
    with pytest.raises(ValueError, match=r"the GPU has 1 GB\. At most") as refused:
        check_memory(PredictedCall(16384, 8), 1e9)
    most = int(str(refused.value).partition("At most ")[2].split()[0].replace(",", ""))
    check_memory(PredictedCall(most, 8), 1e9)
    with pytest.raises(ValueError, match=f"At most {most:,} "):
        check_memory(PredictedCall(most + 2, 8), 1e9)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, window=(300, 0))])
def test_timelines_list_every_event(mask: Mask) -> None:
    call = replace(SMALL, tokens=256, mask=mask, nodes=2)
    passes = predict_passes(call, H100, LINKS)
    line = predicted_timeline("a ring", passes, call)
    assert line.seconds == pytest.approx(sum(each.seconds for each in passes))
    for rank in range(4):
        for lane in ("compute", "slot 0", "slot 1", "slot 2"):
            events = sorted((e for e in line.events if (e.rank, e.lane) == (rank, lane)), key=lambda e: e.begin)
            assert events or lane == "slot 2", (rank, lane)
            assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(events)), (rank, lane)
        for phase in PASSES:  # a rank computes or waits
            spans = [e for e in line.events if (e.rank, e.phase) == (rank, phase) and e.lane in ("compute", "wait")]
            spans.sort(key=lambda e: e.begin)
            assert all(a.end == pytest.approx(b.begin) for a, b in pairwise(spans)) and spans[-1].lane == "compute"
            assert spans[0].begin == pytest.approx(0.0 if phase == "forward" else passes[0].seconds)
    folds = {(e.hop, e.name) for e in line.events if (e.rank, e.lane, e.phase) == (1, "compute", "forward")}
    assert folds == {(hop.index, f"fold of {hop.shard}") for hop in call.plans()[1].hops if hop.computes}
    with pytest.raises(ValueError, match="extrapolated from smaller rings"):
        predicted_timeline("", (replace(passes[0], tracks=()),), call)
    moved = {lane: sorted((e.name, e.nbytes) for e in line.events if e.lane == lane) for lane in ("send", "receive")}
    assert moved["send"] == moved["receive"]


def test_several_lengths_equal_single_ones() -> None:
    call, lengths = PredictedCall(4096, 4, "contiguous", kv_heads=8), np.array([4096, 65536])
    (together,) = predict_passes(call, H100, LINKS, phases=FORWARD, tokens=lengths)
    for at, tokens in enumerate(lengths):
        (alone,) = predict_passes(replace(call, tokens=int(tokens)), H100, LINKS, phases=FORWARD)
        for name in ("seconds", "exposed", "worst"):
            assert getattr(together, name)[at] == pytest.approx(getattr(alone, name)), (tokens, name)


def test_jitter_draws_many_runs() -> None:
    call, jitter = PredictedCall(4096, 8, kv_heads=8), Perturbation(jitter=0.1)
    none, some, again = (
        predict_passes(call, H100, LINKS, luck, phases=FORWARD)[0] for luck in (Perturbation(), jitter, jitter)
    )
    assert some.seconds.shape == some.exposed.shape == (DRAWS,) and 0 < some.seconds.std() < 0.1 * none.seconds
    assert some.seconds.mean() > none.seconds * np.exp(0.1**2 / 2)
    assert np.array_equal(some.seconds, again.seconds)
    draws = np.log(np.concatenate([jitter.launch_factors(rank, phase, 500) for rank in (0, 1) for phase in PASSES]))
    assert draws.mean() == pytest.approx(0, abs=4e-3) and draws.std() == pytest.approx(0.1, rel=0.05)
    assert abs(np.corrcoef(draws.reshape(4, -1))[np.triu_indices(4, 1)]).max() < 0.05


def test_balanced_shards_compensate_for_a_slow_rank() -> None:
    inputs = replace(INPUTS, perturbation=Perturbation({1: 2.0}), phases=FORWARD)
    even, slow, balanced = straggler_seconds(PredictedCall(256, 8, kv_heads=8), inputs)
    assert even < balanced < slow and balanced < 1.25 * 8 / 7.5 * even
    even, same, _ = straggler_seconds(PredictedCall(256, 8), replace(inputs, perturbation=Perturbation(jitter=0.2)))
    assert even == same  # jitter affects even and balanced shards alike


@pytest.mark.parametrize(("call", "names"), [
    (PredictedCall(2048, 16, nodes=8, kv_heads=16, slots=1), {
        "flat ring", "two-level ring", "baseline ring", "all-gather of K/V", "Ulysses 2 x ring 8",
        "Ulysses 4 x ring 4", "Ulysses 8 x ring 2", "Ulysses 16 x ring 1",
    }),
    (PredictedCall(2048, 12, heads=12, kv_heads=6), {
        "flat ring", "baseline ring", "all-gather of K/V", "Ulysses 2 x ring 6", "Ulysses 3 x ring 4",
        "Ulysses 6 x ring 2", "Ulysses 12 x ring 1",
    }),
    (PredictedCall(2048, 4, mask=Mask(causal=True, window=(64, 0)), nodes=2), {"flat ring", "two-level ring"}),
])  # fmt: skip
def test_ways_are_ordered_by_time(call: PredictedCall, names: set[str]) -> None:
    results = predict_alternatives(call, replace(INPUTS, phases=FORWARD))
    assert {way.name for way in results} == names
    assert [way.seconds for way in results] == sorted(way.seconds for way in results)


def test_a_row_adds_both_passes_and_names_the_longest_wait() -> None:
    passes = ring_time.Pass("forward", 2.0, 1.0, 0.5), ring_time.Pass("backward", 4.0, 2.0, np.array([0.125, 1.375]))
    row = command._row(alternatives.Alternative("a ring", 7, passes), SMALL, INPUTS)
    assert (row["fwd"], row["bwd"], row["exposed"], row["worst hop"]) == (2000, 4000, 3000, 750)


def test_exchanges_across_nodes_use_the_slow_link() -> None:
    # A launch takes 1 s and a message between nodes 10 s: one exchange for q, k and v, one for out, and the ring's hop.
    inputs = PredictionInputs(replace(STEADY, memory=1e30), late(0.0, 10.0), phases=FORWARD)
    call = PredictedCall(64, 8, nodes=4, kv_heads=4)
    assert exchange_seconds(call, 4, inputs) == pytest.approx(2 * 10)
    assert ulysses_passes(call, 4, inputs)[0].seconds == pytest.approx(2 * 10 + 10 + 1)
    # the exchange stays inside a node
    assert ulysses_passes(call, 2, inputs)[0].seconds == pytest.approx(3 * 10 + 1, abs=1e-3)
    by_rate = [
        PredictionInputs(inputs.speed, ClusterLinks(LinkSpeed(1e9, 0.0, "", rate), LinkSpeed(1e9, 0.0)))
        for rate in (None, 0.5e9)
    ]
    moved = 64 * 128 * 2 * (2 * 32 + 2 * 4) / 2  # half of q, k, v and out stays on its rank
    assert [exchange_seconds(call, 2, links) for links in by_rate] == pytest.approx([moved / 1e9, moved / 0.5e9])
    shared = replace(by_rate[0], links=replace(by_rate[0].links, nics=1))  # two ranks of a node share its NIC
    assert exchange_seconds(call, 4, shared) == pytest.approx(1.5 * moved / 0.5e9)


def test_an_all_gather_waits_for_every_other_rank() -> None:
    # K and V are gathered one after the other, at the rate of collectives. The backward also scatters fp32 dK and dV.
    links = ClusterLinks(LinkSpeed(1e30, 1e-3, "", 0.5e9), LinkSpeed(1e9, 4e-3))
    inputs = PredictionInputs(replace(STEADY, memory=1e9, passes=1.0), links, Perturbation({1: 3.0}))
    call = PredictedCall(64, 4, kv_heads=4)
    kv = 2 * 64 * 4 * 128  # elements of a shard of K and V

    def collective(width: int, latency: float, rate: float) -> float:
        return 25e-6 + 3 * (2 * latency + kv * width / rate) + 2 * 4 * kv * width / 1e9

    gather, scatter = (collective(width, 1e-3, 0.5e9) for width in (2, 4))
    forward, backward = all_gather_passes(call, inputs)
    assert (forward.exposed, backward.exposed) == pytest.approx((gather, gather + scatter))
    assert (forward.worst, backward.worst) == (forward.exposed, backward.exposed)
    compute = [3.0 * float(ideal_seconds(call, inputs.speed, phase)) for phase in PASSES]
    assert [each.seconds - each.exposed for each in (forward, backward)] == pytest.approx(compute)
    # All NICs of a node receive: each of its two ranks fetches one of the two far shards.
    over_nodes = all_gather_passes(replace(call, nodes=2), replace(inputs, phases=FORWARD))[0]
    assert over_nodes.exposed == pytest.approx(collective(2, 1e-3, 0.5e9))
    narrow = replace(links, between=LinkSpeed(0.1e9, 0.0), nics=1)  # a third of the shards over half of a NIC
    over_a_nic = all_gather_passes(replace(call, nodes=2), replace(inputs, links=narrow, phases=FORWARD))[0]
    assert over_a_nic.exposed == pytest.approx(collective(2, 1e-3, 3 * 0.05e9))
    one_per_node = all_gather_passes(replace(call, nodes=4), replace(inputs, phases=FORWARD))[0]
    assert one_per_node.exposed == pytest.approx(collective(2, 4e-3, 1e9))
    tiny = replace(inputs, links=ClusterLinks(LinkSpeed(1e30, 0.0), LinkSpeed(1e30, 0.0)), phases=FORWARD)
    assert all_gather_passes(call, replace(tiny, speed=STEADY))[0].exposed == pytest.approx(90e-6)  # the host's time


def test_rings_of_a_mesh_share_nics_and_wait_for_slow_groups() -> None:
    asked: list[Any] = []
    inputs = replace(INPUTS, links=replace(LINKS, nics=2), perturbation=Perturbation({5: 2.0}))
    call = PredictedCall(64, 8, kv_heads=8, nodes=2)

    def ring(*given: Any, phases: Any) -> tuple[ring_time.Pass, ...]:
        asked.append((*given, phases))
        return tuple(ring_time.Pass(phase, 1.0, 0.25, 0.125) for phase in phases)

    passes, exchange = ulysses_passes(call, 2, inputs, ring), exchange_seconds(call, 2, inputs)
    assert asked == [(group_call(call, 2), H100, inputs.links.beside(2), Perturbation({2: 2.0}), PASSES)]
    worst = max(0.125, exchange)
    assert passes == [ring_time.Pass(phase, 1.0 + exchange, 0.25 + exchange, worst) for phase in PASSES]


def test_a_map_has_rings_of_whole_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def percent(ring: PredictedCall, inputs: object, tokens: Any) -> Any:
        asked.append((ring.world, ring.nodes, tokens.tolist()))
        return tokens / 100

    monkeypatch.setattr(alternatives, "percent_of_ideal", percent)
    call = PredictedCall(64, 8, nodes=2, kv_heads=8)
    capacity = sum(replace(call, tokens=128).memory().values())
    percents = alternatives.sweep_percents(call, INPUTS, [64, 128, 256], [2, 4, 8, 16], capacity)
    assert asked == [(world, nodes, [64.0, 128.0]) for world, nodes in ((2, 1), (4, 1), (8, 2), (16, 4))]
    assert percents == {world: {64: 0.64, 128: 1.28, 256: None} for world in (2, 4, 8, 16)}


@pytest.mark.parametrize(("degree", "ranks", "nodes", "heads", "kv_heads"), [
    (2, 4, 4, 16, 2), (4, 2, 2, 8, 1), (8, 1, 1, 4, 1),
])  # fmt: skip
def test_groups_that_exchange_heads_are_the_ranks_of_a_ring(
    degree: int, ranks: int, nodes: int, heads: int, kv_heads: int
) -> None:
    call = PredictedCall(64, 8, kv_heads=4, nodes=4, slots=3, chunks=4, batch=2, wire_dtype="float8_e4m3fn")
    group = group_call(call, degree)
    expected = replace(call, tokens=64 * degree, world=ranks, nodes=nodes, heads=heads, kv_heads=kv_heads, chunks=1)
    assert group == expected
    assert group_call(replace(call, world=2, nodes=1, slots=1), 2).slots == 2


def test_a_transport_over_all_nics_is_no_faster_than_a_node() -> None:
    links = ClusterLinks(LinkSpeed(100e9, 0.0), LinkSpeed(40e9, 1e-6), nics=2)
    assert [links.spread(nics).between.rate for nics in (1, 2, 3)] == [40e9, 80e9, 100e9]
    assert (links.spread(2).between.latency, links.spread(2).inside, links.spread(2).nics) == (1e-6, links.inside, 2)
    assert (links.count_nics(8), replace(links, nics=None).count_nics(8)) == (2, 8)
    assert links.beside(4).nics == 0.5 and replace(links, nics=None).beside(4).nics is None
    for broken in ({"rate": 0.0}, {"rate": np.inf}, {"latency": -1e-9}, {"latency": np.inf}):
        with pytest.raises(ValueError, match="a link has a rate of"):
            replace(links.inside, **broken)  # type: ignore[arg-type]


def test_presets_have_plausible_speeds() -> None:
    assert {link for link in GPUS.values()} <= {*PRESETS}
    for name, link in PRESETS.items():
        assert 5e-6 <= link.latency <= 5e-5 and 20e9 <= link.rate <= (link.collective or link.rate) <= 900e9, name


def test_launches_take_the_time_of_their_work_and_of_their_bytes() -> None:
    speed = replace(H100, forward=7e3, backward=11e3, memory=20.0, passes=0.5, launch=1.0, multiprocessors=3, edge=9.0)
    call = PredictedCall(16, 2, batch=2, heads=8, kv_heads=4, head_dim=16, dtype="float32", chunks=2)
    area = Area(pairs=1e5, rows=16, keys=24, longest=20, edges=5)
    heads = 2 * 8 / 2  # of a chunk
    work = heads * (1e5 + 9 * 5) + 0.5 * 3 * 128 * 20
    forward, backward = 4 * 16 * work / 7e3, 2.5 * 4 * 16 * work / 11e3
    q, k = 16 * 8 * 16, 24 * 4 * 16  # elements of a chunk's rows and keys, of both batch rows
    expected = {
        FOLD: 1 + forward + 8 * q / 10, DQ: 1 + 3 / 7 * backward + 8 * q / 10, DKDV: 1 + 4 / 7 * backward + 16 * k / 10,
        ADD: 16 * k / 10, ENCODE: 1 + 2 * 4 * k / 10, DECODE: 1 + 2 * 4 * k / 10, POINT: 0.0,
    }  # fmt: skip
    assert {what: speed.seconds(what, area, call, hop=1) for what in expected} == pytest.approx(expected)
    assert speed.seconds(FOLD, area, call, hop=0) == pytest.approx(1 + forward)
    own = H100.fit_speeds((616e12, PredictedCall(16384, 1)))  # the backward keeps its ratio to the forward
    assert own.backward / own.forward == pytest.approx(430 / 560) and own.peak is None
    # The last program alone bounds a launch with little work.
    small = area._replace(pairs=10.0, edges=0)
    runs, shared = replace(call, kv_heads=1), replace(call, kv_heads=1, chunks=1)  # chunks that are runs of tokens
    assert speed.product_seconds(area, runs) == speed.product_seconds(area, shared)
    assert speed.product_seconds(small, call) == pytest.approx(4 * 16 * 3 * 128 * 20 / 7e3)


@pytest.mark.parametrize(("phase", "encodes", "decodes"), [("forward", [16], [16] * 3), ("backward", None, None)])
def test_wire_dtypes_encode_once_and_decode_every_arrival(
    phase: str, encodes: list[int] | None, decodes: list[int] | None
) -> None:
    call = replace(SMALL, layout="striped", mask=Mask(), dtype="float32", wire_dtype="bfloat16")
    call = replace(call, grad_wire_dtype="bfloat16" if phase == "backward" else None)
    (ops,) = {record_program(call, plan, phase).ops for plan in call.plans()[:1]}
    by_kind = {kind: [op.keys for op in ops if op.what == kind] for kind in (ENCODE, DECODE)}
    kv, kv_wire = 2 * 16 * 2 * 8 * 4, 2 * 16 * 2 * 8 * 2
    if encodes is not None:
        assert by_kind == {ENCODE: encodes * 2, DECODE: decodes * 2}  # type: ignore[operator]  # K and V
    else:  # also dK/dV of every hop, and those that return
        assert len(by_kind[ENCODE]) > 2 and len(by_kind[DECODE]) > 6
    sent = {nbytes for op in ops for _, nbytes in op.sends}
    assert sent == {kv_wire} and kv == 2 * kv_wire


def test_a_host_posts_nothing_while_it_computes() -> None:
    plan = SMALL.plans()[1]
    ops = record_program(SMALL, plan, "backward", on_host=True).ops
    later: list[int] = []  # launches so far
    for number, op in enumerate(ops):
        if op.stream == COMPUTE:
            later.append(number)
        elif later:
            assert later[-1] in op.after, (number, op)
    what = [op.what for op in ops if op.what in (DKDV, ADD)]
    assert what == [DKDV, ADD] * (len(what) // 2) and len(what) > 4
    # Received accumulators are only needed to add.
    gpu = [op for op in record_program(SMALL, plan, "backward").ops if op.what == DKDV]
    host = [op for op in ops if op.what == DKDV]
    assert sum(len(op.after) for op in host) < sum(len(op.after) for op in gpu)


def test_large_rings_are_extrapolated_from_two_smaller_ones() -> None:
    plain = PredictedCall(64, 34)

    def sizes(**changes: Any) -> tuple[int, int, int, int, float] | None:
        found = ring_time._smaller_calls(replace(plain, **changes))
        return found and (found[0].world, found[0].nodes, found[1].world, found[1].nodes, found[2])

    assert sizes(world=32) is None and sizes() == (16, 1, 24, 1, (34 - 16) / 8)
    assert sizes(slots=10) == (20, 1, 28, 1, (34 - 20) / 8)
    assert sizes(world=40, nodes=10) == (16, 4, 24, 6, (10 - 4) / 2)
    contiguous = {"world": 80, "nodes": 20, "two_level": False, "layout": "contiguous"}
    assert sizes(**contiguous) == (24, 6, 32, 8, (20 - 6) / 2)
    assert sizes(**contiguous | {"mask": Mask()}) == sizes(**contiguous | {"two_level": True})
    assert sizes(world=72, nodes=2) == (24, 2, 32, 2, (36 - 12) / 4)  # first smaller nodes
    assert sizes(world=48, nodes=4) is None  # as small as the larger of the two
    small, large = (ring_time.Pass("forward", *np.array([1.0, 0.5, 0.25]) * n) for n in (1, 3))
    assert small.extrapolate(large, 2.5) == ring_time.Pass("forward", 6.0, 3.0, 1.5)
    assert large.extrapolate(small, 1.0).worst == 0.75  # never less than in the small ring


def test_a_backward_exchanges_as_much_as_its_forward() -> None:
    # The backward sends dout, dq, dk and dv, which have the sizes of out, q, k and v.
    call, inputs = PredictedCall(64, 4, kv_heads=4), PredictionInputs(replace(STEADY, memory=1e30), late(10.0))
    assert [step.exposed for step in ulysses_passes(call, 4, inputs)] == pytest.approx([20, 20])


def test_key_heads_are_repeated_if_ranks_outnumber_them() -> None:
    call = PredictedCall(8192, 8, heads=8, kv_heads=2, nodes=2)
    names = {way.name: way for way in predict_alternatives(call, INPUTS)}
    assert {name for name in names if name.startswith("Ulysses")} == {
        "Ulysses 2 x ring 4", "Ulysses 4 x ring 2", "Ulysses 8 x ring 1"
    }  # fmt: skip
    notes = [names[name].note for name in ("Ulysses 4 x ring 2", "Ulysses 8 x ring 1")]
    copies = [f"{n} ranks exchange heads, with {n // 2} copies of each key head" for n in (4, 8)]
    assert notes == [copies[0], f"{copies[1]}, over nodes"]
    (more,) = [way.memory for way in predict_alternatives(replace(call, slots=5), INPUTS) if "x ring 4" in way.name]
    assert more - names["Ulysses 2 x ring 4"].memory == 2 * (2 * 2 * 8192 * 128 * 2)  # two slots of a group's K/V
    full = replace(call, kv_heads=8)
    assert exchange_seconds(call, 8, INPUTS) == exchange_seconds(full, 8, INPUTS) > exchange_seconds(call, 2, INPUTS)
    memory = [way.memory for way in predict_alternatives(full, INPUTS) if way.name == "Ulysses 8 x ring 1"]
    inputs_and_results = 4 * 8192 * 6 * 128 * 2  # six heads in 16 bits
    assert memory == [names["Ulysses 8 x ring 1"].memory + inputs_and_results]


@pytest.mark.parametrize("perturbation", [Perturbation({3: 2.0}), Perturbation({3: 2.0}, 0.2)], ids=["slow", "both"])
def test_every_method_has_the_same_perturbation(perturbation: Perturbation) -> None:
    # Collectives take as long as the slowest rank, exchanges of heads as long as the slowest rank of their group.
    call = PredictedCall(8192, 8, kv_heads=8)
    with_it, without = (
        {way.name: way for way in predict_alternatives(call, replace(INPUTS, perturbation=each))}
        for each in (perturbation, Perturbation())
    )
    for name, way in with_it.items():
        exposed = sum(each.exposed for each in without[name].passes)
        assert way.seconds > 1.7 * (without[name].seconds - exposed)
    assert (
        Perturbation({56: 2.0, 57: 1.5}).group_ranks(8).slow == Perturbation({63: 2.0}).group_ranks(8).slow == {7: 2.0}
    )


def test_ways_that_do_not_fit_come_last() -> None:
    call, inputs = PredictedCall(8192, 8, nodes=2, kv_heads=4), replace(INPUTS, phases=FORWARD)
    by_name = {way.name: way for way in predict_alternatives(call, inputs)}
    largest = max(by_name.values(), key=lambda way: way.memory)
    assert all(way.passes for way in predict_alternatives(call, inputs, capacity=largest.memory))
    *fitting, unfit = predict_alternatives(call, inputs, capacity=largest.memory - 1)
    needed = f"does not fit: needs {human_count(largest.memory, 'B')}, the GPU has "
    assert unfit.name == largest.name and unfit.note.startswith(needed)
    assert not unfit.passes and fitting == [way for way in by_name.values() if way is not largest]


@pytest.mark.parametrize("sees_first", [True, False])
def test_a_tile_with_the_last_visible_row_is_an_edge(sees_first: bool) -> None:
    rows = torch.arange(3 * TILE_ROWS)
    visible = (rows < TILE_ROWS + 5) == sees_first
    lo = torch.where(visible | (not sees_first), 0, 9).int()
    hi = torch.where(visible | sees_first, 9, 0).int()
    area = bounds_area(Bounds(lo, hi), len(rows), 9)
    assert (area.pairs, area.edges) == (9 * int(visible.sum()), TILE_ROWS)


CALL = PredictedCall(
    tokens=16, world=3, layout="contiguous", batch=2, heads=4, kv_heads=2, head_dim=8, dtype="bfloat16"
)
KV, DKV = TransferKind.KV.name, TransferKind.DKV.name


class Counted:
    """Speed of a GPU whose memory moves 1 byte per second; an attention takes its pairs, or 1,000 more backward."""

    launch = 1e6

    def memory_seconds(self, nbytes: float) -> float:
        return nbytes

    def product_seconds(self, area: Any, call: object, *, backward: bool = False) -> float:
        return float(area.pairs) + 1000 * backward


def baseline_program(call: PredictedCall, rank: int, phase: str) -> tuple[list[Op], list[Any]]:
    """Return the operations and costs of one rank."""
    writer, speed = baseline_ring._Writer(call, rank, phase), Counted()
    {"forward": baseline_ring._forward, "backward": baseline_ring._backward}[phase](writer, speed)  # type: ignore[arg-type]
    return writer.ops, writer.costs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_areas_of_the_baseline_ring(layout: str, causal: bool) -> None:
    call = replace(CALL, layout=layout, mask=Mask(causal))
    shards, row = getattr(Layout, layout)(48, 3), 2 * 4 * 8
    for rank, step in product(range(3), repeat=2):
        queries, keys = (shards.positions(shard)[:, None] for shard in (rank, (rank - step) % 3))
        visible = queries >= keys.T if causal else torch.ones(16, 16, dtype=torch.bool)
        if layout == "striped" and step > rank:
            visible |= torch.eye(16, dtype=torch.bool)  # the predictor counts the diagonal of every step
        area = baseline_ring._area(call, rank, step)
        ops, costs = baseline_program(call, rank, "forward")
        merges = [cost for op, cost in zip(ops, costs, strict=True) if (op.what, op.hop) == ("merge", step)]
        if area is None:
            assert not visible.any() and len(merges) == (step == 2)
            continue
        counted = (visible.sum(), visible.any(1).sum(), visible.any(0).sum(), visible.sum(1).max())
        assert area[:4] == tuple(int(number) for number in counted), (rank, step)
        assert area.edges == (16 if causal and (step == 0 or layout == "striped") else 0)
        moved = [(op.sends[0][0], op.receives[0][0]) for op in ops if op.what == KV]
        assert moved == [((rank + 1) % 3, (rank - 1) % 3)] * 2
        # a part of the rows is also copied back
        nbytes = 6 if step == 0 else 46 if causal and layout != "contiguous" and step > rank else 38
        assert merges[0] == pytest.approx(6 * 2e-6 + nbytes * area.rows * row)
        ops, costs = baseline_program(call, rank, "backward")
        merges = [cost for op, cost in zip(ops, costs, strict=True) if (op.what, op.hop) == ("merge", step)]
        assert merges[:2] == [10 * area.rows * row, 10 * area.keys * 64]
        sent = [{op.sends[0][1] for op in ops if op.what == what} for what in (KV, DKV)]
        assert sent == [{16 * 64 * 2}, {16 * 64 * 4}]  # bfloat16 and fp32


def test_waits_of_the_baseline_ring_by_hand() -> None:
    # K/V and dK/dV alternate on one stream. The first dK/dV follow the first K/V, the last follow the last attention.
    # A merge of gradients takes 0.1 s, one of out 0.38 s.
    call, fast = replace(CALL, mask=Mask()), replace(STEADY, memory=1e30, launch=0.0)
    passes = baseline_ring.baseline_passes(call, replace(fast, memory=102_400, passes=1.0), late(10.0))
    assert [each.seconds for each in passes] == pytest.approx([21 + 0.38 + 0.06, 50 + 0.1 + 0.12], abs=1e-3)
    hidden = [each.seconds for each in baseline_ring.baseline_passes(call, fast, late(0.9))]
    assert hidden == pytest.approx([3, 3.8 + 0.9], abs=1e-3)
    # Without work the host's calls remain: two exchanges, three attentions, and six kernels of each merge.
    idle_gpu = replace(fast, launch=-1.0)  # takes back the second of the product
    (idle,) = baseline_ring.baseline_passes(call, idle_gpu, late(0.0), phases=FORWARD)
    assert idle.seconds == pytest.approx(2 * 50e-6 + 3 * 40e-6 + 4 * 6 * 6e-6)


def test_the_baseline_ring_is_flat_with_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    simulate = baseline_ring._simulated
    monkeypatch.setattr(baseline_ring, "_simulated", lambda call, *rest: calls.append(call) or simulate(call, *rest))
    message_cost = ring_time.message_cost
    nodes: Any = set()
    monkeypatch.setattr(
        baseline_ring, "message_cost", lambda call, links: nodes.add(call.nodes) or message_cost(call, links)
    )
    predict = partial(baseline_ring.baseline_passes, replace(CALL, nodes=3, slots=5), H100, LINKS)
    slow, plain = (predict(given) for given in (Perturbation({1: 50.0}), Perturbation()))
    assert {(call.two_level, call.slots) for call in calls} == {(False, 2)} and nodes == {3}
    drawn = predict(Perturbation({}, 0.2))
    assert [len(each.seconds) for each in drawn] == [DRAWS] * 2
    assert [each.phase for each in plain] == [*PASSES] and slow[0].seconds > plain[0].seconds
    (forward,) = predict(phases=FORWARD)
    assert forward == plain[0]
