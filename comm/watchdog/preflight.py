"""What the ranks of a ring must have in common, compared before anything moves.

Every call has a number, and all ranks make the same calls in the same order. What the next one will be follows from
those before: by the same rule on every rank. A rank whose call is the expected one asks nobody. A rank whose call is
another one stops until all have come to the same call; where they have not, each says what its call is, and the
watchdog of a rank that went on answers for it. So two ranks cannot make different calls unless at least one of them
stops first.
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

# Calls of which a rank can still say what they were: more than ranks can be apart.
KEPT_CALLS = 256
# The next call is looked up by this many calls before it, since layers of several kinds alternate, else by the last.
CONTEXT = 8
# as many are remembered
MOST = 4096
# A call that was not made counts the same on every rank: they may go on together.
NOT_MADE = ("", "")

# A rank that is waited for mostly comes within one answer of the store.
FIRST_PAUSE_SECONDS = 2e-5
# A rank that has waited this long says what its call is, and asks the others ...
LATE_SECONDS = 0.02
# ... and repeats the question this often: another rank may have asked about another call in between.
ASK_SECONDS = 0.25
# A rank that is gone may have said something, and the watchdog of one that has returned may still answer, in this time.
WORD_SECONDS = 0.6
# Characters of a value, before its digest stands for the rest: a topology of 1,024 ranks has 5,000.
LONG_TEXT = 200
# As many ranks' words are looked at in one go: all ranks wait at once, and they have one store.
LOOKS = 16


class Said(NamedTuple):
    """What one rank says of one call."""

    fields: Fields | None  # None: it refused the call
    refusal: str | None
    going_on: bool  # it did not stop: its transfers may be in flight


class Verdict(NamedTuple):
    """Why the ranks cannot go on, in words that are the same on every rank."""

    text: str
    in_flight: bool  # some rank did not stop, so that the transports are lost too


class _Call(NamedTuple):
    number: int
    fields: Fields | None  # None: refused, or refused by the others


def digest_of(*parts: object) -> str:
    """Text that tells these parts from any others."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def brief(value: object) -> str:
    """What tells a value from any other, in few words: every rank may read every other's."""
    text = repr(value)
    return text if len(text) <= LONG_TEXT else f"{text[:LONG_TEXT]}…, digest {digest_of(text)}"


def difference(said: Mapping[int, Fields]) -> str | None:
    """The first field that is not the same on these ranks and who has what; None where all agree."""
    for name in dict.fromkeys(name for _, fields in sorted(said.items()) for name in fields):
        values = {rank: fields.get(name, "not given") for rank, fields in sorted(said.items())}
        if len(set(values.values())) > 1:
            by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"{name} differs between ranks ({by_rank}): all ranks of a ring must pass the same"
    return None


