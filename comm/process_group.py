"""Transfers through any backend of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .lanes import StreamLane, lane_for
from .transport import Fence, Message, TransportError, as_bytes, check_messages, check_open, self_pairs


class _Pending(NamedTuple):
    work: dist.Work
    tensor: torch.Tensor  # held: the backend reads or writes this memory until the work is over
    what: str


class HostFence:
    """Transfers that a host backend runs in the background; `wait` blocks until they are over."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = list(pending)

    def wait(self) -> None:
        """Block until every transfer is over."""
        while self._pending:
            work, _, what = self._pending[0]
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(f"{what} failed: {error}") from error
            del self._pending[0]  # only now: a second wait after a failure fails again, it never reports success


class ProcessGroupTransport:
    """One torch.distributed process group. Peers are ranks of that group, not of the world."""

    name = "process_group"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._lane = lane_for(device)
        self._open = True
        self.rank = group.rank()
        self.size = group.size()

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return self._lane.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """See `Transport.post`. On the CPU the call blocks for `after` alone; the backend's threads move the bytes."""
        check_open(self, self._open)
        check_messages(self, self._device, sends, receives)
        self._lane.follow(after)
        # torch.distributed leaves sending to oneself to its backends, and not all of them can.
        for destination, source in self_pairs(self.rank, sends, receives):
            self._lane.copy(destination, source)
        outgoing = [message for message in sends if message.peer != self.rank]
        incoming = [message for message in receives if message.peer != self.rank]
        if not isinstance(self._lane, StreamLane):
            return self._start_on_host(outgoing, incoming)
        self._start_on_stream(self._lane, outgoing, incoming)
        return self._lane.point(keep=[message.tensor for message in (*sends, *receives)])

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        check_open(self, self._open)
        return all_gather_object(self._group, value)

    def close(self) -> None:
        """Stop. The process group belongs to the caller and stays."""
        self._open = False

    def _start_on_host(self, sends: Sequence[Message], receives: Sequence[Message]) -> Fence:
        # Receives first: bytes that find a waiting buffer need none in between.
        pending = [self._start(dist.irecv, "group_src", "receive of {} bytes from", message) for message in receives]
        pending += [self._start(dist.isend, "group_dst", "send of {} bytes to", message) for message in sends]
        return HostFence(pending)

    def _start(self, operation: object, peer_keyword: str, what: str, message: Message) -> _Pending:
        tensor = as_bytes(message.tensor)
        described = f"rank {self.rank}: {what.format(tensor.numel())} rank {message.peer}"
        try:
            work = operation(tensor, group=self._group, **{peer_keyword: message.peer})  # type: ignore[operator]
        except RuntimeError as error:
            raise TransportError(f"{described} failed: {error}") from error
        return _Pending(work, tensor, described)

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


def all_gather_object(group: dist.ProcessGroup, value: object) -> list[object]:
    """`value` of every rank of the group, in rank order, over whatever the group's backend takes."""
    values: list[object] = [None] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise TransportError(
            f"rank {group.rank()}: the exchange with {group.size() - 1} peers failed: {error}"
        ) from error
    return values
