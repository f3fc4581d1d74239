"""Plans of one rank: when K/V are posted, the bounds of each hop, and the number of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.comm.topology.topology import Topology
from ringattn.kernels.shared_cache import SharedValue
from ringattn.ring.schedule import plan as plan_module
from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import BlockMask, Mask, visible_pairs
from ringattn.ring.schedule.plan import Plan, plan
from ringattn.ring.schedule.schedule import schedule
from ringattn.ring.schedule.visibility import cut_keys, sent_keys

from ..support.kernel_cases import dense_mask
from ..support.layouts import Window, layouts, masks

CPU = torch.device("cpu")
CAUSAL = Mask(causal=True)


def plan_of(topology: Topology, mask: Mask | None = None, *, slots: int = 3, rank: int = 0) -> Plan:
    layout = Layout.contiguous(4 * topology.world, topology.world)
    return plan(layout, mask or Mask(), rank, 1, CPU, topology, slots)


def posted(steps: Plan, prefetch: int) -> list[list[int]]:
    """Return, per hop, the hops whose K/V are posted there."""
    return [[hop.index for hop in steps.kv_arrivals(now, prefetch)] for now in range(len(steps.hops))]


@given(st.sampled_from([(1, 1), (1, 6), (2, 2), (2, 4), (4, 2)]), st.integers(0, 3))
def test_every_hop_is_posted_once_and_never_late(shape: tuple[int, int], prefetch: int) -> None:
    steps = plan_of(Topology.grid(*shape))
    when = {index: now for now, indices in enumerate(posted(steps, prefetch)) for index in indices}
    assert sorted(index for indices in posted(steps, prefetch) for index in indices) == [*range(1, len(steps.hops))]
    for index, now in when.items():
        root = index // steps.inner * steps.inner
        # Never a later outer step: transfers posted behind would wait until the rail has brought the next root.
        assert now == (index - steps.inner if index == root else max(root, index - prefetch))
    for posts in steps.kv_posts(prefetch):
        for coming, leaving, to, by_rail, waits in posts:
            root = coming.index % steps.inner == 0
            assert (by_rail, leaving.index) == (root, coming.index - (steps.inner if root else 1))
            assert to == (leaving.rail_to if root else leaving.kv_to)
            assert waits == (leaving.index == 0 or (leaving.index % steps.inner == 0) != root)
    assert steps.kv_posts(prefetch) is steps.kv_posts(prefetch)


@given(st.data(), layouts(max_world=6, max_seqlen=24), masks(), st.sampled_from([1, -1]))
def test_plan_matches_the_schedule_and_the_visible_pairs(
    data: st.DataObject, layout: Layout, mask: Mask, direction: int
) -> None:
    rank = data.draw(st.integers(0, layout.world - 1))
    topology = Topology.grid(2, layout.world // 2) if layout.world % 2 == 0 else None
    steps = plan(layout, mask, rank, direction, CPU, topology)
    whole = schedule(layout, mask, direction=direction, topology=topology)
    assert (steps.rank, steps.hops, steps.edges) == (rank, whole.hops(rank), whole.edges)
    sent = sent_keys(layout, mask, layout)
    mine = layout.positions(rank)
    for hop, parts in zip(steps.hops, steps.hop_masks, strict=True):
        theirs = (sent if hop.index else layout).positions(hop.shard)
        pairs = visible_pairs(mask, mine, theirs)
        assert bool(parts) == (pairs > 0 or hop.index == 0)
        at = [(part.positions.queries, part.positions.keys(part.shard)) for part in parts]
        assert all(q.equal(mine) and k.equal(theirs) and q.dtype == k.dtype == torch.int32 for q, k in at)
        if parts:
            assert sum(int(dense_mask(part.bounds, len(mine), len(theirs)).sum()) for part in parts) == pairs
    launched = [hop.index for hop, parts in zip(steps.hops, steps.hop_masks, strict=True) if parts]
    assert steps.last_launch_hop == launched[-1]
    assert steps.lengths == tuple(sent.lengths[hop.shard] for hop in steps.hops)
    assert steps.max_shard_keys == max(sent.lengths)
    assert (mine if steps.send_index is None else mine[steps.send_index]).equal(sent.positions(rank))


@given(st.data(), layouts(max_world=4, max_seqlen=16), masks(), st.integers(2, 4))
def test_plan_of_runs_matches_the_visible_pairs(data: st.DataObject, layout: Layout, mask: Mask, runs: int) -> None:
    """Each run of the shards is planned as a shard of its own, and the plan of the call has room for all of them."""
    rank = data.draw(st.integers(0, layout.world - 1))
    topology = Topology.grid(2, layout.world // 2) if layout.world % 2 == 0 else None
    call = plan(layout, mask, rank, 1, CPU, topology, runs=runs)
    whole, mine = plan(layout, mask, rank, 1, CPU, topology), layout.positions(rank)
    assert [hop.shard for hop in call.hops] == [hop.shard for hop in whole.hops]
    launched, edges = [], [set[tuple[int, int]](), set[tuple[int, int]]()]
    for number, (steps, (keys, sent)) in enumerate(zip(call.runs, cut_keys(layout, mask, layout, runs), strict=True)):
        assert call.run(number) is call.run(number + runs) is steps
        assert mine[steps.own_keys].equal(keys.positions(rank))
        assert steps.lengths == tuple(sent.lengths[hop.shard] for hop in steps.hops)
        assert max(steps.lengths) <= call.max_shard_keys
        assert steps.dkv_slots <= call.dkv_slots
        for hop, parts in zip(steps.hops, steps.hop_masks, strict=True):
            theirs = (sent if hop.index else keys).positions(hop.shard)
            pairs = sum(int(dense_mask(part.bounds, len(mine), len(theirs)).sum()) for part in parts)
            assert pairs == visible_pairs(mask, mine, theirs)
            assert bool(parts) == (pairs > 0 or hop.index == 0)
            launched += [(hop.index, number)] if parts else []
        for level in (0, 1):
            edges[level] |= {*steps.edges[level]}
    assert [steps.last_launch_hop for steps in call.runs if steps.last_launch_hop >= 0] == [max(launched)[0]]
    assert call.runs[max(launched)[1]].last_launch_hop >= 0
    assert call.edges == tuple(tuple(sorted(pairs)) for pairs in edges)


def test_slots_hold_the_longest_run() -> None:
    # a cut at a multiple of 128 tokens makes the first of two runs longer
    cut = plan(Layout.contiguous(800, 2), Mask(), 0, 1, CPU, runs=2)
    assert [run.max_shard_keys for run in cut.runs] == [256, 144] and cut.max_shard_keys == 256


def test_slots_do_not_grow_with_the_world() -> None:
    for world in (2, 4, 8):
        for layout in (Layout.contiguous(64, world), Layout.zigzag(64, world)):
            for mask in (Mask(), CAUSAL):
                steps = [plan(layout, mask, rank, 1, CPU) for rank in range(world)]
                assert {step.kv_slots for step in steps} == {3}
                assert max(step.dkv_slots for step in steps) <= 3
        assert {plan_of(Topology.flat(world), rank=rank).dkv_slots for rank in range(world)} == {2}
    for shape in ((2, 2), (2, 4), (4, 2), (8, 2)):
        steps = [plan_of(Topology.grid(*shape), rank=rank) for rank in range(shape[0] * shape[1])]
        assert {(step.kv_slots, step.dkv_slots) for step in steps} == {(5, 4)}
    assert plan_of(Topology.grid(2, 2), slots=2).kv_slots == 4
    # dK/dV that return early need one more slot
    early = Window(causal=True, left=20, document=10)
    assert plan_of(Topology.flat(4), early, rank=1).dkv_slots == 3
    assert plan_of(Topology.grid(2, 4), early, rank=6).dkv_slots == 5


def test_a_plan_lists_its_device_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for these tensors before they read a cached plan."""
    for runs in (1, 2):
        listed: Any = []
        monkeypatch.setattr(plan_module, "SharedValue", lambda made, x: listed.extend(x) or SharedValue(made, ()))  # noqa: B023
        made = plan(Layout.contiguous(40, 2), Mask(True, (4, 0), used=(30, 10)), 0, 1, CPU, runs=runs)
        each_run = made.runs or (made,)
        bounds = [part.bounds for run in each_run for hop in run.hop_masks for part in hop]
        tensors = [run.send_index for run in each_run]
        tensors += [x for each in bounds for x in (each.lo, each.hi, each.seqused_k)]
        assert made.send_index is not None and any(each.seqused_k is not None for each in bounds)
        assert {*map(id, tensors)} == {*map(id, listed)}


