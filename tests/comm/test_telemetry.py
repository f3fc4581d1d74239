"""Telemetry: measured times, the gossip of rows between ranks, and the rank that is called a straggler."""

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
    CONFIRMING_LOOKS,
    WINDOW_SECONDS,
    RankRow,
    RankTable,
    Report,
    Stopwatch,
    Straggler,
    StragglerTracker,
    Telemetry,
    find_straggler,
    gossip_peer,
)

from ..support.cuda.device import Event, install_streams
from ..support.transport_cases import wait_until
from ..support.watch_cases import ManualClock, WatchedRanks, ranks_in_first_hop


@pytest.mark.parametrize("size", [2, 3, 5, 100, 1024])
def test_gossip_reaches_all_ranks_in_2_log2_ticks(size: int) -> None:
    """Simulate clocks up to one tick apart, where each rank publishes what it knew one tick ago."""
    skews, known, ticks = [rank % 2 for rank in range(size)], [1 << rank for rank in range(size)], 0
    while any(mask != (1 << size) - 1 for mask in known):
        known = [mask | known[gossip_peer(rank, size, ticks + skews[rank])] for rank, mask in enumerate(known)]
        ticks += 1
    assert ticks <= 2 * (size - 1).bit_length()
    assert all(gossip_peer(0, size, tick) for tick in range(20))  # no rank reads its own table


def test_stopwatch_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stopwatch = install_streams(monkeypatch), Stopwatch(torch.device("cuda", 1))
    monkeypatch.setattr(Event, "elapsed_time", lambda start, end: 2e3)
    for kind in ("compute", "wait"):
        with stopwatch.measure(kind):
            pass
    with pytest.raises(KeyError), stopwatch.measure("wait"):
        raise KeyError
    events: list[Any] = [event for _, *both in stopwatch._running for event in both]
    device.pending.add(events[1])
    assert list(stopwatch.pop_finished()) == []  # the second span is over, but the stream has not reached the first
    device.pending.clear()
    assert list(stopwatch.pop_finished()) == [("compute", 2.0), ("wait", 2.0)]
    with stopwatch.measure("compute"):
        pass
    assert [event for _, *both in stopwatch._running for event in both] == events[:2]
    assert [op.stream for op in device.log] == [device.current(1)] * 7


def rows(computes: list[float], waits: list[float] | None = None, elsewhere: float = 0.0) -> dict[int, RankRow]:
    """Return the rows of a ring, by default at the pace of its slowest rank."""
    slow = max(computes)
    waits = [slow - compute for compute in computes] if waits is None else waits
    window = max(map(sum, zip(computes, waits, strict=True))) + elsewhere
    return {
        rank: RankRow(1, 0.0, "", compute=compute, wait=wait, window=window)
        for rank, (compute, wait) in enumerate(zip(computes, waits, strict=True))
    }


@pytest.mark.parametrize(
    ("name", "table", "rank", "factor"),
    [
        ("one rank computes twice as long", rows([4.0, 4.1, 8.0, 3.9]), 2, 2.0),
        ("one of two ranks is slower", rows([2.0, 3.0]), 1, 1.5),
        ("one rank enters late and computes as long as the others", rows([4.0, 4.0, 4.0], [4.0, 0.0, 4.0]), 1, 2.0),
        ("no rank has computed", rows([0.0, 0.0]), None, None),
        ("a ring of one rank", rows([4.0]), None, None),
        ("all ranks wait for links, one of them less", rows([4.0, 4.0, 4.6, 4.0], [4.0, 4.0, 3.4, 4.0]), None, None),
        ("waits are negligible", rows([9.8, 9.9, 10.0, 9.7]), None, None),
        ("one rank is busy slightly longer than the others", rows([9.05, 9.05, 10.0, 9.05]), None, None),
        ("one rank is busy 5% longer", rows([8.8, 8.8, 9.6, 8.8], [1.2, 1.2, 0.4, 1.2]), None, None),
        ("a rank's first report covers no time", {**rows([2.0, 3.0]), 2: RankRow(1, 0.0, "", compute=1.0)}, 1, 1.5),
        ("a rank without compute is ignored", rows([4.0, 4.0, 0.0], [4.0, 4.0, 0.0]), None, None),
        ("the ring is a small part of the step", rows([0.4, 0.4, 0.8], elsewhere=9.2), None, None),
        ("two of four ranks are slow, so none stands out", rows([4.0, 8.0, 8.0, 7.9]), None, None),
    ],
)
def test_slowest_names_a_straggler_only_if_one_rank_stands_out(
    name: str, table: dict[int, RankRow], rank: int | None, factor: float | None
) -> None:
    expected: object = None if rank is None else (rank, pytest.approx(factor))
    assert find_straggler(table) == expected, name


def test_one_straggler_warning_per_episode() -> None:
    stragglers, slow, even = StragglerTracker(), rows([4.0, 4.0, 8.0, 4.0]), rows([4.0] * 4)
    warnings = [stragglers.update(slow, float(now)) for now in range(20)]
    assert [now for now, warning in enumerate(warnings) if warning] == [CONFIRMING_LOOKS - 1]
    assert warnings[CONFIRMING_LOOKS - 1] == Straggler(2, 2.0, 0.0)
    assert stragglers.update(even, 20.0) is None
    for now in range(21, 30):  # single balanced samples do not end the episode
        assert stragglers.current is not None
        assert not stragglers.update(even if now % 2 else slow, float(now))
    assert not any(stragglers.update(even, float(now)) for now in range(30, 29 + CONFIRMING_LOOKS))
    assert stragglers.current is None
    later_warnings = [stragglers.update(slow, float(now)) for now in range(40, 50)]
    assert [warning.since for warning in later_warnings if warning] == [40.0]


