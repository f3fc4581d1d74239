"""Candidates of ``bench ring``: our rings, other methods, and installable packages."""

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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...comm.group_cache import get_group_cache
from ...comm.groups import MESH_DIMS, Group, resolve_mesh
from ...ring import Ring, ring_attention
from ...ring.local.registry import other_backends
from ...ring.mesh import ring_layout
from ...ring.schedule.schedule import schedule
from ...ring.ulysses import split_ulysses_heads
from ..common.attention import (
    DTYPES,
    PER_DOCUMENT,
    AttentionConfig,
    Tensors,
    check_backend,
    forward_backward,
    sdpa_attention,
)
from ..common.cases import UnavailableError
from ..common.memory_table import (
    ALL_CORES,
    ALL_GATHER,
    BASELINE,
    BUCKET,
    LUCIDRAINS,
    ONE_DEVICE,
    OURS,
    ULYSSES,
    candidate_kind,
    mesh_name,
)
from ..common.ranks import cores
from ..common.timing import DeviceStopwatch
from .baselines import AllGatherAttention, AllToAllAttention, baseline_ring_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

ZHUZILIN = "ring-flash-attn"
CONTEXT_PARALLEL = "PyTorch context_parallel"


def balanced_layout(problem: AttentionConfig) -> str:
    """Return the layout in which every rank has equal work and tokens."""
    return PER_DOCUMENT if problem.cu_seqlens else "zigzag" if problem.causal else "contiguous"


@dataclass(frozen=True)
class CandidateSetting:
    """Arguments of a candidate's constructor on one rank."""

    problem: AttentionConfig
    layouts: tuple[str, ...]
    device: torch.device
    ring: Callable[[Group | None], Ring]  # opens a ring over a group; None: the default group
    shares_gpu: bool = False
    has_slow_links: bool = False  # True if the links of our rings are slowed down

    def positions(self, layout: str) -> Tensor:
        """Return this rank's token positions in a layout."""
        return self.problem.layout_by_name(layout).positions(dist.get_rank())

    def require(self, name: str, *modules: str, pieces: int = 1) -> None:
        """Raise UnavailableError if a module is missing, ranks share a GPU, or shards are not equal.

        ``pieces`` is the number of equal pieces that the candidate ``name`` makes of each shard.
        """
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise UnavailableError(f"{module} is not installed (pip install {name})")
        if self.shares_gpu:
            raise UnavailableError(f"{name} needs one GPU per rank, because it uses NCCL")
        seqlen, pieces = self.problem.seqlen, pieces * self.problem.world
        if seqlen % pieces:
            raise UnavailableError(f"{name} needs a multiple of {pieces} tokens, not {seqlen}")


@dataclass(frozen=True)
class Candidate:
    """One method. ``attend`` takes q, k and v of this rank's tokens, at ``positions`` (None: an idle rank)."""

    name: str
    positions: Tensor | None
    attend: Attend
    threads: int = 1
    step_context: Callable[[], AbstractContextManager[object]] = nullcontext  # context of each forward and backward
    sent_bytes: int | None = None  # bytes that a rank sends per forward and backward, if known
    wait_timer: DeviceStopwatch | None = None  # time in the network, if measurable
    ring: Ring | None = None  # our ring, which records its own waits

    @property
    def kind(self) -> str:
        """The name that ``common/memory_table.py`` uses: without the layout."""
        return candidate_kind(self.name)

    def shards(self, whole: Tensors, device: torch.device) -> Tensors:
        """Return copies of this rank's tokens of q, k, v and dout, given those of the whole sequence."""
        return () if self.positions is None else tuple(x[:, self.positions].contiguous().to(device) for x in whole)

    def run(self, shards: Tensors) -> Tensors:
        """Run forward and backward; return out, dq, dk and dv of this rank's tokens."""
        if self.positions is None:
            return ()
        torch.set_num_threads(self.threads)
        with self.step_context():
            return forward_backward(self.attend, shards[:3], shards[3])


Maker = Callable[[CandidateSetting], Candidate]


