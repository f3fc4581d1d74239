"""Self-check of faster kernels on this GPU: values, races and speed beside the portable kernels.

Each candidate runs in a child process with a deadline, so that a crash or a hang costs that candidate only. The
verdicts are recorded for ``backend="auto"``; see :mod:`ringattn.ring.adopted`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bench.common.attention import AttentionConfig
from ..bench.common.cases import poison_allocations
from ..bench.common.errors import build_judge
from ..bench.common.provenance import typed_command
from ..bench.common.timing import StepTimer, time_in_turns
from ..bench.kernels import contenders
from ..bench.kernels.accuracy import draw_inputs, ring_results
from ..bench.kernels.contenders import ContenderInputs, local_kernel_contender
from ..kernels import PLAIN, KernelConfig
from ..kernels.gpu import GpuSpec, gpu_specs
from ..kernels.json_files import convert_json
from ..kernels.tables import DTYPES
from ..reference.masks import MaskOptions
from ..ring.adopted import (
    FORWARD,
    SCHEMA,
    TRAINING,
    VERSION,
    AdoptionRecord,
    KernelVerdict,
    build_kernel_config,
    clear_adoption_cache,
    current_setup,
    is_faster,
    kernel_name,
    record_path,
)
from ..ring.backends import check_dlse_support
from ..ring.local.protocol import LocalAttention
from ..ring.local.registry import check_supports, other_backends, resolve_backend
from ..ring.ring import call_device
from .pool import JobFailure, Pool
from .store import private_folder, write_private_json

CHECKED_DTYPES, CHECKED_HEAD_DIMS = ("bf16", "fp16"), (64, 128)
DEADLINE = 300.0
"""Seconds for one candidate, most of them for compilation: about ten kernels of 3 to 10 seconds."""

PORTABLE = "auto"
"""Backend of the portable kernels; a backend that a self-check resolves is never an adopted one."""

PASSES_TIMED = {
    FORWARD: (contenders.FORWARD, contenders.STATE),
    TRAINING: (contenders.FORWARD, contenders.STATE, contenders.BACKWARD),
}


@dataclass(frozen=True)
class KernelCandidate:
    """Kernels to check: a backend, and for ``triton`` the fields of its config."""

    backend: str | LocalAttention = "triton"
    options: tuple[tuple[str, str], ...] = ()

    @property
    def backend_name(self) -> str:
        return self.backend if isinstance(self.backend, str) else self.backend.name

    @property
    def name(self) -> str:
        return kernel_name(self.backend_name, self.options)

    @property
    def config(self) -> KernelConfig | None:
        return build_kernel_config(self.options)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases to check, of "forward" and "training": those that run another kernel than the portable one."""
        has_own_forward = not self.options or "forward_kernel" in dict(self.options)
        return (FORWARD, TRAINING) if has_own_forward else (TRAINING,)


_HOPPER = ("forward_kernel", "hopper")
_DETERMINISTIC = ("backward", "single_pass_deterministic")
OUR_CANDIDATES = (
    KernelCandidate(options=(_HOPPER,)),
    KernelCandidate(options=(_DETERMINISTIC,)),
    KernelCandidate(options=(("backward", "single_pass"),)),
    KernelCandidate(options=(_HOPPER, _DETERMINISTIC)),
    KernelCandidate(options=(_HOPPER, ("backward", "hopper"))),
)

CASES = (
    (1, MaskOptions(causal=True)),
    (3, MaskOptions(causal=False)),
    (2, MaskOptions(causal=True, window_size=(100, 0))),
    (3, MaskOptions(causal=True)),
)
"""Ranks and mask of rings that together launch every role (only, first, middle and last hop), full and bounded.

The last one is repeated most.
"""


class CheckSizes(NamedTuple):
    """Tokens, heads and repetitions with which a candidate kernel is checked and timed before its adoption."""

    tokens: int = 1008  # shards are no multiples of tile sides
    heads: tuple[int, int] = (8, 4)
    runs: int = 20
    timed_tokens: int = 8192
    timed_heads: tuple[int, int] = (16, 4)
    samples: int = 20


