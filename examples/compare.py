"""``ringattn demo``: do the sharded and the whole run of one job agree, and how fast was each.

The whole and the float64 run start every step from the weights that the sharded one had there: training amplifies
rounding, so that two runs left to themselves part for good, however exact each step is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..bench.common.attention import DTYPES
from ..bench.common.errors import tolerance
from ..bench.common.flags import human
from ..bench.common.output import prints
from ..bench.common.provenance import provenance
from ..bench.common.ranks import cores
from ..bench.common.result import Result, Row
from .demo import Job
from .model import BYTES
from .train import Part, Run, Training, device_name, on_all_ranks, threads

COLUMNS = ("step", "name", "sharded - whole", "allowed", "error", "pytorch error", "agrees", "sharded", "whole")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Runs:
    """Three runs of one job."""

    ring: Run
    whole: Run
    exact: Run


@dataclass(frozen=True)
class Kept:
    """Keeps a run's gradients, and the weights that each step starts from in files, or takes them from there.

    In memory the weights would count as the run's.
    """

    folder: str
    loads: bool = False

    def before(self, training: Training, step: int) -> None:
        """Weights."""
        path, model = Path(self.folder, f"{step}.pt"), training.model
        if self.loads:
            model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
            return
        weights = {name: whole(weight) for name, weight in model.state_dict().items()}
        if training.part.rank == 0:
            torch.save(weights, path)

    def after(self, training: Training, step: int) -> None:
        """Gradients, on the CPU."""
        if step in training.job.compared:
            named = {name: parameter.grad for name, parameter in training.model.named_parameters()}
            kept = {name: whole(grad).to("cpu", copy=True) for name, grad in named.items() if grad is not None}
            training.run.gradients[step] = kept


def whole(x: Tensor) -> Tensor:
    """Of all ranks, where it lies in parts on them."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def compared(job: Job, text: bytes, world: int) -> Result | None:
    """Train sharded, then take the same steps again in this process; None where another process tells the result.

    Raises:
        RuntimeError: the whole sequence does not fit the GPU.
    """
    with TemporaryDirectory() as folder:
        ring = on_all_ranks(job, text, world, Kept(folder))
        if not prints():
            return None
        try:
            with threads(cores()):
                return agreement(job, Runs(ring, train_whole(job, text, folder), train_exactly(job, text, folder)))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"--seqlen {job.seqlen}: the whole sequence does not fit one GPU, and nothing is left to compare "
                "with; take a shorter one"
            ) from error


def train_whole(job: Job, text: bytes, folder: str) -> Run:
    """The same steps on the whole batch in this process, with PyTorch's attention, nothing computed again."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    training = alone(job, text, device)
    run = training.fit(Kept(folder, loads=True))
    run.where = device_name(device, cores())
    return run


def train_exactly(job: Job, text: bytes, folder: str) -> Run:
    """Loss and gradients of the compared steps in float64, of the whole batch, on the CPU, which has a kernel."""
    training, kept = alone(replace(job, dtype="float32"), text, CPU), Kept(folder, loads=True)
    training.model.double()
    for step in job.compared:
        kept.before(training, step)
        training.optimizer.zero_grad()
        training.run.losses[step] = training.backward(step).item()
        kept.after(training, step)
    return training.run


def alone(job: Job, text: bytes, device: torch.device) -> Training:
    """All of a job in this process."""
    part = Part(0, slice(None), torch.arange(job.seqlen), pytorch_attention, lambda x: x[None], name="whole")
    training = Training(replace(job, block=0), text, device, part)

    def largest(module: torch.nn.Module, inputs: object, logits: Tensor) -> None:
        training.run.logits[len(training.run.losses)] = logits.detach().abs().max().item()

    training.model.head.register_forward_hook(largest)
    return training


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``scaled_dot_product_attention``, causal, of ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def report(job: Job, run: Run) -> Result:
    """What a run gave that nothing is compared with."""
    rows: list[Row] = [{"step": step + 1, "name": "loss", "sharded": loss} for step, loss in run.losses.items()]
    return Result(
        "train", dict.fromkeys(("step", "name", "sharded"), ""), rows, [], [spent("sharded", job, run)], about(job)
    )


def about(job: Job) -> dict[str, Any]:
    """Where a result comes from."""
    return provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"job": asdict(job)}


def agreement(job: Job, runs: Runs) -> Result:
    """A row for every loss, and for every parameter's gradient of the compared steps; numbers are largest elements.

    The tolerance is argued, not tuned: an error against float64 may be twice PyTorch's own in the same dtype (the same
    terms summed in another order err differently by about as much), plus rounding of the numbers themselves: ``eps`` of
    the dtype times the largest element. All runs start each step from the same weights, so that it holds at every step.
    """
    rows: list[Row] = [*losses(job, runs), *gradients(job, runs)]
    wrong = [row for row in rows if not row["agrees"]]
    failed = [f"{row['name']} at step {row['step']}: {measured(row):.1e} > {row['allowed']:.1e}" for row in wrong]
    notes = [
        f"{job.batch} x {job.seqlen:,} bytes of Python's help a step; {job.layers} layers, {job.heads} heads "
        f"({job.kv_heads} of K/V) of dim {job.head_dim}, {job.dtype}, {job.layout}",
        spent("sharded", job, runs.ring),
        spent("whole", job, runs.whole),
        "allowed: twice PyTorch's own error against float64, plus rounding (eps times the largest)",
    ]
    if failed:
        notes.append(f"DISAGREE in {len(failed)} of {len(rows)}")
    else:
        nearest = max(measured(row) / row["allowed"] if row["allowed"] else 0.0 for row in rows)
        notes.append(f"AGREE: every loss and every gradient; the largest error is {nearest:.0%} of what is allowed")
    return Result("demo", dict.fromkeys(COLUMNS, ""), rows, failed, notes, about(job))


def measured(row: Row) -> float:
    """The error against float64, where there is one, else against the whole run."""
    value = row["sharded - whole"] if row["error"] is None else row["error"]
    return float(value)


def row_of(
    step: int, name: str, difference: float, error: float | None, theirs: float | None, allowed: float
) -> dict[str, Any]:
    """One comparison; a NaN agrees with nothing."""
    row: dict[str, Any] = {"step": step + 1, "name": name, "sharded - whole": difference, "allowed": allowed}
    row |= {"error": error, "pytorch error": theirs}
    return row | {"agrees": measured(row) <= allowed}


def losses(job: Job, runs: Runs) -> Iterator[dict[str, Any]]:
    """The loss of every step; where float64 was not computed, PyTorch's error is the larger one of where it was."""
    known = {step: abs(runs.whole.losses[step] - exact) for step, exact in runs.exact.losses.items()}
    largest, dtype = max(known.values()), DTYPES[job.dtype]
    for step in range(job.steps):
        sharded, whole = runs.ring.losses[step], runs.whole.losses[step]
        # a token's loss is the difference of two numbers of this size: log-sum-exp of its logits, and one of them
        size = runs.whole.logits[step] + math.log(BYTES)
        error = abs(sharded - runs.exact.losses[step]) if step in known else None
        row = row_of(step, "loss", abs(sharded - whole), error, known.get(step), tolerance(largest, size, dtype))
        yield row | {"sharded": sharded, "whole": whole}


def gradients(job: Job, runs: Runs) -> Iterator[dict[str, Any]]:
    """Of every parameter, at every compared step."""
    for step in job.compared:
        for name in runs.exact.gradients[step]:
            sharded, whole, exact = (run.gradients[step][name].double() for run in (runs.ring, runs.whole, runs.exact))
            error, theirs = ((x - exact).abs().max().item() for x in (sharded, whole))
            allowed = tolerance(theirs, exact.abs().max().item(), DTYPES[job.dtype])
            yield row_of(step, name, (sharded - whole).abs().max().item(), error, theirs, allowed)


def spent(name: str, job: Job, run: Run) -> str:
    """Speed and memory of a run, in a line."""
    if not run.seconds:
        return f"{name}: no step was left to do ({run.where})"
    peaks = dict.fromkeys(human(peak, "B") for peak in (min(run.peaks), max(run.peaks)))
    per_second = f"{job.batch * job.seqlen / run.step_seconds:,.0f}"
    return f"{name}: {per_second} tokens/s, {run.step_seconds:.3f} s per step, peak {' to '.join(peaks)} ({run.where})"
