"""Flat and two-level schedules: every pair once, every send received, no slot overwritten, no deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import BlockMask, Mask
from ringattn.ring.schedule.schedule import Schedule, schedule
from ringattn.ring.schedule.visibility import cut_keys

from ..support.layouts import NAMES, Window, build_layout, layouts, masks, visible_shards
from ..support.nightly import rest_nightly
from ..support.plan_timing import clear_plan_caches, plan_within
from ..support.rendezvous import computed_pairs, last_use_distance, run_ranks

CAUSAL = Mask(causal=True)
Settings = tuple[int, int, int, int]  # slots, prefetch, groups of heads, runs of tokens
USUAL = (3, 2, 1, 1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    clear_plan_caches()


def rings(world: int) -> st.SearchStrategy[Topology]:
    """Draw a topology: any order of the ranks, in one node or in several of equal size."""

    def cut(order: list[int]) -> st.SearchStrategy[Topology]:
        sizes = st.sampled_from([size for size in range(1, world + 1) if world % size == 0])
        return sizes.map(lambda size: Topology(tuple(tuple(order[i : i + size]) for i in range(0, world, size))))

    return st.permutations(range(world)).flatmap(cut)


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    slots = draw(st.integers(2, 4))
    return (
        slots,
        draw(st.integers(0, slots - 1)),
        *draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2)])),
    )


def computed(plan: Schedule) -> list[tuple[int, int]]:
    return [(rank, hop.shard) for rank in range(plan.world) for hop in plan.hops(rank) if hop.computes]


def check(
    layout: Layout,
    mask: Mask,
    direction: int,
    *,
    kv_layout: Layout | None = None,
    topology: Topology | None = None,
    how: Settings = USUAL,
) -> None:
    slots, _, _, runs = how
    keys = kv_layout or layout
    plan = schedule(layout, mask, kv_layout=kv_layout, direction=direction, topology=topology, slots=slots)
    cut = cut_keys(layout, mask, keys, runs)
    plans = [plan] if runs == 1 else [plan.select_keys(layout, mask, *run) for run in cut]
    assert [part.lengths for part in plans] == [sent.lengths for _, sent in cut]
    check_plans(plans, [{*visible_shards(layout, mask, run)} for run, _ in cut], how)


def check_plans(plans: list[Schedule], wanted: list[set[tuple[int, int]]], how: Settings) -> None:
    """Check the schedules of all runs of tokens, each alone and all together in one loop."""
    for plan, pairs in zip(plans, wanted, strict=True):
        check_plan(plan, pairs)
    check_loops(plans, wanted, how)


def check_plan(plan: Schedule, wanted: set[tuple[int, int]]) -> None:
    check_hops(plan)
    check_order(plan)
    check_messages(plan)
    check_nothing_needless(plan)
    check_bytes(plan)
    assert sorted(computed(plan)) == sorted(wanted)  # each pair once


def check_loops(plans: list[Schedule], wanted: list[set[tuple[int, int]]], how: Settings) -> None:
    _, prefetch, groups, _ = how
    world = plans[0].world
    each = sorted((rank, shard + run * world) for run, pairs in enumerate(wanted) for rank, shard in [*pairs] * groups)
    ranks = run_ranks(*plans, phase="forward", prefetch=prefetch, groups=groups)
    assert sorted(computed_pairs(ranks, "out")) == each
    ranks = run_ranks(*plans, phase="backward", prefetch=prefetch, groups=groups)
    assert sorted(computed_pairs(ranks, "dq")) == sorted(computed_pairs(ranks, "dkdv")) == each
    for shard, rank in enumerate(ranks):
        seers = [Counter(rank for rank, source in pairs if source == shard) for pairs in wanted]
        assert rank.dkdv_of_own == seers * groups


def place(plan: Schedule, rank: int) -> tuple[int, int]:
    """Return a rank's node and rail."""
    return next((n, node.index(rank)) for n, node in enumerate(plan.nodes) if rank in node)


