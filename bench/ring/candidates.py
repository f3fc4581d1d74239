"""Who computes the same attention in ``bench ring``: ours, what people would do otherwise, what they can install."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...comm.groups import MESH_DIMS, Group, resolve_mesh
from ...comm.kept import kept_of
from ...ring import Mask, Ring, ring_attention
from ...ring.mesh import joined
from ...ring.schedule.schedule import schedule
from ...ring.ulysses import heads_of
from ..common.attention import DTYPES, AttentionConfig, Tensors, forward_backward
from ..common.memory_table import (
    ALL_CORES,
    ALL_GATHER,
    BASELINE,
    BUCKET,
    LUCIDRAINS,
    OURS,
    ULYSSES,
    WHOLE,
    exchanged_name,
    kind_of,
)
from ..common.ranks import cores
from ..common.timing import Stopwatch
from .baselines import AllGather, Ulysses, baseline_ring_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

ZHUZILIN = "ring-flash-attn"
CONTEXT_PARALLEL = "PyTorch context_parallel"


class Refused(Exception):
    """A candidate does not compute this, or not here; the message says why."""


def balanced(problem: AttentionConfig) -> str:
    """The layout in which every rank has as much to do."""
    return "zigzag" if problem.causal else "contiguous"


@dataclass(frozen=True)
class Setting:
    """What candidates are made of, on one rank."""

    problem: AttentionConfig
    layouts: tuple[str, ...]
    device: torch.device
    ring: Callable[[Group | None], Ring]  # a new one, of the default group or of another
    shared: bool = False  # ranks share a GPU
    slowed: bool = False  # the links of our rings

    def positions(self, layout: str) -> Tensor:
        """Of this rank."""
        return self.problem.named(layout).positions(dist.get_rank())

    def require(self, name: str, *modules: str, pieces: int = 1) -> None:
        """Refuse where a module is missing, ranks share a GPU, or shards are not so many pieces of one length."""
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise Refused(f"{module} is not installed (pip install {name})")
        if self.shared:
            raise Refused(f"ranks share a GPU here, and {name} talks over NCCL, which takes one rank per GPU")
        seqlen, pieces = self.problem.seqlen, pieces * self.problem.world
        if seqlen % pieces:
            raise Refused(f"{seqlen} tokens are not {pieces} equal pieces, which {name} needs")


@dataclass(frozen=True)
class Candidate:
    """``attend`` on the tokens at ``positions``, all of which this rank holds; None where it stays idle."""

    name: str
    positions: Tensor | None
    attend: Attend
    threads: int = 1
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # each forward and backward
    sent: int | None = None  # bytes that a rank sends in one forward and backward; None: not known
    waits: Stopwatch | None = None  # what it spends in the network; None: not known
    ring: Ring | None = None  # ours, which records its waits itself

    @property
    def kind(self) -> str:
        """What it is, whatever its layout."""
        return kind_of(self.name)

    def shards(self, whole: Tensors, device: torch.device) -> Tensors:
        """This rank's part of q, k, v and dout, in memory of its own."""
        return () if self.positions is None else tuple(x[:, self.positions].contiguous().to(device) for x in whole)

    def run(self, shards: Tensors) -> Tensors:
        """Forward and backward: out, dq, dk and dv of this rank's tokens."""
        if self.positions is None:
            return ()
        torch.set_num_threads(self.threads)
        with self.around():
            return forward_backward(self.attend, shards[:3], shards[3])


Maker = Callable[[Setting], Candidate]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's attention on ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def whole(setting: Setting) -> Candidate:
    """PyTorch's SDPA on the whole sequence, by rank 0 with what one rank has, while the others block."""
    problem = setting.problem
    positions = torch.arange(problem.seqlen) if dist.get_rank() == 0 else None
    return Candidate(WHOLE, positions, partial(sdpa, causal=problem.causal), problem.threads, sent=0)


def all_cores(setting: Setting) -> Candidate:
    """The same with the threads of all ranks: what one process could do with this machine."""
    problem = setting.problem
    threads = min(cores(), problem.threads * problem.world)
    if setting.device.type != "cpu":
        raise Refused("a GPU has no threads to lend")
    if threads <= problem.threads:
        raise Refused(f"there is no more than what one device has: {problem.threads} threads")
    return replace(whole(setting), name=ALL_CORES, threads=threads)


def ours(layout: str, setting: Setting) -> Candidate:
    """``ring_attention``, one shard per rank; sent is what the rank sends that sends most, by the schedule."""
    problem, held, ring = setting.problem, setting.problem.named(layout), setting.ring(None)
    attend: Any = partial(ring_attention, layout=held, ring=ring, causal=problem.causal)
    plan = schedule(held, Mask(causal=problem.causal), direction=ring.direction, topology=ring.topology)
    kv, dkv = kv_bytes(problem)
    sent = max(map(sum, zip(plan.bytes(kv), plan.bytes(kv, dkv), strict=True)))
    positions = setting.positions(layout)
    return Candidate(f"{OURS} {layout}", positions, attend, problem.threads, sent=sent, ring=ring)


