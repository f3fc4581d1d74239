"""Transfers that are late or fail, ranks that break or disagree, and the one thread that watches all rings."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import DONE, LocalGroup, LocalWorld, TransportError
from ringattn.comm.control import Control
from ringattn.comm.watchdog import watch as module
from ringattn.comm.watchdog.deadlines import NEVER, Post
from ringattn.comm.watchdog.watch import FailTogether, Watch, Watchdog, open_watch, ring_control

from ..support.transport_cases import HANGS, until
from ..support.watch_cases import Aborted, Clock, Ranks, Transfer, Unconfirmed, controls, on_all, running

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that does not hang is waited for."""
    monkeypatch.setattr(module, "ABORT_SECONDS", HANGS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_late_transfers_are_propagated_to_all_ranks(clock: Clock) -> None:
    ranks, fences = running(3)
    for fence in (fences[0], fences[1]):
        fence.finish()
    ranks.tick()
    clock.now += 1.0
    ranks.tick()
    clock.now += 2.5
    ranks.watches[2].tick()
    (text,) = ranks.transports[2].reasons
    assert text.startswith(
        "rank 2: forward hop 1: K/V (64 bytes rank 1 -> rank 2, 64 bytes rank 2 -> rank 0) not over 3 s after what it "
        "waits for (its deadline). Last reported: rank 0: in a forward after forward hop 1: K/V ("
    )
    assert "; rank 1: in a forward after forward hop 1: K/V (" in text
    requests = ranks.connection(0).asked
    ranks.tick()  # the others hear it in one tick, and ask no more
    assert ranks.connection(0).asked == requests + 1
    for rank in (0, 1):
        (heard,) = ranks.transports[rank].reasons
        assert heard.startswith(f"rank {rank}: in a forward after forward hop 1: K/V given up. Rank 2 found: rank 2: ")
        assert text in heard
    # whoever waits raises what was found, and a call that comes later is refused with the same words
    requests = ranks.connection(2).asked
    raised = ranks.watches[2].failed(TransportError("the local transport of rank 0 was aborted"))
    assert isinstance(raised, TransportError) and str(raised) == text
    assert ranks.connection(2).asked == requests
    with pytest.raises(TransportError, match="forward hop 1: K/V"):
        ranks.watches[2].agree({"heads": 8})


def test_the_root_cause_is_named_not_the_closed_connection() -> None:
    """Rank 1 gives up because of rank 2; rank 0, whose connection to rank 1 breaks by that, must name rank 2 too."""
    ranks, fences = running(3)
    fences[1].finish("receive from rank 2 failed: killed")
    ranks.watches[1].tick()
    fences[0].finish("send to rank 1 failed: Connection reset by peer")
    message = str(ranks.watches[0].failed(TransportError("send to rank 1 failed: Connection reset by peer")))
    assert "Connection reset by peer. Rank 1 found: " in message and "receive from rank 2 failed: killed" in message


def test_the_transfer_that_failed_is_named_not_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    ranks, _ = running(2)
    watch, broken = ranks.watches[0], Transfer()
    watch.posted("forward hop 2: K/V", broken, [DONE], [(1, 8)], [])
    broken.finish("killed")
    text = str(watch.failed(TransportError("killed")))
    assert text.startswith("rank 0: forward hop 2: K/V (8 bytes rank 0 -> rank 1) failed: killed")
    assert [record.message for record in caplog.records] == [text]  # no traceback: the caller raises


def test_a_problem_that_a_transport_notices_ends_the_ring() -> None:
    ranks, _ = running(2)
    ranks.transports[0].check = lambda: "the link is down"  # type: ignore[method-assign,assignment,return-value]
    ranks.watches[0].tick()
    assert "forward hop 1: K/V" in ranks.transports[0].reasons[0]
    assert " failed: the link is down" in ranks.transports[0].reasons[0]


def test_virtual_ranks_leave_errors_to_their_world() -> None:
    (ranks, _), error = running(2), TransportError("the link is down")
    watch = ranks.watches[0]
    watch._together = True
    assert watch.failed(error) is error
    assert watch.stopped() is None
    watch.close()
    requests = ranks.connection(0).asked
    watch.tick()
    assert not watch._posts.busy and ranks.connection(0).asked == requests
    on_gpu = Watch(ranks.controls[0], deadline=None, device=torch.device("cuda"), transports=list)
    assert not on_gpu._posts._ask_why  # a fence of a stream


def test_a_ring_of_one_rank_asks_nobody() -> None:
    rings = FailTogether()
    (ranks, _), other = running(1, rings=rings), Ranks(2, rings=rings)
    watch, error = ranks.watches[0], ValueError("k has 6 heads")
    watch.enter()
    assert watch.agree({"heads": 8}) == 0
    with watch.span("compute"):
        pass
    watch.left(error)
    assert watch.failed(error) is error
    other.watches[0].failed(error)
    assert watch.stopped() is None
    assert not watch._posts.busy and not [*watch._telemetry.stopwatch.finished()]
    assert ranks.connection(0).asked == 0


def test_last_steps_are_those_of_the_edge_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3)
    for watch in ranks.watches[1:]:
        watch._telemetry.report("between calls", 0, 0)
        watch._control.publish(f"table/{watch.rank}", watch._telemetry.table.packed())
    text = re.sub(r"\d\.\d s", "a while", ranks.watches[0]._last_steps(None))
    assert text == "Last reported: rank 1: between calls (a while ago); rank 2: between calls (a while ago)"
    many, asked = Ranks(module.ASKED_RANKS + 4), [19, 18, *range(1, module.ASKED_RANKS - 1)]
    post = Post("a hop", Transfer(), [DONE], [(19, 8)], [(18, 8)], 0.0, 1)
    text = f"Last reported: nothing; nothing from rank {', '.join(map(str, asked))}"
    assert many.watches[0]._last_steps(post) == text


