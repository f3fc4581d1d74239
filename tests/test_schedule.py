"""Schedules: every pair once, every send received, every sum home, no slot overwritten, no deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.ring.layout import Layout
from ringattn.ring.mask import Mask
from ringattn.ring.schedule import Hop, Schedule, _schedule, _union, schedule

from .layouts import NAMES, Window, layouts, masks, named, sees, small_layouts
from .rendezvous import run_backward, run_forward

CAUSAL = Mask(causal=True)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Plans of another test would hide what makes this one's."""
    _schedule.cache_clear()


def needs(layout: Layout, mask: Mask, keys: Layout) -> set[tuple[int, int]]:
    """(rank, shard) where some query of the rank sees some key of the shard, pair by pair."""
    held = [layout.positions(rank).tolist() for rank in range(layout.world)]
    theirs = [keys.positions(shard).tolist() for shard in range(keys.world)]
    return {
        (rank, shard)
        for rank, queries in enumerate(held)
        for shard, positions in enumerate(theirs)
        if any(sees(mask, query, key) for query in queries for key in positions)
    }


def computed(plan: Schedule) -> list[tuple[int, int]]:
    return [(rank, hop.shard) for rank in range(plan.world) for hop in plan.hops(rank) if hop.computes]


def check(layout: Layout, mask: Mask, direction: int, kv_layout: Layout | None = None) -> None:
    plan = schedule(layout, mask, kv_layout=kv_layout, direction=direction)
    wanted = needs(layout, mask, kv_layout or layout)
    check_hops(plan)
    check_messages(plan)
    check_nothing_needless(plan)
    assert sorted(computed(plan)) == sorted(wanted)  # each once
    assert sorted(run_forward(plan)) == sorted(wanted)
    dq, dkdv, home = run_backward(plan)
    assert sorted(dq) == sorted(dkdv) == sorted(wanted)
    assert home == [Counter(rank for rank, seen in wanted if seen == shard) for shard in range(plan.world)]
    check_bytes(plan)


def check_hops(plan: Schedule) -> None:
    for rank in range(plan.world):
        hops = plan.hops(rank)
        assert [hop.index for hop in hops] == list(range(plan.world))
        assert [hop.shard for hop in hops] == [(rank - plan.direction * t) % plan.world for t in range(plan.world)]
        assert hops[0].kv_from is None
        assert hops[0].kv_slot is None
        for hop in hops[1:]:
            assert hop.kv_slot == (None if hop.kv_from is None else hop.index % 3)
            assert hop.sums_slot in (None, hop.index % 2)
            assert not hop.computes or (hop.kv_from is not None and hop.sums_to is not None)


def check_messages(plan: Schedule) -> None:
    """Every send has its receive, in the group of the same key, and the other way round."""
    hops = [plan.hops(rank) for rank in range(plan.world)]
    every = [(rank, hop) for rank in range(plan.world) for hop in hops[rank]]
    sends = {("kv", hop.index, hop.shard, rank, hop.kv_to) for rank, hop in every if hop.kv_to is not None}
    receives = {("kv", hop.index - 1, hop.shard, hop.kv_from, rank) for rank, hop in every if hop.kv_from is not None}
    assert sends == receives
    sends = {("sums", hop.index, hop.shard, rank, hop.sums_to) for rank, hop in every if hop.sums_to is not None}
    receives = {
        ("sums", hop.index - 1 if hop.index else journey_end(plan, rank), hop.shard, hop.sums_from, rank)
        for rank, hop in every
        if hop.sums_from is not None
    }
    assert sends == receives


def journey_end(plan: Schedule, shard: int) -> int:
    return max(hop for hop, computes in enumerate(plan.visits[shard]) if computes or not hop)


def check_nothing_needless(plan: Schedule) -> None:
    """K/V go no further than the last rank that needs them; sums start at the first that has some."""
    for rank in range(plan.world):
        for hop in plan.hops(rank):
            later = any(plan.visits[hop.shard][hop.index + 1 :])
            earlier = any(plan.visits[hop.shard][1 : hop.index])
            assert (hop.kv_to is not None) == later
            if hop.index:
                assert (hop.sums_from is not None) == (earlier and (hop.computes or later))
                assert (hop.sums_to is not None) == (hop.computes or (earlier and later))
                assert hop.sums_to is None or (hop.sums_to == hop.shard) == (not later or hop.index == plan.world - 1)
            else:
                assert hop.sums_to is None
                assert (hop.sums_from is not None) == later


def check_bytes(plan: Schedule) -> None:
    for kv, sums in ((3, 0), (0, 5), (3, 5)):
        expected = [
            sum(
                plan.lengths[hop.shard] * (kv * (hop.kv_to is not None) + sums * (hop.sums_to is not None))
                for hop in hops
            )
            for hops in map(plan.hops, range(plan.world))
        ]
        assert plan.bytes(kv, sums) == tuple(expected)
    assert plan.bytes(3) == plan.bytes(3, 0)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("causal", [False, True])
