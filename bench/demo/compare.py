"""Compares the sharded and the unsharded run of one job: agreement of results, speed and memory.

Every step of the unsharded and float64 runs starts from the weights of the sharded run. Training amplifies rounding, so
independent runs would diverge however exact each step is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...examples.model import BYTES
from ...examples.train import Job, RankSetup, Run, Training, gather, train_on_mesh, train_virtual_ranks
from ..common.attention import DTYPES, sdpa_attention
from ..common.errors import allowed_error
from ..common.flags import human_count
from ..common.launching import run_process_group
from ..common.memory import PeakMemory
from ..common.output import is_printing_rank
from ..common.provenance import provenance
from ..common.ranks import LaunchedRank, cores, launched_rank
from ..common.result import Result, Row

DIFFERENCE = "sharded - unsharded"
COLUMNS = ("step", "name", DIFFERENCE, "allowed", "error", "pytorch error", "agrees", "sharded", "unsharded")
CPU = torch.device("cpu")

Gradients = dict[int, dict[str, Tensor]]
"""Gradients of the compared steps, by step and parameter."""


@dataclass
class TrainingRun:
    """Losses, gradients and peak memory of one run of the job."""

    run: Run
    gradients: Gradients
    peaks: list[int] = field(default_factory=list)  # bytes of every process, including weights
    device_text: str = ""  # description of the devices
    logits: dict[int, float] = field(default_factory=dict)  # largest magnitude by step


@dataclass(frozen=True)
class TrainingRecorder:
    """Hooks of a training: keep gradients, and save each step's initial weights in ``folder`` or load them."""

    folder: str
    is_loading: bool = False
    gradients: Gradients = field(default_factory=dict)

    def before(self, training: Training, step: int) -> None:
        """Save the weights before ``step``, or load those of the sharded run."""
        path, model = Path(self.folder, f"{step}.pt"), training.model
        if self.is_loading:
            model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
            return
        weights = {name: gather_full(weight) for name, weight in model.state_dict().items()}
        if training.rank_setup.rank == 0:
            torch.save(weights, path)

    def after(self, training: Training, step: int) -> None:
        """Copy the gradients to the CPU if ``step`` is a compared step."""
        if step in compared_steps(training.job):
            named = {name: parameter.grad for name, parameter in training.model.named_parameters()}
            copies = {name: gather_full(grad).to("cpu", copy=True) for name, grad in named.items() if grad is not None}
            if training.rank_setup.rank == 0:
                self.gradients[step] = copies


def compared_steps(job: Job) -> list[int]:
    """Return the steps whose gradients are compared: the first, and the last, where attention is peaked."""
    return sorted({0, job.steps - 1})


def gather_full(x: Tensor) -> Tensor:
    """Return the full tensor of a ``DTensor``, and any other tensor unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let PyTorch use ``count`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_training(job: Job, text: bytes, world: int) -> Result | None:
    """Train sharded, repeat the steps unsharded, and compare; return None on ranks that do not print."""
    with TemporaryDirectory() as folder:
        ring = train_sharded(job, text, world, TrainingRecorder(folder))
        if not is_printing_rank():
            return None
        try:
            with use_threads(cores()):
                whole, exact = train_whole(job, text, folder), train_exactly(job, text, folder)
                return agreement_result(job, ring, whole, exact)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"--seqlen is {job.seqlen}: the unsharded run does not fit on one GPU. Use a shorter sequence."
            ) from error


def train_sharded(job: Job, text: bytes, world: int, recorder: TrainingRecorder) -> TrainingRun:
    """Train on ``world`` ranks: virtual ranks on a single device, else new or launched processes."""
    if launched_rank() is None and (world == 1 or torch.cuda.device_count() == 1):
        return train_virtually(job, text, world, recorder)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return run_process_group(world, train_rank, job, text, recorder, device=kind)


def train_virtually(job: Job, text: bytes, world: int, recorder: TrainingRecorder) -> TrainingRun:
    """Train on virtual ranks of one device."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    memory = PeakMemory(device)
    with use_threads(cores()):
        run = train_virtual_ranks(job, text, world, recorder)
    where = f"{world} virtual ranks on {device_label(device, cores())}, memory of all ranks"
    return TrainingRun(run, recorder.gradients, [memory.bytes], where)


def train_rank(
    place: LaunchedRank, device: torch.device, job: Job, text: bytes, recorder: TrainingRecorder
) -> TrainingRun:
    """Train as one rank of several processes."""
    memory, count = PeakMemory(device), max(1, cores() // place.local_world)
    with use_threads(count):
        run = train_on_mesh(job, text, device, recorder)
    peaks = gather(torch.tensor([memory.bytes], device=device)).flatten().tolist()
    where = f"{place.world} ranks, {device_label(device, count)} each"
    return TrainingRun(run, recorder.gradients, peaks, where)


def device_label(device: torch.device, count: int) -> str:
    """Return the name of a GPU, or on the CPU ``1 process of 4 threads`` for a ``count`` of 4."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"1 process of {count} thread{'s' * (count > 1)}"


def train_whole(job: Job, text: bytes, folder: str) -> TrainingRun:
    """Repeat the steps on the whole batch in this process, with PyTorch's attention and no recomputation."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    memory, recorder = PeakMemory(device), TrainingRecorder(folder, is_loading=True)
    training, logits = prepare_whole(job, text, device)
    run = training.fit(recorder)
    return TrainingRun(run, recorder.gradients, [memory.bytes], device_label(device, cores()), logits)


def train_exactly(job: Job, text: bytes, folder: str) -> TrainingRun:
    """Compute loss and gradients of the compared steps in float64 on the CPU, for the whole batch."""
    recorder = TrainingRecorder(folder, is_loading=True)
    training, logits = prepare_whole(replace(job, dtype="float32"), text, CPU)
    training.model.double()
    for step in compared_steps(job):
        recorder.before(training, step)
        training.optimizer.zero_grad()
        training.run.losses[step] = training.backward(step).item()
        recorder.after(training, step)
    return TrainingRun(training.run, recorder.gradients, logits=logits)


def prepare_whole(job: Job, text: bytes, device: torch.device) -> tuple[Training, dict[int, float]]:
    """Return an unsharded training, and a dict that it fills with the largest logit of every step."""
    part = RankSetup(0, slice(None), torch.arange(job.seqlen), sdpa_attention, lambda x: x[None], name="whole")
    training, logits = Training(replace(job, block=0), text, device, part), dict[int, float]()

    def keep_largest(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        logits[len(training.run.losses)] = output.detach().abs().max().item()

    training.model.head.register_forward_hook(keep_largest)
    return training, logits


def agreement_result(job: Job, ring: TrainingRun, whole: TrainingRun, exact: TrainingRun) -> Result:
    """Build a row for every loss, and for every parameter's gradient of the compared steps.

    Errors are those of the largest element. The allowed error is twice PyTorch's own error against float64 in the same
    dtype, plus rounding: the dtype's ``eps`` times the largest element. Summing the same terms in another order gives
    errors of about the same size. The limit holds at every step because all runs start each step from the same weights.
    """
    rows: list[Row] = [*loss_rows(job, ring, whole, exact), *gradient_rows(job, ring, whole, exact)]
    disagreeing = [row for row in rows if not row["agrees"]]
    failed = [
        f"{row['name']} at step {row['step']}: error {row_error(row):.1e}, allowed {row['allowed']:.1e}"
        for row in disagreeing
    ]
    notes = [
        f"{job.batch} x {job.seqlen:,} bytes of Python's help text per step; {job.layers} layers, {job.heads} heads "
        f"({job.kv_heads} key/value heads) of dim {job.head_dim}, {job.dtype}, {job.layout}",
        speed_and_memory("sharded", job, ring),
        speed_and_memory("unsharded", job, whole),
        "allowed: twice PyTorch's own error against float64, plus rounding (eps times the largest element)",
    ]
    if failed:
        notes.append(f"DISAGREE: {len(failed)} of {len(rows)} losses and gradients exceed their limit")
    else:
        nearest = max(row_error(row) / row["allowed"] if row["allowed"] else 0.0 for row in rows)
        notes.append(f"AGREE: all losses and gradients; the largest error is {nearest:.0%} of its limit")
    about = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"job": asdict(job)}
    return Result("demo", dict.fromkeys(COLUMNS, ""), rows, failed, notes, about)


def row_error(row: Row) -> float:
    """Return a row's error against float64, or its difference to the unsharded run if float64 was not computed."""
    value = row[DIFFERENCE] if row["error"] is None else row["error"]
    return float(value)


def comparison_row(
    step: int, name: str, difference: float, error: float | None, pytorch_error: float | None, allowed: float
) -> dict[str, Any]:
    """Build the row of one loss or gradient at ``step``, which counts from 0.

    The row agrees if ``error``, or ``difference`` if ``error`` is None, is at most ``allowed`` and not NaN.
    """
    row: dict[str, Any] = {"step": step + 1, "name": name, DIFFERENCE: difference, "allowed": allowed}
    row |= {"error": error, "pytorch error": pytorch_error}
    return row | {"agrees": row_error(row) <= allowed}


def loss_rows(job: Job, ring: TrainingRun, whole: TrainingRun, exact: TrainingRun) -> Iterator[dict[str, Any]]:
    """Yield a row for every step's loss; its limit uses the largest PyTorch error of the steps with float64."""
    sharded, unsharded, float64 = (trained.run.losses for trained in (ring, whole, exact))
    pytorch_errors = {step: abs(unsharded[step] - loss) for step, loss in float64.items()}
    largest, dtype = max(pytorch_errors.values()), DTYPES[job.dtype]
    for step in range(job.steps):
        # A token's loss is the difference of two numbers of this size: the log-sum-exp of its logits, and one logit.
        magnitude = whole.logits[step] + math.log(BYTES)
        error = abs(sharded[step] - float64[step]) if step in float64 else None
        allowed = allowed_error(largest, magnitude, dtype)
        row = comparison_row(
            step, "loss", abs(sharded[step] - unsharded[step]), error, pytorch_errors.get(step), allowed
        )
        yield row | {"sharded": sharded[step], "unsharded": unsharded[step]}


def gradient_rows(job: Job, ring: TrainingRun, whole: TrainingRun, exact: TrainingRun) -> Iterator[dict[str, Any]]:
    """Yield a row for every parameter at every compared step."""
    for step in compared_steps(job):
        for name in exact.gradients[step]:
            sharded, unsharded, float64 = (run.gradients[step][name].double() for run in (ring, whole, exact))
            error, pytorch_error = ((x - float64).abs().max().item() for x in (sharded, unsharded))
            allowed = allowed_error(pytorch_error, float64.abs().max().item(), DTYPES[job.dtype])
            yield comparison_row(step, name, (sharded - unsharded).abs().max().item(), error, pytorch_error, allowed)


def speed_and_memory(name: str, job: Job, trained: TrainingRun) -> str:
    """Return a line with a run's speed (of the median step after the first) and peak memory."""
    peaks = dict.fromkeys(human_count(peak, "B") for peak in (min(trained.peaks), max(trained.peaks)))
    timed = sorted(trained.run.seconds[1:] or trained.run.seconds)
    seconds = timed[len(timed) // 2]
    speed = f"{job.batch * job.seqlen / seconds:,.0f} tokens/s, {seconds:.3f} s per step"
    return f"{name}: {speed}, peak {' to '.join(peaks)} ({trained.device_text})"
