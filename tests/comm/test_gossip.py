"""Rows that spread: how fast and at what cost, that old ones never win, and who is called a straggler."""

from __future__ import annotations

import heapq
import json
import random

import pytest

from ringattn.comm.watchdog.telemetry import (
    LOOKS,
    Report,
    Row,
    Straggler,
    Stragglers,
    Table,
    pack,
    peer_at,
    period,
    slowest,
    told,
    unpack,
)


def ticks_until_all_know_all(size: int, seed: int) -> float:
    """Ranks that tick at random moments, drift, and have clocks that are up to half a tick apart."""
    rng = random.Random(seed)
    known, left = [1 << rank for rank in range(size)], [0] * size
    skew = [rng.uniform(-0.5, 0.5) for _ in range(size)]
    moments = [(rng.random(), rank) for rank in range(size)]
    heapq.heapify(moments)
    missing, everyone = size, (1 << size) - 1
    start = rng.randrange(1000)
    while True:
        now, rank = heapq.heappop(moments)
        if known[rank] != everyone:
            known[rank] |= left[peer_at(rank, size, int(start + now + skew[rank]))]
            missing -= known[rank] == everyone
        left[rank] = known[rank]
        if not missing:
            return now
        heapq.heappush(moments, (now + rng.uniform(0.95, 1.1), rank))


@pytest.mark.parametrize("seed", range(4))
def test_everyone_knows_everyone_of_1024_within_20_ticks(seed: int) -> None:
    assert ticks_until_all_know_all(1024, seed) <= 20


@pytest.mark.parametrize("size", [2, 3, 5, 8, 100, 1000])
def test_any_size_spreads_within_twice_the_logarithm(size: int) -> None:
    for seed in range(5):
        assert ticks_until_all_know_all(size, seed) <= 2 * (size - 1).bit_length() + 1


def test_nobody_pulls_from_itself() -> None:
    for size in range(2, 40):
        for tick in range(12):
            peers = [peer_at(rank, size, tick) for rank in range(size)]
            assert sorted(peers) == list(range(size))  # a permutation: nobody is pulled by all
            assert all(peer != rank for rank, peer in enumerate(peers))
    with pytest.raises(ValueError, match="size is 1"):
        peer_at(0, 1, 0)


def typical(rank: int) -> Row:
    step = f"in backward hop {rank % 8}: sums for hop 3, chunk 0"
    return Row(100_000 + rank, 1.79e9 + rank / 7, step, 5000, 10**12, 3.3, 1.1, 10.0, None)


def test_what_a_table_costs() -> None:
    rows = {rank: typical(rank) for rank in range(1024)}
    data = json.dumps(pack(rows), separators=(",", ":"))
    per_row = len(data) / len(rows)
    assert per_row < 160
    # one table left and one pulled at each tick
    print(f"{per_row:.0f} bytes per row, {2 * len(data) / period(1024) / 1e3:.0f} kB/s per rank at 1,024 ranks")
    assert 2 * len(data) / period(1024) < 100e3
    assert unpack(json.loads(data)) == rows


def test_a_peer_that_has_left_nothing_yet() -> None:
    assert unpack(None) == {}


def test_the_newest_row_stays() -> None:
    table = Table()
    old, new = Row(1, 10.0, "old"), Row(2, 11.0, "new")
    assert table.put(3, new)
    assert not table.put(3, old)
    assert not table.put(3, new)
    table.merge({3: old, 1: old})
    assert table.reports(12.0) == (Report(1, 2.0, old), Report(3, 1.0, new))
    assert table.reports(10.5)[1].age == 0.0  # a clock that is behind makes nobody's news come from the future


def rows(computes: list[float], waits: list[float] | None = None, elsewhere: float = 0.0) -> dict[int, Row]:
    """A ring at the pace of its slowest rank, or one with the given waits."""
    slow = max(computes)
    waits = [slow - compute for compute in computes] if waits is None else waits
    window = max(map(sum, zip(computes, waits, strict=True))) + elsewhere
    return {
        rank: Row(1, 0.0, "", compute=compute, wait=wait, window=window)
        for rank, (compute, wait) in enumerate(zip(computes, waits, strict=True))
    }


def test_the_rank_with_low_wait_is_the_straggler() -> None:
    found = slowest(rows([4.0, 4.1, 8.0, 3.9]))
    assert found is not None
    assert found[0] == 2 and found[1] == pytest.approx(2.0)
    assert slowest(rows([2.0, 3.0])) == (1, pytest.approx(1.5))
    # late from elsewhere: in the ring it computes as long as all others
    assert slowest(rows([4.0, 4.0, 4.0], [4.0, 0.0, 4.0])) == (1, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("what", "table"),
    [
        ("nobody has computed", rows([0.0, 0.0])),
        ("one rank alone", rows([4.0])),
        ("all alike", rows([4.0] * 8)),
        ("all wait for the links", rows([4.0, 4.1, 4.0, 3.9], [4.0, 3.9, 4.0, 4.1])),
        ("one waits less, and all for the links", rows([4.0, 4.0, 4.6, 4.0], [4.0, 4.0, 3.4, 4.0])),
        ("nobody waits to speak of", rows([9.8, 9.9, 10.0, 9.7])),
        ("the ring is a small part of what the ranks do", rows([0.4, 0.4, 0.8], elsewhere=9.2)),
        ("two of four are slow: no rank stands out", rows([4.0, 8.0, 8.0, 7.9])),
    ],
)
def test_who_is_no_straggler(what: str, table: dict[int, Row]) -> None:
    assert slowest(table) is None, what


def test_one_warning_per_episode() -> None:
    stragglers, slow, even = Stragglers(), rows([4.0, 4.0, 8.0, 4.0]), rows([4.0] * 4)
    said = [stragglers.look(slow, float(now)) for now in range(20)]
    assert [now for now, one in enumerate(said) if one] == [LOOKS - 1]
    assert said[LOOKS - 1] == Straggler(2, 2.0, 0.0)
    assert stragglers.look(even, 20.0) is None
    assert stragglers.current is not None  # one even look does not end it
    assert not any(stragglers.look(slow, float(now)) for now in range(21, 30))
    assert not any(stragglers.look(even, float(now)) for now in range(30, 40))
    assert stragglers.current is None
    again = [stragglers.look(slow, float(now)) for now in range(40, 50)]
    assert [one.since for one in again if one] == [40.0]


def test_another_straggler_begins_its_own_episode() -> None:
    stragglers = Stragglers()
    said = []
    for now in range(40):
        found = stragglers.look(rows([4.0, 8.0, 4.0] if now < 20 else [8.0, 4.0, 4.0]), float(now))
        said += [found.rank] if found else []
    assert said == [1, 0]


def test_noise_is_no_straggler() -> None:
    """Ranks whose computes differ by 5% and whose every look is shaken by as much again: nobody is named."""
    for seed in range(20):
        rng, stragglers = random.Random(seed), Stragglers()
        base = [4.0 * rng.uniform(0.975, 1.025) for _ in range(8)]
        for now in range(400):
            table = rows([compute * rng.uniform(0.95, 1.05) for compute in base])
            assert stragglers.look(table, float(now)) is None


def test_a_spike_is_no_straggler() -> None:
    stragglers = Stragglers()
    for now in range(100):
        table = rows([4.0, 12.0 if now % 10 < LOOKS - 1 else 4.0, 4.0])
        assert stragglers.look(table, float(now)) is None


def test_it_says_who_and_how_much() -> None:
    assert str(Straggler(3, 1.5, 0.0)).startswith("rank 3 holds the ring up: it is busy 1.50 times as long")


def test_told_names_the_most_silent() -> None:
    reports = [Report(rank, float(rank), Row(1, 0.0, f"step {rank}")) for rank in range(20)]
    text = told(reports, most=2)
    assert text == "rank 18: step 18 (18.0 s ago); rank 19: step 19 (19.0 s ago); and 18 ranks that reported later"
    assert told(reports[:1]) == "rank 0: step 0 (0.0 s ago)"
    assert told(reports[::-1], most=20).startswith("rank 0: step 0 (0.0 s ago); rank 1: ")
