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
        if event.kind == "wait":
            return None if state.barriers[self.barriers[event.what]][0] == event.value else state
        if event.kind == "arrive":
            return self.settled(state, event.what, event.value, 0)
        if event.kind == "expect":
            return self.settled(state, event.what, 1, event.value)
        if event.kind == "load":
            return self.loaded(state, *event.what, *event.value)
        if event.kind == "start":
            return self.started(state, partition, event.what, event.value)
        if event.kind == "put":
            return self.written(state, event.what, event.value)
        if event.kind == "get":
            return self.read(state, partition, event.what, event.value)
        if event.kind == "send":
            slot, send = event.what
            return self.sending(state, partition, slot, send, event.value)
        if event.kind == "sent":
            return state if sum(one[2] == self.names[partition] for one in state.flying) <= event.what else None
        return self.drained(state, partition, event.what)

    def written(self, state: State, slot: str, value: str) -> State:
        holds, readers = state.slots[self.slots[slot]]
        assert readers == 0, f"{value} overwrites {slot} while {holds} is read"
        return state._replace(slots=put(state.slots, self.slots[slot], (value, 0)))

    def read(self, state: State, partition: int, slot: str, wanted: str) -> State:
        holds = state.slots[self.slots[slot]][0]
        assert holds == wanted, f"{self.names[partition]} reads {holds or 'nothing'} in {slot}, not {wanted}"
        return state

    def sending(self, state: State, partition: int, slot: str, send: str, wanted: str) -> State:
        holds, readers = self.read(state, partition, slot, wanted).slots[self.slots[slot]]
        flying = state.flying | {(slot, send, self.names[partition], 0)}
        return state._replace(flying=flying, slots=put(state.slots, self.slots[slot], (holds, readers + 1)))

    def settled(self, state: State, name: str, arrivals: int, nbytes: int) -> State:
        index = self.barriers[name]
        parity, arrived, owed = state.barriers[index]
        arrived, owed = arrived + arrivals, owed + nbytes
        assert arrived <= self.counts[name], f"{name} has more arrivals than a phase takes"
        now = (1 - parity, 0, 0) if arrived == self.counts[name] and owed == 0 else (parity, arrived, owed)
        return state._replace(barriers=put(state.barriers, index, now))

    def loaded(self, state: State, slot: str, load: str, barrier: str, nbytes: int) -> State:
        index = self.slots[slot]
        assert state.slots[index][1] == 0, f"{load} overwrites {slot} while a product reads it"
        flying = state.flying | {(slot, load, barrier, nbytes)}
        return state._replace(flying=flying, slots=put(state.slots, index, ("", 0)))

    def landed(self, state: State, load: tuple[str, str, str, int]) -> State:
        slot, name, barrier, nbytes = load
        index = self.slots[slot]
        if barrier in self.names:  # a send
            holds, readers = state.slots[index]
            return state._replace(flying=state.flying - {load}, slots=put(state.slots, index, (holds, readers - 1)))
        state = state._replace(
            flying=state.flying - {load}, slots=put(state.slots, index, (name, state.slots[index][1]))
        )
        return self.settled(state, barrier, 0, -nbytes)

    def started(self, state: State, partition: int, slots: tuple[str, ...], loads: tuple[str, ...]) -> State:
        now = state.slots
        for slot, wanted in zip(slots, loads, strict=True):
            holds, readers = now[self.slots[slot]]
            assert holds == wanted, f"{self.names[partition]} reads {holds or 'nothing'} in {slot}, not {wanted}"
            now = put(now, self.slots[slot], (holds, readers + 1))
        reading = put(state.reading, partition, (*state.reading[partition], slots))
        return state._replace(slots=now, reading=reading)

    def drained(self, state: State, partition: int, left: int) -> State:
        under_way = state.reading[partition]
        done, now = under_way[: len(under_way) - left], state.slots
        for slot in (slot for slots in done for slot in slots):
            holds, readers = now[self.slots[slot]]
            now = put(now, self.slots[slot], (holds, readers - 1))
        reading = put(state.reading, partition, under_way[len(under_way) - left :] if left else ())
        return state._replace(slots=now, reading=reading)


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """``values`` with one replaced."""
    return (*values[:index], value, *values[index + 1 :])
