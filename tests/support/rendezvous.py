"""Runs schedules with transfers that only start when both ends are there, the strictest way there is.

Every rank is a coroutine that issues what the ring loop issues, in its order. Each level of the ring has a queue of
groups per rank, which run one after the other once what they wait for is over; a message moves when both its ends are
in a group that runs. Contents are sets: K/V are the shard's number, dK/dV are counts of the ranks that added to them.
From when its group runs until it arrives, a slot holds nothing, so that whoever still wanted what was in it fails.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringattn.ring.buffers import BETWEEN, INSIDE, Key, Kind
from ringattn.ring.dkv import ARRIVING_SLOT, LEAVING_SLOT
from ringattn.ring.schedule.plan import Plan
from ringattn.ring.schedule.schedule import Hop, Schedule

Part = tuple[int, int]  # a chunk of a slot
Tag = tuple[str, int, int]  # what a message carries: K/V or dK/dV, of which shard, which chunk
Pairs = list[tuple[int, int]]


@dataclass(eq=False)
class Group:
    key: Key
    level: int
    sends: list[tuple[int, Tag, Callable[[], Any]]] = field(default_factory=list)
    receives: list[tuple[int, Tag, Store, Part]] = field(default_factory=list)
    after: list[Group] = field(default_factory=list)
    leaving: list[tuple[int, Tag, Any]] = field(default_factory=list)  # the sends, with what they carry, once it runs
    runs: bool = False

    @property
    def over(self) -> bool:
        return self.runs and not self.leaving and not self.receives

    def start(self) -> None:
        if self.runs or not all(group.over for group in self.after):
            return
        self.runs = True
        self.leaving = [(peer, tag, read()) for peer, tag, read in self.sends]
        assert all(content is not None for *_, content in self.leaving), f"{self.key}: sent before it was there"
        for _, _, store, part in self.receives:
            store.content[part] = None


@dataclass
class Store:
    """Slots: what is in each chunk of each, and the groups that fill it or send from it."""

    content: dict[Part, Any] = field(default_factory=dict)
    users: dict[Part, list[Group]] = field(default_factory=dict)

    def busy(self, part: Part, group: Group | None) -> None:
        if group is not None:
            self.users.setdefault(part, []).append(group)

    def free(self, part: Part) -> list[Group]:
        return self.users.pop(part, [])


Program = Generator[Group, None, None]  # yields the group that it waits for


@dataclass
class Rank:
    """One rank of the backward or the forward: its slots, and the groups it has issued."""

    plan: Plan
    prefetch: int
    chunks: int
    phase: str
    queues: tuple[deque[Group], deque[Group]] = field(default_factory=lambda: (deque(), deque()))
    issued: list[Key] = field(default_factory=list)
    kv: Store = field(default_factory=Store)
    dkv: Store = field(default_factory=Store)
    kv_came: dict[Part, Group] = field(default_factory=dict)  # per hop and chunk
    dkv_came: dict[Part, Group] = field(default_factory=dict)
    rail_came: dict[int, Group] = field(default_factory=dict)  # per chunk
    home: dict[int, Counter[int]] = field(default_factory=dict)  # per chunk, whose parts of the own shard's dK/dV
    done: dict[str, Pairs] = field(default_factory=lambda: {"out": [], "dq": [], "dkdv": []})

    def post(self, group: Group) -> Group | None:
        if not group.sends and not group.receives:
            return None
        assert not self.issued or self.issued[-1] < group.key, "out of the one order"
        self.issued.append(group.key)
        self.queues[group.level].append(group)
        return group

    def advance(self, now: Hop, kind: Kind = Kind.KV) -> None:
        for coming in self.plan.arrivals(now.index, self.prefetch):
            for chunk in range(self.chunks):
                self.post_kv(now, coming, chunk, kind)

    def post_kv(self, now: Hop, coming: Hop, chunk: int, kind: Kind) -> None:
        by_rail = self.plan.is_outer_root(coming)
        leaving = self.plan.hops[coming.index - (self.plan.inner if by_rail else 1)]
        kind, to = (Kind.RAIL, leaving.rail_to) if by_rail else (kind, leaving.kv_to)
        group = Group(Key(self.phase, now.index, kind, coming.index, chunk), BETWEEN if by_rail else INSIDE)
        if to is not None:
            group.sends.append((to, ("kv", leaving.shard, chunk), lambda: self.held(leaving, chunk)))
            came = self.kv_came.get((leaving.index, chunk))
            group.after += [came] if came is not None and came.level != group.level else []
        if coming.kv_from is not None:
            assert coming.kv_slot is not None
            group.after += self.kv.free((coming.kv_slot, chunk))
            group.receives.append((coming.kv_from, ("kv", coming.shard, chunk), self.kv, (coming.kv_slot, chunk)))
            self.kv_came[coming.index, chunk] = group
        posted = self.post(group)
        for hop in (leaving if to is not None else None, coming if coming.kv_from is not None else None):
            if hop is not None and hop.kv_slot is not None:
                self.kv.busy((hop.kv_slot, chunk), posted)

    def held(self, hop: Hop, chunk: int) -> int | None:
        if hop.index == 0:
            return hop.shard
        return None if hop.kv_slot is None else self.kv.content.get((hop.kv_slot, chunk))

    def compute(self, what: str, hop: Hop, chunk: int) -> Program:
        if not hop.computes:
            return
        if hop.index:
            yield self.kv_came[hop.index, chunk]
        held = self.held(hop, chunk)
        assert held == hop.shard, f"{what} of hop {hop.index}: its slot holds {held}"
        self.done[what].append((self.plan.rank, hop.shard))

    def forward(self) -> Program:
        for hop in self.plan.hops:
            self.advance(hop)
            for chunk in range(self.chunks):
                yield from self.compute("out", hop, chunk)

    def backward(self) -> Program:
        for base, *others in self.plan.outer_steps:
            self.advance(base)
            for chunk in range(self.chunks):
                yield from self.compute("dq", base, chunk)
            for hop in others:
                if self.prefetch < 2:
                    self.advance(hop)
                for chunk in range(self.chunks):
                    yield from self.add(hop, chunk)
                    self.post_dkv(hop, chunk)
                    if self.prefetch > 1 and chunk == self.chunks - 1:
                        self.advance(hop, Kind.PREFETCH)
                    yield from self.compute("dq", hop, chunk)
            if self.plan.two_level:
                for chunk in range(self.chunks):
                    yield from self.absorb(chunk)
                    if base.index:
                        yield from self.add(base, chunk)
                        self.send_return(base, chunk)
        for chunk in range(self.chunks):
            yield from self.absorb(chunk)
            yield from self.compute("dkdv", self.plan.hops[0], chunk)
            self.home[chunk] = self.home.get(chunk, Counter()) + Counter([self.plan.rank] * self.plan.hops[0].computes)

    def add(self, hop: Hop, chunk: int) -> Program:
        """The dK/dV kernel: what arrived, or zero, plus this rank's part."""
        came, base = self.dkv_came.get((hop.index, chunk)), self.plan.is_outer_root(hop)
        if not hop.computes and (came is None or not base):
            return
        slot = LEAVING_SLOT if base else hop.dkv_slot
        assert slot is not None
        if base or came is None:
            yield from self.dkv.free((slot, chunk))
        yield from self.compute("dkdv", hop, chunk)
        before = Counter[int]()
        if came is not None:
            before = yield from self.read(came, (hop.dkv_slot, chunk))
        self.dkv.content[slot, chunk] = before + Counter([self.plan.rank] if hop.computes else [])

    def read(self, came: Group, part: tuple[int | None, int]) -> Generator[Group, None, Counter[int]]:
        yield came
        slot, chunk = part
        assert slot is not None
        content = self.dkv.content[slot, chunk]
        assert content is not None, "added to before it was there"
        return Counter(content)

    def post_dkv(self, hop: Hop, chunk: int) -> None:
        group = Group(Key(self.phase, hop.index, Kind.DKV, hop.index, chunk), INSIDE)
        if hop.dkv_slot is not None:
            self.send_dkv(group, hop.dkv_to, hop.shard, (hop.dkv_slot, chunk))
        coming = [one for one in self.plan.hops[hop.index + 1 : hop.index + 2] if not self.plan.is_outer_root(one)]
        coming += [self.plan.dkv_returns[hop.index]] if hop.index in self.plan.dkv_returns else []
        coming = [one for one in coming if one.dkv_from is not None]
        used = [one.dkv_slot for one in coming]
        assert len({*used, hop.dkv_slot}) == len(used) + 1, "one slot twice in a group"
        for one in coming:
            assert one.dkv_from is not None and one.dkv_slot is not None
            self.receive_dkv(group, one.dkv_from, one.shard, (one.dkv_slot, chunk))
            self.dkv_came[one.index, chunk] = group
        self.post(group)

    def send_return(self, base: Hop, chunk: int) -> None:
        last = base.index + self.plan.inner - 1
        group = Group(Key(self.phase, last, Kind.RETURN, 0, chunk), BETWEEN)
        self.send_dkv(group, base.return_to, base.shard, (LEAVING_SLOT, chunk))
        if base.return_from is not None:
            self.receive_dkv(group, base.return_from, self.plan.rank, (ARRIVING_SLOT, chunk))
            self.rail_came[chunk] = group
        self.post(group)

    def send_dkv(self, group: Group, to: int | None, shard: int, part: Part) -> None:
        if to is not None:
            group.sends.append((to, ("dkv", shard, part[1]), lambda: self.dkv.content.get(part)))
            self.dkv.busy(part, group)

    def receive_dkv(self, group: Group, source: int, shard: int, part: Part) -> None:
        group.after += self.dkv.free(part)
        group.receives.append((source, ("dkv", shard, part[1]), self.dkv, part))
        self.dkv.busy(part, group)

    def absorb(self, chunk: int) -> Program:
        own = self.plan.hops[0]
        came, slot = self.rail_came.pop(chunk, None), ARRIVING_SLOT
        if came is None:
            came, slot = self.dkv_came.pop((own.index, chunk), None), own.dkv_slot or 0
        if came is not None:
            more = yield from self.read(came, (slot, chunk))
            self.home[chunk] = self.home.get(chunk, Counter()) + more


def run(ranks: list[Rank], programs: list[Program]) -> None:
    """Run all programs to their ends; AssertionError where they wait for each other for ever."""
    waits: list[Group | None] = [Group(Key("start", 0, Kind.KV, 0, 0), INSIDE, runs=True) for _ in programs]
    moved = True
    while moved:
        moved = any([step(waits, rank, program) for rank, program in enumerate(programs)])
        moved |= any([meet(ranks, rank, level) for rank in range(len(ranks)) for level in (INSIDE, BETWEEN)])
    stuck = {rank: str(wait.key) for rank, wait in enumerate(waits) if wait is not None}
    assert not stuck, f"deadlock: ranks wait for {stuck}"
    assert all(group.over for rank in ranks for queue in rank.queues for group in queue), "a message that nobody takes"


def step(waits: list[Group | None], rank: int, program: Program) -> bool:
    wait = waits[rank]
    if wait is None or not wait.over:
        return False
    waits[rank] = next(program, None)
    return True


def meet(ranks: list[Rank], rank: int, level: int) -> bool:
    """Move what can move out of the group that runs on ``rank``; whether anything changed."""
    group, changed = head(ranks[rank].queues[level])
    if group is None:
        return changed
    for send in [*group.leaving]:
        peer, tag, content = send
        theirs, _ = head(ranks[peer].queues[level])
        for receive in [*theirs.receives] if theirs is not None else []:
            if receive[:2] == (rank, tag):
                assert theirs is not None and theirs.key == group.key
                receive[2].content[receive[3]] = content
                group.leaving.remove(send)
                theirs.receives.remove(receive)
                changed = True
    return changed


def head(queue: deque[Group]) -> tuple[Group | None, bool]:
    """The group that runs, if one does; whether that has changed."""
    changed = False
    while queue and queue[0].over:
        queue.popleft()
        changed = True
    if not queue:
        return None, changed
    before = queue[0].runs
    queue[0].start()
    return (queue[0] if queue[0].runs else None), changed or queue[0].runs != before


def steps(plan: Schedule, rank: int) -> Plan:
    """A plan without anything to compute."""
    hops = plan.hops(rank)
    return Plan(
        rank=rank,
        hops=hops,
        inner=plan.inner,
        hop_masks=(),
        lengths=(),
        longest=0,
        send_index=None,
        last=0,
        slots=plan.slots,
        edges=((), ()),
        dkv_returns={
            base.index + active_end(plan, base.shard, base.index): base
            for base in hops[:: plan.inner]
            if base.dkv_from is not None
        },
    )


def active_end(plan: Schedule, shard: int, begin: int) -> int:
    """How far from its base a shard is last computed with in the turn that begins at a hop."""
    return max(step for step in range(plan.inner) if not step or plan.active[shard][begin + step])


def run_ranks(plan: Schedule, phase: str, *, prefetch: int = 2, chunks: int = 1) -> list[Rank]:
    """All ranks after a forward or a backward."""
    ranks = [Rank(steps(plan, rank), prefetch, chunks, phase) for rank in range(plan.world)]
    run(ranks, [rank.forward() if phase == "forward" else rank.backward() for rank in ranks])
    return ranks


def gathered(ranks: Sequence[Rank], what: str) -> Pairs:
    """(rank, shard) of everything of a kind that was computed, once per chunk."""
    return [pair for rank in ranks for pair in rank.done[what]]
