"""Happens-before graph of the log: races, deadlocks, and the waits that are needed."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .device import Op, Use


@dataclass(eq=False)
class Wait:
    """A wait of the program, and the edges that disappear without it."""

    op: Op
    edges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the wait, independent of hop and rank: the waiting function and the awaited one."""
        source = self.op.source
        return f"{caller(self.op)} waits for {'the device' if source is None else caller(source)}"

    def __str__(self) -> str:
        return f"{self.op} on {self.op.source}" if self.op.source is not None else str(self.op)


_RING = "buffers key_values dkv loop backends fused prepare ops attention ring wire"
RING = tuple(f"{module}." for module in _RING.split())
PASSED = (
    "copy_streams.", "local._LocalFence.", "buffers.RingCall.post", "buffers.RingCall.mark", "buffers.Arrival.wait",
    "buffers.RingBuffer.mark_computed",
)  # fmt: skip
"""Functions that only forward what their callers ask for."""


def caller(op: Op) -> str:
    """Return the transport function and the ring function that asked for an operation."""
    names = [name for name in op.site.split(" < ") if name and not name.startswith(PASSED)]
    ring = [name for name in names if name.startswith(RING)]
    comm = [name.rpartition(".")[2] for name in names if not name.startswith(RING) and "LocalWorld" not in name]
    place = ring[0].partition(".")[2].replace(".<locals>", "").replace(".<lambda>", "") if ring else ""
    return " of ".join([*comm[:1], *([place] if place else [])])


@dataclass
class Conflict:
    """Two operations that access the same bytes, at least one as a writer, in their intended order."""

    first: Op
    second: Op
    use: Use  # the bytes that both access


