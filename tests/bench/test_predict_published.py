"""Tests of the predictor against published measurements, with one set of constants.

Every number has its source beside it. The predictor gets a GPU's published attention speed, or a rough rate of Triton's
and PyTorch's kernels, and the nominal speed of the links. The kernel constants were checked on the first row of the
first table only, the host's on the last table; none was fitted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringattn.bench.predict.alternatives import all_gather_passes, ulysses_passes
from ringattn.bench.predict.baseline_ring import baseline_passes
from ringattn.bench.predict.inputs import PredictionInputs
from ringattn.bench.predict.links import PRESETS, ClusterLinks
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.program import PASSES
from ringattn.bench.predict.speed import FORWARD_FLOPS, Speed, full_area, gpu_speed
from ringattn.ring import Mask

FORWARD = ("forward",)
A100 = replace(gpu_speed("a100"), forward=215e12, backward=170e12)
H100 = replace(gpu_speed("h100"), forward=560e12, backward=430e12)


def links(inside: str) -> ClusterLinks:
    return ClusterLinks(PRESETS[inside], PRESETS["ib400"])


# github.com/zhuzilin/ring-flash-attention, README, "Performance Summary" (read 2026-11): 8192 tokens per GPU.
# Iterations per second of flash-attention on one GPU, forward and forward with backward, and the percentage of an
# eighth of it that rings reach on 8 GPUs; 32 query and 8 key heads of 128, bf16, causal.
ALONE = {"h800": (591.5, 154.7), "a100": (373.4, 94.7)}
PERCENT = [
    ("h800", "contiguous", 52.1, 53.9), ("h800", "zigzag", 85.2, 90.2), ("h800", "striped", 74.4, 82.9),
    ("a100", "contiguous", 51.4, 52.5), ("a100", "zigzag", 81.7, 89.8), ("a100", "striped", 69.6, 82.6),
]  # fmt: skip
POINTS = 8


@pytest.mark.parametrize(("gpu", "layout", "ahead", "both"), PERCENT)
def test_rings_of_ring_flash_attention(gpu: str, layout: str, ahead: float, both: float) -> None:
    call, one_device = PredictedCall(8192, 8, layout), PredictedCall(8192, 1)
    forward, backward = ALONE[gpu][0], 1 / (1 / ALONE[gpu][1] - 1 / ALONE[gpu][0])
    area = full_area(8192, causal=True)
    flops = FORWARD_FLOPS * call.head_dim * call.heads * area.pairs
    speed = gpu_speed(gpu).fit_speeds((flops * forward, one_device), (2.5 * flops * backward, one_device))
    passes = [each.seconds for each in baseline_passes(call, speed, links(speed.link))]
    alone = [
        8 * (speed.launch + speed.product_seconds(area, one_device, backward=phase == "backward")) for phase in PASSES
    ]
    assert 100 * alone[0] / passes[0] == pytest.approx(ahead, abs=POINTS)
    assert 100 * sum(alone) / sum(passes) == pytest.approx(both, abs=POINTS)


def fa3() -> Speed:
    """Return the speed of FlashAttention-3: 616 TFLOP/s, causal forward, 16k tokens, D128, 16 bits (its paper)."""
    return H100.fit_speeds((616e12, PredictedCall(16384, 1, heads=16, kv_heads=16)))


@pytest.mark.parametrize("world", [8, 16, 32, 64])
def test_ring_of_magi_attention(world: int) -> None:
    # MagiAttention's page: its ring baseline reaches 421 to 446 TFLOP/s per GPU, causal forward, cp 8 to 64. 64 query
    # and 8 key heads of 128, bf16, 8192 tokens per GPU.
    call = PredictedCall(8192, world, heads=64, kv_heads=8, nodes=world // 8)
    (result,) = baseline_passes(call, fa3(), links("nvlink4"), phases=FORWARD)
    flops = FORWARD_FLOPS * call.head_dim * call.heads * full_area(call.seqlen, causal=True).pairs / world
    assert 421e12 * 0.9 <= flops / result.seconds <= 446e12 * 1.1


def test_prefill_of_a_million_tokens_at_meta() -> None:
    # Meta, arXiv:2411.01783: 1M tokens, Llama 3 405B, 128 H100s, 93% parallel efficiency. The 16 nodes are the ring,
    # and the 8 GPUs of a node share the heads: 16 query and 1 key head of 128 per GPU. Only attention is predicted,
    # which dominates at this length.
    call, speed = PredictedCall(2**20 // 16, 16, nodes=16, heads=16, kv_heads=1), fa3()
    (result,) = baseline_passes(call, speed, links("nvlink4"), phases=FORWARD)
    alone = speed.launch + speed.product_seconds(full_area(2**20, causal=True), call)
    assert 100 * alone / 16 / result.seconds == pytest.approx(93, abs=5)


@pytest.mark.parametrize(("degree", "published"), [(8, 21.0), (4, 21.9), (2, 21.4), (1, 18.2)])
def test_ulysses_with_rings_of_usp(degree: int, published: float) -> None:
    # github.com/feifeibear/long-context-attention (USP), README: it/s of a causal forward on 8 x A100. Batch 2, 128k
    # tokens, 8 heads of 128. `degree` ranks exchange heads inside a ring of such groups.
    call, inputs = (
        PredictedCall(2**17 // 8, 8, heads=8, kv_heads=8, batch=2),
        PredictionInputs(A100, links("nvlink3"), phases=FORWARD),
    )
    if degree == 1:
        (result,) = baseline_passes(call, A100, inputs.links, phases=FORWARD)
    else:
        (result,) = ulysses_passes(call, degree, inputs, baseline_passes)
    assert 1 / result.seconds == pytest.approx(published, rel=0.14)


@pytest.mark.parametrize(("kv_heads", "tokens", "published", "points"), [
    (40, 2048, 99, 15), (40, 8192, 52, 40), (40, 32768, 10, 10),
    (5, 2048, 253, 15), (5, 8192, 68, 15), (5, 32768, 18, 15), (5, 65536, 8, 15),
])  # fmt: skip
def test_ring_against_gather_of_vllm_omni(kv_heads: int, tokens: int, published: float, points: float) -> None:
    # github.com/vllm-project/vllm-omni/issues/5092: by how many percent a ring is slower; 4 GPUs, NVLink, full forward.
    # The table names neither GPU nor heads. Assumed are an H100, 40 heads of 128 (Wan2.2), and as many or an eighth as
    # many key heads. With 32 heads the result would be 131, 17 and 5; 275, 71, 19 and 10.
    call = PredictedCall(tokens // 4, 4, mask=Mask(), heads=40, kv_heads=kv_heads)
    inputs = PredictionInputs(H100, links("nvlink4"), phases=FORWARD)
    (ring,), (gather,) = baseline_passes(call, H100, inputs.links, phases=FORWARD), all_gather_passes(call, inputs)
    slower = 100 * (ring.seconds / gather.seconds - 1)
    assert slower > 0 and slower == pytest.approx(published, abs=points)


def test_gpus_with_a_reduced_nvlink() -> None:
    rates = {name: PRESETS[gpu_speed(name).link].rate for name in ("h100", "h800", "a100", "a800")}
    assert rates["h800"] < rates["h100"] and rates["a800"] < rates["a100"]
