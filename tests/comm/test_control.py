"""Messages between ranks through a store: every kind of store, late ranks, and stores that die."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from ringattn.comm import LocalGroup, LocalWorld, TransportError, WorldAborted, processes
from ringattn.comm import control as control_module
from ringattn.comm.control import Control, LocalConnection, StoreConnection, connect_store, open_control
from ringattn.comm.processes import has_ended, own_process
from ringattn.comm.world import Hub

from ..support.rank_processes import RankProcesses, call_outcome, join_group, start_store
from ..support.transport_cases import HANGS, wait_until
from ..support.watch_cases import MemoryConnection

T = TypeVar("T")


def opened(store: Store, rank: int, size: int) -> Control:
    return Control(StoreConnection(store), rank, size, "test/")


def on_all(controls: list[Control], fn: Callable[[Control], T]) -> list[T]:
    with ThreadPoolExecutor(len(controls)) as pool:
        return list(pool.map(fn, controls))


def serve_store(rank: int, pipe: Connection) -> None:
    store = start_store()
    pipe.send(store.port)
    time.sleep(60)


class StoreHost(RankProcesses):
    """A process that serves a TCPStore and can be stopped or killed."""

    def __init__(self) -> None:
        super().__init__(1, serve_store)
        (self.process,) = self.processes
        self.port = self.receive(0)

    def client(self) -> Store:
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        return PrefixStore("group/", store)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Stop the process and wait until all its threads have stopped, because a running thread may still answer."""
        self.signal(signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
            time.sleep(0.001)


@pytest.fixture
def host() -> Iterator[StoreHost]:
    with StoreHost() as served:
        yield served


def test_rank_0_merges_and_propagates_errors_to_all() -> None:
    def merge(values: list[object]) -> object:
        if None in values:
            raise ValueError("a rank sent no shape")
        return {"values": tuple(values)}

    def ends(control: Control) -> str:
        with pytest.raises((ValueError, TransportError)) as caught:
            control.gather_merged(control.rank or None, merge, what="shapes")
        return f"{caught.type.__name__}: {caught.value}"

    store = HashStore()
    controls = [opened(store, rank, 3) for rank in range(3)]
    results = on_all(controls, lambda control: control.gather_merged(control.rank, merge, what="shapes"))
    assert results == [{"values": [0, 1, 2]}] * 3
    message = "TransportError: shapes: rank 0: ValueError: a rank sent no shape"
    assert on_all(controls, ends) == ["ValueError: a rank sent no shape", message, message]
    assert on_all(controls, lambda control: control.gather(control.rank, what="turns")) == [[0, 1, 2]] * 3
    many = [Control(MemoryConnection(store), rank, 12, "many/") for rank in range(12)]
    assert on_all(many, lambda control: control.gather(control.rank, what="turns")) == [[*range(12)]] * 12


def test_one_connection_per_group_and_no_values_of_an_earlier_group() -> None:
    store = start_store()
    for turn in range(2):
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        try:
            control = open_control(group)
            assert control.gather(turn, what="turns") == [turn]
            assert control.gather_merged((turn,), lambda x: (repr(x),), what="turns") == [f"[[{turn}]]"]  # no tuples
            assert open_control(group).gather(-1, what="turns") == [-1]
            assert open_control(group)._connection is control._connection
            assert control.read_key("left") is None
            control.publish("left", turn)
            control.new_scope("ring").publish("failure", turn)
            assert open_control(group).new_scope("ring").read_key("failure") is None  # of the next ring
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ends", "match"),
    [(str, "rank 6, which has already returned"), (lambda group: 1 / 0, "another rank raised ZeroDivision")],
)
def test_virtual_ranks_do_not_wait_for_a_rank_that_is_gone(ends: Callable[[LocalGroup], object], match: str) -> None:
    messages: list[str] = []

    def fn(group: LocalGroup) -> None:
        control = open_control(group)
        control.names = range(5, 8)
        if group.rank() == 1:
            ends(group)
            return
        with pytest.raises(TransportError, match=match) as caught:
            control.gather(0, what="shapes")
        messages.append(str(caught.value))

    with LocalWorld(3, device="cpu") as world, suppress(ZeroDivisionError):
        world.run(fn)
    assert len(messages) == 2


def test_the_last_rank_to_close_a_scope_empties_it() -> None:
    store = HashStore()
    rings = [opened(store, rank, 2).new_scope("ring") for rank in range(2)]
    for _ in range(3):  # values that all ranks have read are deleted while the scope is open
        on_all(rings, lambda ring: ring.gather(ring.rank, what="ranks"))
    wait_until(lambda: store.num_keys() == 1)  # only the last answer is left
    assert [len(ring._connection.published) for ring in rings] == [1, 0]
    other = Control(rings[0]._connection, 0, 2, "test/other/")
    other.publish("news", 2)
    rings[0].publish("news", 1)
    rings[1].scope("inner").count("came", 1)
    rings[0].close()
    assert rings[1].read_key("news") == 1
    rings[0].publish("late", 1)  # the watchdog may still publish
    rings[0].close()
    rings[1].close()
    assert store.num_keys() == 1 and other.read_key("news") == 2
    assert not any(prefix.startswith("test/ring") for ring in rings for prefix in ring._connection.scopes)


def test_the_interval_between_liveness_checks_grows_during_a_wait() -> None:
    looks = control_module.CheckSchedule()
    assert [now / 4 for now in range(160) if looks.is_due(now / 4)] == [1, 2, 4, 8, 16, 26, 36]
    assert [now for now in range(100, 104) if looks.is_due(now)] == [101, 102]  # a new wait has the short interval


@pytest.mark.parametrize("asked_for", [False, True])
def test_has_ended_is_true_only_for_a_process_known_to_be_over(
    asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, number, start = own_process()
    assert "pid:[" in machine, "containers of one machine count PIDs apart"
    assert machine.startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip()), "so do machines"
    assert not has_ended([machine, number, start])
    assert has_ended([machine, number, "1"])  # the number now belongs to another process
    child = subprocess.Popen(["sleep", "60"])
    who = [machine, str(child.pid), processes._stat(str(child.pid))[processes.START_TIME]]
    assert not has_ended(who)
    child.kill()
    if asked_for:
        child.wait()
    wait_until(lambda: has_ended(who))
    child.wait()
    for unknown in (["another machine", *who[1:]], ["", *who[1:]], [*who, 1], "1", None):
        assert not has_ended(unknown)
    monkeypatch.setattr(processes, "PROC", tmp_path)  # a system without /proc
    assert not has_ended(own_process())
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (name (of a process)) S 1 2")
    assert processes._stat("7") == ["S", "1", "2"]


def test_the_socket_that_blocks_a_thread_is_shut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, taken = threading.Thread(target=str), cast("Any", [])
    thread.start()
    call = tmp_path / f"self/task/{thread.native_id}/syscall"
    monkeypatch.setattr(processes, "PROC", tmp_path)
    thread.join()
    assert processes.shut_socket(thread) and not processes.shut_socket(threading.main_thread())  # /proc lacks the file
    call.parent.mkdir(parents=True)
    duplicate = os.dup
    near, far = socket.socketpair()
    monkeypatch.setattr(os, "dup", lambda file: taken.append(file) or duplicate(near.fileno() if file == 3 else file))
    far.setblocking(False)
    with near, far:
        for line in (
            "running",
            "0 0x2 0x0",
            "0 0xffffffff80000003 0x0",
            "0 0x3 0x0",
            f"0 {near.fileno():#x} 0x0",
            "0 0x3fffffff 0x0",
        ):
            call.write_text(f"{line}\n")
            assert processes.shut_socket(thread)
        assert (taken, far.recv(1)) == ([3, near.fileno(), 0x3FFFFFFF], b"")


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_gather_publish_and_exchange_through_every_store(kind: str, tmp_path: Path) -> None:
    served: Any = HashStore() if kind == "hash" else start_store()
    stores = [FileStore(str(tmp_path / "store"), 3) if kind == "file" else PrefixStore("group", served)] * 3
    controls = [opened(store, rank, 3) for rank, store in enumerate(stores)]
    for turn in range(3):
        values = on_all(controls, lambda control, turn=turn: control.gather((turn, control.rank), what="turns"))  # type: ignore[misc]
        assert values == [[[turn, rank] for rank in range(3)]] * 3
    first, second, _ = controls
    assert first.read_key("news") is None
    for news in ({"b": "\x00\udc80"}, 2):
        second.publish("news", news)
        # A TCP store does not confirm writes, so another connection may briefly see the old value.
        wait_until(lambda news=news: first.read_key("news") == news)  # type: ignore[misc]
    assert first.exchange({"x": 1, "y": None}, ["x", "y", "z", "news"]) == {"x": 1, "y": None, "news": 2}


def test_late_ranks_are_named() -> None:
    store = HashStore()
    first, second = opened(store, 0, 4), opened(store, 2, 4)
    late = r"^rank 0 asks what the others take: no answer from rank 1, 3 within 0\.3 s"

    def gather(control: Control, seconds: float) -> None:
        with pytest.raises(TransportError, match=late):
            control.gather(0, what="rank 0 asks what the others take", timeout=seconds)

    with ThreadPoolExecutor(1) as pool:
        waiting_rank = pool.submit(gather, second, HANGS)  # rank 0 publishes the error
        wait_until(lambda: second.read_key("gather0/2") is not None)
        gather(first, 0.3)
        waiting_rank.result()
    for rank in (0, 2):  # rank 2 finds the late ranks itself if rank 0 is silent
        first.publish(f"gather1/{rank}", 0)
    gather(second, 0.3)


def test_a_closed_connection_gives_its_socket_back(host: StoreHost) -> None:
    connection = StoreConnection(host.client())
    files = len(os.listdir("/proc/self/fd"))
    connection.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) < files)


def test_a_killed_store_raises_at_once(host: StoreHost, capfd: pytest.CaptureFixture[str]) -> None:
    control, client, others = opened(host.client(), 0, 2), host.client(), {*threading.enumerate()}
    control.publish("x", 1)
    host.close()
    begun = time.monotonic()
    calls: list[Callable[[], object]] = [
        lambda: control.exchange({"x": 1}, ["x"]),  # a TCPStore confirms reads only
        lambda: control.read_key("x"),
        lambda: control.gather(1, what="shapes"),
    ]
    for call in calls:
        with pytest.raises(TransportError, match=r"the store of the group is gone \("):
            call()
    assert capfd.readouterr().err.count("Exception raised from") <= 1  # torch logs this once per request
    with pytest.raises(TransportError, match="the store of the group"):
        StoreConnection(client, 1.0)
    for thread in {*threading.enumerate()} - others:
        thread.join(HANGS)
        assert not thread.is_alive()
    assert time.monotonic() - begun < 0.75 * control_module.ANSWER_SECONDS


def test_an_unresponsive_store_blocks_no_rank(host: StoreHost) -> None:
    control = Control(StoreConnection(host.client()), 0, 2, "test/").new_scope("ring").scope("inner")
    control.publish("x", 1)
    client = host.client()
    host.stop()
    control.patience = 0.5
    for timeout, match in ((0.3, r"has not answered for 0\.3 s"), (60, r"has not answered for 0\.5 s")):
        with pytest.raises(TransportError, match=match):
            control.exchange(read=["x"], timeout=timeout)
    with pytest.raises(TransportError, match=r"has not answered for 0\.5 s"):
        StoreConnection(client, 0.5)
    host.signal(signal.SIGCONT)
    control.patience = HANGS
    assert control.read_key("x") == 1  # the store was only slow and answers the next request


def test_checking_for_gone_ranks_takes_no_longer_than_the_wait(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "ANSWER_SECONDS", HANGS)
    monkeypatch.setattr(control_module, "connection_closed", lambda group, peer: False)
    connection = of_a_group(host.client())
    host.stop()
    with pytest.raises(TransportError, match=r"has not answered for 0\.3 s"):
        Control(connection, 0, 2, "test/", 0.3).find_dead_peer([1])
    for rank in range(2):  # rank 0 waits for rank 1; rank 1 waits for rank 0's answer
        looks: list[tuple[int, float]] = []
        memory = MemoryConnection(HashStore())
        monkeypatch.setattr(
            memory, "find_dead_peer", lambda gone, _, timeout, looks=looks: looks.append((gone[0], timeout))
        )
        with pytest.raises(TransportError, match=rf"no answer from rank {1 - rank} within 0\.2 s"):
            Control(memory, rank, 2, "test/").gather(0, what="shapes", timeout=0.2)
        assert looks[-1][0] == 1 - rank
        assert max(timeout for _, timeout in looks) <= control_module.FINAL_STORE_SECONDS


def of_a_group(store: Store) -> StoreConnection:
    """Return a connection that checks for gone ranks at every request."""
    group = Mock(rank=Mock(return_value=3))
    connection = StoreConnection(store, group=group)
    connection._group = lambda: group  # type: ignore[assignment]  # a weak reference would let go of it
    connection._looks = Mock(due=Mock(return_value=True))
    return connection


def test_a_rank_whose_process_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "connection_closed", lambda group, peer: False)
    child = subprocess.Popen(["sleep", "60"])
    machine, _, _ = own = own_process()
    ended = [machine, str(child.pid), processes._stat(str(child.pid))[processes.START_TIME]]
    child.kill()
    child.wait()
    connection = of_a_group(HashStore())
    connection.prefix = "job/"
    control = Control(connection, 0, 4, connection.prefix, HANGS)
    control.names = range(10, 14)
    control.exchange({"process/1": own, "process/2": ended})  # rank 3 has not published its process
    assert control.find_dead_peer([1, 3]) is None
    assert str(control.find_dead_peer([1, 2, 3])) == "rank 12 is gone: its process has ended"
    monkeypatch.setattr(control_module, "connection_closed", lambda group, peer: peer == 1)
    assert str(control.find_dead_peer([3, 1])) == "rank 11 is gone: its connection to rank 13 is closed"
    connection._looks.is_due = lambda now: False  # type: ignore[method-assign]
    assert control.find_dead_peer([1]) is None


def test_every_store_thread_is_joined_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    serving: dict[threading.Thread, queue.SimpleQueue[Any]] = {}
    answers = {}
    for _ in range(2):
        jobs, answer = queue.SimpleQueue[Any](), threading.Event()
        jobs.put(lambda answer=answer: answer.wait(HANGS))
        thread = threading.Thread(target=control_module._serve, args=(jobs,), daemon=True)
        serving[thread], answers[thread] = jobs, answer
        thread.start()
    first, second = serving

    def shut(thread: threading.Thread) -> bool:
        threading.Timer(0.5 if thread is first else 0.0, answers[thread].set).start()
        return thread is second

    monkeypatch.setattr(control_module, "_SERVING", serving)
    monkeypatch.setattr(control_module, "FINAL_STORE_SECONDS", 0.01)
    monkeypatch.setattr(control_module, "shut_socket", shut)
    control_module._join_store_threads()
    assert not first.is_alive() and not second.is_alive()


def test_an_abandoned_request_is_not_sent_to_the_store() -> None:
    connection, gate, done = StoreConnection(HashStore()), threading.Event(), list[Store]()
    connection.enqueue(lambda store: gate.wait(HANGS))
    with pytest.raises(TransportError, match=r"has not answered for 0\.05 s"):
        connection.call_store(done.append, 0.05)
    gate.set()
    connection.call_store(lambda store: store.num_keys(), HANGS)
    assert not done


def test_a_failure_of_a_request_without_a_waiter_is_ignored() -> None:
    connection = StoreConnection(HashStore())

    def fail(store: Store) -> None:
        raise dist.DistError("the store is gone")

    connection.enqueue(fail)
    assert connection.call_store(lambda store: store.num_keys(), HANGS) == 0
    value = threading.Event()
    released = weakref.ref(value)
    connection.enqueue(lambda store, value=value: value.set())  # type: ignore[misc]
    del value
    wait_until(lambda: released() is None, "an idle thread holds the values of its last request")
    (thread,) = (thread for thread, jobs in control_module._SERVING.items() if jobs is connection._jobs)
    assert thread.daemon
    del connection  # nobody has closed it
    gc.collect()
    thread.join(HANGS)
    assert not thread.is_alive()


