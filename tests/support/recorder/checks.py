"""What must hold of a recorded graph, and which waits it would hold without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .graph import Graph, Wait
from .memory import Use
from .operation import Recorded

Where = Callable[[Use], str]


@dataclass
class Conflict:
    """Two operations that touch the same bytes, one of them writing, in the order in which they are meant to run."""

    first: Recorded
    second: Recorded
    use: Use  # what both touch


@dataclass
class Checked:
    """A graph with its conflicts."""

    graph: Graph
    where: Where  # what a place in memory is called
    conflicts: list[Conflict] = field(default_factory=list)
    needs: dict[int, int] = field(default_factory=dict)  # by operation, the places in order that it must come after

    def __post_init__(self) -> None:
        if self.cyclic:
            return  # there is no order
        self.conflicts = list(_conflicts(self.graph))
        for conflict in self.conflicts:
            second = conflict.second.number
            self.needs[second] = self.needs.get(second, 0) | 1 << self.graph.place[conflict.first.number]

    @property
    def cyclic(self) -> bool:
        """Whether operations wait for each other, even with eager sends."""
        return len(self.graph.order) < len(self.graph.log)

    def problems(self) -> list[str]:
        """Everything that is wrong, in words."""
        found = list(self.graph.problems)
        for name, more in (("eager", ()), ("rendezvous", self.graph.rendezvous)):
            cycle = self.graph.cycle(more)
            if cycle:
                told = " <- ".join(map(str, cycle))
                found.append(f"deadlock with {name} sends, each waits for the next: {told}")
                return found
        return found + [self.told(conflict) for conflict in self.races()]

    def races(self) -> list[Conflict]:
        """Conflicts whose order nothing forces."""
        happens = self.graph.happens_before
        return [one for one in self.conflicts if not happens(one.first.number, one.second.number)]

    def told(self, conflict: Conflict) -> str:
        """A race in words: where, and the two operations."""
        verbs = [_verb(op, conflict.use) for op in (conflict.first, conflict.second)]
        return (
            f"race on {self.where(conflict.use)}: {conflict.first} {verbs[0]} it, {conflict.second} {verbs[1]} it, "
            "and nothing orders the two"
        )

    def broken_without(self, wait: Wait) -> Conflict | None:
        """A conflict that becomes a race without this wait; None: the check would not notice."""
        graph, gone = self.graph, set(wait.edges)
        reach: dict[int, int] = {}
        changed = sorted({graph.place[second] for _, second in gone})
        pending = set(changed)
        while pending:
            place = min(pending)
            pending.discard(place)
            number = graph.order[place]
            bits = 1 << place
            for earlier in graph.before[number]:
                if (earlier, number) not in gone or earlier in graph.fixed[number]:
                    bits |= reach.get(earlier, graph.reach[earlier])
            if bits == graph.reach[number]:
                continue
            reach[number] = bits
            lost = self.needs.get(number, 0) & ~bits
            if lost:
                first = graph.log[graph.order[lost.bit_length() - 1]]
                return next(c for c in self.conflicts if c.second.number == number and c.first is first)
            pending.update(graph.place[later] for later in graph.after[number])
        return None

    def unnoticed(self) -> list[Wait]:
        """Waits that another implies: without any one of them the graph is still free of races."""
        return [wait for wait in self.graph.waits if self.broken_without(wait) is None]


Live = dict[int, list[tuple[Recorded, int, bool]]]
"""By storage: operations, the bytes that nobody has written since, and whether the operation wrote them."""


def _conflicts(graph: Graph) -> Iterator[Conflict]:
    """Neighbouring conflicts; where all of them are ordered, so is every other, and the first race is one of them."""
    live: Live = {}
    for number in graph.order:
        op = graph.log[number]
        yield from _meet(live, op, op.reads, False)
        yield from _meet(live, op, op.writes, True)


def _meet(live: Live, op: Recorded, uses: Iterable[Use], writes: bool) -> Iterator[Conflict]:
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


def _verb(op: Recorded, use: Use) -> str:
    if op.kind in ("free", "allocate"):
        return f"{op.kind}s"
    wrote = any(one.storage == use.storage and one.bytes & use.bytes for one in op.writes)
    return "writes" if wrote else "reads"
