"""One thread for all rings: whom it serves, when it ends, what it costs, and how it ends a process."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from ringattn.comm import DONE, LocalGroup, LocalWorld, TransportError
from ringattn.comm.control import Control
from ringattn.comm.watchdog import watch as module
from ringattn.comm.watchdog.deadlines import NEVER
from ringattn.comm.watchdog.watch import EXIT_CODE, Watch, Watchdog, open_watch

from ..support.watch_cases import MemoryLine, Transfer, controls

CPU = torch.device("cpu")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    watchdog = Watchdog()
    monkeypatch.setattr(module, "_WATCHDOG", watchdog)
    yield watchdog
    watchdog.stop()


def watch_of(control: Control) -> Watch:
    return Watch(control, deadline=0.2, device=CPU, transports=lambda: [])


def test_one_thread_serves_all_rings_and_ends_with_the_last(fast: Watchdog) -> None:
    watches = [watch_of(control) for control in controls(4)]
    for watch in watches:
        fast.add(watch)
    thread = fast._thread
    assert thread is not None and thread.daemon
    assert [one.name for one in threading.enumerate()].count("ringattn-watchdog") == 1
    gone = weakref.ref(watches[0])
    watches[1].close()
    del watches[0], watch
    time.sleep(0.1)
    gc.collect()
    assert gone() is None  # the thread holds nobody
    assert thread.is_alive()
    watches[0].close()
    watches[0].close()
    assert thread.is_alive()
    del watches
    gc.collect()
    thread.join(2)
    assert not thread.is_alive()
    again = watch_of(controls(2)[0])
    fast.add(again)  # and begins anew
    assert fast._thread is not None and fast._thread.is_alive()


def test_a_fault_in_one_ring_does_not_end_the_watch_over_the_others(
    fast: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = (watch_of(control) for control in controls(2))
    ticks: list[int] = []
    broken.tick = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    good.tick = lambda: ticks.append(1)  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "ringattn"):
        fast.add(broken)
        fast.add(good)
        until = time.monotonic() + 10
        while len(ticks) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(ticks) >= 3
    assert "the watchdog of rank 0 failed" in caplog.text
    broken.close()


def test_virtual_ranks_have_no_deadline_of_their_own(fast: Watchdog) -> None:
    seen: list[tuple[float | None, object]] = []

    def fn(group: LocalGroup) -> None:
        for deadline in (None, 5.0):
            watch = open_watch(group, CPU, deadline=deadline, transports=lambda: [])
            seen.append((watch._posts._seconds, watch._fatal))
            watch.agree({"heads": 8})
            watch.close()

    with LocalWorld(2, device="cpu") as world:
        world.run(fn)
    assert sorted(seen, key=str) == [(5.0, None), (5.0, None), (NEVER, None), (NEVER, None)]


def test_virtual_ranks_that_disagree_get_one_error(fast: Watchdog) -> None:
    def fn(group: LocalGroup) -> None:
        open_watch(group, CPU, deadline=None, transports=lambda: []).agree({"heads": group.rank()})

    with LocalWorld(3, device="cpu") as world, pytest.raises(ValueError, match="heads differs between ranks"):
        world.run(fn)


@pytest.mark.parametrize(("device", "ends"), [("cpu", 0), ("cuda:0", 1)])
def test_only_streams_of_a_gpu_end_the_process(
    device: str, ends: int, fast: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(module, "end_process", ended.append)
    monkeypatch.setattr(module, "control_of", lambda group, patience: controls(2)[0])
    watch = open_watch(object(), torch.device(device), deadline=5.0, transports=list)  # type: ignore[arg-type]
    watch.failed(TransportError("the connection is gone"))
    assert ["the connection is gone" in text for text in ended] == [True] * ends


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12: of a process with threads
def test_a_forked_child_has_a_thread_of_its_own(fast: Watchdog) -> None:
    fast.add(watch := watch_of(controls(2)[0]))
    child = os.fork()
    if child == 0:
        ticked = threading.Event()
        try:
            watch.tick = ticked.set  # type: ignore[method-assign]
            module._WATCHDOG.add(watch)
        finally:
            os._exit(0 if ticked.wait(5) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_process_ends_non_zero() -> None:
    code = """
        import threading
        from ringattn.comm.watchdog.watch import end_process
        threading.Thread(target=lambda: end_process("rank 0: forward hop 1: not over")).start()
        threading.Event().wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CODE == os.EX_TEMPFAIL == 75  # what schedulers start again
    assert "this process ends: rank 0: forward hop 1: not over" in done.stderr


def test_what_it_costs(fast: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 20 s with a post every 2 ms: 0.23% of one core, 0.26% with a table of 1,024 ranks. Here: a bound."""
    monkeypatch.setattr(module, "TICK_SECONDS", 0.25)
    watch = Watch(Control(MemoryLine(controls(2)[0]._line.store), 0, 2, "x/"), deadline=9, device=CPU, transports=list)  # type: ignore[attr-defined]
    fast.add(watch)
    fence = Transfer()
    fence.finish()
    watch.begin("forward")
    begun, cpu = time.monotonic(), time.process_time()
    spent = 0.0
    while time.monotonic() - begun < 2.0:
        before = time.thread_time()
        for _ in range(5):
            watch.posted("hop", fence, [DONE], [(1, 64)], [(1, 64)])
        time.sleep(0.01)
        spent += time.thread_time() - before
    assert time.process_time() - cpu - spent < 0.1 * 2.0
    watch.close()
