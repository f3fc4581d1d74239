"""What ``ringattn doctor`` sends: patterned bytes over every edge by every transport that opens here, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...bench.common.flags import human
from ...bench.links.runs import BOTH_WAYS, ONE_WAY, Edge, Ends, Way
from ...comm import Transport
from ...comm.groups import TRANSPORTS, open_transports
from ...comm.topology.topology import Topology
from ...comm.transports.local import solo_group
from .findings import FAIL, OK, Finding, Ranks, Skipped, examined

AUTO = "auto"
REPEATS = 3  # timed transfers of one way, one behind the other, after one that is not
MOST_ALL_PAIRS = 16  # ranks up to which every pair is warmed up, since sums go home from anywhere
FRACTION = 0.25  # of what an edge should carry: less is no matter of tuning, the bytes take another way
PRINTED = 8  # edges of a line
GIGA = 1e9

CHECK_SETUP = (
    "run again with NCCL_DEBUG=INFO, which prints the path of every pair; `nvidia-smi nvlink -s` shows links that are "
    "down, `ibstat` the NICs, and the lines above every NCCL_* that is set"
)
CHECK_EDGE = f"look at what joins the ranks that the line names: {CHECK_SETUP}"
TAKE_OUT = "an edge corrupts bytes: take that GPU, cable or NIC out of use"


class Pair(NamedTuple):
    """One way over an edge of the ring, and what it should carry."""

    way: Way
    level: int
    expected: float | None


class Rate(NamedTuple):
    """What one edge carried."""

    source: int
    destination: int
    level: int
    both_ways: bool
    gigabytes_per_second: float
    """Per direction, at the slower end."""
    wrong: int
    """Bytes."""
    expected: float | None

    @property
    def edge(self) -> str:
        return f"{self.source}{'<->' if self.both_ways else '->'}{self.destination}"

    @property
    def text(self) -> str:
        return f"{self.edge} {self.gigabytes_per_second:.3g}"


def transports(ranks: Ranks, ring: Topology, nbytes: int, tell: Callable[[Finding], None]) -> None:
    """For every transport: does it open, do the bytes arrive, how fast; then which one ``auto`` takes, and why."""
    for name in TRANSPORTS:
        if name != AUTO:
            _transport(ranks, ring, name, nbytes, tell)
    _transport(ranks, ring, AUTO, nbytes, tell)


def _transport(ranks: Ranks, ring: Topology, name: str, nbytes: int, tell: Callable[[Finding], None]) -> None:
    opened: list[Transport] = []
    try:
        finding = examined(f"transport {name}", CHECK_EDGE, lambda: _opens(ranks, ring, name, opened))
        tell(finding)
        if finding.status == OK and opened and name != AUTO:
            tell(examined(f"GB/s {name}", CHECK_EDGE, lambda: _speeds(ranks, ring, opened, f"GB/s {name}", nbytes)))
    finally:
        for transport in opened:
            transport.close()


def _opens(ranks: Ranks, ring: Topology, name: str, opened: list[Transport]) -> Finding:
    """Open a transport and send a pattern over every edge; what opened is left in ``opened``."""
    check = f"transport {name}"

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
        return _by_itself(ranks, name, check)
    edges = [warmed(ring, level if len(opened) > 1 else None) for level in range(len(opened))]

    def warm_up() -> None:
        for transport, wanted in zip(opened, edges, strict=True):
            transport.warm_up(wanted)

    ranks.together(f"whether bytes arrive by {name}", warm_up)
    if name == AUTO:
        return Finding(check, OK, "; ".join(dict.fromkeys(transport.reason for transport in opened)))
    count = sum(map(len, edges))
    return Finding(check, OK, f"patterned bytes over {count} edge{'s' * (count > 1)}")


def _by_itself(ranks: Ranks, name: str, check: str) -> Finding:
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
    return Finding(check, OK, "one rank sends patterned bytes to itself; run under torchrun for the edges")


def warmed(ring: Topology, level: int | None) -> list[Edge]:
    """The (source, destination) pairs of a level, or of the whole ring: all pairs where the ranks are few."""
    if ring.world == 1:
        return [(0, 0)]
    edges = [edge[:2] for edge in ring.edges if level in (None, edge.level)]
    if level is None and ring.world <= MOST_ALL_PAIRS:
        edges = [(a, b) for a in range(ring.world) for b in range(ring.world) if a != b]
    return list(dict.fromkeys([*edges, *((b, a) for a, b in edges)]))


def _speeds(ranks: Ranks, ring: Topology, opened: Sequence[Transport], check: str, nbytes: int) -> Finding:
    """GB/s of every edge, one way and both ways."""
    rates = [rate for turn in rounds(ring) for rate in _timed(ranks, opened, turn, nbytes)]
    data = {"nbytes": nbytes, "rates": [rate._asdict() for rate in rates]}
    wrong = [rate for rate in rates if rate.wrong]
    if wrong:
        text = ", ".join(f"{rate.edge}: {rate.wrong} wrong bytes of {nbytes}" for rate in wrong[:PRINTED])
        return Finding(check, FAIL, text, TAKE_OUT, data=data)
    slow = [rate for rate in rates if rate.expected and rate.gigabytes_per_second < FRACTION * rate.expected]
    if slow:
        text = ", ".join(f"{rate.text} of {rate.expected:.3g} expected" for rate in slow[:PRINTED])
        return Finding(check, FAIL, text, f"the bytes take another way than they should: {CHECK_SETUP}", data=data)
    slowest = min(rates, key=lambda rate: rate.gigabytes_per_second)
    text = f"{_summary(rates)}; slowest {slowest.text} ({human(nbytes, 'B')} per direction, at the slower end)"
    return Finding(check, OK, text, data=data)


def _summary(rates: Sequence[Rate]) -> str:
    ways = ([rate.text for rate in rates if rate.both_ways == both_ways] for both_ways in (False, True))
    return "; ".join(f"{', '.join(told[:PRINTED])}{', …' * (len(told) > PRINTED)}" for told in ways if told)


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
            turn, left = _disjoint(ring, left)
            yield turn


def _disjoint(ring: Topology, pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """As many as share no host, in their order, and the rest."""
    busy: set[object] = set()
    now: list[Pair] = []
    later: list[Pair] = []
    for pair in pairs:
        hosts = {ring.places[rank].host if ring.places else None for rank in pair.way.pairs[0]}
        (later if hosts & busy else now).append(pair)
        busy |= set() if hosts & busy else hosts
    return now, later


def _timed(ranks: Ranks, opened: Sequence[Transport], turn: Sequence[Pair], nbytes: int) -> Iterator[Rate]:
    """Rates of a round; every rank calls it, and those that are in none of its pairs wait for the others."""
    mine = next((pair for pair in turn if ranks.rank in pair.way.pairs[0]), None)
    ends: list[Ends] = []

    def prepare() -> int:
        if mine is None:
            return 0
        ends.append(Ends(opened[min(mine.level, len(opened) - 1)], mine.way, nbytes, ranks.device))
        wrong = ends[0].wrong(0)
        ends[0].run(1)
        return wrong

    def go() -> float:
        begun = time.perf_counter()
        for one in ends:
            one.run(REPEATS)
        return (time.perf_counter() - begun) / REPEATS

    wrong = ranks.together("a checked transfer", prepare)
    seconds = ranks.together("a timed transfer", go)
    for way, level, expected in turn:
        source, destination = way.pairs[0]
        rate = nbytes / max(seconds[source], seconds[destination]) / GIGA
        bad = sum(wrong[rank] for rank in {source, destination})
        yield Rate(source, destination, level, way.name == BOTH_WAYS, rate, bad, expected)
