"""Pool of worker processes in which a crash or a hang costs one job only."""

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

JOB_TIMEOUT = 120.0
"""Timeout of one job. A backward kernel compiles in 3 to 10 seconds; some candidates never finish."""

INTERPRET = "TRITON_INTERPRET"


@dataclass(frozen=True)
class JobFailure:
    """Reason why a job has no result."""

    reason: str


class Pool:
    """Pool of ``workers`` persistent processes that call ``work(job)``.

    A thread per process sends jobs, and kills the process if a job takes longer than ``seconds``. ``work`` and the jobs
    are pickled.
    """

    def __init__(self, work: Callable[[Any], Any], workers: int, seconds: float = JOB_TIMEOUT) -> None:
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
        self,
        jobs: Sequence[Any],
        on_result: Callable[[Any, Any], None],
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Call ``on_result`` with each job and its result or :class:`JobFailure`, in order of completion.

        When ``seconds_left`` returns 0, running jobs are killed without a result and no job is started.
        """
        futures = {self._threads.submit(self._result, job, seconds_left): job for job in jobs}
        for future in as_completed(futures):
            if (result := future.result()) is not None:
                on_result(futures[future], result)

    def _result(self, job: Any, left: Callable[[], float]) -> Any:
        """Run a job in this thread's worker process and return its result.

        Returns a `JobFailure` if the worker died or the job exceeded its own limit, and None if the seconds of
        ``left()`` ended before.
        """
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
            return None if seconds < self._seconds else JobFailure("it did not end in time and was killed")
        except (EOFError, ConnectionError):
            process.join()
            failure = JobFailure(f"its process died with exit code {process.exitcode}")
        self._own.worker = None
        return failure

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        # spawn, because the parent has threads, and may have loaded Triton's interpreter instead of its compiler
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._lock:
            interpret = os.environ.pop(INTERPRET, None)  # Triton reads the variable when kernels are defined
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
    """Run jobs from a connection in a worker process until it closes. An exception becomes a `JobFailure`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which kills the workers
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result = work(job)
        except Exception as error:
            result = JobFailure(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        connection.send(result)
