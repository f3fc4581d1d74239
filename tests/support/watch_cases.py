"""Shared parts of the watchdog tests: ranks in one process over an in-memory store, and scripted transfers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ringattn.comm import DONE, TransportError
from ringattn.comm.control import Control, KeyScope
from ringattn.comm.watchdog.watch import FailureGroup, Watch

from .transport_cases import HANGS

T = TypeVar("T")


class MemoryConnection:
    """A store connection that always answers, until ``problem`` is set."""

    patience = 10.0

    def __init__(self, store: Any) -> None:
        self.store = store
        self.scopes: defaultdict[str, KeyScope] = defaultdict(KeyScope)
        self.published: set[str] = set()
        self.problem: str | None = None
        self.asked = 0

    def call_store(self, do: Callable[[Any], T], timeout: float) -> T:
        self.asked += 1
        if self.problem is not None:
            raise TransportError(self.problem)
        return do(self.store)

    def enqueue(self, do: Callable[[Any], object]) -> None:
        do(self.store)

    def find_dead_peer(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        return None

    def close(self) -> None:
        """Keep the store open."""


class LaggingStore:
    """A store that applies a set only before its next other request, as a TCPStore may."""

    def __init__(self, store: Any) -> None:
        self._store, self._late = store, list[tuple[str, bytes]]()

    def set(self, key: str, value: bytes) -> None:
        self._late.append((key, value))

    def __getattr__(self, name: str) -> Any:
        while self._late:
            self._store.set(*self._late.pop(0))
        return getattr(self._store, name)


def memory_controls(size: int, patience: float = HANGS) -> list[Control]:
    store = HashStore()
    return [Control(MemoryConnection(store), rank, size, "test/", patience) for rank in range(size)]


def run_on_all(ranks: Sequence[T], fn: Callable[[T], Any]) -> list[Any]:
    """Return the results or errors of ``fn`` for every rank, computed concurrently."""

    def call(rank: T) -> Any:
        try:
            return fn(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


class ManualTransfer:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.problem: str | None = None

    def wait(self) -> None:
        assert self.over, "wait for a fence that is not done"
        if self.problem is not None:
            raise TransportError(self.problem)

    def done(self) -> bool:
        return self.over

    def finish(self, problem: str | None = None) -> None:
        self.over, self.problem = True, problem


class AbortRecorder:
    """A transport that records only its aborts."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def check(self) -> None:
        """Report no background error."""

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)


class WatchedRanks:
    """Watches of all ranks of a ring, ticked by the test; ``rings`` fails together with rank ``place``."""

    def __init__(
        self, size: int, *, deadline: float | None = 3.0, patience: float = HANGS, fatal: bool = False,
        rings: FailureGroup | None = None, place: int = 0, names: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.transports = [AbortRecorder() for _ in range(size)]
        self.ended: list[tuple[int, str]] = []
        self.controls = memory_controls(size, patience)
        for control in self.controls:
            control.names = names or control.names
        self.watches = [
            Watch(
                control,
                deadline=deadline,
                device=torch.device("cpu"),
                transports=lambda transport=transport: [transport],  # type: ignore[misc]
                on_fatal=(lambda text, rank=control.rank: self.ended.append((rank, text))) if fatal else None,  # type: ignore[misc]
                failure_group=rings if control.rank == place else None,
            )
            for control, transport in zip(self.controls, self.transports, strict=True)
        ]

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            for watch in self.watches:
                watch.tick()

    def connection(self, rank: int) -> MemoryConnection:
        connection = self.controls[rank]._connection
        assert isinstance(connection, MemoryConnection)
        return connection


class ManualClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e6
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def ranks_in_first_hop(size: int, **options: object) -> tuple[WatchedRanks, list[ManualTransfer]]:
    """Return ranks in the first hop of a forward, each with a transfer from the previous and to the next rank."""
    ranks = WatchedRanks(size, **options)  # type: ignore[arg-type]
    fences = [ManualTransfer() for _ in range(size)]
    for rank, (watch, fence) in enumerate(zip(ranks.watches, fences, strict=True)):
        watch.begin_loop("forward")
        watch.add_post("forward hop 1: K/V", fence, [DONE], [((rank + 1) % size, 64)], [((rank - 1) % size, 64)])
    return ranks, fences