class _Expected:
    """What the next call is, going by those before; the same on every rank that has made the same calls."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], str] = {}
        self._values: dict[str, str] = {}
        self._last: deque[str] = deque(maxlen=CONTEXT)

    def is_next(self, fields: str, values: str) -> bool:
        """Whether a call has the fields that came after the same calls before, else those of the last call, and the
        values that came with these fields the last time."""
        known = (self._next[context] for context in self._contexts() if context in self._next)
        return fields == next(known, self._last[-1] if self._last else None) and values == self._values.get(fields)

    def add(self, fields: str, values: str) -> None:
        """The call that was made."""
        for known in (self._next, self._values):
            if len(known) >= MOST:  # all ranks forget at the same call
                known.clear()
        self._next |= dict.fromkeys(self._contexts(), fields)
        self._values[fields] = values
        self._last.append(fields)

    def _contexts(self) -> tuple[tuple[str, ...], ...]:
        last = tuple(self._last)
        return last, last[-1:]


class Preflight:
    """One rank's calls, and what it has to say of them.

    A rank that waits at a call asks about it, by one key, and says what its own call is; so does a rank that refuses a
    call. The watchdog of a rank that went on past the call asked about answers. `agree` and `refuse` belong to the
    thread that computes, `wanted` and `hear` to whoever looks at the store for the watch.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._expected = _Expected()
        self._calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._chain = ""  # digest of all calls
        self._lock = threading.RLock()  # over what follows
        self._met = 0  # the last call of which all ranks are known to have come or said something
        self._words: dict[int, Said] = {}  # what this rank has said of its calls, the last met and those after it
        self._unpublished = False  # whether the watchdog should tell the words: another thread's may have come after
        self._heard: dict[int, dict[int, Said]] = {}  # call that this rank has passed -> what others say of it
        self._turn = 0  # of looking at other ranks' words
        self._arrived: str | None = None  # where the ranks last waited for each other

    @property
    def number(self) -> int:
        """How many calls there were."""
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
        """Count a call; unless it is the expected one, wait until all ranks have come to the same.

        No longer than the control's patience. See `Watch.agree`; `values` are expected to be what they were with these
        `fields` the last time, and a reason that `stop` returns while this rank waits ends the wait.

        Raises:
            TransportError: a rank did not answer, `stop` said so, or the store is gone.
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
        """Count a call that this rank does not make, and tell the others why. Raises nothing."""
        number, said = self.number + 1, Said(None, f"{type(error).__name__}: {error}", False)
        self._count(None, NOT_MADE)
        with self._lock:
            self._heard[number] = {self._control.rank: said}
        with contextlib.suppress(TransportError):  # without a store the others find out by their deadlines
            self._say(number, said)

    def wanted(self) -> list[str]:
        """The keys that the watchdog should look at."""
        with self._lock:
            missing = {rank for said in self._heard.values() for rank in range(self._control.size) if rank not in said}
        return ["asked", *map(_words_of, self._some(sorted(missing)))]

    def hear(self, published: Mapping[str, object]) -> tuple[dict[str, object], Verdict | None]:
        """What was found under those keys; returns what to publish, and a verdict where there is one."""
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
            if refused and not self._met < requested <= refused:  # its question had no place, or lost it
                publish["asked"] = refused
            return publish, verdict

    def _judged(self, published: Mapping[str, object]) -> Verdict | None:
        """Why this rank cannot go on from calls that it has passed."""
        for number, said in sorted(self._heard.items()):
            for rank in range(self._control.size):
                if (word := _word(published, rank, number)) is not None:
                    said[rank] = word
            verdict = self._verdict_of(said)
            if verdict is not None and verdict.in_flight:
                return verdict
            if len(said) == self._control.size:  # all raise for the same reason, or agree
                self._all_met(number)
        return None

    def _verdict_of(self, said: Mapping[int, Said]) -> Verdict | None:
        """Judge what these ranks say of one call; None if they can go on."""
        in_flight = any(word.going_on for word in said.values())
        named = sorted((self._control.names[rank], word) for rank, word in said.items())
        for name, word in named:
            if word.refusal is not None:
                return Verdict(f"rank {name} refused this call: {word.refusal}", in_flight)
        differs = difference({name: word.fields for name, word in named if word.fields is not None})
        return None if differs is None else Verdict(differs, in_flight)

    def _meet(self, number: int, fields: Fields, chain: str, stop: Callable[[], str | None]) -> Verdict | None:
        """Wait until all ranks have come to this call; where one is at another, hear what each says of its own."""
        control = self._control
        here = f"arrived{number}/{chain}"
        verdict = None
        if control.count(here, 1) < control.size:
            verdict = self._wait(number, fields, here, stop)
        if verdict is not None:
            control.forget(here)
        else:
            if self._arrived is not None:  # whoever has come here has left there
                control.forget(self._arrived)
            self._arrived = here
        with self._lock:
            self._all_met(number)
        return verdict

    def _wait(self, number: int, fields: Fields, here: str, stop: Callable[[], str | None]) -> Verdict | None:
        """None once all ranks have come; a verdict once each has said what its call is."""
        control, mine = self._control, Said(fields, None, False)
        what = f"what the ranks say of call {number}"
        said = {control.rank: mine}
        begun = gone_at = time.monotonic()
        gone: TransportError | None = None
        pause, ask_at = FIRST_PAUSE_SECONDS, begun + LATE_SECONDS
        while True:
            # Before the looks: a rank may have come, or have said where it is, and be gone.
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
            if hopeless is not None and gone is None:  # once: it is not looked for again and again
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
        """Tell the others what this rank's call is, and ask for theirs."""
        with self._lock:
            self._words[number], self._unpublished = said, True
            words = {_words_of(self._control.rank): self._own_words()}
        requested = self._control.look("asked")
        # Somebody waits at a call before this one, perhaps for this rank, whose watchdog answers: first things first
        standing = isinstance(requested, int) and self._met < requested < number
        self._control.exchange(words if standing else {**words, "asked": number})

    def _own_words(self) -> dict[str, object]:
        return {str(number): list(said) for number, said in self._words.items()}

    def _some(self, ranks: list[int]) -> list[int]:
        """Those whose words to look at now: all of a few, of many each in its turn."""
        if len(ranks) <= LOOKS:
            return ranks
        self._turn += LOOKS
        start = self._turn % len(ranks)
        return (ranks[start:] + ranks[:start])[:LOOKS]

    def _all_met(self, number: int) -> None:
        """All ranks have come to a call, or have said that they did not: what came before is nobody's question."""
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