def connect_late(rank: int, pipe: Connection) -> None:
    store = start_store() if rank == 0 else pipe.recv()
    if rank == 0:
        pipe.send(store.port)
    join_group(rank, 2, store)
    pipe.send("joined")
    pipe.recv()
    assert dist.group.WORLD is not None
    pipe.send(call_outcome(lambda: open_control(dist.group.WORLD, 2.0)))  # type: ignore[arg-type]


def test_a_rank_0_that_is_killed_while_others_connect_is_named() -> None:
    with RankProcesses(2, connect_late) as ranks:
        ranks.ends[1].send(ranks.receive(0))
        assert [ranks.receive(rank) for rank in range(2)] == ["joined"] * 2
        ranks.processes[0].kill()
        ranks.processes[0].join()
        ranks.ends[1].send("connect")
        kind, text, _ = ranks.receive(1)
    assert kind == "TransportError"
    assert "rank 0" in text


@pytest.mark.parametrize("value", [b"[" * 100_000, b"\xff", b"x", b""])
def test_invalid_store_values_are_refused(value: bytes) -> None:
    store = HashStore()
    control = opened(store, 0, 2)
    for key in ("news", "gather0/1"):
        store.set(f"test/{key}", value)  # type: ignore[arg-type]
    reads: list[Callable[[], object]] = [lambda: control.read_key("news"), lambda: control.gather(1, what="shapes")]
    for read in reads:
        with pytest.raises(TransportError, match=r"^test/(news|gather0/1) is not JSON"):
            read()


def test_requests_of_a_virtual_rank_take_turns() -> None:
    """Let the watchdog's thread ask while the rank's own request runs."""
    connection, order = LocalConnection(LocalGroup(Hub(1, timeout=5.0), 0)), list[str]()
    watchdog = threading.Thread(target=connection.call_store, args=(lambda store: order.append("watchdog"), 1.0))

    def ask(store: Store) -> None:
        watchdog.start()
        watchdog.join(0.05)
        order.append("rank")

    connection.call_store(ask, 1.0)
    watchdog.join()
    assert order == ["rank", "watchdog"]


def test_answers_of_ranks_that_returned_early_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 2 answer and return after rank 0's 3rd look at the store, and rank 1 after the 4th."""
    hub, looks, moments = Hub(3, timeout=5.0), itertools.count(1), {3: 2, 4: 1}
    connection = LocalConnection(LocalGroup(hub, 0))
    ask = connection.call_store

    def asking(do: Callable[[Store], T], timeout: float) -> T:
        answers = ask(do, timeout)
        rank = moments.get(next(looks)) if answers is False else None
        if rank is not None:
            Control(connection, rank, 3, "test/").publish(str(rank), rank)
            hub.end_rank(rank)
        return answers

    monkeypatch.setattr(connection, "call_store", asking)
    control = Control(connection, 0, 3, "test/")
    control.publish("0", 0)
    assert control.collect({0: "0", 1: "1", 2: "2"}, what="a test", timeout=5.0) == [0, 1, 2]


def test_attempts_of_a_job_that_share_a_store_do_not_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share torchrun's store between two attempts. In the first one, rank 1 died before it used a ring."""
    served, own_store = start_store(), Mock(wraps=control_module._own_store)
    monkeypatch.setattr(control_module, "_own_store", own_store)
    prefixes = []
    for attempt, ranks in enumerate([[0], [0, 1]]):
        store = PrefixStore(f"/worker/attempt_{attempt}", served)
        monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group, store=store: store)
        groups: list[Any] = [Mock(group_name="0", rank=Mock(return_value=rank)) for rank in ranks]
        connections = [connect_store(group, 5.0) for group in groups]
        prefixes += [connection.prefix for connection in connections]
        for connection in connections:
            connection.close()
    assert prefixes[1] == prefixes[2] != prefixes[0]
    assert [call.args[1] for call in own_store.mock_calls] == [5.0] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_ends_its_wait_for_each_reason(rank: int) -> None:
    control = Control(MemoryConnection(HashStore()), rank, 2, "test/")
    control.names = (4, 7)
    with pytest.raises(TransportError, match=rf"^shapes: no answer from rank {control.names[1 - rank]} within 0\.1 s"):
        control.gather(0, what="shapes", timeout=0.1)
    reasons = iter([None, None, "the user stopped"])
    control.stop = lambda: "the ring was aborted"
    for stopped in (control, control.scope("ring")):
        with pytest.raises(TransportError, match=r"^shapes: the ring was aborted$"):
            stopped.gather(0, what="shapes", timeout=5.0)
    with pytest.raises(TransportError, match=r"^shapes: the user stopped$"):
        control.gather(0, what="shapes", timeout=5.0, stop=lambda: next(reasons))


