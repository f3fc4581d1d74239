"""Kill one rank at any moment of a forward or backward: all others end in time and say where they waited.

Ranks are processes over gloo that compute steps until one is killed, either after a random part of a step or as it
posts a transfer. The store runs on the killed rank, on another rank, or in a separate process as under torchrun.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ringattn import Ring, ring_attention
from ringattn.comm import TransportError

from ..support.nightly import rest_nightly
from ..support.rank_processes import RankProcesses, join_group, start_store

DEADLINE = 60.0  # seconds per transfer; a closed connection is noticed and reported long before
SHORT_DEADLINE = 2.0  # seconds, if nothing else ends a wait
GRACE = 25.0  # allowance for a busy machine; usually a second is enough
WARM_STEPS = 3
TOKENS, HEADS, HEAD_DIM = 64, 2, 16


class Kill(NamedTuple):
    """Scenario of one kill."""

    world: int
    victim: int
    host: int | None  # rank that serves the store; None: a separate process
    at_post: int | None  # the victim ends at this post after the warm-up; None: killed from outside
    after: float  # steps until the kill from outside
    chunks: int
    how: signal.Signals = signal.SIGKILL

    @property
    def seconds(self) -> float:
        """Seconds within which every rank must end."""
        return GRACE + (SHORT_DEADLINE if self.how == signal.SIGSTOP else 0.0)

    @classmethod
    def random(cls, seed: int) -> Kill:
        """Draw a scenario. Worlds and ways to die alternate; the rest is random."""
        rng = random.Random(seed)
        world = 2 + seed % 4
        victim = rng.randrange(world)
        chunks = rng.choice([1, 2])
        posts = 12 * (world - 1) * chunks
        host, at_post = rng.choice([None, 0, victim]), rng.randrange(posts) if seed % 3 else None
        return cls(world, victim, host, at_post, 3 * rng.random(), chunks)


class Told(NamedTuple):
    """Report of how a rank ended."""

    kind: str
    text: str
    when: float


def step(ring: Ring) -> None:
    q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, ring=ring, layout="contiguous")
    assert isinstance(out, torch.Tensor)
    out.sum().backward()


def end_at_post(ring: Ring, number: int) -> None:
    """Kill this process just before its `number`-th transfer from now on."""
    left = number
    for transport in ring.open(torch.device("cpu")):
        post = transport.post

        def posting(post: Any = post, **messages: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return post(**messages)

        transport.post = posting  # type: ignore[method-assign]


def work(rank: int, pipe: Connection, kill: Kill) -> None:
    """Run one rank's steps and report the error that ends them."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        steps(kill, rank, pipe)
    except BaseException as error:
        pipe.send(Told(type(error).__name__, str(error), time.monotonic()))
        raise


def steps(kill: Kill, rank: int, pipe: Connection) -> None:
    """Warm up, then run steps without end."""
    torch.manual_seed(rank)
    served = start_store() if kill.host == rank else None
    if served is not None:
        pipe.send(served.port)
    join_group(rank, kill.world, served or pipe.recv(), timedelta(seconds=120))
    with Ring() as patient:  # without a deadline, because ranks may start far apart on a busy machine
        step(patient)
    dist.barrier()
    ring = Ring(deadline=DEADLINE, chunks=kill.chunks)
    begun = time.monotonic()
    for _ in range(WARM_STEPS):
        begun = time.monotonic()
        step(ring)
    pipe.send(time.monotonic() - begun)
    assert pipe.recv() == "go"
    if kill.how == signal.SIGSTOP:
        assert ring._watch is not None and ring._control is not None
        ring._watch._posts._seconds = ring._control.patience = SHORT_DEADLINE
    if rank == kill.victim and kill.at_post is not None:
        end_at_post(ring, kill.at_post)
    while True:
        step(ring)


def run(kill: Kill) -> None:
    """Run the scenario and check how each rank ends."""
    served = start_store() if kill.host is None else None
    with RankProcesses(kill.world, work, kill) as ranks:
        port = ranks.receive(kill.host or 0) if served is None else served.port
        for rank, end in enumerate(ranks.ends):
            if rank != kill.host:
                end.send(port)
        took = [ranks.receive(rank) for rank in range(kill.world)]
        assert all(isinstance(seconds, float) for seconds in took), took
        for end in ranks.ends:
            end.send("go")
        victim = ranks.processes[kill.victim]
        killed = strike(kill, victim, took[kill.victim])
        for rank in (rank for rank in range(kill.world) if rank != kill.victim):
            check(kill, rank, killed, ranks.receive(rank, killed + kill.seconds - time.monotonic()))
            ranks.processes[rank].join(60)
            assert ranks.processes[rank].exitcode not in (0, None), "torchrun restarts what does not end with 0"
        assert victim.exitcode == (-signal.SIGKILL if kill.how == signal.SIGKILL else None)


def strike(kill: Kill, victim: Any, step_seconds: float) -> float:
    """Kill the victim, or wait until it has killed itself; return the time."""
    if kill.at_post is None:
        time.sleep(kill.after * step_seconds)
        os.kill(victim.pid, kill.how)
    if kill.how == signal.SIGKILL:
        victim.join(30)
        assert victim.exitcode is not None, "the victim did not get to its last post"
    return time.monotonic()


def check(kill: Kill, rank: int, killed: float, report: Told) -> None:
    """Check that the error names the hop, the edge, the bytes, and what each other rank did last."""
    assert report.kind == TransportError.__name__, report
    assert report.when - killed <= kill.seconds
    assert re.match(rf"rank {rank}: ", report.text), report.text
    assert re.search(r"(forward|backward) hop \d+: .*\(.*\d+ bytes rank \d -> rank \d", report.text), report.text
    finder = re.findall(r"Rank (\d) reported: ", report.text)
    reported = report.text.partition("Last reported: ")[2]
    for other in range(kill.world):
        if other != int(finder[-1] if finder else rank):
            assert re.search(rf"rank {other}: [^;]* \(\d+\.\d s ago\)", reported), report.text


@pytest.mark.parametrize("seed", rest_nightly(range(110), *range(10)))
def test_a_killed_rank_ends_all_others_with_a_full_report(seed: int) -> None:
    run(Kill.random(seed))


@pytest.mark.parametrize("host", rest_nightly([None, 0, 1], 1))
def test_a_stopped_rank_ends_all_others_by_the_deadline(host: int | None) -> None:
    """No connection closes, so only a deadline can end the ranks, even if the store hangs, too."""
    run(Kill(4, victim=1, host=host, at_post=None, after=0.5, chunks=1, how=signal.SIGSTOP))
