"""Nodes of the ranks and the order of the ring through them, as data for schedules and transports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, islice, pairwise, permutations
from typing import Any, NamedTuple

import torch

from ...validators import RANKS, short_repr
from ..arg_checks import NODES
from ..control import Control
from .nvml import DeviceInfo, Link, Nic, device_info, link_between, nearest_nics, network_link

MAX_EXHAUSTIVE_RANKS = 8  # largest number of ranks of a node for which all cycles are tried
MAX_PRINTED_ITEMS = 16  # nodes, rails, or ranks per line; of more than this the middle is not printed


class RingEdge(NamedTuple):
    """Connection from one rank to the next in the ring."""

    source: int
    destination: int
    level: int
    """0 inside the nodes and for a flat ring, 1 between the nodes."""
    link: Link


@dataclass(frozen=True)
class Topology:
    """Ranks of a group, node by node, in ring order.

    A rank's index in its node is its rail. The ranks of a rail communicate over the same NIC of their nodes.

    Raises:
        ValueError: a rank is missing or occurs twice, or a node is empty.
    """

    nodes: tuple[tuple[int, ...], ...]
    devices: tuple[DeviceInfo, ...] = field(default=(), compare=False, repr=False)
    """Device of each rank, or empty if unknown. Topologies of the same order are equal, whatever their devices."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", NODES.check("nodes", self.nodes))
        if not isinstance(self.devices, tuple) or not all(isinstance(device, DeviceInfo) for device in self.devices):
            raise ValueError(
                f"devices is {short_repr(self.devices)}; it must be a tuple with the DeviceInfo of every rank, or empty"
            )
        if self.devices and len(self.devices) != self.world:
            raise ValueError(f"devices has {len(self.devices)} entries; it must have one per rank, {self.world}")

    @classmethod
    def flat(cls, world: int) -> Topology:
        """Return a single node with the ring in rank order."""
        world = RANKS.check("world", world)
        return cls((tuple(range(world)),))

    @classmethod
    def grid(cls, nodes: int, per_node: int) -> Topology:
        """Return ``nodes`` nodes of ``per_node`` ranks each, numbered node by node."""
        nodes, per_node = RANKS.check("nodes", nodes), RANKS.check("per_node", per_node)
        return cls(tuple(tuple(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)))

    def to_json(self) -> dict[str, Any]:
        """Return the nodes and devices as plain data; the edges follow from them."""
        return {"nodes": [list(node) for node in self.nodes], "devices": [device.to_json() for device in self.devices]}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Ranks in ring order."""
        return tuple(rank for node in self.nodes for rank in node)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @property
    def two_level(self) -> bool:
        """True if a two-level ring is possible: several nodes of equal size above 1."""
        sizes = {len(node) for node in self.nodes}
        return len(self.nodes) > 1 and len(sizes) == 1 and sizes != {1}

    @cached_property
    def nics(self) -> tuple[Nic | None, ...]:
        """NIC of each rank for messages to other nodes."""
        return _nics(self.devices) if self.devices else (None,) * self.world

    @cached_property
    def edges(self) -> tuple[RingEdge, ...]:
        """Pairs (rank, next rank) of the ring with their link.

        A two-level ring has the cycle of each node first and then the cycle of each rail. A flat ring has one cycle.
        """
        if not self.two_level:
            return tuple(self._edge(a, b, 0) for a, b in _around(self.order))
        inside = [self._edge(a, b, 0) for node in self.nodes for a, b in _around(node)]
        rails = zip(*self.nodes, strict=True)
        return (*inside, *(self._edge(a, b, 1) for rail in rails for a, b in _around(rail)))

    def slowest(self, level: int) -> RingEdge | None:
        """Return the edge of a level with the lowest expected bandwidth, or None if no bandwidth is known."""
        known = [edge for edge in self.edges if edge.level == level and edge.link.gigabytes_per_second is not None]
        return min(known, key=lambda edge: edge.link.gigabytes_per_second or 0.0, default=None)

    def describe(self) -> str:
        """Return the ring's order, the expected bandwidth of every edge and the rails as text."""
        return "\n".join(_description(self))

    def _edge(self, source: int, destination: int, level: int) -> RingEdge:
        """Return the edge between two ranks with its link; ranks on one NIC share the NIC's rate between nodes."""
        if not self.devices:
            return RingEdge(source, destination, level, Link("unknown", "unknown", None))
        link = link_between(self.devices[source], self.devices[destination])
        if link.kind == "network":
            link = network_link(
                (self.nics[rank], self._sharers[rank] if level else 1) for rank in (source, destination)
            )
        return RingEdge(source, destination, level, link)

    @cached_property
    def _sharers(self) -> tuple[int, ...]:
        """Number of ranks that share each rank's NIC. On a two-level ring they all send at once."""
        used = [(device.host, nic) for device, nic in zip(self.devices, self.nics, strict=True)]
        counts = Counter(used)
        return tuple(counts[nic] for nic in used)


def ring_topology(devices: Sequence[DeviceInfo]) -> Topology:
    """Return the ring through ranks on ``devices`` (by rank) that uses as few slow links as possible.

    A node is a host, or an NVLink fabric of several hosts. Inside a node the cycle minimises the number of links of the
    worst kind, then of the second worst, and so on. NVLink is better than PCIe, then more links are better, then more
    common PCIe ancestors. Up to 8 ranks all cycles are tried. With more ranks, the next rank is always the rank with
    the best link to the last one. Ties follow the order of PCIe.

    Nodes follow in the order of their lowest ranks, because schedulers number neighbours that way. If the links leave a
    choice, the cycles of later nodes are rotated so that each rail uses NICs of the same name.

    The function is pure: ranks that pass equal devices get equal topologies.

    Raises:
        ValueError: ``devices`` is empty.
    """
    if not devices:
        raise ValueError("devices is empty; it must have the device of every rank")
    domains: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        domains.setdefault(device.domain, []).append(rank)
    nics = _nics(devices)
    nodes: list[tuple[int, ...]] = []
    for ranks in domains.values():
        pattern = [_name(nics[rank]) for rank in nodes[0]] if nodes else []
        nodes.append(_order_node(devices, ranks, nics, pattern))
    return Topology(tuple(nodes), tuple(devices))


def discover_topology(control: Control, device: torch.device) -> Topology:
    """Return the ring through all ranks. All ranks call it together; only rank 0's result has the devices.

    Rank 0 decides and sends only the order, because the devices of 1,024 ranks are a megabyte.
    """
    devices: list[DeviceInfo] = []

    def ordered(gathered: list[object]) -> tuple[list[int], list[int]]:
        devices.extend(DeviceInfo.from_json(device) for device in gathered)  # type: ignore[arg-type]
        ring = ring_topology(devices)
        # Send differences, which compress to a tenth of the bytes at 1,024 ranks because they are mostly equal.
        return [len(node) for node in ring.nodes], [b - a for a, b in pairwise((0, *ring.order))]

    steps: Any = control.gather_merged(device_info(device).to_json(), ordered, what="the devices of the ranks")
    sizes, order = steps[0], accumulate(steps[1])
    return Topology(tuple(tuple(islice(order, size)) for size in sizes), tuple(devices))


def _order_node(
    devices: Sequence[DeviceInfo], ranks: Sequence[int], nics: Sequence[Nic | None], pattern: Sequence[str | None]
) -> tuple[int, ...]:
    """Return ``ranks``, which are those of one node, in ring order.

    ``nics`` has the NIC of every rank of the ring. ``pattern`` has the NIC names along the first node, which the order
    of a later node follows if the links leave a choice; it is empty for the first node.
    """
    rails = {name: rail for rail, name in reversed([*enumerate(pattern)])}
    first = {devices[rank].host: rank for rank in reversed(ranks)}

    def natural(rank: int) -> tuple[object, ...]:
        device, rail = devices[rank], rails.get(_name(nics[rank]), len(pattern))
        return rail, first[device.host], device.pcie, -1 if device.index is None else device.index, rank

    in_order = sorted(ranks, key=natural)
    links = [[link_between(devices[a], devices[b]).rank if a != b else None for b in in_order] for a in in_order]
    kinds = {kind: number for number, kind in enumerate(sorted({kind for row in links for kind in row if kind}))}
    order = [
        in_order[at] for at in _find_cycle(tuple(tuple(kinds[kind] if kind else 0 for kind in row) for row in links))
    ]
    if len(pattern) != len(order):
        return tuple(order)
    # Try the same cycle from every start. The reverse direction is not tried, because ties follow the rails' direction.
    rotations = [(*order[start:], *order[:start]) for start in range(len(order))]
    names = [_name(nic) for nic in nics]
    return max(rotations, key=lambda cycle: sum(names[a] == name for a, name in zip(cycle, pattern, strict=True)))


