"""The transfer stream of the host: one thread that runs transfers in order, beside compute."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from ..transport import TransportError

# what the end of a process grants a transfer that has just been interrupted
FAREWELL_SECONDS = 1.0

Work = Callable[[], None]
"""Blocks until its transfers are over; raises where they failed."""


class HostFence:
    """Transfers that a `HostStream` runs; `wait` blocks until they are over."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._problem: str | None = None
        self.over_at = 0.0
        """When the transfers were over, by `time.perf_counter`; 0 until then."""

    def wait(self) -> None:
        """Block until every transfer is over; `TransportError` where one failed or was aborted."""
        self._over.wait()
        if self._problem is not None:
            raise TransportError(self._problem)

    def done(self) -> bool:
        """Whether the transfers are over, also by failure."""
        return self._over.is_set()

    def finish(self, problem: str | None) -> None:
        """Let go of whoever waits. The first verdict stays; under the stream's lock."""
        if not self._over.is_set():
            self._problem = problem
            self.over_at = time.perf_counter()
            self._over.set()


class HostStream:
    """Runs work in the order of `submit`, which never blocks.

    What fails once has failed for good: what was sent on from a failed transfer would be garbage, so that everything
    submitted later fails with the same words.

    `interrupt` makes the work that runs right now raise; it is called from another thread, at most once.
    """

    def __init__(self, name: str, interrupt: Work) -> None:
        self._name = name
        self._interrupt = interrupt
        self._queue: queue.SimpleQueue[tuple[Work, HostFence] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: deque[HostFence] = deque()  # of what runs, and of what is queued
        self._running = False
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self.stopped = threading.Event()
        """Set by `abort`: work that only sleeps should wait for this."""

    def submit(self, work: Work) -> HostFence:
        """Run `work` after everything submitted before. Raises `TransportError` once something has failed."""
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
        """Fail all that is not over, at once. From any thread; idempotent."""
        with self._lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            self._problem = self._problem or problem
            running = self._running
            while self._waiting:
                self._waiting.popleft().finish(self._problem)
        if running:
            self._interrupt()

    def close(self) -> None:
        """End the thread, after what is queued."""
        self._queue.put(None)

    def _start(self) -> None:
        _streams().add(self)
        # A daemon: a transfer that nothing interrupts must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Buffers that were made in inference mode may only be written in it; ordinary ones may be, too.
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                self._run_one(*item)
                del item  # and with it the tensors

    def _run_one(self, work: Work, fence: HostFence) -> None:
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
        self.abort("the process ends")
        self.close()
        if self._thread is not None:
            self._thread.join(FAREWELL_SECONDS)


@functools.cache
def _streams() -> weakref.WeakSet[HostStream]:
    streams: weakref.WeakSet[HostStream] = weakref.WeakSet()

    def end_all() -> None:
        # A thread that comes back from a backend while the interpreter is being torn down would crash it.
        for stream in list(streams):
            stream._end()

    atexit.register(end_all)
    return streams
