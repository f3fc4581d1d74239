"""What joins two places, and which NIC is nearest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringattn.comm.topology.nvml import Nic, Place, link_between, nearest_nics, network, pairs_by_link, shared

from ..support.clusters import cpus, hgx, meshed


def test_two_ranks_of_one_gpu() -> None:
    place = hgx("a")[0]
    assert link_between(place, place).kind == "one gpu"


def test_one_end_of_a_link_is_enough() -> None:
    a, b = meshed("a", {(0, 1): 2}, 2)
    assert link_between(a, replace(b, nvlinks=())) == link_between(replace(a, nvlinks=()), b) == link_between(a, b)
    assert link_between(a, b).text == "NVLink 2 x2"


def test_pairs_by_link() -> None:
    """Of two hosts, ranks of one GPU counted once, those of a CPU not at all."""
    places = [*hgx("a"), *meshed("b", {(0, 1): 2}, 3)]
    pairs = pairs_by_link([*places, places[0], *cpus("c", 2)])
    assert pairs.pop("NVLink 4 x18 switch") == 28 and pairs.pop("NVLink 2 x2") == 1
    assert sum(pairs.values()) == 2 and all(text.startswith("PCIe") for text in pairs)


def test_nearest_nics() -> None:
    places = hgx("a")
    assert [nic and nic.name for nic in nearest_nics(places)] == [f"mlx5_{i}" for i in range(8)]
    blind = [replace(place, pcie=()) for place in places]  # dealt out, where nothing is known
    assert len({nic for nic in nearest_nics(blind)}) == 8
    assert nearest_nics([replace(places[0], nics=())]) == [None]
    beside, far = Nic("eno1", 25, places[0].pcie), Nic("mlx5_9", 400)
    assert nearest_nics([replace(places[0], nics=(beside, far))]) == [far]
    only_slow = replace(places[0], nics=(Nic("eth0"),))
    assert nearest_nics([only_slow]) == [Nic("eth0")]


@pytest.mark.parametrize(
    ("nvlinks", "rate"),
    [((4, 18), 380), ((3, 12), 253.3), ((5, 18), 760), ((2, 6), 126.7), ((1, 4), 67.6)],
)
def test_bandwidth_of_nvlink_by_generation(nvlinks: tuple[int, int], rate: float) -> None:
    version, links = nvlinks
    a, b = (
        replace(place, nvlinks=(replace(place.nvlinks[0], links=links, version=version),)) for place in hgx("a")[:2]
    )
    assert link_between(a, b).gigabytes_per_second == pytest.approx(rate, abs=0.1)


def test_the_weaker_end_decides() -> None:
    a, b = hgx("a")[:2]
    weak = replace(b, nvlinks=(replace(b.nvlinks[0], links=9),))
    assert link_between(a, weak).gigabytes_per_second == 190
    assert link_between(a, replace(b, nvlinks=(replace(b.nvlinks[0], version=None),))).gigabytes_per_second == 380
    plain_a, plain_b = (replace(place, nvlinks=()) for place in (a, b))
    assert link_between(plain_a, replace(plain_b, pcie_gigabytes=16)).gigabytes_per_second == 13.125
    assert link_between(plain_a, replace(plain_b, pcie_gigabytes=None)).gigabytes_per_second is None


def test_ways_through_pcie() -> None:
    gpus = meshed("a", {}, 8)
    ways = [link_between(gpus[0], other) for other in gpus[1:]]
    assert [way.text for way in ways] == [
        "PCIe, one switch",
        *["PCIe, inside a socket"] * 2,
        *["PCIe, between sockets"] * 4,
    ]
    assert [way.distance for way in ways] == [0, 2, 2, 3, 3, 3, 3]
    assert link_between(gpus[0], replace(gpus[1], pcie=())).text == "PCIe, unknown path"


def test_between_hosts() -> None:
    a, b = hgx("a")[0], hgx("b")[0]
    assert link_between(a, b).kind == "network"
    assert link_between(cpus("a", 1)[0], cpus("b", 1)[0]).kind == "network"
    assert link_between(replace(a, fabric="f"), replace(b, fabric="f")).kind == "nvlink"
    assert link_between(replace(a, fabric="f"), replace(b, fabric="g")).kind == "network"


def test_rate_of_a_network() -> None:
    fast, slow = Nic("mlx5_0", 400), Nic("mlx5_1", 200)
    assert network([(fast, 1), (fast, 1)]).gigabytes_per_second == 47
    assert network([(fast, 1), (slow, 1)])[:3] == ("network", "mlx5_0 - mlx5_1", 23.5)
    assert network([(fast, 4), (slow, 1)]).gigabytes_per_second == 11.75
    assert network([(fast, 1), (None, 1)])[1:3] == ("mlx5_0 - unknown NIC", None)


def test_shared_ancestors() -> None:
    assert shared("abc", "abd") == 2
    assert shared("abc", "") == 0


def test_places_as_json() -> None:
    for place in (*hgx("a"), *meshed("b", {(0, 1): 2}, 2), *cpus("c", 1)):
        assert Place.from_json(place.to_json()) == place
    assert Place.from_json({"host": "a"}) == Place("a")
