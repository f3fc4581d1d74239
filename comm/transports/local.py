"""Transport between the virtual ranks of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..control import Control
from ..groups import Group
from ..registry import THREADS, register_transport
from ..transport import (
    WARM_UP_SECONDS,
    Fence,
    Message,
    TransportBase,
    TransportError,
    as_bytes,
    check_messages,
    decode_value,
    encode_value,
)
from ..world import Hub, LocalGroup, Parcel, single_rank
from .copy_streams import CopyStream, CudaCopyStream, HostCopyStream, StreamOrderedFence


class _LocalFence(StreamOrderedFence):
    """Fence of a post: its receives are over, and every receiver has copied the sent tensors."""

    def __init__(
        self, hub: Hub, channel: int, arrived: Fence, sent: Sequence[tuple[Parcel, int, str]], patience: float
    ) -> None:
        self._hub = hub
        self._patience = patience
        self._channel = channel
        self._arrived = arrived
        self._sent = sent

    def wait(self) -> None:
        """Order the current stream after the post; on the CPU, block."""
        for fence in self._parts():
            fence.wait()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Order `stream` after the post."""
        for fence in self._parts():
            if isinstance(fence, StreamOrderedFence):
                fence.order(stream)

    def done(self) -> bool:
        """Return True if the post is over or failed; see `Fence.done`."""
        if self._hub.failure is not None or self._hub.stop_reason(self._channel) is not None:
            return True
        taken = [parcel.copied_fence for parcel, _, _ in self._sent]
        return all(fence is not None and fence.done() for fence in taken) and self._arrived.done()

    def _parts(self) -> Iterator[Fence]:
        """Yield the fence of the receiver's copy of each sent tensor, then the fence of the receives."""
        # Wait for the receivers first, because waiting for `arrived` releases the tensors that they read.
        for parcel, peer, what in self._sent:
            yield self._hub.wait_until_copied(parcel, peer, what, self._channel, self._patience)
        yield self._arrived


class LocalTransport(TransportBase):
    """Copies between the virtual ranks of one process, each on the receiver's own transfer stream.

    `patience` is the longest wait for another rank, in seconds; None is the world's timeout.
    """

    name = "local"

    def __init__(
        self,
        group: LocalGroup,
        device: torch.device,
        *,
        copy_stream: CopyStream | None = None,
        patience: float | None = None,
    ) -> None:
        self._group = group
        self._hub = group._hub
        self._patience = self._hub.timeout if patience is None else min(patience, self._hub.timeout)
        super().__init__(group.rank(), group.size(), device, min(WARM_UP_SECONDS, self._patience))
        self._copy_stream = copy_stream or (CudaCopyStream(device) if device.type == "cuda" else HostCopyStream())
        self._channel = next(group.channels)

    def mark(self) -> Fence:
        return self._copy_stream.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Send and receive, blocking until every peer has posted the sends that match `receives`. See `Transport.post`.

        There is no deadlock: sends are published before any wait, and all ranks post in the same global order.
        """
        self._check()
        check_messages(self, self._device, sends, receives)
        self._copy_stream.wait_for_fences(after)
        self._check()  # an abort may have come during the wait
        # The sent tensors are final here, and the receivers copy after this point.
        ready = self._copy_stream.record_point()
        sent = [self._publish(message, ready) for message in sends]
        for message in receives:
            self._receive(message)
        arrived = self._copy_stream.record_point(keep=[message.tensor for message in (*sends, *receives)])
        return _LocalFence(self._hub, self._channel, arrived, sent, self._patience)

    def gather(self, value: object) -> list[object]:
        """Gather encoded values, so that the result is the same as between processes. See `Transport.gather`."""
        self._check()
        data = encode_value(value)
        for peer in range(self.size):
            self._hub.put(("value", self._channel, self.rank, peer), data)
        return [decode_value(self._take("value", peer), f"what rank {peer} gathers") for peer in range(self.size)]

    def abort(self, reason: str) -> None:
        """Abort this transport on every rank, because nothing can arrive any more. See `Transport.abort`."""
        self._hub.stop(self._channel, str(self._aborted_error(reason)))

    def close(self) -> None:
        """Close this transport. The world stays usable."""
        self._open = False

    def _check(self) -> None:
        stopped = self._hub.stop_reason(self._channel)
        if stopped is not None:
            raise TransportError(stopped)
        self._check_open()
        self._group.check_thread()

    def _publish(self, message: Message, ready: Fence) -> tuple[Parcel, int, str]:
        """Put a message into its receiver's mailbox. Return its parcel, the receiver, and text about the wait."""
        parcel = Parcel(as_bytes(message.tensor), ready)
        self._hub.put(("bytes", self._channel, self.rank, message.peer), parcel)
        who, whom = self.names[self.rank], self.names[message.peer]
        what = f"rank {who} waits until rank {whom} takes {message.tensor.nbytes} bytes"
        return parcel, message.peer, what

    def _receive(self, message: Message) -> None:
        """Take the next parcel from the message's peer, and enqueue its copy into the message's tensor."""
        parcel = self._take("bytes", message.peer)
        destination = as_bytes(message.tensor)
        if parcel.tensor.shape != destination.shape:
            raise TransportError(
                f"rank {self.names[self.rank]} expects {destination.numel()} bytes from rank "
                f"{self.names[message.peer]}, which sent {parcel.tensor.numel()}"
            )
        self._copy_stream.wait_for_fences([parcel.ready_fence])  # the sender's compute and the fences in its `after`
        self._copy_stream.copy(destination, parcel.tensor)
        self._hub.confirm_copy(parcel, self._copy_stream.record_point())

    def _take(self, kind: str, peer: int) -> Any:
        """Take the next item from `peer`; `kind` is "bytes" for messages and "value" for `gather`."""
        what = f"rank {self.names[self.rank]} waits for {kind} from rank {self.names[peer]}"
        box = kind, self._channel, peer, self.rank
        return self._hub.take(box, peer, what, self._channel, self._patience)


def _open(group: Group, device: torch.device, *, control: Control, **_: Any) -> LocalTransport:
    members = group if isinstance(group, LocalGroup) else single_rank()  # the else case is a process group of one rank
    opened = LocalTransport(members, device, patience=control.patience)
    opened.names = control.names
    return opened


register_transport("local", _open, ranks=(THREADS,), preference=40)
