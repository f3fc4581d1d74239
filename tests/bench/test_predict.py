"""The predictor: the loops that run, on a counted clock, against sums that can be done by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringattn import LocalWorld, Ring
from ringattn.bench.memory import ALLOWED_SPREAD
from ringattn.bench.predict import ring
from ringattn.bench.predict.alternatives import exchange_seconds, exchanged, ways
from ringattn.bench.predict.baseline import baseline
from ringattn.bench.predict.call import Call, area_of
from ringattn.bench.predict.clock import run, slowed
from ringattn.bench.predict.crossover import check_memory, memory, most_tokens, percent_of_ideal, straggling, sweep
from ringattn.bench.predict.crossover import tokens_needed as needed_of
from ringattn.bench.predict.inputs import Inputs
from ringattn.bench.predict.links import PRESETS, Link, Links
from ringattn.bench.predict.perturbation import DRAWS, Perturbation
from ringattn.bench.predict.program import COMPUTE, INSIDE, PASSES, TRANSFERS, Op, Program, record
from ringattn.bench.predict.ring import form_of, ideal_seconds, predicted
from ringattn.bench.predict.speed import ADD, DKDV, DQ, FOLD, H100, Speed, whole
from ringattn.bench.predict.timelines import timeline
from ringattn.ring import Layout, Mask
from ringattn.ring.buffers import Key, Kind
from ringattn.ring.schedule.layout import Documents
from ringattn.ring.schedule.mask import bigbird, bounds, visible_pairs
from ringattn.ring.schedule.schedule import schedule

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "xeon-2-cores_2026-11-21"
LINKS = Links(PRESETS["nvlink4"], PRESETS["ib400"])
INPUTS = Inputs(H100, LINKS)
ENDLESS = Links(Link(1e30, 0.0), Link(1e30, 0.0))
SMALL = Call(tokens=16, world=4, heads=4, kv_heads=2, head_dim=8)
CAUSAL = Mask(causal=True)


class Steady(Speed):
    """A GPU on which every launch takes a second, half of one for each kernel of a backward; its host takes none."""

    def seconds(self, what: str, area: object, form: object, *, hop: int) -> float:
        return {FOLD: 1.0, DQ: 0.5, DKDV: 0.5}.get(what, 0.0)


STEADY = Steady("steady", 1.0, 1.0, beside=0.0, host=0.0)


def seconds(call: Call, links: Links, speed: Speed = STEADY) -> tuple[float, ...]:
    return tuple(one.seconds for one in predicted(call, speed, links))


def late(inside: float, between: float | None = None) -> Links:
    """Links of which only the latency counts."""
    return Links(Link(1e30, inside), Link(1e30, inside if between is None else between))


@pytest.mark.parametrize(("layout", "nodes", "mask"), [
    ("contiguous", 1, Mask()), ("striped", 2, CAUSAL), ("contiguous", 2, Mask(causal=True, window=(12, 0))),
    ("zigzag", 1, CAUSAL), ("zigzag", 2, Mask(causal=True, documents=Documents([0, 8, 40, 64]))),
])  # fmt: skip
def test_programs_move_what_the_schedule_says(layout: str, mask: Mask, nodes: int) -> None:
    call = replace(SMALL, layout=layout, mask=mask, nodes=nodes)
    made = schedule(call.held, mask, topology=call.topology)
    per_token = 2 * call.kv_heads * call.head_dim
    for phase, sums in zip(PASSES, (0, 4 * per_token), strict=True):
        for plan in call.plans():
            ops = record(plan, call.form, phase).ops
            sent = sum(nbytes for op in ops for _, nbytes in op.sends)
            assert sent == made.bytes(2 * per_token, sums)[plan.rank]
            launched = [op.hop for op in ops if op.what in (FOLD, DKDV)]
            assert sorted(set(launched)) == [hop.index for hop in plan.hops if hop.computes]
    predicted(call, H100, LINKS)  # every message has its other end, and nobody waits forever


@pytest.mark.parametrize(("layout", "world", "nodes"), [
    ("zigzag", 4, 2), ("striped", 3, 1), ("contiguous", 4, 1),
])  # fmt: skip
def test_plain_plans_and_areas_are_those_of_the_ring(layout: str, world: int, nodes: int) -> None:
    """Their bounds are not looked up: what each launch sees is known from whose shard it is."""
    call = Call(512, world, layout, nodes=nodes)
    positions = [call.held.positions(rank) for rank in range(world)]
    for mine in call.plans():
        theirs = Call.plans(replace(call, mask=Mask(causal=True, prefix=1)))[
            mine.rank
        ]  # sees as much, and is not plain
        assert (mine.hops, mine.dkv_returns, mine.kv_slots, mine.dkv_slots, mine.last, mine.lengths) == (
            theirs.hops, theirs.dkv_returns, theirs.kv_slots, theirs.dkv_slots, theirs.last, theirs.lengths,
        )  # fmt: skip
        for hop in mine.hops:
            ahead = (hop.shard > mine.rank) - (hop.shard < mine.rank)
            if hop.computes:
                found = call.plain_area(ahead, 512)
                assert found == area_of(theirs.hop_masks[hop.index][0].bounds, 512, 512)
                assert found.pairs == visible_pairs(CAUSAL, positions[mine.rank], positions[hop.shard])


def test_hidden_links_cost_nothing() -> None:
    assert seconds(SMALL, ENDLESS) == pytest.approx((4, 4))
    assert seconds(SMALL, late(0.4))[0] == pytest.approx(4)  # a hop's transfer takes less than a hop


def test_a_host_that_computes_waits_for_every_transfer() -> None:
    """Without prefetch each of three hops waits for its own, where the host that posts them is what computes.

    A GPU's host is ahead: what it posts late waits for nothing but its slot, and only the first is waited for.
    """
    for prefetch, on_host, waited in ((0, True, 3), (1, True, 0), (0, False, 1)):
        call = replace(SMALL, prefetch=prefetch)
        form = replace(call.form, on_host=on_host)
        programs = [record(plan, form, "forward") for plan in call.plans()]
        costs = [[float(op.what == FOLD) for op in program.ops] for program in programs]
        tracks = run(programs, costs, lambda a, b, nbytes: 0.25)
        assert max(track.seconds for track in tracks) == pytest.approx(4 + 0.25 * waited)
    ops = record(SMALL.plans()[1], replace(SMALL.form, on_host=True), "backward").ops
    came = {number for number, op in enumerate(ops) if op.what == TRANSFERS[Kind.DKV] and op.receives}
    assert {number for op in ops if op.what == ADD for number in op.after} == came  # what arrived is waited for there


def test_slow_links_are_what_counts() -> None:
    """One transfer after the other, then the last hop's compute; chunks expose less."""
    (forward, _) = predicted(SMALL, STEADY, late(10.0))
    assert forward.seconds == pytest.approx(3 * 10 + 1) and forward.exposed == pytest.approx(forward.seconds - 4)
    assert forward.worst == pytest.approx(9)  # the first of them comes beside the own shard's second
    links, call = Links(Link(1e9, 0.0), Link(1e9, 0.0)), replace(SMALL, tokens=4096, kv_heads=4)
    assert seconds(replace(call, chunks=4), links, H100)[0] < seconds(call, links, H100)[0]


def test_backward_hides_the_sums_behind_dq() -> None:
    """K/V and sums take turns on one stream: 0.2 s each fit beside the second that a hop computes; 0.7 s do not."""
    assert seconds(SMALL, late(0.2))[1] == pytest.approx(4)
    assert seconds(SMALL, late(0.7))[1] > 4.2


def test_sums_wait_behind_prefetched_keys() -> None:
    """On one stream in the order of posting: every slot more lets one more group of K/V pass before the first sums."""
    call = Call(2048, 8, kv_heads=32, slots=8)
    taken = [seconds(replace(call, prefetch=prefetch), LINKS, replace(H100, host=0.0))[1] for prefetch in (1, 2, 3, 6)]
    assert taken == sorted(taken) and taken[-1] > 1.1 * taken[0]


def test_a_rail_is_hidden_behind_a_whole_turn() -> None:
    """Eight ranks on two nodes, a link between them that takes three hops."""
    call = replace(SMALL, world=8, nodes=2)
    assert seconds(call, late(0.1, 3.0))[0] == pytest.approx(8)
    assert seconds(replace(call, two_level=False), late(0.1, 3.0))[0] > 15


def test_nics_are_shared_by_the_gpus_that_send_at_once() -> None:
    links = Links(Link(1e30, 0.0), Link(4e9, 1e-3), nics=2)
    assert [links.far(senders).rate for senders in (1, 2, 4, 8)] == [4e9, 4e9, 2e9, 1e9]
    assert links.beside(4).far(1).rate == 2e9 and links.far(8).latency == 1e-3
    call = Call(1024, 16, nodes=2, kv_heads=8)
    few, all_of_them = (seconds(call, replace(LINKS, nics=nics), H100)[0] for nics in (1, None))
    assert few > 1.2 * all_of_them
    assert seconds(replace(call, two_level=False), replace(LINKS, nics=1), H100) == seconds(
        replace(call, two_level=False), LINKS, H100
    )


