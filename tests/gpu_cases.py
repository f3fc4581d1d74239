"""What a transport on a GPU must do beside what every transport must, and the rings that run over each.

The functions of `GPU_CASES` are like those of `transport_cases`; the rings are compared with the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.bench.wire_errors import ring as wired_ring
from ringattn.comm import Message, Topology, Transport
from ringattn.ring import longformer
from ringattn.ring.wire import grad_wire_of, wire_of

from .baselines import Results, exact, pytorch
from .mask_cases import Case as MaskCase
from .mask_cases import compare
from .ring_cases import LAYOUTS, check_results, inputs
from .tolerance import assert_as_exact_as_pytorch
from .transport_cases import CASES, LARGE, Case, eventually, filled, neighbours, values

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
        assert eventually(fence)
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
    call: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)
    """More arguments of the call; tensors are taken to the device of the ring."""

    def fits(self, transport: str, world: int) -> bool:
        """Copy engines join the ranks of one node: the level between nodes would be another transport's."""
        return not self.two_level or (world == 4 and transport != "copy_engine")


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
    "longformer": RingCase("contiguous", causal=False, call={"block_mask": longformer(64, [(0, 5), (200, 210)])}),
}


def ring_arguments(case: RingCase, world: int) -> dict[str, Any]:
    """Of :class:`Ring`."""
    return case.ring | ({"topology": Topology.grid(2, world // 2)} if case.two_level else {})


def drawn(case: RingCase) -> dict[str, Tensor]:
    """The same whole sequence on every rank. A wire is held against a reference that has no gradient through lse."""
    torch.manual_seed(7)
    whole = inputs(TOKENS, HEADS, (HEAD_DIM, HEAD_DIM), case.dtype)
    return whole | {"dlse": torch.zeros_like(whole["dlse"])} if wired(case) else whole


def wired(case: RingCase) -> bool:
    return bool({"wire_dtype", "grad_wire_dtype"} & {*case.ring})


def check_case(case: RingCase, ours: Results, world: int, backend: str) -> None:
    """As exact as PyTorch; with a wire, as PyTorch would be on what arrives."""
    whole = drawn(case)
    if case.call:
        call = case.call | {"causal": case.causal, "backend": backend}
        return compare(MaskCase(LAYOUTS[case.layout](TOKENS, world), whole, call), ours)
    if not wired(case):
        return check_results(ours, whole, causal=case.causal, backend=backend)
    tensors = [whole[name] for name in ("q", "k", "v", "dout")]
    tokens = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    theirs, plain = pytorch(*tensors, seen=tokens), exact(*tensors, causal=True)
    truth = wired_ring(
        (tensors[0], tensors[1], tensors[2], tensors[3]),
        wire=wire_of(case.ring.get("wire_dtype"), case.dtype),
        grad_wire=grad_wire_of(case.ring.get("grad_wire_dtype")),
        world=world,
    )
    for name, right in truth._asdict().items():
        usual = getattr(theirs, name).double() - getattr(plain, name)
        assert_as_exact_as_pytorch(name, getattr(ours, name), right + usual, right)
