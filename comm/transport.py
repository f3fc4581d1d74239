"""The `Transport` protocol, checks that all transports share, and the warm-up."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from .cuda_threads import on_device, wait_at_exit_for

Edge = tuple[int, int]
"""(source, destination) as ranks of the group."""


class TransportError(RuntimeError):
    """A transfer failed or was aborted, or the ranks of a group could not open a transport together."""


class Message(NamedTuple):
    """A contiguous tensor to send to, or to receive from, one peer."""

    peer: int  # rank in the group, even if a communicator covers only some of the group's ranks
    tensor: torch.Tensor


class Placed(Message):
    """A message to a slot at an offset that the sender knows. A transport may write there directly or ignore the hint.

    ``into`` is the part of this rank's own slots that has the same offset and size as the receiver's slot.
    """

    into: torch.Tensor

    def __new__(cls, peer: int, tensor: torch.Tensor, into: torch.Tensor) -> Placed:
        message = super().__new__(cls, peer, tensor)
        message.into = into
        return message


class Fence(Protocol):
    """Handle for a point in the work of a stream, such as the end of a post, that the host or a stream can wait for."""

    def wait(self) -> None:
        """Order later work on the current stream after this point; host transports block instead.

        Idempotent.

        Raises:
            TransportError: (host transports) the transfer failed or was aborted. Every further wait raises again.
        """

    def done(self) -> bool:
        """Return True if this point has passed or the transfer has failed. Never blocks; any thread may call it.

        Raises:
            RuntimeError: the device has failed; the text is the device's.
        """


class Transport(Protocol):
    """Moves tensors between the ranks of one group and tells when their memory may be reused.

    The tensors of a post must stay allocated until the stream that owns them has waited for the post's fence. Until
    then the fence holds them. All ranks open transports and call `warm_up`, `post` and `gather` in the same order.

    `comm.register_transport` has an example, and `comm.testing` has a conformance suite. `TransportBase` and
    `check_messages` provide the common parts.
    """

    name: str
    """Name that selects this transport."""
    rank: int
    """This rank inside the group."""
    size: int
    """Number of ranks in the group."""
    reason: str
    """Why this transport was selected, as text for users; "" if it was not selected by a rule."""

    def mark(self) -> Fence:
        """Return a fence for the compute enqueued so far on the current stream."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Enqueue one group of transfers, in program order, on the transport's single transfer stream.

        No byte of the group moves before every fence in `after` is over. These fences come from `mark` or `post`, of
        this transport or of another. Messages between one (source, destination) pair match in order. A rank may send to
        itself within one post. The returned fence covers the sends and the receives.

        Raises:
            ValueError: the transport cannot send a message; nothing was sent.
            TransportError: the transfer failed, or the transport was closed or aborted.
        """

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Send a known byte pattern over each edge, under a timeout. Every rank passes the same list.

        The first transfer over an edge connects it and may block the host. Each edge is warmed up once.

        Raises:
            ValueError: an edge has a rank outside the group.
            TransportError: on every rank, with the edge and its number of wrong bytes, or with the failed rank and its
                error.
        """

    def gather(self, value: object) -> list[object]:
        """Return one small JSON value of every rank, in rank order. Tuples become lists."""

    def check(self) -> str | None:
        """Return the error of a background failure that no post has raised yet, or None. Any thread may call it."""

    def abort(self, reason: str) -> None:
        """End every transfer in flight. Any thread may call it. Idempotent; the first reason is kept.

        On host transports, blocked and later waits and posts raise a `TransportError` with the reason. On CUDA the
        communicator is aborted and later posts raise. The streams compute garbage from then on, so the process should
        end.
        """

    def close(self) -> None:
        """Release all resources. Idempotent."""


TRANSPORT_ATTRIBUTES = ("rank", "size", *(name for name in vars(Transport) if not name.startswith("_")))
"""Attributes that a transport must have when it opens; `name` and `reason` are set after that."""


