"""The watchdog: late and failed transfers, ranks that break or disagree, and one thread for all rings."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from ringattn.comm import DONE, LocalGroup, LocalWorld, TransportError
from ringattn.comm.control import Control
from ringattn.comm.watchdog import watch as module
from ringattn.comm.watchdog.deadlines import NEVER, Post
from ringattn.comm.watchdog.watch import FailureGroup, Watch, Watchdog, open_watch, ring_control

from ..support.transport_cases import HANGS, wait_until
from ..support.watch_cases import (
    AbortRecorder,
    LaggingStore,
    ManualClock,
    ManualTransfer,
    WatchedRanks,
    memory_controls,
    ranks_in_first_hop,
    run_on_all,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough for aborts that do not hang."""
    monkeypatch.setattr(module, "ABORT_SECONDS", HANGS)


def agreed_once(size: int, **options: Any) -> WatchedRanks:
    """Return ranks that have agreed on call 1."""
    ranks = WatchedRanks(size, **options)
    run_on_all(ranks.watches, lambda watch: watch.agree_on_call({"heads": 8}))
    return ranks


def test_late_transfers_are_propagated_to_all_ranks(clock: ManualClock) -> None:
    ranks, fences = ranks_in_first_hop(3)
    for fence in (fences[0], fences[1]):
        fence.finish()
    ranks.tick()
    clock.now += 1.0
    ranks.tick()
    clock.now += 2.5
    ranks.watches[2].tick()
    (text,) = ranks.transports[2].reasons
    assert text.startswith(
        "rank 2: forward hop 1: K/V (64 bytes rank 1 -> rank 2, 64 bytes rank 2 -> rank 0) not finished 3 s after it "
        "could start, which is its deadline. Last reported: rank 0: in a forward after forward hop 1: K/V ("
    )
    assert "; rank 1: in a forward after forward hop 1: K/V (" in text
    requests = ranks.connection(0).asked
    ranks.tick()  # the other ranks read the failure in one tick and make no more requests
    assert ranks.connection(0).asked == requests + 1
    for rank in (0, 1):
        (reason,) = ranks.transports[rank].reasons
        assert reason.startswith(f"rank {rank}: in a forward after forward hop 1: K/V given up. Rank 2 reported: ")
        assert text in reason
    # A waiting call raises the failure, and later calls raise the same error.
    requests = ranks.connection(2).asked
    raised = ranks.watches[2].report_failure(TransportError("the local transport of rank 0 was aborted"))
    assert isinstance(raised, TransportError) and str(raised) == text
    assert ranks.connection(2).asked == requests
    with pytest.raises(TransportError, match="forward hop 1: K/V"):
        ranks.watches[2].agree_on_call({"heads": 8})


def test_the_root_cause_is_named_not_the_closed_connection() -> None:
    """Let rank 1 fail because of rank 2. Rank 0, whose connection to rank 1 breaks, must name rank 2 too."""
    ranks, fences = ranks_in_first_hop(3)
    fences[1].finish("receive from rank 2 failed: killed")
    ranks.watches[1].tick()
    fences[0].finish("send to rank 1 failed: Connection reset by peer")
    message = str(ranks.watches[0].report_failure(TransportError("send to rank 1 failed: Connection reset by peer")))
    assert "Connection reset by peer. Rank 1 reported: " in message and "receive from rank 2 failed: killed" in message


def test_the_failed_transfer_is_named_not_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    ranks, _ = ranks_in_first_hop(2)
    watch, broken = ranks.watches[0], ManualTransfer()
    watch.add_post("forward hop 2: K/V", broken, [DONE], [(1, 8)], [])
    broken.finish("killed")
    text = str(watch.report_failure(TransportError("killed")))
    assert text.startswith("rank 0: forward hop 2: K/V (8 bytes rank 0 -> rank 1) failed: killed")
    assert [record.message for record in caplog.records] == [text]  # no traceback in the log, because the caller raises


