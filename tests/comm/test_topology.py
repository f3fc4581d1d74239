"""The order of the ring: physical machines as data, against brute force and against what people know of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.comm.topology.nvml import DeviceInfo, Link, NvLink, link_between
from ringattn.comm.topology.topology import Topology, ring_topology

from ..support.clusters import DGX1, cpus, hgx, meshed


def rates(ring: Topology, level: int = 0) -> list[float | None]:
    return [
        rate if (rate := edge.link.gigabytes_per_second) is None else round(rate, 1)
        for edge in ring.edges
        if edge.level == level
    ]


def around(ring: Topology) -> set[frozenset[int]]:
    return {frozenset(edge[:2]) for edge in ring.edges}


def test_eight_gpus_on_two_nodes() -> None:
    ring = ring_topology(hgx("a")[:4] + hgx("b")[:4])
    assert ring.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ring.two_level
    assert rates(ring) == [380] * 8
    assert rates(ring, level=1) == [47] * 8
    assert [edge[:2] for edge in ring.edges if edge.level == 1] == [
        (0, 4), (4, 0), (1, 5), (5, 1), (2, 6), (6, 2), (3, 7), (7, 3)
    ]  # fmt: skip


def test_description() -> None:
    text = ring_topology(hgx("a")[:2] + hgx("b")[:2]).describe()
    assert (
        text
        == """\
two-level ring of 4 ranks, 2 nodes of 2; -N-> expects N GB/s per direction
  node 0, a  0 -380-> 1 -380-> 0   NVLink 4 x18 switch
  node 1, b  2 -380-> 3 -380-> 2   NVLink 4 x18 switch
  rail 0     0 -47-> 2 -47-> 0   mlx5_0
  rail 1     1 -47-> 3 -47-> 1   mlx5_1
  slowest inside: 380 GB/s, 0 -> 1, NVLink 4 x18 switch
  slowest between nodes: 47 GB/s, 0 -> 2, mlx5_0"""
    )
    assert "0 -?-> 1 -?-> 0   unknown" in Topology.flat(2).describe()
    assert (
        Topology.flat(1).describe() == "flat ring of 1 rank, 1 node of 1; -N-> expects N GB/s per direction\n  ring  0"
    )


def test_a_thousand_gpus_fast() -> None:
    devices = [device for node in range(128) for device in hgx(f"host{node}")]
    begun = time.process_time()
    ring = ring_topology(devices)
    assert len(ring.edges) == 2048
    assert len(ring.describe().splitlines()) < 40
    assert time.process_time() - begun < 2
    assert ring.nodes == Topology.grid(128, 8).nodes


def test_nodes_whose_ranks_lie_otherwise_leave_by_the_same_nic() -> None:
    ring = ring_topology(hgx("a") + hgx("b", [3, 7, 5, 1, 0, 2, 6, 4]))
    for rail in zip(*ring.nodes, strict=True):
        assert len({ring.nics[rank].name for rank in rail if ring.nics[rank]}) == 1  # type: ignore[union-attr]


def test_nodes_with_other_gpus_are_turned_so_that_most_rails_meet() -> None:
    ring = ring_topology(hgx("a", [0, 1, 2, 3]) + hgx("b", [1, 2, 3, 4]))
    assert ring.nodes == ((0, 1, 2, 3), (7, 4, 5, 6))


def test_gpus_that_share_a_nic_share_its_bandwidth() -> None:
    ring = ring_topology(hgx("a", adapters=4) + hgx("b", adapters=4))
    assert rates(ring, level=1) == [23.5] * 16
    # alone on the way out, a flat ring has it all: one more host makes the nodes uneven
    flat = ring_topology(hgx("a", adapters=4) + hgx("b", adapters=4)[:3])
    assert not flat.two_level
    assert sorted(rate for rate in rates(flat) if rate)[:2] == [47, 47]


def test_dgx1_runs_on_double_links_alone() -> None:
    ring = ring_topology(meshed("dgx", DGX1, 8))
    assert ring.order == (0, 3, 2, 1, 5, 6, 7, 4)
    assert rates(ring) == [42.2] * 8
    assert {edge.link.text for edge in ring.edges} == {"NVLink 2 x2"}


def test_bridged_pairs_are_neighbours() -> None:
    pairs = {(0, 2): 4, (1, 3): 4}  # bridges join GPUs that are not under one switch
    ring = ring_topology(meshed("pairs", pairs, 4, version=3))
    assert {frozenset({0, 2}), frozenset({1, 3})} < around(ring)
    assert sorted(rates(ring)) == [13.1, 13.1, 84.4, 84.4]  # type: ignore[type-var]
    slow = {edge.link.text for edge in ring.edges if edge.link.kind == "pcie"}
    assert slow == {"PCIe, one switch"}  # of the ways between the pairs, the short one


def test_pcie_alone_follows_the_tree() -> None:
    shuffled = [5, 0, 3, 6, 1, 4, 7, 2]
    devices = meshed("box", {}, 8)
    ring = ring_topology([devices[i] for i in shuffled])
    assert [shuffled[rank] for rank in ring.order] == [*range(8)]
    assert rates(ring) == [13.1] * 8
    assert [edge.link.text for edge in ring.edges].count("PCIe, between sockets") == 2


def test_two_cliques_of_nvlink_stay_together() -> None:
    quads = {(a, b): 2 for a, b in permutations([0, 2, 5, 7], 2)} | {
        (a, b): 2 for a, b in permutations([1, 3, 4, 6], 2)
    }
    ring = ring_topology(meshed("quads", quads, 8))
    assert [edge.link.kind for edge in ring.edges].count("nvlink") == 6


def test_uneven_hosts_make_a_flat_ring() -> None:
    ring = ring_topology(hgx("a")[:3] + hgx("b")[:2] + cpus("c", 1))
    assert ring.nodes == ((0, 1, 2), (3, 4), (5,))
    assert not ring.two_level
    assert [edge[:3] for edge in ring.edges] == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0), (5, 0, 0)]
    assert rates(ring) == [380, 380, 47, 380, None, None]
    assert ring.slowest(0) == ring.edges[2]
    assert "3 nodes of 1 to 3" in ring.describe()


def test_a_fabric_of_many_hosts_is_one_node() -> None:
    trays = [replace(device, fabric="c/1") for host in range(18) for device in hgx(f"tray{host}")[:4]]
    ring = ring_topology([replace(device, nvlinks=(NvLink("switch", 18, 5),)) for device in trays])
    assert ring.nodes == (tuple(range(72)),)
    assert rates(ring) == [760] * 72


@st.composite
def clusters(draw: st.DrawFn) -> list[DeviceInfo]:
    """Hosts of several kinds, uneven or not, their GPUs in any order."""
    kinds = {
        "hgx": lambda host: hgx(host),
        "mesh": lambda host: meshed(host, DGX1, 8),
        "pairs": lambda host: meshed(host, {(0, 1): 4, (2, 3): 4}, 4, version=3),
        "pcie": lambda host: meshed(host, {}, 8),
        "cpu": lambda host: cpus(host, 3),
    }
    devices: list[DeviceInfo] = []
    for number in range(draw(st.integers(1, 4))):
        there = kinds[draw(st.sampled_from(sorted(kinds)))](f"host{number}")
        devices += draw(st.permutations(there))[: draw(st.integers(1, len(there)))]
    return devices


@settings(max_examples=60)
@given(clusters(), st.data())
def test_properties_of_every_order(devices: list[DeviceInfo], data: st.DataObject) -> None:
    ring = ring_topology(devices)
    assert sorted(ring.order) == [*range(len(devices))]
    for node in ring.nodes:  # contiguous, and all of it
        assert {devices[rank].host for rank in node} == {devices[node[0]].host}
    assert len(ring.nodes) == len({device.host for device in devices})
    assert ring_topology(list(devices)).nodes == ring.nodes  # the same on every rank
    assert json.loads(json.dumps(ring.to_json()))["nodes"] == [list(node) for node in ring.nodes]
    again = Topology.from_json(json.dumps(ring.to_json()))
    assert (again, again.devices, again.edges) == (ring, ring.devices, ring.edges)
    assert Topology.from_json({"devices": ring.to_json()["devices"]}) == ring


MACHINES = {
    "DGX-1": meshed("a", DGX1, 8),
    "five of a DGX-1": [meshed("a", DGX1, 8)[gpu] for gpu in (4, 6, 1, 5, 0)],
    "bridges between sockets": meshed("a", {(0, 3): 4, (1, 4): 4, (2, 5): 4}, 6, version=3),
}


@pytest.mark.parametrize("devices", MACHINES.values(), ids=MACHINES)
def test_no_cycle_has_a_better_slowest_link(devices: list[DeviceInfo]) -> None:
    def slowest(order: Sequence[int]) -> object:
        around = zip(order, [*order[1:], order[0]], strict=True)
        return max(link_between(devices[a], devices[b]).rank for a, b in around)

    every = ([0, *rest] for rest in permutations(range(1, len(devices))))
    assert slowest(ring_topology(devices).order) == min(map(slowest, every))  # type: ignore[type-var]


@settings(max_examples=60)
@given(clusters(), st.data())
def test_ranks_in_another_order_make_the_same_ring_of_gpus(devices: list[DeviceInfo], data: st.DataObject) -> None:
    """Hosts follow their lowest ranks; inside of each, the GPUs' links decide and not the ranks' numbers."""
    hosts = list(dict.fromkeys(device.host for device in devices))
    by_host = [[device for device in devices if device.host == host] for host in hosts]
    mixed = [device for there in by_host for device in data.draw(st.permutations(there))]
    straight = [device for there in by_host for device in there]
    rings = [[given[rank] for rank in ring_topology(given).order] for given in (straight, mixed)]
    assert rings[0] == rings[1]


def test_orders_without_places() -> None:
    assert len({Topology([[1, 0]]), Topology(((1, 0),))}) == 1  # type: ignore[arg-type]  # lists do too
    ring = Topology.from_json('{"nodes": [[3, 1], [0, 2]]}')
    assert ring.nodes == ((3, 1), (0, 2))
    assert ring.edges[0].link == Link("unknown", "unknown", None)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("[]", "a topology is"),
        ("{", "Expecting"),
        ('{"nodes": [[0, 2]]}', "every rank from 0 on exactly once"),
        ('{"nodes": [0, 1]}', "lists of ranks"),
        ('{"nodes": [["0"]]}', "lists of ranks"),
        ('{"devices": [{"gpu": "x"}]}', "a device is .* takes 'host'"),
        ('{"devices": [{"host": "a", "nvlinks": [{"links": 3}]}]}', "a NVLink is"),
        ('{"devices": [{"host": "a", "pcie": 3}]}', "pcie is 3: it takes a list"),
        ('{"devices": [{"host": "a", "nvlinks": null}]}', "nvlinks is None: it takes a list"),
        ('{"devices": [{"host": "a", "nics": [{"name": "x", "speed": 3}]}]}', "a NIC is"),
    ],
)
def test_json_that_is_no_topology(data: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Topology.from_json(data)


def test_nvlinks_of_an_unknown_generation_come_first_too() -> None:
    devices = meshed("a", {(0, 2): 4, (1, 3): 4}, 4)
    blind = [replace(one, nvlinks=tuple(replace(link, version=None) for link in one.nvlinks)) for one in devices]
    assert [edge.link.kind for edge in ring_topology(blind).edges].count("nvlink") == 2


def test_devices_of_no_world_or_of_another() -> None:
    with pytest.raises(ValueError, match="devices is empty"):
        ring_topology([])
    with pytest.raises(ValueError, match="devices has 2 entries for 3 ranks"):
        Topology(((0, 1, 2),), tuple(cpus("a", 2)))
