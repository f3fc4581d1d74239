"""Processes that pass different arguments to one call: every rank gets the same error soon, and none hangs."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from ringattn import LocalWorld, Ring, ring_attention, roll, shard, unshard
from ringattn.comm import GroupLike, Limits, LocalGroup, TransportError
from ringattn.ring.args import AttentionArgs
from ringattn.ring.ops import call_forward_op

from ..support.rank_processes import CallOutcome, call_outcome, group_results

WORLD = 3
DEADLINE = 600.0  # seconds for a transfer, and for a wait for other ranks
SOON = 60.0  # seconds; nothing waits, so all of it allows for a busy machine
DROPOUT = {"dropout_p": 0.5}


def attend(ring: Ring, *, tokens: int = 16, causal: Any = False, **options: Any) -> torch.Tensor:
    q, k, v = (torch.randn(2, tokens, 2, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, ring=ring, layout="contiguous", causal=causal, **options)
    assert isinstance(out, torch.Tensor)
    return out


def known_calls(ring: Ring, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Repeat two calls until all ranks expect them, then let rank 1 make the other one."""
    for options in (first, second, first, second, first):
        attend(ring, **options)
    attend(ring, **(first if ring.rank == 1 else second))
    time.sleep(1)  # a rank that waits for nobody gets the error at its next call
    attend(ring)


def unequal_shards(ring: Ring) -> None:
    """Name a layout, which means equal shards, with other lengths on rank 1."""
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
    """List that interrupts the process when the argument checks read it."""

    def __iter__(self) -> Any:
        time.sleep(0.5)  # so that the other ranks are waiting
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
        signal.raise_signal(signal.SIGINT)
        return super().__iter__()


def another_ring(ring: Ring, **of_rank_1: Any) -> None:
    attend(Ring(deadline=DEADLINE, **(of_rank_1 if ring.rank == 1 else {})))


def another_device(ring: Ring) -> None:
    """Compare devices as a call on a GPU would; transports, which depend on the device, are not chosen yet."""
    ring._agree({"call": "forward"}, torch.device("meta" if ring.rank == 1 else "cpu"))


def no_gradient(ring: Ring) -> None:
    for _ in range(2):
        attend(ring).sum().backward()
    with torch.set_grad_enabled(ring.rank != 1):
        attend(ring)
    time.sleep(1)
    attend(ring)


def checkpointed(ring: Ring) -> None:
    """Check that recomputation and hooks that stop a backward do not concern the other ranks."""
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
    """Check that each call is right, or raises and ends the ring."""
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


def backwards_in_another_order(ring: Ring) -> None:
    for same_order in (True, False):  # in the second step rank 1 reverses the order
        outs = [attend(ring), attend(ring)]
        for out in outs if ring.rank == 1 and not same_order else outs[::-1]:
            out.sum().backward()


def refusals_in_a_row(ring: Ring) -> None:
    """Rank 1 fails twice; the other ranks get past the second failure because a valid call came in between."""
    for right in (True, False, True, *([False, False] if ring.rank == 1 else [True])):
        with contextlib.suppress(ValueError):
            attend(ring, causal=right or "neither")
    attend(ring, causal=True)


def how_it_ends(rank: int, body: Callable[[Ring], None]) -> CallOutcome:
    return call_outcome(lambda: body(Ring(deadline=DEADLINE)))


FIRST_CUTS, SECOND_CUTS = {"cu_seqlens": [0, 8, 48]}, {"cu_seqlens": [0, 40, 48]}
DIFFERS = "ValueError: {} differs between ranks ("