def test_a_problem_that_a_transport_notices_ends_the_ring() -> None:
    ranks, _ = ranks_in_first_hop(2)
    ranks.transports[0].check = lambda: "the link is down"  # type: ignore[method-assign,assignment,return-value]
    ranks.watches[0]._transports = lambda: [AbortRecorder(), ranks.transports[0]]  # type: ignore[list-item,return-value]
    ranks.watches[0].tick()
    assert "forward hop 1: K/V" in ranks.transports[0].reasons[0]
    assert " failed: the link is down" in ranks.transports[0].reasons[0]


def test_virtual_ranks_leave_errors_to_their_world() -> None:
    (ranks, _), error = ranks_in_first_hop(2), TransportError("the link is down")
    watch = ranks.watches[0]
    watch._ends_all_ranks = True
    assert watch.report_failure(error) is error
    assert watch.failure_reason() is None
    watch.close()
    requests = ranks.connection(0).asked
    watch.tick()
    assert not watch._posts.is_busy and ranks.connection(0).asked == requests


def test_a_ring_of_one_rank_makes_no_store_requests() -> None:
    rings = FailureGroup()
    (ranks, _), other = ranks_in_first_hop(1, rings=rings), WatchedRanks(2, rings=rings)
    watch, error = ranks.watches[0], ValueError("k has 6 heads")
    watch.begin_call()
    assert watch.agree_on_call({"heads": 8}) == 0
    with watch.span("compute"):
        pass
    watch.report_call_error(error)
    assert watch.report_failure(error) is error
    other.watches[0].report_failure(error)
    assert watch.failure_reason() is None
    assert not watch._posts.is_busy and not [*watch._telemetry.stopwatch.pop_finished()]
    assert ranks.connection(0).asked == 0


def test_last_steps_list_the_peers_of_the_late_transfer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = WatchedRanks(3)
    for watch in ranks.watches[1:]:
        watch._telemetry.report("between calls", 0, 0)
        watch._control.publish(f"table/{watch.rank}", watch._telemetry.table.pack())
    text = re.sub(r"\d\.\d s", "a while", ranks.watches[0]._describe_last_steps(None))
    assert text == "Last reported: rank 1: between calls (a while ago); rank 2: between calls (a while ago)"
    many, asked = WatchedRanks(module.MAX_ASKED_RANKS + 4), [19, 18, *range(1, module.MAX_ASKED_RANKS - 1)]
    post = Post("a hop", ManualTransfer(), [DONE], [(19, 8)], [(18, 8)], 0.0, 1)
    text = f"Last reported: nothing; nothing from rank {', '.join(map(str, asked))}"
    assert many.watches[0]._describe_last_steps(post) == text


def test_a_rank_publishes_its_table_under_its_own_number() -> None:
    ranks, _ = ranks_in_first_hop(3)
    ranks.watches[1].tick()
    assert [ranks.controls[0].read_key(f"table/{rank}") is not None for rank in range(3)] == [False, True, False]


def test_ticks_without_a_turn_to_gossip_move_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ranks_in_first_hop(2)[0].watches[0]
    exchange, warn = Mock(return_value={}), Mock()
    monkeypatch.setattr(watch._telemetry, "next_peer", lambda: None)
    monkeypatch.setattr(watch._telemetry, "warn_straggler", warn)
    monkeypatch.setattr(watch._control, "exchange", exchange)
    watch.tick()
    exchange.assert_called_once_with(None, ["failure", "asked"], module.STORE_SECONDS)
    warn.assert_called_once()


@pytest.mark.parametrize(("compares", "seconds"), [(False, 0.0), (True, 100.0)])
def test_failures_are_read_while_ranks_compare_a_call_and_after_it(
    compares: bool, seconds: float, clock: ManualClock
) -> None:
    ranks, fences = ranks_in_first_hop(2)
    fences[0].finish()
    clock.now += 4.0
    ranks.watches[0].end_loop()
    ranks.watches[0]._is_in_preflight = compares
    ranks.controls[1].publish("failure", (1, "TransportError", "a reason"))
    clock.now += module.GRACE_SECONDS + seconds
    ranks.watches[0].tick()
    assert "a reason" in str(ranks.watches[0].failure_reason())


