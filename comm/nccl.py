"""Transfers through NCCL by CuPy: one communicator and one high-priority stream of our own, one group per post."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .lanes import StreamFence, StreamLane
from .transport import Fence, Message, TransportError, check_edges, check_messages

logger = logging.getLogger(__name__)

# Connecting an edge takes well under a second inside a node and a few seconds between nodes.
DEFAULT_TIMEOUT = 60.0
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
    """CuPy's `NcclCommunicator` over the ranks that `gather` joins.

    `gather` is the control plane, whatever carries it: it takes one small object and returns every rank's, in rank
    order.
    Opening warms up both ring edges, for the first transfer to a peer connects to it and blocks the host.
    """

    name = "nccl"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        gather: Callable[[object], list[object]],
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        missing = nccl_missing()
        if missing:
            raise TransportError(f'transport "nccl": {missing}')
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.rank = rank
        self.size = size
        self._device = device
        self._gather = gather
        self._timeout = timeout
        self._lane = StreamLane(device)
        self._last: StreamFence | None = None
        self._ending = threading.Lock()
        self._ended = ""  # why nothing can be posted any more
        unique_id = self._shared_id()
        with torch.cuda.device(device):
            self._comm: Any = self._nccl.NcclCommunicator(size, unique_id, rank)
        self._warm_up()

    def mark(self) -> StreamFence:
        """The point that compute has reached on the current stream."""
        return self._lane.mark()

    def post(
        self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()
    ) -> StreamFence:
        """See `Transport.post`. Enqueues and returns; the host never waits for the device."""
        comm = self._communicator()
        check_messages(self, self._device, sends, receives)
        self._lane.follow(after)
        stream = self._lane.stream.cuda_stream
        try:
            with self._group():
                for peer, tensor in sends:
                    comm.send(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, peer, stream)
                for peer, tensor in receives:
                    comm.recv(tensor.data_ptr(), tensor.nbytes, self._nccl.NCCL_UINT8, peer, stream)
        except RuntimeError as error:  # NcclError is one
            raise TransportError(f"rank {self.rank}: NCCL refused a group of transfers: {error}") from error
        self._last = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return self._last

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        return self._gather(value)

    def abort(self, reason: str = "aborted") -> None:
        """End every transfer in flight at once, also from another thread; peers see theirs fail or hang."""
        comm = self._end(reason)
        if comm is not None:
            comm.abort()

    def close(self) -> None:
        """Give the communicator back once this rank's transfers are over; abort it if they are not, in time."""
        drained = self._drained()
        comm = self._end("closed")
        if comm is None:
            return
        if not drained:
            comm.abort()
            return
        # destroy() flushes what the network still carries, which abort() would cut off under a slower peer. It blocks
        # for as long as a dead peer of this node stays silent, so it is given a thread and a deadline.
        thread = threading.Thread(target=comm.destroy, name="ringattn-nccl-destroy", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if thread.is_alive():
            logger.warning("rank %d: NCCL did not let go of its communicator in %g s", self.rank, self._timeout)

    def _shared_id(self) -> object:
        """The 128 bytes that the ranks of one communicator know each other by, drawn by rank 0."""
        try:
            mine = self._nccl.get_unique_id() if self.rank == 0 else None
        except RuntimeError as error:
            mine = f"NCCL of rank 0 draws no unique id: {error}"  # in its place, so that no rank waits for it
        shared = self._gather(mine)[0]
        if isinstance(shared, str):
            raise TransportError(shared)
        return shared

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
            raise TransportError(f"the nccl transport of rank {self.rank} is {self._ended}")
        return self._comm

    def _end(self, reason: str) -> Any:
        """The communicator, to whoever ends it first: it must be given back exactly once."""
        with self._ending:
            if self._ended:
                return None
            self._ended = reason
            comm, self._comm = self._comm, None
            return comm

    def _drained(self) -> bool:
        deadline = time.monotonic() + self._timeout
        while not self._ended and self._last is not None and not self._last.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _warm_up(self) -> None:
        reason = f"aborted: its warm-up took more than {self._timeout:g} s"
        timer = threading.Timer(self._timeout, self.abort, [reason])
        timer.daemon = True
        timer.start()
        try:
            check_edges(self, self._device)
        except TransportError:
            self.abort("aborted: its warm-up failed")
            raise
        finally:
            timer.cancel()
        self._communicator()  # the deadline may have passed on the last bytes