@pytest.mark.parametrize(
    ("body", "words", "of_rank_1"),
    [
        (partial(known_calls, first=FIRST_CUTS, second=SECOND_CUTS), DIFFERS.format("cu_seqlens"), None),
        (partial(known_calls, first=DROPOUT, second=DROPOUT | {"dropout_seed": 7}), "ValueError: dropout_seed", None),
        (partial(another_ring, transport="process_group"), DIFFERS.format("transport") + "rank 0: 'auto', ra", None),
        (unequal_shards, DIFFERS.format("tokens per rank") + "rank 0: 16, rank 1: 24, rank 2: 16). ", None),
        (unequal_wholes, DIFFERS.format("tokens") + "rank 0: 48, rank 1: 72, rank 2: 48). ", None),
        (partial(another_ring, limits=Limits(bytes_per_second=1e9)), DIFFERS.format("limits"), None),
        (another_device, DIFFERS.format("device") + "rank 0: 'cpu', rank 1: 'meta', rank 2: 'cpu'). ", None),
        (no_gradient, DIFFERS.format("gradient") + "rank 0: True, rank 1: False, rank 2: True). ", None),
        (a_backward_against_a_forward, DIFFERS.format("call") + "rank 0: 'backward', rank 1: 'forward', rank 2", None),
        (backwards_in_another_order, DIFFERS.format("backward of call") + "rank 0: 6, rank 1: 5, rank 2: 6). ", None),
        (interrupted_before_the_call, "ValueError: rank 1 refused this call: KeyboardInterrupt", "KeyboardInterrupt"),
        (refusals_in_a_row, "ValueError: rank 1 refused this call: ValueError: causal is 'neither'", None),
        (two_threads, "in use by a call in another thread", None),
        (checkpointed, "LookupError: right", None),
    ],
)
def test_every_rank_gets_the_error_of_the_differing_rank_soon(
    body: Callable[[Ring], None], words: str, of_rank_1: str | None
) -> None:
    for rank, (kind, text, seconds) in enumerate(group_results(WORLD, partial(how_it_ends, body=body))):
        assert (of_rank_1 or words if rank == 1 else words) in f"{kind}: {text}"
        assert seconds < SOON


def shards_of(group: LocalGroup) -> list[torch.Tensor]:
    return [torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3)]


def through_attention(group: LocalGroup, where: GroupLike) -> torch.Tensor:
    q, k, v = shards_of(group)
    out = ring_attention(q, k, v, layout="zigzag", group=where)
    assert isinstance(out, torch.Tensor)
    return out


def through_a_graph(group: LocalGroup, where: GroupLike) -> torch.Tensor:
    """Call the op that a graph of torch.compile holds."""
    q, k, v = shards_of(group)
    return call_forward_op(q, k, v, AttentionArgs(layout="zigzag"), None, where)[0]


def through_unshard(group: LocalGroup, where: GroupLike) -> torch.Tensor:
    return unshard(shards_of(group)[0], layout="zigzag", group=where, grad="sum")


def through_roll(group: LocalGroup, where: GroupLike) -> torch.Tensor:
    return roll(shards_of(group)[0], 1, layout="zigzag", group=where)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
@pytest.mark.parametrize("forward", [through_attention, through_a_graph, through_unshard, through_roll])
def test_backwards_in_another_order_are_refused(
    forward: Callable[[LocalGroup, GroupLike], torch.Tensor], mesh: tuple[int, int] | None, known: bool
) -> None:
    """The gradients of both calls have the same shapes, so only the comparison can tell them apart."""

    def step(group: LocalGroup, order: int) -> None:
        where: GroupLike = group if mesh is None else group.mesh(*mesh)
        outs = [forward(group, where) for _ in range(2)]
        for out in outs[::order]:
            out.sum().backward()  # type: ignore[no-untyped-call]

    def on_rank(group: LocalGroup) -> str:
        for order in (
            (1, -1, 1, -1) if known else ()
        ):  # later ranks expect the calls, and learn of the error from the rank that stops
            step(group, order)
        with pytest.raises((ValueError, TransportError)) as raised:
            step(group, 1 if group.rank() else -1)
        return str(raised.value)

    with LocalWorld(2, timeout=SOON) as world:
        texts = world.run(on_rank)
    assert all("backward of call differs between ranks (rank 0: " in text for text in texts), texts


def test_a_gradient_of_lse_on_one_rank_of_a_graph_is_refused_on_both() -> None:
    """Over a mesh the gradients of both results are exchanged together."""

    def on_rank(group: LocalGroup) -> None:
        q, k, v = shards_of(group)
        out, lse = call_forward_op(q, k, v, AttentionArgs(layout="zigzag"), None, group.mesh(1, 2))[:2]
        loss = out.sum() + (lse.sum() if group.rank() else 0.0)
        with pytest.raises(ValueError, match="gradient of lse differs between ranks"):
            loss.backward()  # type: ignore[no-untyped-call]

    with LocalWorld(2, timeout=SOON) as world:
        world.run(on_rank)