def sdpa_one_device(setting: CandidateSetting) -> Candidate:
    """Return SDPA on the whole sequence, run by rank 0 with one rank's threads while the others wait."""
    problem = setting.problem
    positions = torch.arange(problem.seqlen) if dist.get_rank() == 0 else None
    attend = partial(sdpa_attention, causal=problem.causal, cu_seqlens=problem.cu_seqlens)
    return Candidate(ONE_DEVICE, positions, attend, problem.threads, sent_bytes=0)


def sdpa_all_cores(setting: CandidateSetting) -> Candidate:
    """Return SDPA on the whole sequence with the threads of all ranks."""
    problem = setting.problem
    threads = min(cores(), problem.threads * problem.world)
    if setting.device.type != "cpu":
        raise UnavailableError("it runs only on the CPU")
    if threads <= problem.threads:
        raise UnavailableError(f"it would use no more threads than one rank, {problem.threads}")
    return replace(sdpa_one_device(setting), name=ALL_CORES, threads=threads)


def our_ring(layout: str, setting: CandidateSetting, backend: str = "auto") -> Candidate:
    """Return ``ring_attention`` in a layout; its bytes sent are those of the rank that sends most in the schedule."""
    if backend != "auto":
        check_backend(backend, setting.problem, setting.device)
    problem, token_layout, ring = setting.problem, setting.problem.layout_by_name(layout), setting.ring(None)
    mask: dict[str, Any] = {"causal": problem.causal, "cu_seqlens": problem.cu_seqlens}
    attend: Any = partial(ring_attention, layout=token_layout, ring=ring, backend=backend, **mask)
    plan = schedule(token_layout, problem.mask, direction=ring.direction, topology=ring.topology)
    kv, dkv = kv_bytes(problem)
    sent = max(map(sum, zip(plan.bytes(kv), plan.bytes(kv, dkv), strict=True)))
    positions = setting.positions(layout)
    name = f"{OURS} {layout}" if backend == "auto" else f"{OURS} {layout} by {backend}"
    return Candidate(name, positions, attend, problem.threads, sent_bytes=sent, ring=ring)


def kv_bytes(problem: AttentionConfig) -> tuple[int, int]:
    """Return the bytes per token of K and V together, and of fp32 dK and dV together."""
    elements = 2 * problem.batch * problem.kv_heads * problem.head_dim
    return elements * DTYPES[problem.dtype].itemsize, elements * torch.float32.itemsize


def baseline_ring(setting: CandidateSetting) -> Candidate:
    """Return the baseline ring in its balanced layout."""
    problem = setting.problem
    if setting.device.type != "cpu":
        raise UnavailableError(f"it uses a CPU operator. On a GPU compare with {ZHUZILIN}.")
    setting.require(BASELINE, pieces=2)
    waits = DeviceStopwatch(setting.device)
    attend = partial(baseline_ring_attention, causal=problem.causal, waits=waits)
    kv, dkv = kv_bytes(problem)
    hops, shard = problem.world - 1, problem.seqlen // problem.world
    sent = shard * (2 * hops * kv + (problem.world if hops else 0) * dkv)
    positions = setting.positions(balanced_layout(problem))
    return Candidate(BASELINE, positions, attend, problem.threads, sent_bytes=sent, wait_timer=waits)


def all_gather(setting: CandidateSetting) -> Candidate:
    """Return all-gather of K/V with reduce-scatter of dK/dV, in a balanced layout."""
    problem, layout = setting.problem, balanced_layout(setting.problem)
    setting.require(ALL_GATHER)
    net = AllGatherAttention(problem.layout_by_name(layout), problem.mask, setting.device)
    sent = (problem.world - 1) * problem.seqlen // problem.world * sum(kv_bytes(problem))
    return Candidate(ALL_GATHER, setting.positions(layout), net, problem.threads, sent_bytes=sent, wait_timer=net.waits)


def ulysses(setting: CandidateSetting) -> Candidate:
    """Return Ulysses, where every rank computes some heads of the whole sequence after an all-to-all."""
    problem, world = setting.problem, setting.problem.world
    for name, count in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
        if count % world:
            raise UnavailableError(f"{name} is {count}: it must be a multiple of the number of ranks, {world}")
    setting.require(ULYSSES)
    net = AllToAllAttention(problem.layout_by_name("contiguous"), problem.mask, setting.device)
    sent = exchanged_bytes(problem, world)
    positions = setting.positions("contiguous")
    return Candidate(ULYSSES, positions, net, problem.threads, sent_bytes=sent, wait_timer=net.waits)


