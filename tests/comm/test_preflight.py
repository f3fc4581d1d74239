"""Ranks that pass different arguments: what each rank is told, and whether all, some or none of them stop."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.comm import TransportError, WorldAborted
from ringattn.comm.watchdog.preflight import (
    LONG_TEXT,
    MAX_READ_RANKS,
    MAX_REMEMBERED_CALLS,
    CallStatement,
    Preflight,
    Verdict,
    find_difference,
)

from ..support.transport_cases import HANGS
from ..support.watch_cases import MemoryConnection, memory_controls, run_on_all

MUST = "All ranks of a ring must pass the same value"


def preflights(size: int) -> list[Preflight]:
    return [Preflight(control) for control in memory_controls(size)]


def agreed_once(size: int, **ends: Any) -> list[Preflight]:
    """Return ranks that have agreed on call 1."""
    ranks = preflights(size)
    run_on_all(ranks, lambda rank: agree(rank, {"heads": 8}, **ends))
    return ranks


def expecting_a_refusal(size: int) -> list[Preflight]:
    """Return ranks that agreed, refused, and agreed again, so that they expect the same calls again."""
    ranks = agreed_once(size)
    run_on_all(ranks, lambda rank: rank.refuse_call(OSError()))
    run_on_all(ranks, lambda rank: agree(rank, {"heads": 8}))
    return ranks


def agree(preflight: Preflight, fields: dict[str, Any], **changing: Any) -> Verdict | None:
    return preflight.agree_on_call(fields, changing, stop=lambda: None)


def backward(preflight: Preflight, of: int) -> Verdict | None:
    return preflight.agree_on_call({"call": "backward"}, forward_number=of, stop=lambda: None)


def traffic(preflight: Preflight) -> int:
    connection = preflight._control._connection
    assert isinstance(connection, MemoryConnection)
    return connection.asked


def tick(preflight: Preflight) -> Verdict | None:
    """Do what one tick of the watchdog does."""
    exchanged = preflight._control.exchange(read=preflight.keys_to_read())
    publish, verdict = preflight.process_published(exchanged)
    preflight._control.exchange(publish)
    return verdict


def quiet(preflight: Preflight) -> bool:
    """Return True if the watchdog would publish nothing and report nothing."""
    return preflight.process_published(preflight._control.exchange(read=preflight.keys_to_read())) == ({}, None)


def heard(preflight: Preflight) -> Verdict | None:
    """Tick until the watchdog of a rank that went on reports a verdict, or time is up."""
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        verdict = tick(preflight)
        if verdict is not None:
            return verdict
        time.sleep(0.01)
    return None


def verdicts(ranks: list[Preflight], rounds: int = 5) -> list[Verdict | None]:
    latest: list[Verdict | None] = [None] * len(ranks)
    for _ in range(rounds):
        latest = [old or tick(rank) for old, rank in zip(latest, ranks, strict=True)]
    return latest


def test_agreeing_ranks_exchange_nothing_for_repeated_calls() -> None:
    ranks, before = preflights(3), list[int]()
    for fields in ({"heads": 8}, {"heads": 16}, {"heads": 8}):
        assert run_on_all(ranks, lambda rank, fields=fields: agree(rank, fields)) == [None] * 3  # type: ignore[misc]
        before = before or [traffic(rank) for rank in ranks]
    assert before.count(1) == 1  # the last rank finds all others present
    before = [traffic(rank) for rank in ranks]
    for fields in ({"heads": 16}, {"heads": 8}, {"heads": 16}):
        assert [agree(rank, fields) for rank in ranks] == [None] * 3  # one after the other, so no rank waits
    assert [traffic(rank) for rank in ranks] == before
    assert [rank.call_count for rank in ranks] == [6] * 3


def test_every_rank_gets_the_first_differing_field_and_all_values() -> None:
    ranks = preflights(3)
    mine = [{"dtype": "fp16", "heads": 8, "mask": 1}, {"dtype": "fp16", "heads": 4, "mask": 1}]
    mine.append({"dtype": "fp16", "heads": 8, "mask": 2})
    for rank in ranks:
        rank._control.names = (4, 7, 5)
    verdict = run_on_all(ranks, lambda rank: agree(rank, mine[ranks.index(rank)]))
    assert verdict == [Verdict(f"heads differs between ranks (rank 4: 8, rank 5: 8, rank 7: 4). {MUST}", False)] * 3
    assert [[*rank._pack_statements()] for rank in ranks] == [["1"]] * 3  # kept for a rank that has not looked yet
    # No data has moved, so the ranks go on with equal fields and equal histories.
    assert run_on_all(ranks, lambda rank: agree(rank, mine[0])) == [None] * 3
    assert len({rank._chain for rank in ranks}) == 1


def test_difference_names_fields_that_a_rank_lacks() -> None:
    assert find_difference({0: {"heads": "8"}, 1: {"heads": "8", "sink": "1"}}) == (
        f"sink differs between ranks (rank 0: not given, rank 1: 1). {MUST}"
    )
    assert find_difference({0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}) is None


def test_layers_that_alternate_are_expected_from_the_second_step_on() -> None:
    ranks = preflights(2)
    layers = ["local"] * 5 + ["global"] + ["local"] * 2

    def step(rank: Preflight, batch: int) -> None:
        for layer in layers:
            assert agree(rank, {"call": "forward", "layer": layer}, documents=batch) is None
        for back in range(len(layers)):
            assert backward(rank, rank.call_count - 2 * back) is None

    for batch in range(2):
        run_on_all(ranks, lambda rank, batch=batch: step(rank, batch))  # type: ignore[misc]
    before = [traffic(rank) for rank in ranks]
    run_on_all(ranks, lambda rank: step(rank, 1))
    assert [traffic(rank) for rank in ranks] == before


def test_a_refusing_rank_is_named_to_waiting_ranks() -> None:
    ranks = preflights(3)

    def call(rank: Preflight) -> Verdict | None:
        if rank is ranks[1]:
            rank.refuse_call(ValueError("k has 6 heads"))
            return None
        return agree(rank, {"heads": 8})

    # A refusal is an answer, so no rank waits for more.
    outcome = run_on_all(ranks, call)
    assert outcome[0] == outcome[2] == Verdict("rank 1 refused this call: ValueError: k has 6 heads", False)
    assert run_on_all(ranks, lambda rank: agree(rank, {"heads": 8})) == [None] * 3
    assert len({rank._chain for rank in ranks}) == 1


@pytest.mark.parametrize(("refuses", "kind"), [(True, TransportError), (False, TransportError), (False, WorldAborted)])
def test_a_refusal_of_a_rank_that_is_gone_is_waited_for(
    refuses: bool, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait for it unless all virtual ranks end because one of them raised."""
    ranks, gone = preflights(2), kind("rank 1 is gone")
    monkeypatch.setattr(ranks[0]._control._connection, "find_dead_peer", lambda missing, names, timeout: gone)
    if kind is WorldAborted:
        monkeypatch.setattr("ringattn.comm.watchdog.preflight.LAST_STATEMENT_SECONDS", 2 * HANGS)
    if not refuses:  # gone for good, noticed long before the patience ends
        with pytest.raises(TransportError, match="rank 1 is gone"):
            agree(ranks[0], {"heads": 8})
        return
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.LAST_STATEMENT_SECONDS", HANGS)
    last = threading.Timer(0.2, ranks[1].refuse_call, [ValueError("k has 6 heads")])
    last.start()
    verdict = agree(ranks[0], {"heads": 8})
    last.join()
    assert verdict == Verdict("rank 1 refused this call: ValueError: k has 6 heads", False)


def test_the_time_for_a_last_statement_begins_when_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, polls, seconds = preflights(2), itertools.count(), itertools.count()

    def find_dead_peer(missing: object, names: object, timeout: float) -> TransportError | None:
        poll = next(polls)
        if poll == 6:
            ranks[1].refuse_call(ValueError("k has 6 heads"))
        return TransportError("rank 1 is gone") if poll >= 5 else None

    clock = SimpleNamespace(monotonic=seconds.__next__, sleep=lambda pause: None)
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.time", clock)
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.LAST_STATEMENT_SECONDS", 3)
    monkeypatch.setattr(ranks[0]._control._connection, "find_dead_peer", find_dead_peer)
    assert agree(ranks[0], {"heads": 8}) == Verdict("rank 1 refused this call: ValueError: k has 6 heads", False)
    looks = list[None]()
    ranks[1]._control.patience = 4.0
    with pytest.raises(TransportError, match="no answer from rank 0 within 4 s"):
        ranks[1].agree_on_call({"heads": 4}, stop=lambda: looks.append(None))
    assert len(looks) == 4, "one look per second"


def test_watchdogs_find_a_refusal_after_other_ranks_went_on() -> None:
    ranks = agreed_once(3)
    ranks[2].refuse_call(ValueError("out of range"))
    assert [agree(rank, {"heads": 8}) for rank in ranks[:2]] == [None] * 2
    answers = [ranks[0].process_published({"asked": 2})[0] for _ in range(2)]
    assert answers == [{"words/0": {"2": [{"heads": "8"}, None, True]}}, {}]  # answered once
    ranks[0]._control.exchange(answers[0])
    outcome = verdicts(ranks)
    assert outcome == [Verdict("rank 2 refused this call: ValueError: out of range", True)] * 3


@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_call_of_one_rank_is_reported_on_both(changed: int) -> None:
    ranks = agreed_once(2, ends=1)

    def call(rank: Preflight) -> Verdict | None:
        return agree(rank, {"heads": 8}, ends=2) or None if rank is ranks[changed] else follow(rank)

    def follow(rank: Preflight) -> Verdict | None:
        assert agree(rank, {"heads": 8}, ends=1) is None
        return heard(rank)

    values = ", ".join(f"rank {rank}: {2 if rank == changed else 1}" for rank in range(2))
    assert run_on_all(ranks, call) == [Verdict(f"ends differs between ranks ({values}). {MUST}", True)] * 2


def test_a_rank_far_ahead_answers_about_a_call_it_no_longer_remembers() -> None:
    ranks = agreed_once(2)

    answered = threading.Event()

    def call(rank: Preflight) -> Verdict | None:
        if rank is ranks[0]:
            try:
                return agree(rank, {"heads": 4})
            finally:
                answered.set()
        for _ in range(MAX_REMEMBERED_CALLS + 1):
            assert agree(rank, {"heads": 8}) is None
        while not answered.is_set():
            assert tick(rank) is None
            time.sleep(0.01)
        return None

    text = "the ranks did not make the same calls before call 2"
    assert run_on_all(ranks, call)[0] == Verdict(text, True)


def test_different_earlier_calls_are_reported() -> None:
    ranks = preflights(2)

    def end_patience_after_both_published() -> None:
        """End the patience once both ranks have published call 3."""
        words: list[Any] = [ranks[0]._control.read_key(f"words/{rank}") for rank in range(2)]
        if all(calls and "3" in calls for calls in words):
            for rank in ranks:
                rank._control.patience = 0.0

    run_on_all(ranks, lambda rank: agree(rank, {"heads": 8}))
    ranks[0]._count({"heads": "16"}, ("16", ""))
    ranks[1]._count({"heads": "4"}, ("4", ""))
    outcome = run_on_all(ranks, lambda rank: rank.agree_on_call({"heads": 2}, stop=end_patience_after_both_published))
    assert outcome == [Verdict("the ranks did not make the same calls before call 3", True)] * 2


def test_a_rank_that_is_late_is_waited_for() -> None:
    ranks = preflights(2)

    def call(rank: Preflight) -> Verdict | None:
        if rank is ranks[1]:
            while rank._control.read_key("asked") != 1:  # wait until rank 0 asks
                time.sleep(0.001)
            assert quiet(rank)  # the watchdog reads the question before the call
        return agree(rank, {"heads": 4})

    assert run_on_all(ranks, call) == [None] * 2
    assert verdicts(ranks) == [None] * 2


