"""Transport through any backend of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..control import INTERRUPT_TAG, Control, open_control, post_unmatched_receive
from ..cuda_threads import join_at_exit
from ..groups import Group
from ..limits import NO_LIMITS, Limits
from ..registry import PROCESSES, register_transport
from ..transport import (
    DONE,
    WARM_UP_SECONDS,
    Fence,
    Message,
    TransportBase,
    TransportError,
    as_bytes,
    check_messages,
    pair_self_messages,
)
from ..world import LocalGroup
from .copy_streams import CudaCopyStream

# Backends of torch.distributed that read memory from the host, so they cannot send CUDA tensors in stream order.
HOST_BACKENDS = ("gloo", "mpi")

# Zero would mean the group's own timeout.
MIN_TIMEOUT = timedelta(milliseconds=1)

# Time that the exit of the process allows a transfer that cannot be interrupted.
EXIT_JOIN_SECONDS = 1.0

TransferWork = Callable[[], None]
"""Function that blocks until its transfers are over and raises if they failed."""


class HostFence:
    """Fence of transfers that a `TransferThread` runs; `wait` blocks until they are over."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._problem: str | None = None
        self.finished_at = 0.0
        """Time by `time.perf_counter` when the transfers were over; 0 until then."""

    def wait(self) -> None:
        """Block until every transfer is over, and raise `TransportError` if any failed or was aborted."""
        self._over.wait()
        if self._problem is not None:
            raise TransportError(self._problem)

    def done(self) -> bool:
        """Return True if the transfers are over or failed."""
        return self._over.is_set()

    def finish(self, problem: str | None) -> None:
        """End the transfers, with an error text if they failed, and wake all waiters. Only the first call counts.

        The caller holds the lock of the `TransferThread`.
        """
        if not self._over.is_set():
            self._problem = problem
            self.finished_at = time.perf_counter()
            self._over.set()


