"""Runs jobs in worker processes: one that crashes or hangs costs its job alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

J = TypeVar("J")
T = TypeVar("T")

SECONDS = 120.0
"""For one job: a backward kernel compiles in 3 to 10, and some candidates never."""

INTERPRET = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Failure:
    """Why a job has no result."""

    reason: str


class Pool(Generic[J, T]):
    """Calls ``work(job)`` in worker processes, ``workers`` at a time, which last until it is closed.

    ``work`` and jobs are pickled. Interrupted, it ends its processes and passes the interruption on.

    Args:
        seconds: for one job.
    """

    def __init__(self, work: Callable[[J], T], workers: int, seconds: float = SECONDS) -> None:
        self._work, self._workers, self._seconds = work, workers, seconds
        self._crew: list[_Worker[J, T]] = []

    def __enter__(self) -> Pool[J, T]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._crew:
            worker.end()
        self._crew.clear()

    def run(
        self, jobs: Sequence[J], done: Callable[[J, T | Failure], None], left: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Call ``done`` with each job's result as it comes; once no seconds are ``left`` no job is begun."""
        pending = deque(jobs)
        while pending or any(worker.busy for worker in self._crew):
            while pending and left() > 0 and (worker := self._idle()) is not None:
                worker.start(pending.popleft(), self._seconds)
            if not any(worker.busy for worker in self._crew):
                return
            for worker in self._ready():
                job, result = worker.take()
                if not worker.alive:
                    self._crew.remove(worker)
                done(job, result)

    def _idle(self) -> _Worker[J, T] | None:
        for worker in self._crew:
            if not worker.busy:
                return worker
        if len(self._crew) < self._workers:
            self._crew.append(_Worker(self._work))
            return self._crew[-1]
        return None

    def _ready(self) -> list[_Worker[J, T]]:
        """Busy workers that have answered, died or run out of time; waits for the first."""
        busy = [worker for worker in self._crew if worker.busy]
        left = max(0.0, min(worker.ends for worker in busy) - time.monotonic())
        answered = {*wait([worker.connection for worker in busy], left)}
        now = time.monotonic()
        return [worker for worker in busy if worker.connection in answered or now >= worker.ends]


class _Worker(Generic[J, T]):
    def __init__(self, work: Callable[[J], T]) -> None:
        # not forked: the parent has threads, and an interpreter of Triton that a compiler must not have
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        with _compiling():
            self._process.start()
        theirs.close()
        self._job: J | None = None
        self.busy = False
        self.ends = 0.0
        self.alive = True

    def start(self, job: J, seconds: float) -> None:
        self._job, self.busy, self.ends = job, True, time.monotonic() + seconds
        with suppress(ConnectionError):  # it died between two jobs: `take` says so
            self.connection.send(job)

    def take(self) -> tuple[J, T | Failure]:
        """What became of the job that it had."""
        job, self._job, self.busy = self._job, None, False
        assert job is not None
        try:
            if self.connection.poll():
                result: T | Failure = self.connection.recv()
                return job, result
            self.end()
            return job, Failure("it did not end in time, and was ended")
        except (EOFError, ConnectionError):
            self._process.join()
            self.end()
            return job, Failure(f"its process died with exit code {self._process.exitcode}")

    def end(self) -> None:
        """End the process, whatever it does."""
        self.alive = False
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends us
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result = work(job)
        except Exception as error:
            result = Failure(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        connection.send(result)


@contextmanager
def _compiling() -> Iterator[None]:
    """The environment of a process that compiles: Triton reads this one when kernels are defined."""
    before = os.environ.pop(INTERPRET, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[INTERPRET] = before
