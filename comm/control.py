"""Small things that the ranks of a group tell each other through a store, beside the bytes that transports move."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .local import LocalGroup
from .mailboxes import DEFAULT_TIMEOUT, Hub, WorldAborted
from .transport import TransportError

T = TypeVar("T")

# One answer of a store takes microseconds on a host and milliseconds across a cluster. A host that vanished without
# closing its connections never answers: torch's stores would wait for ever, this bounds it.
ANSWER_SECONDS = 20.0
# How often `gather` looks for the others' values: at first so that ranks in step lose nothing, later so that 1,000
# ranks that wait for one do not keep the store busy.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 2e-4, 2e-2


class Line(Protocol):
    """One rank's way to the store of its group."""

    patience: float  # seconds that a gather waits unless told otherwise
    gathers: Counter[str]  # per scope, how many there were: every rank counts the same
    scopes: Counter[str]

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """What `do` returns; TransportError where the store fails or has not answered after `timeout` seconds."""

    def tell(self, do: Callable[[Store], object]) -> None:
        """Have it done soon; nobody waits for it, and a store that fails is no error."""

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known."""


class Control:
    """What the ranks of one group tell each other: small, picklable, rare.

    `gather` is collective, every rank in the same order; `publish` and `look` wait for nobody. The ranks can be
    processes (through the store of torch.distributed, on a connection of its own) or the virtual ranks of a
    `LocalWorld`. Any thread may call.
    """

    def __init__(self, line: Line, rank: int, size: int, prefix: str) -> None:
        self.rank = rank
        self.size = size
        self._line = line
        self._prefix = prefix

    def gather(
        self,
        value: object,
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> list[object]:
        """`value` of every rank, in rank order; `what` says in errors what the ranks were about to tell each other.

        Args:
            value: anything picklable.
            timeout: seconds; by default 300, in a `LocalWorld` the world's own.
            stop: asked while waiting; a reason that it returns ends the wait.

        Raises:
            TransportError: the store is gone, `stop` said so, or ranks (they are named) did not answer in time.
        """
        number = self._line.gathers[self._prefix]
        self._line.gathers[self._prefix] += 1
        keys = [f"gather{number}/{rank}" for rank in range(self.size)]
        self.publish(keys[self.rank], value)
        return self.collect(keys, what=what, timeout=timeout, stop=stop)

    def collect(
        self,
        keys: Sequence[str],
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> list[object]:
        """Wait until every rank has published its one of these keys, given in rank order; otherwise as `gather`."""
        self._await(keys, what, self._line.patience if timeout is None else timeout, stop)
        full = [self._prefix + key for key in keys]
        return [pickle.loads(data) for data in self._ask(lambda store: store.multi_get(full), ANSWER_SECONDS)]

    def publish(self, key: str, value: object) -> None:
        """Leave `value` under `key`, in the place of what was there. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        self.exchange({key: value})

    def look(self, key: str) -> object | None:
        """What was published last under `key`, by whichever rank; None where nobody has. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        return self.exchange(look=[key]).get(key)

    def exchange(
        self, publish: Mapping[str, object] | None = None, look: Sequence[str] = (), timeout: float = ANSWER_SECONDS
    ) -> dict[str, object]:
        """Publish all of these, then look at all of those, in one go; what was not there is missing in the answer.

        Raises:
            TransportError: the store is gone, or has not answered after `timeout` seconds.
        """
        values = {self._prefix + key: pickle.dumps(value) for key, value in (publish or {}).items()}

        def go(store: Store) -> dict[str, object]:
            for key, data in values.items():
                store.set(key, data)  # type: ignore[arg-type]  # the stub knows str alone, the store takes bytes
            found = [key for key in look if store.check([self._prefix + key])]
            return {key: pickle.loads(store.get(self._prefix + key)) for key in found}

        return self._ask(go, timeout)

    @property
    def patience(self) -> float:
        """Seconds that a wait for other ranks takes at most, unless told otherwise."""
        return self._line.patience

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known."""
        return self._line.hopeless(missing)

    def count(self, key: str, more: int) -> int:
        """Add to a number that all ranks share, at first 0; what it is then. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        return self._ask(lambda store: store.add(self._prefix + key, more), ANSWER_SECONDS)

    def forget(self, key: str) -> None:
        """Take away what nobody will look for any more. Waits for nobody, the store included."""
        full = self._prefix + key
        self._line.tell(lambda store: store.delete_key(full))

    def scope(self, name: str) -> Control:
        """The same ranks with other keys; the same `name` names the same keys again."""
        return Control(self._line, self.rank, self.size, f"{self._prefix}{name}/")

    def fresh_scope(self, name: str) -> Control:
        """Keys that nobody has used: every rank calls it in the same order."""
        self._line.scopes[self._prefix + name] += 1
        return self.scope(f"{name}{self._line.scopes[self._prefix + name]}")

    def _ask(self, do: Callable[[Store], T], timeout: float) -> T:
        return self._line.ask(do, timeout)

    def _await(self, keys: Sequence[str], what: str, timeout: float, stop: Callable[[], str | None] | None) -> None:
        deadline, pause = time.monotonic() + timeout, FIRST_POLL_SECONDS
        missing = list(range(self.size))
        while not self._all_there(keys, missing):
            # Only the first that is missing is asked for again: cheap, however many ranks wait.
            while True:
                reason = stop() if stop is not None else None
                # Before the look: a rank may leave its value and be gone, and that value is still an answer.
                hopeless = self._line.hopeless(missing[:1])
                if self._all_there(keys, missing[:1]):
                    break
                error = hopeless if reason is None else TransportError(f"{what}: {reason}")
                if error is None and time.monotonic() >= deadline:
                    error = self._late(keys, missing, what, timeout)
                if error is not None:
                    raise error
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
            del missing[0]

    def _all_there(self, keys: Sequence[str], ranks: Sequence[int]) -> bool:
        wanted = [self._prefix + keys[rank] for rank in ranks]
        return self._ask(lambda store: store.check(wanted), ANSWER_SECONDS)

    def _late(self, keys: Sequence[str], ranks: Sequence[int], what: str, timeout: float) -> TransportError:
        silent = [str(rank) for rank in ranks if not self._all_there(keys, [rank])]
        return TransportError(f"{what}: no answer from rank {', '.join(silent)} within {timeout:g} s")


class _StoreLine:
    """A connection of our own to a store that may stop answering, spoken to by one thread so that no caller hangs.

    torch's stores are clients of a server in another process: a blocked `get` of somebody else must not hold us up,
    hence the clone; and a server that vanished without a reset never answers, hence the thread.
    """

    def __init__(self, store: Store) -> None:
        self.patience = DEFAULT_TIMEOUT
        self.gathers: Counter[str] = Counter()
        self.scopes: Counter[str] = Counter()
        self._gone: str | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        own = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._store: Store = own
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="ringattn-store", daemon=True)
        thread.start()
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
        """Nothing is known about other processes here."""
        return None


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the caller's values until the next one comes


def _end(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    # Also at exit, before the interpreter is taken down: a thread that returns from C++ after that ends the process.
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)


class _LocalLine:
    """Virtual ranks share one store in memory, which always answers."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self._hub: Hub = group._hub
        self.patience = self._hub.timeout
        self.gathers: Counter[str] = Counter()
        self.scopes: Counter[str] = Counter()

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """See `Line.ask`."""
        return do(self._hub.store)

    def tell(self, do: Callable[[Store], object]) -> None:
        """See `Line.tell`."""
        do(self._hub.store)

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


_LINES: weakref.WeakKeyDictionary[Any, tuple[_StoreLine, str]] = weakref.WeakKeyDictionary()


def control_of(group: LocalGroup | dist.ProcessGroup) -> Control:
    """The control of a group; every rank asks for it together the first time. The same group shares one connection."""
    if isinstance(group, LocalGroup):
        line = group.kept.setdefault("control", _LocalLine(group))
        assert isinstance(line, _LocalLine)
        return Control(line, group.rank(), group.size(), "ringattn/")
    if group not in _LINES:
        opened = _StoreLine(_store_of(group))
        # A store may outlive a group and serve the next one: what is left of the last one must not be read again.
        times = opened.ask(lambda store: store.add(f"ringattn/opened{group.rank()}", 1), ANSWER_SECONDS)
        _LINES[group] = opened, f"ringattn{times}/"
    line_of_group, prefix = _LINES[group]
    return Control(line_of_group, group.rank(), group.size(), prefix)


def _store_of(group: dist.ProcessGroup) -> Store:
    # What torch keeps beside every group since before 2.11, already prefixed by the group's name
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    return store
