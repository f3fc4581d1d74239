"""Preflight: comparison of the ranks' calls before anything is sent.

Every call has a number, and all ranks make the same calls in the same order. A rule that is equal on every rank
predicts each call from the previous calls. A rank whose call matches the prediction does not communicate. A rank whose
call differs stops until all ranks have arrived at the same call. If they have not, each rank states its call, and the
watchdog of a rank that has gone on answers for that rank. So two ranks cannot make different calls unless at least one
of them stops first.

    call as predicted      ──────────────────────────────►  go on without communication
    call not as predicted  ─► count arrivals ─► all here ─►  go on
                                     └► compare statements ─► verdict (the same text on all ranks)
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..control import MAX_POLL_SECONDS, Control
from ..transport import TransportError
from ..world import WorldAborted

Fields = Mapping[str, str]  # name -> repr of the value

# Number of past calls that a rank can still state; more than ranks can be apart.
MAX_REMEMBERED_CALLS = 256
# The prediction looks up this many preceding calls, because layers of several kinds alternate, and then the last call.
CONTEXT_CALLS = 8
# Number of remembered predictions.
MAX_EXPECTATIONS = 4096
# Stands for a call that was not made. It counts the same on every rank, so the ranks can go on together.
REFUSED_CALL_KEYS = ("", "")

# First pause of a waiting rank; the others usually arrive within one round trip to the store.
FIRST_PAUSE_SECONDS = 2e-5
# A rank that has waited this long states its call and asks the others ...
LATE_SECONDS = 0.02
# ... and repeats the question this often, because a question about another call may have replaced it.
REPEAT_SECONDS = 0.25
# Time to wait for a statement of a rank that is gone, or for the watchdog of a rank that has returned.
LAST_STATEMENT_SECONDS = 0.6
# Characters of a value that are kept before its digest; a topology of 1,024 ranks has 5,000.
LONG_TEXT = 200
# Number of ranks whose statements are read at once; all ranks wait at the same time and share one store.
MAX_READ_RANKS = 16


class CallStatement(NamedTuple):
    """A rank's statement about one call."""

    fields: Fields | None  # None: the rank refused the call
    refusal: str | None
    is_running: bool  # the rank did not stop, so its transfers may be in flight


class Verdict(NamedTuple):
    """Reason why the ranks cannot go on, with the same text on every rank."""

    text: str
    is_in_flight: bool  # some rank did not stop, so its transfers may be in flight and the ring must fail


class _PastCall(NamedTuple):
    """A call that this rank has made, for later statements."""

    number: int
    fields: Fields | None  # None: the call was refused by this rank or another


def hash_parts(*parts: object) -> str:
    """Return a digest of the `repr` of these parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def shorten_repr(value: object) -> str:
    """Return a short text that identifies a value, because every rank may read it from every other."""
    text = repr(value)
    return text if len(text) <= LONG_TEXT else f"{text[:LONG_TEXT]}…, digest {hash_parts(text)}"


def find_difference(fields_by_rank: Mapping[int, Fields]) -> str | None:
    """Return the first field that differs between ranks and its values by rank, or None if all are equal."""
    for name in dict.fromkeys(name for _, fields in sorted(fields_by_rank.items()) for name in fields):
        values = {rank: fields.get(name, "not given") for rank, fields in sorted(fields_by_rank.items())}
        if len(set(values.values())) > 1:
            by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"{name} differs between ranks ({by_rank}). All ranks of a ring must pass the same value"
    return None


class _CallPredictor:
    """Predicts the next call from the previous calls. Ranks that made the same calls predict the same."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], str] = {}
        self._values: dict[str, str] = {}
        self._last: deque[str] = deque(maxlen=CONTEXT_CALLS)

    def is_next(self, fields: str, values: str) -> bool:
        """Return True if the call is predicted. `fields` and `values` are digests.

        The predicted fields are those that followed the same preceding calls, or else the fields of the last call. The
        predicted values are those of the last call with these fields.
        """
        known = (self._next[context] for context in self._contexts() if context in self._next)
        return fields == next(known, self._last[-1] if self._last else None) and values == self._values.get(fields)

    def add(self, fields: str, values: str) -> None:
        """Record a call that was made, by the digests of its fields and values."""
        for known in (self._next, self._values):
            if len(known) >= MAX_EXPECTATIONS:  # all ranks clear at the same call
                known.clear()
        self._next |= dict.fromkeys(self._contexts(), fields)
        self._values[fields] = values
        self._last.append(fields)

    def _contexts(self) -> tuple[tuple[str, ...], ...]:
        """Return the digests of the last CONTEXT_CALLS calls, and that of the last call alone."""
        last = tuple(self._last)
        return last, last[-1:]


