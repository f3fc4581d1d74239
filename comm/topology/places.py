"""Where ranks sit, and what joins two of them: NVLink, PCIe or the network, with the bandwidth to expect of it.

Bandwidths are GB/s (10^9 bytes) per direction. "Expected" is what copies are known to reach of the nominal rate where
nothing else is in the way: an upper figure to hold a measurement against, not a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

SWITCH = "switch"  # the peer of links into an NVSwitch: they reach every GPU that is linked to it too

# nominal GB/s per direction: of one NVLink by generation, of one PCIe lane by generation
NVLINK_GB_PER_S = {1: 20, 2: 25, 3: 25, 4: 25, 5: 50, 6: 50}
PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 1, 4: 2, 5: 4, 6: 8}
BITS_PER_BYTE = 8
# reached over nominal: copy engines on NVLink 4, the middle of what PCIe 5 x16 and 400G InfiniBand are known to reach
NVLINK_REACHED = 380 / 450
PCIE_REACHED = 52.5 / 64
NETWORK_REACHED = 47 / 50

# what two ranks of one host share of their PCIe paths, by number of common ancestors: see `Place.pcie`
_SHARED = ("between sockets", "inside a socket", "host bridge")
_SWITCH_DEPTH = len(_SHARED)


@dataclass(frozen=True)
class NvLink:
    """The NVLinks of one GPU to one peer."""

    peer: str
    """PCI address of the other GPU, or ``switch``."""
    links: int
    version: int | None = None
    """Generation, 1 to 6."""


@dataclass(frozen=True)
class Nic:
    """A network interface of a host."""

    name: str
    gigabits: float | None = None
    """Rate per direction; None where the system does not tell."""
    pcie: tuple[str, ...] = ()
    """As `Place.pcie`."""


@dataclass(frozen=True)
class Place:
    """What is known of where one rank computes. Every field but the host may be unknown."""

    host: str
    """One name for one machine."""
    gpu: str | None = None
    """UUID."""
    index: int | None = None
    """Of NVML, which counts all GPUs of the host."""
    name: str | None = None
    nvlinks: tuple[NvLink, ...] = ()
    fabric: str | None = None
    """The NVLink domain that reaches beyond the host: GPUs with the same one are linked through its switches."""
    pcie: tuple[str, ...] = ()
    """Ancestors from the socket down to the device: NUMA node, root complex, bridges, the device's own address."""
    pcie_gigabytes: float | None = None
    """Nominal rate of its slot per direction, GB/s."""
    nics: tuple[Nic, ...] = ()
    """All NICs of the host."""
    unknown: str | None = None
    """Why what is missing is missing."""

    @property
    def domain(self) -> str:
        """Places of one domain make a node of the ring: those of a host, or of an NVLink fabric of several hosts."""
        return self.host if self.fabric is None else self.fabric

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what is unknown."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Place:
        """The place that `to_json` wrote, or that somebody wrote by hand.

        Raises:
            ValueError: no host, a field that no place has, or no list where one belongs.
        """
        _known("place", data, cls, needs="host")
        nvlinks = tuple(
            NvLink(**_known("NVLink", one, NvLink, needs="peer")) for one in listed("nvlinks", data.get("nvlinks", ()))
        )
        nics = tuple(_nic(one) for one in listed("nics", data.get("nics", ())))
        return cls(**{**data, "nvlinks": nvlinks, "nics": nics, "pcie": listed("pcie", data.get("pcie", ()))})


def _nic(data: Mapping[str, Any]) -> Nic:
    _known("NIC", data, Nic, needs="name")
    return Nic(**{**data, "pcie": listed("pcie", data.get("pcie", ()))})


def listed(name: str, data: object) -> tuple[Any, ...]:
    """``data``, if it is a list.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(data, list | tuple):
        raise ValueError(f"{name} is {data!r}: it takes a list")
    return tuple(data)


def _known(what: str, data: object, kind: type, *, needs: str) -> Mapping[str, Any]:
    """``data``, if it can be a ``kind``."""
    names = _names(kind)
    if not isinstance(data, Mapping) or needs not in data or not data.keys() <= names.keys():
        raise ValueError(f"a {what} is {data!r}: it takes {needs!r}, and may have others of {', '.join(names)}")
    return data


@cache
def _names(kind: Any) -> dict[str, None]:
    """Of its fields, in their order; asked for of a thousand ranks' NICs."""
    return dict.fromkeys(field.name for field in fields(kind))


class Link(NamedTuple):
    """What joins two ranks."""

    kind: str
    """``nvlink``, ``pcie``, ``network``, ``one gpu`` or ``host memory``."""
    text: str
    gigabytes_per_second: float | None
    """Expected per direction; None where nothing is known."""
    distance: int = 0
    """Orders links of one bandwidth: fewer common ancestors are farther."""

    @property
    def rank(self) -> tuple[bool, float, int]:
        """A better link has a smaller one: NVLink comes first also where its generation, hence its rate, is unknown."""
        return self.kind != "nvlink", -(self.gigabytes_per_second or 0.0), self.distance


def link_between(a: Place, b: Place) -> Link:
    """The best link inside a host or an NVLink fabric; the network without a rate where they share neither."""
    direct = _nvlink(a, b)
    if direct is not None:
        return direct
    if a.host != b.host:
        return Link("network", "network", None, _SWITCH_DEPTH + 1)
    if a.gpu is None or b.gpu is None:
        return Link("host memory", "host memory", None)
    if a.gpu == b.gpu:
        return Link("one gpu", "one GPU", None)
    depth = min(shared(a.pcie, b.pcie), _SWITCH_DEPTH)
    text = "one switch" if depth == _SWITCH_DEPTH else _SHARED[depth]
    return Link("pcie", f"PCIe, {text if a.pcie and b.pcie else 'unknown path'}", _pcie(a, b), _SWITCH_DEPTH - depth)


def pairs_by_link(places: Iterable[Place]) -> dict[str, int]:
    """How many pairs of GPUs are joined by what, by the text of the link; pairs of one host alone."""
    held = [place for place in dict.fromkeys(places) if place.gpu is not None]
    pairs = [link_between(a, b).text for a, b in combinations(held, 2) if a.host == b.host]
    return dict(Counter(pairs))


def network(ends: Iterable[tuple[Nic | None, int]]) -> Link:
    """The network between the NICs at both ends, each with the number of ranks that send through it at once."""
    ends = [*ends]
    rates = [nic.gigabits / sharers if nic is not None and nic.gigabits else None for nic, sharers in ends]
    names = " - ".join(dict.fromkeys("unknown NIC" if nic is None else nic.name for nic, _ in ends))
    known = [rate for rate in rates if rate is not None]
    whole = len(known) == len(rates)
    return Link("network", names, min(known) / BITS_PER_BYTE * NETWORK_REACHED if whole else None, _SWITCH_DEPTH + 1)


def nearest_nics(places: Sequence[Place]) -> list[Nic | None]:
    """For each of the places of one host, the NIC that shares the most PCIe ancestors and the fewest other ranks."""
    nics = _worth_using(places[0].nics)
    load = dict.fromkeys(range(len(nics)), 0)
    chosen: list[Nic | None] = []
    for place in places:
        if not nics:
            chosen.append(None)
            continue
        best = max(load, key=lambda i: (shared(place.pcie, nics[i].pcie), nics[i].gigabits or 0, -load[i], -i))
        load[best] += 1
        chosen.append(nics[best])
    return chosen


def _worth_using(nics: Sequence[Nic]) -> list[Nic]:
    """Not the slow ones beside fast ones, which are for management or storage."""
    fastest = max((nic.gigabits or 0 for nic in nics), default=0)
    return [nic for nic in nics if (nic.gigabits or 0) * 2 >= fastest]


def shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Number of common ancestors, from the root on."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def _nvlink(a: Place, b: Place) -> Link | None:
    if a.gpu is not None and a.gpu == b.gpu and a.host == b.host:
        return None
    joined = a.host == b.host or (a.fabric is not None and a.fabric == b.fabric)
    if not joined:
        return None
    ends = _through_switch(a, b) or (_direct(a, b) if a.host == b.host else None)
    if ends is None:
        return None
    mine, theirs = ends
    links = min(mine.links, theirs.links)
    versions = [one.version for one in ends if one.version is not None]
    nominal = NVLINK_GB_PER_S.get(min(versions)) if versions else None
    text = f"NVLink {min(versions) if versions else '?'} x{links}{' switch' * (mine.peer == SWITCH)}"
    return Link("nvlink", text, None if nominal is None else nominal * links * NVLINK_REACHED)


def _through_switch(a: Place, b: Place) -> tuple[NvLink, NvLink] | None:
    ends = [next((one for one in place.nvlinks if one.peer == SWITCH), None) for place in (a, b)]
    return None if ends[0] is None or ends[1] is None else (ends[0], ends[1])


def _direct(a: Place, b: Place) -> tuple[NvLink, NvLink] | None:
    there = next((one for one in a.nvlinks if b.pcie and one.peer == b.pcie[-1]), None)
    back = next((one for one in b.nvlinks if a.pcie and one.peer == a.pcie[-1]), None)
    # one end is enough: a container may hide the address of the other
    return None if there is None and back is None else (there or back, back or there)  # type: ignore[return-value]


def _pcie(a: Place, b: Place) -> float | None:
    if a.pcie_gigabytes is None or b.pcie_gigabytes is None:
        return None
    return min(a.pcie_gigabytes, b.pcie_gigabytes) * PCIE_REACHED
