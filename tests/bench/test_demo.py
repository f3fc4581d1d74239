"""Tests of ``ringattn demo``: sharded and unsharded training agree, and a broken ring is detected."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from typer.testing import CliRunner

from ringattn import ring_attention
from ringattn.bench.common import ranks
from ringattn.bench.common.attention import sdpa_attention
from ringattn.bench.common.memory import PeakMemory, return_freed_memory
from ringattn.bench.common.memory_table import trained_bytes
from ringattn.bench.common.result import Result, read_result
from ringattn.bench.demo import command, compare
from ringattn.bench.demo.compare import TrainingRecorder, TrainingRun, agreement_result, comparison_row, prepare_whole
from ringattn.examples import train
from ringattn.examples.model import rotate, rotation
from ringattn.examples.train import Job, JobError, RankSetup, Run, Training, read_text, train_virtual_ranks

from ..support.nightly import rest_nightly
from ..support.rank_processes import group_results

# 203 is not divisible by any tested world
TINY = Job(seqlen=203, steps=3, layers=1, heads=4, kv_heads=2, head_dim=8, lr=1e-2)
FLAGS = [
    f"--{name.replace('_', '-')}={getattr(TINY, name)}" for name in ("seqlen", "steps", "layers", "head_dim", "lr")
]


def invoke(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output as one line without frames."""
    result = CliRunner().invoke(command.app, arguments, env={"TERMINAL_WIDTH": "200", "COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("world", "job"), [
    (3, replace(TINY, layout="striped", kv_heads=1, layers=2, dtype="bfloat16")),
    pytest.param(4, replace(TINY, layout="contiguous", kv_heads=4, dtype="float16"), marks=pytest.mark.nightly),
    # a rank without tokens
    pytest.param(3, replace(TINY, seqlen=2, steps=1), marks=pytest.mark.nightly),
])  # fmt: skip
def test_virtual_ranks_agree_with_one_device(world: int, job: Job) -> None:
    result = compared_virtually(job, world)
    assert len(result.rows) > job.steps and result.failed == []


