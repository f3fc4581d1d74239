"""What ranks tell each other through a store: every kind of store, ranks that are late, and stores that die."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from ringattn.comm import Limits, LocalGroup, LocalWorld, Topology, TransportError
from ringattn.comm.control import (
    Control,
    LocalConnection,
    StoreConnection,
    _Looks,
    connect,
    control_of,
    has_ended,
    own_process,
)
from ringattn.comm.groups import choose, request_of
from ringattn.comm.topology import topology
from ringattn.comm.topology.nvml import DeviceInfo
from ringattn.comm.topology.topology import discover, ring_topology
from ringattn.comm.transports.local import Hub

from ..support.clusters import hgx
from ..support.forked import FORKED
from ..support.transport_cases import until
from ..support.watch_cases import MemoryConnection

T = TypeVar("T")
HELD: list[Store] = []  # a clone of a TCPStore does not keep the server


def opened(store: Store, rank: int, size: int) -> Control:
    return Control(StoreConnection(store), rank, size, "test/")


def on_all(controls: list[Control], fn: Callable[[Control], T]) -> list[T]:
    with ThreadPoolExecutor(len(controls)) as pool:
        return list(pool.map(fn, controls))


def serve_store(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(60)


class StoreHost:
    """A process that serves a TCPStore and can be stopped or killed."""

    def __init__(self) -> None:
        here, there = FORKED.Pipe()
        self.process = FORKED.Process(target=serve_store, args=(there,), daemon=True)
        self.process.start()
        self.port = here.recv()

    def client(self) -> Store:
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        return PrefixStore("group/", store)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Stopped in truth: a thread that still runs when the signal is sent may yet answer."""
        self.signal(signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def host() -> Iterator[StoreHost]:
    served = StoreHost()
    yield served
    served.end()


def controls_over(kind: str, tmp_path: Path, size: int) -> list[Control]:
    if kind == "hash":
        store: Store = HashStore()
        return [opened(store, rank, size) for rank in range(size)]
    if kind == "file":
        return [opened(FileStore(str(tmp_path / "store"), size), rank, size) for rank in range(size)]
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    HELD[:] = [served]
    return [opened(PrefixStore("group", served), rank, size) for rank in range(size)]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_gather_publish_and_look_over_every_store(kind: str, tmp_path: Path) -> None:
    controls = controls_over(kind, tmp_path, 3)
    for turn in range(3):
        values = on_all(controls, lambda control, turn=turn: control.gather((turn, control.rank), what="turns"))  # type: ignore[misc]
        assert values == [[[turn, rank] for rank in range(3)]] * 3
    first, second, _ = controls
    assert first.look("news") is None
    second.publish("news", {"b": "\x00\udc80"})
    # a TCP store confirms nothing: another connection may for a moment still see what was there before
    until(lambda: first.look("news") == {"b": "\x00\udc80"})
    second.publish("news", 2)
    until(lambda: first.look("news") == 2)
    assert first.exchange({"x": 1, "y": None}, ["x", "y", "z", "news"]) == {"x": 1, "y": None, "news": 2}


def test_scopes_have_keys_of_their_own() -> None:
    controls = [opened(HashStore(), 0, 1)]
    (control,) = controls
    control.scope("a").publish("key", 1)
    assert control.look("key") is None
    assert control.scope("b").look("key") is None
    assert control.scope("a").look("key") == 1
    first, second = control.fresh_scope("ring"), control.fresh_scope("ring")
    first.publish("key", 2)
    assert second.look("key") is None
    assert first.scope("a").look("key") is None
    # counted per scope and not per object: a second object of a scope does not read what the first one gathered
    assert control.scope("a").gather(1, what="x") == [1]
    assert control.scope("a").gather(2, what="x") == [2]


def test_rank_0_merges_for_all_and_tells_all_what_ended_it() -> None:
    def merge(values: list[object]) -> object:
        if None in values:
            raise ValueError("a rank said nothing")
        return {"values": tuple(values)}

    def ends(control: Control) -> str:
        with pytest.raises((ValueError, TransportError)) as caught:
            control.merged(control.rank or None, merge, what="shapes")
        return f"{caught.type.__name__}: {caught.value}"

    store = HashStore()
    controls = [opened(store, rank, 3) for rank in range(3)]
    found = on_all(controls, lambda control: control.merged(control.rank, merge, what="shapes"))
    assert found == [{"values": [0, 1, 2]}] * 3
    told = "TransportError: shapes: rank 0: ValueError: a rank said nothing"
    assert on_all(controls, ends) == ["ValueError: a rank said nothing", told, told]
    assert on_all(controls, lambda control: control.gather(control.rank, what="turns")) == [[0, 1, 2]] * 3


def test_late_ranks_are_named() -> None:
    store = HashStore()
    controls = [opened(store, rank, 4) for rank in range(4)]

    def some(control: Control) -> str:
        if control.rank in (1, 3):
            return ""
        with pytest.raises(TransportError) as caught:
            control.gather(0, what="rank 0 asks what the others take", timeout=0.3)
        return str(caught.value)

    told = on_all(controls, some)
    assert told[0] == told[2] == "rank 0 asks what the others take: no answer from rank 1, 3 within 0.3 s"


def test_a_gather_can_be_stopped() -> None:
    control = opened(HashStore(), 0, 2)
    reasons = iter([None, None, "the watchdog has had enough"])
    with pytest.raises(TransportError, match="shapes: the watchdog has had enough"):
        control.gather(0, what="shapes", stop=lambda: next(reasons))


@pytest.mark.parametrize("call", ["exchange", "look", "gather"])
def test_a_killed_store_is_an_error_at_once(host: StoreHost, call: str, capfd: pytest.CaptureFixture[str]) -> None:
    control = opened(host.client(), 0, 2)
    control.publish("x", 1)
    host.end()
    begun = time.monotonic()
    calls: dict[str, Callable[[], Any]] = {
        "exchange": lambda: control.exchange({"x": 1}, ["x"]),  # a TCPStore confirms only what it is asked
        "look": lambda: control.look("x"),
        "gather": lambda: control.gather(1, what="shapes"),
    }
    for _ in range(3):
        with pytest.raises(TransportError, match="the store of the group is gone: "):
            calls[call]()
    assert time.monotonic() - begun < 10  # a store's own patience is 20 s
    assert capfd.readouterr().err.count("Exception raised from") <= 1  # torch's: it was asked once


def test_a_store_that_stops_answering_holds_nobody(host: StoreHost) -> None:
    control = opened(host.client(), 0, 2)
    control.publish("x", 1)
    host.stop()
    for _ in range(2):
        with pytest.raises(TransportError, match=r"has not answered for 0\.3 s"):
            control.exchange(look=["x"], timeout=0.3)
    host.signal(signal.SIGCONT)
    assert control.look("x") == 1  # it was only slow: asked again, it answers


def test_one_connection_per_group_and_nothing_read_of_an_earlier_group() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for turn in range(2):
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        try:
            control = control_of(group)
            assert control.gather(turn, what="turns") == [turn]
            assert control_of(group).gather(-1, what="turns") == [-1]
            assert control_of(group)._connection is control._connection
            assert control.look("left") is None
            control.publish("left", turn)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ends", "match"), [(str, "rank 1, which has returned"), (lambda group: 1 / 0, "another rank raised ZeroDivision")]
)
def test_virtual_ranks_do_not_wait_for_one_that_is_gone(ends: Callable[[LocalGroup], object], match: str) -> None:
    told: list[str] = []

    def fn(group: LocalGroup) -> None:
        if group.rank() == 1:
            ends(group)
            return
        with pytest.raises(TransportError, match=match) as caught:
            control_of(group).gather(0, what="shapes")
        told.append(str(caught.value))

    with LocalWorld(3, device="cpu") as world, suppress(ZeroDivisionError):
        world.run(fn)
    assert len(told) == 2


def test_the_store_s_own_timeout_is_left_alone() -> None:
    seconds = timedelta(seconds=77)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    opened(served, 0, 1)
    assert served.timeout == seconds  # type: ignore[attr-defined]


@pytest.mark.parametrize("moments", [{3: 1, 5: 2}, {3: 2, 4: 1}])
def test_what_a_rank_left_before_it_returned_counts(moments: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that answer and return right after a look that found something missing (the 3rd, ...)."""
    hub, looks = Hub(3, timeout=5.0), itertools.count(1)
    connection = LocalConnection(LocalGroup(hub, 0))
    ask = connection.ask

    def asking(do: Callable[[Store], T], timeout: float) -> T:
        found = ask(do, timeout)
        rank = moments.get(next(looks)) if found is False else None
        if rank is not None:
            Control(connection, rank, 3, "test/").publish(str(rank), rank)
            hub.end(rank)
        return found

    monkeypatch.setattr(connection, "ask", asking)
    control = Control(connection, 0, 3, "test/")
    control.publish("0", 0)
    assert control.collect({0: "0", 1: "1", 2: "2"}, what="a test", timeout=5.0) == [0, 1, 2]


class Bomb:
    """What runs where it is unpickled."""

    went_off = False

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return setattr, (Bomb, "went_off", True)


@pytest.mark.parametrize("found", [pickle.dumps(Bomb()), b"[" * 100_000, b"\xff", b"x", b""])
def test_what_another_process_puts_into_the_store_is_never_run(found: bytes) -> None:
    store = HashStore()
    control = opened(store, 0, 2)
    for key in ("news", "gather0/1"):
        store.set(f"test/{key}", found)  # type: ignore[arg-type]
    reads: list[Callable[[], object]] = [lambda: control.look("news"), lambda: control.gather(1, what="shapes")]
    for read in reads:
        with pytest.raises(TransportError, match=r"^test/(news|gather0/1) is no JSON, so that no rank of ours"):
            read()
    assert not Bomb.went_off


def test_the_last_rank_to_close_a_scope_empties_it() -> None:
    store = HashStore()
    rings = [opened(store, rank, 2).fresh_scope("ring") for rank in range(2)]
    for _ in range(3):  # what all have read goes while the scope is open
        on_all(rings, lambda ring: ring.gather(ring.rank, what="ranks"))
    assert store.num_keys() <= 4
    rings[0].publish("news", 1)
    rings[1].scope("inner").count("came", 1)
    rings[0].close()
    assert rings[1].look("news") == 1
    rings[0].publish("late", 1)  # the watchdog may be about to speak
    rings[0].close()
    rings[1].close()
    assert store.num_keys() == 0


def test_no_wait_is_longer_than_the_patience_of_a_control(host: StoreHost) -> None:
    control = Control(StoreConnection(host.client()), 0, 2, "test/", 0.5).fresh_scope("ring").scope("inner")
    with pytest.raises(TransportError, match=r"no answer from rank 1 within 0\.5 s"):
        control.gather(0, what="shapes", timeout=60)
    client = host.client()
    host.stop()
    with pytest.raises(TransportError, match=r"has not answered for 0\.5 s"):
        control.look("x")
    with pytest.raises(TransportError, match=r"has not answered for 0\.5 s"):
        StoreConnection(client, 0.5)


def test_a_line_to_a_store_that_is_gone_is_an_error_in_time(host: StoreHost) -> None:
    client, others = host.client(), {*threading.enumerate()}
    host.end()
    begun = time.monotonic()
    with pytest.raises(TransportError, match="the store of the group"):
        StoreConnection(client, 1.0)
    assert time.monotonic() - begun < 10
    for thread in {*threading.enumerate()} - others:
        thread.join(5)
        assert not thread.is_alive()


def test_a_process_that_has_ended() -> None:
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=say_who, args=(there,), daemon=True)
    process.start()
    who = here.recv()
    assert not has_ended(who) and not has_ended(own_process())
    assert has_ended([who[0], who[1], "1"])  # its number was given to another
    for unknown in (["another machine", *who[1:]], ["", *who[1:]], [*who, 1], "1", None):
        assert not has_ended(unknown)
    process.kill()
    until(lambda: has_ended(who))
    process.join()


def say_who(pipe: Connection) -> None:
    pipe.send(own_process())
    time.sleep(60)


def test_looks_are_rare_and_begin_with_a_wait() -> None:
    looks = _Looks()
    polls = [0.02 * number for number in range(2000)]
    found = [now for now in polls if looks.due(now)]
    assert found == pytest.approx([1, 2, 4, 8, 16, 26, 36], abs=0.2)
    assert not looks.due(100.0)  # another wait
    assert not any(looks.due(time) for time in (101.5, 103.0, 104.5))  # short ones


class Named:
    """What a connection asks a group."""

    group_name = "0"

    def __init__(self, rank: int) -> None:
        self.rank = lambda: rank


def test_attempts_of_a_job_that_share_a_store_do_not_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives an attempt; rank 1 died in the first one before it had used a ring."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prefixes = []
    for attempt, ranks in enumerate([[0], [0, 1]]):
        store = PrefixStore(f"/worker/attempt_{attempt}", served)
        monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group, store=store: store)
        groups: list[Any] = [Named(rank) for rank in ranks]
        connections = [connect(group, 5.0) for group in groups]
        prefixes += [connection.prefix for connection in connections]
        for connection in connections:
            connection.close()
    assert prefixes[1] == prefixes[2] != prefixes[0]


MANY = 1024
MOST_BYTES = 3e6


class CountedConnection(MemoryConnection):
    """One of many ranks' ways to a store that counts."""

    patience, lock = 60.0, threading.Lock()

    def ask(self, do: Callable[[Any], T], timeout: float) -> T:
        with self.lock:
            return super().ask(do, timeout)


class CountingStore:
    """A store in memory: what goes in and out of it is counted, keys and values; numbers as 8 bytes."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.nbytes = self.sets = 0
        self.answered = threading.Event()  # when all have said something, and rank 0 more

    def set(self, key: str, value: bytes) -> None:
        self.data[key] = value
        self.nbytes += len(key) + len(value)
        self.sets += 1
        if self.sets > MANY:
            self.answered.set()

    def get(self, key: str) -> bytes:
        self.nbytes += len(key) + len(self.data[key])
        return self.data[key]

    def check(self, keys: list[str]) -> bool:
        self.nbytes += sum(map(len, keys))
        return all(key in self.data for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        self.nbytes += len(key)
        return self.data.pop(key, None) is not None


def of_many(fn: Callable[[Control], T], monkeypatch: pytest.MonkeyPatch) -> tuple[list[T], CountingStore]:
    """What every rank returns; rank 0 comes last, and the others look again when it has answered."""
    store = CountingStore()
    prefix = f"ringattn/{'0' * 32}/default_pg/1/ring1/"
    controls = [Control(CountedConnection(store), rank, MANY, prefix) for rank in range(MANY)]
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: store.answered.wait(60))
    with ThreadPoolExecutor(MANY) as pool:
        others = [pool.submit(fn, control) for control in controls[1:]]
        while store.sets < MANY - 1:
            pause(1e-3)
        return [fn(controls[0]), *(other.result() for other in others)], store


def devices_of_many() -> list[DeviceInfo]:
    """Nodes of eight GPUs and nine NICs, each with names and numbers of its own, dealt out in turn."""
    drawn = random.Random(0)
    hosts = [f"gpu-{node:03}.cluster.example/{drawn.getrandbits(32):08x}" for node in range(MANY // 8)]
    nodes = [[replace(device, gpu=f"GPU-{UUID(int=drawn.getrandbits(128))}") for device in hgx(host)] for host in hosts]
    return [device for rail in zip(*nodes, strict=True) for device in rail]


@pytest.mark.parametrize("step", ["discover", "choice of a transport", "words that all went well"])
def test_what_a_thousand_ranks_move_to_start(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that goes into the store and out of it, each rank's reading of what rank 0 answers included."""
    devices = devices_of_many()
    request = request_of(None, "auto", torch.device("cuda"), Topology.grid(MANY // 8, 8), Limits())
    request = request._replace(problems=dict.fromkeys(request.problems))
    monkeypatch.setattr(topology, "device_info", lambda rank: devices[rank])
    steps: dict[str, Callable[[Control], Any]] = {
        "discover": lambda control: discover(control, control.rank),  # type: ignore[arg-type]
        "choice of a transport": lambda control: choose(control, request, 2),
        "words that all went well": lambda control: control.gather(None, what="whether it works"),
    }
    found, store = of_many(steps[step], monkeypatch)
    assert all(one == found[0] for one in found)
    assert step != "discover" or found[0] == ring_topology(devices)
    assert store.nbytes <= MOST_BYTES, f"{store.nbytes / 1e6:.2f} MB"
    assert [key.rpartition("/")[2] for key in store.data] == ["all"]  # the rest is taken out again
