"""What ``ringattn doctor`` sends: patterned bytes over every edge by every transport that opens here, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ...bench.common.flags import human
from ...bench.links.runs import BOTH_WAYS, ONE_WAY, Edge, Ends, Way
from ...comm import Transport
from ...comm.groups import TRANSPORTS, open_transports
from ...comm.topology.topology import Topology
from ...comm.transports.local import solo_group
from .findings import OK, Failed, Finding, Ranks, Skipped, checked

AUTO = "auto"
REPEATS = 3  # timed transfers of one way, one behind the other, after one that is not
MOST_ALL_PAIRS = 16  # ranks up to which every pair is warmed up, since accumulators go home from anywhere
FRACTION = 0.25  # of what an edge should carry: less is no matter of tuning, the bytes take another way
PRINTED = 8  # edges of a line
GIGA = 1e9

TODO = (
    "look at what joins the ranks that the line names, and take a GPU, cable or NIC that corrupts bytes out of use: "
    "run again with NCCL_DEBUG=INFO, which prints the path of every pair; `nvidia-smi nvlink -s` shows links that are "
    "down, `ibstat` the NICs, and the lines above every NCCL_* that is set"
)


class Pair(NamedTuple):
    """One way over an edge of the ring, and what it should carry."""

    way: Way
    level: int
    expected: float | None


class Rate(NamedTuple):
    """What one way carried, in GB/s per direction at the slower end."""

    way: Way
    rate: float
    expected: float | None

    def __str__(self) -> str:
        return f"{self.way.edge} {self.rate:.3g}"


def transports(ranks: Ranks, ring: Topology, nbytes: int) -> Iterator[Finding]:
    """For every transport: does it open, do the bytes arrive, how fast; then which one ``auto`` takes, and why."""
    for name in sorted(TRANSPORTS, key=lambda name: name == AUTO):
        opened: list[Transport] = []
        try:
            finding = checked(f"transport {name}", TODO, partial(_opens, ranks, ring, name, opened))
            yield finding
            if finding.status == OK and opened and name != AUTO:
                yield checked(f"GB/s {name}", TODO, partial(_speeds, ranks, ring, opened, nbytes))
        finally:
            for transport in opened:
                transport.close()


def _opens(ranks: Ranks, ring: Topology, name: str, opened: list[Transport]) -> str:
    """Open a transport and send a pattern over every edge; what opened is left in ``opened``."""

    def open_all() -> None:
        try:
            opened.extend(open_transports(ranks.group, transport=name, device=ranks.device, topology=ring))
        except ValueError as error:
            raise Skipped(f"not possible here: {error}") from None

    try:
        ranks.together(f"whether {name} opens", open_all)
    except Skipped:
        if not ranks.alone:
            raise
        return _by_itself(ranks, name)
    edges = [warmed(ring, level if len(opened) > 1 else None) for level in range(len(opened))]

    def warm_up() -> None:
        for transport, wanted in zip(opened, edges, strict=True):
            transport.warm_up(wanted)

    ranks.together(f"whether bytes arrive by {name}", warm_up)
    if name == AUTO:
        return "; ".join(dict.fromkeys(transport.reason for transport in opened))
    count = sum(map(len, edges))
    return f"patterned bytes over {count} edge{'s' * (count > 1)}"


def _by_itself(ranks: Ranks, name: str) -> str:
    """What virtual ranks cannot use may still work for one rank that sends to itself: rank 0 tries."""

    def send() -> None:
        if ranks.rank:
            return
        try:
            (transport,) = open_transports(solo_group(), transport=name, device=ranks.device)
        except ValueError as error:
            raise Skipped(f"not possible here: {error}") from None
        try:
            transport.warm_up([(0, 0)])
        finally:
            transport.close()

    try:
        ranks.together(f"whether {name} sends to itself", send)
    except Skipped as reason:
        raise Skipped(str(reason).removeprefix("rank 0: ")) from None
    return "one rank sends patterned bytes to itself; run under torchrun for the edges"


def warmed(ring: Topology, level: int | None) -> list[Edge]:
    """The (source, destination) pairs of a level, or of the whole ring: all pairs where the ranks are few."""
    if ring.world == 1:
        return [(0, 0)]
    edges = [edge[:2] for edge in ring.edges if level in (None, edge.level)]
    if level is None and ring.world <= MOST_ALL_PAIRS:
        edges = [(a, b) for a in range(ring.world) for b in range(ring.world) if a != b]
    return list(dict.fromkeys([*edges, *((b, a) for a, b in edges)]))


def _speeds(ranks: Ranks, ring: Topology, opened: Sequence[Transport], nbytes: int) -> str:
    """GB/s of every edge, one way and both ways."""
    rates = [rate for turn in rounds(ring) for rate in _timed(ranks, opened, turn, nbytes)]
    slow = [rate for rate in rates if rate.expected and rate.rate < FRACTION * rate.expected]
    if slow:
        raise Failed(", ".join(f"{rate} of {rate.expected:.3g} expected" for rate in slow[:PRINTED]))
    by_way = ([str(rate) for rate in rates if rate.way.name == name] for name in (ONE_WAY, BOTH_WAYS))
    shown = "; ".join(f"{', '.join(texts[:PRINTED])}{', …' * (len(texts) > PRINTED)}" for texts in by_way if texts)
    slowest = min(rates, key=lambda rate: rate.rate)
    return f"{shown}; slowest {slowest} ({human(nbytes, 'B')} per direction, at the slower end)"


def rounds(ring: Topology) -> Iterator[list[Pair]]:
    """Every edge one way, then every pair both ways; what runs at the same time shares no host."""
    if ring.world == 1:
        yield [Pair(Way(ONE_WAY, ((0, 0),)), 0, None)]
        return
    one_way = [Pair(Way(ONE_WAY, (edge[:2],)), edge.level, edge.link.gigabytes_per_second) for edge in ring.edges]
    both: dict[tuple[int, ...], Pair] = {}
    for edge in ring.edges:
        low, high = sorted(edge[:2])
        pair = Pair(Way(BOTH_WAYS, ((low, high), (high, low))), edge.level, edge.link.gigabytes_per_second)
        both.setdefault((edge.level, low, high), pair)
    for left in (one_way, [*both.values()]):
        while left:
            busy, now, later = set[object](), list[Pair](), list[Pair]()
            for pair in left:
                hosts = {ring.devices[rank].host if ring.devices else None for rank in pair.way.pairs[0]}
                (later if hosts & busy else now).append(pair)
                busy |= set() if hosts & busy else hosts
            yield now
            left = later


def _timed(ranks: Ranks, opened: Sequence[Transport], turn: Sequence[Pair], nbytes: int) -> Iterator[Rate]:
    """Rates of a round; every rank calls it, and those that are in none of its pairs wait for the others.

    Raises:
        Failed: wrong bytes arrived.
    """
    mine = next((pair for pair in turn if ranks.rank in pair.way.pairs[0]), None)
    ends: list[Ends] = []

    def prepare() -> None:
        if mine is not None:
            ends.append(Ends(opened[min(mine.level, len(opened) - 1)], mine.way, nbytes, ranks.device))
            if wrong := ends[0].wrong(0):
                raise Failed(f"{mine.way.edge}: {wrong} wrong bytes of {nbytes}")

    def go() -> float:
        begun = time.perf_counter()
        for one in ends:
            one.run(REPEATS)
        return (time.perf_counter() - begun) / REPEATS

    ranks.together("a checked transfer", prepare)
    seconds = ranks.together("a timed transfer", go)
    for way, _, expected in turn:
        slower = max(seconds[rank] for rank in way.pairs[0])
        yield Rate(way, nbytes / slower / GIGA, expected)
