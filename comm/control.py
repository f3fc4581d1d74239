"""Small things that the ranks of a group tell each other through a store, beside the bytes that transports move."""

from __future__ import annotations

import atexit
import contextlib
import math
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from .kept import CONNECTION, kept_of
from .processes import has_ended, own_process, shut_socket
from .transport import TransportError, decoded, encoded
from .world import DEFAULT_TIMEOUT, Hub, LocalGroup, WorldAborted

# What a rank that gives up, or leaves, grants the store for its last words.
LAST_SECONDS = 1.0
# How often `gather` looks for the others' values: at first so that ranks in step lose nothing, later so that 1,000
# ranks that wait for one do not keep the store busy.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 2e-4, 2e-2
# Nobody ever sends with this tag: a receive of it always times out.
INTERRUPT_TAG = 20000


def connection_closed(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether the connection to a peer is closed: it has ended, or broken off all transfers. False for other backends.

    A receive of a tag that nobody sends is refused once gloo has seen the end of the connection. One that is not
    refused is let go of at once: gloo knows it weakly, so that no thread waits and nothing is left to end. It costs
    some bytes in both processes until the group ends: ask seldom.
    """
    if "gloo" not in dist.get_backend_config(group):
        return False
    try:
        receive_nothing(group, peer)
    except RuntimeError:
        return True
    return False


def server_gone(seconds: float) -> str:
    """Return words for an error about the store if rank 0 of the job is seen to be gone in that time, else ""."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.rank() == 0:
        return ""
    begun, pause = time.monotonic(), LONGEST_POLL_SECONDS
    while not connection_closed(world, 0):  # its connections break one after the other
        if time.monotonic() - begun >= seconds:
            return ""
        time.sleep(pause)
        pause *= 2
    return ", and so is rank 0 of the job, which serves it unless the launcher does"


def receive_nothing(group: dist.ProcessGroup, peer: int) -> dist.Work:
    scratch = torch.empty(1, dtype=torch.uint8, device="cpu")  # whatever the default device is
    work = dist.irecv(scratch, group=group, group_src=peer, tag=INTERRUPT_TAG)
    assert work is not None
    return work


T = TypeVar("T")

# One answer of a store takes microseconds on a host and milliseconds across a cluster. A host that vanished without
# closing its connections never answers: torch's stores would wait for ever, this bounds it.
ANSWER_SECONDS = 20.0
# How often a rank that waits looks whether those that it waits for have died: once a wait is as old as the first, then
# each time that its age has doubled, at most as far apart as the second.
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 10.0


@dataclass
class Scope:
    """What a connection remembers of the keys below one prefix, whichever `Control` speaks of them."""

    gathers: int = 0  # how many there were: every rank counts the same
    answer: str | None = None  # rank 0's key of the last one, which others may still have to read
    fresh: dict[str, int] = field(default_factory=dict)  # name of a fresh scope -> how many there were


class Connection(Protocol):
    """One rank's way to the store of its group."""

    patience: float  # seconds that a gather waits unless told otherwise
    scopes: defaultdict[str, Scope]  # by prefix
    published: set[str]  # this rank's keys that are in the store

    def __init__(self, patience: float) -> None:
        self.patience, self.scopes, self.published = patience, defaultdict(Scope), set()

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """What `do` returns; TransportError where the store fails or has not answered after `timeout` seconds."""

    def tell(self, do: Callable[[Store], object]) -> None:
        """Have it done soon; nobody waits for it, and a store that fails is no error."""

    def hopeless(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known; who waits asks again and again.

        `names` is what errors call each rank; `timeout` is how many seconds the look may take.
        """

    def close(self) -> None:
        """End the connection. Idempotent."""


class Looks:
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


class StoreConnection(Connection):
    """A connection of our own to a store that may stop answering, spoken to by one thread so that no caller hangs.

    torch's stores are clients of a server in another process: a blocked `get` of somebody else must not hold us up,
    hence the connection; and a server that vanished without a reset never answers, hence the thread.

    Args:
        store: the group's.
        seconds: in which to connect.
        group: whose ranks may be seen to die.
    """

    def __init__(self, store: Store, seconds: float = ANSWER_SECONDS, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        self.prefix = ""
        self._group = None if group is None else weakref.ref(group)  # which a connection does not outlive
        self._looks = Looks()
        self._gone: str | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="ringattn-store", daemon=True)
        _SERVING[thread] = self._jobs
        thread.start()
        self._store = store
        try:
            self._store = self.ask(lambda theirs: _connected(theirs, seconds), seconds)
        except BaseException:
            self._jobs.put(None)
            raise
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._stop.atexit = False

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        """See `Connection.ask`. A store that failed once is not asked again: torch prints a stack trace each time."""
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
            gone = server_gone(0.0)
            raise TransportError(f"the store of the group has not answered for {timeout:g} s{gone}") from None
        except dist.DistError as error:
            self._gone = f"the store of the group is gone{server_gone(LAST_SECONDS)}: {str(error).splitlines()[0]}"
            raise TransportError(self._gone) from error

    def tell(self, do: Callable[[Store], object]) -> None:
        store = self._store

        def job() -> None:
            with contextlib.suppress(dist.DistError):
                do(store)

        if self._gone is None:
            self._jobs.put(job)

    def hopeless(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """A rank is seen to be gone by its connection where the group has gloo, by its process on the same machine.

        Nothing is known of a rank on another host whose group has NCCL alone, nor of one there that was killed before
        it ever used this group for a ring: such a wait ends by its deadline.
        """
        group = None if self._group is None else self._group()
        if group is None or not self._looks.due(time.monotonic()):
            return None
        for rank in missing:
            if connection_closed(group, rank):
                return TransportError(
                    f"rank {names[rank]} is gone: its connection to rank {names[group.rank()]} is closed"
                )
            key = f"{self.prefix}process/{rank}"
            process = self.ask(lambda store, key=key: store.get(key) if store.check([key]) else b"null", timeout)  # type: ignore[misc]
            if has_ended(decoded(process, key)):
                return TransportError(f"rank {names[rank]} is gone: its process has ended")
        return None

    def close(self) -> None:
        self._gone = "the group was destroyed"
        self._stop()
        self._store = None  # type: ignore[assignment]  # and with it the connection


def connect(group: dist.ProcessGroup, seconds: float) -> StoreConnection:
    """A connection to the store of a group, made in so many seconds; TransportError where that is not possible."""
    # What torch keeps beside every group since before 2.11
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    process = encoded(own_process())
    connection = StoreConnection(store, seconds, group)

    def go(own: Store) -> str:
        # A store may outlive the processes: torchrun's serves the next attempt, below another prefix of the group's,
        # which only the group's own store has. So one word there, whichever rank comes first, names our keys.
        word = bytes(store.compare_set("ringattn", "", uuid4().hex)).decode()
        prefix = f"ringattn/{word}/{group.group_name}/"
        # It may outlive a group, too, and serve the next of its name: what is left of the last must not be read again.
        times = own.add(f"{prefix}opened{group.rank()}", 1)
        own.set(f"{prefix}{times}/process/{group.rank()}", process)  # type: ignore[arg-type]
        return f"{prefix}{times}/"

    connection.prefix = connection.ask(go, seconds)
    return connection


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


# The threads that speak to stores, with their jobs.
_SERVING: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Callable[[], None] | None]] = (
    weakref.WeakKeyDictionary()
)
# How often the end of the process looks at a thread whose store does not answer.
SHUT_SECONDS = 0.1


@atexit.register
def _end_all() -> None:
    """Wait for every thread that speaks to a store: returning into an interpreter that is gone aborts the process.

    A store that does not answer is given up after LAST_SECONDS: its socket is shut, so that the blocked call returns.
    """
    serving = [*_SERVING.items()]
    for _, jobs in serving:
        jobs.put(None)
    for thread, _ in serving:
        thread.join(LAST_SECONDS)
        while thread.is_alive():
            if not shut_socket(thread):
                thread.join(ANSWER_SECONDS)
                break
            thread.join(SHUT_SECONDS)


class LocalConnection(Connection):
    """Virtual ranks share one store in memory, which always answers."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self._hub: Hub = group._hub
        super().__init__(self._hub.timeout)
        self._lock = threading.Lock()  # the rank's own thread, and the watchdog

    def ask(self, do: Callable[[Store], T], timeout: float) -> T:
        with self._lock:
            return do(self._hub.store)

    def tell(self, do: Callable[[Store], object]) -> None:
        self.ask(do, 0.0)

    def hopeless(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """Another rank raised, or has returned from what the world runs."""
        failure = self._hub.failure
        if failure is not None:
            return WorldAborted(f"{self._group} gave up waiting, another rank raised {type(failure).__name__}")
        gone = self._hub.returned(missing)
        if gone:
            return TransportError(
                f"{self._group} waits for rank {names[gone[0]]}, which has returned and will never get there"
            )
        return None

    def close(self) -> None:
        """Nothing to give back: the store goes with its world."""


class Control:
    """What the ranks of one group tell each other: small, ready for JSON, rare.

    `gather` and `merged` are collective, every rank in the same order; `publish` and `look` wait for nobody. The ranks
    can be processes (through the store of torch.distributed, on a connection of its own) or the virtual ranks of a
    `LocalWorld`. Any thread may call. Tuples come as lists. No wait is longer than `patience` seconds, whatever the
    timeout of the group; that of the connection where it is None.
    """

    def __init__(
        self, connection: Connection, rank: int, size: int, prefix: str, patience: float | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.patience = connection.patience if patience is None else patience
        self._connection = connection
        self._prefix = prefix
        self._closed = False
        self.names: Sequence[int] = range(size)
        """What errors call each rank; shared with the scopes that are made of this one."""
        self.stop: Callable[[], str | None] | None = None
        """Asked while a rank waits here, and shared likewise; a reason that it returns ends the wait."""

    def gather(
        self, value: object, *, what: str, timeout: float | None = None, stop: Callable[[], str | None] | None = None
    ) -> list[object]:
        """`value` of every rank, in rank order; otherwise as `merged`."""
        result = self.merged(value, list, what=what, timeout=timeout, stop=stop)
        assert isinstance(result, list)
        return result

    def merged(
        self,
        value: object,
        merge: Callable[[list[object]], object],
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> object:
        """What rank 0 makes of the `value` of every rank.

        Rank 0 alone reads all of them, or what the store moves would grow with the square of the ranks.

        Args:
            value: what JSON has a form for.
            merge: of the values in rank order, on rank 0; makes what JSON has a form for.
            what: what errors say that the ranks were about to tell each other.
            timeout: seconds, if less than `patience`.
            stop: asked while waiting; a reason that it returns ends the wait.

        Raises:
            TypeError: JSON has no form for `value`.
            TransportError: the store is gone, `stop` said so, or ranks (they are named) are gone, or did not answer in
                time; on other ranks also for what ended rank 0's part.
        """
        if self.size == 1:
            return decoded(encoded(merge([decoded(encoded(value), what)])), what)
        scope = self._connection.scopes[self._prefix]
        key, answer = f"gather{scope.gathers}/{{}}".format, f"gather{scope.gathers}/all"
        scope.gathers += 1
        self.publish(key(self.rank), value)
        if self.rank == 0:
            keys = {rank: key(rank) for rank in range(self.size)}
            return self._merge(keys, answer, merge, what=what, timeout=timeout, stop=stop)
        self._await({0: answer}, what, self._within(timeout), stop, lambda: {r: key(r) for r in range(self.size)})
        self.forget(key(self.rank))
        message: Any = self.look(answer)
        problem, result = message
        if problem:
            raise TransportError(problem)
        return result

    def _merge(
        self, keys: Mapping[int, str], answer: str, merge: Callable[[list[object]], object], *, what: str, **wait: Any
    ) -> object:
        """Rank 0's part: the others wait for its answer, so that it says what went wrong, too."""
        try:
            merged = decoded(encoded(merge(self.collect(keys, what=what, **wait))), what)  # as the others see it
        except WorldAborted:  # they see that for themselves
            raise
        except BaseException as error:
            problem = (
                str(error)
                if isinstance(error, TransportError)
                else f"{what}: rank {self.names[0]}: {type(error).__name__}: {error}"
            )
            with contextlib.suppress(TransportError):
                self.publish(answer, (problem, None))
            raise
        self.publish(answer, (None, merged))
        scope = self._connection.scopes[self._prefix]
        for key in (keys[0], scope.answer):
            if key is not None:  # who has published for this merge has read the answer of the last
                self.forget(key)
        scope.answer = answer
        return merged

    def collect(
        self,
        keys: Mapping[int, str],
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> list[object]:
        """Wait until each of these ranks has published its one of these keys, then read them; otherwise as `merged`."""
        self._await(keys, what, self._within(timeout), stop)
        full = [self._prefix + key for key in keys.values()]
        values = self._connection.ask(lambda store: store.multi_get(full), self._within(ANSWER_SECONDS))
        return [decoded(data, key) for data, key in zip(values, full, strict=True)]

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
        values = {self._prefix + key: encoded(value) for key, value in (publish or {}).items()}

        def go(store: Store) -> dict[str, bytes]:
            if self._closed:
                return {}
            self._connection.published.update(values)
            for key, data in values.items():
                store.set(key, data)  # type: ignore[arg-type]  # the stub knows str alone, the store takes bytes
            return {key: store.get(self._prefix + key) for key in look if store.check([self._prefix + key])}

        data_by_key = self._connection.ask(go, self._within(timeout))
        return {key: decoded(data, self._prefix + key) for key, data in data_by_key.items()}

    def hopeless(self, missing: Sequence[int], timeout: float | None = None) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known.

        Raises:
            TransportError: the store is gone, or has not answered after `timeout` seconds or `patience`.
        """
        return self._connection.hopeless(missing, self.names, min(self._within(timeout), ANSWER_SECONDS))

    def count(self, key: str, more: int) -> int:
        """Add to a number that all ranks share, at first 0; what it is then. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        full = self._prefix + key

        def go(store: Store) -> int:
            self._connection.published.add(full)
            return store.add(full, more)

        return self._connection.ask(go, self._within(ANSWER_SECONDS))

    def forget(self, key: str) -> None:
        """Take away what nobody will look for any more. Waits for nobody, the store included."""
        full = self._prefix + key

        def go(store: Store) -> None:
            self._connection.published.discard(full)
            store.delete_key(full)

        self._connection.tell(go)

    def scope(self, name: str) -> Control:
        """The same ranks with other keys; the same `name` names the same keys again."""
        scope = Control(self._connection, self.rank, self.size, f"{self._prefix}{name}/", self.patience)
        scope.names, scope.stop = self.names, self.stop
        return scope

    def fresh_scope(self, name: str) -> Control:
        """Keys that nobody has used: every rank calls it in the same order."""
        fresh = self._connection.scopes[self._prefix].fresh
        fresh[name] = fresh.get(name, 0) + 1
        return self.scope(f"{name}{fresh[name]}")

    def close(self) -> None:
        """Publish nothing any more; the last rank to call takes everything below this scope out of the store.

        Idempotent. Raises nothing: what a store keeps that is gone, or silent, is nobody's concern.
        """

        def go(store: Store) -> None:
            self._closed = True
            mine = [key for key in [*self._connection.published] if key.startswith(self._prefix)]
            self._connection.published.difference_update(mine)
            left = [f"{self._prefix}left/{rank}" for rank in range(self.size)]
            store.set(left[self.rank], encoded(mine))  # type: ignore[arg-type]
            if store.add(f"{self._prefix}closed", 1) == self.size:
                theirs = [decoded(data, key) for data, key in zip(store.multi_get(left), left, strict=True)]
                all_keys = [key for keys in theirs if isinstance(keys, list) for key in keys]
                for key in [f"{self._prefix}closed", *left, *all_keys]:
                    store.delete_key(key)

        if not self._closed:
            with contextlib.suppress(TransportError):
                self._connection.ask(go, LAST_SECONDS)
            for prefix in [prefix for prefix in list(self._connection.scopes) if prefix.startswith(self._prefix)]:
                del self._connection.scopes[prefix]

    def _within(self, timeout: float | None) -> float:
        return self.patience if timeout is None else min(timeout, self.patience)

    def _await(
        self,
        wanted: Mapping[int, str],
        what: str,
        timeout: float,
        stop: Callable[[], str | None] | None,
        said: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Wait for the keys `wanted`, by rank; late are those that have not left their key of `said`, else of these."""
        begun, pause = time.monotonic(), FIRST_POLL_SECONDS
        missing, stop = list(wanted), stop or self.stop

        def left() -> float:
            return min(max(begun + timeout - time.monotonic(), LAST_SECONDS), ANSWER_SECONDS)

        def there(keys: Sequence[str]) -> bool:
            full = [self._prefix + key for key in keys]
            return self._connection.ask(lambda store: store.check(full), left())

        def all_there(ranks: Sequence[int]) -> bool:
            return there([wanted[rank] for rank in ranks])

        while not all_there(missing):
            # Only the first that is missing is asked for again: cheap, however many ranks wait.
            while True:
                now, reason = time.monotonic(), stop() if stop is not None else None
                # Before the look: a rank may leave its value and be gone, and that value is still an answer.
                hopeless = self._connection.hopeless(missing[:1], self.names, left())
                if all_there(missing[:1]):
                    break
                error = hopeless if reason is None else TransportError(f"{what}: {reason}")
                if error is None and now >= begun + timeout:
                    silent = [rank for rank, key in (said() or wanted).items() if not there([key])] or missing
                    late = ", ".join(str(self.names[rank]) for rank in silent)
                    error = TransportError(f"{what}: no answer from rank {late} within {timeout:g} s")
                if error is not None:
                    raise error
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
            del missing[0]


def control_of(group: LocalGroup | dist.ProcessGroup, patience: float | None = None) -> Control:
    """The control of a group; every rank asks for it together the first time. The same group shares one connection.

    Args:
        group: whose ranks.
        patience: seconds that any wait may take, connecting among them; None: 300, in a `LocalWorld` the world's own.

    Raises:
        TransportError: no connection to the store, in that time.
    """
    kept = kept_of(group)
    if isinstance(group, LocalGroup):
        local = kept.setdefault(CONNECTION, LocalConnection(group))
        assert isinstance(local, LocalConnection)
        return Control(local, group.rank(), group.size(), "ringattn/", patience)
    if CONNECTION not in kept:
        kept[CONNECTION] = connect(group, min(ANSWER_SECONDS, patience or ANSWER_SECONDS))
    connection = kept[CONNECTION]
    assert isinstance(connection, StoreConnection)
    return Control(connection, group.rank(), group.size(), connection.prefix, patience)