class TransferThread:
    """Thread that runs transfers in the order of `submit`, which never blocks.

    The first failure is final: later transfers fail with the same text, because a failed transfer leaves garbage that
    must not be sent on.

    Args:
        name: name of the thread.
        interrupt: makes the running transfer raise, and returns True if the backend supports that. Another thread calls
            it, at most once.
    """

    def __init__(self, name: str, interrupt: Callable[[], bool]) -> None:
        self._name = name
        self._interrupt = interrupt
        self._is_joinable = True  # False if the thread may not end when asked to
        self._queue: queue.SimpleQueue[tuple[TransferWork, HostFence] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: deque[HostFence] = deque()  # fences of running and of queued work
        self._running = False
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self.aborted_event = threading.Event()
        """Set by `abort`. Work that only sleeps should wait on this event."""

    def submit(self, work: TransferWork) -> HostFence:
        """Run `work` after all earlier work, and return its fence.

        Raises:
            TransportError: earlier work failed, or the thread was aborted.
        """
        fence = HostFence()
        with self._lock:
            if self._problem is not None:
                raise TransportError(self._problem)
            if self._thread is None:
                self._start()
            self._waiting.append(fence)
            self._queue.put((work, fence))
        return fence

    def abort(self, problem: str) -> None:
        """Fail all unfinished work at once. Any thread may call it. Idempotent."""
        with self._lock:
            if self.aborted_event.is_set():
                return
            self.aborted_event.set()
            self._problem = self._problem or problem
            running = self._running
            while self._waiting:
                self._waiting.popleft().finish(self._problem)
        if running:
            self._is_joinable = self._interrupt()

    def close(self) -> None:
        """End the thread after the queued work."""
        self._queue.put(None)

    def _start(self) -> None:
        _transfer_threads().add(self)
        # Use a daemon thread, so that a transfer that cannot be interrupted does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Tensors created in inference mode may only be written in it; ordinary tensors may be written there, too.
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                self._run_one(*item)
                del item  # release the tensors

    def _run_one(self, work: TransferWork, fence: HostFence) -> None:
        """Run one piece of work and finish its fence, or fail it at once if earlier work failed."""
        with self._lock:
            if self._problem is not None:
                fence.finish(self._problem)
                return
            self._running = True
        problem = None
        try:
            work()
        except TransportError as error:
            problem = str(error)
        except Exception as error:
            problem = f"a transfer failed: {type(error).__name__}: {error}"
        with self._lock:
            self._running = False
            self._problem = self._problem or problem
            if self._waiting and self._waiting[0] is fence:  # not aborted
                self._waiting.popleft()
            fence.finish(self._problem)

    def _end(self) -> None:
        """End the thread at the exit of the process, and wait for it."""
        self.abort("the process ends")
        self.close()
        if self._thread is not None:
            if self._is_joinable:
                join_at_exit(self._thread)
            else:
                self._thread.join(EXIT_JOIN_SECONDS)


@functools.cache
def _transfer_threads() -> weakref.WeakSet[TransferThread]:
    """Return the set of started threads, to which each new thread adds itself. All end with the process."""
    streams: weakref.WeakSet[TransferThread] = weakref.WeakSet()

    def end_all() -> None:
        # A thread that returns from a backend while the interpreter shuts down would crash the process.
        for stream in list(streams):
            stream._end()

    atexit.register(end_all)
    return streams


# Transports of one group take turns with the tags from here on, so that two transports, or a transport and the user's
# own messages, never match. All tags are below 32767, which every MPI supports.
FIRST_TAG = INTERRUPT_TAG + 1
TAGS = 8192

_OPENED: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _interrupt(group: dist.ProcessGroup | None) -> bool:
    """End every transfer of the group in flight, in both directions. The group is unusable afterwards.

    Any thread may call it. A receive that times out closes every connection of its gloo context, which wakes all
    waiters in all threads. `TransferWork` has no abort, and `ProcessGroup.abort` does not end gloo's waits (torch
    2.13). A wait with a timeout on the pending work itself could take its completion away from the thread that waits
    for it.

    Other host backends have no such mechanism, so nothing happens.

    Returns:
        True if no transfer of the group is left in flight.
    """
    if group is None:
        return True
    if "gloo" not in dist.get_backend_config(group):
        return False
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            post_unmatched_receive(group, peer).wait(MIN_TIMEOUT)
        except RuntimeError as error:
            # If the connection to this peer is broken already, the receive fails early. Try the next peer.
            if "Timed out" in str(error):
                break
    return True


class ProcessGroupTransport(TransportBase):
    """Transport through one torch.distributed process group. Peers are ranks of that group, not of the world.

    On the CPU a separate thread runs the transfers, so that the caller can compute meanwhile. On CUDA the backend's
    kernels run on a stream of the transport.
    """

    name = "process_group"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        control: Control | None = None,
        limits: Limits = NO_LIMITS,
        timeout: float = WARM_UP_SECONDS,
        copy_stream: CudaCopyStream | None = None,
    ) -> None:
        self._copy_stream = CudaCopyStream(device) if copy_stream is None and device.type == "cuda" else copy_stream
        refused = limits.find_unsupported("process_group", *([] if self._copy_stream else ["bytes_per_second"]))
        if refused:
            raise ValueError(refused)
        super().__init__(group.rank(), group.size(), device, timeout)
        self._group = group
        self._control = (control or open_control(group)).new_scope("process_group")
        self.names = self._control.names
        self._rate = limits.bytes_per_second
        # CUDA transfers match in stream order and need no tags.
        self._tag = FIRST_TAG if self._copy_stream else self._shared_tag()
        # Use a weak reference: if the thread held the last one, the group's destructor could run in the thread while
        # the interpreter shuts down, which aborts the process.
        group_ref = weakref.ref(group)
        self._transfer_thread = TransferThread(f"ringattn-transfers-{self.rank}", lambda: _interrupt(group_ref()))
        weakref.finalize(self, self._transfer_thread.close).atexit = False

    def mark(self) -> Fence:
        return self._copy_stream.mark() if self._copy_stream else DONE

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """Enqueue transfers and return at once, on the CPU as well. See `Transport.post`."""
        self._check_running()
        check_messages(self, self._device, sends, receives)
        # Copy messages from a rank to itself here, because not all backends of torch.distributed support them.
        copies = pair_self_messages(self.rank, sends, receives)
        outgoing = [message for message in sends if message.peer != self.rank]
        incoming = [message for message in receives if message.peer != self.rank]
        if self._copy_stream is None:
            return self._transfer_thread.submit(partial(self._transfer, outgoing, incoming, copies, tuple(after)))
        self._copy_stream.wait_for_fences(after)
        for destination, source in copies:
            self._copy_stream.copy(destination, source)
        self._start_on_stream(self._copy_stream, outgoing, incoming)
        return self._copy_stream.record_point(keep=[message.tensor for message in (*sends, *receives)])

    def gather(self, value: object) -> list[object]:
        self._check_open()
        # A peer may still be in its warm-up, which has the same timeout.
        return self._control.gather(value, what="gather of the process_group transport", timeout=2 * self._timeout)

    def abort(self, reason: str) -> None:
        """Abort the transport, and with it the process group if transfers are in flight. See `Transport.abort`."""
        if self._aborted:
            return
        self._aborted = reason
        self._transfer_thread.abort(str(self._aborted_error(reason)))
        if self._copy_stream is not None:
            self._group._get_backend(self._device).abort()

    def close(self) -> None:
        """Close the transport. The process group belongs to the caller and stays open."""
        self._open = False
        self._transfer_thread.close()

    def _transfer(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Fence],
    ) -> None:
        """Run the transfers of one post in the transfer thread, and block until they are over.

        `copies` are the (destination, source) bytes of the messages from this rank to itself.
        """
        for fence in after:
            fence.wait()
        if self._transfer_thread.aborted_event.is_set():  # the caller may have freed the tensors
            return
        begun = time.monotonic()
        for destination, source in copies:
            destination.copy_(source)
        pending: list[_Pending] = []
        try:
            # Start the receives first: data that finds a waiting buffer needs no intermediate copy.
            for message in receives:
                pending.append(self._start(dist.irecv, "group_src", "receive of {} bytes from", message))
            for message in sends:
                pending.append(self._start(dist.isend, "group_dst", "send of {} bytes to", message))
            while pending:
                _wait(pending[0])
                del pending[0]
        except TransportError:
            if len(pending) > 1:  # nobody waits for the rest, which must not write to memory that is freed
                _interrupt(self._group)
            raise
        if self._rate is not None:  # the busier direction of the link counts
            nbytes = max(sum(message.tensor.nbytes for message in messages) for messages in (sends, receives))
            self._transfer_thread.aborted_event.wait(max(0.0, begun + nbytes / self._rate - time.monotonic()))

    def _start(self, operation: object, peer_keyword: str, what: str, message: Message) -> _Pending:
        """Start one send or receive; `operation` is `isend` or `irecv` of torch.distributed.

        `peer_keyword` is the operation's keyword for the peer, and `what` describes the transfer in errors.
        """
        tensor = as_bytes(message.tensor)
        who, whom = self.names[self.rank], self.names[message.peer]
        described = f"rank {who}: {what.format(tensor.numel())} rank {whom}"
        try:
            work = operation(tensor, group=self._group, tag=self._tag, **{peer_keyword: message.peer})  # type: ignore[operator]
        except RuntimeError as error:
            raise TransportError(f"{described} failed: {error}") from error
        return _Pending(work, tensor, described)

    def _shared_tag(self) -> int:
        """Return a tag that no other transport of the group uses, the same on every rank."""
        # A local count is not enough: if one rank fails to open a transport, the others may have counted it.
        counted = self._control.gather(
            _OPENED.get(self._group, 0), what="the tag of a transport", timeout=self._timeout
        )
        number = max(count for count in counted if isinstance(count, int))
        _OPENED[self._group] = number + 1
        return FIRST_TAG + number % TAGS

    def _start_on_stream(
        self, copy_stream: CudaCopyStream, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Enqueue the sends and receives of a post on the transport's CUDA stream."""
        operations = [self._operation(dist.isend, message) for message in sends]
        operations += [self._operation(dist.irecv, message) for message in receives]
        # The backend orders its work after the current stream, and wait() orders the current stream and not the host.
        # With the transport's stream current, compute and transfers do not delay each other.
        with torch.cuda.stream(copy_stream.stream):
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def _operation(self, kind: object, message: Message) -> dist.P2POp:
        return dist.P2POp(kind, as_bytes(message.tensor), group=self._group, group_peer=message.peer)  # type: ignore[arg-type]


class _Pending(NamedTuple):
    """A transfer that has started."""

    work: dist.Work
    tensor: torch.Tensor  # held because the backend uses this memory until the work is over
    what: str


def _wait(pending: _Pending) -> None:
    """Wait until a transfer is over, and raise a `TransportError` if it failed."""
    try:
        pending.work.wait()
    except RuntimeError as error:
        raise TransportError(f"{pending.what} failed: {error}") from error


def _open(
    group: dist.ProcessGroup, device: torch.device, *, control: Control, limits: Limits, timeout: float, **_: Any
) -> ProcessGroupTransport:
    return ProcessGroupTransport(group, device, control=control, limits=limits, timeout=timeout)


def _unavailable(group: Group, device: torch.device, limits: Limits) -> str | None:
    """Return why torch.distributed cannot move tensors of `device` in this group, or None if it can."""
    if isinstance(group, LocalGroup):
        return "torch.distributed is not initialised"
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backend = {device_type: backend for device_type, _, backend in pairs}.get(device.type, "")
    if device.type == "cpu" and not backend:
        return 'the group has no backend for CPU tensors; create it with init_process_group("cpu:gloo,cuda:nccl")'
    if device.type == "cuda" and (not backend or backend in HOST_BACKENDS):
        return (
            f"the group's backend for CUDA tensors is {backend or 'none'}, which cannot use a CUDA stream; use "
            'init_process_group("cpu:gloo,cuda:nccl"), or transport="nccl" with any group'
        )
    return limits.find_unsupported("process_group") if device.type == "cuda" else None


register_transport(
    "process_group", _open, ranks=(PROCESSES,), preference=10, limits=("bytes_per_second",), unavailable=_unavailable
)