def compared_virtually(job: Job, world: int) -> Result:
    """Return the demo's result with all ranks as threads."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compare, "train_sharded", compare.train_virtually)
        result = compare.compare_training(job, read_text(), world)
    assert result is not None and f"({world} virtual ranks" in "".join(result.notes)
    return result


def test_weights_depend_only_on_the_seed() -> None:
    def weights(job: Job) -> dict[str, Tensor]:
        return prepare_whole(job, b"text", torch.device("cpu"))[0].model.state_dict()

    first = weights(TINY)
    torch.rand(5)
    assert all(weights(TINY)[name].equal(weight) for name, weight in first.items())
    assert not weights(replace(TINY, seed=1))["head.weight"].equal(first["head.weight"])


Attention = Callable[..., Any]
BROKEN: dict[str, tuple[Attention, str]] = {
    "mask": (lambda q, k, v, **how: ring_attention(q, k, v, **{**how, "causal": False}), "loss at step 1"),
    # same value of k, gradient times 1.0001
    "gradient": (lambda q, k, v, **how: ring_attention(q, k + 1e-4 * (k - k.detach()), v, **how),
                 "key.weight at step 1"),
    "nan": (lambda q, k, v, **how: ring_attention(q, k, v, **how) * math.nan, "loss at step 1: error nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_nightly(BROKEN, "gradient"))
def test_exit_code_of_a_broken_ring(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attention, message = BROKEN[name]
    monkeypatch.setattr(train, "ring_attention", attention)
    code, output = invoke(*FLAGS, "--world", "1", "--plot", str(tmp_path / "loss.png"))
    assert code == 1 and message in output.partition("DISAGREE")[2], output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_with_different_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(job: Job, text: bytes, device: torch.device, part: RankSetup) -> Training:
        return Training(job, bytes([part.rank]) * 300, device, part)

    monkeypatch.setattr(train, "Training", made)
    with pytest.raises(JobError, match="text differs between ranks"):
        train_virtual_ranks(TINY, read_text(), 2)


@pytest.mark.nightly
def test_processes_of_this_machine(alone: None, tmp_path: Path) -> None:
    target, rows, plot = tmp_path / "out.json", tmp_path / "out.csv", tmp_path / "loss.png"
    code, output = invoke(*FLAGS, "--json", str(target), "--csv", str(rows), "--plot", str(plot))
    assert code == 0 and " AGREE: " in output, output
    result = read_result(target)
    losses = [row["sharded"] for row in result.rows if row["name"] == "loss"]
    assert len(losses) == TINY.steps and losses == sorted(losses, reverse=True)
    assert plot.read_bytes().startswith(b"\x89PNG")
    with rows.open() as file:
        assert [float(row["sharded"]) for row in csv.DictReader(file) if row["name"] == "loss"] == losses


def test_only_the_first_launched_process_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "train_sharded", Mock())
    for place in ("train_whole", "train_exactly"):
        monkeypatch.setattr(compare, place, Mock(side_effect=AssertionError))
    for name, value in zip(ranks.LAUNCHERS[0], "1212", strict=True):
        monkeypatch.setenv(name, value)
    assert compare.compare_training(TINY, b"text", 2) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(compare, "train_whole", Mock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(RuntimeError, match=f"--seqlen is {TINY.seqlen}: the unsharded run does not fit"):
        compare.compare_training(TINY, b"text", 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("layers", "dims"), rest_nightly([(3, (4, 2, 32)), (1, (4, 4, 64))], (3, (4, 2, 32))))
def test_counted_memory_matches_the_measured_peak(layers: int, dims: tuple[int, int, int], tmp_path: Path) -> None:
    # float64 takes the most memory. Temporaries of PyTorch's operators are not counted, hence the wide limits.
    ((peak, counted),) = group_results(1, partial(peak_and_count, layers=layers, dims=dims, folder=tmp_path))
    assert 0.75 * counted < peak < 1.5 * counted


def peak_and_count(rank: int, *, layers: int, dims: tuple[int, int, int], folder: Path) -> tuple[int, int]:
    """Return the measured and the counted peak.

    Runs in a fresh process, because free blocks on a used heap would hide allocations.
    """
    heads, kv_heads, head_dim = dims
    job = Job(2048, 1, layers, heads, kv_heads, head_dim)
    training, _ = prepare_whole(job, read_text(), torch.device("cpu"))
    TrainingRecorder(str(folder)).before(training, rank)
    compare.train_exactly(job, read_text(), str(folder))
    with return_freed_memory(torch.device("cpu")):
        peak = PeakMemory(torch.device("cpu"))
        compare.train_exactly(job, read_text(), str(folder))
        return peak.bytes, trained_bytes(job.seqlen, layers, heads * head_dim, kv_heads * head_dim, 8)


@pytest.mark.parametrize(("flag", "value", "message"), [
    ("--seqlen", "100g", "--seqlen: 107,374,182,400 tokens need"),
    ("--dtype", "int8", "'int8' is not valid: it must be one of fp32, bf16, fp16"),
    ("--seqlen", "0", "'0' is not valid: it must be"),
    ("--kv-heads", "3", "--kv-heads is 3"),
    ("--head-dim", "33", "--head-dim is 33: it must be even"),
    ("--data", "2", "--data is 2: it must divide --batch, 1"),
])  # fmt: skip
def test_refusals(flag: str, value: str, message: str) -> None:
    code, output = invoke(flag, value)
    assert code == 2 and message in output


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert command.resolve_ranks(None, 1, None) == 2
    assert command.resolve_ranks(4, 2, None) == 4
    with pytest.raises(ValueError, match="--world is 5: it must be at most 4"):
        command.resolve_ranks(5, 1, None)
    with pytest.raises(ValueError, match="--world is 4: it must be a multiple of --data, 3"):
        command.resolve_ranks(4, 3, None)
    with pytest.raises(ValueError, match="rank 5 has no GPU: start at most 4 ranks"):
        command.resolve_ranks(None, 1, ranks.LaunchedRank(rank=5, world=8, local_rank=5, local_world=8))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert command.resolve_ranks(8, 1, None) == 8  # virtual ranks
    with pytest.raises(ValueError, match="--data is 2: it must be 1"):
        command.resolve_ranks(8, 2, None)


def test_exact_steps_start_from_the_weights_of_their_step(tmp_path: Path) -> None:
    cpu, job = torch.device("cpu"), replace(TINY, seqlen=16, steps=2, dtype="bfloat16")
    training, _ = prepare_whole(replace(job, dtype="float32"), read_text(), cpu)
    losses = []
    for step in range(2):
        TrainingRecorder(str(tmp_path)).before(training, step)
        training.model.double()
        training.optimizer.zero_grad()
        losses.append(training.backward(step).item())
        training.model.float()
        for weight in training.model.parameters():
            weight.data.mul_(1.5)
    exact = compare.train_exactly(job, read_text(), str(tmp_path))
    assert exact.run.losses == dict(enumerate(losses)) and losses[0] != losses[1]
    dtypes = {x.dtype for gradients in exact.gradients.values() for x in gradients.values()}
    assert dtypes == {torch.float64} and {*exact.gradients} == {0, 1}


@pytest.mark.parametrize(("device", "gpu"), [("cpu", False), ("cuda", True)])
def test_memory_of_a_job_by_hand(device: str, gpu: bool) -> None:
    job, tokens = replace(TINY, batch=3, layers=2), 3 * 100
    elements = tokens * (2 * (15 * 32 + 4 * 16) + 6 * 32 + 4 * 256)  # of activations
    needs = command.demo_needs(job, 100, ranks=4, device=torch.device(device))
    assert needs.host == 4 * ((400 << 20) + 24 * tokens) + 8 * elements
    assert needs.gpu == (4 * elements if gpu else 0)


def test_speed_and_memory_of_a_run() -> None:
    run = TrainingRun(Run({}, [9.0, 0.25, 1.0, 0.5]), {}, [3000, 1000, 2000], "2 ranks")
    told = compare.speed_and_memory("sharded", replace(TINY, batch=2), run)
    assert told == "sharded: 812 tokens/s, 0.500 s per step, peak 1.00 kB to 3.00 kB (2 ranks)"
    run = TrainingRun(Run({}, [0.5]), {}, [1000], "here")  # a single step counts, although it warms up
    assert compare.speed_and_memory("x", TINY, run) == "x: 406 tokens/s, 0.500 s per step, peak 1.00 kB (here)"


def test_one_rank_of_several_shares_cores_and_gathers_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: Any = []
    trained = Run({0: 1.0}, [1.0])
    monkeypatch.setattr(compare, "cores", lambda: 6)
    monkeypatch.setattr(compare, "PeakMemory", lambda device: SimpleNamespace(bytes=7))
    monkeypatch.setattr(compare, "gather", lambda x: torch.stack([x, x + 1]))
    monkeypatch.setattr(compare, "train_on_mesh", lambda *_: threads.append(torch.get_num_threads()) or trained)
    before = torch.get_num_threads()
    place, recorder = ranks.LaunchedRank(1, 4, 1, 2), TrainingRecorder("", gradients={0: {}})
    run = compare.train_rank(place, torch.device("cpu"), TINY, b"text", recorder)
    assert run == TrainingRun(trained, {0: {}}, [7, 8], "4 ranks, 1 process of 3 threads each")
    assert threads == [3] and torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("gpus", "world", "way"), [(0, 1, "virtual"), (1, 2, "virtual"), (0, 2, "cpu"), (2, 2, "cuda")]
)
def test_ranks_are_processes_unless_one_device_holds_all(
    gpus: int, world: int, way: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(compare, "train_virtually", lambda job, text, world, recorder: ("virtual", world))
    monkeypatch.setattr(
        compare, "run_process_group", lambda world, entry, *_, device: (device, world, entry is compare.train_rank)
    )
    expected = ("virtual", world) if way == "virtual" else (way, world, True)
    trained: Any = compare.train_sharded(TINY, b"text", world, TrainingRecorder(""))
    assert trained == expected


def test_losses_are_plotted_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"step": step, "name": name, "sharded": 3.0 - step, "unsharded": 4.0 - step}
        for step in (1, 2)
        for name in ("loss", "w")
    ]
    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda *given: saved.append(given))
    command.draw_losses(Result("demo", {}, [*rows]), tmp_path / "loss.png")
    ((figure, target),) = saved
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines == {"sharded": [[1, 2], [2, 1]], "unsharded": [[1, 3], [2, 2]]} and target == tmp_path / "loss.png"


def test_batches_continue_through_the_text_and_wrap_around() -> None:
    part = RankSetup(0, slice(1, 2), torch.tensor([0, 2]), sdpa_attention, lambda x: x[None])
    training = Training(replace(TINY, seqlen=3, batch=2), b"abcdefg", torch.device("cpu"), part)
    assert training.optimizer.defaults["betas"] == (0.9, 0.95)
    batches = [b"".join(bytes(x.flatten().tolist()) for x in training._batch(step)) for step in range(3)]
    assert batches == [b"dfeg", b"cedf", b"bdce"]


def turned(x: Tensor, *positions: int) -> Tensor:
    return rotate(x, rotation(torch.tensor(positions), x.shape[-1], x.dtype))


def test_rotary_scores_depend_only_on_distance() -> None:
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
    at = [turned(x, p) for x, p in ((q, 7), (k, 3), (q, 104), (k, 100))]
    torch.testing.assert_close((at[0] * at[1]).sum(-1), (at[2] * at[3]).sum(-1))
    assert turned(q, 0).equal(q)
    x, shard = torch.randn(1, 9, 2, 8), torch.tensor([1, 4, 8])
    assert turned(x[:, shard], *shard.tolist()).equal(turned(x, *range(9))[:, shard])  # bitwise equal on every shard


def test_a_comparison_fails_on_nan() -> None:
    right = {"difference": 0.0, "error": 1.0, "pytorch_error": 0.5, "allowed": 1.0}
    wrong: list[dict[str, Any]] = [{"error": math.nan}, {"allowed": math.nan}, {"error": None, "difference": 1.1}]
    assert comparison_row(0, "loss", **right)["agrees"]
    assert not any(comparison_row(0, "loss", **{**right, **change})["agrees"] for change in wrong)


def test_a_difference_in_a_late_step_fails() -> None:
    def run(name: str, *gradients: float) -> TrainingRun:
        steps = {step: {"w": torch.tensor([value])} for step, value in zip((0, 2), gradients, strict=True)}
        same = dict.fromkeys(range(3), 1.0)
        return TrainingRun(Run({**same}, [1.0]), steps, [1], name, logits=same)

    exact, whole, ring = run("exact", 1.0, 1.0), run("whole", 1.001, 1.001), run("ring", 1.001, 1.01)
    exact.run.losses.pop(1)
    result = agreement_result(TINY, ring, whole, exact)
    assert result.failed == ["w at step 3: error 1.0e-02, allowed 2.0e-03"]
    assert result.notes[0].endswith("1 layers, 4 heads (2 key/value heads) of dim 8, float32, zigzag")
    assert [note.split()[-1] for note in result.notes[1:3]] == ["(ring)", "(whole)"]
    assert result.provenance["job"]["lr"] == 1e-2
    agreeing = agreement_result(TINY, whole, whole, exact)  # 0.001 of twice 0.001, and of rounding
    assert not agreeing.failed and agreeing.notes[-1].endswith("the largest error is 50% of its limit")
    losses = [row for row in result.rows if row["name"] == "loss"]
    assert [row["pytorch error"] for row in losses] == [0.0, None, 0.0]
    # rounding of the log-sum-exp of 256 logits, of which the largest is 1
    allowed = torch.finfo(torch.float32).eps * (1 + math.log(256))
    assert [row["allowed"] for row in losses] == [pytest.approx(allowed)] * 3
    whole.run.losses[0] += 0.25
    limits = [row["allowed"] for row in agreement_result(TINY, ring, whole, exact).rows if row["name"] == "loss"]
    assert limits == [pytest.approx(2 * 0.25 + allowed)] * 3
