"""What every rank knows of every other without anybody in the middle: rows that spread from peer to peer.

At each tick a rank pulls the table of one peer, merges it into its own and leaves the result for whoever pulls next.
The peer is a power of two away, the next power at the next tick, as in a dissemination barrier (Hensgen, Finkel and
Manber, 1988): were all ticks at the same moment, log2(ranks) of them would do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Seconds between two ticks of a rank, up to this many ranks; with more of them the time grows in proportion, so that a
# rank moves no more bytes a second the more there are.
TICK_SECONDS, TICK_RANKS = 0.25, 32

# A straggler is named when it is busy for at least this many times as long as the median of the others ...
SLOW_FACTOR = 1.1
# ... while these wait in the ring for at least this share of all time, ...
WAITING_SHARE = 0.1
# ... it itself for at most this part of what they do, ...
LOW_WAIT = 0.4
# ... and this has been so at as many looks in a row. It is over when it has not been so at as many in a row.
LOOKS = 4


class Row(NamedTuple):
    """What one rank says of itself."""

    version: int  # counts what the rank has said
    stamp: float  # seconds since the epoch, by the rank's own clock
    step: str  # the last step of a call that it is known to have reached
    calls: int = 0  # phases (forward or backward) begun
    nbytes: int = 0  # sent and received since the ring opened
    compute: float = 0.0  # seconds of the last `window`
    wait: float = 0.0  # seconds of the last `window`
    window: float = 0.0  # seconds that compute and wait were looked at
    gauges: Mapping[str, object] | None = None  # clocks and throttle reasons of its GPU; None where there is none


class Report(NamedTuple):
    """A row as another rank knows it."""

    rank: int
    age: float  # seconds since the rank said it
    row: Row


class Table:
    """The newest row known of every rank."""

    def __init__(self, rows: Mapping[int, Row] | None = None) -> None:
        self.rows: dict[int, Row] = dict(rows or {})

    def put(self, rank: int, row: Row) -> bool:
        """Keep a row unless a newer one is known; whether it was news."""
        known = self.rows.get(rank)
        if known is not None and known.version >= row.version:
            return False
        self.rows[rank] = row
        return True

    def merge(self, rows: Mapping[int, Row]) -> None:
        """Keep what is newer than what is known."""
        for rank, row in rows.items():
            self.put(rank, row)

    def reports(self, now: float) -> tuple[Report, ...]:
        """All rows in rank order, with their age at `now` (seconds since the epoch)."""
        return tuple(Report(rank, max(0.0, now - row.stamp), row) for rank, row in sorted(self.rows.items()))


def pack(rows: Mapping[int, Row]) -> list[list[object]]:
    """Rows for JSON, without the names of their fields, which would be most of the bytes."""
    return [[rank, *row] for rank, row in rows.items()]


def unpack(packed: object) -> dict[int, Row]:
    """The rows of :func:`pack`; none where a peer has not left any yet."""
    return {rank: Row(*row) for rank, *row in packed} if isinstance(packed, list) else {}


def period(size: int) -> float:
    """Seconds between two ticks of a rank in a group of this size."""
    return TICK_SECONDS * max(1.0, size / TICK_RANKS)


def peer_at(rank: int, size: int, tick: int) -> int:
    """Whose table a rank pulls at a tick; never its own. Ticks are counted by the clock, so that all ranks agree.

    At 1,024 ranks that tick at random moments, with clocks half a tick apart, everyone knows everyone after 16 ticks;
    with a random peer each time it takes 25.
    """
    if size < 2:
        raise ValueError(f"size is {size}: a rank alone has no peer")
    powers = (size - 1).bit_length()
    return (rank + (1 << tick % powers)) % size


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    factor: float  # its busy time over the median of the others'
    since: float  # seconds since the epoch

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the ring up: it is busy {self.factor:.2f} times as long as the median of the "
            "other ranks, which wait for it"
        )


def slowest(rows: Mapping[int, Row]) -> tuple[int, float] | None:
    """The rank that waits little while all others wait much, and its factor; None where there is none."""
    waits = {rank: row.wait / row.window for rank, row in rows.items() if row.compute > 0 and row.window > 0}
    if len(waits) < 2:
        return None
    least = min(waits, key=lambda rank: (waits[rank], rank))
    others = [waits[rank] for rank in waits if rank != least]
    waited = statistics.median(others)
    # What a rank does not wait it is busy, in the ring or elsewhere: one that comes late from elsewhere counts too.
    factor = (1 - waits[least]) / max(1 - waited, 1e-9)
    if waited < WAITING_SHARE or waits[least] > LOW_WAIT * waited or factor < SLOW_FACTOR:
        return None
    return least, factor


class Stragglers:
    """Follows who is slow, and says each time once."""

    def __init__(self) -> None:
        self.current: Straggler | None = None
        """Who holds the ring up now."""
        self._candidate: int | None = None
        self._seen = 0
        self._missed = 0
        self._since = 0.0

    def look(self, rows: Mapping[int, Row], now: float) -> Straggler | None:
        """Look at the table; the straggler where a new episode begins just now, else None."""
        found = slowest(rows)
        if self.current is not None:
            self._follow(found)
            return None
        if found is None or found[0] != self._candidate:
            self._candidate, self._seen, self._since = (found[0] if found else None), 0, now
        if found is None:
            return None
        self._seen += 1
        if self._seen < LOOKS:
            return None
        self.current, self._missed = Straggler(*found, self._since), 0
        return self.current

    def _follow(self, found: tuple[int, float] | None) -> None:
        assert self.current is not None
        if found is not None and found[0] == self.current.rank:
            self.current, self._missed = self.current._replace(factor=found[1]), 0
            return
        self._missed += 1
        if self._missed >= LOOKS:
            self.current, self._candidate = None, None


def told(reports: Iterable[Report], most: int = 16) -> str:
    """The last step of each of these ranks, for errors; of many ranks those that have been silent longest."""
    chosen = sorted(reports, key=lambda report: -report.age)
    left = len(chosen) - most
    lines = [f"rank {report.rank}: {report.row.step} ({report.age:.1f} s ago)" for report in chosen[:most]]
    return "; ".join(sorted(lines, key=lambda line: int(line.split()[1][:-1]))) + (
        f"; and {left} ranks that reported later" if left > 0 else ""
    )
