"""Other people's rings, where they are installed and run here."""

from __future__ import annotations

import importlib.util
import math
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .candidates import Candidate, Maker, Refused, Setting, sdpa

LUCIDRAINS, ZHUZILIN, YUNCHANG = "ring-attention-pytorch", "ring-flash-attn", "yunchang"
CONTEXT_PARALLEL = "PyTorch context_parallel"
BUCKET = 1024  # lucidrains' default; one bucket of scores is what it computes at a time
LUCIDRAINS_RUNS = 2  # it takes several times as long as the others


def installed(package: str, *modules: str) -> None:
    """Refuse where a module of a package is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Refused(f"{missing[0]} is not installed (pip install {package})")


def on_gpu(setting: Setting, name: str, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> None:
    """Refuse what is made of FlashAttention's kernels where these do not run."""
    if setting.device.type != "cuda":
        raise Refused(f"{name} computes with FlashAttention's CUDA kernels: it needs a GPU")
    if setting.problem.dtype not in dtypes:
        raise Refused(f"{name} takes {' and '.join(dtypes)}, the problem is {setting.problem.dtype}")


def lucidrains(setting: Setting) -> Candidate:
    """``ring-attention-pytorch`` in its own balanced order (striped by buckets) and its own order of query heads.

    Its bucket ``j`` of ``n`` holds the positions ``j, j + n, j + 2n, …``, and a rank holds consecutive buckets. It
    sends to its neighbours, which gloo does not do with oneself: it takes two ranks.
    """
    problem = setting.problem
    installed(LUCIDRAINS, "ring_attention_pytorch")
    setting.collectives(LUCIDRAINS)
    setting.equal_shards(LUCIDRAINS)
    shard = problem.seqlen // problem.world
    bucket = min(BUCKET, shard)
    if shard % bucket or problem.world == 1:
        raise Refused(f"it takes two ranks or more, and shards of whole buckets of {bucket} tokens")
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
    return Candidate(
        LUCIDRAINS, positions, attend, problem.threads, runs=LUCIDRAINS_RUNS, trusted=False,
        query_heads=repeated_heads(problem.heads, problem.kv_heads),
    )  # fmt: skip


def repeated_heads(heads: int, kv_heads: int) -> tuple[int, ...] | None:
    """The order of our query heads for who repeats all heads of K/V, ``(g h)``; None: ours, as nothing is grouped.

    There query head ``i`` reads head ``i % kv_heads`` of K/V, and ours reads ``i // (heads / kv_heads)``.
    """
    group = heads // kv_heads
    return None if group == 1 else tuple(i % kv_heads * group + i // kv_heads for i in range(heads))


def context_parallel(setting: Setting) -> Candidate:
    """``torch.distributed.tensor.experimental.context_parallel``: head and tail of a zigzag where the mask is causal.

    Its ring replaces the CUDA operators of SDPA alone: on the CPU torch 2.13 ends with "Operator
    aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered".
    """
    problem = setting.problem
    if setting.device.type != "cuda":
        raise Refused("it has no sharding strategy for the CPU's SDPA operator (torch 2.13): it needs a GPU")
    setting.collectives(CONTEXT_PARALLEL)
    setting.equal_shards(CONTEXT_PARALLEL, 2)
    if problem.heads != problem.kv_heads:
        raise Refused("its SDPA operators take as many heads of K/V as of queries")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import _cp_options

    mesh = init_device_mesh("cuda", (problem.world,))
    layout = "zigzag" if problem.causal else "contiguous"

    def around() -> AbstractContextManager[object]:
        _cp_options.enable_load_balance = problem.causal  # it refuses to balance a full mask
        tokens = torch.arange(problem.seqlen, device=setting.device)  # it shards something on entry
        made: AbstractContextManager[object] = enter(mesh, buffers=[tokens], buffer_seq_dims=[0])
        return made

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, causal=problem.causal)

    return Candidate(CONTEXT_PARALLEL, setting.positions(layout), attend, problem.threads, around=around, trusted=False)


def zhuzilin(setting: Setting) -> Candidate:
    """``ring-flash-attn``: its zigzag where the mask is causal, else its plain ring."""
    problem = setting.problem
    on_gpu(setting, ZHUZILIN)
    installed(ZHUZILIN, "ring_flash_attn", "flash_attn")
    setting.collectives(ZHUZILIN)
    setting.equal_shards(ZHUZILIN, 2)
    import ring_flash_attn

    name = "zigzag_ring_flash_attn_func" if problem.causal else "ring_flash_attn_func"
    function: Any = getattr(ring_flash_attn, name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, causal=problem.causal)
        return out

    layout = "zigzag" if problem.causal else "contiguous"
    return Candidate(ZHUZILIN, setting.positions(layout), attend, problem.threads, trusted=False)


def yunchang(setting: Setting) -> Candidate:
    """``yunchang`` (USP): as many ranks as the heads allow exchange heads, rings of the others, zigzag where causal."""
    problem = setting.problem
    on_gpu(setting, YUNCHANG)
    installed(YUNCHANG, "yunchang", "flash_attn")
    setting.collectives(YUNCHANG)
    setting.equal_shards(YUNCHANG, 2)
    import yunchang as usp

    heads = math.gcd(problem.kv_heads, problem.world)
    rank, rings = dist.get_rank(), problem.world // heads
    usp.set_seq_parallel_pg(heads, rings, rank, problem.world)
    kind = "zigzag" if problem.causal else "basic"
    layer = usp.LongContextAttention(ring_impl_type=kind)
    numbers = torch.arange(problem.seqlen).view(1, -1, 1, 1)
    positions = usp.EXTRACT_FUNC_DICT[kind](numbers, rank, world_size=problem.world, rd=rings, ud=heads).flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v, causal=problem.causal)
        return out

    return Candidate(YUNCHANG, positions, attend, problem.threads, trusted=False)


PEERS: dict[str, Maker] = {
    CONTEXT_PARALLEL: context_parallel,
    LUCIDRAINS: lucidrains,
    ZHUZILIN: zhuzilin,
    YUNCHANG: yunchang,
}
