"""The processes of one node find each other, by the same checks on every rank, and talk through sockets."""

from __future__ import annotations

import importlib
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...control import Control
from ...transport import TransportError
from .memory import LONGEST_RECORD, Board, Context, Flags

SHORTEST_WAIT = 1e-3  # seconds
_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group: SO_PEERCRED


def node_id() -> str:
    """The same in all processes of one running kernel and nowhere else; a container has a host name of its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Sockets:
    """Records to and from the other processes of a node: in order for each pair, and never a lost wake-up.

    Sockets, not a mailbox in shared memory: they need no barriers of the host's memory model (Grace is an ARM), a
    process that waits sleeps, and one that dies closes its end at once.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._inboxes: dict[int, deque[bytes]] = {peer: deque() for peer in sockets}
        self._gone: set[int] = set()
        self._reason = ""
        for end in sockets.values():
            end.setblocking(False)
        # Also where nobody closes: a peer must not wait for one that is gone with its transport.
        self._end = weakref.finalize(self, _close, list(sockets.values()))
        _OPEN.add(self)

    def send(self, peer: int, record: bytes, timeout: float) -> None:
        """Put one record on the socket; blocks only where the peer has left hundreds of them unread.

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
        for end in self._sockets.values():
            try:
                end.shutdown(socket.SHUT_RDWR)
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
        fds = {end.fileno(): peer for peer, end in self._sockets.items() if peer not in self._gone}
        for fd, peer in fds.items():
            poller.register(fd, select.POLLIN | (select.POLLOUT if peer == writing else 0))
        events = poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        if not events:
            raise TransportError(f"{what}: nothing happened for {timeout:g} s; do all ranks post in one order?")
        for fd, _ in events:  # everybody's: two ranks that wait for room on each other's full sockets make it this way
            self._collect(fds[fd])


def _close(ends: Sequence[socket.socket]) -> None:
    for end in ends:
        end.close()


_OPEN: weakref.WeakSet[Sockets] = weakref.WeakSet()


def _after_fork() -> None:
    # Ends that a child keeps open, a loader's worker say, would hide from the peers that this process has died.
    for sockets in list(_OPEN):
        sockets.close()


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


def _is_ours(end: socket.socket) -> bool:
    """Anybody on the machine may connect: only processes of this user get to see our memory."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


class Card(NamedTuple):
    """What one rank says of itself."""

    members: tuple[int, ...] = ()
    problem: str | None = None
    node: str = ""
    host: str = ""
    pci_id: str = ""  # of its device
    unreadable: tuple[str, ...] = ()  # devices that its device cannot read
    address: str = ""  # where it listens

    @classmethod
    def of(cls, members: Sequence[int], *others: Any) -> Card:
        """From JSON, which has no tuples."""
        return cls(tuple(members), *others)


def join_node(
    control: Control,
    rank: int,
    members: Sequence[int],
    device: torch.device,
    *,
    missing: str | None,
    first: int,
    timeout: float,
) -> tuple[Context, Flags, Sockets]:
    """This rank's context, the flags that the members share, all at `first`, and its sockets to the other members.

    Every rank of `control` calls it together, whatever its `members`; `missing` is why this rank cannot take part.

    Raises:
        TransportError: on every rank that has to do with the cause, naming the ranks.
    """
    with Listener() as listener, ExitStack() as undo:  # what is to be undone where this fails
        context, card = _card(members, device, missing, listener, undo)
        node = control.fresh_scope("cards")
        node.publish(str(rank), tuple(card))
        peers = {peer: str(peer) for peer in members}
        published: list[Any] = node.collect(peers, what="who is on this node", timeout=timeout)
        cards = {peer: Card.of(*card) for peer, card in zip(members, published, strict=True)}
        problem, joined = problem_of(members, cards), None
        if problem is None and context is not None:
            try:
                addresses = {peer: cards[peer].address for peer in members}
                joined = _join(context, rank, listener, addresses, first, timeout)
                undo.callback(_give_back, context, *joined)
            except (OSError, TransportError) as error:
                problem = f"rank {rank} cannot join its node's other ranks ({error}): do they share one container?"
        # Twice: a rank that others do not reach has waited for them by now.
        problems = control.gather(problem, what="whether the ranks of a node are joined", timeout=2 * timeout)
        failed = [str(text) for peer, text in enumerate(problems) if peer in members and text]
        if context is None or joined is None or failed:
            raise TransportError(f'transport "copy_engine": {"; ".join(dict.fromkeys(failed))}')
        undo.pop_all()
        return context, *joined


def _join(
    context: Context, rank: int, listener: Listener, addresses: Mapping[int, str], first: int, timeout: float
) -> tuple[Flags, Sockets]:
    """Where this fails it gives everything back at once: peers wait for it."""
    ends: dict[int, socket.socket] = {}
    with ExitStack() as undo:
        undo.callback(lambda: _close([*ends.values()]))
        listener.connect(rank, addresses, ends, timeout)
        board = Board.shared(rank, ends, 2 * len(addresses) ** 2, first)
        undo.callback(board.close)
        with context.current():
            joined = Flags(context.driver, board), Sockets(ends)
        undo.pop_all()
    return joined


def _give_back(context: Context, flags: Flags, sockets: Sockets) -> None:
    sockets.close()
    with context.current():
        flags.close()


def problem_of(members: Sequence[int], cards: Mapping[int, Card]) -> str | None:
    """Why these ranks cannot copy from each other, None where they can: the same words on every one of them."""
    mine = {rank: cards[rank] for rank in members}
    for rank, card in mine.items():
        if card.problem:
            return f"on rank {rank} {card.problem}"
    if len({card.members for card in mine.values()}) > 1:
        by_rank = ", ".join(f"rank {rank}: {list(card.members)}" for rank, card in mine.items())
        return f"the ranks disagree on members ({by_rank})"
    if len({card.node for card in mine.values()}) > 1:
        by_rank = ", ".join(f"rank {rank} on {card.host}" for rank, card in mine.items())
        return f"it copies between GPUs of one node, and the ranks are on several ({by_rank})"
    for rank, card in mine.items():
        for peer, other in mine.items():
            if other.pci_id in card.unreadable:
                return f"the device of rank {rank} ({card.pci_id}) cannot read that of rank {peer} ({other.pci_id})"
    return None


def _card(
    members: Sequence[int], device: torch.device, missing: str | None, listener: Listener, undo: ExitStack
) -> tuple[Context | None, Card]:
    """What this rank says of itself; also where it fails, for the others would wait."""
    card = Card(tuple(members), missing, node_id(), socket.gethostname(), address=listener.address)
    if missing:
        return None, card
    driver: Any = importlib.import_module("cuda.bindings.driver")
    try:
        context = Context(driver, device)
        undo.callback(context.release)
        card = card._replace(problem=context.problem(), pci_id=context.pci_id(), unreadable=context.unreadable())
        return context, card
    except (TransportError, RuntimeError) as error:  # RuntimeError: cuda-bindings finds no driver
        return None, card._replace(problem=str(error))
