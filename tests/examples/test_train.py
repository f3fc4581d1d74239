"""``train.py``: losses equal those of one process, a resumed run equals an unbroken one, and ranks share memory."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Ring
from ringattn.bench.common.attention import sdpa_attention
from ringattn.bench.common.memory import PeakMemory, return_freed_memory
from ringattn.bench.demo.compare import TrainingRecorder, TrainingRun, prepare_whole
from ringattn.examples import train
from ringattn.examples.model import Decoder
from ringattn.examples.train import (
    Job,
    JobError,
    RankSetup,
    Run,
    parse_command_line,
    read_text,
    train_on_mesh,
    train_virtual_ranks,
)

from ..support.rank_processes import group_results
from ..support.tolerance import assert_as_exact_as_pytorch

CPU = torch.device("cpu")
TINY = Job(seqlen=203, steps=4, layers=2, heads=4, kv_heads=2, head_dim=8, batch=2, block=32, lr=1e-3)


def process(rank: int, job: Job) -> Run:
    return train_on_mesh(job, read_text(), CPU)


def recorded(rank: int, job: Job, recorder: TrainingRecorder) -> TrainingRun:
    return TrainingRun(train_on_mesh(job, read_text(), CPU, recorder), recorder.gradients)


SIZES: dict[str, int] = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}


def plain_losses(model: Decoder, tokens: Tensor, positions: Tensor, attend: Any, labels: Tensor) -> Tensor:
    """Compute the losses of :class:`Decoder` with plain operations, and rotary embedding with complex numbers."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def turn(x: Tensor) -> Tensor:
        angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)

    x = model.embed.weight[tokens]
    for layer in model.layers:
        weights: Any = {name: part.weight for name, part in layer.named_children()}
        y = norm(x, weights["attention_norm"])
        q, k, v = ((y @ weights[name].mT).unflatten(-1, (-1, 8)) for name in ("query", "key", "value"))
        x = x + attend(turn(q), turn(k), v).flatten(2) @ weights["out"].mT
        y = norm(x, weights["feed_norm"])
        x = x + (torch.nn.functional.silu(y @ weights["gate"].mT) * (y @ weights["up"].mT)) @ weights["down"].mT
    logits = norm(x, model.norm.weight) @ model.head.weight.mT
    return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@pytest.mark.parametrize("block", [1, 7, 300, None])
def test_losses_and_gradients_equal_plain_operations(block: int | None) -> None:
    tokens, labels = torch.randint(256, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16) * 99_991  # far apart, so that angles need float64

    def backward(losses_of: Any, dtype: torch.dtype) -> list[Tensor]:
        model = Decoder(**SIZES, block=block)
        model.initialize(0)
        model.to(dtype)
        losses = losses_of(model, tokens, positions, sdpa_attention, labels)
        return [losses, *torch.autograd.grad(losses.sum(), [*model.parameters()])]

    names = ("losses", *(name for name, _ in Decoder(**SIZES).named_parameters()))
    single, double = (backward(plain_losses, dtype) for dtype in (torch.float32, torch.float64))
    for given in zip(names, backward(Decoder.forward, torch.float32), single, double, strict=True):
        assert_as_exact_as_pytorch(*given)
    model = Decoder(**SIZES, block=block)
    logits = model(tokens, positions, sdpa_attention)
    assert logits.shape == (2, 16, 256)
    expected = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
    torch.testing.assert_close(model(tokens, positions, sdpa_attention, labels), expected)


@pytest.mark.parametrize("seed", [0, 5])
def test_initial_weights_have_unit_gain_and_depend_on_the_seed_alone(seed: int) -> None:
    model, generator = Decoder(**SIZES), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.initialize(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            assert module.weight.eq(1).all()
        elif isinstance(module, torch.nn.Embedding | torch.nn.Linear):
            std = module.weight.shape[1] ** -0.5 if isinstance(module, torch.nn.Linear) else 1.0
            assert module.weight.equal(torch.empty(module.weight.shape).normal_(std=std, generator=generator))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_process_trains_in_a_group_on_its_own_device(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the group after an error, too."""
    calls: list[Any] = []
    for home, name in ((dist, "init_process_group"), (dist, "destroy_process_group"), (torch.cuda, "set_device")):
        monkeypatch.setattr(home, name, lambda *given, name=name: calls.append((name, *given)))

    def fail(*given: Any) -> None:
        calls.append(given)
        raise JobError("no text")

    monkeypatch.setattr(train, "train_on_mesh", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(JobError, match="no text"):
        train.train_process(TINY, b"text")
    device = torch.device("cuda", 3) if gpu else CPU
    in_group = [("init_process_group",), (TINY, b"text", device), ("destroy_process_group",)]
    assert calls == [("set_device", device)] * gpu + in_group


def test_the_forward_ring_runs_once(forward_rings: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the loss with the mean over the text's first bytes, too, and close the rings after the run."""
    rings: Any = []
    monkeypatch.setattr(train, "Ring", lambda group, **options: rings.append(Ring(group, **options)) or rings[-1])
    observer = Mock()
    run = train_virtual_ranks(replace(TINY, steps=1, seed=3), read_text(), 2, observer)
    assert len(forward_rings) == 2 * TINY.layers
    assert observer.before.call_count == observer.after.call_count == 2
    model, text = Decoder(**SIZES), torch.tensor([*read_text()[: 2 * TINY.seqlen + 1]])
    model.initialize(3)
    rows = text[:-1].view(2, -1), text[1:].view(2, -1)
    losses = model(rows[0], torch.arange(TINY.seqlen), sdpa_attention, rows[1])
    assert run.losses == {0: pytest.approx(losses.mean().item(), rel=1e-6)}
    for ring in rings:
        with pytest.raises(ValueError, match="ring is closed"):
            ring.open(CPU)


def one_process(job: Job, text: bytes, gather: Any = lambda flat: flat[None], **setup: Any) -> train.Training:
    part = RankSetup(0, slice(None), torch.arange(job.seqlen), attend=no_attention, gather=gather)
    return train.Training(job, text, CPU, replace(part, **setup))


@pytest.mark.parametrize(("dtype", "block", "in_model"), [("float32", 0, None), ("bfloat16", 7, 7)])
def test_settings_of_the_model_are_those_of_the_job(dtype: str, block: int, in_model: int | None) -> None:
    dtypes = set[torch.dtype]()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtypes.update(x.dtype for x in (q, k, v))
        return sdpa_attention(q, k, v)

    training = one_process(replace(TINY, seqlen=20, dtype=dtype, block=block), b"text", attend=attend)
    assert training.backward(0).dtype == torch.float64
    assert dtypes == {getattr(torch, dtype)}
    assert training.model.block == in_model and len(training.model.layers) == TINY.layers


@pytest.mark.parametrize("name", train.CHOICES["layout"])
def test_the_layout_of_a_job_is_that_of_its_ring(name: str) -> None:
    ring: Any = nullcontext()
    ring.size = 3
    with train.open_ring(ring, replace(TINY, layout=name)) as (layout, _):
        assert layout == getattr(Layout, name)(TINY.seqlen, 3)


def test_rows_are_consecutive_pieces_of_a_text_that_wraps_around() -> None:
    job, text = replace(TINY, seqlen=4, batch=2), b"abcdefghijk"
    training = one_process(job, text, rows=slice(1, 2), positions=torch.tensor([0, 1, 3]))
    for step, tokens, labels in ((0, b"efh", b"fgi"), (1, b"bce", b"cdf")):
        assert [bytes(*x.tolist()) for x in training._batch(step)] == [tokens, labels]


COMPARED = [*(f"--{name.replace('_', '-')}" for name in vars(TINY)), "the text"]


@pytest.mark.parametrize("name", COMPARED)
def test_jobs_and_texts_that_differ_between_ranks_are_refused(name: str) -> None:
    comparisons = iter(COMPARED)

    def gather(digest: Tensor) -> Tensor:
        return torch.stack([digest, digest ^ int(next(comparisons) == name)])

    with pytest.raises(JobError, match=f"^{name} differs between ranks"):
        one_process(TINY, b"text", gather)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_on_a_mesh_equals_one_process(dtype: str, tmp_path: Path) -> None:
    """Train 2 rows on 2 rings of 2 ranks, with weights sharded over all 4.

    Compare every loss and the first gradients, because Adam hides a constant factor of the gradients from the losses.
    """
    job, text = replace(TINY, data=2, dtype=dtype), read_text()
    runs = group_results(4, partial(recorded, job=job, recorder=TrainingRecorder(str(tmp_path))))
    assert all(each.run.losses == runs[0].run.losses for each in runs)
    (single, logits), (exact, _) = (prepare_whole(each, text, CPU) for each in (job, replace(job, dtype="float32")))
    exact.model.double()
    recorders = TrainingRecorder(str(tmp_path)), TrainingRecorder(str(tmp_path))
    fitted = [training.fit(recorder) for training, recorder in zip((single, exact), recorders, strict=True)]
    losses = [torch.tensor([*run.losses.values()], dtype=torch.float64) for run in (runs[0].run, *fitted)]
    size = max(logits.values())  # a token's loss is a difference of numbers this large
    assert_as_exact_as_pytorch("losses", losses[0].float(), losses[1].float(), losses[2], magnitude=size)
    for name in runs[0].gradients[0]:
        three = (gradients[0][name] for gradients in (runs[0].gradients, *(each.gradients for each in recorders)))
        assert_as_exact_as_pytorch(name, *three)
    assert runs[0].run.losses[3] < runs[0].run.losses[0]


def no_attention(*given: Any) -> Any:
    raise AssertionError("no step runs")


def test_fully_sharded_gradients_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam hides a constant factor of the gradients, so check that FSDP2 divides by nothing."""
    calls: list[tuple[str, object]] = []

    def fully_shard(module: Any) -> Any:
        return SimpleNamespace(
            set_gradient_divide_factor=lambda factor: calls.append(("divide", factor)),
            set_force_sum_reduction_for_comms=lambda enable: calls.append(("sum", enable)),
        )

    monkeypatch.setattr(train, "fully_shard", fully_shard)
    one_process(replace(TINY, data=2), b"text", fully_sharded=True)
    assert calls == [("divide", 1.0), ("sum", True)] * (TINY.layers + 1)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    job = replace(TINY, checkpoint=str(tmp_path), every=2)
    whole = train_virtual_ranks(replace(TINY, steps=6), read_text(), 2)
    train_virtual_ranks(replace(job, steps=3), read_text(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]
    resumed = train_virtual_ranks(replace(job, steps=6), read_text(), 2)
    assert resumed.losses == whole.losses and len(resumed.seconds) == 3
    again = train_virtual_ranks(replace(job, steps=6), read_text(), 1)  # no step is left
    assert again.losses == whole.losses and again.seconds == []
    other = r"another job: layers 2, here 1"
    with pytest.raises(JobError, match=other):
        train_virtual_ranks(replace(job, layers=1), read_text(), 1)


@pytest.mark.nightly
def test_a_mesh_resumes_bit_for_bit_and_as_another_mesh(tmp_path: Path) -> None:
    job = replace(TINY, checkpoint=str(tmp_path), data=2)
    (whole, *_) = group_results(4, partial(process, job=replace(TINY, steps=4, data=2)))
    group_results(4, partial(process, job=replace(job, steps=2)))
    assert group_results(2, partial(process, job=replace(job, data=1, block=0)))[0].losses == pytest.approx(
        whole.losses, rel=1e-6
    )
    (tmp_path / "00000004" / ".metadata").unlink()
    assert group_results(4, partial(process, job=job))[0].losses == whole.losses


LONG = Job(seqlen=16384, steps=1, layers=8, heads=8, kv_heads=2, head_dim=32)


def warm(rank: int, job: Job) -> int:
    """Return the peak memory of a step after a warm-up.

    The warm-up excludes what PyTorch imports and caches in its first step. Freed blocks go back to the system at once,
    because tensors cut from blocks of the warm-up would stay resident.
    """
    with return_freed_memory(CPU):
        train_on_mesh(replace(job, seqlen=64, steps=1), read_text(), CPU)
        peak = PeakMemory(CPU)
        train_on_mesh(job, read_text(), CPU)
        return peak.bytes


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_four_ranks_share_the_memory_of_one_process() -> None:
    """Bound each of 4 ranks by 0.30 of one process, including weights and slots (bench/results/LOG.md)."""
    (single,) = group_results(1, partial(warm, job=LONG), patience=1200)
    ranks = group_results(4, partial(warm, job=LONG), patience=1200)
    assert max(ranks) <= 0.30 * single, (ranks, single)


@pytest.mark.parametrize(
    ("command", "job", "world"),
    [
        ("", Job(), 2),
        ("--seqlen 256k --batch 2 --data 2 --checkpoint a", Job(seqlen=1 << 18, batch=2, data=2, checkpoint="a"), 2),
        ("--seqlen 1M --head-dim 64 --dtype bfloat16 --layout striped --lr 1 --world 3",
         Job(seqlen=1 << 20, head_dim=64, dtype="bfloat16", layout="striped", lr=1.0), 3),
    ],
)  # fmt: skip
def test_command_line_to_job(command: str, job: Job, world: int) -> None:
    assert parse_command_line(command.split()) == (job, world)


AT_LEAST_1 = ("seqlen", "steps", "layers", "heads", "kv-heads", "head-dim", "batch", "data", "every")


@pytest.mark.parametrize(
    ("command", "message"),
    [("--seqlen 8x", "'8x' is not a size"), ("--head-dim 33", "must be even"),
     *((f"--{name} 0", f"--{name} is 0: it must be at least 1") for name in AT_LEAST_1),
     ("--heads 3", "--kv-heads is 2: it must divide --heads, 3"),
     ("--data 2", "--data is 2: it must divide --batch, 1"),
     ("--dtype int8", "invalid choice: 'int8'")],
)  # fmt: skip
def test_wrong_command_lines_are_refused(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_command_line(command.split())
    assert refused.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.nightly
def test_under_torchrun(tmp_path: Path) -> None:
    def run(*more: str, ranks: int = 2, code: int = 0) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "ringattn.examples.train", "--seqlen", "64", "--layers", "1", "--checkpoint", "runs", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode != 0) == code, done.stderr
        return done.stdout + done.stderr

    assert "step 2 of 2" in run("--steps", "2")
    again = run("--steps", "3", ranks=1)
    assert "step 3 of 3" in again and "step 2 of" not in again
    assert "lr 0.003, here 1.0" in run("--steps", "4", "--lr", "1", code=1)


def test_progress_lines_of_rank_0_and_settings_of_the_optimizer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[dict[str, Any], int]] = []

    def adam(parameters: Any, **options: Any) -> Any:
        made.append((options, opened[-1]))
        return optimizer(parameters, **options)

    optimizer = torch.optim.Adam
    opened: Any = []
    monkeypatch.setattr(torch.optim, "Adam", adam)
    monkeypatch.setattr(train, "Ring", lambda group, *, slots: opened.append(slots) or Ring(group, slots=slots))
    job = replace(TINY, seqlen=4, layers=1, heads=1, kv_heads=1, head_dim=2, steps=41, lr=0.25)
    run = train_virtual_ranks(job, read_text(), 2)
    pattern = re.compile(r"sharded, step (\d+) of 41: loss (\S+), ([\d,]+) tokens/s")
    lines = [pattern.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    steps = [*range(2, 41, 2), 41]
    speeds = [f"{2 * 4 / seconds:,.0f}" for seconds in run.seconds]
    assert [line and line.groups() for line in lines] == [
        (str(n), f"{run.losses[n - 1]:.4f}", speeds[n - 1]) for n in steps
    ]
    assert made == [({"lr": 0.25, "betas": (0.9, 0.95)}, 2)] * 2
    with pytest.raises(JobError, match="--data is 2: it must be 1 for virtual ranks"):
        train_virtual_ranks(replace(TINY, data=2), read_text(), 2)


def test_the_module_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(Path(str(train.__file__)).read_text(), "train.py", "exec")
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        exec(code, {"__name__": "__main__", "__package__": "ringattn.examples"})
    assert "--kv-heads" in capsys.readouterr().out


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("rank", "seconds", "printed"), [
    (0, [1.0, 4.0, 2.0], "loss 0.5000, 1,000 tokens/s\n"), (1, [1.0], ""), (0, [], "")
])  # fmt: skip
def test_the_command_prints_the_last_loss_on_rank_0(
    launched: bool, rank: int, seconds: list[float], printed: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ran: Any = []
    run = Run({0: 0.1, 1: 0.5, 2: 0.7}, seconds)
    monkeypatch.setattr(train, "train_process", lambda *given: ran.append(given) or run)
    monkeypatch.setattr(train, "train_virtual_ranks", lambda *given: ran.append(given) or run)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: launched)
    monkeypatch.setattr("sys.argv", ["train.py", "--steps=2", "--seqlen=1000", "--batch=2", "--world=3"])
    monkeypatch.setenv("RANK", str(rank))
    train.main()
    job = Job(steps=2, seqlen=1000, batch=2)
    assert ran == [(job, read_text()) if launched else (job, read_text(), 3)] and capsys.readouterr().out == printed


def test_rings_divide_the_ranks_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    with pytest.raises(JobError, match="--data is 4: it must divide the number of ranks, 6"):
        train_on_mesh(replace(TINY, data=4, batch=4), b"", CPU)


def test_ranks_of_a_mesh_take_the_rows_of_their_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    training, mesh = Mock(), MagicMock()
    mesh.get_local_rank.side_effect = {"data": 1, "context": 2}.get
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(train, "init_device_mesh", lambda *args, **names: mesh)
    monkeypatch.setattr(train, "Ring", Mock())
    monkeypatch.setattr(train, "open_ring", lambda ring, job: nullcontext((Layout.contiguous(12, 3), None)))
    monkeypatch.setattr(train, "Training", training)
    train_on_mesh(replace(TINY, data=2, batch=4), b"", CPU)
    part = training.call_args.args[3]
    assert (part.rank, part.rows, part.positions.tolist()) == (5, slice(2, 4), [8, 9, 10, 11])
