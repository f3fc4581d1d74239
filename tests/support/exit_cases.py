"""A process that exits while threads of ringattn are inside torch: ``python -m ...exit_cases CODE KIND...``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from ringattn.comm import TransportError
from ringattn.comm.control import StoreConnection
from ringattn.comm.cuda_threads import CPU_DEVICE, start_thread
from ringattn.comm.transports.process_group import TransferThread
from ringattn.comm.watchdog.watch import _WATCHDOG

# Longer than the interpreter's exit ever waited for a thread.
SECONDS = 2.0
SERVER = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class LateDeletedObject:
    """Object that the interpreter deletes late, and that delays the exit until our threads have ended."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.threads: list[int] = []

    def __del__(self, kill: Any = os.kill, exists: Any = os.path.exists, sleep: Any = time.sleep) -> None:
        if self.server is not None:
            kill(self.server.pid, signal.SIGCONT)  # blocked requests get their answer now
        for _ in range(1000):
            if not any(exists(f"/proc/self/task/{thread}") for thread in self.threads):
                break
            sleep(0.01)
        if self.server is not None:
            kill(self.server.pid, signal.SIGKILL)


def stay_in_torch(begun: threading.Event) -> None:
    """Set ``begun`` and block inside torch for ``SECONDS``."""
    begun.set()
    with suppress(dist.DistError):
        HashStore().wait(["never"], timedelta(seconds=SECONDS))


def run_helper(last: LateDeletedObject, stay: Callable[[], None]) -> None:
    """Run ``stay`` in a helper thread."""
    start_thread(stay, CPU_DEVICE, "test")


def run_tick(last: LateDeletedObject, stay: Callable[[], None]) -> None:
    """Run ``stay`` as the tick of a watch, in the watchdog's thread."""
    watch: Any = SimpleWatch(rank=0, device=CPU_DEVICE, is_closed=False, tick=stay)
    sys.modules["watch"] = watch  # the watchdog keeps only weak references
    _WATCHDOG.add(watch)


def run_transfer(last: LateDeletedObject, stay: Callable[[], None]) -> None:
    """Run ``stay`` in a transfer thread."""
    TransferThread("test", lambda: True).submit(stay)


def run_store_request(last: LateDeletedObject, stay: Callable[[], None]) -> None:
    """Send requests to a stopped store over an open connection and over a new one, then run ``stay``."""
    last.server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert last.server.stdout is not None
    port = int(last.server.stdout.readline())
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    connection = StoreConnection(store)
    last.server.send_signal(signal.SIGSTOP)
    for ask in (
        lambda: connection.call_store(lambda store: store.check(["x"]), 0.1),
        lambda: StoreConnection(store, 0.1),
    ):
        try:
            while True:  # the server may still answer until SIGSTOP takes effect
                ask()
        except TransportError:
            pass
    stay()


class SimpleWatch(SimpleNamespace):
    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


KINDS = {"helper": run_helper, "tick": run_tick, "transfer": run_transfer, "store": run_store_request}


def main(code: str, *kinds: str) -> None:
    before, last = {*threading.enumerate()}, LateDeletedObject()
    sys.modules["last"] = last  # type: ignore[assignment]
    begun = [threading.Event() for _ in kinds]
    for kind, event in zip(kinds, begun, strict=True):
        KINDS[kind](last, partial(stay_in_torch, event) if kind != "store" else event.set)
    for event in begun:
        event.wait()
    last.threads = [thread.native_id or 0 for thread in {*threading.enumerate()} - before]
    assert len(last.threads) >= len(kinds)
    sys.exit(int(code))


if __name__ == "__main__":
    main(*sys.argv[1:])
