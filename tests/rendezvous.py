"""Runs schedules with transfers that only start when both ends are there, the strictest way there is.

Every rank is a coroutine that issues what the ring loop issues, in its order. Groups of transfers run one after the
other per rank; a message moves when both its ends are in the group that runs. Contents are sets: K/V are the shard's
number, sums are counts of the ranks that added to them. A slot that waits for an arrival holds nothing, so that whoever
still wanted what was in it fails.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ringattn.ring.schedule import Hop, Schedule

Contents = dict[int, Any]


@dataclass
class Send:
    peer: int
    shard: int
    content: Any


@dataclass
class Receive:
    peer: int
    shard: int
    slots: Contents
    slot: int


@dataclass
class Group:
    key: tuple[str, int]
    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return not self.sends and not self.receives

    def send(self, peer: int | None, shard: int, content: Any) -> None:
        if peer is not None:
            assert content is not None, "sent before it was there"
            self.sends.append(Send(peer, shard, content))

    def receive(self, peer: int | None, shard: int, slots: Contents, slot: int | None) -> None:
        if peer is not None:
            assert slot is not None
            slots[slot] = None
            self.receives.append(Receive(peer, shard, slots, slot))


Program = Generator[Group, None, None]  # yields the group that it waits for


@dataclass
class Rank:
    """One rank of the backward or the forward: its slots, and the groups it has issued."""

    plan: Schedule
    rank: int
    queue: deque[Group] = field(default_factory=deque)
    kv: Contents = field(default_factory=dict)
    sums: Contents = field(default_factory=dict)
    home: Counter[int] = field(default_factory=Counter)
    done: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"out": [], "dq": [], "dkdv": []})

    @property
    def hops(self) -> tuple[Hop | None, ...]:
        return (*self.plan.hops(self.rank), None)

    def held(self, hop: Hop) -> int | None:
        return hop.shard if hop.index == 0 else self.kv.get(hop.kv_slot) if hop.kv_slot is not None else None

    def compute(self, what: str, hop: Hop) -> None:
        if hop.computes:
            assert self.held(hop) == hop.shard, f"{what} of hop {hop.index}: its slot holds {self.held(hop)}"
            self.done[what].append((self.rank, hop.shard))

    def post_kv(self, hop: Hop, following: Hop | None) -> Group:
        group = Group(("kv", hop.index))
        group.send(hop.kv_to, hop.shard, self.held(hop))
        if following is not None:
            assert following.kv_slot is None or following.kv_slot != hop.kv_slot
            group.receive(following.kv_from, following.shard, self.kv, following.kv_slot)
        self.queue.append(group)
        return group

    def post_sums(self, hop: Hop, following: Hop | None, last: int) -> Group:
        group, own = Group(("sums", hop.index)), self.plan.hops(self.rank)[0]
        content = None if hop.sums_slot is None else self.sums[hop.sums_slot]
        group.send(hop.sums_to, hop.shard, content)
        coming = [following] if following is not None else []
        coming += [own] if hop.index == last else []
        used = [one.sums_slot for one in coming if one.sums_from is not None]
        assert len({*used, hop.sums_slot}) == len(used) + 1, "one slot twice in a group"
        for one in coming:
            group.receive(one.sums_from, one.shard, self.sums, one.sums_slot)
        self.queue.append(group)
        return group

    def forward(self) -> Program:
        for hop, following in pairwise(self.hops):
            assert hop is not None
            arriving = self.post_kv(hop, following)
            self.compute("out", hop)
            yield arriving

    def backward(self) -> Program:
        local, *remote = self.hops
        assert local is not None
        arriving = self.post_kv(local, remote[0])
        self.compute("dq", local)
        sums = Group(("sums", 0))
        last = max(hop for hop in range(self.plan.world) if not hop or self.plan.visits[self.rank][hop])
        for hop, following in pairwise(remote):
            assert hop is not None
            yield arriving
            arriving = self.post_kv(hop, following)
            yield sums  # the sums of the ranks before, or this rank's slot that is free again
            self.add(hop)
            sums = self.post_sums(hop, following, last)
            self.compute("dq", hop)
        yield sums
        self.compute("dkdv", local)
        if local.sums_from is not None:
            assert local.sums_slot is not None
            self.home += self.sums[local.sums_slot]
        self.home[self.rank] += local.computes

    def add(self, hop: Hop) -> None:
        """The dK/dV kernel: what arrived, or zero, plus this rank's part."""
        self.compute("dkdv", hop)
        if hop.sums_slot is not None:
            before = self.sums[hop.sums_slot] if hop.sums_from is not None else Counter[int]()
            assert before is not None, "added to before it was there"
            self.sums[hop.sums_slot] = before + Counter([self.rank] if hop.computes else [])


def run(ranks: list[Rank], programs: list[Program]) -> None:
    """Run all programs to their ends; AssertionError where they wait for each other for ever."""
    waits: list[Group | None] = [Group(("start", 0)) for _ in programs]
    while any(wait is not None for wait in waits):
        moved = [advance(waits, rank, program) for rank, program in enumerate(programs)]
        met = [meet(ranks, rank) for rank in ranks]
        assert any(moved) or any(met), "deadlock"
    assert not any(not group.over for rank in ranks for group in rank.queue), "a message that nobody takes"


def advance(waits: list[Group | None], rank: int, program: Program) -> bool:
    wait = waits[rank]
    if wait is None or not wait.over:
        return False
    waits[rank] = next(program, None)
    return True


def meet(ranks: list[Rank], rank: Rank) -> bool:
    """Move what can move out of the group that runs on ``rank``."""
    while rank.queue and rank.queue[0].over:
        rank.queue.popleft()
    if not rank.queue:
        return False
    group, before = rank.queue[0], len(rank.queue[0].sends)
    for send in [*group.sends]:
        theirs = ranks[send.peer].queue[0] if ranks[send.peer].queue else Group(("none", 0))
        for receive in [*theirs.receives]:
            if receive.peer == rank.rank and receive.shard == send.shard:
                assert theirs.key == group.key
                receive.slots[receive.slot] = send.content
                group.sends.remove(send)
                theirs.receives.remove(receive)
    return len(group.sends) < before


def _run(plan: Schedule, program: Callable[[Rank], Program]) -> list[Rank]:
    ranks = [Rank(plan, rank) for rank in range(plan.world)]
    run(ranks, [program(rank) for rank in ranks])
    return ranks


def run_forward(plan: Schedule) -> list[tuple[int, int]]:
    """(rank, shard) of everything that a forward computes."""
    return [pair for rank in _run(plan, Rank.forward) for pair in rank.done["out"]]


def run_backward(plan: Schedule) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[Counter[int]]]:
    """(rank, shard) of every dQ and dK/dV computed, and for each shard how often each rank's part came home."""
    ranks = _run(plan, Rank.backward)
    dq, dkdv = ([pair for rank in ranks for pair in rank.done[what]] for what in ("dq", "dkdv"))
    return dq, dkdv, [rank.home for rank in ranks]