class Graph:
    """Operations by their place in the log, and edges between them.

    The edges are:

    - the order of a stream;
    - from the record of an event to a wait for it;
    - from a send to its receive;
    - from a host synchronization to what that host enqueues later.

    The operations of one NCCL group run concurrently, between what its stream runs before and after. A send may finish
    before its receive begins; `rendezvous` holds the edges of the other extreme. `where` names a place in memory.
    """

    def __init__(self, log: Sequence[Op], where: Callable[[Use], str] = str) -> None:
        self.log = list(log)
        self.where = where
        for place, op in enumerate(self.log):
            op.number = place
        self.before: list[set[int]] = [set() for _ in self.log]
        self.fixed: list[set[int]] = [set() for _ in self.log]  # the edges of `before` that come from no wait
        self.waits: list[Wait] = []
        self.rendezvous: list[tuple[int, int]] = []
        self.mismatches: list[str] = []
        self._streams()
        self._transfers()
        self._values()

    def _fix(self, first: Iterable[int], second: int) -> None:
        predecessors = list(first)
        self.fixed[second].update(predecessors)
        self.before[second].update(predecessors)

    def _waited(self, wait: Wait, first: int, second: int) -> None:
        wait.edges.append((first, second))
        self.before[second].add(first)

    def _streams(self) -> None:
        """Add the edges of stream order, waits and host synchronization."""
        tails: dict[object, set[int]] = defaultdict(set)
        groups: dict[object, set[int]] = {}  # predecessors of a group's members
        latest: dict[tuple[object, int], Op] = {}
        host: dict[int, Wait] = {}
        for place, op in enumerate(self.log):
            self._fix((earlier.number for earlier in op.after), place)
            if op.kind.startswith("synchronize"):
                host[place] = Wait(op)
            if op.kind == "synchronize event":
                self._wait(place, op)
            if op.stream is None:
                if op.kind == "synchronize":  # synchronizes the whole device
                    self._fix((tail for tail_set in tails.values() for tail in tail_set), place)
                continue
            if op.kind == "free":  # any thread may drop the last reference, so the stream does not wait
                self._fix(tails[op.stream], place)
                if op.host is not None and op.host.number in host:
                    self._waited(host[op.host.number], op.host.number, place)
                continue
            if op.group is None:
                self._fix(tails[op.stream], place)
                tails[op.stream] = {place}
            else:
                members = groups.setdefault(op.group, set(tails[op.stream]))
                self._fix(members, place)
                tails[op.stream] = (tails[op.stream] - members) | {place}
            if op.kind == "wait":
                self._wait(place, op)
            if op.host is not None and latest.get((op.stream, op.thread)) is not op.host:
                if op.group is None:  # the members of a group are unordered
                    latest[op.stream, op.thread] = op.host
                if op.host.number in host:
                    self._waited(host[op.host.number], op.host.number, place)
        self.waits += [wait for wait in host.values() if wait.edges]

    def _wait(self, place: int, op: Op) -> None:
        source = op.source
        if source is not None and self.log[source.number : source.number + 1] == [source]:  # else done earlier
            self.waits.append(Wait(op))
            self._waited(self.waits[-1], source.number, place)

    def _transfers(self) -> None:
        """Connect the n-th send of each pair of ranks with its n-th receive."""
        ends: dict[tuple[object, ...], tuple[list[Op], list[Op]]] = defaultdict(lambda: ([], []))
        for op in self.log:
            if op.wire:
                ends[op.wire][op.kind == "recv"].append(op)
        for (_, source, destination, *_), (sends, receives) in ends.items():
            if len(sends) != len(receives):
                extra = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
                self.mismatches.append(
                    f"{source} sends {len(sends)} messages to {destination}, which receives {len(receives)}: "
                    f"{extra} has no counterpart"
                )
            for send, receive in zip(sends, receives, strict=False):
                self._fix([send.number], receive.number)
                receive.source = send
                if _size(send) != _size(receive):
                    self.mismatches.append(
                        f"{send} of {_size(send)} bytes is received by {receive} of {_size(receive)}"
                    )
                # A rendezvous send ends after its receive begins, so after all predecessors of the receive's group.
                self.rendezvous += [(earlier, send.number) for earlier in self.before[receive.number] - {send.number}]

    def _values(self) -> None:
        """Connect each wait for a memory word with the first write of the value, or of a larger one."""
        written: dict[object, list[tuple[int, Op]]] = defaultdict(list)
        for op in self.log:
            if op.kind == "write" and op.flag is not None:
                written[op.flag[0]].append((op.flag[1], op))
        for op in self.log:
            if op.kind != "await" or op.flag is None:
                continue
            word, wanted = op.flag
            op.source = next((write for value, write in written[word] if value >= wanted), None)
            if op.source is None:
                self.mismatches.append(f"{op} waits for a value that nobody writes")
                continue
            self.waits.append(Wait(op))
            self._waited(self.waits[-1], op.source.number, op.number)

    @cached_property
    def order(self) -> list[int]:
        """Operations in topological order; the list is shorter than the log if there is a cycle."""
        return linear(self.before)

    @cached_property
    def place(self) -> dict[int, int]:
        """Index of each operation in `order`."""
        return {number: place for place, number in enumerate(self.order)}

    @cached_property
    def after(self) -> list[list[int]]:
        return _reverse_edges(self.before)

    @cached_property
    def reach(self) -> list[int]:
        """Bit mask per operation, indexed by `place`, of the operation and all its predecessors."""
        reach = [0] * len(self.log)
        for place, number in enumerate(self.order):
            bits = 0
            for earlier in self.before[number]:
                bits |= reach[earlier]
            reach[number] = bits | 1 << place
        return reach

    def happens_before(self, first: Op, second: Op) -> bool:
        """Return True if ``first`` must end before ``second`` begins."""
        return first is not second and bool(self.reach[second.number] >> self.place[first.number] & 1)

    def cycle(self, more: Iterable[tuple[int, int]] = ()) -> list[Op]:
        """Return operations that wait for each other, with the extra edges ``more``; empty if there are none."""
        before = [set(earlier) for earlier in self.before]
        for first, second in more:
            before[second].add(first)
        done = set(linear(before))
        stuck = next((number for number in range(len(self.log)) if number not in done), None)
        path: list[int] = []
        while stuck is not None and stuck not in path:
            path.append(stuck)
            stuck = next(earlier for earlier in before[stuck] if earlier not in done)
        return [] if stuck is None else [self.log[number] for number in path[path.index(stuck) :]]

    def problems(self) -> list[str]:
        """Return every problem, in words."""
        for name, extra_edges in (("eager", ()), ("rendezvous", self.rendezvous)):
            cycle = self.cycle(extra_edges)
            if cycle:
                text = " <- ".join(map(str, cycle))
                return [*self.mismatches, f"deadlock with {name} sends, each waits for the next: {text}"]
        return self.mismatches + [self.describe_race(conflict) for conflict in self.races()]

    @property
    def cyclic(self) -> bool:
        return len(self.order) < len(self.log)

    @cached_property
    def conflicts(self) -> list[Conflict]:
        """Conflicts of neighbouring accesses.

        If all of them are ordered, every other conflict is, too. If there are races, the first race is in the list.
        """
        live: Live = {}
        conflicts: list[Conflict] = []
        for number in self.order:
            op = self.log[number]
            conflicts += _meet(live, op, op.reads, False)
            conflicts += _meet(live, op, op.writes, True)
        return conflicts

    @cached_property
    def needs(self) -> dict[int, int]:
        """Bit mask per operation, indexed by `place`, of the operations that must run before it."""
        needs: dict[int, int] = defaultdict(int)
        for conflict in self.conflicts:
            needs[conflict.second.number] |= 1 << self.place[conflict.first.number]
        return needs

    def races(self) -> list[Conflict]:
        """Return the conflicts whose two operations no edge orders."""
        return [pair for pair in self.conflicts if not self.happens_before(pair.first, pair.second)]

    def describe_race(self, conflict: Conflict) -> str:
        """Return a sentence that names the memory and both operations of a race."""
        first, second = (f"{op} {_verb(op, conflict.use)} it" for op in (conflict.first, conflict.second))
        return f"race on {self.where(conflict.use)}: {first}, {second}, and nothing orders the two"

    def broken_without(self, wait: Wait) -> Conflict | None:
        """Return a conflict that becomes a race without this wait, or None if there is none."""
        gone = set(wait.edges)
        reach: dict[int, int] = {}
        changed = sorted({self.place[second] for _, second in gone})
        pending = set(changed)
        while pending:
            place = min(pending)
            pending.discard(place)
            number = self.order[place]
            bits = 1 << place
            for earlier in self.before[number]:
                if (earlier, number) not in gone or earlier in self.fixed[number]:
                    bits |= reach.get(earlier, self.reach[earlier])
            if bits == self.reach[number]:
                continue
            reach[number] = bits
            lost = self.needs.get(number, 0) & ~bits
            if lost:
                first = self.log[self.order[lost.bit_length() - 1]]
                return next(c for c in self.conflicts if c.second.number == number and c.first is first)
            pending.update(self.place[later] for later in self.after[number])
        return None

    def redundant_waits(self) -> list[Wait]:
        """Return the redundant waits: each can be removed alone without a race."""
        return [wait for wait in self.waits if self.broken_without(wait) is None]


