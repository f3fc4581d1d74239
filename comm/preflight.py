"""What the ranks of a ring must have in common, compared before the first hop, or behind it where that would cost.

Every call has a number, the same on every rank. A signature that a rank has not seen before stops it until it has
what all others say of that call. One that it has seen stops nobody: the watchdog compares, by a digest over all calls
so far that travels with the telemetry, and answers for its rank when another one stops.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .control import Control
from .transport import TransportError

Fields = Mapping[str, str]  # name -> repr of the value

# Calls of which a rank can still say what they were: more than ranks can be apart, or news between them can be late.
KEPT_CALLS = 256
# Of these calls every this many-th is in a rank's row besides its last ones, so that two rows have one in common.
CHECKPOINT = 64
LAST_CALLS = 3

# How often a rank that waits for the others' word repeats its question.
RING_SECONDS = 0.25
# How often the watchdog looks for the other ranks' calls before it gives up finding the one that differs.
HISTORY_LOOKS = 20


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
    chain: bytes  # of this call and all before
    fields: Fields | None  # None: refused, or refused by the others
    stopped: bool  # this rank stopped there and told the others


def digest_of(fields: Fields, before: bytes = b"") -> bytes:
    """Eight bytes that tell these fields, after those of `before`, from any others."""
    told = repr(sorted(fields.items())).encode()
    return hashlib.blake2b(before + told, digest_size=8).digest()


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


class Preflight:
    """One rank's calls, and what it has to say of them. `agree` and `refuse` belong to the thread that computes,
    everything else to the watchdog."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._seen: set[bytes] = set()
        self._calls: deque[_Call] = deque(maxlen=KEPT_CALLS)
        self._asked = 0  # the call that another rank asks about
        self._answers: dict[int, dict[int, Said]] = {}  # call -> what the ranks have said of it so far
        self._disputed: int | None = None  # the call up to which another rank's calls were different
        self._told_history = False
        self._looks = 0
        self._settled: set[int] = set()
        self._compared: int | None = None  # the last call that all have compared

    @property
    def number(self) -> int:
        """How many calls there were."""
        calls = self._calls
        return calls[-1].number if calls else 0

    def agree(
        self,
        fields: Mapping[str, object],
        changing: Mapping[str, object] | None = None,
        *,
        timeout: float | None,
        stop: Callable[[], str | None],
    ) -> Verdict | None:
        """Count a call; where its fields are new to this rank, hear what all others say of it.

        Args:
            fields: what decides whether the ranks stop to compare.
            changing: what changes too often to stop for; only the watchdog compares it.
            timeout: seconds to wait for the others.
            stop: asked while waiting; a reason that it returns ends the wait.

        Raises:
            TransportError: a rank did not answer, `stop` said so, or the store is gone.
        """
        texts = {name: repr(value) for name, value in fields.items()}
        key = digest_of(texts)
        whole = texts | {name: repr(value) for name, value in (changing or {}).items()}
        if key in self._seen:
            self._count(whole, stopped=False)
            return None
        number = self.number + 1
        verdict = self._compare(number, Said(whole, None, False), timeout, stop)
        self._count(None if verdict else whole, stopped=True)
        if verdict is None:
            self._seen.add(key)
        return verdict

    def refuse(self, error: BaseException) -> None:
        """Count a call that this rank does not make, and tell the others why. Raises nothing."""
        number = self.number + 1
        said = Said(None, f"{type(error).__name__}: {error}", False)
        with contextlib.suppress(TransportError):  # without a store the others find out by their deadlines
            self._control.exchange({_key(number, self._control.rank): tuple(said), "bell": ("asked", number)})
        self._count(None, stopped=True)

    def digests(self) -> tuple[tuple[int, bytes], ...]:
        """For this rank's row: the last calls, and one that others have in theirs too."""
        calls = list(self._calls)
        chosen = [call for call in calls if call.number % CHECKPOINT == 0][-1:] + calls[-LAST_CALLS:]
        return tuple(dict.fromkeys((call.number, call.chain) for call in chosen))

    def wanted(self) -> list[str]:
        """The keys that the watchdog should look at."""
        ranks = range(self._control.size)
        keys = [_key(number, rank) for number, said in self._answers.items() for rank in ranks if rank not in said]
        return ["bell", *keys, *([_history(rank) for rank in ranks] if self._disputed is not None else [])]

    def hear(self, found: Mapping[str, object]) -> tuple[dict[str, object], Verdict | None]:
        """What was found under those keys; returns what to publish, and a verdict where there is one."""
        publish: dict[str, object] = {}
        told = found.get("bell")
        kind, number = told if isinstance(told, tuple) else ("", 0)
        if kind == "asked":
            self._asked = max(self._asked, number)
        if kind == "disputed" or self._disputed is not None:
            publish |= self._tell_history()
        if self._disputed is not None:
            publish["bell"] = ("disputed", self._disputed)  # again: others may have rung it in between
        publish |= self._answer(self._asked)
        verdict = self._judge_answers(found) or self._judge_histories(found)
        return publish, verdict

    def compare_chains(self, rows: Iterable[tuple[tuple[int, bytes], ...]]) -> None:
        """Note where another rank's calls were not this rank's, as the digests in its row show."""
        mine = {call.number: call.chain for call in list(self._calls)}
        for digests in rows:
            for number, chain in digests:
                if mine.get(number, chain) != chain and self._disputed is None:
                    self._disputed = number

    def _compare(
        self, number: int, said: Said, timeout: float | None, stop: Callable[[], str | None]
    ) -> Verdict | None:
        control, bell = self._control, {"bell": ("asked", number)}
        control.exchange({_key(number, control.rank): tuple(said), **bell})
        rung = time.monotonic()

        def ring_again() -> str | None:  # another rank may have asked about another call in between
            nonlocal rung
            if time.monotonic() - rung > RING_SECONDS:
                control.exchange(bell)
                rung = time.monotonic()
            return stop()

        keys = [_key(number, rank) for rank in range(control.size)]
        what = f"what the ranks say of call {number}"
        found = control.collect(keys, what=what, timeout=timeout, stop=ring_again)
        if self._compared is not None:  # who has published this call's word has read that one's
            control.forget(_key(self._compared, control.rank))
        self._compared = number
        return verdict_of({rank: _said(one) for rank, one in enumerate(found)})

    def _count(self, fields: Fields | None, *, stopped: bool) -> None:
        last = self._calls[-1].chain if self._calls else b""
        # A call that was not made counts the same on every rank: they may go on together.
        chain = digest_of(fields or {}, last)
        self._calls.append(_Call(self.number + 1, chain, fields, stopped))

    def _call(self, number: int) -> _Call | None:
        return next((call for call in reversed(list(self._calls)) if call.number == number), None)

    def _answer(self, number: int) -> dict[str, object]:
        """Speak for this rank where it went on past a call that another one stopped at."""
        call = self._call(number)
        if call is None or call.stopped or number in self._answers or number in self._settled:
            return {}
        mine = Said(call.fields, None, True)
        self._answers[number] = {self._control.rank: mine}
        return {_key(number, self._control.rank): tuple(mine)}

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
                self._settled.add(number)
        return None

    def _tell_history(self) -> dict[str, object]:
        if self._told_history:
            return {}
        self._told_history = True
        calls = [(call.number, call.fields) for call in list(self._calls)[-CHECKPOINT:]]
        return {_history(self._control.rank): calls}

    def _judge_histories(self, found: Mapping[str, object]) -> Verdict | None:
        if self._disputed is None:
            return None
        self._looks += 1
        told = {rank: found.get(_history(rank)) for rank in range(self._control.size)}
        histories = {rank: dict(calls) for rank, calls in told.items() if isinstance(calls, list)}
        histories[self._control.rank] = {call.number: call.fields for call in list(self._calls)}
        for number in sorted(histories[self._control.rank]):
            said = {rank: calls[number] for rank, calls in histories.items() if calls.get(number) is not None}
            text = difference(said)
            if text is not None:
                return Verdict(f"call {number}: {text}", True)
        if self._looks < HISTORY_LOOKS:
            return None
        return Verdict(f"the ranks did not make the same calls, up to call {self._disputed}", True)


def _key(number: int, rank: int) -> str:
    return f"call{number}/{rank}"


def _history(rank: int) -> str:
    return f"history/{rank}"


def _said(told: object) -> Said:
    assert isinstance(told, tuple)
    return Said(*told)
