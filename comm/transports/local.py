"""Virtual ranks: threads of one process that share one device; also the world of one."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..numbers import numbered
from ..transport import (
    Edge,
    Fence,
    Message,
    TransportError,
    aborted,
    as_bytes,
    check_messages,
    check_open,
    decoded,
    encoded,
)
from .lanes import Lane, StreamOrdered, lane_for
from .mailboxes import DEFAULT_TIMEOUT, Hub, Parcel
from .warm_up import WarmUp


class LocalGroup:
    """One virtual rank's membership in its `LocalWorld`; what `fn` is called with, and what `group=` takes."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._thread: int | None = None
        self._channels = itertools.count()
        self.number = numbered(self)  # what names this member in a graph of torch.compile
        self._process = os.getpid()
        self.kept: dict[object, Any] = {}
        """What others keep for this member, and what goes with it."""

    def rank(self) -> int:
        """This virtual rank."""
        return self._rank

    def size(self) -> int:
        """Number of virtual ranks."""
        return self._hub.size

    def check_thread(self) -> None:
        """Raise where a wait for the other ranks could never end.

        Peers answer only while `LocalWorld.run` runs them, and only from their own threads. PyTorch runs the backward
        of all CUDA nodes of one device in one thread of its own, unless that is switched off in the thread that calls
        backward(), which `run` does.
        """
        if self._hub.size > 1 and (threading.get_ident() != self._thread or os.getpid() != self._process):
            raise RuntimeError(
                f"{self} was used from thread {threading.current_thread().name!r}, outside of the call that "
                "LocalWorld.run makes for this rank: its peers only answer there. Call backward() inside fn"
            )

    def next_channel(self) -> int:
        """A number for one more transport of this rank: every rank opens its transports in the same order."""
        return next(self._channels)

    @contextmanager
    def adopted(self) -> Iterator[None]:
        """Make the calling thread the only one that may act for this rank."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def __repr__(self) -> str:
        return f"rank {self._rank} of LocalWorld({self._hub.size})"


@functools.cache
def solo_group() -> LocalGroup:
    """The group of one device alone."""
    return LocalGroup(Hub(1, DEFAULT_TIMEOUT), 0)


class _LocalFence(StreamOrdered):
    """The receives of a post are over, and every receiver has copied what the post sent."""

    def __init__(self, hub: Hub, channel: int, arrived: Fence, sent: Sequence[tuple[Parcel, int, str]]) -> None:
        self._hub = hub
        self._channel = channel
        self._arrived = arrived
        self._sent = sent

    def wait(self) -> None:
        """Hold back the current stream; on the CPU, block."""
        for fence in self._parts():
            fence.wait()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Hold back `stream`."""
        for fence in self._parts():
            if isinstance(fence, StreamOrdered):
                fence.order(stream)

    def done(self) -> bool:
        """See `Fence.done`."""
        if self._hub.failure is not None or self._hub.stopped(self._channel) is not None:
            return True
        taken = [parcel.taken for parcel, _, _ in self._sent]
        return all(fence is not None and fence.done() for fence in taken) and self._arrived.done()

    def _parts(self) -> Iterator[Fence]:
        # Receivers first: waiting for `arrived` lets go of the tensors that they read.
        for parcel, peer, what in self._sent:
            yield self._hub.taken(parcel, peer, what, self._channel)
        yield self._arrived


class LocalTransport:
    """Copies between the virtual ranks of one process, each on its receiver's own transfer stream."""

    name = "local"

    def __init__(self, group: LocalGroup, device: torch.device, *, lane: Lane | None = None) -> None:
        self._group = group
        self._hub = group._hub
        self._device = device
        self._lane = lane_for(device) if lane is None else lane
        self._channel = group.next_channel()
        self._open = True
        self._warm_up = WarmUp(device)
        self.reason = ""
        self.rank = group.rank()
        self.size = group.size()

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return self._lane.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """See `Transport.post`. Blocks until every peer has posted the sends that match `receives`.

        No deadlock: sends are published before anything is waited for, and all ranks post in one global order.
        """
        self._check()
        check_messages(self, self._device, sends, receives)
        self._lane.follow(after)
        ready = self._lane.point()  # what the sends hold is final here: the receivers' copies run after it
        sent = [self._publish(message, ready) for message in sends]
        for message in receives:
            self._receive(message)
        arrived = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return _LocalFence(self._hub, self._channel, arrived, sent)

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`."""
        self._warm_up(self, edges)

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`. Values are encoded here too: ranks share nothing that processes could not."""
        self._check()
        data = encoded(value)
        for peer in range(self.size):
            self._hub.put(("value", self._channel, self.rank, peer), data)
        return [decoded(self._take("value", peer), f"what rank {peer} gathers") for peer in range(self.size)]

    def check(self) -> str | None:
        """See `Transport.check`: nothing moves that a fence does not tell of."""
        return None

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Every rank's end of this transport is aborted, as nothing arrives there any more."""
        self._hub.stop(self._channel, str(aborted(self.name, self.rank, reason)))

    def close(self) -> None:
        """Stop. The world goes on."""
        self._open = False

    def _check(self) -> None:
        stopped = self._hub.stopped(self._channel)
        if stopped is not None:
            raise TransportError(stopped)
        check_open(self, self._open)
        self._group.check_thread()

    def _publish(self, message: Message, ready: Fence) -> tuple[Parcel, int, str]:
        parcel = Parcel(as_bytes(message.tensor), ready)
        self._hub.put(("bytes", self._channel, self.rank, message.peer), parcel)
        what = f"rank {self.rank} waits until rank {message.peer} takes {message.tensor.nbytes} bytes"
        return parcel, message.peer, what

    def _receive(self, message: Message) -> None:
        parcel = self._take("bytes", message.peer)
        destination = as_bytes(message.tensor)
        if parcel.tensor.shape != destination.shape:
            raise TransportError(
                f"rank {self.rank} expects {destination.numel()} bytes from rank {message.peer}, "
                f"which sent {parcel.tensor.numel()}"
            )
        self._lane.follow([parcel.ready])  # the sender's compute, and what it had to wait for
        self._lane.copy(destination, parcel.tensor)
        self._hub.settle(parcel, self._lane.point())

    def _take(self, kind: str, peer: int) -> Any:
        what = f"rank {self.rank} waits for {kind} from rank {peer}"
        return self._hub.take((kind, self._channel, peer, self.rank), peer, what, self._channel)
