"""The transport of the copy engines as it is, on a stand-in for CUDA's driver whose streams run and block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from ringattn.comm import Fence, LocalGroup, LocalWorld, Message, Topology, TransportError, open_transports
from ringattn.comm.control import control_of
from ringattn.comm.registry import find_transport
from ringattn.comm.transports.copy_engine import copy_engine
from ringattn.comm.transports.copy_engine.copy_engine import CopyEngineTransport
from ringattn.comm.transports.copy_engine.memory import Board

from ..support.cuda.driver import Workers, running
from ..support.cuda.nccl import check_held
from ..support.transport_cases import CASES, Calling, filled, neighbours, on_ranks, until

CPU = torch.device("cpu")
T = TypeVar("T")


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    with running(monkeypatch) as workers:
        yield workers


def opened(group: LocalGroup, **more: Any) -> CopyEngineTransport:
    options = {"device": CPU, "timeout": 60.0, **more}
    return CopyEngineTransport(rank=group.rank(), size=group.size(), control=control_of(group), **options)


def on_transports(size: int, fn: Callable[[CopyEngineTransport], T]) -> list[T]:
    """What `fn` makes of a transport on each of so many virtual ranks; the transport is closed behind it."""

    def call(group: LocalGroup) -> T:
        transport = opened(group)
        returned = fn(transport)
        transport.close()
        return returned

    return on_ranks(size, call)


def keep_fences(transport: CopyEngineTransport) -> list[Any]:
    """Hold what the posts of a case use: one that lets go of a fence unwaited frees memory under streams that run."""
    fences: list[Any] = []
    post = transport.post

    def kept(**messages: Any) -> Any:
        fences.append(post(**messages))
        return fences[-1]

    transport.post = kept  # type: ignore[method-assign]
    return fences


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_conformance(name: str, world_size: int, workers: Workers) -> None:
    def fn(transport: CopyEngineTransport) -> None:
        fences = keep_fences(transport)
        CASES[name](transport, CPU)
        transport.close()
        fences.clear()

    on_transports(world_size, fn)
    assert not workers.driver.opened and not workers.driver.registered and not +workers.driver.retained


def exchange(transport: CopyEngineTransport, count: int = 10) -> torch.Tensor:
    """One message from every rank to the next."""
    onward, back = neighbours(transport)
    arrived = filled(-1, count, CPU)
    sends = [Message(onward, filled(transport.rank, count, CPU))]
    transport.post(sends=sends, receives=[Message(back, arrived)], after=[transport.mark()]).wait()
    return arrived


def hold(workers: Workers, transport: CopyEngineTransport) -> threading.Event:
    """Nothing behind this point of the transfer stream runs before the event is set."""
    reached = threading.Event()
    workers.put("hold", transport._lane.stream.cuda_stream, lambda: workers.block(reached.is_set), None)
    return reached


def test_tensors_are_held_until_compute_has_waited(workers: Workers) -> None:
    on_transports(1, lambda transport: check_held(workers, transport, 0))


def test_flags_wrap(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "FIRST_NUMBER", (1 << 32) - 5)

    def fn(transport: CopyEngineTransport) -> None:
        for _ in range(10):
            assert int(exchange(transport)[0]) == neighbours(transport)[1]
        CASES["a_ring_reuses_its_slots"](transport, CPU)
        transport.gather(None)
        ready = [transport._flags.board.load(flag) for flag in transport._awaited]
        assert ready == [85, 85], "both flags that this rank waits for began below the wrap"

    on_transports(2, fn)


def test_a_freed_allocation_is_closed_and_its_address_means_another(workers: Workers) -> None:
    driver = workers.driver
    arenas = [torch.zeros(1000, dtype=torch.int32) for _ in range(2)]
    for arena in arenas:
        driver.declare(arena.data_ptr(), arena.nbytes)

    def fn(transport: CopyEngineTransport) -> None:
        other = 1 - transport.rank
        for value in (1, 2, 3):
            arrived = filled(0, 1000, CPU)
            arenas[transport.rank].fill_(value)
            sends, receives = [Message(other, arenas[transport.rank])], [Message(other, arrived)]
            transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
            assert int(arrived[999]) == value
            transport.gather(None)
            assert len(driver.opened) == 2  # one each, and none of those that are gone
            transport.gather(None)
            arena = arenas[transport.rank]
            driver.declare(arena.data_ptr(), arena.nbytes)  # freed, and allocated again
            transport.gather(None)

    on_transports(2, fn)
    assert len(driver.opens) == 6 and set(driver.opens.values()) == {1}


def test_memory_that_cannot_be_shared_goes_through_memory_that_can(workers: Workers) -> None:
    """As with expandable_segments: copied behind `after` and behind what peers took before, and shared once."""
    workers.driver.shareable = False

    def fn(transport: CopyEngineTransport) -> None:
        onward, back = neighbours(transport)
        sent, came = filled(0, 1000, CPU), [filled(-1, 1000, CPU) for _ in range(8)]
        fences: list[Fence] = []
        for turn, into in enumerate(came):
            written = Calling(lambda value=turn: sent.fill_(10 * transport.rank + value))  # type: ignore[misc]
            after: list[Fence] = [*fences[-1:], written]
            sends, receives = [Message(onward, sent)] * 2, [Message(back, into), Message(back, into.clone())]
            fences.append(transport.post(sends=sends, receives=receives, after=after))
            fences[-1].wait()
        assert [int(x[999]) for x in came] == [10 * back + turn for turn in range(8)]
        assert sum(op.detail[0] in workers.driver.allocated for op in workers.log if op.kind == "copy") >= 8
        exchange(transport, 1 << 20)  # more than there is room for
        transport.gather(None)

    on_transports(2, fn)
    assert workers.driver.calls["cuMemAlloc"] == workers.driver.calls["cuMemFree"] == 4
    assert workers.driver.calls["cuIpcOpenMemHandle"] == 4


@pytest.mark.parametrize("name", CASES)
def test_conformance_of_memory_that_cannot_be_shared(name: str, workers: Workers) -> None:
    workers.driver.shareable = False
    on_ranks(2, lambda group: CASES[name](opened(group), CPU))


def test_abort_releases_a_stream_that_waits_for_a_dead_peer(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """And close() waits for the thread that does so: it writes flags that are unmapped then."""
    store = Board.store

    def slow(board: Board, index: int, value: int) -> None:
        time.sleep(0.02)
        store(board, index, value)

    monkeypatch.setattr(Board, "store", slow)

    def fn(transport: CopyEngineTransport) -> None:
        reached = hold(workers, transport) if transport.rank else threading.Event()
        sends, receives = (
            ([Message(0, filled(1, 4, CPU))], []) if transport.rank else ([], [Message(1, filled(0, 4, CPU))])
        )
        fence = transport.post(sends=sends, receives=receives)
        if transport.rank:
            transport.gather(None)
            reached.set()
        else:
            time.sleep(0.05)
            assert not fence.done()
            threading.Thread(target=transport.abort, args=["hop 3 is 20 s late"]).start()
            until(fence.done, "the stream waits on")
            transport.abort("another reason")
            fence.wait()
            with pytest.raises(TransportError, match=r"of rank 0 was aborted: hop 3 is 20 s late"):
                transport.post(sends=[], receives=[])
            transport.gather(None)
        given_back: list[int] = []
        transport._staging.close = lambda: given_back.append(transport.rank)  # type: ignore[method-assign]
        transport.close()
        assert transport._releasing is None or not transport._releasing.is_alive()
        # after an abort streams of peers may still go over it
        assert given_back == ([transport.rank] if transport.rank else [])

    on_transports(2, fn)
    assert not workers.driver.registered


def test_a_peer_that_never_posts_is_named(workers: Workers) -> None:
    def fn(group: LocalGroup) -> None:
        transport = opened(group)
        transport._timeout = 0.2  # not before: opening takes what a busy machine makes of it
        if group.rank() == 0:
            match = "rank 0 waits until rank 2 posts the 16 bytes that it is to send: nothing happened for 0.2 s"
            with pytest.raises(TransportError, match=match):
                transport.post(sends=[], receives=[Message(2, filled(0, 4, CPU))])
            with pytest.raises(TransportError, match=f"was aborted: a post failed: {match}"):
                transport.post(sends=[], receives=[])
        control_of(group).gather(None, what="the test")
        transport.close()

    on_ranks(3, fn)


def test_sizes_that_differ_end_the_transport(workers: Workers) -> None:
    """And what was to move stays, until the stream is past what was enqueued."""

    def fn(transport: CopyEngineTransport) -> None:
        other, rank = 1 - transport.rank, transport.rank
        sends, receives = ([Message(other, filled(0, count, CPU))] for count in (7, 4 + other))
        with pytest.raises(TransportError, match=f"rank {rank} expects {16 + 4 * other} bytes from rank {other}"):
            transport.post(sends=sends, receives=receives)
        kept: Any = transport._last
        assert [*map(id, kept._keep)] == [id(message.tensor) for message in (*sends, *receives)]
        with pytest.raises(TransportError, match="was aborted: a post failed: rank"):
            transport.post(sends=[], receives=[])
        transport.gather(None)

    on_transports(2, fn)


def test_closing_while_transfers_hang(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    """What a stream may still touch is left where it is, and said."""
    held: list[threading.Event] = []

    def fn(group: LocalGroup) -> None:
        transport = opened(group, timeout=0.1)
        held.append(hold(workers, transport))
        transport.post(sends=[], receives=[])
        transport.close()

    on_ranks(1, fn)
    assert "rank 0: transfers by copy engine did not end in 0.1 s" in caplog.text
    assert workers.driver.registered
    held[0].set()


def test_members_of_two_nodes(workers: Workers) -> None:
    def fn(group: LocalGroup) -> None:
        node, place = divmod(group.rank(), 2)
        members = [2 * node, 2 * node + 1]
        open_copy_engine, nodes = find_transport("copy_engine").open, Topology.grid(2, 2)
        transport, between = open_transports(group, transport=open_copy_engine, device=CPU, topology=nodes)
        between.close()
        other, arrived = members[1 - place], filled(-1, 4, CPU)
        mine = filled(group.rank(), 4, CPU)
        transport.post(sends=[Message(other, mine)], receives=[Message(other, arrived)]).wait()
        assert int(arrived[3]) == other
        stranger = (members[0] + 2) % 4
        with pytest.raises(
            ValueError, match=rf"sends\[0\]: peer is {stranger}, this transport joins ranks \[{members[0]}"
        ):
            transport.post(sends=[Message(stranger, mine)], receives=[])
        assert transport.gather(group.rank()) == [0, 1, 2, 3]
        transport.close()

    on_ranks(4, fn)
    with LocalWorld(2, device="cpu", timeout=60) as world, pytest.raises(ValueError, match=r"members is \(1,\)"):
        world.run(lambda group: opened(group, members=[1]))


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync", "cuStreamWaitValue32", "cuStreamWriteValue32"])
def test_a_call_that_cuda_refuses_is_named(call: str, workers: Workers) -> None:
    def fn(transport: CopyEngineTransport) -> None:
        transport.gather(None)
        workers.driver.fails.add(call)
        with pytest.raises(TransportError, match=f"{call} failed: CUDA_ERROR_INVALID_VALUE"):
            transport.warm_up([(0, 1), (1, 0)])
        workers.driver.fails.clear()

    on_transports(2, fn)
