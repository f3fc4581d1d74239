"""The log as a graph: what the device is bound to run before what, what is wrong with that, and which waits count."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .device import Op, Use


@dataclass(eq=False)
class Wait:
    """Edges that one wait of the program makes: without it they are all gone."""

    op: Op
    edges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Which wait of the program it is, whatever the hop and the rank: who waits, and for what."""
        source = self.op.source
        return f"{caller(self.op)} waits for {'the device' if source is None else caller(source)}"

    def __str__(self) -> str:
        return f"{self.op} on {self.op.source}" if self.op.source is not None else str(self.op)


_RING = "buffers key_values dkv loop backends fused prepare ops attention ring wire"
RING = tuple(f"{module}." for module in _RING.split())
PASSED = (
    "lanes.",
    "local._LocalFence.",
    "buffers.RingCall.post",
    "buffers.RingCall.mark",
    "buffers.Arrival.wait",
    "buffers.RingBuffer.computed",
)
"""Functions that only pass on what others ask for."""


def caller(op: Op) -> str:
    """The function of a transport and the function of the ring that asked for an operation."""
    names = [name for name in op.site.split(" < ") if name and not name.startswith(PASSED)]
    ring = [name for name in names if name.startswith(RING)]
    comm = [name.rpartition(".")[2] for name in names if not name.startswith(RING) and "LocalWorld" not in name]
    place = ring[0].partition(".")[2].replace(".<locals>", "").replace(".<lambda>", "") if ring else ""
    return " of ".join([*comm[:1], *([place] if place else [])])


@dataclass
class Conflict:
    """Two operations that touch the same bytes, one of them writing, in the order in which they are meant to run."""

    first: Op
    second: Op
    use: Use  # what both touch


