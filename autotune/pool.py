"""Runs jobs in worker processes: one that crashes or hangs costs its job alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120.0
"""For one job: a backward kernel compiles in 3 to 10, and some candidates never."""

INTERPRET = "TRITON_INTERPRET"


@dataclass(frozen=True)
class Failure:
    """Why a job has no result."""

    reason: str


class Pool:
    """Calls ``work(job)`` in worker processes, ``workers`` at a time, which last until it is closed.

    A thread per process hands it jobs and ends it where it hangs. ``work`` and jobs are pickled.

    Args:
        seconds: for one job.
    """

    def __init__(self, work: Callable[[Any], Any], workers: int, seconds: float = SECONDS) -> None:
        self._work, self._seconds = work, seconds
        self._threads, self._own = ThreadPoolExecutor(workers), threading.local()
        self._lock, self._closed = threading.Lock(), False
        self._started: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            for process in self._started:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.join()

    def run(
        self, jobs: Sequence[Any], done: Callable[[Any, Any], None], left: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Call ``done`` with each job and its result or :class:`Failure`, as they come.

        Without seconds ``left`` no job is begun, and those that run are ended without a result.
        """
        waiting = {self._threads.submit(self._result, job, left): job for job in jobs}
        for future in as_completed(waiting):
            if (result := future.result()) is not None:
                done(waiting[future], result)

    def _result(self, job: Any, left: Callable[[], float]) -> Any:
        """What the worker of this thread makes of a job; None where the seconds do not let it end."""
        seconds = min(left(), self._seconds)
        if seconds <= 0 or self._closed:
            return None
        process, connection = getattr(self._own, "worker", None) or self._start()
        try:
            connection.send(job)
            if connection.poll(seconds):
                return connection.recv()
            process.kill()
            self._own.worker = None
            return None if seconds < self._seconds else Failure("it did not end in time, and was ended")
        except (EOFError, ConnectionError):
            process.join()
            failed = Failure(f"its process died with exit code {process.exitcode}")
        self._own.worker = None
        return failed

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        # not forked: the parent has threads, and an interpreter of Triton that a compiler must not have
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._lock:
            interpret = os.environ.pop(INTERPRET, None)  # Triton reads it when kernels are defined
            try:
                process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
                process.start()
            finally:
                if interpret is not None:
                    os.environ[INTERPRET] = interpret
            self._started.append(process)
            if self._closed:
                process.kill()
        theirs.close()
        self._own.worker = process, ours
        return process, ours


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
