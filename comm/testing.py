"""Conformance suite of transports, as functions of an open transport.

`check_transport` runs all cases::

    with LocalWorld(3) as world:
        world.run(partial(check_transport, open_counting))

or, in the processes of a group, `check_transport("counting", group)`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from . import Fence, GroupLike, LocalGroup, Message, Slots, Transport, TransportError, TransportFactory, open_transport
from .groups import resolve_group

Case = Callable[[Transport, torch.device], None]
CASES: dict[str, Case] = {}
HOST_CASES: dict[str, Case] = {}
"""Cases for transports of CPU tensors, whose transfers block the host. A process group may be unusable afterwards."""

HANG_SECONDS = 60.0
"""Seconds after which a short wait counts as a hang; far more than a busy machine needs."""
# More than any backend buffers, so a send of this size is only over once its receiver takes the data.
LARGE_BYTES = 1 << 20


def check_transport(
    transport: str | TransportFactory, group: GroupLike = None, *, device: torch.device | str = "cpu"
) -> None:
    """Open a transport for every case of the suite and run the case. Every rank of the group calls this together.

    Raises:
        AssertionError: a case failed; the message has this rank, the name of the case and the reason.
    """
    device = torch.device(device)
    cases = CASES | (HOST_CASES if device.type == "cpu" else {})
    if not isinstance(resolve_group(group), LocalGroup):  # an abort may end a group of processes: run one such case
        cases.pop(abort_ends_a_post_that_waits.__name__, None)
    for name, case in cases.items():
        opened = open_transport(group, transport=transport, device=device)
        try:
            case(opened, device)
        except Exception as error:
            raise AssertionError(f"rank {opened.rank}, {name}: {type(error).__name__}: {error}") from error
        finally:
            opened.close()


def case(function: Case) -> Case:
    """Register a function as a case of the suite, under the function's name."""
    CASES[function.__name__] = function
    return function


def expect(arrived: Any, expected: Any, what: str = "the received value") -> None:
    """Raise an `AssertionError` if two values or tensors differ; `what` names the value."""
    same = torch.equal(arrived, expected) if isinstance(arrived, torch.Tensor) else arrived == expected
    if not same:
        raise AssertionError(f"{what} is {arrived}, expected {expected}")


@contextmanager
def expect_error(kind: type[Exception], words: str = "") -> Iterator[None]:
    """Raise an `AssertionError` unless the block raises this type of error with `words` in its text."""
    try:
        yield
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"a {kind.__name__} must contain {words!r}; its text is {str(error)!r}") from error
    else:
        raise AssertionError(f"no error was raised; a {kind.__name__} was expected")


class CallbackFence:
    """A fence that calls `function` when it is waited for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.waited = False

    def wait(self) -> None:
        self.waited = True
        self.function()

    def done(self) -> bool:
        return self.waited


def wait_until(condition: Callable[[], object], what: str = "the condition never became true") -> None:
    """Poll until a condition is true, and raise an `AssertionError` after `HANG_SECONDS` seconds."""
    ends = time.monotonic() + HANG_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(what)
        time.sleep(0.001)


def constant_tensor(value: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` int32 elements of one value."""
    return torch.full((count,), value, dtype=torch.int32, device=device)


def large_tensor(value: int, device: torch.device) -> torch.Tensor:
    """Return `LARGE_BYTES` bytes of int32 elements of one value."""
    return constant_tensor(value, LARGE_BYTES // 4, device)


def distinct_values(tensor: torch.Tensor) -> list[float]:
    """Return the distinct values of a tensor."""
    return sorted(set(tensor.tolist())) if tensor.numel() < 100 else torch.unique(tensor).tolist()


def ring_neighbours(transport: Transport) -> tuple[int, int]:
    """Return (next rank, previous rank) of the ring in rank order."""
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def pass_on(
    transport: Transport, outgoing: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], *after: Fence
) -> Fence:
    """Post sends of `outgoing` to the next rank and receives into `arriving` from the previous rank; return the fence.

    The post waits for the fences in `after`, or, without any, for the compute enqueued so far.
    """
    onward, back = ring_neighbours(transport)
    sends, receives = ([Message(peer, x) for x in given] for peer, given in ((onward, outgoing), (back, arriving)))
    return transport.post(sends=sends, receives=receives, after=after or [transport.mark()])