class DoneFence:
    """A fence that has passed already, for host work that is over when its call returns."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


DONE = DoneFence()


def check_messages(
    transport: Transport, device: torch.device, sends: Sequence[Message], receives: Sequence[Message]
) -> None:
    """Check all messages of a post before anything is sent.

    Raises:
        ValueError: a peer is not a rank, a tensor is on another device, empty or not contiguous, or the sizes of the
            messages from this rank to itself differ between `sends` and `receives`.
    """
    to_self: list[int] = []
    from_self: list[int] = []
    rank, size = transport.rank, transport.size
    for kind, messages, own in (("sends", sends, to_self), ("receives", receives, from_self)):
        for index, (peer, tensor) in enumerate(messages):
            if not (0 <= peer < size and tensor.device == device and tensor.is_contiguous() and tensor.numel()):
                raise ValueError(f"{kind}[{index}]: {_describe_problem(peer, tensor, size, device)}")
            if peer == rank:
                own.append(tensor.nbytes)
    if to_self != from_self:
        raise ValueError(
            f"rank {transport.rank} sends itself messages of {to_self} bytes, but receives {from_self} bytes from "
            "itself; post both ends of such a message together"
        )


def _describe_problem(peer: int, tensor: torch.Tensor, size: int, device: torch.device) -> str:
    """Return why a message cannot be sent or received."""
    if not 0 <= peer < size:
        return f"peer is {peer}; it must be between 0 and {size - 1}"
    if tensor.device != device:
        return f"the tensor is on {tensor.device}; it must be on the transport's device, {device}"
    if not tensor.is_contiguous():
        shape = tuple(tensor.shape)
        return f"the tensor of shape {shape} and strides {tensor.stride()} is not contiguous; call .contiguous() first"
    return f"the tensor of shape {tuple(tensor.shape)} is empty; leave the message out on both sides"


MIN_DEFLATE_BYTES = 512  # above this size compression pays, because the values of different ranks repeat a lot
ZLIB_PREFIX = b"x"  # first byte of zlib data; JSON never starts with it


def encode_value(value: object) -> bytes:
    """Encode a value for other ranks as JSON, compressed if long. Not as a pickle, which could run received code.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    data = json.dumps(value, separators=(",", ":")).encode()
    return data if len(data) < MIN_DEFLATE_BYTES else zlib.compress(data)


def decode_value(data: bytes, what: str) -> object:
    """Decode a value from another rank; `what` names the value in errors.

    Raises:
        TransportError: the data is not valid, so no rank of ours wrote it.
    """
    try:
        return json.loads(zlib.decompress(data) if data[:1] == ZLIB_PREFIX else data)
    except (ValueError, RecursionError, zlib.error) as error:
        raise TransportError(f"{what} is not JSON, so no rank of this group wrote it ({error})") from None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a one-dimensional uint8 view outside of autograd."""
    return tensor.detach().view(-1).view(torch.uint8)


def pair_self_messages(
    rank: int, sends: Sequence[Message], receives: Sequence[Message]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the (destination, source) bytes of the messages that a rank sends to itself, matched in order."""
    sources = [as_bytes(message.tensor) for message in sends if message.peer == rank]
    destinations = [as_bytes(message.tensor) for message in receives if message.peer == rank]
    return list(zip(destinations, sources, strict=True))


# Timeout of one warm-up. Connecting an edge takes well under a second inside a node and a few seconds between nodes.
WARM_UP_SECONDS = 60.0
# Size of one warm-up message: larger than a protocol header, and small enough to cost nothing.
PATTERN_BYTES = 4096
# The stride is coprime to 256, and every block of 256 bytes starts differently, so a shifted or repeated block never
# matches.
PATTERN_STRIDE = 167
BLOCK_STRIDE = 59


def ring_edges(order: Sequence[int]) -> list[Edge]:
    """Return both directions of every edge of the ring whose ranks are `order`."""
    onward = list(zip(order, [*order[1:], *order[:1]], strict=True))
    return list(dict.fromkeys(onward + [(destination, source) for source, destination in onward]))