def test_other_errors_are_kept_and_propagated_to_peers() -> None:
    ranks, _ = ranks_in_first_hop(2)
    error, connection, messages = MemoryError("out of memory"), ranks.connection(0), list[Any]()
    connection.store = LaggingStore(connection.store)

    def abort(reason: str) -> None:
        messages.append(ranks.controls[1].read_key("failure"))  # published before the abort that it explains
        AbortRecorder.abort(ranks.transports[0], reason)

    ranks.transports[0].abort = abort  # type: ignore[method-assign]
    assert ranks.watches[0].report_failure(error) is error
    # Aborted, because the peer still writes to memory that is about to be freed.
    assert messages == [[0, "TransportError", text] for text in ranks.transports[0].reasons]
    ranks.tick()
    (reason,) = ranks.transports[1].reasons
    edges = "64 bytes rank 0 -> rank 1, 64 bytes rank 1 -> rank 0"
    assert reason.startswith(f"rank 1: forward hop 1: K/V ({edges}) given up. Rank 0 reported: rank 0: ")
    assert "failed: MemoryError: out of memory" in reason


def test_a_lost_store_is_reported_and_the_deadline_holds(clock: ManualClock) -> None:
    ranks, _ = ranks_in_first_hop(3)
    run_on_all(ranks.watches, lambda watch: watch.agree_on_call({"heads": 8}))  # each rank now has a row of all others
    for rank in range(3):
        ranks.connection(rank).problem = "the store of the group is gone (Connection reset by peer)"
    clock.now += 1
    ranks.tick()
    requests = ranks.connection(1).asked
    clock.now += 1
    ranks.tick()
    assert ranks.connection(1).asked == requests  # the silent store gets no request for a while
    clock.now += 1
    ranks.tick()
    for rank, transport in enumerate(ranks.transports):
        (text,) = transport.reasons
        assert text.startswith(f"rank {rank}: forward hop 1: K/V (")
        assert all(f"rank {other}: agreed on a call (" in text for other in range(3) if other != rank)
        assert text.endswith(". the store of the group is gone (Connection reset by peer)")


def test_a_failure_is_propagated_after_a_short_stall_of_the_store(clock: ManualClock) -> None:
    ranks, fences = ranks_in_first_hop(2)
    for rank, problem in itertools.product(range(2), ("the store of the group has not answered for 1 s", None)):
        ranks.connection(rank).problem = problem
        ranks.watches[rank].tick() if problem else None
    fences[0].finish("receive from rank 1 failed: Connection reset by peer")
    ranks.watches[0].tick()
    clock.now += 2.0
    ranks.watches[1].tick()
    assert ["Rank 0 reported: rank 0: " in reason for reason in ranks.transports[1].reasons] == [True]


def test_a_hanging_abort_does_not_block_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.1)
    ranks, fences = ranks_in_first_hop(2, fatal=True)
    stuck, over = threading.Event(), list[bool]()
    ranks.transports[0].abort = lambda reason: over.append(stuck.wait(HANGS))  # type: ignore[method-assign]
    fences[0].finish("failed")
    ranks.watches[0].report_failure(TransportError("failed"))
    assert not over
    assert ranks.ended and ranks.ended[0][0] == 0
    stuck.set()