@pytest.mark.parametrize("behind", [0, 1])
def test_a_message_waits_for_both_ends(behind: int) -> None:
    """One rank sends after a launch of two seconds, or the other receives after it: one second more, either way."""
    key = Key("forward", 0, Kind.KV, 1, 0)
    groups: list[Any] = [{"sends": ((1, 8),)}, {"receives": ((0, 8),)}]
    programs, costs = [], []
    for rank, messages in enumerate(groups):
        launch = Op(COMPUTE, FOLD, 0, 0, ())
        programs.append(Program(rank, "forward", (launch, Op(INSIDE, "K/V", 0, 0, (0,), key=key, **messages))))
        costs.append([2.0 if rank == behind else 0.0, 0.0])
    tracks = run(programs, costs, lambda a, b, nbytes: 1.0)
    assert [track.seconds for track in tracks] == [3.0, 3.0]
    issued = run(programs, costs, lambda a, b, nbytes: 1.0, host=lambda op: 4.0)
    assert [track.seconds for track in issued] == [9.0, 9.0]  # the host comes to the second operation after 8 s


def test_programs_that_do_not_fit_together_are_refused() -> None:
    plans = SMALL.plans()
    programs = [record(plan, SMALL.form, "forward") for plan in plans]
    programs[1] = record(
        replace(plans[1], hops=plans[1].hops[:3], hop_masks=plans[1].hop_masks[:3]), SMALL.form, "forward"
    )
    with pytest.raises(ValueError, match="wait for each other forever"):
        run(programs, [[1.0] * 99] * 4, lambda a, b, nbytes: 0.0)


def test_launches_are_slower_for_as_long_as_transfers_last() -> None:
    """Six seconds of transfers posted at once, beside the three launches of 1.8 s that follow: 0.1 less speed."""
    ops = (Op(INSIDE, "K/V", 0, 0, ()), *(Op(COMPUTE, FOLD, hop, 0, ()) for hop in range(4)))
    program = Program(0, "forward", ops)
    found = slowed(program, [0.0, 1.8, 1.8, 1.8, 1.8], [6.0, 0.0, 0.0, 0.0, 0.0], 0.1)
    assert found == pytest.approx([0.0, 2.0, 2.0, 2.0, 1.8])
    many = slowed(program, [0.0, *[np.array([1.8, 6.0])] * 4], [np.array([6.0, 1.0])] + [0.0] * 4, 0.1)
    assert [one.tolist() for one in many[1:]] == [[2.0, 6.1], [2.0, 6.0], [2.0, 6.0], [1.8, 6.0]]
    call = Call(8192, 8, kv_heads=32)
    few, more = (seconds(replace(call, slots=slots), LINKS, replace(H100, host=0.0))[0] for slots in (2, 8))
    assert few == pytest.approx(more, rel=1e-3)  # whatever is posted early, as many bytes pass beside as many launches


STRAIGHT = [
    Call(2048, 34, kv_heads=8), Call(1024, 36, "striped", Mask(), kv_heads=8, nodes=9),
    Call(1024, 36, "contiguous", slots=8), Call(1024, 36, kv_heads=8, nodes=9, two_level=False, chunks=2),
    Call(2048, 36, nodes=2, kv_heads=8, wire_dtype="bfloat16", dtype="float32"),
]  # fmt: skip


@pytest.mark.parametrize("call", STRAIGHT, ids=lambda call: f"{call.layout}-{call.world}-{call.nodes}")
def test_large_rings_are_on_a_straight_line(call: Call) -> None:
    """Through two small ones, against a whole simulation: zigzag, striped, contiguous, flat and of two levels, GQA."""
    for line, every in zip(predicted(call, H100, LINKS), predicted(call, H100, LINKS, simulated=True), strict=True):
        assert not line.tracks and len(every.tracks) == call.world
        assert (line.seconds, line.exposed) == pytest.approx((every.seconds, every.exposed), rel=1e-9, abs=1e-12)
        assert line.worst == pytest.approx(every.worst, abs=1e-9)


def test_large_baseline_rings_are_on_a_straight_line(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(2048, 36, nodes=9, kv_heads=8)
    line = baseline(call, H100, LINKS)
    monkeypatch.setattr(ring, "MOST_SIMULATED", 36)
    every = baseline(call, H100, LINKS)
    assert [one.seconds for one in line] == pytest.approx([one.seconds for one in every], rel=1e-9)
    assert not line[0].tracks and every[0].tracks


def test_windows_meet_as_few_ranks_in_larger_rings() -> None:
    call = Call(64, 160, "contiguous", Mask(causal=True, window=(200, 0)), kv_heads=8, nodes=20)
    line, all_of_them = (predicted(call, H100, LINKS, phases=("forward",), simulated=one)[0] for one in (False, True))
    assert line.seconds == pytest.approx(all_of_them.seconds, rel=1e-9)
    with pytest.raises(ValueError, match="reaches fewer than 64 ranks"):
        predicted(replace(call, mask=Mask(causal=True, window=(9000, 0))), H100, LINKS)
    # past its reach every tile of rows of one device has the same area: counted of a part
    seqlen = call.seqlen
    seen = area_of(bounds(call.mask, torch.arange(seqlen), torch.arange(seqlen)), seqlen, seqlen)
    alone = H100.seconds(FOLD, seen, call.form, hop=0)
    assert ideal_seconds(call, H100, "forward") == pytest.approx(alone / 160)


def test_lengths_are_calls() -> None:
    lengths = np.array([1024.0, 4096.0])
    both = predicted(Call(8192, 40, kv_heads=8), H100, LINKS, tokens=lengths)
    each = [predicted(Call(tokens, 40, kv_heads=8), H100, LINKS) for tokens in (1024, 4096)]
    for index, one in enumerate(both):
        assert one.seconds.tolist() == pytest.approx([passes[index].seconds for passes in each])
        assert one.exposed.tolist() == pytest.approx([passes[index].exposed for passes in each])


def test_tokens_for_ninety_percent() -> None:
    """A length less is not enough, slower links ask for more; of causal contiguous shards no length is enough."""
    call = Call(8192, 40, kv_heads=8)
    needed = needed_of(call, INPUTS)
    assert needed is not None and percent_of_ideal(call, INPUTS, np.array([float(needed)])) >= 90
    assert percent_of_ideal(call, INPUTS, np.array([needed * 0.9])) < 90
    slow = Inputs(H100, Links(Link(5e9, 0.0), Link(5e9, 0.0)), phases=("forward",))
    assert (needed_of(call, slow) or 0) > needed
    assert needed_of(replace(call, layout="contiguous"), INPUTS) is None  # half of all hops wait for the last rank


def test_areas_are_the_pairs_of_the_bounds() -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        held = getattr(Layout, layout)(512, 2)
        for shard in (0, 1):
            made = bounds(CAUSAL, held.positions(1), held.positions(shard))
            assert area_of(made, 256, 256).pairs == visible_pairs(CAUSAL, held.positions(1), held.positions(shard))
    call = Call(512, 2, "contiguous", Mask(blocks=bigbird(1024, 128, window=3, global_=1, random=1)))
    for plan in call.plans():
        for hop in plan.hops:
            seen = visible_pairs(call.mask, call.held.positions(plan.rank), call.held.positions(hop.shard))
            assert sum(area_of(one.bounds, 512, 512).pairs for one in plan.hop_masks[hop.index]) == seen


def test_ideal_is_one_device_with_all_the_work() -> None:
    call = Call(8192, 4)
    assert ideal_seconds(call, H100, "forward") == pytest.approx(ideal_seconds(Call(32768, 1), H100, "forward") / 4)
    many = Call(1 << 12, 2, "contiguous", Mask(blocks=bigbird(1 << 13, 128, window=3, global_=1, random=2)))
    assert many.mask.blocks is not None
    area = area_of(replace(many, world=1, tokens=1 << 13).plans()[0].hop_masks[0][0].bounds, 1 << 13, 1 << 13)
    assert area.pairs == pytest.approx(float(many.mask.blocks.visible.float().mean()) * 2**26)
    by_mask = [ideal_seconds(replace(many, mask=mask), H100, "forward") for mask in (
        Mask(window=(64, 64)), Mask(window=(64, 64), global_tokens=((0, 256),)), Mask()
    )]  # fmt: skip
    assert by_mask == sorted(by_mask) and by_mask[1] > 1.2 * by_mask[0]


def test_fitted_speed_takes_what_was_told() -> None:
    form, area = form_of(tokens=8192, heads=32), whole(8192, causal=True)
    speed = H100.fitted(forward=(300e12, area, form))
    assert 4 * 128 * 32 * area.pairs / speed.seconds(FOLD, area, form, hop=0) == pytest.approx(300e12)
    assert speed.backward / speed.forward == pytest.approx(H100.backward / H100.forward)
    with pytest.raises(ValueError, match="is no speed of this launch"):
        H100.fitted(forward=(1e20, area, form))


@pytest.mark.parametrize("name", ["memory.json", "memory-two-level.json"])
def test_memory_is_what_was_measured(name: str) -> None:
    """Apart from what worlds differ by: what is rounded to pages and what the network library keeps per peer."""
    told = json.loads((MEASURED / name).read_text())
    same = ("layout", "batch", "heads", "kv_heads", "head_dim", "dtype")
    settings = {key: told["ring"][key] for key in ("nodes", "slots", "chunks", "wire_dtype", "grad_wire_dtype")}
    for one in told["worlds"]:
        call = Call(
            told["problem"]["tokens_per_rank"], one["world"], mask=Mask(causal=told["problem"]["causal"]),
            **{key: told["problem"][key] for key in same}, **settings,
        )  # fmt: skip
        peak = max(rank["highest"] for rank in one["ranks"])
        assert sum(memory(call).values()) == pytest.approx(peak, rel=ALLOWED_SPREAD)


def test_memory_does_not_grow_with_the_ring() -> None:
    assert memory(Call(8192, 8)) == memory(Call(8192, 4096))
    assert "slots of sums" not in memory(Call(2048, 1)) and "K/V slots" not in memory(Call(2048, 1))
    most = most_tokens(Call(8192, 8), 80e9)
    check_memory(Call(most, 8), 80e9)
    with pytest.raises(ValueError, match=rf"at most {most:,} fit"):
        check_memory(Call(most + 2, 8), 80e9)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_slots_are_those_that_a_ring_takes(world: int) -> None:
    """Refused in the same words, or taken by both."""

    def refusal(make: Callable[..., object], *arguments: Any, **settings: Any) -> str:
        try:
            make(*arguments, **settings)
        except ValueError as error:
            return str(error)
        return ""

    for slots, prefetch in ((1, None), (1, 1), (2, 2), (3, None), (3, 3)):
        settings: dict[str, Any] = {"slots": slots, "prefetch": prefetch}
        with LocalWorld(world) as ranks:
            theirs = ranks.run(partial(refusal, Ring, **settings))
        assert {*theirs} == {refusal(Call, 64, world, **settings)}, (world, settings)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, window=(300, 0))])
def test_timelines_say_what_happened(mask: Mask) -> None:
    call = replace(SMALL, tokens=256, mask=mask, nodes=2)
    passes = predicted(call, H100, LINKS)
    found = timeline("a ring", passes, call)
    assert found.seconds == pytest.approx(sum(one.seconds for one in passes))
    for rank in range(4):
        for lane in ("compute", "slot 0", "slot 1", "slot 2"):
            mine = sorted((one for one in found.events if (one.rank, one.lane) == (rank, lane)), key=lambda e: e.begin)
            assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(mine)), (rank, lane)
    moved = {lane: sorted((e.name, e.nbytes) for e in found.events if e.lane == lane) for lane in ("send", "receive")}
    assert moved["send"] == moved["receive"]
    with pytest.raises(ValueError, match="a timeline needs every rank"):
        timeline("", predicted(Call(256, 64), H100, LINKS), Call(256, 64))


def test_jitter_is_many_draws() -> None:
    """Each a whole run with its own luck: who waits for all loses more than one rank's mean."""
    call, jitter = Call(4096, 8, kv_heads=8), Perturbation(jitter=0.1)
    (none,) = predicted(call, H100, LINKS, phases=("forward",))
    (some,) = predicted(call, H100, LINKS, jitter, phases=("forward",))
    assert some.seconds.shape == some.exposed.shape == (DRAWS,) and 0 < some.seconds.std() < 0.1 * none.seconds
    assert some.seconds.mean() > none.seconds * np.exp(0.1**2 / 2)
    again = predicted(call, H100, LINKS, jitter, phases=("forward",))[0]
    assert np.array_equal(some.seconds, again.seconds)
    draws = np.log(np.concatenate([jitter.factors(rank, phase, 500) for rank in (0, 1) for phase in PASSES]))
    assert draws.mean() == pytest.approx(0, abs=4e-3) and draws.std() == pytest.approx(0.1, rel=0.05)
    assert abs(np.corrcoef(draws.reshape(4, -1))[np.triu_indices(4, 1)]).max() < 0.05


