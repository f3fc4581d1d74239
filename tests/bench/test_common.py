"""Tests of what the benches share: timing, counts, errors against float64, and provenance."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringattn import reference
from ringattn.bench.common import errors, timing
from ringattn.bench.common import provenance as origin
from ringattn.bench.common.attention import (
    BACKWARD_FLOPS,
    AttentionConfig,
    forward_flops,
    mask_data,
    mask_label,
    random_boundaries,
)
from ringattn.bench.common.flags import PatternFlag
from ringattn.bench.common.provenance import provenance, typed_command
from ringattn.bench.common.timing import Samples, StepTimer, repeats_within, time_in_turns
from ringattn.comm.topology import nvml
from ringattn.ring import slices

from ..support.cuda.device import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALVES = slices([((0, 32), (0, 32), 0), ((32, 64), (32, 64), 0)], 64)


def test_candidates_take_turns() -> None:
    order: list[str] = []
    steps = {name: partial(order.append, name) for name in "abc"}
    done: list[int] = []
    timed = time_in_turns(steps, StepTimer(CPU), repeats=3, warmup=1, progress=partial(done.append, 1))
    assert "".join(order) == "abc" * 4 and len(done) == 12
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
    assert cuda.captured is not None and cuda.captured is clocks["graph"]._capturing
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
    other = replace(config, seed=4)
    assert all(map(torch.equal, config.tensors(), config.tensors()))
    assert not any(map(torch.equal, config.tensors(), other.tensors()))
    inputs = [config.random_shard(rank, CPU) for rank in (0, 1, 1)]
    assert not any(map(torch.equal, inputs[0], other.random_shard(0, CPU)))
    assert [x.shape[1] for x in inputs[0]] == [6] * 4 and not any(map(torch.equal, inputs[0], inputs[1]))
    assert all(map(torch.equal, inputs[1], inputs[2]))
    assert replace(config, dtype="bfloat16").random_shard(0, CPU)[0].dtype == torch.bfloat16
    assert config.title == "causal, zigzag, 12 tokens over 2 ranks, B1 H4/2 D6 float32"
    assert config.flops == 2 * (12 * 13 // 2) * (6 + 3) * 4 and config.flash_flops == 2 * (12 * 12 // 2) * (6 + 3) * 4
    assert forward_flops(7, heads=3, head_dim=4, batch=2) == 2 * 7 * (4 + 4) * 3 * 2 and BACKWARD_FLOPS == 2.5


@pytest.mark.parametrize(("fields", "label", "data"), [
    ({"causal": False}, "full", {"causal": False}),
    ({"cu_seqlens": (0, 9, 64), "prefix_length": 5, "islands": ((4, 8), (20, 30))},
     "causal, 2 documents, prefix 5, 2 islands",
     {"causal": True, "cu_seqlens": (0, 9, 64), "prefix_length": 5, "islands": ((4, 8), (20, 30))}),
    ({"batch": 2, "seqused_k": (9, 64), "window": (7, 0)}, "causal, window (7, 0), keys used (9, 64)",
     {"causal": True, "window_size": (7, 0), "seqused_k": (9, 64)}),
    ({"causal": False, "block_mask": PatternFlag("longformer", {"window": 8, "global": 5})},
     "window (4, 4), 5 global tokens", {"causal": False, "window_size": (4, 4), "global_tokens": ((0, 5),)}),
    ({"causal": False, "block_mask": PatternFlag("longformer", {"window": 8, "global": 0})},
     "window (4, 4)", {"causal": False, "window_size": (4, 4)}),
    ({"causal": False, "intervals": HALVES}, "1 interval", {"causal": False, "intervals": repr(HALVES)}),
    ({"block_mask": PatternFlag("strided", {"block": 16, "stride": 32})}, "causal, 56.2% of blocks of 16",
     {"causal": True, "block_mask": {"block": 16, "blocks": (4, 4), "seen": 9}}),
])  # fmt: skip
def test_every_mask_is_named_and_recorded(fields: dict[str, Any], label: str, data: dict[str, Any]) -> None:
    mask = AttentionConfig(64, layout="contiguous", **fields).mask
    assert (mask_label(mask), mask_data(mask)) == (label, data)


@pytest.mark.parametrize(("options", "dim_v"), [({"causal": True}, 6), ({"causal": True, "window_size": (5, 0)}, 8)])
def test_exact_results_match_the_reference(options: Any, dim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "BLOCK_BYTES", 8 * 24 * 2 * 7)  # 7 rows per block
    q, dout = torch.randn(1, 24, 4, 8), torch.randn(1, 24, 4, dim_v)
    k, v, dlse = torch.randn(1, 24, 2, 8), torch.randn(1, 24, 2, dim_v), torch.randn(1, 4, 24)
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
    kept = [errors.judged_heads(batch, 8, 4, n, n) for batch, n in ((1, 64), (2, 1 << 12), (4, 1 << 12))]
    assert kept == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 3)] and errors.judged_heads(4, 8, 1, 1 << 12, 1 << 12) == (0,)
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
    for origin_of_main, command in (("/some/tool.py", "python -m package.tool"), ("/other.py", "tool.py")):
        spec = SimpleNamespace(origin=origin_of_main, name="package.tool")
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
        monkeypatch.setattr("sys.argv", ["/some/tool.py", "a b", "\udcff"])
        assert typed_command() == f"{command} 'a b' '?'"


def test_provenance_changes_with_sources_and_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(stdout="of a checkout around it"))
    assert origin.git() == {"commit": None, "modified": None}
    digests = [origin.source_digest()]
    for folder in (".", "kernels", "comm", "autotune", "ring", "reference", "conformance", "bench", ".git"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "code.py").touch()
        digests.append(origin.source_digest())
    (tmp_path / "ring" / "code.py").write_text("pass")
    assert digests[-1] == digests[-2] and len({*digests, origin.source_digest()}) == 10
    for status in ("", " M code.py"):
        answers = {"rev-parse": "abc\n", "status": status}
        monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(stdout=answers[words[3]]))  # noqa: B023
        assert origin.git() == {"commit": "abc", "modified": bool(status)}
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError))
    assert origin.git() == {"commit": None, "modified": None}


def test_provenance_has_the_gpu_its_libraries_and_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = SimpleNamespace(name="A10", major=8, minor=6, multi_processor_count=72, total_memory=24 << 30)
    places: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": lambda device: chip,
        "nccl.version": lambda: (2, 28, 9),
    }  # fmt: skip
    for name, place in places.items():
        monkeypatch.setattr(f"torch.cuda.{name}", place)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    nics = [SimpleNamespace(name="mlx5_0", gigabits=400.0), SimpleNamespace(name="eno1", gigabits=None)]
    for reason in (None, "no driver"):
        reader: Any = Mock(return_value={"sm_mhz": 1980}, reason=reason)
        monkeypatch.setattr(nvml, "GpuReader", lambda device, reader=reader: reader)
        monkeypatch.setattr(nvml, "driver_version", Mock(side_effect=OSError) if reason else lambda: "580")
        monkeypatch.setattr(nvml, "list_host_nics", lambda: nics)
        monkeypatch.setattr(nvml, "device_info", lambda device: device.index)
        monkeypatch.setattr(origin, "pairs_by_link", lambda devices: {"NVLink": devices})
        stated = provenance(GPU)
        assert stated["gpu"] == {
            "name": "A10", "capability": "8.6", "multiprocessors": 72, "memory_gib": 24.0,
            "driver": "unknown: OSError" if reason else "580",
            "clocks": {"unknown": reason} if reason else {"sm_mhz": 1980},
        }  # fmt: skip
    host = {"mlx5_0": "400 Gbit/s", "eno1": None}
    assert stated["topology"] == {"gpus": 2, "pairs": {"NVLink": [0, 1]}, "nics": host}
    assert stated["versions"].items() >= {"cuda": "13.0", "cudnn": 91000, "nccl": "2.28.9"}.items()
    assert provenance(CPU)["topology"] == {"nics": host}
    text = {"/proc/meminfo": "MemTotal:  12582912 kB", "/proc/cpuinfo": "model name\t: A\nmodel name\t: B"}
    monkeypatch.setattr(origin, "_read", lambda path: text.get(path, "0.25 0.5 1/2"))
    assert (origin.cpu()["memory_gib"], origin.cpu()["model"], origin.cpu()["load"]) == (12.0, "A", "0.25")


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


def test_times_between_events_are_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    ends: list[Any] = []

    def event(enable_timing: bool) -> Any:
        ends.append(made := Mock(elapsed_time=lambda end: 1500.0 if end is ends[-1] else math.nan))
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    assert timing.event_seconds(lambda: cuda.calls.append("step"), lambda: cuda.calls.append("prepare")) == 1.5
    assert cuda.calls == ["sleep", "prepare", "step"]
    watch = timing.DeviceStopwatch(GPU)
    with watch.count_block():
        ends[-2].record.assert_called_once_with()
        assert not ends[-1].record.called
    assert watch.seconds == watch.lap_seconds() == 1.5 and watch.lap_seconds() == 0.0
    ends[-1].record.assert_called_once_with()
    ends[-1].synchronize.assert_called_once_with()
