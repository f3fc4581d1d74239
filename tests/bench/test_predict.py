"""The predictor: the loops that run, on a counted clock, against sums that can be done by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from csv import DictReader
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.common.timing import Clock
from ringattn.bench.memory import ALLOWED_SPREAD, Setting, of_rank
from ringattn.bench.predict.alike import plan_of, recorded, schedule_of
from ringattn.bench.predict.answers import tokens_needed
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.clock import needed, run, run_alike
from ringattn.bench.predict.host import NEAR, Body, HostSpeed, mean_of, tiles_of, work_of
from ringattn.bench.predict.host_pieces import PATTERNS, Stage, calibrated, pattern
from ringattn.bench.predict.launch import area_of, whole
from ringattn.bench.predict.links import PRESETS, Link, Links, link_of, measured
from ringattn.bench.predict.memory import check, memory, most_tokens, problem_of
from ringattn.bench.predict.others import ways
from ringattn.bench.predict.program import COMPUTE, DKDV, FOLD, INSIDE, PASSES, Op, Program, record
from ringattn.bench.predict.ring import cases, ideal_seconds, predicted
from ringattn.bench.predict.speed import H100, form_of
from ringattn.bench.predict.sweep import PERCENT, draw
from ringattn.bench.predict.timelines import timeline
from ringattn.bench.predict.trouble import Trouble
from ringattn.bench.timeline.events import from_chrome
from ringattn.kernels import FULL, Bounds
from ringattn.ring import Layout, Mask
from ringattn.ring.buffers import Key, Kind
from ringattn.ring.schedule.layout import Documents
from ringattn.ring.schedule.mask import bigbird, bounds, visible_pairs
from ringattn.ring.schedule.schedule import schedule

from ..support.predict_cases import Steady

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "xeon-2-cores_2026-11-21"
LINKS = Links(PRESETS["nvlink4"], PRESETS["ib400"])
ENDLESS = Links(Link(1e30, 0.0), Link(1e30, 0.0))
SMALL = Call(tokens=16, world=4, heads=4, kv_heads=2, head_dim=8)
runner = CliRunner()


def seconds(call: Call, links: Links, device: object = None) -> tuple[float, ...]:
    return tuple(one.seconds for one in predicted(call, device or Steady(), links))  # type: ignore[arg-type]


MASKS = (
    Mask(),
    Mask(causal=True),
    Mask(causal=True, window=(12, 0)),
    Mask(causal=True, documents=Documents([0, 8, 40, 64])),
)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "window", "documents"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
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
            computing = [hop.index for hop in plan.hops if hop.computes]
            assert sorted(set(launched)) == computing
        predicted(call, H100, LINKS)  # every message has its other end, and nobody waits forever


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (8, 1), (4, 2), (6, 2), (8, 4), (12, 3)])
@pytest.mark.parametrize("direction", [1, -1])
def test_closed_schedules_are_those_of_the_ring(world: int, nodes: int, direction: int) -> None:
    for layout in ("zigzag", "striped"):
        call = Call(8, world, layout, nodes=nodes, direction=direction)
        made = schedule(call.held, call.mask, direction=direction, topology=call.topology)
        assert all(made.hops(rank) == schedule_of(call).hops(rank) for rank in range(world))
        ours, theirs = plan_of(call, 1), call.plans()[1]
        assert (ours.dkv_returns, ours.kv_slots, ours.dkv_slots) == (
            theirs.dkv_returns, theirs.kv_slots, theirs.dkv_slots,
        )  # fmt: skip


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (5, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_one_rank_stands_for_all(world: int, nodes: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(2048, world, layout, nodes=nodes)
    each = predicted(call, H100, LINKS)
    monkeypatch.setattr("ringattn.bench.predict.ring.SURELY_TOLD_APART", 0)
    for one, alike, lanes in zip(
        each, predicted(call, H100, LINKS), predicted(call, H100, LINKS, Trouble({1: 1.0 + 1e-12})), strict=True
    ):
        # zigzag has two shapes of a hop, of which one stands for both
        assert alike.seconds == pytest.approx(one.seconds, rel=0.06 if layout == "zigzag" else 1e-3)
        assert alike.seconds >= one.seconds * (1 - 1e-9)
        assert lanes.seconds == pytest.approx(alike.seconds)


def test_hidden_links_cost_nothing() -> None:
    assert seconds(SMALL, ENDLESS) == pytest.approx((4, 4))
    half = Links(Link(1e30, 0.4), Link(1e30, 0.4))
    assert seconds(SMALL, half)[0] == pytest.approx(4)  # a hop's transfer takes less than a hop


def test_a_blocking_ring_adds_its_transfers() -> None:
    """Without prefetch each of three hops waits for its own, where the host that posts them is what computes.

    A GPU's host is ahead: what it posts late waits for nothing but its slot, and only the first is waited for.
    """
    late, host = Links(Link(1e30, 0.25), Link(1e30, 0.25)), Steady()
    host.on_host = True
    assert seconds(replace(SMALL, prefetch=0), late, host)[0] == pytest.approx(4 + 3 * 0.25)
    assert seconds(replace(SMALL, prefetch=1), late, host)[0] == pytest.approx(4)
    assert seconds(replace(SMALL, prefetch=0), late)[0] == pytest.approx(4 + 0.25)


def test_slow_links_are_what_counts() -> None:
    """One transfer after the other, then the last hop's compute."""
    late = Links(Link(1e30, 10.0), Link(1e30, 10.0))
    assert seconds(SMALL, late)[0] == pytest.approx(3 * 10 + 1)


def test_backward_hides_the_sums_behind_dq() -> None:
    """K/V and sums take turns on one stream: 0.2 s each fit beside the second that a hop computes; the last do not.

    After the last hop's dK/dV its sums travel home beside its dQ, half a second.
    """
    short, long = (Links(Link(1e30, late), Link(1e30, late)) for late in (0.2, 0.7))
    assert seconds(SMALL, short)[1] == pytest.approx(4)
    assert seconds(SMALL, long)[1] > 4.2


def test_chunks_expose_less_of_slow_links() -> None:
    late = Links(Link(1e9, 0.0), Link(1e9, 0.0))
    call = replace(SMALL, tokens=4096, kv_heads=4)
    assert seconds(replace(call, chunks=4), late, H100)[0] < seconds(call, late, H100)[0]


def test_a_rail_is_hidden_behind_a_whole_turn() -> None:
    """Eight ranks on two nodes, a link between them that takes three hops."""
    links = Links(Link(1e30, 0.1), Link(1e30, 3.0))
    call = replace(SMALL, world=8, nodes=2)
    assert seconds(call, links)[0] == pytest.approx(8)
    assert seconds(replace(call, two_level=False), links)[0] > 15


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_waits_for_both_ends(late: int) -> None:
    """One rank sends after a launch of two seconds, or the other receives after it: one second more, either way."""
    key = Key("forward", 0, Kind.KV, 1, 0)
    groups: list[Any] = [{"sends": ((1, 8),)}, {"receives": ((0, 8),)}]
    programs, costs = [], []
    for rank, messages in enumerate(groups):
        launch = Op(COMPUTE, FOLD, 0, 0, ())
        programs.append(Program(rank, "forward", (launch, Op(INSIDE, "K/V", 0, 0, (0,), key=key, **messages))))
        costs.append([2.0 if rank == late else 0.0, 0.0])
    tracks = run(programs, costs, lambda a, b, nbytes: 1.0)
    assert [track.seconds for track in tracks] == [3.0, 3.0]


def test_programs_that_do_not_fit_together_are_refused() -> None:
    plans = SMALL.plans()
    programs = [record(plan, SMALL.form, "forward") for plan in plans]
    programs[1] = record(
        replace(plans[1], hops=plans[1].hops[:3], hop_masks=plans[1].hop_masks[:3]), SMALL.form, "forward"
    )
    with pytest.raises(ValueError, match="wait for each other forever"):
        run(programs, [[1.0] * 99] * 4, lambda a, b, nbytes: 0.0)


def test_what_is_left_to_wait_for_says_the_same() -> None:
    for call in (Call(256, 32, nodes=4, chunks=2), Call(256, 32)):
        for phase in PASSES:
            program = recorded(call, phase)
            draw = np.random.default_rng(0)
            costs, groups = draw.random((2, len(program.ops), 8))
            less = needed(program)
            assert sum(len(op.after) for op in less.ops) < sum(len(op.after) for op in program.ops) / 2
            whole, short = (run_alike(one, list(costs), list(groups)) for one in (program, less))
            assert whole.seconds.tolist() == short.seconds.tolist() and whole.by_hop == short.by_hop


def test_areas_are_the_pairs_of_the_bounds() -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        held = getattr(Layout, layout)(512, 2)
        for shard in (0, 1):
            made = bounds(Mask(causal=True), held.positions(1), held.positions(shard))
            queries, keys = held.positions(1), held.positions(shard)
            assert area_of(made, 256, 256).pairs == int((queries[:, None] >= keys[None]).sum())
    assert area_of(bounds(Mask(causal=True), torch.arange(256), torch.arange(256)), 256, 256).edges == 256


def test_areas_of_blocks_are_their_pairs() -> None:
    """At every hop of a ring whose other bounds are full; and an ideal device computes no more."""
    call = Call(512, 2, "contiguous", Mask(blocks=bigbird(1024, 128, window=3, global_=1, random=1)))
    held = call.held
    for plan in call.plans():
        for hop in plan.hops:
            seen = visible_pairs(call.mask, held.positions(plan.rank), held.positions(hop.shard))
            assert sum(area_of(one.bounds, 512, 512).pairs for one in plan.hop_masks[hop.index]) == seen
    many = Call(1 << 15, 2, "contiguous", Mask(blocks=bigbird(1 << 16, 128, window=3, global_=1, random=2)))
    assert many.mask.blocks is not None
    part = float(many.mask.blocks.visible.float().mean())
    blocks, full = (ideal_seconds(one, H100, "forward") for one in (many, replace(many, mask=Mask())))
    assert blocks == pytest.approx(part * full, rel=0.1)  # a pass over the state beside it
    by_mask = [ideal_seconds(replace(many, mask=mask), H100, "forward") for mask in (
        Mask(window=(64, 64)), Mask(window=(64, 64), global_tokens=((0, 2048),)), Mask()
    )]  # fmt: skip
    assert by_mask == sorted(by_mask) and by_mask[1] > 2 * by_mask[0]


def test_fitted_speed_takes_what_was_told() -> None:
    form, area = form_of(tokens=8192, heads=32), whole(8192, causal=True)
    speed = H100.fitted(forward=(300e12, area, form))
    assert 4 * 128 * 32 * area.pairs / speed.seconds(FOLD, area, form, hop=0) == pytest.approx(300e12)
    with pytest.raises(ValueError, match="is no speed of this launch"):
        H100.fitted(forward=(1e20, area, form))


def test_tokens_that_hide_the_links() -> None:
    """MHA, causal: the closed form knows neither the state nor the edges, so that it asks for more tokens."""
    call = Call(8192, 64, heads=32, kv_heads=32)
    needed = tokens_needed(call, H100, LINKS)
    assert needed.forward is not None
    assert needed.closed_forward / 2 < needed.forward < needed.closed_forward * 1.5
    slow = replace(call, nodes=8, two_level=False)
    flat, ringed = (tokens_needed(one, H100, LINKS).forward for one in (slow, replace(slow, two_level=True)))
    assert flat is not None and ringed is not None and flat > 3 * ringed


def test_lanes_are_calls() -> None:
    calls = [Call(tokens, 32) for tokens in (1024, 4096)]
    both = cases(calls, H100, LINKS, "forward").seconds
    assert both.tolist() == pytest.approx([cases([one], H100, LINKS, "forward").seconds[0] for one in calls])


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