def test_a_mismatch_with_transfers_in_flight_ends_the_ring() -> None:
    ranks = agreed_once(2, deadline=HANGS)

    def call(watch: Watch) -> None:
        if watch.rank == 0:
            watch.agree_on_call({"heads": 4})
            return
        watch.agree_on_call({"heads": 8})
        watch.begin_loop("forward")
        watch.add_post("forward hop 1: K/V", ManualTransfer(), [DONE], [(0, 64)], [(0, 64)])
        while not ranks.transports[1].reasons:
            watch.tick()
            time.sleep(0.01)
        raise watch.report_failure(TransportError(ranks.transports[1].reasons[0]))

    text = "heads differs between ranks (rank 0: 4, rank 1: 8). All ranks of a ring must pass the same value"
    assert [(type(error), str(error)) for error in run_on_all(ranks.watches, call)] == [(ValueError, text)] * 2
    assert ranks.transports[0].reasons == ranks.transports[1].reasons == [text]


def two_rings(**options: Any) -> tuple[WatchedRanks, WatchedRanks]:
    """Return two rings of a process that is rank 0 of both, as in a mesh, after one agreed call."""
    rings = FailureGroup()
    both = WatchedRanks(2, rings=rings, **options), WatchedRanks(2, rings=rings, **options)
    for ranks in both:
        for watch in ranks.watches:
            watch.begin_call()
        run_on_all(ranks.watches, lambda watch: watch.agree_on_call({"heads": 8}))
        for watch in ranks.watches:
            watch.end_call()
    return both


@pytest.mark.parametrize("kind", ["TransportError", "ValueError"])
def test_a_failure_reaches_the_ranks_of_the_other_ring(kind: str) -> None:
    here, there = two_rings()
    here.controls[1].publish("failure", (1, kind, "a reason"))
    here.watches[0].tick()
    there.watches[1].tick()
    raised = TransportError if kind == "TransportError" else ValueError
    for watch in (there.watches[0], there.watches[1]):
        with pytest.raises(raised, match="a reason"):
            watch.agree_on_call({"heads": 8})
    assert all("a reason" in reason for reason in (*there.transports[0].reasons, *there.transports[1].reasons))
    assert [len(transport.reasons) for transport in there.transports] == [1, 1]


def test_a_failure_carries_the_rank_of_this_process_in_each_ring() -> None:
    rings = FailureGroup()
    here, there = (WatchedRanks(2, rings=rings, place=place) for place in (0, 1))
    here.watches[0].report_failure(MemoryError("out of memory"))
    failures: Any = [ranks.controls[0].read_key("failure") for ranks in (here, there)]
    assert [rank for rank, *_ in failures] == [0, 1]


def test_the_other_ring_gets_the_failure_before_the_process_ends() -> None:
    here, there = two_rings(fatal=True)
    failures = list[Any]()
    here.watches[0]._fatal = lambda text: failures.append(there.controls[1].read_key("failure"))
    here.watches[0].report_failure(MemoryError("out of memory"))
    (failure,) = failures
    assert failure[:2] == [0, "TransportError"] and "MemoryError: out of memory" in failure[2]


def test_only_open_rings_of_the_same_set_fail_together() -> None:
    (here, there), alone = two_rings(), WatchedRanks(2)
    there.watches[0].close()
    here.watches[0].report_failure(MemoryError("out of memory"))
    for ranks in (there, alone):
        assert ranks.controls[1].read_key("failure") is None
        assert not any(transport.reasons for transport in ranks.transports)


@pytest.mark.parametrize("both", [True, False])
def test_a_refusal_ends_no_ring(both: bool) -> None:
    rings = two_rings()
    called = rings if both else rings[:1]
    for ranks in called:
        ranks.watches[0].begin_call()
    for ranks in called:
        ranks.watches[0].report_call_error(ValueError("k has 6 heads"))
    for ranks in called:
        with pytest.raises(ValueError, match="rank 0 refused this call: ValueError: k has 6 heads"):
            ranks.watches[1].agree_on_call({"heads": 4})
        assert run_on_all(ranks.watches, lambda watch: watch.agree_on_call({"heads": 4})) == [3, 3]
        assert ranks.controls[1].read_key("failure") is None


@pytest.mark.parametrize("heads", [[8, 4], [8, 8]])
def test_an_error_known_to_all_ranks_is_not_published_again(heads: list[int]) -> None:
    ranks = WatchedRanks(2)

    def call(watch: Watch) -> None:
        watch.begin_call()
        with suppress(ValueError):
            watch.agree_on_call({"heads": heads[watch.rank]})
            watch.cancel_call()
        watch.report_call_error(ValueError("heads"))

    run_on_all(ranks.watches, call)
    assert ranks.controls[1].read_key("failure") is None
    assert [watch._preflight.call_count for watch in ranks.watches] == [1, 1]
    assert ranks.watches[0]._step() == "between calls"


@pytest.mark.parametrize(("error", "agreed"), [(TransportError("rank 1 is gone"), False), (MemoryError("of 0"), True)])
def test_an_error_of_a_lost_or_agreed_ring_is_not_a_refusal(error: Exception, agreed: bool) -> None:
    here, there = two_rings()
    for ranks in (here, there):
        ranks.watches[0].begin_call()
    if agreed:
        assert run_on_all(there.watches, lambda watch: watch.agree_on_call({"heads": 8})) == [2, 2]
    here.watches[0].report_call_error(error)
    for ranks in (here, there):
        ranks.watches[1].tick()
        with pytest.raises(TransportError, match=str(error)):
            ranks.watches[1].agree_on_call({"heads": 4})


def test_errors_use_the_rank_numbers_of_the_mesh(clock: ManualClock) -> None:
    ranks = agreed_once(2, names=(1, 3))
    for watch in ranks.watches:
        watch.begin_loop("forward")
    ranks.watches[1].add_post("forward hop 1: K/V", ManualTransfer(), [DONE], [(0, 64)], [(0, 64)])
    for _ in range(2):
        clock.now += 2.0
        ranks.watches[1].tick()
    ranks.watches[0].tick()
    late = "rank 3: forward hop 1: K/V (64 bytes rank 1 -> rank 3, 64 bytes rank 3 -> rank 1) not finished 3 s"
    assert ranks.transports[1].reasons[0].startswith(late)
    assert "Last reported: rank 1: agreed on a call" in ranks.transports[1].reasons[0]
    assert ranks.transports[0].reasons[0].startswith("rank 1: ")
    assert f"Rank 3 reported: {late}" in ranks.transports[0].reasons[0]


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_connection_broken_by_a_refusing_rank_raises_the_refusal(ticks: int) -> None:
    """Answer the question in one tick and read the reason in the next, unless the connection breaks earlier."""
    ranks = agreed_once(2, deadline=HANGS)
    ranks.watches[1].begin_call()
    ranks.watches[1].report_call_error(ValueError("k has 6 heads"))
    watch = ranks.watches[0]
    watch.agree_on_call({"heads": 8})
    watch.begin_loop("forward")
    watch.add_post("forward hop 1: K/V", ManualTransfer(), [DONE], [(1, 64)], [(1, 64)])
    text = "rank 1 refused this call: ValueError: k has 6 heads"
    for _ in range(ticks):
        watch.tick()
    words: Any = ranks.controls[1].read_key("words/0") or {}
    assert ("2" in words, ranks.transports[0].reasons) == (ticks > 0, [text] * (ticks > 1))
    raised = watch.report_failure(TransportError("Connection closed by peer"))
    assert (type(raised), str(raised)) == (ValueError, text)
    words = ranks.controls[1].read_key("words/0")
    assert "2" in words
    assert ranks.controls[1].read_key("failure") == [0, "ValueError", text]


@pytest.mark.parametrize("answered", [False, True])
def test_an_idle_rank_answers_questions_at_its_next_poll(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last call be long over while another rank waits at a new call. An idle watchdog polls now and then."""
    ranks = agreed_once(2, deadline=HANGS)
    ranks.watches[1].agree_on_call({"heads": 8})
    monkeypatch.setattr(module, "GRACE_SECONDS", -NEVER)
    monkeypatch.setattr(module, "IDLE_SECONDS", NEVER if answered else 0.0)
    ranks.controls[0].publish("asked", 2)
    asked = ranks.connection(1).asked
    ranks.watches[1].tick()
    words: Any = ranks.controls[0].read_key("words/1") or {}
    assert ("2" in words, ranks.connection(1).asked > asked) == (not answered, not answered)
    ranks.controls[0].publish("words/0", {"2": [{"heads": "4"}, None, False]})
    ranks.watches[1].tick()
    assert ("heads differs" in str(ranks.watches[1].failure_reason())) is not answered


def test_clocks_restart_after_a_stopped_process_continues(clock: ManualClock) -> None:
    ranks, _ = ranks_in_first_hop(2)  # a deadline of 3 s
    ranks.tick()
    clock.now += 1000.0  # as after SIGSTOP and SIGCONT, or in a debugger
    ranks.tick()
    assert not ranks.transports[0].reasons
    for _ in range(4):
        clock.now += 1.0
        ranks.tick()
    assert ranks.transports[0].reasons


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    watchdog = Watchdog()
    monkeypatch.setattr(module, "_WATCHDOG", watchdog)
    yield watchdog
    watchdog.stop()


def watch_of(control: Control) -> Watch:
    return Watch(control, deadline=0.2, device=CPU, transports=lambda: [])


def test_a_fault_in_one_ring_does_not_stop_watching_the_others(
    fast: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = (watch_of(control) for control in memory_controls(2))
    ticks: list[int] = []
    broken.tick = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    good.tick = lambda: ticks.append(1)  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "ringattn"):
        fast.add(broken)
        fast.add(good)
        wait_until(lambda: len(ticks) >= 3)
    assert "the watchdog of rank 0 failed" in caplog.text
    broken.close()
    left: Any = [good, Mock(rank=3, device="a device that has failed")]
    module._tick(left)
    assert left == [good] and "the watchdog of rank 3 failed" in caplog.text


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12, in a process with threads
def test_a_forked_child_starts_its_own_watchdog_thread(fast: Watchdog) -> None:
    fast.add(watch := watch_of(memory_controls(2)[0]))
    child = os.fork()
    if child == 0:
        ticked = threading.Event()
        try:
            watch.tick = ticked.set  # type: ignore[method-assign]
            module._WATCHDOG.add(watch)
        finally:
            os._exit(0 if ticked.wait(HANGS) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_stream_deadlines_end_the_process_with_the_reason(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    ranks, _ = ranks_in_first_hop(3, fatal=True)
    ranks.tick()
    clock.now += 4
    ranks.tick()
    assert [rank for rank, _ in ranks.ended] == [0, 1, 2]
    for rank, text in ranks.ended:
        assert ranks.transports[rank].reasons == [text]  # aborted before
    assert "Last reported: rank 1: in forward hop 1: K/V (" in ranks.ended[0][1]
    (watch, *_), error = ranks_in_first_hop(2, fatal=True, names=(4, 6))[0].watches, MemoryError("no room")
    assert watch.report_failure(error) is error
    assert [record.message for record in caplog.records if record.exc_info and record.exc_info[1] is error] == [
        "rank 4 failed"
    ]


def test_a_rank_that_does_not_come_to_the_preflight_is_named() -> None:
    ranks = WatchedRanks(2, patience=0.2, names=(1, 3))
    with pytest.raises(TransportError, match=r"^rank 1: comparing .* no answer from rank 3 within 0\.2 s\. Last"):
        ranks.watches[0].agree_on_call({"heads": 8})


def test_one_thread_serves_all_rings_and_ends_with_the_last(fast: Watchdog) -> None:
    before, watches = {*threading.enumerate()}, [watch_of(control) for control in memory_controls(4)]
    for watch in watches:
        fast.add(watch)
    thread, gone = fast._thread, weakref.ref(watches[0])
    assert thread is not None and thread.daemon
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    assert names.count("ringattn-watchdog") == 1
    watches[1].close()
    del watches[0], watch
    wait_until(lambda: gc.collect() >= 0 and gone() is None)  # the thread holds no watch
    assert thread.is_alive()
    del watches
    gc.collect()
    thread.join(HANGS)
    assert not thread.is_alive()
    again = watch_of(memory_controls(2)[0])
    fast.add(again)  # the watchdog starts a new thread
    assert fast._thread is not None and fast._thread.is_alive()


def test_the_thread_closes_destroyed_groups(fast: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = threading.Event()
    monkeypatch.setattr(module, "close_destroyed_groups", swept.set)
    watch = watch_of(memory_controls(2)[0])
    fast.add(watch)
    assert swept.wait(HANGS)


def test_stop_waits_for_a_running_tick(fast: Watchdog) -> None:
    begun, over = threading.Event(), list[bool]()

    def tick() -> None:
        begun.set()
        fast._end.wait(HANGS)
        time.sleep(0.1)
        over.append(True)

    watch = watch_of(memory_controls(2)[0])
    watch.tick = tick  # type: ignore[method-assign]
    fast.add(watch)
    assert begun.wait(HANGS)
    fast.stop()
    assert over, "stop must wait for the tick"


def test_virtual_ranks_have_no_deadline_of_their_own(fast: Watchdog) -> None:
    rings = [FailureGroup() for _ in range(2)]

    def fn(group: LocalGroup) -> list[tuple[float | None, object, bool]]:
        watches = [
            open_watch(
                group,
                CPU,
                control=ring_control(group, deadline),
                deadline=deadline,
                transports=list,
                failure_group=rings[group.rank()],
            )
            for deadline in (None, 5.0)
        ]
        assert {*watches} == {*rings[group.rank()].watches}
        gpu, gauges = torch.device("cuda", 0), Mock(return_value={"sm_mhz": 1980})
        watches.append(
            open_watch(group, gpu, control=ring_control(group, 9.0), deadline=9.0, transports=list, gauges=gauges)
        )
        assert watches[-1].telemetry()[0].row.gauges == {"sm_mhz": 1980}
        for watch in watches:
            watch.close()
        return [(watch._posts._seconds, watch._fatal, watch._ends_all_ranks) for watch in watches]

    with LocalWorld(2, device="cpu") as world:
        assert world.run(fn) == [[(NEVER, None, True), (5.0, None, True), (9.0, None, True)]] * 2


@pytest.mark.parametrize(("device", "steps"), [("cpu", []), ("cuda:0", ["flush", 75])])
def test_only_failures_on_a_gpu_end_the_process(
    device: str, steps: list[object], fast: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit with EX_TEMPFAIL, so that schedulers restart the process."""
    ended: list[object] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "stdout", Mock(flush=lambda: ended.append("flush")))
    group: Any = object()
    alone, watch = (
        open_watch(group, torch.device(device), control=memory_controls(size)[0], deadline=None, transports=list)
        for size in (1, 2)
    )
    assert ({*fast._watches}, alone.is_closed, watch._posts._seconds) == ({watch}, False, None)
    watch.report_failure(TransportError("the connection is gone"))
    assert ended == steps and os.EX_TEMPFAIL == 75
    assert ("ending this process: rank 0: between calls failed: the connection is gone" in caplog.text) is bool(steps)


def test_fences_of_a_gpu_are_not_waited_for() -> None:
    """Poll the fence, because waiting would block a stream."""
    watch = Watch(memory_controls(2)[0], deadline=3.0, device=torch.device("cuda", 0), transports=list)
    fence = Mock(done=Mock(return_value=True))
    watch.add_post("a hop", fence, [DONE], [(1, 8)], [])
    watch._posts.poll(time.monotonic())
    fence.wait.assert_not_called()


def test_the_first_failure_stays_and_aborts_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = WatchedRanks(2, deadline=HANGS)
    for text in ("the first", "another"):
        ranks.watches[0]._fail(module.RingFailure(0, "TransportError", text))
    assert ranks.transports[0].reasons == ["the first"] and ranks.watches[0].failure_reason() == "the first"
    assert ranks.controls[1].read_key("failure") == [0, "TransportError", "the first"]
    assert [record.message for record in caplog.records] == ["the first"]


def test_an_answering_store_resets_the_pause_between_retries(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, pauses = WatchedRanks(2, deadline=HANGS, names=(4, 6)), list[float]()
    watch, connection = ranks.watches[0], ranks.connection(0)
    with caplog.at_level(logging.INFO, "ringattn"):
        for problem in (*["silent"] * 5, None, "silent"):
            connection.problem = problem
            answers = [watch._exchange() for _ in range(2)]
            assert answers == [None if problem else {}] * 2
            pauses += [watch._retry_store_at - clock.now] if problem else []
            clock.now += module.MAX_SILENT_SECONDS
    assert pauses == [2.0, 4.0, 8.0, 16.0, 16.0, 2.0]
    assert connection.asked == 5 + 2 + 1, "a silent store is asked once per pause"
    assert [record.message for record in caplog.records] == ["rank 4: silent"]


def test_a_call_is_passed_on_to_the_preflight_with_every_argument() -> None:
    watch = WatchedRanks(2).watches[0]
    preflight = watch._preflight = Mock(call_count=4, agree_on_call=Mock(return_value=None))
    assert watch.agree_on_call({"a": 1}, {"b": 2}, forward_number=3, is_forced=True) == 5
    given = call({"a": 1}, {"b": 2}, forward_number=3, is_forced=True, stop=watch.failure_reason)
    assert preflight.agree_on_call.mock_calls == [given]
    assert [report.row.step for report in watch._telemetry.table.reports(0.0)] == ["agreed on a call"] * 2
    assert not watch._is_in_preflight and watch._agreed_call == 5
    preflight.agree_on_call.return_value = Mock(text="they differ", is_in_flight=False)
    with pytest.raises(ValueError, match="they differ"):
        watch.agree_on_call({})
    assert watch._agreed_call is None and watch.failure_reason() is None


def test_only_a_transport_error_looks_for_another_rank_s_failure_first() -> None:
    for error, looks in ((KeyError("a head"), 0), (TransportError("closed"), 1)):
        watch = WatchedRanks(2).watches[0]
        watch._find_explanation = Mock(return_value=None)  # type: ignore[method-assign]
        watch.report_failure(error)
        assert watch._find_explanation.call_count == looks


@pytest.mark.parametrize("active", ["phase", "preflight", "transfer", ""])
def test_a_ring_is_active_in_a_loop_a_preflight_or_a_transfer(active: str, clock: ManualClock) -> None:
    watch = WatchedRanks(2).watches[0]
    if active == "transfer":
        watch.add_post("K/V", ManualTransfer(), [DONE], [(1, 64)], [])
    watch._phase, watch._is_in_preflight = "forward" if active == "phase" else None, active == "preflight"
    clock.now += 2.0
    watch.tick()
    assert watch._active_at == (clock.now if active else -NEVER)


def test_idle_ranks_of_large_worlds_ask_seldom(clock: ManualClock) -> None:
    ranks = WatchedRanks(64)
    ranks.watches[0]._answered_at = clock.now
    for seconds, asked in ((1.9, 0), (0.2, 1)):  # twice as seldom as 32 ranks
        clock.now += seconds
        ranks.watches[0].tick()
        assert ranks.connection(0).asked == asked


@pytest.mark.parametrize(("finder", "told"), [(0, True), (1, False)])
def test_a_difference_of_calls_is_told_by_the_rank_that_found_it(finder: int, told: bool) -> None:
    ranks = WatchedRanks(2)
    ranks.watches[0]._report_problem(None, "given up", module.RingFailure(finder, "ValueError", "they differ"))
    published = ranks.controls[1].read_key("failure")
    assert published == ([finder, "ValueError", "they differ"] if told else None)
    assert ranks.watches[0].failure_reason() == "they differ"
