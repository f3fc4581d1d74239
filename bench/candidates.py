"""Who computes the same attention in ``bench ring``: ours, what people would do otherwise, what they can install."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..ring import Layout, Ring, ring_attention
from .launching import cores
from .usual_ring import usual_ring_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PEER = "ring-attention-pytorch"
PEER_BUCKET = 1024  # its default; one bucket of scores is what it computes at a time
PEER_RUNS = 2  # it takes several times as long as the others


@dataclass(frozen=True)
class Problem:
    """One attention, forward and backward, over the ranks of the default group."""

    seqlen: int
    world: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    layout: str = "zigzag"
    threads: int = 1  # per process
    seed: int = 0

    @cached_property
    def held(self) -> Layout:
        made: Layout = getattr(Layout, self.layout)(self.seqlen, self.world)
        return made

    def tensors(self) -> Tensors:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        draw = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seqlen, count, self.head_dim) for count in heads]
        return tuple(torch.randn(shape, generator=draw).to(DTYPES[self.dtype]) for shape in shapes)


@dataclass(frozen=True)
class Candidate:
    """``attend`` on the tokens at ``positions``, all of which this rank holds; None where it stays idle."""

    name: str
    positions: Tensor | None
    attend: Attend
    threads: int = 1
    runs: int | None = None  # at most; None: as many as asked for

    def shards(self, whole: Tensors) -> Tensors:
        """This rank's part of q, k, v and dout, in memory of its own."""
        return () if self.positions is None else tuple(x[:, self.positions].contiguous() for x in whole)

    def run(self, shards: Tensors) -> Tensors:
        """Forward and backward: out, dq, dk and dv of this rank's tokens."""
        if self.positions is None:
            return ()
        torch.set_num_threads(self.threads)
        *inputs, dout = shards
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = self.attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's attention on ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def ours(problem: Problem, ring: Ring) -> Candidate:
    """``ring_attention``, one shard per rank."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(q, k, v, layout=problem.held, ring=ring, causal=problem.causal)
        assert isinstance(out, Tensor)
        return out

    return Candidate("ringattn", problem.held.positions(dist.get_rank()), attend, problem.threads)


def whole(problem: Problem, dtype: torch.dtype | None = None) -> Candidate:
    """PyTorch's SDPA on the whole sequence: rank 0 with the threads of all ranks, while the others block."""
    threads = min(cores(), problem.threads * problem.world)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if dtype is None else x.to(dtype) for x in (q, k, v))
        return sdpa(q, k, v, causal=problem.causal)

    return Candidate(
        "SDPA, one process", torch.arange(problem.seqlen) if dist.get_rank() == 0 else None, attend, threads
    )


def usual(problem: Problem) -> Candidate | None:
    """The baseline of :mod:`.usual_ring`; None for layouts that it is not made for."""
    even = problem.seqlen % (2 * problem.world) == 0
    if not even or (problem.causal and problem.layout != "zigzag"):
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return usual_ring_attention(q, k, v, causal=problem.causal)

    return Candidate("usual ring", problem.held.positions(dist.get_rank()), attend, problem.threads)


def peer(problem: Problem) -> Candidate | None:
    """``ring-attention-pytorch`` in its own balanced order (striped by buckets); None where it is not installed.

    Its bucket ``j`` of ``n`` holds the positions ``j, j + n, j + 2n, …``, and a rank holds consecutive buckets. It
    sends to its neighbours, which gloo does not do with oneself: it takes two ranks.
    """
    shard = problem.seqlen // problem.world
    bucket = min(PEER_BUCKET, shard)
    fits = problem.seqlen % problem.world == 0 and shard % bucket == 0 and problem.world > 1
    if not fits or importlib.util.find_spec("ring_attention_pytorch") is None:
        return None
    with warnings.catch_warnings():  # beartype finds the package's type hints old-fashioned
        warnings.simplefilter("ignore")
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    order = torch.arange(problem.seqlen).view(bucket, -1).t().reshape(-1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring_flash_attn(
            q, k, v, causal=problem.causal, bucket_size=bucket, ring_reduce_col=True,
            striped_ring_attn=problem.causal, ring_size=problem.world,
        )  # fmt: skip
        return out

    positions = order.chunk(problem.world)[dist.get_rank()]
    return Candidate(PEER, positions, attend, problem.threads, runs=PEER_RUNS)


def candidates(problem: Problem, ring: Ring) -> dict[str, Candidate]:
    """All that can do this problem here; the first is what the others are compared with."""
    found = [whole(problem), ours(problem, ring), usual(problem), peer(problem)]
    return {one.name: one for one in found if one is not None}
