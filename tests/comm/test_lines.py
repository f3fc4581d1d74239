"""comm/transports/copy_engine/lines.py: records and flags between processes."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from ringattn.comm import TransportError
from ringattn.comm.transports.copy_engine.memory import Board, flag_of
from ringattn.comm.transports.copy_engine.sockets import Listener, Sockets, node_id


@pytest.fixture
def pair() -> Iterator[tuple[Sockets, Sockets]]:
    """The lines of ranks 0 and 1."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = Sockets({1: first}), Sockets({0: second})
    yield lines
    for line in lines:
        line.close()
        line.close()


def test_records_stay_whole_and_in_order(pair: tuple[Sockets, Sockets]) -> None:
    for record in (b"a", b"bc" * 60, b"d"):
        pair[0].send(1, record, 1.0)
    assert [pair[1].receive(0, "waits", 1.0) for _ in range(3)] == [b"a", b"bc" * 60, b"d"]


def test_full_lines_both_ways_make_room(pair: tuple[Sockets, Sockets]) -> None:
    """Far more than a socket holds, from both ends at once, before either end reads."""
    count = 3000
    got: dict[int, list[bytes]] = {}

    def talk(rank: int) -> None:
        other = 1 - rank
        for number in range(count):
            pair[rank].send(other, number.to_bytes(100, "little"), 5.0)
        got[rank] = [pair[rank].receive(other, "waits", 5.0) for _ in range(count)]

    threads = [threading.Thread(target=talk, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = [number.to_bytes(100, "little") for number in range(count)]
    assert got == {0: expected, 1: expected}


def test_silence_is_an_error_in_time(pair: tuple[Sockets, Sockets]) -> None:
    with pytest.raises(TransportError, match=r"rank 1 waits for rank 0: nothing happened for 0\.05 s; do all ranks"):
        pair[1].receive(0, "rank 1 waits for rank 0", 0.05)
    with pytest.raises(TransportError, match=r"a record for rank 1 waits: nothing happened for 0\.05 s"):
        for _ in range(100_000):
            pair[0].send(1, b"x" * 100, 0.05)


def test_what_was_sent_before_the_end_arrives_and_then_the_end(pair: tuple[Sockets, Sockets]) -> None:
    pair[1].send(0, b"never read", 1.0)  # makes the other end's close a reset
    pair[0].send(1, b"last words", 1.0)
    pair[0].close()
    assert pair[1].receive(0, "rank 1 waits", 5.0) == b"last words"
    with pytest.raises(TransportError, match="rank 1 waits: that rank has ended its transport, or died"):
        pair[1].receive(0, "rank 1 waits", 5.0)
    with pytest.raises(TransportError, match="a record for rank 0 waits: that rank has ended"):
        pair[1].send(0, b"x", 5.0)


def test_cutting_wakes_whoever_waits(pair: tuple[Sockets, Sockets]) -> None:
    threading.Timer(0.05, pair[1].cut, ["enough"]).start()
    started = time.monotonic()
    with pytest.raises(TransportError, match="enough"):
        pair[1].receive(0, "waits", 10.0)
    pair[1]._inboxes[0].append(b"there before, and too late")
    with pytest.raises(TransportError, match="enough"):
        pair[1].receive(0, "waits", 10.0)
    with pytest.raises(TransportError, match="has ended"):
        pair[0].receive(1, "waits", 10.0)
    with pytest.raises(TransportError, match="enough"):
        pair[1].send(0, b"x", 10.0)
    assert time.monotonic() - started < 5
    pair[0].cut("and the other")


def test_flags() -> None:
    board = Board.new(70, -1)
    assert {board.load(index) for index in range(70)} == {(1 << 32) - 1}
    board.store(69, (1 << 32) + 5)
    assert (board.load(69), board.load(68)) == (5, (1 << 32) - 1)
    other = Board(os.dup(board._fd), 70)
    other.store(3, 7)
    assert board.load(3) == 7
    for one in (board, other):
        one.close()
        one.close()


def test_every_flag_has_its_place() -> None:
    members = [2, 5, 7]
    places = [flag_of(members, *pair) for pair in itertools.product(members, members)]
    assert sorted(itertools.chain(*places)) == list(range(18))


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for one in sockets.values():
        one.close()


def test_nobody_comes() -> None:
    with Listener() as listener, pytest.raises(TimeoutError):
        listener.connect(0, {0: "", 1: ""}, {}, 0.05)


def test_a_node_is_itself() -> None:
    assert node_id() == node_id() != ""


PROCESSES = """
import os, sys
from ringattn.comm.transports.copy_engine.memory import Board
from ringattn.comm.transports.copy_engine.sockets import Sockets, Listener

listeners = [Listener() for _ in range(3)]
addresses = {rank: listener.address for rank, listener in enumerate(listeners)}

def run(rank):
    sockets = {}
    listeners[rank].connect(rank, addresses, sockets, 10.0)
    board = Board.shared(rank, sockets, 3, 41)
    lines = Sockets(sockets)
    assert sorted(lines.peers) == [peer for peer in range(3) if peer != rank]
    board.store(rank, board.load(rank) + 1 + rank)
    for peer in lines.peers:
        lines.send(peer, bytes([rank, peer]), 10.0)
    assert all(lines.receive(peer, "waits", 10.0) == bytes([peer, rank]) for peer in lines.peers)
    assert [board.load(index) for index in range(3)] == [42, 43, 44]
    return 0

children = []
for rank in range(3):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run(rank)
        finally:
            os._exit(code)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


def test_between_processes() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESSES], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_maker_that_gives_up() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first.close()
    with second, pytest.raises(TransportError, match="rank 0 hands out no flags"):
        Board.shared(1, {0: second}, 8, 0)


def test_a_child_does_not_hide_that_its_parent_died(pair: tuple[Sockets, Sockets]) -> None:
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
