"""The protocol of every transport, what all of them check, and the warm-up."""

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
"""(source, destination), ranks of the group."""


class TransportError(RuntimeError):
    """A transfer failed or was aborted, or the ranks of a group could not open a transport together."""


class Message(NamedTuple):
    """One contiguous tensor that goes to, or comes from, one peer."""

    peer: int  # rank inside the group, also where a communicator covers only some of its ranks
    tensor: torch.Tensor


class Placed(Message):
    """A message whose sender knows where its receiver has room for it: transports may put it there, or pass that over.

    ``into`` is what this rank has in the same place of its own slots: as large, and as far from their beginning.
    """

    into: torch.Tensor

    def __new__(cls, peer: int, tensor: torch.Tensor, into: torch.Tensor) -> Placed:
        message = super().__new__(cls, peer, tensor)
        message.into = into
        return message


class Fence(Protocol):
    """A point in time of a compute stream or of the transfer stream."""

    def wait(self) -> None:
        """Let what is issued afterwards on the current stream run after this point; a host transport blocks.

        Idempotent.

        Raises:
            TransportError: on host transports, where the transfer failed or was aborted; again at every wait.
        """

    def done(self) -> bool:
        """Whether this point is past, also by failure of the transfer. Never blocks; from any thread.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """


class Transport(Protocol):
    """Moves tensors between the ranks of one group and says when their memory may be touched again.

    A tensor of a post must stay allocated until the fence of that post has been waited for on the stream that owns the
    tensor; the fence itself holds it until then. Opening a transport, `warm_up`, `post` and `gather` are things that
    every rank does in the same order. `comm.register_transport` has an example and `comm.testing` a conformance suite;
    `TransportBase` and `check_messages` have what transports share.
    """

    name: str
    """Selects this transport."""
    rank: int
    """This rank inside the group."""
    size: int
    """Number of ranks in the group."""
    reason: str
    """Why this transport was taken and not another, for people; "" where nobody chose."""

    def mark(self) -> Fence:
        """The point that the compute issued so far on the current stream has reached."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Enqueue one group of transfers, in program order, on the transport's one transfer stream.

        No byte of the group moves before every fence in `after` (from `mark` or `post`, of this transport or of
        another) is over. Messages between one (source, destination) pair match in order; a rank may send to itself
        inside one post. The returned fence covers the sends and the receives.

        Raises:
            ValueError: a message that this transport cannot take; nothing has been sent.
            TransportError: the transfer failed, or the transport was closed or aborted.
        """

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """Send a checked byte pattern over each edge, under a timeout; every rank passes the same list.

        The first transfer over an edge connects it and may block the host; an edge is warmed up once.

        Raises:
            ValueError: an edge between ranks that are not there.
            TransportError: on every rank, naming the edge and the number of wrong bytes, or who failed how.
        """

    def gather(self, value: object) -> list[object]:
        """One small value of every rank, ready for JSON, in rank order; tuples come as lists."""

    def check(self) -> str | None:
        """What went wrong in the background and no post has raised, in its own words; cheap, and from any thread."""

    def abort(self, reason: str) -> None:
        """End every transfer in flight; from any thread, idempotent, the first reason stays.

        On host transports blocked and later waits and posts raise a `TransportError` with the reason. On CUDA the
        communicator is aborted and later posts raise; what streams compute from there on is garbage, so that a process
        should end.
        """

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""


TRANSPORT_ATTRIBUTES = ("rank", "size", *(name for name in vars(Transport) if not name.startswith("_")))
"""What a transport must have when it opens; `name` and `reason` are set then."""


class Done:
    """A fence with nothing left to wait for: work on the host is over when its call returns."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """True."""
        return True


DONE = Done()


def check_messages(
    transport: Transport, device: torch.device, sends: Sequence[Message], receives: Sequence[Message]
) -> None:
    """Refuse, before anything moves, a message that would be misread, or that would hang."""
    to_self: list[int] = []
    from_self: list[int] = []
    rank, size = transport.rank, transport.size
    for kind, messages, own in (("sends", sends, to_self), ("receives", receives, from_self)):
        for index, (peer, tensor) in enumerate(messages):
            if not (0 <= peer < size and tensor.device == device and tensor.is_contiguous() and tensor.numel()):
                raise ValueError(f"{kind}[{index}]: {_problem(peer, tensor, size, device)}")
            if peer == rank:
                own.append(tensor.nbytes)
    if to_self != from_self:
        raise ValueError(
            f"rank {transport.rank} sends itself messages of {to_self} bytes and receives {from_self}: "
            "both ends of a message to oneself belong to one post"
        )


def _problem(peer: int, tensor: torch.Tensor, size: int, device: torch.device) -> str:
    if not 0 <= peer < size:
        return f"peer is {peer}, the ranks of this group are 0 to {size - 1}"
    if tensor.device != device:
        return f"the tensor is on {tensor.device}, this transport moves tensors of {device}"
    if not tensor.is_contiguous():
        return f"shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: call .contiguous() first"
    return f"shape {tuple(tensor.shape)} holds no bytes: leave the message out on both sides"


DEFLATED_BYTES = 512  # from here on deflating saves more than it costs: ranks say much the same
ZLIB = b"x"  # what a deflated value begins with, and JSON never


def encoded(value: object) -> bytes:
    """A value as it goes to other ranks: JSON, for what comes from a network is data and never code; long, deflated.

    Raises:
        TypeError: JSON has no such value.
    """
    data = json.dumps(value, separators=(",", ":")).encode()
    return data if len(data) < DEFLATED_BYTES else zlib.compress(data)


def decoded(data: bytes, what: str) -> object:
    """The value that another rank encoded; `what` names it in errors.

    Raises:
        TransportError: somebody else wrote it.
    """
    try:
        return json.loads(zlib.decompress(data) if data[:1] == ZLIB else data)
    except (ValueError, RecursionError, zlib.error) as error:
        raise TransportError(f"{what} is no JSON, so that no rank of ours has written it ({error})") from None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a one-dimensional uint8 view outside of autograd."""
    return tensor.detach().view(-1).view(torch.uint8)