def test_kernels_are_compiled_for_every_kind_of_bounds_of_a_plan() -> None:
    halves, blocks = Layout.contiguous(40, 2), BlockMask(torch.eye(2, dtype=torch.bool), 20)

    def kinds(mask: Mask, layout: Layout = halves, rank: int = 1, runs: int = 1) -> set[tuple[bool, ...]]:
        return {*plan(layout, mask, rank, 1, CPU, runs=runs).mask_kinds}

    full, bounded, padded, sparse = (True,) * 3, (False, True, True), (False, False, True), (True, True, False)
    assert kinds(Mask()) == {full} and kinds(CAUSAL) == {full, bounded}
    assert kinds(CAUSAL, rank=0, runs=2) == {bounded}
    assert kinds(Mask(used=(10, 40))) == {(True, False, True)} and kinds(Mask(True, used=(30, 20))) == {padded, full}
    assert kinds(Mask(blocks=blocks)) == {full}  # the block of a hop is visible as a whole
    assert kinds(Mask(blocks=blocks), Layout.uneven([0, 40])) == {sparse}


def test_plans_are_cached() -> None:
    layout = Layout.zigzag(16, 2)
    first = plan(layout, CAUSAL, 0, 1, CPU)
    for other in (plan(layout, CAUSAL, 1, 1, CPU), plan(layout, CAUSAL, 0, -1, CPU), plan(layout, Mask(), 0, 1, CPU)):
        assert other is not first
    assert plan(Layout.zigzag(16, 2), Mask(causal=True), 0, 1, CPU) is first
