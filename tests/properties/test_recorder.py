"""The recorder on small programs whose races are known, and its checks against the slow and obvious."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.comm.cuda_threads import on_device

from ..support.recorder.checks import Checked
from ..support.recorder.device import GPU, Recorder
from ..support.recorder.engine import CopyEngine, install
from ..support.recorder.graph import Graph, linear
from ..support.recorder.memory import Use, footprint
from ..support.recorder.modes import acting
from ..support.recorder.replay import Replay, without
from ..support.stand_in import Fabric


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


def checked(recorder: Recorder) -> Checked:
    recorder.recording = False
    names = recorder.memory.storages
    return Checked(Graph(recorder.log), lambda use: names[use.storage].name or "a buffer")  # type: ignore[arg-type]


def problems(recorder: Recorder) -> list[str]:
    return checked(recorder).problems()


def buffer(recorder: Recorder, name: str = "x", count: int = 4) -> torch.Tensor:
    made = torch.zeros(count, device=GPU)
    recorder.name(made, name)
    return made


def test_a_read_that_nothing_orders(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream(priority=-1)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream())
    with recorder.labelled("hop 2"):
        x.fill_(3)
    transfer.wait_event(ready)  # too early: recorded before the write
    with torch.cuda.stream(transfer):
        kept = x + 1
    (problem,) = problems(recorder)
    assert problem.startswith("race on x: #")
    assert "op fill_ (hop 2) writes it" in problem
    assert "transfer stream" in problem and "op add reads it, and nothing orders the two" in problem
    del kept


def test_a_wait_orders(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    x.fill_(3)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream())
    transfer.wait_event(ready)
    with torch.cuda.stream(transfer):
        kept = x + 1
    found = checked(recorder)
    assert found.problems() == []
    assert found.unnoticed() == []
    del kept


def test_a_wait_means_the_newest_record(recorder: Recorder) -> None:
    x, transfer, ready = buffer(recorder), torch.cuda.Stream(), torch.cuda.Event()
    ready.record(torch.cuda.current_stream())
    x.fill_(3)
    ready.record(torch.cuda.current_stream())
    transfer.wait_event(ready)
    x.fill_(4)
    ready.record(torch.cuda.current_stream())  # after the wait was enqueued: it does not mean this one
    with torch.cuda.stream(transfer):
        kept = x + 1
    (problem,) = problems(recorder)
    assert "fill_ writes it" in problem
    del kept


def test_a_wait_on_an_event_that_was_never_recorded(recorder: Recorder) -> None:
    torch.cuda.Stream().wait_event(torch.cuda.Event())
    (problem,) = problems(recorder)
    assert problem.endswith("waits for an event that was never recorded: it waits for nothing")


def test_what_a_gpu_refuses_of_events(recorder: Recorder) -> None:
    """A record on the current stream of whatever device, one on a second device, a query from a third."""
    event = torch.cuda.Event()
    with pytest.raises(AssertionError, match="without a stream"):
        event.record()
    event.record(torch.cuda.current_stream())
    with pytest.raises(RuntimeError, match="event device 1 does not match recording stream's device 0"):
        event.record(torch.cuda.current_stream(0))
    with torch.cuda.device(0), pytest.raises(AssertionError, match="makes a context on GPU 0"):
        event.query()
    recorder.captures = True
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        event.query()
    with on_device(GPU):
        assert event.query()


@pytest.mark.parametrize("how", ["nothing", "wait", "record_stream", "synchronize"])
def test_memory_is_freed_while_another_stream_uses_it(recorder: Recorder, how: str) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    transfer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(transfer):
        x.fill_(1)
    if how == "wait":
        torch.cuda.current_stream().wait_stream(transfer)
    elif how == "record_stream":
        x.record_stream(transfer)
    elif how == "synchronize":
        transfer.synchronize()
    del x
    found = problems(recorder)
    assert len(found) == (how == "nothing")
    assert not found or ("op fill_ writes it, #" in found[0] and ": free frees it" in found[0])


def test_what_another_thread_frees_holds_up_no_stream(recorder: Recorder) -> None:
    """Garbage of one rank that another one's thread collects, after its host has waited for something."""
    given, transfer, again = [buffer(recorder)], torch.cuda.Stream(), buffer(recorder, "y")
    freed, waited = torch.cuda.Event(), torch.cuda.Event()
    waited.record(transfer)

    def collect() -> None:
        with acting(recorder, 1), torch.cuda.device(GPU):
            waited.synchronize()
            given.clear()

    collecting = threading.Thread(target=collect)
    collecting.start()
    collecting.join()
    again.fill_(1)
    freed.record(torch.cuda.current_stream())
    graph = checked(recorder).graph
    (wait,), (op,) = ([op.number for op in graph.log if op.kind == kind] for kind in ("synchronize event", "free"))
    (fill,) = (op.number for op in graph.log if op.detail == "fill_")
    assert graph.happens_before(wait, op)
    assert not graph.happens_before(wait, fill)


def test_the_host_waits_for_the_record_that_there_was(recorder: Recorder) -> None:
    event, x = torch.cuda.Event(), buffer(recorder)
    event.record(torch.cuda.current_stream())
    event.synchronize()
    x.fill_(1)
    event.record(torch.cuda.current_stream())  # it is used again: what waited for it before waits for the first record
    assert problems(recorder) == []


def test_memory_is_used_before_its_stream_had_let_go_of_it(recorder: Recorder) -> None:
    transfer = torch.cuda.Stream()
    made = torch.empty(4, device=GPU)
    with torch.cuda.stream(transfer):
        made.fill_(1)
    transfer.synchronize()
    (problem,) = problems(recorder)
    assert ": allocate allocates it" in problem and "fill_ writes it" in problem
    del made


def test_only_bytes_that_both_touch(recorder: Recorder) -> None:
    x, transfer = buffer(recorder, count=8).view(4, 2), torch.cuda.Stream()
    transfer.wait_stream(torch.cuda.current_stream())
    x[:, 0].fill_(1)
    with torch.cuda.stream(transfer):
        x[:, 1].fill_(2)
    assert problems(recorder) == []


def test_the_host_waits_for_one_stream_and_goes_on_in_another(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    x.fill_(1)
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(transfer):
        x.fill_(2)
    found = checked(recorder)
    assert found.problems() == []
    assert found.unnoticed() == []  # neither can it be left out


def test_reading_back_is_a_wait_of_the_host(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    x.fill_(1)
    x.sum().item()
    with torch.cuda.stream(transfer):
        x.fill_(2)
    assert problems(recorder) == []


# NCCL


def communicators(fabric: Fabric, size: int = 2) -> list[Any]:
    unique = fabric.get_unique_id()
    return [fabric.NcclCommunicator(size, unique, rank) for rank in range(size)]


def enqueue(fabric: Fabric, *operations: tuple[Any, str, torch.Tensor, int]) -> None:
    fabric.groupStart()
    stream = torch.cuda.current_stream().cuda_stream
    for communicator, kind, x, peer in operations:
        getattr(communicator, kind)(x.data_ptr(), x.nbytes, Fabric.NCCL_UINT8, peer, stream)
    fabric.groupEnd()


@pytest.mark.parametrize("opposite", [True, False])
def test_sends_that_need_each_other(both: tuple[Recorder, Fabric], opposite: bool) -> None:
    """Both ranks send first: fine as long as sends are eager."""
    recorder, fabric = both
    held = []
    for rank, communicator in enumerate(communicators(fabric)):
        with acting(recorder, rank), torch.cuda.stream(torch.cuda.Stream()):
            x, into = (buffer(recorder, f"{name} of rank {rank}") for name in ("x", "into"))
            kinds = [("send", x), ("recv", into)]
            for kind, tensor in kinds if opposite or rank == 0 else reversed(kinds):
                enqueue(fabric, (communicator, kind, tensor, 1 - rank))
            held += [x, into]
    found = problems(recorder)
    assert len(found) == opposite
    if opposite:
        assert found[0].startswith("deadlock with rendezvous sends, each waits for the next: #")
        assert "nccl send to 1" in found[0] and "nccl send to 0" in found[0]


def test_a_group_is_over_as_a_whole(both: tuple[Recorder, Fabric]) -> None:
    recorder, fabric = both
    held = []
    for rank, communicator in enumerate(communicators(fabric)):
        with acting(recorder, rank), torch.cuda.stream(torch.cuda.Stream()):
            x, into = buffer(recorder), buffer(recorder)
            enqueue(fabric, (communicator, "send", x, 1 - rank), (communicator, "recv", into, 1 - rank))
            x.copy_(into)
            held += [x, into]
    assert problems(recorder) == []


def test_operations_of_one_group_run_side_by_side(both: tuple[Recorder, Fabric]) -> None:
    recorder, fabric = both
    (communicator,) = communicators(fabric, 1)
    with acting(recorder, 0):
        x, slot, far = (buffer(recorder, name) for name in ("x", "slot", "far"))
        sends = [(communicator, "send", tensor, 0) for tensor in (x, slot)]
        enqueue(fabric, *sends, *((communicator, "recv", tensor, 0) for tensor in (slot, far)))
    (problem,) = problems(recorder)
    assert problem.startswith("race on slot: ")
    assert "nccl send to 0 reads it" in problem and "nccl recv from 0 writes it" in problem


def test_what_arrives_comes_after_what_was_sent(both: tuple[Recorder, Fabric]) -> None:
    """The receiver's use of the slot orders nothing at the sender's: it must wait for its own send."""
    recorder, fabric = both
    held = []
    for rank, communicator in enumerate(communicators(fabric)):
        with acting(recorder, rank), torch.cuda.stream(torch.cuda.Stream()):
            x, transfer = buffer(recorder, f"x of rank {rank}"), torch.cuda.Stream()
            transfer.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(transfer):
                enqueue(fabric, (communicator, ("send", "recv")[rank], x, 1 - rank))
            if rank == 1:
                torch.cuda.current_stream().wait_stream(transfer)
            x.fill_(1)
            held.append(x)
    (problem,) = problems(recorder)
    assert problem.startswith("race on x of rank 0: ") and "nccl send to 1 reads it" in problem


@pytest.mark.parametrize(("sizes", "match"), [((4, None), "receives 0"), ((4, 3), "16 bytes is received by")])
def test_ends_that_do_not_fit(both: tuple[Recorder, Fabric], sizes: tuple[int, int | None], match: str) -> None:
    recorder, fabric = both
    held = []
    for rank, (communicator, size) in enumerate(zip(communicators(fabric), sizes, strict=True)):
        with acting(recorder, rank), torch.cuda.stream(torch.cuda.Stream()):
            if size is not None:
                held.append(buffer(recorder, count=size))
                enqueue(fabric, (communicator, ("send", "recv")[rank], held[-1], 1 - rank))
    (problem,) = problems(recorder)
    assert match in problem


def test_an_address_of_nothing(both: tuple[Recorder, Fabric]) -> None:
    recorder, fabric = both
    (communicator,) = communicators(fabric, 1)
    with acting(recorder, 0):
        x = buffer(recorder)
        fabric.groupStart()
        with pytest.raises(AssertionError, match=r"17 bytes at .* are in no allocation that is alive"):
            communicator.send(x.data_ptr(), 17, 1, 0, torch.cuda.current_stream().cuda_stream)


# values in memory


@pytest.fixture
def engine(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> CopyEngine:
    made = CopyEngine(recorder)
    monkeypatch.setattr(made.driver, "flag_identity", lambda address: address)
    return made


@pytest.mark.parametrize(("written", "ordered"), [(2, True), (3, True), (1, False)])
def test_a_value_that_is_waited_for(recorder: Recorder, engine: CopyEngine, written: int, ordered: bool) -> None:
    flag, x, transfer = torch.zeros(1, dtype=torch.int32), buffer(recorder), torch.cuda.Stream()
    x.fill_(1)
    engine.write(torch.cuda.current_stream().cuda_stream, flag.data_ptr(), written)
    flag.fill_(9)  # the host is not held up
    engine.wait(transfer.cuda_stream, flag.data_ptr(), 2)
    with torch.cuda.stream(transfer):
        x.fill_(2)
    found = checked(recorder)
    assert (found.problems() == []) == ordered
    if ordered:
        assert found.unnoticed() == []
    else:
        assert "waits for a value that nobody writes" in found.problems()[0]


def test_values_that_wait_for_each_other(recorder: Recorder, engine: CopyEngine) -> None:
    flags = torch.full((2,), 9, dtype=torch.int32)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for mine, other in ((0, 1), (1, 0)):
        engine.wait(streams[mine].cuda_stream, flags[other:].data_ptr(), 1)
        engine.write(streams[mine].cuda_stream, flags[mine:].data_ptr(), 1)
    (problem,) = problems(recorder)
    assert problem.startswith("deadlock with eager sends")


def test_a_copy_of_the_copy_engine(recorder: Recorder, engine: CopyEngine) -> None:
    x, into, transfer = buffer(recorder), buffer(recorder, "into"), torch.cuda.Stream()
    transfer.wait_stream(torch.cuda.current_stream())
    engine.copy(transfer.cuda_stream, into.data_ptr(), x.data_ptr(), 8)
    kept = into[:2] + 0
    more = into[2:] + 0  # not copied
    (problem,) = problems(recorder)
    assert problem.startswith("race on into") and "engine copy of 8 bytes" in problem
    del kept, more


# waits that another implies


def test_waits_that_another_implies(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    compute = torch.cuda.current_stream()
    x.fill_(3)
    transfer.wait_stream(compute)
    transfer.wait_stream(compute)  # again: either can go
    transfer.wait_stream(transfer)  # its own order
    with torch.cuda.stream(transfer):
        x.fill_(4)
    compute.wait_stream(transfer)
    x.fill_(5)
    found = checked(recorder)
    assert found.problems() == []
    assert [wait.op.kind for wait in found.unnoticed()] == ["wait"] * 3
    assert len(found.graph.waits) == 4


Program = list[tuple[str, int, int]]


def programs() -> st.SearchStrategy[Program]:
    step = st.tuples(st.sampled_from(["read", "write", "record", "wait"]), st.integers(0, 2), st.integers(0, 2))
    return st.lists(step, max_size=25)


def run(recorder: Recorder, program: Program) -> None:
    """On three streams, three words of memory and three events."""
    streams, events = [recorder.stream() for _ in range(3)], [recorder.event() for _ in range(3)]
    for kind, stream, which in program:
        if kind == "record":
            events[which].record(streams[stream])
        elif kind == "wait" and events[which].last is not None:
            streams[stream].wait_event(events[which])
        elif kind in ("read", "write"):
            use = (Use(which, 1 << stream | 1),)
            reads, writes = (use, ()) if kind == "read" else ((), use)
            recorder.add(kind, streams[stream], reads=reads, writes=writes)


def paths(graph: Graph, missing: set[tuple[int, int]]) -> list[set[int]]:
    """What comes before each operation, followed step by step."""
    before: list[set[int]] = []
    for number, earlier in enumerate(graph.before):
        kept = [one for one in earlier if (one, number) not in missing or one in graph.fixed[number]]
        before.append({*kept, *(far for one in kept for far in before[one])})
    return before


def races(graph: Graph, missing: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every pair, not the neighbouring ones alone."""
    before = paths(graph, missing)
    found = []
    for (i, first), (j, second) in itertools.combinations(enumerate(graph.log), 2):
        pairs = [(a, b) for a in first.writes for b in (*second.reads, *second.writes)]
        pairs += [(a, b) for a in first.reads for b in second.writes]
        if any(a.storage == b.storage and a.bytes & b.bytes for a, b in pairs) and i not in before[j]:
            found.append((i, j))
    return found


@given(programs())
def test_races_and_implied_waits_are_those_of_the_slow_check(program: Program) -> None:
    recorder = Recorder()
    run(recorder, program)
    found = checked(recorder)
    graph = found.graph
    slow = races(graph, set())
    assert {(one.first.number, one.second.number) for one in found.races()} <= set(slow)
    assert bool(found.races()) == bool(slow)
    if not slow:
        for wait in graph.waits:
            broken = found.broken_without(wait)
            without_it = races(graph, set(wait.edges))
            assert (broken is not None) == bool(without_it)
            if broken is not None:
                assert (broken.first.number, broken.second.number) in without_it


@given(programs(), st.integers(0, 9))
def test_any_order_agrees_with_every_edge(program: Program, seed: int) -> None:
    recorder = Recorder()
    run(recorder, program)
    graph = checked(recorder).graph
    chance = random.Random(seed)
    for order in (graph.order, linear(graph.before, iter(chance.random, None))):
        place = {number: index for index, number in enumerate(order)}
        assert len(place) == len(graph.log)
        assert all(place[first] < place[second] for second in place for first in graph.before[second])


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=3),
)
def test_the_bytes_of_a_strided_tensor(itemsize: int, offset: int, dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(count for count, _ in dims), tuple(stride for _, stride in dims)
    places = [
        offset + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    covered = {place * itemsize + byte for place in places for byte in range(itemsize)}
    assert footprint(itemsize, offset, shape, strides) == sum(1 << byte for byte in covered)


# execution


def test_replay_does_what_was_recorded(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    recorder.begin()
    (x + 2).mul_(3)
    y = torch.full((4,), 5.0, device=GPU)
    y[1:] += x[1:] + torch.arange(3)
    transfer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(transfer):
        z = torch.cat([y[::2], x]).to(torch.float64)
        z[0].copy_(y[1])
    (kept, before) = (recorder.held(one) for one in (z, x))
    want = z.clone()
    graph = checked(recorder).graph
    for seed in range(5):
        replay = Replay(recorder)
        replay.run(graph, seed)
        assert torch.equal(replay.tensor(kept), want)
        assert torch.equal(replay.tensor(before), torch.zeros(4))
    del y, z


def test_replay_sees_a_missing_wait(recorder: Recorder) -> None:
    x, transfer = buffer(recorder), torch.cuda.Stream()
    recorder.begin()
    x.fill_(3)
    transfer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(transfer):
        y = x + 1
    kept = recorder.held(y)
    found = checked(recorder)
    (wait,) = found.graph.waits
    broken = found.broken_without(wait)
    assert broken is not None
    results = []
    for before in (None, without(found.graph, wait.edges, [(broken.first.number, broken.second.number)])):
        replay = Replay(recorder)
        replay.run(found.graph, 0, before)
        results.append(replay.tensor(kept).tolist())
    assert results == [[4.0] * 4, [1.0] * 4]


def test_freed_memory_is_poisoned(recorder: Recorder) -> None:
    """A use after free that the checks report is NaN when it is executed."""
    x, transfer = buffer(recorder), torch.cuda.Stream()
    recorder.begin()
    with torch.cuda.stream(transfer):
        y = x + 1
    kept = recorder.held(y)
    del x
    found = checked(recorder)
    (race,) = found.races()
    replay = Replay(recorder)
    replay.run(found.graph, 0, without(found.graph, [], [(race.first.number, race.second.number)]))
    assert replay.tensor(kept).isnan().all()