@lru_cache(maxsize=64)  # most nodes of a cluster have the same links
def _find_cycle(grades: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the cycle from 0 through all ranks of a node with the best links. Ties prefer rank order.

    ``grades[a][b]`` grades the link between a and b: 0 is the best kind of link.
    """
    count = len(grades)
    if count < 4 or len({grades[a][b] for a, b in combinations(range(count), 2)}) == 1:
        return tuple(range(count))
    if count <= MAX_EXHAUSTIVE_RANKS:
        return min(
            ((0, *rest) for rest in permutations(range(1, count))),
            key=lambda order: sorted((grades[a][b] for a, b in _around(order)), reverse=True),
        )
    order, remaining = [0], [*range(1, count)]
    while remaining:
        order.append(min(remaining, key=lambda rank: grades[order[-1]][rank]))
        remaining.remove(order[-1])
    return tuple(order)


def _nics(devices: Sequence[DeviceInfo]) -> tuple[Nic | None, ...]:
    """Return the NIC of each device for messages to other nodes, or None for a device without one."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(range(len(devices)), key=lambda rank: (devices[rank].pcie, rank)):
        hosts.setdefault(devices[rank].host, []).append(rank)
    chosen: dict[int, Nic | None] = {}
    for ranks in hosts.values():
        chosen |= zip(ranks, nearest_nics([devices[rank] for rank in ranks]), strict=True)
    return tuple(chosen[rank] for rank in range(len(devices)))


def _name(nic: Nic | None) -> str | None:
    return None if nic is None else nic.name


def _around(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return all pairs (rank, next rank) of the cycle; none for a single rank."""
    return [*zip(ranks, (*ranks[1:], ranks[0]), strict=True)] if len(ranks) > 1 else []


def _description(ring: Topology) -> Iterator[str]:
    """Yield the lines of `Topology.describe`."""
    sizes = sorted({len(node) for node in ring.nodes})
    per_node = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    ranks = f"{len(ring.nodes)} node{'s' * (len(ring.nodes) > 1)} of {per_node}"
    kind = "two-level ring" if ring.two_level else "flat ring"
    yield f"{kind} of {ring.world} rank{'s' * (ring.world > 1)}, {ranks}; -N->: expected GB/s per direction"
    links = {(edge.source, edge.destination, edge.level): edge.link for edge in ring.edges}
    levels = [[("ring", ring.order)]]
    if ring.two_level:
        levels = [[(f"node {number}{_host(ring, node)}", node) for number, node in enumerate(ring.nodes)]]
        levels += [[(f"rail {number}", rail) for number, rail in enumerate(zip(*ring.nodes, strict=True))]]
    width = max(len(name) for lines in levels for name, _ in lines)
    for level, lines in enumerate(levels):
        for line in _abridged([f"{name:<{width}}  {_walk(ranks, level, links)}" for name, ranks in lines]):
            yield f"  {line}"
    for level, where in enumerate((" inside", " between nodes") if ring.two_level else ("",)):
        slow = ring.slowest(level)
        if slow is not None:
            yield f"  slowest{where}: {_rate(slow.link)} GB/s, {slow.source} -> {slow.destination}, {slow.link.text}"


def _host(ring: Topology, node: Sequence[int]) -> str:
    hosts = {ring.devices[rank].host.partition("/")[0] for rank in node} if ring.devices else set()
    return f", {hosts.pop()}" if len(hosts) == 1 else ""


def _walk(ranks: Sequence[int], level: int, links: Mapping[tuple[int, int, int], Link]) -> str:
    """Format a cycle as ``0 -380-> 1 -380-> 0``, with the rate of each link in GB/s, followed by the kinds of links."""
    around = _around(ranks)
    steps = _abridged([f"-{_rate(links[a, b, level])}-> {b}" for a, b in around])
    kinds = _abridged([*dict.fromkeys(links[a, b, level].text for a, b in around)], most=4)
    return f"{' '.join([str(ranks[0]), *steps])}   {', '.join(kinds)}".rstrip()


def _rate(link: Link) -> str:
    return "?" if link.gigabytes_per_second is None else f"{link.gigabytes_per_second:.3g}"


def _abridged(items: list[str], most: int = MAX_PRINTED_ITEMS) -> list[str]:
    """Return the items, with an ellipsis in place of the middle of a long list."""
    return items if len(items) <= most else [*items[: most - 4], "…", *items[-3:]]
