"""Small values that the ranks of a group exchange through a store, separate from the tensors that transports move."""

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

from .group_cache import CONNECTION_KEY, get_group_cache
from .processes import has_ended, own_process, shut_socket
from .transport import TransportError, decode_value, encode_value
from .world import DEFAULT_TIMEOUT, Hub, LocalGroup, WorldAborted

# Time that a rank that gives up or leaves allows the store for its final messages.
FINAL_STORE_SECONDS = 1.0
# Pauses between reads of a waiting `gather`. The first is short, so that ranks in step lose no time. The last is long,
# so that 1,000 ranks that wait for one rank do not overload the store.
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 2e-4, 2e-2
# No rank ever sends with this tag, so a receive with it always times out.
INTERRUPT_TAG = 20000


def connection_closed(group: dist.ProcessGroup, peer: int) -> bool:
    """Return True if this rank or `peer` has closed the gloo connection between them. Other backends give False.

    Posts a receive with a tag that no rank sends, which raises if gloo has seen the connection close. Otherwise the
    receive is dropped at once. gloo has only a weak reference to it, so no thread waits and nothing has to be
    cancelled. Each call leaks a few bytes in both processes until the group ends, so call it seldom.
    """
    if "gloo" not in dist.get_backend_config(group):
        return False
    try:
        post_unmatched_receive(group, peer)
    except RuntimeError:
        return True
    return False


def describe_lost_server(seconds: float) -> str:
    """Return a clause for an error about the store if rank 0 of the job, which usually serves it, has died, else "".

    Rank 0 counts as dead if its connection to this rank closes within `seconds`.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.rank() == 0:
        return ""
    begun, pause = time.monotonic(), MAX_POLL_SECONDS
    while not connection_closed(world, 0):  # the connections of a dead process break one after the other
        if time.monotonic() - begun >= seconds:
            return ""
        time.sleep(pause)
        pause *= 2
    return "; rank 0 of the job, which usually serves the store, is gone, too"


def post_unmatched_receive(group: dist.ProcessGroup, peer: int) -> dist.Work:
    """Post a one-byte receive from `peer` with a tag that no rank sends, and return its work."""
    scratch = torch.empty(1, dtype=torch.uint8, device="cpu")  # the default device may be another
    work = dist.irecv(scratch, group=group, group_src=peer, tag=INTERRUPT_TAG)
    assert work is not None
    return work


T = TypeVar("T")

# Timeout of one answer of a store, which takes microseconds on a host and milliseconds across a cluster. Without it,
# torch would wait for ever if the store's host vanished without closing its connections.
ANSWER_SECONDS = 20.0
# A waiting rank checks for dead ranks after the first of these times, then each time the wait's age has doubled, but at
# least at the second interval.
FIRST_CHECK_SECONDS, MAX_CHECK_SECONDS = 1.0, 10.0


@dataclass
class KeyScope:
    """A connection's counters for the keys below one prefix, shared by every `Control` with that prefix."""

    gathers: int = 0  # number of gathers so far, equal on every rank
    answer: str | None = None  # rank 0's key of the last result, which other ranks may not have read yet
    fresh: dict[str, int] = field(default_factory=dict)  # name -> number of `new_scope` calls with this name


class Connection(Protocol):
    """One rank's connection to the store of its group."""

    patience: float  # default timeout of a gather in seconds
    scopes: defaultdict[str, KeyScope]  # keyed by prefix
    published: set[str]  # this rank's keys in the store

    def __init__(self, patience: float) -> None:
        self.patience, self.scopes, self.published = patience, defaultdict(KeyScope), set()

    def call_store(self, do: Callable[[Store], T], timeout: float) -> T:
        """Run `do` with the store and return its result.

        Raises:
            TransportError: the store fails or does not answer within `timeout` seconds.
        """

    def enqueue(self, do: Callable[[Store], object]) -> None:
        """Run `do` with the store soon, without waiting for it. A failure of the store is ignored."""

    def find_dead_peer(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """Return an error that names a dead rank among `missing`, or None if none of them is known to be dead.

        A waiting rank calls this repeatedly.

        Args:
            missing: ranks of the group whose answers have not arrived.
            names: numbers by which errors call the ranks of the group.
            timeout: longest time of the check in seconds.
        """

    def close(self) -> None:
        """End the connection. Idempotent."""


class CheckSchedule:
    """Schedule of checks that are too expensive for every poll of a wait, such as the check for dead ranks."""

    def __init__(self) -> None:
        self._since = self._last = self._next = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True if a waiting rank should check at time `now`, in seconds of `time.monotonic`.

        Call it at every poll of a wait. After a pause of FIRST_CHECK_SECONDS without a call, a new wait begins.
        """
        if now - self._last > FIRST_CHECK_SECONDS:  # a new wait has begun
            self._since, self._next = now, now + FIRST_CHECK_SECONDS
        self._last = now
        if now < self._next:
            return False
        self._next = now + min(now - self._since, MAX_CHECK_SECONDS)
        return True


class StoreConnection(Connection):
    """A separate connection to a store, used by one thread so that a store that stops answering blocks no caller.

    torch's stores are clients of a server in another process. The connection is separate because a blocked `get` of
    another user must not delay us. The thread is needed because a server that vanished without a reset never answers.

    Args:
        store: the group's store.
        seconds: timeout of connecting.
        group: group whose dead ranks `find_dead_peer` detects; None detects nothing.
    """

    def __init__(self, store: Store, seconds: float = ANSWER_SECONDS, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        self.prefix = ""
        self._group = None if group is None else weakref.ref(group)  # the connection must not keep the group alive
        self._looks = CheckSchedule()
        self._gone: str | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="ringattn-store", daemon=True)
        _SERVING[thread] = self._jobs
        thread.start()
        self._store = store
        try:
            self._store = self.call_store(lambda group_store: _own_store(group_store, seconds), seconds)
        except BaseException:
            self._jobs.put(None)
            raise
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._stop.atexit = False

    def call_store(self, do: Callable[[Store], T], timeout: float) -> T:
        """Run `do` in the thread; see `Connection.call_store`. Once the store has failed, calls raise at once."""
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
            gone = describe_lost_server(0.0)
            raise TransportError(f"the store of the group has not answered for {timeout:g} s{gone}") from None
        except dist.DistError as error:
            cause, where = str(error).splitlines()[0], describe_lost_server(FINAL_STORE_SECONDS)
            self._gone = f"the store of the group is gone ({cause}){where}"
            raise TransportError(self._gone) from error

    def enqueue(self, do: Callable[[Store], object]) -> None:
        store = self._store

        def job() -> None:
            with contextlib.suppress(dist.DistError):
                do(store)

        if self._gone is None:
            self._jobs.put(job)

    def find_dead_peer(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """Detect a dead rank by its gloo connection, or on the same machine by its process.

        Two kinds of dead ranks on other hosts stay undetected: those in a group with NCCL alone, and those that died
        before they first used this group for a ring. Waits for them end by their deadline.
        """
        group = None if self._group is None else self._group()
        if group is None or not self._looks.is_due(time.monotonic()):
            return None
        for rank in missing:
            if connection_closed(group, rank):
                return TransportError(
                    f"rank {names[rank]} is gone: its connection to rank {names[group.rank()]} is closed"
                )
            key = f"{self.prefix}process/{rank}"
            process = self.call_store(lambda store, key=key: store.get(key) if store.check([key]) else b"null", timeout)  # type: ignore[misc]
            if has_ended(decode_value(process, key)):
                return TransportError(f"rank {names[rank]} is gone: its process has ended")
        return None

    def close(self) -> None:
        self._gone = "the group was destroyed"
        self._stop()
        self._store = None  # type: ignore[assignment]  # closes the connection


def connect_store(group: dist.ProcessGroup, seconds: float) -> StoreConnection:
    """Connect to the store of a group within `seconds`.

    Raises:
        TransportError: the store did not accept the connection or did not answer.
    """
    # All supported versions of torch keep a store for every group.
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    process = encode_value(own_process())
    connection = StoreConnection(store, seconds, group)

    def go(own: Store) -> str:
        # A store may outlive the processes: torchrun's store serves the next attempt under another group prefix, which
        # only the group's own store adds. So the first rank writes a random id there, and all our keys contain the id.
        job_id = bytes(store.compare_set("ringattn", "", uuid4().hex)).decode()
        prefix = f"ringattn/{job_id}/{group.group_name}/"
        # A store may also outlive a group and serve the next group of the same name, which must not read old keys.
        opened = own.add(f"{prefix}opened{group.rank()}", 1)
        own.set(f"{prefix}{opened}/process/{group.rank()}", process)  # type: ignore[arg-type]
        return f"{prefix}{opened}/"

    connection.prefix = connection.call_store(go, seconds)
    return connection


def _own_store(store: Store, seconds: float) -> Store:
    """Open another connection to the server of `store`, with keys that do not get the group's prefix.

    Connecting may take `seconds`. Later waits for a key end after ANSWER_SECONDS.
    """
    plain = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(plain, TCPStore):
        # Do not clone(): if the server is gone, clone retries for the group's timeout of half an hour. Pass half of
        # the seconds, because TCPStore may try twice.
        own: Store = TCPStore(
            plain.host, plain.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds / 2)
        )
    else:
        own = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    return own


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the jobs of one store thread in order until None arrives."""
    while (job := jobs.get()) is not None:
        job()
        del job  # release the caller's values before waiting for the next job


# Threads that use stores, with their jobs.
_SERVING: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Callable[[], None] | None]] = (
    weakref.WeakKeyDictionary()
)
# Interval at which the exit of the process checks a thread whose store does not answer.
SHUT_SECONDS = 0.1