def _pattern(edge: Edge, device: torch.device) -> torch.Tensor:
    """Return bytes that identify an edge. Every fourth byte has one byte of a rank added."""
    source, destination = edge
    digits = torch.tensor([source % 256, source >> 8, destination % 256, destination >> 8], device=device)
    place = torch.arange(PATTERN_BYTES, device=device)
    values = place * PATTERN_STRIDE + (place >> 8) * BLOCK_STRIDE + digits[place % 4]
    return (values % 256).to(torch.uint8)


class TransportBase(Transport):
    """Shared part of all transports. A subclass adds a name, `mark`, `post`, `gather`, `abort` and `close`."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float = WARM_UP_SECONDS) -> None:
        self.rank = rank
        self.size = size
        self.names: Sequence[int] = range(size)
        """Rank numbers for errors."""
        self.reason = ""
        self.multiprocessors: int | None = None
        """Number of GPU multiprocessors that transfers occupy, if known."""
        self._device = device
        self._timeout = timeout
        self._open = True
        self._aborted = ""  # why
        self._warm: set[Edge] = set()

    def warm_up(self, edges: Sequence[Edge]) -> None:
        for source, destination in edges:
            if not (0 <= source < self.size and 0 <= destination < self.size):
                raise ValueError(
                    f"edges has ({source}, {destination}); its ranks must be between 0 and {self.size - 1}"
                )
        fresh = [edge for edge in dict.fromkeys(edges) if edge not in self._warm]
        if not fresh:
            return
        late, problem = f"its warm-up took more than {self._timeout:g} s", None
        try:
            with self._deadline(late) as expired:
                problem = self._exchange_patterns(fresh)
            if problem is None and expired.is_set():  # the deadline passed during the last bytes
                problem = f"rank {self.names[self.rank]}: {late}"
        # A transport over only some of the group's ranks raises ValueError for a peer that it cannot reach.
        except (TransportError, ValueError) as error:
            problem = f"rank {self.names[self.rank]}: {error}"
        # Gather even if this rank failed, so that the other ranks do not wait for it.
        problems = [str(text) for text in self.gather(problem) if text]
        if problems:
            raise TransportError(f"the warm-up of the {self.name} transport failed: {'; '.join(problems)}")
        self._warm.update(fresh)

    def check(self) -> str | None:
        """Return None: fences report all failures of this transport."""
        return None

    def _exchange_patterns(self, edges: Sequence[Edge]) -> str | None:
        """Send and receive the patterns. Return a description of wrong bytes that arrived on this rank, or None."""
        rank, device = self.rank, self._device
        sends = [Message(edge[1], _pattern(edge, device)) for edge in edges if edge[0] == rank]
        arriving = [edge for edge in edges if edge[1] == rank]
        receives = [Message(edge[0], torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=device)) for edge in arriving]
        if not sends and not receives:
            return None
        self.post(sends=sends, receives=receives, after=[self.mark()]).wait()
        problems = []
        for edge, (peer, arrived) in zip(arriving, receives, strict=True):
            wrong = int((arrived != _pattern(edge, device)).sum())
            if wrong:
                who, whom = self.names[rank], self.names[peer]
                problems.append(f"rank {who} got {wrong} wrong bytes of {PATTERN_BYTES} from rank {whom}")
        return "; ".join(problems) or None

    @contextmanager
    def _deadline(self, late: str) -> Iterator[threading.Event]:
        """Abort the transport with reason `late` and set the yielded event if the block exceeds the timeout."""
        expired = threading.Event()

        def expire() -> None:
            wait_at_exit_for(threading.current_thread())
            expired.set()
            with on_device(self._device):
                self.abort(late)

        timer = threading.Timer(self._timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            yield expired
        finally:
            timer.cancel()

    def _closed_error(self) -> TransportError:
        return TransportError(f"the {self.name} transport of rank {self.names[self.rank]} is closed")

    def _aborted_error(self, reason: str) -> TransportError:
        return TransportError(f"the {self.name} transport of rank {self.names[self.rank]} was aborted: {reason}")

    def _check_open(self) -> None:
        if not self._open:
            raise self._closed_error()

    def _check_running(self) -> None:
        if self._aborted:
            raise self._aborted_error(self._aborted)
        self._check_open()