def test_a_rank_publishes_its_table_under_its_own_number() -> None:
    ranks, _ = running(3)
    ranks.watches[1].tick()
    assert [ranks.controls[0].look(f"table/{rank}") is not None for rank in range(3)] == [False, True, False]


def test_ticks_without_a_turn_to_gossip_move_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = running(2)[0].watches[0]
    exchange, warn = Mock(return_value={}), Mock()
    monkeypatch.setattr(watch._telemetry, "next_peer", lambda: None)
    monkeypatch.setattr(watch._telemetry, "warn", warn)
    monkeypatch.setattr(watch._control, "exchange", exchange)
    watch.tick()
    exchange.assert_called_once_with(None, ["failure", "asked"], module.STORE_SECONDS)
    warn.assert_called_once()


@pytest.mark.parametrize(("compares", "seconds"), [(False, 0.0), (True, 100.0)])
def test_failures_are_heard_while_ranks_compare_a_call_and_after_it(
    compares: bool, seconds: float, clock: Clock
) -> None:
    ranks, fences = running(2)
    fences[0].finish()
    clock.now += 4.0
    ranks.watches[0].end()
    ranks.watches[0]._waiting = compares
    ranks.controls[1].publish("failure", (1, "TransportError", "a reason"))
    clock.now += module.GRACE_SECONDS + seconds
    ranks.watches[0].tick()
    assert "a reason" in str(ranks.watches[0].stopped())


def test_other_errors_are_kept_and_propagated_to_peers() -> None:
    ranks, _ = running(2)
    error, connection, messages = MemoryError("out of memory"), ranks.connection(0), list[Any]()
    connection.store = Unconfirmed(connection.store)

    def abort(reason: str) -> None:
        messages.append(ranks.controls[1].look("failure"))  # the reason is there before what it explains
        Aborted.abort(ranks.transports[0], reason)

    ranks.transports[0].abort = abort  # type: ignore[method-assign]
    assert ranks.watches[0].failed(error) is error
    assert messages == [[0, "TransportError", ranks.transports[0].reasons[0]]]
    assert len(ranks.transports[0].reasons) == 1  # the peer still writes to what is about to be freed
    ranks.tick()
    (heard,) = ranks.transports[1].reasons
    edges = "64 bytes rank 0 -> rank 1, 64 bytes rank 1 -> rank 0"
    assert heard.startswith(f"rank 1: forward hop 1: K/V ({edges}) given up. Rank 0 found: rank 0: ")
    assert "failed: MemoryError: out of memory" in heard


def test_a_lost_store_is_reported_and_the_deadline_holds(clock: Clock) -> None:
    ranks, _ = running(3)
    on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))  # from here on everyone has heard of everyone
    for rank in range(3):
        ranks.connection(rank).problem = "the store of the group is gone: Connection reset by peer"
    clock.now += 1
    ranks.tick()
    requests = ranks.connection(1).asked
    clock.now += 1
    ranks.tick()
    assert ranks.connection(1).asked == requests  # left alone for a while
    clock.now += 1
    ranks.tick()
    for rank, transport in enumerate(ranks.transports):
        (text,) = transport.reasons
        assert text.startswith(f"rank {rank}: forward hop 1: K/V (")
        assert all(f"rank {other}: agreed on a call (" in text for other in range(3) if other != rank)
        assert text.endswith(". the store of the group is gone: Connection reset by peer")


def test_a_store_that_was_silent_for_a_moment_carries_a_failure(clock: Clock) -> None:
    """Rank 0 tells it, and rank 1 hears it soon: both had found the store silent."""
    ranks, fences = running(2)
    for rank, problem in itertools.product(range(2), ("the store of the group has not answered for 1 s", None)):
        ranks.connection(rank).problem = problem
        ranks.watches[rank].tick() if problem else None
    fences[0].finish("receive from rank 1 failed: Connection reset by peer")
    ranks.watches[0].tick()
    clock.now += 2.0
    ranks.watches[1].tick()
    assert ["Rank 0 found: rank 0: " in reason for reason in ranks.transports[1].reasons] == [True]


def test_a_hanging_abort_does_not_block_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.1)
    ranks, fences = running(2, fatal=True)
    stuck, over = threading.Event(), list[bool]()
    ranks.transports[0].abort = lambda reason: over.append(stuck.wait(HANGS))  # type: ignore[method-assign]
    fences[0].finish("failed")
    ranks.watches[0].failed(TransportError("failed"))
    assert not over
    assert ranks.ended and ranks.ended[0][0] == 0
    stuck.set()


def test_a_mismatch_with_transfers_in_flight_ends_the_ring() -> None:
    ranks = Ranks(2, deadline=HANGS)
    on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))

    def call(watch: Watch) -> None:
        if watch.rank == 0:
            watch.agree({"heads": 4})
            return
        watch.agree({"heads": 8})
        watch.begin("forward")
        watch.posted("forward hop 1: K/V", Transfer(), [DONE], [(0, 64)], [(0, 64)])
        while not ranks.transports[1].reasons:
            watch.tick()
            time.sleep(0.01)
        raise watch.failed(TransportError(ranks.transports[1].reasons[0]))

    text = "heads differs between ranks (rank 0: 4, rank 1: 8): all ranks of a ring must pass the same"
    assert [(type(error), str(error)) for error in on_all(ranks.watches, call)] == [(ValueError, text)] * 2
    assert ranks.transports[0].reasons == ranks.transports[1].reasons == [text]


def two_rings(**options: Any) -> tuple[Ranks, Ranks]:
    """Two rings of a process that is rank 0 of both, as in a mesh; both have agreed on a call that is over."""
    rings = FailTogether()
    both = Ranks(2, rings=rings, **options), Ranks(2, rings=rings, **options)
    for ranks in both:
        for watch in ranks.watches:
            watch.enter()
        on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))
        for watch in ranks.watches:
            watch.leave()
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
            watch.agree({"heads": 8})
    assert all("a reason" in reason for reason in (*there.transports[0].reasons, *there.transports[1].reasons))
    assert [len(transport.reasons) for transport in there.transports] == [1, 1]


def test_a_failure_is_told_as_that_of_this_process_s_rank_in_each_ring() -> None:
    rings = FailTogether()
    here, there = (Ranks(2, rings=rings, place=place) for place in (0, 1))
    here.watches[0].failed(MemoryError("out of memory"))
    told: Any = [ranks.controls[0].look("failure") for ranks in (here, there)]
    assert [rank for rank, *_ in told] == [0, 1]


def test_an_error_before_the_first_tick_names_its_transfer() -> None:
    ranks, _ = running(2)
    raised = ranks.watches[0].failed(TransportError("closed by peer"))
    assert str(raised).startswith("rank 0: forward hop 1: K/V (64 bytes rank 1 -> rank 0, ")
    ranks.watches[1].close()
    assert not ranks.watches[1]._posts.busy  # a fence holds its tensors


def test_the_ranks_of_the_other_ring_are_told_before_the_process_ends() -> None:
    here, there = two_rings(fatal=True)
    told = list[Any]()
    here.watches[0]._fatal = lambda text: told.append(there.controls[1].look("failure"))
    here.watches[0].failed(MemoryError("out of memory"))
    (failure,) = told
    assert failure[:2] == [0, "TransportError"] and "MemoryError: out of memory" in failure[2]


def test_rings_fail_together_only_where_they_are_told_to() -> None:
    (here, there), alone = two_rings(), Ranks(2)
    there.watches[0].close()
    here.watches[0].failed(MemoryError("out of memory"))
    for ranks in (there, alone):
        assert ranks.controls[1].look("failure") is None
        assert not any(transport.reasons for transport in ranks.transports)


@pytest.mark.parametrize("both", [True, False])
def test_a_refusal_ends_no_ring(both: bool) -> None:
    """Nor does it after calls that were agreed on and are over; some calls are of one of the rings alone."""
    rings = two_rings()
    called = rings if both else rings[:1]
    for ranks in called:
        ranks.watches[0].enter()
    for ranks in called:
        ranks.watches[0].left(ValueError("k has 6 heads"))
    for ranks in called:
        with pytest.raises(ValueError, match="rank 0 refused this call: ValueError: k has 6 heads"):
            ranks.watches[1].agree({"heads": 4})
        assert on_all(ranks.watches, lambda watch: watch.agree({"heads": 4})) == [3, 3]
        assert ranks.controls[1].look("failure") is None


@pytest.mark.parametrize("heads", [[8, 4], [8, 8]])
def test_an_error_that_all_ranks_know_is_told_once(heads: list[int]) -> None:
    """They disagreed, or another ring of theirs refused the call on which they agreed here."""
    ranks = Ranks(2)

    def call(watch: Watch) -> None:
        watch.enter()
        with suppress(ValueError):
            watch.agree({"heads": heads[watch.rank]})
            watch.call_off()
        watch.left(ValueError("heads"))

    on_all(ranks.watches, call)
    assert ranks.controls[1].look("failure") is None
    assert [watch._preflight.number for watch in ranks.watches] == [1, 1]
    assert ranks.watches[0]._step() == "between calls"


@pytest.mark.parametrize(("error", "agreed"), [(TransportError("rank 1 is gone"), False), (MemoryError("of 0"), True)])
def test_what_ends_a_mesh_is_no_refusal(error: Exception, agreed: bool) -> None:
    """Where the other ring was lost, or has agreed on the call."""
    here, there = two_rings()
    for ranks in (here, there):
        ranks.watches[0].enter()
    if agreed:
        assert on_all(there.watches, lambda watch: watch.agree({"heads": 8})) == [2, 2]
    here.watches[0].left(error)
    for ranks in (here, there):
        ranks.watches[1].tick()
        with pytest.raises(TransportError, match=str(error)):
            ranks.watches[1].agree({"heads": 4})


