"""Rank processes forked from a server that has imported everything, which starts once per test worker."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

FORKED = multiprocessing.get_context("forkserver")
# One list for all tests, because the first test starts the server. torch's backward needs symbolic shapes.
PRELOADED = [
    "torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.ring",
    "ringattn.comm.watchdog.watch", "pytest",
]  # fmt: skip
FORKED.set_forkserver_preload(PRELOADED)

MINUTE = timedelta(minutes=1)
CallOutcome = tuple[str, str, float]  # error name, error text, seconds


class RankProcesses:
    """Forked processes that run ``work(rank, pipe, *arguments)``; they are killed at the end of the context."""

    def __init__(self, size: int, work: Callable[..., None], *arguments: Any) -> None:
        pipes = [FORKED.Pipe() for _ in range(size)]
        self.ends = [parent_end for parent_end, _ in pipes]
        self.processes: list[Any] = [
            FORKED.Process(target=work, args=(rank, child_end, *arguments), daemon=True)
            for rank, (_, child_end) in enumerate(pipes)
        ]
        for process, (_, child_end) in zip(self.processes, pipes, strict=True):
            process.start()
            child_end.close()

    def receive(self, rank: int, timeout: float = 120.0) -> Any:
        """Return the next object that a rank sent; fail after ``timeout`` seconds."""
        assert self.ends[rank].poll(max(timeout, 0.0)), f"rank {rank} sent nothing for {timeout} s"
        return self.ends[rank].recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.close()
            process.kill()
            process.join()


def join_group(rank: int, size: int, store: Store | int, timeout: timedelta = MINUTE) -> None:
    """Join a gloo process group as ``rank``; ``store`` is a store or the port of another process's store."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # no rank exits while others still connect to it
    if isinstance(store, int):
        store = TCPStore("127.0.0.1", store, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


class GroupProcesses(RankProcesses):
    """Rank processes of one process group, whose store this process serves."""

    def __init__(self, size: int, work: Callable[..., None], *arguments: Any, timeout: timedelta = MINUTE) -> None:
        self.store = start_store()
        super().__init__(size, run_in_group, size, self.store.port, timeout, work, *arguments)


def start_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_in_group(
    rank: int, pipe: Connection, size: int, port: int, timeout: timedelta, work: Any, *arguments: Any
) -> None:
    """Join the process group and call ``work(rank, pipe, *arguments)``."""
    join_group(rank, size, port, timeout)
    work(rank, pipe, *arguments)


def group_results(
    size: int, body: Callable[[int], Any], *, ends: int | None = None, patience: float = 120
) -> list[Any]:
    """Run ``body(rank)`` in ``size`` processes of one group and return the results in rank order.

    Args:
        size: number of processes.
        body: function to run in each process.
        ends: rank whose process may exit without a result, or None.
        patience: seconds to wait for each result.
    """
    with GroupProcesses(size, send_result, body, timeout=timedelta(minutes=30)) as ranks:
        received = [ranks.receive(rank, patience) for rank in range(size) if rank != ends]
        failed = [text for text, _ in received if text]
        assert not failed, "\n".join(failed)
        for rank, process in enumerate(ranks.processes):
            process.join(patience)
            assert process.exitcode == 0 or rank == ends
        return [result for _, result in received]


def send_result(rank: int, pipe: Connection, body: Callable[[int], Any]) -> None:
    """Send ``body(rank)`` with an empty string, or None with the traceback, through the pipe."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    gc.freeze()  # the imported modules are large and stay alive
    try:
        result = "", body(rank)
    except BaseException:
        result = f"rank {rank}:\n{traceback.format_exc()}", None
    pipe.send_bytes(pickle.dumps(result))  # `send` would share tensors through this process's memory


def call_outcome(call: Callable[[], object]) -> CallOutcome:
    """Return error name, error text and seconds of a call; both texts are empty if nothing is raised."""
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun
