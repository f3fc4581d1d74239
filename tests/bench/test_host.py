"""Tests of ``bench host``: posts, launches and Python calls per hop, and the verdict on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.result import read_result
from ringattn.bench.common.timing import Samples, StepTimer
from ringattn.bench.host import command, hop_posting
from ringattn.bench.host.hop_posting import HOPS
from ringattn.bench.overlap.measure import BACKWARD, FORWARD, PHASES, TOGETHER
from ringattn.comm.transports.nccl import NcclTransport
from ringattn.kernels.device.forward import forward_kernel
from ringattn.ring.schedule.plan import plan

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def problem(tokens: int, heads: int, head_dim: int) -> AttentionConfig:
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "dtype": "bfloat16"}
    return AttentionConfig(HOPS * tokens, HOPS, causal=False, layout="contiguous", **sizes)


def test_host_time_on_a_cpu_is_a_lower_bound(tmp_path: Path) -> None:
    target, before = tmp_path / "h.json", (torch.cuda.Event, torch.cuda.Stream, torch.cat)
    words = "bench host --tokens 256 --heads 4 --head-dim 16 --chunks 2 --device cpu"
    result = CliRunner().invoke(cli.app, [*words.split(), "--json", str(target)])
    assert result.exit_code == 0, result.output
    report = read_result(target)
    assert [row["phase"] for row in report.rows] == [*PHASES] and report.notes[-1] == command.LOWER_BOUND
    assert report.notes[1] == "2 chunks; per hop of one rank, median of 20 passes, timed by clock"
    assert all(0 < row["host"] < 1e5 and "compute" not in row for row in report.rows)
    assert before == (torch.cuda.Event, torch.cuda.Stream, torch.cat)


@pytest.mark.parametrize(("device", "timer", "host", "note", "failed"), [
    ("cuda", "events", 99.0, command.AHEAD, []),
    ("cuda", "events", 101.0, command.AHEAD, ["the host is slower than the device in the forward"]),
    ("cuda", "clock", 101.0, command.BY_CLOCK, []),
    ("cpu", "clock", 101.0, command.LOWER_BOUND, []),
])  # fmt: skip
def test_host_time_is_judged_against_compute(
    device: str, timer: str, host: float, note: str, failed: list[str]
) -> None:
    # With the clock timer, host time is part of the compute time.
    rows = [{"phase": FORWARD, "host": host, "compute": 100.0}]
    assert command.host_verdict(rows, device, timer) == (note, failed)


def test_columns_are_per_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([8e-3, 6e-3] * len(PHASES))  # seconds per pass with and without launches
    monkeypatch.setattr(hop_posting, "posting_seconds", lambda step, device: next(seconds))
    monkeypatch.setattr(hop_posting, "count_python_calls", lambda step: 2 * HOPS)
    columns = {"host": pytest.approx(8e3 / HOPS), "Triton's part": pytest.approx(2e3 / HOPS), "Python calls": 2}
    shard: Any = SimpleNamespace(run=print)
    assert hop_posting.host_rows(shard, StepTimer(CPU)) == [{"phase": phase} | columns for phase in PHASES]


def test_the_first_pass_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 90.0, *(float(now) for n in range(hop_posting.REPEATS) for now in (n, n + (1 if n % 4 else 9)))])
    monkeypatch.setattr(hop_posting, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    monkeypatch.setattr(hop_posting, "median", lambda samples: samples)
    steps: list[None] = []
    seconds: Any = hop_posting.posting_seconds(lambda: steps.append(None), CPU)
    assert seconds == [1.0 if n % 4 else 9.0 for n in range(hop_posting.REPEATS)]
    assert len(steps) == hop_posting.REPEATS + 1


def test_on_a_gpu_a_rank_sends_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seconds = torch.device("cuda"), iter([8e-3, 6e-3] * len(PHASES))
    monkeypatch.setattr(hop_posting, "posting_seconds", lambda step, device: next(seconds))
    monkeypatch.setattr(hop_posting, "count_python_calls", lambda step: HOPS)
    samples = {phase: Samples((HOPS * 1e-3,)) for phase in PHASES}
    monkeypatch.setattr(
        hop_posting, "time_in_turns", lambda steps, *_, **named: {name: samples[name] for name in steps}
    )
    shard: Any = SimpleNamespace(run=print)
    clock: Any = SimpleNamespace(device=cuda)
    assert [row["compute"] for row in hop_posting.host_rows(shard, clock)] == [pytest.approx(1e3)] * len(PHASES)
    config = problem(32, 2, 16)
    own = plan(config.token_layout, config.mask, 0, 1, CPU, runs=2)
    looped = hop_posting.loop_back(own)
    assert looped.edges == (((0, 0),), ()) and len(looped.runs) == len(own.runs) > 0
    for one, real in ((looped, own), *zip(looped.runs, own.runs, strict=True)):
        for hop, base in zip(one.hops, real.hops, strict=True):
            peers = {name: None if getattr(base, name) is None else 0 for name in hop_posting.PEERS}
            assert hop == replace(base, **peers)  # type: ignore[arg-type]
        assert one.dkv_returns == {after: one.hops[base.index] for after, base in real.dkv_returns.items()}
    revised: list[Any] = []
    monkeypatch.setattr(hop_posting, "RankPasses", lambda *_, **named: revised.append(named))
    for device in (cuda, CPU):
        hop_posting.rank_passes(config, Any, device)  # type: ignore[arg-type]
    assert revised == [{"backend": "triton", "revise_plan": hop_posting.loop_back}, {"backend": "triton"}]


def test_every_hop_is_posted_and_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    posts: list[tuple[int, int]] = []
    launches: list[str] = []
    post = NcclTransport.post

    def posting(transport: NcclTransport, **messages: Any) -> Any:
        posts.append((len(messages["sends"]), len(messages["receives"])))
        return post(transport, **messages)

    monkeypatch.setattr(NcclTransport, "post", posting)

    def run(kernel: Any, *args: object, **named: object) -> None:
        launches.append(kernel.__name__)

    # Not monkeypatch: undone after the block, monkeypatch would restore the stub of `stub_device` for good.
    with hop_posting.ring_of_one(CPU) as ring, patch.object(type(forward_kernel), "run", run):
        shard = hop_posting.rank_passes(problem(32, 2, 16), ring, CPU)  # runs a forward
        assert posts == [(2, 2)] * (HOPS - 1) and launches == ["forward_kernel"] * HOPS
        posts.clear()
        launches.clear()
        shard.run(BACKWARD, TOGETHER)
        assert ring._watch is not None and str(ring._watch._posts.last_label) == "backward hop 7: dK/dV, chunk 0"
    assert len(posts) == 2 * (HOPS - 1) and set(posts) == {(2, 2)}
    assert sorted(launches) == ["delta_kernel", *["dkdv_kernel"] * HOPS, *["dq_kernel"] * HOPS]


def test_python_calls_of_a_hop() -> None:
    # `count_python_calls` counts functions of this package and of the standard library. The count is deterministic.

    def outer() -> None:
        for _ in range(5):
            problem(1, 2, 3)  # calls the constructor of a dataclass
        hop_posting.ignore_call(torch.ones(1).is_same_size(torch.nn.functional.pad(torch.ones(1), (1, 1))))

    assert hop_posting.count_python_calls(outer) == 1 + 2 * 5
    with hop_posting.ring_of_one(CPU) as ring:
        shard = hop_posting.rank_passes(problem(256, 4, 64), ring, CPU)
        count = hop_posting.count_python_calls
        calls = [count(lambda phase=phase: shard.run(phase, TOGETHER)) / HOPS for phase in PHASES]  # type: ignore[misc]
    assert calls[0] <= 120 and calls[1] <= 260  # of the forward, about 6 look up the TMA descriptors of q, k and v


@pytest.mark.nightly
def test_kernels_compile_normally_after_the_bench() -> None:
    # A kernel keeps the compiler of its first launch.
    code = """
import torch, triton
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.host import hop_posting
from ringattn.kernels.device.forward import forward_kernel
with hop_posting.ring_of_one(torch.device("cpu")) as ring:
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": "bfloat16"}
    hop_posting.rank_passes(AttentionConfig(256, 8, causal=False, layout="contiguous", **sizes), ring,
    torch.device("cpu"))
assert forward_kernel.device_caches and forward_kernel.compile is triton.compiler.compile
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
