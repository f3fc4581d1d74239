"""What others have measured and published, predicted with one set of constants.

Every number has its source beside it. What is given to the predictor is one GPU's published attention speed and the
nominal speed of its links; the constants of :class:`~ringattn.bench.predict.speed.Speed` were looked at on the first
row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ringattn.bench.predict.launch import whole
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.speed import FORWARD_FLOPS, GPUS, H100, Speed, form_of
from ringattn.bench.predict.usual import Usual, baseline, seconds

GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Table:
    """github.com/zhuzilin/ring-flash-attention, README, "Performance Summary" (read 2026-11): 8192 tokens per GPU.

    Iterations per second of flash-attention on one GPU, forward and forward with backward, and what percentage of it,
    divided by 8, its rings reach on 8; 32 query and 8 key heads of 128, bf16, causal.
    """

    gpu: str
    link: str
    forward: float
    both: float
    percent: dict[str, tuple[float, float]]  # by layout: forward, forward with backward


TABLES = (
    Table(
        "h800", "nvlink4-h800", 591.5, 154.7,
        {"contiguous": (52.1, 53.9), "zigzag": (85.2, 90.2), "striped": (74.4, 82.9)},
    ),
    Table(
        "a100", "nvlink3", 373.4, 94.7,
        {"contiguous": (51.4, 52.5), "zigzag": (81.7, 89.8), "striped": (69.6, 82.6)},
    ),
)  # fmt: skip
POINTS = 8


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("table", TABLES, ids=["h800", "a100"])
def test_ring_zigzag_and_stripe_of_a_readme(table: Table, layout: str) -> None:
    form, area = form_of(tokens=8192, heads=32, kv_heads=8), whole(8192, causal=True)
    flops = FORWARD_FLOPS * form.head_dim * form.heads * area.pairs
    backward = 1 / table.both - 1 / table.forward
    speed = GPUS[table.gpu].fitted(
        forward=(flops * table.forward, area, form), backward=(2.5 * flops / backward, area, form)
    )
    links, ring = Links(PRESETS[table.link], PRESETS["ib400"]), Usual(8, GPUS_OF_A_NODE, form, layout)
    ahead, back = (seconds(ring, speed, links, phase) for phase in ("forward", "backward"))
    alone, alone_back = (8 * baseline(form, speed, phase) for phase in ("forward", "backward"))
    found = 100 * alone / ahead, 100 * (alone + alone_back) / (ahead + back)
    assert found == pytest.approx(table.percent[layout], abs=POINTS)


def h100() -> Speed:
    """FlashAttention-3's 616 TFLOP/s: forward, causal, 16k tokens, hidden dim 2048, D128, bf16/fp16 (its paper)."""
    return H100.fitted(forward=(616e12, whole(16384, causal=True), form_of(tokens=16384, heads=16)))


@pytest.mark.parametrize("world", [8, 16, 32, 64])
def test_a_rings_teraflops_on_h100(world: int) -> None:
    """MagiAttention's page: its ring baseline reaches 421 to 446 TFLOP/s per GPU, causal forward, cp 8 to 64.

    64 query and 8 key heads of 128, bf16, 8192 tokens per GPU.
    """
    form = form_of(tokens=8192, heads=64, kv_heads=8)
    ring = Usual(world, GPUS_OF_A_NODE, form, "zigzag")
    taken = seconds(ring, h100(), Links(PRESETS["nvlink4"], PRESETS["ib400"]), "forward")
    flops = FORWARD_FLOPS * form.head_dim * form.heads * whole(8192 * world, causal=True).pairs / world
    assert 421e12 * 0.9 <= flops / taken <= 446e12 * 1.1


def test_a_prefill_of_a_million_tokens() -> None:
    """Meta, arXiv:2411.01783: 1M tokens, Llama 3 405B, 128 H100s: 93% parallel efficiency.

    16 nodes are the ring, the 8 GPUs of a node share the heads: 16 query and 1 key head of 128 per GPU. Of attention
    alone, which is most of it at this length; one GPU's share of the whole sequence is what is divided.
    """
    world, speed = 16, h100()
    tokens = 2**20 // world
    form = form_of(tokens=tokens, heads=16, kv_heads=1)
    ring = Usual(world, 1, form, "zigzag")
    taken = seconds(ring, speed, Links(PRESETS["nvlink4"], PRESETS["ib400"]), "forward")
    alone = speed.launch + speed.products(whole(2**20, causal=True), form)
    assert 100 * alone / world / taken == pytest.approx(93, abs=5)