class Preflight:
    """One rank's calls, and its statements about them.

    A rank that waits at a call, or refuses a call, publishes its statement and asks the others by writing one key. The
    watchdog of a rank that has passed the call answers. The compute thread calls `agree_on_call` and `refuse_call`; the
    watchdog calls `keys_to_read` and `process_published`.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._expected = _CallPredictor()
        self._calls: deque[_PastCall] = deque(maxlen=MAX_REMEMBERED_CALLS)
        self._chain = ""  # digest of all calls
        self._lock = threading.RLock()  # protects all attributes below
        self._last_agreed_call = 0  # last call that all ranks are known to have reached or stated
        self._own_statements: dict[int, CallStatement] = {}  # this rank's statements, from the last agreed call on
        self._unpublished = False  # the watchdog should publish the statements
        self._received: dict[int, dict[int, CallStatement]] = {}  # call that this rank has passed -> statements by rank
        self._read_offset = 0  # offset into the ranks whose statements to read
        self._last_arrival_key: str | None = None  # key of the last arrival count

    @property
    def call_count(self) -> int:
        """Number of calls so far."""
        calls = self._calls
        return calls[-1].number if calls else 0

    def agree_on_call(
        self,
        fields: Mapping[str, object],
        values: Mapping[str, object] | None = None,
        *,
        forward_number: int | None = None,
        is_forced: bool = False,
        stop: Callable[[], str | None],
    ) -> Verdict | None:
        """Count a call. If the call is not predicted, wait until all ranks have arrived at the same call.

        The wait is limited by the control's patience. See `Watch.agree_on_call` for the arguments. A reason returned by
        `stop` ends the wait.

        Returns:
            None if the ranks can go on, or else the reason why they cannot.

        Raises:
            TransportError: a rank did not answer, `stop` returned a reason, or the store is gone.
        """
        number = self.call_count + 1
        texts, changing = (
            {name: shorten_repr(value) for name, value in (part or {}).items()} for part in (fields, values)
        )
        all_fields = texts | changing | ({} if forward_number is None else {"backward of call": str(forward_number)})
        keys = hash_parts(texts, None if forward_number is None else number - forward_number), hash_parts(changing)
        verdict = None
        if is_forced or not self._expected.is_next(*keys):
            verdict = self._wait_for_ranks(number, all_fields, hash_parts(self._chain, keys), stop)
        self._count(None if verdict else all_fields, REFUSED_CALL_KEYS if verdict else keys)
        return verdict

    def refuse_call(self, error: BaseException) -> None:
        """Count a call that this rank does not make, and tell the others why. Never raises."""
        number, refusal = self.call_count + 1, CallStatement(None, f"{type(error).__name__}: {error}", False)
        self._count(None, REFUSED_CALL_KEYS)
        with self._lock:
            self._received[number] = {self._control.rank: refusal}
        with contextlib.suppress(TransportError):  # without a store the other ranks' deadlines end their waits
            self._publish_statement(number, refusal)

    def keys_to_read(self) -> list[str]:
        """Return the keys of the store whose values `process_published` needs."""
        with self._lock:
            ranks, received = range(self._control.size), self._received.values()
            missing = {rank for statements in received for rank in ranks if rank not in statements}
        return ["asked", *map(_statement_key, self._next_ranks(sorted(missing)))]

    def process_published(self, published: Mapping[str, object]) -> tuple[dict[str, object], Verdict | None]:
        """Process what other ranks have published; `published` maps `keys_to_read` to values, without missing keys.

        Returns:
            Values to publish by key, and the reason why the ranks cannot go on or None.
        """
        with self._lock:
            asked = published.get("asked")
            requested = asked if isinstance(asked, int) else self._last_agreed_call
            if self._last_agreed_call < requested <= self.call_count and requested not in self._received:
                call = next((call for call in reversed(list(self._calls)) if call.number == requested), None)
                if call is None or call.fields is not None:
                    own = CallStatement(None if call is None else call.fields, None, True)
                    self._own_statements[requested], self._unpublished = own, True
                    self._received[requested] = {self._control.rank: own}
            verdict = self._judge_passed_calls(published)
            publish: dict[str, object] = (
                {_statement_key(self._control.rank): self._pack_statements()} if self._unpublished else {}
            )
            self._unpublished = False
            own_statements = {call: by_rank[self._control.rank] for call, by_rank in self._received.items()}
            refused = min((call for call, own in own_statements.items() if own.refusal), default=0)
            # Another question was there before, or has replaced the question about the refused call.
            if refused and not self._last_agreed_call < requested <= refused:
                publish["asked"] = refused
            return publish, verdict

    def _judge_passed_calls(self, published: Mapping[str, object]) -> Verdict | None:
        """Return a verdict on a call that this rank has passed already, or None."""
        for number, statements in sorted(self._received.items()):
            for rank in range(self._control.size):
                if (statement := _parse_statement(published, rank, number)) is not None:
                    statements[rank] = statement
            verdict = self._judge(statements)
            if verdict is not None and verdict.is_in_flight:
                return verdict
            if len(statements) == self._control.size:  # all ranks raise for the same reason, or agree
                self._set_agreed(number)
        return None

    def _judge(self, statements: Mapping[int, CallStatement]) -> Verdict | None:
        """Return the reason why the ranks cannot go on after their statements about one call, or None if they can."""
        in_flight = any(statement.is_running for statement in statements.values())
        named = sorted((self._control.names[rank], statement) for rank, statement in statements.items())
        for name, statement in named:
            if statement.refusal is not None:
                return Verdict(f"rank {name} refused this call: {statement.refusal}", in_flight)
        calls = {name: statement.fields for name, statement in named if statement.fields is not None}
        difference = find_difference(calls)
        return None if difference is None else Verdict(difference, in_flight)

    def _wait_for_ranks(
        self, number: int, fields: Fields, chain: str, stop: Callable[[], str | None]
    ) -> Verdict | None:
        """Announce that this rank has arrived at the call, and wait for the others.

        `chain` is a digest of all calls up to this call, so that only ranks with the same calls count as arrived.

        Returns:
            None if all ranks arrived at the same call, else a verdict from their statements.
        """
        control = self._control
        arrival_key = f"arrived{number}/{chain}"
        verdict = None
        if control.count(arrival_key, 1) < control.size:
            verdict = self._wait(number, fields, arrival_key, stop)
        if verdict is not None:
            control.delete_key(arrival_key)
        else:
            if self._last_arrival_key is not None:  # a rank that has arrived here no longer reads the previous count
                control.delete_key(self._last_arrival_key)
            self._last_arrival_key = arrival_key
        with self._lock:
            self._set_agreed(number)
        return verdict

    def _wait(self, number: int, fields: Fields, arrival_key: str, stop: Callable[[], str | None]) -> Verdict | None:
        """Return None once all ranks have arrived, or a verdict once every rank has stated its call."""
        control, own = self._control, CallStatement(fields, None, False)
        what = f"comparing call {number}"
        statements = {control.rank: own}
        begun = died_at = time.monotonic()
        dead_peer_error: TransportError | None = None
        pause, ask_at = FIRST_PAUSE_SECONDS, begun + LATE_SECONDS
        while True:
            # Check for dead ranks before reading, because a rank may arrive or state its call and then end.
            silent = [rank for rank in range(control.size) if rank not in statements]
            now, reason, peer_error = time.monotonic(), stop(), control.find_dead_peer(silent)
            if (
                all(statement == own for statement in statements.values())
                and control.count(arrival_key, 0) == control.size
            ):
                return None
            if now >= ask_at:
                self._publish_statement(number, own)
                ask_at = now + REPEAT_SECONDS
            if number in self._own_statements:
                ranks_to_read = self._next_ranks(silent)
                published = control.exchange(read=[_statement_key(rank) for rank in ranks_to_read])
                parsed = {rank: _parse_statement(published, rank, number) for rank in ranks_to_read}
                statements |= {rank: statement for rank, statement in parsed.items() if statement is not None}
            if len(statements) == control.size and not all(statement == own for statement in statements.values()):
                return self._judge(statements) or Verdict(
                    f"the ranks did not make the same calls before call {number}", True
                )
            if reason is not None:
                raise TransportError(f"{what}: {reason}")
            if peer_error is not None and dead_peer_error is None:  # keep the first time
                dead_peer_error, died_at = peer_error, now
            if dead_peer_error is not None and (
                isinstance(dead_peer_error, WorldAborted) or now > died_at + LAST_STATEMENT_SECONDS
            ):
                raise dead_peer_error
            if now - begun >= control.patience:
                late = ", ".join(str(control.names[rank]) for rank in range(control.size) if rank not in statements)
                if not late:
                    return Verdict(f"the ranks did not make the same calls before call {number}", True)
                raise TransportError(f"{what}: no answer from rank {late} within {control.patience:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, MAX_POLL_SECONDS)

    def _publish_statement(self, number: int, statement: CallStatement) -> None:
        """Publish this rank's statement about a call, and ask the other ranks for theirs."""
        with self._lock:
            self._own_statements[number], self._unpublished = statement, True
            values = {_statement_key(self._control.rank): self._pack_statements()}
        requested = self._control.read_key("asked")
        # Another rank may be asking about an earlier call, perhaps waiting for this rank. Keep that question.
        is_earlier_question = isinstance(requested, int) and self._last_agreed_call < requested < number
        self._control.exchange(values if is_earlier_question else {**values, "asked": number})

    def _pack_statements(self) -> dict[str, object]:
        """Return this rank's statements as JSON, by the number of the call."""
        return {str(number): list(said) for number, said in self._own_statements.items()}

    def _next_ranks(self, ranks: list[int]) -> list[int]:
        """Return the ranks whose statements to read now, taking turns if there are many."""
        if len(ranks) <= MAX_READ_RANKS:
            return ranks
        self._read_offset += MAX_READ_RANKS
        start = self._read_offset % len(ranks)
        return (ranks[start:] + ranks[:start])[:MAX_READ_RANKS]

    def _set_agreed(self, number: int) -> None:
        """Record that all ranks have agreed on a call or stated it, and drop the statements about earlier calls."""
        self._last_agreed_call = number
        self._own_statements = {call: statements for call, statements in self._own_statements.items() if call >= number}
        self._received = {call: statements for call, statements in self._received.items() if call > number}

    def _count(self, fields: Fields | None, keys: tuple[str, str]) -> None:
        """Record a call. `keys` are the digests of its fields and values; `fields` is None for a refused call."""
        self._calls.append(_PastCall(self.call_count + 1, fields))
        self._chain = hash_parts(self._chain, keys)
        self._expected.add(*keys)


def _statement_key(rank: int) -> str:
    return f"words/{rank}"


def _parse_statement(published: Mapping[str, object], rank: int, number: int) -> CallStatement | None:
    """Return the statement of a rank about call `number` from the values of the store, or None."""
    statements = published.get(_statement_key(rank))
    statement = statements.get(str(number)) if isinstance(statements, dict) else None
    return CallStatement(*statement) if isinstance(statement, list) else None
