"""Runs jobs in worker processes: one that crashes or hangs costs its job alone."""

from __future__ import annotations

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


def run_jobs(
    jobs: Sequence[J],
    work: Callable[[J], T],
    *,
    workers: int,
    done: Callable[[J, T | Failure], None],
    seconds: float = SECONDS,
) -> None:
    """Call ``work(job)`` for every job, ``workers`` at a time, and ``done`` with each result as it comes.

    ``work`` and jobs are pickled. Interrupted, it ends its processes and passes the interruption on.
    """
    pending = deque(jobs)
    crew: list[_Worker[J, T]] = []
    try:
        while pending or any(worker.busy for worker in crew):
            while pending and (worker := _idle(crew, workers, work)) is not None:
                worker.start(pending.popleft(), seconds)
            for worker in _ready(crew):
                job, result = worker.take()
                if not worker.alive:
                    crew.remove(worker)
                done(job, result)
    finally:
        for worker in crew:
            worker.end()


def _idle(crew: list[_Worker[J, T]], most: int, work: Callable[[J], T]) -> _Worker[J, T] | None:
    for worker in crew:
        if not worker.busy:
            return worker
    if len(crew) < most:
        crew.append(_Worker(work))
        return crew[-1]
    return None


def _ready(crew: list[_Worker[J, T]]) -> list[_Worker[J, T]]:
    """Busy workers that have answered, died or run out of time; waits for the first."""
    busy = [worker for worker in crew if worker.busy]
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
