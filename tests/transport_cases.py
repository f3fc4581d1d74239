"""What every transport must do, as functions of an open transport.

Imported by the tests for transports of this process; run as a script for those that need real ones:
`python transport_cases.py PROCESSES FOLDER` runs every case in that many processes over gloo. Each leaves one JSON file
in the folder: for each case that it ran the traceback of its failure, or "" where there was none.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.comm import Fence, Message, Slots, Transport, TransportError, open_transport

Case = Callable[[Transport, torch.device], None]
CASES: dict[str, Case] = {}

# More than any backend buffers on its own: a send of this size is only over once its receiver takes it.
LARGE = 1 << 20
# of one rank with another, where something went wrong
PATIENCE = timedelta(seconds=5)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Calling:
    """A fence that calls a function when it is waited for."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.function()


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
    seen: list[float] = []

    def still_reading() -> None:
        time.sleep(0.05 * (1 + transport.rank))
        seen.extend(values(arrived))

    sends = [Message(onward, filled(transport.rank, LARGE // 4, device))]
    reading = Calling(still_reading)
    transport.post(sends=sends, receives=[Message(back, arrived)], after=[reading]).wait()
    assert seen == [-2]
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
        gathered = transport.gather({"rank": transport.rank, "step": step, "shape": (1, transport.rank)})
        assert gathered == [{"rank": rank, "step": step, "shape": (1, rank)} for rank in range(transport.size)]
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


@case
def closing_twice_is_fine(transport: Transport, device: torch.device) -> None:
    transport.gather(None)  # nobody closes under another rank's last transfer
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match=f"the {transport.name} transport of rank {transport.rank} is closed"):
        transport.post(sends=[], receives=[])


def group_ranks(world: int, processes: int) -> list[int]:
    """Global ranks of a group of `world`: the highest, so that group ranks and global ranks differ where they can."""
    return list(range(processes - world, processes))


def run_cases(rank: int, processes: int, folder: Path) -> None:
    """Run every case on a group of every size, up to the first that fails: its peers are out of step from there on."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=PATIENCE,
    )
    results: dict[str, str] = {}
    worlds = (2, 3, processes)
    groups = {world: dist.new_group(group_ranks(world, processes), timeout=PATIENCE) for world in worlds}
    mine = [world for world in worlds if rank in group_ranks(world, processes)]
    try:
        for world, name in itertools.product(mine, CASES):
            results[f"{name}-{world}"] = traceback_of(run_case, groups[world], name)
            if results[f"{name}-{world}"]:
                return
        results["a_dead_peer"] = traceback_of(a_dead_peer, rank, processes, folder / "posted")
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        os._exit(0)  # at once: the peers of a rank that failed, or that is dead on purpose, are to notice it


def run_case(group: dist.ProcessGroup, name: str) -> None:
    transport = open_transport(group, transport="process_group", device="cpu")
    assert (transport.rank, transport.size) == (dist.get_rank(group), dist.get_world_size(group))
    CASES[name](transport, torch.device("cpu"))


def a_dead_peer(rank: int, processes: int, posted: Path) -> None:
    """The other ranks die, rank 0 waits for bytes of one: an error that says so, and the same one at a second wait."""
    transport = open_transport(device="cpu")
    if rank != 0:
        deadline = time.monotonic() + 5
        while not posted.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return
    fence = transport.post(sends=[], receives=[Message(processes - 1, torch.zeros(6))])
    posted.touch()
    for _ in range(2):
        with pytest.raises(TransportError, match=f"rank 0: receive of 24 bytes from rank {processes - 1} failed"):
            fence.wait()


def traceback_of(function: Callable[..., None], *arguments: object) -> str:
    try:
        function(*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""


def main(processes: int, folder: Path) -> int:
    # Forked: torch is imported once, and in this fresh process it has not started a thread yet.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_cases, args=(rank, processes, folder)) for rank in range(processes)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
