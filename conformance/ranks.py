"""Child processes that run a target: alive over many cases, ended by a deadline, started again after a failure."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ..bench.common.ranks import LOOPBACK, LaunchedRank, open_store, rank_environment
from .protocol import load_target

FORKED = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.conformance.referee"]
TIMEOUT = timedelta(minutes=30)  # the parent ends ranks that hang, by its own deadline
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
    notes: str = ""
    """What the ranks did beside the request: fork, or print to standard output."""


class Ranks:
    """Processes of one process group that load one target."""

    def __init__(self, world: int, target: str, device: str = "cpu") -> None:
        FORKED.set_forkserver_preload(PRELOADED)  # without effect if the server runs
        self.world, self.target, self.device = world, target, device
        self._folder = Path(tempfile.mkdtemp(prefix="ringattn-"))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._printed = [0] * world
        """Number of bytes that each rank has printed until the last request."""

    def _start(self) -> None:
        self._store, pairs = open_store(), [FORKED.Pipe() for _ in range(self.world)]
        self._pipes = [ours for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            place = LaunchedRank(rank, self.world, rank, self.world)
            arguments = place, self._store.port, theirs, self._log(rank), self.target, self.device
            self._processes.append(FORKED.Process(target=serve, args=arguments))
            self._processes[-1].start()
            theirs.close()

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def run(self, work: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> Reply:
        """Call ``work(target, rank, *arguments)`` on every rank; end the ranks if they do not all succeed."""
        if not self._processes:
            self._start()
            deadline += START_SECONDS
        end, answers = time.monotonic() + deadline, dict[int, Any]()
        for connection in self._pipes:
            with suppress(OSError):  # the rank has died, which the wait below finds
                connection.send((work, *arguments))
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready: list[Any] = wait([*waiting], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = Reply("dies", [], text=f"rank {rank} {self._last_words(rank)}")
                if answers[rank].status != "ok":
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return self._join(answers)._replace(notes=self._notes(answers))

    def _join(self, answers: dict[int, Reply]) -> Reply:
        failed = [reply for reply in answers.values() if reply.status != "ok"]
        errors = {reply.error for reply in failed}
        is_refused = len(failed) == self.world and len(errors) == 1 and errors <= {*CLEAN_ERRORS}
        if len(answers) - len(failed) < self.world and not is_refused:
            self.end()  # a rank may still wait for another, and messages may be left
        if failed:
            # A rank whose peer left fails by a connection error. The others have the cause.
            return min(failed, key=lambda reply: (reply.status != "dies", "onnection" in reply.text))
        if late := sorted({*range(self.world)} - {*answers}):
            return Reply("hangs", [], text=f"no answer from rank {', '.join(map(str, late))}")
        return Reply("ok", [value for rank in range(self.world) for value in answers[rank].values])

    def _last_words(self, rank: int) -> str:
        self._processes[rank].join(GRACE_SECONDS)
        code = self._processes[rank].exitcode
        cause = f"is killed by {signal.Signals(-code).name}" if code and code < 0 else f"exits with code {code}"
        lines = self._log(rank).with_suffix(".err").read_text(errors="replace").strip().splitlines()
        return f"{cause}{f': {lines[-1]}' if lines else ''}"

    def _notes(self, answers: dict[int, Reply]) -> str:
        notes, printed = {reply.notes for reply in answers.values() if reply.notes}, b""
        for rank, start in enumerate(self._printed):
            text = self._log(rank).read_bytes()[start:] if self._log(rank).exists() else b""
            self._printed[rank], printed = start + len(text), printed + text
        lines = printed.decode(errors="replace").strip().splitlines()
        return "; ".join([*notes, *(f"it prints {line[:60]!r}" for line in lines[:1])])

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


def _side_effects(forks: set[str]) -> str:
    """Return ``forks`` and which of torch's defaults the target changed, as one text; undo these changes."""
    is_changed = {
        "dtype": torch.get_default_dtype() != torch.float32, "device": torch.get_default_device().type != "cpu",
        "grad mode": not torch.is_grad_enabled(),
    }  # fmt: skip
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    return "; ".join([*forks, *(f"it changes the default {name}" for name in is_changed if is_changed[name])])


def serve(place: LaunchedRank, port: int, pipe: Connection, log: Path, path: str, kind: str) -> None:
    """Join the process group and answer requests, ``(work, *arguments)``, by pickled replies until the pipe closes.

    Output goes to the file ``log``. A copy of this process that the target forked ends when the target returns in it.
    """
    os.setsid()  # one signal ends this process and all that the target starts
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    for stream, name in ((1, log), (2, log.with_suffix(".err"))):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    forks, own = set[str](), os.getpid()
    os.register_at_fork(after_in_parent=lambda: forks.add("it forks processes"))
    torch.set_num_threads(1)
    os.environ |= rank_environment(place, port) | {"TORCH_DIST_INIT_BARRIER": "1", "GLOO_SOCKET_IFNAME": "lo"}
    device, backend = place.shared_device(kind), "gloo"
    target: Any = None
    if kind == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=TIMEOUT)
    while True:
        try:
            work, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        forks.clear()
        try:
            target = target or replace(load_target(path), device=device)
            value = work(target, place.rank, *arguments)
            answer = pickle.dumps(Reply("ok", [value], notes=_side_effects(forks)))
        except BaseException as error:  # SystemExit of a target, too
            text = str(error).encode(errors="replace").decode()
            answer = pickle.dumps(Reply("error", [], type(error).__name__, text, _side_effects(forks)))
        if os.getpid() != own:
            os._exit(0)
        with suppress(ValueError):  # the target may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        pipe.send_bytes(answer)
