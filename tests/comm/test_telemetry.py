"""How long work takes, how rows spread and at what cost, and who is called a straggler."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ringattn.comm.watchdog.telemetry import (
    LOOKS,
    WINDOW_SECONDS,
    RankRow,
    Report,
    Stopwatch,
    Straggler,
    Stragglers,
    Table,
    Telemetry,
    peer_at,
    slowest,
)

from ..support.cuda.device import Event, install_streams
from ..support.transport_cases import until
from ..support.watch_cases import Clock, Ranks, running


@pytest.mark.parametrize("size", [2, 3, 5, 100, 1024])
def test_gossip_reaches_all_ranks_in_2_log2_ticks(size: int) -> None:
    """Of ranks whose clocks are up to a tick apart, each of which leaves what it knew a tick ago."""
    skews, known, ticks = [rank % 2 for rank in range(size)], [1 << rank for rank in range(size)], 0
    while any(mask != (1 << size) - 1 for mask in known):
        known = [mask | known[peer_at(rank, size, ticks + skews[rank])] for rank, mask in enumerate(known)]
        ticks += 1
    assert ticks <= 2 * (size - 1).bit_length()


def test_a_stopwatch_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over comes out in order, and its events are used again."""
    device, stopwatch = install_streams(monkeypatch), Stopwatch(torch.device("cuda", 1))
    monkeypatch.setattr(Event, "elapsed_time", lambda start, end: 2e3)
    for kind in ("compute", "wait"):
        with stopwatch.measure(kind):
            pass
    with pytest.raises(KeyError), stopwatch.measure("wait"):
        raise KeyError
    events: list[Any] = [event for _, *both in stopwatch._running for event in both]
    device.pending.add(events[1])
    assert list(stopwatch.finished()) == []  # the second one is over, and the stream has not reached the first
    device.pending.clear()
    assert list(stopwatch.finished()) == [("compute", 2.0), ("wait", 2.0)]
    with stopwatch.measure("compute"):
        pass
    assert [event for _, *both in stopwatch._running for event in both] == events[:2]
    assert [op.stream for op in device.log] == [device.current(1)] * 7


def rows(computes: list[float], waits: list[float] | None = None, elsewhere: float = 0.0) -> dict[int, RankRow]:
    """A ring at the pace of its slowest rank, or one with the given waits."""
    slow = max(computes)
    waits = [slow - compute for compute in computes] if waits is None else waits
    window = max(map(sum, zip(computes, waits, strict=True))) + elsewhere
    return {
        rank: RankRow(1, 0.0, "", compute=compute, wait=wait, window=window)
        for rank, (compute, wait) in enumerate(zip(computes, waits, strict=True))
    }


@pytest.mark.parametrize(
    ("what", "table", "rank", "factor"),
    [
        ("one computes twice as long", rows([4.0, 4.1, 8.0, 3.9]), 2, 2.0),
        ("one of two", rows([2.0, 3.0]), 1, 1.5),
        ("late from elsewhere, and alike in the ring", rows([4.0, 4.0, 4.0], [4.0, 0.0, 4.0]), 1, 2.0),
        ("nobody has computed", rows([0.0, 0.0]), None, None),
        ("one rank alone", rows([4.0]), None, None),
        ("one waits less, and all for the links", rows([4.0, 4.0, 4.6, 4.0], [4.0, 4.0, 3.4, 4.0]), None, None),
        ("nobody waits to speak of", rows([9.8, 9.9, 10.0, 9.7]), None, None),
        ("one is busy a little longer than all wait", rows([9.05, 9.05, 10.0, 9.05]), None, None),
        ("one is busy a twentieth longer", rows([8.8, 8.8, 9.6, 8.8], [1.2, 1.2, 0.4, 1.2]), None, None),
        ("one that has not computed is no part of it", rows([4.0, 4.0, 0.0], [4.0, 4.0, 0.0]), None, None),
        ("the ring is a small part of what the ranks do", rows([0.4, 0.4, 0.8], elsewhere=9.2), None, None),
        ("two of four are slow: no rank stands out", rows([4.0, 8.0, 8.0, 7.9]), None, None),
    ],
)
def test_who_is_a_straggler(what: str, table: dict[int, RankRow], rank: int | None, factor: float | None) -> None:
    expected: object = None if rank is None else (rank, pytest.approx(factor))
    assert slowest(table) == expected, what


def test_one_warning_per_episode() -> None:
    stragglers, slow, even = Stragglers(), rows([4.0, 4.0, 8.0, 4.0]), rows([4.0] * 4)
    said = [stragglers.look(slow, float(now)) for now in range(20)]
    assert [now for now, warning in enumerate(said) if warning] == [LOOKS - 1]
    assert said[LOOKS - 1] == Straggler(2, 2.0, 0.0)
    assert stragglers.look(even, 20.0) is None
    assert stragglers.current is not None  # one even look does not end it
    assert not any(stragglers.look(slow, float(now)) for now in range(21, 30))
    assert not any(stragglers.look(even, float(now)) for now in range(30, 40))
    assert stragglers.current is None
    again = [stragglers.look(slow, float(now)) for now in range(40, 50)]
    assert [warning.since for warning in again if warning] == [40.0]


def test_single_slow_samples_are_no_straggler() -> None:
    stragglers = Stragglers()
    for now in range(100):
        table = rows([4.0, 12.0 if now % 10 < LOOKS - 1 else 4.0, 4.0])
        assert stragglers.look(table, float(now)) is None


CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_compute_and_wait_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    telemetry = Telemetry(0, 2, CPU, None)
    for second in range(40):
        clock.now += 1
        telemetry.spent("compute", 0.25 if second < 20 else 0.5)
        telemetry.spent("wait", 0.125)
        telemetry.report("x", 0, 0)
    row = telemetry.table.rows[0]
    assert row.window == pytest.approx(WINDOW_SECONDS)
    assert row.compute / row.window == pytest.approx(0.5)
    assert row.wait / row.window == pytest.approx(0.125)
    assert row.version == 40


def test_a_large_world_pulls_a_table_less_often_than_it_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, moments = Telemetry(0, 64, CPU, None), iter([100.0, 100.25, 100.5, 100.75])
    monkeypatch.setattr(time, "time", lambda: next(moments))
    assert [telemetry.next_peer() for _ in range(4)] == [peer_at(0, 64, 200), None, peer_at(0, 64, 201), None]


def test_gauges_are_read_now_and_then(clock: Clock) -> None:
    reads: list[int] = []

    def gauges() -> dict[str, object]:
        reads.append(1)
        return {"sm_clock": 1980, "throttle": ("power cap",)}

    telemetry = Telemetry(0, 2, CPU, gauges)
    for _ in range(20):
        clock.now += 0.25
        telemetry.report("x", 0, 0)
    assert 2 <= len(reads) <= 4
    assert telemetry.table.rows[0].gauges == {"sm_clock": 1980, "throttle": ("power cap",)}


def test_idle_rings_only_poll_for_questions(clock: Clock) -> None:
    ranks, fences = running(2)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        fence.finish()
        watch.end()
    ranks.tick(2)
    clock.now += 5
    ranks.tick()
    requests = ranks.connection(0).asked
    for more, later in enumerate((5, 1.5), 1):
        clock.now += later
        ranks.tick(5)
        assert ranks.connection(0).asked == requests + more
    ranks.connection(0).problem = "the store is silent"
    ranks.watches[0].enter()
    ranks.watches[0].left(ValueError("k has 6 heads"))  # told once the store answers
    for problem, message in (("the store is silent", None), (None, {"1": [None, "ValueError: k has 6 heads", False]})):
        clock.now += 20
        ranks.connection(0).problem = problem
        ranks.tick()
        assert ranks.controls[1].look("words/0") == message


def test_newer_rows_replace_older_ones() -> None:
    table, old, new = Table(), RankRow(1, 10.0, "old"), RankRow(2, 11.0, "new")
    table.merge({3: new})
    table.merge({3: old, 1: old})
    assert table.reports(12.0) == (Report(1, 2.0, old), Report(3, 1.0, new))
    assert table.reports(10.5)[1].age == 0.0  # a clock that is behind makes no row come from the future
    copy = Table()
    copy.merge_packed(json.loads(json.dumps(table.packed())))
    copy.merge_packed(None)  # of a peer that has left nothing yet
    assert copy.rows == table.rows


def test_every_rank_gets_the_telemetry_of_all() -> None:
    ranks, fences = running(3)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        watch._telemetry.spent("lunch", 100.0)
        fence.finish()

    def spread_out() -> bool:
        ranks.tick()
        return all([known.row.window > 0 for known in watch.telemetry()] == [True] * 3 for watch in ranks.watches)

    until(spread_out, "a rank does not hear of another")
    for watch in ranks.watches:
        for rank, (of, age, row) in enumerate(watch.telemetry()):
            assert of == rank and 0 <= age < 20
            assert (row.nbytes, row.calls, row.step) == (128, 1, "in a forward after forward hop 1: K/V")
            assert row.gauges is None


@pytest.mark.parametrize(("age", "windows"), [(0.0, 1), (2 * WINDOW_SECONDS, 1), (0.0, 0.1)])
def test_a_straggler_is_reported_once_by_one_rank(
    age: float, windows: float, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """From rows that are not old, in several windows: one rank computes twice as long as the others."""
    ranks, now = Ranks(3), time.time()
    computes, waits = (4.0, 8.0, 4.0), (4.0, 0.1, 4.0)
    table = {
        rank: RankRow(10**6, now - age, "x", compute=compute, wait=wait, window=8.1)
        for rank, (compute, wait) in enumerate(zip(computes, waits, strict=True))
    }
    with caplog.at_level(logging.WARNING, "ringattn"):
        for _ in range(12):
            clock.now += windows * WINDOW_SECONDS
            for watch in ranks.watches:
                watch._telemetry.table.rows.update(table)
                watch._telemetry.warn(clock.now)
    messages = [record.message for record in caplog.records]
    assert len(messages) == (not age and windows == 1)
    assert all("rank 1 holds the ring up: it is busy 1.95 times as long as" in text for text in messages)


def test_telemetry_beside_the_watchdog() -> None:
    """Several threads ask while one measures."""
    (watch, _), over, interval = Ranks(2).watches, threading.Event(), sys.getswitchinterval()

    def ask() -> None:
        while not over.is_set():
            watch.telemetry()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            for _ in range(3000):
                with watch.span("compute"):
                    pass
            over.set()
            for thread in asking:
                thread.result()
        (_, _, row), *_ = watch.telemetry()
        assert row.compute > 0 and row.step == "between calls"
    finally:
        over.set()
        sys.setswitchinterval(interval)
