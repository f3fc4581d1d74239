"""What every transport must do, as functions of an open transport."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pytest
import torch

from ringattn.comm import (
    DONE,
    Edge,
    Fence,
    LocalGroup,
    LocalWorld,
    Message,
    Slots,
    Transport,
    TransportError,
)

T = TypeVar("T")
Case = Callable[[Transport, torch.device], None]
CASES: dict[str, Case] = {}
# for transports whose transfers the host waits for
HOST_CASES: dict[str, Case] = {}

CPU = torch.device("cpu")
# Seconds after which a wait that is short where all is well is taken for a hang: far more than a busy machine needs.
HANGS = float(os.environ.get("RINGATTN_TEST_HANGS", "60"))
# More than any backend buffers on its own: a send of this size is only over once its receiver takes it.
LARGE = 1 << 20


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def host_case(function: Case) -> Case:
    HOST_CASES[function.__name__] = function
    return function


class Calling:
    """A fence that calls a function when it is waited for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.function()

    def done(self) -> bool:
        return self.waits > 0


def on_ranks(size: int, fn: Callable[[LocalGroup], T]) -> list[T]:
    """What `fn` returns on each of so many virtual ranks."""
    with LocalWorld(size, device="cpu", timeout=HANGS) as world:
        return world.run(fn)


def until(condition: Callable[[], object], what: str = "it never came to that") -> None:
    """Wait for a state, as long as a busy machine may take to get there."""
    ends = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.001)


def filled(value: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=device)


def values(tensor: torch.Tensor) -> list[float]:
    """The distinct values of a tensor."""
    return sorted(set(tensor.tolist())) if tensor.numel() < 100 else torch.unique(tensor).tolist()


def neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


@case
def a_pair_matches_in_order(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    arrived: list[torch.Tensor] = []
    fences: list[Fence] = []
    for post in range(4):  # several posts in flight, three messages of one size in each
        outgoing = [filled(100 * transport.rank + 3 * post + index, 1000, device) for index in range(3)]
        incoming = [filled(-1, 1000, device) for _ in range(3)]
        arrived += incoming
        fences.append(
            transport.post(
                sends=[Message(onward, tensor) for tensor in outgoing],
                receives=[Message(back, tensor) for tensor in incoming],
                after=[transport.mark()],
            )
        )
    for fence in fences:
        fence.wait()
    assert [int(tensor[0]) for tensor in arrived] == [100 * back + index for index in range(12)]
    assert all(len(values(tensor)) == 1 for tensor in arrived)


@case
def sizes_and_dtypes_arrive_bit_for_bit(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)

    def payload(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    kinds = [
        (dtype, shape)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for shape in ((1,), (3, 5), (2, 33, 7), ())
    ]
    kinds.append((torch.float32, (LARGE // 4,)))
    sends = [Message(onward, payload(transport.rank, *kind)) for kind in kinds]
    receives = [Message(back, torch.zeros(shape, dtype=dtype, device=device)) for dtype, shape in kinds]
    transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
    for kind, message in zip(kinds, receives, strict=True):
        assert torch.equal(message.tensor, payload(back, *kind)), kind


@case
def a_ring_reuses_its_slots(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    slots = Slots(3, device)
    specs = [((64, 8), torch.float32), ((5,), torch.float16)]
    slots.reserve(4096)
    current: Sequence[torch.Tensor] = [torch.full(shape, transport.rank, dtype=dtype) for shape, dtype in specs]
    current = [tensor.to(device) for tensor in current]
    held = None
    for hop in range(40):
        slot = hop % slots.count
        arriving = slots.tensors(slot, specs)
        fence = transport.post(
            sends=[Message(onward, tensor) for tensor in current],
            receives=[Message(back, tensor) for tensor in arriving],
            after=[*slots.free(slot), transport.mark()],
        )
        slots.busy(slot, fence)
        if held is not None:
            slots.busy(held, fence)  # its bytes leave from there
        if (hop + transport.rank) % 7 == 0:
            time.sleep(0.002)  # ranks drift apart
        fence.wait()
        expected = (transport.rank - hop - 1) % transport.size
        assert all(bool((tensor == expected).all()) for tensor in arriving), hop
        current, held = arriving, slot
    slots.drain()


@case
def both_neighbours_in_one_post(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    for _ in range(3):
        sends = [
            Message(onward, filled(transport.rank, 10, device)),
            Message(back, filled(-transport.rank, 10, device)),
        ]
        receives = [Message(back, filled(99, 10, device)), Message(onward, filled(99, 10, device))]
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        assert [int(message.tensor[3]) for message in receives] == [back, -onward]


@case
def a_rank_sends_to_itself(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    mine, sums = filled(7, 33, device), torch.randn(5, 3, device=device)
    copies = (filled(0, 33, device), torch.zeros(5, 3, device=device))
    sends = [Message(transport.rank, mine), Message(transport.rank, sums)]
    receives = [Message(transport.rank, tensor) for tensor in copies]
    transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
    assert torch.equal(copies[0], mine)
    assert torch.equal(copies[1], sums)

    neighbour = filled(0, 33, device)
    copies[0].zero_()
    transport.post(
        sends=[Message(onward, filled(transport.rank, 33, device)), Message(transport.rank, mine)],
        receives=[Message(back, neighbour), Message(transport.rank, copies[0])],
        after=[transport.mark()],
    ).wait()
    assert torch.equal(copies[0], mine)
    assert torch.equal(neighbour, filled(back, 33, device))


@case
def nothing_leaves_before_after_is_over(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    outgoing, arrived = filled(-1, 1000, device), filled(-2, 1000, device)

    def write() -> None:
        outgoing.fill_(transport.rank)
        if device.type == "cuda":  # this fence is a point of the host
            torch.cuda.synchronize(device)

    ready = Calling(write)
    fence = transport.post(sends=[Message(onward, outgoing)], receives=[Message(back, arrived)], after=[ready])
    fence.wait()
    assert ready.waits >= 1
    assert torch.equal(arrived, filled(back, 1000, device))


@case
def nothing_arrives_before_after_is_over(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    arrived = filled(-2, LARGE // 4, device)
    readings: list[float] = []

    def still_reading() -> None:
        time.sleep(0.05 * (1 + transport.rank))
        readings.extend(values(arrived))

    sends = [Message(onward, filled(transport.rank, LARGE // 4, device))]
    reading = Calling(still_reading)
    transport.post(sends=sends, receives=[Message(back, arrived)], after=[reading]).wait()
    assert readings == [-2]
    assert values(arrived) == [back]


@case
def a_post_may_follow_another(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    first, second = filled(-1, LARGE // 4, device), filled(-1, LARGE // 4, device)
    mine = filled(transport.rank, LARGE // 4, device)
    came = transport.post(sends=[Message(onward, mine)], receives=[Message(back, first)], after=[transport.mark()])
    # Sends on what is still arriving, as a ring that runs ahead does.
    went_on = transport.post(sends=[Message(onward, first)], receives=[Message(back, second)], after=[came])
    went_on.wait()
    assert values(second) == [(transport.rank - 2) % transport.size]
    came.wait()


@case
def posts_run_ahead(transport: Transport, device: torch.device) -> None:
    """Twice around the ring, every hop posted before any is waited for."""
    onward, back = neighbours(transport)
    held = filled(transport.rank, 1000, device)
    fences: list[Fence] = [transport.mark()]
    for _ in range(2 * transport.size):
        arriving = filled(-1, 1000, device)
        after = [fences[-1], transport.mark()]
        # Each fence holds its tensors until it has been waited for.
        fences.append(transport.post(sends=[Message(onward, held)], receives=[Message(back, arriving)], after=after))
        held = arriving
    for fence in reversed(fences):
        fence.wait()
    assert values(held) == [transport.rank]


@case
def done_says_what_is_over(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    until(transport.mark().done)  # a point of a device is over some time after the host has gone past it
    tensor, arrived = filled(transport.rank, LARGE // 4, device), filled(-1, LARGE // 4, device)
    fence = transport.post(sends=[Message(onward, tensor)], receives=[Message(back, arrived)], after=[transport.mark()])
    until(fence.done)  # nobody needs to wait for it
    fence.wait()
    assert values(arrived) == [back]
    assert fence.done()


@case
def a_sent_buffer_is_free_after_the_wait(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    outgoing, arrived = filled(5 + transport.rank, LARGE, device), filled(0, LARGE, device)
    sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
    if transport.size == 1:
        sent = received = transport.post(sends=sends, receives=receives, after=[transport.mark()])
    elif transport.rank % 2 == 0 and transport.rank + 1 < transport.size:
        sent = transport.post(sends=sends, receives=[], after=[transport.mark()])
        sent.wait()
        outgoing.fill_(-1)  # the receiver, late as it is, has what was there before
        received = transport.post(sends=[], receives=receives, after=[transport.mark()])
    else:
        time.sleep(0.1)
        received = transport.post(sends=[], receives=receives, after=[transport.mark()])
        sent = transport.post(sends=sends, receives=[], after=[transport.mark()])
    sent.wait()
    outgoing.fill_(-1)
    received.wait()
    assert values(arrived) == [5 + back]


@case
def waiting_is_idempotent(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    arrived = filled(0, 4, device)
    sends = [Message(onward, filled(transport.rank, 4, device))]
    fence = transport.post(sends=sends, receives=[Message(back, arrived)], after=[transport.mark()])
    for _ in range(3):
        fence.wait()
    mark = transport.mark()
    mark.wait()
    mark.wait()
    transport.post(sends=[], receives=[], after=[fence, mark]).wait()
    assert int(arrived[0]) == back


@case
def sending_leaves_autograd_alone(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    weight = torch.full((6,), float(transport.rank), device=device, requires_grad=True)
    doubled = weight * 2
    arrived = torch.zeros(6, device=device)
    transport.post(sends=[Message(onward, doubled)], receives=[Message(back, arrived)], after=[transport.mark()]).wait()
    torch.autograd.backward(doubled.sum())
    assert weight.grad is not None
    assert values(weight.grad) == [2.0]
    assert not arrived.requires_grad
    assert values(arrived) == [2.0 * back]


@case
def gather_is_in_rank_order(transport: Transport, device: torch.device) -> None:
    for step in range(3):
        gathered = transport.gather({"rank": transport.rank, "step": step, "shape": [1, transport.rank]})
        assert gathered == [{"rank": rank, "step": step, "shape": [1, rank]} for rank in range(transport.size)]
    assert transport.gather(None) == [None] * transport.size


@case
def wrong_messages_are_refused(transport: Transport, device: torch.device) -> None:
    me, tensor = transport.rank, filled(0, 6, device)
    refused: list[tuple[list[Message], list[Message], str]] = [
        ([Message(transport.size, tensor)], [], rf"sends\[0\]: peer is {transport.size}, the ranks of this group"),
        ([], [Message(-1, tensor)], r"receives\[0\]: peer is -1"),
        ([Message(0, filled(0, 12, device)[::2])], [], "not contiguous"),
        ([], [Message(0, filled(0, 0, device))], "holds no bytes"),
        ([Message(0, tensor.to("meta"))], [], "is on meta, this transport moves tensors of"),
        ([Message(me, tensor)], [], r"sends itself messages of \[24\] bytes and receives \[\]"),
        ([Message(me, tensor)], [Message(me, tensor[:3])], r"receives \[12\]"),
    ]
    for sends, receives, match in refused:
        with pytest.raises(ValueError, match=match):
            transport.post(sends=sends, receives=receives)
    transport.gather(None)  # nothing was sent: the transport still works


def counting(transport: Transport) -> list[list[Message]]:
    """The sends of every post from now on."""
    posted: list[list[Message]] = []
    post = transport.post

    def counted(*, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        posted.append([*sends])
        return post(sends=sends, receives=receives, after=after)

    transport.post = counted  # type: ignore[method-assign]
    return posted


@case
def edges_are_warmed_up_once(transport: Transport, device: torch.device) -> None:
    ranks, posted = range(transport.size), counting(transport)
    everything: list[Edge] = list(itertools.permutations(ranks, 2)) + [(rank, rank) for rank in ranks]
    transport.warm_up([(0, transport.size - 1)] * 2)
    first = len([message for sends in posted for message in sends])
    assert first == (transport.rank == 0)
    transport.warm_up(everything)
    transport.warm_up(everything[::-1])
    peers = [message.peer for sends in posted for message in sends]
    assert sorted(peers) == list(ranks)
    for edge in ((0, transport.size), (-1, 0)):
        with pytest.raises(ValueError, match=rf"edges has \({edge[0]}, {edge[1]}\): the ranks of this group are 0 to"):
            transport.warm_up([edge])


@case
def a_warm_up_names_wrong_bytes_everywhere(transport: Transport, device: torch.device) -> None:
    post, source = transport.post, transport.size - 1

    def spoiled(**messages: Any) -> Fence:
        fence = post(**messages)
        fence.wait()
        for message in messages["receives"]:
            message.tensor[17:20] ^= 1
        return DONE if device.type == "cpu" else transport.mark()

    if transport.rank == 0:
        transport.post = spoiled  # type: ignore[method-assign]
    with pytest.raises(TransportError, match=rf"rank 0 got 3 wrong bytes of 4096 from rank {source}$"):
        transport.warm_up([(source, 0)])
    with pytest.raises(TransportError, match=f"the warm-up of the {transport.name} transport failed"):
        transport.warm_up([(source, 0)])  # the edge is not warm


@case
def an_aborted_transport_refuses_posts(transport: Transport, device: torch.device) -> None:
    transport.gather(None)  # nobody aborts under another rank's last transfer
    transport.abort("somebody said so")
    transport.abort("for the second time")
    message = rf"the {transport.name} transport of rank \d was aborted: somebody said so"
    for _ in range(2):
        with pytest.raises(TransportError, match=message):
            transport.post(sends=[], receives=[])
    transport.close()


@host_case
def abort_ends_a_wait(transport: Transport, device: torch.device) -> None:
    """Nobody sends. Another thread of rank 0 ends its wait, and what was posted behind it; the others wait for that."""
    onward, back = neighbours(transport)
    if transport.size == 1:  # a rank alone waits for nobody
        return
    transport.gather(None)
    fences: list[Fence] = []
    if transport.rank == 0:
        timer = threading.Timer(0.1, transport.abort, ["it took too long"])
        timer.start()
        with pytest.raises(TransportError, match="was aborted: it took too long"):
            for peer in (onward, back):
                fences.append(transport.post(sends=[], receives=[Message(peer, filled(0, 1000, device))]))
            for fence in fences:
                fence.wait()
        timer.join()
        with suppress(TransportError):
            transport.gather(None)
    else:
        with suppress(TransportError):  # a virtual rank is told with rank 0
            transport.gather(None)
        transport.abort("it took too long")
    for fence in fences:
        assert fence.done()
        with pytest.raises(TransportError, match="was aborted: it took too long"):
            fence.wait()
    with pytest.raises(TransportError, match="was aborted: it took too long"):
        transport.post(sends=[], receives=[])


@case
def closing_twice_is_fine(transport: Transport, device: torch.device) -> None:
    transport.gather(None)  # nobody closes under another rank's last transfer
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match=f"the {transport.name} transport of rank {transport.rank} is closed"):
        transport.post(sends=[], receives=[])


def traceback_of(function: Callable[..., None], *arguments: object) -> str:
    try:
        function(*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""
