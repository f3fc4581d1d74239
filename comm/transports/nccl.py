"""Transfers through NCCL by CuPy: one communicator and one high-priority stream of our own, one group per post."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..control import Control
from ..cuda_threads import on_device, start, within
from ..limits import NO_LIMITS, Limits
from ..transport import Edge, Fence, Message, TransportError, aborted, check_messages, closed
from .lanes import StreamFence, StreamLane, passed
from .nccl_library import OVERRIDES, ConfiguredCommunicator, overridden, several_loaded
from .warm_up import DEFAULT_TIMEOUT, WarmUp

logger = logging.getLogger(__name__)

# A call that sees the flag of an abort returns at once; its connections look for it every half second at most.
CALL_SECONDS = 10.0


def nccl_missing() -> str | None:
    """Why CuPy's NCCL cannot be used here, with what to install; None where it can. Touches no GPU."""
    # torch is loaded by now, so the library that CuPy resolves by name is the one that torch brought.
    extra = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}"
    # CuPy warns of a library that it cannot load and goes on without; where warnings are errors, its import would fail.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            available = importlib.import_module("cupy.cuda.nccl").available
        except ImportError as error:
            return f'CuPy does not import ({error}): pip install "ringattn[{extra}]"'
    reasons = " ".join(" ".join(str(warning.message).split()) for warning in told)
    if not available:
        return f'this CuPy finds no NCCL library{reasons and f" ({reasons})"}: pip install "ringattn[{extra}]"'
    if reasons:
        logger.warning("CuPy: %s", reasons)
    return several_loaded()


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
        self._calling = threading.Lock()  # held while a call uses the communicator, which is freed by nobody else then
        self._comm: Any = self._join(limits)
        # Nothing else would end one that nobody closed; aborted, for destroying it is collective inside a node.
        self._dropped = weakref.finalize(self, _drop, self._nccl, self._comm, self._calling, device, os.getpid())

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
        check_messages(self, self._device, sends, receives)
        try:
            places = [self._members[peer] for peer, _ in (*sends, *receives)]
        except KeyError as peer:
            raise ValueError(f"peer is {peer}, this communicator joins ranks {list(self._members)}") from None
        self._lane.follow(after)
        stream = self._lane.stream.cuda_stream
        try:
            with self._calling, self._group() as comm:
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
        with self._ending:
            if self._ended:
                raise TransportError(self._ended)
            comm, handles = self._comm, list[int]()
        try:
            with self._calling:
                for tensor in tensors:
                    handles.append(comm.register(tensor.data_ptr(), tensor.nbytes))
            yield
        finally:
            if passed(self._last, self._timeout):  # a peer may still write there
                with self._ending:  # an abort has let go of them
                    for handle in handles if not self._ended else ():
                        comm.deregister(handle)

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        # A peer may still be in its warm-up, until the deadline of that.
        return self._control.gather(value, what="gather of the nccl transport", timeout=2 * self._timeout)

    def check(self) -> str | None:
        """See `Transport.check`. NCCL notices network errors; a peer of the same node that died is silent."""
        with self._ending:  # or the communicator could be given back meanwhile
            try:
                if not self._ended:
                    self._comm.check_async_error()
            except RuntimeError as error:
                return f"the nccl transport of rank {self.rank}: {error}"
        return None

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Peers see their transfers fail or hang."""
        comm = self._end(str(aborted(self.name, self.rank, reason)))
        if comm is not None:
            self._give_up(comm)

    def close(self) -> None:
        """Give the communicator back once this rank's transfers are over; abort it if they are not, in time."""
        drained = bool(self._ended) or passed(self._last, self._timeout)
        comm = self._end(str(closed(self.name, self.rank)))
        if comm is None:
            return
        if not (drained and self._calling.acquire(timeout=self._timeout)):
            return self._give_up(comm)
        self._calling.release()  # nobody calls any more: it has ended
        # destroy() flushes what the network still carries, which abort() would cut off under a slower peer. It blocks
        # for as long as a dead peer of this node stays silent, so it is given a thread and a deadline.
        if not within(self._timeout, comm.destroy, self._device, "nccl-destroy"):
            logger.warning("rank %d: NCCL did not let go of its communicator in %g s", self.rank, self._timeout)

    def _join(self, limits: Limits) -> Any:
        """The communicator of the members; blocks until every one of them is here."""
        size, place, shared = len(self._members), self._members[self.rank], self._shared_id()
        joined: list[Any] = []
        given_up = threading.Event()

        def join() -> None:
            try:
                joined.append(ConfiguredCommunicator(size, shared, place, limits))
            except Exception as error:
                joined.append(error)
            if given_up.is_set():
                _abandon(joined)

        # A member that failed leaves the others waiting in NCCL, which nothing ends: so from a thread.
        if not within(self._timeout, join, self._device, "nccl-join"):
            given_up.set()
            start(partial(_abandon, joined), self._device, "nccl-abandon")
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
        ids = self._control.fresh_scope("ids")  # not gathered: each communicator has one, and its members need no other
        if self.rank == first:
            ids.publish(str(first), mine)
        told: list[Any] = ids.collect({first: str(first)}, what="the unique ids of NCCL", timeout=self._timeout)
        if isinstance(told[0], str):
            raise TransportError(told[0])
        is_bytes, *numbers = told[0]
        return bytes(numbers) if is_bytes else tuple(numbers)

    @contextmanager
    def _group(self) -> Iterator[Any]:
        """The communicator, inside of a group of transfers."""
        with self._ending:
            if self._ended:
                raise TransportError(self._ended)
            comm = self._comm
        self._nccl.groupStart()
        try:
            yield comm
        finally:
            # Left open, the group would swallow every later NCCL call of this thread, torch's own too.
            self._nccl.groupEnd()

    def _give_up(self, comm: Any) -> None:
        # From a thread: it may not come back, where a peer died.
        within(self._timeout, partial(_abort, self._nccl, comm, self._calling), self._device, "nccl-abort")

    def _end(self, why: str) -> Any:
        """The communicator, to whoever ends it first: it must be given back exactly once."""
        with self._ending:
            if self._ended:
                return None
            self._ended = why
            comm, self._comm = self._comm, None
            self._dropped.detach()
            return comm


def _abort(nccl: Any, comm: Any, calling: threading.Lock) -> None:
    """Abort a communicator, and free it only under no call; nothing new calls it, as its transport has ended.

    `ncclCommAbort` raises the flag that ends kernels and calls, then frees what a call still looks at on its way out;
    inside of a group NCCL puts the freeing off to the group's end. So: raise the flag, wait for the call, free.

    No deadlock: the flag waits for nobody, and a first transfer, which connects and blocks, looks for it all the time.
    A call that does not return all the same keeps its communicator, leaked with the open group of this thread.
    """
    nccl.groupStart()
    comm.abort()
    if not calling.acquire(timeout=CALL_SECONDS):
        logger.warning("a call of NCCL did not end in %g s of its abort: its communicator is not freed", CALL_SECONDS)
        return
    calling.release()
    with contextlib.suppress(RuntimeError):  # what is to be said of the end was said
        nccl.groupEnd()


def _drop(nccl: Any, comm: Any, calling: threading.Lock, device: torch.device, process: int) -> None:
    """Abort what nobody closed, without holding up whoever collects it."""
    if os.getpid() != process:  # in a fork it is the parent's
        return
    if threading.main_thread().is_alive():
        start(partial(_abort, nccl, comm, calling), device, "nccl-dropped")
        return
    # From Python 3.12 on no thread starts at exit: end the kernels here, and free nothing, which may block.
    with on_device(device):
        nccl.groupStart()
        comm.abort()


def _abandon(joined: list[Any]) -> None:
    """Give back a communicator whose last member came after all, when nobody waited for it any more."""
    with contextlib.suppress(IndexError):  # not there yet, or the other thread was faster
        late = joined.pop()
        if not isinstance(late, Exception):
            late.abort()