@pytest.mark.parametrize("error", [WorldAborted("another rank raised"), ValueError("no shape")])
def test_an_error_of_rank_0_reaches_the_other_ranks_except_an_abort_of_all(error: Exception) -> None:
    def merge(values: list[object]) -> object:
        raise error

    store = HashStore()
    controls = [Control(MemoryConnection(store), rank, 2, "test/") for rank in range(2)]
    controls[0].names = (4, 7)
    controls[1].publish("gather0/1", 0)
    with pytest.raises(type(error), match=str(error)):
        controls[0].gather_merged(0, merge, what="shapes")
    expected = None if isinstance(error, WorldAborted) else ["shapes: rank 4: ValueError: no shape", None]
    assert controls[1].read_key("gather0/all") == expected

    def break_store(values: list[object]) -> object:
        connection.problem = "the store is gone"
        raise error

    connection = MemoryConnection(HashStore())
    broken = Control(connection, 0, 2, "test/")
    broken.publish("gather0/1", 0)
    with pytest.raises(type(error), match=str(error)):  # and not the error of the store
        broken.gather_merged(0, break_store, what="shapes")


@pytest.mark.parametrize(("patience", "limit"), [(0.5, 0.5), (1e6, control_module.ANSWER_SECONDS)])
def test_no_request_takes_longer_than_the_patience_of_its_control(patience: float, limit: float) -> None:
    connection, timeouts = MemoryConnection(HashStore()), cast("Any", [])
    call_store = connection.call_store
    connection.call_store = lambda do, timeout: timeouts.append(timeout) or call_store(do, timeout)  # type: ignore[method-assign]
    connection.find_dead_peer = lambda missing, names, timeout: timeouts.append(timeout)  # type: ignore[method-assign]
    control = Control(connection, 0, 2, "test/", patience)
    requests: list[Callable[[], object]] = [
        lambda: control.publish("0", 0), lambda: control.read_key("0"), lambda: control.count("calls", 2),
        lambda: control.exchange({"1": 0}, timeout=1e9), lambda: control.find_dead_peer([1], 1e9),
        lambda: control.collect({0: "0", 1: "1"}, what="values"), control.close,
    ]  # fmt: skip
    expected = [[limit]] * 3 + [[patience], [limit], [max(limit, 1.0), limit], [control_module.FINAL_STORE_SECONDS]]
    for request, seconds in zip(requests, expected, strict=True):
        timeouts.clear()
        request()
        assert timeouts == pytest.approx(seconds, abs=0.2)


def test_a_closed_connection_is_noticed_without_taking_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    group, receive = Mock(), Mock(side_effect=[Mock(), RuntimeError("Connection closed by peer")])
    backends = iter(("cpu:gloo", "cpu:gloo", "cuda:nccl"))
    monkeypatch.setattr(dist, "irecv", receive)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: next(backends))
    with torch.device("meta"):  # the user's default device
        assert [control_module.connection_closed(group, 3) for _ in range(3)] == [False, True, False]
    (scratch,), options = receive.call_args
    assert (scratch.device.type, options) == ("cpu", {"group": group, "group_src": 3, "tag": 20000})


