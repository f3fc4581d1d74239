"""Stop or kill one rank of a mesh: all others end in time, with errors that number ranks in the mesh.

Ranks are processes over gloo. Only ``Ring(mesh["ring"], deadline=…)`` sets the deadline; the Ulysses dimension has to
take it over.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Ring, ring_attention, roll, shard, unshard
from ringattn.comm import TransportError
from ringattn.ring.mesh import resolve_mesh_rings

from ..support.rank_processes import GroupProcesses, RankProcesses, call_outcome, join_group, start_store

CPU = torch.device("cpu")
RANKS = 4
TOKENS, HEADS, HEAD_DIM = 8, 4, 8
DEADLINE = 4.0
BOUND = 10.0  # seconds within which every rank ends on an idle machine
HANGS = 100.0  # seconds on a busy machine; every other deadline is longer
MOVES = ("unshard", "roll", "backward of unshard", "backward of roll")
MOMENTS = ("first call", "next call", "forward", "backward", "shard", *MOVES)


class Case(NamedTuple):
    """Scenario of one stopped or killed rank."""

    victim: int
    how: signal.Signals
    moment: str
    default: bool = False  # calls pass no ring
    compiled: bool = False
    store_on: int | None = None  # rank that serves the store; None: a separate process


def attention(case: Case) -> tuple[Ring, Callable[[], torch.Tensor], Any]:
    """Return the ring with the deadline, this rank's forward, and the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    call: Any = partial(ring_attention, layout="contiguous", group=mesh)
    if case.compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")

    def forward(ring: Ring | None) -> torch.Tensor:
        q, k, v = (torch.ones(1, TOKENS, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
        out = call(q, k, v, ring=ring)
        assert isinstance(out, torch.Tensor)
        return out

    if case.moment != "first call":
        # Warm up without a deadline, because ranks may compile and connect far apart; a second ring compiles once more.
        for _ in range(1 + case.compiled):
            with Ring(mesh["ring"]) as patient:
                forward(patient).sum().backward()  # type: ignore[no-untyped-call]
        dist.barrier()
    ring = Ring(mesh["ring"], deadline=DEADLINE)
    return ring, partial(forward, None if case.default else ring), mesh


def work(rank: int, pipe: Connection, case: Case) -> None:
    """Run to the chosen moment; the victim reports its end, the other ranks report their errors."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    ring, forward, mesh = attention(case)

    def end() -> None:
        if rank == case.victim:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), case.how)

    def move(name: str) -> torch.Tensor:
        x, options = torch.ones(1, TOKENS, requires_grad=True), {"layout": "contiguous", "group": mesh}
        return unshard(x, **options, grad="sum") if name == "unshard" else roll(x, 3, **options)

    def at_a_transfer() -> None:
        """Make the victim end at its next transfer, in the ring or in the exchange depending on the rank."""
        both = resolve_mesh_rings(
            (mesh["ring"].get_group(), mesh["ulysses"].get_group()), CPU, None if case.default else ring
        )
        (transport,) = both[rank % 2].open(CPU)
        post = transport.post

        def posting(**messages: Any) -> Any:
            end()
            return post(**messages)

        transport.post = posting  # type: ignore[method-assign]

    def action() -> None:
        if case.moment == "shard":
            end()
            shard(torch.ones(1, TOKENS * RANKS), layout="contiguous", group=mesh)
        elif case.moment in MOVES[:2]:
            end()
            move(case.moment)
        elif case.moment.startswith("backward of "):
            moved = move(case.moment.removeprefix("backward of "))
            end()
            moved.sum().backward()  # type: ignore[no-untyped-call]
        elif case.moment == "backward":
            out = forward()
            at_a_transfer()
            out.sum().backward()  # type: ignore[no-untyped-call]
        else:
            at_a_transfer() if case.moment == "forward" else end()
            forward().sum().backward()  # type: ignore[no-untyped-call]

    if case.moment != "first call":
        for _ in range(3):
            forward().sum().backward()  # type: ignore[no-untyped-call]
        for name in MOVES[:2]:
            move(name).sum().backward()  # type: ignore[no-untyped-call]
    dist.barrier()
    pipe.send(call_outcome(action))
    pipe.send(time.monotonic())
    pipe.recv()  # stay alive, so that no rank takes this one for the victim


def with_store(rank: int, pipe: Connection, case: Case) -> None:
    """Run `work` with the store on one of the ranks."""
    served = start_store() if rank == case.store_on else None
    if served is not None:
        pipe.send(served.port)
    join_group(rank, RANKS, served or pipe.recv())
    work(rank, pipe, case)


def run(case: Case, seconds: float) -> dict[int, str]:
    """Run the scenario and return the errors of the other ranks."""
    with (
        GroupProcesses(RANKS, work, case) if case.store_on is None else RankProcesses(RANKS, with_store, case) as ranks
    ):
        if case.store_on is not None:
            port = ranks.receive(case.store_on)
            for rank in range(RANKS):
                if rank != case.store_on:
                    ranks.ends[rank].send(port)
        begun = ranks.receive(case.victim)
        assert isinstance(begun, float), begun
        texts = {}
        for rank in (rank for rank in range(RANKS) if rank != case.victim):
            kind, text, _ = ranks.receive(rank, begun + HANGS - time.monotonic())
            took = ranks.receive(rank) - begun
            if not kind and case.moment == "backward of roll" and case.victim != (rank + 1) % RANKS:
                continue  # its gradient comes from the next rank, so it may be complete
            assert (kind, took < seconds) == (TransportError.__name__, True), (rank, kind, took, text)
            texts[rank] = text
        return texts


def check(case: Case, texts: dict[int, str]) -> None:
    """Check the numbers in each error: neighbours of the victim name it, other ranks name a neighbour."""
    row, column = divmod(case.victim, 2)
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}: "), text
        beside = rank // 2 == row or rank % 2 == column
        named = {int(number) for number in re.findall(r"[Rr]ank (\d)", text)}
        assert case.victim in named if beside else named & (texts.keys() - {rank}), (rank, text)
        for finder, word in re.findall(r"Rank (\d) reported: rank (\d)", text):
            assert finder == word, (rank, text)


@pytest.mark.parametrize("case", [Case(1, signal.SIGSTOP, "first call")])
def test_a_stopped_rank_ends_all_others(case: Case) -> None:
    """Rank 0 waits for rank 1 in the exchange of heads, rank 3 in the ring, rank 2 for both of them."""
    check(case, run(case, HANGS))


VICTIMS = [*product(range(RANKS), (signal.SIGSTOP, signal.SIGKILL))]


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("victim", "how"), VICTIMS)
@pytest.mark.parametrize("default", [False, True])
def test_any_rank_may_fail_at_any_moment(victim: int, how: signal.Signals, moment: str, default: bool) -> None:
    case = Case(victim, how, moment, default)
    check(case, run(case, BOUND))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["next call", "forward", "backward"])
@pytest.mark.parametrize(("victim", "how"), VICTIMS)
def test_any_rank_may_fail_in_a_graph(victim: int, how: signal.Signals, moment: str) -> None:
    case = Case(victim, how, moment, compiled=True)
    check(case, run(case, BOUND))
