"""Slow ranks and launches that vary: what they cost, told apart and with a lane of the clock for each rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringattn.bench.predict.answers import straggling
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.ring import predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.trouble import Trouble
from ringattn.ring import Mask

FULL, CAUSAL = Mask(), Mask(causal=True)
LINKS = Links(PRESETS["nvlink4"], PRESETS["ib400"])


def test_slow_gpus_and_balanced_shards() -> None:
    call = Call(16384, 8)
    found = straggling(call, H100, LINKS, Trouble({3: 1.5}))
    assert found.slow == pytest.approx(1.5 * found.even, rel=0.05)
    # 7 and two thirds of a GPU do the work of 8
    assert found.balanced == pytest.approx(found.even * 8 / (7 + 1 / 1.5), rel=0.06)


def test_jitter_costs_time_and_is_repeatable() -> None:
    one, same, none = (
        predicted(Call(4096, 8), H100, LINKS, Trouble(jitter=spread))[0].seconds for spread in (0.1, 0.1, 0)
    )
    assert one == same > none


def test_noise_is_lognormal_and_drawn_for_each() -> None:
    noise = Trouble(jitter=0.5, seed=1).noise()
    first, second = np.log(noise(40_001)), np.log(noise(40_001))
    for drawn in (first, second):
        assert drawn.mean() == pytest.approx(0, abs=4 * 0.5 / len(drawn) ** 0.5)
        assert drawn.std() == pytest.approx(0.5, rel=4 / (2 * len(drawn)) ** 0.5)
        assert (np.abs(drawn) > 0.5 * 3).mean() == pytest.approx(0.0027, abs=4 * (0.0027 / len(drawn)) ** 0.5)
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / len(one) ** 0.5


@pytest.mark.parametrize("nodes", [1, 256])
def test_jitter_costs_as_much_per_hop_in_larger_rings(nodes: int) -> None:
    """The mean of what is drawn is above 1, which all lose; what they lose by waiting is less the more hops there are.

    Beside the ring of 1,024 ranks the one of 2,048 has twice the hops, among which a rank's luck evens out.
    """
    spread = 0.1
    lost = {}
    for world in (1024, 2048):
        call = Call(4096, world, nodes=nodes * world // 2048 or 1, kv_heads=8)
        none, some = (predicted(call, H100, LINKS, Trouble(jitter=jitter)) for jitter in (0, spread))
        lost[world] = [(b.seconds - a.seconds) / world for a, b in zip(none, some, strict=True)]
        mean = np.expm1(spread**2 / 2)
        assert all(a * world > mean * (b.seconds - b.waited) for a, b in zip(lost[world], none, strict=True))
    assert all(0.8 * few < many < few for many, few in zip(lost[2048], lost[1024], strict=True))


@pytest.mark.parametrize("nodes", [1, 256])
def test_one_slow_rank_of_thousands(nodes: int) -> None:
    """It needs its own time, and all others can do no worse than to be as slow."""
    call = Call(4096, 2048, nodes=nodes, kv_heads=8)
    every = Trouble(dict.fromkeys(range(call.world), 1.5))
    device = replace(H100, beside=0.0)  # what transfers take of a launch is no more on a slow rank
    even, one, all_ = (predicted(call, device, LINKS, given) for given in (None, Trouble({1500: 1.5}), every))
    for none, slow, slowest in zip(even, one, all_, strict=True):
        assert 1.5 * (none.seconds - none.waited) <= slow.seconds * (1 + 1e-9)
        assert slow.seconds <= slowest.seconds * (1 + 1e-9)


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize(
    ("layout", "mask", "off"),
    # a zigzag's hops are given the rows of the one shape and the keys of the other
    [("contiguous", FULL, 1e-9), ("striped", CAUSAL, 0.005), ("contiguous", CAUSAL, 0.05), ("zigzag", CAUSAL, 0.08)],
)
def test_slow_ranks_are_slow_where_they_are(layout: str, mask: Mask, off: float, nodes: int) -> None:
    """Told apart, or a lane each: of ranks that all differ, who waits for whom says how long all do."""
    call = Call(4096, 20, layout, mask, nodes=nodes)
    each_other = dict(enumerate(1 + np.random.default_rng(0).random(call.world)))
    for slow in ({5: 1.5}, {5: 1.5, 6: 1.4, 18: 3.0}, each_other):
        each, lanes = (predicted(call, H100, LINKS, Trouble(slow), told_apart=apart) for apart in (True, False))
        for one, told in zip(lanes, each, strict=True):
            assert one.seconds == pytest.approx(told.seconds, rel=off)
            waits = sum(sum(track.waits()) for track in told.tracks) / call.world
            assert mask == CAUSAL or sum(one.by_hop) == pytest.approx(waits)


def test_who_sees_little_costs_little_where_it_is_slow() -> None:
    """Rank 3 of contiguous shards computes at 4 of 20 hops: half more of that is less than the last rank takes."""
    call = Call(4096, 20, "contiguous", CAUSAL)
    for none, some in zip(*(predicted(call, H100, LINKS, Trouble(slow)) for slow in ({}, {3: 1.5})), strict=True):
        assert some.seconds < 1.01 * none.seconds


def test_only_the_edges_of_nodes_wait_for_the_slow_link() -> None:
    """In a flat ring over nodes: as told apart, 4 to 17% below what it takes where every rank sends over it."""
    call = Call(2048, 24, "striped", CAUSAL, nodes=3, two_level=False)
    each, lanes = (predicted(call, H100, LINKS, Trouble({3: 1.5}), told_apart=apart) for apart in (True, False))
    assert [one.seconds for one in lanes] == pytest.approx([one.seconds for one in each], rel=0.01)
