"""Time what the host computes for a call: layouts, masks, schedules, plans, tile look-up and posting one hop.

The functions under test cache their results. Benchmarks without a cache therefore use a new sequence length in every
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.host.hop_posting import rank_passes, ring_of_one
from ringattn.bench.overlap.measure import PHASES, TOGETHER
from ringattn.comm import GroupLike, Topology
from ringattn.kernels import default_config
from ringattn.ring import Mask, bounds, schedule, visible_pairs
from ringattn.ring.schedule.layout import Documents
from ringattn.ring.schedule.plan import plan

MILLION = 1 << 20
WORLD = 8
ROUNDS = 10
CAUSAL = Mask(causal=True)
DOCUMENT = 3000  # tokens
CPU = torch.device("cpu")
MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda seqlen: CAUSAL,
    "window": lambda seqlen: Mask(causal=True, window=(4096, 0)),
    "documents": lambda seqlen: Mask(causal=True, documents=Documents([*range(0, seqlen, DOCUMENT), seqlen])),
}


@pytest.fixture
def uncached(benchmark: Any) -> Callable[..., None]:
    """Return ``run(work, seqlen, step)``, which times ``work(n)`` for ``n = seqlen, seqlen + step, ...``."""

    def run(work: Callable[[int], object], seqlen: int, step: int) -> None:
        lengths = count(seqlen, step)
        benchmark.pedantic(work, setup=lambda: ((next(lengths),), {}), rounds=ROUNDS)

    return run


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_layout_and_positions(uncached: Callable[..., None], name: str) -> None:
    uncached(lambda seqlen: getattr(Layout, name)(seqlen, WORLD).positions(3), MILLION, 2 * WORLD)


def test_zigzag_layout_per_document(uncached: Callable[..., None]) -> None:
    def work(seqlen: int) -> torch.Tensor:
        return Layout.zigzag(seqlen, WORLD, cu_seqlens=[*range(0, seqlen, DOCUMENT), seqlen]).positions(3)

    uncached(work, MILLION, 1)


@pytest.mark.parametrize("work", [bounds, visible_pairs])
@pytest.mark.parametrize("name", MASKS)
def test_mask_of_one_hop(benchmark: Any, name: str, work: Callable[..., object]) -> None:
    layout = Layout.zigzag(MILLION, WORLD)
    benchmark(work, MASKS[name](MILLION), layout.positions(5), layout.positions(2))


@pytest.mark.parametrize(("world", "nodes"), [(8, 1), (64, 1), (256, 1), (64, 8)])
def test_schedule(uncached: Callable[..., None], world: int, nodes: int) -> None:
    topology = Topology.grid(nodes, world // nodes)

    def work(seqlen: int) -> object:
        return schedule(Layout.zigzag(seqlen, world), CAUSAL, topology=topology).hops(world // 2)

    uncached(work, 1024 * world, 2 * world)


@pytest.mark.parametrize("name", MASKS)
def test_plan(uncached: Callable[..., None], name: str) -> None:
    """Time one rank's plan of a new call: the schedule, and the bounds of each of the rank's hops."""

    def work(seqlen: int) -> object:
        return plan(Layout.zigzag(seqlen, WORLD), MASKS[name](seqlen), 3, 1, CPU)

    uncached(work, MILLION, 2 * WORLD)


def test_cached_plan(benchmark: Any) -> None:
    layout = Layout.zigzag(MILLION, WORLD)
    benchmark(plan, layout, CAUSAL, 0, 1, CPU)


def test_default_tiles(benchmark: Any) -> None:
    q = torch.empty(1, 1, 1, 128)
    benchmark(default_config, q, q)


def test_call_without_tokens(benchmark: Any) -> None:
    """Time everything in ``ring_attention`` but the attention: checks, plan and autograd node of an empty batch."""
    q = torch.empty(0, 1024, 8, 64, requires_grad=True)
    benchmark(ring_attention, q, q, q, causal=True)


@pytest.fixture
def world_of_two() -> Iterator[LocalWorld]:
    with LocalWorld(2) as world:
        yield world


def test_call_on_two_ranks_without_tokens(benchmark: Any, world_of_two: LocalWorld) -> None:
    """Time such a call on two virtual ranks, which also start two threads and compare their arguments."""
    q = torch.empty(0, 1024, 8, 64)

    def call(group: GroupLike) -> None:
        ring_attention(q, q, q, layout="zigzag", group=group, causal=True)

    benchmark(world_of_two.run, call)


@pytest.mark.parametrize("phase", PHASES)
def test_posting_a_ring_pass(benchmark: Any, phase: str) -> None:
    """Time the host's part of a pass over 8 hops; without a GPU a lower bound, because device calls are stubs."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    config = AttentionConfig(8 * 4096, 8, 1, 32, 32, 128, "bfloat16", causal=False, layout="contiguous")
    with ring_of_one(device) as ring:
        shard = rank_passes(config, ring, device)
        benchmark(shard.run, phase, TOGETHER)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
