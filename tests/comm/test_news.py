"""What each rank learns of the others, over which seconds, and who is told of a straggler."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest
import torch

from ringattn.comm.watchdog import telemetry as news_module
from ringattn.comm.watchdog.telemetry import Row

from ..support.watch_cases import Clock, Ranks, running

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def spread(ranks: Ranks, times: int = 12) -> None:
    for _ in range(times):
        ranks.tick()
        time.sleep(0.13)


def test_every_rank_learns_what_every_other_does() -> None:
    ranks, fences = running(3)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        with watch.span("compute"):
            time.sleep(0.02)
        watch.spent("wait", 0.5 + watch.rank)
        watch.spent("lunch", 100.0)
        fence.finish()
    ranks.tick()
    for watch in ranks.watches:
        watch.spent("wait", 0.5)
    spread(ranks)
    for watch in ranks.watches:
        reports = watch.telemetry()
        assert [report.rank for report in reports] == [0, 1, 2]
        assert all(0 <= report.age < 2 for report in reports)
        for report in reports:
            row = report.row
            assert (row.nbytes, row.calls, row.step) == (128, 1, "in a forward after forward hop 1: K/V")
            assert row.gauges is None
            assert row.window > 0


def test_compute_and_wait_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    news = news_module.News(0, 2, CPU, None)
    for second in range(40):
        clock.now += 1
        news.spent("compute", 0.25 if second < 20 else 0.5)
        news.spent("wait", 0.125)
        news.say("x", 0, 0)
    row = news.table.rows[0]
    assert row.window == pytest.approx(news_module.WINDOW_SECONDS)
    assert row.compute / row.window == pytest.approx(0.5)
    assert row.wait / row.window == pytest.approx(0.125)
    assert row.version == 40


def test_gauges_are_read_now_and_then(clock: Clock) -> None:
    reads: list[int] = []

    def gauges() -> dict[str, object]:
        reads.append(1)
        return {"sm_clock": 1980, "throttle": ("power cap",)}

    news = news_module.News(0, 2, CPU, gauges)
    for _ in range(20):
        clock.now += 0.25
        news.say("x", 0, 0)
    assert 2 <= len(reads) <= 4
    assert news.table.rows[0].gauges == {"sm_clock": 1980, "throttle": ("power cap",)}


def straggling(ranks: Ranks, slow: int) -> None:
    """Rows as the gossip would bring them, of a ring in which one rank computes twice as long."""
    now = time.time()
    for rank in range(len(ranks.watches)):
        compute, wait = (8.0, 0.1) if rank == slow else (4.0, 4.0)
        row = Row(10**6 + int(now * 1e3), now, "x", compute=compute, wait=wait, window=8.1)
        for watch in ranks.watches:
            watch._news.table.rows[rank] = row


def test_a_straggler_is_named_once_and_by_one_rank(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    ranks = Ranks(3)
    with caplog.at_level(logging.WARNING, "ringattn"):
        for _ in range(12):
            clock.now += news_module.WINDOW_SECONDS
            straggling(ranks, 1)
            for watch in ranks.watches:
                watch._news.warn(clock.now)
    (record,) = caplog.records
    assert "rank 1 holds the ring up: it is busy 1.95 times as long as" in record.message
    assert ", since " in record.message


def test_old_rows_make_no_straggler(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    ranks = Ranks(3)
    straggling(ranks, 1)
    for rank, row in ranks.watches[0]._news.table.rows.items():
        ranks.watches[0]._news.table.rows[rank] = row._replace(stamp=row.stamp - 2 * news_module.WINDOW_SECONDS)
    with caplog.at_level(logging.WARNING, "ringattn"):
        for _ in range(12):
            clock.now += news_module.WINDOW_SECONDS
            ranks.watches[0]._news.warn(clock.now)
    assert not caplog.records


def test_a_ring_that_rests_only_looks_for_questions(clock: Clock) -> None:
    ranks, fences = running(2)
    for watch, fence in zip(ranks.watches, fences, strict=True):
        fence.finish()
        watch.end()
    ranks.tick(2)
    clock.now += 5
    ranks.tick()
    asked = ranks.line(0).asked
    clock.now += 5
    ranks.tick(5)
    assert ranks.line(0).asked == asked + 1


def test_telemetry_beside_the_watchdog() -> None:
    (watch, _), errors = Ranks(2).watches, []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                watch.telemetry()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            with watch.span("compute"):
                pass
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors
