"""The processes of one node: records between them, and one verdict on every rank before anything is connected."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringattn.comm import LocalGroup, LocalWorld, TransportError
from ringattn.comm.control import control_of
from ringattn.comm.transports.copy_engine.memory import Board
from ringattn.comm.transports.copy_engine.sockets import Card, Listener, Sockets, join_node, problem_of

from ..support.cuda.driver import Driver, Result, install_driver


@pytest.fixture
def pair() -> Iterator[tuple[Sockets, Sockets]]:
    """The lines of ranks 0 and 1."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = Sockets({1: first}), Sockets({0: second})
    yield lines
    for line in lines:
        line.close()
        line.close()


def test_simultaneous_large_sends_do_not_deadlock(pair: tuple[Sockets, Sockets]) -> None:
    """Far more than a socket holds, from both ends at once, before either end reads."""
    count = 3000
    got: dict[int, list[bytes]] = {}

    def talk(rank: int) -> None:
        other = 1 - rank
        for number in range(count):
            pair[rank].send(other, number.to_bytes(100, "little"), 60.0)
        got[rank] = [pair[rank].receive(other, "waits", 60.0) for _ in range(count)]

    threads = [threading.Thread(target=talk, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [number.to_bytes(100, "little") for number in range(count)]
    assert got == {0: expected, 1: expected}


def test_silent_peers_time_out(pair: tuple[Sockets, Sockets]) -> None:
    with pytest.raises(TransportError, match=r"rank 1 waits for rank 0: nothing happened for 0\.05 s; do all ranks"):
        pair[1].receive(0, "rank 1 waits for rank 0", 0.05)
    with pytest.raises(TransportError, match=r"a record for rank 1 waits: nothing happened for 0\.05 s"):
        for _ in range(100_000):
            pair[0].send(1, b"x" * 100, 0.05)


def test_data_sent_before_close_arrives_before_eof(pair: tuple[Sockets, Sockets]) -> None:
    pair[1].send(0, b"never read", 1.0)  # makes the other end's close a reset
    pair[0].send(1, b"last words", 1.0)
    pair[0].close()
    assert pair[1].receive(0, "rank 1 waits", 5.0) == b"last words"
    with pytest.raises(TransportError, match="rank 1 waits: that rank has ended its transport, or died"):
        pair[1].receive(0, "rank 1 waits", 5.0)
    with pytest.raises(TransportError, match="a record for rank 0 waits: that rank has ended"):
        pair[1].send(0, b"x", 5.0)


def test_shutdown_unblocks_waiting_threads(pair: tuple[Sockets, Sockets]) -> None:
    threading.Timer(0.05, pair[1].cut, ["enough"]).start()
    with pytest.raises(TransportError, match="enough"):
        pair[1].receive(0, "waits", 10.0)
    pair[1]._inboxes[0].append(b"there before, and too late")
    with pytest.raises(TransportError, match="enough"):
        pair[1].receive(0, "waits", 10.0)
    with pytest.raises(TransportError, match="has ended"):
        pair[0].receive(1, "waits", 10.0)
    with pytest.raises(TransportError, match="enough"):
        pair[1].send(0, b"x", 10.0)
    pair[0].cut("and the other")


def test_unknown_connections_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    sockets: dict[int, socket.socket] = {}
    with Listener() as listener, Listener() as other, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(listener.address)
        with pytest.raises(TimeoutError):
            listener.connect(0, {0: "", 1: ""}, sockets, 0.05)
        assert not sockets and line.recv(10) == b""
        with pytest.raises(TransportError, match="a process of another user answers for rank 0"):
            listener.connect(1, {0: other.address, 1: ""}, sockets, 0.05)
    for sock in sockets.values():
        sock.close()


def test_a_board_fails_where_rank_0_is_gone() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first.close()
    with second, pytest.raises(TransportError, match="rank 0 hands out no flags"):
        Board.shared(1, {0: second}, 8, 0)


def test_forked_children_do_not_keep_sockets_of_a_dead_parent_open(pair: tuple[Sockets, Sockets]) -> None:
    gone, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        os.read(gone, 1)  # until the parent lets it go
        os._exit(0)
    try:
        pair[1].close()
        with pytest.raises(TransportError, match="has ended its transport, or died"):
            pair[0].receive(1, "waits", 2.0)
    finally:
        os.close(alive)
        os.close(gone)
        os.waitpid(child, 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    install_driver(monkeypatch, driver)
    yield driver
    assert not +driver.retained, "a context is held"
    assert not driver.registered


def joined(group: LocalGroup, members: list[int] | None = None, missing: str | None = None) -> Any:
    members = list(range(group.size())) if members is None else members
    device = torch.device("cpu", group.rank())  # a device of its own on the stand-in
    control = control_of(group)
    return join_node(control, group.rank(), members, device, missing=missing, first=7, timeout=60.0)


def refused(world_size: int, *arguments: Any) -> str:
    """What every rank is told, which is the same."""

    def fn(group: LocalGroup) -> str:
        with pytest.raises(TransportError) as caught:
            joined(group, *arguments)
        return str(caught.value)

    with LocalWorld(world_size, device="cpu", timeout=60) as world:
        (message,) = set(world.run(fn))
    return message


@pytest.mark.parametrize("problem", ["the device has no CUDA IPC", "Failed to dlopen libcuda.so.1", "no bindings"])
def test_missing_features_are_errors_on_all_ranks(
    problem: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError(problem)

    driver.has_ipc = "IPC" not in problem
    if "libcuda" in problem:
        monkeypatch.setattr(driver, "cuInit", no_library)
    missing = problem if "bindings" in problem else None
    assert refused(2, None, missing) == f'transport "copy_engine": on rank 0 {problem}'


def test_a_board_that_cuda_does_not_take(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    register = driver.cuMemHostRegister

    def refuse_rank_1(host: int, nbytes: int, flags: int) -> Any:
        if threading.current_thread().name.startswith("ringattn-rank1"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return register(host, nbytes, flags)

    monkeypatch.setattr(driver, "cuMemHostRegister", refuse_rank_1)
    held = len(os.listdir("/proc/self/fd"))
    assert "rank 1 cannot join its node's other ranks (cuMemHostRegister failed: CUDA_ERROR_INVALID_VALUE)" in refused(
        2
    )
    assert len(os.listdir("/proc/self/fd")) <= held


CARDS = [Card((0, 1), None, "a", "host-a", "0"), Card((0, 1), None, "a", "host-a", "1")]


@pytest.mark.parametrize(
    ("index", "change", "problem"),
    [
        (0, {}, None),
        (1, {"problem": "it is broken"}, "on rank 1 it is broken"),
        (1, {"members": (0, 1, 2)}, "the ranks disagree on members (rank 0: [0, 1], rank 1: [0, 1, 2])"),
        (1, {"node": "b", "host": "host-b"}, "several (rank 0 on host-a, rank 1 on host-b)"),
        (0, {"unreadable": ("1",)}, "the device of rank 0 (0) cannot read that of rank 1 (1)"),
        (0, {"unreadable": ("2",)}, None),
        (1, {"pci_id": "0"}, None),  # two processes on one device
    ],
)
def test_problems(index: int, change: dict[str, Any], problem: str | None) -> None:
    cards = list(CARDS)
    cards[index] = cards[index]._replace(**change)
    elsewhere = Card((2,), "it is broken", "b")  # is no problem here
    reason = problem_of((0, 1), dict(enumerate([*cards, elsewhere])))
    assert reason is None if problem is None else reason is not None and problem in reason
