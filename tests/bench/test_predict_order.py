"""Test that `predict` and `bench ring` agree on which of ring, Ulysses and both combined is faster.

The links between ranks are slowed so that bytes decide, as between GPUs, and not wake-ups of processes on shared
cores. The predictor knows the rate of the links and the speed of one process.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.common.attention import BACKWARD_FLOPS, AttentionConfig
from ringattn.bench.common.memory_table import ONE_DEVICE, OURS, ULYSSES
from ringattn.bench.common.ranks import cores
from ringattn.bench.common.result import read_result
from ringattn.bench.predict.alternatives import predict_alternatives
from ringattn.bench.predict.inputs import PredictionInputs
from ringattn.bench.predict.links import ClusterLinks, LinkSpeed
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.speed import Speed

HEADS, HEAD_DIM = 4, 64
FLAT, RING = "flat ring", f"{OURS} zigzag"
"""Names of the ring in the predictor and in the bench; meshes have the same name in both."""
CLEAR = 1.15  # ratio of times that tells two candidates apart


class Case(NamedTuple):
    world: int
    batch: int
    kv_heads: int
    rate: int  # bytes per second per link
    lengths: tuple[int, ...]
    first: str  # fastest at the shortest length
    last: str = ""  # fastest at the longest length


CASES = (
    Case(2, 2, 4, 40 << 20, (512, 1024, 2048, 8192), "Ulysses 2 x ring 1", RING),
    Case(4, 4, 4, 20 << 20, (256, 512, 1024, 2048), "Ulysses 4 x ring 1"),
    Case(4, 4, 1, 20 << 20, (256, 512, 1024, 2048), RING),
)


def measured(case: Case, target: Path) -> dict[int, dict[str, float]]:
    """Return the measured seconds by total tokens and candidate."""
    flags = f"--world {case.world} --batch {case.batch} --heads {HEADS} --kv-heads {case.kv_heads} --repeats 3"
    flags += f" --head-dim {HEAD_DIM} --by {OURS},{ULYSSES} --bytes-per-second {case.rate} --device cpu"
    lengths = ",".join(map(str, case.lengths))
    result = CliRunner().invoke(
        app, ["bench", "ring", *flags.split(), "--seqlen", lengths, "--json", str(target)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    seconds: dict[int, dict[str, float]] = {}
    for row in read_result(target).rows:
        seconds.setdefault(row["tokens"], {})[row["candidate"]] = row["time"] / 1e3
    return seconds


def predicted(case: Case, tokens: int, speed: Speed) -> dict[str, float]:
    """Return the predicted seconds by candidate, under the bench's names."""
    call = PredictedCall(
        tokens // case.world, case.world, heads=HEADS, kv_heads=case.kv_heads, head_dim=HEAD_DIM, batch=case.batch,
        dtype="float32",
    )  # fmt: skip
    link = LinkSpeed(case.rate, 0.0)  # the throttled link hides the latency
    return {
        way.name.replace(FLAT, RING): way.seconds
        for way in predict_alternatives(call, PredictionInputs(speed, ClusterLinks(link, link)))
    }


def speed_of(case: Case, longest: int, seconds: float) -> Speed:
    """Return the speed of a rank that shares its cores, from the seconds of one process for the whole call."""
    flops = AttentionConfig(longest, 1, case.batch, HEADS, case.kv_heads, HEAD_DIM).flops * (1 + BACKWARD_FLOPS)
    rate = flops / seconds * min(1, cores() / case.world)
    # A core runs one program at a time. A launch takes half a millisecond of Python and PyTorch.
    return Speed(
        "a core", rate, rate, memory=8e9, multiprocessors=1, capacity=8e9, launch=5e-4, edge=64, beside=0, host=3e-4
    )


@pytest.mark.nightly
@pytest.mark.idle
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", CASES, ids=["two", "four", "one-key-head"])
def test_predict_and_bench_ring_agree_on_the_order(case: Case, tmp_path: Path) -> None:
    # Candidates that either one tells apart have the same order in the other. Ulysses wins with short shards and many
    # key heads, the ring with long shards and few key heads.
    seconds = measured(case, tmp_path / "ring.json")
    speed = speed_of(case, max(seconds), seconds[max(seconds)].pop(ONE_DEVICE))
    for tokens, by_bench in seconds.items():
        by_predictor = predicted(case, tokens, speed)
        names = [name for name in by_bench if name != ONE_DEVICE]
        # the ring, and a mesh for every power of two that divides the world
        assert {*names} <= {*by_predictor} and len(names) == case.world.bit_length()
        for a, b in permutations(names, 2):
            for times, others in ((by_bench, by_predictor), (by_predictor, by_bench)):
                if times[a] * CLEAR < times[b]:
                    assert others[a] < others[b], f"{a} before {b} at {tokens} tokens: {by_predictor}, {by_bench}"
        if tokens == min(case.lengths):
            assert min(names, key=by_bench.__getitem__) == case.first
        if tokens == max(case.lengths) and case.last:
            assert by_bench[case.last] * CLEAR < max(by_bench[name] for name in names)
