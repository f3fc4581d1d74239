"""Processes that pass different things to one call: every one of them gets the same error, soon, and none hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._C._distributed_c10d import TCPStore

from ringattn import Ring, ring_attention

from ..support.forked import FORKED

WORLD = 3
SOON = 10.0  # seconds; the deadline is far beyond it
DROPOUT = {"dropout_p": 0.5}


def attend(ring: Ring, *, tokens: int = 16, causal: bool = False, **options: Any) -> torch.Tensor:
    q, k, v = (torch.randn(2, tokens, 2, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, ring=ring, layout="contiguous", causal=causal, **options)
    assert isinstance(out, torch.Tensor)
    return out


def known_calls(ring: Ring, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Both known to all ranks; then rank 1 makes one of them and the others the other one."""
    for options in (first, second, first, second, first):
        attend(ring, **options)
    attend(ring, **(first if ring.rank == 1 else second))
    time.sleep(1)  # a rank that waits for nobody gets the error at its next call
    attend(ring)


def a_backward_against_a_forward(ring: Ring) -> None:
    out = attend(ring)
    if ring.rank == 1:
        attend(ring)
    out.sum().backward()


def interrupted_before_the_call(ring: Ring) -> None:
    if ring.rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        attend(ring, cu_seqlens=Endless())
    attend(ring)


class Endless(list[int]):
    """Never gets past the checks."""

    def __iter__(self) -> Iterator[int]:
        while True:
            time.sleep(0.01)


def no_gradient(ring: Ring) -> None:
    for _ in range(2):
        attend(ring).sum().backward()
    with torch.set_grad_enabled(ring.rank != 1):
        attend(ring)
    time.sleep(1)
    attend(ring)


def legal(ring: Ring) -> None:
    """What checkpointing, and a backward that hooks stop, do to a call is nothing to the others."""
    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    whole = [ring_attention(x, x, x, ring=ring, layout="contiguous").sum()]
    for early in (True, False):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early):
            whole.append(
                torch.utils.checkpoint.checkpoint(
                    lambda x: ring_attention(x, x, x, ring=ring, layout="contiguous").sum(), x, use_reentrant=False
                )
            )
    grads = [torch.autograd.grad(one, x)[0] for one in whole]
    assert all(torch.equal(grads[0], grad) for grad in grads)
    raise LookupError("right")


def two_threads(ring: Ring) -> None:
    """Every call is right or ends by an error, and the ring with it."""
    errors: list[BaseException] = []

    def calls(value: float) -> None:
        x = torch.full((1, 16, 2, 8), value)
        try:
            for _ in range(20):
                out = ring_attention(x, x, x, ring=ring, layout="contiguous")
                assert torch.equal(out, x), "wrong, without an error"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors, "nothing was raised"
    raise next((error for error in errors if isinstance(error, AssertionError)), None) or RuntimeError(str(errors))


def one_rank_alone_is_wrong(ring: Ring) -> None:
    attend(ring)
    if ring.rank == 1:
        ring_attention(*(torch.randn(1, 16, heads, 8) for heads in (3, 2, 2)), ring=ring, layout="contiguous")
    attend(ring)
    time.sleep(SOON / 2)
    attend(ring)


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


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            partial(known_calls, first={"cu_seqlens": [0, 8, 48]}, second={"cu_seqlens": [0, 40, 48]}),
            "cu_seqlens differs",
        ),
        (partial(known_calls, first=DROPOUT, second=DROPOUT | {"dropout_seed": 7}), "dropout_seed differs"),
        (no_gradient, "gradient differs between ranks (rank 0: True, rank 1: False, rank 2: True): "),
        (a_backward_against_a_forward, "call differs between ranks (rank 0: 'backward', rank 1: 'forward', rank 2: "),
    ],
)
def test_calls_that_differ(body: Callable[[Ring], None], words: str) -> None:
    for kind, message, seconds in outcomes(body):
        assert kind == "ValueError" and message.startswith(words), message
        assert seconds < SOON


def test_an_interrupt_before_the_call_begins() -> None:
    first, interrupted, last = outcomes(interrupted_before_the_call)
    assert interrupted[0] == "KeyboardInterrupt"
    for kind, message, seconds in (first, last):
        assert kind == "ValueError" and message.startswith("rank 1 refused this call: KeyboardInterrupt")
        assert seconds < SOON


def test_checkpointing() -> None:
    assert [(kind, words) for kind, words, _ in outcomes(legal)] == [("LookupError", "right")] * WORLD


def test_two_threads_on_one_ring() -> None:
    for kind, words, seconds in outcomes(two_threads):
        assert kind == "RuntimeError" and "in use by a call of another thread" in words, words
        assert seconds < SOON


def test_a_rank_that_refuses_alone_is_named_on_all_others() -> None:
    first, wrong, last = outcomes(one_rank_alone_is_wrong)
    assert wrong[0] == "ValueError" and wrong[1].startswith("k has 2 heads, q has 3: the heads of q must be a multiple")
    for kind, message, seconds in (first, last):
        assert (kind, message) == ("ValueError", f"rank 1 refused this call: ValueError: {wrong[1]}")
        assert seconds < SOON