@pytest.mark.parametrize(("other", "stays"), [(77, False), (1, False), (2, True)])
def test_an_overwritten_question_is_asked_again(other: int, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = agreed_once(2)
    assert agree(ranks[0], {"heads": 8}) is None  # call 2, which rank 1 has not made
    for name in ("LATE_SECONDS", "REPEAT_SECONDS"):
        monkeypatch.setattr(f"ringattn.comm.watchdog.preflight.{name}", 0.0)
    questions: list[object] = []

    def stop() -> str | None:
        questions.append(ranks[1]._control.read_key("asked"))
        ranks[1]._control.publish("asked", other)
        return "stopped by the test" if len(questions) == 4 else None

    with pytest.raises(TransportError, match="stopped by the test"):
        ranks[0].agree_on_call({"heads": 4}, stop=stop)
    assert questions[1:] == [other if stays else 3] * 3


@pytest.mark.parametrize(("late", "requests"), [(60.0, [1, 2, 3]), (0.0, [1, 5, 7])])
def test_short_waits_send_no_question(late: float, requests: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask one question in a longer wait, then read the answers. Every look checks whether all ranks have come."""
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.LATE_SECONDS", late)
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.REPEAT_SECONDS", 60.0)
    rank, _ = preflights(2)
    looks: list[int] = []

    def stop() -> str | None:
        looks.append(traffic(rank))
        return "stopped by the test" if len(looks) == 3 else None

    with pytest.raises(TransportError, match="stopped by the test"):
        rank.agree_on_call({"heads": 8}, stop=stop)
    assert looks == requests


def test_answers_of_many_ranks_are_read_in_rotation() -> None:
    rank, ranks = preflights(2)[0], [*range(2 * MAX_READ_RANKS + 8)]
    assert rank._next_ranks(ranks[:MAX_READ_RANKS]) == ranks[:MAX_READ_RANKS]
    turns = [rank._next_ranks(ranks) for _ in range(3)]
    assert [len(turn) for turn in turns] == [MAX_READ_RANKS] * 3
    assert sorted({rank for turn in turns for rank in turn}) == ranks


def test_a_rank_that_publishes_before_it_arrives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.LATE_SECONDS", 0.0)
    ranks, looks, silent = preflights(2), itertools.count(), list[Any]()
    monkeypatch.setattr(ranks[0]._control._connection, "find_dead_peer", lambda missing, *_: silent.append(missing))
    ranks[1]._publish_statement(1, CallStatement({"heads": "8"}, None, False))
    with ThreadPoolExecutor(1) as pool:

        def stop() -> None:
            if next(looks) == 3:
                pool.submit(agree, ranks[1], {"heads": 8})

        assert ranks[0].agree_on_call({"heads": 8}, stop=stop) is None
    assert (silent[0], silent[-1]) == ([1], [])  # a rank may end once it has stated its call


def test_calls_leave_a_constant_number_of_keys_in_the_store() -> None:
    ranks = preflights(2)
    store = ranks[0]._control._connection.store  # type: ignore[attr-defined]
    key_counts = set()
    for heads in range(20):
        run_on_all(ranks, lambda rank, heads=heads: agree(rank, {"heads": heads}))  # type: ignore[misc]
        run_on_all(ranks, lambda rank, heads=heads: agree(rank, {"heads": heads, "rank": ranks.index(rank)}))  # type: ignore[misc]
        key_counts.add(store.num_keys())
    assert max(key_counts) - min(key_counts) <= 2
    for _ in range(20):
        for rank in ranks:
            rank.refuse_call(ValueError("k has 6 heads"))
        assert verdicts(ranks) == [None] * 2  # no rank went on
        assert not any(rank._received for rank in ranks)
        assert [[*rank._pack_statements()] for rank in ranks] == [[str(rank.call_count)] for rank in ranks]


def test_a_settled_question_is_not_answered_after_its_call_is_forgotten() -> None:
    ranks = preflights(2)

    def late(rank: Preflight) -> Verdict | None:
        if rank is ranks[1]:
            time.sleep(0.1)  # rank 0 asks about call 1 meanwhile
        return agree(rank, {"heads": 8})

    assert run_on_all(ranks, late) == [None] * 2
    assert verdicts(ranks) == [None] * 2
    assert all(quiet(rank) for _ in range(2) for rank in ranks)
    for ahead in (0, 1):
        for _ in range(MAX_REMEMBERED_CALLS - ahead):
            assert [agree(rank, {"heads": 8}) for rank in ranks] == [None] * 2
        assert agree(ranks[0], {"heads": 8}) is None  # rank 0 is one call ahead
        assert verdicts(ranks) == [None] * 2
        assert agree(ranks[1], {"heads": 8}) is None


def test_a_rank_that_waits_at_a_later_call_answers_about_an_earlier_one() -> None:
    """Let rank 1 pass call 2 and wait at call 3 when rank 0 makes a different call 2."""
    ranks = agreed_once(2)
    seen_verdicts: list[Verdict | None] = []

    def calls(rank: Preflight) -> Verdict | None:
        if rank is ranks[0]:
            time.sleep(0.1)
            return agree(rank, {"heads": 4})
        assert agree(rank, {"heads": 8}) is None

        def stop() -> str | None:  # the watchdog ticks between two looks
            seen_verdicts.append(tick(rank))
            return "verdict seen" if seen_verdicts[-1] is not None else None

        with pytest.raises(TransportError, match="verdict seen"):
            rank.agree_on_call({"heads": 2}, stop=stop)
        return seen_verdicts[-1]

    text = f"heads differs between ranks (rank 0: 4, rank 1: 8). {MUST}"
    assert run_on_all(ranks, calls) == [Verdict(text, True)] * 2


def test_newer_watchdog_messages_replace_older_ones() -> None:
    ranks = preflights(2)
    ranks[0].refuse_call(ValueError("k has 6 heads"))
    late, _ = ranks[0].process_published({})
    ranks[0].refuse_call(ValueError("k has 7 heads"))
    ranks[0]._control.exchange(late)
    assert tick(ranks[0]) is None
    words: Any = ranks[1]._control.read_key("words/0")
    assert [*words] == ["1", "2"]
    assert quiet(ranks[0])


def test_a_refusal_is_kept_until_all_ranks_have_read_it() -> None:
    ranks = agreed_once(2)

    def calls(rank: Preflight) -> list[Verdict | None]:
        if rank is ranks[0]:
            rank.refuse_call(ValueError("k has 6 heads"))
            rank.refuse_call(ValueError("k has 7 heads"))
            return [agree(rank, {"heads": 2})]
        time.sleep(0.2)
        return [agree(rank, {"heads": heads}) for heads in (4, 4, 2)]

    refused = [Verdict(f"rank 0 refused this call: ValueError: k has {heads} heads", False) for heads in (6, 7)]

    def ticking(rank: Preflight) -> list[Verdict | None]:
        def ticked(missing: object, timeout: object = None) -> Any:
            return tick(rank)

        rank._control.find_dead_peer = ticked  # type: ignore[method-assign]
        return calls(rank)

    assert run_on_all(ranks, ticking) == [[None], [*refused, None]]


def test_a_second_refusal_ends_the_ring_if_another_rank_went_on() -> None:
    """Let a rank pass the second refused call after all ranks have read the first refusal."""
    ranks = expecting_a_refusal(3)
    first, refusing, third = ranks
    for heads in (6, 7):
        refusing.refuse_call(ValueError(f"k has {heads} heads"))
    refused = [Verdict(f"rank 1 refused this call: ValueError: k has {heads} heads", heads == 7) for heads in (6, 7)]
    assert run_on_all([first, third], lambda rank: agree(rank, {"heads": 2})) == [refused[0]] * 2
    assert tick(refusing) is None
    assert agree(first, {"heads": 8}) is None  # rank expects the call that followed the earlier refusal
    reported = run_on_all(ranks, lambda rank: agree(rank, {"heads": 4}) if rank is third else heard(rank))
    assert reported == [refused[1]] * 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_second_refusal_reaches_a_rank_that_went_on(waits: bool) -> None:
    """Go on before the refusing rank's watchdog ticks. With ``waits``, the other rank then waits at a later call."""
    ranks = expecting_a_refusal(2)
    for heads in (6, 7):
        ranks[0].refuse_call(ValueError(f"k has {heads} heads"))
    assert agree(ranks[1], {"heads": 2}) == Verdict("rank 0 refused this call: ValueError: k has 6 heads", False)
    assert agree(ranks[1], {"heads": 8}) is None  # rank expects the call that followed the earlier refusal
    reported: list[Verdict | None] = []

    def stop() -> str | None:  # the watchdogs tick between two looks
        reported[:] = [old or new for old, new in zip(reported or [None] * 2, map(tick, ranks), strict=True)]
        return "verdict seen" if all(reported) else None

    if waits:
        with pytest.raises(TransportError, match="verdict seen"):
            ranks[1].agree_on_call({"heads": 4}, stop=stop)
    else:
        reported = verdicts(ranks)
    assert reported == [Verdict("rank 0 refused this call: ValueError: k has 7 heads", True)] * 2


@pytest.mark.parametrize("length", [LONG_TEXT - 1, LONG_TEXT, 100 * LONG_TEXT])
def test_long_values_that_differ_at_their_end_are_reported(length: int) -> None:
    ranks, texts = preflights(2), ["x" * (length - 3) + end for end in "ab"]
    verdict = run_on_all(ranks, lambda rank: agree(rank, {}, documents=texts[ranks.index(rank)]))
    assert verdict[0] == verdict[1] and verdict[0].text.startswith("documents differs between ranks")
    assert len(verdict[0].text) < 4 * LONG_TEXT  # short, because every rank reads every other rank's values
    same = run_on_all(ranks, lambda rank: agree(rank, {}, documents=texts[0]))
    assert same == [None, None]


@pytest.mark.parametrize("known", [False, True])
def test_backwards_in_different_orders_are_reported(known: bool) -> None:
    ranks = preflights(2)

    def forwards(rank: Preflight) -> list[int]:
        assert agree(rank, {"call": "forward"}) is None and agree(rank, {"call": "forward"}) is None
        return [rank.call_count, rank.call_count - 1]

    def step(rank: Preflight) -> Verdict | None:
        for _ in range(4 if known else 0):
            assert [backward(rank, of) for of in forwards(rank)] == [None, None]
        calls = forwards(rank)
        verdict = backward(rank, calls[ranks.index(rank)])
        return verdict or heard(rank)

    calls = 18 if known else 2
    text = f"backward of call differs between ranks (rank 0: {calls}, rank 1: {calls - 1}). {MUST}"
    assert run_on_all(ranks, step) == [Verdict(text, known)] * 2


def test_a_call_without_transfers_waits_for_the_others_each_time() -> None:
    ranks = preflights(2)
    for _ in range(3):
        assert (
            run_on_all(ranks, lambda rank: rank.agree_on_call({"call": "shard"}, is_forced=True, stop=lambda: None))
            == [None] * 2
        )
    with pytest.raises(TransportError, match="stopped by the test"):
        ranks[0].agree_on_call({"call": "shard"}, is_forced=True, stop=lambda: "stopped by the test")


def test_the_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget at the same call on all ranks, so that they still expect the same calls."""
    monkeypatch.setattr("ringattn.comm.watchdog.preflight.MAX_EXPECTATIONS", 8)
    ranks = preflights(2)
    for heads in range(40):
        assert run_on_all(ranks, lambda rank, heads=heads: agree(rank, {"heads": heads}, ends=heads)) == [None] * 2  # type: ignore[misc]
        remembered = [(rank._expected._next, rank._expected._values) for rank in ranks]
        assert remembered[0] == remembered[1]
        assert all(len(known) <= 8 + 2 for of_rank in remembered for known in of_rank)
