"""Conformance cases for process groups on the CPU, run in real processes over gloo.

They come on top of the cases in `transport_cases` that every transport must pass.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringattn.comm import (
    Limits,
    Message,
    ProcessGroupTransport,
    Transport,
    TransportError,
    control,
    open_transport,
    register_transport,
    unregister_transport,
)
from ringattn.comm.transport import ring_edges

from .transport_cases import (
    CASES,
    CPU,
    HANGS,
    HOST_CASES,
    constant_tensor,
    distinct_values,
    error_traceback,
    ring_neighbours,
    wait_until,
)

# Each case has its own group, because some leave it broken.
GROUP_CASES: dict[str, Callable[[dist.ProcessGroup], None]] = {}

# Seconds that a rank waits for another one after a failure.
PATIENCE = timedelta(seconds=HANGS)


def group_case(function: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    GROUP_CASES[function.__name__] = function
    return function


@group_case
def a_throttled_link_takes_its_time(group: dist.ProcessGroup) -> None:
    transport = ProcessGroupTransport(group, CPU, limits=Limits(bytes_per_second=10e6))
    onward, back = ring_neighbours(transport)
    first, second = torch.zeros(100_000), torch.zeros(100_000)  # 40 ms each
    dist.barrier(group)
    started = time.monotonic()
    first_fence = transport.post(sends=[Message(onward, torch.ones(100_000))], receives=[Message(back, first)])
    second_fence = transport.post(sends=[Message(onward, first)], receives=[Message(back, second)], after=[first_fence])
    assert not first_fence.done() or time.monotonic() - started >= 0.04
    first_fence.wait()
    assert time.monotonic() - started >= 0.04
    second_fence.wait()
    assert time.monotonic() - started >= 0.08
    assert distinct_values(second) == [1]


@group_case
def transports_of_one_group_do_not_mix(group: dist.ProcessGroup) -> None:
    """Post messages of one size between the same two ranks in opposite orders."""
    transports = [ProcessGroupTransport(group, CPU) for _ in range(2)]
    onward, back = ring_neighbours(transports[0])
    arrived = [constant_tensor(-1, 10, CPU) for _ in transports]
    stray = constant_tensor(99, 10, CPU)  # and one message sent by the user
    works = [dist.isend(stray, group=group, group_dst=onward)]
    fences = {}
    for index in (0, 1) if group.rank() % 2 else (1, 0):
        sends = [Message(onward, constant_tensor(index, 10, CPU))]
        fences[index] = transports[index].post(sends=sends, receives=[Message(back, arrived[index])])
        time.sleep(0.05)
    for fence in fences.values():
        fence.wait()
    assert [distinct_values(tensor) for tensor in arrived] == [[0], [1]]
    dist.recv(stray, group=group, group_src=back)
    for work in works:
        assert work is not None
        work.wait()


@group_case
def buffers_of_inference_mode_are_taken(group: dist.ProcessGroup) -> None:
    transport = ProcessGroupTransport(group, CPU)
    onward, back = ring_neighbours(transport)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            arrived, copied = constant_tensor(-1, 10, CPU), constant_tensor(-1, 10, CPU)
            own_rank = constant_tensor(transport.rank, 10, CPU)
            sends = [Message(onward, own_rank), Message(transport.rank, own_rank)]
            receives = [Message(back, arrived), Message(transport.rank, copied)]
            transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
            assert (distinct_values(arrived), distinct_values(copied)) == ([back], [transport.rank])


@group_case
def auto_falls_back_where_one_rank_alone_failed(group: dist.ProcessGroup) -> None:
    def flaky(group: dist.ProcessGroup, device: torch.device, *, control: Any, **_: object) -> Transport:
        if group.rank() == 1:
            control.new_scope("process_group").gather(0, what="the tag")  # now the ranks' counters differ
            raise RuntimeError("out of memory")
        opened.append(ProcessGroupTransport(group, device, control=control))
        opened[-1].name = "flaky"
        return opened[-1]

    opened: list[Transport] = []
    failed = "rank 1: RuntimeError: out of memory"
    register_transport("flaky", flaky, preference=99)
    register_transport("never", flaky, preference=98, unavailable=lambda *_: "of another kind")
    try:
        transport = open_transport(group, device="cpu")
        with pytest.raises(TransportError, match=f"^{failed}$"):
            open_transport(group, transport="flaky", device="cpu")
    finally:
        unregister_transport("flaky")
        unregister_transport("never")
    never = "never: of another kind (rank 0)"
    assert transport.reason == f"auto selected process_group; not {never}; not flaky: {failed}"
    transport.post(sends=[], receives=[]).wait()
    for other in opened:
        with pytest.raises(TransportError, match="is closed"):
            other.post(sends=[], receives=[])


@group_case
def peers_feel_an_abort(group: dist.ProcessGroup) -> None:
    """Abort on rank 0; its peers notice by the connection, long before the group's timeout."""
    transport = ProcessGroupTransport(group, CPU)
    onward, back = ring_neighbours(transport)
    messages = [Message(onward, constant_tensor(0, 1000, CPU)), Message(back, constant_tensor(0, 1000, CPU))]
    transport.warm_up(ring_edges(range(transport.size)))
    fence = transport.post(sends=[], receives=messages)
    if transport.rank == 0:
        wait_until(lambda: transport._transfer_thread._running)
        time.sleep(0.1)  # the other ranks may start their transfers later
        transport.abort("it took too long")
    with pytest.raises(TransportError, match="it took too long" if transport.rank == 0 else "failed: .*onnection"):
        fence.wait()


@group_case
def a_warm_up_has_a_deadline(group: dist.ProcessGroup) -> None:
    """Warm up on rank 0 only."""
    transport = ProcessGroupTransport(group, CPU)
    transport._timeout = 0.2  # only for the warm-up, because ranks may open late
    if transport.rank == 0:
        with pytest.raises(TransportError, match=r"no answer from rank 1.* within 0\.4 s"):
            transport.warm_up([(0, 1), (1, 0)])
        with pytest.raises(TransportError, match=r"was aborted: its warm-up took more than 0\.2 s"):
            transport.post(sends=[], receives=[])


def group_ranks(world: int, processes: int) -> list[int]:
    """Return the highest ``world`` global ranks, so that group ranks and global ranks differ where possible."""
    return list(range(processes - world, processes))


def run_cases(rank: int, pipe: Connection, folder: Path) -> None:
    """Run every case on groups of every size, and send the traceback of each case, or "".

    Stops at the first failure, because the peers are out of step after it.
    """
    pytest.MonkeyPatch().setattr(control, "DEFAULT_TIMEOUT", PATIENCE.total_seconds())
    results: dict[str, str] = {}
    processes = dist.get_world_size()
    worlds = (2, 3, processes)
    alone = [*HOST_CASES, *GROUP_CASES]
    groups = {
        (world, name): dist.new_group(group_ranks(world, processes), timeout=PATIENCE)
        for world, name in itertools.product(worlds, ["all", *alone])
    }
    meeting = dist.new_group(timeout=2 * PATIENCE)
    try:
        for world in worlds:
            for name in [*CASES, *alone] if rank in group_ranks(world, processes) else []:
                group = groups[world, name if name in alone else "all"]
                results[f"{name}-{world}"] = error_traceback(run_case, group, name)
                if results[f"{name}-{world}"]:
                    return
            dist.barrier(meeting)  # no rank times out on ranks that are still busy in a smaller world
        results["a_dead_peer"] = error_traceback(a_dead_peer, rank, processes, folder / "posted")
    finally:
        pipe.send(results)
        os._exit(0)  # exit at once, so that the peers of a failed or deliberately dead rank notice


def run_case(group: dist.ProcessGroup, name: str) -> None:
    if name in GROUP_CASES:
        return GROUP_CASES[name](group)
    transport = ProcessGroupTransport(group, CPU)
    assert (transport.rank, transport.size) == (dist.get_rank(group), dist.get_world_size(group))
    (CASES | HOST_CASES)[name](transport, CPU)


def a_dead_peer(rank: int, processes: int, posted: Path) -> None:
    """Let the other ranks die, and check that rank 0 gets the same error at every wait."""
    transport = open_transport(device="cpu")
    if rank != 0:
        return wait_until(posted.exists)
    fence = transport.post(sends=[], receives=[Message(processes - 1, torch.zeros(6))])
    posted.touch()
    for _ in range(2):
        with pytest.raises(TransportError, match=f"rank 0: receive of 24 bytes from rank {processes - 1} failed"):
            fence.wait()