def kv_bytes(problem: AttentionConfig) -> tuple[int, int]:
    """Of K and V of a token, and of its dK and dV in fp32."""
    elements = 2 * problem.batch * problem.kv_heads * problem.head_dim
    return elements * DTYPES[problem.dtype].itemsize, elements * torch.float32.itemsize


def baseline_ring(setting: Setting) -> Candidate:
    """A ring as it is usually written, in the layout that it is made for."""
    problem = setting.problem
    if setting.device.type != "cpu":
        raise Refused(f"it is written on the CPU's operator; on a GPU {ZHUZILIN} is the baseline ring")
    setting.require(BASELINE, pieces=2)
    waits = Stopwatch(setting.device)
    attend = partial(baseline_ring_attention, causal=problem.causal, waits=waits)
    kv, dkv = kv_bytes(problem)
    hops, shard = problem.world - 1, problem.seqlen // problem.world
    sent = shard * (2 * hops * kv + (problem.world if hops else 0) * dkv)
    positions = setting.positions(balanced(problem))
    return Candidate(BASELINE, positions, attend, problem.threads, sent=sent, waits=waits)


def all_gather(setting: Setting) -> Candidate:
    """K/V of all ranks on every rank, dK/dV reduced and scattered; balanced by a zigzag where the mask is causal."""
    problem, layout = setting.problem, balanced(setting.problem)
    setting.require(ALL_GATHER)
    net = AllGather(problem.named(layout), problem.causal, setting.device)
    sent = (problem.world - 1) * problem.seqlen // problem.world * sum(kv_bytes(problem))
    return Candidate(ALL_GATHER, setting.positions(layout), net, problem.threads, sent=sent, waits=net.waits)


def ulysses(setting: Setting) -> Candidate:
    """Heads for tokens, all-to-all: every rank computes some heads of the whole sequence."""
    problem, world = setting.problem, setting.problem.world
    for name, count in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
        if count % world:
            raise Refused(f"{name} is {count}: {world} ranks need a multiple of {world}")
    setting.require(ULYSSES)
    net = Ulysses(problem.named("contiguous"), problem.causal, setting.device)
    sent = exchanged_bytes(problem, world)
    return Candidate(ULYSSES, setting.positions("contiguous"), net, problem.threads, sent=sent, waits=net.waits)


def exchanged_bytes(problem: AttentionConfig, degree: int) -> int:
    """Of q, k, v and out, then of dout, dq, dk and dv; a rank keeps its own part of each.

    Of fewer key heads than ranks several have the same.
    """
    kv = kv_bytes(problem)[0] * max(problem.kv_heads, degree) // problem.kv_heads
    queries = problem.batch * problem.heads * problem.head_dim * DTYPES[problem.dtype].itemsize
    return problem.seqlen // problem.world * (degree - 1) * (4 * queries + 2 * kv) // degree


