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

from ..control import LONGEST_POLL_SECONDS, Control
from ..transport import TransportError
from ..world import WorldAborted

Fields = Mapping[str, str]  # name -> repr of the value

# Number of past calls that a rank can still state; more than ranks can be apart.
KEPT_CALLS = 256
# The prediction looks up this many preceding calls, because layers of several kinds alternate, and then the last call.
CONTEXT = 8
# Number of remembered predictions.
MOST = 4096
# Stands for a call that was not made. It counts the same on every rank, so the ranks can go on together.
NOT_MADE = ("", "")

# First pause of a waiting rank; the others usually arrive within one round trip to the store.
FIRST_PAUSE_SECONDS = 2e-5
# A rank that has waited this long states its call and asks the others ...
LATE_SECONDS = 0.02
# ... and repeats the question this often, because a question about another call may have replaced it.
ASK_SECONDS = 0.25
# Time to wait for a statement of a rank that is gone, or for the watchdog of a rank that has returned.
WORD_SECONDS = 0.6
# Characters of a value that are kept before its digest; a topology of 1,024 ranks has 5,000.
LONG_TEXT = 200
# Number of ranks whose statements are read at once; all ranks wait at the same time and share one store.
LOOKS = 16


class Said(NamedTuple):
    """A rank's statement about one call."""

    fields: Fields | None  # None: the rank refused the call
    refusal: str | None
    going_on: bool  # the rank did not stop, so its transfers may be in flight


class Verdict(NamedTuple):
    """Reason why the ranks cannot go on, with the same text on every rank."""

    text: str
    in_flight: bool  # some rank did not stop, so the transports are lost, too


class _Call(NamedTuple):
    number: int
    fields: Fields | None  # None: the call was refused by this rank or another


def digest_of(*parts: object) -> str:
    """Return a digest that identifies these parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def brief(value: object) -> str:
    """Return a short text that identifies a value, because every rank may read it from every other."""
    text = repr(value)
    return text if len(text) <= LONG_TEXT else f"{text[:LONG_TEXT]}…, digest {digest_of(text)}"


def difference(said: Mapping[int, Fields]) -> str | None:
    """Return the first field that differs between ranks and its values by rank, or None if all are equal."""
    for name in dict.fromkeys(name for _, fields in sorted(said.items()) for name in fields):
        values = {rank: fields.get(name, "not given") for rank, fields in sorted(said.items())}
        if len(set(values.values())) > 1:
            by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"{name} differs between ranks ({by_rank}): all ranks of a ring must pass the same"
    return None


class _Expected:
    """Predicts the next call from the previous calls. Ranks that made the same calls predict the same."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], str] = {}
        self._values: dict[str, str] = {}
        self._last: deque[str] = deque(maxlen=CONTEXT)

    def is_next(self, fields: str, values: str) -> bool:
        """Return True if the call is predicted.

        The predicted fields are those that followed the same preceding calls, or else the fields of the last call. The
        predicted values are those of the last call with these fields.
        """
        known = (self._next[context] for context in self._contexts() if context in self._next)
        return fields == next(known, self._last[-1] if self._last else None) and values == self._values.get(fields)

    def add(self, fields: str, values: str) -> None:
        """Record a call that was made."""
        for known in (self._next, self._values):
            if len(known) >= MOST:  # all ranks clear at the same call
                known.clear()
        self._next |= dict.fromkeys(self._contexts(), fields)
        self._values[fields] = values
        self._last.append(fields)

    def _contexts(self) -> tuple[tuple[str, ...], ...]:
        last = tuple(self._last)
        return last, last[-1:]