def test_memory_is_counted_as_the_bench_counts_it() -> None:
    """By what it is for, and with every setting of a ring that `bench memory` has."""
    for setting in (Setting(), Setting(2, 4), Setting(wire_dtype="bfloat16", grad_wire_dtype="bfloat16")):
        call = Call(
            2048, 8, nodes=setting.nodes, slots=setting.slots, wire_dtype=setting.wire_dtype,
            grad_wire_dtype=setting.grad_wire_dtype, dtype="float32",
        )  # fmt: skip
        assert sum(memory(call).values()) == of_rank(problem_of(call), setting)
    assert "slots of sums" not in memory(Call(2048, 1)) and "K/V slots" not in memory(Call(2048, 1))


def test_memory_does_not_grow_with_the_ring() -> None:
    assert memory(Call(8192, 8)) == memory(Call(8192, 4096))
    most = most_tokens(Call(8192, 8), 80e9)
    check(Call(most, 8), 80e9)
    with pytest.raises(ValueError, match=rf"at most {most:,} fit"):
        check(Call(most + 2, 8), 80e9)


def test_every_way_is_told_and_the_fastest_first() -> None:
    found = ways(Call(2048, 16, nodes=2), H100, LINKS)
    names = [way.name for way in found]
    assert {"flat ring", "two-level ring", "all-gather of K/V"} < {*names}
    assert any(name.startswith("Ulysses") for name in names)
    assert [way.seconds for way in found] == sorted(way.seconds for way in found)
    assert "Ulysses" in [way.name for way in ways(Call(2048, 8), H100, LINKS)]
    assert all(way.percent is not None and way.percent <= 101 for way in found)


@pytest.mark.parametrize("mask", MASKS[:3])
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


def test_a_host_computes_in_pieces() -> None:
    """A second per score of the operator, of which a causal ring of two shards has half a square and a square."""
    body = Body(1.0, 1.0, 1.0, edge=0.0, score=1.0, masked=0.0, row=0.0)
    speed = HostSpeed(body, body, key=0.0, head_dim=8, beside=0.0)
    call = Call(256, 2, "contiguous", heads=1, kv_heads=1, head_dim=8, dtype="float32")
    forward, backward = predicted(call, speed, ENDLESS)
    assert forward.seconds == backward.seconds == 256 * 257 / 2 + 256**2
    with pytest.raises(ValueError, match="was measured at 8"):
        predicted(replace(call, head_dim=16), speed, ENDLESS)


@pytest.mark.parametrize(("tokens", "score"), [(191, 4.0), (192, 3.0), (767, 3.0), (768, 1.0)])
def test_calls_of_few_rows_have_a_cost_of_their_own(tokens: int, score: float) -> None:
    """Of triangles as of rectangles."""
    body = Body(1.0, 3.0, 4.0, edge=0.0, score=0.0, masked=0.0, row=0.0)
    speed = HostSpeed(body, body, key=0.0, head_dim=8, beside=0.0)
    call = Call(tokens, 2, "contiguous", heads=1, kv_heads=1, head_dim=8, dtype="float32")
    assert predicted(call, speed, ENDLESS)[0].seconds == score * (tokens * (tokens + 1) / 2 + tokens**2)


def test_patterns_are_calls_of_one_shape() -> None:
    """However long: no two blocks of rows that see the same keys are neighbours, and so make a call together."""
    small, few, some = (work_of(pattern(2048, *one), 2048, 2048, 2, 1) for one in PATTERNS.values())
    assert (small.pieces, small.by_32, small.by_64) == (16, 2 * 2048 * 128, 0)
    assert (few.pieces, few.by_32, few.by_64) == (16, 2 * 2048 * 512, 0)
    assert (some.pieces, some.by_32, some.by_64) == (4, 0, 2 * 2048 * 1024)


def test_keys_of_several_pieces_are_added_up() -> None:
    """Of a rectangle of 256 keys beside a triangle of 512, by key head; of one piece nothing is."""
    at = torch.arange(512, dtype=torch.int32)
    found = work_of(Bounds(torch.zeros_like(at), at + 257), 512, 768, 4, 2)
    assert (found.pieces, found.added, found.by_64) == (2, 2 * (256 + 512), 4 * (512 * 256 + 512 * 513 / 2))
    assert work_of(FULL, 512, 768, 4, 2).added == 0


def test_far_keys_are_those_after_the_first_ones() -> None:
    """Of rows that see all keys, and of a triangle's, each row's own; those of short calls are all near."""
    assert work_of(FULL, 512, NEAR + 100, 4, 2).far == 4 * 512 * 100
    at = torch.arange(NEAR + 100, dtype=torch.int32)
    causal = Bounds(torch.zeros_like(at), at + 1)
    assert work_of(causal, NEAR + 100, NEAR + 100, 4, 2).far == 4 * sum(range(1, 101))
    assert work_of(FULL, 4096, NEAR, 4, 2).far == 0


def test_what_is_calibrated_is_what_was_there() -> None:
    """Seconds that are made of known constants tell them again."""
    tokens, known = 2048, Body(1e-9, 1.2e-9, 1.5e-9, 3e-7, 2e-9, 1e-9, 4e-7, 5e-7, 6e-5, 7e-8, far=2e-10)
    stage = Stage.of(tokens, 2, 1, 8, torch.float32)
    full, rows, by = 2 * known.by_256, 2 * tokens, astuple(known)
    seconds = {
        "RECTANGLE": full * tokens**2,
        "CAUSAL": full * tokens * (tokens + 1) / 2 + known.edge * rows,
        "hop": full * tokens * stage.thin + known.row * rows,
        "far": full * 1024 * 4 * tokens + 2 * known.far * 1024 * (4 * tokens - NEAR),
    }
    for name, near in stage.limits.items():
        scores, masked = tiles_of(near, tokens, stage.keys_of(name), 2, 1)
        seconds[name] = 2 * (known.score * scores + known.masked * masked + known.block_row * tokens)
        seconds[name] -= 0 if name == "band" else 2 * known.masked * masked  # of the others nothing is on an edge
    for name, seen in stage.patterns.items():
        work = work_of(seen, tokens, tokens, 2, 1)
        seconds[name] = sum(count * each for count, each in zip(work, by, strict=True))
    told = {f"backward {name}": value for name, value in seconds.items()} | {"sums": known.added * tokens}
    assert astuple(stage.body("backward", told)) == pytest.approx(by, rel=1e-6)


def test_an_idle_neighbour_is_worth_something() -> None:
    """Contiguous causal shards: rank 0 is done when rank 1 begins its square, and has computed beside its triangle."""
    body = Body(1.0, 1.0, 1.0, edge=0.0, score=1.0, masked=0.0, row=0.0)
    speed = HostSpeed(body, body, key=0.0, head_dim=8, beside=0.0, alone=0.75)
    call = Call(256, 2, "contiguous", heads=1, kv_heads=1, head_dim=8, dtype="float32")
    assert predicted(call, speed, ENDLESS)[0].seconds == 256 * 257 / 2 + 0.75 * 256**2
    even = replace(call, layout="striped")
    busy, crowded = (predicted(even, replace(speed, alone=alone), ENDLESS)[0].seconds for alone in (0.75, 1.0))
    assert busy == pytest.approx(crowded, rel=0.01)
    assert predicted(replace(call, world=1), speed, ENDLESS)[0].seconds == 0.75 * 256 * 257 / 2


def test_a_speed_is_the_mean_of_all_ranks() -> None:
    fast, slow = (HostSpeed(Body(*[x] * 11), Body(*[2 * x] * 11), key=x, head_dim=8, alone=x / 4) for x in (1.0, 3.0))
    assert mean_of([fast, slow]) == HostSpeed(Body(*[2.0] * 11), Body(*[4.0] * 11), key=2.0, head_dim=8, alone=0.5)


