"""Lines between the processes of one node: small records through sockets, and flags in memory that all of them map."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...transport import TransportError

# One flag per cache line of the GPU: writers of two flags never meet in one line.
FLAG_STRIDE = 128
FLAG_BITS = 32
LONGEST_RECORD = 256
SHORTEST_WAIT = 1e-3  # seconds
_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group: SO_PEERCRED


def node_id() -> str:
    """The same in all processes of one running kernel and nowhere else; a container has a host name of its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Lines:
    """Records to and from the other processes of a node: in order for each pair, and never a lost wake-up.

    Sockets, not a mailbox in shared memory: they need no barriers of the host's memory model (Grace is an ARM), a
    process that waits sleeps, and one that dies closes its end at once.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._inboxes: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[int] = set()
        self._reason = ""
        for line in sockets.values():
            line.setblocking(False)
        # Also where nobody closes: a peer must not wait for one that is gone with its transport.
        self._end = weakref.finalize(self, _close, list(sockets.values()))
        _OPEN.add(self)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks at the other ends."""
        return tuple(self._sockets)

    def send(self, peer: int, record: bytes, timeout: float) -> None:
        """Put one record on the line; blocks only where the peer has left hundreds of them unread.

        Raises:
            TransportError: the peer is gone, or has read nothing for `timeout` seconds.
        """
        what = f"a record for rank {peer} waits"
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._sockets[peer].send(record)
                return
            except BlockingIOError:
                self._wait(deadline, timeout, what, peer)
            except (ConnectionError, OSError) as error:
                raise TransportError(self._reason or f"{what}: that rank has ended its transport, or died") from error

    def receive(self, peer: int, what: str, timeout: float) -> bytes:
        """The next record of a peer; blocks, `timeout` seconds at most, until there is one.

        Raises:
            TransportError: names what is waited for, and that the peer is gone or silent.
        """
        inbox = self._inboxes[peer]
        deadline = time.monotonic() + timeout
        self._collect(peer)
        while not inbox or self._reason:
            if self._reason:  # also where a record is there: nobody will release who goes on to wait for its bytes
                raise TransportError(self._reason)
            if peer in self._gone:
                raise TransportError(f"{what}: that rank has ended its transport, or died")
            self._wait(deadline, timeout, what)
        return inbox.popleft()

    def cut(self, reason: str) -> None:
        """Wake whoever waits, here and at the other ends; from any thread. Later waits raise `reason`."""
        self._reason = reason
        for line in self._sockets.values():
            try:
                line.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                continue

    def close(self) -> None:
        """Give the sockets back. Idempotent."""
        self._end()

    def _collect(self, peer: int) -> None:
        while peer not in self._gone:
            try:
                record = self._sockets[peer].recv(LONGEST_RECORD)
            except BlockingIOError:
                return
            except ConnectionResetError:  # told once, where the peer left records unread; what it sent still comes
                continue
            except OSError:
                record = b""
            if record:
                self._inboxes[peer].append(record)
            else:
                self._gone.add(peer)

    def _wait(self, deadline: float, timeout: float, what: str, writing: int | None = None) -> None:
        """Sleep until something can be read, or written to `writing`."""
        poller = select.poll()
        fds = {line.fileno(): peer for peer, line in self._sockets.items() if peer not in self._gone}
        for fd, peer in fds.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if peer == writing else 0))
        events = poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        if not events:
            raise TransportError(f"{what}: nothing happened for {timeout:g} s; do all ranks post in one order?")
        for fd, _ in events:  # everybody's: two ranks that wait for room on each other's full lines make it this way
            self._collect(fds[fd])


def _close(lines: Sequence[socket.socket]) -> None:
    for line in lines:
        line.close()


_OPEN: weakref.WeakSet[Lines] = weakref.WeakSet()


def _after_fork() -> None:
    # Ends that a child keeps open, a loader's worker say, would hide from the peers that this process has died.
    for lines in list(_OPEN):
        lines.close()


os.register_at_fork(after_in_child=_after_fork)


