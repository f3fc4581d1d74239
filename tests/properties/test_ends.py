"""Ends of rings, worlds and groups, with and without failures: they leave nothing behind."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn import LocalWorld, Ring, ring_attention
from ringattn.comm import GroupLike, LocalGroup, TransportError
from ringattn.comm.control import open_control
from ringattn.comm.watchdog.telemetry import TICK_SECONDS

from ..support.nightly import rest_nightly
from ..support.rank_processes import CallOutcome, call_outcome, group_results
from ..support.ring_cases import run_ranks

CPU = torch.device("cpu")
SECONDS = 1.0  # the ring's deadline
GRACE = 40.0  # allowance for a busy machine; every other deadline is longer


def step(group: GroupLike = None, ring: Ring | None = None, heads: int = 1, dropout_p: float = 0.0) -> None:
    q, k, v = (torch.ones(1, 8, heads, 16, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, group=group, ring=ring, layout="contiguous", dropout_p=dropout_p)
    torch.autograd.backward(out.sum())


def held() -> list[int]:
    """Return the numbers of threads and file descriptors of this process."""
    return [threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))]


def settled(most: Sequence[float] | None = None) -> list[int]:
    """Wait until threads and descriptors are at most ``most``, or for a second; return their numbers."""
    begun = time.monotonic()
    while time.monotonic() < begun + (1 if most is None else GRACE) and not (most and no_more(held(), most)):
        gc.collect()
        time.sleep(0.05)
    return held()


def no_more(now: Sequence[float], before: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(now, before, strict=True))


def dies(rank: int, *, known: bool) -> CallOutcome:
    """Kill rank 1 before its first call, or before a call with a new signature."""
    if known:
        step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return call_outcome(lambda: step(heads=2))


@pytest.mark.parametrize("known", rest_nightly([False, True], False))
def test_a_closed_connection_ends_the_wait_for_a_killed_rank(known: bool) -> None:
    for rank, (kind, text, seconds) in zip((0, 2), group_results(3, partial(dies, known=known), ends=1), strict=True):
        assert kind == TransportError.__name__
        # seen by this rank, or reported by the other surviving rank
        assert re.search(r"rank 1 is gone: its connection to rank [02] is closed", text), text
        assert text.startswith(f"rank {rank}: ")
        assert seconds < GRACE


def comes_late(rank: int) -> CallOutcome:
    """Call a ring whose other rank has given up."""
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["given up"])
    ring = Ring(deadline=SECONDS)
    answer = call_outcome(lambda: step(ring=ring))
    store.set("given up", "")
    return answer if call_outcome(ring.close)[0] == "" else ("close raised", "", 0.0)


def test_a_late_rank_waits_no_longer_than_its_deadline() -> None:
    for kind, _, seconds in group_results(2, comes_late):
        assert kind == TransportError.__name__
        assert seconds < SECONDS + GRACE


def groups_come_and_go(rank: int) -> list[list[int]]:
    counts: list[list[int]] = []
    for turn in range(4):
        group = dist.new_group()
        step(group)
        with Ring(group) as ring:
            step(ring=ring)
        dist.barrier()
        dist.destroy_process_group(group)
        del group, ring
        counts.append(settled(counts[0] if turn else [1, math.inf]))
    return counts


def test_a_destroyed_group_leaves_no_threads_or_descriptors() -> None:
    for first, *others in group_results(2, groups_come_and_go):
        assert first[0] == 1  # the main thread
        assert all(no_more(now, first) for now in others)


def forks(rank: int) -> list[str]:
    ring = Ring()
    step(ring=ring)
    step()
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        answers = [call_outcome(lambda: step(ring=ring)), call_outcome(step), call_outcome(ring.close)]
        os.write(write_end, "\n".join(f"{kind}: {text}" for kind, text, seconds in answers if seconds < GRACE).encode())
        os._exit(0)
    os.wait()
    step(ring=ring)
    return os.read(read_end, 4096).decode().splitlines()


def test_calls_in_forked_processes_raise_at_once() -> None:
    for of_ring, of_group, of_close in group_results(2, forks):
        assert re.match(r"RuntimeError: ring belongs to process \d+, but this process was forked", of_ring)
        assert re.match(r"RuntimeError: group was created before process \d+ was forked", of_group)
        assert of_close == ": "


@pytest.mark.parametrize("closed", rest_nightly([True, False], False))
def test_a_world_ends_its_threads_and_its_rings(closed: bool) -> None:
    before = settled()
    world = LocalWorld(3)
    world.run(step)
    if closed:
        world.close()
        world.close()
    del world
    assert no_more(settled(before), before)


def test_rings_leave_nothing_in_the_store_of_their_world() -> None:
    def rings(group: LocalGroup) -> None:
        for _ in range(3):
            with Ring(group) as ring:
                step(ring=ring, dropout_p=0.5)
                step(ring=ring, heads=2)

    with LocalWorld(2) as world:
        world.run(rings)
        assert world._hub.store.num_keys() == 0
        assert world._hub._boxes == {}
        assert all(not open_control(group)._connection.published for group in world._groups)
        assert all(len(open_control(group)._connection.scopes) <= 1 for group in world._groups)


def test_close_releases_everything_after_a_failure() -> None:
    """A call fails on all ranks, and closing the transport fails, too."""
    closed: list[str] = []
    aborted: list[str] = []

    def fails(group: LocalGroup) -> None:
        ring = Ring(group)
        step(ring=ring)
        (transport,) = ring.open(CPU)

        def refuse(*args: object, **named: object) -> Any:
            raise KeyError("a fault")

        def close() -> None:
            closed.append(transport.name)
            raise OSError("nothing to close")

        def abort(reason: str, abort: Callable[[str], None] = transport.abort) -> None:
            aborted.append(reason)
            abort(reason)

        transport.post, transport.close = refuse, close  # type: ignore[method-assign]
        transport.abort = abort  # type: ignore[method-assign]
        try:
            with pytest.raises(KeyError, match="a fault"):
                step(ring=ring)
        finally:
            ring.close()
            ring.close()
        assert (ring._kv, ring._dkv, ring._control) == (None, None, None)
        assert not ring._opened

    run_ranks(2, fails)
    assert len(closed) == 2
    # other ranks may never post the matching transfers
    assert aborted == ["aborted because a call on its ring failed: KeyError('a fault')"] * 2


WARM, STEPS = 500, 500  # after the warm-up, the history of calls is full, and caches of torch and Python nearly
ROUNDS = 100  # rings or worlds, one after the other


def growth(do: Callable[[], object], warm: int, times: int) -> float:
    """Return the growth of traced memory per call, in bytes. Threads and descriptors must not grow."""

    def traced(count: int) -> int:
        for _ in range(count):
            do()
        time.sleep(4 * TICK_SECONDS)  # the watchdog releases finished transfers
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()  # before objects that are replaced later
    try:
        at_first = traced(warm)
        before = held()
        per_time = (traced(times) - at_first) / times
    finally:
        tracemalloc.stop()
    assert no_more(settled(before), before)
    return per_time


def grows(rank: int, *, what: str) -> float:
    if what == "steps":
        with Ring() as ring:
            return growth(lambda: step(ring=ring), WARM, STEPS)

    def open_and_run() -> None:
        with LocalWorld(2) if what == "worlds" else Ring() as opened:
            opened.run(step) if isinstance(opened, LocalWorld) else step(ring=opened)

    return growth(open_and_run, 10, ROUNDS)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("what", "most"), [("steps", 100), ("rings", 1000), ("worlds", 1000)])
def test_steps_rings_and_worlds_do_not_leak_memory(what: str, most: float) -> None:
    """Caches of torch and Python still grow a little; a leaked ring would be tens of kB."""
    assert max(group_results(2, partial(grows, what=what), patience=800)) <= most