def check_hops(plan: Schedule) -> None:
    count = len(plan.nodes)
    for rank in range(plan.world):
        hops, (node, rail) = plan.hops(rank), place(plan, rank)
        assert [hop.index for hop in hops] == list(range(plan.count))
        assert [hop.shard for hop in hops] == [
            plan.nodes[(node - plan.direction * outer) % count][(rail - plan.direction * step) % len(plan.nodes[0])]
            for outer in plan.outer_steps
            for step in plan.steps
        ]
        assert hops[0].kv_from is None
        assert hops[0].kv_slot is None
        for hop in hops[1:]:
            outer, step = divmod(hop.index, plan.inner)
            slot = hop.index % plan.slots if step else plan.slots + outer % 2
            assert hop.kv_slot == (None if hop.kv_from is None else slot)
            assert not hop.computes or hop.kv_from is not None
            assert not hop.computes or (hop.dkv_to if step else hop.return_to) is not None
            assert not step or hop.dkv_slot == (None if hop.dkv_to is None else hop.index % 2)
            assert not step or (hop.rail_to, hop.return_to, hop.return_from) == (None, None, None)


def check_order(plan: Schedule) -> None:
    """Check that distances are distinct and start with the own shard; without a mask all of them occur."""
    for distances, ring in ((plan.outer_steps, plan.nodes), (plan.steps, plan.nodes[0])):
        assert distances[0] == 0
        assert len(set(distances)) == len(distances)
        assert set(distances) <= set(range(len(ring)))
    assert (plan.count, plan.inner) == (len(plan.outer_steps) * len(plan.steps), len(plan.steps))
    assert plan.ranks.tolist() == [
        [plan.rank_at(shard, hop) for hop in range(plan.count)] for shard in range(plan.world)
    ]
    assert all(
        plan.shard_at(rank, hop) == shard for shard, row in enumerate(plan.ranks) for hop, rank in enumerate(row)
    )


Message = tuple[str, int, int, int, int, int]  # kind, level, hop of the key, shard, source, destination


def sent(plan: Schedule) -> Iterator[Message]:
    for rank in range(plan.world):
        for hop in plan.hops(rank):
            if hop.kv_to is not None:
                yield "kv", 0, hop.index + 1, hop.shard, rank, hop.kv_to
            if hop.rail_to is not None:
                yield "kv", 1, hop.index + plan.inner, hop.shard, rank, hop.rail_to
            if hop.dkv_to is not None:
                yield "dkv", 0, hop.index, hop.shard, rank, hop.dkv_to
            if hop.return_to is not None:
                yield "dkv", 1, hop.index, hop.shard, rank, hop.return_to


def received(plan: Schedule) -> Iterator[Message]:
    for rank in range(plan.world):
        for hop in plan.hops(rank):
            root = hop.index % plan.inner == 0
            if hop.kv_from is not None:
                yield "kv", int(root), hop.index, hop.shard, hop.kv_from, rank
            if hop.dkv_from is not None:
                key = hop.index + last_use_distance(plan, hop.shard, hop.index) if root else hop.index - 1
                yield "dkv", 0, key, hop.shard, hop.dkv_from, rank
            if hop.return_from is not None:
                yield "dkv", 1, hop.index, rank, hop.return_from, rank


def check_messages(plan: Schedule) -> None:
    """Check that sends and receives match within each group of equal key and level."""
    sends, receives = sorted(sent(plan)), sorted(received(plan))
    assert sends == receives
    assert len(set(sends)) == len(sends)
    moves = [
        (each.kind, each.level, *move)
        for each in plan.moves()
        for move in zip(each.shards.tolist(), each.sources.tolist(), each.destinations.tolist(), strict=True)
    ]
    assert sorted(moves) == sorted((kind, level, *move) for kind, level, _, *move in sends)
    for level in (0, 1):
        edges = {(source, destination) for _, at, _, _, source, destination in sends if at == level}
        assert plan.edges[level] == tuple(sorted(edges))
        ends = [(place(plan, source), place(plan, destination)) for source, destination in edges]
        # within a node or along a rail
        assert all(a != b and a[level] == b[level] for a, b in ends)


