"""`Layout.packed`: balance, traffic as in the schedule, brute force, bounds, and invalid arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.bench.common.attention import random_boundaries
from ringattn.comm.topology.topology import Topology
from ringattn.ring.schedule import layout as layout_module
from ringattn.ring.schedule import packed_layout
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import Mask, visible_pairs
from ringattn.ring.schedule.packed_layout import Cost, PackedMask, PackedProblem, Runs, _Stream
from ringattn.ring.schedule.schedule import schedule

from ..support.mask_cases import RingCase, check_case
from ..support.ring_cases import inputs

TOKENS, WORLD = 1 << 20, 64
REFERENCE = random_boundaries(TOKENS, 8192, 0)  # the documents of docs/masks.md


def work(layout: Layout, mask: Mask) -> list[int]:
    every = torch.arange(layout.seqlen)
    return [visible_pairs(mask, layout.positions(rank), every) for rank in range(layout.world)]


def unevenness(values: list[int] | tuple[int, ...]) -> float:
    return max(values) * len(values) / sum(values)


def moved(layout: Layout, mask: Mask, topology: Topology | None = None) -> float:
    """Return the K/V that are sent, relative to a full mask."""
    sent, most = (sum(schedule(layout, each, topology=topology).bytes(1)) for each in (mask, Mask()))
    return sent / most


def boundaries(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def problem(cu_seqlens: list[int], world: int, *masks: PackedMask, **more: Any) -> PackedProblem:
    given = {"nodes": (tuple(range(world)),), "shares": (1,) * world} | more
    return PackedProblem(np.array(cu_seqlens), masks or (PackedMask(-1, 0, 1),), **given)


def cost(case: PackedProblem, layout: Layout) -> Cost:
    return case.cost(packed_layout._runs(case, layout.spans_per_rank))


def named(cu_seqlens: list[int], world: int, speeds: list[int] | None = None) -> list[Layout]:
    seqlen = cu_seqlens[-1]
    plain = [make(seqlen, world) for make in (Layout.contiguous, Layout.zigzag)]
    plain += [Layout.balanced(seqlen, speeds, causal=causal) for causal in (False, True) if speeds]
    striped = [Layout.striped(seqlen, world)] if seqlen <= 1000 else []  # evaluated token by token
    return [*plain, Layout.zigzag(seqlen, world, cu_seqlens), *striped]


@pytest.mark.parametrize("topology", [None, Topology.grid(8, 8)])
@pytest.mark.parametrize("heads", [1, 8])
def test_the_documents_of_the_docs(topology: Topology | None, heads: int) -> None:
    """Contiguous shards have 4.78 times the mean work on one rank, and zigzag per document moves all K/V."""
    layout = Layout.packed(REFERENCE, WORLD, topology=topology, heads_per_kv_head=heads)
    mask = Mask(causal=True, documents=Documents(REFERENCE))
    assert unevenness(work(layout, mask)) <= 1.05
    assert unevenness(layout.lengths) <= 1.10
    assert moved(layout, mask, topology) <= 0.08
    assert torch.cat([layout.positions(rank) for rank in range(WORLD)]).sort().values.equal(torch.arange(TOKENS))


SKEWED: dict[str, Callable[[np.random.Generator], list[int]]] = {
    "one document of half the tokens": lambda rng: [60_000, *(int(n) for n in rng.exponential(1000, 60) + 1)],
    "thousands of short documents": lambda rng: [int(n) for n in rng.exponential(200, 1000) + 1],
    "log-normal": lambda rng: [int(n) for n in rng.lognormal(8, 1.2, 60) + 1],
    "long documents only": lambda rng: [60_000, 50_000, 20_000],
}


@pytest.mark.parametrize("name", SKEWED)
def test_skewed_lengths(name: str) -> None:
    """The work is near its lower bound, the mean, and no named layout has a lower cost."""
    cu_seqlens = boundaries(SKEWED[name](np.random.default_rng(0)))
    layout = Layout.packed(cu_seqlens, 8)
    assert unevenness(work(layout, Mask(causal=True, documents=Documents(cu_seqlens)))) <= 1.05
    assert unevenness(layout.lengths) <= 1.101
    case = problem(cu_seqlens, 8)
    ours, *others = (cost(case, each) for each in (layout, *named(cu_seqlens, 8)))
    assert ours <= min(others)
    assert ours.step >= case.least_step()
    assert others[2].step >= case.least_step(all_see_all=True)


@pytest.mark.parametrize("world", [3, 4, 6])
def test_documents_that_fit_move_nothing(world: int) -> None:
    """Any number of ranks works like a group of ranks per document, without groups."""
    layout = Layout.packed(boundaries([5000] * world + [300] * 2 * world), world)
    mask = Mask(causal=True, documents=Documents(boundaries([5000] * world + [300] * 2 * world)))
    assert {*layout.lengths} == {5600}
    assert moved(layout, mask) == 0


def draw_problems() -> st.SearchStrategy[tuple[list[int], int]]:
    lengths = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
    return st.tuples(lengths.map(boundaries), st.integers(1, 5))


WINDOWS = [(-1, 0), (-1, -1), (3, 0), (2, 1), (0, -1)]


@settings(max_examples=40)
@given(draw_problems(), st.sampled_from(WINDOWS), st.data())
def test_cost_equals_the_schedule_of_any_layout(drawn: Any, window: tuple[int, int], data: st.DataObject) -> None:
    """Pairs equal the mask's, and keys sent equal those of the schedule, on both levels."""
    cu_seqlens, world = drawn
    owners = data.draw(st.lists(st.integers(0, world - 1), min_size=cu_seqlens[-1], max_size=cu_seqlens[-1]))
    layout = Layout.from_positions([torch.tensor(owners).eq(rank).nonzero()[:, 0] for rank in range(world)])
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    topology = Topology.grid(world // (size := data.draw(st.sampled_from(sizes))), size)
    nodes = topology.nodes if topology.two_level else (topology.order,)
    masks = PackedMask(*window, 1)
    case = problem(cu_seqlens, world, masks, nodes=nodes)
    mask = Mask(window == (-1, 0), window if window != (-1, 0) else (-1, -1), Documents(cu_seqlens))
    runs = packed_layout._runs(case, layout.spans_per_rank)
    assert rank_pairs(case, runs) == work(layout, mask)
    shards, ranks, pairs, lengths = case._visibility(runs, masks, np.array(layout.lengths))
    visits = zip(shards.tolist(), ranks.tolist(), strict=True)
    seen: dict[tuple[int, ...], int] = dict(zip(visits, pairs.tolist(), strict=True))
    for hop in product(range(world), repeat=2):
        shard, rank = map(layout.positions, hop)
        assert seen.pop(hop, 0) == visible_pairs(mask, rank, shard)
    assert not seen
    plan = schedule(layout, mask, topology=topology)
    sent = case._moves(shards, *case._distances(shards, ranks), lengths)
    if tuple(lengths.tolist()) == plan.lengths:  # the estimate joins keys that are seen in several pieces
        assert [tuple(keys.tolist()) for keys in sent] == [plan.bytes(1, level=level) for level in (0, 1)]
    assert all(mine >= exact for mine, exact in zip(lengths.tolist(), plan.lengths, strict=True))


@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
@pytest.mark.parametrize("nodes", [{}, {"crosses_nodes": True}, {"nodes": ((0,), (1,))}])
@pytest.mark.parametrize("heads", [1, 4])
def test_cost_by_hand(shares: tuple[int, int], nodes: dict[str, Any], heads: int) -> None:
    """Two ranks exchange their keys under a full mask in three layers, beside work or instead of it."""
    more: dict[str, Any] = {"shares": shares, "heads_per_kv_head": heads}
    case, tokens = problem([0, 2000], 2, PackedMask(-1, -1, 3), **more, **nodes), (1200, 800)
    mean = sum(shares) / 2
    own = [n * n + 256 * 128 for n in tokens]
    other = 1200 * 800 + 256 * (128 + 2000)
    slowest = max((mine + other) * mean / share for mine, share in zip(own, shares, strict=True))
    by_hop = max(mine * mean / share for mine, share in zip(own, shares, strict=True)) + other * mean / min(shares)
    extra = max(n * mean / share for n, share in zip(tokens, shares, strict=True)) - 1000
    compute, transfer = (slowest + by_hop) / 2 + extra * 8192, 1200 * (12288 if nodes else 2560) // heads
    step = max(8 * compute + transfer, 8 * transfer)
    made = cost(case, Layout.uneven(tokens))
    assert (made.excess, made.moved) == (100 if shares == (1, 1) else 250, 3 * 2000)  # 10% above the share
    assert made.step == pytest.approx(3 * step, rel=1e-3)  # integers


@pytest.mark.parametrize("left", [3, 4])
def test_all_keys_count_as_sent_if_most_of_them_are(left: int) -> None:
    """The schedule sends 9 of 16 keys, or all of them if it is 12."""
    layout, window = Layout.contiguous(16, 4), PackedMask(left, 0, 1)
    case = problem([0, 16], 4, window)
    *_, sent = case._visibility(packed_layout._runs(case, layout.spans_per_rank), window, np.array(layout.lengths))
    assert tuple(sent.tolist()) == schedule(layout, Mask(True, (left, 0))).lengths


def test_every_argument_reaches_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: Any = []
    monkeypatch.setattr(layout_module, "packed_spans", lambda problem, *_: problems.append(problem) or [[(0, 10)], []])
    masks = [(Mask(True), 2), (Mask(window=(3, 1)), 1), (Mask(True, (5, 0)), 4)]
    uneven, two_level, flat = Topology(((2, 0), (1,))), Topology(((1, 3), (0, 2))), Topology(((1, 0),))
    Layout.packed([0, 4, 10], 3, masks=masks, topology=uneven, speeds=[1, 0.5, 2], max_tokens=9, heads_per_kv_head=8)
    Layout.packed([0, 10], 4, topology=two_level)
    Layout.packed([0, 10], 2, topology=flat)
    assert [case.boundaries.tolist() for case in problems] == [[0, 4, 10], [0, 10], [0, 10]]
    given = [replace(case, boundaries=np.zeros(0)) for case in problems]  # type: ignore[arg-type]
    layers = PackedMask(-1, 0, 2), PackedMask(3, 1, 1), PackedMask(5, 0, 4)
    assert vars(given[0]) == vars(PackedProblem(given[0].boundaries, layers, ((2, 0, 1),), (2, 1, 4), 9, True, 8))
    causal = PackedMask(-1, 0, 1)
    assert [(each.masks, each.nodes, each.crosses_nodes) for each in given[1:]] == [
        ((causal,), ((1, 3), (0, 2)), False), ((causal,), ((1, 0),), False),
    ]  # fmt: skip


def rank_pairs(case: PackedProblem, runs: Runs) -> list[int]:
    first = case.boundaries[runs.documents]
    pairs = case.pairs(runs.documents, runs.stops - first) - case.pairs(runs.documents, runs.starts - first)
    return [int(pairs[runs.ranks == rank].sum()) for rank in range(len(case.shares))]


@settings(max_examples=40)
@given(draw_problems(), st.sampled_from(WINDOWS), st.data())
def test_every_token_is_on_one_rank_and_no_named_layout_is_better(
    drawn: Any, window: tuple[int, int], data: st.DataObject
) -> None:
    cu_seqlens, world = drawn
    seqlen = cu_seqlens[-1]
    speeds = data.draw(st.lists(st.integers(0, 4), min_size=world, max_size=world).filter(any))
    ranks = sum(map(bool, speeds))
    most = data.draw(st.none() | st.integers(-(-seqlen // ranks), seqlen))
    mask = Mask(window == (-1, 0), window if window != (-1, 0) else (-1, -1))
    layout = Layout.packed(cu_seqlens, world, masks=[(mask, 2)], speeds=speeds, max_tokens=most)
    assert layout.world == world
    assert sorted(p for rank in range(world) for p in layout.positions(rank).tolist()) == [*range(seqlen)]
    assert all(
        length <= (seqlen if most is None else most) * (speed > 0)
        for length, speed in zip(layout.lengths, speeds, strict=True)
    )
    case = problem(cu_seqlens, world, PackedMask(*window, 2), shares=tuple(speeds), max_tokens=most)
    if all(speeds):
        assert all(cost(case, layout) <= cost(case, other) for other in named(cu_seqlens, world, speeds))


@settings(max_examples=40)
@given(draw_problems().filter(lambda drawn: drawn[0][-1] <= 9 and drawn[1] <= 3))
def test_work_is_near_the_best_of_brute_force(drawn: Any) -> None:
    """Without transfers, the slowest rank has at most a token's pairs more than the best of all layouts needs."""
    cu_seqlens, world = drawn
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PAIRS_PER_LAUNCH", "PAIRS_PER_EXTRA_TOKEN"):
            patch.setattr(packed_layout, name, 0)
        patch.setattr(packed_layout, "PAIRS_PER_TOKEN", (0, 0))
        layout = Layout.packed(cu_seqlens, world)
    mask = Mask(causal=True, documents=Documents(cu_seqlens))
    keys = [position + 1 - start for start, end in pairwise(cu_seqlens) for position in range(start, end)]
    most = int(problem(cu_seqlens, world).limits[0])
    best = min(
        max(sum(keys[p] for p in range(len(keys)) if owners[p] == rank) for rank in range(world))
        for owners in product(range(world), repeat=len(keys))
        if max(map(owners.count, range(world))) <= most
    )
    assert max(work(layout, mask)) <= best + max(keys)


def test_windows_and_full_layers_share_a_layout() -> None:
    cu_seqlens = boundaries([30_000, 9000, 4000, 2000, 2000, 1000])
    windowed, full = Mask(causal=True, window=(1023, 0)), Mask(causal=True)
    layout = Layout.packed(cu_seqlens, 4, masks=[(windowed, 5), (full, 1)])
    totals = [0] * 4
    for mask, layers in ((windowed, 5), (full, 1)):
        pairs = work(layout, Mask(True, mask.window, Documents(cu_seqlens)))
        totals = [total + layers * mine for total, mine in zip(totals, pairs, strict=True)]
    assert unevenness(totals) <= 1.05


def test_a_slow_rank_gets_less() -> None:
    cu_seqlens = boundaries([500, 700] * 500)
    layout = Layout.packed(cu_seqlens, 8, speeds=[1, 1, 0.5, 1, 1, 0, 1, 1])
    pairs = work(layout, Mask(causal=True, documents=Documents(cu_seqlens)))
    assert pairs[5] == layout.lengths[5] == 0
    assert pairs[2] / pairs[0] == pytest.approx(0.5, rel=0.05)
    assert max(pairs) * 6.5 / sum(pairs) <= 1.05


@pytest.mark.parametrize("slow", [[1 / 1024], [0.01, 0.011], [0.03]])
def test_a_very_slow_rank_stays_empty_if_that_is_cheaper(slow: list[float]) -> None:
    """Use a rank on which one token takes longer than its share of the work on the others."""
    layout = Layout.packed([0, 5000, 7000, 10_000], 5, speeds=[*slow, *[1] * (5 - len(slow))])
    assert layout.lengths[: len(slow)] == (0,) * len(slow)
    assert unevenness(layout.lengths[len(slow) :]) <= 1.101


def test_neighbours_in_the_topology_share_documents() -> None:
    """The ring order of the topology counts, not the rank numbers."""
    order = (3, 0, 2, 1)
    plain, turned = (
        Layout.packed([0, 30_000, 31_000, 60_000], 4, topology=each) for each in (None, Topology((order,)))
    )
    assert [plain.spans(place) for place in range(4)] == [turned.spans(rank) for rank in order]


def test_every_machine_computes_the_same_layout() -> None:
    layout = Layout.packed(REFERENCE, WORLD, speeds=[1.1, *[0.7] * (WORLD - 1)], topology=Topology.grid(8, 8))
    assert repr(layout) == "<Layout of 1048576 tokens over 64 ranks, spans 16bd1c6dd8679e09>"


LAYERS = [(Mask(), 2), (Mask(True, (511, 0)), 1)]
MIXED = [473, 121, 1538, 101, 74, 872, 2918, 2735, 3083, 739, 240, 960]


@pytest.mark.parametrize(
    ("documents", "call", "lengths"),
    [
        ([94, 2, 571, 668, 2], {"speeds": [0.25, 1, 0.25, 0.01], "topology": Topology.grid(2, 2)}, (223, 891, 223, 0)),
        (MIXED, {"masks": LAYERS}, (2302, 2315, 2307, 2264, 2307, 2359)),
        ([4244, 8034, 1526, 6435], {"speeds": [0.5, 0.25, 1, 0.25], "heads_per_kv_head": 1}, (5248, 2012, 10468, 2511)),
    ],
)
def test_every_machine_computes_the_same_layout_of_few_documents(
    documents: list[int], call: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Leave a slow rank empty, share one layout between two masks, and trim ranks with too many tokens."""
    assert Layout.packed(boundaries(documents), len(lengths), **call).lengths == lengths


@pytest.mark.parametrize("world", [2, 4])
def test_attention_in_a_packed_layout_is_exact(world: int) -> None:
    cu_seqlens = [0, 7, 31, 33, 56]
    check_case(RingCase(Layout.packed(cu_seqlens, world), inputs(56), {"causal": True, "cu_seqlens": cu_seqlens}))


MASK = Mask(causal=True)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens": [0, 5, 3]}, r"cu_seqlens\[2\] is 3"),
    ({"cu_seqlens": [0, 1 << 29], "masks": [(MASK, 8)]}, r"cu_seqlens and masks have more than 2\^60 pairs"),
    ({"world": 0}, "world is 0"),
    ({"speeds": [1, 1]}, "speeds has 2 entries: it must have one per rank, 3"),
    ({"speeds": [0, 0, 0]}, "speeds"),
    ({"topology": Topology.flat(4)}, "topology has 4 ranks: it must be a Topology of 3 ranks"),
    ({"topology": "flat"}, "topology is 'flat': it must be a Topology of 3 ranks"),
    ({"speeds": [1e-19, 1, 1]}, r"speeds\[0\] is 1e-19: it must be 0 or at least 1/1024"),
    ({"max_tokens": 3}, "max_tokens is 3: .* It must be at least 4"),
    ({"max_tokens": 4, "speeds": [1, 0, 1]}, "max_tokens is 4: 2 ranks .* It must be at least 5"),
    ({"max_tokens": 2.5}, "max_tokens is 2.5"),
    ({"heads_per_kv_head": 0}, "heads_per_kv_head is 0"),
    ({"heads_per_kv_head": 1.5}, "heads_per_kv_head is 1.5"),
    ({"masks": []}, "masks is empty"),
    ({"masks": [MASK]}, r"masks\[0\]"),
    ({"masks": [(MASK, 0)]}, r"masks\[0\]\[1\] is 0"),
    ({"masks": [(MASK, 1), (Mask(causal=True, prefix=3), 1)]}, r"masks\[1\]"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"cu_seqlens": [0, 4, 10], "world": 3}
    with pytest.raises(ValueError, match=message):
        Layout.packed(**(given | arguments))


@pytest.mark.nightly
@pytest.mark.idle
@pytest.mark.parametrize(
    ("world", "documents", "nodes", "seconds"), [(64, 500, 1, 0.1), (1024, 5000, 128, 1.0), (4096, 20000, 512, 5.0)]
)
def test_time_to_build(world: int, documents: int, nodes: int, seconds: float) -> None:
    """Documents have an exponential distribution with mean 8k."""
    lengths = (np.random.default_rng(0).exponential(8192, documents) + 1).astype(int).tolist()
    topology, times = Topology.grid(nodes, world // nodes), []
    for shift in range(3):
        start = time.process_time()
        Layout.packed(boundaries([*lengths[shift:], *lengths[:shift]]), world, topology=topology)
        times.append(time.process_time() - start)
    assert min(times) <= seconds


def test_only_cuts_near_the_end_of_a_document_move_to_it() -> None:
    stream = _Stream(problem([0, 10, 30], 2), np.array([0, 1]), False)
    assert stream.snap(np.array([3, 7, 8, 12, 13, 27, 28]), 2).tolist() == [3, 7, 10, 10, 13, 27, 30]