def test_slow_ranks_are_slow_where_they_are() -> None:
    """Rank 3 of contiguous shards computes at 4 of 20 hops: half more of that is less than the last rank takes."""
    call = Call(4096, 20, "contiguous", kv_heads=8)
    none, early, last = (seconds_of(call, Perturbation(slow)) for slow in ({}, {3: 1.5}, {19: 1.5}))
    assert early < 1.01 * none and last > 1.4 * none
    with pytest.raises(ValueError, match="at most 128 GPUs"):
        predicted(replace(call, world=256), H100, LINKS, Perturbation({3: 1.5}))


def seconds_of(call: Call, perturbation: Perturbation) -> float:
    return sum(float(np.mean(one.seconds)) for one in predicted(call, H100, LINKS, perturbation))


@pytest.mark.parametrize("world", [4, 34])
def test_balanced_shards_make_up_for_a_slow_rank(world: int) -> None:
    """On the clock, whatever the ring: shards in proportion to speeds lose little more than the speed that is gone."""
    call = Call(256, world, kv_heads=8)
    inputs = replace(INPUTS, perturbation=Perturbation({1: 2.0}), phases=("forward",))
    even, slow, balanced = straggling(call, inputs)
    gone = world / (world - 0.5)
    assert even < balanced < slow and balanced < 1.25 * gone * even


