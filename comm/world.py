"""Virtual ranks, which are threads of one process that share one device, and the group of a single rank."""

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

from ..validators import RANKS
from .arg_checks import DEVICE, SECONDS
from .cuda_threads import new_stream
from .group_cache import close_group_cache, create_handle
from .transport import Fence, TransportError

# A rank that raises or returns wakes the others at once, so only a deadlock or extremely slow compute takes this long.
DEFAULT_TIMEOUT = 300.0


class WorldAborted(TransportError):
    """Another rank of the same `LocalWorld` raised; its error is the one that `run` raises."""


@dataclass(eq=False)
class Parcel:
    """A sent tensor on its way to its receiver, with the fences of both sides."""

    tensor: torch.Tensor | None
    ready_fence: Fence  # the tensor has its final content
    copied_fence: Fence | None = None  # the receiver has copied the tensor, so the sender may overwrite it


class Hub:
    """State that the ranks of one world share: mailboxes behind one lock, and the failure that ends all waits."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.names: Sequence[int] = range(size)  # rank numbers for errors
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # holds the small values that `Control` exchanges
        self.failure: BaseException | None = None
        self.timeout = timeout
        self._changed = threading.Condition()
        self._boxes: dict[Hashable, deque[Any]] = {}  # without empty boxes, because every transport adds new ones
        self._returned_ranks: set[int] = set()
        self._stopped: dict[int, str] = {}
        self._sub_hubs: dict[tuple[Hashable, tuple[int, ...]], Hub] = {}

    def sub_hub(self, name: Hashable, ranks: tuple[int, ...]) -> Hub:
        """Return the hub of a subset of the ranks, numbered from 0. The same name and ranks give the same hub."""
        with self._changed:
            if (name, ranks) not in self._sub_hubs:
                sub_hub = self._sub_hubs[name, ranks] = Hub(len(ranks), self.timeout)
                sub_hub.names, sub_hub.failure = ranks, self.failure
                sub_hub._returned_ranks.update(i for i, rank in enumerate(ranks) if rank in self._returned_ranks)
            return self._sub_hubs[name, ranks]

    def put(self, box: Hashable, item: object) -> None:
        """Append an item to a mailbox, and wake the ranks that wait."""
        with self._changed:
            self._boxes.setdefault(box, deque()).append(item)
            self._changed.notify_all()

    def take(self, box: Hashable, peer: int, what: str, channel: int, patience: float) -> Any:
        """Return the next item of a mailbox that `peer` fills, waiting at most `patience` seconds.

        `what` describes the wait in errors. `stop` on `channel` ends the wait.
        """
        with self._changed:
            self._wait_until(lambda: box in self._boxes, peer, what, channel, patience)
            item = self._boxes[box].popleft()
            if not self._boxes[box]:
                del self._boxes[box]
            return item

    def confirm_copy(self, parcel: Parcel, taken: Fence) -> None:
        """Give the sender of a parcel the fence of the receiver's copy, and drop the tensor."""
        with self._changed:
            parcel.copied_fence, parcel.tensor = taken, None
            self._changed.notify_all()

    def wait_until_copied(self, parcel: Parcel, peer: int, what: str, channel: int, patience: float) -> Fence:
        """Block until `peer` has enqueued its copy of the parcel, and return the fence of that copy.

        See `take` for the other arguments.
        """
        with self._changed:
            self._wait_until(lambda: parcel.copied_fence is not None, peer, what, channel, patience)
        assert parcel.copied_fence is not None
        return parcel.copied_fence

    def begin_run(self) -> None:
        """Reset the set of returned ranks before a run."""
        with self._changed:
            self._returned_ranks.clear()
            for sub_hub in self._sub_hubs.values():
                sub_hub.begin_run()

    def end_rank(self, rank: int) -> None:
        """Record that a rank has returned, and wake all ranks that wait for it."""
        with self._changed:
            self._returned_ranks.add(rank)
            self._changed.notify_all()
            for (_, ranks), sub_hub in self._sub_hubs.items():
                if rank in ranks:
                    sub_hub.end_rank(ranks.index(rank))

    def find_returned(self, peers: Iterable[int]) -> list[int]:
        """Return those of `peers` that have returned and will not act any more."""
        with self._changed:
            return sorted(self._returned_ranks.intersection(peers))

    def abort(self, error: BaseException, note: str) -> None:
        """End all waits with an error, and add `note` to it. If there was an earlier error, that one is kept."""
        with self._changed:
            if self.failure is None:
                error.add_note(note)
                self.failure = error
            self._changed.notify_all()
            for sub_hub in self._sub_hubs.values():
                sub_hub._give_up(self.failure)

    def _give_up(self, error: BaseException) -> None:
        """End all waits of this sub-hub because a rank of the whole world raised."""
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def stop(self, channel: int, reason: str) -> None:
        """End all waits on a channel with `reason`. If the channel was stopped before, the first reason is kept."""
        with self._changed:
            self._stopped.setdefault(channel, reason)
            self._changed.notify_all()

    def stop_reason(self, channel: int) -> str | None:
        """Return why this channel was stopped, or None."""
        return self._stopped.get(channel)

    def _wait_until(self, ready: Callable[[], bool], peer: int, what: str, channel: int, patience: float) -> None:
        """Wait until `ready` returns True. The caller holds the lock. See `take` for the other arguments.

        Raises:
            WorldAborted: a rank raised.
            TransportError: the channel was stopped, `peer` has returned, or `patience` seconds have passed.
        """
        deadline = time.monotonic() + patience
        while not ready():
            if self.failure is not None:
                raise WorldAborted(f"{what}: stopped waiting because another rank raised {type(self.failure).__name__}")
            if channel in self._stopped:
                raise TransportError(f"{what}: {self._stopped[channel]}")
            if peer in self._returned_ranks:
                raise TransportError(f"{what}: rank {self.names[peer]} has already returned")
            if not self._changed.wait(deadline - time.monotonic()):
                raise TransportError(
                    f"{what}: nothing happened for {patience:g} s. Check that all ranks post in the same order"
                )


class LocalGroup:
    """One virtual rank's membership in a `LocalWorld`: the argument of `fn`, and a value for every `group`."""

    def __init__(self, hub: Hub, rank: int, member: LocalGroup | None = None) -> None:
        self._hub = hub
        self._rank = rank
        self._world_member = member or self  # of the whole world
        self._thread: int | None = None
        self.channels = itertools.count()
        """Channel numbers of this rank's transports; they match because all ranks open transports in the same order."""
        self.handle = create_handle(self)  # stands for this member in graphs of torch.compile
        self._process = os.getpid()
        self.cache: dict[object, Any] = {}
        """Objects cached for this member and closed with it."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._hub.size

    def check_thread(self) -> None:
        """Raise if a wait for the other ranks could never end.

        The other ranks respond only while `LocalWorld.run` runs them, and only in their own threads. By default PyTorch
        runs the backward pass of all CUDA nodes of one device in an extra thread. `run` disables that for the threads
        of its ranks.

        Raises:
            RuntimeError: the caller is not the thread in which `run` calls `fn` for this rank.
        """
        if self._hub.size > 1 and (threading.get_ident() != self._world_member._thread or os.getpid() != self._process):
            raise RuntimeError(
                f"{self} was used from thread {threading.current_thread().name!r}. It works only in the thread in "
                "which LocalWorld.run calls fn for this rank. Call backward() inside fn"
            )

    def mesh(self, ring: int, ulysses: int) -> LocalMesh:
        """Return this rank's membership in a ``ring x ulysses`` mesh over the world.

        Raises:
            ValueError: an argument is not a number of ranks, or their product is not the size of the world.
        """
        shape = RANKS.check("ring", ring), RANKS.check("ulysses", ulysses)
        if ring * ulysses != self.size():
            raise ValueError(
                f"ring is {ring} and ulysses is {ulysses}; their product must be {self.size()}, the world size"
            )
        if shape not in self.cache:
            column, row = self._rank % ulysses, self._rank // ulysses
            lines = tuple(range(column, self.size(), ulysses)), tuple(range(row * ulysses, (row + 1) * ulysses))
            # Name each hub by shape and dimension: channels and keys belong to one group, even if two groups have the
            # same ranks.
            hubs = (self._hub.sub_hub((shape, dim), ranks) for dim, ranks in enumerate(lines))
            groups = (LocalGroup(hub, ranks.index(self._rank), self) for hub, ranks in zip(hubs, lines, strict=True))
            self.cache[shape] = LocalMesh(*groups)
        mesh: LocalMesh = self.cache[shape]
        return mesh

    def __repr__(self) -> str:
        return f"rank {self._world_member._rank} of LocalWorld({self._world_member._hub.size})"


@dataclass(frozen=True, eq=False)
class LocalMesh:
    """One virtual rank's membership in a two-dimensional mesh: rank ``r * ulysses.size() + u`` of its world."""

    ring: LocalGroup
    ulysses: LocalGroup

    def close(self) -> None:
        """Close the rings and transports cached for the ring group and the Ulysses group."""
        for group in (self.ring, self.ulysses):
            close_group_cache(group.cache)


@functools.cache
def single_rank() -> LocalGroup:
    """Return the group of this device alone, for a rank that computes by itself inside ``torch.distributed``."""
    return LocalGroup(Hub(1, DEFAULT_TIMEOUT), 0)


T = TypeVar("T")