def test_single_slow_samples_give_no_straggler_warning() -> None:
    stragglers = StragglerTracker()
    for now in range(100):
        table = rows([4.0, 12.0 if now % 10 < CONFIRMING_LOOKS - 1 else 4.0, 4.0])
        assert stragglers.update(table, float(now)) is None


CPU = torch.device("cpu")


def test_compute_and_wait_cover_the_last_window(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    telemetry = Telemetry(0, 2, CPU, dict, range(2))  # a GPU without a driver has no gauges
    for second in range(40):
        clock.now += 1
        telemetry.add_seconds("compute", 0.25 if second < 20 else 0.5)
        telemetry.add_seconds("wait", 0.125)
        telemetry.report("x", 0, 0)
    row = telemetry.table.rows[0]
    assert row.window == pytest.approx(WINDOW_SECONDS)
    assert row.compute / row.window == pytest.approx(0.5)
    assert row.wait / row.window == pytest.approx(0.125)
    assert (row.version, row.gauges) == (40, None)


def test_a_large_world_pulls_a_table_less_often_than_it_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, moments = Telemetry(0, 64, CPU, None, range(64)), iter([100.0, 100.25, 100.5, 100.75])
    monkeypatch.setattr(time, "time", lambda: next(moments))
    assert [telemetry.next_peer() for _ in range(4)] == [gossip_peer(0, 64, 200), None, gossip_peer(0, 64, 201), None]


def test_gauges_are_read_less_often_than_rows(clock: ManualClock) -> None:
    reads: list[int] = []

    def gauges() -> dict[str, object]:
        reads.append(1)
        return {"sm_clock": 1980, "throttle": ("power cap",)}

    telemetry = Telemetry(0, 2, CPU, gauges, range(2))
    for _ in range(20):
        clock.now += 0.25
        telemetry.report("x", 0, 0)
    assert 2 <= len(reads) <= 4
    assert telemetry.table.rows[0].gauges == {"sm_clock": 1980, "throttle": ("power cap",)}


def test_idle_rings_only_poll_for_questions(clock: ManualClock) -> None:
    ranks, fences = ranks_in_first_hop(2)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        fence.finish()
        watch.end_loop()
    ranks.tick(2)
    clock.now += 5
    ranks.tick()
    requests = ranks.connection(0).asked
    for more, later in enumerate((5, 1.5), 1):
        clock.now += later
        ranks.tick(5)
        assert ranks.connection(0).asked == requests + more
    ranks.connection(0).problem = "the store is silent"
    ranks.watches[0].begin_call()
    ranks.watches[0].report_call_error(ValueError("k has 6 heads"))  # published once the store answers
    for problem, message in (("the store is silent", None), (None, {"1": [None, "ValueError: k has 6 heads", False]})):
        clock.now += 20
        ranks.connection(0).problem = problem
        ranks.tick()
        assert ranks.controls[1].read_key("words/0") == message


def test_newer_rows_replace_older_ones() -> None:
    table, old = RankTable(), RankRow(1, 10.0, "old")
    new = RankRow(2, 11.0, "new", 3, 4, 5.0, 6.0, 7.0, {"sm_mhz": 1980})
    table.merge({3: new})
    table.merge({3: RankRow(2, 12.0, "another copy")})
    table.merge({3: old, 1: old})
    assert table.reports(12.0) == (Report(1, 2.0, old), Report(3, 1.0, new))
    assert table.reports(10.5)[1].age == 0.0  # ages are never negative, even if this rank's clock is behind
    copy = RankTable()
    copy.merge_from_peer(json.loads(json.dumps(table.pack())))
    copy.merge_from_peer(None)  # the peer has published nothing yet
    assert copy.rows == table.rows
    table.merge({3: (newest := RankRow(3, 9.0, "after the rank's clock was set back"))})
    assert table.rows[3] is newest


def test_every_rank_gets_the_telemetry_of_all() -> None:
    ranks, fences = ranks_in_first_hop(3)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        watch._telemetry.add_seconds("lunch", 100.0)
        fence.finish()

    def spread_out() -> bool:
        ranks.tick()
        return all([known.row.window > 0 for known in watch.telemetry()] == [True] * 3 for watch in ranks.watches)

    wait_until(spread_out, "a rank has no row of another")
    for watch in ranks.watches:
        for rank, (of, age, row) in enumerate(watch.telemetry()):
            assert of == rank and 0 <= age < 20
            assert (row.nbytes, row.calls, row.step) == (128, 1, "in a forward after forward hop 1: K/V")
            assert row.gauges is None


@pytest.mark.parametrize(("age", "windows"), [(0.0, 1), (2 * WINDOW_SECONDS, 1), (0.0, 0.1)])
def test_a_straggler_is_reported_once_by_one_rank(
    age: float, windows: float, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    ranks, now = WatchedRanks(3, names=(2, 5, 8)), time.time()
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
                watch._telemetry.warn_straggler(clock.now)
    messages = [record.message for record in caplog.records]
    assert len(messages) == (not age and windows == 1)
    times = {time.strftime("since %H:%M:%S", time.localtime(now + second)) for second in range(10)}
    assert all(text[-14:] in times for text in messages)
    assert all("rank 5 is a straggler: it is busy 1.95 times as long as" in text for text in messages)


def test_telemetry_is_thread_safe() -> None:
    (watch, _), over, interval = WatchedRanks(2).watches, threading.Event(), sys.getswitchinterval()

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