def test_every_way_is_told_and_the_fastest_first() -> None:
    found = ways(Call(2048, 16, nodes=2, kv_heads=16), INPUTS)
    assert {way.name for way in found} == {
        "flat ring", "two-level ring", "baseline ring", "all-gather of K/V", "Ulysses 2 x ring 8", "Ulysses 4 x ring 4",
        "Ulysses 8 x ring 2", "Ulysses",
    }  # fmt: skip
    assert [way.seconds for way in found] == sorted(way.seconds for way in found)
    six = {way.name for way in ways(Call(2048, 12, heads=12, kv_heads=6), INPUTS) if "Ulysses" in way.name}
    assert six == {"Ulysses 2 x ring 6", "Ulysses 3 x ring 4", "Ulysses 6 x ring 2"}
    windowed = ways(Call(2048, 4, mask=Mask(causal=True, window=(64, 0)), nodes=2), INPUTS)
    assert {way.name for way in windowed} == {"flat ring", "two-level ring"}
    one_slot = {way.name: way.note for way in ways(Call(1024, 4, nodes=2, slots=1), INPUTS)}
    assert one_slot["flat ring"] == "2 slots, which it needs" and one_slot["two-level ring"] == ""


def test_groups_over_nodes_go_over_the_slow_link() -> None:
    """A second per launch, ten per message between nodes: three of each of four tensors, then the ring's one."""
    inputs = Inputs(replace(STEADY, memory=1e30), late(0.0, 10.0), phases=("forward",))
    call = Call(64, 8, nodes=4, kv_heads=4)
    assert exchange_seconds(call, 4, inputs) == pytest.approx(4 * 3 * 10)
    assert exchanged(call, 4, inputs)[0].seconds == pytest.approx(4 * 3 * 10 + 10 + 1)
    assert exchanged(call, 2, inputs)[0].seconds == pytest.approx(3 * 10 + 1, abs=1e-3)  # inside a node
    by_rate = [Inputs(inputs.speed, Links(Link(1e9, 0.0, "", rate), Link(1e9, 0.0))) for rate in (None, 0.5e9)]
    moved = 64 * 128 * 2 * (2 * 32 + 2 * 4) / 2  # of all heads of q, k, v and out half stays
    assert [exchange_seconds(call, 2, one) for one in by_rate] == pytest.approx([moved / 1e9, moved / 0.5e9])


@pytest.mark.parametrize("perturbation", [Perturbation({3: 2.0}), Perturbation({3: 2.0}, 0.2)], ids=["slow", "both"])
def test_every_way_has_the_same_perturbation(perturbation: Perturbation) -> None:
    """And whoever waits for all takes as long as the slowest; a group exchanges heads when its slowest is done."""
    call = Call(8192, 8, kv_heads=8)
    with_it, without = ({way.name: way for way in ways(call, replace(INPUTS, perturbation=given))}
                        for given in (perturbation, Perturbation()))  # fmt: skip
    assert with_it["flat ring"].seconds == seconds_of(call, perturbation)
    for name, way in with_it.items():
        exposed = sum(one.exposed for one in without[name].passes)
        assert way.seconds > 1.7 * (without[name].seconds - exposed)
    assert perturbation.slowest(16) >= 2
    assert Perturbation({56: 2.0, 57: 1.5}).grouped(8).slow == Perturbation({63: 2.0}).grouped(8).slow == {7: 2.0}


def test_ways_that_do_not_fit_come_last() -> None:
    """The sequence on every rank is what a GPU has no room for; of what fits nothing changes."""
    call = Call(8192, 32, nodes=4, kv_heads=4)
    every = {way.name: way for way in ways(call, INPUTS)}
    needed = every["all-gather of K/V"].memory
    *fitting, gathered = ways(call, INPUTS, capacity=needed - 1)
    assert gathered.name == "all-gather of K/V" and gathered.note.startswith("does not fit: needs 2.")
    assert not gathered.passes and fitting == [way for way in every.values() if way.name != gathered.name]


def test_the_map_is_percent_of_ideal() -> None:
    """Empty where a point fits no GPU."""
    call = Call(1024, 8, kv_heads=8)
    found = sweep(call, INPUTS, [1024, 8192], [2, 32, 64])
    assert found[32][8192] == pytest.approx(percent_of_ideal(replace(call, world=32, nodes=4), INPUTS, 8192.0))
    some = sweep(call, INPUTS, [1024, 8192], [2, 32], 0.1e9)
    assert [some[world][8192] for world in (2, 32)] == [None, None] and some[2][1024] == found[2][1024]