class Preflight:
    """One rank's calls, and its statements about them.

    A rank that waits at a call, or refuses a call, publishes its statement and asks the others by writing one key. The
    watchdog of a rank that has passed the call answers. The compute thread calls `agree` and `refuse`; the watchdog
    calls `wanted` and `hear`.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._expected = _Expected()
        self._calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._chain = ""  # digest of all calls
        self._lock = threading.RLock()  # protects all attributes below
        self._met = 0  # last call that all ranks are known to have reached or stated
        self._words: dict[int, Said] = {}  # this rank's statements, from the last agreed call on
        self._unpublished = False  # the watchdog should publish the statements
        self._heard: dict[int, dict[int, Said]] = {}  # call that this rank has passed -> statements by rank
        self._turn = 0  # offset into the ranks whose statements to read
        self._arrived: str | None = None  # key of the last arrival count

    @property
    def number(self) -> int:
        """Number of calls so far."""
        calls = self._calls
        return calls[-1].number if calls else 0

    def agree(
        self,
        fields: Mapping[str, object],
        values: Mapping[str, object] | None = None,
        *,
        of: int | None = None,
        always: bool = False,
        stop: Callable[[], str | None],
    ) -> Verdict | None:
        """Count a call. If the call is not predicted, wait until all ranks have arrived at the same call.

        The wait is limited by the control's patience. See `Watch.agree` for the arguments. A reason returned by `stop`
        ends the wait.

        Raises:
            TransportError: a rank did not answer, `stop` returned a reason, or the store is gone.
        """
        number = self.number + 1
        texts, changing = ({name: brief(value) for name, value in (part or {}).items()} for part in (fields, values))
        all_fields = texts | changing | ({} if of is None else {"backward of call": str(of)})
        keys = digest_of(texts, None if of is None else number - of), digest_of(changing)
        verdict = None
        if always or not self._expected.is_next(*keys):
            verdict = self._meet(number, all_fields, digest_of(self._chain, keys), stop)
        self._count(None if verdict else all_fields, NOT_MADE if verdict else keys)
        return verdict

    def refuse(self, error: BaseException) -> None:
        """Count a call that this rank does not make, and tell the others why. Never raises."""
        number, said = self.number + 1, Said(None, f"{type(error).__name__}: {error}", False)
        self._count(None, NOT_MADE)
        with self._lock:
            self._heard[number] = {self._control.rank: said}
        with contextlib.suppress(TransportError):  # without a store the other ranks' deadlines end their waits
            self._say(number, said)

    def wanted(self) -> list[str]:
        """Return the keys that the watchdog should read."""
        with self._lock:
            missing = {rank for said in self._heard.values() for rank in range(self._control.size) if rank not in said}
        return ["asked", *map(_words_of, self._some(sorted(missing)))]

    def hear(self, published: Mapping[str, object]) -> tuple[dict[str, object], Verdict | None]:
        """Process the published values of those keys; return values to publish and a verdict, if there is one."""
        with self._lock:
            asked = published.get("asked")
            requested = asked if isinstance(asked, int) else self._met
            if self._met < requested <= self.number and requested not in self._heard:
                call = next((call for call in reversed(list(self._calls)) if call.number == requested), None)
                if call is None or call.fields is not None:
                    said = Said(None if call is None else call.fields, None, True)
                    self._words[requested], self._unpublished = said, True
                    self._heard[requested] = {self._control.rank: said}
            verdict = self._judged(published)
            publish: dict[str, object] = {_words_of(self._control.rank): self._own_words()} if self._unpublished else {}
            self._unpublished = False
            refused = min((call for call, said in self._heard.items() if said[self._control.rank].refusal), default=0)
            if refused and not self._met < requested <= refused:  # another question was there or replaced it
                publish["asked"] = refused
            return publish, verdict

    def _judged(self, published: Mapping[str, object]) -> Verdict | None:
        """Return a verdict on a call that this rank has passed already, or None."""
        for number, said in sorted(self._heard.items()):
            for rank in range(self._control.size):
                if (word := _word(published, rank, number)) is not None:
                    said[rank] = word
            verdict = self._verdict_of(said)
            if verdict is not None and verdict.in_flight:
                return verdict
            if len(said) == self._control.size:  # all ranks raise for the same reason, or agree
                self._all_met(number)
        return None

    def _verdict_of(self, said: Mapping[int, Said]) -> Verdict | None:
        """Judge the statements about one call; return None if the ranks can go on."""
        in_flight = any(word.going_on for word in said.values())
        named = sorted((self._control.names[rank], word) for rank, word in said.items())
        for name, word in named:
            if word.refusal is not None:
                return Verdict(f"rank {name} refused this call: {word.refusal}", in_flight)
        differs = difference({name: word.fields for name, word in named if word.fields is not None})
        return None if differs is None else Verdict(differs, in_flight)

    def _meet(self, number: int, fields: Fields, chain: str, stop: Callable[[], str | None]) -> Verdict | None:
        """Wait until all ranks have arrived at this call. If a rank is at a different call, compare all statements."""
        control = self._control
        here = f"arrived{number}/{chain}"
        verdict = None
        if control.count(here, 1) < control.size:
            verdict = self._wait(number, fields, here, stop)
        if verdict is not None:
            control.forget(here)
        else:
            if self._arrived is not None:  # a rank that has arrived here no longer reads the previous count
                control.forget(self._arrived)
            self._arrived = here
        with self._lock:
            self._all_met(number)
        return verdict

    def _wait(self, number: int, fields: Fields, here: str, stop: Callable[[], str | None]) -> Verdict | None:
        """Return None once all ranks have arrived, or a verdict once every rank has stated its call."""
        control, mine = self._control, Said(fields, None, False)
        what = f"comparing call {number}"
        said = {control.rank: mine}
        begun = gone_at = time.monotonic()
        gone: TransportError | None = None
        pause, ask_at = FIRST_PAUSE_SECONDS, begun + LATE_SECONDS
        while True:
            # Check for dead ranks before reading, because a rank may arrive or state its call and then end.
            silent = [rank for rank in range(control.size) if rank not in said]
            now, reason, hopeless = time.monotonic(), stop(), control.hopeless(silent)
            if all(word == mine for word in said.values()) and control.count(here, 0) == control.size:
                return None
            if now >= ask_at:
                self._say(number, mine)
                ask_at = now + ASK_SECONDS
            if number in self._words:
                some = self._some(silent)
                published = control.exchange(look=[_words_of(rank) for rank in some])
                words = {rank: _word(published, rank, number) for rank in some}
                said |= {rank: word for rank, word in words.items() if word is not None}
            if len(said) == control.size and not all(word == mine for word in said.values()):
                return self._verdict_of(said) or Verdict(
                    f"the ranks did not make the same calls before call {number}", True
                )
            if reason is not None:
                raise TransportError(f"{what}: {reason}")
            if hopeless is not None and gone is None:  # keep the first time
                gone, gone_at = hopeless, now
            if gone is not None and (isinstance(gone, WorldAborted) or now > gone_at + WORD_SECONDS):
                raise gone
            if now - begun >= control.patience:
                late = ", ".join(str(control.names[rank]) for rank in range(control.size) if rank not in said)
                if not late:
                    return Verdict(f"the ranks did not make the same calls before call {number}", True)
                raise TransportError(f"{what}: no answer from rank {late} within {control.patience:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_SECONDS)

    def _say(self, number: int, said: Said) -> None:
        """Publish this rank's statement and ask for those of the others."""
        with self._lock:
            self._words[number], self._unpublished = said, True
            words = {_words_of(self._control.rank): self._own_words()}
        requested = self._control.look("asked")
        # Another rank may be asking about an earlier call, perhaps waiting for this rank. Keep that question.
        standing = isinstance(requested, int) and self._met < requested < number
        self._control.exchange(words if standing else {**words, "asked": number})

    def _own_words(self) -> dict[str, object]:
        return {str(number): list(said) for number, said in self._words.items()}

    def _some(self, ranks: list[int]) -> list[int]:
        """Return the ranks whose statements to read now, taking turns if there are many."""
        if len(ranks) <= LOOKS:
            return ranks
        self._turn += LOOKS
        start = self._turn % len(ranks)
        return (ranks[start:] + ranks[:start])[:LOOKS]

    def _all_met(self, number: int) -> None:
        """Record that all ranks have agreed on or stated a call, and drop everything about earlier calls."""
        self._met = number
        self._words = {call: said for call, said in self._words.items() if call >= number}
        self._heard = {call: said for call, said in self._heard.items() if call > number}

    def _count(self, fields: Fields | None, keys: tuple[str, str]) -> None:
        self._calls.append(_Call(self.number + 1, fields))
        self._chain = digest_of(self._chain, keys)
        self._expected.add(*keys)


def _words_of(rank: int) -> str:
    return f"words/{rank}"


def _word(published: Mapping[str, object], rank: int, number: int) -> Said | None:
    words = published.get(_words_of(rank))
    word = words.get(str(number)) if isinstance(words, dict) else None
    return Said(*word) if isinstance(word, list) else None