def check_nothing_needless(plan: Schedule) -> None:
    """Check that K/V stop at the last rank and node that need them, and dK/dV start at the first with a part."""
    for rank in range(plan.world):
        for hop in plan.hops(rank):
            step = hop.index % plan.inner
            begin = hop.index - step
            active = plan.active[hop.shard]
            later = any(active[hop.index + 1 : begin + plan.inner])
            earlier = any(active[begin + 1 : hop.index])
            assert (hop.kv_to is not None) == later
            if step:
                assert (hop.dkv_from is not None) == (earlier and (hop.computes or later))
                assert (hop.dkv_to is not None) == (hop.computes or (earlier and later))
                root = plan.rank_at(hop.shard, begin)
                ends = not later or step == plan.inner - 1
                assert hop.dkv_to is None or (hop.dkv_to == root) == ends
            else:
                assert hop.dkv_to is None
                assert (hop.dkv_from is not None) == later
                assert (hop.rail_to is not None) == any(active[begin + plan.inner :])
                assert hop.return_to == (hop.shard if begin and (hop.computes or later) else None)
    across = Counter(
        (shard, place(plan, to)[0]) for kind, level, _, shard, _, to in sent(plan) if (kind, level) == ("kv", 1)
    )
    assert set(across.values()) <= {1}  # K/V enter a node once
    assert all(node != place(plan, shard)[0] for shard, node in across)


def check_bytes(plan: Schedule) -> None:
    for kv, dkv in ((3, 0), (0, 5), (3, 5)):
        expected = {0: [0] * plan.world, 1: [0] * plan.world}
        for kind, level, _, shard, source, _ in sent(plan):
            expected[level][source] += plan.lengths[shard] * (kv if kind == "kv" else dkv)
        for level, counts in expected.items():
            assert plan.bytes(kv, dkv, level=level) == tuple(counts)
        assert plan.bytes(kv, dkv) == tuple(map(sum, zip(*expected.values(), strict=True)))
    assert plan.bytes(3) == plan.bytes(3, 0)
    assert all(type(count) is int for count in plan.bytes(3))


@pytest.mark.parametrize(("causal", "direction"), rest_nightly([(False, 1), (True, 1), (True, -1)], (True, -1)))
def test_schedules_of_every_small_ring(causal: bool, direction: int) -> None:
    for name in NAMES:
        for world in (1, 2, 3, 5, 8):
            for seqlen in {0, 1, world - 1, world, 2 * world + 1, 3 * world}:
                check(build_layout(name, seqlen, world), Mask(causal=causal), direction)


@given(st.data(), layouts(max_seqlen=14), masks(), st.sampled_from([1, -1]), settings())
def test_schedules_of_any_ring(data: st.DataObject, layout: Layout, mask: Mask, direction: int, how: Settings) -> None:
    check(layout, mask, direction, topology=data.draw(rings(layout.world)), how=how)


@given(st.data(), masks(), st.sampled_from([1, -1]))
def test_schedules_with_another_kv_layout(data: st.DataObject, mask: Mask, direction: int) -> None:
    layout = data.draw(layouts(max_seqlen=16))
    keys = data.draw(layouts(max_seqlen=16, world=layout.world))
    check(layout, mask, direction, kv_layout=keys, topology=data.draw(rings(layout.world)))


