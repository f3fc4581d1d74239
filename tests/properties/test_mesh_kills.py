"""A rank of a mesh is stopped or killed: all others end in time, with a TransportError that counts ranks in the mesh.

Ranks are processes over gloo. The deadline is that of ``Ring(mesh["ring"], deadline=…)``, which says nothing of the
dimension that exchanges heads.
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

from ringattn import Ring, ring_attention, shard, unshard
from ringattn.comm import TransportError
from ringattn.ring.mesh import rings_of

from ..support.forked import Group, Ranks, ending, join, serve

CPU = torch.device("cpu")
RANKS = 4
TOKENS, HEADS, HEAD_DIM = 8, 4, 8
DEADLINE = 4.0
BOUND = 10.0  # seconds in which every rank ends, with that deadline, on a machine with little else to do
HANGS = 100.0  # as many on a busy one; no other deadline is as short
MOMENTS = ("first call", "next call", "forward", "backward", "unshard", "backward of unshard", "shard")


class Case(NamedTuple):
    """What happens."""

    victim: int
    how: signal.Signals
    moment: str
    default: bool = False  # calls name no ring
    compiled: bool = False
    store_on: int | None = None  # the rank that serves the store; None: a process that stays


def attention(case: Case) -> tuple[Ring, Callable[[], torch.Tensor], Any]:
    """The ring with the deadline, a forward on this rank, and the mesh."""
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
        # Ranks compile and connect as far apart as a busy machine likes: for another ring once more, for any other not.
        for _ in range(1 + case.compiled):
            with Ring(mesh["ring"]) as patient:
                forward(patient).sum().backward()  # type: ignore[no-untyped-call]
        dist.barrier()
    ring = Ring(mesh["ring"], deadline=DEADLINE)
    return ring, partial(forward, None if case.default else ring), mesh


def work(rank: int, pipe: Connection, case: Case) -> None:
    """Come to the moment; the victim says when it ends itself, the others how they end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    ring, forward, mesh = attention(case)

    def end() -> None:
        if rank == case.victim:
            pipe.send(time.monotonic())
            os.kill(os.getpid(), case.how)

    def joined() -> torch.Tensor:
        return unshard(torch.ones(1, TOKENS, requires_grad=True), layout="contiguous", group=mesh, grad="sum")

    def at_a_transfer() -> None:
        """End at the last but one transfer of either dimension: of a forward, or a backward."""
        both = rings_of((mesh["ring"].get_group(), mesh["ulysses"].get_group()), CPU, None if case.default else ring)
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
        elif case.moment == "unshard":
            end()
            joined()
        elif case.moment == "backward of unshard":
            whole = joined()
            end()
            whole.sum().backward()  # type: ignore[no-untyped-call]
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
        joined().sum().backward()  # type: ignore[no-untyped-call]
    dist.barrier()
    pipe.send(ending(action))
    pipe.send(time.monotonic())
    pipe.recv()  # whoever has ended must not be seen to be gone by others


def with_store(rank: int, pipe: Connection, case: Case) -> None:
    """As `work`; one of the ranks serves the store."""
    served = serve() if rank == case.store_on else None
    if served is not None:
        pipe.send(served.port)
    join(rank, RANKS, served or pipe.recv())
    work(rank, pipe, case)


def run(case: Case, seconds: float) -> dict[int, str]:
    """Let it happen; what each other rank raises, by rank."""
    with Group(RANKS, work, case) if case.store_on is None else Ranks(RANKS, with_store, case) as ranks:
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
            assert (kind, took < seconds) == (TransportError.__name__, True), (rank, kind, took, text)
            texts[rank] = text
        return texts


def check(case: Case, texts: dict[int, str]) -> None:
    """Ranks have the numbers of the mesh: who shares a row or a column with the victim names it, or who does."""
    row, column = divmod(case.victim, 2)
    for rank, text in texts.items():
        assert text.startswith(f"rank {rank}: "), text
        beside = rank // 2 == row or rank % 2 == column
        named = {int(number) for number in re.findall(r"[Rr]ank (\d)", text)}
        assert case.victim in named if beside else named & (texts.keys() - {rank}), (rank, text)
        for finder, word in re.findall(r"Rank (\d) found: rank (\d)", text):
            assert finder == word, (rank, text)


@pytest.mark.parametrize("case", [Case(1, signal.SIGSTOP, "first call")])
def test_a_stopped_rank_ends_the_wait_of_all(case: Case) -> None:
    """Rank 0 waits for rank 1 where heads are exchanged, rank 3 in the ring, rank 2 for both of them."""
    check(case, run(case, HANGS))


VICTIMS = [*product(range(RANKS), (signal.SIGSTOP, signal.SIGKILL))]


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("victim", "how"), VICTIMS)
@pytest.mark.parametrize("default", [False, True])
def test_any_rank_at_any_moment(victim: int, how: signal.Signals, moment: str, default: bool) -> None:
    case = Case(victim, how, moment, default)
    check(case, run(case, BOUND))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["next call", "forward", "backward"])
@pytest.mark.parametrize(("victim", "how"), VICTIMS)
def test_any_rank_in_a_graph(victim: int, how: signal.Signals, moment: str) -> None:
    case = Case(victim, how, moment, compiled=True)
    check(case, run(case, BOUND))
