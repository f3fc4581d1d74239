"""Device and stream-capture mode of the threads that ringattn starts."""

from __future__ import annotations

import ctypes
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import DONE, LocalTransport, TransportError, cuda_threads, group_cache, single_rank
from ringattn.comm.cuda_threads import exchange_capture_mode, on_device, run_with_timeout, start_thread
from ringattn.comm.transports.copy_streams import CudaCopyStream
from ringattn.comm.watchdog.watch import Watch, _tick

from ..support.cuda.device import GLOBAL, THREAD_LOCAL, Device
from ..support.transport_cases import wait_until
from ..support.watch_cases import memory_controls

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def place(device: Device) -> tuple[int, int]:
    return device.thread.index, device.thread.capture_mode


def test_device_and_capture_mode_are_set_and_restored(device: Device) -> None:
    with pytest.raises(KeyError), on_device(CUDA):
        assert place(device) == (1, THREAD_LOCAL)
        raise KeyError
    assert place(device) == (0, GLOBAL)
    states: list[tuple[int, int]] = []
    start_thread(lambda: states.append(place(device)), CUDA, "test").join()
    assert run_with_timeout(60.0, lambda: states.append(place(device)), CUDA, "test")
    assert states == [(1, THREAD_LOCAL)] * 2


def test_a_device_that_has_failed_does_not_hide_the_caller_s_error(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", Mock(side_effect=RuntimeError("an illegal memory access")))
    with pytest.raises(KeyError), on_device(CUDA):
        raise KeyError


def test_the_exit_waits_for_threads_and_for_those_that_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, gate = cast("Any", []), threading.Event()

    def first() -> None:
        gate.wait(0.05)
        start_thread(lambda: gate.wait(0.05) or ended.append("second"), CPU, "second")
        ended.append("first")

    monkeypatch.setattr(cuda_threads, "_THREADS_TO_JOIN", weakref.WeakSet())
    start_thread(first, CPU, "first")
    cuda_threads._join_all()
    assert ended == ["first", "second"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda_threads, "DRIVER_SECONDS", 0.01)
    stuck = start_thread(gate.wait, CPU, "stuck")  # as in a call of the driver that never returns
    cuda_threads._join_all()
    assert stuck.is_alive() and stuck.daemon
    gate.set()


@pytest.mark.parametrize(("where", "initialized"), [(CPU, True), (CUDA, False)])
def test_no_cuda_context_is_created(where: torch.device, initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device", None)
    monkeypatch.setattr(cuda_threads, "exchange_capture_mode", None)
    with on_device(where):
        pass


def test_a_tick_polls_transfers_and_spans_during_a_capture_on_another_device(device: Device) -> None:
    lane = CudaCopyStream(CUDA)
    watch = Watch(memory_controls(2)[0], deadline=None, device=CUDA, transports=list)
    watch.begin_loop("forward")
    with watch.span("compute"):
        pass
    watch.add_post("hop 1", lane.record_point(), [DONE, lane.mark()], [(1, 64)], [])
    device.captures = True
    _tick([watch])
    assert watch.failure_reason() is None and not watch._posts.is_busy and not watch._telemetry.stopwatch._running


def test_a_ring_that_dies_during_a_tick_is_freed_on_its_device(device: Device) -> None:
    class Watched:
        rank, device, tick = 0, CUDA, staticmethod(lambda: None)

        def __del__(self) -> None:
            freed.append(place(device))

    freed: list[tuple[int, int]] = []
    watches: Any = [Watched()]
    _tick(watches)
    assert not watches and freed == [(1, THREAD_LOCAL)]


def test_late_warm_ups_and_failed_rings_abort_on_the_device(device: Device) -> None:
    transport, places = LocalTransport(single_rank(), CUDA), list[tuple[int, int]]()
    transport.abort = lambda reason: places.append(place(device))  # type: ignore[method-assign]
    transport._timeout = 0.0
    with transport._deadline("late"):
        wait_until(lambda: places)
    watch = Watch(memory_controls(2)[0], deadline=None, device=CUDA, transports=lambda: [transport])
    watch.report_failure(TransportError("the link is down"))
    assert places == [(1, THREAD_LOCAL)] * 2


def test_a_ring_whose_group_is_gone_is_closed_on_its_device(device: Device) -> None:
    class Ring:
        def close(self) -> None:
            closed.append(place(device))

    closed: list[tuple[int, int]] = []
    group_cache.close_group_cache({key: Ring() for key in (CUDA, (CUDA, 4.0), group_cache.CONNECTION_KEY)})
    assert closed == [(0, GLOBAL), (1, THREAD_LOCAL), (1, THREAD_LOCAL)]  # the connection first


@pytest.mark.parametrize("runtime", ["cuda", "hip"])
def test_the_capture_mode_is_exchanged_in_the_runtime_of_torch(
    runtime: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2" if runtime == "hip" else None)
    modes, loaded = [GLOBAL], list[str]()

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    def load(path: str) -> object:
        loaded.append(path)
        return SimpleNamespace(**{f"{runtime}ThreadExchangeStreamCaptureMode": exchange} if len(loaded) == 1 else {})

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_threads._load_exchange_mode.cache_clear()
    assert exchange_capture_mode(THREAD_LOCAL) == GLOBAL
    assert exchange_capture_mode(GLOBAL) == THREAD_LOCAL
    assert loaded == [str(Path(torch.__file__).parent / "lib" / f"libc10_{runtime}.so")]
    cuda_threads._load_exchange_mode.cache_clear()
    assert exchange_capture_mode(THREAD_LOCAL) == exchange_capture_mode(THREAD_LOCAL) == THREAD_LOCAL
    (record,) = caplog.records  # a runtime without the function is logged once
    assert "graph capture in another thread may fail" in record.message
    cuda_threads._load_exchange_mode.cache_clear()