def test_ranks_have_the_numbers_of_the_mesh_in_errors(clock: Clock) -> None:
    ranks = Ranks(2, names=(1, 3))
    on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))
    for watch in ranks.watches:
        watch.begin("forward")
    ranks.watches[1].posted("forward hop 1: K/V", Transfer(), [DONE], [(0, 64)], [(0, 64)])
    for _ in range(2):
        clock.now += 2.0
        ranks.watches[1].tick()
    ranks.watches[0].tick()
    late = "rank 3: forward hop 1: K/V (64 bytes rank 1 -> rank 3, 64 bytes rank 3 -> rank 1) not over 3 s"
    assert ranks.transports[1].reasons[0].startswith(late)
    assert "Last reported: rank 1: agreed on a call" in ranks.transports[1].reasons[0]
    assert ranks.transports[0].reasons[0].startswith("rank 1: ")
    assert f"Rank 3 found: {late}" in ranks.transports[0].reasons[0]


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_connection_that_breaks_because_a_rank_refused_and_left(ticks: int) -> None:
    """A tick reads the question and answers, the next one reads the reason, unless the connection breaks first."""
    ranks = Ranks(2, deadline=HANGS)
    on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))
    ranks.watches[1].enter()
    ranks.watches[1].left(ValueError("k has 6 heads"))
    watch = ranks.watches[0]
    watch.agree({"heads": 8})
    watch.begin("forward")
    watch.posted("forward hop 1: K/V", Transfer(), [DONE], [(1, 64)], [(1, 64)])
    text = "rank 1 refused this call: ValueError: k has 6 heads"
    for _ in range(ticks):
        watch.tick()
    words: Any = ranks.controls[1].look("words/0") or {}
    assert ("2" in words, ranks.transports[0].reasons) == (ticks > 0, [text] * (ticks > 1))
    raised = watch.failed(TransportError("Connection closed by peer"))
    assert (type(raised), str(raised)) == (ValueError, text)
    words = ranks.controls[1].look("words/0")
    assert "2" in words
    assert ranks.controls[1].look("failure") == [0, "ValueError", text]


@pytest.mark.parametrize("answered", [False, True])
def test_a_rank_that_computes_something_else_for_long_answers(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last call is long over, and another rank waits at another one; it looks for questions once in a while."""
    ranks = Ranks(2, deadline=HANGS)
    on_all(ranks.watches, lambda watch: watch.agree({"heads": 8}))
    ranks.watches[1].agree({"heads": 8})
    monkeypatch.setattr(module, "GRACE_SECONDS", -NEVER)
    monkeypatch.setattr(module, "IDLE_SECONDS", NEVER if answered else 0.0)
    ranks.controls[0].publish("asked", 2)
    asked = ranks.connection(1).asked
    ranks.watches[1].tick()
    words: Any = ranks.controls[0].look("words/1") or {}
    assert ("2" in words, ranks.connection(1).asked > asked) == (not answered, not answered)


def test_a_process_that_was_stopped_starts_its_clocks_again(clock: Clock) -> None:
    ranks, _ = running(2)  # a deadline of 3 s
    ranks.tick()
    clock.now += 1000.0  # SIGSTOP and SIGCONT, a debugger
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
    broken, good = (watch_of(control) for control in controls(2))
    ticks: list[int] = []
    broken.tick = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    good.tick = lambda: ticks.append(1)  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "ringattn"):
        fast.add(broken)
        fast.add(good)
        until(lambda: len(ticks) >= 3)
    assert "the watchdog of rank 0 failed" in caplog.text
    broken.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12: of a process with threads
def test_a_forked_child_has_a_thread_of_its_own(fast: Watchdog) -> None:
    fast.add(watch := watch_of(controls(2)[0]))
    child = os.fork()
    if child == 0:
        ticked = threading.Event()
        try:
            watch.tick = ticked.set  # type: ignore[method-assign]
            module._WATCHDOG.add(watch)
        finally:
            os._exit(0 if ticked.wait(HANGS) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_stream_deadlines_end_the_process_with_the_reason(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    ranks, _ = running(3, fatal=True)
    ranks.tick()
    clock.now += 4
    ranks.tick()
    assert [rank for rank, _ in ranks.ended] == [0, 1, 2]
    for rank, text in ranks.ended:
        assert ranks.transports[rank].reasons == [text]  # aborted before
    assert "Last reported: rank 1: in forward hop 1: K/V (" in ranks.ended[0][1]
    (watch, *_), error = running(2, fatal=True)[0].watches, MemoryError("no room")
    assert watch.failed(error) is error
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


def test_a_rank_that_does_not_come_to_the_preflight_is_named() -> None:
    ranks = Ranks(2, patience=0.2)
    with pytest.raises(
        TransportError, match=r"^rank 0: comparing .* no answer from rank 1 within 0\.2 s\. Last reported: nothing"
    ):
        ranks.watches[0].agree({"heads": 8})


def test_one_thread_serves_all_rings_and_ends_with_the_last(fast: Watchdog) -> None:
    before, watches = {*threading.enumerate()}, [watch_of(control) for control in controls(4)]
    for watch in watches:
        fast.add(watch)
    thread, gone = fast._thread, weakref.ref(watches[0])
    assert thread is not None and thread.daemon
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    assert names.count("ringattn-watchdog") == 1
    watches[1].close()
    del watches[0], watch
    until(lambda: gc.collect() >= 0 and gone() is None)  # the thread holds nobody
    assert thread.is_alive()
    del watches
    gc.collect()
    thread.join(HANGS)
    assert not thread.is_alive()
    again = watch_of(controls(2)[0])
    fast.add(again)  # and begins anew
    assert fast._thread is not None and fast._thread.is_alive()


def test_stop_waits_for_a_running_tick(fast: Watchdog) -> None:
    begun, over = threading.Event(), list[bool]()

    def tick() -> None:
        begun.set()
        fast._end.wait(HANGS)
        time.sleep(0.1)
        over.append(True)

    watch = watch_of(controls(2)[0])
    watch.tick = tick  # type: ignore[method-assign]
    fast.add(watch)
    assert begun.wait(HANGS)
    fast.stop()
    assert over, "the process would end under the thread"


def test_virtual_ranks_have_no_deadline_of_their_own(fast: Watchdog) -> None:
    def fn(group: LocalGroup) -> list[tuple[float | None, object]]:
        watches = [
            open_watch(group, CPU, control=ring_control(group, deadline), deadline=deadline, transports=list)
            for deadline in (None, 5.0)
        ]
        for watch in watches:
            watch.close()
        return [(watch._posts._seconds, watch._fatal) for watch in watches]

    with LocalWorld(2, device="cpu") as world:
        assert world.run(fn) == [[(NEVER, None), (5.0, None)]] * 2


@pytest.mark.parametrize(("device", "codes"), [("cpu", []), ("cuda:0", [75])])
def test_only_streams_of_a_gpu_end_the_process(
    device: str, codes: list[int], fast: Watchdog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a code that schedulers take for a reason to start it again."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    group: Any = object()
    watch = open_watch(group, torch.device(device), control=controls(2)[0], deadline=5.0, transports=list)
    watch.failed(TransportError("the connection is gone"))
    assert ended == codes and os.EX_TEMPFAIL == 75
    assert ("this process ends: rank 0: between calls failed: the connection is gone" in caplog.text) is bool(codes)


def test_fences_of_a_gpu_are_not_waited_for() -> None:
    """The host would make a stream wait."""
    watch = Watch(controls(2)[0], deadline=3.0, device=torch.device("cuda", 0), transports=list)
    fence = Mock(done=Mock(return_value=True))
    watch.posted("a hop", fence, [DONE], [(1, 8)], [])
    watch._posts.poll(time.monotonic())
    fence.wait.assert_not_called()


def test_the_first_failure_stays_and_aborts_once(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(2, deadline=HANGS)
    for text in ("the first", "another"):
        ranks.watches[0]._fail(module.Failure(0, "TransportError", text))
    assert ranks.transports[0].reasons == ["the first"] and ranks.watches[0].stopped() == "the first"
    assert ranks.controls[1].look("failure") == [0, "TransportError", "the first"]
    assert [record.message for record in caplog.records] == ["the first"]


def test_a_store_that_answered_again_is_soon_asked_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """However long it was left alone before. The log says once that it is silent."""
    ranks, pauses = Ranks(2, deadline=HANGS), list[float]()
    watch, connection = ranks.watches[0], ranks.connection(0)
    with caplog.at_level(logging.INFO, "ringattn"):
        for problem in ("silent", "silent", "silent", None, "silent"):
            connection.problem = problem
            watch._exchange()
            pauses += [watch._ask_again - clock.now] if problem else []
            clock.now += module.MOST_SILENT_SECONDS
    assert pauses == [2.0, 4.0, 8.0, 2.0]
    assert [record.message for record in caplog.records] == ["rank 0: silent"]