def exchanged_bytes(problem: AttentionConfig, degree: int) -> int:
    """Return the bytes that a rank sends in all-to-alls over ``degree`` ranks, in a forward and backward."""
    kv = kv_bytes(problem)[0] * max(problem.kv_heads, degree) // problem.kv_heads
    queries = problem.batch * problem.heads * problem.head_dim * DTYPES[problem.dtype].itemsize
    return problem.seqlen // problem.world * (degree - 1) * (4 * queries + 2 * kv) // degree


def ulysses_mesh(degree: int, setting: CandidateSetting) -> Candidate:
    """Return ``ring_attention`` over a mesh: Ulysses over ``degree`` neighbours, and rings over the groups."""
    problem, layout = setting.problem, balanced_layout(setting.problem)
    try:
        _, kv_heads = split_ulysses_heads(problem.heads, problem.kv_heads, degree)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    name = mesh_name(degree, problem.world)
    setting.require(name)
    mesh = init_device_mesh(setting.device.type, (problem.world // degree, degree), mesh_dim_names=MESH_DIMS)
    for group in resolve_mesh(mesh) or ():
        get_group_cache(group)[setting.device] = setting.ring(group)  # calls with this mesh use this ring
    token_layout = problem.layout_by_name(layout)
    mask: dict[str, Any] = {"causal": problem.causal, "cu_seqlens": problem.cu_seqlens}
    attend: Any = partial(ring_attention, layout=token_layout, group=mesh, **mask)
    plan = schedule(ring_layout(token_layout, degree), problem.mask)
    heads_per_rank = kv_heads[0].stop - kv_heads[0].start
    kv, dkv = (nbytes * heads_per_rank // problem.kv_heads for nbytes in kv_bytes(problem))
    ring_bytes = max(map(sum, zip(plan.bytes(kv), plan.bytes(kv, dkv), strict=True)))
    sent = exchanged_bytes(problem, degree) + ring_bytes
    return Candidate(name, setting.positions(layout), attend, problem.threads, sent_bytes=sent)


# Rings of other packages, if they are installed and run on this machine.


def lucidrains(setting: CandidateSetting) -> Candidate:
    """Return ``ring-attention-pytorch`` in its own layout (striped by buckets) and its own order of query heads.

    Bucket ``j`` of ``n`` holds the positions ``j, j + n, j + 2n, …``, and a rank holds consecutive buckets. The package
    needs two ranks, because gloo cannot send from a rank to itself.
    """
    problem = setting.problem
    setting.require(LUCIDRAINS, "ring_attention_pytorch")
    shard = problem.seqlen // problem.world
    bucket = min(BUCKET, shard)
    if shard % bucket or problem.world == 1:
        raise UnavailableError(f"it needs at least two ranks, and shards with a multiple of {bucket} tokens")
    with warnings.catch_warnings():  # beartype warns about the package's type hints
        warnings.simplefilter("ignore")
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    heads = repeated_head_order(problem.heads, problem.kv_heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring_flash_attn(
            q[:, :, heads], k, v, causal=problem.causal, bucket_size=bucket, ring_reduce_col=True,
            striped_ring_attn=problem.causal, ring_size=problem.world,
        )  # fmt: skip
        return out[:, :, heads.argsort()]

    order = torch.arange(problem.seqlen).view(bucket, -1).t().reshape(-1)
    positions = order.chunk(problem.world)[dist.get_rank()]
    return Candidate(LUCIDRAINS, positions, attend, problem.threads)


def repeated_head_order(heads: int, kv_heads: int) -> Tensor:
    """Return our query heads in the order in which head ``i`` reads key/value head ``i % kv_heads``."""
    return torch.arange(heads).view(kv_heads, -1).t().reshape(-1)


def context_parallel(setting: CandidateSetting) -> Candidate:
    """Return ``torch.distributed.tensor.experimental.context_parallel``, with its head-tail balancing if causal.

    ``context_parallel`` replaces only SDPA's CUDA operators. On the CPU, torch 2.13 fails with "Operator
    aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered".
    """
    problem = setting.problem
    if setting.device.type != "cuda":
        raise UnavailableError("it needs a GPU, because it cannot shard the CPU's SDPA operator (torch 2.13)")
    setting.require(CONTEXT_PARALLEL, pieces=2)
    if problem.heads != problem.kv_heads:
        raise UnavailableError("its SDPA operators need as many key/value heads as query heads")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import _cp_options

    mesh = init_device_mesh("cuda", (problem.world,))

    def around() -> AbstractContextManager[object]:
        _cp_options.enable_load_balance = problem.causal  # a full mask cannot be balanced
        tokens = torch.arange(problem.seqlen, device=setting.device)  # it needs a buffer to shard on entry
        context: AbstractContextManager[object] = enter(mesh, buffers=[tokens], buffer_seq_dims=[0])
        return context

    attend, positions = partial(sdpa_attention, causal=problem.causal), setting.positions(balanced_layout(problem))
    return Candidate(CONTEXT_PARALLEL, positions, attend, problem.threads, step_context=around)


def zhuzilin(setting: CandidateSetting) -> Candidate:
    """Return ``ring-flash-attn``: its zigzag variant if causal, else its plain ring."""
    problem = setting.problem
    if setting.device.type != "cuda" or problem.dtype == "float32":
        raise UnavailableError("its FlashAttention kernels need a GPU, and float16 or bfloat16")
    setting.require(ZHUZILIN, "ring_flash_attn", "flash_attn", pieces=2)
    import ring_flash_attn

    name = "zigzag_ring_flash_attn_func" if problem.causal else "ring_flash_attn_func"
    attend = partial(getattr(ring_flash_attn, name), causal=problem.causal)
    return Candidate(ZHUZILIN, setting.positions(balanced_layout(problem)), attend, problem.threads)


BASELINES: dict[str, Maker] = {BASELINE: baseline_ring, ALL_GATHER: all_gather, ULYSSES: ulysses}
PEERS: dict[str, Maker] = {CONTEXT_PARALLEL: context_parallel, LUCIDRAINS: lucidrains, ZHUZILIN: zhuzilin}
"""Candidates of other packages, whose wrong results are notes and not failures."""


def select_makers(layouts: Sequence[str], prefixes: Sequence[str], worlds: Sequence[int]) -> dict[str, Maker]:
    """Return the constructors of candidates whose names start with one of ``prefixes`` (none: all), by name.

    The first is always SDPA on one device, which the others are compared with.
    """
    rings: dict[str, Maker] = {f"{OURS} {layout}": partial(our_ring, layout) for layout in layouts}
    rings |= {
        f"{OURS} {layouts[0]} by {name}": partial(our_ring, layouts[0], backend=name) for name in other_backends()
    }
    mixed = {
        mesh_name(degree, world): partial(ulysses_mesh, degree)
        for world in worlds
        for degree in range(2, world + 1)
        if world % degree == 0
    }
    makers: dict[str, Maker] = {ONE_DEVICE: sdpa_one_device, ALL_CORES: sdpa_all_cores}
    makers |= {**rings, **BASELINES, **mixed, **PEERS}
    starts: str | tuple[str, ...] = (ONE_DEVICE, *prefixes) if prefixes else ""
    return {name: make for name, make in makers.items() if name.startswith(starts)}


def make_candidates(
    setting: CandidateSetting, prefixes: Sequence[str] = ()
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return by name the candidates that can compute this problem here, and why the others cannot."""
    available: dict[str, Candidate] = {}
    absent: dict[str, str] = {}
    for name, make in select_makers(setting.layouts, prefixes, [setting.problem.world]).items():
        try:
            if setting.has_slow_links and name in BASELINES | PEERS:
                raise UnavailableError("--bytes-per-second slows down only our rings")
            if setting.problem.cu_seqlens and name in {BASELINE} | PEERS.keys():
                raise UnavailableError("it is not set up for packed documents here")
            available[name] = make(setting)
        except UnavailableError as reason:
            absent[name] = str(reason)
    return available, absent
