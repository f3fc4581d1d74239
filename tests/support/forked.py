"""Processes that begin with everything imported: forked from one that did so, once for all tests of a worker."""

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
# one list for all tests, since the first of them starts the server; symbolic shapes are torch's, for gradients
PRELOADED = [
    "torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.ring",
    "ringattn.comm.watchdog.watch", "pytest",
]  # fmt: skip
FORKED.set_forkserver_preload(PRELOADED)

MINUTE = timedelta(minutes=1)
Ending = tuple[str, str, float]  # name of an error, its text, seconds that it took


class Ranks:
    """Processes that run ``work(rank, pipe, *arguments)``, each with the other end of a pipe; killed at the end."""

    def __init__(self, size: int, work: Callable[..., None], *arguments: Any) -> None:
        pipes = [FORKED.Pipe() for _ in range(size)]
        self.ends = [here for here, _ in pipes]
        self.processes: list[Any] = [
            FORKED.Process(target=work, args=(rank, there, *arguments), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process, (_, there) in zip(self.processes, pipes, strict=True):
            process.start()
            there.close()

    def receive(self, rank: int, timeout: float = 120.0) -> Any:
        """What a rank sends next."""
        assert self.ends[rank].poll(max(timeout, 0.0)), f"rank {rank} hangs"
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


def join(rank: int, size: int, store: Store | int, timeout: timedelta = MINUTE) -> None:
    """Become a rank of a process group over gloo; ``store`` may be the port of one that another process serves."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # nobody ends while others still connect to it
    if isinstance(store, int):
        store = TCPStore("127.0.0.1", store, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


class Group(Ranks):
    """The ranks of one process group, whose store this process serves."""

    def __init__(self, size: int, work: Callable[..., None], *arguments: Any, timeout: timedelta = MINUTE) -> None:
        self.store = serve()
        super().__init__(size, joined, size, self.store.port, timeout, work, *arguments)


def serve() -> TCPStore:
    """A store for processes of this machine, here."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def joined(rank: int, pipe: Connection, size: int, port: int, timeout: timedelta, work: Any, *arguments: Any) -> None:
    join(rank, size, port, timeout)
    work(rank, pipe, *arguments)


def results(size: int, body: Callable[[int], Any], *, ends: int | None = None, patience: float = 120) -> list[Any]:
    """What ``body(rank)`` returns in the processes of one group; ``ends`` is a rank that returns nothing."""
    with Group(size, send_result, body, timeout=timedelta(minutes=30)) as ranks:
        received = [ranks.receive(rank, patience) for rank in range(size) if rank != ends]
        failed = [text for text, _ in received if text]
        assert not failed, "\n".join(failed)
        for rank, process in enumerate(ranks.processes):
            process.join(patience)
            assert process.exitcode == 0 or rank == ends
        return [result for _, result in received]


def send_result(rank: int, pipe: Connection, body: Callable[[int], Any]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    gc.freeze()  # what is imported is large, and stays
    try:
        result = "", body(rank)
    except BaseException:
        result = f"rank {rank}:\n{traceback.format_exc()}", None
    pipe.send_bytes(pickle.dumps(result))  # `send` would keep tensors in the memory of this process


def ending(call: Callable[[], object]) -> Ending:
    """How a call ends; a name of "" where it raises nothing."""
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun
