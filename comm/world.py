"""Virtual ranks: threads of one process that share one device; also the world of one rank."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..kinds import RANKS
from .checked import DEVICE, SECONDS
from .cuda_threads import new_stream
from .kept import end, handle_of
from .transport import Fence, TransportError

# A rank that waits this long hangs: one that raised or returned wakes the others at once, so only a real deadlock, or
# compute far slower than any test's, gets here.
DEFAULT_TIMEOUT = 300.0


class WorldAborted(TransportError):
    """Another rank of the same `LocalWorld` raised; its error is the one that `run` raises."""


@dataclass(eq=False)
class Parcel:
    """A sent tensor on its way to its receiver, and the news that it has been copied."""

    tensor: torch.Tensor | None
    ready: Fence  # the bytes are there
    taken: Fence | None = None  # the receiver's copy is over: the sender may write again


class Hub:
    """What the ranks of one world share: mailboxes behind one lock, and why nobody should wait any longer."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.names: Sequence[int] = range(size)  # of the ranks, in errors
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # for `Control`: small values by name
        self.failure: BaseException | None = None
        self.timeout = timeout
        self._changed = threading.Condition()
        self._boxes: dict[Hashable, deque[Any]] = {}  # none that is empty: every transport has its own
        self._returned: set[int] = set()
        self._stopped: dict[int, str] = {}
        self._lines: dict[tuple[Hashable, tuple[int, ...]], Hub] = {}

    def line(self, name: Hashable, ranks: tuple[int, ...]) -> Hub:
        """What some of the ranks share, which are 0, 1, 2, ... there; for each of them the same by the same name."""
        with self._changed:
            if (name, ranks) not in self._lines:
                made = self._lines[name, ranks] = Hub(len(ranks), self.timeout)
                made.names, made.failure = ranks, self.failure
                made._returned.update(i for i, rank in enumerate(ranks) if rank in self._returned)
            return self._lines[name, ranks]

    def put(self, box: Hashable, item: object) -> None:
        """Add an item to a box."""
        with self._changed:
            self._boxes.setdefault(box, deque()).append(item)
            self._changed.notify_all()

    def take(self, box: Hashable, peer: int, what: str, channel: int, patience: float) -> Any:
        """Take the next item of a box that `peer` fills on a channel; wait for it `patience` seconds at most."""
        with self._changed:
            self._wait_until(lambda: box in self._boxes, peer, what, channel, patience)
            item = self._boxes[box].popleft()
            if not self._boxes[box]:
                del self._boxes[box]
            return item

    def settle(self, parcel: Parcel, taken: Fence) -> None:
        """Tell the sender of a parcel where its copy ends."""
        with self._changed:
            parcel.taken, parcel.tensor = taken, None  # the bytes are no longer needed for it
            self._changed.notify_all()

    def taken(self, parcel: Parcel, peer: int, what: str, channel: int, patience: float) -> Fence:
        """The point where `peer` has copied the parcel; blocks until it has enqueued that copy."""
        with self._changed:
            self._wait_until(lambda: parcel.taken is not None, peer, what, channel, patience)
        assert parcel.taken is not None
        return parcel.taken

    def begin(self) -> None:
        """Every rank is about to run."""
        with self._changed:
            self._returned.clear()
            for line in self._lines.values():
                line.begin()

    def end(self, rank: int) -> None:
        """A rank has returned: whoever waits for it is told."""
        with self._changed:
            self._returned.add(rank)
            self._changed.notify_all()
            for (_, ranks), line in self._lines.items():
                if rank in ranks:
                    line.end(ranks.index(rank))

    def returned(self, peers: Iterable[int]) -> list[int]:
        """Which of these have returned: they will not do anything any more."""
        with self._changed:
            return sorted(self._returned.intersection(peers))

    def abort(self, error: BaseException, note: str) -> None:
        """Wake every waiting rank; the first error stays."""
        with self._changed:
            if self.failure is None:
                error.add_note(note)
                self.failure = error
            self._changed.notify_all()
            for line in self._lines.values():
                line._give_up(self.failure)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def stop(self, channel: int, reason: str) -> None:
        """Wake every rank that waits on a channel; the first reason stays."""
        with self._changed:
            self._stopped.setdefault(channel, reason)
            self._changed.notify_all()

    def stopped(self, channel: int) -> str | None:
        """Why nothing moves on this channel any more."""
        return self._stopped.get(channel)

    def _wait_until(self, ready: Callable[[], bool], peer: int, what: str, channel: int, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not ready():
            if self.failure is not None:
                raise WorldAborted(f"{what}: given up, another rank raised {type(self.failure).__name__}")
            if channel in self._stopped:
                raise TransportError(f"{what}: {self._stopped[channel]}")
            if peer in self._returned:
                raise TransportError(f"{what}: rank {self.names[peer]} has returned and will never get there")
            if not self._changed.wait(deadline - time.monotonic()):
                raise TransportError(f"{what}: nothing happened for {patience:g} s; do all ranks post in one order?")


class LocalGroup:
    """One virtual rank's membership in its `LocalWorld`; what `fn` is called with, and what `group=` takes."""

    def __init__(self, hub: Hub, rank: int, member: LocalGroup | None = None) -> None:
        self._hub = hub
        self._rank = rank
        self._member = member or self  # of the whole world
        self._thread: int | None = None
        self.channels = itertools.count()
        """Numbers of this rank's transports: every rank opens its own in the same order."""
        self.number = handle_of(self)  # what names this member in a graph of torch.compile
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
        if self._hub.size > 1 and (threading.get_ident() != self._member._thread or os.getpid() != self._process):
            raise RuntimeError(
                f"{self} was used from thread {threading.current_thread().name!r}, outside of the call that "
                "LocalWorld.run makes for this rank: its peers only answer there. Call backward() inside fn"
            )

    def mesh(self, ring: int, ulysses: int) -> LocalMesh:
        """This world as ``ring x ulysses`` ranks, for ``group=`` of what takes two dimensions; made once, and kept.

        Raises:
            ValueError: they are not numbers of ranks, or not as many in all as the world has.
        """
        shape = RANKS.of("ring", ring), RANKS.of("ulysses", ulysses)
        if ring * ulysses != self.size():
            raise ValueError(f"ring is {ring}, ulysses is {ulysses}: {self} has {self.size()} ranks in all")
        if shape not in self.kept:
            column, row = self._rank % ulysses, self._rank // ulysses
            lines = tuple(range(column, self.size(), ulysses)), tuple(range(row * ulysses, (row + 1) * ulysses))
            # by shape and dimension: channels and keys are counted by group, also where two groups are the same ranks
            hubs = (self._hub.line((shape, dim), ranks) for dim, ranks in enumerate(lines))
            groups = (LocalGroup(hub, ranks.index(self._rank), self) for hub, ranks in zip(hubs, lines, strict=True))
            self.kept[shape] = LocalMesh(*groups)
        made: LocalMesh = self.kept[shape]
        return made

    def __repr__(self) -> str:
        return f"rank {self._member._rank} of LocalWorld({self._member._hub.size})"


@dataclass(frozen=True, eq=False)
class LocalMesh:
    """One virtual rank's membership in a mesh of two dimensions: rank ``r * ulysses.size() + u`` of its world."""

    ring: LocalGroup
    ulysses: LocalGroup

    def close(self) -> None:
        """End what is kept for its two groups."""
        for group in (self.ring, self.ulysses):
            end(group.kept)


@functools.cache
def single_rank() -> LocalGroup:
    """The group of this device alone: for ``group=`` of a rank that computes by itself inside ``torch.distributed``."""
    return LocalGroup(Hub(1, DEFAULT_TIMEOUT), 0)


T = TypeVar("T")


class LocalWorld:
    """`world_size` virtual ranks in one process on one device: `with LocalWorld(4) as world: outs = world.run(fn)`.

    `device` is where the ranks compute: by default the current CUDA device, else the CPU. `timeout` bounds, in seconds,
    every wait of one rank for another.
    """

    def __init__(
        self, world_size: int, *, device: torch.device | str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        default = "cuda" if device is None and torch.cuda.is_available() else "cpu"
        world_size = RANKS.of("world_size", world_size)
        self.device: torch.device = DEVICE.of("device", default if device is None else device)
        self._timeout: float = SECONDS.of("timeout", timeout)
        self._running = threading.Lock()
        self._open = True
        self._process = os.getpid()
        # Threads live as long as the world: CPU kernels keep a team of helper threads per calling thread.
        self._workers = [
            ThreadPoolExecutor(
                1, thread_name_prefix=f"ringattn-rank{rank}", initializer=_prepare_thread, initargs=(self.device,)
            )
            for rank in range(world_size)
        ]
        cuda = self.device.type == "cuda"
        self._streams = [new_stream(self.device) if cuda else None for _ in range(world_size)]
        self._groups: list[LocalGroup] = []
        # Also where nobody closes: the threads hold no world, or it would never go.
        self._end = weakref.finalize(self, _end, self._workers, self._groups)
        self._end.atexit = False
        self._renew()

    def run(self, fn: Callable[[LocalGroup], T]) -> list[T]:
        """Call `fn(group)` once per virtual rank, all at the same time; their results in rank order.

        Whether gradients are recorded is the caller's setting. A backward pass that waits for other ranks belongs
        inside `fn`. If a rank raises, the others are woken, and the first error is raised here.
        """
        if not callable(fn):
            raise ValueError(f"fn is {fn!r}: it must be a function of one argument, the rank's group")
        if not self._open:
            raise RuntimeError("this LocalWorld is closed: call run inside its with block")
        if os.getpid() != self._process:
            raise RuntimeError("this LocalWorld has its threads in the process that this one was forked from")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this LocalWorld is already running: one run at a time, and none inside of fn")
        try:
            return self._run(fn)
        finally:
            self._running.release()

    def close(self) -> None:
        """End the threads, and the rings that were kept for the ranks. Idempotent."""
        self._open = False
        if os.getpid() == self._process:
            self._end()
            for worker in self._workers:
                worker.shutdown()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, fn: Callable[[LocalGroup], T]) -> list[T]:
        hub = self._hub
        caller = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        call = functools.partial(self._call, fn, torch.is_grad_enabled(), caller)
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
            group._thread = threading.get_ident()  # the only one that may act for this rank
            with self._stream_of(group.rank(), caller), torch.set_grad_enabled(grad):
                return fn(group)
        except BaseException as error:
            hub.abort(error, f"raised by {group}")
            raise
        finally:
            group._thread = None
            hub.end(group.rank())

    def _renew(self) -> None:
        # After a failure messages may lie around that nobody fetched: new groups cannot see them.
        self._hub = Hub(len(self._workers), self._timeout)
        for group in self._groups:
            end(group.kept)
        self._groups[:] = [LocalGroup(self._hub, rank) for rank in range(len(self._workers))]

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


def _prepare_thread(device: torch.device) -> None:
    torch.autograd.set_multithreading_enabled(False)  # of this thread: see LocalGroup.check_thread
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _end(workers: Sequence[ThreadPoolExecutor], groups: Sequence[LocalGroup]) -> None:
    for worker in workers:
        worker.shutdown(wait=False)
    for group in groups:
        end(group.kept)
