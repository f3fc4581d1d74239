"""What a transport on a GPU must do beside what every transport must, and the rings that run over each.

The functions of `GPU_CASES` are like those of `transport_cases`; the rings are compared with the reference.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.bench.common.cases import NotHere
from ringattn.bench.kernels.accuracy import accuracy
from ringattn.comm import LocalGroup, Message, Topology, Transport
from ringattn.reference import attention
from ringattn.ring import longformer

from .baselines import Results
from .mask_cases import Case as MaskCase
from .mask_cases import compare, expected
from .ring_cases import LAYOUTS, check_results, inputs
from .transport_cases import CASES, LARGE, Case, filled, neighbours, until, values

GPU_CASES: dict[str, dict[str, Case]] = {"local": {}, "nccl": {}, "copy_engine": {}, "process_group": {}}

BUSY_SECONDS = 4.0  # of a stream that is held: far more than it takes to notice that it was let go
CYCLES_PER_SECOND = 2e9  # about, of any GPU of the last years
SEGMENT = 32 << 20  # bytes: more than torch's allocator cuts from one allocation, so that freeing it frees memory


def gpu_case(*transports: str) -> Callable[[Case], Case]:
    def kept(function: Case) -> Case:
        for name in transports:
            GPU_CASES[name][function.__name__] = function
        return function

    return kept


def cases_of(transport: str) -> dict[str, Case]:
    """All that a transport must do on a GPU."""
    return CASES | GPU_CASES[transport]


def hold(transport: Transport, seconds: float) -> None:
    """Keep the stream busy that the next mark of a transport is on."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def give_back(device: torch.device) -> None:
    """Return what torch's allocator keeps of freed memory to CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@gpu_case("local", "nccl", "copy_engine")
def compute_is_waited_for_both_ways(transport: Transport, device: torch.device) -> None:
    """Values, not only order: slow compute before the send, and compute on what arrived."""
    onward, back = neighbours(transport)
    outgoing, arrived = filled(-1, LARGE, device), filled(-1, LARGE, device)
    for step in range(1, 20):
        hold(transport, 0.5e-3)
        outgoing.fill_(100 * step + transport.rank)
        sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
        transport.post(sends=sends, receives=receives, after=[transport.mark()]).wait()
        doubled = 2 * arrived
        arrived.fill_(-1)
        assert values(doubled) == [2 * (100 * step + back)], step


@gpu_case("nccl")
def a_graph_replays_transfers(transport: Transport, device: torch.device) -> None:
    onward, back = neighbours(transport)
    outgoing, arrived = filled(0, LARGE, device), filled(-1, LARGE, device)
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
        assert values(arrived) == [2 * (10 * back + 3 * replay)]
    step()  # and as before: the last point of the transport is one of a stream again
    assert values(arrived) == [2 * (10 * back + 10)]


@gpu_case("copy_engine")
def an_abort_frees_a_waiting_stream(transport: Transport, device: torch.device) -> None:
    """Rank 0's stream waits for bytes that rank 1 has announced and its own stream is not ready to send."""
    transport.gather(None)
    outgoing, arrived = filled(1, 1000, device), filled(-1, 1000, device)
    if transport.rank == 1:
        hold(transport, BUSY_SECONDS)
        transport.post(sends=[Message(0, outgoing)], receives=[], after=[transport.mark()])
    if transport.rank == 0 and transport.size > 1:
        fence = transport.post(sends=[], receives=[Message(1, arrived)], after=[transport.mark()])
        time.sleep(0.2)
        assert not fence.done(), "it was to wait"
        begun = time.monotonic()
        transport.abort("it took too long")
        until(fence.done)
        assert time.monotonic() - begun < BUSY_SECONDS / 2
    transport.close()


