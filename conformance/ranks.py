"""Child processes that run a target: alive over many cases, ended by a deadline, started again after a failure."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch._C._distributed_c10d import TCPStore

from .worker import serve

FORKED = multiprocessing.get_context("forkserver")
PRELOADED = ("torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.conformance.worker")
START_SECONDS = 60.0  # for imports, beside the deadline of the first request
GRACE_SECONDS = 1.0  # for the other ranks to end after one failed
CLEAN_ERRORS = ("ValueError", "NotImplementedError", "MisuseError")  # after these on every rank, processes stay


class Reply(NamedTuple):
    """Answer of all ranks to one request."""

    status: str
    """``ok``, ``error``, ``hangs`` or ``dies``."""
    values: list[Any]
    """What every rank returned, if ``ok``."""
    error: str = ""
    """Name of the exception's type."""
    text: str = ""
    printed: str = ""
    """What the ranks printed to standard output."""


class Ranks:
    """Processes of one process group that load one target."""

    def __init__(self, world: int, target: str, device: str = "cpu", preload: Sequence[str] = ()) -> None:
        FORKED.set_forkserver_preload([*(preload or PRELOADED)])  # without effect if the server runs
        self.world, self.target, self.device = world, target, device
        self._folder = Path(tempfile.mkdtemp(prefix="ringattn-"))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._read = [0] * world

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pairs = [FORKED.Pipe() for _ in range(self.world)]
        self._pipes = [ours for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            log = str(self._folder / f"{rank}.log")
            arguments = rank, self.world, self._store.port, theirs, log, self.target, self.device
            self._processes.append(FORKED.Process(target=serve, args=arguments))
            self._processes[-1].start()
            theirs.close()

    def run(self, work: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> Reply:
        """Call ``work(target, rank, *arguments)`` on every rank; end the ranks if they do not all succeed."""
        if not self._processes:
            self._start()
            deadline += START_SECONDS
        end, answers = time.monotonic() + deadline, dict[int, Any]()
        for pipe in self._pipes:
            with suppress(OSError):  # the rank has died, which the wait below finds
                pipe.send((work, *arguments))
        while len(answers) < self.world:
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready: list[Any] = wait([*waiting], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    answers[waiting[pipe]] = ("dies", "", f"rank {waiting[pipe]} {self._last_words(waiting[pipe])}")
                if answers[waiting[pipe]][0] != "ok":
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return self._judge(answers)

    def _judge(self, answers: dict[int, Any]) -> Reply:
        printed = "".join(map(self._printed, range(self.world)))
        failed = [answer for answer in answers.values() if answer[0] != "ok"]
        is_refused = len(failed) == self.world and len({x[1] for x in failed}) == 1 and failed[0][1] in CLEAN_ERRORS
        if len(answers) - len(failed) < self.world and not is_refused:
            self.end()  # a rank may still wait for another, and messages may be left
        if failed:
            # A rank whose peer left fails by a connection error. The others have the cause.
            kind, name, text = min(failed, key=lambda answer: (answer[0] != "dies", "onnection" in answer[2]))
            return Reply(kind, [], name, text, printed)
        if late := sorted({*range(self.world)} - {*answers}):
            return Reply("hangs", [], text=f"no answer from rank {', '.join(map(str, late))}", printed=printed)
        values = [torch.load(io.BytesIO(answers[rank][1]), weights_only=False) for rank in range(self.world)]
        return Reply("ok", values, printed=printed)

    def _last_words(self, rank: int) -> str:
        self._processes[rank].join(GRACE_SECONDS)
        code = self._processes[rank].exitcode
        cause = f"is killed by {signal.Signals(-code).name}" if code and code < 0 else f"exits with code {code}"
        lines = (self._folder / f"{rank}.log.err").read_text(errors="replace").strip().splitlines()
        return f"{cause}{f': {lines[-1]}' if lines else ''}"

    def _printed(self, rank: int) -> str:
        """Return what a rank printed since the last request."""
        path = self._folder / f"{rank}.log"
        text = path.read_bytes()[self._read[rank] :] if path.exists() else b""
        self._read[rank] += len(text)
        return text.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and delete what they printed."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """End the processes and all that they started; the next request starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
