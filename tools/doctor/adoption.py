"""``ringattn doctor --adopt``, and the check that shows which kernels are adopted."""

from __future__ import annotations

import sys
import time

import torch
import typer

from ...autotune.adopt import CheckJob, adopt, adoption_jobs
from ...bench.common.provenance import provenance
from ...bench.common.result import Result, Row
from ...kernels.gpu import gpu_specs
from ...ring.adopted import HOW_TO_ADOPT, AdoptionRecord, KernelVerdict, find_adoption, record_path
from ...ring.ring import call_device
from .findings import CheckFailedError, CheckSkippedError, DoctorRanks, text_by_rank

REFUSED_HINT = "delete the file, or run `ringattn doctor --adopt`, which replaces it"
UNITS = {
    "kernel": "", "phase": "", "dtype": "", "D": "", "verdict": "", "ms": "", "portable": "ms", "same bits": "",
    "reason": "",
}  # fmt: skip
REASON_LENGTH = 70  # characters of a reason that a line of the check shows


def adopt_kernels(device: torch.device | None) -> Result:
    """Check all candidates on a GPU, record the verdicts, and return them as a table.

    Raises:
        typer.BadParameter: There is no GPU, or the record cannot be written.
    """
    device = device or call_device()
    gpu = gpu_specs(device)
    if gpu is None:
        raise typer.BadParameter("--adopt needs a CUDA GPU, but torch finds none")
    total, done, begin = len(adoption_jobs(device)), 0, time.monotonic()

    def step(job: CheckJob) -> None:
        nonlocal done
        done += 1
        text = f"checked {done} of {total} in {time.monotonic() - begin:.0f} s"
        print(f"{text}: {job.candidate.name} {job.dtype} D{job.head_dim}", file=sys.stderr, flush=True)

    try:
        record = adopt(device, step)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    notes = [*describe_record(record), f"recorded in {record_path(gpu)}; backend='auto' uses the adopted kernels"]
    rows = [table_row(verdict) for verdict in record.verdicts]
    return Result("adopt", UNITS, rows, [], notes, provenance(device) | {"setup": record.setup._asdict()})


def table_row(verdict: KernelVerdict) -> Row:
    """Return a verdict as a row of the table."""
    times = [None if x is None else 1e3 * x for x in (verdict.seconds, verdict.portable_seconds)]
    word = "adopted" if verdict.adopted else "passed" if verdict.passed else "failed"
    cells = verdict.name, verdict.phase, verdict.dtype, verdict.head_dim, word, *times
    return dict(zip(UNITS, (*cells, verdict.repeatable if verdict.passed else None, verdict.reason), strict=True))


def describe_record(record: AdoptionRecord) -> list[str]:
    """Return lines with the fastest adopted kernel of each kind of call, and with the others and the reasons."""
    best: dict[tuple[str, str, int], KernelVerdict] = {}
    reasons: dict[str, str] = {}
    for verdict in record.verdicts:
        kind = verdict.phase, verdict.dtype, verdict.head_dim
        if verdict.adopted and (kind not in best or verdict.speedup > best[kind].speedup):
            best[kind] = verdict
        if verdict.reason:
            reasons.setdefault(verdict.name, verdict.reason)
    adopted = [f"{phase} {dtype} D{dim} {x.name} ({x.speedup:.2f}x)" for (phase, dtype, dim), x in best.items()]
    others = [f"{name} ({reason[:REASON_LENGTH]})" for name, reason in reasons.items()]
    lines = [f"adopted: {', '.join(adopted) or 'none'}"]
    return [*lines, f"not adopted for every call: {'; '.join(others)}"] if others else lines


def check_adopted(ranks: DoctorRanks) -> str:
    """Return which kernels each rank has adopted, and why not the others."""

    def describe() -> str:
        gpu = gpu_specs(ranks.device)
        if gpu is None:
            raise CheckSkippedError("only GPUs can adopt kernels")
        adoption = find_adoption(gpu)
        if adoption.is_refused:
            raise CheckFailedError(adoption.problem)
        if adoption.record is None:
            raise CheckSkippedError(f"{adoption.problem}. {HOW_TO_ADOPT}")
        return "; ".join(describe_record(adoption.record))

    return str(ranks.merge_on_rank_0("adopted kernels", describe, text_by_rank))
