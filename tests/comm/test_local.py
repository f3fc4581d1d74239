"""Virtual ranks: results, errors that reach the caller, and waits that always end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ringattn.comm import LocalGroup, LocalTransport, LocalWorld, Message, TransportError, WorldAborted, open_transport
from ringattn.comm.world import Hub

from ..support.watch_cases import ManualClock

CPU = torch.device("cpu")


def world_of(size: int, timeout: float = 60) -> LocalWorld:
    return LocalWorld(size, device="cpu", timeout=timeout)


def exchange(group: LocalGroup, value: float = 0.0) -> torch.Tensor:
    """Pass one tensor around the ring."""
    transport = LocalTransport(group, CPU)
    arrived = torch.empty(3)
    sends = [Message((group.rank() + 1) % group.size(), torch.full((3,), group.rank() + value))]
    receives = [Message((group.rank() - 1) % group.size(), arrived)]
    transport.post(sends=sends, receives=receives).wait()
    return arrived


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_run_and_the_end_of_a_world_close_cached_rings(fails: bool) -> None:
    closed, before = list[int](), {*threading.enumerate()}

    def fn(group: LocalGroup) -> None:
        group.cache["a ring"] = SimpleNamespace(close=lambda: closed.append(group.rank()))
        if fails:
            raise KeyError

    with world_of(2) as world:
        with pytest.raises(KeyError) if fails else nullcontext():
            world.run(fn)
        assert sorted(closed) == ([0, 1] if fails else [])
        threads = [x for x in threading.enumerate() if x not in before and x.name.startswith("ringattn-rank")]
    assert sorted(closed) == [0, 1] and [thread.is_alive() for thread in threads] == [False] * 2


def test_autograd_stays_in_the_rank_s_thread() -> None:
    """Check the switch that stops CUDA's engine from running every rank's backward in one device thread."""

    def fn(group: LocalGroup) -> bool:
        threads: list[int] = []
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: threads.append(threading.get_ident()))  # type: ignore[no-untyped-call]
        torch.autograd.backward(y.sum())
        return threads == [threading.get_ident()] and not torch._C._is_multithreading_enabled()

    with world_of(2) as world:
        assert world.run(fn) == [True, True]
        assert world.run(fn) == [True, True]
    assert torch._C._is_multithreading_enabled()  # the caller's thread keeps its setting


def test_a_rank_is_refused_outside_its_own_thread() -> None:
    def posts(group: LocalGroup) -> None:
        LocalTransport(group, CPU).post(sends=[], receives=[])

    with world_of(2) as world:
        world.run(posts)
        groups = world.run(lambda group: group)
        match = r"rank 0 of LocalWorld\(2\) was used from thread 'MainThread'. .* Call backward\(\) inside fn"
        for call in (posts, partial(open_transport, device="cpu")):
            with pytest.raises(RuntimeError, match=match):
                call(groups[0])
        with pytest.raises(RuntimeError, match=r"rank 0 of LocalWorld\(2\) was used from thread 'ringattn-rank1"):
            world.run(lambda group: posts(groups[0]) if group.rank() == 1 else None)

    def forked(group: LocalGroup) -> None:
        group._process = -1  # of the parent
        with pytest.raises(RuntimeError, match="was used from thread"):
            posts(group)

    with world_of(2) as world:
        world.run(forked)
    with world_of(1) as world:  # with one rank no other rank can block
        posts(world.run(lambda group: group)[0])


@pytest.mark.parametrize(("size", "kind"), [(1, KeyError), (4, KeyError), (4, SystemExit)])
def test_the_first_error_unblocks_peers_and_is_raised_by_run(size: int, kind: type[BaseException]) -> None:
    woken: list[BaseException] = []

    def fn(group: LocalGroup) -> None:
        if group.rank() == size - 1:
            time.sleep(0.05)
            raise kind("broken")
        try:
            LocalTransport(group, CPU).gather(None)
        except TransportError as error:
            woken.append(error)
            raise

    with world_of(size) as world, pytest.raises(kind, match="broken") as caught:
        world.run(fn)
    assert caught.value.__notes__ == [f"raised by rank {size - 1} of LocalWorld({size})"]
    assert len(woken) == size - 1
    assert all(
        isinstance(error, WorldAborted) and f"another rank raised {kind.__name__}" in str(error) for error in woken
    )


def test_run_works_after_a_failed_run() -> None:
    def fails(group: LocalGroup) -> None:
        transport = LocalTransport(group, CPU)
        transport.post(sends=[Message(1 - group.rank(), torch.zeros(3))], receives=[])  # no rank receives this message
        raise ValueError("no")

    with world_of(2) as world:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                world.run(fails)
            with torch.no_grad():  # ranks use the caller's grad mode
                outs = world.run(lambda group: exchange(group, 0.5 + torch.is_grad_enabled()))
            assert [out.tolist() for out in outs] == [[1.5] * 3, [0.5] * 3]


def test_keyboard_interrupt_unblocks_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def interrupted(futures: object) -> None:
        monkeypatch.setattr("ringattn.comm.world.wait", wait)
        assert waiting.wait(60)
        time.sleep(0.05)
        raise KeyboardInterrupt

    def fn(group: LocalGroup) -> None:
        waiting.set()
        with pytest.raises(WorldAborted):
            LocalTransport(group, CPU).post(sends=[], receives=[Message(1 - group.rank(), torch.empty(1))])
        time.sleep(0.05)
        ended.append(group.rank())

    ended: list[int] = []
    monkeypatch.setattr("ringattn.comm.world.wait", interrupted)
    with world_of(2) as world:
        with pytest.raises(KeyboardInterrupt):
            world.run(fn)
        assert sorted(ended) == [0, 1], "the ranks must end before the run does"


def numbered(group: LocalGroup) -> LocalTransport:
    """Return a transport whose errors number the ranks from 4 on."""
    transport = LocalTransport(group, CPU)
    transport.names = range(4, 4 + group.size())
    return transport


def send(group: LocalGroup) -> None:
    numbered(group).post(sends=[Message(1, torch.zeros(3))], receives=[]).wait()


def receive(group: LocalGroup, count: int = 3) -> None:
    numbered(group).post(sends=[], receives=[Message(1 - group.rank(), torch.empty(count))])


Body = Callable[[LocalGroup], object]


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (exchange, str, "rank 1 has already returned"),
        (send, str, "rank 4 waits until rank 5 takes 12 bytes: rank 1 has already returned"),
        (send, lambda group: receive(group, 4), "rank 5 expects 16 bytes from rank 4, which sent 12"),
        (
            receive,
            receive,
            r"(4 waits for bytes from rank 5|5 waits for bytes from rank 4): nothing happened for 0\.5 s. Check",
        ),
    ],
)
def test_deadlocked_waits_raise(first: Body, second: Body, match: str) -> None:
    with world_of(2, timeout=0.5 if first is receive else 60) as world, pytest.raises(TransportError, match=match):
        world.run(lambda group: second(group) if group.rank() else first(group))


def refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=match):
        call()


def test_wrong_uses_of_a_local_world_are_refused() -> None:
    refused(lambda: LocalWorld(0), "world_size is 0")
    refused(lambda: LocalWorld(2, timeout=0), "timeout is 0: it must be a positive number of seconds")
    world = world_of(2)
    refused(lambda: world.run(3), "fn is 3; it must be a function")  # type: ignore[arg-type]
    refused(lambda: world.run(lambda group: world.run(exchange)), "never inside fn")
    world.close()
    world.close()
    refused(lambda: world.run(exchange), "this LocalWorld is closed")
    forked = world_of(2)
    forked._process = -1
    refused(lambda: forked.run(exchange), "forked from")
    forked.close()
    assert forked._end.alive  # the threads belong to the parent
    forked._end()
    assert not world_of(2)._end.atexit  # at exit, closing could wait for ranks that have ended
    with world_of(2) as left:
        pass
    refused(lambda: left.run(exchange), "this LocalWorld is closed")


def test_a_mesh_created_after_a_failure_has_failed_too() -> None:
    """Fail a mesh that is created after another rank has raised, because nobody else will join it."""
    hub = Hub(4, 60.0)
    before = hub.sub_hub("ring", (0, 2))
    hub.end_rank(3)
    hub.abort(KeyError("a fault"), "by rank 1")
    after = hub.sub_hub("ring", (1, 3))
    assert before.failure is hub.failure is after.failure and hub.sub_hub("ring", (1, 3)) is after
    assert after.find_returned([0, 1]) == [1] and (after.names, after.timeout) == ((1, 3), 60.0)
    hub.end_rank(2)
    assert before.find_returned([0, 1]) == [1]
    hub.begin_run()
    assert before.find_returned([0, 1]) == after.find_returned([0, 1]) == hub.find_returned(range(4)) == []
    for item in range(2):
        hub.put("box", item)
    with pytest.raises(WorldAborted):
        hub.sub_hub("late", (0, 1)).take("box", 0, "rank 0 waits", 0, 60.0)
    assert [hub.take("box", 1, "rank 0 waits", 0, 60.0) for _ in range(2)] == [0, 1] and not hub._boxes
    with pytest.raises(WorldAborted, match="another rank raised KeyError"):
        after.take("box", 0, "rank 1 waits", 0, 60.0)


def test_wake_ups_by_other_ranks_do_not_extend_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, clock, waits = Hub(2, 60.0), ManualClock(monkeypatch), list[float]()

    def interrupted(seconds: float) -> bool:
        clock.now += 1
        waits.append(seconds)
        return seconds > 0 and len(waits) < 9

    monkeypatch.setattr(hub._changed, "wait", interrupted)
    with pytest.raises(TransportError, match="nothing happened for 2 s"):
        hub.take("box", 1, "rank 0 waits", 0, 2.0)
    assert waits == [2, 1, 0]


@pytest.mark.parametrize("end", ["taken", "aborted", "failed"])
def test_a_send_is_done_when_it_is_taken_or_can_no_longer_be(end: str) -> None:
    over = False
    hub, copied = Hub(2, 60.0), SimpleNamespace(done=lambda: over, wait=bool)
    group = LocalGroup(hub, 0)
    group._thread = threading.get_ident()
    transport = LocalTransport(group, CPU)
    fence = transport.post(sends=[Message(1, torch.ones(3))], receives=[])
    assert not fence.done()
    if end == "taken":
        parcel = hub.take(("bytes", transport._channel, 0, 1), 0, "rank 1 waits", transport._channel, 60.0)
        hub.confirm_copy(parcel, copied)
        assert not fence.done()  # the copy itself is not over
        over = True
        for arrived in (False, True):  # so far this rank's own receives
            fence._arrived = SimpleNamespace(done=lambda arrived=arrived: arrived)  # type: ignore[attr-defined]
            assert fence.done() is arrived
    elif end == "aborted":
        transport.abort("it took too long")
    else:
        hub.abort(KeyError(), "by rank 1")
    assert fence.done()
