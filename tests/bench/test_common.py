"""Tests of what the benches share: timing, counts, errors against float64, and provenance."""

from __future__ import annotations

import json
import math
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn import reference
from ringattn.bench.common import errors, timing
from ringattn.bench.common import provenance as origin
from ringattn.bench.common.attention import BACKWARD_FLOPS, AttentionConfig, forward_flops, random_boundaries
from ringattn.bench.common.provenance import provenance, typed_command
from ringattn.bench.common.timing import Samples, StepTimer, repeats_within, time_in_turns

from ..support.cuda.device import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_candidates_take_turns() -> None:
    order: list[str] = []
    steps = {name: partial(order.append, name) for name in "abc"}
    timed = time_in_turns(steps, StepTimer(CPU), repeats=3, warmup=1)
    assert "".join(order) == "abc" * 4
    assert {name: len(samples.seconds) for name, samples in timed.items()} == {"a": 3, "b": 3, "c": 3}


def test_time_of_a_step_is_that_of_the_slowest_rank() -> None:
    class Slow(timing.RankTeam):
        def wait_until_ready(self) -> None:
            order.append("ready")

        def slowest_seconds(self, seconds: float) -> float:
            return seconds + 5

    def step() -> None:
        order.append("step")
        time.sleep(0.02)

    order: list[str] = []
    samples = time_in_turns({"sleep": step}, StepTimer(CPU, Slow()), repeats=3, warmup=0)["sleep"]
    assert 5.02 <= samples.median < 10 and order == ["ready", "step"] * 3


def test_median_spread_and_number_of_samples() -> None:
    samples = Samples((4.0, 1.0, 2.0, 3.0, 5.0))
    assert samples.median == 3.0 and samples.spread == pytest.approx(1 / 3)
    assert Samples((1.0,)).spread == 0.0
    counts = [repeats_within(1.0, one_round) for one_round in (0.1, 10.0, 0.0)]
    assert counts == [10, timing.MIN_SAMPLES, timing.MAX_SAMPLES]


def test_gpu_timers_flush_and_enqueue_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # The events and graph clocks keep the device busy while the host enqueues. All clocks flush the cache first.
    cuda = FakeCuda(monkeypatch)
    flushed: Any = SimpleNamespace(zero_=lambda: cuda.calls.append("flush"))
    clocks = {name: StepTimer(GPU, timer=name, _flush=flushed) for name in ("", "graph", "clock")}
    assert clocks[""].timer == "events" and StepTimer(CPU).timer == "clock"
    with clocks["graph"].capture_stream():
        step = clocks["graph"].prepare_step(lambda: cuda.calls.append("step"))
    assert cuda.calls == ["stream of priority 0", "step", "synchronize", "capture", "step"]
    for name, run, calls in (
        ("", lambda: cuda.calls.append("step"), ["synchronize", "sleep", "flush", "step"]),
        ("graph", step, ["synchronize", "sleep", "flush", "replay"]),
        ("clock", lambda: cuda.calls.append("step"), ["flush", "synchronize", "step", "synchronize"]),
    ):
        cuda.calls.clear()
        assert 0 <= clocks[name](run) < 60 and cuda.calls == calls


def test_packed_documents_depend_on_the_seed() -> None:
    ends = random_boundaries(4096, 64, seed=1)
    assert ends == random_boundaries(4096, 64, seed=1) != random_boundaries(4096, 64, seed=2)
    assert ends[0] == 0 and ends[-1] == 4096 and ends == sorted({*ends}) and 32 < len(ends) < 128
    with pytest.raises(ValueError, match=r"documents is 0: .* at least 1"):
        random_boundaries(64, 0, seed=0)


