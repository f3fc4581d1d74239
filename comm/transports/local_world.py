"""A world of virtual ranks: the threads that run them, and how an error in one ends all."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..checked import DEVICE, RANKS, SECONDS
from ..kept import end
from .lanes import new_stream
from .local import LocalGroup
from .mailboxes import DEFAULT_TIMEOUT, Hub

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
        self._streams = [self._new_stream() for _ in range(world_size)]
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
        for group in self._groups:
            end(group.kept)
        self._groups[:] = [LocalGroup(self._hub, rank) for rank in range(len(self._workers))]

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


def _prepare_thread(device: torch.device) -> None:
    torch.autograd.set_multithreading_enabled(False)  # of this thread: see LocalGroup.check_thread
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _end(workers: Sequence[ThreadPoolExecutor], groups: Sequence[LocalGroup]) -> None:
    for worker in workers:
        worker.shutdown(wait=False)
    for group in groups:
        end(group.kept)