class Listener:
    """Where the processes of a node find this one, before they are connected."""

    def __init__(self) -> None:
        self._socket = _new_socket()
        # In the abstract namespace: there is no file to forget, and none that another user could reach by a path.
        self.address = f"\0ringattn-{secrets.token_hex(16)}"
        self._socket.bind(self.address)
        self._socket.listen()

    def connect(
        self, rank: int, addresses: Mapping[int, str], sockets: dict[int, socket.socket], timeout: float
    ) -> None:
        """Put one socket to each other rank of `addresses` into `sockets`, all of which listen already.

        Raises:
            OSError: they were not all connected within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for peer in sorted(peer for peer in addresses if peer < rank):
            sockets[peer] = _new_socket()
            sockets[peer].settimeout(timeout)
            sockets[peer].connect(addresses[peer])
            if not _is_ours(sockets[peer]):
                raise TransportError(f"a process of another user answers for rank {peer}")
            sockets[peer].send(_HELLO.pack(rank))
        while len(sockets) < len(addresses) - 1:
            self._socket.settimeout(max(SHORTEST_WAIT, deadline - time.monotonic()))  # zero would not wait at all
            accepted, _ = self._socket.accept()
            accepted.settimeout(timeout)
            if not _is_ours(accepted):
                accepted.close()
                continue
            hello = accepted.recv(LONGEST_RECORD)
            if len(hello) != _HELLO.size:  # whoever it was has given up, and says so itself
                accepted.close()
                continue
            sockets[_HELLO.unpack(hello)[0]] = accepted

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


def _new_socket() -> socket.socket:
    # Records stay whole, in order, and the end of the peer is an end of the file.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_ours(line: socket.socket) -> bool:
    """Anybody on the machine may connect: only processes of this user get to see our memory."""
    _, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


class Board:
    """`count` 32-bit flags, all of one first value, in memory that the processes of a node share.

    Made by one of them and handed to the others through their lines, without a name: it is gone with the last of them,
    also where they were killed, and no flag of an earlier transport can be mistaken for one of this.
    """

    def __init__(self, fd: int, count: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, self.nbytes_of(count))
        self._words = memoryview(self._map).cast("I")

    @staticmethod
    def nbytes_of(count: int) -> int:
        """Bytes of so many flags, in whole pages."""
        return -(-max(1, count) * FLAG_STRIDE // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def new(cls, count: int, first: int) -> Board:
        """A board of our own, every flag at `first`."""
        fd = os.memfd_create("ringattn-flags")
        os.ftruncate(fd, cls.nbytes_of(count))
        board = cls(fd, count)
        for index in range(count):
            board.store(index, first)
        return board

    @classmethod
    def shared(cls, rank: int, sockets: Mapping[int, socket.socket], count: int, first: int) -> Board:
        """The board of all these ranks: the lowest makes it."""
        maker = min([rank, *sockets])
        if rank != maker:
            _, fds, _, _ = socket.recv_fds(sockets[maker], LONGEST_RECORD, 1)
            if not fds:  # the end of the line, or no descriptor is left for it here
                raise TransportError(f"rank {maker} hands out no flags: it gave up, or too many files are open here")
            return cls(fds[0], count)
        board = cls.new(count, first)
        try:
            for line in sockets.values():
                socket.send_fds(line, [b"board"], [board._fd])
        except BaseException:
            board.close()
            raise
        return board

    @property
    def memory(self) -> mmap.mmap:
        """The mapped bytes."""
        return self._map

    def load(self, index: int) -> int:
        """A flag as it is now."""
        return self._words[index * FLAG_STRIDE // 4]

    def store(self, index: int, value: int) -> None:
        """Set a flag, modulo 2^32, from the host: one word, so the host's memory model does not matter."""
        self._words[index * FLAG_STRIDE // 4] = value % (1 << FLAG_BITS)

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1


def flag_of(members: Sequence[int], source: int, destination: int) -> tuple[int, int]:
    """Where the two flags of the messages from `source` to `destination` lie on a board: (ready, taken)."""
    pair = members.index(source) * len(members) + members.index(destination)
    return 2 * pair, 2 * pair + 1