Live = dict[int, list[tuple[Op, int, bool]]]
"""By storage: operations, the bytes of theirs that were not overwritten since, and whether they wrote them."""


def _meet(live: Live, op: Op, uses: Iterable[Use], writes: bool) -> Iterator[Conflict]:
    for use in uses:
        remaining = []
        for other, live_bytes, wrote in live.get(use.storage, []):
            common = live_bytes & use.bytes
            if common and (writes or wrote) and other is not op:
                yield Conflict(other, op, Use(use.storage, common))
            rest = live_bytes & ~use.bytes if writes and other is not op else live_bytes
            if rest:
                remaining.append((other, rest, wrote))
        live[use.storage] = [*remaining, (op, use.bytes, writes)]


def _verb(op: Op, use: Use) -> str:
    if op.kind in ("free", "allocate"):
        return f"{op.kind}s"
    wrote = any(write.storage == use.storage and write.bytes & use.bytes for write in op.writes)
    return "writes" if wrote else "reads"


def _size(op: Op) -> int:
    return sum(use.bytes.bit_count() for use in (*op.reads, *op.writes))


def _reverse_edges(before: Sequence[Iterable[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for number, earlier in enumerate(before):
        for previous in earlier:
            after[previous].append(number)
    return after


def linear(before: Sequence[set[int]], draws: Iterator[float] | None = None) -> list[int]:
    """Return a topological order; among ready operations, the one with the lowest draw or number comes first."""
    after, waiting = _reverse_edges(before), [len(earlier) for earlier in before]
    ready = [(next(draws) if draws else 0.0, number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for later in after[number]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (next(draws) if draws else 0.0, later))
    return order