def self_pairs(
    rank: int, sends: Sequence[Message], receives: Sequence[Message]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (destination, source) bytes of the messages that a rank sends to itself, matched in order."""
    sources = [as_bytes(message.tensor) for message in sends if message.peer == rank]
    destinations = [as_bytes(message.tensor) for message in receives if message.peer == rank]
    return list(zip(destinations, sources, strict=True))


# of one warm-up, in seconds: connecting an edge takes well under a second inside a node, a few between nodes
WARM_UP_SECONDS = 60.0
# One message: more than a protocol header, little enough to cost nothing.
PATTERN_BYTES = 4096
# Coprime to 256, and different for every block of 256: a shifted or repeated block never looks like the right one.
PATTERN_STRIDE = 167
BLOCK_STRIDE = 59


def ring_edges(order: Sequence[int]) -> list[Edge]:
    """Both directions of every edge of the ring through `order`."""
    onward = list(zip(order, [*order[1:], *order[:1]], strict=True))
    return list(dict.fromkeys(onward + [(destination, source) for source, destination in onward]))


def _pattern(edge: Edge, device: torch.device) -> torch.Tensor:
    """Bytes that tell this edge from any other: every fourth one carries one byte of one of its ranks."""
    source, destination = edge
    digits = torch.tensor([source % 256, source >> 8, destination % 256, destination >> 8], device=device)
    place = torch.arange(PATTERN_BYTES, device=device)
    values = place * PATTERN_STRIDE + (place >> 8) * BLOCK_STRIDE + digits[place % 4]
    return (values % 256).to(torch.uint8)


class TransportBase(Transport):
    """What all transports do alike; each has a name, `mark`, `post`, `gather`, `abort` and `close` of its own."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float = WARM_UP_SECONDS) -> None:
        self.rank = rank
        self.size = size
        self.names: Sequence[int] = range(size)
        """What errors call each rank."""
        self.reason = ""
        self.multiprocessors: int | None = None
        """How many multiprocessors of a GPU its transfers take, if that is known."""
        self._device = device
        self._timeout = timeout
        self._open = True
        self._aborted = ""  # why
        self._warm: set[Edge] = set()

    def warm_up(self, edges: Sequence[Edge]) -> None:
        for source, destination in edges:
            if not (0 <= source < self.size and 0 <= destination < self.size):
                raise ValueError(
                    f"edges has ({source}, {destination}): the ranks of this group are 0 to {self.size - 1}"
                )
        fresh = [edge for edge in dict.fromkeys(edges) if edge not in self._warm]
        if not fresh:
            return
        late, problem = f"its warm-up took more than {self._timeout:g} s", None
        try:
            with self._deadline(late) as expired:
                problem = self._exchange_patterns(fresh)
            if problem is None and expired.is_set():  # on the last bytes
                problem = f"rank {self.names[self.rank]}: {late}"
        # ValueError: a transport over some of the group's ranks refuses a peer that it cannot reach
        except (TransportError, ValueError) as error:
            problem = f"rank {self.names[self.rank]}: {error}"
        # Also where this rank failed: the others must hear of it instead of waiting.
        problems = [str(text) for text in self.gather(problem) if text]
        if problems:
            raise TransportError(f"the warm-up of the {self.name} transport failed: {'; '.join(problems)}")
        self._warm.update(fresh)

    def check(self) -> str | None:
        """See `Transport.check`: nothing moves that a fence does not tell of."""
        return None

    def _exchange_patterns(self, edges: Sequence[Edge]) -> str | None:
        """What arrived wrong on this rank."""
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
        """End the transfers of a warm-up that takes too long; the event says that this happened."""
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
        """What whoever uses a closed transport is told."""
        return TransportError(f"the {self.name} transport of rank {self.names[self.rank]} is closed")

    def _aborted_error(self, reason: str) -> TransportError:
        """What whoever uses an aborted transport, or waits for it, is told."""
        return TransportError(f"the {self.name} transport of rank {self.names[self.rank]} was aborted: {reason}")

    def _check_open(self) -> None:
        if not self._open:
            raise self._closed_error()

    def _check_running(self) -> None:
        if self._aborted:
            raise self._aborted_error(self._aborted)
        self._check_open()
