"""Search of ``ringattn tune --ring`` for the fastest ring settings, by running whole steps on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..bench.common.attention import AttentionConfig
from ..bench.common.errors import AttentionInputs, ErrorJudge, build_judge
from ..bench.common.flags import rank_threads, resolve_world
from ..bench.common.launching import run_process_group
from ..bench.common.memory import check_ranks_fit
from ..bench.common.memory_table import tuned_bytes
from ..bench.common.output import is_printing_rank
from ..bench.common.progress import progress
from ..bench.common.provenance import provenance
from ..bench.common.ranks import LaunchedRank, launched_rank
from ..bench.common.result import Result
from ..bench.common.timing import RankTeam, StepTimer
from ..bench.ring.candidates import Candidate, CandidateSetting, our_ring
from ..bench.ring.measure import gather_results
from ..comm import resolve_group
from ..comm.control import open_control
from ..comm.topology import nvml
from ..kernels.gpu import gpu_or_interpreter
from ..reference.masks import MaskOptions
from ..ring import Ring
from .ring_table import DEFAULT, RingEntry, RingPoint, RingSetting, candidate_settings, read_ring_table, save_ring
from .search import Budget, SearchResult, TimedRun, median_clocks, planned_runs, samples, search
from .store import private_folder
from .tile_space import SHORT_DTYPE_NAMES, ModelShape
from .tune import installed_driver, measurement_details

RING_CHECK_TOKENS = 192  # tokens per rank of the check: several tiles, with a fast float64 reference
LONG_DTYPE_NAMES = {short: name for name, short in SHORT_DTYPE_NAMES.items()}
UNITS = {
    "tokens": "", "transport": "", "chunks": "", "channels": "", "time": "ms", "spread": "%", "runs": "", "note": "",
}  # fmt: skip


def ring_problems(
    shape: ModelShape, lengths: Sequence[int], causal: bool, device: str, world: int | None
) -> list[AttentionConfig]:
    """Return the attention problem for each number of tokens per rank.

    Raises:
        typer.BadParameter: ``world`` differs from the launcher's number of ranks.
        ValueError: The value dim differs from the head dim, or there is only one rank.
    """
    if shape.value_dim != shape.head_dim:
        raise ValueError(f"--value-dim is {shape.value_dim}: with --ring it must equal --head-dim, {shape.head_dim}")
    place = launched_rank()
    if place is not None and place.world < 2:
        raise ValueError("the launcher started 1 rank; --ring needs at least 2")
    ranks = resolve_world(world, max(2, torch.cuda.device_count() if device == "cuda" else 0))
    problem = AttentionConfig(
        ranks, ranks, 1, shape.heads, shape.kv_heads, shape.head_dim, LONG_DTYPE_NAMES[shape.dtype], causal, "zigzag",
        rank_threads(ranks), 0, device,
    )  # fmt: skip
    return [replace(problem, seqlen=tokens * ranks) for tokens in lengths]


def ring_point(problem: AttentionConfig) -> RingPoint:
    """Return the tuning point of an attention problem."""
    return RingPoint(
        problem.world, problem.heads, problem.kv_heads, problem.head_dim, SHORT_DTYPE_NAMES[problem.dtype],
        "bounded" if problem.causal else "full", problem.seqlen // problem.world,
    )  # fmt: skip


def tune_rings(problems: Sequence[AttentionConfig], budget: float, folder: Path) -> Result:
    """Search the best setting for each problem, with equal parts of ``budget`` seconds.

    Raises:
        RefusedTable: The table of this GPU's ring settings cannot be read.
        ValueError: The folder cannot be created.
        typer.BadParameter: A length does not fit into free memory; the message names the longest that fits.
        typer.Exit: A rank failed.
        KeyboardInterrupt: The user interrupted the search.
    """
    kind, place = problems[0].device, launched_rank()
    device = torch.device(kind, 0) if place is None else place.shared_device(kind)
    if is_printing_rank():
        read_ring_table(private_folder(folder), gpu_or_interpreter(device))  # raise early for an unreadable table
    for problem in problems:
        rings = len(candidate_settings(ring_point(problem), kind))
        check_ranks_fit("--seqlen", problem, partial(tuned_bytes, rings=rings), per_rank=True)
    result = Result("tune --ring", UNITS, provenance=provenance(torch.device(kind)))
    for problem in problems:
        result.add(run_process_group(problem.world, search_ring, problem, budget / len(problems), folder, device=kind))
    return result


# one rank of a search


def search_ring(
    place: LaunchedRank, device: torch.device, problem: AttentionConfig, budget: float, folder: Path
) -> Result:
    """Run the search on one rank; all ranks get the same result, and rank 0 writes the table."""
    torch.set_num_threads(problem.threads)
    point, gpu = ring_point(problem), gpu_or_interpreter(device)
    control = open_control(resolve_group()).scope("tune")
    clock, reader, own_budget = StepTimer(device, RankTeam()), nvml.GpuReader(device), Budget(budget)
    rings: dict[RingSetting, Ring] = {}
    steps: dict[RingSetting, Candidate] = {}

    def left() -> float:  # by the clock of rank 0, so that all ranks stop together
        seconds: Any = control.gather_merged(own_budget.left(), lambda values: values[0], what="the seconds left")
        return float(seconds)

    def run(setting: RingSetting) -> TimedRun:
        reading = TimedRun.from_nvml(clock(partial(steps[setting].run, shards)), reader())
        reasons: list[Any] = control.gather(reading.throttled, what="why clocks are low")
        return replace(reading, throttled=tuple(dict.fromkeys(chain(*reasons))))

    with ExitStack() as stack:
        small = replace(problem, seqlen=RING_CHECK_TOKENS * problem.world)
        shards = problem.random_shard(place.rank, device)
        # the tolerance of the tests: twice the error of PyTorch's attention in the same dtype, plus rounding
        judge = build_judge(AttentionInputs(*small.tensors()), MaskOptions(causal=small.causal))
        candidates = candidate_settings(point, problem.device)

        def check(setting: RingSetting) -> str | None:
            try:
                rings[setting] = stack.enter_context(Ring(**setting.arguments))
                if (error_text := ring_error(small, rings[setting], device, judge)) is not None:
                    return error_text
                steps[setting] = ring_candidate(problem, rings[setting], device)
                steps[setting].run(shards)  # warm-up, which compiles
            except (ValueError, RuntimeError, ImportError) as error:  # the setting cannot run here, on any rank
                return f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None

        step = stack.enter_context(progress()) if place.rank == 0 else lambda part, more: None
        part = f"measuring {point.length} tokens"
        step(part, planned_runs(len(candidates) - 1))
        found = search(candidates, DEFAULT, check, run, left, on_run=lambda: step(part, None))
        entry = None if found.best is None else ring_table_entry(point, found, rings[found.best].transport)
        path = save_ring(folder, gpu, entry) if entry is not None and place.rank == 0 else None
    return ring_search_result(point, found, entry, path)


def ring_error(problem: AttentionConfig, ring: Ring, device: torch.device, judge: ErrorJudge) -> str | None:
    """Run a problem on a ring, and return text on the first result whose error exceeds its limit, or None.

    All ranks get the same text.
    """
    candidate = ring_candidate(problem, ring, device)
    shards = candidate.run(candidate.shards(problem.tensors(), device))
    errors = judge.head_errors(gather_results(candidate, shards, problem, judge.kv_heads))
    for name in judge.failing_results(errors):
        return f"error of {name} is {errors[name]:.2g}, above the limit of {judge.limits[name]:.2g}"
    return None


def ring_candidate(problem: AttentionConfig, ring: Ring, device: torch.device) -> Candidate:
    """Return the candidate of the benchmarks that runs ``problem`` on an open ring."""
    return our_ring(problem.layout, CandidateSetting(problem, (problem.layout,), device, lambda _: ring))


def ring_table_entry(point: RingPoint, search_result: SearchResult[RingSetting], transport: str) -> RingEntry:
    """Return the table entry of the best setting, with the transport that it used and medians in seconds."""
    assert search_result.best is not None
    readings = search_result.readings[search_result.best]
    runs, baseline = samples(readings), samples(search_result.readings.get(DEFAULT, readings)).median
    about = {**measurement_details(), "driver": installed_driver(), "clocks": median_clocks(readings)}
    return RingEntry(point, replace(search_result.best, transport=transport), runs.median, runs.spread, baseline, about)


def ring_search_result(
    point: RingPoint, search_result: SearchResult[RingSetting], entry: RingEntry | None, path: Path | None
) -> Result:
    """Return the result of a search, with a row per setting and notes on the best one."""
    result, tokens = Result("tune --ring", UNITS), f"{point.length} tokens"
    for setting, readings in search_result.readings.items():
        runs, note = samples(readings), "default" if setting == DEFAULT else ""
        figures = {"time": runs.median * 1e3, "spread": 100 * runs.spread, "runs": len(readings)}
        result.rows.append({"tokens": point.length, **asdict(setting), **figures, "note": note})
    for setting, problem in search_result.errors.items():
        result.rows.append({"tokens": point.length, **asdict(setting), "runs": 0, "note": problem})
    if not search_result.is_complete:
        result.notes.append(f"{tokens}: the search is incomplete; increase --budget")
    if entry is not None:
        gain = 1 - entry.seconds / entry.baseline
        comparison = f"{gain:.1%} less than the default" if gain > 0 else "no faster than the default"
        result.notes += [
            f"{tokens}: written: {path}; programs read it with autotune.shared_ring_settings",
            f"{tokens}: best: {entry.setting}, {entry.seconds * 1e3:.4g} ms ± {entry.spread:.1%} a step, {comparison}",
        ]
    elif search_result.is_complete:
        result.failed.append(f"{tokens}: no setting works here; see the column note for the reasons")
    return result