def test_inputs_and_their_flops() -> None:
    config = AttentionConfig(12, 2, heads=4, kv_heads=2, head_dim=6, head_dim_v=3, seed=3)
    assert [x.shape for x in config.tensors()] == [(1, 12, 4, 6), (1, 12, 2, 6), (1, 12, 2, 3), (1, 12, 4, 3)]
    assert all(torch.equal(a, b) for a, b in zip(config.tensors(), config.tensors(), strict=True))
    inputs = [config.random_shard(rank, CPU) for rank in (0, 1, 1)]
    assert [x.shape[1] for x in inputs[0]] == [6] * 4 and not any(map(torch.equal, inputs[0], inputs[1]))
    assert all(map(torch.equal, inputs[1], inputs[2]))
    assert config.flops == 2 * (12 * 13 // 2) * (6 + 3) * 4 and config.flash_flops == 2 * (12 * 12 // 2) * (6 + 3) * 4
    assert forward_flops(7, heads=3, head_dim=4, batch=2) == 2 * 7 * (4 + 4) * 3 * 2 and BACKWARD_FLOPS == 2.5


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (5, 0)}])
def test_exact_results_match_the_reference(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "BLOCK_BYTES", 8 * 24 * 2 * 7)  # 7 rows per block
    q, dout = torch.randn(1, 24, 4, 8), torch.randn(1, 24, 4, 8)
    k, v, dlse = torch.randn(1, 24, 2, 8), torch.randn(1, 24, 2, 8), torch.randn(1, 4, 24)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    results = reference.attention(*leaves, **options)
    grads = torch.autograd.grad(results, leaves, (dout.double(), dlse.double()))
    whole = dict(zip(errors.RESULTS_WITH_LSE, [*results, *grads], strict=True))
    judge = errors.build_judge(errors.AttentionInputs(q, k, v, dout, dlse), options, (1,))
    assert judge.heads == (2, 3) and max(judge.errors(whole).values()) < 1e-12
    whole["dk"] = whole["dk"] + 1e-3
    assert judge.errors(whole)["dk"] == pytest.approx(1e-3) and judge.failing_results(judge.errors(whole)) == ["dk"]
    assert judge.failing_results({"dv": math.nan, "dq": 0.0}) == ["dv"]
    eps, usual = torch.finfo(torch.float32).eps, judge.pytorch_errors
    assert 0 < max(usual.values()) < 1e-5
    assert [errors.judged_heads(1, 8, 4, n, n) for n in (64, 1 << 14)] == [(0, 1, 2, 3), (0, 3)]
    sizes = {name: judge.exact[name].abs().max().item() for name in errors.RESULTS_WITH_LSE}
    assert judge.limits == {name: pytest.approx(2 * usual[name] + eps * size) for name, size in sizes.items()}


def test_limits_are_finite_if_rows_see_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # This PyTorch attention returns NaN for rows that see no key.

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, **_: Any) -> Any:
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attn_mask, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    config = AttentionConfig(64, 1, 2, heads=4, kv_heads=2, head_dim=16, causal=False, seqused_k=(0, 33))
    (q, k, v, dout), options = config.tensors(), config.reference_masks(CPU)
    assert max(errors.build_judge(errors.AttentionInputs(q, k, v, dout), options).pytorch_errors.values()) < 1e-5


def test_provenance_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/folder/ringattn", "bench", "ring", "--json", "my file"])
    stated = provenance(CPU)
    assert stated["command"] == "ringattn bench ring --json 'my file'"
    assert stated["versions"]["torch"] == torch.__version__
    assert stated["cpu"]["cores"] >= 1 and stated["gpu"] is None
    assert [*stated["topology"]] == ["nics"] and isinstance(stated["topology"]["nics"], dict)
    assert len(stated["ringattn"]["sources"]) == 12
    assert "/some" not in json.dumps(stated)
    monkeypatch.setattr("sys.argv", ["/some/ringattn/__main__.py", "demo"])
    assert typed_command() == "python -m ringattn demo"


def test_provenance_changes_with_sources_and_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    digests = [origin.source_digest()]
    for folder in ("kernels", "comm", "autotune", "ring", "reference", "bench", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").touch()
        digests.append(origin.source_digest())
    assert len({*digests}) == 7 and digests[-1] == digests[-2]
    for status in ("", " M code.py"):
        answers = {"rev-parse": "abc\n", "status": status}
        monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(stdout=answers[words[3]]))  # noqa: B023
        assert origin.git() == {"commit": "abc", "modified": bool(status)}
    chip = SimpleNamespace(name="A10", major=8, minor=6, multi_processor_count=72, total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert [origin.gpu(GPU)[name] for name in ("name", "capability", "memory_gib")] == ["A10", "8.6", 24.0]
    monkeypatch.setattr(origin, "_read", lambda path: "MemTotal:  12582912 kB" if path == "/proc/meminfo" else "")
    assert origin.cpu()["memory_gib"] == 12.0


def test_progress_into_a_pipe_prints_few_lines(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from ringattn.bench.common import progress as module

    seconds = iter(range(0, 100, 4))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for silent, lines in ((True, []), (False, ["timing: 1 of 5", "timing: 4 of 5"])):
        with module.progress(silent=silent) as step:
            step("timing", 2)
            step("timing", 3)
            for _ in range(5):
                step("timing", None)
        assert capfd.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_a_stopwatch_sums_its_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watch = timing.DeviceStopwatch(CPU)
    for _ in range(2):
        with watch.count_block():
            pass
    assert (watch.lap_seconds(), watch.lap_seconds()) == (3.0, 0.0)