def ulysses_by_ring(degree: int, setting: Setting) -> Candidate:
    """``ring_attention`` over a mesh: heads for tokens among so many neighbours, and rings of the rest."""
    problem, layout = setting.problem, balanced(setting.problem)
    try:
        _, kv_heads = heads_of(problem.heads, problem.kv_heads, degree)
    except ValueError as error:
        raise Refused(str(error)) from None
    name = exchanged_name(degree, problem.world)
    setting.require(name)
    mesh = init_device_mesh(setting.device.type, (problem.world // degree, degree), mesh_dim_names=MESH_DIMS)
    for group in resolve_mesh(mesh) or ():
        kept_of(group)[setting.device] = setting.ring(group)  # which calls with this mesh take
    held = problem.named(layout)
    attend: Any = partial(ring_attention, layout=held, group=mesh, causal=problem.causal)
    plan = schedule(joined(held, degree), Mask(causal=problem.causal))
    few = kv_heads[0].stop - kv_heads[0].start
    kv, dkv = (nbytes * few // problem.kv_heads for nbytes in kv_bytes(problem))
    moved = max(map(sum, zip(plan.bytes(kv), plan.bytes(kv, dkv), strict=True)))
    sent = exchanged_bytes(problem, degree) + moved
    return Candidate(name, setting.positions(layout), attend, problem.threads, sent=sent)


# other people's rings, where they are installed and run here


def lucidrains(setting: Setting) -> Candidate:
    """``ring-attention-pytorch`` in its own balanced order (striped by buckets) and its own order of query heads.

    Its bucket ``j`` of ``n`` holds the positions ``j, j + n, j + 2n, …``, and a rank holds consecutive buckets. It
    sends to its neighbours, which gloo does not do with oneself: it takes two ranks.
    """
    problem = setting.problem
    setting.require(LUCIDRAINS, "ring_attention_pytorch")
    shard = problem.seqlen // problem.world
    bucket = min(BUCKET, shard)
    if shard % bucket or problem.world == 1:
        raise Refused(f"it takes two ranks or more, and shards of whole buckets of {bucket} tokens")
    with warnings.catch_warnings():  # beartype finds the package's type hints old-fashioned
        warnings.simplefilter("ignore")
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    heads = repeated_heads(problem.heads, problem.kv_heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring_flash_attn(
            q[:, :, heads], k, v, causal=problem.causal, bucket_size=bucket, ring_reduce_col=True,
            striped_ring_attn=problem.causal, ring_size=problem.world,
        )  # fmt: skip
        return out[:, :, heads.argsort()]

    order = torch.arange(problem.seqlen).view(bucket, -1).t().reshape(-1)
    positions = order.chunk(problem.world)[dist.get_rank()]
    return Candidate(LUCIDRAINS, positions, attend, problem.threads)


def repeated_heads(heads: int, kv_heads: int) -> Tensor:
    """The order of our query heads for who repeats all heads of K/V, ``(g h)``.

    There query head ``i`` reads head ``i % kv_heads`` of K/V, and ours reads ``i // (heads / kv_heads)``.
    """
    return torch.arange(heads).view(kv_heads, -1).t().reshape(-1)


def context_parallel(setting: Setting) -> Candidate:
    """``torch.distributed.tensor.experimental.context_parallel``: head and tail of a zigzag where the mask is causal.

    Its ring replaces the CUDA operators of SDPA alone: on the CPU torch 2.13 ends with "Operator
    aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered".
    """
    problem = setting.problem
    if setting.device.type != "cuda":
        raise Refused("it has no sharding strategy for the CPU's SDPA operator (torch 2.13): it needs a GPU")
    setting.require(CONTEXT_PARALLEL, pieces=2)
    if problem.heads != problem.kv_heads:
        raise Refused("its SDPA operators take as many heads of K/V as of queries")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import _cp_options

    mesh = init_device_mesh("cuda", (problem.world,))

    def around() -> AbstractContextManager[object]:
        _cp_options.enable_load_balance = problem.causal  # it refuses to balance a full mask
        tokens = torch.arange(problem.seqlen, device=setting.device)  # it shards something on entry
        made: AbstractContextManager[object] = enter(mesh, buffers=[tokens], buffer_seq_dims=[0])
        return made

    attend = partial(sdpa, causal=problem.causal)
    return Candidate(CONTEXT_PARALLEL, setting.positions(balanced(problem)), attend, problem.threads, around=around)


def zhuzilin(setting: Setting) -> Candidate:
    """``ring-flash-attn``: its zigzag where the mask is causal, else its plain ring."""
    problem = setting.problem
    if setting.device.type != "cuda" or problem.dtype == "float32":
        raise Refused("it computes with FlashAttention's CUDA kernels: it needs a GPU, and float16 or bfloat16")
    setting.require(ZHUZILIN, "ring_flash_attn", "flash_attn", pieces=2)
    import ring_flash_attn

    name = "zigzag_ring_flash_attn_func" if problem.causal else "ring_flash_attn_func"
    attend = partial(getattr(ring_flash_attn, name), causal=problem.causal)
    return Candidate(ZHUZILIN, setting.positions(balanced(problem)), attend, problem.threads)


# all of them


BASELINES: dict[str, Maker] = {BASELINE: baseline_ring, ALL_GATHER: all_gather, ULYSSES: ulysses}
PEERS: dict[str, Maker] = {CONTEXT_PARALLEL: context_parallel, LUCIDRAINS: lucidrains, ZHUZILIN: zhuzilin}
"""Other people's: a wrong result of theirs is noted, and fails nothing."""


def makers(layouts: Sequence[str], worlds: Sequence[int]) -> dict[str, Maker]:
    """All that there are, by name; the first is what the others are compared with."""
    rings = {f"{OURS} {layout}": partial(ours, layout) for layout in layouts}
    mixed = {
        exchanged_name(degree, world): partial(ulysses_by_ring, degree)
        for world in worlds
        for degree in range(2, world + 1)
        if world % degree == 0
    }
    return {WHOLE: whole, ALL_CORES: all_cores, **rings, **BASELINES, **mixed, **PEERS}


def chosen(layouts: Sequence[str], by: Sequence[str], worlds: Sequence[int]) -> dict[str, Maker]:
    """Those whose names start with one of ``by``, beside the first; without any all of them."""
    every = makers(layouts, worlds)
    return {name: make for name, make in every.items() if not by or name == WHOLE or name.startswith(tuple(by))}


def candidates(setting: Setting, by: Sequence[str] = ()) -> tuple[dict[str, Candidate], dict[str, str]]:
    """All that can do this problem here, and why the others cannot."""
    able: dict[str, Candidate] = {}
    absent: dict[str, str] = {}
    for name, make in chosen(setting.layouts, by, [setting.problem.world]).items():
        try:
            if setting.slowed and name in BASELINES | PEERS:
                raise Refused("its transfers are not ours, and --bytes-per-second slows ours alone")
            able[name] = make(setting)
        except Refused as reason:
            absent[name] = str(reason)
    return able, absent
