"""Processes that begin with everything imported: forked from one that did so, once for all tests of a worker."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
# one list for all tests, since the first of them starts the server; symbolic shapes are torch's, for gradients
PRELOADED = [
    "torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.ring",
    "ringattn.comm.watchdog.watch", "pytest",
]  # fmt: skip
FORKED.set_forkserver_preload(PRELOADED)


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

    def receive(self, rank: int, timeout: float = 60.0) -> Any:
        """What a rank sends next."""
        assert self.ends[rank].poll(max(timeout, 0.0)), f"rank {rank} hangs"
        return self.ends[rank].recv()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.close()
            process.kill()
            process.join()