@case
def messages_between_two_ranks_arrive_in_order(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    arrived: list[torch.Tensor] = []
    fences: list[Fence] = []
    for post in range(4):  # several posts in flight, three messages of one size in each
        outgoing = [constant_tensor(100 * transport.rank + 3 * post + index, 1000, device) for index in range(3)]
        incoming = [constant_tensor(-1, 1000, device) for _ in range(3)]
        arrived += incoming
        fences.append(pass_on(transport, outgoing, incoming))
    for fence in fences:
        fence.wait()
    expect([int(tensor[0]) for tensor in arrived], [100 * back + index for index in range(12)])
    expect({len(distinct_values(tensor)) for tensor in arrived}, {1}, "the number of values in a message")


@case
def all_sizes_and_dtypes_arrive_unchanged(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)

    def payload(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    kinds = [
        (dtype, shape)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for shape in ((1,), (3, 5), (2, 33, 7), ())
    ]
    kinds.append((torch.float32, (LARGE_BYTES // 4,)))
    arriving = [torch.zeros(shape, dtype=dtype, device=device) for dtype, shape in kinds]
    pass_on(transport, [payload(transport.rank, *kind) for kind in kinds], arriving).wait()
    for kind, arrived in zip(kinds, arriving, strict=True):
        expect(arrived, payload(back, *kind), f"{kind}")


@case
def slots_can_be_reused_around_the_ring(transport: Transport, device: torch.device) -> None:
    slots = Slots(3, device)
    specs = [((64, 8), torch.float32), ((5,), torch.float16)]
    slots.reserve(4096)
    current: Sequence[torch.Tensor] = [torch.full(shape, transport.rank, dtype=dtype) for shape, dtype in specs]
    current = [tensor.to(device) for tensor in current]
    held = None
    for hop in range(40):
        slot = hop % slots.count
        arriving = slots.tensors(slot, specs)
        fence = pass_on(transport, current, arriving, *slots.pop_uses(slot), transport.mark())
        slots.add_use(slot, fence)
        if held is not None:
            slots.add_use(held, fence)  # the post sends from this slot
        if (hop + transport.rank) % 7 == 0:
            time.sleep(0.002)  # lets the ranks drift apart
        fence.wait()
        expected = (transport.rank - hop - 1) % transport.size
        expect([distinct_values(tensor) for tensor in arriving], [[expected]] * len(arriving), f"hop {hop}")
        current, held = arriving, slot
    slots.drain()


@case
def one_post_exchanges_with_both_neighbours(transport: Transport, device: torch.device) -> None:
    onward, back = ring_neighbours(transport)
    for _ in range(3):
        sends = [
            Message(onward, constant_tensor(transport.rank, 10, device)),
            Message(back, constant_tensor(-transport.rank, 10, device)),
        ]
        receives = [Message(back, constant_tensor(99, 10, device)), Message(onward, constant_tensor(99, 10, device))]
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        expect([int(message.tensor[3]) for message in receives], [back, -onward])


@case
def a_rank_can_send_to_itself(transport: Transport, device: torch.device) -> None:
    onward, back = ring_neighbours(transport)
    mine, sums = constant_tensor(7, 33, device), torch.randn(5, 3, device=device)
    copies = (constant_tensor(0, 33, device), torch.zeros(5, 3, device=device))
    sends = [Message(transport.rank, mine), Message(transport.rank, sums)]
    receives = [Message(transport.rank, tensor) for tensor in copies]
    transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
    expect(copies[0], mine)
    expect(copies[1], sums)

    neighbour = constant_tensor(0, 33, device)
    copies[0].zero_()
    transport.post(
        sends=[Message(onward, constant_tensor(transport.rank, 33, device)), Message(transport.rank, mine)],
        receives=[Message(back, neighbour), Message(transport.rank, copies[0])],
        after=[transport.mark()],
    ).wait()
    expect(copies[0], mine)
    expect(neighbour, constant_tensor(back, 33, device))


@case
def sends_wait_for_the_fences_in_after(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    outgoing, arrived = constant_tensor(-1, 1000, device), constant_tensor(-2, 1000, device)

    def write() -> None:
        outgoing.fill_(transport.rank)
        if device.type == "cuda":  # the fence blocks the host
            torch.cuda.synchronize(device)

    pass_on(transport, [outgoing], [arrived], CallbackFence(write)).wait()
    expect(arrived, constant_tensor(back, 1000, device))


@case
def receives_wait_for_the_fences_in_after(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    arrived, readings = large_tensor(-2, device), list[float]()

    def still_reading() -> None:
        time.sleep(0.05 * (1 + transport.rank))
        readings.extend(distinct_values(arrived))

    pass_on(transport, [large_tensor(transport.rank, device)], [arrived], CallbackFence(still_reading)).wait()
    expect(readings, [-2], "the values in the buffer before its fence was over")
    expect(distinct_values(arrived), [back])


@case
def a_post_can_send_what_an_earlier_post_receives(transport: Transport, device: torch.device) -> None:
    first, second = large_tensor(-1, device), large_tensor(-1, device)
    arrived = pass_on(transport, [large_tensor(transport.rank, device)], [first])
    # Send a tensor that is still arriving, as a ring that runs ahead does.
    pass_on(transport, [first], [second], arrived).wait()
    expect(distinct_values(second), [(transport.rank - 2) % transport.size])
    arrived.wait()


@case
def many_posts_can_be_queued_before_any_wait(transport: Transport, device: torch.device) -> None:
    """Send twice around the ring, posting every hop before waiting for any."""
    held = constant_tensor(transport.rank, 1000, device)
    fences: list[Fence] = [transport.mark()]
    for _ in range(2 * transport.size):
        arriving = constant_tensor(-1, 1000, device)
        # Each fence holds its tensors until it has been waited for.
        fences.append(pass_on(transport, [held], [arriving], fences[-1], transport.mark()))
        held = arriving
    for fence in reversed(fences):
        fence.wait()
    expect(distinct_values(held), [transport.rank])


@case
def done_becomes_true_without_a_wait(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    wait_until(transport.mark().done)  # a device passes a point some time after the host
    arrived = large_tensor(-1, device)
    fence = pass_on(transport, [large_tensor(transport.rank, device)], [arrived])
    wait_until(fence.done)  # a fence is done without anyone waiting for it
    fence.wait()
    expect(distinct_values(arrived), [back])
    expect(fence.done(), True, "done() of a fence that is over")


@case
def a_sent_buffer_can_be_overwritten_after_the_wait(transport: Transport, device: torch.device) -> None:
    onward, back = ring_neighbours(transport)
    outgoing, arrived = large_tensor(5 + transport.rank, device), large_tensor(0, device)
    sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
    if transport.size == 1:
        sent = received = pass_on(transport, [outgoing], [arrived])
    elif transport.rank % 2 == 0 and transport.rank + 1 < transport.size:
        sent = transport.post(sends=sends, receives=[], after=[transport.mark()])
        sent.wait()
        outgoing.fill_(-1)  # a late receiver must still get the old values
        received = transport.post(sends=[], receives=receives, after=[transport.mark()])
    else:
        time.sleep(0.1)
        received = transport.post(sends=[], receives=receives, after=[transport.mark()])
        sent = transport.post(sends=sends, receives=[], after=[transport.mark()])
    sent.wait()
    outgoing.fill_(-1)
    received.wait()
    expect(distinct_values(arrived), [5 + back])


@case
def a_fence_can_be_waited_for_repeatedly(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    arrived = constant_tensor(0, 4, device)
    fence = pass_on(transport, [constant_tensor(transport.rank, 4, device)], [arrived])
    for _ in range(3):
        fence.wait()
    mark = transport.mark()
    for _ in range(2):
        mark.wait()
    transport.post(sends=[], receives=[], after=[fence, mark]).wait()
    expect(int(arrived[0]), back)


@case
def transfers_do_not_affect_autograd(transport: Transport, device: torch.device) -> None:
    _, back = ring_neighbours(transport)
    weight = torch.full((6,), float(transport.rank), device=device, requires_grad=True)
    doubled = weight * 2
    arrived = torch.zeros(6, device=device)
    pass_on(transport, [doubled], [arrived]).wait()
    torch.autograd.backward(doubled.sum())
    expect(weight.grad is not None and distinct_values(weight.grad), [2.0], "the gradient")
    expect(arrived.requires_grad, False, "requires_grad of the received tensor")
    expect(distinct_values(arrived), [2.0 * back])


@case
def gather_returns_values_in_rank_order(transport: Transport, device: torch.device) -> None:
    for step in range(3):
        gathered = transport.gather({"rank": transport.rank, "step": step, "shape": [1, transport.rank]})
        expect(gathered, [{"rank": rank, "step": step, "shape": [1, rank]} for rank in range(transport.size)])
    expect(transport.gather(None), [None] * transport.size)


@case
def invalid_messages_raise_before_anything_is_sent(transport: Transport, device: torch.device) -> None:
    me, tensor = transport.rank, constant_tensor(0, 6, device)
    wrong: list[tuple[list[Message], list[Message]]] = [
        ([Message(transport.size, tensor)], []),  # no such peer
        ([], [Message(-1, tensor)]),
        ([Message(0, constant_tensor(0, 12, device)[::2])], []),  # not contiguous
        ([], [Message(0, constant_tensor(0, 0, device))]),  # no bytes
        ([Message(0, tensor.to("meta"))], []),  # another device
        ([Message(me, tensor)], []),  # sent to itself, but never received
        ([Message(me, tensor)], [Message(me, tensor[:3])]),
    ]
    for sends, receives in wrong:
        with expect_error(ValueError):
            transport.post(sends=sends, receives=receives)
    transport.gather(None)  # nothing was sent, so the transport still works


@case
def warm_up_works_for_every_pair_of_ranks(transport: Transport, device: torch.device) -> None:
    ranks = range(transport.size)
    for _ in range(2):
        transport.warm_up([*itertools.permutations(ranks, 2), *((rank, rank) for rank in ranks)])
    for edge in ((0, transport.size), (-1, 0)):
        with expect_error(ValueError):
            transport.warm_up([edge])


@case
def posts_after_an_abort_raise_its_reason(transport: Transport, device: torch.device) -> None:
    transport.gather(None)  # do not abort during another rank's last transfer
    transport.abort("somebody said so")
    transport.abort("for the second time")
    for _ in range(2):
        with expect_error(TransportError, "somebody said so"):
            transport.post(sends=[], receives=[])
    transport.close()


def abort_ends_a_blocked_receive(transport: Transport, device: torch.device) -> None:
    """Abort rank 0's receive from another thread, without any sender. The other ranks wait until that is over."""
    onward, back = ring_neighbours(transport)
    if transport.size == 1:  # a single rank never waits
        return
    transport.gather(None)
    fences: list[Fence] = []
    if transport.rank == 0:
        timer = threading.Timer(0.1, transport.abort, ["it took too long"])
        timer.start()
        with expect_error(TransportError, "it took too long"):
            for peer in (onward, back):
                fences.append(transport.post(sends=[], receives=[Message(peer, constant_tensor(0, 1000, device))]))
            for fence in fences:
                fence.wait()
        timer.join()
        with suppress(TransportError):
            transport.gather(None)
    else:
        with suppress(TransportError):  # rank 0's abort also reaches virtual ranks
            transport.gather(None)
        transport.abort("it took too long")
    for fence in fences:
        expect(fence.done(), True, "done() of a fence that is over")
        with expect_error(TransportError, "it took too long"):
            fence.wait()
    with expect_error(TransportError, "it took too long"):
        transport.post(sends=[], receives=[])


def abort_ends_a_post_that_waits(transport: Transport, device: torch.device) -> None:
    """Abort while a post waits for its `after`. The post must not move its messages any more."""
    _, back = ring_neighbours(transport)
    own, neighbours = constant_tensor(-1, 10, device), constant_tensor(-1, 10, device)
    sent = constant_tensor(transport.rank, 10, device)
    transport.gather(None)
    aborting = CallbackFence(partial(transport.abort, "it took too long"))
    sends = [Message(peer, sent) for peer in dict.fromkeys((transport.rank, ring_neighbours(transport)[0]))]
    receives = [Message(peer, x) for peer, x in {transport.rank: own, back: neighbours}.items()]
    with expect_error(TransportError, "it took too long"):
        transport.post(sends=sends, receives=receives, after=[aborting]).wait()
    time.sleep(0.05)  # a transfer thread may still run
    expect([distinct_values(x) for _, x in receives], [[-1]] * len(receives))


HOST_CASES |= {case.__name__: case for case in (abort_ends_a_post_that_waits, abort_ends_a_blocked_receive)}


@case
def close_can_be_called_twice(transport: Transport, device: torch.device) -> None:
    transport.gather(None)  # do not close during another rank's last transfer
    transport.close()
    transport.close()
    with expect_error(TransportError, "closed"):
        transport.post(sends=[], receives=[])
