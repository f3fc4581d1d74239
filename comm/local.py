"""Virtual ranks: threads of one process that share one device; also the world of one."""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .lanes import Lane, StreamOrdered, indexed, lane_for, new_stream
from .mailboxes import DEFAULT_TIMEOUT, Hub, Parcel
from .transport import Fence, Message, TransportError, as_bytes, check_messages, check_open

T = TypeVar("T")


class LocalGroup:
    """One virtual rank's membership in its `LocalWorld`; what `fn` is called with, and what `group=` takes."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._thread: int | None = None
        self._channels = itertools.count()
        self.kept: dict[object, object] = {}
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
        if self._hub.size > 1 and threading.get_ident() != self._thread:
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

    def __init__(self, hub: Hub, arrived: Fence, sent: Sequence[tuple[Parcel, int, str]]) -> None:
        self._hub = hub
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

    def _parts(self) -> Iterator[Fence]:
        # Receivers first: waiting for `arrived` lets go of the tensors that they read.
        for parcel, peer, what in self._sent:
            yield self._hub.taken(parcel, peer, what)
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
        self.rank = group.rank()
        self.size = group.size()

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return self._lane.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """See `Transport.post`. Blocks until every peer has posted the sends that match `receives`.

        No deadlock: sends are published before anything is waited for, and all ranks post in one global order.
        """
        check_open(self, self._open)
        self._group.check_thread()
        check_messages(self, self._device, sends, receives)
        self._lane.follow(after)
        ready = self._lane.point()  # what the sends hold is final here: the receivers' copies run after it
        sent = [self._publish(message, ready) for message in sends]
        for message in receives:
            self._receive(message)
        arrived = self._lane.point(keep=[message.tensor for message in (*sends, *receives)])
        return _LocalFence(self._hub, arrived, sent)

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`. Values are pickled here too: ranks share nothing that processes could not."""
        check_open(self, self._open)
        self._group.check_thread()
        data = pickle.dumps(value)
        for peer in range(self.size):
            self._hub.put(("value", self._channel, self.rank, peer), data)
        return [pickle.loads(self._take("value", peer)) for peer in range(self.size)]

    def close(self) -> None:
        """Stop. The world goes on."""
        self._open = False

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
        return self._hub.take((kind, self._channel, peer, self.rank), peer, what)


class LocalWorld:
    """`world_size` virtual ranks in one process on one device: `with LocalWorld(4) as world: outs = world.run(fn)`.

    `device` is where the ranks compute: by default the current CUDA device, else the CPU. `timeout` bounds, in seconds,
    every wait of one rank for another.
    """

    def __init__(
        self, world_size: int, *, device: torch.device | str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: a world has at least one rank")
        self.device = indexed(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._timeout = timeout
        self._running = threading.Lock()
        self._open = True
        # Threads live as long as the world: CPU kernels keep a team of helper threads per calling thread.
        self._workers = [
            ThreadPoolExecutor(1, thread_name_prefix=f"ringattn-rank{rank}", initializer=self._prepare_thread)
            for rank in range(world_size)
        ]
        self._streams = [self._new_stream() for _ in range(world_size)]
        self._renew()

    def run(self, fn: Callable[[LocalGroup], T]) -> list[T]:
        """Call `fn(group)` once per virtual rank, all at the same time; their results in rank order.

        Whether gradients are recorded is the caller's setting. A backward pass that waits for other ranks belongs
        inside `fn`. If a rank raises, the others are woken, and the first error is raised here.
        """
        if not self._open:
            raise RuntimeError("this LocalWorld is closed: call run inside its with block")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this LocalWorld is already running: one run at a time, and none inside of fn")
        try:
            return self._run(fn)
        finally:
            self._running.release()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._open = False
        for worker in self._workers:
            worker.shutdown()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, fn: Callable[[LocalGroup], T]) -> list[T]:
        hub, call = self._hub, functools.partial(self._call, fn, torch.is_grad_enabled(), self._caller_stream())
        hub.begin()
        futures = [worker.submit(call, group) for worker, group in zip(self._workers, self._groups, strict=True)]
        try:
            wait(futures)
        except BaseException as error:  # the caller was interrupted: the ranks must not wait on
            hub.abort(error, "LocalWorld.run was interrupted")
            wait(futures)
        if hub.failure is not None:
            self._renew()
            raise hub.failure
        return [future.result() for future in futures]

    def _call(
        self, fn: Callable[[LocalGroup], T], grad: bool, caller: torch.cuda.Stream | None, group: LocalGroup
    ) -> T:
        hub = group._hub
        try:
            with group.adopted(), self._stream_of(group.rank(), caller), torch.set_grad_enabled(grad):
                return fn(group)
        except BaseException as error:
            hub.abort(error, f"raised by {group}")
            raise
        finally:
            hub.end(group.rank())

    def _renew(self) -> None:
        # After a failure messages may lie around that nobody fetched: new groups cannot see them.
        self._hub = Hub(len(self._workers), self._timeout)
        self._groups = [LocalGroup(self._hub, rank) for rank in range(len(self._workers))]

    def _prepare_thread(self) -> None:
        torch.autograd.set_multithreading_enabled(False)  # of this thread: see LocalGroup.check_thread
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _new_stream(self) -> torch.cuda.Stream | None:
        return new_stream(self.device) if self.device.type == "cuda" else None

    def _caller_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def _stream_of(self, rank: int, caller: torch.cuda.Stream | None) -> Iterator[None]:
        """A compute stream of the rank's own: after what the caller had enqueued, and over before `run` returns."""
        stream = self._streams[rank]
        if stream is None or caller is None:
            yield
            return
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