class Graph:
    """Operations by their place in the log, and edges between them.

    Edges are: the order of a stream; the record of an event to a wait for it; a send to its receive; what the host has
    waited for to what it enqueues later. The operations of one NCCL group run side by side, between what its stream ran
    before and after. A send may be over before its receive begins; `rendezvous` are the edges of the other extreme.
    `where` says what a place in memory is called.
    """

    def __init__(self, log: Sequence[Op], where: Callable[[Use], str] = str) -> None:
        self.log = list(log)
        self.where = where
        for place, op in enumerate(self.log):
            op.number = place
        self.before: list[set[int]] = [set() for _ in self.log]
        self.fixed: list[set[int]] = [set() for _ in self.log]  # the part of `before` that is nobody's wait
        self.waits: list[Wait] = []
        self.rendezvous: list[tuple[int, int]] = []
        self.mismatches: list[str] = []
        self._streams()
        self._transfers()
        self._values()

    def _fix(self, first: Iterable[int], second: int) -> None:
        known = list(first)
        self.fixed[second].update(known)
        self.before[second].update(known)

    def _waited(self, wait: Wait, first: int, second: int) -> None:
        wait.edges.append((first, second))
        self.before[second].add(first)

    def _streams(self) -> None:
        """Stream order, waits and what the host has waited for."""
        tails: dict[object, set[int]] = defaultdict(set)
        groups: dict[object, set[int]] = {}  # what the members of a group come after
        latest: dict[tuple[object, int], Op] = {}
        host: dict[int, Wait] = {}
        for place, op in enumerate(self.log):
            self._fix((earlier.number for earlier in op.after), place)
            if op.kind.startswith("synchronize"):
                host[place] = Wait(op)
            if op.kind == "synchronize event":
                self._wait(place, op)
            if op.stream is None:
                if op.kind == "synchronize":  # of the whole device
                    self._fix((tail for tail_set in tails.values() for tail in tail_set), place)
                continue
            if op.kind == "free":  # maybe by a thread that drops the last reference: the stream waits for nothing
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
                if op.group is None:  # the members of a group do not come after each other
                    latest[op.stream, op.thread] = op.host
                if op.host.number in host:
                    self._waited(host[op.host.number], op.host.number, place)
        self.waits += [wait for wait in host.values() if wait.edges]

    def _wait(self, place: int, op: Op) -> None:
        source = op.source
        if source is not None and self.log[source.number : source.number + 1] == [source]:  # else it was over before
            self.waits.append(Wait(op))
            self._waited(self.waits[-1], source.number, place)

    def _transfers(self) -> None:
        """The n-th send of a pair goes to its n-th receive."""
        ends: dict[tuple[object, ...], tuple[list[Op], list[Op]]] = defaultdict(lambda: ([], []))
        for op in self.log:
            if op.wire:
                ends[op.wire][op.kind == "recv"].append(op)
        for (_, source, destination, *_), (sends, receives) in ends.items():
            if len(sends) != len(receives):
                extra = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
                self.mismatches.append(
                    f"{source} sends {len(sends)} messages to {destination}, which receives {len(receives)}: "
                    f"{extra} has no other end"
                )
            for send, receive in zip(sends, receives, strict=False):
                self._fix([send.number], receive.number)
                receive.source = send
                if _size(send) != _size(receive):
                    self.mismatches.append(
                        f"{send} of {_size(send)} bytes is received by {receive} of {_size(receive)}"
                    )
                # a send is over when its receive has begun: after what that receive's group comes after
                self.rendezvous += [(earlier, send.number) for earlier in self.before[receive.number] - {send.number}]

    def _values(self) -> None:
        """A wait for a value of a word of memory is over when somebody has written it, or a larger one."""
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
        """The operations in an order that every edge agrees with; shorter where there is a cycle."""
        return linear(self.before)

    @cached_property
    def place(self) -> dict[int, int]:
        """Where each operation is in `order`."""
        return {number: place for place, number in enumerate(self.order)}

    @cached_property
    def after(self) -> list[list[int]]:
        """Successors."""
        return _turned(self.before)

    @cached_property
    def reach(self) -> list[int]:
        """For each operation those that are bound to run before it, as bits at their places in `order`."""
        reach = [0] * len(self.log)
        for place, number in enumerate(self.order):
            bits = 0
            for earlier in self.before[number]:
                bits |= reach[earlier]
            reach[number] = bits | 1 << place
        return reach

    def happens_before(self, first: Op, second: Op) -> bool:
        """Whether the first is bound to be over before the second begins."""
        return first is not second and bool(self.reach[second.number] >> self.place[first.number] & 1)

    def cycle(self, more: Iterable[tuple[int, int]] = ()) -> list[Op]:
        """Operations that wait for each other for ever, with these edges too; empty where there are none."""
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
        """Everything that is wrong, in words."""
        for name, more in (("eager", ()), ("rendezvous", self.rendezvous)):
            cycle = self.cycle(more)
            if cycle:
                text = " <- ".join(map(str, cycle))
                return [*self.mismatches, f"deadlock with {name} sends, each waits for the next: {text}"]
        return self.mismatches + [self.told(conflict) for conflict in self.races()]

    @property
    def cyclic(self) -> bool:
        """Whether operations wait for each other, even with eager sends."""
        return len(self.order) < len(self.log)

    @cached_property
    def conflicts(self) -> list[Conflict]:
        """Neighbouring conflicts; where all of them are ordered, so is every other; the first race is one of them."""
        live: Live = {}
        conflicts: list[Conflict] = []
        for number in self.order:
            op = self.log[number]
            conflicts += _meet(live, op, op.reads, False)
            conflicts += _meet(live, op, op.writes, True)
        return conflicts

    @cached_property
    def needs(self) -> dict[int, int]:
        """By operation, the places in `order` of those that it must come after."""
        needs: dict[int, int] = defaultdict(int)
        for conflict in self.conflicts:
            needs[conflict.second.number] |= 1 << self.place[conflict.first.number]
        return needs

    def races(self) -> list[Conflict]:
        """Conflicts whose order nothing forces."""
        return [pair for pair in self.conflicts if not self.happens_before(pair.first, pair.second)]

    def told(self, conflict: Conflict) -> str:
        """A race in words: where, and the two operations."""
        first, second = (f"{op} {_verb(op, conflict.use)} it" for op in (conflict.first, conflict.second))
        return f"race on {self.where(conflict.use)}: {first}, {second}, and nothing orders the two"

    def broken_without(self, wait: Wait) -> Conflict | None:
        """A conflict that becomes a race without this wait; None: the check would not notice."""
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

    def unnoticed(self) -> list[Wait]:
        """Waits that another implies: without any one of them the graph is still free of races."""
        return [wait for wait in self.waits if self.broken_without(wait) is None]


Live = dict[int, list[tuple[Op, int, bool]]]
"""By storage: operations, the bytes that nobody has written since, and whether the operation wrote them."""


def _meet(live: Live, op: Op, uses: Iterable[Use], writes: bool) -> Iterator[Conflict]:
    for use in uses:
        left = []
        for other, held, wrote in live.get(use.storage, []):
            common = held & use.bytes
            if common and (writes or wrote) and other is not op:
                yield Conflict(other, op, Use(use.storage, common))
            rest = held & ~use.bytes if writes and other is not op else held
            if rest:
                left.append((other, rest, wrote))
        live[use.storage] = [*left, (op, use.bytes, writes)]


def _verb(op: Op, use: Use) -> str:
    if op.kind in ("free", "allocate"):
        return f"{op.kind}s"
    wrote = any(write.storage == use.storage and write.bytes & use.bytes for write in op.writes)
    return "writes" if wrote else "reads"


def _size(op: Op) -> int:
    return sum(use.bytes.bit_count() for use in (*op.reads, *op.writes))


def _turned(before: Sequence[Iterable[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for number, earlier in enumerate(before):
        for previous in earlier:
            after[previous].append(number)
    return after


def linear(before: Sequence[set[int]], draws: Iterator[float] | None = None) -> list[int]:
    """An order that every edge agrees with: at each step the ready operation that draws least, or that is first."""
    after, left = _turned(before), [len(earlier) for earlier in before]
    ready = [(next(draws) if draws else 0.0, number) for number, count in enumerate(left) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for later in after[number]:
            left[later] -= 1
            if not left[later]:
                heapq.heappush(ready, (next(draws) if draws else 0.0, later))
    return order
