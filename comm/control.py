"""Small things that the ranks of a group tell each other through a store, beside the bytes that transports move."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .kept import LINE, kept_of
from .store_line import ANSWER_SECONDS, Line, LocalLine, StoreLine, open_line
from .transport import TransportError, decoded, encoded
from .transports.local import LocalGroup
from .transports.mailboxes import WorldAborted

# What a rank that gives up, or leaves, grants the store for its last words.
LAST_SECONDS = 1.0
# How often `gather` looks for the others' values: at first so that ranks in step lose nothing, later so that 1,000
# ranks that wait for one do not keep the store busy.
FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 2e-4, 2e-2


class Control:
    """What the ranks of one group tell each other: small, ready for JSON, rare.

    `gather` and `merged` are collective, every rank in the same order; `publish` and `look` wait for nobody. The ranks
    can be processes (through the store of torch.distributed, on a connection of its own) or the virtual ranks of a
    `LocalWorld`. Any thread may call. Tuples come as lists. No wait is longer than `patience` seconds, whatever the
    timeout of the group; that of the line where it is None.
    """

    def __init__(self, line: Line, rank: int, size: int, prefix: str, patience: float | None = None) -> None:
        self.rank = rank
        self.size = size
        self.patience = line.patience if patience is None else patience
        self._line = line
        self._prefix = prefix
        self._closed = False

    def gather(
        self,
        value: object,
        *,
        what: str,
        timeout: float | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> list[object]:
        """`value` of every rank, in rank order; otherwise as `merged`."""
        found = self.merged(value, list, what=what, timeout=timeout, stop=stop)
        assert isinstance(found, list)
        return found

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
        scope = self._line.scopes[self._prefix]
        key, answer = f"gather{scope.gathers}/{{}}".format, f"gather{scope.gathers}/all"
        scope.gathers += 1
        self.publish(key(self.rank), value)
        if self.rank == 0:
            keys = {rank: key(rank) for rank in range(self.size)}
            return self._merge(keys, answer, merge, what=what, timeout=timeout, stop=stop)
        self._await({0: answer}, what, self._within(timeout), stop, lambda: {r: key(r) for r in range(self.size)})
        self.forget(key(self.rank))
        told: Any = self.look(answer)
        problem, found = told
        if problem:
            raise TransportError(problem)
        return found

    def _merge(
        self, keys: Mapping[int, str], answer: str, merge: Callable[[list[object]], object], *, what: str, **wait: Any
    ) -> object:
        """Rank 0's part: the others wait for its answer, so that it says what went wrong, too."""
        try:
            merged = decoded(encoded(merge(self.collect(keys, what=what, **wait))), what)  # as the others see it
        except WorldAborted:  # they see that for themselves
            raise
        except BaseException as error:
            told = (
                str(error) if isinstance(error, TransportError) else f"{what}: rank 0: {type(error).__name__}: {error}"
            )
            with contextlib.suppress(TransportError):
                self.publish(answer, (told, None))
            raise
        self.publish(answer, (None, merged))
        scope = self._line.scopes[self._prefix]
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
        found = self._line.ask(lambda store: store.multi_get(full), self._within(ANSWER_SECONDS))
        return [decoded(data, key) for data, key in zip(found, full, strict=True)]

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
            self._line.published.update(values)
            for key, data in values.items():
                store.set(key, data)  # type: ignore[arg-type]  # the stub knows str alone, the store takes bytes
            return {key: store.get(self._prefix + key) for key in look if store.check([self._prefix + key])}

        found = self._line.ask(go, self._within(timeout))
        return {key: decoded(data, self._prefix + key) for key, data in found.items()}

    def hopeless(self, missing: Sequence[int]) -> TransportError | None:
        """Why nothing will come from these ranks any more, where that is known."""
        return self._line.hopeless(missing)

    def count(self, key: str, more: int) -> int:
        """Add to a number that all ranks share, at first 0; what it is then. Waits for no other rank.

        Raises:
            TransportError: the store is gone.
        """
        full = self._prefix + key

        def go(store: Store) -> int:
            self._line.published.add(full)
            return store.add(full, more)

        return self._line.ask(go, self._within(ANSWER_SECONDS))

    def forget(self, key: str) -> None:
        """Take away what nobody will look for any more. Waits for nobody, the store included."""
        full = self._prefix + key

        def go(store: Store) -> None:
            self._line.published.discard(full)
            store.delete_key(full)

        self._line.tell(go)

    def scope(self, name: str) -> Control:
        """The same ranks with other keys; the same `name` names the same keys again."""
        return Control(self._line, self.rank, self.size, f"{self._prefix}{name}/", self.patience)

    def fresh_scope(self, name: str) -> Control:
        """Keys that nobody has used: every rank calls it in the same order."""
        fresh = self._line.scopes[self._prefix].fresh
        fresh[name] = fresh.get(name, 0) + 1
        return self.scope(f"{name}{fresh[name]}")

    def close(self) -> None:
        """Publish nothing any more; the last rank to call takes everything below this scope out of the store.

        Idempotent. Raises nothing: what a store keeps that is gone, or silent, is nobody's concern.
        """

        def go(store: Store) -> None:
            self._closed = True
            mine = [key for key in [*self._line.published] if key.startswith(self._prefix)]
            self._line.published.difference_update(mine)
            left = [f"{self._prefix}left/{rank}" for rank in range(self.size)]
            store.set(left[self.rank], encoded(mine))  # type: ignore[arg-type]
            if store.add(f"{self._prefix}closed", 1) == self.size:
                theirs = [decoded(data, key) for data, key in zip(store.multi_get(left), left, strict=True)]
                told = [key for keys in theirs if isinstance(keys, list) for key in keys]
                for key in [f"{self._prefix}closed", *left, *told]:
                    store.delete_key(key)

        if not self._closed:
            with contextlib.suppress(TransportError):
                self._line.ask(go, LAST_SECONDS)
            for prefix in [prefix for prefix in list(self._line.scopes) if prefix.startswith(self._prefix)]:
                del self._line.scopes[prefix]

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
        missing = list(wanted)

        def there(keys: Sequence[str]) -> bool:
            full = [self._prefix + key for key in keys]
            left = begun + timeout - time.monotonic()
            return self._line.ask(lambda store: store.check(full), min(max(left, LAST_SECONDS), ANSWER_SECONDS))

        def all_there(ranks: Sequence[int]) -> bool:
            return there([wanted[rank] for rank in ranks])

        while not all_there(missing):
            # Only the first that is missing is asked for again: cheap, however many ranks wait.
            while True:
                now, reason = time.monotonic(), stop() if stop is not None else None
                # Before the look: a rank may leave its value and be gone, and that value is still an answer.
                hopeless = self._line.hopeless(missing[:1])
                if all_there(missing[:1]):
                    break
                error = hopeless if reason is None else TransportError(f"{what}: {reason}")
                if error is None and now >= begun + timeout:
                    silent = [rank for rank, key in (said() or wanted).items() if not there([key])] or missing
                    late = ", ".join(map(str, silent))
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
        local = kept.setdefault(LINE, LocalLine(group))
        assert isinstance(local, LocalLine)
        return Control(local, group.rank(), group.size(), "ringattn/", patience)
    if LINE not in kept:
        kept[LINE] = open_line(group, min(ANSWER_SECONDS, patience or ANSWER_SECONDS))
    line = kept[LINE]
    assert isinstance(line, StoreLine)
    return Control(line, group.rank(), group.size(), line.prefix, patience)
