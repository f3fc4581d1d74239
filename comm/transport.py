"""What moves bytes between ranks: the protocol that every transport fulfils, and the checks that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

# One warm-up message: more than a protocol header, little enough to cost nothing.
PATTERN_BYTES = 4096
# Coprime to 256, so that a shifted, swapped or repeated block of bytes never looks like the right one.
PATTERN_STRIDE = 167


class TransportError(RuntimeError):
    """A transfer failed, or the ranks of a group could not open a transport together."""


class Message(NamedTuple):
    """One contiguous tensor that goes to, or comes from, one peer."""

    peer: int  # rank inside the group
    tensor: torch.Tensor


class Fence(Protocol):
    """A point in time of a compute stream or of the transfer stream."""

    def wait(self) -> None:
        """Let what is issued afterwards on the current stream run after this point; a host transport blocks.

        Idempotent.
        """


class Transport(Protocol):
    """Moves tensors between the ranks of one group and says when their memory may be touched again.

    A tensor of a post must stay allocated until the fence of that post has been waited for on the stream that owns the
    tensor; the fence itself holds it until then. Opening a transport, `post` and `gather` are things that every rank
    does in the same order.
    """

    @property
    def name(self) -> str:
        """The name that selects this transport."""

    @property
    def rank(self) -> int:
        """This rank inside the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def mark(self) -> Fence:
        """The point that the compute issued so far on the current stream has reached."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Enqueue one group of transfers, in program order, on the transport's one transfer stream.

        No byte of the group moves before every fence in `after` (from `mark` or `post`) is over. Messages between one
        (source, destination) pair match in order; a rank may send to itself inside one post. The returned fence covers
        the sends and the receives.

        Raises:
            ValueError: a message that this transport cannot take; nothing has been sent.
            TransportError: the transfer failed.
        """

    def gather(self, value: object) -> list[object]:
        """One small picklable object of every rank, in rank order."""

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""


class Done:
    """A fence with nothing left to wait for: work on the host is over when its call returns."""

    def wait(self) -> None:
        """Return at once."""


DONE = Done()


def check_open(transport: Transport, is_open: bool) -> None:
    """Raise where a closed transport is used."""
    if not is_open:
        raise TransportError(f"the {transport.name} transport of rank {transport.rank} is closed")


def check_messages(
    transport: Transport, device: torch.device, sends: Sequence[Message], receives: Sequence[Message]
) -> None:
    """Refuse, before anything moves, a message that would be misread, or that would hang."""
    for kind, messages in (("sends", sends), ("receives", receives)):
        for index, (peer, tensor) in enumerate(messages):
            problem = _problem(peer, tensor, transport.size, device)
            if problem:
                raise ValueError(f"{kind}[{index}]: {problem}")
    to_self = [message.tensor.nbytes for message in sends if message.peer == transport.rank]
    from_self = [message.tensor.nbytes for message in receives if message.peer == transport.rank]
    if to_self != from_self:
        raise ValueError(
            f"rank {transport.rank} sends itself messages of {to_self} bytes and receives {from_self}: "
            "both ends of a message to oneself belong to one post"
        )


def _problem(peer: int, tensor: torch.Tensor, size: int, device: torch.device) -> str | None:
    if not 0 <= peer < size:
        return f"peer is {peer}, the ranks of this group are 0 to {size - 1}"
    if tensor.device != device:
        return f"the tensor is on {tensor.device}, this transport moves tensors of {device}"
    if not tensor.is_contiguous():
        return f"shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: call .contiguous() first"
    if tensor.numel() == 0:
        return f"shape {tuple(tensor.shape)} holds no bytes: leave the message out on both sides"
    return None


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


def check_edges(transport: Transport, device: torch.device) -> None:
    """Send patterned bytes over both ring edges of every rank; one verdict, the same on every rank.

    Raises:
        TransportError: on every rank, if the bytes of any rank did not arrive as they left.
    """
    try:
        problem = _exchange_patterns(transport, device)
    except TransportError as error:
        problem = f"rank {transport.rank}: {error}"
    # Also where this rank failed: the others must hear of it instead of waiting.
    problems = [str(found) for found in transport.gather(problem) if found]
    if problems:
        raise TransportError(f"the warm-up of the {transport.name} transport failed: {'; '.join(problems)}")


def _exchange_patterns(transport: Transport, device: torch.device) -> str | None:
    rank, size = transport.rank, transport.size
    onward, back = (rank + 1) % size, (rank - 1) % size
    # Travelling onward first on both lists: at world 2 both neighbours are one peer, and messages match in order.
    sends = [Message(onward, _pattern(rank, 0, device)), Message(back, _pattern(rank, 1, device))]
    receives = [Message(peer, torch.zeros(PATTERN_BYTES, dtype=torch.uint8, device=device)) for peer in (back, onward)]
    transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
    for way, (peer, arrived) in enumerate(receives):
        wrong = int((arrived != _pattern(peer, way, device)).sum())
        if wrong:
            return f"rank {rank} got {wrong} wrong bytes of {PATTERN_BYTES} from rank {peer}"
    return None


def _pattern(rank: int, way: int, device: torch.device) -> torch.Tensor:
    values = torch.arange(PATTERN_BYTES, device=device) * PATTERN_STRIDE + 2 * rank + way
    return (values % 256).to(torch.uint8)