class CheckJob(NamedTuple):
    """Self-check of one candidate for one dtype and head dim."""

    candidate: KernelCandidate
    dtype: str
    head_dim: int
    device: torch.device
    sizes: CheckSizes = CheckSizes()

    def verdict(self, phase: str, reason: str = "", repeatable: bool = False, *times: float) -> KernelVerdict:
        """Return the verdict of a phase. A kernel that passed has ``times``, and is adopted if there is no ``reason``.

        ``times`` are as in :func:`time_passes`.
        """
        seconds, portable, spread = times or (None, None, None)
        return KernelVerdict(
            self.candidate.backend_name, dict(self.candidate.options), phase, self.dtype, self.head_dim, bool(times),
            reason, repeatable, seconds, portable, spread, adopted=bool(times) and not reason,
        )  # fmt: skip


def check_candidate(job: CheckJob) -> list[KernelVerdict]:
    """Check and time one candidate; runs in a child process, which must end if this function raises."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    problem, repeatable = find_refusal(job), False
    if not problem:
        problem, repeatable = find_wrong_result(job)
    if problem:
        return [job.verdict(phase, problem) for phase in job.candidate.phases]
    by_pass, verdicts = time_passes(job), []
    for phase in job.candidate.phases:
        times = torch.stack([by_pass[name] for name in PASSES_TIMED[phase]]).sum(0).tolist()
        reason = "" if is_faster(*times) else "it is not faster than the portable kernels"
        verdicts.append(job.verdict(phase, reason, repeatable, *times))
    return verdicts


def find_refusal(job: CheckJob) -> str:
    """Return the reason why a candidate does not support this GPU, dtype or head dim, or ""."""
    q = torch.empty(1, 16, 2, job.head_dim, dtype=DTYPES[job.dtype], device=job.device)
    needs = {"bounds": True, "backward": True, "config": bool(job.candidate.options)}
    try:
        kernel = resolve_backend(job.candidate.backend, job.device)
        check_supports(kernel, q, q, needs, PLAIN, None, job.candidate.config)
        check_dlse_support(kernel, q, q, q)
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}".splitlines()[0][:300]
    return ""


def find_wrong_result(job: CheckJob) -> tuple[str, bool]:
    """Return the first result with too large an error, or "", and whether repeated runs gave the same bits."""
    torch.manual_seed(0)
    candidate, sizes, repeatable = job.candidate, job.sizes, True
    for world, masks in CASES:
        shape = (sizes.tokens, *sizes.heads, job.head_dim, job.head_dim)
        inputs = draw_inputs(job.device, DTYPES[job.dtype], shape)
        judge = build_judge(inputs, masks)
        run = partial(ring_results, inputs, world, backend=candidate.backend, config=candidate.config, **masks)
        # poisoning turns on PyTorch's deterministic algorithms, which change other projects' kernels
        with poison_allocations() if candidate.options else nullcontext():
            first = run()
        for number in range(sizes.runs if (world, masks) == CASES[-1] else 2):
            results = run() if number else first
            if number and all(torch.equal(x, first[name]) for name, x in results.items()):
                continue
            repeatable = repeatable and not number
            errors = judge.head_errors(results)
            for name in judge.failing_results(errors):
                again = f" in run {number + 1}" if number else ""
                return (
                    f"error of {name} is {errors[name]:.3g}{again}; at most {judge.limits[name]:.3g} is allowed "
                    f"({world} ranks, {dict(masks)})"
                ), False
    return "", repeatable


def time_passes(job: CheckJob) -> dict[str, Tensor]:
    """Time every pass beside that of the portable kernels, in turns, with a full and with a causal mask.

    Returns:
        The seconds of the candidate and of the portable kernels by pass, and by how much they vary together.
    """
    (heads, kv_heads), dtype = job.sizes.timed_heads, str(DTYPES[job.dtype]).removeprefix("torch.")
    clock = StepTimer(job.device)
    totals = {name: torch.zeros(3, dtype=torch.float64) for name in contenders.PASSES}
    for causal in (True, False):
        problem = AttentionConfig(
            job.sizes.timed_tokens, heads=heads, kv_heads=kv_heads, head_dim=job.head_dim, dtype=dtype, causal=causal
        )
        given = ContenderInputs(problem, *problem.random_shard(0, job.device))
        candidate = local_kernel_contender(job.candidate.backend, given, job.candidate.config).steps
        portable = local_kernel_contender(PORTABLE, given).steps
        for name, step in candidate.items():
            pair = time_in_turns({"own": step, "portable": portable[name]}, clock, repeats=job.sizes.samples)
            spread = sum(samples.median * samples.spread for samples in pair.values())
            totals[name] += torch.tensor([pair["own"].median, pair["portable"].median, spread], dtype=torch.float64)
    return totals


def run_checks(
    jobs: Sequence[CheckJob],
    seconds: float = DEADLINE,
    progress: Callable[[CheckJob], None] = lambda job: None,
) -> tuple[KernelVerdict, ...]:
    """Run self-checks one after the other, each with a deadline, and return all verdicts.

    A failed job may leave its process unable to use the GPU, so the next one gets a new process.
    """
    verdicts: list[KernelVerdict] = []
    results: dict[CheckJob, Any] = {}
    waiting = list(jobs)
    while waiting:
        with Pool(check_candidate, 1, seconds) as pool:
            has_failed = False
            while waiting and not has_failed:
                pool.run([job := waiting.pop(0)], results.__setitem__)
                result = results[job]
                if has_failed := isinstance(result, JobFailure):
                    result = [job.verdict(phase, result.reason) for phase in job.candidate.phases]
                verdicts += result
                progress(job)
    return tuple(verdicts)


def adoption_jobs(device: torch.device) -> list[CheckJob]:
    """Return the self-checks of all candidates on a GPU."""
    candidates = (*OUR_CANDIDATES, *map(KernelCandidate, other_backends(device)))
    return [
        CheckJob(candidate, dtype, head_dim, device)
        for candidate in candidates
        for dtype in CHECKED_DTYPES
        for head_dim in CHECKED_HEAD_DIMS
    ]


def writable_record_path(gpu: GpuSpec) -> Path:
    """Return the path of a GPU's record, and create its folder.

    Raises:
        ValueError: The record cannot be written there.
    """
    path = record_path(gpu)
    if path is None:
        raise ValueError("this user has no home folder to keep the record in: set RINGATTN_CONFIG_DIR to a folder")
    folder = private_folder(path.parent)
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: it must be a file in a folder that this user may write to")
    return path


def save_verdicts(gpu: GpuSpec, verdicts: Sequence[KernelVerdict], command: str) -> tuple[Path, AdoptionRecord]:
    """Write the record of a GPU atomically into the user's table folder, and return its path and content.

    Raises:
        ValueError: The record cannot be written.
    """
    path = writable_record_path(gpu)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = AdoptionRecord(SCHEMA, VERSION, current_setup(gpu), date, command, tuple(verdicts))
    data = record.to_json()
    convert_json(AdoptionRecord, data, "record")  # never write a record that a reader would refuse
    write_private_json(path, data)
    clear_adoption_cache()
    return path, record


def adopt(
    device: torch.device | str | None = None, progress: Callable[[CheckJob], None] = lambda job: None
) -> AdoptionRecord:
    """Check every candidate on a GPU and record the verdicts, so that ``backend="auto"`` uses what passed.

    Args:
        device: The GPU; default: the current one. Nothing else should run on it.
        progress: Called after each self-check.

    Raises:
        ValueError: The device is no GPU, or the record cannot be written.
    """
    device = torch.device(device or call_device())
    gpu = gpu_specs(device)
    if gpu is None:
        raise ValueError(f"device is {device}: kernels can be adopted only on a CUDA GPU")
    writable_record_path(gpu)  # before the checks, which take minutes
    _, record = save_verdicts(gpu, run_checks(adoption_jobs(device), progress=progress), typed_command())
    return record
