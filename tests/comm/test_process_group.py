"""The transfer stream of the host: in order, never blocking its caller, and over when it is told so."""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm.transport import TransportError
from ringattn.comm.transports import process_group
from ringattn.comm.transports.process_group import HostStream, Work

from ..support.transport_cases import until


def test_work_runs_in_order_and_behind_its_caller() -> None:
    stream, gate, order = HostStream("test", lambda: True), threading.Event(), []
    fences = [stream.submit(gate.wait)]  # type: ignore[arg-type]
    fences += [stream.submit(lambda number=number: order.append(number)) for number in range(20)]  # type: ignore[misc]
    assert not any(fence.done() for fence in fences)
    gate.set()
    fences[-1].wait()
    assert order == list(range(20))
    assert all(fence.done() for fence in fences)
    stream.close()


def test_failed_work_stays_failed() -> None:
    stream, gate = HostStream("test", lambda: True), threading.Event()

    def fail() -> None:
        gate.wait()
        raise TransportError("rank 3 is gone")

    fences = [stream.submit(fail), stream.submit(lambda: pytest.fail("ran after a failure"))]
    gate.set()
    for fence in fences * 2:
        with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
            fence.wait()
        assert fence.done()
    with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
        stream.submit(lambda: None)
    stream.close()


def test_tensors_are_released() -> None:
    stream, tensor = HostStream("test", lambda: True), torch.zeros(3)
    gone = weakref.ref(tensor)
    stream.submit(lambda tensor=tensor: tensor.add_(1)).wait()  # type: ignore[misc]
    del tensor
    until(lambda: gc.collect() >= 0 and gone() is None)
    stream.close()


def test_process_exit_waits_for_running_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Work] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    process_group._streams.cache_clear()
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
        fence = HostStream("test-end", interrupt).submit(work)
        assert begun.wait(60)
        (end,) = ends
        end()
        assert returned.is_set()
        with pytest.raises(TransportError, match="the process ends"):
            fence.wait()
    finally:
        process_group._streams.cache_clear()  # those that are made from here on end with this process again


def test_work_that_ends_after_an_abort_does_not_undo_it() -> None:
    interrupted, over = threading.Event(), threading.Event()

    def interrupt() -> bool:
        interrupted.set()
        return True

    stream = HostStream("test", interrupt)
    begun = threading.Event()

    def work() -> None:
        begun.set()
        assert interrupted.wait(60)

    running, ended = stream.submit(work), stream.submit(over.set)
    assert begun.wait(60)
    stream.abort("rank 3 is gone")
    assert stream._thread is not None
    stream.close()
    stream._thread.join(60)  # past the end of what ran, and of what was queued
    for fence in (running, ended):
        with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
            fence.wait()
    with pytest.raises(TransportError, match=r"^rank 3 is gone$"):
        stream.submit(lambda: None)
    assert not over.is_set()


def test_an_interrupt_goes_on_behind_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def receive(group: object, peer: int) -> Mock:
        asked.append(peer)
        return Mock(wait=Mock(side_effect=RuntimeError("Timed out" if peer else "Connection closed by peer")))

    monkeypatch.setattr(process_group, "receive_nothing", receive)
    monkeypatch.setattr(process_group.dist, "get_backend_config", lambda group: "cpu:gloo")
    assert process_group._interrupt(Mock(size=lambda: 4, rank=lambda: 1))
    assert asked == [0, 2]