@atexit.register
def _join_store_threads() -> None:
    """Wait for every store thread, because a thread that returns after the interpreter's shutdown aborts the process.

    If a thread has not ended after FINAL_STORE_SECONDS, its socket is shut down so that the blocked call returns.
    """
    serving = [*_SERVING.items()]
    for _, jobs in serving:
        jobs.put(None)
    for thread, _ in serving:
        thread.join(FINAL_STORE_SECONDS)
        while thread.is_alive():
            if not shut_socket(thread):
                thread.join(ANSWER_SECONDS)
                break
            thread.join(SHUT_SECONDS)


class LocalConnection(Connection):
    """Connection of virtual ranks to their common store in memory, which always answers."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self._hub: Hub = group._hub
        super().__init__(self._hub.timeout)
        self._lock = threading.Lock()  # shared by the rank's thread and the watchdog

    def call_store(self, do: Callable[[Store], T], timeout: float) -> T:
        with self._lock:
            return do(self._hub.store)

    def enqueue(self, do: Callable[[Store], object]) -> None:
        self.call_store(do, 0.0)

    def find_dead_peer(self, missing: Sequence[int], names: Sequence[int], timeout: float) -> TransportError | None:
        """Return an error if another rank raised, or if a rank of `missing` has returned from `fn`, else None."""
        failure = self._hub.failure
        if failure is not None:
            return WorldAborted(f"{self._group} gave up waiting because another rank raised {type(failure).__name__}")
        gone = self._hub.find_returned(missing)
        if gone:
            return TransportError(f"{self._group} waits for rank {names[gone[0]]}, which has already returned")
        return None

    def close(self) -> None:
        """Do nothing, because the store ends with its world."""


class Control:
    """Exchange of small, rare JSON values between the ranks of one group.

    `gather` and `gather_merged` are collective: every rank calls them in the same order. `publish` and `read_key` never
    wait for other ranks. The ranks are processes (through the store of torch.distributed, on a separate connection) or
    virtual ranks of a `LocalWorld`. Any thread may call. Tuples become lists. No wait exceeds `patience` seconds,
    whatever the group's timeout is; None uses the connection's patience.

        rank 1 ─ value ─┐
        rank 2 ─ value ─┼─► store ─► rank 0: merge ─► store ─► all ranks
        rank 3 ─ value ─┘
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
        """Rank numbers for errors; inherited by scopes."""
        self.stop: Callable[[], str | None] | None = None
        """Called while a rank waits; a returned reason ends the wait. Inherited by scopes."""

    def gather(
        self, value: object, *, what: str, timeout: float | None = None, stop: Callable[[], str | None] | None = None
    ) -> list[object]:
        """Return `value` of every rank, in rank order. See `gather_merged` for the arguments and errors."""
        result = self.gather_merged(value, list, what=what, timeout=timeout, stop=stop)
        assert isinstance(result, list)
        return result

    def gather_merged(
        self,
        value: object,
        merge: Callable[[list[object]], object],
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> object:
        """Return the result of `merge`, which rank 0 applies to the values of all ranks.

        Only rank 0 reads all values. Otherwise the store's traffic would grow with the square of the number of ranks.

        Args:
            value: JSON value of this rank.
            merge: maps the values in rank order to a JSON value; called on rank 0.
            what: name of the exchange in errors.
            timeout: seconds, if less than `patience`.
            stop: called during the wait; a returned reason ends the wait.

        Raises:
            TypeError: `value` is not a JSON value.
            TransportError: the store is gone, `stop` returned a reason, ranks died or did not answer in time, or an
                error, such as one of `merge`, has ended the exchange on rank 0.
        """
        if self.size == 1:
            return decode_value(encode_value(merge([decode_value(encode_value(value), what)])), what)
        scope = self._connection.scopes[self._prefix]
        key, answer = f"gather{scope.gathers}/{{}}".format, f"gather{scope.gathers}/all"
        scope.gathers += 1
        self.publish(key(self.rank), value)
        if self.rank == 0:
            keys = {rank: key(rank) for rank in range(self.size)}
            return self._merge(keys, answer, merge, what=what, timeout=timeout, stop=stop)
        self._wait_for_keys(
            {0: answer}, what, self._clamp_timeout(timeout), stop, lambda: {r: key(r) for r in range(self.size)}
        )
        self.delete_key(key(self.rank))
        message: Any = self.read_key(answer)
        problem, result = message
        if problem:
            raise TransportError(problem)
        return result

    def _merge(
        self, keys: Mapping[int, str], answer: str, merge: Callable[[list[object]], object], *, what: str, **wait: Any
    ) -> object:
        """Collect the values under `keys`, merge them on rank 0, and publish the result or the error under `answer`.

        `wait` has the `timeout` and `stop` of `collect`.
        """
        try:
            merged = decode_value(
                encode_value(merge(self.collect(keys, what=what, **wait))), what
            )  # encode and decode, so that rank 0 gets the same as the others
        except WorldAborted:  # the other ranks see the abort themselves
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
            if key is not None:  # a rank that published for this merge has read the last answer
                self.delete_key(key)
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
        """Wait until each rank in `keys` (rank -> key) has published its key, and return the values in that order.

        Only the ranks that need the values call it. See `gather_merged` for the other arguments and the errors.
        """
        self._wait_for_keys(keys, what, self._clamp_timeout(timeout), stop)
        full = [self._prefix + key for key in keys.values()]
        values = self._connection.call_store(lambda store: store.multi_get(full), self._clamp_timeout(ANSWER_SECONDS))
        return [decode_value(data, key) for data, key in zip(values, full, strict=True)]

    def publish(self, key: str, value: object) -> None:
        """Store `value` under `key`, replacing the previous value. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        self.exchange({key: value})

    def read_key(self, key: str) -> object | None:
        """Return the value last published under `key` by any rank, or None. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        return self.exchange(read=[key]).get(key)

    def exchange(
        self, publish: Mapping[str, object] | None = None, read: Sequence[str] = (), timeout: float = ANSWER_SECONDS
    ) -> dict[str, object]:
        """Publish some keys and then read others, in one request. Missing keys are left out of the result.

        Raises:
            TransportError: the store is gone, or has not answered within `timeout` seconds.
        """
        values = {self._prefix + key: encode_value(value) for key, value in (publish or {}).items()}

        def go(store: Store) -> dict[str, bytes]:
            if self._closed:
                return {}
            self._connection.published.update(values)
            for key, data in values.items():
                store.set(key, data)  # type: ignore[arg-type]  # the stub declares str, but the store accepts bytes
            return {key: store.get(self._prefix + key) for key in read if store.check([self._prefix + key])}

        data_by_key = self._connection.call_store(go, self._clamp_timeout(timeout))
        return {key: decode_value(data, self._prefix + key) for key, data in data_by_key.items()}

    def find_dead_peer(self, missing: Sequence[int], timeout: float | None = None) -> TransportError | None:
        """Return an error if one of these ranks is known to be dead, else None.

        Raises:
            TransportError: the store is gone, or has not answered within `timeout` seconds or `patience`.
        """
        return self._connection.find_dead_peer(missing, self.names, min(self._clamp_timeout(timeout), ANSWER_SECONDS))

    def count(self, key: str, increment: int) -> int:
        """Add to a counter that all ranks share and that starts at 0; return its new value. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        full = self._prefix + key

        def go(store: Store) -> int:
            self._connection.published.add(full)
            return store.add(full, increment)

        return self._connection.call_store(go, self._clamp_timeout(ANSWER_SECONDS))

    def delete_key(self, key: str) -> None:
        """Delete a key that nobody will read again. Does not wait for the store."""
        full = self._prefix + key

        def go(store: Store) -> None:
            self._connection.published.discard(full)
            store.delete_key(full)

        self._connection.enqueue(go)

    def scope(self, name: str) -> Control:
        """Return a control of the same ranks with keys below `name`. The same `name` gives the same keys again."""
        scope = Control(self._connection, self.rank, self.size, f"{self._prefix}{name}/", self.patience)
        scope.names, scope.stop = self.names, self.stop
        return scope

    def new_scope(self, name: str) -> Control:
        """Return a control whose keys no earlier call has used. Every rank calls it in the same order."""
        fresh = self._connection.scopes[self._prefix].fresh
        fresh[name] = fresh.get(name, 0) + 1
        return self.scope(f"{name}{fresh[name]}")

    def close(self) -> None:
        """Stop publishing. The last rank to close deletes everything below this scope from the store.

        Idempotent and never raises, because nobody needs the contents of a store that is gone or silent.
        """

        def go(store: Store) -> None:
            self._closed = True
            mine = [key for key in [*self._connection.published] if key.startswith(self._prefix)]
            self._connection.published.difference_update(mine)
            left = [f"{self._prefix}left/{rank}" for rank in range(self.size)]
            store.set(left[self.rank], encode_value(mine))  # type: ignore[arg-type]
            if store.add(f"{self._prefix}closed", 1) == self.size:
                theirs = [decode_value(data, key) for data, key in zip(store.multi_get(left), left, strict=True)]
                all_keys = [key for keys in theirs if isinstance(keys, list) for key in keys]
                for key in [f"{self._prefix}closed", *left, *all_keys]:
                    store.delete_key(key)

        if not self._closed:
            with contextlib.suppress(TransportError):
                self._connection.call_store(go, FINAL_STORE_SECONDS)
            for prefix in [prefix for prefix in list(self._connection.scopes) if prefix.startswith(self._prefix)]:
                del self._connection.scopes[prefix]

    def _clamp_timeout(self, timeout: float | None) -> float:
        return self.patience if timeout is None else min(timeout, self.patience)

    def _wait_for_keys(
        self,
        wanted: Mapping[int, str],
        what: str,
        timeout: float,
        stop: Callable[[], str | None] | None,
        alternatives: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Wait until each rank in `wanted` (rank -> key) has published its key.

        The error of a timeout names the ranks that have not published their key in `alternatives()` (rank -> key), or
        in `wanted` if that mapping is empty. See `gather_merged` for the other arguments.
        """
        begun, pause = time.monotonic(), FIRST_POLL_SECONDS
        missing, stop = list(wanted), stop or self.stop

        def seconds_left() -> float:
            return min(max(begun + timeout - time.monotonic(), FINAL_STORE_SECONDS), ANSWER_SECONDS)

        def have_keys(keys: Sequence[str]) -> bool:
            full = [self._prefix + key for key in keys]
            return self._connection.call_store(lambda store: store.check(full), seconds_left())

        def have_published(ranks: Sequence[int]) -> bool:
            return have_keys([wanted[rank] for rank in ranks])

        while not have_published(missing):
            # Poll only the first missing key, which is cheap for any number of ranks.
            while True:
                now, reason = time.monotonic(), stop() if stop is not None else None
                # Check for dead ranks first: a rank may publish its value and then end, and the value still counts.
                dead_peer_error = self._connection.find_dead_peer(missing[:1], self.names, seconds_left())
                if have_published(missing[:1]):
                    break
                error = dead_peer_error if reason is None else TransportError(f"{what}: {reason}")
                if error is None and now >= begun + timeout:
                    silent = [
                        rank for rank, key in (alternatives() or wanted).items() if not have_keys([key])
                    ] or missing
                    late = ", ".join(str(self.names[rank]) for rank in silent)
                    error = TransportError(f"{what}: no answer from rank {late} within {timeout:g} s")
                if error is not None:
                    raise error
                time.sleep(pause)
                pause = min(1.5 * pause, MAX_POLL_SECONDS)
            del missing[0]


def open_control(group: LocalGroup | dist.ProcessGroup, patience: float | None = None) -> Control:
    """Return the control of a group, which shares one connection. The first call is collective.

    Args:
        group: group of the ranks.
        patience: longest wait in seconds, including connecting. None: 300, or the world's timeout in a `LocalWorld`.

    Raises:
        TransportError: the store did not accept a connection in time.
    """
    cache = get_group_cache(group)
    if isinstance(group, LocalGroup):
        local = cache.setdefault(CONNECTION_KEY, LocalConnection(group))
        assert isinstance(local, LocalConnection)
        return Control(local, group.rank(), group.size(), "ringattn/", patience)
    if CONNECTION_KEY not in cache:
        cache[CONNECTION_KEY] = connect_store(group, min(ANSWER_SECONDS, patience or ANSWER_SECONDS))
    connection = cache[CONNECTION_KEY]
    assert isinstance(connection, StoreConnection)
    return Control(connection, group.rank(), group.size(), connection.prefix, patience)