@pytest.mark.parametrize(
    ("rank", "closed", "seconds", "text"),
    [(0, True, 0.0, ""), (None, True, 0.0, ""), (1, False, 0.05, ""), (1, True, 0.0, "; rank 0 of the job")],
)
def test_a_dead_rank_0_is_named_as_the_server_of_the_store(
    rank: int | None, closed: bool, seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = None if rank is None else Mock(rank=Mock(return_value=rank))
    stand_in = Mock(
        wraps=dist, is_initialized=lambda: rank is not None, group=Mock(WORLD=world), DistError=dist.DistError
    )
    monkeypatch.setattr(control_module, "dist", stand_in)
    monkeypatch.setattr(control_module, "connection_closed", lambda group, peer: closed and (group, peer) == (world, 0))
    begun = time.monotonic()
    assert control_module.describe_lost_server(seconds).startswith(text) and time.monotonic() - begun >= seconds
    assert bool(control_module.describe_lost_server(seconds)) is bool(text)


def test_errors_of_a_store_say_whether_its_server_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "describe_lost_server", lambda seconds: f", looked for {seconds:g} s")
    connection, gate, asked = StoreConnection(HashStore()), threading.Event(), list[object]()
    with pytest.raises(TransportError, match=r"has not answered for 0\.05 s, looked for 0 s$"):
        connection.call_store(lambda store: gate.wait(HANGS), 0.05)
    gate.set()

    def fail(store: Store) -> None:
        asked.append(store)
        raise dist.DistError("connection reset\nand a stack")

    for _ in range(2):  # a failed store is not asked again
        with pytest.raises(
            TransportError, match=r"^the store of the group is gone \(connection reset\), looked for 1 s$"
        ):
            connection.call_store(fail, HANGS)
    connection.close()
    with pytest.raises(TransportError, match=r"^the group was destroyed$"):
        connection.call_store(fail, HANGS)
    assert len(asked) == 1 and not connection._stop.atexit


def test_a_connection_has_its_own_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = list[Any](), cast("Any", [])
    members = {"host": "node", "port": 7, "set_timeout": lambda store, timeout: made.append(timeout)}
    kind: Any = type("Server", (), members)
    monkeypatch.setattr(control_module, "TCPStore", kind)
    monkeypatch.setattr(kind, "__init__", lambda store, *where, **how: made.extend([where, how]), raising=False)
    control_module._own_store(kind.__new__(kind), 4.0)
    second = timedelta(seconds=1)
    how = {"is_master": False, "wait_for_workers": False, "timeout": 2 * second}
    assert made == [("node", 7), how, control_module.ANSWER_SECONDS * second]
    connection = StoreConnection(HashStore())
    monkeypatch.setattr(control_module, "connect_store", lambda group, seconds: given.append(seconds) or connection)
    monkeypatch.setattr(control_module, "get_group_cache", lambda group: {})
    for patience in (None, 4.0, 1e6):
        open_control(Mock(rank=lambda: 0, size=lambda: 1), patience)
    assert given == [control_module.ANSWER_SECONDS, 4.0, control_module.ANSWER_SECONDS]


def test_polls_of_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll seldom after a while, limit every request by the time left, and name rank 0 if only its answer lacks."""
    now, pauses, timeouts = [0.0], list[float](), cast("Any", [])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)

    monkeypatch.setattr(control_module, "time", Mock(monotonic=lambda: now[0], sleep=sleep))
    connection = MemoryConnection(HashStore())
    control = Control(connection, 1, 2, "test/", 1e6)
    control.publish("gather0/0", 0)
    call_store = connection.call_store
    connection.call_store = lambda do, timeout: timeouts.append(timeout) or call_store(do, timeout)  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="no answer from rank 0 within 60 s"):
        control.gather(0, what="shapes", timeout=60)
    assert pauses[:3] == pytest.approx([2e-4, 3e-4, 4.5e-4]) and {*pauses[20:]} == {control_module.MAX_POLL_SECONDS}
    assert 60 <= now[0] < 60.1
    waits = timeouts[1:]  # after the publication
    assert (max(waits), min(waits)) == (control_module.ANSWER_SECONDS, control_module.FINAL_STORE_SECONDS)
