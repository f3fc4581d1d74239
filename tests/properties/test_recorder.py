"""The recorder of stream operations finds missing waits, in programs with known races and against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.comm.cuda_threads import on_device

from ..support.cuda.device import Op, Use
from ..support.cuda.graph import Graph, linear
from ..support.cuda.memory import footprint
from ..support.cuda.nccl import Communicator, Fabric
from ..support.cuda.operators import acting
from ..support.cuda.recorder import GPU, Recorder, install
from ..support.cuda.replay import Replay, without


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, Fabric]]:
    recorder, fabric = install(monkeypatch)
    fabric.moves = False
    with torch.cuda.device(GPU):
        yield recorder, fabric


@pytest.fixture
def recorder(both: tuple[Recorder, Fabric]) -> Iterator[Recorder]:
    with acting(both[0], 0):
        yield both[0]


def graph_of(recorder: Recorder) -> Graph:
    recorder.end()
    return Graph(recorder.log, lambda use: recorder.memory.storages[use.storage].name or "a buffer")


def check(recorder: Recorder, *fragments: str) -> None:
    """Check that there is one problem with these words, or none if no words are given."""
    problems = graph_of(recorder).problems()
    assert len(problems) == bool(fragments), problems
    assert all(fragment in problems[0] for fragment in fragments), problems


def buffer(recorder: Recorder, name: str = "x", count: int = 4) -> torch.Tensor:
    made = torch.zeros(count, device=GPU)
    recorder.name(made, name)
    return made


def compute() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(compute())
    return event


def early_record(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    ready = recorded()
    x.fill_(3)
    transfer.wait_event(ready)


def right_record(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    x.fill_(3)
    transfer.wait_stream(compute())


def late_record(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    """Wait before the event is recorded again: a wait uses the newest record at that time."""
    ready = recorded()
    transfer.wait_event(ready)
    x.fill_(3)
    ready.record(compute())


def host_waits(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    x.fill_(3)
    compute().synchronize()


def host_reads(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    x.fill_(3)
    x.sum().item()


def other_bytes(x: torch.Tensor, transfer: torch.cuda.Stream) -> None:
    transfer.wait_stream(compute())
    x[::2].fill_(3)


@pytest.mark.parametrize(
    ("program", "ordered"),
    [
        (early_record, False), (right_record, True), (late_record, False), (host_waits, True), (host_reads, True),
        (other_bytes, True),
    ],
)  # fmt: skip
def test_operations_that_order_two_streams(program: Callable[..., None], ordered: bool, recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream(priority=-1)
    with recorder.labelled("hop 2"):
        program(x, transfer)
    with torch.cuda.stream(transfer):
        x[1::2].fill_(4)
    race = ("race on x: #", "op fill_ (hop 2) writes it, #", "transfer stream", "and nothing orders the two")
    check(recorder, *(() if ordered else race))


@pytest.mark.parametrize("how", ["allocated", "freed", "freed behind a wait", "freed with record_stream"])
def test_memory_allocated_on_another_stream(recorder: Recorder, how: str) -> None:
    """The owning stream may still use the old contents, or give the memory to the next allocation."""
    transfer, x = torch.cuda.Stream(), torch.empty(4, device=GPU)
    if how != "allocated":
        transfer.wait_stream(compute())
    with torch.cuda.stream(transfer):
        x.fill_(1)
    if how in ("allocated", "freed behind a wait"):
        compute().wait_stream(transfer)
    if how == "freed with record_stream":
        x.record_stream(transfer)
    del x
    messages = {"allocated": ": allocate allocates it", "freed": ": free frees it"}
    check(recorder, *((messages[how], "fill_ writes it") if how in messages else ()))


def test_invalid_uses_of_events_raise(recorder: Recorder) -> None:
    event = torch.cuda.Event()
    with pytest.raises(AssertionError, match="never recorded"):
        torch.cuda.Stream().wait_event(event)
    with pytest.raises(AssertionError, match="without a stream"):
        event.record()
    event.record(compute())
    with pytest.raises(RuntimeError, match="event device 1 does not match recording stream's device 0"):
        event.record(torch.cuda.current_stream(0))
    with torch.cuda.device(0), pytest.raises(AssertionError, match="makes a context on GPU 0"):
        event.query()
    recorder.captures = True
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        event.query()
    with on_device(GPU):
        assert event.query()


Operation = tuple[str, torch.Tensor, int]
"""Kind (send or recv), tensor and peer."""


def groups(both: tuple[Recorder, Fabric], of_ranks: list[list[list[Operation]]]) -> None:
    """Enqueue each rank's groups of operations on its own stream."""
    recorder, fabric = both
    compute().synchronize()
    unique = fabric.get_unique_id()
    for rank, of_rank in enumerate(of_ranks):
        communicator: Communicator = fabric.NcclCommunicator(len(of_ranks), unique, rank)
        with acting(recorder, rank), torch.cuda.stream(torch.cuda.Stream()):
            for operations in of_rank:
                fabric.groupStart()
                for kind, x, peer in operations:
                    call = getattr(communicator, kind)
                    call(x.data_ptr(), x.nbytes, Fabric.NCCL_UINT8, peer, compute().cuda_stream)
                fabric.groupEnd()


@pytest.mark.parametrize("in_one_group", [False, True])
def test_crossing_sends_deadlock_unless_grouped(
    both: tuple[Recorder, Fabric], recorder: Recorder, in_one_group: bool
) -> None:
    """Two ranks that both send first deadlock, unless sends are eager or grouped with the receives."""
    ranks = [[("send", buffer(recorder), 1 - rank), ("recv", buffer(recorder), 1 - rank)] for rank in range(2)]
    groups(both, [[operations] if in_one_group else [[operation] for operation in operations] for operations in ranks])
    fragments = ("deadlock with rendezvous sends, each waits for the next: #", "send to 1", "send to 0")
    check(recorder, *(() if in_one_group else fragments))


def test_operations_of_one_group_run_concurrently(both: tuple[Recorder, Fabric], recorder: Recorder) -> None:
    x, slot, far = (buffer(recorder, name) for name in ("x", "slot", "far"))
    groups(both, [[[("send", x, 0), ("send", slot, 0), ("recv", slot, 0), ("recv", far, 0)]]])
    check(recorder, "race on slot: ", "send to 0 reads it", "recv from 0 writes it")


def test_a_receive_does_not_order_the_sender(both: tuple[Recorder, Fabric], recorder: Recorder) -> None:
    """The sender must wait for its own send."""
    x, into = buffer(recorder), buffer(recorder, "into")
    groups(both, [[[("send", x, 1)]], [[("recv", into, 0)]]])
    x.fill_(1)
    check(recorder, "race on x: ", "send to 1 reads it")


@pytest.mark.parametrize(("receives", "match"), [(0, "receives 0"), (3, "16 bytes is received by")])
def test_unmatched_sends_and_receives_are_found(
    both: tuple[Recorder, Fabric], recorder: Recorder, receives: int, match: str
) -> None:
    x, into = buffer(recorder), buffer(recorder, count=3)
    groups(both, [[[("send", x, 1)]], [[("recv", into, 0)]] if receives else []])
    check(recorder, match)


@pytest.mark.parametrize(("written", "ordered"), [(2, True), (3, True), (1, False)])
def test_a_stream_waits_for_a_written_value(recorder: Recorder, written: int, ordered: bool) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    x.fill_(1)
    recorder.write(compute().cuda_stream, "word", written)
    recorder.blocks = False
    recorder.wait(transfer.cuda_stream, "word", 2)
    with torch.cuda.stream(transfer):
        x.fill_(2)
    graph = graph_of(recorder)
    problems = graph.problems()
    assert (
        graph.redundant_waits() == problems == [] if ordered else "waits for a value that nobody writes" in problems[0]
    )


def test_values_that_wait_for_each_other_deadlock(recorder: Recorder) -> None:
    recorder.blocks = False
    for mine, other in ((0, 1), (1, 0)):
        stream = torch.cuda.Stream().cuda_stream
        recorder.wait(stream, other, 1)
        recorder.write(stream, mine, 1)
    check(recorder, "deadlock with eager sends")


def test_copies_beneath_torch_are_recorded(recorder: Recorder) -> None:
    x, into, transfer = buffer(recorder), buffer(recorder, "into"), torch.cuda.Stream()
    transfer.wait_stream(compute())
    recorder.copy(transfer.cuda_stream, into.data_ptr(), x.data_ptr(), 8)
    into[2:].fill_(1)  # not copied
    into[:2].fill_(1)
    check(recorder, "race on into", "copy of 8 bytes writes it")


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


@pytest.mark.parametrize("freed", [False, True])
def test_replay_sees_a_missing_wait(recorder: Recorder, freed: bool) -> None:
    """A read that is too early returns the old value, or NaN if the memory was freed."""
    x, transfer = buffer(recorder), torch.cuda.Stream()
    recorder.begin()
    x.fill_(3)
    transfer.wait_stream(compute())
    with torch.cuda.stream(transfer):
        y = x + 1
    result = recorder.replay_argument(y)
    if freed:
        del x
    graph = graph_of(recorder)
    (race,) = graph.races() if freed else [graph.broken_without(graph.waits[0])]
    assert race is not None
    edges = [] if freed else graph.waits[0].edges
    replay = Replay(recorder)
    replay.run(graph, 0, without(graph, edges, [(race.first.number, race.second.number)]))
    replayed = replay.tensor(result)
    assert replayed.isnan().all() if freed else replayed.tolist() == [1.0] * 4
