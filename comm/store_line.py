"""One rank's way to the store of its group: a store that may fall silent, or the memory that virtual ranks share."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from .transport import TransportError, decoded, encoded
from .transports.gloo import connection_closed
from .transports.local import LocalGroup
from .transports.mailboxes import DEFAULT_TIMEOUT, Hub, WorldAborted
from .watchdog.liveness import has_ended, own_process

T = TypeVar("T")

# One answer of a store takes microseconds on a host and milliseconds across a cluster. A host that vanished without
# closing its connections never answers: torch's stores would wait for ever, this bounds it.
ANSWER_SECONDS = 20.0
# How often a rank that waits looks whether those that it waits for have died: once a wait is as old as the first, then
# each time that its age has doubled, at most as far apart as the second.
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 10.0


@dataclass
class Scope:
    """What a line remembers of the keys below one prefix, whichever `Control` speaks of them."""

    gathers: int = 0  # how many there were: every rank counts the same
    answer: str | None = None  # rank 0's key of the last one, which others may still have to read
    fresh: dict[str, int] = field(default_factory=dict)  # name of a fresh scope -> how many there were


class Line(Protocol):
    """One rank's way to the store of its group."""

    patience: float  # seconds that a gather waits unless told otherwise
    scopes: defaultdict[str, Scope]  # by prefix
    published: set[str]  # this rank's keys that are in the store

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """What `do` returns; TransportError where the store fails or has not answered after `timeout` seconds."""

    def tell(self, do: Callable[[Store], object]) -> None:
        """Have it done soon; nobody waits for it, and a store that fails is no error."""

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known; who waits asks again and again."""


class _Looks:
    """When a rank that waits should look at what costs something to look at."""

    def __init__(self) -> None:
        self._since = self._last = self._next = -math.inf

    def due(self, now: float) -> bool:
        """Whether to look; asked all the while that a rank waits, and not in between."""
        if now - self._last > FIRST_LOOK_SECONDS:  # another wait
            self._since, self._next = now, now + FIRST_LOOK_SECONDS
        self._last = now
        if now < self._next:
            return False
        self._next = now + min(now - self._since, LONGEST_LOOK_SECONDS)
        return True


class StoreLine:
    """A connection of our own to a store that may stop answering, spoken to by one thread so that no caller hangs.

    torch's stores are clients of a server in another process: a blocked `get` of somebody else must not hold us up,
    hence the connection; and a server that vanished without a reset never answers, hence the thread.

    Args:
        store: the group's.
        seconds: in which to connect.
        group: whose ranks may be seen to die.
    """

    def __init__(
        self, store: Store, seconds: float = ANSWER_SECONDS, group: dist.ProcessGroup | None = None, prefix: str = ""
    ) -> None:
        self.patience = DEFAULT_TIMEOUT
        self.scopes: defaultdict[str, Scope] = defaultdict(Scope)
        self.published: set[str] = set()
        self.prefix = prefix
        self._group = None if group is None else weakref.ref(group)  # a line is kept as long as its group is there
        self._looks = _Looks()
        self._gone: str | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="ringattn-store", daemon=True)
        thread.start()
        self._store = store
        try:
            self._store = self.ask(lambda theirs: _connected(theirs, seconds), seconds)
        except BaseException:
            self._jobs.put(None)
            raise
        self._stop = weakref.finalize(self, _end, self._jobs, thread)

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """See `Line.ask`. A store that failed once is not asked again: torch prints a stack trace each time."""
        if self._gone is not None:
            raise TransportError(self._gone)
        answer: Future[T] = Future()
        store = self._store

        def job() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(do(store))
                except BaseException as error:
                    answer.set_exception(error)

        self._jobs.put(job)
        try:
            return answer.result(timeout)
        except TimeoutError:
            answer.cancel()
            raise TransportError(f"the store of the group has not answered for {timeout:g} s") from None
        except dist.DistError as error:
            self._gone = f"the store of the group is gone: {str(error).splitlines()[0]}"
            raise TransportError(self._gone) from error

    def tell(self, do: Callable[[Store], object]) -> None:
        """See `Line.tell`."""
        store = self._store

        def job() -> None:
            with contextlib.suppress(dist.DistError):
                do(store)

        if self._gone is None:
            self._jobs.put(job)

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """A rank is seen to be gone by its connection where the group has gloo, by its process on the same machine.

        Nothing is known of a rank on another host whose group has NCCL alone, nor of one there that was killed before
        it ever used this group for a ring: such a wait ends by its deadline.
        """
        group = None if self._group is None else self._group()
        if group is None or not self._looks.due(time.monotonic()):
            return None
        for rank in missing:
            if connection_closed(group, rank):
                return TransportError(f"rank {rank} is gone: its connection to rank {group.rank()} is closed")
            key = f"{self.prefix}process/{rank}"
            told = self.ask(lambda store, key=key: store.get(key) if store.check([key]) else b"null", ANSWER_SECONDS)  # type: ignore[misc]
            if has_ended(decoded(told, key)):
                return TransportError(f"rank {rank} is gone: its process has ended")
        return None

    def close(self) -> None:
        """End the connection and its thread. Idempotent."""
        self._gone = "the group was destroyed"
        self._stop()
        self._store = None  # type: ignore[assignment]  # and with it the connection


def open_line(group: dist.ProcessGroup, seconds: float) -> StoreLine:
    """A line to the store of a group, opened within so many seconds; TransportError where that is not possible."""
    # What torch keeps beside every group since before 2.11
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    process = encoded(own_process())
    line = StoreLine(store, seconds, group)

    def go(own: Store) -> str:
        # A store may outlive the processes: torchrun's serves the next attempt, below another prefix of the group's,
        # which only the group's own store has. So one word there, whichever rank comes first, names our keys.
        word = bytes(store.compare_set("ringattn", "", uuid4().hex)).decode()
        prefix = f"ringattn/{word}/{group.group_name}/"
        # It may outlive a group, too, and serve the next of its name: what is left of the last must not be read again.
        times = own.add(f"{prefix}opened{group.rank()}", 1)
        own.set(f"{prefix}{times}/process/{group.rank()}", process)  # type: ignore[arg-type]
        return f"{prefix}{times}/"

    line.prefix = line.ask(go, seconds)
    return line


def _connected(store: Store, seconds: float) -> Store:
    """A connection of our own, whose own waits end after ANSWER_SECONDS; without the prefix of the group's."""
    plain = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(plain, TCPStore):
        # Not clone(): where the server is gone it tries for as long as the group's timeout, half an hour. Half of the
        # seconds, for it may try twice.
        own: Store = TCPStore(
            plain.host, plain.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds / 2)
        )
    else:
        own = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return own


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the caller's values until the next one comes


def _end(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    # Also at exit, before the interpreter is taken down: a thread that returns from C++ after that ends the process.
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)


class LocalLine:
    """Virtual ranks share one store in memory, which always answers."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self._hub: Hub = group._hub
        self.patience = self._hub.timeout
        self.scopes: defaultdict[str, Scope] = defaultdict(Scope)
        self.published: set[str] = set()
        self._lock = threading.Lock()  # the rank's own thread, and the watchdog

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """See `Line.ask`."""
        with self._lock:
            return do(self._hub.store)

    def tell(self, do: Callable[[Store], object]) -> None:
        """See `Line.tell`."""
        self.ask(do, 0.0)

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """Another rank raised, or has returned from what the world runs."""
        failure = self._hub.failure
        if failure is not None:
            return WorldAborted(f"{self._group} gave up waiting, another rank raised {type(failure).__name__}")
        gone = self._hub.returned(missing)
        if gone:
            return TransportError(
                f"{self._group} waits for rank {gone[0]}, which has returned and will never get there"
            )
        return None

    def close(self) -> None:
        """Nothing to give back: the store goes with its world."""
