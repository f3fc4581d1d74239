"""The recorder of stream operations finds races and implied waits like brute force does."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from ..support.cuda.device import Op, Use
from ..support.cuda.graph import Graph, linear
from ..support.cuda.memory import footprint
from ..support.cuda.recorder import Recorder

Program = list[tuple[str, int, int]]


def programs() -> st.SearchStrategy[Program]:
    step = st.tuples(st.sampled_from(["read", "write", "record", "wait"]), st.integers(0, 2), st.integers(0, 2))
    return st.lists(step, max_size=25)


def run(program: Program) -> Graph:
    """Run the program on three streams, three words of memory and three events."""
    recorder = Recorder()
    streams, events = [recorder.stream() for _ in range(3)], [recorder.event() for _ in range(3)]
    for kind, stream, which in program:
        if kind == "record":
            events[which].record(streams[stream])
        elif kind == "wait" and events[which].last is not None:
            streams[stream].wait_event(events[which])
        elif kind in ("read", "write"):
            use = (Use(which, 1 << stream | 1),)
            recorder.add(
                kind, streams[stream], reads=use if kind == "read" else (), writes=use if kind == "write" else ()
            )
    return Graph(recorder.log)


def slow_races(graph: Graph, missing: set[tuple[int, int]]) -> list[tuple[Op, Op]]:
    """Return all races by following the predecessors of each operation, over all pairs of operations."""
    before: list[set[int]] = []
    for number, earlier in enumerate(graph.before):
        predecessors = [op for op in earlier if (op, number) not in missing or op in graph.fixed[number]]
        before.append({*predecessors, *(earlier_op for op in predecessors for earlier_op in before[op])})
    races = []
    for first, second in itertools.combinations(graph.log, 2):
        pairs = [(a, b) for a in first.writes for b in (*second.reads, *second.writes)]
        pairs += [(a, b) for a in first.reads for b in second.writes]
        shared = any(a.storage == b.storage and a.bytes & b.bytes for a, b in pairs)
        if shared and first.number not in before[second.number]:
            races.append((first, second))
    return races


@given(programs(), st.integers(0, 9))
def test_races_and_implied_waits_equal_brute_force(program: Program, seed: int) -> None:
    graph = run(program)
    slow = slow_races(graph, set())
    assert {(race.first, race.second) for race in graph.races()} <= set(slow)
    assert bool(graph.races()) == bool(slow)
    for wait in [] if slow else graph.waits:
        broken, without_it = graph.broken_without(wait), slow_races(graph, set(wait.edges))
        assert (broken is not None) == bool(without_it)
        assert broken is None or (broken.first, broken.second) in without_it
    for order in (graph.order, linear(graph.before, iter(random.Random(seed).random, None))):
        place = {number: index for index, number in enumerate(order)}
        assert len(place) == len(graph.log)
        assert all(place[first] < place[second] for second in place for first in graph.before[second])


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=3))
def test_footprint_of_strided_tensors(itemsize: int, offset: int, dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(count for count, _ in dims), tuple(stride for _, stride in dims)
    indices = itertools.product(*map(range, shape))
    places = [offset + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
    covered = {place * itemsize + byte for place in places for byte in range(itemsize)}
    assert footprint(itemsize, offset, shape, strides) == sum(1 << byte for byte in covered)
