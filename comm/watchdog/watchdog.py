"""One thread that watches all rings of a process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from ..control import Control, control_of
from ..cuda_threads import HOST, on_device, within
from ..groups import Group
from ..kept import end_destroyed
from ..transport import Transport
from ..transports.local import LocalGroup
from .deadlines import FIRST_SECONDS, NEVER
from .gossip import TICK_SECONDS
from .news import Gauges
from .watch import Watch

logger = logging.getLogger(__name__)

# sysexits' EX_TEMPFAIL: what torchrun and schedulers restart
EXIT_CODE = 75
# A pipe that nobody reads must not keep the process.
FLUSH_SECONDS = 1.0


class Watchdog:
    """The thread. It runs while there is a ring to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def add(self, watch: Watch) -> None:
        """Watch one more ring, until it is closed or nobody holds it any more."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringattn-watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End with the process: a thread that returns from C++ into an interpreter that is gone brings it down."""
        self._end.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        while not self._end.wait(TICK_SECONDS):
            with self._lock:
                watches = [watch for watch in self._watches if not watch.closed]
                if not watches:
                    self._thread = None
                    return
            while watches:
                _tick(watches)
            end_destroyed()


def _tick(watches: list[Watch]) -> None:
    """Look at the last one, and let go of it: nobody else may hold it any more, and what it holds is freed here."""
    rank, device, left = watches[-1].rank, watches[-1].device, len(watches) - 1
    try:
        with on_device(device):
            watches.pop().tick()
    except Exception:  # a fault in here must not end the watch over the other rings
        logger.exception("the watchdog of rank %d failed", rank)
    finally:
        del watches[left:]


_WATCHDOG = Watchdog()
atexit.register(lambda: _WATCHDOG.stop())


def _after_fork() -> None:
    global _WATCHDOG
    _WATCHDOG = Watchdog()  # threads stay behind


os.register_at_fork(after_in_child=_after_fork)


def open_watch(
    group: Group,
    device: torch.device,
    *,
    control: Control | None = None,
    deadline: float | None,
    transports: Callable[[], Sequence[Transport]],
    gauges: Gauges | None = None,
) -> Watch:
    """Watch over a ring of this group until it is closed; every rank opens its rings in the same order.

    Args:
        group: the ring's ranks.
        device: where they compute.
        control: of this ring alone; None: a new one, see `ring_control`.
        deadline: seconds that a transfer may take; None: many times the median hop, and no limit in a `LocalWorld`,
            which has one of its own.
        transports: the transports that are open now; must not hold the ring.
        gauges: reads clocks and throttle reasons of the device.
    """
    local = isinstance(group, LocalGroup)
    control = control or ring_control(group, deadline)
    watch = Watch(
        control,
        deadline=NEVER if local and deadline is None else deadline,
        device=device,
        transports=transports,
        fatal=None if local or device.type == "cpu" else end_process,
        patience=control.patience,
        together=local,
        gauges=gauges,
    )
    if watch.size > 1:
        _WATCHDOG.add(watch)
    return watch


def ring_control(group: Group, deadline: float | None) -> Control:
    """What the ranks of a ring tell each other, where nothing waits longer than the ring's deadline allows.

    Raises:
        TransportError: no connection to the store of the group, in that time.
    """
    # A LocalWorld has a patience of its own; elsewhere the first wait is for ranks that compile.
    first = None if isinstance(group, LocalGroup) else FIRST_SECONDS
    return control_of(group, deadline or first).fresh_scope("ring")


def end_process(reason: str) -> None:
    """Leave at once, non-zero, so that torchrun restarts: the streams of this process wait for bytes for ever."""
    logger.critical("this process ends: %s", reason)
    within(FLUSH_SECONDS, sys.stdout.flush, HOST, "flush")  # os._exit does not
    os._exit(EXIT_CODE)