def test_every_small_ring(causal: bool, direction: int) -> None:
    for name in NAMES:
        for world in range(1, 9):
            for seqlen in {0, 1, world - 1, world, 2 * world + 1, 3 * world}:
                check(named(name, seqlen, world), Mask(causal=causal), direction)


@pytest.mark.parametrize("direction", [1, -1])
def test_every_size_up_to_nine_tokens(direction: int) -> None:
    for layout in small_layouts(9, 4):
        check(layout, CAUSAL, direction)


@given(layouts(max_seqlen=20), masks(), st.sampled_from([1, -1]))
def test_any_ring(layout: Layout, mask: Mask, direction: int) -> None:
    check(layout, mask, direction)


@given(st.data(), masks(), st.sampled_from([1, -1]))
def test_any_ring_with_other_keys(data: st.DataObject, mask: Mask, direction: int) -> None:
    layout = data.draw(layouts(max_seqlen=16))
    check(layout, mask, direction, data.draw(layouts(max_seqlen=16, world=layout.world)))


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_any_pattern_of_visits(visits: list[list[bool]]) -> None:
    """Whatever masks will come: the journeys are right for every pattern."""
    world = len(visits)
    for direction in (1, -1):
        plan = Schedule(world, direction, tuple(map(tuple, visits)), tuple(range(1, world + 1)))
        wanted = {(plan.rank_at(s, t), s) for s in range(world) for t in range(world) if visits[s][t]}
        check_hops(plan)
        check_messages(plan)
        check_nothing_needless(plan)
        check_bytes(plan)
        assert sorted(run_forward(plan)) == sorted(wanted)
        dq, dkdv, home = run_backward(plan)
        assert sorted(dq) == sorted(dkdv) == sorted(wanted)
        assert home == [Counter(rank for rank, seen in wanted if seen == shard) for shard in range(world)]


def test_a_causal_contiguous_ring_sends_half() -> None:
    layout = Layout.contiguous(64, 8)
    full, causal = (sum(schedule(layout, mask).bytes(2)) for mask in (Mask(), CAUSAL))
    assert full == 8 * 7 * 8 * 2
    assert causal * 2 == full
    assert sum(schedule(Layout.zigzag(64, 8), CAUSAL).bytes(2)) == full


def test_a_short_window_keeps_to_the_neighbours() -> None:
    plan = schedule(Layout.contiguous(64, 8), Window(causal=True, left=7))
    assert [hop.index for hop in plan.hops(3) if hop.computes] == [0, 1]
    assert plan.bytes(1) == (8,) * 7 + (0,)
    assert plan.bytes(0, 1) == (0,) + (8,) * 7


def test_hops_of_a_full_ring_of_three() -> None:
    assert schedule(Layout.contiguous(6, 3), Mask()).hops(1) == (
        Hop(0, 1, True, None, 2, None, 0, None, 1),
        Hop(1, 0, True, 0, 2, 1, None, 2, 1),
        Hop(2, 2, True, 0, None, 2, 0, 2, 0),
    )
    assert schedule(Layout.contiguous(6, 3), Mask(), direction=-1).hops(1) == (
        Hop(0, 1, True, None, 0, None, 2, None, 1),
        Hop(1, 2, True, 2, 0, 1, None, 0, 1),
        Hop(2, 0, True, 2, None, 2, 2, 0, 0),
    )


def test_a_shard_that_passes_a_rank() -> None:
    before_the_first = schedule(Layout.contiguous(6, 3), CAUSAL, direction=-1)
    assert before_the_first.journeys == ((1, 2), (2, 2), (1, 0))
    assert before_the_first.hops(0)[1] == Hop(1, 1, False, 1, 2, 1, None, None, None)
    seen, unseen = (True, True, False, True), (True, False, False, False)
    between = Schedule(4, 1, (seen, unseen, unseen, unseen), (1, 1, 1, 1))
    assert between.hops(2)[2] == Hop(2, 0, False, 1, 3, 2, 1, 3, 0)  # the sums pass too, with nothing added


def test_sums_that_come_home_early_have_a_slot_of_their_own() -> None:
    short = schedule(Layout.contiguous(8, 4), Window(causal=True, left=1))
    assert [short.hops(rank)[0].sums_slot for rank in range(4)] == [2, 2, 2, None]
    assert [short.hops(rank)[0].sums_from for rank in range(4)] == [1, 2, 3, None]
    for world in range(2, 9):
        whole = schedule(Layout.contiguous(world, world), Mask())
        assert {whole.hops(rank)[0].sums_slot for rank in range(world)} == {world % 2}


def test_schedules_are_pure_values() -> None:
    layout = Layout.zigzag(16, 4)
    plan = schedule(layout, CAUSAL)
    assert schedule(Layout.zigzag(16, 4), Mask(causal=True), kv_layout=layout, direction=1) == plan
    assert schedule(layout, CAUSAL, direction=-1) != plan
    assert plan.lengths == (4, 4, 4, 4)
    with pytest.raises(FrozenInstanceError):
        plan.world = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        plan.hops(0)[0].shard = 3  # type: ignore[misc]


def test_bad_arguments() -> None:
    layout = Layout.contiguous(8, 2)
    with pytest.raises(ValueError, match=r"^kv_layout is made for 3 ranks, layout for 2: both must be the same$"):
        schedule(layout, Mask(), kv_layout=Layout.contiguous(8, 3))
    for direction in (0, 2):
        message = rf"^direction is {direction}: it must be 1 \(to the next rank\) or -1 \(to the one before\)$"
        with pytest.raises(ValueError, match=message):
            schedule(layout, Mask(), direction=direction)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"^rank is {rank}: the schedule has ranks 0 to 1$"):
            schedule(layout, Mask()).hops(rank)


@pytest.mark.parametrize("name", NAMES)
def test_a_million_tokens_over_64_ranks_are_planned_in_no_time(name: str) -> None:
    layout = named(name, 2**20, 64)
    start = perf_counter()
    plan = schedule(layout, CAUSAL)
    plan.hops(63)
    assert perf_counter() - start < 2
    assert len(computed(plan)) == (64 * 65 // 2 if name == "contiguous" else 64 * 64)


def test_what_a_rank_sees_is_one_interval_for_most_masks() -> None:
    """What keeps the planning cheap: it searches for the ends of these."""
    contiguous, striped = torch.arange(100, 200), torch.arange(0, 100, 5)
    for mask in (
        Mask(),
        CAUSAL,
        Window(left=4, right=0),
        Window(left=5, right=-1),
        Window(left=300, right=300, document=300),
    ):
        for positions in (contiguous, striped):
            starts, ends = _union(mask, positions, reach=150)
            assert len(starts) == len(ends) == 1
    starts, ends = _union(Window(left=2, right=1), torch.tensor([0, 1, 10, 11, 12, 40, 99]), reach=42)
    assert (starts.tolist(), ends.tolist()) == ([0, 8, 38], [3, 14, 42])


def test_a_thousand_ranks_print() -> None:
    plan = schedule(Layout.contiguous(4096, 1024), CAUSAL)
    lines = str(plan).splitlines()
    assert lines[0] == "1024 ranks, K/V move to the next rank, 524800 of 1048576 hops compute"
    assert lines[3].split()[-6:] == ["hop", "1021", "hop", "1022", "hop", "1023"]
    assert lines[3].split()[24:26] == ["…", "hop"]
    assert lines[4].split()[:4] == ["rank", "0", "0", ">"]
    assert lines[4].split()[-4:] == ["…", ".", ".", "."]
    assert lines[16].split() == ["…"] * 17
    assert [line.split()[1] for line in lines[4:20] if "rank" in line] == [*map(str, range(12)), "1021", "1022", "1023"]
    assert max(map(len, lines)) < 170
    assert plan.hops(1023)[1023].kv_from == 1022


def test_text() -> None:
    assert (
        str(schedule(Layout.contiguous(6, 3), CAUSAL))
        == """\
3 ranks, K/V move to the next rank, 6 of 9 hops compute

K/V: N shard N is computed with, (N) only passes, > goes on, . nothing comes
         hop 0   hop 1   hop 2
rank 0   0 >     .       .
rank 1   1 >     0 >     .
rank 2   2       1       0

dK/dV sums: N of shard N, > go on, ^ go home, . none; hop 0: < come home
         hop 0   hop 1   hop 2
rank 0   0 <     .       .
rank 1   1 <     0 >     .
rank 2   .       1 ^     0 ^"""
    )


def test_text_of_the_other_direction_with_a_shard_that_passes() -> None:
    assert (
        str(schedule(Layout.contiguous(6, 3), CAUSAL, direction=-1))
        == """\
3 ranks, K/V move to the previous rank, 6 of 9 hops compute

K/V: N shard N is computed with, (N) only passes, > goes on, . nothing comes
         hop 0   hop 1   hop 2
rank 0   0 >     (1) >   .
rank 1   1 >     .       0
rank 2   2       0 >     1

dK/dV sums: N of shard N, > go on, ^ go home, . none; hop 0: < come home
         hop 0   hop 1   hop 2
rank 0   0 <     .       .
rank 1   1 <     .       0 ^
rank 2   .       0 >     1 ^"""
    )


@pytest.mark.parametrize("world", [16, 17])
def test_tables_up_to_sixteen_ranks_are_whole(world: int) -> None:
    text = str(schedule(Layout.striped(world, world), Mask()))
    assert ("…" in text) == (world > 16)
