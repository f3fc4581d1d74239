"""What moves between ranks on one device: virtual ranks against one launch, and NCCL sending to itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..comm import LocalGroup, LocalWorld, Message, open_transport
from ..comm.nccl import nccl_missing
from ..kernels import attention_backward, attention_forward
from ..ring import Layout, ring_attention
from .candidates import DTYPES, sdpa
from .cases import NotHere, Number, distance
from .device_cases import synchronize
from .flops import BACKWARD_FLOPS, forward_flops, pairs_of
from .speed import AGREE, causal_bounds
from .timing import Clock, interleaved

POISON = 0xFF  # a NaN of every float type
HOST_CLOCK = torch.device("cpu")  # LocalWorld.run returns when its streams are over: the host's clock sees all of it


def local_world(
    device: torch.device,
    *,
    world: int = 4,
    tokens: int = 8192,
    heads: tuple[int, int] = (16, 16),
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 10,
) -> Iterator[Number]:
    """Causal forward and backward, zigzag over virtual ranks of one device, against the same in one piece."""
    seqlen = world * tokens
    layout = Layout.zigzag(seqlen, world)
    given = tuple(
        torch.randn(1, seqlen, count, head_dim, device=device).to(DTYPES[dtype])
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    # ranks keep their shards, as they do in a training step: cutting and joining are not timed
    shards = [tuple(layout.shard(x, rank) for x in given) for rank in range(world)]

    def of_rank(group: LocalGroup) -> tuple[Tensor, ...]:
        *inputs, dout = shards[group.rank()]
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ring_attention(*leaves, layout=layout, group=group, causal=True)
        assert isinstance(out, Tensor)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    labels = {"world": world, "tokens per rank": tokens, "dtype": dtype, "head_dim": head_dim}
    with LocalWorld(world, device=device) as ranks:
        sharded = [layout.unshard(parts) for parts in zip(*ranks.run(of_rank), strict=True)]
        yield Number(
            "difference from one piece", distance(sharded, in_one_piece(*given)), "relative", labels, AGREE[dtype]
        )
        steps = {"LocalWorld": lambda: ranks.run(of_rank), "one piece": lambda: in_one_piece(*given)}
        taken = interleaved(steps, Clock(HOST_CLOCK), repeats=repeats)
    once = forward_flops(pairs_of(seqlen, causal=True), heads=heads[0], head_dim=head_dim)
    for name, samples in taken.items():
        told = {**labels, "by": name}
        yield Number("forward and backward time", samples.median * 1e3, "ms", told, spread=samples.spread)
        rate = once * (1 + BACKWARD_FLOPS) / samples.median / 1e12
        yield Number("forward and backward", rate, "TFLOP/s", told, spread=samples.spread)
    ratio = taken["LocalWorld"].median / taken["one piece"].median
    yield Number("LocalWorld over one piece", ratio, "times", labels)


def in_one_piece(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Our kernels in one launch each on a GPU, PyTorch's attention on the CPU; over when it returns."""
    if q.device.type == "cuda":
        limits = causal_bounds(q, k)
        out, lse = attention_forward(q, k, v, bounds=limits)
        grads = attention_backward(dout, q, k, v, out, lse, bounds=limits)
        synchronize(q.device)
        return (out, *grads)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(leaves[0], leaves[1], leaves[2], causal=True)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def nccl_to_itself(
    device: torch.device, *, nbytes: tuple[int, ...] = (1 << 20, 1 << 24, 1 << 28, 1 << 30)
) -> Iterator[Number]:
    """A one-rank communicator through CuPy: it proves pointers, streams and events, not a link."""
    missing = nccl_missing()
    if missing:
        raise NotHere(missing)
    transport = open_transport(transport="nccl", device=device)
    try:
        clock = Clock(device)
        for count in nbytes:
            labels = {"bytes": count}
            source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
            target = torch.full_like(source, POISON)

            def post(source: Tensor = source, target: Tensor = target) -> None:
                after = [transport.mark()]
                transport.post(sends=[Message(0, source)], receives=[Message(0, target)], after=after).wait()

            post()
            # compared on the compute stream, which has been held back by the fence: an early read would see the poison
            yield Number("wrong bytes", int((source != target).sum()), "bytes", labels, limit=0)
            samples = interleaved({"post": post}, clock, repeats=20, warmup=3)["post"]
            yield Number("sent to itself", count / samples.median / 1e9, "GB/s", labels, spread=samples.spread)
    finally:
        transport.close()
