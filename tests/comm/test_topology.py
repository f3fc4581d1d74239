"""Ring order for machines described as data, against brute force and against known good orders."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.comm import LocalWorld
from ringattn.comm.control import open_control
from ringattn.comm.topology import topology
from ringattn.comm.topology.nvml import DeviceInfo, Link, Nic
from ringattn.comm.topology.topology import Topology, _find_cycle, discover_topology, ring_topology

from ..support.clusters import DGX1, cpus, hgx, nvlink_mesh_host


def rates(ring: Topology, level: int = 0) -> list[float | None]:
    return [
        rate if (rate := edge.link.gigabytes_per_second) is None else round(rate, 1)
        for edge in ring.edges
        if edge.level == level
    ]


def test_topology_is_described_in_text() -> None:
    text = ring_topology(hgx("a/1f0c")[:2] + hgx("b/77d2")[:2]).describe()  # the hosts' names and boot ids
    assert (
        text
        == """\
two-level ring of 4 ranks, 2 nodes of 2; -N->: expected GB/s per direction
  node 0, a  0 -380-> 1 -380-> 0   NVLink 4 x18 switch
  node 1, b  2 -380-> 3 -380-> 2   NVLink 4 x18 switch
  rail 0     0 -47-> 2 -47-> 0   mlx5_0
  rail 1     1 -47-> 3 -47-> 1   mlx5_1
  slowest inside: 380 GB/s, 0 -> 1, NVLink 4 x18 switch
  slowest between nodes: 47 GB/s, 0 -> 2, mlx5_0"""
    )
    assert "0 -?-> 1 -?-> 0   unknown" in Topology.flat(2).describe()
    alone = "flat ring of 1 rank, 1 node of 1; -N->: expected GB/s per direction\n  ring  0"
    assert Topology.flat(1).describe() == alone
    edges = " ".join(["0", *(f"-?-> {rank}" for rank in range(1, 13)), "…", *(f"-?-> {rank}" for rank in (18, 19, 0))])
    assert f"ring  {edges}   unknown" in Topology.flat(20).describe()
    racks = [replace(hgx(host)[0], fabric=f"rack {number // 2}") for number, host in enumerate("abcd")]
    assert "\n  node 0  0 -380-> 1 " in ring_topology(racks).describe(), "a node of several hosts has no host's name"


def test_1024_gpus_are_ordered_in_2_seconds() -> None:
    devices = [device for node in range(128) for device in hgx(f"host{node}")]
    begun = time.process_time()
    ring = ring_topology(devices)
    assert len(ring.edges) == 2048
    assert len(ring.describe().splitlines()) < 40
    assert time.process_time() - begun < 2
    assert ring.nodes == Topology.grid(128, 8).nodes


def test_gpus_that_share_a_nic_share_its_bandwidth() -> None:
    ring = ring_topology(hgx("a", adapters=4) + hgx("b", adapters=4))
    assert rates(ring, level=1) == [23.5] * 16
    # Uneven nodes make a flat ring, whose only outgoing edge has the whole NIC.
    flat = ring_topology(hgx("a", adapters=4) + hgx("b", adapters=4)[:3])
    assert not flat.two_level
    assert sorted(rate for rate in rates(flat) if rate)[:2] == [47, 47]


def test_ranks_of_an_nvlink_fabric_use_the_nics_of_their_own_host() -> None:
    hosts = [replace(hgx(host)[0], fabric="c/1", nics=(Nic(f"of {host}", 400),)) for host in ("a", "b")]
    assert [nic and nic.name for nic in ring_topology(hosts).nics] == ["of a", "of b"]


def test_uneven_hosts_make_a_flat_ring() -> None:
    ring = ring_topology(hgx("a")[:3] + hgx("b")[:2] + cpus("c", 1))
    assert ring.nodes == ((0, 1, 2), (3, 4), (5,))
    assert not ring.two_level
    assert [edge[:3] for edge in ring.edges] == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0), (5, 0, 0)]
    assert rates(ring) == [380, 380, 47, 380, None, None]
    assert ring.slowest(0) == ring.edges[2]
    assert "3 nodes of 1 to 3" in ring.describe()


@st.composite
def clusters(draw: st.DrawFn) -> list[DeviceInfo]:
    """Draw hosts of several kinds, even or uneven, with their GPUs in any order."""
    kinds = {
        "hgx": lambda host: hgx(host),
        "mesh": lambda host: nvlink_mesh_host(host, DGX1, 8),
        "pairs": lambda host: nvlink_mesh_host(host, {(0, 1): 4, (2, 3): 4}, 4, version=3),
        "pcie": lambda host: nvlink_mesh_host(host, {}, 8),
        "cpu": lambda host: cpus(host, 3),
    }
    devices: list[DeviceInfo] = []
    for number in range(draw(st.integers(1, 4))):
        host_devices = kinds[draw(st.sampled_from(sorted(kinds)))](f"host{number}")
        devices += draw(st.permutations(host_devices))[: draw(st.integers(1, len(host_devices)))]
    return devices


@settings(max_examples=60)
@given(clusters(), st.data())
def test_every_rank_order_keeps_nodes_and_json(devices: list[DeviceInfo], data: st.DataObject) -> None:
    ring = ring_topology(devices)
    assert sorted(ring.order) == [*range(len(devices))]
    for node in ring.nodes:  # each node holds the ranks of one host
        assert {devices[rank].host for rank in node} == {devices[node[0]].host}
    assert len(ring.nodes) == len({device.host for device in devices})
    assert ring_topology(list(devices)).nodes == ring.nodes  # the same on every rank
    parsed = json.loads(json.dumps(ring.to_json()))
    assert parsed["nodes"] == [list(node) for node in ring.nodes]
    assert [DeviceInfo.from_json(device) for device in parsed["devices"]] == devices


@settings(max_examples=60)
@given(clusters(), st.data())
def test_ranks_in_another_order_make_the_same_ring_of_gpus(devices: list[DeviceInfo], data: st.DataObject) -> None:
    hosts = list(dict.fromkeys(device.host for device in devices))
    by_host = [[device for device in devices if device.host == host] for host in hosts]
    mixed = [device for there in by_host for device in data.draw(st.permutations(there))]
    straight = [device for there in by_host for device in there]
    rings = [[topology[rank] for rank in ring_topology(topology).order] for topology in (straight, mixed)]
    assert rings[0] == rings[1]


QUADS = {pair: 2 for quad in ([0, 2, 5, 7], [1, 3, 4, 6]) for pair in combinations(quad, 2)}
PAIRS = nvlink_mesh_host("a", {(0, 2): 4, (1, 3): 4}, 4, version=3)  # bridges connect GPUs under different switches
BLIND = [replace(gpu, nvlinks=tuple(replace(link, version=None) for link in gpu.nvlinks)) for gpu in PAIRS]
BOX = nvlink_mesh_host("a", {}, 8)
SHUFFLED = [BOX[i] for i in (5, 0, 3, 6, 1, 4, 7, 2)]
TRAYS = [replace(device, fabric="c/1") for host in range(18) for device in hgx(f"tray{host}")[:4]]


@pytest.mark.parametrize(
    ("devices", "order", "links"),
    [
        (nvlink_mesh_host("a", DGX1, 8), (0, 3, 2, 1, 5, 6, 7, 4), {"NVLink 2 x2": 8}),
        (nvlink_mesh_host("a", QUADS, 8), (0, 1, 3, 4, 6, 7, 2, 5), {"NVLink 2 x2": 6, "PCIe, one switch": 1}),
        (PAIRS, (0, 1, 3, 2), {"NVLink 3 x4": 2, "PCIe, one switch": 2}),
        (BLIND, (0, 1, 3, 2), {"NVLink ? x4": 2}),  # an unknown NVLink generation still beats PCIe
        (SHUFFLED, (1, 4, 7, 2, 5, 0, 3, 6), {"PCIe, between sockets": 2}),  # the order follows the PCIe tree
        ([replace(gpu, pcie=()) for gpu in SHUFFLED], (1, 4, 7, 2, 5, 0, 3, 6), {"PCIe, unknown path": 8}),
        (TRAYS, tuple(range(72)), {"NVLink 4 x18 switch": 72}),  # an NVLink fabric across hosts is one node
        ([TRAYS[i] for i in (0, 4, 5, 1)], (0, 3, 1, 2), {"NVLink 4 x18 switch": 4}),  # its hosts follow in turn
    ],
    ids=["DGX-1", "cliques", "bridges", "unknown generation", "PCIe", "unknown paths", "fabric", "fabric, mixed"],
)
def test_order_inside_a_node(devices: list[DeviceInfo], order: tuple[int, ...], links: dict[str, int]) -> None:
    ring = ring_topology(devices)
    assert ring.nodes == (order,)
    assert Counter(links) <= Counter(edge.link.text for edge in ring.edges)


@pytest.mark.parametrize(
    ("there", "node"),
    [([3, 7, 5, 1, 0, 2, 6, 4], (12, 11, 13, 8, 15, 10, 14, 9)), ([1, 2, 3, 4, 5, 6, 7, 0], (15, *range(8, 15)))],
)
def test_rails_leave_every_node_by_the_same_nic(there: list[int], node: tuple[int, ...]) -> None:
    ring = ring_topology(hgx("a") + hgx("b", there))
    assert ring.nodes[1] == node
    for rail in zip(*ring.nodes, strict=True):
        assert len({ring.nics[rank].name for rank in rail if ring.nics[rank]}) == 1  # type: ignore[union-attr]
    nics = tuple(Nic(name, 400) for name in "xy")
    apart = ring_topology([replace(gpu, nics=nics) for gpu in hgx("a", [3, 0])])
    assert [nic and nic.name for nic in apart.nics] == ["y", "x"]  # in the order of PCIe, not of the ranks
    shifted = ring_topology(hgx("a", [0, 1, 2, 3]) + hgx("b", [1, 2, 3, 4]))
    assert shifted.nodes[1] == (7, 4, 5, 6)  # rails share a NIC where possible


@settings(max_examples=60)
@given(st.integers(4, 6), st.data())
def test_a_cycle_has_the_fewest_of_the_worst_links(count: int, data: st.DataObject) -> None:
    pairs = {pair: data.draw(st.integers(0, 3)) for pair in combinations(range(count), 2)}
    grades = tuple(tuple(pairs.get((min(a, b), max(a, b)), 0) for b in range(count)) for a in range(count))

    def worst_first(order: Sequence[int]) -> list[int]:
        return sorted((grades[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True)), reverse=True)

    cycle = _find_cycle(grades)
    assert cycle[0] == 0 and sorted(cycle) == [*range(count)]
    assert worst_first(cycle) == min(worst_first([0, *rest]) for rest in permutations(range(1, count)))


def test_large_nodes_are_ordered_greedily_by_the_best_next_link() -> None:
    """Order too many ranks for all cycles greedily. On a line of switches each rank's neighbour comes next."""
    place = [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    grades = tuple(tuple(abs(place[a] - place[b]) for b in range(10)) for a in range(10))
    assert [place[rank] for rank in _find_cycle(grades)] == [*range(10)]


def test_every_rank_gets_the_order_that_rank_0_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in (PAIRS, SHUFFLED[:4] + hgx("b")[:3]):
        monkeypatch.setattr(topology, "device_info", lambda device, devices=devices: devices[device.index])
        with LocalWorld(len(devices)) as world:
            rings = world.run(lambda group: discover_topology(open_control(group), torch.device("meta", group.rank())))
        assert rings == [ring_topology(devices)] * len(devices) and "H100" not in repr(rings)
        assert [len(ring.devices) for ring in rings] == [len(devices), *[0] * (len(devices) - 1)]


def test_nodes_of_one_rank_make_no_second_level() -> None:
    assert not any(Topology(nodes).two_level for nodes in (((0,), (1,)), ((0, 1),), ((0, 1), (2,))))
    assert Topology(((0, 1), (2, 3))).two_level


def test_nodes_without_devices() -> None:
    assert len({Topology([[1, 0]]), Topology(((1, 0),))}) == 1  # type: ignore[arg-type]  # lists do too
    assert Topology(((3, 1), (0, 2))).edges[0].link == Link("unknown", "unknown", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([[[0, 2]]], "every rank from 0 on exactly once"),
        ([[0, 1]], "a list of nodes"),
        ([[]], "a list of nodes"),
        ([[["0"]]], "a list of nodes"),
        ([[[0]], 3], "devices is 3; it must be a tuple with the DeviceInfo of every rank, or empty"),
        ([[[0], []]], "a list of nodes"),
        ([[[0, 1, 2]], tuple(cpus("a", 2))], "devices has 2 entries; it must have one per rank, 3"),
        ([[[0]], tuple(cpus("a", 2))], "devices has 2 entries; it must have one per rank, 1"),
    ],
)
def test_refused_topologies(arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(*arguments)
    with pytest.raises(ValueError, match="devices is empty"):
        ring_topology([])
