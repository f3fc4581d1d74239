"""Every interleaving of a program's partitions and loads, as states of their barriers; nothing but the order counts.

What a partition does to barriers and slots depends on nobody else's timing, so that one run's traces are all runs'. A
state is how far each partition is, which loads are in flight and what each barrier, slot and product is at; the search
visits every one that can be reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from .gluon_stand_in import Event

T = TypeVar("T")

Traces = dict[str, list[Event]]


class State(NamedTuple):
    """Tuples all through, so that two are compared by value."""

    at: tuple[int, ...]
    """Events done, by partition."""
    flying: frozenset[tuple[str, str, str, int]]
    """Loads that have not landed: (slot, load, barrier, bytes); and what is sent: (slot, send, partition, 0)."""
    barriers: tuple[tuple[int, int, int], ...]
    """(parity of the phase under way, arrivals in it, bytes it still waits for)."""
    slots: tuple[tuple[str, int], ...]
    """(the load or store whose tile it holds, or '' while one lands; products and sends that read it)."""
    reading: tuple[tuple[tuple[str, ...], ...], ...]
    """Slots of the products under way, oldest first, by partition."""


class Search:
    """Of the states of one program.

    ``counts``: arrivals that complete a phase, by barrier. A product must find the loads that it found in the traces.
    """

    def __init__(self, traces: Traces, counts: dict[str, int]) -> None:
        self.names, self.traces, self.counts = list(traces), list(traces.values()), counts
        self.barriers = {name: i for i, name in enumerate(counts)}
        events = [event for trace in self.traces for event in trace]
        slots = {slot for event in events if event.kind == "start" for slot in event.what}
        slots |= {event.what[0] for event in events if event.kind in ("load", "send")}
        slots |= {event.what for event in events if event.kind in ("put", "get")}
        self.slots = {name: i for i, name in enumerate(sorted(slots))}

    def run(self) -> tuple[int, str | None]:
        """(states visited, what goes wrong in one of them, or None)."""
        nobody = tuple(() for _ in self.names)
        fresh = State(
            (0,) * len(self.names), frozenset(), ((0, 0, 0),) * len(self.barriers), (("", 0),) * len(self.slots), nobody
        )
        seen, work = {fresh}, [fresh]
        while work:
            state = work.pop()
            try:
                following = list(self.following(state))
            except AssertionError as error:
                return len(seen), str(error)
            if not following and any(at < len(trace) for at, trace in zip(state.at, self.traces, strict=True)):
                return len(seen), "deadlock"
            new = set(following) - seen
            seen |= new
            work.extend(new)
        return len(seen), None

    def following(self, state: State) -> Iterator[State]:
        for load in state.flying:
            yield self.landed(state, load)
        for partition, trace in enumerate(self.traces):
            if state.at[partition] < len(trace):
                after = self.after(state, partition, trace[state.at[partition]])
                if after is not None:
                    yield after._replace(at=put(state.at, partition, state.at[partition] + 1))

    def after(self, state: State, partition: int, event: Event) -> State | None:
        """``state`` with the event done, or None where it must wait."""
        who, what, value = self.names[partition], event.what, event.value
        if event.kind == "wait":
            return None if state.barriers[self.barriers[what]][0] == value else state
        if event.kind in ("arrive", "expect"):
            return self.settled(state, what, *((value, 0) if event.kind == "arrive" else (1, value)))
        if event.kind == "load":
            (slot, load), (barrier, nbytes) = what, value
            state = self.filled(state, slot, load, "")
            return state._replace(flying=state.flying | {(slot, load, barrier, nbytes)})
        if event.kind == "start":
            for slot, wanted in zip(what, value, strict=True):
                state = self.read(state, who, slot, wanted, 1)
            return state._replace(reading=put(state.reading, partition, (*state.reading[partition], what)))
        if event.kind == "put":
            return self.filled(state, what, value, value)
        if event.kind == "get":
            return self.read(state, who, what, value)
        if event.kind == "send":
            slot, send = what
            state = self.read(state, who, slot, value, 1)
            return state._replace(flying=state.flying | {(slot, send, who, 0)})
        if event.kind == "sent":
            return state if sum(one[2] == who for one in state.flying) <= what else None
        under_way = state.reading[partition]  # drained, but for so many
        done = under_way[: len(under_way) - what]
        state = self.released(state, [slot for slots in done for slot in slots])
        return state._replace(reading=put(state.reading, partition, under_way[len(done) :]))

    def filled(self, state: State, slot: str, what: str, holds: str) -> State:
        index = self.slots[slot]
        before, readers = state.slots[index]
        assert readers == 0, f"{what} overwrites {slot} while a product reads it or {before} is sent"
        return state._replace(slots=put(state.slots, index, (holds, 0)))

    def read(self, state: State, who: str, slot: str, wanted: str, readers: int = 0) -> State:
        """By one more reader, where it stays."""
        index = self.slots[slot]
        holds, before = state.slots[index]
        assert holds == wanted, f"{who} reads {holds or 'nothing'} in {slot}, not {wanted}"
        return state._replace(slots=put(state.slots, index, (holds, before + readers)))

    def released(self, state: State, slots: list[str]) -> State:
        now = state.slots
        for slot in slots:
            holds, readers = now[self.slots[slot]]
            now = put(now, self.slots[slot], (holds, readers - 1))
        return state._replace(slots=now)

    def settled(self, state: State, name: str, arrivals: int, nbytes: int) -> State:
        index = self.barriers[name]
        parity, arrived, owed = state.barriers[index]
        arrived, owed = arrived + arrivals, owed + nbytes
        assert arrived <= self.counts[name], f"{name} has more arrivals than a phase takes"
        now = (1 - parity, 0, 0) if arrived == self.counts[name] and owed == 0 else (parity, arrived, owed)
        return state._replace(barriers=put(state.barriers, index, now))

    def landed(self, state: State, load: tuple[str, str, str, int]) -> State:
        slot, name, barrier, nbytes = load
        state = state._replace(flying=state.flying - {load})
        if barrier in self.names:  # a send
            return self.released(state, [slot])
        readers = state.slots[self.slots[slot]][1]
        state = state._replace(slots=put(state.slots, self.slots[slot], (name, readers)))
        return self.settled(state, barrier, 0, -nbytes)


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """``values`` with one replaced."""
    return (*values[:index], value, *values[index + 1 :])
