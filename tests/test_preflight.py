"""Ranks that pass different things: who is told what, when everyone stops, when only some do, and when nobody does."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ringattn.comm import TransportError
from ringattn.comm.preflight import CHECKPOINT, KEPT_CALLS, Preflight, Said, Verdict, difference, digest_of, verdict_of

from .watch_cases import MemoryLine, controls, on_all

MUST = "all ranks of a ring must pass the same"


def preflights(size: int) -> list[Preflight]:
    return [Preflight(control) for control in controls(size)]


def agree(preflight: Preflight, fields: dict[str, Any], timeout: float = 5.0, **changing: Any) -> Verdict | None:
    return preflight.agree(fields, changing, timeout=timeout, stop=lambda: None)


def traffic(preflight: Preflight) -> int:
    line = preflight._control._line
    assert isinstance(line, MemoryLine)
    return line.asked


def tick(preflight: Preflight) -> Verdict | None:
    """What the watchdog does."""
    found = preflight._control.exchange(look=preflight.wanted())
    publish, verdict = preflight.hear(found)
    preflight._control.exchange(publish)
    return verdict


def verdicts(ranks: list[Preflight], rounds: int = 5) -> list[Verdict | None]:
    found: list[Verdict | None] = [None] * len(ranks)
    for _ in range(rounds):
        found = [old or tick(one) for old, one in zip(found, ranks, strict=True)]
    return found


def test_ranks_that_agree_stop_once_per_signature() -> None:
    ranks = preflights(3)
    for fields in ({"heads": 8}, {"heads": 16}):
        assert on_all(ranks, lambda one, fields=fields: agree(one, fields)) == [None] * 3  # type: ignore[misc]
    before = [traffic(one) for one in ranks]
    for fields in ({"heads": 8}, {"heads": 16}, {"heads": 8}):
        assert [agree(one, fields) for one in ranks] == [None] * 3  # one after the other: nobody waits
    assert [traffic(one) for one in ranks] == before
    assert [one.number for one in ranks] == [5] * 3


def test_every_rank_is_told_the_first_field_and_who_has_what() -> None:
    ranks = preflights(3)
    mine = [{"dtype": "fp16", "heads": 8, "mask": 1}, {"dtype": "fp16", "heads": 4, "mask": 1}]
    mine.append({"dtype": "fp16", "heads": 8, "mask": 2})
    told = on_all(ranks, lambda one: agree(one, mine[ranks.index(one)]))
    assert told == [Verdict(f"heads differs between ranks (rank 0: 8, rank 1: 4, rank 2: 8): {MUST}", False)] * 3
    # nothing has moved: with the same fields they go on, and have nothing to reproach each other with
    assert on_all(ranks, lambda one: agree(one, mine[0])) == [None] * 3
    assert len({one.digests()[-1] for one in ranks}) == 1


def test_a_field_that_one_rank_does_not_know() -> None:
    assert difference({0: {"heads": "8"}, 1: {"heads": "8", "sink": "1"}}) == (
        f"sink differs between ranks (rank 0: not given, rank 1: 1): {MUST}"
    )
    assert difference({0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}) is None


def test_what_changes_is_part_of_the_comparison_but_not_a_reason_to_stop() -> None:
    ranks = preflights(2)
    assert on_all(ranks, lambda one: agree(one, {"heads": 8}, ends=(3, 9))) == [None] * 2
    before = [traffic(one) for one in ranks]
    assert [agree(one, {"heads": 8}, ends=(4, 9)) for one in ranks] == [None] * 2
    assert [traffic(one) for one in ranks] == before
    told = on_all(ranks, lambda one: agree(one, {"heads": 9}, ends=ranks.index(one)))
    assert told == [Verdict(f"ends differs between ranks (rank 0: 0, rank 1: 1): {MUST}", False)] * 2


def test_a_rank_that_refuses_is_named_to_those_that_wait() -> None:
    ranks = preflights(3)

    def one(rank: Preflight) -> Verdict | None:
        if rank is ranks[1]:
            rank.refuse(ValueError("k has 6 heads"))
            return None
        return agree(rank, {"heads": 8})

    def waiting(rank: Preflight) -> Verdict | None:
        return one(rank)

    # the refusal alone is an answer; nobody waits for more of that rank
    told = on_all(ranks, waiting)
    assert told[0] == told[2] == Verdict("rank 1 refused this call: ValueError: k has 6 heads", False)
    assert on_all(ranks, lambda rank: agree(rank, {"heads": 8})) == [None] * 3
    assert len({rank.digests()[-1] for rank in ranks}) == 1


def test_ranks_that_all_refuse_go_on_together() -> None:
    ranks = preflights(2)
    for rank in ranks:
        rank.refuse(ValueError("k has 6 heads"))
    assert on_all(ranks, lambda rank: agree(rank, {"heads": 8})) == [None] * 2
    assert verdicts(ranks) == [None] * 2


def test_a_rank_that_refuses_while_others_go_on_is_found_by_their_watchdogs() -> None:
    ranks = preflights(3)
    on_all(ranks, lambda one: agree(one, {"heads": 8}))
    ranks[2].refuse(ValueError("out of range"))
    assert [agree(one, {"heads": 8}) for one in ranks[:2]] == [None] * 2
    told = verdicts(ranks)
    assert told[0] == told[1] == Verdict("rank 2 refused this call: ValueError: out of range", True)


def test_a_new_signature_against_a_known_one() -> None:
    """Rank 1 goes on, its transfers are posted; rank 0 stops. Both hear of it, rank 1 through its watchdog."""
    ranks = preflights(2)
    on_all(ranks, lambda one: agree(one, {"heads": 8}))

    def one(rank: Preflight) -> Verdict | None:
        if rank is ranks[0]:
            return agree(rank, {"heads": 4})
        assert agree(rank, {"heads": 8}) is None
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            verdict = tick(rank)
            if verdict is not None:
                return verdict
            time.sleep(0.01)
        return None

    told = on_all(ranks, one)
    assert told == [Verdict(f"heads differs between ranks (rank 0: 4, rank 1: 8): {MUST}", True)] * 2


def test_a_rank_that_is_late_to_a_call_answers_when_it_gets_there() -> None:
    ranks = preflights(2)
    on_all(ranks, lambda one: agree(one, {"heads": 8}))
    ranks[1]._seen.add(digest_of({"heads": "4"}))  # known to one of them alone: it will not stop

    def one(rank: Preflight) -> Verdict | None:
        if rank is ranks[0]:
            return agree(rank, {"heads": 4})
        while rank._control.look("bell") != ("asked", 2):
            time.sleep(0.001)
        assert tick(rank) is None  # it hears the question before its call
        assert agree(rank, {"heads": 4}) is None
        assert tick(rank) is None
        return None

    assert on_all(ranks, one) == [None] * 2
    assert verdicts(ranks) == [None] * 2


def test_known_signatures_that_differ_are_found_behind_the_call() -> None:
    ranks = preflights(3)
    for fields in ({"heads": 8, "causal": True}, {"heads": 8, "causal": False}):
        on_all(ranks, lambda one, fields=fields: agree(one, fields))  # type: ignore[misc]
    for rank, one in enumerate(ranks):
        assert agree(one, {"heads": 8, "causal": rank != 2}) is None  # nobody stops
    for one in ranks:
        one.compare_chains(other.digests() for other in ranks)
    text = f"call 3: causal differs between ranks (rank 0: True, rank 1: True, rank 2: False): {MUST}"
    told = verdicts(ranks)
    # the first to look may not have everybody's word yet
    assert told[-1] == Verdict(text, True)
    assert all(one is not None and one.in_flight and "call 3: causal differs" in one.text for one in told)


def test_what_changes_is_compared_behind_the_call() -> None:
    ranks = preflights(2)
    on_all(ranks, lambda one: agree(one, {"heads": 8}, ends=(1, 2)))
    for rank, one in enumerate(ranks):
        assert agree(one, {"heads": 8}, ends=(1, 2 + rank)) is None
    ranks[0].compare_chains([ranks[1].digests()])  # one notices, and rings
    told = verdicts(ranks)
    assert told[0] == Verdict(f"call 2: ends differs between ranks (rank 0: (1, 2), rank 1: (1, 3)): {MUST}", True)


@pytest.mark.parametrize("ahead", [0, 1, CHECKPOINT, KEPT_CALLS - 1])
def test_digests_of_a_rank_that_is_behind_can_be_compared(ahead: int) -> None:
    ranks = preflights(2)
    on_all(ranks, lambda one: agree(one, {"heads": 8}, x=0))
    for call in range(300):
        agree(ranks[0], {"heads": 8}, x=call)
        agree(ranks[1], {"heads": 8}, x=call)
    old = ranks[1].digests()
    for call in range(ahead):
        agree(ranks[0], {"heads": 8}, x=call)
    ranks[0].compare_chains([old])
    assert ranks[0]._disputed is None
    number, chain = old[-1]
    ranks[0].compare_chains([((number, bytes(8)),)])
    assert ranks[0]._disputed == number
    assert len(chain) == 8


def test_two_rows_of_ranks_that_are_apart_share_a_checkpoint() -> None:
    one, other = preflights(1)[0], preflights(1)[0]
    for call in range(CHECKPOINT + 40):
        agree(one, {"heads": 8}, x=call)
    for call in range(CHECKPOINT + 5):
        agree(other, {"heads": 8}, x=call)
    assert {number for number, _ in one.digests()} & {number for number, _ in other.digests()} == {CHECKPOINT}


def test_a_difference_too_old_to_name_is_still_an_error() -> None:
    ranks = preflights(2)
    on_all(ranks, lambda one: agree(one, {"heads": 8}, x=0))
    for rank, one in enumerate(ranks):
        agree(one, {"heads": 8}, x=rank)
        for _ in range(KEPT_CALLS):
            agree(one, {"heads": 8}, x=2)
    for one in ranks:
        one.compare_chains(other.digests() for other in ranks)
    assert [verdict and verdict.text for verdict in verdicts(ranks, 25)] == [
        "the ranks did not make the same calls, up to call 256"
    ] * 2


def test_a_rank_that_never_comes_is_named() -> None:
    ranks = preflights(2)
    with pytest.raises(TransportError, match=r"what the ranks say of call 1: no answer from rank 1 within 0\.2 s"):
        agree(ranks[0], {"heads": 8}, timeout=0.2)


def test_whoever_waits_can_be_stopped() -> None:
    ranks = preflights(2)
    with pytest.raises(TransportError, match="rank 1 is gone"):
        ranks[0].agree({"heads": 8}, timeout=5.0, stop=lambda: "rank 1 is gone")


def test_a_question_is_repeated_when_another_one_took_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.comm.preflight.RING_SECONDS", 0.0)
    ranks = preflights(2)
    rung: list[object] = []

    def stop() -> str | None:
        rung.append(ranks[1]._control.look("bell"))
        ranks[1]._control.publish("bell", ("asked", 77))
        return "enough" if len(rung) == 3 else None

    with pytest.raises(TransportError, match="enough"):
        ranks[0].agree({"heads": 8}, timeout=5.0, stop=stop)
    assert rung == [("asked", 1)] * 3


def test_a_verdict_names_refusals_first() -> None:
    said = {0: Said({"a": "1"}, None, True), 1: Said(None, "ValueError: no", False), 2: Said({"a": "2"}, None, False)}
    assert verdict_of(said) == Verdict("rank 1 refused this call: ValueError: no", True)


def test_words_that_everybody_has_read_leave_the_store() -> None:
    ranks = preflights(2)
    for heads in range(20):
        on_all(ranks, lambda rank, heads=heads: agree(rank, {"heads": heads}))  # type: ignore[misc]
    assert all(rank._control.look(f"call{call}/{rank._control.rank}") is None for rank in ranks for call in range(19))
