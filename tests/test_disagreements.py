"""Processes that pass different things to one call: every one of them gets the same error, soon, and none hangs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ringattn import Ring, ring_attention

from .forked import FORKED

WORLD = 3
SOON = 10.0  # seconds; the deadline is far beyond it


def call(ring: Ring, *, heads: int = 2, causal: bool = False, tokens: int = 16) -> None:
    q, k, v = (torch.randn(1, tokens, heads, 8) for _ in range(3))
    ring_attention(q, k, v, ring=ring, layout="contiguous", causal=causal)


def at_the_first_call(ring: Ring) -> None:
    call(ring, heads=4 if ring.rank == 1 else 2)


def a_new_signature_against_a_known_one(ring: Ring) -> None:
    call(ring)
    call(ring, heads=4 if ring.rank == 1 else 2)


def known_signatures(ring: Ring) -> None:
    # of one size: gloo ends a process that gets more bytes than it expects (SIGABRT), before anybody can compare
    for causal in (True, False):
        call(ring, causal=causal)
    call(ring, causal=ring.rank == 1)
    time.sleep(SOON / 2)  # whoever needs nothing of the others is told at its next call
    call(ring)


def one_rank_alone_is_wrong(ring: Ring) -> None:
    call(ring)
    if ring.rank == 1:
        ring_attention(*(torch.randn(1, 16, heads, 8) for heads in (3, 2, 2)), ring=ring, layout="contiguous")
    call(ring)
    time.sleep(SOON / 2)
    call(ring)


def work(body: Callable[[Ring], None], rank: int, port: int, pipe: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    begun = time.monotonic()
    try:
        body(Ring(deadline=120.0))
        pipe.send(("", "nothing was raised", 0.0))
    except BaseException as error:
        pipe.send((type(error).__name__, str(error), time.monotonic() - begun))


def outcomes(body: Callable[[Ring], None]) -> list[tuple[str, str, float]]:
    """Type, text and time of the error of each rank."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [FORKED.Pipe() for _ in range(WORLD)]
    ranks: list[Any] = [
        FORKED.Process(target=work, args=(body, rank, served.port, pipes[rank][1]), daemon=True)
        for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            process.start()
        for _, there in pipes:
            there.close()
        for here, _ in pipes:
            assert here.poll(60), "a rank hangs"
        return [here.recv() for here, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize("body", [at_the_first_call, a_new_signature_against_a_known_one])
def test_whoever_has_not_seen_a_signature_stops_before_the_first_hop(body: Callable[[Ring], None]) -> None:
    told = outcomes(body)
    text = "heads differs between ranks (rank 0: (2, 2), rank 1: (4, 4), rank 2: (2, 2)): "
    assert [(kind, words) for kind, words, _ in told] == [
        ("ValueError", f"{text}all ranks of a ring must pass the same")
    ] * WORLD
    assert all(seconds < SOON for _, _, seconds in told)


def test_known_signatures_are_compared_while_the_call_runs() -> None:
    told = outcomes(known_signatures)
    for kind, words, seconds in told:
        assert kind == "ValueError", words
        assert words.startswith("call 3: causal differs between ranks (rank "), words
        assert "rank 1: True" in words
        assert seconds < SOON


def test_a_rank_that_refuses_alone_is_named_on_all_others() -> None:
    told = outcomes(one_rank_alone_is_wrong)
    assert told[1][:2] == ("ValueError", "k has 2 heads, q has 3: the heads of q must be a multiple of the heads of k")
    for rank in (0, 2):
        kind, words, seconds = told[rank]
        assert (kind, words) == ("ValueError", f"rank 1 refused this call: ValueError: {told[1][1]}")
        assert seconds < SOON
