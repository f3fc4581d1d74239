"""Processes that pass different things to one call: every one of them gets the same error, soon, and none hangs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from ringattn import Ring, ring_attention, shard
from ringattn.comm import Limits

from ..support.forked import Ending, ending, results

WORLD = 3
DEADLINE = 600.0  # seconds of a transfer, and of a wait for the others
SOON = 60.0  # of which nothing waits; all of it is a busy machine's
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


def unequal_shards(ring: Ring) -> None:
    """Of a layout by its name, which means equal ones."""
    attend(ring, tokens=24 if ring.rank == 1 else 16)


def unequal_wholes(ring: Ring) -> None:
    shard(torch.randn(1, 72 if ring.rank == 1 else 48, 2), layout="zigzag")


def a_backward_against_a_forward(ring: Ring) -> None:
    out = attend(ring)
    if ring.rank == 1:
        attend(ring)
    out.sum().backward()


def interrupted_before_the_call(ring: Ring) -> None:
    if ring.rank == 1:
        attend(ring, cu_seqlens=Interrupted())
    attend(ring)


class Interrupted(list[int]):
    """Does not get past the checks."""

    def __iter__(self) -> Any:
        time.sleep(0.5)  # the others wait
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started it in the background
        signal.raise_signal(signal.SIGINT)
        return super().__iter__()


def another_ring(ring: Ring, **of_rank_1: Any) -> None:
    attend(Ring(deadline=DEADLINE, **(of_rank_1 if ring.rank == 1 else {})))


def another_device(ring: Ring) -> None:
    """As a tensor on a GPU would: compared before the transports are chosen, which differ by device."""
    ring._agree({"call": "forward"}, torch.device("meta" if ring.rank == 1 else "cpu"))


def no_gradient(ring: Ring) -> None:
    for _ in range(2):
        attend(ring).sum().backward()
    with torch.set_grad_enabled(ring.rank != 1):
        attend(ring)
    time.sleep(1)
    attend(ring)


def checkpointed(ring: Ring) -> None:
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
    grads = [torch.autograd.grad(output, x)[0] for output in whole]
    assert all(torch.equal(grads[0], grad) for grad in grads)
    raise LookupError("right")


def two_threads(ring: Ring) -> None:
    """Every call is right or ends by an error, and the ring with it."""
    errors: list[BaseException] = []

    def calls(value: float) -> None:
        x = torch.full((1, 16, 2, 8), value)
        try:
            while not errors:
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


def how_it_ends(rank: int, body: Callable[[Ring], None]) -> Ending:
    return ending(lambda: body(Ring(deadline=DEADLINE)))


DIFFERS = "ValueError: {} differs between ranks ("


@pytest.mark.parametrize(
    ("body", "words", "of_rank_1"),
    [
        (
            partial(known_calls, first={"cu_seqlens": [0, 8, 48]}, second={"cu_seqlens": [0, 40, 48]}),
            DIFFERS.format("cu_seqlens"),
            None,
        ),
        (partial(known_calls, first=DROPOUT, second=DROPOUT | {"dropout_seed": 7}), "ValueError: dropout_seed", None),
        (
            partial(another_ring, transport="process_group"),
            DIFFERS.format("transport") + "rank 0: 'auto', rank 1: 'process_group', rank 2: 'auto'): ",
            None,
        ),
        (unequal_shards, DIFFERS.format("tokens per rank") + "rank 0: 16, rank 1: 24, rank 2: 16): ", None),
        (unequal_wholes, DIFFERS.format("tokens") + "rank 0: 48, rank 1: 72, rank 2: 48): ", None),
        (partial(another_ring, limits=Limits(bytes_per_second=1e9)), DIFFERS.format("limits"), None),
        (another_device, DIFFERS.format("device") + "rank 0: 'cpu', rank 1: 'meta', rank 2: 'cpu'): ", None),
        (no_gradient, DIFFERS.format("gradient") + "rank 0: True, rank 1: False, rank 2: True): ", None),
        (a_backward_against_a_forward, DIFFERS.format("call") + "rank 0: 'backward', rank 1: 'forward', rank 2", None),
        (interrupted_before_the_call, "ValueError: rank 1 refused this call: KeyboardInterrupt", "KeyboardInterrupt"),
        (two_threads, "in use by a call of another thread", None),
        (checkpointed, "LookupError: right", None),
    ],
)
def test_every_rank_gets_the_error_soon(body: Callable[[Ring], None], words: str, of_rank_1: str | None) -> None:
    for rank, (kind, text, seconds) in enumerate(results(WORLD, partial(how_it_ends, body=body))):
        assert (of_rank_1 or words if rank == 1 else words) in f"{kind}: {text}"
        assert seconds < SOON
