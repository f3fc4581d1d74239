"""The host's transfer stream: ordered, never blocking its caller, and ended by an abort."""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringattn.comm.transport import Message, TransportError
from ringattn.comm.transports import process_group
from ringattn.comm.transports.process_group import ProcessGroupTransport, TransferThread, TransferWork

from ..support.transport_cases import wait_until


def test_work_runs_in_order_without_blocking_the_caller() -> None:
    stream, gate, order = TransferThread("test", lambda: True), threading.Event(), []
    fences = [stream.submit(gate.wait)]  # type: ignore[arg-type]
    fences += [stream.submit(lambda number=number: order.append(number)) for number in range(20)]  # type: ignore[misc]
    assert not any(fence.done() or fence.finished_at for fence in fences)
    begun = time.perf_counter()
    gate.set()
    fences[-1].wait()
    assert order == list(range(20)) and stream._thread is not None and stream._thread.daemon
    assert all(fence.done() for fence in fences)
    assert begun < fences[0].finished_at < fences[-1].finished_at < time.perf_counter()
    stream.close()


def test_a_failure_fails_all_later_work() -> None:
    stream, gate = TransferThread("test", lambda: pytest.fail("no transfer was running")), threading.Event()

    def fail() -> None:
        gate.wait()
        raise TransportError("rank 3 is gone")

    fences = [stream.submit(fail), stream.submit(lambda: pytest.fail("ran after a failure"))]
    gate.set()
    for fence in fences * 2:
        with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
            fence.wait()
        assert fence.done()
    for _ in range(2):
        with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
            stream.submit(lambda: None)
        stream.abort("the ring has failed")
    stream.close()


def test_tensors_are_released() -> None:
    stream = TransferThread("test", lambda: True)
    with torch.inference_mode():  # outside of which such a tensor may not be written
        tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    stream.submit(lambda tensor=tensor: tensor.add_(1)).wait()  # type: ignore[misc]
    del tensor
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
    stream.close()


def test_process_exit_waits_for_running_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[TransferWork] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    process_group._transfer_threads.cache_clear()
    begun, interrupted, returned = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert interrupted.wait(60)
        time.sleep(0.1)
        returned.set()

    def interrupt() -> bool:
        interrupted.set()
        return True

    try:
        fence = TransferThread("test-end", interrupt).submit(work)
        assert begun.wait(60)
        (end,) = ends
        end()
        assert returned.is_set()
        with pytest.raises(TransportError, match="the process ends"):
            fence.wait()
    finally:
        process_group._transfer_threads.cache_clear()  # streams made from here on register with the real atexit


def test_process_exit_leaves_a_transfer_that_cannot_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "EXIT_JOIN_SECONDS", 0.01)
    stream, over = TransferThread("test", lambda: False), threading.Event()
    fence = stream.submit(over.wait)  # type: ignore[arg-type]
    wait_until(lambda: stream._running)
    stream._end()
    assert stream._thread is not None and stream._thread.is_alive() and fence.done()
    with pytest.raises(TransportError, match="the process ends"):
        fence.wait()
    over.set()


def test_an_unexpected_error_of_a_transfer_is_named() -> None:
    stream = TransferThread("test", lambda: True)
    with pytest.raises(TransportError, match=r"^a transfer failed: KeyError: 'rank 3'$"):
        stream.submit(Mock(side_effect=KeyError("rank 3"))).wait()
    stream.close()


def test_a_transfer_that_cannot_start_is_described_by_the_ranks_of_the_mesh() -> None:
    transport, refuse = Mock(rank=0, names=(7, 8)), Mock(side_effect=RuntimeError("closed by peer"))
    with pytest.raises(TransportError, match=r"^rank 7: send of 24 bytes to rank 8 failed: closed by peer$"):
        ProcessGroupTransport._start(transport, refuse, "group_dst", "send of {} bytes to", Message(1, torch.zeros(6)))
    assert refuse.call_args.kwargs == {"group": transport._group, "tag": transport._tag, "group_dst": 1}


def test_only_transfers_of_gloo_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:mpi")
    assert process_group._interrupt(None) and not process_group._interrupt(Mock())


def test_an_abort_while_a_post_waits_for_its_fences_moves_nothing() -> None:
    aborted, held = threading.Event(), torch.zeros(2)
    transport, fence = Mock(), Mock(wait=aborted.set)
    transport._transfer_thread.aborted_event = aborted
    ProcessGroupTransport._transfer(transport, [], [], [(held, torch.ones(2))], [fence])
    assert aborted.is_set() and held.count_nonzero() == 0


def test_work_that_ends_after_an_abort_does_not_undo_it() -> None:
    interrupted, over = threading.Event(), threading.Event()

    def interrupt() -> bool:
        interrupted.set()
        return True

    stream = TransferThread("test", interrupt)
    begun = threading.Event()

    def work() -> None:
        begun.set()
        assert interrupted.wait(60)

    running, ended = stream.submit(work), stream.submit(over.set)
    assert begun.wait(60)
    stream.abort("rank 3 is gone")
    assert stream._thread is not None
    stream.close()
    stream._thread.join(60)  # running and queued work are over
    for fence in (running, ended):
        with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
            fence.wait()
    with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
        stream.submit(lambda: None)
    assert not over.is_set()


def test_an_interrupt_continues_after_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def receive(group: object, peer: int) -> Mock:
        asked.append(peer)
        return Mock(wait=Mock(side_effect=RuntimeError("Timed out" if peer else "Connection closed by peer")))

    monkeypatch.setattr(process_group, "post_unmatched_receive", receive)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    assert process_group._interrupt(Mock(size=lambda: 4, rank=lambda: 1))
    assert asked == [0, 2]
