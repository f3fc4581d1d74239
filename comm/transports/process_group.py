"""Transfers through any backend of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..control import Control, control_of
from ..limits import NO_LIMITS, Limits
from ..transport import (
    DONE,
    Edge,
    Fence,
    Message,
    TransportError,
    aborted,
    as_bytes,
    check_messages,
    check_open,
    self_pairs,
)
from .gloo import INTERRUPT_TAG, interrupt
from .host_stream import HostStream
from .lanes import StreamLane
from .warm_up import DEFAULT_TIMEOUT, WarmUp

# Transports of one group use the tags behind this one in turn: two of them, or one and its user's own messages, never
# take each other's. All below 32767, the least that an MPI must offer.
FIRST_TAG = INTERRUPT_TAG + 1
TAGS = 8192

_OPENED: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _interrupt(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        interrupt(group)


class ProcessGroupTransport:
    """One torch.distributed process group. Peers are ranks of that group, not of the world.

    On the CPU a thread of its own runs the transfers, so that they go on while the caller computes. On CUDA the
    backend's own kernels run on a stream of ours.
    """

    name = "process_group"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        control: Control | None = None,
        limits: Limits = NO_LIMITS,
        timeout: float = DEFAULT_TIMEOUT,
        lane: StreamLane | None = None,
    ) -> None:
        self._lane = StreamLane(device) if lane is None and device.type == "cuda" else lane
        refused = limits.refused_by("process_group", *([] if self._lane else ["bytes_per_second"]))
        if refused:
            raise ValueError(refused)
        self.rank = group.rank()
        self.size = group.size()
        self.reason = ""
        self._group = group
        self._device = device
        self._control = (control or control_of(group)).fresh_scope("process_group")
        self._rate = limits.bytes_per_second
        self._timeout = timeout
        self._tag = FIRST_TAG if self._lane else self._shared_tag()  # what works in stream order has no tags
        self._warm_up = WarmUp(device, timeout)
        self._open = True
        self._aborted = ""
        # Weakly: the thread must not be the last to hold the group, whose destructor would then run there, perhaps
        # while the interpreter is being taken down, which ends the process with an abort.
        seen = weakref.ref(group)
        self._host = HostStream(f"ringattn-transfers-{self.rank}", lambda: _interrupt(seen()))
        weakref.finalize(self, self._host.close).atexit = False

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return self._lane.mark() if self._lane else DONE

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """See `Transport.post`. Returns at once, also on the CPU."""
        if self._aborted:
            raise aborted(self.name, self.rank, self._aborted)
        check_open(self, self._open)
        check_messages(self, self._device, sends, receives)
        # torch.distributed leaves sending to oneself to its backends, and not all of them can.
        copies = self_pairs(self.rank, sends, receives)
        outgoing = [message for message in sends if message.peer != self.rank]
        incoming = [message for message in receives if message.peer != self.rank]
        if self._lane is None:
            work = _Transfers(
                self._group,
                self._tag,
                self.rank,
                outgoing,
                incoming,
                copies,
                tuple(after),
                self._rate,
                self._host.stopped,
            )
            return self._host.submit(work.run)
        self._lane.follow(after)
        for destination, source in copies:
            self._lane.copy(destination, source)
        self._start_on_stream(self._lane, outgoing, incoming)
        return self._lane.point(keep=[message.tensor for message in (*sends, *receives)])

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`."""
        self._warm_up(self, edges)

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        check_open(self, self._open)
        # A peer may still be in its warm-up, until the deadline of that.
        return self._control.gather(value, what="gather of the process_group transport", timeout=2 * self._timeout)

    def check(self) -> str | None:
        """See `Transport.check`: nothing moves that a fence does not tell of."""
        return None

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Where transfers are in flight, the process group that carries them ends with them."""
        if self._aborted:
            return
        self._aborted = reason
        self._host.abort(str(aborted(self.name, self.rank, reason)))
        if self._lane is not None:
            self._group._get_backend(self._device).abort()

    def close(self) -> None:
        """Stop. The process group belongs to the caller and stays."""
        self._open = False
        self._host.close()

    def _shared_tag(self) -> int:
        """A tag of this transport's own, the same on every rank."""
        # Counting alone is not enough: where one rank fails to open a transport the others may have counted it.
        counted = self._control.gather(
            _OPENED.get(self._group, 0), what="the tag of a transport", timeout=self._timeout
        )
        number = max(count for count in counted if isinstance(count, int))
        _OPENED[self._group] = number + 1
        return FIRST_TAG + number % TAGS

    def _start_on_stream(self, lane: StreamLane, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        operations = [self._operation(dist.isend, message) for message in sends]
        operations += [self._operation(dist.irecv, message) for message in receives]
        # The backend starts after the stream that is current here, and wait() holds back that stream and not the host:
        # with our own stream current, compute neither delays the transfer nor is delayed by it.
        with torch.cuda.stream(lane.stream):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def _operation(self, kind: object, message: Message) -> dist.P2POp:
        return dist.P2POp(kind, as_bytes(message.tensor), group=self._group, group_peer=message.peer)  # type: ignore[arg-type]


class _Pending(NamedTuple):
    work: dist.Work
    tensor: torch.Tensor  # held: the backend reads or writes this memory until the work is over
    what: str


class _Transfers(NamedTuple):
    """One group of transfers, as the host's transfer stream runs it."""

    group: dist.ProcessGroup
    tag: int
    rank: int
    sends: Sequence[Message]
    receives: Sequence[Message]
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]
    after: Sequence[Fence]
    rate: float | None  # bytes per second
    stopped: threading.Event

    def run(self) -> None:
        """Block until what has to be over before is over, then until the transfers are."""
        for fence in self.after:
            fence.wait()
        begun = time.monotonic()
        for destination, source in self.copies:
            destination.copy_(source)
        self._transfer()
        if self.rate is not None:
            over = begun + self._nbytes() / self.rate
            self.stopped.wait(max(0.0, over - time.monotonic()))

    def _transfer(self) -> None:
        pending: list[_Pending] = []
        try:
            # Receives first: bytes that find a waiting buffer need none in between.
            for message in self.receives:
                pending.append(self._start(dist.irecv, "group_src", "receive of {} bytes from", message))
            for message in self.sends:
                pending.append(self._start(dist.isend, "group_dst", "send of {} bytes to", message))
            while pending:
                _wait(pending[0])
                del pending[0]
        except TransportError:
            if len(pending) > 1:  # nobody will wait for those: they must not write to memory that is free by then
                interrupt(self.group)
            raise

    def _nbytes(self) -> int:
        """Of the busier direction of the link."""
        return max(sum(message.tensor.nbytes for message in way) for way in (self.sends, self.receives))

    def _start(self, operation: object, peer_keyword: str, what: str, message: Message) -> _Pending:
        tensor = as_bytes(message.tensor)
        described = f"rank {self.rank}: {what.format(tensor.numel())} rank {message.peer}"
        try:
            work = operation(tensor, group=self.group, tag=self.tag, **{peer_keyword: message.peer})  # type: ignore[operator]
        except RuntimeError as error:
            raise TransportError(f"{described} failed: {error}") from error
        return _Pending(work, tensor, described)


def _wait(pending: _Pending) -> None:
    try:
        pending.work.wait()
    except RuntimeError as error:
        raise TransportError(f"{pending.what} failed: {error}") from error