@given(st.data(), st.integers(1, 6), st.sampled_from([1, -1]), settings())
def test_active_ranges_of_any_visible_shards(data: st.DataObject, world: int, direction: int, how: Settings) -> None:
    """Active ranges are right for any pattern of visible shards and any order of hops."""
    ring = data.draw(rings(world))
    nodes = ring.nodes if ring.two_level else (ring.order,)
    outers, steps = data.draw(distances(len(nodes))), data.draw(distances(len(nodes[0])))
    hops = len(outers) * len(steps)
    rows = st.lists(st.booleans(), min_size=hops, max_size=hops)
    plans, wanted = [], []
    for _ in range(how[3]):
        active = tuple(map(tuple, data.draw(st.lists(rows, min_size=world, max_size=world))))
        plan = Schedule(nodes, direction, active, tuple(range(1, world + 1)), how[0], outers, steps)
        plans.append(plan)
        wanted.append({(plan.rank_at(s, t), s) for s in range(world) for t in range(hops) if active[s][t]})
    check_plans(plans, wanted, how)


def distances(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw some distances around a ring, in any order."""
    return st.lists(st.integers(1, count - 1), unique=True).map(lambda far: (0, *far)) if count > 1 else st.just((0,))


def test_distances_without_visible_pairs_are_skipped() -> None:
    layout = Layout.contiguous(64, 8)
    assert schedule(layout, CAUSAL).steps == tuple(range(8))
    assert schedule(layout, Window(causal=True, left=7)).steps == (0, 1)
    assert schedule(layout, Window(causal=True, left=7), direction=-1).steps == (0, 7)
    assert schedule(layout, Mask(documents=Documents(range(0, 65, 8)))).steps == (0,)
    # only every second rank needs K/V, so each transfer skips one
    even = Layout([[(start, 8)] if rank % 2 == 0 else [] for rank, start in enumerate(range(0, 64, 8))])
    assert schedule(even, Mask()).steps == (0, 2, 4, 6)
    assert schedule(even, Mask()).hops(2)[1].kv_from == 0
    # the topology's order counts, not the rank numbers
    ring = Topology(((0, 4, 1, 5, 2, 6, 3, 7),))
    assert schedule(layout, Window(causal=True, left=7), topology=ring).steps == (0, 2, 3)


@pytest.mark.parametrize("direction", [1, -1])
def test_keys_needed_on_both_sides_take_the_short_way(direction: int) -> None:
    """K/V go to one neighbour, then straight to the other one."""
    plan = schedule(Layout.contiguous(64, 8), Mask(window=(7, 7)), direction=direction)
    assert plan.steps == (0, 1, 7)
    for rank in range(8):
        first, second, third = plan.hops(rank)
        assert first.kv_to == (rank + direction) % 8
        assert second.kv_to in (None, (rank - 2 * direction) % 8)
        assert third.kv_to is None
    assert sorted(plan.bytes(1)) == [8] + [16] * 7  # two shards; one is needed on one side only
    nodes = schedule(Layout.contiguous(64, 16), Mask(window=(3, 3)), direction=direction, topology=Topology.grid(4, 4))
    assert (nodes.outer_steps, nodes.steps) == ((0, 1, 3), (0, 1, 3))
    assert nodes.count == 9


def test_the_direction_with_fewer_transfers_is_chosen() -> None:
    """Ranks one, two and three further need K/V; the longer way round takes fewer hops."""
    visible = torch.eye(4, dtype=torch.bool)
    visible[[1, 3, 3], [0, 0, 1]] = True
    for owners, steps in (([0, 0, 1, 2, 3], (0, 1, 3, 2)), ([0, 1, 1, 2, 3], (0, 1, 2, 3))):
        layout = Layout.uneven([owners.count(rank) for rank in range(4)])
        assert schedule(layout, Mask(blocks=BlockMask(visible[owners][:, owners], 1))).steps == steps


def test_dkv_that_return_early_have_their_own_slot() -> None:
    short = schedule(Layout.contiguous(8, 4), Mask(causal=True, documents=Documents([0, 6, 8])))
    assert [short.hops(rank)[0].dkv_slot for rank in range(4)] == [1, 2, None, None]
    assert [short.hops(rank)[0].dkv_from for rank in range(4)] == [2, 2, None, None]
    # in two nodes that exchange nothing, the slot is the first one behind the rotating ones as well
    apart = Mask(causal=True, documents=Documents([0, 6, 8, 14, 16]))
    check(Layout.contiguous(16, 8), apart, 1, topology=Topology.grid(2, 4))
    assert schedule(Layout.contiguous(16, 8), apart, topology=Topology.grid(2, 4)).hops(1)[0].dkv_slot == 2
    for world in range(2, 9):
        whole = schedule(Layout.contiguous(world, world), Mask())
        assert {whole.hops(rank)[0].dkv_slot for rank in range(world)} == {world % 2}


def test_runs_that_no_later_rank_sees_are_not_sent() -> None:
    """Half of the keys of a causal zigzag shard stop at rank 0 if K/V move to the previous rank."""
    layout = Layout.zigzag(4096, 4)
    whole = schedule(layout, CAUSAL, direction=-1)
    runs = [whole.select_keys(layout, CAUSAL, *run) for run in cut_keys(layout, CAUSAL, layout, 2)]
    assert sum(whole.bytes(1)) == 4 * 3 * 1024
    assert [sum(run.bytes(1)) for run in runs] == [4 * 3 * 512, (0 + 1 + 2 + 3) * 512]


def test_equal_schedules_share_one_object() -> None:
    layout = Layout.zigzag(16, 4)
    plan = schedule(layout, CAUSAL)
    for change in ({"direction": -1}, {"topology": Topology.grid(2, 2)}, {"slots": 4}):
        assert schedule(layout, CAUSAL, **change) != plan  # type: ignore[arg-type]
    assert schedule(Layout.zigzag(16, 4), Mask(causal=True), kv_layout=layout, direction=1) is plan
    # Nodes of one rank, or of different sizes, give a flat schedule.
    for nodes in (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), ((0,), (1, 2, 3))):
        assert schedule(layout, CAUSAL, topology=Topology(nodes), slots=3) is plan
    assert plan.lengths == (4, 4, 4, 4)


def test_refusals() -> None:
    layout = Layout.contiguous(8, 2)
    rows: list[tuple[dict[str, Any], str]] = [
        ({"kv_layout": Layout.contiguous(8, 3)}, "kv_layout is made for 3 ranks and layout for 2: .*"),
        ({"kv_layout": Layout.contiguous(8, 1)}, "kv_layout is made for 1 ranks and layout for 2: .*"),
        ({"direction": 0}, r"direction is 0: it must be 1 \(to the next rank\) or -1 \(to the previous rank\)"),
        ({"topology": Topology.grid(2, 2)}, "topology has 4 ranks, but layout is made for 2"),
        ({"slots": 0}, "slots is 0: it must be at least 1"),
    ]
    assert schedule(layout, Mask(), slots=1).slots == 1
    for change, message in rows:
        with pytest.raises(ValueError, match=f"^{message}$"):
            schedule(layout, Mask(), **change)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"^rank is {rank}: the schedule has ranks 0 to 1$"):
            schedule(layout, Mask()).hops(rank)


def test_large_clusters_are_planned_quickly() -> None:
    nodes, per_node = 128, 8
    world = nodes * per_node

    def use(plan: Schedule) -> None:
        plan.hops(world - 1)
        plan.bytes(1)

    topology, layout = Topology.grid(nodes, per_node), Layout.zigzag(2 * world, world)
    plan = plan_within(10, lambda: schedule(layout, CAUSAL, topology=topology), use)
    assert plan.bytes(1, level=0) == (nodes * (per_node - 1) * 2,) * world
    # The bytes of a flat ring, but over every NIC of a node.
    assert plan.bytes(1, level=1) == ((nodes - 1) * 2,) * world
