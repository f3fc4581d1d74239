"""Where virtual ranks of one process meet: mailboxes behind one lock, in which nobody waits for a rank that is gone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..transport import Fence, TransportError

# A rank that waits this long hangs: one that raised or returned wakes the others at once, so only a real deadlock, or
# compute far slower than any test's, gets here.
DEFAULT_TIMEOUT = 300.0


class WorldAborted(TransportError):
    """Another rank of the same `LocalWorld` raised; its error is the one that `run` raises."""


class Parcel:
    """A sent tensor on its way to its receiver, and the news that it has been copied."""

    def __init__(self, tensor: torch.Tensor, ready: Fence) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.ready = ready  # the bytes are there
        self.taken: Fence | None = None  # the receiver's copy is over: the sender may write again

    def settle(self, taken: Fence) -> None:
        """Note the point where the receiver has its copy; the bytes are no longer needed for it."""
        self.taken = taken
        self.tensor = None


class Hub:
    """What the ranks of one world share: mailboxes behind one lock, and why nobody should wait any longer."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # for `Control`: small values by name
        self.failure: BaseException | None = None
        self.timeout = timeout
        self._changed = threading.Condition()
        self._boxes: dict[Hashable, deque[Any]] = {}  # none that is empty: every transport has its own
        self._returned: set[int] = set()
        self._stopped: dict[int, str] = {}

    def put(self, box: Hashable, item: object) -> None:
        """Add an item to a box."""
        with self._changed:
            self._boxes.setdefault(box, deque()).append(item)
            self._changed.notify_all()

    def take(self, box: Hashable, peer: int, what: str, channel: int) -> Any:
        """The next item of a box that `peer` fills on a channel; blocks until there is one."""
        with self._changed:
            self._wait_until(lambda: box in self._boxes, peer, what, channel)
            item = self._boxes[box].popleft()
            if not self._boxes[box]:
                del self._boxes[box]
            return item

    def settle(self, parcel: Parcel, taken: Fence) -> None:
        """Tell the sender of a parcel where its copy ends."""
        with self._changed:
            parcel.settle(taken)
            self._changed.notify_all()

    def taken(self, parcel: Parcel, peer: int, what: str, channel: int) -> Fence:
        """The point where `peer` has copied the parcel; blocks until it has enqueued that copy."""
        with self._changed:
            self._wait_until(lambda: parcel.taken is not None, peer, what, channel)
        assert parcel.taken is not None
        return parcel.taken

    def begin(self) -> None:
        """Every rank is about to run."""
        with self._changed:
            self._returned.clear()

    def end(self, rank: int) -> None:
        """A rank has returned: whoever waits for it is told."""
        with self._changed:
            self._returned.add(rank)
            self._changed.notify_all()

    def returned(self, peers: Iterable[int]) -> list[int]:
        """Which of these have returned: they will not do anything any more."""
        with self._changed:
            return sorted(self._returned.intersection(peers))

    def abort(self, error: BaseException, note: str) -> None:
        """Wake every waiting rank; the first error stays."""
        with self._changed:
            if self.failure is None:
                error.add_note(note)
                self.failure = error
            self._changed.notify_all()

    def stop(self, channel: int, reason: str) -> None:
        """Wake every rank that waits on a channel; the first reason stays."""
        with self._changed:
            self._stopped.setdefault(channel, reason)
            self._changed.notify_all()

    def stopped(self, channel: int) -> str | None:
        """Why nothing moves on this channel any more."""
        return self._stopped.get(channel)

    def _wait_until(self, ready: Callable[[], bool], peer: int, what: str, channel: int) -> None:
        deadline = time.monotonic() + self.timeout
        while not ready():
            if self.failure is not None:
                raise WorldAborted(f"{what}: given up, another rank raised {type(self.failure).__name__}")
            if channel in self._stopped:
                raise TransportError(f"{what}: {self._stopped[channel]}")
            if peer in self._returned:
                raise TransportError(f"{what}: rank {peer} has returned and will never get there")
            if not self._changed.wait(deadline - time.monotonic()):
                raise TransportError(
                    f"{what}: nothing happened for {self.timeout:g} s; do all ranks post in one order?"
                )
