"""Do the sharded and the whole run of ``ringattn demo`` agree, and how fast was each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from ..bench.common.attention import DTYPES
from ..bench.common.errors import tolerance
from ..bench.common.flags import human
from ..bench.common.provenance import provenance
from ..bench.common.result import Result, Row
from .demo import Job
from .model import BYTES
from .training import Run, Runs

COLUMNS = ("step", "name", "sharded - whole", "allowed", "error", "pytorch error", "agrees", "sharded", "whole")


def compared(job: Job, runs: Runs) -> Result:
    """A row for every loss, and for every parameter's gradient of the compared steps; numbers are largest elements.

    The tolerance is argued, not tuned: an error against float64 may be twice PyTorch's own in the same dtype (the same
    terms summed in another order err differently by about as much), plus rounding of the numbers themselves: ``eps`` of
    the dtype times the largest element. All runs start each step from the same weights, so that it holds at every step.
    """
    rows: list[Row] = [*losses(job, runs), *gradients(job, runs)]
    wrong = [row for row in rows if not row["agrees"]]
    failed = [f"{row['name']} at step {row['step']}: {measured(row):.1e} > {row['allowed']:.1e}" for row in wrong]
    notes = [
        f"{job.seqlen:,} bytes of Python's help; {job.layers} layers, {job.heads} heads ({job.kv_heads} of K/V) of dim "
        f"{job.head_dim}, {job.dtype}, {job.layout}",
        spent("sharded", job, runs.ring),
        spent("whole", job, runs.whole),
        "allowed: twice PyTorch's own error against float64, plus rounding (eps times the largest)",
    ]
    if failed:
        notes.append(f"DISAGREE in {len(failed)} of {len(rows)}")
    else:
        nearest = max(measured(row) / row["allowed"] if row["allowed"] else 0.0 for row in rows)
        notes.append(f"AGREE: every loss and every gradient; the largest error is {nearest:.0%} of what is allowed")
    about = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"job": asdict(job)}
    return Result("demo", dict.fromkeys(COLUMNS, ""), rows, failed, notes, about)


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
    peaks = dict.fromkeys(human(peak, "B") for peak in (min(run.peaks), max(run.peaks)))
    per_second = f"{job.seqlen / run.step_seconds:,.0f}"
    return f"{name}: {per_second} tokens/s, {run.step_seconds:.3f} s per step, peak {' to '.join(peaks)} ({run.where})"