@gpu_case("copy_engine", "nccl")
def memory_is_given_back_while_peers_know_it(transport: Transport, device: torch.device) -> None:
    """What a peer opened is freed and allocated anew, at the same address or another: bytes come from what is there."""
    onward, back = neighbours(transport)
    for step in range(6):
        outgoing = filled(100 * step + transport.rank, (1 + step % 2) * SEGMENT // 4, device)
        arrived = torch.empty_like(outgoing)
        sends, receives = [Message(onward, outgoing)], [Message(back, arrived)]
        fence = transport.post(sends=sends, receives=receives, after=[transport.mark()])
        fence.wait()
        assert values(arrived) == [100 * step + back], step
        del sends, receives, fence, outgoing, arrived
        give_back(device)
    transport.gather(None)


class RingCase(NamedTuple):
    """One call of ``ring_attention``, twice on one ring."""

    layout: str = "zigzag"
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    ring: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    two_level: bool = False
    ulysses: int = 1
    """Ranks that exchange heads for tokens."""
    call: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    """More arguments of the call; tensors are taken to the device of the ring."""

    def fits(self, transport: str, world: int) -> bool:
        """Copy engines join the ranks of one node: the level between nodes would be another transport's. Of a mesh the
        exchange takes what ``auto`` takes."""
        fits_levels = not self.two_level or (world == 4 and transport != "copy_engine")
        return fits_levels and world % self.ulysses == 0


TOKENS, HEADS, HEAD_DIM = 499, (4, 2), 64
BOUNDARIES = [0, 17, 130, 131, 400, TOKENS]

RING_CASES = {
    "flat": RingCase(),
    "fp16, full, the other way": RingCase("striped", torch.float16, causal=False, ring={"direction": -1}),
    "fp32, uneven": RingCase("uneven", torch.float32),
    "blocking": RingCase(ring={"prefetch": 0, "slots": 2}),
    "chunks": RingCase(ring={"chunks": 2}),
    "two levels": RingCase(two_level=True),
    "two levels, chunks": RingCase("contiguous", ring={"chunks": 2, "direction": -1}, two_level=True),
    "K/V as bf16": RingCase("contiguous", torch.float32, ring={"wire_dtype": "bfloat16"}),
    "K/V as fp8": RingCase("contiguous", ring={"wire_dtype": "float8_e4m3fn"}),
    "K/V as fp8, sums as bf16, chunks": RingCase(
        "contiguous", ring={"wire_dtype": "float8_e4m3fn", "grad_wire_dtype": "bfloat16", "chunks": 2}
    ),
    "window to both sides": RingCase("contiguous", causal=False, call={"window_size": (60, 20)}),
    "documents and prefix": RingCase(call={"cu_seqlens": BOUNDARIES, "prefix_length": 150}),
    "padding, softcap and ALiBi": RingCase(
        call={"seqused_k": [0, 300], "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}
    ),
    "dropout, chunks": RingCase(ring={"chunks": 2}, call={"dropout_p": 0.3, "dropout_seed": (1 << 63) + 5}),
    "fp32, dropout and softcap": RingCase(
        "striped", torch.float32, call={"dropout_p": 0.3, "dropout_seed": 7, "softcap": 5.0}
    ),
    "rows of their own": RingCase(call={"cu_seqlens": [[0, 130, TOKENS], [0, 7, 300, TOKENS]], "leftpad_k": [5, 0]}),
    "heads for tokens": RingCase(ulysses=2),
    "heads for tokens, striped": RingCase("striped", torch.float16, causal=False, ulysses=2),
    "longformer": RingCase("contiguous", causal=False, call={"block_mask": longformer(64, [(0, 5), (200, 210)])}),
}


def ring_arguments(case: RingCase, world: int) -> dict[str, Any]:
    """Of :class:`Ring`."""
    return case.ring | ({"topology": Topology.grid(2, world // 2)} if case.two_level else {})


def drawn(case: RingCase) -> dict[str, Tensor]:
    """The same whole sequence on every rank."""
    torch.manual_seed(7)
    return inputs(TOKENS, HEADS, (HEAD_DIM, HEAD_DIM), case.dtype)


def check_case(case: RingCase, ours: Results, world: int, backend: str) -> None:
    """As exact as PyTorch; with a wire, as PyTorch would be on what arrives."""
    whole = drawn(case)
    if case.call or {"wire_dtype", "grad_wire_dtype"} & {*case.ring}:
        call = case.call | {"causal": case.causal, "backend": backend}
        compare(expected(MaskCase(LAYOUTS[case.layout](TOKENS, world), whole, call, ring=case.ring)), ours)
    else:
        check_results(ours, whole, causal=case.causal, backend=backend)


# alone on a GPU, each in a process of its own: `python -m tests.support.gpu_cases NAME`

POLLED = 1.0  # seconds of a capture: many ticks of the watchdog


def captured(device: torch.device) -> None:
    """A graph that has nothing to do with the ring is captured in global mode, while its watchdog polls its hops."""
    world, rows = 2, 64
    layout, posted, over = Layout.zigzag(rows, world), threading.Barrier(world, timeout=60), threading.Event()
    whole = [torch.randn(1, rows, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def replayed() -> Tensor:
        x, graph, side = torch.ones(1000, device=device), torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        x.mul_(2)  # its kernel is loaded: a capture would not
        side.wait_stream(torch.cuda.current_stream(device))
        posted.wait()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="global")  # `torch.cuda.graph` would wait for the ring first
            x.mul_(2)
            time.sleep(POLLED)
            graph.capture_end()
            x.fill_(1)
            graph.replay()
        side.synchronize()
        return x

    def fn(group: LocalGroup) -> Tensor:
        q, k, v = (layout.shard(x, group.rank()) for x in whole)
        with Ring(group, transport="local", deadline=30) as ring:
            call = partial(ring_attention, q, k, v, layout=layout, ring=ring, causal=True)
            call()
            torch.cuda.synchronize(device)
            if group.rank() == 0:
                torch.cuda._sleep(int(BUSY_SECONDS * CYCLES_PER_SECOND))  # the hops wait, and are polled
            out = call()
            assert isinstance(out, Tensor)
            if group.rank() == 0:
                assert values(replayed()) == [2]
                over.set()
            else:
                posted.wait()
                assert over.wait(2 * BUSY_SECONDS + POLLED)
            torch.cuda.synchronize(device)
            return out

    with LocalWorld(world, device=device) as ranks:
        results = layout.unshard(ranks.run(fn))
    alone, _ = attention(*whole, causal=True)
    torch.testing.assert_close(results.double(), alone, rtol=2e-2, atol=2e-2)


def compiled(device: torch.device) -> None:
    """Forward and gradients of a whole graph are eager's, to the bit."""
    leaves = [torch.randn(1, 96, heads, 64, device=device).bfloat16().requires_grad_() for heads in (4, 2, 2)]

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out

    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def hopper(device: torch.device) -> None:
    """The smallest forward and backward that turn every ring of the Hopper kernels around once, with bounds."""
    for number in accuracy(
        device, backend="hopper", dtype="bfloat16", head_dim=64, seqlen=512, heads=(1, 1), causal_worlds=(1,),
        full_worlds=(),
    ):  # fmt: skip
        assert not number.fails, number


ALONE = {function.__name__: function for function in (captured, compiled, hopper)}

if __name__ == "__main__":
    try:
        ALONE[sys.argv[1]](torch.device("cuda", 0))
    except NotHere as missing:
        print(missing)
        sys.exit(os.EX_UNAVAILABLE)