def test_a_window_on_a_host_goes_by_tiles() -> None:
    body = Body(0.0, 0.0, 0.0, edge=0.0, score=1.0, masked=0.0, row=0.0)
    speed = HostSpeed(body, body, key=0.0, head_dim=8, beside=0.0)
    call = Call(1024, 2, "contiguous", Mask(causal=True, window=(99, 0)), 1, 1, 8, dtype="float32")
    visible = 1024 * 100
    assert visible < predicted(call, speed, ENDLESS)[0].seconds < 4 * visible


def test_links_from_a_file_of_bench_links(tmp_path: Path) -> None:
    rows = [
        {
            "transport": "process_group", "channels": None, "way": "ring", "edge": "all", "nbytes": nbytes,
            "seconds": 1e-3 + nbytes / 2e9,
        }
        for nbytes in (1 << 16, 1 << 20, 1 << 24)
    ]  # fmt: skip
    target = tmp_path / "links.json"
    target.write_text(json.dumps({"schema": "ringattn bench links 1", "links": rows}))
    link = link_of(str(target))
    assert (link.rate, link.latency) == (pytest.approx(2e9), pytest.approx(1e-3))
    with pytest.raises(ValueError, match="has no transfers between two ranks"):
        measured({"schema": "ringattn bench links 1", "links": []})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--link", "warp"], "it takes one of nvlink4"),
        (["--gpus", "8", "--nodes", "3"], "it must divide 8 GPUs, as 1, 2, 4, 8 do"),
        (["--tokens", "4m"], "GB for this attention alone"),
        (["--gpu", "abacus"], "it must be one of h100"),
        (["--backward-tflops", "300"], "without tflops"),
        (["--slow", "3"], "RANK=FACTOR"),
        (["--slow", "9=2"], "ranks are 0 to 7"),
        (["--sweep", "tokens=1k"], "tokens=1k..128k,gpus=2..16k"),
        (["--gpus", "512", "--prefix-length", "4k"], "of 262144 hops in all: at most 128 are told apart, or 1024 with"),
        (["--gpus", "2k", "--window", "4k,0", "--jitter", "0.1"], "2048 GPUs with this layout and mask do different"),
        (["--gpus", "2k", "--tokens", "1k", "--window", "100k,0"], "reaches less than half of 128 ranks"),
        (["--gpus", "256", "--trace", "trace.json"], "of 128 at most"),
        (["--chunks", "99"], "it must be 1 to kv_heads"),
        (["--json", "nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_bad_input_is_named(arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = runner.invoke(app, ["predict", *arguments], env={"COLUMNS": "1000", "TERM": "dumb"})
    assert found.exit_code == 2
    assert told in " ".join(found.output.replace("│", " ").split())


def test_the_command_tells_everything(tmp_path: Path) -> None:
    target, trace, csv = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "p.csv"
    arguments = ["--slow", "2=1.25", "--json", str(target), "--trace", str(trace), "--csv", str(csv)]
    found = runner.invoke(app, ["predict", "--gpus", "8", "--nodes", "2", "--kv-heads", "8", *arguments])
    assert found.exit_code == 0, found.output
    told = json.loads(target.read_text())
    assert {"two-level ring", "flat ring"} <= {way["name"] for way in told["ways"]}
    assert "Layout.balanced" in found.output and "tokens per GPU that hide the links" in found.output
    assert from_chrome(json.loads(trace.read_text())).world == 8
    assert told["schema"] == "ringattn predict 1" and {"command", "date", "versions"} <= told["provenance"].keys()
    both = [[one[key] for one in told["passes"]] for key in ("seconds", "exposed", "ideal")]
    step = told["step"]
    assert [step["seconds"], step["exposed"], step["ideal"]] == pytest.approx([sum(one) for one in both])
    assert step["percent_of_ideal"] == pytest.approx(100 * step["ideal"] / step["seconds"])
    shown = next(line.split() for line in found.output.splitlines() if line.startswith("step"))
    assert float(shown[1]) == pytest.approx(1e3 * step["seconds"], rel=1e-3)
    rows = list(DictReader(csv.read_text().splitlines()))
    whole = [row for row in rows if not row["hop"]]
    assert [row["phase"] for row in whole] == ["forward", "backward", "step"]
    assert [float(row["seconds"]) for row in whole] == [*both[0], step["seconds"]]
    for one in told["passes"]:
        hops = [row for row in rows if row["hop"] and row["phase"] == one["phase"]]
        assert [int(row["hop"]) for row in hops] == list(range(8))
        assert [float(row["exposed"]) for row in hops] == one["exposed_by_hop"]
        assert sum(one["exposed_by_hop"]) == pytest.approx(one["exposed"])
    window = runner.invoke(app, ["predict", "--window", "4k,0", "--gpus", "4"])
    assert window.exit_code == 0, window.output


def test_the_map(tmp_path: Path) -> None:
    target = tmp_path / "map.svg"
    arguments = ["--sweep", "tokens=1k..4k,gpus=2..32", "--picture", str(target), "--json", "-"]
    found = runner.invoke(app, ["predict", *arguments])
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)
    assert told["schema"] == "ringattn predict sweep 1" and {"command", "date", "versions"} <= told["provenance"].keys()
    assert told["call"]["per_node"] == 8 and told["call"]["layout"] == "zigzag" and told["links"] and told["speed"]
    rows = told["points"]
    assert len(rows) == 3 * 5 and all(0 < row["percent of ideal"] < 101 for row in rows)
    assert target.read_text().lstrip().startswith("<?xml")


def test_the_map_is_light_or_dark_as_its_page_is(tmp_path: Path) -> None:
    points = [{"tokens": 1024, "gpus": gpus, PERCENT: share} for gpus, share in ((2, 95.0), (4, 50.0), (8, None))]
    draw(points, "a map", tmp_path / "map.svg")
    svg = (tmp_path / "map.svg").read_text()
    assert "prefers-color-scheme: dark" in svg and "fill: var(--paper)" in svg and '#ffffff;"' not in svg
    # black and white stand on the colours of the map, all else has the theme's
    inks = {
        told: re.findall(rf'<text style="[^"]*middle(?:; fill: )?([^";]*)"[^>]*>{told}</text>', svg)
        for told in ("95", "50", "-", "8")
    }
    assert inks == {"95": [""], "50": ["#ffffff"], "-": ["var(--ink)"], "8": ["var(--ink)"]}, inks
    draw(points, "a map", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_ideal_is_one_device_divided() -> None:
    call = Call(8192, 4)
    assert ideal_seconds(call, H100, "forward") == pytest.approx(ideal_seconds(Call(32768, 1), H100, "forward") / 4)


def test_kinds_are_in_the_names_of_transfers() -> None:
    ops = record(replace(SMALL, world=4, nodes=2).plans()[0], SMALL.form, "backward").ops
    assert {op.key.kind for op in ops if op.key} == {*Kind}
    assert all((op.key is None) == (op.stream == COMPUTE) for op in ops)


def test_a_calibration_is_of_this_thread() -> None:
    """Tiny: what it finds are numbers of the right kind, and a ring can be predicted from them alone."""
    speed = calibrated(
        256, heads=2, kv_heads=1, head_dim=8, dtype=torch.float32, clock=Clock(torch.device("cpu")), repeats=1
    )
    assert speed.forward.by_256 > 0 and speed.backward.score > 0 and speed.key > 0
    call = Call(512, 2, "striped", Mask(causal=True), 2, 1, 8, dtype="float32")
    assert all(one.seconds > 0 for one in predicted(call, speed, ENDLESS))


@pytest.mark.nightly
@pytest.mark.idle
def test_measured_rings_on_this_cpu() -> None:
    """Exit code 1 where a row is off by more than 10% and its spread."""
    command = [sys.executable, "-m", "ringattn.bench.predict.check", "--seqlen", "4k,8k"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
