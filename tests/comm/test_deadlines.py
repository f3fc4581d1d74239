"""Deadlines of transfers: when one is late, which one is named, and why one failed."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn.comm.watchdog.deadlines import (
    FIRST_DEADLINE_SECONDS,
    LONGEST_FACTOR,
    MAX_POLLED_POSTS,
    MEDIAN_FACTOR,
    MIN_DEADLINE_SECONDS,
    NEVER,
    Deadlines,
    Post,
)

from ..support.watch_cases import ManualTransfer


def post(
    fence: ManualTransfer,
    *,
    after: tuple[ManualTransfer, ...] = (),
    now: float = 0.0,
    call: int = 1,
    label: str = "hop 1",
) -> tuple[Any, ...]:
    """Return the arguments of a ``Post``."""
    return (label, fence, after, [(1, 64)], [(2, 32)], now, call)


def finished() -> ManualTransfer:
    fence = ManualTransfer()
    fence.finish()
    return fence


def test_the_default_deadline_is_a_multiple_of_the_median() -> None:
    documented = FIRST_DEADLINE_SECONDS, MIN_DEADLINE_SECONDS, MEDIAN_FACTOR, LONGEST_FACTOR
    assert documented == (600.0, 60.0, 100, 4)  # in the docstring of `Ring`
    deadlines = Deadlines(None, ask_why=True)
    assert deadlines.limit(Post(*post(ManualTransfer()))) == FIRST_DEADLINE_SECONDS
    for _ in range(9):
        deadlines.add(*post(finished(), now=10.0))
    deadlines.poll(12.0)  # each took 2 s
    assert deadlines.limit(Post(*post(ManualTransfer()))) == MEDIAN_FACTOR * 2.0
    late_call = Post(*post(ManualTransfer(), call=2))  # ranks may enter a call late
    assert deadlines.limit(late_call) == FIRST_DEADLINE_SECONDS
    deadlines.add(*post(finished(), now=12.0, call=2))
    deadlines.poll(12.1)
    assert deadlines.limit(Post(*post(ManualTransfer(), call=2))) == MEDIAN_FACTOR * 2.0


def after_many(durations: float) -> Deadlines:
    """Return the deadlines of a ring whose first call is over."""
    deadlines = Deadlines(None, ask_why=True)
    for _ in range(20):
        deadlines.add(*post(finished()))
        deadlines.add(*post(finished(), label="hop 2"))
    deadlines.poll(durations)
    return deadlines


def test_the_first_transfer_of_a_label_waits_for_ranks_that_compile() -> None:
    deadlines, first, second = Deadlines(None, ask_why=True), ManualTransfer(), ManualTransfer()
    deadlines.add(*post(first))
    deadlines.add(*post(second, label="hop 2"))
    first.finish()
    assert deadlines.poll(0.1) is None
    assert deadlines.poll(0.1 + FIRST_DEADLINE_SECONDS - 1) is None
    assert deadlines.poll(0.1 + FIRST_DEADLINE_SECONDS) is not None


def test_late_ranks_do_not_expire_transfers_posted_ahead() -> None:
    deadlines, first, second = after_many(0.01), ManualTransfer(), ManualTransfer()
    deadlines.add(*post(first, now=10.0, call=2))
    deadlines.add(*post(second, now=10.0, call=2, label="hop 2"))
    assert deadlines.poll(129.0) is None
    first.finish()
    assert deadlines.poll(130.0) is None
    assert deadlines.poll(130.0 + MIN_DEADLINE_SECONDS) is not None


def test_deadlines_grow_with_long_hops() -> None:
    deadlines, slow, following = after_many(0.01), ManualTransfer(), ManualTransfer()
    for fence in (slow, following):
        deadlines.add(*post(fence, now=1.0))
    assert deadlines.poll(51.0) is None
    slow.finish()
    deadlines.poll(51.0)
    following.finish()
    deadlines.poll(52.0)  # took 1 s, because it ran after the slow transfer
    assert deadlines.limit(Post(*post(ManualTransfer()))) == LONGEST_FACTOR * 50.0


@pytest.mark.parametrize("what", ["the transfer", "its dependency"])
def test_a_failed_device_is_reported_as_the_reason(what: str) -> None:
    deadlines, fences = Deadlines(NEVER, ask_why=False), [ManualTransfer(), ManualTransfer()]

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fences[what != "the transfer"].done = fail  # type: ignore[method-assign]
    deadlines.add(*post(fences[0], after=(fences[1],)))
    deadlines.add(*post(fences[0], label="hop 2"))
    assert deadlines.poll(1.0) is None
    assert deadlines.failed_post is not None and deadlines.failed_post.label == "hop 1"
    assert deadlines.failed_post.problem == "CUDA error: an illegal memory access was encountered"


def test_deadlines_start_when_dependencies_complete() -> None:
    deadlines, before, fence = Deadlines(3.0, ask_why=True), ManualTransfer(), ManualTransfer()
    deadlines.add(*post(fence, after=(before,), now=0.0))
    assert deadlines.is_busy
    assert deadlines.poll(100.0) is None  # the dependency is not over, so the clock has not started
    before.finish()
    assert deadlines.poll(101.0) is None
    assert deadlines.poll(103.9) is None
    late = deadlines.poll(104.0)
    assert late is not None and late.fence is fence
    fence.finish()
    assert deadlines.poll(105.0) is None
    assert not deadlines.is_busy


def test_the_oldest_late_transfer_is_named() -> None:
    deadlines = Deadlines(3.0, ask_why=True)
    for number in range(3):
        deadlines.add(*post(ManualTransfer(), now=10.0 + number, label=f"hop {number}"))
    assert deadlines.poll(12.9) is None
    late = deadlines.poll(13.0)
    assert late is not None and late.label == "hop 0"
    assert deadlines.oldest is late
    assert deadlines.last_label == "hop 2"


@pytest.mark.parametrize("ask_why", [True, False])
def test_a_failed_transfer_is_recorded_with_its_reason(ask_why: bool) -> None:
    """Ask a fence why it failed only on the host, because that means waiting for the fence."""
    deadlines, good, bad = Deadlines(3.0, ask_why=ask_why), ManualTransfer(), ManualTransfer()
    deadlines.add(*post(good))
    deadlines.add(*post(bad))
    good.finish()
    bad.finish("closed by rank 2")
    assert deadlines.poll(1.0) is None
    failed = deadlines.failed_post
    assert (failed and (failed.fence, failed.problem)) == ((bad, "closed by rank 2") if ask_why else None)
    assert deadlines.nbytes == 2 * 96


def test_a_poll_queries_a_bounded_number_of_fences() -> None:
    queries = [0]

    class Asked(ManualTransfer):
        def done(self) -> bool:
            queries[0] += 1
            return super().done()

    deadlines, fences = Deadlines(3.0, ask_why=False), [Asked() for _ in range(1023)]
    for fence in fences:
        deadlines.add(*post(fence))
    assert deadlines.poll(1.0) is None
    assert queries == [MAX_POLLED_POSTS]
    for fence in fences[:500]:
        fence.finish()
    assert deadlines.poll(2.0) is None
    assert queries == [MAX_POLLED_POSTS + 500 + MAX_POLLED_POSTS]
    late = deadlines.poll(5.0)
    assert late is not None and late is deadlines.oldest and late.fence is fences[500]


def test_messages_of_one_edge_are_summed() -> None:
    whole = Post("hop 1", ManualTransfer(), (), [(1, 64), (2, 8), (1, 4)], [(2, 32), (2, 2)], 0.0, 1)
    assert whole.edges(0, (5, 6, 7)) == "34 bytes rank 7 -> rank 5, 68 bytes rank 5 -> rank 6, 8 bytes rank 5 -> rank 7"
    assert whole.nbytes == 110