class LocalWorld:
    """`world_size` virtual ranks in one process on one device.

    Example: `with LocalWorld(4) as world: outs = world.run(fn)`.

    Args:
        world_size: number of virtual ranks.
        device: device of all ranks. The default is the current CUDA device, or else the CPU.
        timeout: longest wait of one rank for another, in seconds.
    """

    def __init__(
        self, world_size: int, *, device: torch.device | str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        default = "cuda" if device is None and torch.cuda.is_available() else "cpu"
        world_size = RANKS.check("world_size", world_size)
        self.device: torch.device = DEVICE.check("device", default if device is None else device)
        self._timeout: float = SECONDS.check("timeout", timeout)
        self._running = threading.Lock()
        self._open = True
        self._process = os.getpid()
        # Keep the threads as long as the world, because CPU kernels keep helper threads for each calling thread.
        self._workers = [
            ThreadPoolExecutor(
                1, thread_name_prefix=f"ringattn-rank{rank}", initializer=_prepare_thread, initargs=(self.device,)
            )
            for rank in range(world_size)
        ]
        cuda = self.device.type == "cuda"
        self._streams = [new_stream(self.device) if cuda else None for _ in range(world_size)]
        self._groups: list[LocalGroup] = []
        # End the threads also if nobody calls close. They hold no reference to the world, so it can be collected.
        self._end = weakref.finalize(self, _end, self._workers, self._groups)
        self._end.atexit = False
        self._reset_groups()

    def run(self, fn: Callable[[LocalGroup], T]) -> list[T]:
        """Call `fn(group)` once per virtual rank, all at the same time, and return the results in rank order.

        Gradients are recorded if the caller records them. A backward pass that waits for other ranks belongs inside
        `fn`. If a rank raises, the other ranks are woken, and the first error is raised here.
        """
        if not callable(fn):
            raise ValueError(f"fn is {fn!r}; it must be a function of one argument, the rank's group")
        if not self._open:
            raise RuntimeError("this LocalWorld is closed; call run inside its with block")
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LocalWorld belongs to the process that this one was forked from; create a new LocalWorld here"
            )
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this LocalWorld is already running; call run once at a time, and never inside fn")
        try:
            return self._run(fn)
        finally:
            self._running.release()

    def close(self) -> None:
        """End the threads and close everything cached for the ranks. Idempotent."""
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
        """Run `fn` on all ranks, and raise the first error after all ranks have ended."""
        hub = self._hub
        caller = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        call = functools.partial(self._call, fn, torch.is_grad_enabled(), caller)
        hub.begin_run()
        futures = [worker.submit(call, group) for worker, group in zip(self._workers, self._groups, strict=True)]
        try:
            wait(futures)
        except BaseException as error:  # the caller was interrupted, so the ranks must stop waiting
            hub.abort(error, "LocalWorld.run was interrupted")
            wait(futures)
        if hub.failure is not None:
            self._reset_groups()
            raise hub.failure
        return [future.result() for future in futures]

    def _call(
        self, fn: Callable[[LocalGroup], T], grad: bool, caller: torch.cuda.Stream | None, group: LocalGroup
    ) -> T:
        """Run `fn` for one rank in the rank's thread. An error also ends the waits of all other ranks.

        `grad` and `caller` are the gradient mode and the current stream of the thread that called `run`.
        """
        hub = group._hub
        try:
            group._thread = threading.get_ident()  # the only thread that may act for this rank
            with self._rank_stream(group.rank(), caller), torch.set_grad_enabled(grad):
                return fn(group)
        except BaseException as error:
            hub.abort(error, f"raised by {group}")
            raise
        finally:
            group._thread = None
            hub.end_rank(group.rank())

    def _reset_groups(self) -> None:
        """Close everything cached for the ranks, and make new groups with a new hub."""
        # After a failure, mailboxes may hold messages that nobody fetched. A new hub starts without them.
        self._hub = Hub(len(self._workers), self._timeout)
        for group in self._groups:
            close_group_cache(group.cache)
        self._groups[:] = [LocalGroup(self._hub, rank) for rank in range(len(self._workers))]

    @contextmanager
    def _rank_stream(self, rank: int, caller: torch.cuda.Stream | None) -> Iterator[None]:
        """Make the rank's compute stream current, after the caller's work, and synchronise the stream at the end."""
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
    """Set up the thread of one rank: its device, and a backward pass that runs in the same thread."""
    torch.autograd.set_multithreading_enabled(False)  # for this thread; see LocalGroup.check_thread
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _end(workers: Sequence[ThreadPoolExecutor], groups: Sequence[LocalGroup]) -> None:
    """End the ranks' threads without waiting for them, and close everything cached for the ranks."""
    for worker in workers:
        worker.shutdown(wait=False)
    for group in groups:
        close_group_cache(group.cache)
