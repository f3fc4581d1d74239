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
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .control import LONGEST_POLL_SECONDS, Control
from .transport import TransportError

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
    stopped: bool  # this rank stopped there until all had come


def digest_of(*parts: object) -> str:
    """Text that tells these parts from any others."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def difference(said: Mapping[int, Fields]) -> str | None:
    """The first field that is not the same on these ranks and who has what; None where all agree."""
    for name in dict.fromkeys(name for fields in said.values() for name in fields):
        values = {rank: fields.get(name, "not given") for rank, fields in sorted(said.items())}
        if len(set(values.values())) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            return f"{name} differs between ranks ({told}): all ranks of a ring must pass the same"
    return None


def verdict_of(said: Mapping[int, Said]) -> Verdict | None:
    """What these ranks say of one call, judged; None where they can go on."""
    in_flight = any(one.going_on for one in said.values())
    for rank, one in sorted(said.items()):
        if one.refusal is not None:
            return Verdict(f"rank {rank} refused this call: {one.refusal}", in_flight)
    found = difference({rank: one.fields for rank, one in said.items() if one.fields is not None})
    return None if found is None else Verdict(found, in_flight)


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
    """One rank's calls, and what it has to say of them. `agree` and `refuse` belong to the thread that computes,
    everything else to the watchdog."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._expected = _Expected()
        self._calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._asked = 0  # the call that another rank asks about
        self._answers: dict[int, dict[int, Said]] = {}  # call -> what the ranks have said of it so far
        self._settled = 0  # of the calls that were asked about, up to which all ranks have said the same
        self._chain = ""  # digest of all calls
        self._arrived: str | None = None  # where the ranks last waited for each other
        self._told: int | None = None  # the last call of which this rank has said something

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
        timeout: float | None,
        stop: Callable[[], str | None],
    ) -> Verdict | None:
        """Count a call; unless it is the expected one, wait until all ranks have come to the same.

        Args:
            fields: what a call keeps whenever it comes again, such as a layer's shapes.
            values: what changes from batch to batch: expected to be what they were with these fields the last time.
            of: the number of the forward whose backward this is.
            timeout: seconds to wait for the others.
            stop: asked while waiting; a reason that it returns ends the wait.

        Raises:
            TransportError: a rank did not answer, `stop` said so, or the store is gone.
        """
        number = self.number + 1
        texts, changing = ({name: repr(value) for name, value in (given or {}).items()} for given in (fields, values))
        told = texts | changing | ({} if of is None else {"backward of call": str(of)})
        keys = digest_of(texts, None if of is None else number - of), digest_of(changing)
        stopped = not self._expected.is_next(*keys)
        patience = self._control.patience if timeout is None else timeout
        verdict = self._meet(number, told, digest_of(self._chain, keys), patience, stop) if stopped else None
        self._count(None if verdict else told, NOT_MADE if verdict else keys, stopped=stopped)
        return verdict

    def refuse(self, error: BaseException) -> None:
        """Count a call that this rank does not make, and tell the others why. Raises nothing."""
        number = self.number + 1
        with contextlib.suppress(TransportError):  # without a store the others find out by their deadlines
            self._say(number, Said(None, f"{type(error).__name__}: {error}", False))
        self._count(None, NOT_MADE, stopped=True)

    def wanted(self) -> list[str]:
        """The keys that the watchdog should look at."""
        ranks = range(self._control.size)
        keys = [_key(number, rank) for number, said in self._answers.items() for rank in ranks if rank not in said]
        return ["asked", *keys]

    def hear(self, found: Mapping[str, object]) -> tuple[dict[str, object], Verdict | None]:
        """What was found under those keys; returns what to publish, and a verdict where there is one."""
        asked = found.get("asked")
        if isinstance(asked, int):
            self._asked = max(self._asked, asked)
        return self._answer(self._asked), self._judge_answers(found)

    def _meet(
        self, number: int, told: Fields, chain: str, timeout: float, stop: Callable[[], str | None]
    ) -> Verdict | None:
        """Wait until all ranks have come to this call; where one is at another, hear what each says of its own."""
        control = self._control
        here = f"arrived{number}/{chain}"
        if control.count(here, 1) < control.size and not self._all_come(number, told, here, timeout, stop):
            verdict = self._hear_all(number, timeout, stop)
            control.forget(here)
            return verdict
        if self._arrived is not None:  # whoever has come here has left there
            control.forget(self._arrived)
        self._arrived = here
        return None

    def _all_come(self, number: int, told: Fields, here: str, timeout: float, stop: Callable[[], str | None]) -> bool:
        """Whether all ranks came; False as soon as one of them says that it is at another call."""
        control, what = self._control, what_of(number)
        begun = time.monotonic()
        pause, ask_at = FIRST_PAUSE_SECONDS, begun + LATE_SECONDS
        silent = [rank for rank in range(control.size) if rank != control.rank]
        while True:
            # Before the looks: a rank may have come, or have said where it is, and be gone.
            now, reason, hopeless = time.monotonic(), stop(), control.hopeless(silent)
            if control.count(here, 0) == control.size:
                return True
            if now >= ask_at or hopeless is not None:
                self._say(number, Said(told, None, False))
                ask_at = now + ASK_SECONDS
            if self._told == number:
                words = control.exchange(look=[_key(number, rank) for rank in silent])
                said = {rank: _said(words[_key(number, rank)]) for rank in silent if _key(number, rank) in words}
                if any(one.going_on or one.fields != told for one in said.values()):
                    return False
                silent = [rank for rank in silent if rank not in said]
            if reason is not None or hopeless is not None:
                raise hopeless or TransportError(f"{what}: {reason}")
            if now - begun >= timeout:
                if not silent:
                    return False
                late = ", ".join(map(str, silent))
                raise TransportError(f"{what}: no answer from rank {late} within {timeout:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_SECONDS)

    def _hear_all(self, number: int, timeout: float, stop: Callable[[], str | None]) -> Verdict:
        control = self._control
        ask_at = 0.0

        def ask_again() -> str | None:
            nonlocal ask_at
            if time.monotonic() >= ask_at:
                control.publish("asked", number)
                ask_at = time.monotonic() + ASK_SECONDS
            return stop()

        keys = [_key(number, rank) for rank in range(control.size)]
        found = control.collect(keys, what=what_of(number), timeout=timeout, stop=ask_again)
        said = {rank: _said(one) for rank, one in enumerate(found)}
        return verdict_of(said) or Verdict(f"the ranks did not make the same calls before call {number}", True)

    def _say(self, number: int, said: Said) -> None:
        if self._told not in (None, number):  # a rank at this call has done with that one
            self._control.forget(_key(self._told, self._control.rank))
        self._told = number
        self._control.exchange({_key(number, self._control.rank): list(said), "asked": number})

    def _count(self, fields: Fields | None, keys: tuple[str, str], *, stopped: bool) -> None:
        self._calls.append(_Call(self.number + 1, fields, stopped))
        self._chain = digest_of(self._chain, keys)
        self._expected.add(*keys)

    def _answer(self, number: int) -> dict[str, object]:
        """Speak for this rank where it went on past a call that another one stopped at."""
        if not self._settled < number <= self.number or number in self._answers:
            return {}
        call = next((call for call in reversed(list(self._calls)) if call.number == number), None)
        if call is not None and call.stopped:
            return {}
        mine = Said({} if call is None else call.fields, None, True)
        self._answers[number] = {self._control.rank: mine}
        return {_key(number, self._control.rank): list(mine)}

    def _judge_answers(self, found: Mapping[str, object]) -> Verdict | None:
        for number, said in [*self._answers.items()]:
            for rank in range(self._control.size):
                if (one := found.get(_key(number, rank))) is not None:
                    said[rank] = _said(one)
            verdict = verdict_of(said)
            if verdict is not None:
                return verdict
            if len(said) == self._control.size:
                del self._answers[number]
                self._settled = max(self._settled, number)
        return None


def what_of(number: int) -> str:
    """What ranks that wait at a call are about to tell each other."""
    return f"what the ranks say of call {number}"


def _key(number: int | None, rank: int) -> str:
    return f"call{number}/{rank}"


def _said(told: object) -> Said:
    assert isinstance(told, list)
    return Said(*told)
