"""Cases that need a GPU: transfers in stream order, CUDA graphs, torch.compile, and a killed rank."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ... import reference
from ...comm import LocalGroup, LocalWorld, Message, Transport
from ...comm.testing import LARGE_BYTES, constant_tensor, distinct_values, expect, ring_neighbours
from ...comm.watchdog.watch import EXIT_CODE
from ...ring import Layout, Ring, ring_attention
from ..common.cases import MeasuredNumber, relative_distance
from ..common.launching import start_processes
from ..common.ranks import launched_rank
from ..kernels.speed import AGREEMENT_LIMITS

BUSY_SECONDS = 4.0  # for a blocked stream: far more than an abort takes to free it
CYCLES_PER_SECOND = 2e9  # roughly, of recent GPUs
SEGMENT = 32 << 20  # bytes: too large for torch's allocator to share a segment, so that freeing it frees memory
CAPTURE_SECONDS = 1.0  # many ticks of the watchdog
DEADLINE, GRACE = 3.0, 2.0  # seconds, for the ring with a killed rank
STEPS_BEFORE_KILL = 3


def hold_stream(seconds: float) -> None:
    """Enqueue a kernel that keeps the current stream busy for about ``seconds``."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def compute_is_waited_for_both_ways(transport: Transport, device: torch.device) -> None:
    """Check that a send waits for slow compute before it, and that compute waits for a receive."""
    onward, back = ring_neighbours(transport)
    outgoing, arrived = constant_tensor(-1, LARGE_BYTES, device), constant_tensor(-1, LARGE_BYTES, device)
    for step in range(1, 20):
        hold_stream(0.5e-3)
        outgoing.fill_(100 * step + transport.rank)
        sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        doubled = 2 * arrived
        arrived.fill_(-1)
        expect(distinct_values(doubled), [2 * (100 * step + back)])


def a_graph_replays_transfers(transport: Transport, device: torch.device) -> None:
    """Check that a CUDA graph of transfers can be replayed on other data."""
    onward, back = ring_neighbours(transport)
    outgoing, arrived = constant_tensor(0, LARGE_BYTES, device), constant_tensor(-1, LARGE_BYTES, device)
    sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]

    def step() -> None:
        outgoing.add_(1)
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        arrived.mul_(2)

    step()  # connects
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):
            step()
    outgoing.fill_(10 * transport.rank)
    for replay in range(1, 4):
        arrived.fill_(-1)
        graph.replay()
        expect(distinct_values(arrived), [2 * (10 * back + 3 * replay)])
    step()  # eager transfers work after the graph
    expect(distinct_values(arrived), [2 * (10 * back + 10)])


def memory_is_given_back_while_peers_know_it(transport: Transport, device: torch.device) -> None:
    """Check that peers receive the new data after memory that they had mapped was freed and allocated again."""
    onward, back = ring_neighbours(transport)
    for step in range(6):
        outgoing = constant_tensor(100 * step + transport.rank, (1 + step % 2) * SEGMENT // 4, device)
        arrived = torch.empty_like(outgoing)
        sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
        fence = transport.post(sends=sends, receives=receives, after=[transport.mark()])
        fence.wait()
        expect(distinct_values(arrived), [100 * step + back])
        del sends, receives, fence, outgoing, arrived
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    transport.gather(None)


TRANSFER_CASES: dict[str, tuple[Callable[[Transport, torch.device], None], ...]] = {
    "local": (compute_is_waited_for_both_ways,),
    "nccl": (
        compute_is_waited_for_both_ways, a_graph_replays_transfers, memory_is_given_back_while_peers_know_it,
    ),
    "nccl_one_sided": (compute_is_waited_for_both_ways, memory_is_given_back_while_peers_know_it),
}  # fmt: skip
"""GPU cases by transport, in addition to those of :mod:`ringattn.comm.testing`."""


def capture_case(device: torch.device) -> Iterator[MeasuredNumber]:
    """Check that an unrelated CUDA graph can be captured in global mode while the watchdog polls a ring."""
    world, rows = 2, 64
    layout, posted, capture_ended = Layout.zigzag(rows, world), threading.Barrier(world, timeout=60), threading.Event()
    tensors = [torch.randn(1, rows, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def capture() -> Tensor:
        x, graph = torch.ones(1000, device=device), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        x.mul_(2)  # load its kernel, which a capture cannot
        side.wait_stream(torch.cuda.current_stream(device))
        posted.wait()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="global")  # `torch.cuda.graph` would first wait for the ring
            x.mul_(2)
            time.sleep(CAPTURE_SECONDS)
            graph.capture_end()
            x.fill_(1)
            graph.replay()
        side.synchronize()
        return x

    def run_rank(group: LocalGroup) -> Tensor:
        q, k, v = (layout.shard(x, group.rank()) for x in tensors)
        with Ring(group, transport="local", deadline=30) as ring:
            call = partial(ring_attention, q, k, v, layout=layout, ring=ring, causal=True)
            call()
            torch.cuda.synchronize(device)
            if group.rank() == 0:
                hold_stream(BUSY_SECONDS)  # hops wait while the watchdog polls them
            out = call()
            if group.rank() == 0:
                expect(distinct_values(capture()), [2], "what the graph replayed")
                capture_ended.set()
            else:
                posted.wait()
                expect(capture_ended.wait(2 * BUSY_SECONDS + CAPTURE_SECONDS), True, "whether the capture ended")
            torch.cuda.synchronize(device)
            return out

    with LocalWorld(world, device=device) as ranks:
        out = layout.unshard(ranks.run(run_rank))
    exact, _ = reference.attention(*tensors, causal=True)
    limit = AGREEMENT_LIMITS["bfloat16"]
    yield MeasuredNumber("difference from float64", relative_distance([out], [exact]), "relative", limit=limit)


def torch_compile_case(device: torch.device) -> Iterator[MeasuredNumber]:
    """Count elements of out and gradients whose bits differ between torch.compile and eager mode."""
    leaves = [torch.randn(1, 96, heads, 64, device=device).bfloat16().requires_grad_() for heads in (4, 2, 2)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, causal=True)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    changed = sum(int((a != b).sum()) for a, b in zip(*results, strict=True))
    yield MeasuredNumber("different from eager", changed, "elements", limit=0)


def killed_rank_case(device: torch.device, *, transport: str, world: int = 2) -> Iterator[MeasuredNumber]:
    """Kill a rank while its peers' streams wait for it; each peer must exit with an error within the deadline."""
    ends: dict[int, float] = {}
    with start_processes(world, train_until_killed, transport, device.type) as (_, ranks):
        while len(ends) < world:
            ends |= {i: time.monotonic() for i, rank in enumerate(ranks) if i not in ends and rank.poll() is not None}
            time.sleep(0.01)
    *codes, victim = (rank.returncode for rank in ranks)
    labels = {"by": transport, "exit codes": f"{codes}"}
    unexpected = sum(code not in (1, EXIT_CODE) for code in codes) + (victim != -signal.SIGKILL)
    yield MeasuredNumber("ranks with another exit code", unexpected, "ranks", labels, limit=0)
    late = max(ends.values()) - ends[world - 1]
    yield MeasuredNumber("time until the last rank ended", late, "s", labels, limit=DEADLINE + GRACE)


def train_until_killed(transport: str, kind: str) -> None:
    """Run steps as one rank without end; the last rank kills itself after some steps."""
    place = launched_rank()
    assert place is not None
    device = place.shared_device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    layout = Layout.zigzag(499, place.world)
    inputs = [torch.randn(2, 499, heads, 64, device=device) for heads in (4, 2, 2)]
    q, k, v = (layout.shard(x, place.rank).requires_grad_() for x in inputs)
    ring = Ring(transport=transport, deadline=DEADLINE)
    for step in itertools.count():
        torch.autograd.backward(ring_attention(q, k, v, layout=layout, ring=ring, causal=True).sum())
        if kind == "cuda":
            torch.cuda.synchronize(device)
        if step == STEPS_BEFORE_KILL and place.rank == place.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
