"""Transfers through NCCL by CuPy: one communicator and one high-priority stream of our own, one group per post."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .control import Control
from .lanes import StreamFence, StreamLane
from .limits import NO_LIMITS, Limits
from .nccl_library import OVERRIDES, ConfiguredCommunicator, overridden
from .transport import Edge, Fence, Message, TransportError, aborted, check_messages, closed
from .warm_up import DEFAULT_TIMEOUT, WarmUp

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.001


def nccl_missing() -> str | None:
    """Why CuPy's NCCL cannot be used here, with what to install; None where it can. Touches no GPU."""
    # torch is loaded by now, so the library that CuPy resolves by name is the one that torch brought.
    extra = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}"
    try:
        available = importlib.import_module("cupy.cuda.nccl").available
    except ImportError as error:
        return f'CuPy does not import ({error}): pip install "ringattn[{extra}]"'
    return None if available else f'this CuPy finds no NCCL library: pip install "ringattn[{extra}]"'


class NcclTransport:
    """An NCCL communicator, grouped by CuPy, over some or all ranks of a group.

    `members` are the group's ranks that the communicator joins, in its order; by default all. `rank`, `size`, the
    peers of messages and what `gather` returns are the group's own. Every rank of the group opens its transports in
    the same order, also where their members differ, as the rings inside the nodes do. `lane` is the stream that
    transfers run on; None makes one.

    Nothing is connected yet: the first transfer to a peer connects to it and blocks the host, `warm_up` does that.
    """

    name = "nccl"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        control: Control,
        members: Sequence[int] | None = None,
        limits: Limits = NO_LIMITS,
        timeout: float = DEFAULT_TIMEOUT,
        lane: StreamLane | None = None,
    ) -> None:
        self._members = {peer: place for place, peer in enumerate(range(size) if members is None else members)}
        if rank not in self._members:
            raise ValueError(f"members is {list(self._members)}: rank {rank} is not one of them")
        refused = limits.refused_by("nccl", *OVERRIDES) or overridden(limits)
        if refused:
            raise ValueError(refused)
        missing = nccl_missing()
        if missing:
            raise TransportError(f'transport "nccl": {missing}')
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.rank = rank
        self.size = size
        self.reason = ""
        self._device = device
        self._control = control.fresh_scope("nccl")
        self._timeout = timeout
        self._warm_up = WarmUp(device, timeout)
        self._lane = StreamLane(device) if lane is None else lane
        self._last: StreamFence | None = None
        self._ending = threading.Lock()
        self._ended = ""  # why nothing can be posted any more
        self._comm: Any = self._join(limits)

    @property
    def lane(self) -> StreamLane:
        """The stream that transfers run on."""
        return self._lane

    def mark(self) -> StreamFence:
        """The point that compute has reached on the current stream."""
        return self._lane.mark()

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        """See `Transport.post`. Enqueues and returns; the host never waits for the device."""
        comm = self._communicator()
        check_messages(self, self._device, sends, receives)
        places = [self._place(message) for message in (*sends, *receives)]
        self._lane.follow(after)
        stream = self._lane.stream.cuda_stream
        try:
            with self._group():
                for (_, tensor), place in zip(sends, places, strict=False):
                    comm.send(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, place, stream)
                for (_, tensor), place in zip(receives, places[len(sends) :], strict=True):
                    comm.recv(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, place, stream)
        except RuntimeError as error:  # NcclError is one
            refused = self._ended or f"rank {self.rank}: NCCL refused a group of transfers: {error}"
            raise TransportError(refused) from error
        self._last = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return self._last

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`. A transport whose warm-up failed is aborted."""
        try:
            self._warm_up(self, edges)
        except TransportError:
            self.abort("its warm-up failed")
            raise

    @contextmanager
    def registered(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let NCCL reach these tensors without buffers of its own between, where it can, until the end of the block.

        A message must be registered at both ends or at neither: what NCCL makes of one end alone is undefined.

        Raises:
            TransportError: NCCL refuses, or is too old.
        """
        comm, handles = self._communicator(), list[int]()
        try:
            for tensor in tensors:
                handles.append(comm.register(tensor.data_ptr(), tensor.nbytes))
            yield
        finally:
            if self._drained() and not self._ended:  # a peer may still write there; an abort has let go of them
                for handle in handles:
                    comm.deregister(handle)

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        # A peer may still be in its warm-up, until the deadline of that.
        return self._control.gather(value, what="gather of the nccl transport", timeout=2 * self._timeout)

    def check(self) -> str | None:
        """What NCCL has noticed since, None where all is well. Cheap, and from any thread: for a watchdog to poll.

        NCCL notices network errors; a peer of the same node that died is silent.
        """
        with self._ending:  # or the communicator could be given back meanwhile
            if self._ended:
                return self._ended
            try:
                self._comm.check_async_error()
            except RuntimeError as error:
                return f"the nccl transport of rank {self.rank}: {error}"
        return None

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Peers see their transfers fail or hang."""
        comm = self._end(str(aborted(self.name, self.rank, reason)))
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Give the communicator back once this rank's transfers are over; abort it if they are not, in time."""
        drained = self._drained()
        comm = self._end(str(closed(self.name, self.rank)))
        if comm is None:
            return
        if not drained:  # abort() may not come back either, where a peer died
            _in_time(comm.abort, self._timeout)
            return
        # destroy() flushes what the network still carries, which abort() would cut off under a slower peer. It blocks
        # for as long as a dead peer of this node stays silent, so it is given a thread and a deadline.
        if not _in_time(comm.destroy, self._timeout):
            logger.warning("rank %d: NCCL did not let go of its communicator in %g s", self.rank, self._timeout)

    def _join(self, limits: Limits) -> Any:
        """The communicator of the members; blocks until every one of them is here."""
        size, place, shared = len(self._members), self._members[self.rank], self._shared_id()
        joined: list[Any] = []
        given_up = threading.Event()

        def join() -> None:
            try:
                with torch.cuda.device(self._device):
                    joined.append(ConfiguredCommunicator(size, shared, place, limits))
            except Exception as error:
                joined.append(error)
            if given_up.is_set():
                _abandon(joined)

        # A member that failed leaves the others waiting in NCCL, which nothing ends: so from a thread.
        if not _in_time(join, self._timeout):
            given_up.set()
            _abandon(joined)
            raise TransportError(f"rank {self.rank}: ranks {list(self._members)} did not join in {self._timeout:g} s")
        if isinstance(joined[0], Exception):
            raise TransportError(f"rank {self.rank}: NCCL makes no communicator: {joined[0]}") from joined[0]
        return joined[0]

    def _shared_id(self) -> Any:
        """What the members of one communicator know each other by, drawn by the first of them."""
        first = next(iter(self._members))
        try:
            drawn = self._nccl.get_unique_id() if self.rank == first else None
            mine: object = None if drawn is None else [isinstance(drawn, bytes), *drawn]  # CuPy 14: bytes, 13: a tuple
        except RuntimeError as error:
            mine = f"NCCL of rank {first} draws no unique id: {error}"  # in its place, so that no rank waits for it
        told: list[Any] = self._control.gather(mine, what="the unique ids of NCCL", timeout=self._timeout)
        failed = [found for found in told if isinstance(found, str)]
        if failed:
            raise TransportError("; ".join(failed))
        is_bytes, *numbers = told[first]
        return bytes(numbers) if is_bytes else tuple(numbers)

    def _place(self, message: Message) -> int:
        place = self._members.get(message.peer)
        if place is None:
            raise ValueError(f"peer is {message.peer}, this communicator joins ranks {list(self._members)}")
        return place

    @contextmanager
    def _group(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            # Left open, the group would swallow every later NCCL call of this thread, torch's own too.
            self._nccl.groupEnd()

    def _communicator(self) -> Any:
        if self._ended:
            raise TransportError(self._ended)
        return self._comm

    def _end(self, why: str) -> Any:
        """The communicator, to whoever ends it first: it must be given back exactly once."""
        with self._ending:
            if self._ended:
                return None
            self._ended = why
            comm, self._comm = self._comm, None
            return comm

    def _drained(self) -> bool:
        deadline = time.monotonic() + self._timeout
        while not self._ended and self._last is not None and not self._last.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def _abandon(joined: list[Any]) -> None:
    """Give back a communicator whose last member came after all, when nobody waited for it any more."""
    with contextlib.suppress(IndexError):  # not there yet, or the other thread was faster
        late = joined.pop()
        if not isinstance(late, Exception):
            late.abort()


def _in_time(function: Callable[[], object], seconds: float) -> bool:
    """Call what may never return in a thread of its own; whether it has returned in time."""
    thread = threading.Thread(target=function, name="ringattn-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
